"""Expected Spark rows, computed by the plain decoder, and commit log files made for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.message import ReceivedMessage, messages_of_record
from rmqkit.protocol.properties import decode_properties, encode_properties
from rmqkit.protocol.record import (
    COMPRESSED,
    INNER_BATCH,
    NEED_UNWRAP,
    BatchEntry,
    Record,
    decode_record,
    encode_batch,
    encode_record,
    is_blank,
    pack_blank,
    pack_host,
)

MakeRecord = Callable[[int], bytes]
"""A record for a place in the log (its physical offset)."""

HOST_V4 = pack_host("192.168.31.152", 10911)
HOST_V6 = pack_host("fd00::1:2", 40894)


def record_at(physical_offset: int, **changed: Any) -> bytes:
    """An ordinary record; any field may be given."""
    fields: dict[str, Any] = {
        "topic": b"orders", "queue_id": 1, "flag": 0, "queue_offset": 7, "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000, "born_host": HOST_V4, "store_timestamp": 1_700_000_000_005,
        "store_host": HOST_V4, "reconsume_times": 0, "prepared_transaction_offset": 0, "body": b"hello",
        "properties": encode_properties({"TAGS": "a", "KEYS": "k1 k2", "UNIQ_KEY": "FD00"}),
    }  # fmt: skip
    return encode_record(**fields | changed, physical_offset=physical_offset)


def segment_of(makers: Iterable[MakeRecord], *, base_offset: int = 0, size: int | None = None) -> bytes:
    """A commit log file: records back to back, and a blank up to ``size`` if that is given."""
    data = bytearray()
    for make in makers:
        data += make(base_offset + len(data))
    if size is not None:
        data += pack_blank(size - len(data))
        data += bytes(size - len(data))
    return bytes(data)


def plain_records(segment: bytes) -> list[Record]:
    """The records from the start of a file up to its blank, zeros or end."""
    records: list[Record] = []
    position = 0
    while position < len(segment) and not is_blank(segment, position) and any(segment[position : position + 8]):
        records.append(decode_record(segment, position))
        position += records[-1].size
    return records


def plain_rows(segment: bytes, broker_name: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file, by `messages_of_record`; times in µs since the epoch."""
    return [row_of(m) for record in plain_records(segment) for m in messages_of_record(record, broker_name)]


def row_of(message: ReceivedMessage) -> dict[str, Any]:
    """A message as a row of all 20 columns."""
    return {
        "topic": message.topic,
        "brokerName": message.broker_name,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "commitLogOffset": message.physical_offset,
        "storeSize": message.store_size,
        "msgId": message.msg_id,
        "keys": message.properties.get("KEYS"),
        "tags": message.tags,
        "lite_topic": message.properties.get("__LITE_TOPIC"),
        "properties": message.properties,
        "body": message.body,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "bodyCrc": message.body_crc,
        "bornTimestamp": _microseconds(message.born_timestamp),
        "bornHost": message.born_host,
        "storeTimestamp": _microseconds(message.store_timestamp),
        "storeHost": message.store_host,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
    }


def rows_of(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    """The rows of Arrow batches, comparable with `plain_rows`."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for i, field in enumerate(batch.schema):
            if pa.types.is_timestamp(field.type):
                batch = batch.set_column(i, field.name, batch.column(i).cast(pa.int64()))
        rows += batch.to_pylist()
    for row in rows:
        if isinstance(row.get("properties"), list):
            assert len(dict(row["properties"])) == len(row["properties"]), "a map key occurs twice"
            row["properties"] = dict(row["properties"])
    return rows


def _microseconds(milliseconds: int) -> int | None:
    microseconds = milliseconds * 1000
    return microseconds if -(2**63) <= microseconds < 2**63 else None


# ---------------------------------------------------------------- Hypothesis

_i32 = st.integers(-(2**31), 2**31 - 1)
_i64 = st.integers(-(2**63), 2**63 - 1)
_hosts = st.one_of(
    st.just(HOST_V4), st.just(HOST_V6), st.binary(min_size=8, max_size=8), st.binary(min_size=20, max_size=20)
)
_words = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), max_size=6)
_names = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "WAIT", "a", "", "日本"]) | _words
_separators = st.sampled_from(["\x01", "\x02", "\x01\x01", "\x02\x02", ""])
property_strings = st.one_of(
    st.dictionaries(_names, _words, max_size=5).map(encode_properties),
    st.dictionaries(_names, _words, max_size=5).map(encode_properties).map(lambda encoded: encoded[:-1]),
    st.lists(st.tuples(_names, _separators, _words, _separators), max_size=5).map(
        lambda pieces: "".join("".join(piece) for piece in pieces).encode()
    ),
    st.binary(max_size=40),
)
_topics = st.one_of(
    st.sampled_from([b"orders", b"%RETRY%group"]),
    st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable()).map(str.encode),
    st.just(b"%RETRY%" + b"g" * 190),  # written with magic v2
)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[int, bytes]:
    """sysFlag bits and the stored body that goes with them: plain, compressed, an inner batch, or both."""
    body = draw(st.binary(max_size=60))
    flags = draw(st.sampled_from([0, 0x2, 0x4, 0x8, INNER_BATCH, NEED_UNWRAP]))
    if draw(st.booleans()):
        entry = st.builds(BatchEntry, body=st.binary(max_size=20), properties=property_strings, flag=_i32)
        body = encode_batch(draw(st.lists(entry, max_size=4)))
        flags = INNER_BATCH | NEED_UNWRAP
    compression = draw(st.sampled_from([None, *Compression]))
    if compression is not None:
        return flags | COMPRESSED | compression, compress(body, compression)
    return flags, body


@st.composite
def record_makers(draw: st.DrawFn) -> MakeRecord:
    """Records of every layout, all of which the plain decoder can read."""
    sys_flag, body = draw(bodies())
    fields = {
        "topic": draw(_topics),
        "queue_id": draw(_i32),
        "flag": draw(_i32),
        "queue_offset": draw(st.integers(0, 2**40)),
        "sys_flag": sys_flag,
        "born_timestamp": draw(_i64),
        "born_host": draw(_hosts),
        "store_timestamp": draw(st.integers(0, 2**45)),
        "store_host": draw(_hosts),
        "reconsume_times": draw(_i32),
        "prepared_transaction_offset": draw(_i64),
        "body": body,
        "properties": draw(property_strings),
    }
    return lambda physical_offset: record_at(physical_offset, **fields)


def decoded(encoded: bytes) -> dict[str, str]:
    """The properties of a string, by the plain decoder."""
    return decode_properties(encoded)
