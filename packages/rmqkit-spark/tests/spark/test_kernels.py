"""Every kernel is equal to the plain decoder, on what real brokers wrote and on records of every layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.arrow.schema import MESSAGE_COLUMNS, PROPERTY_STRING, arrow_schema
from rmqkit.errors import BodyError
from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.message import messages_of_record, read_messages
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import COMPRESSED, INNER_BATCH, NEED_UNWRAP, BatchEntry, encode_batch
from rmqkit.store.kernels import batch as batch_module
from rmqkit.store.kernels.batch import MessageBatch, message_batches, topics_of
from rmqkit.store.kernels.gather import gather, pick, text_array
from rmqkit.store.kernels.properties import Properties
from rmqkit.store.log.scan import Records, crc_matches, log_end, walk
from tests.golden_stores import unpack_golden
from tests.spark.messages import (
    HOST_V6,
    MakeRecord,
    plain_records,
    plain_rows,
    property_strings,
    record_at,
    record_makers,
    row_of,
    rows_of,
    segment_of,
)

_BASE = 1 << 30
_INNER = INNER_BATCH | NEED_UNWRAP


def _records(segment: bytes, base_offset: int = 0, high: int | None = None) -> list[Records]:
    parts = list(walk(segment, base_offset, 0, high, rows_max=7))
    assert all(isinstance(part, Records) for part in parts)
    return [part for part in parts if isinstance(part, Records)]


def _columns(batch: MessageBatch) -> pa.RecordBatch:
    arrays = [column.kernel(batch) for column in MESSAGE_COLUMNS if column.kernel]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(MESSAGE_COLUMNS))


def _rows(segment: bytes, base_offset: int = 0, high: int | None = None, **how: Any) -> list[dict[str, Any]]:
    batches = [b for records in _records(segment, base_offset, high) for b in message_batches(records, **how)]
    decoded = [_columns(batch) for batch in batches]
    assert [problem for batch in batches for problem in batch.problems.values()] == []
    return rows_of(decoded)


# ---------------------------------------------------------------- whole rows


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_rows_of_a_real_broker_are_the_plain_decoders(name: str, tmp_path: Path) -> None:
    store = unpack_golden(name, tmp_path)
    for path in sorted((store.root / "commitlog").iterdir()):
        segment = path.read_bytes()
        base = int(path.name)
        rows = _rows(segment, base, log_end(segment, base))
        assert rows == plain_rows(segment)
        end = sum(record.size for record in plain_records(segment))
        assert rows == [row_of(message) for message in read_messages(segment[:end])]


@given(st.lists(record_makers(), max_size=10))
def test_rows_of_any_records_are_the_plain_decoders(makers: list[MakeRecord]) -> None:
    segment = segment_of(makers, base_offset=_BASE)
    assert _rows(segment, _BASE, broker_name="broker-a") == plain_rows(segment, "broker-a")


@given(st.lists(record_makers(), max_size=10))
def test_without_unwrapping_rows_are_records_as_they_are_stored(makers: list[MakeRecord]) -> None:
    segment = segment_of(makers, base_offset=_BASE)
    rows = _rows(segment, _BASE, unwrapped=False, decompressed=False)
    records = plain_records(segment)
    assert [row["body"] for row in rows] == [record.body for record in records]
    assert [row["sysFlag"] for row in rows] == [record.sys_flag for record in records]
    assert [row["flag"] for row in rows] == [record.flag for record in records]
    assert [row["properties"] for row in rows] == [decode_properties(record.properties) for record in records]
    assert [row["queueOffset"] for row in rows] == [record.queue_offset for record in records]


@given(st.lists(record_makers(), max_size=6))
def test_stored_bodies_can_be_had_while_batches_are_unwrapped(makers: list[MakeRecord]) -> None:
    segment = segment_of(makers)
    expected = []
    for record in plain_records(segment):
        if record.sys_flag & _INNER == _INNER:
            expected += [(message.body, message.sys_flag) for message in messages_of_record(record)]
        else:
            expected.append((record.body, record.sys_flag))
    assert [(row["body"], row["sysFlag"]) for row in _rows(segment, decompressed=False)] == expected


@given(st.lists(record_makers(), min_size=1, max_size=8), st.data())
def test_rows_of_chosen_records_are_theirs(makers: list[MakeRecord], data: st.DataObject) -> None:
    segment = segment_of(makers)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(makers), max_size=len(makers))))
    (records,) = [part for part in walk(segment, 0) if isinstance(part, Records)]
    rows = rows_of([_columns(batch) for batch in message_batches(records.take(chosen))])
    kept = [record for record, keep in zip(plain_records(segment), chosen, strict=True) if keep]
    assert rows == [row_of(message) for record in kept for message in messages_of_record(record)]


def test_properties_as_strings_are_what_is_stored() -> None:
    segment = segment_of([record_at, lambda at: record_at(at, properties=b"a\x01\xff\x02")])
    (batch,) = message_batches(_records(segment)[0])
    assert PROPERTY_STRING.kernel is not None
    assert PROPERTY_STRING.kernel(batch).to_pylist() == [
        "TAGS\x01a\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01FD00\x02",
        "a\x01\N{REPLACEMENT CHARACTER}\x02",
    ]


def test_a_message_without_unique_key_is_known_by_its_offset_id() -> None:
    segment = segment_of(
        [
            lambda at: record_at(at, properties=b""),
            record_at,
            lambda at: record_at(at, properties=b"", store_host=HOST_V6),
        ],
        base_offset=203,
    )
    ids = [row["msgId"] for row in _rows(segment, 203)]
    assert ids[0] == "C0A81F9800002A9F00000000000000CB"  # store.md §3.8
    assert ids[1] == "FD00"
    assert ids[2].startswith("FD00000000000000000000000001000200009FBE")
    assert len(ids[2]) == 56


def test_a_time_that_microseconds_cannot_hold_is_null() -> None:
    segment = segment_of([lambda at: record_at(at, born_timestamp=2**63 - 1), record_at])
    assert [row["bornTimestamp"] for row in _rows(segment)] == [None, 1_700_000_000_000_000]


# ---------------------------------------------------------------- what cannot be decoded


def _one_problem(maker: MakeRecord) -> tuple[str, pa.RecordBatch]:
    segment = segment_of([record_at, maker, record_at])
    (batch,) = message_batches(_records(segment)[0])
    columns = _columns(batch)
    ((row, reason),) = batch.problems.items()
    assert row == 1
    return reason, columns


def test_a_body_that_cannot_be_decompressed_stays_as_it_is_stored() -> None:
    reason, columns = _one_problem(lambda at: record_at(at, body=b"nonsense", sys_flag=COMPRESSED | Compression.ZLIB))
    assert "zlib body of 8 bytes is damaged" in reason
    assert columns["body"].to_pylist() == [b"hello", b"nonsense", b"hello"]
    assert columns["sysFlag"].to_pylist() == [0, COMPRESSED | Compression.ZLIB, 0]


def test_an_inner_batch_that_cannot_be_unwrapped_stays_one_row() -> None:
    reason, columns = _one_problem(lambda at: record_at(at, body=b"not a batch", sys_flag=_INNER))
    assert "batch entry at byte 0 is cut off" in reason
    assert columns["body"].to_pylist() == [b"hello", b"not a batch", b"hello"]


def test_a_compressed_inner_batch_that_cannot_be_unwrapped_is_shown_decompressed() -> None:
    reason, columns = _one_problem(
        lambda at: record_at(at, body=compress(b"not a batch", Compression.ZSTD), sys_flag=_INNER | 0x200 | COMPRESSED)
    )
    assert "batch entry at byte 0 is cut off" in reason
    assert columns["body"].to_pylist()[1] == b"not a batch"
    assert columns["sysFlag"].to_pylist()[1] == _INNER | 0x200


def test_a_topic_that_is_not_utf_8_is_a_problem() -> None:
    reason, columns = _one_problem(lambda at: record_at(at, topic=b"\xff\xfe"))
    assert reason == "the topic is not UTF-8"
    assert columns["topic"].to_pylist() == ["orders", "\N{REPLACEMENT CHARACTER}" * 2, "orders"]


@given(st.lists(st.tuples(st.binary(max_size=40), st.sampled_from([0, _INNER]), st.integers(0, 7)), max_size=6))
def test_problems_are_exactly_what_the_plain_decoder_refuses(bodies: list[tuple[bytes, int, int]]) -> None:
    makers = [
        lambda at, body=body, flags=inner | (COMPRESSED | kind << 8 if kind else 0): record_at(
            at, body=body, sys_flag=flags
        )
        for body, inner, kind in bodies
    ]
    segment = segment_of(makers)
    refused = []
    for record in plain_records(segment):
        try:
            list(messages_of_record(record))
        except BodyError as error:
            refused.append(str(error))
    batches = [batch for records in _records(segment) for batch in message_batches(records)]
    assert [batch.problems[row] for batch in batches for row in sorted(batch.problems)] == refused


def test_members_come_between_their_neighbours_with_their_own_values() -> None:
    members = encode_batch(BatchEntry(b"m%d" % i, b"TAGS\x01t%d" % i, flag=i) for i in range(3))
    segment = segment_of(
        [record_at, lambda at: record_at(at, body=members, sys_flag=_INNER, queue_offset=40), record_at]
    )
    rows = _rows(segment)
    assert [(row["body"], row["tags"], row["flag"], row["queueOffset"]) for row in rows] == [
        (b"hello", "a", 0, 7),
        (b"m0", "t0", 0, 40),
        (b"m1", "t1", 1, 41),
        (b"m2", "t2", 2, 42),
        (b"hello", "a", 0, 7),
    ]


def test_much_decompressed_data_comes_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "_PLAIN_BYTES_MAX", 1500)
    packed = compress(bytes(1000), Compression.ZLIB)
    makers = [lambda at: record_at(at, body=packed, sys_flag=COMPRESSED)] * 5
    (records,) = _records(segment_of(makers))
    batches = list(message_batches(records))
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert rows_of([_columns(batch) for batch in batches]) == plain_rows(segment_of(makers))
    assert [len(batch) for batch in message_batches(records, bodies=False)] == [5]


# ---------------------------------------------------------------- the parts


@given(st.lists(property_strings, max_size=8))
def test_property_maps_and_values_are_the_plain_decoders(strings: list[bytes]) -> None:
    properties = Properties(text_array(pa.array(strings, pa.binary())))
    expected = [decode_properties(string) for string in strings]
    pairs = properties.map().to_pylist()
    assert [dict(entries) for entries in pairs] == expected
    assert [len(entries) for entries in pairs] == [len(entries) for entries in expected]
    for name in ("KEYS", "TAGS", "UNIQ_KEY", "a", "日本", "never"):
        assert properties.values_of(name).to_pylist() == [entries.get(name) for entries in expected]


_words = st.text("aKé日0", min_size=1, max_size=12)


@given(
    st.lists(_words, min_size=1, max_size=4), st.lists(st.lists(_words, min_size=4, max_size=4), min_size=1), st.data()
)
def test_rows_that_are_alike_but_for_one_are_decoded_the_same(
    names: list[str], values: list[list[str]], data: st.DataObject
) -> None:
    rows = ["".join(f"{name}\x01{value}\x02" for name, value in zip(names, row, strict=False)) for row in values]
    if data.draw(st.booleans()):
        row, at = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(0, 5))
        rows[row] = rows[row][:at] + data.draw(st.text("aK\x01\x02", max_size=2)) + rows[row][at + 1 :]
    properties = Properties(pa.array(rows, pa.string()))
    expected = [decode_properties(row.encode()) for row in rows]
    assert [dict(entries) for entries in properties.map().to_pylist()] == expected
    for name in (*names, "never"):
        assert properties.values_of(name).to_pylist() == [entries.get(name) for entries in expected]


@pytest.mark.parametrize(
    ("string", "expected"),
    [
        (b"", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"\x01b\x02a\x01\x02\x02x\x02c\x01d\x02", {"c": "d"}),
        (b"a\x011\x02b\x012\x02a\x013\x02", {"a": "3", "b": "2"}),
        (b"a\x011\x02a\x01\x02", {"a": "1"}),
        (b"\x00\x01\x00\x02", {"\x00": "\x00"}),
        ("名\x01値\x02".encode(), {"名": "値"}),
    ],
)
def test_property_strings_by_hand(string: bytes, expected: dict[str, str]) -> None:
    strings = [b"x\x01y\x02", string, b"", b"z\x01w"]
    (_, entries, _, _) = Properties(text_array(pa.array(strings, pa.binary()))).map().to_pylist()
    assert dict(entries) == expected == decode_properties(string)


def test_duplicates_are_dropped_when_names_are_many_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from rmqkit.store.kernels import properties as module

    monkeypatch.setattr(module, "_CELLS_MAX", 0)
    strings = [b"a\x011\x02b\x012\x02a\x013\x02", b"a\x014\x02"]
    entries = Properties(text_array(pa.array(strings, pa.binary()))).map().to_pylist()
    assert [dict(pairs) for pairs in entries] == [{"a": "3", "b": "2"}, {"a": "4"}]
    assert [len(pairs) for pairs in entries] == [2, 1]


@given(st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5)), max_size=10))
def test_gather_copies_out_what_lies_between_gaps(parts: list[tuple[bytes, bytes]]) -> None:
    data = b"".join(gap + value for gap, value in parts) + b"tail"
    ends = np.cumsum([len(gap) + len(value) for gap, value in parts], dtype="i8")
    lengths = np.array([len(value) for _, value in parts], "i8")
    assert gather(data, ends - lengths, lengths).to_pylist() == [value for _, value in parts]


def test_pick_gives_null_for_a_negative_index() -> None:
    assert pick(pa.array(["a", "b"]), np.array([1, -1, 0])).to_pylist() == ["b", None, "a"]


def test_a_topic_is_held_once_per_batch() -> None:
    (records,) = _records(segment_of([record_at, lambda at: record_at(at, topic=b"other"), record_at]))
    assert topics_of(records).dictionary.to_pylist() == [b"orders", b"other"]


@given(st.lists(record_makers(), min_size=1, max_size=6), st.data())
def test_the_crc_reports_which_bodies_have_changed(makers: list[MakeRecord], data: st.DataObject) -> None:
    segment = bytearray(segment_of(makers))
    (records,) = [part for part in walk(bytes(segment), 0) if isinstance(part, Records)]
    broken = [data.draw(st.booleans()) and bool(size) for size in records.body_bytes.tolist()]
    for at in records.body_at[np.array(broken)].tolist():
        segment[at] ^= 0x40
    (changed,) = [part for part in walk(bytes(segment), 0) if isinstance(part, Records)]
    assert crc_matches(changed).tolist() == [not flag for flag in broken]


def test_kernels_do_not_import_spark() -> None:
    code = "import sys, rmqkit.arrow.reader, rmqkit.arrow.splits; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
