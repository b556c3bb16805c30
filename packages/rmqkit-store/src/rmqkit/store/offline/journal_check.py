"""Offline check and repair of the journals of tables under ``config`` (`rmqkit.store.table_journal`).

=====================================  ==============================================================================
state of a journal                     repair
=====================================  ==============================================================================
changes that the file lacks            the file gets the changes, and the journal is removed. This is no damage: a
                                       broker that was killed leaves such a journal, and the next start does the same
a damaged line                         the file gets the changes before it; the journal becomes ``X.journal.damaged``
it belongs to another table            it becomes ``X.journal.old``
a later release of rmqkit wrote it     none
=====================================  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rmqkit.errors import BodyError, StoreMismatch
from rmqkit.store.files import JsonFile, decode_file, sync_directory
from rmqkit.store.offline.findings import UNWRITTEN, Kind, Report, entries_of
from rmqkit.store.table_journal import Change, Found, apply, file_of, lacking, read_journal, version_of

__all__ = ["check_journals", "merges"]

_SUFFIX = ".journal"


def check_journals(root: Path, report: Report) -> None:
    """Report faults of journals, and count the changes that the files lack."""
    for path in _journals(root):
        report.checked["files"] += 1
        try:
            found, changes, _ = _state(path)
        except StoreMismatch as error:
            report.add(Kind.CONFIG, path, 0, "a journal of this release", error)
            continue
        if changes:
            report.checked[UNWRITTEN] += len(changes)
        # A running broker may be writing the last line.
        if found.damage and (found.lost_changes or not report.is_live):
            report.add(Kind.CONFIG, path, found.sound_bytes, "complete changes", found.damage)
        if changes is None and not report.is_live:
            expected = f"a journal that belongs to this {file_of(path).name}"
            report.add(Kind.CONFIG, path, 0, expected, f"{len(found.changes)} changes of another version of it")


def merges(root: Path) -> Iterator[tuple[Path, str, Callable[[], None]]]:
    """Yield each journal that can be repaired, with the text of the repair and its function."""
    for path in _journals(root):
        try:
            found, changes, _ = _state(path)
        except StoreMismatch:
            continue
        if changes is None:
            yield path, f"kept as {path.name}.old: its changes are of another table", partial(_set_aside, path, ".old")
        else:
            action = f"{len(changes)} changes written to {file_of(path).name}"
            yield path, action + (f"; {found.damage}" if found.damage else ""), partial(_merge, path)


def _journals(root: Path) -> list[Path]:
    return [path for path in entries_of(root / "config") if path.suffix == _SUFFIX]


def _state(path: Path) -> tuple[Found, list[Change] | None, dict[str, Any]]:
    """Return a journal, the changes that the file lacks, and the content of the file, or of its backup.
    Raises StoreMismatch: a later release of rmqkit has written the journal."""
    found = read_journal(path.read_bytes(), path)
    file = JsonFile(file_of(path))
    table, is_lost = _table(file.path), False
    if table is None:
        table, is_lost = _table(file.backup) or {}, True
    return found, lacking(found, version_of(table), is_lost=is_lost), table


def _table(path: Path) -> dict[str, Any] | None:
    try:
        return decode_file(path.read_bytes(), dict[str, Any])
    except (OSError, BodyError):
        return None


def _merge(path: Path) -> None:
    found, changes, table = _state(path)
    assert changes is not None, "the journal belongs to the table"
    if changes:
        apply(table, changes)
        JsonFile(file_of(path)).save(table)
    if found.damage:
        _set_aside(path, ".damaged")
    else:
        path.unlink()
        sync_directory(path.parent)


def _set_aside(path: Path, suffix: str) -> None:
    path.replace(path.with_name(path.name + suffix))
    sync_directory(path.parent)
