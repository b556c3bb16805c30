"""What both kinds of queue share: files of fixed-size entries, in log order (``ConsumeQueueInterface``).

Every entry begins with ``i64 physicalOffset, i32 size`` of its record; what follows, and how entries relate to queue
offsets, is the kind's own affair (`consume_queue`, `batch_queue`). Entries are numbered by *index*: entry ``i`` lies at
logical byte ``i * entry_bytes``.

Only the dispatcher appends. Everything here is rebuilt from the log when it is lost. Descriptors are opened when first
needed, so that a store may have more queues than a process may have open files.
Owner thread only; flush threads call `sync`. Source: store.md §4, §6, §12.2.
"""

from __future__ import annotations

import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from rmqkit.store.file_queue import FileQueue
from rmqkit.store.mapped_file import MappedFile

__all__ = ["LogicQueue"]

_log = logging.getLogger(__name__)

_PLACE = struct.Struct(">qi")
_SCAN_BYTES = 4096
_SCAN_BYTES_MAX = 1 << 20
_RECOVERED_FILES = 3
_BLANK_BYTES = 0x7FFFFFFF
"""The size a blank entry claims; there is no such record."""


class LogicQueue(ABC):
    """One queue of one topic.

    Args:
        directory: where its files lie.
        file_bytes: size of its files, a multiple of the entry size.
        dirty: where the queue enters itself when it has something to flush.

    Attributes:
        next_offset: queue offset of the next message put; at or ahead of ``max_offset`` (the *queue offset table*).
        min_offset, max_offset: first readable message and one past the last, counted in messages.
        max_physical_offset: end of the newest record indexed, -1 if there is none.
        recovered_record: physicalOffset and size of that record when the queue was recovered, (-1, 0) without one.
    """

    layout: ClassVar[struct.Struct]
    """One entry."""
    setting: ClassVar[str]
    """The key that sets the file size."""

    def __init__(self, topic: str, queue_id: int, directory: Path, file_bytes: int, dirty: set[LogicQueue]) -> None:
        self.topic = topic
        self.topic_utf8 = topic.encode()
        self.queue_id = queue_id
        self.queue = FileQueue([directory], file_bytes, setting=self.setting)
        self.entry_bytes = self.layout.size
        self.next_offset = 0
        self.min_offset = 0
        self.max_offset = 0
        self.recovered_record = (-1, 0)
        self.max_physical_offset = -1
        self.is_dirty = False
        self._dirty = dirty
        self._file: MappedFile
        self._fd = -1
        self._position = 0
        self._file_bytes = file_bytes

    # ---- the kind's own

    @abstractmethod
    def append(self, queue_offset: int, physical_offset: int, size: int, tags_code: int, store_timestamp: int) -> None:
        """Index one record; ignored when it was indexed before.

        Raises:
            OSError: the disk refused; the queue is as before.
        """

    @abstractmethod
    def resume(self) -> None:
        """Take the end of the files for the end of the queue."""

    @abstractmethod
    def correct_min_offset(self, min_physical_offset: int) -> None:
        """Move the first readable message to the first one whose record still exists."""

    @abstractmethod
    def place(self, queue_offset: int) -> tuple[int, int]:
        """physicalOffset and size of the record that holds a message, (-1, 0) without one."""

    @abstractmethod
    def scan(self, queue_offset: int, bytes_max: int) -> Iterator[tuple[int, int, int, int, int]] | None:
        """Entries from a message on, within one file, in about ``bytes_max`` bytes of entries.

        Returns:
            physicalOffset, size, stored tagsCode, queue offset after it and number of messages of each; None when the
            file is missing.
        """

    @abstractmethod
    def next_file_offset(self, queue_offset: int) -> int:
        """Queue offset at which the file after the one of a message begins."""

    def tags_code(self, stored: int) -> int | None:
        """The real tag code of an entry; None when unknown."""
        return stored

    @staticmethod
    def is_valid(entry: tuple[Any, ...]) -> bool:
        """Whether recovery takes an entry for one."""
        return bool(entry[0] >= 0 and entry[1] > 0)

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
        """The fields of an entry; (-1, 0) where there is none."""
        at = index * self.entry_bytes
        file = self.queue.find(at) if index >= 0 else None
        if file is None or at + self.entry_bytes > file.start + file.wrote:
            return -1, 0
        return self.layout.unpack(file.read(at - file.start, self.entry_bytes))

    def file_bounds(self) -> list[tuple[int, int]]:
        """First and last index of every file that has entries, oldest first."""
        return [
            (file.start // self.entry_bytes, (file.start + file.wrote) // self.entry_bytes - 1)
            for file in self.queue.files
            if file.wrote
        ]

    def _open_last(self) -> None:
        """Make the last file ready for appends, and a new one last when it is full."""
        files = self.queue.files
        if not files or files[-1].wrote == files[-1].size:
            self.queue.append(self.queue.create(files[-1].end if files else 0))
        self._file = self.queue.files[-1]
        self._fd, self._position = self._file.fd, self._file.wrote

    # ---- recovery

    def recover(self) -> None:
        """Find the last valid entry, starting at the third-last file, and forget what follows it."""
        files = self.queue.files
        for file in files[-_RECOVERED_FILES:]:
            valid_bytes = self._valid_bytes(file)
            if valid_bytes < file.size:
                self.queue.truncate(file.start + valid_bytes)
                break
        self.resume()
        self._find_newest()

    def _find_newest(self) -> None:
        """Take the newest record from the last entry that is no blank; blanks fill the start of one file at most."""
        for index in range(self.end_index - 1, self.first_index - 1, -1):
            physical_offset, size = self.entry(index)[:2]
            if size != _BLANK_BYTES:
                self.recovered_record = physical_offset, size
                self.max_physical_offset = physical_offset + size
                return
        self.recovered_record, self.max_physical_offset = (-1, 0), -1

    def _valid_bytes(self, file: MappedFile) -> int:
        """Bytes of valid entries at the start of a file."""
        position, chunk_bytes = 0, _SCAN_BYTES
        while position < file.size:
            whole = chunk_bytes - chunk_bytes % self.entry_bytes
            for entry in self.layout.iter_unpack(file.read(position, min(whole, file.size - position))):
                if not self.is_valid(entry):
                    return position
                position += self.entry_bytes
            chunk_bytes = min(chunk_bytes * 4, _SCAN_BYTES_MAX)
        return position

    def truncate_physical(self, end: int) -> None:
        """Drop every entry of a record at or behind a physical offset."""
        first, kept = self.first_index, self.end_index
        while kept > first and self.entry(kept - 1)[0] >= end:
            kept -= 1
        if kept < self.end_index:
            self.queue.truncate(kept * self.entry_bytes)
            self.resume()
        self._find_newest()

    # ---- flushing and deleting

    def sync(self) -> None:
        """Wait until everything appended so far is on the disk; called from a flush thread.

        Raises:
            OSError: the disk refused.
        """
        self._dirty.discard(self)  # in this order: an append from here on enters the queue again
        self.is_dirty = False
        self.queue.sync()

    def mark_synced(self) -> None:
        """Take everything for being on the disk."""
        self.queue.mark_synced()

    def check(self) -> None:
        """Look at the files without changing anything.

        Raises:
            StoreMismatch: a file has another length than the settings say.
        """
        self.queue.check()

    def load(self) -> None:
        """Take over the files on the disk."""
        self.queue.load()

    def drop_expired(self, min_physical_offset: int) -> int:
        """Delete files whose last entry points below an offset; returns how many. Source: store.md §4.5."""

        def is_expired(file: MappedFile) -> bool:
            last = _PLACE.unpack(file.read(file.size - self.entry_bytes, _PLACE.size))
            return bool(last[0] < min_physical_offset)

        return self.queue.drop_front(is_expired)

    def follow(self, min_physical_offset: int) -> int:
        """Begin where the log begins: delete expired files, correct the min offset; returns how many files."""
        count = self.drop_expired(min_physical_offset)
        self.correct_min_offset(min_physical_offset)
        return count

    def close_idle(self) -> None:
        """Give back descriptors that no flush thread is going to use; opened again when needed."""
        self._fd = -1
        self.queue.close_idle()

    def close(self) -> None:
        """Give back descriptors; the next append or read opens what it needs again."""
        self._fd = -1
        self.queue.close()

    def destroy(self) -> None:
        """Delete the files."""
        self._dirty.discard(self)
        self.queue.destroy()
