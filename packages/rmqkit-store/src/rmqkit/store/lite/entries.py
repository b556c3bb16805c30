"""The entries of all light queues of lite topics, in the order of the log, in ``lite/entries``.

=================  ======  ====  =====================================================================
field              offset  size  value
=================  ======  ====  =====================================================================
physicalOffset          0     8  place of the record in the commit log
size                    8     4  size of the record
slot                   12     4  number of the lite topic's row in `LiteTable`
queueOffset            16     8  number of the message in its light queue
epoch                  24     4  life of the lite topic
storeTimestamp         28     8  ms
previous               36     8  index of the queue's entry before this one, -1 without one in this life
jump                   44     8  index of an earlier entry of the queue, -1 without one
tagsCode               52     4  Java hash of TAGS
=================  ======  ====  =====================================================================

The entries of one queue are a list from its newest entry back to its oldest. The jumps make it a skip list: a search
reads at most about three times the binary logarithm of the queue's length (Myers, "An applicative random-access stack",
1983). All queues share the files, so a message of any lite topic is an append. Files expire from the front, like the
files of the log, and a queue's list ends where the files begin.

In a running store, new entries are held in memory until the next flush cycle, like those of consume queues
(`rmqkit.store.queues.consume_queue`): a write for each run of messages would be a third of the cost of the run. A kill
loses nothing, because recovery enters the messages after the last entry from the log.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.queues.base import ConsumeQueueBase

__all__ = ["LITE_ENTRY", "LiteEntries", "LiteEntry"]

LITE_ENTRY = struct.Struct(">qiIqIqqqi")
assert LITE_ENTRY.size == 56
_unpack = LITE_ENTRY.unpack_from
_LINKS_AT = 16
_unpack_links = struct.Struct(">q20xq").unpack_from
_BYTES = LITE_ENTRY.size
_HELD_BYTES_MAX = 1024 * _BYTES


class LiteEntry(Struct, frozen=True, gc=False, array_like=True):
    """One entry, with its fields in the order of the file."""

    physical_offset: int
    size: int
    slot: int
    number: int
    epoch: int
    store_timestamp: int
    previous: int
    jump: int
    tags_code: int


class LiteEntries(ConsumeQueueBase):
    """The entries of all lite topics. Their index is their number in the order of the log."""

    __slots__ = ("_held_bytes_max",)
    layout = LITE_ENTRY
    setting = "mappedFileSizeLiteQueue"

    def __init__(self, directory: Path, file_bytes: int, dirty: dict[ConsumeQueueBase, None]) -> None:
        super().__init__("rmq_sys_lite", 0, directory, file_bytes, dirty)
        self._held_bytes_max = 0

    def hold_entries(self) -> None:
        """Allow new entries to be held in memory, until a flush cycle calls `write_held`."""
        self._held_bytes_max = _HELD_BYTES_MAX

    def append_all(self, entries: bytes, end: int) -> None:
        """Append packed entries, in the order of their records. ``end``: physical end of the last record. The entries
        that fill a file are written, so that held entries always belong to the last file.
        Raises OSError: a write failed. Some entries may have been appended; the call can be repeated with the rest."""
        done = 0
        while done < len(entries):
            if self._fd < 0 or self._position == self._file_bytes:
                self._open_last()
            room = (self._file_bytes - self._position) // _BYTES * _BYTES
            part = entries[done : done + room]
            if len(part) < room and len(self._held) + len(part) <= self._held_bytes_max:
                self._held += part
            else:
                self._write(part)
            self._position += len(part)
            done += len(part)
            self.max_offset += len(part) // _BYTES
            if not self.is_dirty:
                self.is_dirty = True
                self._dirty[self] = None
        self.max_physical_offset = end

    def at(self, index: int) -> LiteEntry | None:
        """Return an entry, or None if its file has expired."""
        if index < 0:
            return None
        position = index * _BYTES
        file = self._reading
        if file is None or not file.start <= position < file.end:
            file = self._find(position)
        if file is None or position + _BYTES > file.start + file.wrote:
            return self._held_at(index)
        return LiteEntry(*_unpack(file.view, position - file.start))

    def _held_at(self, index: int) -> LiteEntry | None:
        """Return an entry that is held in memory, or that another thread has just written. Return None if there is no
        such entry."""
        # Count from the end: the thread that writes held entries removes them from the start, after the write.
        before_end = (self.max_offset - index) * _BYTES
        raw = self._held[-before_end : _BYTES - before_end or None] if before_end > 0 else b""
        if len(raw) == _BYTES:
            return LiteEntry(*_unpack(raw))
        file = self._find(index * _BYTES)
        if file is None or (index + 1) * _BYTES > file.start + file.wrote:
            return None
        return LiteEntry(*_unpack(file.view, index * _BYTES - file.start))

    def links(self, index: int) -> tuple[int, int] | None:
        """Return the queue offset and the jump of an entry, or None if its file has expired."""
        position, file = index * _BYTES, self._reading
        if file is None or index < 0 or not file.start <= position < file.end or position >= file.start + file.wrote:
            entry = self.at(index)
            return None if entry is None else (entry.number, entry.jump)
        number, jump = _unpack_links(file.view, position - file.start + _LINKS_AT)
        return number, jump

    def first_where(self, tail: int, is_reached: Callable[[LiteEntry], bool]) -> LiteEntry | None:
        """Return the oldest entry of a queue for which a condition holds, searching from the entry at index ``tail``
        back. The condition holds for an entry if it holds for an older entry of the queue. Return None if it does not
        hold for the entry at ``tail``."""
        found = self.at(tail)
        if found is None or not is_reached(found):
            return None
        while True:
            far = self.at(found.jump)
            if far is None or not is_reached(far):
                far = self.at(found.previous)
            if far is None or not is_reached(far):
                return found
            found = far

    def chunks(self) -> Iterator[tuple[int, MappedFile, int]]:
        """Write the held entries. Yield each file that has entries, oldest first: index of its first entry, the file,
        and its bytes with entries. Raises OSError: held entries cannot be written."""
        self.write_held()
        for file in self.queue.files:
            if file.wrote:
                yield file.start // _BYTES, file, file.wrote - file.wrote % _BYTES

    # ---- as a queue

    def append(
        self,
        queue_offset: int,
        physical_offset: int,
        size: int,
        tags_code: int,
        store_timestamp: int,
        bitmap: bytes = b"",
    ) -> None:
        raise NotImplementedError("entries of lite topics are appended by LiteQueues")

    def resume(self) -> None:
        """Set the end to the end of the files."""
        self._fd = -1
        self.min_offset, self.max_offset = self.first_index, self.end_index

    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Set the first index to the first entry on the disk: each queue finds its own first message."""
        self.min_offset = self.first_index

    def _drop_from(self, physical_offset: int, is_torn: Callable[[int, tuple[Any, ...]], bool]) -> None:
        """Drop entries from the end."""
        self.write_held()
        super()._drop_from(physical_offset, is_torn)

    def place(self, queue_offset: int) -> tuple[int, int]:
        entry = self.entry(queue_offset)
        return entry[0], entry[1]

    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        raise NotImplementedError("a queue of a lite topic is read with LiteQueue")

    def next_file_offset(self, queue_offset: int) -> int:
        return (queue_offset * _BYTES // self._file_bytes + 1) * (self._file_bytes // _BYTES)

    def is_whole(self, file: MappedFile) -> bool:
        """Return True if the page cache still has the entries of a file that failed to sync. Records that are in
        several light queues have several entries."""
        start = max(0, file.again_from or 0) // _BYTES
        raw = file.read(start * _BYTES, file.wrote - start * _BYTES)
        offsets = [entry[0] for entry in LITE_ENTRY.iter_unpack(raw)]
        return self.valid_count(raw) * _BYTES == len(raw) and all(map(operator.le, offsets, offsets[1:]))
