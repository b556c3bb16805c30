"""The Spark format ``rocketmq-store``, which reads a broker's files without the broker.

::

    spark.read.format("rocketmq-store").option("topic", "orders").load("/data/store")  # or "s3://bucket/store"

===========================  =========================================================================================
class                        runs in
===========================  =========================================================================================
`StoreSource`                the driver's Python: options, schema
`StoreReader.partitions`     the planner process: files and splits (`splits.plan_splits`)
`StoreReader.read`           the executors' Python workers: `reader.read_split`, `reads`, `tables.read_table`
===========================  =========================================================================================

=========================================  ===========================================================================
request                                    read
=========================================  ===========================================================================
everything                                 the log, split by bytes
startingTimestamp, endingTimestamp         the files of the log that may have messages of these times
topic, queue with offsetsFrom=consumequeue  the records that the queues point at
topic and key                              the records that the index points at, then compared
archive                                    the segments of deleted log files (`rmqkit.arrow.archived`), then as above
=========================================  ===========================================================================

Spark has no column pruning for Python sources: name the needed columns by ``.schema("topic string, ...")`` or
``option("columns", ...)``. Then no other column is decoded or transferred. The options ``topic``, ``queueId``,
``startingTimestamp`` and ``endingTimestamp`` exclude messages before they are decoded. Filters are never pushed into
this reader: Spark 4.1 to 4.3 reuses the reader of the first plan with its filters for later actions of the same data
frame. It does not report that these actions have no filters, so they would lack rows.

Spark plans a data frame once, at its first action, and reuses the partitions: a data frame is a snapshot of the log at
this time. The next ``load`` sees messages that arrived later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from rmqkit.arrow.archived import ArchivedFile, plan_archive, read_archived
from rmqkit.arrow.fs import find_segments, resolve, with_s3_settings
from rmqkit.arrow.options import CorruptRecords, IncludeProperties, VerifyCrc
from rmqkit.arrow.plan import Part, plan_parts, read_part
from rmqkit.arrow.reader import EVERYTHING, ReadPlan, Selection
from rmqkit.arrow.schema import CORRUPT, CORRUPT_COLUMN, Column, choose, message_columns
from rmqkit.arrow.splits import Split, grouped, plan_splits
from rmqkit.errors import SettingsError
from rmqkit.spark.options import Entity, StoreOptions, parse_options, words
from rmqkit.spark.schema import check_types, declared, given_options
from rmqkit.spark.source.tables import TABLES, read_table

FORMAT = "rocketmq-store"
_S3 = ("fs.s3a.", "spark.hadoop.fs.s3a.")
_PARTITIONS_MAX = 256
JAR = Path(__file__).parents[1] / "rmqkit-spark.jar"
"""The readers in Java (``jvm``); it is missing where the package was built without a JDK."""


class StoreSource(DataSource):
    """The format ``rocketmq-store``. Spark makes an instance per read, on the driver."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``spark.read.format``."""
        return FORMAT

    def schema(self) -> str | StructType:
        """Return the columns if the caller passes no schema."""
        return declared(chosen_columns(store_options(given_options(self.options)), ()), self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a reader of the columns in ``schema``: the caller's schema, or the result of `schema`."""
        options = store_options(given_options(self.options, schema))
        columns = chosen_columns(options, schema.names)
        check_types(columns, schema, FORMAT)
        if options.entity is not Entity.MESSAGES:
            return TableReader(options, schema.names)
        return StoreReader(options, read_plan(options, schema.names))


class StoreTwin(StoreSource):
    """The same format under another name, for reads that the reader in the JVM passes on (``jvm/StoreSource.java``)."""

    @classmethod
    def name(cls) -> str:
        """Return the name that the reader in the JVM looks up."""
        return f"{FORMAT}-python"


class StoreReader(DataSourceReader):
    """Reader of messages: it plans a read on the driver, and reads a partition in a task."""

    def __init__(self, options: StoreOptions, plan: ReadPlan) -> None:
        self._options = options
        self._plan = plan

    def partitions(self) -> Sequence[InputPartition]:
        """Plan which part of the store, as it is now, each task reads."""
        parts = store_parts(self._options, self._plan.selection)
        archived = [InputPartition((file,)) for file in archived_files(self._options)]
        return [*archived, *_partitions(parts, self._options.split_bytes)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of one partition as Arrow record batches; runs in a task."""
        # Yield each batch immediately: when limit() has enough rows, Spark stops the worker, and the rest is not read.
        for part in partition.value:
            is_archived = isinstance(part, ArchivedFile)
            yield from read_archived(part, self._plan) if is_archived else read_part(part, self._plan)


class TableReader(DataSourceReader):
    """Reader of the tables that are not messages (`rmqkit.spark.source.tables`)."""

    def __init__(self, options: StoreOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = list(names)

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the parts of the current table."""
        segments = find_segments(self._options.path, words(self._options.log_paths))
        is_log = self._options.entity is Entity.RAW
        splits = plan_splits(segments, self._options.split_bytes) if is_log else []
        parts = TABLES[self._options.entity].parts(self._options, segments, splits)
        return _partitions(parts, self._options.split_bytes)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one partition as Arrow record batches; runs in a task."""
        for part in partition.value:
            yield from read_table(self._options.entity, part, self._names, read_plan(self._options, ()))


def store_options(given: Mapping[str, str]) -> StoreOptions:
    """Parse the options of a read; settings of Hadoop's S3 connector (``fs.s3a.…``) are added to the path.
    Raises SettingsError: an option is unknown or not valid, or the path is missing."""
    s3 = {name: value for name, value in given.items() if name.lower().startswith(_S3)}
    options = parse_options(StoreOptions, {name: given[name] for name in given.keys() - s3.keys()}, FORMAT)
    if not options.path and not options.log_paths:
        raise SettingsError(f"{FORMAT}: no path: give the store directory to load(...)")
    # Refuse instead of ignoring: the tables lack these columns, and users would not notice unfiltered rows.
    if options.entity is not Entity.MESSAGES:
        for name, value in (
            ("queueId", options.queue_ids),
            ("startingTimestamp", options.starting_timestamp_ms),
            ("endingTimestamp", options.ending_timestamp_ms),
        ):
            if value:
                raise SettingsError(f"{FORMAT}: {name} is for entity=messages: use where(...) instead")
    if options.archive:
        # The segments have one form of a message.
        for name, is_same in (
            ("entity=messages", options.entity is Entity.MESSAGES),
            ("decompress=true", options.decompress),
            ("includeProperties=map", options.include_properties is not IncludeProperties.STRING),
        ):
            if not is_same:
                raise SettingsError(f"{FORMAT}: archive needs {name}: remove the other option, or archive")
        options = replace(options, archive=with_s3_settings(options.archive, s3))
    return replace(options, path=resolve(with_s3_settings(options.path, s3))) if options.path else options


def store_splits(options: StoreOptions) -> list[Split]:
    """Return the splits of the store's current log.
    Raises StoreError: the store is missing or cannot be read (its subclass StoreMismatch: its files do not fit)."""
    return plan_splits(find_segments(options.path, words(options.log_paths)), options.split_bytes)


def store_parts(options: StoreOptions, selection: Selection = EVERYTHING) -> list[Part]:
    """Return the parts of the store to read for the selected messages.
    Raises StoreError: see `store_splits`. Raises SettingsError: a key is set without a topic."""
    try:
        return plan_parts(
            options.path,
            find_segments(options.path, words(options.log_paths)),
            selection,
            keys=words(options.keys),
            offsets_from=options.offsets_from,
            split_bytes=options.split_bytes,
            index_slot_count=options.index_slot_count,
        )
    except SettingsError as error:
        raise SettingsError(f"{FORMAT}: {error}") from None


def archived_files(options: StoreOptions) -> list[ArchivedFile]:
    """Return the segments of the archive with messages that the log does not have. Raises StoreError: see
    `plan_archive`."""
    if not options.archive:
        return []
    segments = find_segments(options.path, words(options.log_paths))
    is_strict = options.corrupt_records is CorruptRecords.FAIL
    return plan_archive(options.archive, options.path, segments, is_strict=is_strict)


def refuse_archive(options: StoreOptions, job: str) -> None:
    """Raise SettingsError if the options name an archive: the job reads only the log files on the disk."""
    if options.archive:
        raise SettingsError(
            f"{job}: the option archive cannot be used, because this job reads only the log files that the store still"
            " has: leave archive out, or read both with summary, query, sql or replay"
        )


def _partitions(parts: Sequence[Any], split_bytes: int) -> list[InputPartition]:
    """Make a task for each part, but group small parts: a task costs more than the read of a small file."""
    splits = [part for part in parts if isinstance(part, Split)]
    size = len(parts) // _PARTITIONS_MAX + 1
    groups: list[tuple[Any, ...]] = [*grouped(splits, split_bytes)]
    if len(splits) < len(parts):
        groups = [tuple(parts[first : first + size]) for first in range(0, len(parts), size)]
    assert sum(map(len, groups)) == len(parts), "each part is read by one task"
    return [InputPartition(group) for group in groups or [()]]


def chosen_columns(options: StoreOptions, names: Iterable[str]) -> list[Column]:
    """Return the columns of a read: the columns in ``names``, otherwise the columns in the option, otherwise all.
    Raises SettingsError: a column does not exist."""
    wanted_names = list(names) or words(options.columns)
    if options.entity is Entity.MESSAGES:
        return list(read_plan(options, wanted_names).columns)
    columns = TABLES[options.entity].columns
    return choose(columns, wanted_names, FORMAT) if wanted_names else list(columns)


def available_columns(options: StoreOptions) -> list[Column]:
    """List the columns that exist with some options."""
    columns = message_columns(options.include_properties)
    columns = [column for column in columns if column.name != "body" or options.include_body]
    return [*columns, CORRUPT_COLUMN] if _reports(options) else columns


def read_plan(options: StoreOptions, names: Iterable[str]) -> ReadPlan:
    """Make the plan for the records of a store; an empty ``names`` means all columns.
    Raises SettingsError: a column does not exist, or damage has to be reported without the column for it."""
    available = available_columns(options)
    columns = choose(available, list(names) or [column.name for column in available], FORMAT)
    if _reports(options) and CORRUPT_COLUMN not in columns:
        raise SettingsError(
            f"{FORMAT}: corruptRecordMode=report and verifyCrc=column need the column {CORRUPT}: add it to the columns"
        )
    times = (options.starting_timestamp_ms, options.ending_timestamp_ms)
    return ReadPlan(
        columns=tuple(columns),
        selection=Selection.of(options.topic_names, _queue_ids(options.queue_ids), *times),
        verify_crc=options.verify_crc,
        corrupt_records=options.corrupt_records,
        decompress=options.decompress,
        unwrap=options.unwrap,
        broker_name=options.broker_name,
        keys=frozenset(words(options.keys)),
        lite_topics=frozenset(words(options.lite_topics)),
        lite_prefix=options.lite_prefix,
        batch_rows=options.batch_rows,
    )


def _queue_ids(text: str) -> Iterator[int]:
    for word in words(text):
        if not word.isdecimal():
            raise SettingsError(f"{FORMAT}: queueId={text} must be queue ids, separated by commas")
        yield int(word)


def _reports(options: StoreOptions) -> bool:
    return options.corrupt_records is CorruptRecords.REPORT or options.verify_crc is VerifyCrc.COLUMN
