"""A read-only view of a commit log: mapped files, scanned record by record, including damage.

A broker repairs a store when it opens the store. A `LogView` changes nothing and needs no settings: the name of a
segment is its start, and the length of its file is its size. The offline tools (`rmqkit.store.offline`) read logs with
it.

The scan handles bytes that are not a record as follows:

===========================================  ======================================================================
a blank with the number of remaining bytes   the segment is full, the scan continues with the next segment; a
                                             `Damage` if records follow that were stored later than the record
                                             before the blank
zeros, and no record in any later segment    the end of the log (segments are preallocated)
later records were stored earlier than the   the end of the log: stale bytes, because a recovery of an Apache broker
records before, in the last segment with     cuts the log without clearing the rest (store.md §2)
records
other bytes, and no record after them        a `Damage` up to the end of the segment, then the end of the log
anything else                                a `Damage` up to the next sound record, where the scan continues
===========================================  ======================================================================

`walk` decodes every record and needs no numpy. `runs` returns the same log in runs of the bulk scan of `scan`, ten
times as fast. A test compares both. Scanned pages are released during the scan, so that a scan needs little memory for
a log of any length. The zeros at the end of a preallocated segment are not read. Source: store.md §2, §3, §12.1.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import BLANK_BYTES, Record, closes_file, decode_record
from rmqkit.store.log import scan
from rmqkit.store.log.scan import Buffer, Damage, Records
from rmqkit.system import disk

__all__ = ["LogView", "Segment", "data_end", "mapped"]

_KEPT_BYTES = 64 << 20
"""Number of bytes of a segment after which scanned pages are released."""


class Segment(Struct):
    """One commit-log file.

    Attributes:
        start: physical offset of the first byte.
        buffer, view: the bytes of the file, mapped.
        data_end: position after which the file is a hole.
    """

    path: Path
    start: int
    buffer: Buffer
    view: memoryview
    data_end: int
    released: int = 0

    @classmethod
    def opened(cls, path: Path, start: int) -> Segment:
        """Map a file. Raises OSError: the file cannot be read."""
        buffer = mapped(path)
        return cls(path, start, buffer, memoryview(buffer), data_end(path))

    @property
    def end(self) -> int:
        return self.start + len(self.buffer)

    def release(self, position: int) -> None:
        """Release the scanned pages before a position; a later read loads them again."""
        if isinstance(self.buffer, disk.Mapped) and abs(position - self.released) >= _KEPT_BYTES:
            disk.release_pages(self.buffer)
            self.released = position

    def next_record(self, position: int, high: int) -> int:
        """Return the start of the next sound record at or after a position. Return ``high`` if no record ends at or
        before ``high``.
        """
        return scan.find_record(self.buffer, self.start, position, high, min(high, self.data_end))

    def runs(self, low: int, high: int) -> Iterator[Records | Damage]:
        """Yield the records of a part in runs, and damage, up to a blank. This needs numpy.

        Args:
            low, high: positions. Each is the start of a record or the end of the segment.
        """
        position, stored_ms = low, 0
        while position < high:
            assert position < high <= len(self.buffer), "a part is inside its segment"
            if closes_file(self.view, position):
                if (damage := self.false_blank(position, high, stored_ms)) is None:
                    return
                yield damage
                position = damage.end
                continue
            for records in scan.runs(self.buffer, self.start, position, high):
                run = records.text_only()
                if len(run):
                    position, stored_ms = run.end, int(run.take(slice(-1, None)).store_timestamps[0])
                    yield run
                    self.release(position)
                if len(run) < len(records):
                    break
            if position == high or closes_file(self.view, position):
                continue
            resumed = self.next_record(position + 1, high)
            yield Damage(position, resumed, self._reason(position))
            position = resumed

    def false_blank(self, position: int, high: int, stored_ms: int) -> Damage | None:
        """Return the damage if records follow a blank that should end the segment. Return None if the blank is valid.

        The record before the blank was stored at ``stored_ms``.
        """
        resumed = scan.behind_blank(self.buffer, self.start, position, high, stored_ms)
        return None if resumed == high else Damage(position, resumed, scan.FALSE_BLANK)

    def _reason(self, position: int) -> str:
        try:
            self.record(position)
        except RecordCorrupt as error:
            return error.reason
        raise AssertionError("the bulk scan rejected a sound record")

    def record(self, position: int) -> Record:
        """Return the record at a position. The CRC of its body is not checked.

        Raises:
            RecordCorrupt: there is no record, or the record belongs to another place.
        """
        record = decode_record(self.view, position)
        if record.physical_offset != self.start + position:
            reason = f"it belongs to offset {record.physical_offset}"
            raise RecordCorrupt(position, reason, size=record.size)
        return record


class LogView:
    """The segments of a log, oldest first.

    Args:
        files: path and start of each segment.

    Attributes:
        end: physical offset after the last record. It is known after a `walk`.
    """

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self.segments = [Segment.opened(path, start) for path, start in files]
        self.end = self.segments[0].start if self.segments else 0

    @property
    def min_offset(self) -> int:
        """Physical offset of the first byte, 0 without files."""
        return self.segments[0].start if self.segments else 0

    @property
    def file_bytes(self) -> int:
        return sum(len(segment.buffer) for segment in self.segments)

    def record_at(self, physical_offset: int) -> Record:
        """Return the record at a physical offset.

        Raises:
            RecordCorrupt: there is no record.
        """
        i = bisect_right(self.segments, physical_offset, key=lambda segment: segment.start) - 1
        if i < 0 or physical_offset >= self.segments[i].end:
            raise RecordCorrupt(physical_offset, "no segment holds this offset")
        return self.segments[i].record(physical_offset - self.segments[i].start)

    def walk(self) -> Iterator[tuple[Segment, Record | Damage]]:
        """Yield every record and every damaged part, in order."""
        stored_ms = 0
        for i, segment in enumerate(self.segments):
            position, size, before_ms = 0, len(segment.buffer), 0
            while position < size:
                if closes_file(segment.view, position):
                    if (blank := segment.false_blank(position, size, before_ms)) is None:
                        break
                    yield segment, blank
                    position = blank.end
                    continue
                try:
                    record = segment.record(position)
                except RecordCorrupt as error:
                    damage = Damage(position, segment.next_record(position + 1, size), error.reason)
                    if self.is_end(i, damage, stored_ms):
                        return
                    yield segment, damage
                    position = damage.end
                    continue
                position += record.size
                stored_ms = before_ms = record.store_timestamp
                self.end = segment.start + position
                segment.release(position)
                yield segment, record

    def runs(self) -> Iterator[tuple[Segment, Records | Damage]]:
        """Yield the same records as `walk`, but in runs of many records. This needs numpy."""
        stored_ms = 0
        for i, segment in enumerate(self.segments):
            for part in segment.runs(0, len(segment.buffer)):
                if not isinstance(part, Damage):
                    stored_ms = int(part.store_timestamps[-1])
                    self.end = segment.start + part.end
                elif self.is_end(i, part, stored_ms):
                    return
                yield segment, part

    def is_end(self, i: int, damage: Damage, stored_ms: int) -> bool:
        """Return True if the damage in segment ``i`` is the valid end of the log. The record before the damage was
        stored at ``stored_ms``."""
        segment = self.segments[i]
        if any(_begins_with_record(later) for later in self.segments[i + 1 :]):
            return False
        if damage.end == len(segment.buffer):
            return not any(segment.view[damage.position : damage.position + BLANK_BYTES])
        return segment.record(damage.end).store_timestamp < stored_ms


def data_end(path: Path) -> int:
    """Return the end of the last part of a file that is not a hole. Return the file's length if the system cannot
    report holes.
    """
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        end, size = 0, disk.size_of(descriptor)
        while end < size:
            try:
                end = disk.seek_hole(descriptor, disk.seek_data(descriptor, end))
            except OSError as error:
                return end if error.errno == errno.ENXIO else size
        return size
    finally:
        disk.close(descriptor)


def _begins_with_record(segment: Segment) -> bool:
    try:
        return segment.record(0).size > 0
    except RecordCorrupt:
        return False


def mapped(path: Path) -> Buffer:
    """Return the bytes of a file, mapped read-only.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        size = disk.size_of(descriptor)
        return disk.map_file(descriptor, size) if size else b""
    finally:
        disk.close(descriptor)
