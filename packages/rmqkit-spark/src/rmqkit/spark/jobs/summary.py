"""`summary` says what is in a store: messages, times and bytes of every topic and tag.

Each task reduces its split to one row per topic and tag; Spark adds those up. No body is read.

===================  ===============================================================================
column               value
===================  ===============================================================================
topic, tags          as stored; tags is null for messages without one
messages             how many, members of inner batches included
firstStoreTimestamp  the broker's clock at the first of them, and
lastStoreTimestamp   at the last
bytes                of their records in the commit log; an inner batch counts with its first member
===================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmqkit.arrow.reader import ReadPlan, read_split
from rmqkit.arrow.splits import Split
from rmqkit.spark.jobs.log_ranges import task_count
from rmqkit.spark.jobs.tasks import rows_of_tasks
from rmqkit.spark.session import address
from rmqkit.spark.source.store import read_plan, store_options, store_splits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["record_bytes", "summary"]

_READ = ("topic", "tags", "storeTimestamp", "storeSize", "commitLogOffset")
_SCHEMA = (
    "topic string, tags string, messages bigint, firstStoreTimestamp timestamp, lastStoreTimestamp timestamp,"
    " bytes bigint"
)


def summary(spark: SparkSession, path: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Count messages, times and bytes of a store by topic and tag: ``summary(spark, path).show(truncate=False)``.
    Further options are those of ``rocketmq-store``, such as ``topic`` or ``corruptRecordMode``.
    Raises SettingsError: an option cannot be used.
    Raises StoreError: there is no readable store."""
    from pyspark.sql import functions

    parsed = store_options({**(options or {}), "path": address(spark, path)})
    plan = read_plan(parsed, _READ)
    splits = store_splits(parsed)
    parts = rows_of_tasks(spark, lambda split: _reduced(split, plan), splits, task_count(splits), _SCHEMA)
    return (
        parts.groupBy("topic", "tags")
        .agg(
            functions.sum("messages").alias("messages"),
            functions.min("firstStoreTimestamp").alias("firstStoreTimestamp"),
            functions.max("lastStoreTimestamp").alias("lastStoreTimestamp"),
            functions.sum("bytes").alias("bytes"),
        )
        .orderBy("topic", "tags")
    )


def record_bytes(batch: Any) -> tuple[Any, Any]:
    """Find the bytes of every message's record, and whether it is the first of it: members of an inner batch share the
    offset of their record, whose bytes the first one has."""
    import numpy as np

    # Before the first row stands -1 and not 0, which is the offset of the first record of a log.
    is_first = np.diff(batch["commitLogOffset"].to_numpy(), prepend=-1) != 0
    return np.where(is_first, batch["storeSize"].to_numpy(), 0).astype("i8"), is_first


def _reduced(split: Split, plan: ReadPlan) -> Iterator[tuple[Any, ...]]:
    """The rows of one split."""
    import pyarrow as pa

    # Grouped in the task: rows of messages never cross to the JVM, which costs more than decoding them.
    counted = [_counted(batch) for batch in read_split(split, plan)]
    if counted:
        grouped = pa.concat_tables(counted).group_by(["topic", "tags"])
        sums = grouped.aggregate([("messages", "sum"), ("first", "min"), ("last", "max"), ("bytes", "sum")])
        yield from zip(*sums.to_pydict().values(), strict=True)


def _counted(batch: Any) -> Any:
    """One batch of messages, per topic and tag."""
    import pyarrow as pa

    sizes, _ = record_bytes(batch)
    rows = pa.table(
        {"topic": batch["topic"], "tags": batch["tags"], "time": batch["storeTimestamp"], "bytes": pa.array(sizes)}
    )
    grouped = rows.group_by(["topic", "tags"])
    counted = grouped.aggregate([([], "count_all"), ("time", "min"), ("time", "max"), ("bytes", "sum")])
    return counted.rename_columns(["topic", "tags", "messages", "first", "last", "bytes"])
