"""The journal of a table, ``config/X.journal``: the changes that are newer than the table's file, ``config/X.json``.

A broker appends each change of its topics or groups to the journal, and writes the file only now and then. So the cost
of a change does not depend on the number of rows. Apache's broker does not read journals; a clean stop leaves none.

A journal is text, one entry per line: the CRC-32 of the rest as eight hex digits, a space, JSON, a line feed.

=========  ====================================================  ======================================================
entry      JSON                                                  meaning
=========  ====================================================  ======================================================
header     ``{"journal":1,"base":VERSION}``                      first line: the format, and the version of the file
                                                                 to which the journal belongs
change     ``{"dataVersion":VERSION,"topicConfigTable":          the new version of the table, and rows by name:
           {"T":{…},"U":null}}``                                 complete new rows, null for deleted rows
mark       ``{"saving":VERSION}``                                the file is about to be replaced by the table up to
                                                                 here, with this version
=========  ====================================================  ======================================================

A line is written with one write and synced before the change is acknowledged. All rows of a line change together.

**The file is replaced** in three steps, and a crash may happen between any two of them: append a mark; replace the file
(`rmqkit.store.files.JsonFile`); remove the journal, or replace it by a journal with the lines after the mark. Lines can
be appended during the second step.

**A start** finds the version of the file in the header or in a mark, and applies the changes after it. Without such an
entry the journal belongs to another table: Apache's broker has changed the file, or the file was exchanged. No change
is applied then, except if the file is lost and the journal is newer than the backup. The first line that is not
complete ends the journal. After a power cut this can be the last line, whose change was not acknowledged. If complete
lines follow, the journal was damaged, and their changes are lost.

A found journal is never appended to. The start writes the file, which removes the journal. Then Apache's broker can
read the whole table. The reader is pure. `TableJournal` writes, and any thread may use it.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError, StoreMismatch, StoreUnavailable
from rmqkit.protocol import fastjson
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.files import make_directory, sync_directory, write_durably
from rmqkit.system import disk, threads

__all__ = [
    "Change",
    "Found",
    "Line",
    "TableJournal",
    "apply",
    "apply_journal",
    "file_of",
    "journal_of",
    "lacking",
    "read_journal",
    "stored_table",
    "version_of",
]

FORMAT = 1
_VERSION = "dataVersion"
_SHOWN_MAX = 20
_ENTRIES = ("journal", "saving", _VERSION)

# The rows of a change: member of the file → name of the row → the row, or None for a deleted row.
Rows = Mapping[str, Mapping[str, Any]]


class Change(Struct, frozen=True):
    """A change of a table. ``version``: the version of the table after it."""

    version: DataVersion
    rows: dict[str, dict[str, Any]]


class Found(Struct):
    """The content of a journal.

    Attributes:
        base: the version in the header; None if the journal has no complete header, and so no change.
        entries: changes, and the versions of marks, in their order.
        sound_bytes: the length of the complete lines.
        size: the length of the journal.
        lost: the names of rows in complete lines after the first damaged line.
        lost_changes: the number of these lines.
    """

    base: DataVersion | None
    entries: list[Change | DataVersion]
    sound_bytes: int
    size: int
    lost: list[str]
    lost_changes: int = 0

    @property
    def changes(self) -> list[Change]:
        return [one for one in self.entries if isinstance(one, Change)]

    @property
    def damage(self) -> str:
        """The text for operators if the journal is not complete, or an empty text."""
        if self.sound_bytes == self.size:
            return ""
        if not self.lost_changes:
            return f"{self.size - self.sound_bytes} bytes at its end are no complete change"
        names = ", ".join(self.lost[:_SHOWN_MAX]) + (", …" if len(self.lost) > _SHOWN_MAX else "")
        return (
            f"damaged at byte {self.sound_bytes}: this change and {self.lost_changes} later changes are lost: {names}"
        )


def journal_of(file: Path) -> Path:
    """Return the path of the journal of a table's file."""
    return file.with_suffix(".journal")


def file_of(journal: Path) -> Path:
    """Return the path of the table's file beside a journal."""
    return journal.with_suffix(".json")


