"""Bloom bits of SQL92 subscriptions (store.md §17.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.filter.sql92 import BloomFilter

STANDARD = BloomFilter.of(20, 32)


def test_the_standard_filter_has_3_positions_of_112_bits():
    assert (STANDARD.position_count, STANDARD.bit_count) == (3, 112)


@pytest.mark.parametrize(
    ("group", "topic", "positions"), [("g_sql_1", "GoldSql", (87, 77, 13)), ("g_sql_2", "GoldSql", (10, 65, 23))]
)
def test_positions_are_those_of_a_real_broker(group, topic, positions):
    assert STANDARD.positions(group, topic) == positions


def test_bit_p_is_counted_from_the_low_end_of_byte_p_divided_by_8():
    mask = STANDARD.mask((0, 13, 111))
    assert STANDARD.bitmap(mask) == bytes([1, 1 << 5]) + bytes(11) + bytes([1 << 7])


def test_a_bitmap_of_another_length_says_nothing():
    mask = STANDARD.mask((87, 77, 13))
    assert STANDARD.has(b"", mask)
    assert STANDARD.has(bytes(15), mask)
    assert not STANDARD.has(bytes(14), mask)


@given(st.text(), st.text(), st.sampled_from([(20, 32), (1, 1), (99, 4096), (5, 100)]))
def test_positions_lie_in_the_bitmap_and_are_found_in_it(group, topic, parameters):
    bloom = BloomFilter.of(*parameters)
    positions = bloom.positions(group, topic)
    assert len(positions) == bloom.position_count
    assert all(0 <= position < bloom.bit_count for position in positions)
    bitmap = bloom.bitmap(bloom.mask(positions))
    assert len(bitmap) * 8 == bloom.bit_count
    assert bloom.has(bitmap, bloom.mask(positions))
