"""The walk over a commit log in tasks, and the combination of the task results on the driver, range by range.

A task cannot know the end of the log: zeros or stale records may be the end, or damage that more records follow.
Therefore a task returns *log ranges*: adjacent records, and the reason why they stop. The driver decides which ranges
are in the log, by the same rules as a single walk of `LogView`::

    driver   log_splits(log, ...)                                  one record is read per boundary
    task     walked(split, ...) ─→ (LogRange, result of its records), another one after each damage
    driver   in_log(log, ...)   ─→ the same as `LogView.runs`, with a result in place of each range

A split ends at a record, so damage ends in the split where it begins. Every job returns the counts of each file
(`SegmentCounts`), including damage. A task counts its split during the walk (`counted`). The driver adds up the splits
of each file (`add_up`). `rmqkit.spark.jobs.tasks` runs the tasks.
Source: store.md §2, §12.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec import Struct

from rmqkit.arrow.plan import SPLIT_BYTES
from rmqkit.arrow.splits import Anchors, Split, grouped
from rmqkit.errors import StoreError
from rmqkit.store.bulk import DispatchColumns
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Damage, Records
from rmqkit.store.log.view import LogView, Segment

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")


class LogRange(Struct):
    """Adjacent records, from ``low`` to ``high`` in their file. ``stored_ms`` is the storeTimestamp of the last record.
    The records are followed by ``damage``, a blank (``blank_bytes``), or a record of the next split."""

    path: str
    start: int
    low: int
    high: int
    records: int = 0
    stored_ms: int = 0
    blank_bytes: int = 0
    damage: Damage | None = None


class Work(Protocol[Result_co]):
    """The work of a task on the records of one range."""

    def add(self, segment: Segment, arrivals: DispatchColumns) -> None:
        """Process a run of records."""

    def result(self) -> Result_co:
        """Return the result for the driver."""


class SegmentCounts(Struct):
    """The counts of one commit log file.

    ``segment`` is the path of the file, ``base_offset`` the physical offset of its first byte. The walked bytes are
    counted in three numbers: ``bytes`` of records, ``blank_bytes`` at the end of a full file, and ``damaged_bytes``.
    ``damages`` counts the places where the walk had to search for the next record. ``bad_crcs`` counts records with a
    body that does not match its CRC, if the job checks bodies. Zeros after the newest record are not counted.
    """

    segment: str
    base_offset: int
    records: int = 0
    bytes: int = 0
    blank_bytes: int = 0
    bad_crcs: int = 0
    damages: int = 0
    damaged_bytes: int = 0

    @classmethod
    def of(cls, split: Split) -> SegmentCounts:
        """Return zero counts for the file of a split."""
        return cls(str(split.path), split.base_offset)

    def add(self, other: SegmentCounts) -> None:
        """Add the counts of another part of the same file."""
        assert (self.segment, self.base_offset) == (other.segment, other.base_offset), "both counts are of one file"
        # The first two fields identify the file; all other fields are summed.
        for name in self.__struct_fields__[2:]:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError to a StoreError: only the texts of rmqkit's errors are passed from a task to the user."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be read or written: {error.strerror}") from error


def log_splits(log: LogView, split_bytes: int) -> list[Split]:
    """Cut all files into splits with at least one record each.
    Unlike `plan_splits`, this includes the bytes after the end of the log, which may contain stale records."""
    splits = []
    for segment in log.segments:
        size = len(segment.buffer)
        anchors = Anchors(str(segment.path))
        bounds = scan.split(segment.buffer, segment.start, segment.data_end, split_bytes, anchors.point_at)
        bounds = bounds or [(0, size)]
        # Extend the last split to the end of the file, even if the end is a hole, to count the blank of a full file.
        bounds[-1] = bounds[-1][0], size
        splits += [Split(str(segment.path), segment.start, low, high) for low, high in bounds if size]
    return splits


def walked(split: Split, begin: Callable[[int], Work[Result]]) -> Iterator[tuple[LogRange, Result]]:
    """Walk over a split and yield each range with its result. ``begin(offset)`` returns the `Work` for the range that
    begins at a physical offset.
    Raises StoreError: the file cannot be read."""
    # Open the file in the task: a mapping cannot be pickled.
    with disk_errors(Path(split.path)):
        segment = Segment.opened(Path(split.path), split.base_offset)
    log_range = LogRange(split.path, split.base_offset, split.low, split.low)
    work = begin(segment.start + split.low)
    for part in segment.runs(split.low, split.high):
        if isinstance(part, Damage):
            log_range.damage = part
            yield log_range, work.result()
            assert part.end > part.position, "damage is not empty"
            # Begin a new result after the damage: the driver may decide that the log ends at the damage.
            log_range = LogRange(split.path, split.base_offset, part.end, part.end)
            work = begin(segment.start + part.end)
            continue
        log_range.records += len(part)
        log_range.high, log_range.stored_ms = part.end, int(part.store_timestamps[-1])
        work.add(segment, DispatchColumns(part))
    if log_range.high < split.high:
        log_range.blank_bytes = len(segment.buffer) - log_range.high
    yield log_range, work.result()


def in_log(
    log: LogView, found: Iterable[tuple[LogRange, Result]], counts: dict[Path, SegmentCounts]
) -> Iterator[tuple[Segment, tuple[LogRange, Result] | Damage]]:
    """Yield the ranges and the damage up to the end of the log. ``found`` contains the ranges of all splits, in order.
    Set ``log.end``, and add the counts of each file to ``counts``."""
    places = {segment.start: i for i, segment in enumerate(log.segments)}
    stored_ms, closed = 0, -1
    for log_range, result in found:
        i = places[log_range.start]
        if i == closed:  # stale records after a blank
            continue
        assert log_range.low <= log_range.high, "a range does not end before its start"
        segment = log.segments[i]
        count = counts.setdefault(segment.path, SegmentCounts(str(segment.path), segment.start))
        count.records += log_range.records
        count.bytes += log_range.high - log_range.low
        count.blank_bytes += log_range.blank_bytes
        if log_range.records:
            log.end, stored_ms = log_range.start + log_range.high, log_range.stored_ms
            yield segment, (log_range, result)
        if log_range.blank_bytes:
            closed = i
        elif (damage := log_range.damage) is not None:
            if log.is_end(i, damage, stored_ms):
                return
            count.damages += 1
            count.damaged_bytes += damage.end - damage.position
            yield segment, damage


def counted(parts: Iterable[Records | Damage], counts: SegmentCounts, split: Split) -> Iterator[Records | Damage]:
    """Yield and count the parts of a walk over a split. Count the remaining bytes as the blank."""
    walked = 0
    for part in parts:
        if isinstance(part, Damage):
            size = part.end - part.position
            counts.damages += 1
            counts.damaged_bytes += size
        else:
            size = int(part.sizes.sum())
            counts.records += len(part)
            counts.bytes += size
        walked += size
        yield part
    assert walked <= split.high - split.low, "a walk stays in its split"
    counts.blank_bytes += split.high - split.low - walked


def add_up(counts: Iterable[SegmentCounts]) -> list[SegmentCounts]:
    """Add up the counts of splits for each file. Return the files in the order of the log."""
    sums: dict[str, SegmentCounts] = {}
    for one in counts:
        sums.setdefault(one.segment, SegmentCounts(one.segment, one.base_offset)).add(one)
    return sorted(sums.values(), key=lambda one: one.base_offset)


def task_count(splits: Sequence[Split]) -> int:
    """Return the number of tasks for some splits."""
    return max(1, len(grouped(splits, SPLIT_BYTES)))
