"""The writes of a table's file. The file is always written as a whole.

A table with few changes is written by the loop, or in a thread that writes all changes since the last write
(`SharedWrite`). A table that changes all the time is written every few seconds and at stop (`LazyTable`).

For a large table it takes too long to make the content on the loop. So the writer receives a function that makes the
content from a copy of the table, and calls it under the write lock.
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
# The rows before and after a change, by name. A new row has None before the change.
Changes = dict[str, tuple[Row | None, Row]]


class SharedWrite(Generic[Row]):
    """The writes of a table. An earlier content never replaces a later content. Use it only on the event loop.
    ``write``: writes changes with `save_aside`, or reverts them and raises StoreUnavailable.
    ``is_due``: True if the table has changes for which no caller waits, or which the disk refused."""

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
        """Write a copy of the table in a thread. Raises StoreUnavailable: the disk refused."""
        # Reset before the write: changes during the write are not part of it and must stay due.
        self.is_due = False
        try:
            # Number the contents here, on the loop: the threads may get the lock in another order.
            await asyncio.to_thread(self._write, next(self._numbers), content)
        except StoreUnavailable:
            self.is_due = True
            raise

    def _write(self, number: int, content: Callable[[], Any]) -> None:
        with self._writing:
            if number > self._written_number:  # otherwise a later content is already on the disk
                self._file.save(content())
                self._written_number = number

    def changed(self, table: Mapping[str, Row], rows: Mapping[str, Row]) -> dict[str, Row]:
        """Return a table with changed rows. The next `done` waits for their write."""
        for name, row in rows.items():
            # Store the row that is on the disk, even if it was changed twice since: a refused write reverts to it.
            before = self._changes[name][0] if name in self._changes else table.get(name)
            self._changes[name] = before, row
        return {**table, **rows}

    async def done(self) -> None:
        """Wait until all earlier changes are on the disk. Raises StoreUnavailable: the changes were reverted."""
        if self._round is None:
            self._round = asyncio.create_task(self._run(), name="shared write")
        await asyncio.shield(self._round)  # a cancelled caller must not cancel the write, for which other callers wait

    async def _run(self) -> None:
        async with self._one_round:
            # This write copies the table now, so later changes wait for the next write.
            self._round = None
            changes, self._changes = self._changes, {}
            assert changes, "a write has at least one change"
            await self._write_changes(changes)

    def taken_back(self, table: Mapping[str, Row], changes: Changes[Row]) -> dict[str, Row]:
        """Return a table without the changes of a refused write. Rows that were changed again since then stay."""
        kept = dict(table)
        for name, (before, after) in changes.items():
            if name in self._changes:
                # The row was changed again meanwhile, so keep it. If the next write is refused, it reverts to the row
                # before the refused change.
                self._changes[name] = before, self._changes[name][1]
            elif kept.get(name) is after:
                del kept[name]
                kept |= {} if before is None else {name: before}
        return kept


class LazyTable(ABC):
    """A table that is written every few seconds. Each change sets ``_is_dirty``. Use it only on the event loop, except
    `write`."""

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
        """Write a snapshot. Any thread can call this, but only one at a time.
        Raises StoreUnavailable: the file could not be written. The table is dirty again."""
        try:
            self._file.save(snapshot)
        except BaseException:
            self._is_dirty = True  # this may be another thread, which is safe for a bool
            raise

    def persist(self) -> None:
        self.write(self.snapshot())

    async def persist_round(self) -> None:
        """Write the table in a thread if it has changed."""
        if self.is_dirty:
            await asyncio.to_thread(self.write, self.snapshot())
