"""Delayed messages: kept in SCHEDULE_TOPIC_XXXX until they are due (``ScheduleMessageService``).

A message with a delay level lies in queue ``level - 1`` of the delay topic, its own topic and queue in REAL_TOPIC and
REAL_QID; the tag code of its queue entry is the time it is due. The queue of a level is in the order of that time, so
its first entry says when the level has work. One timer stands for the earliest of them all; a level whose queue is
empty waits for a message like a held pull. A round delivers runs of due messages, at most `_ROUND_MS_MAX` at a time.

==================================  ==========================================================================
what                                then
==================================  ==========================================================================
clock set back                      due when the delay has passed by the loop's time
clock set forward                   due by the wall clock, found within `_LOOK_MS_MAX`
due later than now + its delay      the table changed, or the clock was set back before the start: due now
level not in ``messageDelayLevel``  its messages are delivered at the time their entries say
record expired                      skipped
record or entry damaged             skipped and logged
store refuses                       the same message again after 100 ms
anything unexpected                 that level again after 10 s
message can never be stored         skipped and logged (`Destination`)
==================================  ==========================================================================

An acting master has no log to put messages into: those due are put at other brokers (`RemotePut`), a run of a level at
a time; what fails is tried again after 100 ms, and the level waits for it.

The delivered copy keeps DELAY, REAL_TOPIC and REAL_QID. Offsets are written every ``flushDelayOffsetInterval`` and at
stop, and only when the copies before them are on the disk, so a crash repeats messages and loses none.
Loop only. Source: behaviour.md §9.2; store.md §9.5, §18.1.
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
"""Queues of the delay topic that are looked after whatever the table says."""

_NEVER = float("inf")
_RUN = 32
_ROUND_MS_MAX = 3.0
_PAUSE_MS_MIN = 5
_LOOK_MS_MAX = 1000
_STEP_MS_MIN = 1000  # less delays a message by less, and the two clocks are not read at the same moment
_RETRY_MS = 100
_BROKEN_MS = 10_000
_WAIT_MS = 86_400_000.0
_HALF_TOPIC = HALF_TOPIC.encode()
_Entry = tuple[int, int, int, int | None]
"""What `MessageStore.entries` yields: the offset behind it, physical offset, size, time it is due."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Level:
    """One delay level.

    Attributes:
        delay_ms: None for a level that the table does not have.
        offset: queue offset of the next message to deliver.
        look_at_ms: time of the loop at which its queue is looked at again.
        waits_for: the offset behind the entry that the level waits for; -1 without one.
        waits_skew_ms: wall time less the loop's time when the level began to wait for that entry.
        ahead: entries that were read and not delivered yet, the one at ``offset`` first.
        is_busy: whether the first of them are being delivered.
        stored: the offsets of those that are stored already, after one that is not.
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
    """Stores messages with a delay level until they are due, and delivers them.

    Args:
        folder: where ``delayOffset.json`` lies.
        delays_ms: ``messageDelayLevel``, level 1 first.
        flushes: whether a message can only be read after a flush round (SYNC_FLUSH).
        on_delivered: called with every message that was put where it belongs, and where it is.
        dead_letters: get what can never be stored where it belongs.
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
        """A message as it is stored until it is due; levels above the last count as the last."""
        return to_delay_level(message, level, len(self._delays_ms))

    # ---- offsets

    def load(self) -> None:
        """Read the offsets; the store is asked for its own only when delivery starts.
        A file that is missing is made: a broker may be killed before it first writes how far it delivered, and
        a lost file looks the same."""
        found = self._file.load(DelayOffsets)
        self._is_file_missing = found is None
        if found is None:
            with suppress(StoreUnavailable):  # a disk that refuses is reported when there are offsets to be written
                self._file.save(DelayOffsets(DataVersion(), {}))  # older than any of a master's, which is to win
        stored = found or DelayOffsets()
        self._data_version = stored.data_version or DataVersion()
        self._levels.clear()
        self._written = {level: offset for level, offset in stored.offset_table.items() if level > 0}
        count = max(_LEVEL_COUNT_MIN, len(self._delays_ms))
        # Also levels that only the file knows: what a longer table put there is still to be delivered.
        for number in sorted({*range(1, count + 1), *self._written}):
            delay_ms = self._delays_ms[number - 1] if number <= len(self._delays_ms) else None
            self._levels[number] = _Level(number, delay_ms, self._written.get(number, 0))

    def needed_from(self) -> int | None:
        """Physical offset of the oldest message that is not delivered yet, None where there is none."""
        found = [
            entry[1]
            for level in self._levels.values()
            for entry in self._store.entries(SCHEDULE_TOPIC, level.queue_id, level.offset, count_max=1)
        ]
        return min(found, default=None)

    def offsets(self) -> DelayOffsets:
        """Return how far each level is delivered, as it is stored and as slaves ask for it."""
        return DelayOffsets(self._data_version, self._offsets())

    def replace_with(self, copied: DelayOffsets) -> None:
        """Put the master's offsets in the place of the file and read it; not while this broker delivers itself.
        Source: behaviour.md §10.1."""
        if not self.is_running and copied.offset_table != self._offsets():
            self._file.save(copied)
            self.load()

    def merge_forward(self, copied: DelayOffsets) -> None:
        """Take over the offsets that are further in a member's table, unless it is older than this one.
        Source: behaviour.md §10.5."""
        version = copied.data_version or DataVersion()
        if version.timestamp >= self._data_version.timestamp:
            own = self._offsets()
            # Level by level, forward only: a message that either broker has delivered is not delivered again.
            further = {level: max(offset, own.get(level, 0)) for level, offset in copied.offset_table.items()}
            self.replace_with(DelayOffsets(version, own | further))

    def _offsets(self) -> dict[int, int]:
        known = self._written
        return {level.number: level.offset for level in self._levels.values() if level.offset or level.number in known}

    async def persist_round(self) -> None:
        """Write the newest offsets whose deliveries are on the disk: these, or those of the last round."""
        offsets, end_offset = self._offsets(), self._destination.end_offset
        # An offset on the disk before the message it was moved for would lose that message in a crash: where the newest
        # are not safe yet, those of the last round are, and the newest wait for the next one.
        if self._store.durable_offset < end_offset:
            self._store.request_flush()
            (offsets, end_offset), self._taken = self._taken, (offsets, end_offset)
        if self._store.durable_offset >= end_offset and offsets and offsets != self._written:
            await asyncio.to_thread(self._write, offsets)

    def persist(self) -> None:
        """Write the offsets of a store that was closed in order."""
        if self._store.failure is None and self._offsets() != self._written:
            self._write(self._offsets())

    def _write(self, offsets: dict[int, int]) -> None:
        # In a thread, of a copy: levels move on meanwhile.
        self._data_version.advance(self._clock.now_ms())
        self._file.save(DelayOffsets(self._data_version, offsets))
        self._written = offsets

    # ---- delivery

    def start(self, remote_put: RemotePut | None = None) -> None:
        """Deliver from now on, what became due before first; into the own log, or at other brokers."""
        self.is_running, self._destination.remote_put = True, remote_put
        pending = 0
        for level in self._levels.values():
            pending += self._clamp(level) - level.offset
            level.look_at_ms = 0.0
            # Read for an offset that may have moved since.
            level.ahead.clear()
            level.stored.clear()
        if self._is_file_missing and pending:
            _log.warning(
                "%s is missing, and so is its backup: %d messages of %s are delivered when they are due, also those"
                " that were delivered before",
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
        """`stop`, and wait for what is on its way: the offsets say then what was delivered."""
        self.stop()
        await self._destination.finish()

    def _look_at(self, at_ms: float) -> None:
        """Have a round at a time of the loop."""
        if not self.is_running or at_ms >= self._timer_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        assert at_ms < _NEVER, "a round is for a time that comes"
        wait_ms = max(at_ms - _loop_ms(), 0)
        self._timer_ms = at_ms
        self._timer = asyncio.get_running_loop().call_later(wait_ms / 1000, self._round)

    def _round(self) -> None:
        """Deliver what is due for a while, the levels that were not served longest first."""
        self._timer, self._timer_ms = None, _NEVER
        now_ms, until_ms = _loop_ms(), self._clock.monotonic_ms() + _ROUND_MS_MAX
        self._notice_step_back(self._clock.now_ms())
        end_offset, levels = self._destination.end_offset, self._levels.values()
        # By the time they were last served: a level with a long backlog must not keep the others from their turn.
        due = deque(sorted((level for level in levels if level.look_at_ms <= now_ms), key=lambda one: one.look_at_ms))
        while due and self._clock.monotonic_ms() < until_ms:
            level = due.popleft()
            # From here on each path sets a time, or has a message wake the level: nothing else does.
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
        """Deliver a level's next messages and set the time at which the level is looked at again: ``now_ms`` if more
        may be due."""
        try:
            if await self._deliver_run(level):
                level.look_at_ms = now_ms
        except Refused:
            # The same messages again, for ever: a later one would be out of order, and the refused one lost.
            level.look_at_ms = _loop_ms() + _RETRY_MS
        except Exception:  # noqa: BLE001 - the outer edge of a level's work: logged, and tried again later
            _log.exception("delay level %d: cannot deliver entry %d", level.number, level.offset)
            level.look_at_ms = _loop_ms() + _BROKEN_MS
        level.is_busy = False
        # A round in which nothing waits looks at all levels when it ends.
        if self._destination.is_remote and level.look_at_ms < _NEVER:
            self._look_at(level.look_at_ms)

    async def _deliver_run(self, level: _Level) -> bool:
        """Deliver a level's next messages. Return whether more may be due; if not, the level knows when to look again.
        Raises Refused: some of them need another try."""
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
        # Up to the first that is not stored. After a restart those after it are delivered again, and none is lost.
        passed = handed.passed
        for _ in range(passed):
            assert level.ahead[0][0] > level.offset, "the offset of a level never falls"
            level.offset = level.ahead.popleft()[0]
        level.stored = {due[at][0] for at in range(passed, len(due)) if handed.stored[at]}
        if handed.failure is not None:
            raise handed.failure
        return not has_later

    def _due_ms(self, level: _Level, entry: _Entry) -> int:
        """Return the wall time at which an entry is due; 0 for an entry that does not say it."""
        _, physical_offset, size, due_ms = entry
        if due_ms is None:  # the extension unit that holds it is missing
            record = self._record(level, physical_offset, size)
            due_ms = 0 if record is None else record.store_timestamp + (level.delay_ms or 0)
        return due_ms

    def _is_due(self, level: _Level, entry: _Entry, now_ms: int) -> bool:
        """Return whether an entry is due. If it is not, the level looks at the entry again in time.
        ``now_ms``: wall time."""
        wait_ms: float = self._due_ms(level, entry) - now_ms
        if wait_ms <= 0:
            return True
        loop_ms = _loop_ms()
        skew_ms = now_ms - loop_ms
        if level.waits_for != entry[0]:
            if level.delay_ms is not None and wait_ms > level.delay_ms:
                # Stored before the clock was set back, so the entry's time is one of the clock as it went then.
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
        """Remember how wall time and the loop's time differed before the wall clock was set back."""
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
        """The message to put for a delayed one; None when it is gone or does not say where it belongs."""
        record = self._record(level, physical_offset, size)
        if record is None:
            return None
        # A half message that was sent with a level has lost its place. Apache's broker drops it here, too.
        place = self._destination.place_of(record, forbidden=_HALF_TOPIC)
        return None if place is None else message_from(record, topic=place[0], queue_id=place[1])

    def _clamp(self, level: _Level) -> int:
        """Bring a level's offset into its queue; returns the end of the queue."""
        low = self._store.min_offset(SCHEDULE_TOPIC, level.queue_id)
        high = self._store.max_offset(SCHEDULE_TOPIC, level.queue_id)
        if not low <= level.offset <= high:
            _log.warning("delay level %d: offset %d is not in %d to %d", level.number, level.offset, low, high)
            level.offset = low if level.offset < low else high
        return high

    def _find_next(self, level: _Level) -> bool:
        """Go on where nothing could be read; at the end of its queue a level waits for the next message."""
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
    """Return the loop's time, which is monotonic, in milliseconds."""
    return asyncio.get_running_loop().time() * 1000
