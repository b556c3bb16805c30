"""Hashes, batches, compression, names, versions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.protocol import names
from rmqkit.protocol.codes import version_name, version_number
from rmqkit.protocol.compression import Compression, compress, decompress
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, java_hash, tags_code
from rmqkit.protocol.record import BatchEntry, batch_bounds, decode_batch, encode_batch
from tests.golden_stores import golden_manifest


@pytest.mark.parametrize(
    ("text", "hashed"), [("", 0), ("TagA", 2598919), ("TagB", 2598920), ("polygenelubricants", -(2**31))]
)
def test_java_hash_of_known_texts(text, hashed):
    assert java_hash(text) == hashed


@pytest.mark.parametrize("version", ["5.4.0", "4.9.4"])
def test_java_hash_of_every_tag_and_key_a_real_client_hashed(version):
    manifest = golden_manifest(version)
    hashes = {**manifest["tagHash"], **manifest["keyHash"]}
    assert len(hashes) > 100
    assert {text: java_hash(text) for text in hashes} == hashes


@given(st.text(st.characters(), max_size=30))
def test_java_hash_agrees_with_its_definition(text):
    h = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for i in range(0, len(units), 2):
        h = (31 * h + int.from_bytes(units[i : i + 2])) & 0xFFFFFFFF
    assert java_hash(text) & 0xFFFFFFFF == h
    assert -(2**31) <= java_hash(text) < 2**31


def java_units(code_point: int) -> tuple[int, ...]:
    """The UTF-16 code units of a character, by the definition of surrogates."""
    if code_point < 0x10000:
        return (code_point,)
    return (0xD800 + ((code_point - 0x10000) >> 10), 0xDC00 + ((code_point - 0x10000) & 0x3FF))


@pytest.mark.parametrize("plane", range(17))
def test_java_hash_of_characters_of_every_plane(plane):
    for low in (0x0000, 0x0001, 0x0041, 0x00E9, 0x4E2D, 0xD7FF, 0xD800, 0xDBFF, 0xDC00, 0xDFFF, 0xE000, 0xFFFE, 0xFFFF):
        units = java_units(plane << 16 | low)
        assert java_hash(chr(plane << 16 | low)) == (31 * units[0] + units[1] if len(units) == 2 else units[0])
        hashed = 0
        for unit in (*units, ord("x"), *units):
            hashed = (31 * hashed + unit) & 0xFFFFFFFF
        assert java_hash(f"{chr(plane << 16 | low)}x{chr(plane << 16 | low)}") & 0xFFFFFFFF == hashed


def test_tags_code_is_the_hash_as_a_signed_64_bit_number():
    assert [tags_code(tags) for tags in ("TagA", "polygenelubricants", "")] == [2598919, -(2**31), 0]


BATCH_VECTOR = bytes.fromhex("0000001f 00000000 00000000 00000000 00000002 6869 0007 54414753014102")


def test_the_batch_vector_both_ways():
    entries = [BatchEntry(b"hi", b"TAGS\x01A\x02")]
    assert encode_batch(entries) == BATCH_VECTOR
    assert decode_batch(BATCH_VECTOR) == entries
    assert decode_batch(BATCH_VECTOR * 3) == entries * 3


@pytest.mark.parametrize("length", range(1, len(BATCH_VECTOR)))
def test_a_cut_off_batch_is_a_body_error(length):
    with pytest.raises(BodyError, match="batch entry at byte"):
        decode_batch(BATCH_VECTOR + BATCH_VECTOR[:length])


@pytest.mark.parametrize("size", [0, 1, PROPERTIES_BYTES_MAX])
def test_a_batch_carries_properties_up_to_the_limit(size):
    entries = [BatchEntry(b"x", b"p" * size)] * 2
    assert decode_batch(encode_batch(entries)) == entries


@given(st.lists(st.builds(BatchEntry, st.binary(max_size=20), st.binary(max_size=20), st.integers(-9, 9)), max_size=5))
def test_batches_survive(entries):
    assert decode_batch(encode_batch(entries)) == entries


def test_bounds_say_where_the_messages_lie():
    assert batch_bounds(BATCH_VECTOR * 2) == [(0, 20, 24, 31), (0, 51, 55, 62)]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_batch_or_a_body_error(noise):
    for body in (noise, BATCH_VECTOR[:20] + noise):
        try:
            decode_batch(body)
        except BodyError as error:
            assert str(error)


@given(st.binary(max_size=2000), st.sampled_from(Compression), st.integers(1, 9))
def test_bodies_survive_compression(body, compression, level):
    packed = compress(body, compression, level)
    assert decompress(packed, 1 | compression) == body
    assert decompress(packed, int(compression)) == packed  # without bit 0 it is no compressed body


def test_old_clients_compress_with_zlib_and_do_not_say_so():
    assert decompress(compress(b"x" * 5000, Compression.ZLIB), 1) == b"x" * 5000


def test_an_unknown_compression_type_is_a_body_error():
    with pytest.raises(BodyError, match="compression type 4"):
        decompress(b"", 1 | 0x400)


@pytest.mark.parametrize("compression", list(Compression))
def test_damaged_cut_and_exploding_bodies_are_body_errors(compression):
    packed = compress(bytes(100_000), compression)
    with pytest.raises(BodyError, match="beyond the limit of 1000 bytes"):
        decompress(packed, 1 | compression, bytes_max=1000)
    for broken in (b"", packed[:10], packed[:-3], b"\x00" * 20):
        with pytest.raises(BodyError):
            decompress(broken, 1 | compression)


@given(st.binary(max_size=60), st.sampled_from(Compression))
def test_any_bytes_decompress_or_are_a_body_error(noise, compression):
    try:
        decompress(noise, 1 | compression)
    except BodyError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("topic", "fault"),
    [
        ("orders", None),
        ("%RETRY%g", None),
        ("a" * 127, None),
        ("%RETRY%" + "a" * 248, None),
        ("", "The specified topic is blank."),
        (" ", "The specified topic is blank."),
        ("a b", "The specified topic: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("é", "The specified topic: é, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("a" * 128, f"The specified topic: {'a' * 128}, is longer than topic max length: 127"),
    ],
)
def test_topic_names(topic, fault):
    assert names.topic_fault(topic) == fault


def test_group_names():
    assert names.group_fault("g" * 120) is None
    assert names.group_fault("g" * 121) is not None
    assert names.group_fault("g\n") is not None
    assert names.group_fault("") == "The specified group is blank."


@pytest.mark.parametrize(
    ("release", "number", "name"),
    [((4, 0, 0), 213, "V4_0_0"), ((4, 9, 4), 401, "V4_9_4"), ((5, 3, 1), 475, "V5_3_1"), ((5, 4, 0), 493, "V5_4_0")],
)
def test_versions(release, number, name):
    assert version_number(*release) == number
    assert version_name(number) == name
    assert version_name(number - 1) == name + "_SNAPSHOT"
