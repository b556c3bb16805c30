"""Counts per file are the same however the file is split, and every byte is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from rmqkit.arrow.fs import find_segments, map_file
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.spark.jobs.log_ranges import SegmentCounts, add_up, counted
from rmqkit.store.log import scan
from tests.golden_stores import unpack_golden
from tests.spark.messages import plain_records, record_at, segment_of


def count(splits: list[Split]) -> list[SegmentCounts]:
    parts = []
    for split in splits:
        counts = SegmentCounts.of(split)
        walked = scan.walk(map_file(split.path), split.base_offset, split.low, split.high)
        assert sum(1 for _ in counted(walked, counts, split)) > 0
        parts.append(counts)
    return add_up(parts)


def test_records_blanks_and_damage_are_distinguished(tmp_path: Path) -> None:
    data = bytearray(segment_of([record_at] * 10, size=2000))
    size = len(record_at(0))
    data[3 * size + 4 : 3 * size + 8] = bytes(4)  # no magic
    path = tmp_path / ("0" * 20)
    path.write_bytes(data)
    split = Split(str(path), 0, 0, len(data))
    assert count([split]) == [SegmentCounts(str(path), 0, 9, 9 * size, 2000 - 10 * size, 0, 1, size)]


@pytest.mark.parametrize("split_bytes", [5_000, 1 << 20])
def test_a_file_has_one_count_of_all_its_bytes(tmp_path: Path, split_bytes: int) -> None:
    root = unpack_golden("5.4.0", tmp_path).root
    segments = find_segments(str(root), [])
    counts = count(plan_splits(segments, split_bytes)[::-1])
    for segment, one in zip(segments, counts, strict=True):
        records = plain_records(Path(segment.path).read_bytes())
        assert (one.segment, one.base_offset) == (segment.path, segment.base_offset)
        assert (one.records, one.bytes) == (len(records), sum(record.size for record in records))
        is_newest = segment is segments[-1]
        assert one.blank_bytes == (0 if is_newest else segment.size - one.bytes)
        assert (one.bad_crcs, one.damages, one.damaged_bytes) == (0, 0, 0)
