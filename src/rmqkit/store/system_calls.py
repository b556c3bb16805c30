"""What a store asks of the operating system that systems call by different names.

===========  ===================================  =====================================================================
function     Linux                                where that is missing (macOS)
===========  ===================================  =====================================================================
`sync_data`  fdatasync                            F_FULLFSYNC, as fsync there leaves data in the disk's own cache; fsync
                                                  on a file system that does not know it
`sync_file`  fsync                                the same
`reserve`    posix_fallocate                      a byte of every block is written that may be a hole
`forget`     posix_fadvise, POSIX_FADV_DONTNEED   nothing: the system decides what it keeps in memory
===========  ===================================  =====================================================================

The names are looked up when they are called. Source: store.md §13.
"""

from __future__ import annotations

import errno
import os

__all__ = ["forget", "reserve", "sync_data", "sync_file"]

_BLOCK_BYTES = 4096
_NOT_KNOWN = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


def sync_data(descriptor: int) -> None:
    """Wait until a file's bytes, and its length, are on the disk. Raises OSError: the disk refused."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        sync_file(descriptor)


def sync_file(descriptor: int) -> None:
    """Wait until a file or directory is on the disk with all that is told of it. Raises OSError: the disk refused."""
    import fcntl  # missing on Windows, where files are read that were written elsewhere

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
    """Give a file its blocks from 0 to a size, without changing what is in it; nobody else may write to it meanwhile.
    Raises OSError: the disk has no room for them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    for position in range(0, size, _BLOCK_BYTES):
        if os.pread(descriptor, 1, position) == b"\0":
            os.pwrite(descriptor, b"\0", position)


def forget(descriptor: int, start: int, size: int) -> None:
    """Let the page cache drop a part of a file that is on the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
