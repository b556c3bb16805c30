"""`start_stream` starts a streaming query, and retries if the machine was too busy to start Python in time.

Spark starts a Python process for each source of a stream. This process must connect back within 10 s. This time is
fixed in Spark. The import of PySpark alone takes a second of CPU time, so on a busy machine a query may fail before it
has read anything. Its checkpoint is then unchanged, and the next start reads the same messages.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rmqkit.spark.failures import PythonSlow, error_within

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_LOOK_S = 0.1
_BEGINNING = ("Initializing", "Getting offsets")
"""Status messages of a query whose source has not answered yet."""

_log = logging.getLogger(__name__)


def start_stream(writer: DataStreamWriter, tries: int = 3) -> StreamingQuery:
    """Start a query, and return it when its source has answered or the query has stopped.

    ::

        query = start_stream(rows.writeStream.format("parquet").option("path", out).option("checkpointLocation", state))

    Args:
        writer: the result of ``writeStream``, with all options set.
        tries: number of starts before the error is raised.

    Raises:
        PythonSlow: Python was not ready in time, ``tries`` times.
        StreamingQueryException: the query has failed with another error.
    """
    from pyspark.errors import StreamingQueryException

    for left in reversed(range(tries)):
        query = writer.start()
        try:
            while not query.awaitTermination(_LOOK_S) and _begins(query):  # type: ignore[arg-type]
                pass
        except StreamingQueryException as error:
            ours = error_within(error)
            if not isinstance(ours, PythonSlow):
                raise
            if not left:
                raise ours from None
            _log.warning("a stream is started again: Python was not ready in time")
        else:
            return query
    raise ValueError(f"tries={tries} must be at least 1")


def _begins(query: StreamingQuery) -> bool:
    """Return True if the source of a running query has not answered yet."""
    return query.lastProgress is None and query.status["message"].startswith(_BEGINNING)
