"""A disk that refuses: chosen operations of the store on chosen files fail with an errno, until it is repaired."""

from __future__ import annotations

import errno
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rmqkit.system import disk

OPERATIONS = (
    "open",
    "pwrite",
    "truncate",
    "reserve",
    "sync_file",
    "sync_data",
    "remove",
    "rename",
    "make_directory",
)


@dataclass
class _Rule:
    operations: frozenset[str]
    path: str
    number: int
    taken_bytes: int
    times: int | None


class RefusingDisk:
    """A disk that refuses chosen operations.

    Attributes:
        count: number of refused operations.
    """

    def __init__(self) -> None:
        self.count = 0
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._real: dict[str, Any] = {}

    def refuse(
        self, number: int, *operations: str, path: str = "", taken_bytes: int = 0, times: int | None = None
    ) -> None:
        """Refuse operations (all without a name) on paths that contain a text.

        Args:
            taken_bytes: number of bytes that a pwrite writes before it stops short; the next pwrite is refused.
            times: number of operations to refuse; None: all until `repair`.
        """
        self._rules.append(_Rule(frozenset(operations or OPERATIONS), path, number, taken_bytes, times))

    def repair(self) -> None:
        """Stop refusing."""
        self._rules.clear()

    def _check(self, operation: str, path: str) -> int:
        """Return the number of bytes that may be written.

        Raises:
            OSError: the operation is refused.
        """
        with self._lock:  # flush threads call this too
            for rule in self._rules:
                if operation not in rule.operations or rule.path not in path or rule.times == 0:
                    continue
                if rule.taken_bytes and operation == "pwrite":
                    taken, rule.taken_bytes = rule.taken_bytes, 0
                    return taken
                if rule.times is not None:
                    rule.times -= 1
                self.count += 1
                raise OSError(rule.number, os.strerror(rule.number), path)
        return sys.maxsize

    def call(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Execute an operation, or refuse it."""
        first = arguments[0]
        if self._rules and (operation != "open" or arguments[1] & (os.O_CREAT | os.O_TRUNC | os.O_RDWR)):
            path = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else os.fspath(first)
            allowed = self._check(operation, str(path))
            if operation == "pwrite" and allowed < len(arguments[1]):
                arguments = (first, memoryview(arguments[1])[:allowed], *arguments[2:])
        return self._real[operation](*arguments, **keywords)

    @contextmanager
    def installed(self) -> Iterator[RefusingDisk]:
        """Replace functions of `rmqkit.system.disk`."""
        self._real = {name: getattr(disk, name) for name in OPERATIONS}
        with disk.replaced({name: functools.partial(self.call, name) for name in OPERATIONS}):
            try:
                yield self
            finally:
                self.repair()


NO_SPACE, READ_ONLY, BROKEN = errno.ENOSPC, errno.EROFS, errno.EIO
