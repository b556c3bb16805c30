"""The common part of both kinds of queue: files of fixed-size entries, in log order (``ConsumeQueueInterface``).

Every entry begins with ``i64 physicalOffset, i32 size`` of its record. The kind of queue defines the other fields of
the entry, and the relation of entries to queue offsets (`consume_queue`, `batch_queue`). Entries are numbered by
*index*: entry ``i`` is at logical byte ``i * entry_bytes``.

Only the dispatcher appends. All files can be rebuilt from the log. Descriptors are opened on first use and closed by
`close_idle`, so that a store can have more queues than a process can have open files. A queue holds these files open:
the file for appends, the file of the last read, and the files that wait for a flush. Use this module only in the owner
thread of the store; flush threads call `sync`. Source: store.md §4, §6, §12.2.
"""

from __future__ import annotations

import errno
import operator
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

from rmqkit.protocol.record import topic_field
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import SECTOR_BYTES, BytesLost, MappedFile
from rmqkit.store.queues.queue_ext import ExtUnit, is_address
from rmqkit.system import disk, threads

__all__ = ["BLANK_SIZE", "NO_RECORD", "ConsumeQueueBase"]

NO_RECORD = (-1, 0)
"""physicalOffset and size that mean "no record"."""
_PLACE = struct.Struct(">qi")
_SCAN_BYTES = 4096
_SCAN_BYTES_MAX = 1 << 20
_RECOVERED_FILES = 3
_NO_END = 1 << 63
_IS_NEGATIVE = bytes(0x80) + b"\1" * 0x80
BLANK_SIZE = 0x7FFFFFFF
"""The size in a blank entry. No record has this size."""


