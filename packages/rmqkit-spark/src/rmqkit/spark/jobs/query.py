"""Search for messages of a store or an archive: by key, id and time (`query`), or with SQL (`sql`).

=======================  =======================================================================================
request                  read of a store
=======================  =======================================================================================
offset message id        the record at its physical offset
key, or unique id        the records that the index has for it in the topic; without topic or index everything
topic                    the records that the topic's consume queues point at; without consume queues everything
times                    only the log files that may have messages of these times
SQL                      the columns that the statement uses; only the messages that its WHERE selects
=======================  =======================================================================================

The topics and times in the manifests of an archive (`rmqkit.spark.jobs.archive`, in any format) select the files to
read. Bounds of times are inclusive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec.structs import replace

from rmqkit.arrow.fs import exists, find_segments, join, map_records
from rmqkit.arrow.queue_files import IndexReads, find_index_files, read_records_at
from rmqkit.arrow.schema import Column
from rmqkit.errors import SettingsError
from rmqkit.protocol.ids import decode_offset_id, offset_id
from rmqkit.protocol.record import host_text, pack_host
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.spark.jobs.archive_target import Run, Target
from rmqkit.spark.options import Entity, StoreOptions, words
from rmqkit.spark.schema import to_ddl
from rmqkit.spark.session import address
from rmqkit.spark.source.archive import FORMAT as ARCHIVE
from rmqkit.spark.source.store import FORMAT, available_columns, chosen_columns, read_plan, store_options
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Records

if TYPE_CHECKING:
    from pyspark.sql import Column as Test
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["VIEWS", "query", "sql", "table"]

VIEWS = {entity.value.replace("-", "_"): entity for entity in Entity}
"""The tables of `sql`, by their names in a statement; an archive only has ``messages``."""

_TESTED = ("topic", "msgId", "keys", "storeTimestamp", "storeHost", "commitLogOffset")


def query(
    spark: SparkSession,
    path: str,
    options: Mapping[str, str] | None = None,
    *,
    topic: str = "",
    key: str = "",
    msg_id: str = "",
    begin_ms: int | None = None,
    end_ms: int | None = None,
) -> DataFrame:
    """Find the messages that match all conditions.

    Args:
        path: a store, or an archive.
        options: options of ``rocketmq-store``: columns, maxHashSlotNum, corruptRecordMode, ...
        key: one of the message's keys, or its unique id.
        msg_id: unique id, or offset message id.
        begin_ms, end_ms: first and last ``storeTimestamp``.

    Raises:
        SettingsError: an option is not valid.
        StoreError: the store is missing or cannot be read, or it has another number of index slots.
    """
    path = address(spark, path)
    parsed = store_options({**(options or {}), "path": path})
    columns = [column.name for column in chosen_columns(parsed, ())]
    tests = _tests(topic, key, msg_id, begin_ms, end_ms)
    runs = Target.of(path).runs()
    if runs:
        frame = _archived(spark, path, runs, lambda file: _may_have(file, topic, begin_ms, end_ms))
    elif (picked := _picked(parsed, msg_id)) is not None:
        frame = spark.createDataFrame(picked)
    else:
        needed = dict.fromkeys([*columns, *_TESTED])
        source = {**_source(parsed, topic, key or msg_id), **_times(begin_ms, end_ms)}
        frame = loaded(spark, path, {**(options or {}), **source, "columns": ",".join(needed)})
    return reduce(lambda some, test: some.where(test), tests, frame).select(columns)


def sql(spark: SparkSession, path: str, text: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Run a SELECT over the views `VIEWS` of a store or an archive; further options are options of ``rocketmq-store``.
    Other views of the session can be joined.
    Raises SettingsError: an option is not valid, or the session has a view with the name of a table.
    Raises AnalysisException: Spark cannot analyze the statement."""
    given, path = dict(options or {}), address(spark, path)
    store_options({**given, "path": path})
    runs = Target.of(path).runs()
    names = [name for name in VIEWS if re.search(rf"\b{name}\b", text, re.IGNORECASE)]
    if runs:
        names = [name for name in names if VIEWS[name] is Entity.MESSAGES]
    for name in names:
        if spark.catalog.tableExists(name):
            raise SettingsError(f"sql: this session has a view or table {name}: drop it, or give it another name")
    frames = {name: _whole(spark, path, {**given, "entity": VIEWS[name].value}, runs) for name in names}
    # Without the alias, where() on the result could use columns that a select has dropped.
    return _selected(spark, text, frames).alias("messages")


