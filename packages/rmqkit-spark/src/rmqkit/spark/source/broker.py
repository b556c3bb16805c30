"""The readers of the format ``rocketmq``: live topics as a table (`BrokerReader`) or stream (`BrokerStreamReader`).

::

    spark.read.format("rocketmq").option("nameServer", "host:9876").option("subscribe", "orders").load()
    spark.readStream.format("rocketmq").option("subscribe", "orders").option("maxOffsetsPerTrigger", 100000).load()

=======================  =============================================================================================
class                    runs in
=======================  =============================================================================================
`BrokerReader`           the driver: computes the offsets when Spark plans the batch
`BrokerStreamReader`     one Python process on the driver's machine, which keeps its connections
``read`` of both         the executors' Python workers: pull a range of a queue, and decode it like store files
=======================  =============================================================================================

`rmqkit.spark.planning` describes the options, offsets and checkpoints. With the package's jar Spark does not use these
readers: ``jvm/LiveTable.java`` calls the same plans, and ``jvm/Pulls.java`` pulls and decodes the ranges in the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from rmqkit.arrow.reader import ReadPlan, decode_pulled
from rmqkit.arrow.schema import Column, choose, message_columns
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import Range, broker_pool, offsets_in
from rmqkit.spark.kafka_columns import kafka_columns, sources, to_kafka
from rmqkit.spark.options import ColumnNames, LiveOptions, words
from rmqkit.spark.planning import FORMAT, NO_LIMIT, Part, Planner, StreamPlanner, live_options, tags_of
from rmqkit.spark.schema import check_types


class QueuePartition(InputPartition):
    """A range of a queue that a task reads, and the number of the queue in the column ``partition``."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.value)
        self.number = part.number
        self._plain = part.plain()

    def __getstate__(self) -> dict[str, Any]:
        """Return plain values."""
        return self._plain

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the partition in a Python worker."""
        pull = state["pull"]
        queue = MessageQueue(pull["topic"], pull["brokerName"], pull["queueId"])
        self.value = Range(queue, state["low"], state["high"], pull["logOffsetMax"])
        self.number, self._plain = pull["partition"], state


class _Reading:
    """The common part of batch and stream readers."""

    def __init__(self, options: LiveOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = list(names)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range of a queue; runs in a task."""
        part = partition.value
        if not isinstance(part, Range):  # an empty batch has one empty partition
            return
        assert part.low < part.high, "a task has messages to read"
        options = self._options
        columns = tuple(read_columns(options, self._names))
        number = partition.number if isinstance(partition, QueuePartition) else 0
        is_kafka = options.column_names is ColumnNames.KAFKA
        plan = ReadPlan(
            columns=sources(columns) if is_kafka else columns,
            decompress=options.decompress,
            unwrap=options.unwrap,
            broker_name=part.queue.broker_name,
            tags=tags_of(options, part.queue.topic),
            lite_topics=frozenset(words(options.lite_topics)),
            lite_prefix=options.lite_prefix,
            batch_rows=options.batch_rows,
        )
        names = [column.name for column in columns]
        for body in broker_pool(options).bodies(part):
            for batch in decode_pulled(body, plan, *offsets_in(part)):
                yield to_kafka(batch, names, number) if is_kafka else batch


class BrokerReader(_Reading, DataSourceReader):
    """Reader of one batch, whose offsets are computed when Spark plans it, on the driver."""

    def partitions(self) -> Sequence[InputPartition]:
        """Plan ranges of the current messages of the queues."""
        return _partitions(Planner(self._options).batch()) or [InputPartition(None)]


class BrokerStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader that Spark calls between the batches of a stream, in a Python process on the driver's machine."""

    def __init__(self, options: LiveOptions, names: Sequence[str], clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(options, names)
        self.planner = StreamPlanner(options, clock)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the start of a new query."""
        return self.planner.initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return the limit of the options."""
        rows_max = self.planner.rows_max()
        return ReadMaxRows(rows_max) if rows_max else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Fix the end of the query."""
        self.planner.end_now()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next batch."""
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else NO_LIMIT
        return self.planner.latest_offset(start, 0 if isinstance(limit, ReadAllAvailable) else rows_max)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the current ends of the queues."""
        return self.planner.known_latest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan ranges from ``start`` to ``end``."""
        return _partitions(self.planner.parts(start, end))

    def commit(self, end: dict[str, Any]) -> None:
        """Save the offsets of a completed batch for the group of ``commitOffsetsToGroup``."""
        self.planner.commit(end)

    def stop(self) -> None:
        """Do nothing: the connections stay open for the next query of this process."""


def _partitions(parts: Iterable[Part]) -> list[InputPartition]:
    return [QueuePartition(part) for part in parts]


def checked_names(given: Mapping[str, str], schema: StructType) -> list[str]:
    """List the names of a schema's columns. Raises SettingsError: a column is unknown, or has another type."""
    check_types(read_columns(live_options(given), schema.names), schema, FORMAT)
    return list(schema.names)


def read_columns(options: LiveOptions, names: Sequence[str]) -> list[Column]:
    columns, more = message_columns(options.include_properties), list[Column]()
    if options.column_names is ColumnNames.KAFKA:
        columns, more = kafka_columns(options.include_properties)
    wanted = list(names) or words(options.columns)
    return choose([*columns, *more], wanted, FORMAT) if wanted else columns
