"""The writers of the format ``rocketmq``, which send the rows of batches and streams to topics.

::

    df.write.format("rocketmq").option("nameServer", "host:9876").option("topic", "orders").mode("append").save()
    df.writeStream.format("rocketmq").option("topic", "orders").option("deliveryGuarantee", "transactional")
      .option("checkpointLocation", path).start()

==================  ===================================================================================================
deliveryGuarantee   effect
==================  ===================================================================================================
at-least-once       tasks send their rows; a repeated task sends the same keys (`rmqkit.spark.sink.rows`) again, so
                    that readers can drop duplicates (``dropDuplicates(["msgId"])``)
transactional       tasks stage their rows as half messages, and the driver commits them: each row becomes visible once,
                    but no row of a failed batch (`rmqkit.spark.sink.exactly_once`). Rows become visible one by one
==================  ===================================================================================================

``write`` runs in the executors' Python workers. ``commit`` and ``abort`` run in a process on the driver's machine. A
batch that was already committed, or has the ``sinkId`` and ``batchId`` of a committed batch, adds no rows. Thus
``foreachBatch`` can write exactly once, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.client.producer.transaction import TransactionState
from rmqkit.errors import SettingsError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.spark.kafka_columns import from_kafka
from rmqkit.spark.options import ColumnNames, DeliveryGuarantee, ReservedProperties, SinkOptions, parse_options
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch, Half, pack_halves
from rmqkit.spark.sink.producer import SinkProducer, pace
from rmqkit.spark.sink.rows import RowKeys, check_columns, messages, place

_SOURCE = "rocketmq"
_SPARKS_OWN = ("path", "checkpointlocation", "queryname")


@dataclass
class Staged(WriterCommitMessage):
    """The result of a task: the number of rows that the task sent, or the half messages to commit."""

    sink_id: str
    row_count: int
    halves: list[bytes]


class _Writing:
    """The common part of batch and stream writers. It sends or stages rows, and commits or rolls back staged rows."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def stage(self, batches: Iterator[pa.RecordBatch], keys: RowKeys) -> Staged:
        if self._options.guarantee is DeliveryGuarantee.TRANSACTIONAL:
            return self._stage(batches, keys)
        row_count = 0
        for rows in self._rows(batches, keys):
            _producer(self._options).send(rows)
            row_count += len(rows)
        return Staged(keys.sink_id, row_count, [])

    def _stage(self, batches: Iterator[pa.RecordBatch], keys: RowKeys) -> Staged:
        batch = Batch(keys.sink_id, keys.batch_id)
        sink = exactly_once(self._options)
        now = sink.progress(batch)
        staged: list[Half] = []
        try:
            for rows in self._rows(batches, keys):
                # If the batch is decided, stage only rows with half messages that the brokers have deleted.
                if now.is_decided:
                    rows = [row for row in rows if (row.msg_id or "").removeprefix(batch.prefix) in now.gone]
                sink.producer.stage(rows, batch, staged)
        # Handle every error that ends the task: no commit message names the half messages of the task, so only the task
        # can roll them back.
        except BaseException:
            sink.roll_back(staged, batch)
            raise
        return Staged(keys.sink_id, len(staged), pack_halves(staged))

    def _rows(self, batches: Iterator[pa.RecordBatch], keys: RowKeys) -> Iterator[list[PlacedMessage]]:
        """Yield the messages of a task in lists, limited to ``maxRowsPerSecond``."""
        limit = self._options.rows_per_s
        number = 0
        drops_reserved = self._options.reserved_properties is ReservedProperties.DROP
        is_kafka = self._options.column_names is ColumnNames.KAFKA
        for batch in batches:
            for low in range(0, batch.num_rows, limit or max(1, batch.num_rows)):
                part = batch.slice(low, limit or None)
                if is_kafka:
                    part = from_kafka(part, number, keys.partition)
                rows = list(messages(part, number, self._options.topic, keys, drops_reserved=drops_reserved))
                number += len(rows)
                if is_kafka:
                    place(rows, self._sender().queues)
                with pace(len(rows), limit):
                    yield rows

    def _sender(self) -> SinkProducer:
        is_transactional = self._options.guarantee is DeliveryGuarantee.TRANSACTIONAL
        return exactly_once(self._options).producer if is_transactional else _producer(self._options)

    def _commit(self, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        done = [message for message in messages if isinstance(message, Staged)]
        assert len({message.sink_id for message in done}) <= 1, "the tasks of a batch have the same sink id"
        if done and self._options.guarantee is DeliveryGuarantee.TRANSACTIONAL:
            packed = (piece for message in done for piece in message.halves)
            exactly_once(self._options).commit(Batch(done[0].sink_id, batch_id), packed)

    def _abort(self, batch_id: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        done = [message for message in messages if isinstance(message, Staged)]
        if done and self._options.guarantee is DeliveryGuarantee.TRANSACTIONAL:
            packed = (piece for message in done for piece in message.halves)
            exactly_once(self._options).abort(Batch(done[0].sink_id, batch_id), packed)


class BatchWriter(_Writing, DataSourceArrowWriter):
    """The writer of one data frame. The keys of its rows contain ``sinkId`` (by default a new id) and ``batchId``."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        # Create it once, on the driver, and pickle it with the writer: all tasks, and repeated tasks, must create the
        # same keys.
        self._sink_id = options.sink_id or uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Send or stage the rows of a task."""
        return self.stage(iterator, RowKeys(self._sink_id, self._options.batch_id, _context().partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the rows of all tasks visible."""
        self._commit(self._options.batch_id, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Roll the staged rows back, because a task or the commit failed."""
        self._abort(self._options.batch_id, messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """The writer of the micro-batches of a stream. The keys of its rows contain ``sinkId`` or the id of the query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Send or stage the rows of a task."""
        context = _context()
        # Spark passes both ids to a task only as properties of its job. The query stores its id in the checkpoint, so a
        # batch that runs again after a restart creates the same keys.
        sink_id = self._options.sink_id or str(context.getLocalProperty("sql.streaming.queryId"))
        batch_id = int(str(context.getLocalProperty("streaming.sql.batchId")))
        return self.stage(iterator, RowKeys(sink_id, batch_id, context.partitionId()))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Make the rows of a micro-batch visible. Spark calls this again if it did not record the end of the
        micro-batch."""
        self._commit(batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Roll the staged rows back, because a task or the commit failed."""
        self._abort(batchId, messages)


def sink_options(given: Mapping[str, str], schema: StructType, *, overwrite: bool) -> SinkOptions:
    """Parse the options of a write.
    Raises SettingsError: an option is unknown or not valid, or the columns do not match."""
    known = {key: text for key, text in given.items() if key.lower() not in _SPARKS_OWN}
    options = parse_options(SinkOptions, known, _SOURCE)
    if overwrite:
        raise SettingsError(f"{_SOURCE}: a topic cannot be overwritten: use mode append")
    if "/" in options.sink_id or not options.sink_id.isprintable() or " " in options.sink_id:
        raise SettingsError(f"{_SOURCE}: sinkId {options.sink_id!r} must have neither slashes nor blanks")
    may_delay = options.guarantee is DeliveryGuarantee.AT_LEAST_ONCE
    is_kafka = options.column_names is ColumnNames.KAFKA
    check_columns(schema, options.topic, may_delay=may_delay, source=_SOURCE, is_kafka=is_kafka)
    return options


_producers: dict[SinkOptions, SinkProducer] = {}
open_sinks: dict[SinkOptions, ExactlyOnce] = {}
"""The transactional sinks of this process, by their options."""


def exactly_once(options: SinkOptions) -> ExactlyOnce:
    """Return the transactional sink of this process for some options. The first call creates the sink."""
    known = open_sinks.get(options)
    if known is None or known.producer.is_from_parent:
        known = open_sinks[options] = ExactlyOnce(options)
    return known


def _producer(options: SinkOptions) -> SinkProducer:
    known = _producers.get(options)
    if known is None or known.is_from_parent:
        known = _producers[options] = SinkProducer(options, _unknown)
        known.start()
    return known


def _unknown(message: ReceivedMessage) -> TransactionState:
    """Answer UNKNOWN: a check-back to a sink without transactions is about the half message of another process."""
    return TransactionState.UNKNOWN


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "write runs in tasks"
    return context
