"""The columns of Spark's Kafka connector, made of messages and made into messages (``columnNames=kafka``).

==============  ======================================  ==============================  ================================
column          type                                    read                            written
==============  ======================================  ==============================  ================================
key             binary                                  ``keys``, else the sharding     ``keys`` and the sharding key,
                                                        key, else null                  which chooses the queue
value           binary                                  the body                        the body, never null or empty
topic           string                                  the topic                       the topic, unless the option
                                                                                        ``topic`` is set
partition       int                                     the number of the queue         the queue with this number
offset          bigint                                  the offset in the queue         ignored
timestamp       timestamp                               the store time                  ignored
timestampType   int                                     1 (``LogAppendTime``)           ignored
headers         array<struct<key:string,value:binary>>  properties of the application,  properties
                                                        null if there are none
==============  ======================================  ==============================  ================================

``key``, ``value`` and values of ``headers`` are UTF-8 texts in messages, except for the body. Rows may have ``key`` and
``value`` as strings, too.

**Numbers of queues.** RocketMQ numbers the queues of each broker from 0. `rmqkit.spark.broker_pool.numbered` numbers
the queues of all brokers of a topic from 0, in the order of broker names, then of queue ids. A number changes if the
topic gets a queue that is earlier in this order. Therefore the columns ``brokerName`` and ``queueId``, not
``partition``, identify a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rmqkit.arrow.options import IncludeProperties
from rmqkit.arrow.schema import MESSAGE_COLUMNS, Column, message_columns
from rmqkit.errors import MessageIllegal
from rmqkit.protocol.properties import RESERVED_NAMES, SHARDING_KEY
from rmqkit.store.kernels.columns import property_value

HEADERS = "array<struct<key:string,value:binary>>"
LOG_APPEND_TIME = 1
"""Kafka's number for timestamps that the broker sets. Its other number is 0, for times of producers."""

KAFKA_COLUMNS: tuple[Column, ...] = (
    Column("key", "binary", None),
    Column("value", "binary", None),
    Column("topic", "string", None),
    Column("partition", "int", None),
    Column("offset", "bigint", None),
    Column("timestamp", "timestamp", None),
    Column("timestampType", "int", None),
    Column("headers", HEADERS, None),
)

KAFKA_SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": (HEADERS,),
    "offset": ("bigint",),
    "timestamp": ("timestamp",),
    "timestampType": ("int",),
    # Kafka has no such columns. The sink accepts them as it does with its own names.
    "tags": ("string",),
    "flag": ("int",),
    "delayLevel": ("int",),
    "deliverTimeMs": ("bigint",),
    "rowKey": ("string",),
}
"""The columns of rows to write, and their types."""

_SHARDING = Column("shardingKey", "string", property_value(SHARDING_KEY))
_OWN = {column.name: column for column in MESSAGE_COLUMNS}
_SOURCES: dict[str, tuple[Column, ...]] = {
    "key": (_OWN["keys"], _SHARDING),
    "value": (_OWN["body"],),
    "topic": (_OWN["topic"],),
    "partition": (),
    "offset": (_OWN["queueOffset"],),
    "timestamp": (_OWN["storeTimestamp"],),
    "timestampType": (),
    "headers": (_OWN["properties"],),
}
"""The columns of messages from which each column is made."""
_RENAMED = {"value": "body", "partition": "queueId"}
_IGNORED = ("offset", "timestamp", "timestampType")
_HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


# ---------------------------------------------------------------- read


def kafka_columns(properties: IncludeProperties) -> tuple[list[Column], list[Column]]:
    """List Kafka's columns, and the columns of RocketMQ that a read may have besides them."""
    kafka = [column for column in KAFKA_COLUMNS if column.name != "headers" or properties is not IncludeProperties.NONE]
    return kafka, [column for column in message_columns(properties) if column.name not in _SOURCES]


