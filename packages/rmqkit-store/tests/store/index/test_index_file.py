"""Hashes of keys: store.md §7.2."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import find_keys, find_property, java_hash
from rmqkit.store.index.file import key_hash
from tests.golden_stores import golden_manifest


def test_hash_of_golden_keys() -> None:
    hashes = golden_manifest("5.4.0")["keyHash"]
    assert len(hashes) > 10
    for text, hashed in hashes.items():
        topic, _, key = text.partition("#")
        assert key_hash(topic, key) == abs(hashed)


@given(st.text(max_size=40), st.text(max_size=60))
def test_short_cut_equals_the_hash_of_the_whole(topic: str, key: str) -> None:
    plain = abs(java_hash(f"{topic}#{key}"))
    assert key_hash(topic, key) == (plain if plain < 1 << 31 else 0)


@given(st.text(st.characters(codec="utf-8"), min_size=32, max_size=32))
def test_short_cut_for_unique_keys_equals_the_hash_of_the_whole(key: str) -> None:
    assert key_hash("T", key) == abs(java_hash(f"T#{key}")) & 0x7FFFFFFF


def test_hash_that_has_no_positive_counterpart_is_zero() -> None:
    assert java_hash("T#jllgx0D") == -(1 << 31)
    assert key_hash("T", "jllgx0D") == 0


@given(st.lists(st.sampled_from([b"KEYS", b"TAGS", b"UNIQ_KEY", b"XKEYS", b"\x01", b"\x02", b"v", b""]), max_size=12))
def test_keys_are_found_as_properties_are(pieces: list[bytes]) -> None:
    properties = b"".join(pieces)
    found = [find_property(properties, name) or b"" for name in (b"UNIQ_KEY", b"KEYS", b"TAGS")]
    assert list(find_keys(properties)) == found
