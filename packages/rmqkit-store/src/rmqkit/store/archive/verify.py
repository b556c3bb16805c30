"""Check of every segment of an archive, and repair of segments from a store that still has their log files.

The check of a segment covers:

- its trailer, its directory and Parquet's footer, and the CRC-32 of every section and block;
- the range of the log: the blocks hold the whole log file without a gap;
- every record with the CRC-32 of its body, and the first record against the identity of the segment.

The check of the archive covers names, order, missing and duplicate ranges, gaps in the numbers of queues, and that all
segments belong to one log (`rmqkit.store.archive.identity`).

One segment is in memory at a time, block by block. A repair writes a segment like a broker does (`seal`): the segment
appears only when it is complete, and is read back. A segment of another log is never replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field

from rmqkit.errors import RecordCorrupt, StoreError
from rmqkit.protocol.record import decode_record
from rmqkit.store.archive.archive import Found, segment_name, segments_in
from rmqkit.store.archive.contents import identity_of
from rmqkit.store.archive.identity import identity_in
from rmqkit.store.archive.places import Place
from rmqkit.store.archive.seal import Work, seal
from rmqkit.store.archive.segment import SegmentFile, parts_of
from rmqkit.store.settings import StoreSettings

__all__ = ["Problem", "Report", "found_in", "repair", "verify"]


class Problem(Struct):
    """A fault: the segment's name, its range of the log from ``start`` to ``end``, and a description.

    ``is_lost``: whether writing the segment again from its log file repairs the fault.
    """

    name: str
    start: int
    end: int
    text: str
    is_lost: bool

    def __str__(self) -> str:
        return f"{self.name} (log from {self.start} to {self.end}): {self.text}"


class Report(Struct):
    """The result of an archive check."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    log: str = ""
    problems: list[Problem] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Return True if there are no problems."""
        return not self.problems


def _segment(place: Place, name: str, size: int) -> SegmentFile:
    return SegmentFile(name, lambda position, count: place.read(name, position, count), size)


def found_in(place: Place) -> list[Found]:
    """Return the readable segments of a place, in log order. Raises OSError: the place cannot be reached."""
    found = []
    for name, size in segments_in(place).items():
        try:
            segment = _segment(place, name, size)
        except StoreError:
            continue
        found.append(Found(name, size, segment.directory, segment.digest))
    return sorted(found, key=lambda one: one.directory.start)


def verify(place: Place, progress: Callable[[int, int], None] = lambda done, total: None) -> Report:
    """Check all segments of a place.

    Raises:
        StoreError: the place has no segments.
        OSError: the place cannot be reached.
    """
    sizes = segments_in(place)
    if not sizes:
        raise StoreError(f"{place} has no segments: give the folder of a broker, such as {place}/broker-a")
    found = found_in(place)
    # Most segments have the right log. Segments of another log were put there by mistake.
    named = Counter(one.directory.log for one in found if one.directory.log).most_common(1)
    report = Report(segments=len(sizes), bytes=sum(sizes.values()), log=named[0][0] if named else "")
    readable = {one.name for one in found}
    file_bytes = max((one.directory.end - one.directory.start for one in found), default=0)
    for name in sorted(sizes.keys() - readable):
        start = int(name.partition(".")[0])
        report.problems.append(Problem(name, start, start + file_bytes, _why(place, name, sizes[name]), is_lost=True))
    own = []
    for done, one in enumerate(found):
        progress(done, len(found))
        if one.directory.log not in ("", report.log):
            text = f"it belongs to log {one.directory.log}, the others to {report.log}: remove it"
            report.problems.append(_problem(one, text, is_lost=False))
            continue
        own.append(one)
        try:
            records, changed = _check(_segment(place, one.name, one.size))
            report.records += records
            if changed:
                text = f"{len(changed)} bodies were changed before they were archived, the first at {changed[0]}"
                report.problems.append(_problem(one, text, is_lost=False))
        except StoreError as error:
            report.problems.append(_problem(one, str(error), is_lost=True))
    progress(len(found), len(found))
    _check_order(own, report)
    report.problems.sort(key=lambda problem: (problem.start, problem.name))
    return report


def _problem(one: Found, text: str, *, is_lost: bool) -> Problem:
    return Problem(one.name, one.directory.start, one.directory.end, text, is_lost)


def _why(place: Place, name: str, size: int) -> str:
    try:
        _segment(place, name, size)
    except StoreError as error:
        return str(error)
    return "it changes while it is read"


def _check(segment: SegmentFile) -> tuple[int, list[int]]:
    """Read a whole segment. Return the number of its records, and the offsets of the records with a changed body.
    Raises StoreError: the segment is damaged."""
    directory, records, first = segment.directory, 0, None
    segment.check_footer()
    name, covered, changed = segment.name, list[tuple[int, int]](), list[int]()
    for physical_offset, part in parts_of(segment):
        covered.append((physical_offset, physical_offset + len(part)))
        try:
            record = decode_record(part)
        except RecordCorrupt:
            continue
        if record.physical_offset != physical_offset:
            continue
        records += 1
        if first is None or physical_offset < first[0]:
            first = physical_offset, identity_of(part)
        try:
            decode_record(part, verify_crc=True)
        except RecordCorrupt:
            changed.append(physical_offset)
    end = directory.start
    for start, stop in sorted(covered):
        if start != end:
            raise StoreError(f"{name} does not hold the log from {end} to {start}")
        end = stop
    if end != directory.records_end:
        raise StoreError(f"{name} holds the log to {end}, and its directory says {directory.records_end}")
    if records != directory.record_count:
        raise StoreError(f"{name} has {records} sound records, and its directory says {directory.record_count}")
    if first is not None and first[1] != directory.identity:
        raise StoreError(f"{name} begins with another record than its directory lists")
    for _, part_of_keys in directory.keys:
        segment.section(part_of_keys)
    return records, sorted(changed)


def _check_order(own: list[Found], report: Report) -> None:
    """Report problems with names, and with the ranges between segments."""
    damaged = [problem for problem in report.problems if problem.is_lost]
    ends: dict[tuple[str, int], int] = {}
    before: Found | None = None
    for one in own:
        directory = one.directory
        if one.name != segment_name(directory.start):
            wanted = segment_name(directory.start)
            report.problems.append(_problem(one, f"it has the wrong name: rename it to {wanted}", is_lost=False))
        if before is not None and directory.start < before.directory.end:
            report.problems.append(_problem(one, f"{before.name} has the same log: remove one", is_lost=False))
            continue
        if before is not None and directory.start > before.directory.end:
            size = directory.end - directory.start
            for start in range(before.directory.end, directory.start, size):
                if not any(problem.start == start for problem in damaged):
                    end = min(start + size, directory.start)
                    report.problems.append(Problem(segment_name(start), start, end, "it is missing", is_lost=True))
        for queue in directory.queues if before is None or directory.start == before.directory.end else ():
            end = ends.get((queue.topic, queue.queue_id), queue.first)
            if queue.topic and queue.first > end:
                text = f"queue {queue.queue_id} of topic {queue.topic} lacks messages {end} to {queue.first - 1}"
                report.problems.append(_problem(one, text, is_lost=False))
        ends.update({(queue.topic, queue.queue_id): queue.end for queue in directory.queues if queue.topic})
        before = one


def repair(place: Place, report: Report, root: Path, settings: StoreSettings) -> Report:
    """Write damaged and missing segments again from the log of a store, and check the archive again.

    Raises:
        StoreError: the store has another log, or its log is unknown.
        OSError: the place cannot be written, or the log cannot be read.
    """
    files = _log_files(root, settings)
    log_id = _identity(place, report, root, files)
    repaired, refused = [], dict[str, str]()
    for problem in report.problems:
        path = files.get(problem.start) if problem.is_lost else None
        if path is None:
            continue
        try:
            work = Work(str(path), problem.start, "", "", settings.index_tags, log_id)
            repaired.append(seal(work, place).name)
        except StoreError as error:
            refused[problem.name] = str(error)
    found = verify(place)
    found.repaired = repaired
    for problem in found.problems:
        if problem.is_lost and problem.name not in refused:
            problem.text += f"; {root} has no full log file of it"
        elif problem.name in refused:
            problem.text += f"; {refused[problem.name]}"
    return found


def _log_files(root: Path, settings: StoreSettings) -> dict[int, Path]:
    """Return the full files of a store's log: all files except the last one."""
    paths = [settings.store_path_commit_log, settings.read_only_commit_log_store_paths]
    roots = [Path(text.strip()).expanduser() for path in paths for text in path.split(",") if text.strip()]
    files = {
        int(path.name): path
        for folder in roots or [root / "commitlog"]
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.name.isdigit() and len(path.name) == 20
    }
    return {start: files[start] for start in sorted(files)[:-1]}


def _identity(place: Place, report: Report, root: Path, files: dict[int, Path]) -> str:
    """Return the identity for new segments. Raises StoreError: the store has another log, or its log is unknown."""
    known = identity_in(root)
    if known and report.log and known != report.log:
        raise StoreError(f"{root} has log {known}, and the archive {place} is of log {report.log}: give another store")
    lost = {problem.name for problem in report.problems}
    compared = [
        (one, _begins(files[one.directory.start], one.directory.identity))
        for one in found_in(place)
        if one.directory.start in files and one.name not in lost
    ]
    differing = next((one.name for one, is_same in compared if not is_same), None)
    if differing is not None:
        raise StoreError(f"{root} has another log than the archive {place}: {differing} begins with another record")
    if not compared and not (known and known == report.log):
        raise StoreError(f"{root} has no log file of a sound segment of {place}: it is unknown whether it has this log")
    return report.log or known


def _begins(path: Path, identity: str) -> bool:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(4), "big")
        file.seek(0)
        return identity_of(file.read(size)) == identity
