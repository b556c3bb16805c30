"""The extension of a consume queue: tag code, store time and filter bitmap of each message (``ConsumeQueueExt``).

==============  ====  ==============================================
field           size  value
==============  ====  ==============================================
size               2  size of the whole unit, 20 + bitMapSize, ≤ 32 767
tagsCode           8  the real tag code, or the delivery time
msgStoreTime       8  storeTimestamp of the message
bitMapSize         2  bytes of the bitmap, 0 without a bitmap
bitMap             n  Bloom bitmap of the SQL92 subscriptions
==============  ====  ==============================================

The consume-queue entry contains the unit's *address* instead of a tag code: its byte position minus 2^63. A unit needs
``size + 4`` free bytes. If a file has fewer, an ``i16 -1`` marks it as full, and the unit goes to the next file.

Bitmaps are stored here, not computed. The owner of the filters passes them (``bitmap_of`` of `MessageStore`).
Source: store.md §5, §17.3.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path

from msgspec import Struct

from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import MappedFile

__all__ = ["ADDRESS_BASE", "ADDRESS_MAX", "FILE_FULL", "FREE_BYTES", "UNIT", "ExtUnit", "QueueExt", "is_address"]

_log = logging.getLogger(__name__)

UNIT = struct.Struct(">hqqh")
_SIZE = struct.Struct(">h")
FILE_FULL = -1
FREE_BYTES = 4
ADDRESS_BASE = 1 << 63
ADDRESS_MAX = -2147483649
_UNIT_BYTES_MAX = 32767
assert UNIT.size == 20


def is_address(tags_code: int) -> bool:
    """Return True if a tag code is the address of an extension unit: addresses are less than every tag hash."""
    return tags_code <= ADDRESS_MAX


class ExtUnit(Struct, gc=False):
    """A unit of an extension file."""

    tags_code: int
    store_timestamp: int
    bitmap: bytes = b""


class QueueExt:
    """The extension files of one queue.
    ``directory``: ``consumequeue_ext/<topic>/<queueId>``.
    ``file_bytes``: size of its files."""

    __slots__ = ("_reading", "queue")

    def __init__(self, directory: Path, file_bytes: int) -> None:
        self.queue = FileQueue(
            [directory], file_bytes, setting="mappedFileSizeConsumeQueueExt", root=directory.parents[2]
        )
        self._reading: MappedFile | None = None

    def append(self, tags_code: int, store_timestamp: int, bitmap: bytes = b"") -> int:
        """Store a unit and return its address. Return the plain tag code if the unit cannot be stored."""
        size = UNIT.size + len(bitmap)
        if size > min(_UNIT_BYTES_MAX, self.queue.file_bytes - FREE_BYTES):
            return tags_code
        try:
            file = self._file_with_room(size + FREE_BYTES)
            file.write(file.wrote, UNIT.pack(size, tags_code, store_timestamp, len(bitmap)) + bitmap)
        except OSError as error:
            _log.error("%s: cannot store an extension unit: %s", self.queue.directories[0], error)
            return tags_code
        address = file.start + file.wrote - ADDRESS_BASE
        assert is_address(address), "an address differs from every tag hash"
        file.wrote += size
        return address

    def _file_with_room(self, free_bytes: int) -> MappedFile:
        last = self.queue.files[-1] if self.queue.files else None
        if last is not None and last.wrote + free_bytes <= last.size:
            return last
        if last is not None and last.wrote < last.size:
            if last.size - last.wrote >= _SIZE.size:
                last.write(last.wrote, _SIZE.pack(FILE_FULL))
            last.wrote = last.size
        file = self.queue.create(0 if last is None else last.end)
        self.queue.append(file)
        return file

    def read(self, address: int) -> ExtUnit | None:
        """Return the unit at an address, or None."""
        position = address + ADDRESS_BASE
        file = self.queue.find(position)
        if file is not self._reading:
            before, self._reading = self._reading, file
            if before is not None and before is not self.queue.files[-1] and before.is_idle:
                before.close()
        if file is None or file.wrote - position + file.start < UNIT.size:
            return None
        at = position - file.start
        size, tags_code, store_timestamp, bitmap_bytes = UNIT.unpack(file.read(at, UNIT.size))
        if size < 1 or bitmap_bytes < 0:
            return None
        return ExtUnit(tags_code, store_timestamp, file.read(at + UNIT.size, bitmap_bytes))

    def recover(self) -> None:
        """Scan all units and drop everything after the last one."""
        for file in self.queue.files:
            units_end, is_full = _units(file)
            if not is_full:
                self.queue.truncate(file.start + units_end)
                return

    def truncate_behind(self, address: int | None) -> None:
        """Drop the units after the unit at an address, the last unit with an entry. Drop all units if no unit has an
        entry.
        """
        if address is None:
            if self.queue.files:
                self.queue.truncate(self.queue.min_offset)
            return
        file = self.queue.find(address + ADDRESS_BASE)
        if file is not None:
            size = _SIZE.unpack(file.read(address + ADDRESS_BASE - file.start, _SIZE.size))[0]
            self.queue.truncate(address + ADDRESS_BASE + max(size, 0))

    def is_whole(self, file: MappedFile) -> bool:
        """Return True if the units of a file are contiguous up to its written end, or up to a rest that is too short
        for a unit.
        """
        end, is_full = _units(file)
        return is_full or end >= file.wrote or (file.wrote == file.size and file.size - end < UNIT.size + FREE_BYTES)

    def drop_expired(self, min_address: int) -> int:
        """Delete files that end before the unit of the oldest readable message. Return the number of deleted files."""
        return self.queue.drop_front(lambda file: file.end < min_address + ADDRESS_BASE)


def _units(file: MappedFile) -> tuple[int, bool]:
    """Return the end of the units in a file, and whether the file is marked as full there."""
    content = file.read(0, file.size)
    position = 0
    while position + UNIT.size + FREE_BYTES <= len(content):
        size = _SIZE.unpack_from(content, position)[0]
        if size == FILE_FULL:
            return position, True
        if size < UNIT.size or position + size > len(content):
            return position, False
        position += size
    return position, len(content) - position < UNIT.size + FREE_BYTES and content[
        position : position + 2
    ] == b"\xff\xff"
