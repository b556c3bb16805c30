"""The byte ranges of a commit log, one per task.

A split is a part of one file that begins and ends at records, so tasks are independent of each other. The plan is also
a snapshot: the newest file is read only up to the last record that was complete when the query was planned.
Preallocated files after the newest file are not read. The plan reads all heads of the newest file. In every other file,
the plan reads one record per boundary if a consume queue points at this record (`Anchors`). Otherwise the plan reads
all heads of the file.

**Anchors** distinguish records from bytes in a body that look like a record: an entry of a consume queue points at a
record. A sender that predicts the offset of its message can write a body that contains a completely valid record. A
walk from the start of a file steps over the body, but a search from the middle finds the false record. The head of a
record contains its topic, queue and queue offset, so one read of 20 bytes finds its entry, and only a broker writes
entries. For deleted topics, batch queues and stores without queues no entry is found, which proves nothing.

From a remote file of any size, the plan fetches about twenty times `_LOOK_BYTES`. A bisection finds the zeros at the
end. The records end where the chain of records before these zeros stops. Two rare states of the newest file are
recognised only if the file is local. In a remote file, records after a hole of zeros are not searched for, and records
after the end that a recovery cut off are treated as records after damage. Source: store.md §4.
"""

from __future__ import annotations

import bisect
import functools
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from rmqkit.arrow.fs import RemotePath, Segment, StoredFile, StoreFile, above, data_end, exists, join, list_files
from rmqkit.errors import StoreError
from rmqkit.protocol.record import BLANK_MAGIC, MAGIC_V1, MAGIC_V2, Record, decode_record
from rmqkit.store.log import scan
from rmqkit.store.queues.consume_queue import ENTRY, ENTRY_BYTES

_LOOK_BYTES = 64 << 10
_ANCHORS_TRIED = 4
_TASK_BYTES_MIN = 4 << 20
_TASKS_MIN = 16  # if the log has enough bytes
_HEAD = struct.Struct(">ii20xqiq")  # size, magic, ..., physicalOffset, sysFlag, bornTimestamp
_QUEUE_FILE = re.compile(r"\d{20}")
_MAGICS = (0, MAGIC_V1, MAGIC_V2, BLANK_MAGIC)  # 0: the record is being written


class Split(Struct, frozen=True):
    """A part of a commit log file. ``base_offset`` is the physical offset of the file's first byte.
    ``low`` and ``high`` are positions in the file at which a record begins or the records of the file end."""

    path: str
    base_offset: int
    low: int
    high: int


def plan_splits(segments: Sequence[Segment], split_bytes: int) -> list[Split]:
    """Cut a log into splits of about ``split_bytes`` and at least one record. The files of the log must be in order.
    Raises StoreError: a file cannot be read, or was deleted meanwhile."""
    splits: list[Split] = []
    anchors: dict[str, Anchors] = {}
    segments = list(segments)
    while segments:
        segment = segments.pop()
        # Start at the newest file: only files after the last record may be preallocated and empty.
        high = segment.size if splits else _records_end(segment)
        if high:
            fresh = list(_splits_of(segment, high, split_bytes, anchors))
            ends = [split.base_offset + split.high for split in fresh[-1:]]
            assert not splits or all(end <= splits[0].base_offset for end in ends), "splits ascend"
            splits[:0] = fresh
    return splits


