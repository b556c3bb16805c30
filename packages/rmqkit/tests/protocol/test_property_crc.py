"""The checksum of a whole record: store.md §3.5."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.record import has_sound_crc, iter_records, seal, with_room_for_crc
from tests.golden_stores import unpack_golden


def test_digits_are_least_significant_first() -> None:
    content = b"record"
    assert zlib.crc32(content) & 0x7FFFFFFF == 456_433_553
    assert seal(content + bytes(20)) == b"record__CRC32#\x013553346540\x02"


@pytest.mark.parametrize(
    ("properties", "kept"),
    [
        (b"", b""),
        (b"A\x01b\x02", b"A\x01b\x02"),
        (b"A\x01b", b"A\x01b\x02"),
        (b"__CRC32#\x01123\x02A\x01b\x02", b"A\x01b\x02"),
        (b"A\x01b\x02__CRC32#\x01123", b"A\x01b\x02"),
        (b"my__CRC32#\x01123\x02", b"my__CRC32#\x01123\x02"),
    ],
)
def test_room_is_made_and_a_clients_own_is_dropped(properties: bytes, kept: bytes) -> None:
    assert with_room_for_crc(properties) == kept + bytes(20)


def test_golden_records_are_sound_and_sealed_the_same(tmp_path: Path) -> None:
    root = unpack_golden("5.4.0-ipv6-crc", tmp_path).root
    log = (root / "commitlog" / ("0" * 20)).read_bytes()
    position = count = 0
    for record in iter_records(log):
        raw = log[position : position + record.size]
        assert has_sound_crc(raw)
        assert seal(raw[:-20] + bytes(20)) == raw
        position += record.size
        count += 1
    assert count == 21


@given(st.binary(min_size=1, max_size=200), st.data())
def test_any_flipped_bit_is_noticed(content: bytes, data: st.DataObject) -> None:
    sealed = bytearray(seal(content + bytes(20)))
    assert has_sound_crc(bytes(sealed))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert not has_sound_crc(bytes(sealed))


@pytest.mark.parametrize("record", [b"", bytes(20), bytes(21), b"__CRC32#\x01"])
def test_anything_else_is_not_sound(record: bytes) -> None:
    assert not has_sound_crc(record)
