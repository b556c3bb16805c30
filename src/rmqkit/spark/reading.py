"""`read` plans a piece of work over messages before it reads them, because Spark tells a Python source nothing.

A source that is written in Python is told neither which columns a query uses nor which rows, so a plain
``spark.read.format("rocketmq-store")`` decodes and ships all of them. Spark's own reader of Parquet is told. So the
work is planned over an empty Parquet table of the same columns first, and what that reader would read is then asked of
the store, by the options ``columns``, ``topic``, ``queueId``, ``startingTimestamp`` and ``endingTimestamp``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read(
    spark: SparkSession,
    path: str,
    work: Callable[[DataFrame], DataFrame],
    options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Read of a store, or of an archive of one, only what some work needs: the columns that it uses and, if it uses the
    messages once, the topics, queues and times that its conditions leave.

    ::

        counts = read(spark, "store", lambda messages: messages.where("topic = 'Orders'").groupBy("tags").count())

    Args:
        work: makes the wanted data frame of the messages. It is called twice, first with an empty frame of the same
            columns, so it must not run an action.
        options: further ones of ``rocketmq-store``; they go before what is found out.

    Raises:
        SettingsError: an option cannot be used.
        AnalysisException: Spark does not understand the work.
    """
    from rmqkit.spark.jobs.query import planned

    return planned(spark, path, work, options)
