"""Checks of a store without a broker: its damage (`verify`), its content (`stat`), its messages (`dump`).

The commit log is the truth: every record is checked with its CRCs (`LogView`), and all other files are compared with
the records (`queue_check` describes the rules). Files are opened for reading, and nothing is changed. Each damage
becomes a `Finding` with its file and position, never an exception. `verify` and `stat` scan with numpy, `dump` without
numpy.

A store that a broker holds is refused, except with ``read_only``. With ``read_only``, the record that is being written
and the records that are not yet in the queues are not reported.

Not handled here: repair (`repair`).
Source: store.md §2–§8, §12.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from rmqkit.errors import BodyError, RecordCorrupt, StoreError, StoreLocked
from rmqkit.protocol import fastjson
from rmqkit.protocol.message import ReceivedMessage, messages_of_record
from rmqkit.protocol.names import SCHEDULE_TOPIC, TIMER_TOPIC
from rmqkit.protocol.properties import REAL_QUEUE_ID, REAL_TOPIC, TIMER_OUT_MS, find_property
from rmqkit.protocol.record import CRC_NAME, TRAILER_BYTES, body_crc, has_sound_crc
from rmqkit.store.files import StoreLock
from rmqkit.store.log.commit_log import gone_files, log_directories, noted_start
from rmqkit.store.log.mapped_file import file_name
from rmqkit.store.log.remains import is_filler
from rmqkit.store.log.scan import Damage, need_numpy
from rmqkit.store.log.view import LogView, Segment
from rmqkit.store.offline.file_check import check_small_files, check_timer_files
from rmqkit.store.offline.findings import (
    FINDINGS_MAX,
    UNWRITTEN,
    Finding,
    Kind,
    Progress,
    Report,
    common_length,
    files_in_order,
)
from rmqkit.store.queues.table import deleted_topics_path
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.store.bulk import DispatchColumns, Ints
    from rmqkit.store.offline.queue_check import LogSpan

__all__ = [
    "FINDINGS_MAX",
    "UNWRITTEN",
    "Finding",
    "Kind",
    "LogDamage",
    "QueueStat",
    "Report",
    "Stat",
    "check_other_files",
    "check_records",
    "dump",
    "is_held",
    "open_log",
    "queue_ends",
    "stat",
    "tally",
    "verify",
]

Part = TypeVar("Part")
_NEEDED = {
    SCHEDULE_TOPIC: {
        REAL_TOPIC.encode(): re.compile(rb".+", re.DOTALL),
        REAL_QUEUE_ID.encode(): re.compile(rb"[0-9]+"),
    },
}
"""Properties that messages of these topics need for delivery, and the form of each.

