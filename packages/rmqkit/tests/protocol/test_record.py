"""Stored records: the layout of store.md §3.1 and the checks of §12.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol import record
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.record import (
    decode_record,
    encode_record,
    encode_records,
    host_text,
    is_blank,
    iter_records,
    layout_of,
    pack_blank,
    pack_host,
    topic_field,
    unpack_host,
)

# remoting.md §12: topic T, queue 1, offset 7, physical 256, body "hi", TAGS=A
VECTOR = bytes.fromhex(
    "00000065 daa320a7 58932aac 00000001 00000000 0000000000000007 0000000000000100 00000000 0000018bcfe56800"
    "0a000001000003e8 0000018bcfe56801 0a00000200002a9f 00000000 0000000000000000 00000002 6869 01 54 0007"
    "54414753014102"
)
VECTOR_FIELDS = {
    "topic": b"T",
    "queue_id": 1,
    "flag": 0,
    "queue_offset": 7,
    "physical_offset": 256,
    "sys_flag": 0,
    "born_timestamp": 1700000000000,
    "born_host": pack_host("10.0.0.1", 1000),
    "store_timestamp": 1700000000001,
    "store_host": pack_host("10.0.0.2", 10911),
    "reconsume_times": 0,
    "prepared_transaction_offset": 0,
    "body": b"hi",
    "properties": b"TAGS\x01A\x02",
}


def test_the_vector_is_encoded():
    assert encode_record(**VECTOR_FIELDS) == VECTOR


def test_the_vector_is_decoded():
    decoded = decode_record(VECTOR, verify_crc=True)
    assert (decoded.topic, decoded.queue_id, decoded.queue_offset, decoded.physical_offset) == ("T", 1, 7, 256)
    assert (decoded.body, decoded.properties, decoded.body_crc) == (b"hi", b"TAGS\x01A\x02", 0x58932AAC)
    assert (host_text(decoded.born_host), host_text(decoded.store_host)) == ("10.0.0.1:1000", "10.0.0.2:10911")
    assert (decoded.born_timestamp, decoded.store_timestamp, decoded.size) == (1700000000000, 1700000000001, 101)


def test_a_client_sees_the_vector_as_one_message():
    (message,) = read_messages(VECTOR, "broker-a")
    assert (message.tags, message.keys, message.msg_id) == ("A", [], "0A00000200002A9F0000000000000100")


def test_positions_are_those_of_the_spec():
    assert layout_of(0).positions == {
        "size": 0,
        "magic": 4,
        "body_crc": 8,
        "queue_id": 12,
        "flag": 16,
        "queue_offset": 20,
        "physical_offset": 28,
        "sys_flag": 36,
        "born_timestamp": 40,
        "born_host": 48,
        "store_timestamp": 56,
        "store_host": 64,
        "reconsume_times": 72,
        "prepared_transaction_offset": 76,
        "body_bytes": 84,
    }
    assert layout_of(record.BORN_HOST_V6).positions["store_timestamp"] == 68
    assert layout_of(0x30).head_bytes == 112


def test_a_masked_crc_has_no_top_bit():
    assert record.body_crc(b"half1") == 0x4F4EA5A8  # crc32 is 0xCF4EA5A8
    assert record.body_crc(b"hello") == 0x3610A686


def test_a_topic_of_128_bytes_makes_a_v2_record():
    v2 = decode_record(encode_record(**VECTOR_FIELDS | {"topic": b"t" * 128}))
    v1 = decode_record(encode_record(**VECTOR_FIELDS | {"topic": b"t" * 127}))
    assert (v1.magic, v2.magic) == (record.MAGIC_V1, record.MAGIC_V2)
    assert (v1.size, v2.size) == (91 + 2 + 127 + 7, 92 + 2 + 128 + 7)


@pytest.mark.parametrize("length", range(len(VECTOR)))
def test_a_cut_off_record_is_corrupt(length):
    with pytest.raises(RecordCorrupt):
        decode_record(VECTOR[:length])


def test_what_follows_a_record_does_not_matter():
    assert decode_record(VECTOR + b"rest").size == len(VECTOR)


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (4, b"\x00", "magic"),
        (3, b"\x66", "size"),
        (3, b"\x64", "add up"),
        (87, b"\x03", "fit|add up"),
        (90, b"\x7f", "fit"),
        (90, b"\x80", "fit"),
        (93, b"\x08", "add up"),
    ],
)
def test_lengths_that_cannot_be_are_corrupt(position, value, reason):
    damaged = VECTOR[:position] + value + VECTOR[position + 1 :]
    with pytest.raises(RecordCorrupt, match=reason):
        decode_record(damaged)


def test_a_changed_body_is_found_by_its_crc_only():
    damaged = VECTOR.replace(b"hi", b"ho")
    assert decode_record(damaged).body == b"ho"
    with pytest.raises(RecordCorrupt, match="CRC"):
        decode_record(damaged, verify_crc=True)


def test_a_blank_has_size_zero():
    blank = pack_blank(100)
    assert blank == bytes.fromhex("00000064cbd43194")
    assert is_blank(blank)
    assert not is_blank(VECTOR)


def test_a_run_of_records_ends_at_the_first_that_is_not_one():
    assert len(list(iter_records(VECTOR * 3))) == 3
    assert len(list(iter_records(VECTOR * 2 + VECTOR[:-1]))) == 2
    assert len(list(iter_records(VECTOR + pack_blank(8) + VECTOR))) == 1


HOSTS = st.builds(pack_host, st.ip_addresses().map(str), st.integers(min_value=0, max_value=65535))
RECORDS = st.fixed_dictionaries(
    {
        "topic": st.text(min_size=1, max_size=40).map(str.encode),
        "queue_id": st.integers(0, 2**31 - 1),
        "flag": st.integers(-(2**31), 2**31 - 1),
        "queue_offset": st.integers(0, 2**63 - 1),
        "physical_offset": st.integers(0, 2**63 - 1),
        "sys_flag": st.integers(0, 2**31 - 1),
        "born_timestamp": st.integers(0, 2**62),
        "born_host": HOSTS,
        "store_timestamp": st.integers(0, 2**62),
        "store_host": HOSTS,
        "reconsume_times": st.integers(0, 2**31 - 1),
        "prepared_transaction_offset": st.integers(0, 2**63 - 1),
        "body": st.binary(max_size=300),
        "properties": st.binary(max_size=300),
    }
)


@given(RECORDS)
def test_what_is_encoded_is_decoded(fields):
    encoded = encode_record(**fields)
    decoded = decode_record(encoded, verify_crc=True)
    host_bits = (0x10 if len(fields["born_host"]) == 20 else 0) | (0x20 if len(fields["store_host"]) == 20 else 0)
    assert decoded.size == len(encoded)
    assert decoded.topic.encode() == fields["topic"]
    assert decoded.sys_flag == fields["sys_flag"] & ~0x30 | host_bits
    for name in fields.keys() - {"topic", "sys_flag"}:
        assert getattr(decoded, name) == fields[name]


@given(st.binary(max_size=200), st.integers(0, 20))
def test_any_bytes_are_a_record_or_corrupt(noise, position):
    for buffer in (noise, VECTOR[:8] + noise, VECTOR[:40] + noise, VECTOR[:88] + noise):
        try:
            assert decode_record(buffer, min(position, len(buffer))).size >= 91
        except RecordCorrupt as error:
            assert str(error)


@given(st.integers(0, len(VECTOR) * 8 - 1))
def test_one_flipped_bit_is_a_record_or_corrupt(bit):
    damaged = bytearray(VECTOR)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        decode_record(bytes(damaged), verify_crc=True)
    except RecordCorrupt as error:
        assert error.position == 0


@given(HOSTS)
def test_hosts_survive_packing(host):
    assert pack_host(*unpack_host(host)) == host


def test_a_host_must_be_a_literal_address():
    with pytest.raises(ValueError, match="'localhost' is not a literal"):
        pack_host("localhost", 1)


HOSTS = st.sampled_from([pack_host("10.0.0.1", 1000), pack_host("::1", 10911)])


ROWS = st.tuples(
    st.sampled_from([b"T", b"t" * 127, b"t" * 128]),
    *[st.integers(-9, 9)] * 6,
    st.binary(max_size=40),
    st.binary(max_size=40),
)


@given(st.lists(ROWS, max_size=5), HOSTS, HOSTS, st.sampled_from([bytes, memoryview]))
def test_records_of_a_run_are_those_that_are_encoded_one_by_one(rows, born_host, store_host, kind):
    names = ("queue_id", "flag", "queue_offset", "sys_flag", "born_timestamp", "reconsume_times", "body", "properties")
    common = {"born_host": born_host, "store_host": store_host, "store_timestamp": 99}
    data, sizes = encode_records(
        [
            (topic_field(topic), *numbers, kind(body), kind(len(properties).to_bytes(2, "big") + properties))
            for topic, *numbers, body, properties in rows
        ],
        physical_offset=1000,
        **common,
    )
    position = 0
    for (topic, *values), size in zip(rows, sizes, strict=True):
        fields = dict(zip(names, values, strict=True))
        plain = encode_record(
            topic=topic, physical_offset=1000 + position, prepared_transaction_offset=0, **common, **fields
        )
        assert data[position : position + size] == plain
        position += size
    assert position == len(data)
