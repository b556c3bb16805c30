"""Message ids (remoting.md §7.4)."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.ids import UniqueKeys, decode_offset_id, offset_id
from rmqkit.protocol.record import pack_host


@pytest.mark.parametrize(
    ("text", "ip", "port", "offset"),
    [
        ("7F000001000055970000000000000000", "127.0.0.1", 21911, 0),
        ("C0A81F9800002A9F00000000000000CB", "192.168.31.152", 10911, 203),
        ("00000000000000000000000000000001000055970000000000000100", "::1", 21911, 256),
    ],
)
def test_offset_ids_of_the_spec(text, ip, port, offset):
    assert decode_offset_id(text) == (ip, port, offset)
    assert offset_id(pack_host(ip, port), offset) == text


@pytest.mark.parametrize("text", ["", "7F", "G" * 32, " " * 32, "7F000001 0000 5597 0000000000000", "0" * 40])
def test_what_is_no_offset_id_is_a_value_error(text):
    with pytest.raises(ValueError, match="offset message id"):
        decode_offset_id(text)


def test_a_unique_key_holds_address_process_and_time_of_the_month():
    now_ms = int(datetime(2026, 2, 28, 23, 59, 59).timestamp() * 1000)
    key = bytes.fromhex(UniqueKeys(bytes([10, 0, 0, 1]), 0x12345, 0xCAFE0007).next(now_ms))
    assert key[:10].hex() == "0a0000012345cafe0007"
    since_month_ms = int.from_bytes(key[10:14])
    assert since_month_ms == ((27 * 24 + 23) * 3600 + 59 * 60 + 59) * 1000
    assert int.from_bytes(key[14:]) == 8


def test_time_starts_over_with_the_month():
    keys = UniqueKeys(bytes(4), 1, 0)
    last_ms = int(datetime(2026, 12, 31, 23, 59, 59).timestamp() * 1000)
    assert int(keys.next(last_ms)[20:28], 16) > 2**31  # needs all 32 bits at the end of a long month
    assert int(keys.next(last_ms + 1000)[20:28], 16) == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 16]))
def test_keys_are_upper_case_hex_of_fixed_length_and_all_different(seed, ip_bytes):
    keys = UniqueKeys(bytes(ip_bytes), 1, seed)
    given_out = [keys.next(1_700_000_000_000) for _ in range(100)]
    assert len(set(given_out)) == 100
    assert {len(key) for key in given_out} == {(ip_bytes + 12) * 2}
    assert all(key == key.upper() for key in given_out)
