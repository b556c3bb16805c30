"""One Spark session for all tests here: it costs more to start than most tests take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores, in UTC."""
    from rmqkit.spark import spark_session

    session = spark_session(
        "rmqkit-tests",
        "local[2]",
        {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "2", "spark.default.parallelism": "2"},
    )
    yield session
    session.stop()