Brokers drop messages without these properties, and no CRC covers them.
"""
_NEEDED[TIMER_TOPIC] = {**_NEEDED[SCHEDULE_TOPIC], TIMER_OUT_MS.encode(): re.compile(rb"[+-]?[0-9]{1,18}")}
_CHUNK_BYTES = 1 << 20
_DERIVED = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")


class QueueStat(Struct):
    """The records of one queue in the log. ``max_offset`` is one past the last message. Times are store times in ms.
    ``restart_offset``: number of the first record since the numbers last began again. If they never did, the number of
    the first record.
    ``restart_at``: the physical offset of the same record if the numbers began again, otherwise -1.
    ``first_at``, ``last_at``: physical offsets of the first and the last record."""

    topic: str
    queue_id: int
    records: int = 0
    messages: int = 0
    bytes: int = 0
    min_offset: int = 0
    max_offset: int = 0
    first_store_timestamp: int = 0
    last_store_timestamp: int = 0
    restart_offset: int = 0
    restart_at: int = -1
    first_at: int = -1
    last_at: int = -1

    def add(self, arrivals: DispatchColumns, rows: Ints) -> None:
        """Count records of a run that belong to the queue."""
        counts, offsets = arrivals.batch_counts[rows], arrivals.queue_offsets[rows]
        times = arrivals.store_timestamps
        if not self.records:
            self.min_offset, self.first_store_timestamp = int(offsets[0]), int(times[rows[0]])
            self.restart_offset, self.first_at = self.min_offset, int(arrivals.offsets[rows[0]])
        begins = [0] if self.records and offsets[0] < self.max_offset else []
        falls = (offsets[1:] < (offsets + counts)[:-1]).nonzero()[0] + 1
        for row in [*begins, *falls.tolist()]:
            self.restart_offset, self.restart_at = int(offsets[row]), int(arrivals.offsets[rows[row]])
        self.records += len(rows)
        self.messages += int(counts.sum())
        self.bytes += int(arrivals.records.sizes[rows].sum())
        self.max_offset = int(offsets[-1] + counts[-1])  # the numbers of a topic that was created again begin at 0
        self.last_store_timestamp, self.last_at = int(times[rows[-1]]), int(arrivals.offsets[rows[-1]])

    def join(self, later: QueueStat) -> None:
        """Add the records of a later part of the log."""
        if later.restart_at >= 0 or later.min_offset < self.max_offset:
            self.restart_offset, self.restart_at = (
                later.restart_offset,
                later.restart_at if later.restart_at >= 0 else later.first_at,
            )
        self.records += later.records
        self.messages += later.messages
        self.bytes += later.bytes
        self.max_offset, self.last_at = later.max_offset, later.last_at
        self.last_store_timestamp = later.last_store_timestamp


class Stat(Struct):
    """The content of a log. Offsets are physical. ``bytes`` counts the bytes of records, without blanks."""

    segments: int
    records: int
    bytes: int
    damaged_bytes: int
    min_offset: int
    max_offset: int
    first_store_timestamp: int
    last_store_timestamp: int
    queues: list[QueueStat]


def verify(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    read_only: bool = False,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Check every record, queue entry, extension unit and index chain of a store.

    Args:
        settings: the settings of the store. Without settings, a file's length is compared with other files of its kind.
        read_only: whether to check a store that a broker holds, in its present state.

    Raises:
        StoreLocked: a broker holds the store.
        StoreError: there is no store, or its index sizes are unknown.
        ExtraMissing: numpy is missing.
        OSError: a file cannot be read.
    """
    need_numpy("verify")
    from rmqkit.store.offline.queue_check import DerivedFiles, FileSizes

    report = Report(is_live=is_held(root, read_only), is_unclean=(root / "abort").exists())
    log = open_log(root, settings, report)
    folders = [root / name for name in _DERIVED]
    total = log.file_bytes + sum(path.stat().st_size for folder in folders for path in folder.rglob("*"))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    used = settings or StoreSettings()
    sizes = FileSizes.of(root, used, are_set=settings is not None)
    derived = DerivedFiles(root, log, used, report, sizes, advance=advance)

    def look(segment: Segment, arrivals: DispatchColumns) -> None:
        check_records(segment, arrivals, report)
        derived.compare(arrivals)

    damages = LogDamage(report)
    tallies = _walk(log, damages, advance, look=look)
    # Check the tail after the scan and before the queues: the queue entries decide whether the last bytes are damage.
    damages.check_tail(derived.indexed_end)
    damages.check_behind(log)
    derived.check(queue_ends(root, log, tallies))
    check_other_files(root, log, report, settings, tallies)
    return report


def check_other_files(
    root: Path,
    log: LogView,
    report: Report,
    settings: StoreSettings | None,
    tallies: dict[tuple[str, int], QueueStat],
) -> None:
    """Check the files that contain no messages. ``tallies``: the content of each queue according to the log."""
    newest_ms = max((tally.last_store_timestamp for tally in tallies.values()), default=0)
    has_delays = any(topic == SCHEDULE_TOPIC for topic, _ in tallies)
    log_end = log.segments[-1].end if log.segments else 0
    check_small_files(root, report, newest_ms, log_end, has_delays=has_delays)
    check_timer_files(root, log, report, settings)


