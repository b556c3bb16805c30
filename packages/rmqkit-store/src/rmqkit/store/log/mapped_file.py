"""One file of a fixed-size file queue (``MappedFile``).

The name is the logical offset of the first byte, with 20 digits. The file has its full size from the start and is
sparse. Bytes are written with ``pwrite``, never through a mapping: a full disk is then an `OSError` that can be
handled, not a signal that kills the process. On Linux both ways use the same page cache. The commit log is read through
a read-only mapping. Its slices prevent the mapping from being released, so a deleted or closed file stays readable
while a sender holds a slice.

Not handled here: the meaning of the bytes, the order of files (`file_queue`), the time of a flush (`flush`).
Source: store.md §2.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from rmqkit.system import disk, threads

__all__ = ["SECTOR_BYTES", "BytesLost", "MappedFile", "file_name"]

SECTOR_BYTES = 512
"""The unit that a disk writes completely or not at all."""

_CHUNK_BYTES = 1 << 20
_WARM_BYTES = 16 << 20  # flushLeastPagesWhenWarmMapedFile, 4096 pages


def file_name(start: int) -> str:
    """Return the name of the file that begins at a logical offset."""
    return f"{start:020d}"


class BytesLost(OSError):
    """The error that is raised if the page cache no longer holds the bytes of a failed sync."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EIO, "the system dropped bytes that it could not write", str(path))


class MappedFile:
    """A file of ``size`` bytes that begins at logical offset ``start``.

    Attributes:
        wrote: number of bytes from the start of the file that contain data.
        synced: number of bytes from the start of the file that are known to be on the disk. It is -1 if the zeros after
            them are not known to be on the disk.
        is_named_durably: whether the file's name is known to be on the disk.
        again_from: position from which the next `sync` must write the bytes again, because the last sync failed. It is
            -1 if the zeros after a cut must be written again, too. It is None if the last sync did not fail.
    """

    __slots__ = (
        "_changing_back",
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
        self._changing_back = threads.Lock()  # held by a change of existing bytes: a cut, or a repeated write
        self._fd = -1
        self._view: memoryview | None = None

    @classmethod
    def create(cls, path: Path, start: int, size: int) -> MappedFile:
        """Create a sparse file. Raises OSError: the file cannot be created; no file remains."""
        disk.make_directories(path.parent)
        file = cls(path, start, size, wrote=0)
        file.is_named_durably = False
        # Truncate: a crash may leave an old file that is not part of the queue, such as an extension without its queue.
        file._fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            disk.truncate(file._fd, size)
        except OSError:
            file.delete()
            raise
        return file

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def is_idle(self) -> bool:
        """Return True if no flush thread will use the descriptor."""
        return self.synced >= self.wrote and self.is_named_durably

    @property
    def fd(self) -> int:
        if self._fd < 0:
            if self._is_deleted:  # another file may have the path now
                raise FileNotFoundError(errno.ENOENT, "deleted", str(self.path))
            self._fd = disk.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        return self._fd

    def open_read_only(self) -> None:
        """Open the file for reading only, for a store that must not be written. Raises OSError: the file cannot be
        read.
        """
        self._fd = disk.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def view(self) -> memoryview:
        """The whole file, mapped read-only. Slices stay valid while they are referenced."""
        if self._view is None:
            self._view = memoryview(disk.map_file(self.fd, self.size))
        return self._view

    def read(self, position: int, size: int) -> bytes:
        """Return a copy of ``size`` bytes at a position, or of fewer bytes at the end of the file."""
        return disk.pread(self.fd, size, position)

    def write(self, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at a position. Raises OSError: the write failed; a part may have been written."""
        disk.write_all(self.fd, data, position)

    def sync(self) -> None:
        """Wait until the written bytes are on the disk. Do nothing for a file that was deleted meanwhile.

        After a failed sync, a later success proves nothing: the kernel marks the pages as written, and the next call
        succeeds without them. So the next `sync` writes the bytes again first. Before the next `sync`, the caller must
        check that the page cache still holds the bytes: XFS and btrfs drop them.
        Raises OSError: the sync failed; data written since the last successful `sync` may be lost."""
        wrote = self.wrote  # read before the call: the sync may miss data that the owner writes meanwhile
        assert wrote <= self.size, "written bytes are inside the file"
        try:
            if self.again_from is not None:
                with self._changing_back:  # bytes that the owner cuts off meanwhile must not be written again
                    wrote = self.wrote
                    self._write_again(self.again_from, wrote)
            disk.sync_data(self.fd)
        except OSError:
            if not self._is_deleted:
                self.again_from = self.synced if self.again_from is None else min(self.synced, self.again_from)
                raise
        self.again_from = None
        self.synced = wrote

    def _write_again(self, start: int, end: int) -> None:
        """Write the bytes that are not on the disk again, with their content in the page cache."""
        if start < 0:
            raise BytesLost(self.path)  # zeros after a cut: the owner may append there now
        for position in range(start, end, _CHUNK_BYTES):
            self.write(position, self.read(position, min(_CHUNK_BYTES, end - position)))

    def warm(self, *, is_wanted: Callable[[], bool]) -> None:
        """Allocate the blocks and pages of a new file (``warmMapedFileEnable``), which takes as long as writing the
        file.
        After that, a full disk affects only other files, and a flush does not allocate space. The zeros are synced in
        parts; otherwise the first flush of the file would wait for all of them. Stop early if ``is_wanted`` returns
        False.
        Source: store.md §13.6.
        Raises OSError: the disk has no space for the file."""
        disk.reserve(self.fd, self.size)
        zeros = bytes(min(_WARM_BYTES, self.size))
        for position in range(0, self.size, _WARM_BYTES):
            self.write(position, memoryview(zeros)[: self.size - position])
            disk.sync_data(self.fd)
            if not is_wanted():
                return

    def clear_from(self, position: int) -> bool:
        """Write zeros over all data after a position. Holes remain holes. Return True if any byte was not zero."""
        is_changed = False
        while position < self.size:
            try:
                position = disk.seek_data(self.fd, position)
            except OSError:  # ENXIO: only a hole follows
                break
            data_end = min(disk.seek_hole(self.fd, position), position + _CHUNK_BYTES)
            chunk, zeros = self.read(position, data_end - position), bytes(data_end - position)
            if chunk != zeros:
                self.write(position, zeros)
                is_changed = True
            position += len(chunk)
        return is_changed

    def cut(self, position: int) -> None:
        """Remove all data after a position. Raises OSError: the file cannot be read or written."""
        with self._changing_back:
            self.wrote = min(position, self.size)
            # the zeros must reach the disk, too, even if no data is before them
            self.synced = -1 if self.clear_from(self.wrote) else min(self.synced, self.wrote)

    def close(self) -> None:
        """Close the descriptor. Slices of `view` stay valid."""
        self._view = None
        if self._fd >= 0:
            disk.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        """Close and remove the file. Slices of `view` stay valid.
        Raises OSError: the file cannot be removed and can still be used."""
        self._is_deleted = True  # first: a flush thread may be about to sync it
        with self._changing_back:  # a repeated write must not use the descriptor of a file that is opened next
            self.close()
        try:
            disk.remove(self.path, missing_ok=True)
        except OSError:
            self._is_deleted = False
            raise