def read_journal(content: bytes, path: Path) -> Found:
    """Return the content of a journal. ``path``: its path, for the error.
    Raises StoreMismatch: a later release of rmqkit has written the journal."""
    found = Found(None, [], 0, len(content), [])
    lines = content.split(b"\n")
    for line in lines[:-1]:
        entry = _entry(line)
        if entry is None:
            break
        if found.base is None:
            found.base = _base(entry, path)
        else:
            found.entries.append(
                _version(entry["saving"]) if "saving" in entry else Change(_version(entry.pop(_VERSION)), entry)
            )
        found.sound_bytes += len(line) + 1
    for line in content[found.sound_bytes :].split(b"\n")[1:]:
        if (entry := _entry(line)) is not None and _VERSION in entry:
            found.lost_changes += 1
            found.lost += [name for member, rows in entry.items() if member != _VERSION for name in rows]
    return found


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the entry in a line, or None if the line is not complete."""
    crc, _, text = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = fastjson.loads(text)
    except BodyError:
        return None
    return entry if isinstance(entry, dict) and not entry.keys().isdisjoint(_ENTRIES) else None


def _base(header: dict[str, Any], path: Path) -> DataVersion:
    if header.get("journal") != FORMAT:
        raise StoreMismatch(
            f"{path}: its format is {header.get('journal')}, not {FORMAT}: start and stop the release of rmqkit that "
            "wrote it, which writes its changes to the table's file"
        )
    return _version(header["base"])


def _version(value: Any) -> DataVersion:
    return msgspec.convert(value, DataVersion)


def lacking(found: Found, version: DataVersion, *, is_lost: bool) -> list[Change] | None:
    """Return the changes that a file of a version lacks. Return None if the journal belongs to another table.
    ``is_lost``: the file is lost, and the version is that of its backup, or of an empty table."""
    if found.base is None:
        return []
    if found.base == version:
        return found.changes
    for number, entry in enumerate(found.entries):
        if entry == version:  # a mark: a change is never equal to a version
            return [one for one in found.entries[number + 1 :] if isinstance(one, Change)]
    # The rows of the journal are complete rows, so they are right even if changes before them are lost.
    is_newer = (found.base.counter, found.base.timestamp) > (version.counter, version.timestamp)
    return found.changes if is_lost and is_newer else None


def apply(table: dict[str, Any], changes: list[Change]) -> None:
    """Apply changes to the content of a table's file."""
    for change in changes:
        for member, rows in change.rows.items():
            known = table.setdefault(member, {})
            for name, row in rows.items():
                if row is None:
                    known.pop(name, None)
                else:
                    known[name] = row
        table[_VERSION] = msgspec.to_builtins(change.version)


def version_of(table: Mapping[str, Any]) -> DataVersion:
    """Return the version in the content of a table's file. A file without a version has that of an empty table."""
    try:
        return msgspec.convert(table.get(_VERSION) or {}, DataVersion, strict=False)
    except msgspec.ValidationError:
        return DataVersion()


def stored_table(file: Path) -> dict[str, Any] | None:
    """Return the content of a table's file with the changes of its journal, or None if the file cannot be read.
    A running broker may write both."""
    # Read the journal first: if the broker replaces both in between, the newer file contains the older journal.
    with suppress(OSError, BodyError):
        journal = _content(journal_of(file))
        table = fastjson.loads(disk.read_file(file))
        if isinstance(table, dict):
            with suppress(StoreMismatch):
                apply_journal(table, journal, journal_of(file))
            return table
    return None


def apply_journal(table: dict[str, Any], journal: bytes | None, path: Path) -> None:
    """Apply the content of a journal to the content of a table's file, if both belong together. ``path``: the path of
    the journal, for the error. Raises StoreMismatch: a later release of rmqkit has written the journal."""
    if journal is not None:
        apply(table, lacking(read_journal(journal, path), version_of(table), is_lost=False) or [])


def _content(path: Path) -> bytes | None:
    try:
        return disk.read_file(path)
    except FileNotFoundError:
        return None


class Line:
    """A line that is, or will be, in a journal. ``end``: the position after it, counted over all files of the journal.
    ``rows``: the rows of a change. ``failure``: the reason why the disk refused the line, or None."""

    __slots__ = ("_entry", "end", "failure", "is_done", "rows")

    def __init__(self, entry: Mapping[str, Any], rows: Rows) -> None:
        self._entry = entry
        self.rows = rows
        self.end = 0
        self.is_done = False
        self.failure: StoreUnavailable | None = None

    def text(self) -> bytes:
        text = fastjson.dumps({**self._entry, **self.rows})
        assert b"\n" not in text, "an entry is one line"
        return b"%08x %b\n" % (zlib.crc32(text), text)


