"""Offline checks of files without messages: the checkpoint, JSON under ``config``, notes, and files of the timer.

`check_small_files` reports a wrong length of the checkpoint, impossible times or offsets in it, and files that are not
JSON. Times that are wrong by less than a day are not found. Only the existence of ``abort`` has a meaning, so its
content is not checked.

`check_timer_files` reports damage in the files of timed messages, and `mend_timer_files` repairs it:

=======================  ============================================  ==============================================
file                     check                                         repair
=======================  ============================================  ==============================================
``timerlog/``            names, lengths; units by the rules of         emptied, see below
                         `TimerFiles`
``timerwheel``           its length; its slots match the units         rebuilt from the log
``config/timercheck``    its length, possible numbers                  rebuilt, and the log emptied
``config/timermetrics``  JSON                                          its backup, or removed: a start counts again
=======================  ============================================  ==============================================

After the log was emptied, the next start puts the undelivered messages of the timer topic on the wheel again.
Source: store.md §8, §9, §18.3 to §18.6.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from rmqkit.errors import BodyError, RecordCorrupt, StoreMismatch
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import REAL_TOPIC, TIMER_DELETE_KEY, TIMER_OUT_MS, find_property, java_hash
from rmqkit.protocol.schemas.brokers import TIMER_CHECKPOINT_BYTES, DelayOffsets, TimerMetrics, decode_timer_checkpoint
from rmqkit.protocol.schemas.groups import FilterFile, SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import ConsumerOffsets, LightOffsets
from rmqkit.protocol.schemas.pop import MessageRequestModes
from rmqkit.protocol.schemas.topics import TopicConfigTable
from rmqkit.store.files import decode_file, is_note
from rmqkit.store.log.checkpoint import CHECKPOINT_BYTES
from rmqkit.store.log.view import LogView
from rmqkit.store.offline.findings import Kind, Report, common_length, entries_of, files_in_order
from rmqkit.store.offline.journal_check import check_journals
from rmqkit.store.settings import StoreSettings
from rmqkit.store.timer.check import Damage
from rmqkit.store.timer.files import TimerFiles, checkpoint_fault, load_delivered_before, load_timer_checkpoint
from rmqkit.store.timer.log import DELETE, PLAIN, ROLL, Unit
from rmqkit.store.timer.wheel import WHEEL_BYTES

__all__ = ["NOTES", "check_small_files", "check_timer_files", "is_json", "is_timer_file", "mend_timer_files"]

_DAY_MS = 86_400_000
_TIMES = ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp")
_OFFSETS = ("masterFlushedOffset", "confirmPhyOffset", "logicsPhysicalOffset")
NOTES = ("logstart", "queueends", "indexfiles")
_TYPES: dict[str, type] = {
    "topics.json": TopicConfigTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerFilter.json": FilterFile,
    "consumerOffset.json": ConsumerOffsets,
    "lmqConsumerOffset.json": LightOffsets,
    "delayOffset.json": DelayOffsets,
    "messageRequestMode.json": MessageRequestModes,
    "timermetrics": TimerMetrics,
}
_I64 = struct.Struct(">q")
_INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
_PLACE = re.compile(r"(?:byte|character) (\d+)")


def check_small_files(root: Path, report: Report, newest_ms: int, log_end: int, *, has_delays: bool) -> None:
    """Report faults of the checkpoint, the notes, and the files and journals under ``config``.
    ``newest_ms``: storeTimestamp of the newest record.
    ``log_end``: physical offset one past the last segment.
    ``has_delays``: whether the delay topic has messages. A broker with such messages stores their delivery offsets."""
    _check_checkpoint(root / "checkpoint", report, newest_ms, log_end)
    for path in (root / name for name in NOTES):
        if path.is_file():
            report.checked["files"] += 1
            if not is_note(path.read_bytes()):
                report.add(Kind.CONFIG, path, 0, "a line with the CRC of the rest", "another one")
    for path in entries_of(root / "config"):
        if path.name.endswith((".json", ".json.bak")):
            report.checked["files"] += 1
            if (reason := is_json(path)) is not None:
                place = _PLACE.search(reason)
                report.add(Kind.CONFIG, path, int(place[1]) if place else 0, "JSON", reason)
        if path.name.endswith(".bak") and not path.with_suffix("").exists():
            report.add(Kind.FILE_MISSING, path.with_suffix(""), 0, "the file beside its backup", "none")

    check_journals(root, report)
    delays = root / "config" / "delayOffset.json"
    has_run = (root / "config" / "topics.json").exists()  # a store that no broker has used delivers nothing
    if has_delays and has_run and not delays.exists() and not delays.with_name(delays.name + ".bak").exists():
        report.add(Kind.FILE_MISSING, delays, 0, "the offsets of the delay levels", "none")


def is_json(path: Path) -> str | None:
    """Return the reason why a file is not JSON, or is not the JSON that a broker stores under its name. Return None if
    the file is right."""
    content = path.read_bytes()
    # A power cut leaves zeros in a file that was replaced without a flush. A JSON parser would report the zeros as bad
    # syntax.
    if not content.strip(b"\0 \t\r\n"):
        return f"{len(content)} bytes without content"
    try:
        decode_file(content, _TYPES.get(path.name.removesuffix(".bak"), object))
    except BodyError as error:
        return str(error)
    return None


def _check_checkpoint(path: Path, report: Report, newest_ms: int, log_end: int) -> None:
    if not path.is_file():
        return
    report.checked["files"] += 1
    content = path.read_bytes()
    if len(content) != CHECKPOINT_BYTES:
        position = min(len(content), CHECKPOINT_BYTES)
        report.add(Kind.FILE_SIZE, path, position, f"{CHECKPOINT_BYTES} bytes", f"{len(content)} bytes")
    latest_ms = max(newest_ms, int(path.stat().st_mtime * 1000)) + _DAY_MS
    bounds = [(name, latest_ms) for name in _TIMES] + [(name, log_end) for name in _OFFSETS]
    for i, (name, high) in enumerate(bounds[: len(content) // _I64.size]):
        (value,) = _I64.unpack_from(content, i * _I64.size)
        if not 0 <= value <= high:
            report.add(Kind.CHECKPOINT, path, i * _I64.size, f"{name} from 0 to {high}", value)


def check_timer_files(root: Path, log: LogView, report: Report, settings: StoreSettings | None) -> None:
    """Report faults of the timer files. ``log``: the commit log, to check the units of waiting messages.
    ``settings``: the settings of the store. Without settings, a file's length is compared with other files of its kind.
    """
    _check_timer_checkpoint(root / "config" / "timercheck", report)
    for name in ("timermetrics", "timermetrics.bak"):
        path = root / "config" / name
        if path.is_file():
            report.checked["files"] += 1
            if (reason := is_json(path)) is not None:
                report.add(Kind.CONFIG, path, 0, "JSON", reason)
    wheel, log_bytes = root / "timerwheel", _log_bytes(root, settings)
    known = report.counts.total()
    if wheel.is_file():
        report.checked["files"] += 1
        if (length := wheel.stat().st_size) != WHEEL_BYTES:
            found = f"{length} bytes"
            report.add(Kind.FILE_SIZE, wheel, min(length, WHEEL_BYTES), f"{WHEEL_BYTES} bytes", found)
    list(files_in_order([root / "timerlog"], log_bytes, report))
    # A running broker writes log and wheel one after the other. They agree only after it has stopped.
    if report.counts.total() == known and not report.is_live:
        _check_content(root, log, report, settings, log_bytes)


def _check_timer_checkpoint(path: Path, report: Report) -> None:
    if not path.is_file():
        return
    report.checked["files"] += 1
    content = path.read_bytes()
    try:
        fault = checkpoint_fault(decode_timer_checkpoint(content[:TIMER_CHECKPOINT_BYTES]))
    except BodyError:
        found = f"{len(content)} bytes"
        report.add(Kind.FILE_SIZE, path, len(content), f"at least {TIMER_CHECKPOINT_BYTES} bytes", found)
        return
    if fault:
        report.add(Kind.CHECKPOINT, path, 0, "a time and offsets that can be", fault)


def _check_content(root: Path, log: LogView, report: Report, settings: StoreSettings | None, log_bytes: int) -> None:
    files = _opened(root, settings, log_bytes)
    try:
        damage, fault = files.check(None)
        if damage is Damage.NONE:
            _check_units(files, log, report, (settings or StoreSettings()).timer_precision_ms)
    finally:
        files.close()
    if damage is Damage.WHEEL:
        report.add(Kind.TIMER, root / "timerwheel", 0, "the slots that the units of the timer log make", fault)
    elif damage is Damage.LOG:
        report.add(Kind.TIMER, root / "timerlog", 0, "units up to the offset in config/timercheck", fault)


def _check_units(files: TimerFiles, log: LogView, report: Report, precision_ms: int) -> None:
    """Report units of waiting messages that do not match their records.
    Skip units with records that retention has deleted."""
    begin, end = max(files.log.queue.min_offset, 0), files.checkpoint.last_timer_log_flush_position
    for position, unit in files.log.scan(begin):
        if position >= end:
            break
        if unit.time_ms < files.checkpoint.last_read_time_ms or unit.physical_offset < log.min_offset:
            continue
        expected, found = _expected_of(unit, log, precision_ms)
        if expected != found:
            file = files.log.queue.find(position)
            assert file is not None, "the unit was read from a file"
            report.add(Kind.TIMER_UNIT, file.path, position - file.start, expected, found)


def _expected_of(unit: Unit, log: LogView, precision_ms: int) -> tuple[str, str]:
    """Return two texts: the expected record or magic of a unit, and the actual one. The texts are equal if the unit is
    sound."""
    at = f"a record at {unit.physical_offset}"
    try:
        record = log.record_at(unit.physical_offset)
    except RecordCorrupt as error:
        return at, f"none there: {error.reason}"
    topic = find_property(record.properties, REAL_TOPIC.encode()) if record.topic == TIMER_TOPIC else None
    if topic is None or java_hash(topic.decode("utf-8", "replace")) != unit.topic_hash:
        return f"{at} for a topic with the hash {unit.topic_hash}", f"one of {record.topic} for {topic!r}"
    if unit.size != record.size:
        return f"{at} of {unit.size} bytes", f"one of {record.size} bytes"
    due = find_property(record.properties, TIMER_OUT_MS.encode())
    if due is None or not _INTEGER.fullmatch(due):
        return "", ""  # reported with its record
    is_marker = find_property(record.properties, TIMER_DELETE_KEY.encode()) is not None
    is_rolled = int(due) - unit.time_ms >= precision_ms
    magic = PLAIN | (ROLL if is_rolled else 0) | (DELETE if is_marker else 0)
    return (
        f"magic {magic} at a unit for {unit.physical_offset}",
        f"magic {unit.magic} at a unit for {unit.physical_offset}",
    )


def is_timer_file(root: Path, path: Path) -> bool:
    """Return True if `mend_timer_files` repairs a file."""
    alone = (root / "timerlog", root / "timerwheel", root / "config" / "timercheck")
    return path in alone or path.parent == root / "timerlog"


def mend_timer_files(root: Path, settings: StoreSettings | None, *, is_reset: bool = False) -> None:
    """Rebuild the wheel, or empty the timer log so that the next start rebuilds everything.
    With ``is_reset`` the log is emptied even if no damage is found.
    Raises OSError: a file cannot be written."""
    wheel, folder = root / "timerwheel", root / "timerlog"
    if wheel.is_file() and wheel.stat().st_size != WHEEL_BYTES:
        wheel.unlink()
    files = _new(root, settings, _log_bytes(root, settings))
    try:
        files.log.queue.check()
    except StoreMismatch:
        checkpoint = root / "config" / "timercheck"
        files.start_over(load_timer_checkpoint(checkpoint), load_delivered_before(checkpoint))
        for path in entries_of(folder):
            path.unlink()
        return
    try:
        files.load()
        damage, _ = files.check(None)
        if damage is Damage.WHEEL:
            files.make_wheel()
            files.wheel.take()
            files.wheel.write()
        elif damage is Damage.LOG or is_reset:
            files.start_over(files.checkpoint, files.delivered_before)
            files.log.sync()
    finally:
        files.close()


def _log_bytes(root: Path, settings: StoreSettings | None) -> int:
    if settings is not None:
        return settings.timer_log_file_bytes
    return common_length([root / "timerlog"]) or StoreSettings().timer_log_file_bytes


def _new(root: Path, settings: StoreSettings | None, log_bytes: int) -> TimerFiles:
    return TimerFiles(root, log_file_bytes=log_bytes, precision_ms=(settings or StoreSettings()).timer_precision_ms)


def _opened(root: Path, settings: StoreSettings | None, log_bytes: int) -> TimerFiles:
    files = _new(root, settings, log_bytes)
    queue = files.log.queue
    # Skip empty files, which `FileQueue.load` would delete: a check must not change anything.
    queue.found = [one for one in queue.check() if one[2]]
    files.load(is_read_only=True)
    return files