def stat(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    read_only: bool = False,
    progress: Progress = lambda done, total: None,
) -> Stat:
    """Count the records of the log. Checksums and queues are not checked.

    Raises:
        StoreLocked, StoreError, OSError: see `verify`.
    """
    need_numpy("stat")
    report = Report(is_live=is_held(root, read_only))
    log = open_log(root, settings, report)

    def advance(count: int) -> None:
        progress(log.end - log.min_offset, log.file_bytes)

    damages = LogDamage(report)
    tallies = _walk(log, damages, advance, look=lambda segment, arrivals: None)
    damages.add_tail()
    queues = [tallies[key] for key in sorted(tallies)]
    return Stat(
        segments=len(log.segments),
        records=sum(queue.records for queue in queues),
        bytes=sum(queue.bytes for queue in queues),
        damaged_bytes=report.damaged_bytes,
        min_offset=log.min_offset,
        max_offset=log.end,
        first_store_timestamp=min((queue.first_store_timestamp for queue in queues), default=0),
        last_store_timestamp=max((queue.last_store_timestamp for queue in queues), default=0),
        queues=queues,
    )


def dump(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    topic: str | None = None,
    queue_id: int | None = None,
    begin_ms: int = 0,
    end_ms: int | None = None,
    key: str | None = None,
    begin_offset: int = 0,
    read_only: bool = False,
    verify_crc: bool = False,
    on_damage: Callable[[Finding], None] = lambda finding: None,
) -> Iterator[ReceivedMessage]:
    """Yield the messages of a log in log order. Inner batches are unpacked and bodies are decompressed.

    Args:
        begin_ms, end_ms: store times, inclusive.
        key: a word of KEYS, or the unique key.
        begin_offset: physical offset of the first record.
        verify_crc: whether to skip messages with a body that does not match its CRC.
        on_damage: called for bytes that are not a record, and for bodies that are unreadable or skipped. The scan
            continues after them.

    Raises:
        StoreLocked, StoreError, OSError: see `verify`, raised by the first message.
    """
    is_live = is_held(root, read_only)
    log = open_log(root, settings, Report())
    log.segments = [segment for segment in log.segments if segment.end > begin_offset]
    for segment, part in log.walk():
        if isinstance(part, Damage):
            is_last = segment is log.segments[-1] and part.end == len(segment.buffer)
            if not (is_live and is_last):  # otherwise a broker is writing the record
                on_damage(_unreadable(segment, part))
        elif (
            part.physical_offset >= begin_offset
            and not is_filler(part)
            and topic in (None, part.topic)
            and queue_id in (None, part.queue_id)
            and begin_ms <= part.store_timestamp
            and (end_ms is None or part.store_timestamp <= end_ms)
        ):
            at = part.physical_offset - segment.start
            if verify_crc and not part.has_sound_body:
                found = f"{body_crc(part.body):08x}"
                on_damage(Finding(Kind.BODY_CRC, str(segment.path), at, f"{part.body_crc:08x}", found))
                continue
            try:
                messages = list(messages_of_record(part))
            except BodyError as error:
                on_damage(Finding(Kind.RECORD, str(segment.path), at, "a body that can be read", str(error)))
                continue
            yield from (one for one in messages if key is None or key in one.keys or key == one.msg_id)


def is_held(root: Path, read_only: bool) -> bool:
    """Return True if a broker holds the store and ``read_only`` is set. Raises StoreLocked: a broker holds the store,
    and ``read_only`` is not set."""
    try:
        StoreLock(root).check()
    except StoreLocked:
        if not read_only:
            raise
        return True
    return False


def open_log(root: Path, settings: StoreSettings | None, report: Report) -> LogView:
    """Open the commit log of a store.

    Raises:
        StoreError: the store has no commit log.
    """
    folders = {path for paths in log_directories(root, settings or StoreSettings()) for path in paths}
    if not any(folder.is_dir() for folder in folders):
        missing = ", ".join(sorted(map(str, folders)))
        raise StoreError(f"{root} is not a store: there is no {missing}: name its storePathRootDir")
    file_bytes = common_length(folders) if settings is None else settings.commit_log_file_bytes
    log = LogView(list(files_in_order(folders, file_bytes, report)))
    _check_start(root, log, report)
    return log


