"""The results of an offline check of a store: findings, a report of them, and the files that should exist.

Source: store.md §2.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct, field

from rmqkit.store.log.mapped_file import file_name

__all__ = [
    "FINDINGS_MAX",
    "UNWRITTEN",
    "Finding",
    "Kind",
    "Progress",
    "Report",
    "common_length",
    "entries_of",
    "files_in_order",
]

FINDINGS_MAX = 10_000
"""Maximum number of findings in a report. Further findings are only counted."""

UNWRITTEN = "changes only in journals"
"""The count of changes of topics and groups that only rmqkit can read, in `Report.checked`."""

Progress = Callable[[int, int], None]
"""A callback for the number of bytes checked so far, and the total."""


class Kind(enum.StrEnum):
    """The kind of a fault."""

    FILE_NAME = "file name"
    FILE_SIZE = "file size"
    FILE_MISSING = "file missing"
    RECORD = "record"
    BODY_CRC = "body CRC"
    RECORD_CRC = "record CRC"
    PROPERTIES = "properties"
    QUEUE_ENTRY = "queue entry"
    QUEUE_END = "queue end"
    EXT_UNIT = "extension unit"
    INDEX_HEADER = "index header"
    INDEX_CHAIN = "index chain"
    INDEX_ENTRY = "index entry"
    CHECKPOINT = "checkpoint"
    CONFIG = "configuration"
    TIMER = "timed messages"
    TIMER_UNIT = "timer unit"


class Finding(Struct):
    """A fault, at ``position`` bytes from the start of a file."""

    kind: Kind
    path: str
    position: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path} at {self.position}: {self.kind}: expected {self.expected}, found {self.found}"


class Report(Struct):
    """The findings of a check, and counts of everything that was checked.

    Attributes:
        findings: the first `FINDINGS_MAX` findings.
        counts: number of findings of each kind.
        checked: numbers of files, records, entries and units that were checked.
        damaged_bytes: number of bytes in the log that are not records.
        tail: the finding about such bytes at the end of the log, or None.
        open_ends: the findings about such bytes at the end of an older segment.
        gaps: ranges of such bytes, and records with a wrong checksum, if other records of the same segment follow. The
            key is the path and the position, the value is the position of the end.
        is_live: whether a broker holds the store. The part that the broker is writing is not checked.
        is_unclean: whether ``abort`` exists: the broker was not stopped cleanly, and its next start repairs the store
            as far as possible.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    damaged_bytes: int = 0
    tail: Finding | None = None
    open_ends: list[Finding] = field(default_factory=list)
    gaps: dict[tuple[str, int], int] = field(default_factory=dict)
    is_live: bool = False
    is_unclean: bool = False

    @property
    def is_sound(self) -> bool:
        """Return True if there are no findings."""
        return not self.counts

    def add(self, kind: Kind, path: Path, position: int, expected: object, found: object) -> Finding:
        """Add a finding."""
        finding = Finding(kind, str(path), position, str(expected), str(found))
        self.counts[kind.value] += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(finding)
        return finding

    def join(self, other: Report) -> None:
        """Add the findings of another part."""
        self.findings += other.findings[: FINDINGS_MAX - len(self.findings)]
        self.counts += other.counts
        self.gaps |= other.gaps
        self.checked += other.checked


def entries_of(folder: Path) -> list[Path]:
    """Return the paths in a directory, sorted by name. Return an empty list if the directory is missing."""
    return sorted(folder.iterdir()) if folder.is_dir() else []


def common_length(folders: Iterable[Path]) -> int:
    """Return the most common length of the files under some directories, or 0 if there are no files."""
    lengths = Counter(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    return max(lengths, key=lambda length: (lengths[length], length), default=0)


def files_in_order(folders: Iterable[Path], file_bytes: int, report: Report) -> Iterator[tuple[Path, int]]:
    """Yield the files of one file queue with their starts, oldest first. Report violations of store.md §2."""
    paths = sorted((path for folder in folders for path in entries_of(folder)), key=lambda path: path.name)
    previous: tuple[Path, int] | None = None
    for path in paths:
        if not path.is_file() or len(path.name) != 20 or not path.name.isdecimal():
            report.add(Kind.FILE_NAME, path, 0, "a file with a name of 20 digits", path.name)
            continue
        length, start = path.stat().st_size, int(path.name)
        if length != file_bytes and not (length == 0 and path is paths[-1]):
            report.add(Kind.FILE_SIZE, path, min(length, file_bytes), f"{file_bytes} bytes", f"{length} bytes")
        if previous is not None and start != previous[1] + file_bytes:
            expected = f"{file_name(previous[1] + file_bytes)} before this file"
            report.add(Kind.FILE_MISSING, path, 0, expected, previous[0].name)
        previous = path, start
        report.checked["files"] += 1
        yield previous
