"""Repair of everything that the commit log determines, without a broker. Sound bytes of the log are never changed.

===========================================  ==========================================================================
damage                                       repair
===========================================  ==========================================================================
torn record at the end of the log            its bytes become zeros, as in a recovery (*)
segment that is too short                    zeros extend it to its length
an older segment without records at its end  a blank is written after the records, so that the log continues in the
                                             next segment; otherwise a recovery would cut off everything after it (*)
other bytes that are not a record, or a      they become *filler* records, which brokers skip, so that the bytes after
record with a wrong checksum                 them survive a recovery (`filler`); blank entries preserve the numbers of
                                             the lost messages (*)
segments with exchanged names                they are renamed by the offsets in their records
queue or extension file                      all queues are rebuilt (`rebuild`)
index file                                   the index is rebuilt
checkpoint                                   it is removed: the next recovery starts at an older segment
``config/X.json`` or its backup              replaced by the other file if that file can be read
``config/X.journal``                         see `journal_check`; its changes are written to ``config/X.json``
``logstart``, ``queueends``, ``indexfiles``  removed
``timerlog``, ``timerwheel``, ``timercheck`` see `file_check`; ``timermetrics`` is removed if no backup can be read
===========================================  ==========================================================================

(*) The previous bytes are stored in ``repaired``.

All other damage stays and is reported: missing segments, and files that do not belong to the store.
Source: store.md §8, §9.1, §11, §12.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec import Struct

from rmqkit.errors import RecordCorrupt
from rmqkit.protocol.record import BLANK_BYTES, decode_record, pack_blank
from rmqkit.store.files import StoreLock, sync_directory, write_durably
from rmqkit.store.log.commit_log import log_directories
from rmqkit.store.log.mapped_file import MappedFile, file_name
from rmqkit.store.log.remains import FILLER_BYTES_MIN, fillers, place_of
from rmqkit.store.log.view import mapped
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.file_check import NOTES, is_json, is_timer_file, mend_timer_files
from rmqkit.store.offline.findings import Finding, Kind, Progress, Report, common_length, entries_of
from rmqkit.store.offline.journal_check import merges
from rmqkit.store.offline.rebuild import QUEUE_TREES, rebuild
from rmqkit.store.settings import StoreSettings
from rmqkit.system import disk

__all__ = ["Repaired", "Step", "repair"]

_QUEUES, _INDEX = "consumequeue", "index"


class Step(Struct):
    """A step of a repair, done or planned."""

    path: str
    action: str

    def __str__(self) -> str:
        return f"{self.path}: {self.action}"


class Repaired(Struct):
    """The steps of a repair. With ``is_dry_run``, the steps that a repair would take.

    Attributes:
        remaining: the findings after the repair; in a dry run the findings that no step repairs.
    """

    steps: list[Step]
    remaining: list[Finding]
    is_dry_run: bool


def repair(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    is_dry_run: bool,
    progress: Progress = lambda done, total: None,
) -> Repaired:
    """Repair all damage that can be repaired.

    Args:
        settings: the settings of the store. Without settings, the sizes are taken from the existing files.

    Raises:
        StoreLocked: a broker holds the store.
        StoreError: there is no store, or its index sizes are unknown.
        OSError: a file cannot be written; completed steps stay.
    """
    renames = list(_renames(root, settings))
    named = [Step(str(path), f"named {target.name}: its records have these offsets") for path, target in renames]
    if renames and not is_dry_run:
        lock = StoreLock(root)
        lock.acquire()
        try:
            _rename(renames)
        finally:
            lock.release()
    named += _merge_journals(root, is_dry_run=is_dry_run)
    # Repair the log before its derived files, and check again in between: only a sound log shows the missing entries.
    report = verify(root, settings, progress=progress)
    if is_dry_run:  # findings of these files do not count
        moved = {one.path for one in named}
        report.findings = [one for one in report.findings if one.path not in moved]
    edits = list(_edits(root, settings, report))
    steps = [step for _, step, _ in edits]
    # Only the repaired log shows the missing entries of derived files. A dry run plans for the present findings.
    if is_dry_run:
        repaired = [finding for finding, _, _ in edits]
        left = [one for one in report.findings if one not in repaired and not _tree_of(root, one)]
        return Repaired(named + steps + _rebuild_steps(root, report), left, is_dry_run)
    if edits:
        lock = StoreLock(root)
        lock.acquire()
        try:
            for _, _, act in edits:
                act()
        finally:
            lock.release()
        report = verify(root, settings, progress=progress)
    if rebuilds := _rebuild_steps(root, report):
        trees = {_tree_of(root, one) for one in report.findings}
        rebuild(root, settings, queues=_QUEUES in trees, index=_INDEX in trees, progress=progress)
        report = verify(root, settings, progress=progress)
    return Repaired(named + steps + rebuilds, report.findings, is_dry_run)


def _merge_journals(root: Path, *, is_dry_run: bool) -> list[Step]:
    """Write the changes of journals to their files. Do it first: a file that cannot be read gets a content here."""
    found = list(merges(root))
    if found and not is_dry_run:
        lock = StoreLock(root)
        lock.acquire()
        try:
            for _, _, act in found:
                act()
        finally:
            lock.release()
    return [Step(str(path), action) for path, action, _ in found]


def _renames(root: Path, settings: StoreSettings | None) -> Iterator[tuple[Path, Path]]:
    """Yield the log files with wrong names, and their right names. Skip a file if another file keeps the right name."""
    folders = {folder for some in log_directories(root, settings or StoreSettings()) for folder in some}
    log = [path for folder in folders for path in entries_of(folder) if path.name.isdecimal() and path.stat().st_size]
    places = {path: place_of(memoryview(mapped(path))) for path in log}
    moved = {path for path, place in places.items() if place is not None and path.name != file_name(place)}
    # Repeat until nothing changes: a file that stays may have the name that another file needs, which then stays, too.
    while True:
        kept = {path.name for path in log if path not in moved}
        targets = Counter(file_name(places[path] or 0) for path in moved)
        stay = {path for path in moved if targets[name := file_name(places[path] or 0)] > 1 or name in kept}
        if not stay:
            break
        moved -= stay
    for path in sorted(moved):
        yield path, path.with_name(file_name(places[path] or 0))


def _rename(renames: list[tuple[Path, Path]]) -> None:
    """Rename files. A new name may be the present name of another of these files."""
    assert len({target for _, target in renames}) == len(renames), "the new names differ"
    for path, _ in renames:  # move all files aside first: they may have exchanged names
        path.rename(path.with_name(f"{path.name}.moved"))
    for path, target in renames:
        path.with_name(f"{path.name}.moved").rename(target)
    for folder in {path.parent for path, _ in renames}:
        sync_directory(folder)


def _rebuild_steps(root: Path, report: Report) -> list[Step]:
    trees = {_tree_of(root, one) for one in report.findings}
    return [Step(str(root / tree), "rebuilt from the log") for tree in (_QUEUES, _INDEX) if tree in trees]


def _tree_of(root: Path, finding: Finding) -> str:
    """Return the directory that must be rebuilt to repair a finding, or an empty text if a rebuild does not help."""
    if finding.kind is Kind.FILE_NAME:
        return ""
    path = Path(finding.path)
    top = path.relative_to(root).parts[0] if path.is_relative_to(root) and path != root else ""
    return _INDEX if top == _INDEX else _QUEUES if top in QUEUE_TREES else ""


def _edits(
    root: Path, settings: StoreSettings | None, report: Report
) -> Iterator[tuple[Finding, Step, Callable[[], None]]]:
    """Yield each finding that a change in its own file repairs, together with the change."""
    folders = [folder for some in log_directories(root, settings or StoreSettings()) for folder in some]
    file_bytes = settings.commit_log_file_bytes if settings else common_length(folders)
    for finding in report.findings:
        path = Path(finding.path)
        action, act = "", _nothing
        if finding == report.tail:
            action, act = (
                f"cleared torn bytes from position {finding.position}",
                partial(_cut, root, path, finding.position),
            )
        elif finding in report.open_ends and path.stat().st_size - finding.position >= BLANK_BYTES:
            action = f"closed with a blank record at position {finding.position}"
            act = partial(_cut, root, path, finding.position, is_closed=True)
        elif (end := report.gaps.pop((finding.path, finding.position), 0)) - finding.position >= FILLER_BYTES_MIN:
            action = (
                f"replaced {end - finding.position} damaged bytes at position {finding.position} by a filler record"
            )
            act = partial(_bridge, root, path, finding.position, end)
        elif finding.kind is Kind.FILE_SIZE and path.parent in folders and path.stat().st_size < file_bytes:
            action, act = f"extended with zeros to {file_bytes} bytes", partial(_extend, path, file_bytes)
        elif path == root / "checkpoint":  # without it the next start reads the whole log, which is slow but correct
            action, act = "removed", partial(path.unlink, missing_ok=True)
        elif is_timer_file(root, path):
            action = (
                "rebuilt: the wheel from the timer log; the next start rebuilds what the log lacks from the timer topic"
            )
            act = partial(mend_timer_files, root, settings, is_reset=finding.kind is Kind.TIMER_UNIT)
        elif finding.kind in (Kind.CONFIG, Kind.FILE_MISSING):
            action, act = _edit_of_small_file(root, path)
        if action:
            yield finding, Step(finding.path, action), act


def _edit_of_small_file(root: Path, path: Path) -> tuple[str, Callable[[], None]]:
    """Return the repair of a configuration file or a note: its description and its function. The description is empty
    if there is no repair."""
    if path in [root / name for name in NOTES]:
        return "removed: the next start compares nothing with it", partial(path.unlink, missing_ok=True)
    if path.parent != root / "config":
        return "", _nothing
    other = path.with_suffix("") if path.suffix == ".bak" else path.with_name(path.name + ".bak")
    if other.is_file() and is_json(other) is None:
        return f"replaced by {other.name}", partial(_copy, other, path)
    if path.name.startswith("timermetrics"):
        return "removed: the next start counts from 0", partial(path.unlink, missing_ok=True)
    return "", _nothing


def _nothing() -> None:
    """Do nothing: most findings have no repair in their own file."""


def _cut(root: Path, path: Path, position: int, *, is_closed: bool = False) -> None:
    """End a segment at a position with zeros or a blank. The previous bytes are stored in ``repaired``.
    A filler before the blank marks that messages were lost."""
    with _opened(path) as file:
        assert 0 <= position <= file.size, "the position is in the segment"
        _keep(root, file, position, file.size)  # first, so that a crash afterwards loses nothing
        file.clear_from(position)
        if is_closed:
            if file.size - position >= FILLER_BYTES_MIN + BLANK_BYTES:
                lost_bytes, now_ms = file.size - position, int(path.stat().st_mtime * 1000)
                (filler,) = fillers(file.start + position, FILLER_BYTES_MIN, now_ms, lost_bytes=lost_bytes)
                file.write(position, filler)
                position += len(filler)
            file.write(position, pack_blank(file.size - position))


def _bridge(root: Path, path: Path, position: int, end: int) -> None:
    """Replace a part of a segment with filler records. The previous bytes are stored in ``repaired``."""
    with _opened(path) as file:
        _keep(root, file, position, end)
        try:
            store_timestamp = decode_record(file.view, end).store_timestamp
        except RecordCorrupt:
            store_timestamp = int(path.stat().st_mtime * 1000)
        for filler in fillers(file.start + position, end - position, store_timestamp):
            file.write(position, filler)
            position += len(filler)
        assert position == end, "the fillers end at the next record"


@contextmanager
def _opened(path: Path) -> Iterator[MappedFile]:
    """Open a segment for changes. The changes are on the disk when the context ends."""
    size = path.stat().st_size
    file = MappedFile(path, int(path.name), size, wrote=size)
    try:
        yield file
        file.sync()
    finally:
        file.close()


def _keep(root: Path, file: MappedFile, position: int, end: int) -> None:
    (root / "repaired").mkdir(exist_ok=True)
    removed = bytes(file.view[position:end]).rstrip(b"\0")
    write_durably(root / "repaired" / f"{file.path.name}-{position}", removed)


def _extend(path: Path, file_bytes: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(file_bytes)
        disk.sync_file(file.fileno())


def _copy(source: Path, target: Path) -> None:
    write_durably(target, source.read_bytes())
