"""A live topic as a typed table, which grows with the topic: a stream that appends each message once.

::

    write_table(spark, "orders", Path("order.json"), "delta:///data/orders", "/data/orders-checkpoint", is_once=True)

=========================  =======================================================================================
column                     value
=========================  =======================================================================================
each property of the body  by the schema (`rmqkit.spark.jobs.typed_schema`); null if the property is absent
``_topic``, ...            the fields of the message in `MESSAGE_FIELDS`; topic, broker, queue and offset are its key
=========================  =======================================================================================

A message whose body does not fit is a row of the table with the suffix ``_rejected``: body, reason, and the same
fields. Tasks decode the bodies and write Parquet files, at most one for each table and partition of a batch. The driver
publishes the files of both tables, the rejected rows first (`rmqkit.spark.jobs.typed_target`). Rows are only appended,
so a late message needs nothing: it is a row like all others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from rmqkit.errors import SettingsError, StoreError
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs.archive_files import ArchivedFile
from rmqkit.spark.jobs.archive_target import Target
from rmqkit.spark.jobs.typed_columns import META, TIMESTAMP
from rmqkit.spark.jobs.typed_files import NewFile
from rmqkit.spark.jobs.typed_schema import RowDecoder, RowSchema, read_schema
from rmqkit.spark.jobs.typed_target import Place, TypedTable, opened_table
from rmqkit.spark.planning import FORMAT
from rmqkit.spark.session import address, is_connect
from rmqkit.spark.streams import start_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Written", "write_table"]

MESSAGE_FIELDS = pa.schema(
    [
        ("topic", pa.string()), ("brokerName", pa.string()), ("queueId", pa.int32()), ("queueOffset", pa.int64()),
        ("msgId", pa.string()), ("keys", pa.string()), ("tags", pa.string()), ("storeTimestamp", TIMESTAMP),
    ]
)  # fmt: skip
_COLUMNS = [field.with_name(META + field.name) for field in MESSAGE_FIELDS]
_REJECTED = pa.schema([("body", pa.binary()), ("reason", pa.string()), *_COLUMNS])
_READ = ("body", *MESSAGE_FIELDS.names)
_OWN_OPTIONS = ("subscribe", "topic", "subscribepattern", "assign", "columns")
_LOOK_S = 0.5
COMPACTED_BATCHES = 60
"""A job that compacts merges small files after so many batches: by default once an hour."""


class Written(Struct):
    """The result of a job. ``batches``, ``rows`` and ``rejected`` count what this job added."""

    topic: str
    table: str
    rejected_table: str
    batches: int = 0
    rows: int = 0
    rejected: int = 0


# Long: the function declares and describes its options.
def write_table(
    spark: SparkSession,
    topic: str,
    schema: Path,
    target: str,
    checkpoint: str,
    options: Mapping[str, str] | None = None,
    *,
    message: str = "",
    is_once: bool = False,
    interval_s: int = 60,
    catalog: Mapping[str, str] | None = None,
    is_compacted: bool = False,
    stop: threading.Event | None = None,
) -> Written:
    """Append the messages of a topic to a table, until ``stop`` is set or the source fails.

    Args:
        schema: file with the schema of the bodies: a JSON Schema, ``.avsc`` of Avro, or ``.desc``, the descriptor of
            Protobuf. A new optional property adds a column.
        message: full name of the Protobuf message, if the descriptor's file has several.
        target: PATH or parquet://PATH, delta://PATH, or iceberg://CATALOG/NAMESPACE.TABLE.
        checkpoint: folder of the stream's progress. Table and checkpoint belong together.
        options: options of ``rocketmq``: nameServer, startingOffsets (default: earliest), maxOffsetsPerTrigger, ...
        is_once: whether to stop when all messages that exist at the start are written.
        interval_s: seconds from the start of a batch to the start of the next.
        catalog: properties of the Iceberg catalog.
        is_compacted: whether to merge the small files at the end, and after every `COMPACTED_BATCHES` batches.

    Raises:
        SettingsError: schema, target or an option is not valid, or they do not continue the table.
        StoreError: another job writes to the table, or a part of it is missing.
        DataLost: messages were deleted before they were read, or the topic was created again, unless
            failOnDataLoss=false.
    """
    if is_connect(spark):
        raise SettingsError("a typed table needs the driver in this process: use a master, not Spark Connect")
    place = Place.of(target)
    given = {"startingOffsets": "earliest", **(options or {})}
    for name in given:
        if name.lower() in _OWN_OPTIONS:
            raise SettingsError(f"option {name} is not for typed tables: the command sets it")
    source = {**given, "subscribe": topic, "columns": ",".join(_READ)}
    state = checkpoint if "://" in checkpoint else str(Path(checkpoint).absolute())
    with one_line(), _opened(spark, read_schema(schema, message), place, catalog or {}) as batches:
        batches.written = Written(topic, place.text, place.rejected.text)
        batches.is_compacted = is_compacted
        stream = spark.readStream.format(FORMAT).options(**source).load().writeStream.foreachBatch(batches.write)
        stream = stream.option("checkpointLocation", state)
        query = start_stream(
            stream.trigger(availableNow=True) if is_once else stream.trigger(processingTime=f"{interval_s} seconds")
        )
        try:
            while not query.awaitTermination(_LOOK_S):  # type: ignore[arg-type]
                if stop is not None and stop.is_set():
                    break
        finally:
            query.stop()
        batches.close()
        if is_compacted:
            batches.compact()
    return batches.written


@contextmanager
def _opened(spark: SparkSession, schema: RowSchema, place: Place, catalog: Mapping[str, str]) -> Iterator[_Batches]:
    """Open the table and the table of rejected rows."""
    if place.table_format != "iceberg":
        place = Place(place.table_format, address(spark, place.text))
    rows = pa.schema([*schema.arrow, *_COLUMNS])
    with (
        opened_table(place, rows, schema.columns, catalog) as table,
        opened_table(place.rejected, _REJECTED, None, catalog) as rejected,
    ):
        # The repetition of a batch must sort its messages as before, or a message would be in both tables, or in none.
        if table.number < rejected.number and rejected.schema != schema.digest:
            raise SettingsError(
                f"table {table.target.root}: its last batch is only in the table of rejected rows: run the job once"
                " with the former schema, then change it"
            )
        batches = _Batches(schema, table, rejected)
        try:
            yield batches
        finally:
            batches.close()


class _Batches:
    """The function for ``foreachBatch``, which Spark calls in a thread of its own."""

    def __init__(self, schema: RowSchema, table: TypedTable, rejected: TypedTable) -> None:
        self.written = Written("", "", "")
        self.is_compacted = False
        self._schema = schema
        self._tables = (rejected, table)
        self._lock = threading.Lock()
        self._is_closed = False

    def write(self, messages: DataFrame, batch: int) -> None:
        """Append a batch to both tables. Raises: as `TypedTable.check`."""
        query = messages.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "Spark sets the id of the query in the thread of the batch"
        # A query that was stopped does not wait for this thread, but the tables are locked only until `close`.
        with self._lock:
            if self._is_closed:
                raise StoreError(f"batch {batch} was not written: the job was stopped; start it again")
            self.append(messages, batch + 1, query)

    def append(self, messages: DataFrame, number: int, query: str) -> None:
        """Write the files of a batch in tasks, and publish them."""
        for table in self._tables:
            table.check(number, query)
        if number <= min(table.number for table in self._tables):
            return
        plan = _Plan(self._schema, number, tuple(table.target for table in self._tables))
        parts = messages.select(*_READ).mapInArrow(partial(_write_rows, plan), "part int, file binary").collect()
        counts = [0, 0]
        for i, table in enumerate(self._tables):
            files = [msgspec.json.decode(part["file"], type=ArchivedFile) for part in parts if part["part"] == i]
            if table.publish(number, query, files, self._schema):
                counts[i] = sum(file.rows for file in files)
        self.written.batches += 1
        self.written.rejected += counts[0]
        self.written.rows += counts[1]
        if self.is_compacted and number % COMPACTED_BATCHES == 0:
            self.compact()

    def close(self) -> None:
        """Wait until the running batch is complete, and refuse later batches."""
        with self._lock:
            self._is_closed = True

    def compact(self) -> None:
        """Merge the small files of both tables."""
        for table in self._tables:
            table.compact()


# ---------------------------------------------------------------- inside a task


class _Plan(Struct, frozen=True):
    """The facts about a batch that every task needs. ``targets`` are those of the rejected rows, and of the rows."""

    schema: RowSchema
    number: int
    targets: tuple[Target, ...]


def _write_rows(plan: _Plan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Decode the messages of a partition, and write them to a file of each table. Yield the files."""
    decoder = RowDecoder(plan.schema)
    schemas = (_REJECTED, pa.schema([*plan.schema.arrow, *_COLUMNS]))
    files = [NewFile(target, plan.number, schema) for target, schema in zip(plan.targets, schemas, strict=True)]
    for batch in batches:
        decoded = decoder.decode(batch["body"].to_pylist())
        fits = pa.array(decoded.fits, pa.bool_())
        good, bad = batch.filter(fits), batch.filter(pc.invert(fits))
        for file, schema, rows, columns in (
            (files[0], schemas[0], bad, [bad["body"], pa.array(decoded.reasons, pa.string())]),
            (files[1], schemas[1], good, decoded.columns),
        ):
            fields = [rows[field.name].cast(field.type) for field in MESSAGE_FIELDS]
            file.add(pa.record_batch([*columns, *fields], schema=schema))
    found = [(i, msgspec.json.encode(one)) for i, file in enumerate(files) for one in file.close()]
    yield pa.record_batch(
        {"part": pa.array([i for i, _ in found], pa.int32()), "file": pa.array([one for _, one in found], pa.binary())}
    )
