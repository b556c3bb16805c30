"""The consume queue: the index of one topic queue, 20 bytes per message (``ConsumeQueue``).

==============  ====  ==================================================
field           size  value
==============  ====  ==================================================
physicalOffset     8  place of the record in the commit log
size               4  size of the record
tagsCode           8  Java hash of TAGS; delivery time in the delay topic; or the address of an extension unit
==============  ====  ==================================================

Entry ``i`` is message ``i`` of the queue and is at logical byte ``20 * i``, big-endian. A repeated append is recognised
by its physical offset and ignored, so that a part of the log can be dispatched twice. A later record with a number that
already has an entry belongs to a topic that was deleted and created again: the old entries are dropped (Java ignores
the record). If the first entry of a queue is not number 0, *blank* entries ``(0, 0x7FFFFFFF, 0)`` fill the file before
it. Blank entries also replace lost messages before a later message.

In a running store, entries are first *held* in memory, up to `HELD_BYTES_MAX`. They are written together in the next
flush cycle, or when this size is reached. Reads find held entries in memory. A process that reads the files beside the
broker sees them up to ``flushIntervalConsumeQueue`` later. A kill loses nothing: the log has the records, and the
checkpoint covers only entries that are in the files.

Invariants: ``max_offset`` entries end at the last byte, written or held. ``max_physical_offset`` is the end of the
newest indexed record. The owner thread adds held entries at the end. Any thread that writes held entries removes them
from the start, under one lock for all queues, after they are in the file. Source: store.md §4.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.queues.base import BLANK_SIZE, NO_RECORD, ConsumeQueueBase
from rmqkit.store.queues.queue_ext import ExtUnit, QueueExt, is_address
from rmqkit.system import disk

__all__ = ["BLANK_ENTRY", "ENTRY", "ENTRY_BYTES", "HELD_BYTES_MAX", "ConsumeQueue"]

_log = logging.getLogger(__name__)

ENTRY = struct.Struct(">qiq")
ENTRY_BYTES = ENTRY.size
BLANK_ENTRY = ENTRY.pack(0, BLANK_SIZE, 0)
_pack = ENTRY.pack
assert ENTRY_BYTES == 20
HELD_BYTES_MAX = 1024 * ENTRY_BYTES
"""Maximum number of bytes of entries that one queue holds in memory."""


class ConsumeQueue(ConsumeQueueBase):
    """A consume queue of a topic, in ``consumequeue/<topic>/<queueId>``.

    Attributes:
        ext: its extension files, or None.
        held_bytes_max: maximum number of bytes of entries to hold. With 0, each entry is written immediately, as
            recovery requires.
    """

    __slots__ = ("ext", "held_bytes_max")
    layout = ENTRY
    setting = "mappedFileSizeConsumeQueue"

    def __init__(
        self,
        topic: str,
        queue_id: int,
        directory: Path,
        file_bytes: int,
        dirty: dict[ConsumeQueueBase, None],
        ext: QueueExt | None = None,
    ) -> None:
        super().__init__(topic, queue_id, directory, file_bytes, dirty)
        self.ext = ext
        self.held_bytes_max = 0
        if ext is not None:
            self.file_queues = self.queue, ext.queue

    # ---- appending

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
        Raises OSError: a write failed; the queue is unchanged."""
        end = physical_offset + size
        # Compare the place in the log, not the number: recovery repeats records, and the numbers of a recreated topic
        # begin at 0.
        if end <= self.max_physical_offset:
            return
        if queue_offset != self.max_offset:
            self._make_ready_for(queue_offset)
        if self._fd < 0 or self._position == self._file_bytes:
            self._open_last()
        if self.ext is not None:
            tags_code = self.ext.append(tags_code, store_timestamp, bitmap)
        self._take(_pack(physical_offset, size, tags_code), 1, end)

    def append_run(self, queue_offset: int, physical_offset: int, end: int, entries: bytes) -> bool:
        """Index the records between two physical offsets together.
        Return False, with nothing done, if they must be indexed one by one: the queue has an extension, the records are
        not the next records, or their entries do not fit into the file.
        Raises OSError: a write failed; the queue is unchanged."""
        if self.ext is not None or queue_offset != self.max_offset or physical_offset < self.max_physical_offset:
            return False
        if self._fd < 0 or self._position == self._file_bytes:
            self._open_last()
        position = self._position
        assert position == self.max_offset * ENTRY_BYTES % self._file_bytes, "entry i is at byte i * 20"
        if position + len(entries) > self._file_bytes:
            return False
        self._take(entries, len(entries) // ENTRY_BYTES, end)
        return True

    def _take(self, entries: bytes, count: int, end: int) -> None:
        """Hold entries in memory, or write them together with all held entries in one write. Raises OSError: nothing
        was changed."""
        held = self._held
        if len(held) + len(entries) <= self.held_bytes_max:
            held += entries
        else:
            self._write(entries)
        self._position += len(entries)
        self.max_offset += count
        self.max_physical_offset = end
        if not self.is_dirty:
            self.is_dirty = True
            self._dirty[self] = None

    def _make_ready_for(self, queue_offset: int) -> None:
        """Prepare the queue for an entry that is not the expected next one."""
        self.write_held()
        if queue_offset > max(self.max_offset, self.next_offset):
            self.on_gap(self)
        is_empty = self.min_offset >= self.max_offset
        if not self.queue.files or (is_empty and queue_offset > self.max_offset):
            self._start_at(queue_offset)
            return
        place = self.topic, self.queue_id
        if queue_offset < self.max_offset:
            forgotten = self.max_offset - max(queue_offset, self.min_offset)
            _log.warning("%s-%d: renumbered from %d on, %d messages dropped", *place, queue_offset, forgotten)
            self._restart_at(queue_offset)
        elif queue_offset < self.next_offset:  # the log does not have the messages with these numbers
            self.fill_gap(queue_offset, self.max_physical_offset, queue_offset - self.max_offset)
        else:
            said = "%s-%d: %d messages from %d on are not in the log: consumers find message %d under the number %d"
            _log.error(said, *place, queue_offset - self.max_offset, self.max_offset, queue_offset, self.max_offset)

    def fill_gap(self, queue_offset: int, physical_offset: int, gap_max: int) -> None:
        """Append at most ``gap_max`` blank entries for lost messages before the message with a number and a physical
        offset. Blank entries have no extension unit.
        The caller must append an entry next: Apache's broker would use the size in a last blank as the size of a
        record.
        Do nothing if the queue has no files, because its first number is free, if more messages are missing, or if the
        message is older than the queue, such as a message of a deleted topic.
        Raises OSError: a write failed; some entries may have been appended."""
        if not self.queue.files or not 0 < queue_offset - self.max_offset <= gap_max:
            return
        if physical_offset < self.max_physical_offset:
            return
        said = "%s-%d: %d messages from %d on are not in the log: lost, their entries are blank"
        _log.warning(said, self.topic, self.queue_id, queue_offset - self.max_offset, self.max_offset)
        ext, self.ext = self.ext, None
        try:
            while (left := queue_offset - self.max_offset) > 0:
                at = self.max_physical_offset
                is_taken = self.append_run(self.max_offset, at, at, BLANK_ENTRY * min(left, self.room))
                assert is_taken, "blanks fit and follow the last entry"
        finally:
            self.ext = ext

    @property
    def room(self) -> int:
        """Number of further entries that fit in the file of the next entry."""
        self.write_held()
        return (self._file_bytes - self.queue.max_offset % self._file_bytes) // ENTRY_BYTES

    def _start_at(self, queue_offset: int) -> None:
        """Begin a queue at an entry, because its earlier messages are gone. The first file has blanks before this
        entry."""
        self.close()
        for queue in self.file_queues:
            queue.destroy()  # entries of removed records, if any
        expected = queue_offset * ENTRY_BYTES
        start = expected - expected % self._file_bytes
        file = self.queue.create(start)
        try:
            file.write(0, BLANK_ENTRY * ((expected - start) // ENTRY_BYTES))
        except OSError:
            file.delete()
            raise
        file.wrote = expected - start
        self.queue.append(file)
        self.resume()
        self.min_offset = queue_offset

    def _restart_at(self, queue_offset: int) -> None:
        """Drop the entries from a number on, because a later record has the same number.
        Numbers decrease in a log only if a topic was deleted and created again: the dropped entries belong to the old
        topic."""
        if queue_offset < self.first_index:
            self._start_at(queue_offset)
            return
        self.queue.truncate(queue_offset * ENTRY_BYTES)
        self.resume()
        self.min_offset = min(self.min_offset, queue_offset)
        if self.ext is not None:
            self.ext.truncate_behind(self._last_address())

    # ---- opening

    def recover(self, *, clean: bool = True) -> None:
        """Find the last valid entry. Drop everything after it, and the extension units without an entry."""
        super().recover(clean=clean)
        if self.ext is not None:
            self.ext.recover()
            if clean:  # a torn address looks too low: after a crash `truncate_for_replay` cuts the units
                self.ext.truncate_behind(self._last_address())

    def _last_address(self) -> int | None:
        """Return the last extension address in the queue."""
        codes = (int(tags_code) for _, (_, _, tags_code) in self._newest_first())
        return next((code for code in codes if is_address(code)), None)

    def _drop_from(self, physical_offset: int, is_torn: Callable[[int, tuple[Any, ...]], bool]) -> None:
        """Drop entries from the end, and their extension units."""
        self.write_held()
        super()._drop_from(physical_offset, is_torn)
        if self.ext is not None:
            self.ext.truncate_behind(self._last_address())

    def resume(self) -> None:
        """Set the end of the queue to the end of the files."""
        self.max_offset = self.end_index
        self._fd = -1

    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move the first readable message to the first message that still has a record."""
        if self.queue.files:
            self.min_offset = max(self.min_offset, self.first_behind(min_physical_offset))

    # ---- reading

    def read(self, queue_offset: int, count: int) -> bytes:
        """Return up to ``count`` entries from a number on, within one file, or empty bytes if the file is missing."""
        held, before = b"", 0
        if self._held and queue_offset + count > self.max_offset - len(self._held) // ENTRY_BYTES:
            # The held entries end at max_offset. Entries that another thread removed before this copy are in the file.
            held = bytes(self._held)
            before = (self.max_offset - queue_offset) * ENTRY_BYTES - len(held)
            if before <= 0:
                return held[-before : count * ENTRY_BYTES - before]
        at = queue_offset * ENTRY_BYTES
        file = self._find(at)
        if file is None:
            return b""
        position = at - file.start
        raw = disk.pread(file.fd, max(0, min(count * ENTRY_BYTES, file.wrote - position)), position)
        return (raw[:before] + held)[: count * ENTRY_BYTES] if held and file is self._file else raw

    def entry(self, index: int) -> tuple[Any, ...]:
        """Return the fields of an entry, held or in the files, or (-1, 0) if the entry does not exist."""
        if self._held and 0 <= index < self.max_offset:
            raw = self.read(index, 1)
            return ENTRY.unpack(raw) if raw else NO_RECORD
        return super().entry(index)

    @property
    def end_index(self) -> int:
        """Index one past the last entry, held or in the files."""
        return self.max_offset if self._held else super().end_index

    def file_bounds(self) -> list[tuple[int, int]]:
        """Return first and last index of every file that has entries or will get the held entries, oldest first."""
        if not self._held:
            return super().file_bounds()
        first = self.queue.files[-1].start // ENTRY_BYTES
        return [bound for bound in super().file_bounds() if bound[0] < first] + [(first, self.max_offset - 1)]

    def newest_record(self) -> tuple[int, int]:
        """Return physicalOffset and size of the record of the last entry that is not blank, or (-1, 0) without a
        record."""
        newest = bytes(self._held[-ENTRY_BYTES:])  # not a blank, because an entry always follows blanks
        if not newest:
            return super().newest_record()
        physical_offset, size, _ = ENTRY.unpack(newest)
        return physical_offset, size

    def place(self, queue_offset: int) -> tuple[int, int]:
        """Return physicalOffset and size of a message's record, or (-1, 0) without a record."""
        entry = self.entry(queue_offset)
        return entry[0], entry[1]

    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Iterate over entries within one file, starting with the entry of a message."""
        raw = self.read(queue_offset, -(-bytes_max // ENTRY_BYTES))
        return _numbered(raw, queue_offset) if raw else None

    def next_file_offset(self, queue_offset: int) -> int:
        """Return the queue offset at which the file after the file of a message begins."""
        return (queue_offset * ENTRY_BYTES // self._file_bytes + 1) * (self._file_bytes // ENTRY_BYTES)

    def unit(self, stored: int) -> ExtUnit | None:
        """Return the extension unit at the address in an entry's tag code, or None if there is none."""
        return self.ext.read(stored) if self.ext is not None and is_address(stored) else None

    def is_whole(self, file: MappedFile) -> bool:
        """Return True if the page cache still has the data of a file that failed to sync."""
        if self.ext is not None and file in self.ext.queue.files:
            return self.ext.is_whole(file)
        return super().is_whole(file)

    def follow(self, min_physical_offset: int) -> int:
        """Make the queue begin where the log begins, and the extension at the unit of the first readable message."""
        count = super().follow(min_physical_offset)
        if self.ext is None or self.min_offset >= self.max_offset:
            return count
        address = self.entry(self.min_offset)[2]
        return count + (self.ext.drop_expired(address) if is_address(address) else 0)


def _numbered(raw: bytes, queue_offset: int) -> Iterator[tuple[int, int, int, int, int]]:
    for physical_offset, size, tags_code in ENTRY.iter_unpack(raw):
        queue_offset += 1
        yield physical_offset, size, tags_code, queue_offset, 1