def table(spark: SparkSession, path: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Implement `rmqkit.spark.read`."""
    path = address(spark, path)
    store_options({**(options or {}), "path": path})
    return _whole(spark, path, options or {}, Target.of(path).runs())


def _whole(spark: SparkSession, path: str, options: Mapping[str, str], runs: Collection[Run]) -> DataFrame:
    """Return all rows of a store or of an archive. A query reads only the columns and messages that it uses."""
    return _archived(spark, path, runs, lambda file: True) if runs else loaded(spark, path, options)


# ---------------------------------------------------------------- conditions


def _tests(topic: str, key: str, msg_id: str, begin_ms: int | None, end_ms: int | None) -> list[Test]:
    """Return the conditions for a message, as Spark columns."""
    from pyspark.sql import functions as f

    tests = []
    if topic:
        tests.append(f.col("topic") == topic)
    if key:
        tests.append((f.col("msgId") == key) | f.array_contains(f.split("keys", r"\s+"), key))
    if msg_id:
        test = f.col("msgId") == msg_id
        if (place := _place(msg_id)) is not None:
            test |= (f.col("storeHost") == place[0]) & (f.col("commitLogOffset") == place[1])
        tests.append(test)
    if begin_ms is not None:
        tests.append(f.col("storeTimestamp") >= f.timestamp_millis(f.lit(begin_ms)))
    if end_ms is not None:
        tests.append(f.col("storeTimestamp") <= f.timestamp_millis(f.lit(end_ms)))
    return tests


def _place(msg_id: str) -> tuple[str, int] | None:
    """Return the store host and the physical offset in an offset message id, or None if the text is not such an id."""
    try:
        ip, port, offset = decode_offset_id(msg_id)
    except ValueError:
        return None
    return host_text(pack_host(ip, port)), offset


# ---------------------------------------------------------------- a store


def _source(options: StoreOptions, topic: str, key: str) -> dict[str, str]:
    """Return the options that limit the read of a store as far as possible."""
    if not topic:
        return {}
    if key and "," not in key and find_index_files(options.path, options.index_slot_count):
        return {"topic": topic, "key": key}
    if not words(options.log_paths) and exists(join(options.path, "consumequeue", topic)):
        return {"topic": topic, "offsetsFrom": "consumequeue"}
    return {"topic": topic}


def _times(begin_ms: int | None, end_ms: int | None) -> dict[str, str]:
    """Return the options for inclusive bounds of storeTimestamp."""
    bounds = {"startingTimestamp": begin_ms or 0, "endingTimestamp": 0 if end_ms is None else end_ms + 1}
    return {name: str(value) for name, value in bounds.items() if value > 0}


def _picked(options: StoreOptions, msg_id: str) -> pa.Table | None:
    """Return the message with an offset message id, or None if this message is not at the physical offset in the id."""
    place = _place(msg_id)
    if place is None:
        return None
    for segment in find_segments(options.path, words(options.log_paths)):
        position = place[1] - segment.base_offset
        if 0 <= position < segment.size:
            found = scan.pick(map_records(segment.path, [position]), segment.base_offset, [position])
            for part in found:
                if isinstance(part, Records) and offset_id(part.record(0).store_host, place[1]) == msg_id.upper():
                    plan = read_plan(replace(options, topics=""), [one.name for one in available_columns(options)])
                    return pa.Table.from_batches(read_records_at(IndexReads(segment, (place[1],)), plan))
    return None


def loaded(spark: SparkSession, path: str, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format(FORMAT).options(**options).load(path)


# ---------------------------------------------------------------- an archive


def _archived(
    spark: SparkSession,
    path: str,
    runs: Collection[Run],
    is_wanted: Callable[[ArchivedFile], bool],
) -> DataFrame:
    """Return the rows of an archive's files; the topic is read from the file, not the folder (Spark makes 007 7)."""
    columns = _archive_columns(runs)
    target = Target.of(path)
    files = [file for run in runs for file in run.files if is_wanted(file)]
    if not files:
        return spark.createDataFrame([], to_ddl(columns))
    # Pass a schema, or else Spark first runs a job that reads footers.
    if target.is_local:
        return spark.read.schema(to_ddl(columns)).parquet(*map(target.path_of, files))
    names = json.dumps([file.path for file in files])
    return spark.read.format(ARCHIVE).schema(to_ddl(columns)).option("files", names).load(path)


def _archive_columns(runs: Collection[Run]) -> list[Column]:
    return available_columns(store_options({**next(iter(runs)).settings.options, "path": "/"}))


def _may_have(file: ArchivedFile, topic: str, begin_ms: int | None, end_ms: int | None) -> bool:
    """Return True if a file may have rows of a topic and time."""
    if topic and file.topic is not None and file.topic != topic:
        return False
    if begin_ms is not None and (file.stored_max_ms is None or file.stored_max_ms < begin_ms):
        return False
    return end_ms is None or (file.stored_min_ms is not None and file.stored_min_ms <= end_ms)


# ---------------------------------------------------------------- views


def _selected(spark: SparkSession, text: str, frames: Mapping[str, DataFrame]) -> DataFrame:
    """Run a statement over data frames. PySpark gives each frame a unique name, and passes the frames with the
    statement. Other threads of the session see no view, and Spark Connect can resolve the frames at every action."""
    if not frames:
        return spark.sql(text)
    tables = ", ".join(f"{name} as (select * from {{{name}}})" for name in frames)
    statement = text.rstrip().rstrip(";").replace("{", "{{").replace("}", "}}")
    return spark.sql(f"with {tables} select * from (\n{statement}\n)", None, **frames)
