"""Delayed messages, which SCHEDULE_TOPIC_XXXX stores until they are due (``ScheduleMessageService``).

A message with a delay level is stored in queue ``level - 1`` of the delay topic. REAL_TOPIC and REAL_QID contain its
own topic and queue. The tag code of its queue entry is the time when the message is due. The queue of a level is
ordered by this time, so its first entry is due first. One timer waits for the earliest entry of all levels. A level
with an empty queue waits for a message like a held pull. When the timer fires, due messages are delivered for at most
`_ROUND_MS_MAX`.

==================================  ==========================================================================
case                                result
==================================  ==========================================================================
clock set back                      due when the delay has passed by the loop's time
clock set forward                   due by the wall clock, noticed within `_LOOK_MS_MAX`
due later than now + its delay      due now: the setting changed, or the clock was set back before the start
level not in ``messageDelayLevel``  its messages are delivered at the times in their entries
record expired                      skipped
record or entry damaged             skipped and logged
the store refuses a message         the message is retried after 100 ms
unexpected error                    the level is retried after 10 s
message can never be stored         sent to the dead letters and logged (`Destination`)
==================================  ==========================================================================

An acting master cannot store messages in its log. It sends due messages to other brokers (`RemotePut`), one batch of a
level at a time. It retries failed messages after 100 ms, and the level waits for them.

The delivered copy still has DELAY, REAL_TOPIC and REAL_QID. Offsets are written every ``flushDelayOffsetInterval`` and
at stop. An offset is written only when the copies of all earlier messages are on the disk: a crash repeats messages,
but loses none.
Use this module only on the event loop. Source: behaviour.md §9.2; store.md §9.5, §18.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from rmqkit.broker.dead_letters import DeadLetters
from rmqkit.broker.delay.destination import Destination, OnDelivered, Refused, RemotePut
from rmqkit.broker.messages import message_from, to_delay_level
from rmqkit.broker.pull.long_polling import LongPolling, WaitingPull
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt, StoreUnavailable
from rmqkit.protocol.names import HALF_TOPIC, SCHEDULE_TOPIC
from rmqkit.protocol.record import Record, decode_record
from rmqkit.protocol.schemas.brokers import DelayOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.files import JsonFile
from rmqkit.store.message_store import InnerMessage, MessageStore

__all__ = ["Schedule"]

_LEVEL_COUNT_MIN = 18
"""The number of queues of the delay topic that are always delivered, even if fewer levels are configured."""

_NEVER = float("inf")
_RUN = 32
_ROUND_MS_MAX = 3.0
_PAUSE_MS_MIN = 5
_LOOK_MS_MAX = 1000
_STEP_MS_MIN = 1000  # smaller steps delay messages only a little; the two clocks are not read at the same moment
_RETRY_MS = 100
_BROKEN_MS = 10_000
_WAIT_MS = 86_400_000.0
_HALF_TOPIC = HALF_TOPIC.encode()
_Entry = tuple[int, int, int, int | None]
"""An element of `MessageStore.entries`: the next offset, the physical offset, the size, the due time or None."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Level:
    """One delay level.

    Attributes:
        delay_ms: the delay; None for a level that is not configured.
        offset: the queue offset of the next message to deliver.
        look_at_ms: the loop's time at which the queue of the level is read again.
        waits_for: the offset after the entry that the level waits for, or -1.
        waits_skew_ms: wall time minus the loop's time when the level began to wait for this entry.
        ahead: entries that were read and are not delivered yet. The first is the entry at ``offset``.
        is_busy: True while a delivery of the level is running.
        stored: the offsets after entries that were stored already although an earlier entry was refused.
    """

    number: int
    delay_ms: int | None
    offset: int = 0
    look_at_ms: float = 0.0
    waits_for: int = -1
    waits_skew_ms: float = 0.0
    ahead: deque[_Entry] = field(default_factory=deque)
    is_busy: bool = False
    stored: set[int] = field(default_factory=set)

    @property
    def queue_id(self) -> int:
        return self.number - 1


