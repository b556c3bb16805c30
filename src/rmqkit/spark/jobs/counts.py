"""What a job came across in the files of a log: every job that reads them says it, damage included.

A task counts its split while it walks (`counted`), the driver adds up the splits of each file (`add_up`)::

    counts = SegmentCounts.of(split)
    for part in counted(scan.walk(buffer, split.base_offset, split.low, split.high), counts, split):
        ...  # the task's work; it adds to counts.bad_crcs itself if it looks at CRCs

Source: spark.md §5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from rmqkit.spark.source.splits import Split
from rmqkit.store.bulk.scan import Damage, Records

__all__ = ["SegmentCounts", "add_up", "counted"]


class SegmentCounts(Struct):
    """What was read of one commit log file.

    ``segment`` is its path, ``base_offset`` the physical offset of its first byte. Of the bytes that were walked,
    ``bytes`` are records, ``blank_bytes`` the blank that closes a full file, and ``damaged_bytes`` no records at all,
    in ``damages`` places where the walk had to find the next one. ``bad_crcs`` counts records whose body is not the
    one that was stored, as far as the job looks at bodies; zeros behind the newest record count nowhere.
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
        """Nothing counted yet, of a split's file."""
        return cls(str(split.path), split.base_offset)

    def add(self, other: SegmentCounts) -> None:
        """Count what was read of another part of the same file."""
        for name in self.__struct_fields__[2:]:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def counted(parts: Iterable[Records | Damage], counts: SegmentCounts, split: Split) -> Iterator[Records | Damage]:
    """The parts that a walk over a split yields, counted; what is left of the split in the end is its blank."""
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
    counts.blank_bytes += split.high - split.low - walked


def add_up(counts: Iterable[SegmentCounts]) -> list[SegmentCounts]:
    """One for each file, in the order of the log, from those of its splits."""
    sums: dict[str, SegmentCounts] = {}
    for one in counts:
        sums.setdefault(one.segment, SegmentCounts(one.segment, one.base_offset)).add(one)
    return sorted(sums.values(), key=lambda one: one.base_offset)