class ConsumeQueueBase(ABC):
    """One queue of one topic.

    Args:
        directory: the directory of its files.
        file_bytes: size of its files, a multiple of the entry size.
        dirty: the queues with unflushed entries, in the order of their first one.

    Attributes:
        next_offset: queue offset of the next message put. It is not less than ``max_offset`` (the *queue offset
            table*).
        min_offset, max_offset: queue offset of the first readable message, and one past the last.
        max_physical_offset: end of the newest indexed record, or of the newest record of a deleted topic with the same
            name; -1 without a record.
        recovered_record: physicalOffset and size of the newest indexed record at the recovery of the queue, or (-1, 0).
        queue, file_queues: the files of the entries; the same files together with the files of the extension, if any.
        on_open: called before the queue opens a file while it has no other open file.
        on_gap: called before a message is indexed although messages before it are missing.
    """

    __slots__ = tuple(
        """
        queue file_queues queue_id topic topic_field topic_utf8 min_offset max_offset next_offset max_physical_offset
        recovered_record on_open on_gap is_dirty _dirty _fd _file _file_bytes _held _position _reading _writing
        """.split()
    )

    layout: ClassVar[struct.Struct]
    """The fields of an entry."""
    setting: ClassVar[str]
    """The key of the file size setting."""
    entry_bytes: ClassVar[int]
    least: ClassVar[dict[int, int]] = {0: 0, 1: 1}
    """The fields of an entry that recovery checks, and the smallest valid value of each."""

    _looked_at: ClassVar[list[tuple[int, int, int]]]

    def __init_subclass__(cls) -> None:
        cls.entry_bytes = cls.layout.size
        kinds = cls.layout.format
        ends = [struct.calcsize(kinds[: field + 1]) for field in range(len(kinds))]
        cls._looked_at = [(ends[field], ends[field + 1], least) for field, least in cls.least.items()]

    def __init__(
        self, topic: str, queue_id: int, directory: Path, file_bytes: int, dirty: dict[ConsumeQueueBase, None]
    ) -> None:
        self.topic = topic
        self.topic_utf8 = topic.encode()
        self.topic_field = topic_field(self.topic_utf8)
        self.queue_id = queue_id
        self.queue = FileQueue([directory], file_bytes, setting=self.setting, root=directory.parents[2])
        self.file_queues: tuple[FileQueue, ...] = (self.queue,)
        self.next_offset = 0
        self.min_offset = 0
        self.max_offset = 0
        self.recovered_record = NO_RECORD
        self.max_physical_offset = -1
        self.is_dirty = False
        self.on_open: Callable[[ConsumeQueueBase], None] = _ignore
        self.on_gap: Callable[[ConsumeQueueBase], None] = _ignore
        self._dirty = dirty
        self._reading: MappedFile | None = None
        self._file: MappedFile
        self._fd = -1
        self._position = 0
        self._file_bytes = file_bytes
        self._held = bytearray()
        self._writing = threads.Lock()

    # ---- for each kind of queue

    @abstractmethod
    def append(
        self,
        queue_offset: int,
        physical_offset: int,
        size: int,
        tags_code: int,
        store_timestamp: int,
        bitmap: bytes = b"",
    ) -> None:
        """Index one record. If the record is already indexed, do nothing.
        ``bitmap``: the SQL92 subscriptions that match the record, for the extension if there is one.
        Raises OSError: a write failed; the queue is unchanged."""

    @abstractmethod
    def resume(self) -> None:
        """Set the end of the queue to the end of its files."""

    @abstractmethod
    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move the first readable message to the first message that still has a record."""

    @abstractmethod
    def place(self, queue_offset: int) -> tuple[int, int]:
        """Return physicalOffset and size of the record of a message, or (-1, 0) without a record."""

    @abstractmethod
    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Iterate over entries from a message on, within one file, for about ``bytes_max`` bytes of entries.
        Each row has physicalOffset, size, stored tagsCode, next queue offset and number of messages. Return None if the
        file is missing."""

    @abstractmethod
    def next_file_offset(self, queue_offset: int) -> int:
        """Return the queue offset at which the file after the file of a message begins."""

    def unit(self, stored: int) -> ExtUnit | None:
        """Return the extension unit at the address in an entry's tag code, or None if there is none."""
        return None

    def tags_code(self, stored: int) -> int | None:
        """Return the real tag code of an entry, read from the extension if necessary. Return None if the tag code is
        unknown.
        """
        if not is_address(stored):
            return stored
        unit = self.unit(stored)
        return None if unit is None else unit.tags_code

    @classmethod
    def are_valid(cls, entries: list[tuple[Any, ...]]) -> bool:
        """Return True if recovery accepts the entries."""
        return all(min(map(itemgetter(field), entries)) >= least for field, least in cls.least.items())

    @classmethod
    def valid_count(cls, raw: bytes) -> int:
        """Return the number of valid packed entries before the first invalid entry.
        Each step checks the same byte of all entries together, which takes a tenth of the time of unpacking the
        entries."""
        step = cls.entry_bytes
        count = len(raw) // step
        for start, end, least in cls._looked_at:
            columns = [raw[at : count * step : step] for at in range(start, end)]
            invalid = columns[0].translate(_IS_NEGATIVE).find(1)
            count = count if invalid < 0 else invalid
            if least and count:  # ``least`` is 1: a bit of the field must be set
                bits = 0
                for column in columns:
                    bits |= int.from_bytes(column[:count], "big")
                invalid = bits.to_bytes(count, "big").find(0)
                count = count if invalid < 0 else invalid
        return count

    # ---- entries held in memory, for kinds that support it

    @property
    def has_held(self) -> bool:
        """Return True if the queue has entries in memory that are not yet in a file."""
        return bool(self._held)

    def write_held(self) -> None:
        """Write the held entries. Any thread can call this. Raises OSError: the write failed, and the entries are still
        held."""
        if self._held:
            self._write(b"")

    def forget_held(self) -> None:
        """Drop the held entries, because their queue is deleted, or because the store is closed and the next start
        dispatches them again."""
        with self._writing:
            self._held.clear()

    def _write(self, entries: bytes) -> None:
        """Write the held entries and then ``entries``. Raises OSError: nothing was changed."""
        with self._writing:
            data = bytes(self._held) + entries
            if not data:
                return  # another thread has written the entries
            file = self._file
            if disk.pwrite(self._fd, data, file.wrote) != len(data):
                raise OSError(errno.ENOSPC, f"no space left for {file.path}")
            file.wrote += len(data)
            # Delete the entries from the start, and only after the write: the owner may read, and hold more entries,
            # meanwhile.
            del self._held[: len(data) - len(entries)]

    # ---- entries by index

    @property
    def first_index(self) -> int:
        """Index of the first entry on the disk."""
        return max(0, self.queue.min_offset) // self.entry_bytes

    @property
    def end_index(self) -> int:
        """Index one past the last entry."""
        return self.queue.max_offset // self.entry_bytes

    def entry(self, index: int) -> tuple[Any, ...]:
        """Return the fields of an entry, or (-1, 0) if the entry does not exist."""
        at = index * self.entry_bytes
        file = self._find(at) if index >= 0 else None
        if file is None or at + self.entry_bytes > file.start + file.wrote:
            return -1, 0
        return self.layout.unpack(file.read(at - file.start, self.entry_bytes))

    def file_bounds(self) -> list[tuple[int, int]]:
        """Return first and last index of every file that has entries, oldest first."""
        return [
            (file.start // self.entry_bytes, (file.start + file.wrote) // self.entry_bytes - 1)
            for file in self.queue.files
            if file.wrote
        ]

    def first_behind(self, physical_offset: int) -> int:
        """Return the index of the first entry with a record at or after an offset. Return the end of the queue if there
        is none.
        Files may be missing. The search treats a damaged or blank entry like the next sound entry. The result is not a
        blank."""

        def offset_of(index: int) -> int:
            for at in range(index, self.end_index):
                found, size = self.entry(at)[:2]
                if found >= 0 and 0 < size < BLANK_SIZE:
                    return int(found)
            return _NO_END

        bounds = self.file_bounds()
        if physical_offset <= 0 and bounds:
            return bounds[0][0]  # without a read: a start does this for every queue
        at = bisect_left(bounds, physical_offset, key=lambda bound: offset_of(bound[1]))
        if at == len(bounds):
            return self.end_index
        indexes = range(bounds[at][0], bounds[at][1] + 1)
        first = indexes.start + bisect_left(indexes, physical_offset, key=offset_of)
        while physical_offset > 0 and first < indexes.stop and self.entry(first)[1] == BLANK_SIZE:
            first += 1
        return first

    def _find(self, at: int) -> MappedFile | None:
        """Return the file that contains a logical byte, open for reading."""
        file = self.queue.find(at)
        if file is not None and file is not self._reading:
            self._take_up(file)
        return file

    def _take_up(self, file: MappedFile) -> None:
        """Open a file. Close the previous file unless it still gets entries or waits for a flush."""
        before, self._reading = self._reading, file
        if before is None:
            self.on_open(self)
        elif before is not self.queue.files[-1] and before.is_idle:
            before.close()

    def _open_last(self) -> None:
        """Prepare the last file for appends. Create a new file if the last file is full."""
        self.write_held()
        self.close_idle()
        self.on_open(self)
        files = self.queue.files
        if not files or files[-1].wrote == files[-1].size:
            self.queue.append(self.queue.create(files[-1].end if files else 0))
        self._file = self.queue.files[-1]
        self._reading = self._file
        self._fd, self._position = self._file.fd, self._file.wrote

    # ---- recovery

    def recover(self, *, clean: bool = True) -> None:
        """Find the last valid entry, starting at the third-last file, and drop everything after it.
        ``clean``: whether the store was closed cleanly. If not, the last entries may be torn."""
        files = self.queue.files
        for file in files[-_RECOVERED_FILES:]:
            valid_bytes = self._valid_bytes(file)
            if valid_bytes < file.size:
                self.queue.truncate(file.start + valid_bytes)
                break
        self.resume()
        self._find_newest()

    def recover_at(self, end: int) -> None:
        """Cut the queue at a logical byte, the end that a clean stop noted."""
        assert end <= self.queue.max_offset, "a queue is cut at or before its end"
        assert end % self.entry_bytes == 0, "a queue is cut between entries"
        self.queue.truncate(end)
        self.resume()
        self._find_newest()

    def _find_newest(self) -> None:
        self.recovered_record = self.newest_record()
        self.max_physical_offset = sum(self.recovered_record)

    def newest_record(self) -> tuple[int, int]:
        """Return physicalOffset and size of the record of the last entry that is not blank, or (-1, 0) without a
        record.
        Blank entries fill the start of at most one file."""
        return next((entry[:2] for _, entry in self._newest_first() if entry[1] != BLANK_SIZE), NO_RECORD)

    def _valid_bytes(self, file: MappedFile) -> int:
        """Return the number of bytes of valid entries at the start of a file."""
        position, chunk_bytes = 0, _SCAN_BYTES
        while position < file.size:
            whole = min(chunk_bytes - chunk_bytes % self.entry_bytes, file.size - position)
            valid_bytes = self.valid_count(file.read(position, whole)) * self.entry_bytes
            position += valid_bytes
            if valid_bytes < whole:
                break
            chunk_bytes = min(chunk_bytes * 4, _SCAN_BYTES_MAX)
        return position

    def truncate_physical(self, end: int) -> None:
        """Drop every entry with a record at or after a physical offset."""
        self._drop_from(end, lambda index, entry: False)

    def truncate_for_replay(
        self, start: int, is_record: Callable[[ConsumeQueueBase, int, tuple[Any, ...]], bool]
    ) -> None:
        """Drop every entry that a replay of the log from a physical offset on will create again.
        These entries may be torn: after a power cut only some sectors of the unflushed bytes are on the disk, and an
        entry may be in two sectors. An entry that is torn inside its physicalOffset may look too old.
        ``is_record``: returns True if the log holds the record of an entry at an index, or if the record was deleted.
        """

        def is_torn(index: int, entry: tuple[Any, ...]) -> bool:
            room = -(index * self.entry_bytes % self._file_bytes) % SECTOR_BYTES
            return 0 < room < _PLACE.size and not is_record(self, index, entry)

        self._drop_from(start, is_torn)  # the replay determines the first number of a queue that is now empty

    def forget_before(self, end: int) -> None:
        """Drop the entries of a deleted topic: all entries before a physical offset, the end of the deleted records. Do
        nothing if the queue has records after this offset."""
        if self.max_physical_offset > end:
            return
        self._drop_from(_NO_END, lambda index, entry: entry[0] < end)
        if self.first_index == self.end_index:
            for queue in self.file_queues:
                queue.destroy()  # the numbers begin at 0 again
            self.resume()
        self.max_physical_offset = max(self.max_physical_offset, end)

    def _drop_from(self, physical_offset: int, is_torn: Callable[[int, tuple[Any, ...]], bool]) -> None:
        """Drop entries from the end while they are torn or their records are at or after an offset. Stop at the first
        valid entry."""
        kept = self.first_index
        for index, entries in self._chunks_newest_first():
            if min(map(itemgetter(0), entries)) >= physical_offset:
                continue
            stays = [
                i for i, entry in enumerate(entries, index) if entry[0] < physical_offset and self.are_valid([entry])
            ]
            found = next((i for i in reversed(stays) if not is_torn(i, entries[i - index])), None)
            if found is not None:
                kept = found + 1
                break
        if kept < self.end_index:
            self.queue.truncate(kept * self.entry_bytes)
            self.resume()
            assert self.end_index == kept, "the queue ends at the cut"
        self._find_newest()

    def _newest_first(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yield index and fields of every entry, newest first."""
        for index, entries in self._chunks_newest_first():
            yield from zip(range(index + len(entries) - 1, index - 1, -1), reversed(entries), strict=True)

    def _chunks_newest_first(self) -> Iterator[tuple[int, list[tuple[Any, ...]]]]:
        """Yield the entries in chunks, newest chunk first: the index of the first entry, and the fields of each
        entry.
        """
        chunk_bytes = _SCAN_BYTES - _SCAN_BYTES % self.entry_bytes
        for file in reversed(self.queue.files):
            for end in range(file.wrote, 0, -chunk_bytes):
                start = max(0, end - chunk_bytes)
                entries = list(self.layout.iter_unpack(file.read(start, end - start)))
                yield (file.start + start) // self.entry_bytes, entries

    # ---- flushing and deleting

    def sync(self, *, unnamed: set[MappedFile] | None = None) -> None:
        """Wait until everything written so far is on the disk; called from a flush thread.
        ``unnamed``: see `FileQueue.sync`.
        Raises OSError: the sync failed."""
        self._dirty.pop(self, None)  # in this order: an append from now on adds the queue again
        self.is_dirty = False
        try:
            for queue in self.file_queues:
                for file in queue.refused():
                    if not self.is_whole(file):
                        raise BytesLost(file.path)
                queue.sync(unnamed=unnamed)
        except OSError:
            self.is_dirty = True
            self._dirty[self] = None
            raise
        if self.has_held:
            self.is_dirty = True
            self._dirty[self] = None

    def is_whole(self, file: MappedFile) -> bool:
        """Return True if the page cache still has the entries of a file that failed to sync.
        Where bytes were lost, the page has zeros or its older content. Then an entry consists of zeros, or its
        physicalOffset is not greater than the physicalOffset of the previous entry. A wrong tag code in the last entry
        is not detected."""
        start = max(0, file.again_from or 0) // self.entry_bytes
        raw = file.read(start * self.entry_bytes, file.wrote - start * self.entry_bytes)
        offsets = [entry[0] for entry in self.layout.iter_unpack(raw) if entry[1] != BLANK_SIZE]
        return self.valid_count(raw) * self.entry_bytes == len(raw) and all(map(operator.lt, offsets, offsets[1:]))

    def mark_synced(self) -> None:
        """Mark everything as durable."""
        for queue in self.file_queues:
            queue.mark_synced()

    def check(self, *, clean: bool = True) -> None:
        """Check the files without changing anything.
        ``clean``: whether the store was closed cleanly.
        Raises StoreMismatch: the length of a file does not match the settings."""
        for queue in self.file_queues:
            queue.found = queue.check(has_empty=not clean)

    def load(self) -> None:
        """Load the files on the disk, or the result of a previous `check`."""
        for queue in self.file_queues:
            queue.load()

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files with a last entry before a physical offset. Return the number of deleted files. Source: store.md
        §4.5.
        """

        def is_expired(file: MappedFile) -> bool:
            for position in range(file.size - self.entry_bytes, -1, -self.entry_bytes):
                physical_offset, size = _PLACE.unpack(file.read(position, _PLACE.size))
                if size != BLANK_SIZE:  # blanks do not show the offset of their records
                    return bool(physical_offset < min_physical_offset)
            return True

        return self.queue.drop_front(is_expired)

    def follow(self, min_physical_offset: int) -> int:
        """Make the queue begin where the log begins: delete expired files and correct the min offset. Return the number
        of deleted files."""
        if len(self.queue.files) <= 1 and self.min_offset == self.max_offset:
            return 0  # no message remains, and the newest file must stay
        count = self.drop_expired(min_physical_offset)
        self.correct_min_offset(min_physical_offset)
        return count

    def close_idle(self) -> bool:
        """Close the descriptors that no flush thread will use. Return True if no descriptor remains open.
        Close nothing while entries are held: the last file is needed to write them."""
        if self._held:
            return False
        self._fd, self._reading = -1, None
        for queue in self.file_queues:
            queue.close_idle()
        return all(file.is_idle for queue in self.file_queues for file in queue.files)

    def close(self) -> None:
        """Write held entries and close the descriptors. The next append or read opens them again.
        Raises OSError: held entries cannot be written."""
        self.write_held()
        self._fd, self._reading = -1, None
        for queue in self.file_queues:
            queue.close()

    def destroy(self) -> None:
        """Delete the files. The queue accepts no more entries: sends that wait for the disk may still refer to it.
        Raises OSError: a file cannot be removed."""
        self.max_physical_offset = _NO_END
        self.forget_held()
        self._dirty.pop(self, None)
        for queue in self.file_queues:
            queue.destroy()


def _ignore(queue: ConsumeQueueBase) -> None:
    """Do nothing: the default callback of a queue that is not in a table."""
