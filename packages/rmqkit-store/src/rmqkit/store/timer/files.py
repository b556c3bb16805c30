"""The timer files, which are opened, recovered and flushed in an order that survives a crash.

=======================  =============================================================================================
``timerlog/``            a unit per message, `rmqkit.store.timer.log`
``timerwheel``           the last unit of every second, `rmqkit.store.timer.wheel`
``config/timercheck``    56 bytes (`protocol.schemas.brokers`) in a file of 4096: the next second to deliver, the
                         flushed end of the log, the next message of the timer topic to put on the wheel. Then
                         `DeliveredBefore`, which only rmqkit reads
=======================  =============================================================================================

Every flush writes log, wheel and checkpoint, in this order. It writes only units with durable records
(`TimerFiles.take` and, later, `write`). So the wheel on the disk has every unit before the checkpoint's position and
queue offset. `recover` drops later units, and their messages are read from the timer topic again. (The reference notes
its log position before it flushes: units after this position with a message before the queue offset are linked again.)
At every start the wheel is compared with the log (`rmqkit.store.timer.check`). An incomplete wheel is rebuilt from the
log. If the log ends before the checkpoint's position, or is damaged, everything must be read from the timer topic. Then
`TimerFiles.is_lost` is set, and the checkpoint is written first, so that a kill meanwhile loses nothing:

====================  ====================================================
lastTimerQueueOffset  0: from the topic's start
masterTimerQueueOf…   unchanged: messages before it are completed if their
lastReadTimeMs        time is before this value, which is unchanged, too
====================  ====================================================

After a clock was set back, the read time alone does not show which messages were delivered. So ``config/timercheck``
also has up to `DELIVERED_BEFORE_MAX` pairs of a time and a queue offset. Messages before both were delivered::

    at  size  field
    56     4  number of pairs, 0 in the files of RocketMQ
    60     4  CRC-32 of the pairs
    64    16  each pair: time in ms, queue offset of the timer topic

Use this module only in the owner thread of the store, except for `write`. Source: store.md §18.5, §18.6.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rmqkit.errors import BodyError
from rmqkit.protocol.schemas.brokers import (
    TIMER_CHECKPOINT_BYTES,
    TimerCheckpoint,
    decode_timer_checkpoint,
    encode_timer_checkpoint,
)
from rmqkit.store.files import make_directory, sync_directory
from rmqkit.store.timer.check import Damage, Waiting, check_wheel, is_long, looks_sound, unit_weight, waiting_of
from rmqkit.store.timer.log import DELETE, NONE, UNIT_BYTES, TimerLog, Unit, UnitsLost
from rmqkit.store.timer.wheel import Slot, TimerWheel
from rmqkit.system import disk

__all__ = [
    "CHECKPOINT_FILE_BYTES",
    "DELIVERED_BEFORE_MAX",
    "DeliveredBefore",
    "TimerFiles",
    "UnitsLost",
    "checkpoint_fault",
    "load_delivered_before",
    "load_timer_checkpoint",
    "save_timer_checkpoint",
]

CHECKPOINT_FILE_BYTES = 4096
_AHEAD_MS_MAX = 60_000
"""Maximum time by which the read time may be later than the checkpoint. A clock that was set back causes such a
difference.
"""
DELIVERED_BEFORE_MAX = 16
"""Maximum number of pairs. With more steps of the clock, messages from before the first steps are repeated."""
_PAIRS_HEAD = struct.Struct(">iI")
_PAIR = struct.Struct(">qq")
_PAIRS_BYTES_MAX = _PAIRS_HEAD.size + DELIVERED_BEFORE_MAX * _PAIR.size
assert TIMER_CHECKPOINT_BYTES + _PAIRS_BYTES_MAX <= 512, "a sector contains the checkpoint and all pairs"

DeliveredBefore = tuple[tuple[int, int], ...]
"""Pairs of a time in ms and a queue offset of the timer topic: messages before both were delivered."""

_log = logging.getLogger(__name__)


class TimerFiles:
    """The timer files of the store directory ``root``.

    Attributes:
        checkpoint: the checkpoint of the last `load` or `write`.
        delivered_before: the pairs of the last `load` or `write`.
        is_lost: whether messages before the checkpoint's queue offset may be missing on the wheel.
        fault: the fault that `recover` found; empty without a fault.
        waiting: the waiting messages according to the log, if `recover` read the whole log.
    """

    def __init__(self, root: Path, *, log_file_bytes: int, precision_ms: int) -> None:
        self.log = TimerLog(root, log_file_bytes)
        self.wheel = TimerWheel(root / "timerwheel", precision_ms)
        self.checkpoint = TimerCheckpoint()
        self.delivered_before: DeliveredBefore = ()
        self.is_lost = False
        self.fault = ""
        self.waiting: Waiting | None = None
        self._precision_ms = precision_ms
        self._path = root / "config" / "timercheck"
        self._taken: tuple[TimerCheckpoint, DeliveredBefore] | None = None
        self._has_wheel = False

    def load(self, *, is_read_only: bool = False) -> None:
        """Open the existing files. Raises StoreMismatch: a file has the wrong length."""
        self.checkpoint = load_timer_checkpoint(self._path)
        self.delivered_before = load_delivered_before(self._path)
        self.log.queue.load()
        for file in self.log.queue.files if is_read_only else ():
            file.open_read_only()
        self._has_wheel = self.wheel.load(is_read_only=is_read_only)

    def recover(self, queue_offset_of: Callable[[Unit], int | None], *, total: int | None = None) -> int:
        """Set log and wheel to the position of the checkpoint. Return the queue offset of the next message for the
        wheel.
        ``queue_offset_of``: returns the number of a unit's message in the timer topic. It returns None if the commit
        log lost the message, and -1 if retention deleted it. ``total``: number of waiting messages in
        config/timermetrics, if known.
        Raises OSError: a file cannot be written."""
        log, flushed, next_offset = (
            self.log,
            self.checkpoint.last_timer_log_flush_position,
            _next_offset(self.checkpoint),
        )
        damage, self.fault = self.check(total)
        self.is_lost = damage is Damage.LOG
        if self.is_lost:
            self.start_over(self.checkpoint, self.delivered_before)
            _log.warning("timer log and wheel: %s: reading the timer topic from its start", self.fault)
            return 0
        if damage is Damage.WHEEL:
            self.make_wheel()
        end = max(flushed, log.queue.min_offset, 0)
        dropped: list[tuple[int, Unit]] = []
        for position, unit in log.scan(end):
            number = None if dropped else queue_offset_of(unit)
            if number is None or number >= next_offset:
                # Drop all units after the first dropped unit, too: the log is cut at its position, and the timer topic
                # is read again from its message on.
                dropped.append((position, unit))
                continue
            next_offset = max(next_offset, number + 1)
            end = position + UNIT_BYTES
            if unit.time_ms >= self.checkpoint.last_read_time_ms:
                self._link(position, unit)
                if self.waiting is not None:
                    self.waiting.add(unit)
        # Newest first: each call sets its slot back to the previous unit, but only if the slot ends at this unit.
        for position, unit in reversed(dropped):
            self._unlink(position, unit)
        if log.queue.files:
            log.truncate(end)
            # A failed sync of the earlier process may have left these units in the page cache only.
            log.queue.write_again(flushed)
        return next_offset

    def check(self, total: int | None) -> tuple[Damage, str]:
        """Return the damage and a text about the damage. Nothing is changed. ``total``: see `recover`."""
        log, known = self.log, self.checkpoint
        flushed, read_ms = known.last_timer_log_flush_position, max(known.last_read_time_ms, 0)
        self.waiting = None
        if read_ms == 0 and log.unit(max(log.queue.min_offset, 0)) is not None:  # also after a kill in the first second
            return Damage.LOG, f"{self._path} does not say what was delivered"
        if not self._reaches(flushed) or (not log.queue.files and _next_offset(self.checkpoint) > 0):
            return Damage.LOG, f"the log ends before {flushed}, the flushed offset in {self._path}"
        if (
            self._has_wheel
            and total is not None
            and is_long(log, flushed)
            and looks_sound(self.wheel, log, total=total, read_ms=read_ms, precision_ms=self._precision_ms)
        ):
            return Damage.NONE, ""
        self.waiting = waiting_of(log, end=flushed, read_ms=read_ms)
        damage, fault = check_wheel(
            self.wheel, log, self.waiting, end=flushed, read_ms=read_ms, precision_ms=self._precision_ms
        )
        return damage, f"there is no {self.wheel.path}" if damage is Damage.WHEEL and not self._has_wheel else fault

    def make_wheel(self) -> None:
        """Rebuild the wheel from the units of the log that `check` read."""
        assert self.waiting is not None, "check() has read the log"
        self.wheel.clear()
        for slot in self.waiting.slots.values():
            self.wheel.put(slot)

    def start_over(self, known: TimerCheckpoint, delivered_before: DeliveredBefore) -> None:
        """Empty the log and the wheel. After that, all messages of the timer topic that are not completed according to
        a checkpoint and pairs are put on the wheel again. No thread may be in `write`: a snapshot that waits for it is
        dropped. Raises OSError: a file cannot be written."""
        self._taken = None
        checkpoint = msgspec.structs.replace(
            known,
            last_timer_log_flush_position=0,
            last_timer_queue_offset=0,
            master_timer_queue_offset=max(known.last_timer_queue_offset, known.master_timer_queue_offset),
        )
        # Write the checkpoint first: a kill afterwards only repeats work.
        save_timer_checkpoint(self._path, checkpoint, delivered_before)
        self.checkpoint, self.delivered_before = checkpoint, delivered_before
        self.wheel.clear()
        if self.log.queue.files:
            self.log.truncate(max(self.log.queue.min_offset, 0))

    def add(self, units: Sequence[Unit]) -> int:
        """Put the first ``units`` on the wheel, as many as fit in the current file of the log. Return the number of
        units that fit. Their ``previous`` is set here. Raises OSError: the write failed, nothing was added."""
        wheel = self.wheel
        position, room = self.log.place()
        linked: list[Unit] = []
        slots: dict[int, Slot] = {}
        for unit in units[:room]:
            time_ms = unit.write_ms + unit.delay_ms
            slot = slots.get(time_ms) or wheel.slot(time_ms)
            weight = -1 if unit.magic & DELETE else 1
            if slot is None:
                slots[time_ms] = Slot(time_ms, position, position, weight)
                linked.append(unit if unit.previous == NONE else unit._replace(previous=NONE))
            else:
                # `_unlink` leaves a slot without units, not an empty one.
                first = position if slot.first < 0 else slot.first
                slots[time_ms] = Slot(time_ms, first, position, slot.pending + weight)
                linked.append(Unit(slot.last, *unit[1:]))
            position += UNIT_BYTES
        self.log.append(linked)
        # Change the slots after the append: if the append fails, a slot must not end at one of these units.
        for slot in slots.values():
            wheel.put(slot)
        return len(linked)

    def take(self, checkpoint: TimerCheckpoint, delivered_before: DeliveredBefore = ()) -> None:
        """Take a snapshot of the wheel and the progress of the timer for the next `write`.
        Raises OSError: a file cannot be written, and no snapshot was taken."""
        assert self._taken is None, "write() has finished"
        if not self.log.queue.files and _next_offset(checkpoint) > 0:
            # A slave makes no units of messages that its master has delivered. Without a file the log would count as
            # lost: a start would read the timer topic again, and `rmq store verify` would report damage.
            self.log.place()
        self.wheel.take()
        # Use the present end: `write` may miss units that the owner adds while `write` runs, so the checkpoint must not
        # include them.
        taken = msgspec.structs.replace(checkpoint, last_timer_log_flush_position=self.log.end)
        self._taken = taken, delivered_before

    @property
    def has_taken(self) -> bool:
        """Return True if a snapshot waits for `write`."""
        return self._taken is not None

    def write(self) -> None:
        """Make the snapshot durable. Any thread can call this, but only one at a time.
        Raises UnitsLost: the page cache lost units after a failed sync; there is no snapshot any more. Call
        `start_over`.
        Raises OSError: a write failed; the next call repeats all writes."""
        assert self._taken is not None, "take() was called"
        try:
            self.log.sync()
        except UnitsLost:
            self._taken = None
            raise
        self.wheel.write()
        checkpoint, delivered_before = self._taken
        save_timer_checkpoint(self._path, checkpoint, delivered_before)
        self.checkpoint, self.delivered_before, self._taken = checkpoint, delivered_before, None

    def close(self) -> None:
        self.log.close()
        self.wheel.close()

    # ---- internals

    def _reaches(self, position: int) -> bool:
        """Return True if the log has units up to a position."""
        if position == 0 or position % self.log.queue.file_bytes == 0:
            return 0 <= position <= self.log.end
        return position > 0 and self.log.unit(position - UNIT_BYTES) is not None

    def _link(self, position: int, unit: Unit) -> None:
        slot = self.wheel.slot(unit.time_ms)
        if slot is None:
            self.wheel.put(Slot(unit.time_ms, position, position, unit_weight(unit)))
        elif slot.last < position:
            self.wheel.put(slot._replace(last=position, pending=slot.pending + unit_weight(unit)))

    def _unlink(self, position: int, unit: Unit) -> None:
        slot = self.wheel.slot(unit.time_ms)
        if slot is not None and slot.last == position:
            first = NONE if unit.previous == NONE else slot.first
            self.wheel.put(slot._replace(first=first, last=unit.previous, pending=slot.pending - unit_weight(unit)))


def _next_offset(checkpoint: TimerCheckpoint) -> int:
    """Return the queue offset of the next message of the timer topic to put on the wheel."""
    return min(checkpoint.last_timer_queue_offset, checkpoint.master_timer_queue_offset)


def load_timer_checkpoint(path: Path) -> TimerCheckpoint:
    """Return the checkpoint in a file. Return a checkpoint of zeros if the file is missing or has impossible values."""
    try:
        known = decode_timer_checkpoint(disk.read_file(path)[:TIMER_CHECKPOINT_BYTES])
    except FileNotFoundError:
        return TimerCheckpoint()
    except BodyError as error:
        _log.warning("%s cannot be read (%s): the timer topic is read from its start", path, error)
        return TimerCheckpoint()
    fault = checkpoint_fault(known)
    if fault:
        _log.warning("%s cannot be used (%s): the timer topic is read from its start", path, fault)
    return TimerCheckpoint() if fault else known


def checkpoint_fault(known: TimerCheckpoint) -> str:
    """Return the reason why a checkpoint is impossible, or an empty text if it is possible. In a possible checkpoint,
    the read time is not later than the time of the checkpoint."""
    read_ms, written_ms = known.last_read_time_ms, known.data_version.timestamp
    offsets = known.last_timer_queue_offset, known.master_timer_queue_offset
    if min(read_ms, known.last_timer_log_flush_position, *offsets) < 0:
        return "it has a number below 0"
    if read_ms > written_ms + _AHEAD_MS_MAX and written_ms > 0:
        return f"lastReadTimeMs is {read_ms}, later than the checkpoint itself, {written_ms}"
    return ""


def load_delivered_before(path: Path) -> DeliveredBefore:
    """Return the pairs in the file of a checkpoint. Return no pairs if the file is missing or the CRC is wrong."""
    try:
        stored = disk.read_file(path)[TIMER_CHECKPOINT_BYTES:][:_PAIRS_BYTES_MAX]
    except FileNotFoundError:
        return ()
    count, crc = _PAIRS_HEAD.unpack_from(stored) if len(stored) >= _PAIRS_HEAD.size else (0, 0)
    pairs = stored[_PAIRS_HEAD.size :][: max(count, 0) * _PAIR.size]
    if len(pairs) != count * _PAIR.size or zlib.crc32(pairs) != crc:
        _log.warning("%s: the %d pairs of delivered times have a wrong CRC: messages may be repeated", path, count)
        return ()
    return tuple(_PAIR.iter_unpack(pairs))


def save_timer_checkpoint(path: Path, checkpoint: TimerCheckpoint, delivered_before: DeliveredBefore = ()) -> None:
    """Write and sync a checkpoint and pairs. Raises OSError: the write failed."""
    assert len(delivered_before) <= DELIVERED_BEFORE_MAX, "a sector contains the checkpoint and all pairs"
    pairs = b"".join([_PAIR.pack(*one) for one in delivered_before])
    head = _PAIRS_HEAD.pack(len(delivered_before), zlib.crc32(pairs))
    is_new = not disk.exists(path)
    make_directory(path.parent)
    # Write in place, without a rename: the bytes are in one sector, which is written completely, and the name then
    # needs no sync every second.
    descriptor = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if disk.size_of(descriptor) != CHECKPOINT_FILE_BYTES:
            disk.truncate(descriptor, CHECKPOINT_FILE_BYTES)
        disk.write_all(descriptor, encode_timer_checkpoint(checkpoint) + head + pairs, 0)
        disk.sync_data(descriptor)
    finally:
        disk.close(descriptor)
    if is_new:
        sync_directory(path.parent)
