"""One Spark session for all tests here: it costs more to start than most tests take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SPARK_SECONDS_MAX = 900  # a test that is interrupted leaves the conversation with the JVM in disorder for all others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS_MAX))


@pytest.fixture(scope="module", autouse=True)
def no_clients_left() -> Iterator[None]:
    """What sources and sinks connected in this process is closed with the servers of a module."""
    yield
    from rmqkit.client.sync.portal import portal
    from rmqkit.spark import broker_sink, live

    portal().run(portal()._close_clients)
    live._connected.clear()
    broker_sink._producers.clear()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores, in UTC."""
    from rmqkit.spark import spark_session

    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # half the CPU of a short life
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where its workers find `bench`
        session = spark_session("rmqkit-tests", "local[2]", settings)
    yield session
    session.stop()
