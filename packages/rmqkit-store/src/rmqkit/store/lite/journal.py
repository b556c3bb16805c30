"""The journal of lite topics, ``lite/topics``: their names, and the state that the entries do not have.

The file is a list of records. The last record of a slot is valid. A record has these fields, then the name:

==============  ====  =======================================================================================
field           size  value
==============  ====  =======================================================================================
crc                4  CRC-32 of the rest of the record
kind               1  see `Kind`
slot               4  row of the lite topic in `LiteTable`; 0 for `Kind.FLOOR`
epoch              4  life of the lite topic
first              8  number of the first message of this life
next               8  number of the next message
born               8  physical offset of the first record: an entry of the slot before it belongs to another name
storeTimestamp     8  time of the newest message, ms
nameBytes          2  size of the name: ``parent$lite`` in UTF-8, or the parent for `Kind.FLOOR`
==============  ====  =======================================================================================

Records are written every few seconds, and before anything that they replace is deleted. After a crash, the log has the
names of newer lite topics. Records after a torn record are dropped: the entries and the log replace them.
"""

from __future__ import annotations

import enum
import logging
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from rmqkit.store.files import cut_file, make_directory, sync_directory, write_durably
from rmqkit.system import disk

__all__ = ["Kind", "LiteJournal", "LiteNote"]

_log = logging.getLogger(__name__)
_HEAD = struct.Struct(">IBIIqqqqH")
_CRC_BYTES = 4


class Kind(enum.IntEnum):
    """The state of a slot.

    Attributes:
        FREE: the slot has no lite topic.
        LIVE, DEAD: the lite topic lives, or it has expired and its name is remembered.
        FLOOR: no slot. ``epoch`` is the first life of new lite topics of a parent.
    """

    FREE = 0
    LIVE = 1
    DEAD = 2
    FLOOR = 3


class LiteNote(Struct, frozen=True, gc=False):
    """One record of the journal."""

    kind: Kind
    slot: int
    epoch: int
    first: int
    next: int
    born: int
    store_timestamp: int
    name: str

    def encoded(self) -> bytes:
        """Return the record as stored."""
        name = self.name.encode()
        fields = self.slot, self.epoch, self.first, self.next, self.born, self.store_timestamp
        rest = _HEAD.pack(0, self.kind, *fields, len(name))[_CRC_BYTES:] + name
        return zlib.crc32(rest).to_bytes(_CRC_BYTES, "big") + rest


class LiteJournal:
    """The file of the journal.

    Attributes:
        count: number of records in the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self._is_unsynced = False
        self._is_doubted = False
        self.count = 0

    def load(self) -> Iterator[LiteNote]:
        """Yield the records of the file, and cut the file at the first torn record.
        Raises OSError: the file cannot be read or cut."""
        content = disk.read_file(self._path) if disk.exists(self._path) else b""
        self._end = self.count = 0
        for note, end in decoded(content):
            self._end, self.count = end, self.count + 1
            yield note
        if self._end < len(content):
            said = "%s: dropping %d bytes after a torn record: the log replaces them"
            _log.warning(said, self._path, len(content) - self._end)
            cut_file(self._path, self._end)
        self._is_doubted = self._end > 0

    def append(self, notes: Iterable[LiteNote], *, is_durable: bool) -> None:
        """Append records. ``is_durable``: wait until the whole file is on the disk. After a failed sync, also of an
        earlier process, the system may consider pages as written that are not on the disk. So the first wait of a
        process, and the first after a failure, write the whole file again.
        Raises OSError: the write failed."""
        data = [note.encoded() for note in notes]
        if not data and not (is_durable and self._is_unsynced):
            return
        is_new = not disk.exists(self._path)
        make_directory(self._path.parent)
        descriptor = disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            joined = b"".join(data)
            if is_durable and self._is_doubted:
                disk.write_all(descriptor, disk.pread(descriptor, self._end, 0), 0)
            disk.write_all(descriptor, joined, self._end)
            self._is_unsynced = True
            if is_durable:
                self._is_doubted = True
                disk.sync_data(descriptor)
                self._is_unsynced = self._is_doubted = False
        finally:
            disk.close(descriptor)
        if is_new and is_durable:
            sync_directory(self._path.parent)
        self._end += len(joined)
        self.count += len(data)

    def rewrite(self, notes: Iterable[LiteNote]) -> None:
        """Replace the file by these records, durably. Raises OSError: the write failed; the file is unchanged."""
        data = [note.encoded() for note in notes]
        content = b"".join(data)
        make_directory(self._path.parent)
        aside = self._path.with_suffix(".tmp")
        write_durably(aside, content)
        disk.rename(aside, self._path)
        sync_directory(self._path.parent)
        self._end, self.count, self._is_doubted = len(content), len(data), False


def decoded(content: bytes) -> Iterator[tuple[LiteNote, int]]:
    """Yield each record at the start of a journal with its end, up to the first torn record."""
    at = 0
    while at + _HEAD.size <= len(content):
        crc, kind, slot, epoch, first, following, born, stored_ms, name_bytes = _HEAD.unpack_from(content, at)
        end = at + _HEAD.size + name_bytes
        if end > len(content) or zlib.crc32(content[at + _CRC_BYTES : end]) != crc:
            return
        name = content[at + _HEAD.size : end].decode()
        yield LiteNote(Kind(kind), slot, epoch, first, following, born, stored_ms, name), end
        at = end