class Schedule:
    """The delay levels. They store messages until the messages are due, and then deliver them.

    Args:
        folder: the folder of ``delayOffset.json``.
        delays_ms: ``messageDelayLevel`` in ms, level 1 first.
        flushes: True if a message can only be read after a flush (SYNC_FLUSH).
        on_delivered: called with every message that was stored in its real topic, and with its position.
        dead_letters: receives messages that can never be stored in their real topic.
    """

    def __init__(
        self,
        folder: Path,
        store: MessageStore,
        delays_ms: tuple[int, ...],
        long_polling: LongPolling,
        clock: Clock,
        *,
        flushes: bool,
        on_delivered: OnDelivered | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self._file = JsonFile(folder / "delayOffset.json")
        self._store = store
        self._delays_ms = delays_ms
        self._long_polling = long_polling
        self._clock = clock
        self._flushes = flushes
        self._levels: dict[int, _Level] = {}
        self._data_version = DataVersion()
        self._taken: tuple[dict[int, int], int] = ({}, 0)
        self._written: dict[int, int] = {}
        self._is_file_missing = False
        self._timer: asyncio.Handle | None = None
        self._timer_ms = _NEVER
        self._skew_ms = self._skew_before_ms = -_NEVER
        self.is_running = False
        self._destination = Destination(store, "delayed", on_delivered, dead_letters)

    def schedule(self, message: InnerMessage, level: int) -> InnerMessage:
        """Return a message in the form in which it is stored until it is due. A level above the last level is replaced
        by the last level."""
        return to_delay_level(message, level, len(self._delays_ms))

    # ---- offsets

    def load(self) -> None:
        """Read the offsets. They are compared with the queues of the store only when delivery starts.
        Create a missing file. If the file is missing at a later start, it was lost."""
        found = self._file.load(DelayOffsets)
        self._is_file_missing = found is None
        if found is None:
            with suppress(StoreUnavailable):  # a disk error is reported when there are offsets to write
                self._file.save(DelayOffsets(DataVersion(), {}))  # older than every version of a master
        stored = found or DelayOffsets()
        self._data_version = stored.data_version or DataVersion()
        self._levels.clear()
        self._written = {level: offset for level, offset in stored.offset_table.items() if level > 0}
        count = max(_LEVEL_COUNT_MIN, len(self._delays_ms))
        # Include levels that are only in the file: their messages still have to be delivered after the setting was cut.
        for number in sorted({*range(1, count + 1), *self._written}):
            delay_ms = self._delays_ms[number - 1] if number <= len(self._delays_ms) else None
            self._levels[number] = _Level(number, delay_ms, self._written.get(number, 0))

    def needed_from(self) -> int | None:
        """Return the physical offset of the oldest message that is not delivered yet, or None."""
        found = [
            entry[1]
            for level in self._levels.values()
            for entry in self._store.entries(SCHEDULE_TOPIC, level.queue_id, level.offset, count_max=1)
        ]
        return min(found, default=None)

    def offsets(self) -> DelayOffsets:
        """Return the offset of each level, in the form of the file and of the answer to slaves."""
        return DelayOffsets(self._data_version, self._offsets())

    def replace_with(self, copied: DelayOffsets) -> None:
        """Replace the offsets by the master's, unless this broker delivers messages itself.
        Source: behaviour.md §10.1."""
        if not self.is_running and copied.offset_table != self._offsets():
            self._file.save(copied)
            self.load()

    def merge_forward(self, copied: DelayOffsets) -> None:
        """Adopt the offsets that are greater in the table of another member, unless the other table is older.
        Source: behaviour.md §10.5."""
        version = copied.data_version or DataVersion()
        if version.timestamp >= self._data_version.timestamp:
            own = self._offsets()
            # Use the greater offset of each level: a message that either broker has delivered is not delivered again.
            further = {level: max(offset, own.get(level, 0)) for level, offset in copied.offset_table.items()}
            self.replace_with(DelayOffsets(version, own | further))

    def _offsets(self) -> dict[int, int]:
        known = self._written
        return {level.number: level.offset for level in self._levels.values() if level.offset or level.number in known}

    async def persist_round(self) -> None:
        """Write the current offsets, or the offsets of the last call if the current deliveries are not on the disk."""
        offsets, end_offset = self._offsets(), self._destination.end_offset
        # A delivered message has to be on the disk before its offset: otherwise a crash loses the message. If the
        # messages before the current offsets are not on the disk yet, write the offsets of the last call now, and the
        # current offsets in the next call.
        if self._store.durable_offset < end_offset:
            self._store.request_flush()
            (offsets, end_offset), self._taken = self._taken, (offsets, end_offset)
        if self._store.durable_offset >= end_offset and offsets and offsets != self._written:
            await asyncio.to_thread(self._write, offsets)

    def persist(self) -> None:
        """Write the offsets, if the store was closed without a failure."""
        if self._store.failure is None and self._offsets() != self._written:
            self._write(self._offsets())

    def _write(self, offsets: dict[int, int]) -> None:
        # This runs in a thread with a copy of the offsets, because the levels change meanwhile.
        self._data_version.advance(self._clock.now_ms())
        self._file.save(DelayOffsets(self._data_version, offsets))
        self._written = offsets

    # ---- delivery

    def start(self, remote_put: RemotePut | None = None) -> None:
        """Start to deliver into this broker's log, or to other brokers with ``remote_put``. Overdue messages are
        delivered first."""
        self.is_running, self._destination.remote_put = True, remote_put
        pending = 0
        for level in self._levels.values():
            pending += self._clamp(level) - level.offset
            level.look_at_ms = 0.0
            # Drop these entries: the offset may have changed after they were read.
            level.ahead.clear()
            level.stored.clear()
        if self._is_file_missing and pending:
            _log.warning(
                "%s is missing, and so is its backup: %d messages of %s are delivered when they are due, including"
                " messages that were delivered before",
                self._file.path,
                pending,
                SCHEDULE_TOPIC,
            )
        self._is_file_missing = False
        self._look_at(_loop_ms())

    def stop(self) -> None:
        self.is_running = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_ms = None, _NEVER

    async def stop_remote(self) -> None:
        """Stop, and wait for running deliveries. The offsets do not change after this."""
        self.stop()
        await self._destination.finish()

    def _look_at(self, at_ms: float) -> None:
        """Schedule a `_round` at a time of the loop, unless an earlier call is scheduled."""
        if not self.is_running or at_ms >= self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        assert at_ms < _NEVER, "a scheduled time is finite"
        wait_ms = max(at_ms - _loop_ms(), 0)
        self._timer_ms = at_ms
        self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._round)

    def _round(self) -> None:
        """Deliver due messages for at most `_ROUND_MS_MAX`. Begin with the level that has waited longest."""
        self._timer, self._timer_ms = None, _NEVER
        now_ms, until_ms = _loop_ms(), self._clock.monotonic_ms() + _ROUND_MS_MAX
        self._notice_step_back(self._clock.now_ms())
        end_offset, levels = self._destination.end_offset, self._levels.values()
        # A level with a long backlog must not hold up the other levels.
        due = deque(sorted((level for level in levels if level.look_at_ms <= now_ms), key=lambda one: one.look_at_ms))
        while due and self._clock.monotonic_ms() < until_ms:
            level = due.popleft()
            # Each path after this line has to set a time, or register a wake-up by the next message.
            level.look_at_ms = _NEVER
            if not level.is_busy:
                level.is_busy = True
                self._destination.run(self._deliver(level, now_ms), f"delay level {level.number}")
            if level.look_at_ms <= now_ms:
                due.append(level)
        if self._flushes and self._destination.end_offset != end_offset:
            self._store.request_flush()
        at_ms = min(level.look_at_ms for level in levels)
        if at_ms < _NEVER:
            self._look_at(now_ms if due else max(at_ms, now_ms + _PAUSE_MS_MIN))

    async def _deliver(self, level: _Level, now_ms: float) -> None:
        """Deliver the next messages of a level. Set the time at which its queue is read again: ``now_ms`` if more
        messages may be due."""
        try:
            if await self._deliver_run(level):
                level.look_at_ms = now_ms
        except Refused:
            # Retry the same messages without limit: skipping a message would lose it or break the order.
            level.look_at_ms = _loop_ms() + _RETRY_MS
        except Exception:  # noqa: BLE001 - the outer edge of a level's work: logged and retried later
            _log.exception("delay level %d: cannot deliver entry %d", level.number, level.offset)
            level.look_at_ms = _loop_ms() + _BROKEN_MS
        level.is_busy = False
        # For a delivery that does not wait, `_round` sets the timer when it ends.
        if self._destination.is_remote and level.look_at_ms < _NEVER:
            self._look_at(level.look_at_ms)

    async def _deliver_run(self, level: _Level) -> bool:
        """Deliver the next messages of a level. Return True if more may be due. If not, set the time to read the queue
        again. Raises Refused: some messages have to be retried."""
        if not level.ahead:
            level.ahead.extend(self._store.entries(SCHEDULE_TOPIC, level.queue_id, level.offset, count_max=_RUN))
        if not level.ahead:
            return self._find_next(level)
        now_ms = self._clock.now_ms()
        due = list(takewhile(lambda entry: self._is_due(level, entry, now_ms), level.ahead))
        has_later = len(due) < len(level.ahead)
        handed = await self._destination.put(
            [None if entry[0] in level.stored else self._message(level, entry[1], entry[2]) for entry in due]
        )
        # Move the offset to the first message that is not stored. Later messages are delivered again after a restart.
        passed = handed.passed
        for _ in range(passed):
            assert level.ahead[0][0] > level.offset, "the offset of a level only grows"
            level.offset = level.ahead.popleft()[0]
        level.stored = {due[at][0] for at in range(passed, len(due)) if handed.stored[at]}
        if handed.failure is not None:
            raise handed.failure
        return not has_later

    def _due_ms(self, level: _Level, entry: _Entry) -> int:
        """Return the wall time at which an entry is due; 0 if it is unknown."""
        _, physical_offset, size, due_ms = entry
        if due_ms is None:  # the extension unit with the time is missing
            record = self._record(level, physical_offset, size)
            due_ms = 0 if record is None else record.store_timestamp + (level.delay_ms or 0)
        return due_ms

    def _is_due(self, level: _Level, entry: _Entry, now_ms: int) -> bool:
        """Return True if an entry is due. If not, set the time to check the entry again. ``now_ms``: wall time."""
        wait_ms: float = self._due_ms(level, entry) - now_ms
        if wait_ms <= 0:
            return True
        loop_ms = _loop_ms()
        skew_ms = now_ms - loop_ms
        if level.waits_for != entry[0]:
            if level.delay_ms is not None and wait_ms > level.delay_ms:
                # The entry was stored before the clock was set back, so its time is by the earlier clock.
                wait_ms -= self._skew_before_ms - skew_ms
                if not 0 < wait_ms <= level.delay_ms:
                    return True
                level.waits_for, level.waits_skew_ms = entry[0], self._skew_before_ms
            else:
                level.waits_for, level.waits_skew_ms = entry[0], skew_ms
        elif level.waits_skew_ms - skew_ms > _STEP_MS_MIN:
            wait_ms -= level.waits_skew_ms - skew_ms
        level.look_at_ms = loop_ms + min(wait_ms, _LOOK_MS_MAX)
        return wait_ms <= 0

    def _notice_step_back(self, now_ms: int) -> None:
        """Detect that the wall clock was set back. Remember the earlier difference between wall time and loop time."""
        skew_ms = now_ms - _loop_ms()
        if skew_ms < self._skew_ms - _STEP_MS_MIN:
            self._skew_before_ms = self._skew_ms
        self._skew_ms = skew_ms

    def _record(self, level: _Level, physical_offset: int, size: int) -> Record | None:
        stored = self._store.log.copy(physical_offset, size)
        if stored is None:
            if physical_offset >= self._store.min_physical_offset:
                self._log_skipped(level, physical_offset, f"the log has no {size} bytes there")
            return None
        try:
            record = decode_record(stored, verify_crc=self._store.checks_bodies)
        except RecordCorrupt as error:
            self._log_skipped(level, physical_offset, str(error))
            return None
        if (record.topic, record.queue_id) == (SCHEDULE_TOPIC, level.queue_id):
            return record
        self._log_skipped(level, physical_offset, f"it is one of {record.topic}-{record.queue_id}")
        return None

    @staticmethod
    def _log_skipped(level: _Level, physical_offset: int, why: str) -> None:
        _log.error("delay level %d: message at %d is skipped: %s", level.number, physical_offset, why)

    def _message(self, level: _Level, physical_offset: int, size: int) -> InnerMessage | None:
        """Return the copy of a delayed message to put; None if the message is gone or lacks its real topic or queue."""
        record = self._record(level, physical_offset, size)
        if record is None:
            return None
        # A half message that was sent with a level has lost its real topic. Apache's broker drops it here, too.
        place = self._destination.place_of(record, forbidden=_HALF_TOPIC)
        return None if place is None else message_from(record, topic=place[0], queue_id=place[1])

    def _clamp(self, level: _Level) -> int:
        """Move a level's offset into the range of its queue. Return the end of the queue."""
        low = self._store.min_offset(SCHEDULE_TOPIC, level.queue_id)
        high = self._store.max_offset(SCHEDULE_TOPIC, level.queue_id)
        if not low <= level.offset <= high:
            _log.warning("delay level %d: offset %d is not in %d to %d", level.number, level.offset, low, high)
            level.offset = low if level.offset < low else high
        return high

    def _find_next(self, level: _Level) -> bool:
        """Return True if the queue has to be read again after a read without entries. At the end of its queue the level
        waits for the next message."""
        before = level.offset
        if level.offset < self._clamp(level):
            if level.offset == before:
                _log.error("delay level %d: cannot read entry %d", level.number, level.offset)
                level.look_at_ms = _loop_ms() + _BROKEN_MS
            return level.offset != before
        level.look_at_ms = _NEVER

        def arrived() -> None:
            level.look_at_ms = 0.0
            self._look_at(_loop_ms())

        until_ms = self._clock.monotonic_ms() + _WAIT_MS
        self._long_polling.hold(
            SCHEDULE_TOPIC, level.queue_id, WaitingPull(None, level.offset, None, until_ms, arrived)
        )
        return False


def _loop_ms() -> float:
    """Return the loop's monotonic time in milliseconds."""
    return asyncio.get_running_loop().time() * 1000