def _check_start(root: Path, log: LogView, report: Report) -> None:
    """Report missing first files if the log begins after the start that a broker noted."""
    noted = noted_start(root)  # read after the files were listed: a broker notes the new start before it deletes files
    if noted is not None and log.segments and log.min_offset > noted:
        expected = f"{file_name(noted)} to be the first file"
        report.add(Kind.FILE_MISSING, log.segments[0].path, 0, expected, gone_files(noted, log.min_offset))


def _walk(
    log: LogView,
    damages: LogDamage,
    advance: Callable[[int], None],
    *,
    look: Callable[[Segment, DispatchColumns], None],
) -> dict[tuple[str, int], QueueStat]:
    """Scan the log and report its damage. Return the content of each queue."""
    from rmqkit.store.bulk import DispatchColumns

    tallies: dict[tuple[str, int], QueueStat] = {}
    walked = 0
    for segment, part in damages.passed(log.runs()):
        advance(log.end - log.min_offset - walked)
        walked = log.end - log.min_offset
        damages.report.checked["records"] += len(part)
        arrivals = DispatchColumns(part)
        tally(arrivals, tallies)
        look(segment, arrivals)
    advance(log.file_bytes - walked)
    return tallies


def tally(arrivals: DispatchColumns, tallies: dict[tuple[str, int], QueueStat]) -> None:
    """Count a run of records, by topic and queue id."""
    for topic, queue_id, rows in arrivals.groups():
        key = topic, queue_id
        (tallies.get(key) or tallies.setdefault(key, QueueStat(*key))).add(arrivals, rows)


def queue_ends(root: Path, log: LogView, tallies: dict[tuple[str, int], QueueStat]) -> dict[tuple[str, int], LogSpan]:
    """Return the expected offsets of each queue according to the log. Omit queues with only messages of a deleted
    topic."""
    from rmqkit.store.offline.queue_check import LogSpan

    deleted = _deleted_topics(root, log)
    return {
        key: LogSpan(one.restart_offset, one.max_offset, -1 if key[0] in deleted else one.restart_at)
        for key, one in tallies.items()
        if one.last_at > deleted.get(key[0], -1)
    }


def _deleted_topics(root: Path, log: LogView) -> dict[str, int]:
    """Return the physical offset of the last record of each deleted topic. As in the broker, a note is valid only if
    its record is in the log. Store times are not compared: the clock of a broker may have been set back."""
    noted: dict[str, tuple[int, int, int]] = {}
    with suppress(OSError, BodyError):
        noted = fastjson.decode_as(deleted_topics_path(root).read_bytes(), dict[str, tuple[int, int, int]])
    valid = {}
    for topic, (physical_offset, size, store_timestamp) in noted.items():
        with suppress(RecordCorrupt):
            record = log.record_at(physical_offset)
            if (record.size, record.store_timestamp) == (size, store_timestamp):
                valid[topic] = physical_offset
    return valid


