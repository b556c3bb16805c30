"""The small files of a store, looked at offline: ``checkpoint`` and the JSON files under ``config`` with their backups.

What can be told: a checkpoint's length, and times or offsets that cannot be; JSON that is none. What cannot: times that
are off by less than a day. ``abort`` says something by being there, whatever it holds. Source: store.md §8, §9.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

from rmqkit.errors import BodyError
from rmqkit.protocol.schemas.brokers import DelayOffsets, TimerMetrics
from rmqkit.protocol.schemas.groups import SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import ConsumerOffsets, LightOffsets
from rmqkit.protocol.schemas.pop import MessageRequestModes
from rmqkit.protocol.schemas.topics import TopicConfigTable
from rmqkit.store.files import decode_file
from rmqkit.store.log.checkpoint import CHECKPOINT_BYTES
from rmqkit.store.note_files import is_note
from rmqkit.store.offline.findings import Kind, Report, entries_of

__all__ = ["NOTES", "check_small_files", "is_json"]

_DAY_MS = 86_400_000
_TIMES = ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp")
_OFFSETS = ("masterFlushedOffset", "confirmPhyOffset")
NOTES = ("logstart", "queueends", "indexfiles")
_TYPES: dict[str, type] = {
    "topics.json": TopicConfigTable,
    "subscriptionGroup.json": SubscriptionGroupTable,
    "consumerOffset.json": ConsumerOffsets,
    "lmqConsumerOffset.json": LightOffsets,
    "delayOffset.json": DelayOffsets,
    "messageRequestMode.json": MessageRequestModes,
    "timermetrics": TimerMetrics,
}
_I64 = struct.Struct(">q")
_PLACE = re.compile(r"(?:byte|character) (\d+)")


def check_small_files(root: Path, report: Report, newest_ms: int, log_end: int, *, has_delays: bool) -> None:
    """Note what is wrong with them.
    ``newest_ms``: storeTimestamp of the newest record.
    ``log_end``: physical offset one past the last segment.
    ``has_delays``: whether messages wait, or waited, at delay levels: a broker notes how far it delivered them."""
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

    delays = root / "config" / "delayOffset.json"
    has_run = (root / "config" / "topics.json").exists()  # a store without a broker delivers nothing
    if has_delays and has_run and not delays.exists() and not delays.with_name(delays.name + ".bak").exists():
        report.add(Kind.FILE_MISSING, delays, 0, "the offsets of the delay levels", "none")


def is_json(path: Path) -> str | None:
    """Why a file holds no JSON, or not what a broker keeps under its name; None when it does."""
    content = path.read_bytes()
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
