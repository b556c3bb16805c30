"""Records as rows of a table, and rows as records again.

The columns are those of every reader of messages (`rmqkit.store.kernels.schema`). Two columns are added, so that the
rows give back the records byte for byte:

==================  ===================================================================================================
propertiesEnd       whether the property string of the record ends with the separator 0x02
storedRecord        the whole record where the other columns do not give it back: compressed bodies, repeated
                    properties, text that is not UTF-8, times that a timestamp cannot hold; otherwise null
==================  ===================================================================================================

`rows_of` makes the records again from its own rows, and compares: no rule decides which records need ``storedRecord``.
A row is one stored record. The members of an inner batch are one row, because a queue stores them as one record. Bodies
are decompressed, unless the bodies of one call would need more than 32 MiB. Source: store.md §3.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rmqkit.protocol.record import BORN_HOST_V6, MAGIC_V1, MAGIC_V2, STORE_HOST_V6, layout_of, pack_host
from rmqkit.store.kernels.batch import MessageBatch, message_batches
from rmqkit.store.kernels.gather import gather
from rmqkit.store.kernels.schema import MESSAGE_COLUMNS, arrow_schema
from rmqkit.store.log import scan

__all__ = ["RECORD_COLUMNS", "SCHEMA", "records_of", "rows_of"]

SCHEMA = arrow_schema(MESSAGE_COLUMNS).append(pa.field("propertiesEnd", pa.bool_()))
SCHEMA = SCHEMA.append(pa.field("storedRecord", pa.binary()))
_DERIVED = {"brokerName", "storeSize", "msgId", "keys", "tags", "lite_topic"}
RECORD_COLUMNS = [name for name in SCHEMA.names if name not in _DERIVED]
"""The columns from which records are made."""

_NUMBERS = {
    "body_crc": "bodyCrc",
    "queue_id": "queueId",
    "flag": "flag",
    "queue_offset": "queueOffset",
    "physical_offset": "commitLogOffset",
    "sys_flag": "sysFlag",
    "born_timestamp": "bornTimestamp",
    "store_timestamp": "storeTimestamp",
    "reconsume_times": "reconsumeTimes",
    "prepared_transaction_offset": "preparedTransactionOffset",
}
"""Field of a record's head → column."""
_HOSTS = {"born_host": "bornHost", "store_host": "storeHost"}
_TIMES = {"bornTimestamp", "storeTimestamp"}
_HOST_BITS = BORN_HOST_V6 | STORE_HOST_V6
_TOPIC_BYTES_MAX_V1 = 127
_NOTHING = pa.scalar(b"", pa.binary())


# ---------------------------------------------------------------- records to rows


def rows_of(content: bytes, broker_name: str) -> pa.Table:
    """Return a row for each of some contiguous records. ``broker_name``: the column of this name; null if empty.

    Raises:
        BodyError: the content does not consist of records.
    """
    records = scan.pulled(content)
    batch = next(message_batches(records, unwrapped=False, broker_name=broker_name))
    if batch.record_count < len(records):
        batch = next(message_batches(records, decompressed=False, unwrapped=False, broker_name=broker_name))
    arrays = [column.kernel(batch) for column in MESSAGE_COLUMNS if column.kernel is not None]
    table = pa.Table.from_arrays([*arrays, _ends(batch), pa.nulls(len(batch), pa.binary())], schema=SCHEMA)
    return table.set_column(len(arrays) + 1, SCHEMA.field("storedRecord"), _different(records, table))


def _ends(batch: MessageBatch) -> pa.Array:
    """Return whether the property string of each record ends with a separator."""
    records = batch.records
    last = np.frombuffer(records.buffer, "u1")[records.properties_at + records.properties_bytes - 1]
    return pa.array((last == 2) & (records.properties_bytes > 0))


def _different(records: scan.Records, table: pa.Table) -> pa.Array:
    """Return each record that differs from the record that its row gives back, and null for the others."""
    rebuilt = records_of(table)
    data = rebuilt.buffers()[2]
    if data is not None and data.equals(pa.py_buffer(records.buffer)) and not rebuilt.null_count:
        bounds = np.frombuffer(rebuilt.buffers()[1], "i4")[: len(records)]
        if (bounds == records.positions).all():
            return pa.nulls(len(records), pa.binary())
    stored = gather(records.buffer, records.positions, records.sizes)
    is_same = pc.fill_null(pc.equal(rebuilt, stored), fill_value=False)
    return pc.if_else(is_same, pa.scalar(None, pa.binary()), stored)


# ---------------------------------------------------------------- rows to records


