"""A table's file, which is always written as a whole: by the loop at once, or in a thread for all changes since the
last write (`SharedWrite`). A table that changes all the time is written every few seconds and at stop (`LazyTable`).

The writer makes the content under the write lock, from a function and a copy of the table that does not change: for a
large table this takes longer than the loop may wait.
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
# Rows before and after a change, by name; None before: a new row.
Changes = dict[str, tuple[Row | None, Row]]


class SharedWrite(Generic[Row]):
    """The writes of a table. An earlier content never replaces a later one. Loop only.
    ``write``: writes changes with `save_aside`, or reverts them and raises StoreUnavailable.
    ``is_due``: whether the table has changes without a waiting caller, or that the disk refused."""

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
        """Write the table on the loop. Raises StoreUnavailable: the disk refused."""
        self._write(next(self._numbers), content)
        self.is_due = False

    async def save_aside(self, content: Callable[[], Any]) -> None:
        """Write a table that no longer changes in a thread. Raises StoreUnavailable: the disk refused."""
        # Before the write: changes during the write are due again, and must not be marked as written.
        self.is_due = False
        try:
            # Take the number here, on the loop, in the order of the contents: threads may lock in another order.
            await asyncio.to_thread(self._write, next(self._numbers), content)
        except StoreUnavailable:
            self.is_due = True
            raise

    def _write(self, number: int, content: Callable[[], Any]) -> None:
        with self._writing:
            if number > self._written_number:  # otherwise a later content is on the disk already
                self._file.save(content())
                self._written_number = number

    def changed(self, table: Mapping[str, Row], rows: Mapping[str, Row]) -> dict[str, Row]:
        """Return a table with changed rows; the next `done` waits for their write."""
        for name, row in rows.items():
            # The row on the disk, even if it was changed twice since: a refused write reverts to it.
            before = self._changes[name][0] if name in self._changes else table.get(name)
            self._changes[name] = before, row
        return {**table, **rows}

    async def done(self) -> None:
        """Wait until all earlier changes are on the disk. Raises StoreUnavailable: they were reverted."""
        if self._round is None:
            self._round = asyncio.create_task(self._run(), name="shared write")
        await asyncio.shield(self._round)  # other callers wait for it, too: a cancelled one must not cancel the write

    async def _run(self) -> None:
        async with self._one_round:
            # Later changes wait for the next write: this one copies the table now.
            self._round = None
            changes, self._changes = self._changes, {}
            assert changes, "a write has at least one change"
            await self._write_changes(changes)

    def taken_back(self, table: Mapping[str, Row], changes: Changes[Row]) -> dict[str, Row]:
        """Return a table without the changes of a refused write; rows that were changed again since stay."""
        kept = dict(table)
        for name, (before, after) in changes.items():
            if name in self._changes:
                # Changed again meanwhile: keep the row. If the next write is refused, it reverts to the row before
                # this change.
                self._changes[name] = before, self._changes[name][1]
            elif kept.get(name) is after:
                del kept[name]
                kept |= {} if before is None else {name: before}
        return kept


class LazyTable(ABC):
    """A table that is written every few seconds. Each change sets ``_is_dirty``. Loop only, but for `write`."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)
        self._is_dirty = False

    @property
    def is_dirty(self) -> bool:
        """Return True if the table changed since the last `snapshot`."""
        return self._is_dirty

    @abstractmethod
    def snapshot(self) -> Any:
        """Return a copy of the table to write, and mark the table as written."""

    def write(self, snapshot: Any) -> None:
        """Write a snapshot, in any thread, but one call at a time.
        Raises StoreUnavailable: the file could not be written; the table is dirty again."""
        try:
            self._file.save(snapshot)
        except BaseException:
            self._is_dirty = True  # in the writing thread, which is safe for a bool
            raise

    def persist(self) -> None:
        self.write(self.snapshot())

    async def persist_round(self) -> None:
        """Write the table in a thread if it has changed."""
        if self.is_dirty:
            await asyncio.to_thread(self.write, self.snapshot())