class TableJournal:
    """The journal of one table. Lines are written in the order of `add`. Any thread may write. ``path``: the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._base = DataVersion()
        self._waiting: deque[Line] = deque()
        self._writing = threads.Lock()
        self._descriptor = -1
        self._size = 0
        # The position of the file's first byte, counted over all files of the journal.
        self._origin = 0
        self._is_torn = False
        self._is_found = False

    def read(self) -> Found | None:
        """Read the journal that an earlier run left. Return None if there is none. The next `drop` removes it.
        Raises StoreMismatch: a later release of rmqkit has written it. Raises OSError: it cannot be read."""
        content = _content(self.path)
        if content is None:
            return None
        found = read_journal(content, self.path)
        self._is_found = True
        return found

    def starts_at(self, version: DataVersion) -> None:
        """Set the version of the table's file, for the header of the next journal."""
        self._base = version

    @property
    def is_empty(self) -> bool:
        """Return True if there is no journal, and no line waits to be written."""
        with self._writing:
            return self._descriptor < 0 and not self._is_found and not self._waiting

    @property
    def _new_path(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    def add(self, version: DataVersion, rows: Rows) -> Line:
        """Add a change, which the next `write` writes. The caller must not change the rows afterwards."""
        return self._add(Line({_VERSION: version}, rows))

    def add_mark(self, version: DataVersion) -> Line:
        """Add a mark before the table's file is replaced by a table of a version."""
        return self._add(Line({"saving": version}, {}))

    def _add(self, line: Line) -> Line:
        self._waiting.append(line)
        return line

    def write(self, line: Line) -> None:
        """Return when a line and all lines before it are on the disk.
        Raises StoreUnavailable: the disk refused. The line is not in the journal."""
        with self._writing:
            if not line.is_done:
                self._write_waiting()
        assert line.is_done, "a line is added before it is written"
        if line.failure is not None:
            raise line.failure

    def _write_waiting(self) -> None:
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        texts = [one.text() for one in lines]
        failure, end = None, self._origin + self._size
        try:
            end = self._append(b"".join(texts)) - sum(map(len, texts))
        except OSError as error:
            failure = StoreUnavailable(f"cannot write {self.path}: errno {error.errno} {error.strerror}")
            failure.__cause__ = error
        for one, text in zip(lines, texts, strict=True):
            end += len(text)
            one.end, one.failure, one.is_done = end, failure, True

    def _append(self, content: bytes) -> int:
        """Append lines. Return the position after them. Raises OSError: they are not in the journal."""
        assert not self._is_found, "the file is written first: a found journal may belong to another table"
        if self._descriptor < 0:
            self._create(content)
        else:
            self._repair()
            try:
                disk.write_all(self._descriptor, content, self._size)
                disk.sync_data(self._descriptor)
            except OSError:
                # Otherwise the rest of these lines could be read after a shorter line.
                self._is_torn = True
                with suppress(OSError):
                    self._repair()
                raise
            self._size += len(content)
        return self._origin + self._size

    def _repair(self) -> None:
        """Cut off lines that the disk refused. Raises OSError: the disk still refuses."""
        if self._is_torn:
            disk.truncate(self._descriptor, self._size)
            disk.sync_file(self._descriptor)
            self._is_torn = False

    def _create(self, content: bytes) -> None:
        header = Line({"journal": FORMAT, "base": self._base}, {}).text()
        make_directory(self.path.parent)
        descriptor = disk.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            disk.write_all(descriptor, header + content, 0)
            disk.sync_file(descriptor)
            sync_directory(self.path.parent)
        except OSError:
            disk.close(descriptor)
            with suppress(OSError):
                disk.remove(self.path)
            raise
        self._descriptor, self._size, self._is_torn = descriptor, len(header) + len(content), False
        self._origin -= len(header)

    def drop(self, mark: Line | None, version: DataVersion, *, aside: str = "") -> None:
        """Remove the lines up to a mark; None: all lines. The table's file with a version is on the disk.
        ``aside``: the suffix under which the whole journal is kept; empty: it is removed.
        Raises StoreUnavailable: the disk refused. The journal stays, and is complete."""
        with self._writing:
            try:
                self._drop(mark, version, aside)
            except OSError as error:
                said = f"cannot replace {self.path}: errno {error.errno} {error.strerror}"
                raise StoreUnavailable(said) from error

    def _drop(self, mark: Line | None, version: DataVersion, aside: str) -> None:
        assert mark is None or (mark.is_done and mark.failure is None), "the mark is on the disk"
        self._base = version
        end = self._origin + self._size
        start = end if mark is None else mark.end
        if start >= end:
            if self._descriptor >= 0 or self._is_found:
                self._remove(aside)
            return
        header = Line({"journal": FORMAT, "base": version}, {}).text()
        tail = disk.pread(self._descriptor, end - start, start - self._origin)
        assert len(tail) == end - start, "the lines after the mark are in the file"
        write_durably(self._new_path, header + tail)
        descriptor = disk.open(self._new_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            disk.rename(self._new_path, self.path)
        except OSError:
            disk.close(descriptor)
            raise
        disk.close(self._descriptor)
        self._descriptor, self._size = descriptor, len(header) + len(tail)
        self._origin, self._is_torn = start - len(header), False
        sync_directory(self.path.parent)

    def _remove(self, aside: str) -> None:
        if self._is_found:
            disk.remove(self._new_path, missing_ok=True)  # a kill during a replacement leaves it
        if aside:
            disk.rename(self.path, self.path.with_name(self.path.name + aside))
        else:
            disk.remove(self.path, missing_ok=True)
        if self._descriptor >= 0:
            disk.close(self._descriptor)
        self._descriptor, self._is_found, self._is_torn = -1, False, False
        self._origin, self._size = self._origin + self._size, 0
        sync_directory(self.path.parent)
