"""Messages created from the rows of an Arrow batch (`messages`), and the check of the schema (`check_columns`). With
``columnNames=kafka``, `rmqkit.spark.kafka_columns` makes these columns of Kafka's.

==============  ==========================  =======================================================================
column          type                        message field
==============  ==========================  =======================================================================
body            binary, string              the body; the only required column, never null or empty
topic           string                      the topic; the option ``topic`` takes precedence, as in Spark's Kafka sink
tags            string                      TAGS
keys            string, array<string>       KEYS; several are separated by blanks
properties      map<string,string>          properties of the application; a row read from a topic also has RocketMQ's
                                            properties, which the option ``reservedProperties`` can drop
flag            int                         the flag
delayLevel      int                         DELAY: one of the broker's delay levels
deliverTimeMs   bigint                      TIMER_DELIVER_MS: ms since the epoch
shardingKey     string                      __SHARDINGKEY; rows with equal keys are sent to one queue, in order
queueId         int                         the queue, on the first broker (by name) that has this queue
rowKey          string                      last part of the row's key, instead of partition and row number
==============  ==========================  =======================================================================

**The row's key** is ``sinkId/batch/partition/row``, or ``sinkId/batch/rowKey``. It is sent as UNIQ_KEY: every client
shows it as ``msgId``, and the index contains it. A row that is sent again has the same key. Row numbers identify rows
only if each run gives each partition the same rows in the same order (no shuffle without a sort before the sink).
Otherwise add a column ``rowKey``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from msgspec import Struct
from pyspark.sql.types import StructType

from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.errors import MessageIllegal, SettingsError
from rmqkit.protocol.properties import RESERVED_NAMES, copied_properties
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.spark.broker_pool import numbered
from rmqkit.spark.kafka_columns import KAFKA_SINK_COLUMNS

ROW_KEY_CHARS_MAX = 255

SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "body": ("binary", "string"),
    "topic": ("string",),
    "tags": ("string",),
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "flag": ("int",),
    "delayLevel": ("int",),
    "deliverTimeMs": ("bigint",),
    "shardingKey": ("string",),
    "queueId": ("int",),
    "rowKey": ("string",),
}
DELAYS = ("delayLevel", "deliverTimeMs")


class RowKeys(Struct, frozen=True):
    """The keys of the rows of a task."""

    sink_id: str
    batch_id: int
    partition: int

    @property
    def prefix(self) -> str:
        """The prefix of all keys in the batch."""
        return f"{self.sink_id}/{self.batch_id}/"

    def key(self, number: int, row_key: str | None) -> str:
        """Return the key of a row.
        Raises MessageIllegal: ``row_key`` is empty, too long, or has characters that are not printable."""
        if row_key is None:
            return f"{self.prefix}{self.partition}/{number}"
        if not 0 < len(row_key) <= ROW_KEY_CHARS_MAX or not row_key.isprintable():
            raise MessageIllegal(f"rowKey {row_key!r} must have 1 to {ROW_KEY_CHARS_MAX} printable characters")
        return self.prefix + row_key


def check_columns(schema: StructType, topic: str, *, may_delay: bool, source: str, is_kafka: bool = False) -> None:
    """Check the columns of rows to write, which have Kafka's names if ``is_kafka`` is set. Raises SettingsError: a
    column is unknown (the text suggests a similar name), has another type, or is missing."""
    columns = KAFKA_SINK_COLUMNS if is_kafka else SINK_COLUMNS
    for field in schema.fields:
        wanted = columns.get(field.name)
        if wanted is None:
            near = difflib.get_close_matches(field.name, columns, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(columns)}"
            raise SettingsError(f"{source}: there is no column {field.name!r} in the sink: {hint}")
        found = field.dataType.simpleString()
        if found not in wanted:
            raise SettingsError(f"{source}: column {field.name} must be {' or '.join(wanted)}, it is {found}: cast it")
        if field.name in DELAYS and not may_delay:
            raise SettingsError(
                f"{source}: column {field.name} cannot be sent with deliveryGuarantee=transactional, whose rows count"
                " as stored once consumers can see them: leave it out, or use at-least-once"
            )
    body = "value" if is_kafka else "body"
    for name in (body,) if topic else (body, "topic"):
        if name not in schema.names:
            instead = ", or set option topic" if name == "topic" else ""
            raise SettingsError(f"{source}: the sink needs a column {name}: add it{instead}")


def messages(
    batch: pa.RecordBatch, first: int, topic: str, keys: RowKeys, *, drops_reserved: bool = False
) -> Iterator[PlacedMessage]:
    """Create a message from each row in a batch of a task. The first row has the number ``first`` in the task. With
    ``drops_reserved``, RocketMQ's own properties are dropped.
    Raises MessageIllegal: a row cannot be sent; the text has its partition and number."""
    # Convert whole columns to Python values. Converting row by row takes several times as long.
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    empty: Sequence[None] = (None,) * batch.num_rows
    names = [name for name in SINK_COLUMNS if name != "body"]
    rows = zip(columns["body"], *(columns.get(name, empty) for name in names), strict=True)
    for number, (
        body,
        own_topic,
        tags,
        words,
        properties,
        flag,
        level,
        at_ms,
        sharding_key,
        queue_id,
        row_key,
    ) in enumerate(rows, first):
        where = topic or own_topic  # as in Kafka's sink: rows from another topic have its name in the column
        if not body or not where:
            missing = "topic" if body else "body"
            raise MessageIllegal(f"row {number} of partition {keys.partition} has no {missing}: filter it out before")
        own = {name: value for name, value in properties or () if value is not None}
        if drops_reserved:
            own = copied_properties(own)
        elif reserved := sorted(RESERVED_NAMES.intersection(own)):
            raise MessageIllegal(
                f"row {number} of partition {keys.partition} has RocketMQ's own properties {', '.join(reserved)}:"
                " set option reservedProperties=drop, or leave them out"
            )
        yield PlacedMessage(
            topic=where,
            body=body.encode() if isinstance(body, str) else body,
            tags=tags,
            keys=words.split() if isinstance(words, str) else [word for word in words or () if word],
            properties=own,
            flag=flag or 0,
            delay_level=level or 0,
            deliver_at=None if at_ms is None else at_ms / 1000,
            sharding_key=sharding_key,
            queue_id=queue_id,
            msg_id=keys.key(number, row_key),
        )


def place(rows: Iterable[PlacedMessage], queues_of: Callable[[str], Iterable[MessageQueue]]) -> None:
    """Replace the queue id of rows from Kafka's columns, which is a number of `numbered`, by the broker and the id of
    the queue. ``queues_of`` returns the writable queues of a topic.
    Raises MessageIllegal: the topic has no queue with this number."""
    known: dict[str, list[MessageQueue]] = {}
    for row in rows:
        if (number := row.queue_id) is None:
            continue
        if row.topic not in known:
            known[row.topic] = list(numbered(queues_of(row.topic)))
        queues = known[row.topic]
        if not 0 <= number < len(queues):
            there = f"0 to {len(queues) - 1}" if queues else "none"
            raise MessageIllegal(f"topic {row.topic} has no partition {number} to send to: it has {there}")
        row.broker_name, row.queue_id = queues[number].broker_name, queues[number].queue_id
