"""A table that changes all the time: its file is written every few seconds and at stop, and only when it changed."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from rmqkit.store.json_files import JsonFile

__all__ = ["LazyTable"]


class LazyTable(ABC):
    """Whoever changes the table sets ``_is_dirty``. Loop only, but for `write`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)
        self._is_dirty = False

    @property
    def is_dirty(self) -> bool:
        """Whether the table changed since the last `snapshot`."""
        return self._is_dirty

    @abstractmethod
    def snapshot(self) -> Any:
        """A copy of the table as it is now, to be written elsewhere; from now on it counts as written."""

    def write(self, snapshot: Any) -> None:
        """Write a snapshot; may be called from another thread, one call at a time.
        Raises StoreUnavailable: the file could not be written; the next snapshot is written in its place."""
        try:
            self._file.save(snapshot)
        except BaseException:
            self._is_dirty = True
            raise

    def persist(self) -> None:
        self.write(self.snapshot())

    async def persist_round(self) -> None:
        """Write the table when it changed; the disk is waited for in a thread."""
        if self.is_dirty:
            await asyncio.to_thread(self.write, self.snapshot())