def records_of(rows: pa.Table) -> pa.Array:
    """Return the record of each row. ``rows`` has at least `RECORD_COLUMNS`."""
    columns = {name: _array(rows[name]) for name in RECORD_COLUMNS}
    stored = columns["storedRecord"]
    if len(stored) and not stored.null_count:
        return stored
    bodies, topics = columns["body"], columns["topic"].dictionary_encode()
    names = [name.encode() for name in topics.dictionary.to_pylist()]
    topic_pieces = pa.array([_topic_piece(name) for name in names], pa.binary()).take(topics.indices)
    texts, end = _property_strings(columns["properties"]), _separators(columns["propertiesEnd"])
    end_bytes = len(end.as_py()) if isinstance(end, pa.Scalar) else _lengths(end)
    properties_bytes = _lengths(texts) + end_bytes
    is_v2 = np.array([len(name) > _TOPIC_BYTES_MAX_V1 for name in names], bool)[topics.indices.to_numpy()]
    tail_bytes = _lengths(bodies) + _lengths(topic_pieces) + properties_bytes + 2
    heads = _heads(columns, _lengths(bodies), tail_bytes, np.where(is_v2, MAGIC_V2, MAGIC_V1))
    sizes = _fixed(properties_bytes.astype(">u2").view("V2"))
    made = pc.binary_join_element_wise(heads, bodies, topic_pieces, sizes, texts, end, _NOTHING)
    return made if stored.null_count == len(stored) else pc.coalesce(stored, made)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _lengths(values: pa.Array) -> NDArray[np.int64]:
    found: NDArray[np.int64] = pc.binary_length(values).to_numpy(zero_copy_only=False).astype("i8")
    return found


@functools.lru_cache(maxsize=1024)
def _topic_piece(name: bytes) -> bytes:
    """Return a topic with its length before it: one byte, or two in records of version 2."""
    return len(name).to_bytes(1 if len(name) <= _TOPIC_BYTES_MAX_V1 else 2) + name


def _property_strings(properties: pa.MapArray) -> pa.Array:
    """Return ``name 0x01 value 0x02 name 0x01 value …`` for each row, as bytes."""
    pairs = pc.binary_join_element_wise(properties.keys, properties.items, "\x01")
    lists = pa.ListArray.from_arrays(properties.offsets, pairs)
    return pc.binary_join(lists, "\x02").cast(pa.binary())


def _separators(ends: pa.Array) -> pa.Array | pa.Scalar:
    """Return the separator or nothing after each property string, as one value if all rows have the same."""
    count = ends.true_count
    if count in (0, len(ends)):
        return pa.scalar(b"\x02" if count else b"", pa.binary())
    return pc.if_else(ends, pa.scalar(b"\x02", pa.binary()), _NOTHING)


def _heads(
    columns: dict[str, pa.Array],
    body_bytes: NDArray[np.int64],
    tail_bytes: NDArray[np.int64],
    magic: NDArray[np.int64],
) -> pa.Array:
    """Return the fields before the body of each record, as bytes. ``tail_bytes``: the bytes after these fields."""
    host_bits = columns["sysFlag"].to_numpy() & _HOST_BITS
    numbers = {field: _numbers(columns[name], is_time=name in _TIMES) for field, name in _NUMBERS.items()}
    hosts = {field: columns[name].dictionary_encode() for field, name in _HOSTS.items()}
    numbers |= {"magic": magic, "body_bytes": body_bytes}
    layouts, of_layout = [], np.unique(host_bits).tolist()
    for bits in of_layout:
        heads = np.zeros(len(host_bits), scan.head_dtype(bits))
        heads["size"] = layout_of(bits).head_bytes + tail_bytes
        for field, values in numbers.items():
            heads[field] = values
        for field, texts in hosts.items():
            heads[field] = _packed(texts, heads.dtype[field])
        layouts.append(_fixed(heads))
    if len(layouts) == 1:
        return layouts[0]
    chosen = np.searchsorted(of_layout, host_bits) * len(host_bits) + np.arange(len(host_bits))
    return pa.concat_arrays(layouts or [pa.array([], pa.binary())]).take(pa.array(chosen))


def _numbers(column: pa.Array, *, is_time: bool) -> NDArray[np.int64]:
    values = pc.fill_null(column.cast(pa.int64()), 0)
    found: NDArray[np.int64] = values.to_numpy()
    return found // 1000 if is_time else found


def _packed(texts: pa.DictionaryArray, kind: np.dtype[Any]) -> NDArray[Any]:
    """Return the packed bytes of each address. An address of another size becomes zeros: its layout is another one."""
    packed = [_packed_host(text) for text in texts.dictionary.to_pylist()]
    fitting = b"".join(one if len(one) == kind.itemsize else bytes(kind.itemsize) for one in packed)
    found: NDArray[Any] = np.frombuffer(fitting, kind)[texts.indices.to_numpy()]
    return found


@functools.lru_cache(maxsize=4096)
def _packed_host(text: str) -> bytes:
    ip, _, port = text.rpartition(":")
    return pack_host(ip.strip("[]"), int(port))


def _fixed(values: NDArray[Any]) -> pa.Array:
    """Return items of a fixed size as an array of bytes."""
    width = values.dtype.itemsize
    bounds = np.arange(0, (len(values) + 1) * width, width, dtype="i4")
    return pa.Array.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(bounds), pa.py_buffer(values.view("u1"))]
    )
