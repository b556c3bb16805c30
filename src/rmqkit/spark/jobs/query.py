"""`query` and `sql` find messages of a store, or of an archive of one: by key, id and time, or with SQL.

=======================  =======================================================================================
asked for                read of a store
=======================  =======================================================================================
offset message id        the one record at its place
key, or unique id        what the index knows under it within the topic; without a topic, or an index, everything
topic                    what the topic's consume queues point at; without them everything
times                    of all that, the log files that may have such messages
SQL                      the columns that the statement uses; for ``messages``, if it is read once, of the topics,
                         queues and store times that its WHERE leaves (`_narrowed`)
=======================  =======================================================================================

Of an archive (`rmqkit.spark.jobs.archive`, in any of its formats) the files are read that may hold such rows, by what
its manifests say of topics, times and offsets. Times are bounds that belong to the range. Source: spark.md §5, §8.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec.structs import replace

from rmqkit.arrow.fs import exists, find_segments, join, map_records
from rmqkit.arrow.queue_files import IndexReads, find_index_files, read_records_at
from rmqkit.arrow.reader import Condition, bounds, wanted
from rmqkit.arrow.schema import Column
from rmqkit.errors import SettingsError
from rmqkit.protocol.ids import decode_offset_id, offset_id
from rmqkit.protocol.record import host_text, pack_host
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.spark.jobs.archive_target import Run, Target
from rmqkit.spark.options import Entity, StoreOptions, words
from rmqkit.spark.schema import to_ddl
from rmqkit.spark.session import address, is_connect
from rmqkit.spark.source.archive import FORMAT as ARCHIVE
from rmqkit.spark.source.store import FORMAT, available_columns, chosen_columns, read_plan, store_options
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Records

if TYPE_CHECKING:
    from pyspark.sql import Column as Test
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["VIEWS", "query", "sql"]

VIEWS = {entity.value.replace("-", "_"): entity for entity in Entity}
"""The tables of `sql`, by their names in a statement; an archive has ``messages`` only."""

_TESTED = ("topic", "msgId", "keys", "storeTimestamp", "storeHost", "commitLogOffset")
_EMPTY = "file:/dev/null"
"""An empty file on every machine: tables of it are planned and never read."""
_SCAN = re.compile(r"^ReadSchema: struct<(.*)>$", re.MULTILINE)
_JAVA_TIMES = "spark.sql.datetime.java8API.enabled"
_PUSHED = (
    r"(?<=[\[ ])(EqualTo|EqualNullSafe|LessThan|LessThanOrEqual|GreaterThan|GreaterThanOrEqual|In)"
    r"\(({mark}t\d+c\d+)(?:,([\w%|.:+-]+)|, \[([\w%|.:,+-]+)\])\)(?=, |\]\n)"
)
"""Filters of a plan that stand by themselves, not in an Or or a Not, whose values are simple."""


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
        options: of ``rocketmq-store``: columns, maxHashSlotNum, corruptRecordMode, ...
        key: one of the message's keys, or its unique id.
        msg_id: unique id, or offset message id.
        begin_ms, end_ms: first and last ``storeTimestamp``.

    Raises:
        SettingsError: an option cannot be used.
        StoreError: there is no readable store, or it has another number of index slots.
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
        frame = _loaded(spark, path, {**(options or {}), **source, "columns": ",".join(needed)})
    return reduce(lambda some, test: some.where(test), tests, frame).select(columns)


def sql(spark: SparkSession, path: str, text: str, options: Mapping[str, str] | None = None) -> DataFrame:
    """Run a SELECT over the views `VIEWS` of a store or an archive; further options are those of
    ``rocketmq-store``. Other views of the session can be joined.
    Raises SettingsError: an option cannot be used, or the session has a view of such a name.
    Raises AnalysisException: Spark does not understand the statement."""
    given, path = dict(options or {}), address(spark, path)
    parsed = store_options({**given, "path": path})
    runs = Target.of(path).runs()
    names = [name for name in VIEWS if re.search(rf"\b{name}\b", text, re.IGNORECASE)]
    if runs:
        names = [name for name in names if VIEWS[name] is Entity.MESSAGES]
    shapes = {name: _columns_of(parsed, VIEWS[name], runs) for name in names}
    if is_connect(spark):
        frames: dict[str, DataFrame] = {}
        return _narrowest(spark, path, given, runs, shapes, frames.__setitem__, lambda: _selected(spark, text, frames))
    with _views(spark, names) as new_view:
        return _narrowest(spark, path, given, runs, shapes, new_view, lambda: spark.sql(text))


def planned(
    spark: SparkSession, path: str, work: Callable[[DataFrame], DataFrame], options: Mapping[str, str] | None = None
) -> DataFrame:
    """Do what `rmqkit.spark.read` says."""
    given, path = dict(options or {}), address(spark, path)
    parsed = store_options({**given, "path": path})
    runs = Target.of(path).runs()
    (name,) = (name for name, entity in VIEWS.items() if entity is parsed.entity)
    frames: dict[str, DataFrame] = {}
    shapes = {name: _columns_of(parsed, parsed.entity, runs)}
    return _narrowest(spark, path, given, runs, shapes, frames.__setitem__, lambda: work(frames[name]))


def _narrowest(
    spark: SparkSession,
    path: str,
    given: Mapping[str, str],
    runs: Collection[Run],
    shapes: Mapping[str, list[Column]],
    new_table: Callable[[str, DataFrame], None],
    work: Callable[[], DataFrame],
) -> DataFrame:
    """Do some work over tables that have nothing but what it uses; ``shapes`` are all columns of each."""
    scans, tests = _scans(spark, work, shapes, new_table)
    for name, columns in shapes.items():
        read = set().union(*scans[name]) or {columns[0].name}
        needed = [column.name for column in columns if column.name in read]
        if runs:
            frame = _archived(spark, path, runs, lambda file: True, needed)
        else:
            chosen = {**given, "entity": VIEWS[name].value, "columns": ",".join(needed)}
            if VIEWS[name] is Entity.MESSAGES:
                chosen |= _narrowed(tests[name], given)
            frame = _loaded(spark, path, chosen)
        new_table(name, frame.selectExpr(*(_shaped(column, needed) for column in columns)))
    # The alias is a border: Spark lets where() use columns of the table that a select had dropped, and here those that
    # the work does not use are nulls.
    return work().alias("messages")


# ---------------------------------------------------------------- conditions


def _tests(topic: str, key: str, msg_id: str, begin_ms: int | None, end_ms: int | None) -> list[Test]:
    """What a message must meet, for Spark."""
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
    """Store host and physical offset in an offset message id; None if it cannot be one."""
    try:
        ip, port, offset = decode_offset_id(msg_id)
    except ValueError:
        return None
    return host_text(pack_host(ip, port)), offset


# ---------------------------------------------------------------- a store


def _source(options: StoreOptions, topic: str, key: str) -> dict[str, str]:
    """The least that has to be read of a store."""
    if not topic:
        return {}
    if key and "," not in key and find_index_files(options.path, options.index_slot_count):
        return {"topic": topic, "key": key}
    if not words(options.log_paths) and exists(join(options.path, "consumequeue", topic)):
        return {"topic": topic, "offsetsFrom": "consumequeue"}
    return {"topic": topic}


def _times(begin_ms: int | None, end_ms: int | None) -> dict[str, str]:
    """The options for bounds of storeTimestamp, both inclusive."""
    bounds = {"startingTimestamp": begin_ms or 0, "endingTimestamp": 0 if end_ms is None else end_ms + 1}
    return {name: str(value) for name, value in bounds.items() if value > 0}


def _picked(options: StoreOptions, msg_id: str) -> pa.Table | None:
    """The message whose offset message id this is; None when there is none at its place."""
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


def _loaded(spark: SparkSession, path: str, options: Mapping[str, str]) -> DataFrame:
    return spark.read.format(FORMAT).options(**options).load(path)


# ---------------------------------------------------------------- an archive


def _archived(
    spark: SparkSession,
    path: str,
    runs: Collection[Run],
    is_wanted: Callable[[ArchivedFile], bool],
    needed: Collection[str] | None = None,
) -> DataFrame:
    """The rows of an archive's files; the topic is the one in the file, not the folder's (Spark takes 007 for 7)."""
    columns = _archive_columns(runs)
    target = Target.of(path)
    files = [file for run in runs for file in run.files if is_wanted(file)]
    if not files:
        return spark.createDataFrame([], to_ddl(columns))
    # With a schema: else Spark runs a job of its own that reads footers before it plans.
    if target.is_local:
        return spark.read.schema(to_ddl(columns)).parquet(*map(target.path_of, files))
    chosen = [column for column in columns if needed is None or column.name in needed]
    names = json.dumps([file.path for file in files])
    return spark.read.format(ARCHIVE).schema(to_ddl(chosen)).option("files", names).load(path)


def _archive_columns(runs: Collection[Run]) -> list[Column]:
    return available_columns(store_options({**next(iter(runs)).settings.options, "path": "/"}))


def _may_have(file: ArchivedFile, topic: str, begin_ms: int | None, end_ms: int | None) -> bool:
    """Whether rows of a file can be of a topic and time."""
    if topic and file.topic is not None and file.topic != topic:
        return False
    if begin_ms is not None and (file.stored_max_ms is None or file.stored_max_ms < begin_ms):
        return False
    return end_ms is None or (file.stored_min_ms is not None and file.stored_min_ms <= end_ms)


# ---------------------------------------------------------------- views


def _columns_of(options: StoreOptions, entity: Entity, runs: Collection[Run]) -> list[Column]:
    if runs:
        return _archive_columns(runs)
    if entity is Entity.MESSAGES:
        return chosen_columns(options, ())
    from rmqkit.spark.source.tables import TABLES

    return list(TABLES[entity].columns)


def _selected(spark: SparkSession, text: str, frames: Mapping[str, DataFrame]) -> DataFrame:
    """A statement over data frames, for Spark Connect: its frames are resolved again by every action, when views would
    be gone. So the frames travel with the statement."""
    if not frames:
        return spark.sql(text)
    tables = ", ".join(f"{name} as (select * from {{{name}}})" for name in frames)
    statement = text.rstrip().rstrip(";").replace("{", "{{").replace("}", "}}")
    return spark.sql(f"with {tables} select * from (\n{statement}\n)", None, **frames)


@contextmanager
def _views(spark: SparkSession, names: Collection[str]) -> Iterator[Callable[[str, DataFrame], None]]:
    """Gives a function that makes a view; all are dropped in the end, what was planned with them goes on."""
    for name in names:
        if spark.catalog.tableExists(name):
            raise SettingsError(f"sql: this session has a view or table {name}: drop it, or give it another name")
    try:
        yield lambda name, frame: frame.createOrReplaceTempView(name)
    finally:
        for name in names:
            spark.catalog.dropTempView(name)


def _scans(
    spark: SparkSession,
    work: Callable[[], DataFrame],
    shapes: Mapping[str, list[Column]],
    new_table: Callable[[str, DataFrame], None],
) -> tuple[dict[str, list[set[str]]], dict[str, list[Condition]]]:
    """The columns that some work uses of each table, every time that it reads it, and the conditions that rows of each
    table have to meet where it is read once.

    Spark does not tell a Python source, but it tells Parquet: the work is planned over empty Parquet tables of the same
    shapes, and the plan says what it would read. A table that the plan does not have is not read at all. All that is
    known of a plan is its text, over Spark Connect too. So a column has a name that no text of the work can hold."""
    mark = f"c{uuid.uuid4().hex}"
    columns = {f"{mark}t{i}c{j}": (name, one) for i, name in enumerate(shapes) for j, one in enumerate(shapes[name])}
    for name in shapes:
        own = {alias: column for alias, (table, column) in columns.items() if table == name}
        ddl = ", ".join(f"{alias} {column.spark}" for alias, column in own.items())
        empty = spark.read.schema(ddl).parquet(_EMPTY)
        new_table(name, empty.selectExpr(*(f"{alias} as `{column.name}`" for alias, column in own.items())))
    printed = io.StringIO()
    # explain prints and gives nothing back; the JVM's own text of a plan is not there over Spark Connect.
    with _plain_times(spark), contextlib.redirect_stdout(printed):
        work().explain("formatted")
    scans: dict[str, list[set[str]]] = {name: [] for name in shapes}
    for read in _SCAN.findall(printed.getvalue()):
        found = [columns[alias] for alias in re.findall(rf"{mark}t\d+c\d+(?=:)", read)]
        for name in {name for name, _ in found} or shapes:  # without columns it may be any of them
            scans[name].append({column.name for table, column in found if table == name})
    tests: dict[str, list[Condition]] = {name: [] for name in shapes}
    for kind, alias, value, values in re.findall(_PUSHED.format(mark=mark), printed.getvalue()):
        name, column = columns[alias]
        condition = _condition(column.name, kind, values.split(",") if values else [value])
        # A table that is read twice has filters of two reads, and the text does not say whose: neither may narrow it.
        if condition is not None and len(scans[name]) == 1:
            tests[name].append(condition)
    return scans, tests


@contextmanager
def _plain_times(spark: SparkSession) -> Iterator[None]:
    """Have plans print times in UTC, not in the zone of whatever machine the driver is."""
    before = spark.conf.get(_JAVA_TIMES)
    spark.conf.set(_JAVA_TIMES, "true")
    try:
        yield
    finally:
        spark.conf.set(_JAVA_TIMES, str(before))


def _condition(column: str, kind: str, texts: Sequence[str]) -> Condition | None:
    """A condition of a plan on one of the columns by which a store can be narrowed; None for any other."""
    try:
        match column:
            case "topic":
                return Condition(column, kind, tuple(texts))
            case "queueId":
                return Condition(column, kind, tuple(map(int, texts)))
            case "storeTimestamp":
                since = [datetime.fromisoformat(text) - datetime.fromtimestamp(0, UTC) for text in texts]
                return Condition(column, kind, tuple(time // timedelta(microseconds=1) for time in since))
    except (ValueError, TypeError):  # a time of no calendar
        pass
    return None


def _narrowed(tests: Sequence[Condition], given: Mapping[str, str]) -> dict[str, str]:
    """Options that leave out what does not meet conditions; some of that may be left in. The statement has the
    conditions still. Pushed filters would be kept by Spark for other statements (`rmqkit.spark.source.store`)."""
    low_us, high_us = bounds([test for test in tests if test.column == "storeTimestamp"])
    topics, queue_ids = wanted(tests, "topic"), wanted(tests, "queueId")
    options = {
        # An option is split at commas and stripped, so it cannot name such a topic. All are read then, and the
        # statement leaves out the rest.
        "topic": "" if any("," in topic or topic.split() != [topic] for topic in topics) else ",".join(topics),
        "queueId": "" if any(queue_id < 0 for queue_id in queue_ids) else ",".join(map(str, queue_ids)),
        "startingTimestamp": "" if low_us is None or low_us < 1000 else str(low_us // 1000),
        "endingTimestamp": "" if high_us is None or high_us < 0 else str(high_us // 1000 + 1),
    }
    # What the caller said wins: two bounds of one name cannot both be options.
    taken = {name.lower() for name in given}
    return {name: value for name, value in options.items() if value and name.lower() not in taken}


def _shaped(column: Column, needed: Collection[str]) -> str:
    """A column of a view, or a null in the place of one that is not used."""
    return f"`{column.name}`" if column.name in needed else f"cast(null as {column.spark}) as `{column.name}`"
