"""One file of a fixed-size file queue (``MappedFile``).

The name is the logical offset of the first byte, 20 digits; the file has its full size from the start and is sparse.
Bytes are written with ``pwrite``, never through a mapping: a full disk is then an `OSError` that can be answered,
not a signal that ends the process; on Linux both see the same page cache. The commit log is read through a read-only
mapping that its slices keep alive, so a deleted or closed file stays readable for whoever still sends from it.

Not handled here: what the bytes mean, which file follows (`file_queue`), when to flush (`flush`).
Source: store.md §2.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from rmqkit.store.files import reserve, sync_data, write_all

__all__ = ["SECTOR_BYTES", "BytesLost", "MappedFile", "changing_back", "file_name"]

SECTOR_BYTES = 512
"""What a disk writes whole or not at all."""

_CHUNK_BYTES = 1 << 20
changing_back = threading.Lock()
"""Held while bytes are written again, and while a file is cut: both concern bytes that are there already."""
_WARM_BYTES = 16 << 20  # flushLeastPagesWhenWarmMapedFile, 4096 pages


def file_name(start: int) -> str:
    """The name of the file that begins at a logical offset."""
    return f"{start:020d}"


class BytesLost(OSError):
    """The page cache does not hold any more what a refused sync did not bring to the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EIO, "the system dropped bytes that it could not write", str(path))


class MappedFile:
    """A file of ``size`` bytes that begins at logical offset ``start``.

    Attributes:
        wrote: bytes from the start of the file that hold data.
        synced: bytes from the start of the file that are known to be on the disk; -1 when zeros behind are not.
        is_named_durably: whether the file's name is known to be on the disk.
        again_from: position from which the next `sync` has to write the bytes again, as the last one failed; -1 when
            zeros behind a cut are among them, None when it did not fail.
    """

    __slots__ = (
        "_fd",
        "_is_deleted",
        "_view",
        "again_from",
        "is_named_durably",
        "path",
        "size",
        "start",
        "synced",
        "wrote",
    )

    def __init__(self, path: Path, start: int, size: int, *, wrote: int) -> None:
        self.path = path
        self.start = start
        self.size = size
        self.wrote = wrote
        self.synced = 0
        self.is_named_durably = True
        self.again_from: int | None = None
        self._is_deleted = False
        self._fd = -1
        self._view: memoryview | None = None

    @classmethod
    def create(cls, path: Path, start: int, size: int) -> MappedFile:
        """Make a new sparse file. Raises OSError: the disk refused; no file is left behind."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = cls(path, start, size, wrote=0)
        file.is_named_durably = False
        # A crash may leave a file of which the queue does not know, an extension without its queue: start from zeros.
        file._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(file._fd, size)
        except OSError:
            file.delete()
            raise
        return file

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def is_idle(self) -> bool:
        """Return True if no flush thread is going to use the descriptor."""
        return self.synced >= self.wrote and self.is_named_durably

    @property
    def fd(self) -> int:
        if self._fd < 0:
            if self._is_deleted:  # by now the path may be another file's
                raise FileNotFoundError(errno.ENOENT, "deleted", str(self.path))
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def open_read_only(self) -> None:
        """Open the file for reads alone, of a store that may not be written. Raises OSError: it cannot be read."""
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def view(self) -> memoryview:
        """The whole file, mapped read-only; slices stay valid for as long as somebody holds them."""
        if self._view is None:
            self._view = memoryview(mmap.mmap(self.fd, self.size, access=mmap.ACCESS_READ))
        return self._view

    def read(self, position: int, size: int) -> bytes:
        """Copy out bytes; fewer when the file ends."""
        return os.pread(self.fd, size, position)

    def write(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at a position. Raises OSError: the disk refused; a part may have been written."""
        write_all(self.fd, data, position)

    def sync(self) -> None:
        """Wait until the written bytes are on the disk; a file deleted meanwhile needs no disk.

        A refused sync proves nothing about later ones: the kernel takes the pages for written, and the next call
        succeeds without them. So the next `sync` writes the bytes again first. Whoever calls it after a refusal has to
        check before that the page cache still holds what was written: XFS and btrfs drop it.
        Raises OSError: the disk refused; what was written since the last `sync` may be lost."""
        wrote = self.wrote  # before the call: what the owner writes meanwhile may miss the disk
        assert wrote <= self.size, "a file holds what was written to it"
        try:
            if self.again_from is not None:
                with changing_back:  # what the owner cuts off meanwhile must not come back
                    wrote = self.wrote
                    self._write_again(self.again_from, wrote)
            sync_data(self.fd)
        except OSError:
            if not self._is_deleted:
                self.again_from = self.synced if self.again_from is None else min(self.synced, self.again_from)
                raise
        self.again_from = None
        self.synced = wrote

    def _write_again(self, start: int, end: int) -> None:
        """Write bytes that are not on the disk again, with the content of the page cache."""
        if start < 0:
            raise BytesLost(self.path)  # the zeros behind a cut: the owner may append there now
        for position in range(start, end, _CHUNK_BYTES):
            self.write(position, self.read(position, min(_CHUNK_BYTES, end - position)))

    def warm(self, *, is_wanted: Callable[[], bool]) -> None:
        """Give a new file its blocks and its pages (``warmMapedFileEnable``), which takes as long as writing it all.
        A later full disk then concerns other files only, and a flush writes data without looking for room. The zeros go
        to the disk bit by bit, as the first flush of the file would wait for all of them; it ends early when they are
        no longer wanted. Source: store.md §13.6.
        Raises OSError: the disk has no room for the file."""
        reserve(self.fd, self.size)
        zeros = bytes(min(_WARM_BYTES, self.size))
        for position in range(0, self.size, _WARM_BYTES):
            self.write(position, memoryview(zeros)[: self.size - position])
            sync_data(self.fd)
            if not is_wanted():
                return

    def clear_from(self, position: int) -> bool:
        """Turn everything behind a position into zeros, holes staying holes; whether there was anything else."""
        is_changed = False
        while position < self.size:
            try:
                position = os.lseek(self.fd, position, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole follows
                break
            data_end = min(os.lseek(self.fd, position, os.SEEK_HOLE), position + _CHUNK_BYTES)
            chunk, zeros = self.read(position, data_end - position), bytes(data_end - position)
            if chunk != zeros:
                self.write(position, zeros)
                is_changed = True
            position += len(chunk)
        return is_changed

    def close(self) -> None:
        """Give the descriptor back; slices of `view` stay valid."""
        self._view = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        """Close and remove the file; slices of `view` stay valid.
        Raises OSError: the disk refused; the file can be used on."""
        self._is_deleted = True  # first: a flush thread may be about to sync it
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError:
            self._is_deleted = False
            raise
