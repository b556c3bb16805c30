"""The facts of a run of records equal those of the single records, for all properties."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.properties import find_keys
from rmqkit.protocol.record import INNER_BATCH, TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from rmqkit.store.bulk import DispatchColumns
from rmqkit.store.dispatcher import request_of
from rmqkit.store.index.file import key_hashes
from rmqkit.store.log import scan
from rmqkit.store.settings import parse_delay_levels
from tests.golden_stores import unpack_golden
from tests.spark.messages import HOST_V4, HOST_V6, record_at, segment_of

DELAYS_MS = parse_delay_levels("1s 5s 10s")

_names = st.sampled_from(
    ["TAGS", "KEYS", "UNIQ_KEY", "DELAY", "INNER_NUM", "XTAGS", "TAG", "A_UNIQ_KEY", "MY_KEYS", ""]
)
_values = st.sampled_from(
    [
        "",
        "a",
        "TagA",
        " ",
        "k1 k2",
        " k1  k2 ",
        "x" * 64,
        "x" * 65,
        "y" * 700,
        "schlüssel",
        "漢字 𝒳",
        "2",
        "99",
        "-1",
        "b=\x01c",
    ]
) | st.text(max_size=9)
_entries = st.builds(lambda name, value: f"{name}\x01{value}", _names, _values) | st.text("TAGSKEY\x01 x", max_size=9)
_property_strings = st.lists(_entries, max_size=5).map(lambda entries: "\x02".join(entries).encode()) | st.binary(
    max_size=30
)
_records = st.fixed_dictionaries(
    {
        "topic": st.sampled_from([b"orders", b"t", SCHEDULE_TOPIC.encode(), "thème".encode(), b"n" * 200]),
        "queue_id": st.sampled_from([0, 1, 7]),
        "queue_offset": st.integers(0, 5),
        "sys_flag": st.sampled_from([0, 0, 4, 8, 12, INNER_BATCH, INNER_BATCH | 0x40]),
        "born_host": st.sampled_from([HOST_V4, HOST_V6]),
        "properties": _property_strings,
        "store_timestamp": st.integers(0, 1 << 41),
    }
)

DELAYED_BATCH = {
    "topic": SCHEDULE_TOPIC.encode(),
    "queue_id": 1,
    "queue_offset": 0,
    "sys_flag": INNER_BATCH,
    "born_host": HOST_V4,
    "properties": b"DELAY\x012\x02INNER_NUM\x013",
    "store_timestamp": 0,
}


def run_of(segment: bytes, base_offset: int) -> DispatchColumns:
    (records,) = scan.runs(segment, base_offset, 0, len(segment))
    return DispatchColumns(records)


def assert_as_one_by_one(run: DispatchColumns) -> None:
    records = [run.records.record(row) for row in range(len(run))]
    expected = [request_of(record, DELAYS_MS) for record in records]
    assert run.offsets.tolist() == [one.physical_offset for one in expected]
    assert run.queue_offsets.tolist() == [one.queue_offset for one in expected]
    assert run.tags_codes(DELAYS_MS).tolist() == [one.tags_code for one in expected]
    assert run.batch_counts.tolist() == [one.batch_count for one in expected]
    assert run.store_timestamps.tolist() == [one.store_timestamp for one in expected]
    for with_tags in (True, False):
        rows, hashes = run.keys(with_tags=with_tags)
        assert list(zip(rows.tolist(), hashes.tolist(), strict=True)) == [
            (row, hashed)
            for row, record in enumerate(records)
            if record.sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK
            for hashed in key_hashes(record.topic, find_keys(record.properties), with_tags=with_tags)
        ]
    in_no_queue = (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)
    grouped = {(topic, queue_id): rows.tolist() for topic, queue_id, rows in run.groups()}
    assert grouped == {
        (record.topic, record.queue_id): [
            row
            for row, other in enumerate(records)
            if (other.topic, other.queue_id) == (record.topic, record.queue_id)
            and other.sys_flag & TRANSACTION_MASK not in in_no_queue
        ]
        for record in records
        if record.sys_flag & TRANSACTION_MASK not in in_no_queue
    }


@given(st.lists(_records, min_size=1, max_size=8), st.integers(0, 1 << 40))
@example([DELAYED_BATCH], 0)
def test_facts_are_those_of_every_record(fields, base_offset):
    makers = [lambda at, one=one: record_at(at, **one) for one in fields]
    assert_as_one_by_one(run_of(segment_of(makers, base_offset=base_offset), base_offset))


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_facts_of_what_real_brokers_wrote(name, tmp_path):
    for path in sorted((unpack_golden(name, tmp_path).root / "commitlog").iterdir()):
        with open(path, "rb") as file:
            segment = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for records in scan.runs(segment, int(path.name), 0, len(segment)):
            assert_as_one_by_one(DispatchColumns(records))


def test_a_run_is_cut_before_a_topic_that_is_no_text():
    topics = [b"a", b"b", b"\xff", b"a"]
    segment = segment_of([lambda at, topic=topic: record_at(at, topic=topic) for topic in topics])
    assert [len(run_of(one, 0).records.text_only()) for one in (segment, segment[: len(segment) // 4 * 2])] == [2, 2]
    first = segment_of([lambda at: record_at(at, topic=b"\xff")])
    assert len(run_of(first, 0).records.text_only()) == 0


def test_suspects_are_looked_at():
    whole = [
        lambda at: record_at(at),
        lambda at: record_at(at, properties=b"A\x01b\x02__CRC32#\x01" + b"1" * 10 + b"\x02"),
    ]
    segment = bytearray(segment_of([*whole, record_at, lambda at: record_at(at, properties=b"A\x01b\0")]))
    starts = run_of(bytes(segment), 0).records.positions.tolist()
    segment[starts[2] + 90] ^= 1  # in the body
    assert run_of(bytes(segment), 0).suspects().tolist() == [1, 2, 3]
