"""The seam to the disk: one function for each call by which stores, tables and offset files use files.

Call ``disk.NAME(...)``, never a name that was imported from this module: `replaced` then replaces it everywhere, and
the call costs the same as the call of ``os``. Flags are those of ``os``, errors are the `OSError` of the system.

Some calls have different names on different systems, which are looked up at each call:

=============  ===================================  ===================================================================
function       Linux                                without it (macOS)
=============  ===================================  ===================================================================
`sync_data`    fdatasync                            F_FULLFSYNC, as fsync leaves data in the disk's own cache;
                                                    fsync on a file system that does not know it
`sync_file`    fsync                                the same
`reserve`      posix_fallocate                      a byte is written in every block that may be a hole
`drop_cached`  posix_fadvise, POSIX_FADV_DONTNEED   nothing: the system decides which data it caches
=============  ===================================  ===================================================================

On Windows, where clients store offsets and stores are only read, `pread` and `pwrite` move the position of the file.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rmqkit.system.seam import replaced_in

__all__ = [
    "Mapped",
    "close",
    "drop_cached",
    "duplicate",
    "exists",
    "file_sizes",
    "is_directory",
    "is_file",
    "is_locked",
    "lock",
    "make_directories",
    "make_directory",
    "map_file",
    "modified_ms",
    "mounts",
    "names",
    "open",
    "pread",
    "pwrite",
    "read_file",
    "release_pages",
    "remove",
    "remove_directory",
    "remove_tree",
    "rename",
    "replaced",
    "reserve",
    "seek_data",
    "seek_hole",
    "set_modified_ms",
    "size",
    "size_of",
    "space",
    "sync_data",
    "sync_file",
    "truncate",
    "unlock",
    "write_all",
]

Mapped = mmap.mmap
"""The type of a mapping. It is not replaced."""
_BLOCK_BYTES = 4096
_NOT_KNOWN = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
_MOUNTS = Path("/proc/self/mountinfo")

# ---------------------------------------------------------------- open files

close = os.close
"""Close a descriptor: ``close(descriptor)``."""
duplicate = os.dup
"""Return a second descriptor of an open file: ``duplicate(descriptor)``."""
truncate = os.ftruncate
"""Set the length of an open file: ``truncate(descriptor, size)``."""

if sys.platform == "win32":

    def open(path: Path, flags: int, mode: int = 0o777) -> int:  # noqa: A001 - the name of the call
        return os.open(path, flags | os.O_BINARY, mode)

    def pread(descriptor: int, size: int, position: int) -> bytes:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, size)

    def pwrite(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> int:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.write(descriptor, data)
else:
    open = os.open  # noqa: A001 - the name of the call
    """Return a descriptor: ``open(path, flags, mode=0o777)``. It also opens a directory, for `sync_file`."""
    pread = os.pread
    """Return the bytes at a position, fewer only at the end of the file: ``pread(descriptor, size, position)``."""
    pwrite = os.pwrite
    """Write bytes at a position and return their number, which may be less: ``pwrite(descriptor, data, position)``."""


def size_of(descriptor: int) -> int:
    """Return the length of an open file."""
    return os.fstat(descriptor).st_size


def seek_data(descriptor: int, position: int) -> int:
    """Return the start of the first data at or after a position. Raises OSError: ENXIO if only a hole follows."""
    return os.lseek(descriptor, position, os.SEEK_DATA)


def seek_hole(descriptor: int, position: int) -> int:
    """Return the start of the first hole at or after a position; the end of a file counts as a hole."""
    return os.lseek(descriptor, position, os.SEEK_HOLE)


def map_file(descriptor: int, size: int, *, writable: bool = False) -> mmap.mmap:
    """Map the first bytes of an open file. With ``writable``, changes of the mapping change the file."""
    return mmap.mmap(descriptor, size, access=mmap.ACCESS_DEFAULT if writable else mmap.ACCESS_READ)


def release_pages(mapping: mmap.mmap) -> None:
    """Release the memory of a mapped file; a later read loads the pages again."""
    mapping.madvise(mmap.MADV_DONTNEED)


def sync_data(descriptor: int) -> None:
    """Wait until the data and the length of a file are on the disk. Raises OSError: the sync failed."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync_file(descriptor)


def sync_file(descriptor: int) -> None:
    """Wait until the data and metadata of a file or directory are on the disk. Raises OSError: the sync failed."""
    if sys.platform != "win32":
        import fcntl

        full_sync = getattr(fcntl, "F_FULLFSYNC", None)
        if full_sync is not None:
            try:
                fcntl.fcntl(descriptor, full_sync)
                return
            except OSError as error:
                if error.errno not in _NOT_KNOWN:
                    raise
    os.fsync(descriptor)


def reserve(descriptor: int, size: int) -> None:
    """Allocate the blocks of a file from 0 to a size, without changing its content. No other thread may write
    meanwhile.
    Raises OSError: the disk has no space for the blocks."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    if size_of(descriptor) < size:
        truncate(descriptor, size)
    for position in range(0, size, _BLOCK_BYTES):
        if pread(descriptor, 1, position) == b"\0":
            pwrite(descriptor, b"\0", position)


def drop_cached(descriptor: int, start: int, size: int) -> None:
    """Remove a part of a file from the page cache. The part must be on the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


