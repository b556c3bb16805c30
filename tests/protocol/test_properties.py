"""Property strings (remoting.md §7.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import (
    PROPERTIES_BYTES_MAX,
    RESERVED_NAMES,
    decode_properties,
    encode_properties,
    find_property,
)


def test_entries_end_with_0x02():
    assert encode_properties({"TAGS": "A", "KEYS": "k1 k2"}) == b"TAGS\x01A\x02KEYS\x01k1 k2\x02"


@pytest.mark.parametrize(
    ("encoded", "properties"),
    [
        (b"", {}),
        (b"TAGS\x01A\x02", {"TAGS": "A"}),
        (b"TAGS\x01A", {"TAGS": "A"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01\x02\x01b\x02ab\x02\x02x\x01y", {"x": "y"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        ("ключ\x01значение\x02".encode(), {"ключ": "значение"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
    ],
)
def test_both_writers_are_read_and_broken_pieces_dropped(encoded, properties):
    assert decode_properties(encoded) == properties


@pytest.mark.parametrize("pair", [("a\x01", "b"), ("a", "b\x02"), ("\x02", "b")])
def test_separators_cannot_be_written(pair):
    with pytest.raises(ValueError, match="separator"):
        encode_properties([pair])


def test_the_longest_string_is_read_and_searched():
    value = "v" * (PROPERTIES_BYTES_MAX - len("a\x01\x02"))
    encoded = encode_properties({"a": value})
    assert len(encoded) == PROPERTIES_BYTES_MAX
    assert (decode_properties(encoded), find_property(encoded, b"a")) == ({"a": value}, value.encode())


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_reserved_names_can_be_carried(name):
    assert decode_properties(encode_properties({name: "x"})) == {name: "x"}


WORD = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=8)


@given(st.dictionaries(WORD, WORD, max_size=6))
def test_what_is_encoded_is_decoded(properties):
    assert decode_properties(encode_properties(properties)) == properties


@given(st.lists(st.sampled_from(["a", "b", "aa", "\x01", "\x02", "KEYS"])).map("".join), st.sampled_from(["a", "KEYS"]))
def test_finding_one_equals_decoding_all(text, name):
    found = find_property(text.encode(), name.encode())
    assert (None if found is None else found.decode()) == decode_properties(text.encode()).get(name)