def grouped(splits: Sequence[Split], split_bytes: int) -> list[tuple[Split, ...]]:
    """Group consecutive small splits. A log of many small files must not be read by as many tasks, because a task costs
    as much as several MiB. No group exceeds ``split_bytes``, unless it has only one split."""
    sizes = [split.high - split.low for split in splits]
    room = min(split_bytes, max(_TASK_BYTES_MIN, sum(sizes) // _TASKS_MIN))
    groups: list[list[Split]] = []
    left = 0
    for split, size in zip(splits, sizes, strict=True):
        if not groups or size > left:
            groups.append([])
            left = room
        groups[-1].append(split)
        left -= size
    return [tuple(group) for group in groups]


def records_end(segments: Sequence[Segment]) -> int:
    """Return the physical offset at which the records of a log end, without reading all heads. An entry that points
    after this offset points at a record that a crash tore. Raises StoreError: a file cannot be read."""
    for segment in reversed(segments):
        file = StoreFile(segment.path)
        written = _written_end(file, segment.size)
        if end := _chained_end(file, segment.base_offset, written):
            return segment.base_offset + end
    return segments[0].base_offset if segments else 0


def _records_end(segment: Segment) -> int:
    """Return the end of the records in a file that may be the newest file, or 0 if nothing was written to the file yet.
    For a file that no broker wrote, return the end of its data: the reader of the file reports the damage."""
    file = StoreFile(segment.path)
    written = _written_end(file, segment.size)
    if written < _HEAD.size:
        return 0
    if isinstance(segment.path, RemotePath):
        end = _chained_end(file, segment.base_offset, written)
    else:
        end = scan.log_end(file.buffer, segment.base_offset, written)
    return end or (written if _is_foreign(file, segment.base_offset) else 0)


def _written_end(file: StoreFile, size: int) -> int:
    """Return the position after which a file contains no written byte."""
    return _zeros_behind(file, 0) if isinstance(file.path, RemotePath) else data_end(file.path, size)


def _is_foreign(file: StoreFile, base_offset: int) -> bool:
    """Return True if a file begins neither with a blank nor with a record for this offset. A record that is still being
    written is accepted."""
    _, magic, physical_offset, _, born_timestamp = _HEAD.unpack_from(file.buffer)
    return magic not in _MAGICS or bool(physical_offset != base_offset and born_timestamp and magic != BLANK_MAGIC)


def _splits_of(segment: Segment, high: int, split_bytes: int, anchors: dict[str, Anchors]) -> Iterator[Split]:
    """Cut a file into splits up to ``high``. ``anchors`` caches the anchors of each folder of log files."""
    bounds = [(0, high)]
    if high > split_bytes:
        file, folder = StoreFile(segment.path), above(segment.path, 1)
        known = anchors.get(folder) or anchors.setdefault(folder, Anchors(segment.path))
        if isinstance(segment.path, RemotePath):
            lows = _fetched_boundaries(file, segment.base_offset, high, split_bytes, known)
            bounds = list(zip(lows, [*lows[1:], high], strict=True))
        else:
            bounds = scan.split(file.buffer, segment.base_offset, high, split_bytes, known.point_at)
    return (Split(segment.path, segment.base_offset, low, end) for low, end in bounds)


# ---------------------------------------------------------------- remote files: few reads


def _fetched_boundaries(file: StoreFile, base_offset: int, high: int, split_bytes: int, anchors: Anchors) -> list[int]:
    """Return the starts of the splits of a remote file, like `scan.split` but with few requests. If no entry points at
    one of the next few records, trust the first record, because a walk over the records would fetch the whole file."""
    lows = [0]
    for target in range(split_bytes, high, split_bytes):
        first = low = _fetched_record(file, base_offset, max(target, lows[-1] + 1), high)
        for _ in range(_ANCHORS_TRIED if anchors.exist else 0):
            if low >= high or anchors.point_at(decode_record(memoryview(file.buffer), low)):
                break
            low = _fetched_record(file, base_offset, low + 1, high)
        else:
            low = first
        if low >= high:
            break
        lows.append(low)
    return lows


def _fetched_record(file: StoreFile, base_offset: int, low: int, high: int) -> int:
    """Fetch the first record at or after ``low`` and return its start. Return ``high`` if there is no record."""
    reach, stop = _LOOK_BYTES, low
    while stop < high:
        stop = min(low + reach, high)
        file.fetch(low, stop)
        if (found := scan.find_record(file.buffer, base_offset, low, stop)) < stop:
            return found
        reach *= 8
    return high


def _chained_end(file: StoreFile, base_offset: int, zeros: int) -> int:
    """Return the end of the records before some zeros. A body may contain more zeros than the bisection reads.
    Therefore search again after the last found record, until no record follows."""
    end = 0
    while zeros > end and (further := _chain_end(file, base_offset, end, zeros)) > end:
        end = further
        zeros = _zeros_behind(file, end)
    return end


def _zeros_behind(file: StoreFile, low: int) -> int:
    """Return a position at or after ``low`` at which zeros begin, or the end of the file."""

    def is_written(position: int) -> bool:
        stop = min(position + _LOOK_BYTES, file.size)
        file.fetch(position, stop)
        return any(file.buffer[position:stop])

    high = file.size
    if low >= high or not is_written(low):
        return low
    while high - low > _LOOK_BYTES:
        middle = (low + high) // 2
        low, high = (middle, high) if is_written(middle) else (low, middle)
    return high


def _chain_end(file: StoreFile, base_offset: int, low: int, zeros: int) -> int:
    """Return the end of the records before some zeros. Records may begin at ``low``. Return ``low`` if no record
    follows."""
    back = _LOOK_BYTES
    while (start := max(low, zeros - back)) > low:
        file.fetch(start, zeros)
        start = scan.find_record(file.buffer, base_offset, start, zeros)
        if start < zeros:
            break
        back *= 8
    stop = min(zeros + _LOOK_BYTES, file.size)
    file.fetch(start, stop)
    end = start + scan.log_end(file.buffer[start:stop], base_offset + start)
    assert low <= start <= end <= file.size, "records end within their file"
    return end if end > start else _record_end(file, base_offset, start)


def _record_end(file: StoreFile, base_offset: int, position: int) -> int:
    """Return the end of the record at a position, or the position itself if no record begins there."""
    size, magic = _HEAD.unpack_from(file.buffer, position)[:2] if position + _HEAD.size <= file.size else (0, 0)
    if size < 0 or magic not in (MAGIC_V1, MAGIC_V2):
        return position
    stop = min(position + size, file.size)
    file.fetch(position, stop)
    return position + scan.log_end(file.buffer[position:stop], base_offset + position)


class Anchors:
    """The consume queues of a store, found by a file of its ``commitlog``."""

    def __init__(self, log_file: str) -> None:
        self._folder = join(above(log_file, 2), "consumequeue")
        self._files: dict[tuple[str, int], list[StoredFile]] = {}

    @functools.cached_property
    def exist(self) -> bool:
        """Return True if the store has queues. Raises StoreError: the store cannot be listed."""
        return exists(self._folder)

    def point_at(self, record: Record) -> bool:
        """Return True if the queue of a record has an entry that points at the place of the record."""
        # Bytes that only look like a record may have any text as topic.
        if record.queue_offset < 0 or "/" in record.topic or "\0" in record.topic or record.topic in ("", ".", ".."):
            return False
        at = record.queue_offset * ENTRY_BYTES
        with suppress(StoreError):  # deleted by retention, or not readable: proves nothing, like a missing entry
            files = self._of_queue(record.topic, record.queue_id)
            number = bisect.bisect_right(files, at, key=lambda file: int(file.names[-1])) - 1
            low = at - int(files[number].names[-1]) if number >= 0 else 0
            if number >= 0 and low + ENTRY_BYTES <= files[number].size:
                file = StoreFile(files[number].path)
                file.fetch(low, low + ENTRY_BYTES)
                return ENTRY.unpack_from(file.buffer, low)[:2] == (record.physical_offset, record.size)
        return False

    def _of_queue(self, topic: str, queue_id: int) -> list[StoredFile]:
        key = topic, queue_id
        if key not in self._files:
            files = list_files(self._folder, topic, str(queue_id))
            self._files[key] = [file for file in files if _QUEUE_FILE.fullmatch(file.names[-1])]
        return self._files[key]
