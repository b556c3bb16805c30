"""A table's file, written whole: by the loop at once, or in a thread for all changes that came while it was written
(`SharedWrite`); a table that changes all the time is written every few seconds and at stop (`LazyTable`).

What is written is made by whoever writes it, under the lock of writing: for a large table that takes longer than a
thread may keep the loop waiting, so it is handed a function, with a copy of the table that nobody changes any more.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from rmqkit.errors import StoreUnavailable
from rmqkit.store.files import JsonFile

Row = TypeVar("Row")
# What rows were, None for new ones, and what they became.
Changes = dict[str, tuple[Row | None, Row]]


class SharedWrite(Generic[Row]):
    """Writes a table, earlier contents never over later ones. Loop only.
    ``write``: brings changes to the disk with `save_aside`, or takes them back and raises StoreUnavailable.
    ``is_due``: whether the table has changes that nobody waits for, or that the disk refused."""

    def __init__(self, file: JsonFile, write: Callable[[Changes[Row]], Awaitable[None]]) -> None:
        self._file = file
        self._write_changes = write
        self.is_due = False
        self._changes: Changes[Row] = {}
        self._round: asyncio.Task[None] | None = None
        self._one_round = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._written_number = 0
        self._writing = threading.Lock()

    def save(self, content: Callable[[], Any]) -> None:
        """Write the table; the loop waits. Raises StoreUnavailable: the disk refused."""
        self._write(next(self._numbers), content)
        self.is_due = False

    async def save_aside(self, content: Callable[[], Any]) -> None:
        """Write the table, which nobody changes any more, in a thread. Raises StoreUnavailable: the disk refused."""
        # Before the write: what changes while it is written is due again, and must not be marked as written.
        self.is_due = False
        try:
            # Numbered here, on the loop, in the order of the contents; threads may take the lock in another one.
            await asyncio.to_thread(self._write, next(self._numbers), content)
        except StoreUnavailable:
            self.is_due = True
            raise

    def _write(self, number: int, content: Callable[[], Any]) -> None:
        with self._writing:
            if number > self._written_number:  # else a later content is on the disk already
                self._file.save(content())
                self._written_number = number

    def changed(self, table: Mapping[str, Row], rows: Mapping[str, Row]) -> dict[str, Row]:
        """A table with other rows, which the next `done` waits for."""
        for name, row in rows.items():
            # The row that is on the disk, also when it was changed twice since: that is what a refused write goes back
            # to.
            before = self._changes[name][0] if name in self._changes else table.get(name)
            self._changes[name] = before, row
        return {**table, **rows}

    async def done(self) -> None:
        """Wait until the changes made before are on the disk. Raises StoreUnavailable: they were taken back."""
        if self._round is None:
            self._round = asyncio.create_task(self._run(), name="shared write")
        await asyncio.shield(self._round)  # others wait for it, too: who gives up must not cancel their write

    async def _run(self) -> None:
        async with self._one_round:
            # From here on changes wait for the next round: this one has made its copy of the table.
            self._round = None
            changes, self._changes = self._changes, {}
            assert changes, "a round begins when there is something to write"
            await self._write_changes(changes)

    def taken_back(self, table: Mapping[str, Row], changes: Changes[Row]) -> dict[str, Row]:
        """A table without changes that are not on the disk; rows that others changed since stay."""
        kept = dict(table)
        for name, (before, after) in changes.items():
            if name in self._changes:
                # Changed again meanwhile: the row stays, and the next write is undone to the row before this change.
                self._changes[name] = before, self._changes[name][1]
            elif kept.get(name) is after:
                del kept[name]
                kept |= {} if before is None else {name: before}
        return kept


class LazyTable(ABC):
    """Whoever changes the table sets ``_is_dirty``. Loop only, but for `write`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)
        self._is_dirty = False

    @property
    def is_dirty(self) -> bool:
        """Return True if the table changed since the last `snapshot`."""
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
            self._is_dirty = True  # from the writing thread: a bool that the loop sets and clears is safe
            raise

    def persist(self) -> None:
        self.write(self.snapshot())

    async def persist_round(self) -> None:
        """Write the table when it changed; the disk is waited for in a thread."""
        if self.is_dirty:
            await asyncio.to_thread(self.write, self.snapshot())
