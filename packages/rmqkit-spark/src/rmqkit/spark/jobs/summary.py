"""The summary of a store: messages, times and bytes of every topic and tag.

Each task reduces its split to one row per topic and tag; Spark adds these rows up. No body is read.

===================  ===============================================================================
column               value
===================  ===============================================================================
topic, tags          as stored; tags is null for messages without tags
messages             number of messages, including members of inner batches
firstStoreTimestamp  store time of the first message
lastStoreTimestamp   store time of the last message
bytes                size of the records in the commit log; an inner batch is counted with its first member
===================  ===============================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rmqkit.arrow.archived import ArchivedFile, read_archived
from rmqkit.arrow.reader import ReadPlan, read_split
from rmqkit.arrow.splits import Split
from rmqkit.spark.jobs.log_ranges import task_count
from rmqkit.spark.jobs.tasks import rows_of_tasks
from rmqkit.spark.session import address
from rmqkit.spark.source.store import archived_files, read_plan, store_options, store_splits

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
    ``options`` are options of ``rocketmq-store``, such as ``topic``, ``corruptRecordMode`` or ``archive``.
    Raises SettingsError: an option is not valid.
    Raises StoreError: the store is missing or cannot be read."""
    from pyspark.sql import functions

    parsed = store_options({**(options or {}), "path": address(spark, path)})
    plan = read_plan(parsed, _READ)
    files, splits = archived_files(parsed), store_splits(parsed)
    todo: list[ArchivedFile | Split] = [*files, *splits]
    count = len(files) + task_count(splits)
    parts = rows_of_tasks(spark, lambda part: _reduced(part, plan), todo, count, _SCHEMA)
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
    """Return the record size of every message, and a mask of the messages that are first in their record. The members
    of an inner batch share a record: the first member gets its size, all other members get 0."""
    import numpy as np

    # Prepend -1 instead of 0, because 0 is the offset of the first record of a log.
    is_first = np.diff(batch["commitLogOffset"].to_numpy(), prepend=-1) != 0
    return np.where(is_first, batch["storeSize"].to_numpy(), 0).astype("i8"), is_first


def _reduced(part: ArchivedFile | Split, plan: ReadPlan) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one segment of an archive or one split of the log."""
    import pyarrow as pa

    # Group in the task: transferring a row per message to the JVM would cost more than decoding the messages.
    batches = read_archived(part, plan) if isinstance(part, ArchivedFile) else read_split(part, plan)
    counted = [_counted(batch) for batch in batches]
    if counted:
        grouped = pa.concat_tables(counted).group_by(["topic", "tags"])
        sums = grouped.aggregate([("messages", "sum"), ("first", "min"), ("last", "max"), ("bytes", "sum")])
        yield from zip(*sums.to_pydict().values(), strict=True)


def _counted(batch: Any) -> Any:
    """Count one batch of messages by topic and tag."""
    import pyarrow as pa

    sizes, _ = record_bytes(batch)
    rows = pa.table(
        {"topic": batch["topic"], "tags": batch["tags"], "time": batch["storeTimestamp"], "bytes": pa.array(sizes)}
    )
    grouped = rows.group_by(["topic", "tags"])
    counted = grouped.aggregate([([], "count_all"), ("time", "min"), ("time", "max"), ("bytes", "sum")])
    return counted.rename_columns(["topic", "tags", "messages", "first", "last", "bytes"])
