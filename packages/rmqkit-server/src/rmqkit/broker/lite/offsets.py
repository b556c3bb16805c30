"""The offsets of groups in lite topics, in ``lite/offsets.*`` below the store.

A group has an array with one number for each slot of `LiteTable`, so an offset costs eight bytes. Changed offsets are
appended to the newest file every few seconds. Offsets of lite topics that expire are forgotten.

A file contains records: CRC-32 (4 bytes), size of the rest (2), offset (8), life (4), size of the group's name (2), the
group, ``parent$lite``. The offset -1 deletes an earlier record. A file grows with every commit. So a new file begins
when the newest one has twice as many records as there are offsets: each save also copies some thousand other offsets to
it, and when all are copied, the older files are deleted. A reader reads the files in order. A torn record ends a file:
its offsets are a few seconds old, and their messages are delivered again.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path

from rmqkit.errors import StoreUnavailable
from rmqkit.store.files import cut_file, make_directory
from rmqkit.store.lite.table import LiteTable
from rmqkit.system import disk

__all__ = ["LiteOffsets"]

_log = logging.getLogger(__name__)
_HEAD = struct.Struct(">IH")
_ROW = struct.Struct(">qIH")
_NONE = -1
_COPIED_MAX = 5000
_RECORDS_MIN = 10_000
_SENT_BYTES = 256 << 10


class LiteOffsets:
    """The offsets of all groups. Use it only on the event loop."""

    def __init__(self, store_root: Path, table: LiteTable) -> None:
        self._folder = store_root / "lite"
        self._table = table
        self._groups: dict[str, array[int]] = {}
        self._changed: dict[tuple[str, int], None] = {}
        self._deleted: list[tuple[str, str]] = []
        self._number = 1
        self._end = self._count = 0
        self._copying: Iterator[tuple[str, int]] | None = None
        self._old: list[Path] = []

    def get(self, group: str, slot: int) -> int:
        """Return the offset of a group in a lite topic, or -1."""
        offsets = self._groups.get(group)
        return _NONE if offsets is None or slot >= len(offsets) else offsets[slot]

    def commit(self, group: str, slot: int, offset: int) -> None:
        """Set the offset of a group in a lite topic."""
        offsets = self._groups.get(group)
        if offsets is None:
            offsets = self._groups[group] = array("q")
        if slot >= len(offsets):
            offsets.extend([_NONE] * (len(self._table.names) - len(offsets)))
        offsets[slot] = offset
        self._changed[group, slot] = None

    def forget(self, slot: int) -> None:
        """Forget the offsets in a lite topic that expired or was deleted. Its row must still have its name."""
        for group, offsets in self._groups.items():
            if slot < len(offsets) and offsets[slot] != _NONE:
                offsets[slot] = _NONE
                self._changed.pop((group, slot), None)
                self._deleted.append((group, self._name(slot)))

    def forget_group(self, group: str) -> None:
        """Forget the offsets of a group that was deleted."""
        for slot, offset in enumerate(self._groups.pop(group, ())):
            if offset != _NONE:
                self._changed.pop((group, slot), None)
                self._deleted.append((group, self._name(slot)))

    @property
    def count(self) -> int:
        """Number of offsets; it takes a millisecond for each million slots and group."""
        return sum(len(offsets) - offsets.count(_NONE) for offsets in self._groups.values())

    def groups(self) -> list[str]:
        return list(self._groups)

    def _name(self, slot: int) -> str:
        return f"{self._table.parent_of(slot).name}${self._table.names[slot]}"

    # ---- copies at slaves

    def records_after(self, number: int, position: int) -> tuple[int, int, bytes]:
        """Return the records after a place in the files, some hundred KiB at most, and the place after them. If a file
        has no such place, the records begin with the oldest file.
        Raises StoreUnavailable: a file cannot be read."""
        numbers = [*(int(path.suffix[1:]) for path in self._old), self._number]
        if number not in numbers or not 0 <= position <= self._size_of(number):
            number, position = numbers[0], 0
        while position >= self._size_of(number) and number != self._number:
            number, position = numbers[numbers.index(number) + 1], 0
        left = min(_SENT_BYTES, self._size_of(number) - position)
        if left <= 0:
            return number, position, b""
        try:
            descriptor = disk.open(self._path_of(number), os.O_RDONLY | os.O_CLOEXEC)
            try:
                content = disk.pread(descriptor, left, position)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise StoreUnavailable(f"{self._path_of(number)}: {error.strerror}: correct the disk") from error
        end = 0
        while end + _HEAD.size <= len(content) and (after := end + _HEAD.size + _size_at(content, end)) <= len(content):
            end = after
        return number, position + end, content[:end]

    def take(self, records: bytes) -> None:
        """Enter the records of a master. Those of lite topics that this broker does not have are left out."""
        for _ in self._load_records(records):
            pass

    def _size_of(self, number: int) -> int:
        """Return the size of a file up to the last record that was written to it."""
        if number == self._number:
            return self._end
        try:
            return disk.size(self._path_of(number))
        except OSError:
            return 0

    # ---- files

    def load(self) -> None:
        """Read the files. The table of lite topics is loaded. Raises StoreUnavailable: a file cannot be read."""
        names = disk.names(self._folder) if disk.is_directory(self._folder) else []
        paths = [self._folder / name for name in names if name.startswith("offsets.")]
        try:
            for path in paths:
                content = disk.read_file(path)
                self._end = self._count = 0
                for end in self._load_records(content):
                    self._end, self._count = end, self._count + 1
                if self._end < len(content):
                    said = "%s: dropping %d bytes after a torn record: some messages are delivered again"
                    _log.warning(said, path, len(content) - self._end)
                    cut_file(path, self._end)
        except OSError as error:
            raise StoreUnavailable(f"{error.filename or self._folder}: {error.strerror}: correct the disk") from error
        self._changed.clear()
        if paths:
            self._number = int(paths[-1].suffix[1:])
            self._old = paths[:-1]
            self._copying = self._all() if self._old else None

    def _load_records(self, content: bytes) -> Iterator[int]:
        at = 0
        while at + _HEAD.size + _ROW.size <= len(content):
            crc, size = _HEAD.unpack_from(content, at)
            start, end = at + _HEAD.size, at + _HEAD.size + size
            if end > len(content) or size < _ROW.size or zlib.crc32(content[start:end]) != crc:
                return
            offset, epoch, group_bytes = _ROW.unpack_from(content, start)
            names = content[start + _ROW.size : end]
            parent, _, name = names[group_bytes:].decode().partition("$")
            slot = self._table.find(parent, name)
            if slot is not None and (self._table.epochs[slot] == epoch or offset == _NONE):
                self.commit(names[:group_bytes].decode(), slot, offset)
            yield end
            at = end

    def save(self) -> None:
        """Append the changed offsets to the newest file. Raises StoreUnavailable: the disk refused; the next call tries
        again."""
        if self._copying is None and self._count > 2 * self.count + _RECORDS_MIN:
            self._old = [*self._old, self._path]
            self._number, self._end, self._count = self._number + 1, 0, 0
            self._copying = self._all()
        rows = list(self._changed)
        deleted = self._deleted
        copied: list[tuple[str, int]] = []
        for _ in range(_COPIED_MAX if self._copying is not None else 0):
            row = next(self._copying, None) if self._copying is not None else None
            if row is None:
                self._copying = None
                break
            copied.append(row)
        data = [self._record(group, slot) for group, slot in (*copied, *rows)]
        data += [_encoded(group, name, _NONE, 0) for group, name in deleted]
        if data:
            self._append(b"".join(data))
            self._count += len(data)
            self._changed, self._deleted = {}, []
        if self._copying is None and self._old:
            self._drop_old()

    def _record(self, group: str, slot: int) -> bytes:
        return _encoded(group, self._name(slot), self._groups[group][slot], self._table.epochs[slot])

    def _all(self) -> Iterator[tuple[str, int]]:
        for group, offsets in list(self._groups.items()):
            for slot, offset in enumerate(offsets):
                if offset != _NONE and self._groups.get(group) is offsets:
                    yield group, slot

    @property
    def _path(self) -> Path:
        return self._path_of(self._number)

    def _path_of(self, number: int) -> Path:
        return self._folder / f"offsets.{number:08d}"

    def _append(self, data: bytes) -> None:
        try:
            make_directory(self._folder)
            descriptor = disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                disk.write_all(descriptor, data, self._end)
            finally:
                disk.close(descriptor)
        except OSError as error:
            raise StoreUnavailable(f"cannot write {self._path}: {error.strerror}: free the disk") from error
        self._end += len(data)

    def _drop_old(self) -> None:
        try:
            descriptor = disk.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                disk.sync_file(descriptor)  # before the older copies of these offsets are deleted
            finally:
                disk.close(descriptor)
            for path in self._old:
                disk.remove(path, missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"cannot sync {self._path}: {error.strerror}: free the disk") from error
        self._old = []


def _size_at(content: bytes, at: int) -> int:
    return int(_HEAD.unpack_from(content, at)[1])


def _encoded(group: str, name: str, offset: int, epoch: int) -> bytes:
    encoded = group.encode()
    rest = _ROW.pack(offset, epoch, len(encoded)) + encoded + name.encode()
    return _HEAD.pack(zlib.crc32(rest), len(rest)) + rest
