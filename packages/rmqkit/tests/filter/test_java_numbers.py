"""Property texts as numbers (behaviour.md §6.4); every expectation was asked of Java 17."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.filter.sql92 import parse_double, parse_int, parse_long, sortable


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("+7", 7),
        ("-7", -7),
        ("00007", 7),
        ("７", 7),
        ("٣", 3),
        ("2147483647", 2147483647),
        ("-2147483648", -(1 << 31)),
    ],
)
def test_an_int_as_java_reads_it(text, number):
    assert parse_int(text) == parse_long(text) == number


@pytest.mark.parametrize(
    "text", ["", "+", " 7", "7 ", "7_0", "7.0", "7L", "0x7", "1e3", "𝟕", "x", "2147483648", "-2147483649", "9" * 5000]
)
def test_no_int(text):
    with pytest.raises(ValueError):
        parse_int(text)


def test_a_long_goes_to_63_bits():
    assert parse_long("9223372036854775807") == (1 << 63) - 1
    assert parse_long("-9223372036854775808") == -(1 << 63)
    with pytest.raises(ValueError):
        parse_long("9223372036854775808")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7.0),
        (" 7.5\n", 7.5),
        ("5.", 5.0),
        (".5", 0.5),
        ("7f", 7.0),
        ("7e+2D", 700.0),
        ("1e999", math.inf),
        ("-Infinity", -math.inf),
        ("0x1p3", 8.0),
        ("+0X1.8P-3", 0.1875),
        ("0x1p99999", math.inf),
        ("-0x1p99999", -math.inf),
        ("1e-999", 0.0),
    ],
)
def test_a_double_as_java_reads_it(text, number):
    assert parse_double(text) == sortable(number)


@pytest.mark.parametrize(
    "text", ["", "x", "1e", "7_0", "0x7", "nan", "inf", "infinity", "\u00a07.5", "٣", "7.5e", "9" * 30_000 + "x"]
)
def test_no_double(text):
    with pytest.raises(ValueError):
        parse_double(text)


def test_doubles_sort_as_double_compare_sorts_them():
    ordered = [-math.inf, -1.5, -0.0, 0.0, 5e-324, 1.5, math.inf, math.nan]
    keys = [sortable(number) for number in ordered]
    assert keys == sorted(set(keys))
    negative_nan = struct.unpack(">d", bytes.fromhex("fff8000000000000"))[0]
    assert sortable(negative_nan) == sortable(math.nan) == parse_double("+NaN") == parse_double("-NaN")


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_sortable_agrees_with_the_order_of_numbers(one, other):
    if one < other:
        assert sortable(one) < sortable(other)
    if one == other != 0:
        assert sortable(one) == sortable(other)


@given(st.text())
def test_any_text_is_a_number_or_a_value_error(text):
    for parse in (parse_int, parse_long, parse_double):
        try:
            assert isinstance(parse(text), int)
        except ValueError:
            pass
