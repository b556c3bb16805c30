"""The scan of a log: the compiled core finds the same records and the same checksums of bodies as numpy."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.core import CORE
from rmqkit.store.log import scan
from tests.spark.messages import MakeRecord, plain_records, record_at, record_makers, segment_of

SOME_OCTET = st.tuples(st.integers(0, 1 << 12), st.sampled_from([0, 1, 0x10, 0x20, 0x7F, 0x80, 0xA7, 0xAB, 0xFF]))
BOUNDS = st.tuples(st.integers(0, 1 << 12), st.integers(0, 1 << 12), st.integers(0, 5), st.integers(0, 600))


def both(call):
    """Return the results of a scan function with the core and without it."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = call()
        patch.setattr(CORE, "fault", "compared with the core")
        return compiled, call()


def assert_same(compiled: scan.Records, plain: scan.Records) -> None:
    for column in fields(scan.Records)[1:-1]:
        found, wanted = getattr(compiled, column.name), getattr(plain, column.name)
        assert np.array_equal(found, wanted), column.name
        assert np.asarray(found).dtype == np.asarray(wanted).dtype, column.name


@given(
    st.lists(record_makers(), min_size=1, max_size=8),
    st.integers(0, 1 << 40),
    st.lists(SOME_OCTET, max_size=4),
    BOUNDS,
    st.booleans(),
)
def test_the_same_records_are_sound(
    makers: list[MakeRecord], base_offset: int, octets: list[tuple[int, int]], bounds: tuple[int, ...], from_start: bool
) -> None:
    segment = bytearray(segment_of(makers, base_offset=base_offset))
    starts = [0, *np.cumsum([record.size for record in plain_records(bytes(segment))]).tolist()]
    for at, octet in octets:
        segment[at % len(segment)] = octet
    low = starts[bounds[0] % len(starts)] if from_start else bounds[0] % (len(segment) + 1)
    high = low + bounds[1] % (len(segment) + 1 - low)
    for ours, theirs in zip(
        *both(lambda: [scan._sound_records(segment, at, low, high, *bounds[2:]) for at in (base_offset, None)]),
        strict=True,
    ):
        assert_same(ours, theirs)
    for ours, theirs in zip(*both(lambda: list(scan.walk(segment, base_offset))), strict=True):
        if isinstance(ours, scan.Damage):
            assert ours == theirs
        else:
            assert_same(ours, theirs)


@given(st.lists(record_makers(), min_size=1, max_size=8), st.lists(SOME_OCTET, max_size=4))
def test_the_same_bodies_have_their_checksum(makers: list[MakeRecord], octets: list[tuple[int, int]]) -> None:
    segment = bytearray(segment_of(makers))
    for at, octet in octets:
        segment[at % len(segment)] = octet
    parts = [part for part in scan.walk(segment, 0) if isinstance(part, scan.Records)]
    compiled, plain = both(lambda: [scan.crc_matches(part).tolist() for part in parts])
    assert compiled == plain


def test_a_body_longer_than_a_block_is_checked_to_its_end() -> None:
    segment = bytearray(segment_of([lambda at: record_at(at, body=bytes(range(256)) * 300)]))
    (records,) = scan.walk(segment, 0)
    assert both(lambda: scan.crc_matches(records).tolist()) == ([True], [True])
    segment[int(records.body_at[0] + records.body_bytes[0]) - 1] ^= 1
    assert both(lambda: scan.crc_matches(records).tolist()) == ([False], [False])


@pytest.mark.parametrize(
    ("starts", "sizes", "sums", "words"),
    [
        ([0], [9], bytes(4), "a part lies outside of the buffer"),
        ([9], [0], bytes(4), "a part lies outside of the buffer"),
        ([-1], [1], bytes(4), "a part lies outside of the buffer"),
        ([0], [-1], bytes(4), "a part lies outside of the buffer"),
        ([0, 0], [1], bytes(4), "not as many starts as sizes and sums"),
        ([0], [1], bytes(8), "not as many starts as sizes and sums"),
    ],
)
def test_parts_that_are_not_there_are_refused(starts: list[int], sizes: list[int], sums: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CORE.log_reader.have_sums(bytes(8), np.array(starts).tobytes(), np.array(sizes).tobytes(), sums)
    with pytest.raises(ValueError, match="the buffer ends before its end"):
        CORE.log_reader.sound_records(bytes(8), 0, 0, 9, 1, 1)