# ---------------------------------------------------------------- paths

rename = os.replace
"""Rename a file or directory, and replace a file that has the new name: ``rename(source, target)``."""
remove_directory = os.rmdir
"""Remove an empty directory: ``remove_directory(path)``."""


def remove(path: Path, *, missing_ok: bool = False) -> None:
    """Remove a file."""
    path.unlink(missing_ok=missing_ok)


def make_directory(path: Path) -> None:
    """Create one directory if it is missing. Raises FileNotFoundError: its parent is missing."""
    path.mkdir(exist_ok=True)


def remove_tree(path: Path) -> None:
    """Remove a directory with everything below it. Ignore errors: the rest may stay."""
    import shutil  # imports compressors, which clients do not need

    shutil.rmtree(path, ignore_errors=True)


def names(directory: Path) -> list[str]:
    """Return the names in a directory, sorted."""
    return sorted(os.listdir(directory))  # noqa: PTH208 - names, not paths


def file_sizes(directory: Path) -> list[tuple[str, int]]:
    """Return name and length of each file in a directory, sorted. Directories in it are left out."""
    with os.scandir(directory) as entries:
        return sorted((entry.name, entry.stat().st_size) for entry in entries if not entry.is_dir())


def exists(path: Path) -> bool:
    """Return True if a path is a file or a directory."""
    return path.exists()


def is_directory(path: Path) -> bool:
    """Return True if a path is a directory."""
    return path.is_dir()


def is_file(path: Path) -> bool:
    """Return True if a path is a file."""
    return path.is_file()


def size(path: Path) -> int:
    """Return the length of a file. Raises FileNotFoundError: it is missing."""
    return path.stat().st_size


def modified_ms(path: Path) -> int:
    """Return the time of the last change of a file in ms. Raises FileNotFoundError: it is missing."""
    return path.stat().st_mtime_ns // 1_000_000


def set_modified_ms(path: Path, time_ms: int) -> None:
    """Set the time of the last change of a file."""
    os.utime(path, ns=(time_ms * 1_000_000, time_ms * 1_000_000))


def read_file(path: Path) -> bytes:
    """Return the content of a file. Raises FileNotFoundError: it is missing."""
    return path.read_bytes()


def space(path: Path) -> os.statvfs_result:
    """Return the space of the disk of a path, as statvfs reports it. Raises OSError: the path is missing."""
    return os.statvfs(path)


def mounts(path: Path) -> list[tuple[str, str]]:
    """Return the type and the mount point of a path's file system, or an empty list if the kernel reports nothing."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = [line.split() for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return []
    return [(words[words.index("-") + 1], words[4]) for words in lines if words[2] == number and "-" in words]


# ---------------------------------------------------------------- several calls


def write_all(descriptor: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all bytes at a position, even if a nearly full disk accepts only a part at first.
    Raises OSError: the write failed; a part may have been written."""
    written = pwrite(descriptor, data, position)
    while written < len(data):  # after a short write, the next call raises the reason
        written += pwrite(descriptor, memoryview(data)[written:], position + written)


def make_directories(directory: Path) -> None:
    """Create a directory and its missing parents. Their names may not be on the disk yet."""
    try:
        make_directory(directory)
    except FileNotFoundError:
        make_directories(directory.parent)
        make_directory(directory)


# ---------------------------------------------------------------- lock files
# A POSIX record lock on byte 0, as Java brokers use it. Record locks belong to the process, and closing any descriptor
# of the file releases them. Therefore the process has a list of its locked files. It checks the list first, and opens
# the file only if the file is not in the list. Source: store.md §8.3.

_held: dict[int, Path] = {}
_holding = threading.Lock()  # of the list only: a simulator replaces all three functions


def lock(path: Path) -> int:
    """Create a file if it is missing, and lock it for the caller. Return the descriptor, for `unlock`.
    Raises BlockingIOError: another process, or another caller in this process, has locked it."""
    with _holding:
        if path in _held.values():
            raise BlockingIOError(errno.EWOULDBLOCK, "this process has locked it", str(path))
        descriptor = open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _can_lock(descriptor):
            close(descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(path))
        _held[descriptor] = path
        return descriptor


def unlock(descriptor: int) -> None:
    """Release a locked file, and close it."""
    with _holding:
        close(descriptor)
        _held.pop(descriptor, None)


def is_locked(path: Path) -> bool:
    """Return True if a file is locked, by this or another process. Nothing is changed."""
    with _holding:
        if path in _held.values():
            return True
        try:
            descriptor = open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            return not _can_lock(descriptor)
        finally:
            close(descriptor)


def _can_lock(descriptor: int) -> bool:
    import fcntl  # missing on Windows, where stores are only read

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError:
        return False
    return True


_REPLACEABLE = frozenset(__all__) - {"Mapped", "make_directories", "replaced", "write_all"}


def replaced(by: Mapping[str, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Replace functions of this module by name while the context is entered. Raises ValueError: a name is unknown."""
    return replaced_in(__name__, _REPLACEABLE, by)
