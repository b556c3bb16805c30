"""Looking at a store without a broker: is it whole (`verify`), what does it hold (`stat`), which messages (`dump`).

The commit log is the truth: every record is checked with its CRCs (`log_view`), and everything else is held against the
records (`derived_files`, which says what has to hold). Files are opened for reading and nothing is changed. Damage is a
`Finding` with its file and position, never an exception.

A store that a broker holds is refused unless asked for with ``read_only``; then the record being written and what the
queues do not have yet are no findings.

Not handled here: repair (opening the store does it), checkpoint, timer log and wheel, ``config``.
Source: store.md §2–§8, §12.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from rmqkit.errors import BodyError, StoreError, StoreLocked
from rmqkit.protocol.message import ReceivedMessage, messages_of_record
from rmqkit.protocol.record import (
    INNER_BATCH,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    Record,
    body_crc,
)
from rmqkit.store.commit_log import log_directories
from rmqkit.store.derived_files import DerivedFiles
from rmqkit.store.dispatcher import arrival_of
from rmqkit.store.findings import FINDINGS_MAX, Finding, Kind, Progress, Report, common_length, files_in_order
from rmqkit.store.log_view import LogView, Segment
from rmqkit.store.property_crc import TRAILER_BYTES, has_sound_crc
from rmqkit.store.scan import Damage
from rmqkit.store.settings import StoreSettings
from rmqkit.store.store_lock import StoreLock

__all__ = ["FINDINGS_MAX", "Finding", "Kind", "QueueStat", "Report", "Stat", "dump", "stat", "verify"]

_DERIVED = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")
_PROGRESS_RECORDS = 4096


class QueueStat(Struct):
    """The records of one queue in the log; ``max_offset`` is one past the last message, times are store times in ms."""

    topic: str
    queue_id: int
    records: int = 0
    messages: int = 0
    bytes: int = 0
    min_offset: int = 0
    max_offset: int = 0
    first_store_timestamp: int = 0
    last_store_timestamp: int = 0

    def add(self, record: Record, count: int) -> None:
        """Count a record of ``count`` messages."""
        if not self.records:
            self.min_offset, self.first_store_timestamp = record.queue_offset, record.store_timestamp
        self.records += 1
        self.messages += count
        self.bytes += record.size
        self.max_offset = max(self.max_offset, record.queue_offset + count)
        self.last_store_timestamp = record.store_timestamp


class Stat(Struct):
    """What a log holds; offsets are physical, ``bytes`` are those of records, without blanks."""

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
    """Look at every record, queue entry, extension unit and index chain of a store.

    Args:
        settings: what the store was written with; without them a file's length is compared with those of its kind.
        read_only: take a store that a broker holds as it is at this moment.

    Raises:
        StoreLocked: a broker holds the store.
        StoreError: there is no store, or its index sizes have to be said.
        OSError: a file cannot be read.
    """
    report = Report(is_live=_is_live(root, read_only), is_unclean=(root / "abort").exists())
    log = _log(root, settings, report)
    folders = [root / name for name in _DERIVED]
    total = log.file_bytes + sum(path.stat().st_size for folder in folders for path in folder.rglob("*"))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    used = settings or StoreSettings()
    derived = DerivedFiles(root, log, used, report, sizes_are_set=settings is not None, advance=advance)
    tallies = _walk(log, report, advance, with_sums=True)
    derived.check({key: tally.max_offset for key, tally in tallies.items()})
    return report


def stat(
    root: Path,
    settings: StoreSettings | None = None,
    *,
    read_only: bool = False,
    progress: Progress = lambda done, total: None,
) -> Stat:
    """Count what the log holds; checksums and queues are left alone.

    Raises:
        StoreLocked, StoreError, OSError: as `verify`.
    """
    report = Report(is_live=_is_live(root, read_only))
    log = _log(root, settings, report)
    tallies = _walk(log, report, lambda count: progress(log.end - log.min_offset, log.file_bytes), with_sums=False)
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
    read_only: bool = False,
    on_damage: Callable[[Finding], None] = lambda finding: None,
) -> Iterator[ReceivedMessage]:
    """The messages of a log in its order, inner batches unpacked and bodies decompressed.

    Args:
        begin_ms, end_ms: store times, inclusive.
        key: a word of KEYS, or the unique key.
        on_damage: told of bytes that are no record and bodies that cannot be read; the walk goes on behind them.

    Raises:
        StoreLocked, StoreError, OSError: as `verify`, with the first message.
    """
    is_live = _is_live(root, read_only)
    log = _log(root, settings, Report())
    for segment, part in log.walk():
        if isinstance(part, Damage):
            if not (is_live and _is_being_written(log, segment, part)):
                on_damage(_unreadable(segment, part))
        elif (
            topic in (None, part.topic)
            and queue_id in (None, part.queue_id)
            and begin_ms <= part.store_timestamp
            and (end_ms is None or part.store_timestamp <= end_ms)
        ):
            try:
                messages = list(messages_of_record(part))
            except BodyError as error:
                at = part.physical_offset - segment.start
                on_damage(Finding(Kind.RECORD, str(segment.path), at, "a body that can be read", str(error)))
                continue
            yield from (one for one in messages if key is None or key in one.keys or key == one.msg_id)


def _is_live(root: Path, read_only: bool) -> bool:
    """Whether a broker holds the store; it is refused then, unless asked for."""
    try:
        StoreLock(root).check()
    except StoreLocked:
        if not read_only:
            raise
        return True
    return False


def _log(root: Path, settings: StoreSettings | None, report: Report) -> LogView:
    folders = {path for paths in log_directories(root, settings or StoreSettings()) for path in paths}
    if not any(folder.is_dir() for folder in folders):
        missing = ", ".join(sorted(map(str, folders)))
        raise StoreError(f"{root} is no store, there is no {missing}: name its storePathRootDir")
    file_bytes = common_length(folders) if settings is None else settings.commit_log_file_bytes
    return LogView(list(files_in_order(folders, file_bytes, report)))


def _walk(
    log: LogView, report: Report, advance: Callable[[int], None], *, with_sums: bool
) -> dict[tuple[str, int], QueueStat]:
    """Walk the log and note its damage; returns what it holds of each queue."""
    tallies: dict[tuple[str, int], QueueStat] = {}
    walked = 0
    for number, (segment, part) in enumerate(log.walk()):
        if number % _PROGRESS_RECORDS == 0:
            advance(log.end - log.min_offset - walked)
            walked = log.end - log.min_offset
        if isinstance(part, Damage):
            if not (report.is_live and _is_being_written(log, segment, part)):
                report.damaged_bytes += part.end - part.position
                finding = _unreadable(segment, part)
                report.add(finding.kind, segment.path, finding.position, finding.expected, finding.found)
            continue
        report.checked["records"] += 1
        _tally(tallies, part)
        if with_sums:
            _check_sums(segment, part, report)
    advance(log.file_bytes - walked)
    return tallies


def _check_sums(segment: Segment, record: Record, report: Report) -> None:
    position = record.physical_offset - segment.start
    if (crc := body_crc(record.body)) != record.body_crc:
        report.add(Kind.BODY_CRC, segment.path, position, f"{record.body_crc:08x}", f"{crc:08x}")
    if record.properties.endswith(b"\0"):  # no CRC covers them: this is how a torn record shows
        report.add(Kind.RECORD, segment.path, position, "properties of text", "zero bytes at their end: a torn record")
    if record.properties[-TRAILER_BYTES:].startswith(b"__CRC32#\x01") and not has_sound_crc(
        segment.view[position : position + record.size]
    ):
        report.add(Kind.RECORD_CRC, segment.path, position, "the CRC at the record's end", "another one")


def _tally(tallies: dict[tuple[str, int], QueueStat], record: Record) -> None:
    """Count a record for its queue; the transaction markers of old stores are in none."""
    if record.sys_flag & TRANSACTION_MASK not in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK):
        key = record.topic, record.queue_id
        count = arrival_of(record, ()).batch_count if record.sys_flag & INNER_BATCH else 1
        (tallies.get(key) or tallies.setdefault(key, QueueStat(*key))).add(record, count)


def _is_being_written(log: LogView, segment: Segment, damage: Damage) -> bool:
    return segment is log.segments[-1] and damage.end == len(segment.buffer)


def _unreadable(segment: Segment, damage: Damage) -> Finding:
    found = f"{damage.reason} ({damage.end - damage.position} bytes are no record)"
    return Finding(Kind.RECORD, str(segment.path), damage.position, "a record, or zeros behind the last one", found)
