"""Frames and reports of the HA link (store.md §21.2)."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import FrameError
from rmqkit.protocol.ha import DATA_BYTES_MAX, HEAD_BYTES, Reports, encode_report, frame_head, split_frames
from tests.sources import ROOT

GOLDEN = ROOT / "tests" / "golden"
OFFSETS = st.integers(0, (1 << 62) - 1)
STREAMS = {one["reportedOffset"]: one["frames"] for one in json.loads((GOLDEN / "ha-5.4.0.json").read_text())}


def golden_stream(reported_offset: int) -> bytes:
    return gzip.decompress((GOLDEN / f"ha-5.4.0-from-{reported_offset}.bin.gz").read_bytes())


def split(stream: bytes) -> tuple[list[tuple[int, bytes]], int]:
    frames, used = split_frames(memoryview(stream))
    return [(offset, bytes(data)) for offset, data in frames], used


def test_a_frame_and_a_heartbeat():
    stream = bytes.fromhex("0000000000000100 00000003") + b"abc" + bytes.fromhex("0000000000000103 00000000")
    assert split(stream) == ([(256, b"abc"), (259, b"")], 27)
    assert frame_head(256, 3) + b"abc" + frame_head(259, 0) == stream


def test_a_frame_that_is_not_whole_stays_where_it_is():
    whole = frame_head(7, 5) + b"hello"
    for cut in range(len(whole)):
        assert split(whole + whole[:cut]) == ([(7, b"hello")], len(whole))
        assert split(whole[:cut]) == ([], 0)


@pytest.mark.parametrize("reported_offset", [0, 300_000])
def test_what_a_real_master_sent_is_split_into_its_frames(reported_offset):
    stream = golden_stream(reported_offset)
    frames, used = split(stream)
    assert [(offset, len(data)) for offset, data in frames] == [
        (frame["offset"], frame["size"]) for frame in STREAMS[reported_offset]
    ]
    assert used == len(stream)
    assert b"".join(frame_head(offset, len(data)) + data for offset, data in frames) == stream


@pytest.mark.parametrize("head", [(-1, 0), (0, -1), (1 << 63, 0), (0, DATA_BYTES_MAX + 1), (-1, 1 << 31)])
def test_what_can_be_no_frame_is_refused_before_its_data_comes(head):
    offset, size = head
    damaged = (offset & (1 << 64) - 1).to_bytes(8) + (size & (1 << 32) - 1).to_bytes(4)
    with pytest.raises(FrameError):
        split(frame_head(0, 1) + b"x" + damaged)


def test_the_largest_frame_fits_into_the_buffer_of_an_apache_slave():
    assert HEAD_BYTES + DATA_BYTES_MAX == 4 << 20
    assert split(frame_head(0, DATA_BYTES_MAX)) == ([], 0)


@given(st.lists(st.tuples(OFFSETS, st.binary(max_size=40)), max_size=8), st.lists(st.integers(0, 400)))
def test_frames_survive_any_cut(frames, cuts):
    stream = b"".join(frame_head(offset, len(data)) + data for offset, data in frames)
    found, held = [], b""
    for start, end in pairwise([0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]):
        held += stream[start:end]
        whole, used = split(held)
        found += whole
        held = held[used:]
    assert (found, held) == (frames, b"")


def test_a_report_is_eight_bytes():
    assert encode_report(13468) == bytes.fromhex("000000000000349c")
    assert Reports().feed(bytes.fromhex("000000000000349c")) == 13468


def test_the_newest_whole_report_of_a_read_counts():
    reports = Reports()
    assert reports.feed(encode_report(1) + encode_report(2) + encode_report(3)[:5]) == 2
    assert reports.feed(encode_report(3)[5:7]) is None
    assert reports.feed(encode_report(3)[7:] + encode_report(4)[:7]) == 3


@pytest.mark.parametrize("bytes_of_no_report", [b"\xff" * 8, b"\x80" + bytes(7), b"\x7f" + b"\xff" * 7])
def test_what_can_be_no_report_is_refused(bytes_of_no_report):
    with pytest.raises(FrameError):
        Reports().feed(bytes_of_no_report)


@given(st.lists(OFFSETS, min_size=1), st.lists(st.integers(0, 400)))
def test_reports_survive_any_cut(offsets, cuts):
    stream, reports, last = b"".join(map(encode_report, offsets)), Reports(), None
    for start, end in pairwise([0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]):
        newest = reports.feed(stream[start:end])
        last = newest if newest is not None else last
        assert newest is None or newest == offsets[end // 8 - 1]
    assert last == offsets[-1]


@given(st.binary(max_size=100))
def test_any_bytes_are_frames_and_reports_or_refused(data):
    try:
        frames, used = split(data)
        assert used == sum(HEAD_BYTES + len(one) for _, one in frames) <= len(data)
    except FrameError:
        pass
    try:
        Reports().feed(data)
    except FrameError:
        pass