def sources(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Return the columns of messages that `to_kafka` needs to make some columns."""
    # At least one column: a batch without columns has no number of rows.
    found = {_OWN["queueOffset"].name: _OWN["queueOffset"]}
    for column in columns:
        found |= {one.name: one for one in _SOURCES.get(column.name, (column,))}
    return tuple(found.values())


def to_kafka(batch: pa.RecordBatch, names: Sequence[str], number: int) -> pa.RecordBatch:
    """Make the named columns of messages of the queue with a number."""
    arrays = [_MADE[name](batch, number) if name in _MADE else batch.column(name) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _key(batch: pa.RecordBatch, _: int) -> pa.Array:
    return pc.coalesce(batch.column("keys"), batch.column(_SHARDING.name)).cast(pa.binary())


def _headers(batch: pa.RecordBatch, _: int) -> pa.Array:
    """Make headers of the properties that belong to the application."""
    properties = batch.column("properties")
    offsets = properties.offsets.to_numpy()
    low, high = int(offsets[0]), int(offsets[-1])
    names, values = properties.keys.slice(low, high - low), properties.items.slice(low, high - low)
    is_own = pc.invert(pc.is_in(names, value_set=_reserved()))
    before = np.concatenate([[0], np.cumsum(is_own.to_numpy(zero_copy_only=False))])
    ends = before[offsets - low].astype("i4")
    pairs = [names.filter(is_own), values.filter(is_own).cast(pa.binary())]
    structs = pa.StructArray.from_arrays(pairs, fields=list(_HEADER))
    return pa.ListArray.from_arrays(pa.array(ends), structs, type=pa.list_(_HEADER), mask=pa.array(np.diff(ends) == 0))


@functools.cache
def _reserved() -> pa.Array:
    # Made on first use: the first call of `pa.array` imports pandas, which takes longer than the plan of a read.
    return pa.array(sorted(RESERVED_NAMES), pa.string())


def _same(value: int | None) -> Callable[[pa.RecordBatch, int], pa.Array]:
    """Return a function that makes a column of one number, by default the number of the queue."""
    return lambda batch, number: pa.repeat(pa.scalar(number if value is None else value, pa.int32()), batch.num_rows)


_MADE: dict[str, Callable[[pa.RecordBatch, int], pa.Array]] = {
    "key": _key,
    "value": lambda batch, _: batch.column("body"),
    "partition": _same(None),
    "offset": lambda batch, _: batch.column("queueOffset"),
    "timestamp": lambda batch, _: batch.column("storeTimestamp"),
    "timestampType": _same(LOG_APPEND_TIME),
    "headers": _headers,
}


# ---------------------------------------------------------------- write


def from_kafka(batch: pa.RecordBatch, first: int, partition: int) -> pa.RecordBatch:
    """Make the columns of the sink from Kafka's columns. The column ``queueId`` has numbers of `numbered`. The first
    row has the number ``first`` in its task.
    Raises MessageIllegal: a row cannot be a message; the text has its partition and number."""
    columns: dict[str, Any] = {}
    for name in batch.schema.names:
        values = batch.column(name)
        rows = _Rows(name, first, partition)
        if name == "key":
            columns["keys"] = columns["shardingKey"] = rows.texts(values)
        elif name == "headers":
            columns["properties"] = rows.properties(values)
        elif name == "value":
            columns["body"] = rows.filled(values)
        elif name not in _IGNORED:
            columns[_RENAMED.get(name, name)] = values
    return pa.RecordBatch.from_pydict(columns)


class _Rows:
    """A column of the rows of a task, for errors with the numbers of rows."""

    def __init__(self, name: str, first: int, partition: int) -> None:
        self._name, self._first, self._partition = name, first, partition

    def filled(self, values: pa.Array) -> pa.Array:
        """Return values of which none is null or empty."""
        is_empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
        if (row := pc.index(is_empty, True).as_py()) >= 0:
            raise self._error(row, f"no {self._name}: RocketMQ has no empty bodies and no tombstones, filter it out")
        return values

    def texts(self, values: pa.Array) -> pa.Array:
        """Return texts, null in place of empty texts."""
        decoded = [self._text(row, value, self._name) or None for row, value in enumerate(values.to_pylist())]
        return pa.array(decoded, pa.string())

    def properties(self, values: pa.Array) -> pa.Array:
        """Return the headers of each row as a map."""
        maps = [dict(self._pairs(row, headers or ())) for row, headers in enumerate(values.to_pylist())]
        return pa.array([list(pairs.items()) for pairs in maps], pa.map_(pa.string(), pa.string()))

    def _pairs(self, row: int, headers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str | None]]:
        seen: set[str] = set()
        for header in headers:
            name = header["key"]
            if not name or name in seen:
                wrong = f"the header {name!r} twice" if name else "a header without a key"
                raise self._error(row, f"{wrong}: properties have one value for each name, merge or drop headers")
            seen.add(name)
            yield name, self._text(row, header["value"], f"header {name!r}")

    def _text(self, row: int, value: bytes | str | None, name: str) -> str | None:
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise self._error(row, f"a {name} that is no UTF-8, {value!r:.40}: encode it, as with base64()") from None

    def _error(self, row: int, text: str) -> MessageIllegal:
        return MessageIllegal(f"row {self._first + row} of partition {self._partition} has {text}")
