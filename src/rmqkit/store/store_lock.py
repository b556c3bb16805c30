"""The lock of a store directory: a POSIX record lock on byte 0 of ``lock``, as Java brokers take it.

Record locks belong to the process, and closing any descriptor of the file gives them up. So a process keeps the list of
the directories it holds, looks there first, and opens the file only when it does not hold it. Source: store.md §8.3.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from rmqkit.errors import StoreLocked

__all__ = ["StoreLock"]

_held: set[Path] = set()
_held_lock = threading.Lock()


class StoreLock:
    """Exclusive use of one store directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._fd = -1

    def check(self) -> None:
        """See whether the directory is free, without changing anything.
        Raises StoreLocked: a store of this or another process has it."""
        with _held_lock:
            if self._root in _held:
                raise StoreLocked(str(self._root))
            try:
                fd = os.open(self._root / "lock", os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                raise StoreLocked(str(self._root)) from None
            finally:
                os.close(fd)

    def acquire(self) -> None:
        """Take the lock. Raises StoreLocked: a store of this or another process has it; nothing was changed."""
        with _held_lock:
            if self._root in _held:
                raise StoreLocked(str(self._root))
            fd = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError:
                os.close(fd)
                raise StoreLocked(str(self._root)) from None
            os.pwrite(fd, b"lock", 0)
            self._fd = fd
            _held.add(self._root)

    def release(self) -> None:
        if self._fd >= 0:
            with _held_lock:
                os.close(self._fd)
                self._fd = -1
                _held.discard(self._root)
