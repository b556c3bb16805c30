"""Which task reads which bytes of a commit log.

A split is a part of one file that begins and ends at records, so tasks need nothing from each other. The plan is also
a snapshot: the newest file is read only up to the last record that was complete when the query was planned, and
preallocated files behind it not at all. The plan reads the heads of that one file, and one record per boundary.
Source: spark.md §3, §7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from rmqkit.errors import StoreMismatch
from rmqkit.spark.fs import Segment, data_end, map_file
from rmqkit.store import scan

__all__ = ["Split", "plan_splits"]


class Split(Struct, frozen=True):
    """A part of a commit log file, ``base_offset`` being the physical offset of its first byte.
    ``low`` and ``high`` are positions in the file; a record begins at each, or the file's records end there."""

    path: str
    base_offset: int
    low: int
    high: int


def plan_splits(segments: Sequence[Segment], split_bytes: int) -> list[Split]:
    """The splits of a log, whose files are in order; each has about ``split_bytes``, at least one record.
    Raises StoreMismatch: files are missing in the middle.
    Raises StoreError: a file cannot be read, or has vanished meanwhile."""
    splits: list[Split] = []
    segments = list(segments)
    while segments:
        segment = segments.pop()
        high = segment.size if splits else _records_end(segment)
        if high:
            _check_follows(segments, segment)
            splits[:0] = _splits_of(segment, high, split_bytes)
    return splits


def _records_end(segment: Segment) -> int:
    """Where the records of a file that may be the newest one end; 0 when nothing was written to it yet."""
    written = data_end(segment.path, segment.size)
    return scan.log_end(map_file(segment.path), segment.base_offset, written) if written else 0


def _splits_of(segment: Segment, high: int, split_bytes: int) -> Iterator[Split]:
    bounds = [(0, high)]
    if high > split_bytes:
        bounds = scan.split(map_file(segment.path), segment.base_offset, high, split_bytes)
    return (Split(segment.path, segment.base_offset, low, end) for low, end in bounds)


def _check_follows(before: Sequence[Segment], segment: Segment) -> None:
    end = before[-1].base_offset + before[-1].size if before else segment.base_offset
    if end != segment.base_offset:
        raise StoreMismatch(
            f"commit log bytes {end} to {segment.base_offset} are missing before {segment.path}: restore the file"
            f" between, or move the files before the gap away"
        )