class LogDamage:
    """A reporter for the damage of a log during a scan. Damage at the end of the log waits for `check_tail`.

    Attributes:
        stale: bytes at the end of the log that are not damage.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.stale: tuple[Segment, Damage] | None = None
        self._tail: tuple[Segment, Damage] | None = None

    def passed(self, parts: Iterable[tuple[Segment, Part | Damage]]) -> Iterator[tuple[Segment, Part]]:
        """Yield the parts of a log that are not damage."""
        for segment, part in parts:
            self.add_tail()  # another part follows, so the previous part is not at the end
            if isinstance(part, Damage):
                self._tail = segment, part
            else:
                yield segment, part
        # A sound record follows. A crash never leaves such damage, even if the queues lack the record.
        if self._tail is not None and self._tail[1].end < len(self._tail[0].buffer):
            self.add_tail()
        if self.report.is_live:
            self.stale, self._tail = self._tail, None

    def add_tail(self) -> None:
        """Report the last part as damage."""
        if self._tail is not None:
            self._add(*self._tail)
            self._tail = None

    def check_tail(self, indexed_end: Callable[[], int]) -> None:
        """Distinguish a torn record at the end of the log from stale bytes that a recovery of an Apache broker left.

        After a clean stop every record is in a queue, so bytes after the last record of all queues are not records.
        """
        if self._tail is None:
            return
        segment, damage = self._tail
        log_end, indexed = segment.start + damage.position, indexed_end()
        if self.report.is_unclean or indexed != log_end:
            hint = "" if indexed > log_end else ": a torn record, or stale bytes after the log's end"
            self.report.tail = self._add(segment, damage, hint)
            self.report.open_ends.remove(self.report.tail)
        else:
            self.stale = self._tail

    def check_behind(self, log: LogView) -> None:
        """Report bytes in files after the zeros at the end of an unclean log. The next start sets these bytes aside."""
        if self._tail is not None or not self.report.is_unclean or self.report.is_live:
            return
        for segment in log.segments:
            for at in range(0, segment.data_end if segment.start >= log.end else 0, _CHUNK_BYTES):
                chunk = bytes(segment.view[at : at + _CHUNK_BYTES])
                if found := len(chunk) - chunk.count(0):
                    at += len(chunk) - len(chunk.lstrip(b"\0"))
                    self.report.add(Kind.RECORD, segment.path, at, "zeros after the end of the log", f"{found} others")
                    break

    def _add(self, segment: Segment, damage: Damage, hint: str = "") -> Finding:
        self.report.damaged_bytes += damage.end - damage.position
        found = _unreadable(segment, damage)
        finding = self.report.add(found.kind, segment.path, found.position, found.expected, found.found + hint)
        if damage.end == len(segment.buffer):
            self.report.open_ends.append(finding)
        else:
            self.report.gaps[finding.path, finding.position] = damage.end
        return finding


def check_records(segment: Segment, arrivals: DispatchColumns, report: Report) -> None:
    """Report the records with wrong checksums, and the records that a broker cannot deliver when they are due."""
    _check_sums(segment, arrivals, report)
    for topic, needed in _NEEDED.items():
        for row in arrivals.rows_of(topic).tolist():
            properties = arrivals.records.properties(row)
            for name, form in needed.items():
                value = find_property(properties, name)
                if value is None or not form.fullmatch(value):
                    position = int(arrivals.records.positions[row])
                    found = "none" if value is None else repr(value)
                    report.add(Kind.PROPERTIES, segment.path, position, f"a {name.decode()} in {topic}", found)


def _check_sums(segment: Segment, arrivals: DispatchColumns, report: Report) -> None:
    for row in arrivals.suspects().tolist():
        record = arrivals.records.record(row)
        position = record.physical_offset - segment.start
        found_before = report.counts.total()
        if (crc := body_crc(record.body)) != record.body_crc:
            report.add(Kind.BODY_CRC, segment.path, position, f"{record.body_crc:08x}", f"{crc:08x}")
        if record.properties.endswith(b"\0"):  # no CRC covers the properties: zeros reveal a torn record
            found = "zero bytes at their end: a torn record"
            report.add(Kind.RECORD, segment.path, position, "properties of text", found)
        if record.properties[-TRAILER_BYTES:].startswith(CRC_NAME) and not has_sound_crc(
            segment.view[position : position + record.size]
        ):
            report.add(Kind.RECORD_CRC, segment.path, position, "the CRC at the record's end", "another one")
        if report.counts.total() > found_before:
            report.gaps[str(segment.path), position] = position + record.size


def _unreadable(segment: Segment, damage: Damage) -> Finding:
    found = f"{damage.reason} ({damage.end - damage.position} bytes are no record)"
    return Finding(Kind.RECORD, str(segment.path), damage.position, "a record, or zeros after the last one", found)
