"""Property strings (remoting.md §7.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import (
    PROPERTIES_BYTES_MAX,
    RESERVED_NAMES,
    _sort_entries,
    copied_properties,
    decode_properties,
    encode_in_stored_order,
    encode_properties,
    find_property,
    in_stored_order,
    java_hash,
    own_properties,
)


def test_entries_end_with_0x02():
    assert encode_properties({"TAGS": "A", "KEYS": "k1 k2"}) == b"TAGS\x01A\x02KEYS\x01k1 k2\x02"


def test_the_properties_of_the_application_are_those_without_a_reserved_name():
    assert own_properties({"TAGS": "A", "a": "1", "RETRY_TOPIC": "T", "tags": "B"}) == {"a": "1", "tags": "B"}


def test_a_message_that_is_sent_again_leaves_the_reason_behind_why_it_was_a_dead_letter():
    reason = {f"rmqkit_{name}": "x" for name in ("reason", "traceback", "handler", "tries")}
    letter = {"TAGS": "A", "a": "1", "rmqkit_key": "own", **reason}
    assert own_properties(letter) == {"a": "1", "rmqkit_key": "own", **reason}
    assert copied_properties(letter) == {"a": "1", "rmqkit_key": "own"}


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


# ---- the order in which a 5.x broker stores them; literals from a 5.4.0 broker's log

STAMPS = b"MSG_REGION\x01R\x02TRACE_ON\x01true\x02CLUSTER\x01C\x02"
SENT = b"UNIQ_KEY\x01U\x02WAIT\x01true\x02KEYS\x01k\x02TAGS\x01t\x02" + STAMPS


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (b"", b""),
        (
            SENT,
            b"MSG_REGION\x01R\x02UNIQ_KEY\x01U\x02CLUSTER\x01C\x02TAGS\x01t\x02KEYS\x01k\x02WAIT\x01true\x02TRACE_ON\x01true\x02",
        ),
        # UNIQ_KEY and CLUSTER share a bucket, and what the producer sent first stays first
        (
            b"CLUSTER\x01mine\x02" + SENT,
            b"MSG_REGION\x01R\x02CLUSTER\x01C\x02UNIQ_KEY\x01U\x02TAGS\x01t\x02KEYS\x01k\x02WAIT\x01true\x02TRACE_ON\x01true\x02",
        ),
        (
            b"UNIQ_KEY\x01U\x02INNER_NUM\x011\x02INNER_BASE\x010\x02CLUSTER\x01C\x02",
            b"INNER_BASE\x010\x02UNIQ_KEY\x01U\x02CLUSTER\x01C\x02INNER_NUM\x011\x02",
        ),
        (b"a\x01\x02\x01b\x02ab\x02\x02x\x01y", b"x\x01y\x02"),
    ],
)
def test_order_that_is_stored(sent, stored):
    assert in_stored_order(sent) == stored


@given(st.dictionaries(st.text("aé\U0001f600KEYS", min_size=1), st.text("b\xe9\ud83d ", max_size=3), max_size=120))
def test_a_mapping_is_joined_in_the_order_of_its_string(properties):
    assert encode_in_stored_order(properties) == in_stored_order(encode_properties(properties))


def test_a_value_may_hold_the_first_separator_and_not_the_second():
    assert encode_in_stored_order({"a": "b\x01c"}) == b"a\x01b\x01c\x02"
    for properties in ({"a": "b\x02"}, {"a": "", "b": "\x02c"}):
        with pytest.raises(ValueError, match="0x02"):
            encode_in_stored_order(properties)


@given(st.dictionaries(st.integers(0, 10_000), st.sampled_from("ab"), max_size=250))
def test_stored_order_keeps_everything_and_is_stable(numbered):
    encoded = encode_properties({f"name-{number}": value for number, value in numbered.items()})
    stored = in_stored_order(encoded)
    assert sorted(stored.split(b"\x02")) == sorted(encoded.split(b"\x02"))
    assert in_stored_order(stored) == stored


@given(
    st.lists(st.sampled_from([b"a", b"b", b"UNIQ_KEY", b"TAGS", b"\x01", b"\x02", b"\x01v\x02", b"w\x01"]), max_size=14)
)
def test_the_quick_way_orders_like_the_plain_one(parts):
    encoded = b"".join(parts)
    assert in_stored_order(encoded) == _sort_entries(encoded)


@pytest.mark.parametrize(("count", "buckets"), [(96, 128), (97, 256), (192, 256), (193, 512)])
def test_map_grows_beyond_three_quarters(count, buckets):
    hashes = {name: java_hash(name) & 0xFFFFFFFF for name in (f"n{i}" for i in range(count))}
    expected = sorted(hashes, key=lambda name: (hashes[name] ^ hashes[name] >> 16) % buckets)
    assert list(decode_properties(in_stored_order(encode_properties(dict.fromkeys(hashes, "v"))))) == expected
