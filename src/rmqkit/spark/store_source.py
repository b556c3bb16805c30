"""The Spark data source ``rocketmq-store``: messages out of the files of a broker, without the broker.

::

    spark.read.format("rocketmq-store").option("topic", "orders").load("/data/store")

===========================  =========================================================================================
class                        runs in
===========================  =========================================================================================
`StoreSource`                the driver's Python: options, schema
`StoreReader.partitions`     the planner process: which files, which splits (`splits.plan_splits`)
`StoreReader.read`           the executors' Python workers: `reader.read_split`
===========================  =========================================================================================

Spark has no column pruning for Python sources: name the columns that are needed, by ``.schema("topic string, ...")``
or ``option("columns", ...)``, and nothing else is decoded or shipped. Filters reach the reader with
``filterPushdown=true``, which Spark allows only when ``spark.sql.python.filterPushdown.enabled`` is true (the session
of `rmqkit.spark.spark_session` sets it).

Spark plans a data frame once, at its first action, and keeps the partitions: a data frame is a snapshot of the log at
that moment. Messages that arrive later are seen by the next ``load``. Source: spark.md §2, §8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from rmqkit.errors import SettingsError
from rmqkit.spark.filters import from_spark, topic_in
from rmqkit.spark.fs import find_segments
from rmqkit.spark.options import CorruptRecords, IncludeProperties, StoreOptions, VerifyCrc, parse_options, words
from rmqkit.spark.reader import ReadPlan, read_split
from rmqkit.spark.schema import CORRUPT, CORRUPT_COLUMN, MESSAGE_COLUMNS, PROPERTY_STRING, Column, choose, to_ddl
from rmqkit.spark.splits import Split, plan_splits

__all__ = ["FORMAT", "StoreReader", "StoreSource", "available_columns", "read_plan", "store_options", "store_splits"]

FORMAT = "rocketmq-store"


class StoreSource(DataSource):
    """The format, as Spark knows it."""

    @classmethod
    def name(cls) -> str:
        """What ``spark.read.format`` is given."""
        return FORMAT

    def schema(self) -> str:
        """The columns when the caller gives no schema."""
        options = store_options(self.options)
        return to_ddl(read_plan(options, words(options.columns)).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns in ``schema``, which is the caller's or ours."""
        options = store_options(self.options)
        plan = read_plan(options, schema.names)
        for column, field in zip(plan.columns, schema.fields, strict=True):
            if field.dataType.simpleString() != column.spark:
                raise SettingsError(
                    f"{FORMAT}: column {column.name} is {column.spark}, the schema says"
                    f" {field.dataType.simpleString()}: leave the cast to a select"
                )
        return FilteringStoreReader(options, plan) if options.filter_pushdown else StoreReader(options, plan)


class StoreReader(DataSourceReader):
    """Plans and reads a store."""

    def __init__(self, options: StoreOptions, plan: ReadPlan) -> None:
        self._options = options
        self._plan = plan

    def partitions(self) -> Sequence[InputPartition]:
        """The splits of the log as it is now."""
        return [InputPartition(split) for split in store_splits(self._options)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of one split as Arrow record batches."""
        if isinstance(partition.value, Split):  # an empty store has one partition of nothing
            yield from read_split(partition.value, self._plan)


class FilteringStoreReader(StoreReader):
    """The same with filters in the reader; Spark refuses a reader that has `pushFilters` unless it is configured."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take over what `filters` can decide exactly; the rest is given back to Spark."""
        for pushed in filters:
            condition = from_spark(pushed)
            if condition is None:
                yield pushed
            else:
                self._plan = replace(self._plan, conditions=(*self._plan.conditions, condition))


def store_options(given: Mapping[str, str]) -> StoreOptions:
    """The options of a read. Raises SettingsError: one of them is unknown or cannot be used, or there is no path."""
    options = parse_options(StoreOptions, given, FORMAT)
    if not options.path and not options.log_paths:
        raise SettingsError(f"{FORMAT}: no path: give the store directory to load(...)")
    return options


def store_splits(options: StoreOptions) -> list[Split]:
    """The splits of the store's log as it is now.
    Raises StoreError: the store is not there or cannot be read (its subclass StoreMismatch: its files do not fit)."""
    return plan_splits(find_segments(options.path, words(options.log_paths)), options.split_bytes)


def available_columns(options: StoreOptions) -> list[Column]:
    """The columns that exist with some options."""
    columns = [column for column in MESSAGE_COLUMNS if column.name != "body" or options.include_body]
    if options.include_properties is not IncludeProperties.MAP:
        at = next(i for i, column in enumerate(columns) if column.name == "properties")
        columns[at : at + 1] = [PROPERTY_STRING] if options.include_properties is IncludeProperties.STRING else []
    return [*columns, CORRUPT_COLUMN] if _reports(options) else columns


def read_plan(options: StoreOptions, names: Iterable[str]) -> ReadPlan:
    """What to make of a store; all columns if no names are given.
    Raises SettingsError: a column does not exist, or reports have no column to go to."""
    available = available_columns(options)
    columns = choose(available, list(names) or [column.name for column in available], FORMAT)
    if _reports(options) and CORRUPT_COLUMN not in columns:
        raise SettingsError(
            f"{FORMAT}: corruptRecordMode=report and verifyCrc=column need the column {CORRUPT}: add it to the columns"
        )
    topics = words(options.topics)
    return ReadPlan(
        columns=tuple(columns),
        conditions=(topic_in(topics),) if topics else (),
        verify_crc=options.verify_crc,
        corrupt_records=options.corrupt_records,
        decompress=options.decompress,
        unwrap=options.unwrap,
        broker_name=options.broker_name,
        batch_rows=options.batch_rows,
    )


def _reports(options: StoreOptions) -> bool:
    return options.corrupt_records is CorruptRecords.REPORT or options.verify_crc is VerifyCrc.COLUMN
