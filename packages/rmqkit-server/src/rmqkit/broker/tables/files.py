"""The files of tables.

A table of topics or groups has a journal beside its file (`JournaledTable`). Each change is appended to the journal,
and the file is written now and then. A table that changes all the time is written every few seconds and at stop
(`LazyTable`).

For a large table it takes too long to make the file's content on the loop. So a thread makes it from a copy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rmqkit.clock import Clock
from rmqkit.errors import StoreUnavailable
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.files import JsonFile, RowTexts
from rmqkit.store.table_journal import Line, TableJournal, journal_of, lacking
from rmqkit.system import disk, threads

_log = logging.getLogger(__name__)
_CHANGES_MIN = 1000
_FILE_AFTER_MS_MAX = 60_000

# Member of the file, and name of the row.
_Key = tuple[str, str]
# Rows to set, or None to remove a row.
_Rows = dict[_Key, Any]


class _Snapshot(NamedTuple):
    """A copy of the table to write. ``mark``: in the journal, after the last change that the copy contains."""

    number: int
    version: DataVersion
    members: dict[str, dict[str, Any]]
    mark: Line | None


class JournaledTable:
    """The rows of a table, and their file and journal. Use it only on the event loop.

    ``members``: the members of the file that have rows, with the type of a row.
    ``on_shared``: called with the rows of shared changes, after they are on the disk.

    The file is written when the journal has as many changes as the table has rows, and at least `_CHANGES_MIN`. It is
    also written when the oldest change in the journal is 1 ms old for each row, at most 60 s. `write_new` tests this
    every second. So the file of a small table is a second behind, and writes of a large file take less than 1 % of the
    time.

    Attributes:
        file, journal: the files of the table.
        members: the rows by member and name. A changed row is a new object. Only methods change them.
        version: the version of the table.
    """

    def __init__(
        self,
        path: Path,
        members: Mapping[str, Any],
        clock: Clock,
        on_shared: Callable[[list[Any]], None] = lambda rows: None,
    ) -> None:
        self.file = JsonFile(path)
        self.journal = TableJournal(journal_of(path))
        self.members: dict[str, dict[str, Any]] = {member: {} for member in members}
        self.version = DataVersion()
        self._types = members
        self._clock = clock
        self._on_shared = on_shared
        self._texts = {member: RowTexts() for member in members}
        # The last version that was given to a change. Only changes on the disk set `version`.
        self._given = self.version
        # Rows that may differ from the rows in file and journal.
        self._unsaved: dict[_Key, None] = {}
        self._is_version_unsaved = False
        self._must_write_file = False
        self._journal_aside = ""
        self._changes_since_file = 0
        self._first_change_ms = 0.0
        # The rows of the next shared write, before and after the changes.
        self._shared: dict[_Key, tuple[Any, Any]] = {}
        self._round: asyncio.Task[None] | None = None
        self._one_round = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._written_number = 0
        self._writing_file = threads.Lock()

    # -- reading

    def load(self, version: DataVersion, members: Mapping[str, dict[str, Any]]) -> None:
        """Take over the content of the file, or of its backup, and apply the journal.
        Raises StoreMismatch: the journal is of a later release. Nothing was changed on the disk."""
        is_lost = not disk.exists(self.file.path)
        self.journal.starts_at(version)
        for member, rows in members.items():
            self.members[member].update(rows)
        if (found := self.journal.read()) is not None:
            path = self.journal.path
            changes = lacking(found, version, is_lost=is_lost)
            if changes is None:
                self._journal_aside = ".old"
                _log.warning(
                    "%s: its %d changes are not applied, because %s was changed without it, or is of another store; "
                    "it is kept as %s.old",
                    *(path, len(found.changes), self.file.path.name, path.name),
                )
            elif found.damage:
                self._journal_aside = ".damaged"
                _log.warning("%s: %s; it is kept as %s.damaged", path, found.damage, path.name)
            for change in changes or ():
                for member, rows in change.rows.items():
                    self._take_row_changes(member, rows)
                version = change.version
        self.version = self._given = version
        self._must_write_file = is_lost or found is not None

    def _take_row_changes(self, member: str, rows: Mapping[str, Any]) -> None:
        known = self.members[member]
        for name, row in rows.items():
            if row is None:
                known.pop(name, None)
            else:
                known[name] = msgspec.convert(row, self._types[member], strict=False)

    # -- changes

    def change(self, rows: _Rows, *, version: DataVersion | None = None) -> None:
        """Change rows. When this returns, the change is on the disk.
        ``version``: the version after the change; None: the next version.
        Raises StoreUnavailable: the disk refused. Nothing has changed."""
        self._write_found_file()
        given = self._given
        before = self._set(rows)
        new = self._given = self._next_version() if version is None else version
        try:
            self._append()
        except StoreUnavailable:
            self._set(before)
            self._given = given
            raise
        self.version = new

    def replace(self, members: Mapping[str, Mapping[str, Any]], version: DataVersion) -> None:
        """Make the rows and the version equal to those of another table. When this returns, the differences are on the
        disk. Raises StoreUnavailable: the disk refused. Nothing has changed."""
        rows: _Rows = {}
        for member, wanted in members.items():
            known = self.members[member]
            rows |= {(member, name): None for name in known.keys() - wanted.keys()}
            rows |= {(member, name): row for name, row in wanted.items() if known.get(name) != row}
        self.change(rows, version=version)

    def add_missing(self, rows: _Rows) -> None:
        """Add rows that every broker has, without a new version. `persist` writes them."""
        self._set(rows)

    def change_soon(self, rows: _Rows) -> None:
        """Change rows in constant time. `write_new` writes all such changes of a second."""
        self._set(rows)
        self.version = self._given = self._next_version()
        self._is_version_unsaved = True

    async def change_shared(self, rows: _Rows) -> None:
        """Change rows. One write has all changes that arrive before it begins, and they succeed or fail together. When
        this returns, they are on the disk. Raises StoreUnavailable: the disk refused. The rows are unchanged."""
        # Change the rows before the write, so that concurrent changes see each other.
        for key, before in self._set(rows).items():
            # Store the row that is on the disk, even if it was changed twice since: a refused write reverts to it.
            self._shared[key] = (self._shared[key][0] if key in self._shared else before), rows[key]
        if self._round is None:
            self._round = asyncio.create_task(self._write_shared(), name="shared write")
        await asyncio.shield(self._round)  # a cancelled caller must not cancel the write, for which other callers wait

    async def _write_shared(self) -> None:
        async with self._one_round:
            # This write takes the changes now, so later changes wait for the next write.
            self._round = None
            shared, self._shared = self._shared, {}
            assert shared, "a write has at least one change"
            known, given = self.version, self._given
            version = self._given = self._next_version()
            try:
                await self._append_aside()
            except StoreUnavailable:
                self._take_back(shared)
                if self._given is version:
                    self._given = given
                raise
            # Set the version after the write. Other changes may have set a later version during it.
            if self.version is not known:
                version = self._given = self._next_version()
                self._is_version_unsaved = True
            assert version != known, "a changed table has a new version"
            self.version = version
            self._on_shared([after for _, after in shared.values()])

    def _take_back(self, shared: Mapping[_Key, tuple[Any, Any]]) -> None:
        """Revert the changes of a refused write. Rows that were changed again since then stay."""
        for key, (before, after) in shared.items():
            if key in self._shared:
                # The row was changed again meanwhile, so keep it. If the next write is refused, it reverts to the row
                # before the refused change.
                self._shared[key] = before, self._shared[key][1]
            elif self.members[key[0]].get(key[1]) is after:
                self._set({key: before})

    def _set(self, rows: _Rows) -> _Rows:
        """Set rows, and return the former rows."""
        before = {}
        for member, name in rows:
            known, row = self.members[member], rows[member, name]
            before[member, name] = known.get(name)
            if row is None:
                known.pop(name, None)
            else:
                known[name] = row
        self._unsaved.update(dict.fromkeys(rows))
        return before

    def _next_version(self) -> DataVersion:
        version = msgspec.structs.replace(self._given)
        version.advance(self._clock.now_ms())
        return version

    # -- the journal

    def _line(self) -> Line:
        """Return a line with the unsaved rows."""
        rows: dict[str, dict[str, Any]] = {}
        for member, name in self._unsaved:
            rows.setdefault(member, {})[name] = self.members[member].get(name)
        self._unsaved, self._is_version_unsaved = {}, False
        if not self._changes_since_file:
            self._first_change_ms = self._clock.monotonic_ms()
        self._changes_since_file += 1
        return self.journal.add(self._given, rows)

    def _refused(self, line: Line) -> None:
        """Write the rows of a refused line again later, because they may be on the disk."""
        self._unsaved |= {(member, name): None for member, rows in line.rows.items() for name in rows}
        self._is_version_unsaved = True

    def _append(self) -> None:
        line = self._line()
        try:
            self.journal.write(line)
        except StoreUnavailable:
            self._refused(line)
            raise

    async def _append_aside(self) -> None:
        """Append in a thread. The order of lines is the order of the calls, and not that of the threads."""
        self._write_found_file()
        line = self._line()
        try:
            await asyncio.to_thread(self.journal.write, line)
        except StoreUnavailable:
            self._refused(line)
            raise

    # -- the file

    async def write_new(self) -> None:
        """Append the changes of `change_soon`, and write the file if it is time. The broker calls this every second."""
        if self._unsaved or self._is_version_unsaved:
            await self._append_aside()
        if self._is_file_due():
            snapshot, count = self._snapshot(has_mark=True), self._changes_since_file
            self._changes_since_file = 0
            try:
                await asyncio.to_thread(self._write_file, snapshot)
            except StoreUnavailable:
                self._changes_since_file += count
                raise

    def _is_file_due(self) -> bool:
        count = sum(map(len, self.members.values()))
        age_ms = self._clock.monotonic_ms() - self._first_change_ms
        return self._changes_since_file >= max(count, _CHANGES_MIN) or (
            self._changes_since_file > 0 and age_ms >= min(count, _FILE_AFTER_MS_MAX)
        )

    def persist(self) -> None:
        """Write the file if it lacks changes. The journal is removed."""
        if self._must_write_file or self._unsaved or self._is_version_unsaved or not self.journal.is_empty:
            # Without lines in the journal no mark is needed: no line is added while this blocks the loop.
            has_mark = not (self._must_write_file or self.journal.is_empty)
            self._write_file(self._snapshot(has_mark=has_mark))
            self._unsaved, self._is_version_unsaved = {}, False
            self._must_write_file, self._changes_since_file = False, 0

    def _write_found_file(self) -> None:
        if self._must_write_file:
            self.persist()

    def _snapshot(self, *, has_mark: bool) -> _Snapshot:
        # Copy the rows on the loop: changes would disturb a thread that reads them.
        members = {member: dict(rows) for member, rows in self.members.items()}
        mark = self.journal.add_mark(self._given) if has_mark else None
        return _Snapshot(next(self._numbers), self._given, members, mark)

    def _write_file(self, snapshot: _Snapshot) -> None:
        """Write a snapshot, unless a later snapshot is written. Any thread can call this."""
        with self._writing_file:
            if snapshot.number <= self._written_number:
                return
            if snapshot.mark is not None:
                self.journal.write(snapshot.mark)
            texts = {member: self._texts[member].of(rows) for member, rows in snapshot.members.items()}
            self.file.save({"dataVersion": snapshot.version, **texts})
            self.journal.drop(snapshot.mark, snapshot.version, aside=self._journal_aside)
            self._journal_aside = ""
            self._written_number = snapshot.number


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
