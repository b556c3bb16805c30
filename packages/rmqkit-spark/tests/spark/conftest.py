"""Timeouts of the Spark tests, and the closing of their clients. The Spark session is in `session`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

SPARK_SECONDS_MAX = 900  # a test that is interrupted leaves the conversation with the JVM in disorder for all others


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SPARK_SECONDS_MAX))


@pytest.fixture(scope="module", autouse=True)
def no_clients_left() -> Iterator[None]:
    """Close the clients of sources and sinks in this process together with the servers of a module."""
    yield
    from rmqkit.client.runtime.process import portal
    from rmqkit.spark import broker_pool
    from rmqkit.spark.sink import writers

    portal().run(portal()._close_clients)
    broker_pool._connected.clear()
    writers._producers.clear()
