"""A log walked by many tasks, and put together by the rules by which one walk of `LogView` finds its end.

A task cannot know where the log ends: zeros or stale records may be its end, or damage with more records behind. So it
hands out *stretches*, records back to back with what stopped them, and the driver decides which are in the log::

    driver   log_splits(log, ...)                                  one record is read per boundary
    task     walked(split, ...) ─→ (Stretch, result of its records), a further one behind each damage
    driver   in_log(log, ...)   ─→ what `LogView.runs` yields, with a result in place of each stretch

A split ends at a record, so damage ends in the split where it begins. Source: store.md §2, §12.1; spark.md §3, §5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from rmqkit.errors import StoreError
from rmqkit.spark.jobs.counts import SegmentCounts
from rmqkit.spark.source.splits import Split
from rmqkit.store.bulk import scan
from rmqkit.store.bulk.columns import Arrivals
from rmqkit.store.bulk.scan import Damage
from rmqkit.store.offline.view import LogView, Segment

__all__ = ["Stretch", "Work", "disk_errors", "in_log", "log_splits", "walked"]

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")


class Stretch(Struct):
    """Records back to back, from ``low`` to ``high`` in their file; ``stored_ms`` is the last one's storeTimestamp.
    Behind them is ``damage``, a blank (``blank_bytes``), or a record of the next split."""

    path: str
    start: int
    low: int
    high: int
    records: int = 0
    stored_ms: int = 0
    blank_bytes: int = 0
    damage: Damage | None = None


class Work(Protocol[Result_co]):
    """What a task does with the records of one stretch."""

    def add(self, segment: Segment, arrivals: Arrivals) -> None:
        """Look at a run of records."""

    def result(self) -> Result_co:
        """What came of them, to be sent to the driver."""


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise what the disk refuses as a StoreError: the text of no other error gets from a task to the user."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be read or written: {error.strerror}") from error


def log_splits(log: LogView, split_bytes: int) -> list[Split]:
    """The splits of all files, up to their last byte that is in no hole; each has at least one record.
    Unlike `plan_splits` this trusts nothing: what is behind the log's end is read, too."""
    splits = []
    for segment in log.segments:
        size = len(segment.buffer)
        bounds = scan.split(segment.buffer, segment.start, segment.data_end, split_bytes) or [(0, size)]
        bounds[-1] = bounds[-1][0], size
        splits += [Split(str(segment.path), segment.start, low, high) for low, high in bounds if size]
    return splits


def walked(split: Split, begin: Callable[[int], Work[Result]]) -> Iterator[tuple[Stretch, Result]]:
    """The stretches of a split, each with what a work made of it that began at its physical offset.
    Raises StoreError: the file cannot be read."""
    with disk_errors(Path(split.path)):
        segment = Segment.opened(Path(split.path), split.base_offset)
    stretch = Stretch(split.path, split.base_offset, split.low, split.low)
    work = begin(segment.start + split.low)
    for part in segment.runs(split.low, split.high):
        if isinstance(part, Damage):
            stretch.damage = part
            yield stretch, work.result()
            stretch = Stretch(split.path, split.base_offset, part.end, part.end)
            work = begin(segment.start + part.end)
            continue
        stretch.records += len(part)
        stretch.high, stretch.stored_ms = part.records.end, int(part.store_timestamps[-1])
        work.add(segment, part)
    if stretch.high < split.high:
        stretch.blank_bytes = len(segment.buffer) - stretch.high
    yield stretch, work.result()


def in_log(
    log: LogView, found: Iterable[tuple[Stretch, Result]], counts: dict[Path, SegmentCounts]
) -> Iterator[tuple[Segment, tuple[Stretch, Result] | Damage]]:
    """The stretches and damage up to the log's end, in order, from those of all splits in order; sets ``log.end``, and
    ``counts`` what each file holds."""
    places = {segment.start: i for i, segment in enumerate(log.segments)}
    stored_ms, closed = 0, -1
    for stretch, result in found:
        i = places[stretch.start]
        if i == closed:  # stale records behind a blank
            continue
        segment = log.segments[i]
        count = counts.setdefault(segment.path, SegmentCounts(str(segment.path), segment.start))
        count.records += stretch.records
        count.bytes += stretch.high - stretch.low
        count.blank_bytes += stretch.blank_bytes
        if stretch.records:
            log.end, stored_ms = stretch.start + stretch.high, stretch.stored_ms
            yield segment, (stretch, result)
        if stretch.blank_bytes:
            closed = i
        elif (damage := stretch.damage) is not None:
            if log.is_end(i, damage, stored_ms):
                return
            count.damages += 1
            count.damaged_bytes += damage.end - damage.position
            yield segment, damage
