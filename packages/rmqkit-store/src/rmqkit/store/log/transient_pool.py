"""The transient store pool: appended bytes stay in memory until they are *committed* (``TransientStorePool``).

=========  ========================================  ============================================================
step       executed by                               action
=========  ========================================  ============================================================
append     owner thread                              copies a record into the buffer of the newest log file
commit     store-commit, every commitIntervalCommit  one ``pwrite`` of new bytes to the page cache, which makes them
           Log; a clean stop                         readable
flush      store-flush                               fdatasync of committed bytes (`flush`)
=========  ========================================  ============================================================

A busy page cache then blocks the commit thread, not the owner. A buffer is as large as a log file. It is free again
when its file is full and committed. While no buffer is free, appends that need a new file are refused. Buffers are
locked in RAM if RLIMIT_MEMLOCK allows it. A crash of the process loses uncommitted bytes. Queues have committed records
only, so log and queues agree afterwards. A failed commit loses nothing: the next commit retries.

Use this module only in the owner thread of the store, except `commit` (one thread at a time) and `lock_buffers`.
Source: store.md §13.5.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from collections import deque

from rmqkit.store.log.mapped_file import MappedFile

__all__ = ["TransientPool"]

_log = logging.getLogger(__name__)


class _Lent:
    """A buffer with the uncommitted bytes of a log file. Each byte has the same position as in the file."""

    __slots__ = ("committed", "end", "file", "is_closed", "view")

    def __init__(self, file: MappedFile, view: memoryview) -> None:
        self.file = file
        self.view = view
        self.committed = self.end = file.wrote
        self.is_closed = False


class TransientPool:
    """The buffers of one log.
    ``count``: maximum number of buffers (``transientStorePoolSize``). Each buffer is allocated on first use.
    ``buffer_bytes``: size of each buffer, equal to the size of a log file.
    ``committed_offset``: physical offset up to which the log is in the page cache."""

    def __init__(self, count: int, buffer_bytes: int) -> None:
        self.committed_offset = 0
        self._buffer_bytes = buffer_bytes
        self._left = count
        self._free: deque[memoryview] = deque()
        self._lent: deque[_Lent] = deque()
        self._newest: _Lent | None = None
        self._unlocked: deque[memoryview] = deque()
        self._can_lock = True

    @property
    def free_count(self) -> int:
        """Number of buffers without a file."""
        return self._left + len(self._free)

    def lend(self, file: MappedFile) -> None:
        """Assign a buffer to a file. The buffer collects the further bytes of the file. Raises OSError: see
        `reserve`.
        """
        self.reserve()
        self._newest = _Lent(file, self._free.popleft())
        self._lent.append(self._newest)
        if len(self._lent) == 1:
            self.committed_offset = file.start + file.wrote

    def reserve(self) -> None:
        """Make sure that a buffer is free.
        Raises BlockingIOError: all buffers wait to be committed.
        Raises OSError: there is no memory for another buffer."""
        if self._free:
            return
        if not self._left:
            raise BlockingIOError(errno.EAGAIN, "all buffers of the transient store pool wait to be committed")
        view = memoryview(mmap.mmap(-1, self._buffer_bytes))
        self._left -= 1
        self._unlocked.append(view)
        self._free.append(view)

    def append(self, data: bytes | bytearray) -> None:
        """Append bytes to the newest file. The caller must know that they fit."""
        lent = self._newest
        assert lent is not None, "lend() was called"
        position = lent.end
        end = position + len(data)
        lent.view[position:end] = data
        lent.end = end

    def end_file(self) -> None:
        """Mark the newest file as complete. It is full after the next commit."""
        if self._newest is not None:
            self._newest.is_closed = True
            self._newest = None

    def slice(self, physical_offset: int, size: int) -> bytes | None:
        """Return a copy of bytes in a buffer, committed or not. Return None if no buffer holds all of them."""
        # The commit thread may remove the oldest buffer meanwhile. Only the owner thread assigns the buffer again.
        for lent in tuple(self._lent):
            position = physical_offset - lent.file.start
            if position >= 0 and 0 < size <= lent.end - position:
                return bytes(lent.view[position : position + size])
        return None

    def commit(self, least_bytes: int) -> bool:
        """Move the uncommitted bytes to the page cache, oldest file first. Return True if anything was moved.
        ``least_bytes``: if the newest file has fewer bytes than this, leave them in their buffer.
        Raises OSError: the write failed; the remaining bytes stay in the buffers."""
        before = self.committed_offset
        while self._lent:
            lent = self._lent[0]
            is_closed = lent.is_closed  # read it before the end: a closed file gets no more bytes
            end, file = lent.end, lent.file
            if not is_closed and end - lent.committed < max(1, least_bytes):
                break
            assert lent.committed <= end, "only appended bytes are committed"
            if end > lent.committed:
                file.write(lent.committed, lent.view[lent.committed : end])
                lent.committed = end
            # Set it after the write: readers and the flush assume that everything before
            # ``wrote`` is in the page cache.
            file.wrote = file.size if is_closed else end
            self.committed_offset = file.start + file.wrote
            if not is_closed:
                break
            self._lent.popleft()
            self._free.append(lent.view)
        return self.committed_offset > before

    def lock_buffers(self) -> None:
        """Lock new buffers in RAM. This takes long, so a thread other than the owner should call it. Log once if
        locking is not allowed."""
        while self._can_lock and self._unlocked:
            view = self._unlocked.popleft()
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(view))):
                self._can_lock = False
                _log.warning(
                    "transient store pool: buffer of %d bytes cannot be locked in RAM, errno %d: raise RLIMIT_MEMLOCK",
                    len(view),
                    ctypes.get_errno(),
                )
