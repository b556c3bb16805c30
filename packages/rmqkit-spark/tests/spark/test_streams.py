"""A stream is started again if Python was not ready in time, and only then."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from rmqkit.spark import start_stream
from rmqkit.spark.failures import PythonSlow, error_within

pytestmark = pytest.mark.spark

_SLOW = (
    "[STREAM_FAILED] Query [id = 1] terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST",
    "Caused by: java.net.SocketTimeoutException: Timed out while waiting for the Python worker to connect back",
)


class Query:
    """A query that ends with an error, or says what it does, one message for each look."""

    lastProgress = None  # noqa: N815 - PySpark's name

    def __init__(self, *said: str) -> None:
        self._said = list(said)

    @property
    def status(self) -> dict[str, str]:
        return {"message": self._said[0]}

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802 - PySpark's name
        if len(self._said) > 1:
            self._said.pop(0)
        if self._said[0] == "ended":
            return True
        if "exception" in self._said[0].lower():
            raise StreamingQueryException(self._said[0])
        return False


class Writer:
    """Starts the given queries, one after the other."""

    def __init__(self, *queries: Query) -> None:
        self.left = list(queries)

    def start(self) -> Any:
        return self.left.pop(0)


@pytest.mark.parametrize("text", _SLOW)
def test_a_start_for_which_python_was_slow_is_tried_again(text: str, caplog: pytest.LogCaptureFixture) -> None:
    running = Query(
        "Initializing sources", "Initializing sources", "Getting offsets from X", "Waiting for data to arrive"
    )
    with caplog.at_level(logging.WARNING):
        assert start_stream(Writer(Query("Initializing sources", text), Query(text), running)) is running  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "a stream is started again: Python was not ready in time"
    ] * 2
    assert running.status["message"] == "Waiting for data to arrive", "the source has answered"


def test_the_last_try_raises_what_to_do() -> None:
    writer = Writer(*(Query(_SLOW[0]) for _ in range(3)))
    with pytest.raises(
        PythonSlow, match=r"within the 10 s that Spark allows it, .*: start the query again, its checkpoint"
    ):
        start_stream(writer, tries=2)  # type: ignore[arg-type]
    assert len(writer.left) == 1
    assert isinstance(error_within(PySparkException(_SLOW[1])), PythonSlow)


def test_another_error_is_raised_at_once() -> None:
    writer = Writer(Query("exception: no such topic"), Query("Waiting for data to arrive"))
    with pytest.raises(StreamingQueryException, match="no such topic"):
        start_stream(writer)  # type: ignore[arg-type]
    assert len(writer.left) == 1


def test_a_query_that_has_ended_is_returned() -> None:
    query = Query("Initializing sources", "ended")
    assert start_stream(Writer(query)) is query  # type: ignore[arg-type]


def test_spark_starts_a_stream(spark: SparkSession, tmp_path: Any) -> None:
    rows = spark.readStream.format("rate").load()
    query = start_stream(rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path)))
    assert query.isActive
    query.stop()
