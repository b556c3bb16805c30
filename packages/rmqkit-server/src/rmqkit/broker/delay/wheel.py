"""The state of the timer wheel, and the enqueueing of timed messages (``TimerEnqueuePutService``).

==================  =====================================================================================
queue offset        the offset of the next message of the timer topic to put on the wheel
read time           the next second to deliver
write time          the second that has begun. Messages for earlier seconds are due immediately
master progress     a checkpoint: messages before its queue offset and read time were already delivered. This broker
                    delivered them before its start, or another broker of the same name delivered them
delivered before    pairs of a time and a queue offset: messages before both were delivered, although the read time is
                    earlier, because the clock was set back
==================  =====================================================================================

A slave requests its master's progress every few seconds (GET_TIMER_CHECK_POINT) and puts the messages of the master's
wheel on its own wheel. The slave puts no later messages on its wheel, because the master may store them directly in
their real topic. A master that returns copies the progress of the broker that acted for it, and skips the messages that
the other broker delivered. `TimerFiles` writes the state, together with ``config/timermetrics``.

`Enqueue` processes the timer topic in chunks. It reads the log in one piece if the records of a chunk are close
together, and writes the timer log once per chunk.

=================================  ===========================================================================
a message of the timer topic       action
=================================  ===========================================================================
its second is already over         the action of `Late`. A marker is dropped. After a start, the read time of a master
                                   moves back to this second, because a kill may have lost a step back of the clock
more than the roll window ahead    rolled: put on the wheel at an earlier time. At this time the message is stored in
                                   the timer topic again. The window ends before the log file of a message may be
                                   deleted (`roll_window_slots`)
delivered by another broker        skipped (`TimerState.was_delivered`)
without a time or a topic          dropped and logged
=================================  ===========================================================================

Use this module only on the event loop, except `TimerState.write`. Source: store.md §18.3, §18.5, §18.6; behaviour.md
§9.3, §10.1, §10.5.
"""

from __future__ import annotations

import enum
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import msgspec

from rmqkit.broker.delay.destination import Refused
from rmqkit.clock import Clock
from rmqkit.errors import RecordCorrupt, StoreMismatch
from rmqkit.metrics import Histogram, histogram
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import find_property, java_hash
from rmqkit.protocol.record import Record, decode_record, record_properties
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, TimerMetrics, TimingCount
from rmqkit.store.files import JsonFile
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from rmqkit.store.timer.check import Waiting
from rmqkit.store.timer.files import DELIVERED_BEFORE_MAX, DeliveredBefore, TimerFiles, UnitsLost
from rmqkit.store.timer.log import DELETE, NONE, PLAIN, ROLL, Unit

__all__ = ["INTEGER", "Broken", "Enqueue", "Late", "TimerState"]

INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
_CHUNK = 256
_DELAY_MS_MAX = (1 << 31) - 1
"""The largest delay that a unit of the timer log can hold."""
_HOUR_MS = 3_600_000
_READ_BACK_SLOTS_MAX = 7 * 86_400 - 60
_SPAN_BYTES_MAX = 1 << 20
_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_OUT_MS = property_names.TIMER_OUT_MS.encode()
_DELETE_KEY = property_names.TIMER_DELETE_KEY.encode()
_Entry = tuple[int, int, int, int | None]

_log = logging.getLogger(__name__)


class Broken(Exception):
    """Timer log or wheel are damaged and have to be rebuilt from the timer topic."""


class TimerState:
    """The positions and counts of one timer, and its files.

    Attributes:
        queue_offset, read_ms, write_ms, master_progress: the positions of the table at the top of the module.
        counts_delivered: True if ``metrics`` may count messages on this wheel that were delivered: another broker
            delivered them, or they were counted again after the clock was set back.
        delivered_before: the pairs of the table at the top of the module. The queue offsets increase, and the times
            decrease.
        left_out: the queue offsets of the timer topic to skip (`rmqkit.broker.delay.survey`).
        needs_survey: True if the topic is read again, and a survey has to find the messages to skip first.
        metrics: the numbers of waiting messages by topic.
        is_changed: True if the state changed since the last write.
        enqueued, dequeued: the numbers of messages put on the wheel, and delivered, since the start, by topic.
        is_measured: True if ``delay_seconds`` is used.
        delay_seconds: the delays of messages since their producer made them, by topic.
    """

    def __init__(self, store: MessageStore, settings: StoreSettings, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.window_ms = roll_window_slots(settings) * settings.timer_precision_ms
        self._metrics_file = JsonFile(store.root / "config" / "timermetrics")
        self._written_counter = 0
        self._taken_end = 0
        self._taken_metrics = TimerMetrics()
        self.precision_ms = settings.timer_precision_ms
        self.files = TimerFiles(
            store.root, log_file_bytes=settings.timer_log_file_bytes, precision_ms=settings.timer_precision_ms
        )
        self.metrics = TimerMetrics()
        self.master_progress = TimerCheckpoint()
        self.queue_offset = self.read_ms = self.write_ms = 0
        self.is_changed = self.counts_delivered = self.needs_survey = False
        self.left_out: set[int] = set()
        self.delivered_before: DeliveredBefore = ()
        self._done_before = TimerCheckpoint()
        self._broken_ms = -1
        self.enqueued: Counter[str] = Counter()
        self.dequeued: Counter[str] = Counter()
        self.is_measured = False
        self.delay_seconds: dict[str, Histogram] = {}

    def load(self) -> None:
        """Read the counts. The caller opens the store afterwards."""
        try:
            self.metrics = self._metrics_file.load(TimerMetrics) or TimerMetrics()
        except StoreMismatch as error:
            _log.warning("%s; counting the waiting messages again", error)
            self.metrics = TimerMetrics()
        self._written_counter = self.metrics.data_version.counter

    def recover(self) -> None:
        """Make the files match the store, which was just opened. Repair damaged files.
        Raises StoreMismatch: a file has the wrong length. Raises OSError: the disk refused."""
        files = self.files
        files.load()
        total = sum(one.count for one in self.metrics.timing_count.values())
        self.queue_offset = files.recover(self._number_of, total=total)
        known = self.master_progress = files.checkpoint
        self.read_ms, self.delivered_before = known.last_read_time_ms, files.delivered_before
        dealt_with = max(known.last_timer_queue_offset, known.master_timer_queue_offset)
        if self.queue_offset < dealt_with:  # also true if an earlier start was killed before it had read the topic
            self._done_before = known
        self.needs_survey = self.queue_offset < dealt_with or (self.is_unset and self.offset_end > 0)
        if files.is_lost:
            self.metrics.timing_count.clear()
        elif files.waiting is not None and files.waiting.total != total:
            self._recount(files.waiting)
            self.counts_delivered = bool(self.delivered_before)
        if files.fault and not files.is_lost:
            pending = 0 if files.waiting is None else files.waiting.total
            _log.warning("timer wheel: %s: rebuilt from the timer log, %d messages pending", files.fault, pending)
            self.is_changed = True
        self.place()

    @property
    def is_unset(self) -> bool:
        """Return True if no checkpoint has the time up to which messages were delivered."""
        return self.files.checkpoint.last_read_time_ms <= 0

    @property
    def offset_end(self) -> int:
        """The offset after the last message of the timer topic."""
        return self._store.max_offset(TIMER_TOPIC, 0)

    def _recount(self, waiting: Waiting) -> None:
        """Set the counts from the timer log. The log has only topic hashes, so unknown names are read from records."""
        names = {java_hash(topic): topic for topic in self.metrics.timing_count}
        counts: Counter[str] = Counter()
        for hashed, count in waiting.counts.items():
            topic = names.get(hashed)
            if topic is None:
                record = self.record(waiting.samples[hashed].physical_offset, waiting.samples[hashed].size)
                found = None if record is None else find_property(record.properties, _REAL_TOPIC)
                topic = None if found is None else found.decode("utf-8", "replace")
            if topic is not None:
                counts[topic] = count
        for known in self.metrics.timing_count.values():
            known.count = 0
        self.count(counts)

    def start_over(self, why: Broken, *, delivered: Iterable[int]) -> None:
        """Drop timer log and wheel. The timer topic is read again from its start. ``delivered``: the positions of the
        delivered units of the current second. Raises OSError: the disk refused."""
        log = self.files.log
        for position in delivered:
            unit = log.unit(position)
            number = None if unit is None else self._number_of(unit)
            if number is not None:
                self.left_out.add(number)
        # Remember the read time, so that it causes only one rebuild: damage in the topic would cause endless rebuilds.
        known, self._broken_ms = self.checkpoint(is_follower=False), self.read_ms
        _log.warning("timer log and wheel: %s: reading the timer topic from its start", why)
        self.files.start_over(known, self.delivered_before)
        self._done_before = self.files.checkpoint
        self.metrics.timing_count.clear()
        self.queue_offset, self.is_changed, self.needs_survey = 0, True, True
        self.place()

    def end_survey(self, left_out: set[int], oldest_ms: int | None) -> None:
        """Skip the messages that a survey found. ``oldest_ms``: the time to begin at if no checkpoint has a time."""
        self.left_out |= left_out
        self.needs_survey = False
        if self.is_unset:
            now_ms = self._clock.now_ms()
            self.read_ms = self.floor(now_ms if oldest_ms is None else min(oldest_ms, now_ms))
            self.place()

    def may_rebuild(self, time_ms: int) -> bool:
        """Return True if this second has not caused a rebuild of timer log and wheel yet."""
        return time_ms != self._broken_ms

    def place(self) -> None:
        """Continue the delivery where it stopped. The write time stays at the read time until the backlog is on the
        wheel."""
        now_ms, read_ms = self.floor(self._clock.now_ms()), self.read_ms
        if read_ms <= 0 and not self.files.log.end:
            read_ms = now_ms
        # A timer that was off for longer than seven days begins seven days back, as in the reference.
        self.read_ms = max(read_ms, self._earliest_read_ms)
        self.write_ms = self.read_ms if now_ms - self.read_ms < self.window_ms else now_ms
        assert self.read_ms <= self.write_ms, "the read time is never after the write time"

    @property
    def _earliest_read_ms(self) -> int:
        return self.floor(self._clock.now_ms()) - _READ_BACK_SLOTS_MAX * self.precision_ms

    def clamp(self) -> int:
        """Move the offsets into the range of the timer topic's queue. Return the end of the queue."""
        low, high = self._store.min_offset(TIMER_TOPIC, 0), self._store.max_offset(TIMER_TOPIC, 0)
        self.queue_offset = min(max(self.queue_offset, low), high)
        # If the log was cut, other messages get the offsets after the end.
        self.delivered_before = tuple([(time_ms, min(end, high)) for time_ms, end in self.delivered_before])
        assert 0 <= self.queue_offset <= high, "the queue offset is inside the queue"
        return high

    # ---- transitions: only these methods change positions and times

    def read_up_to(self, queue_offset: int) -> None:
        """Record that all messages of the timer topic before an offset are handled."""
        assert queue_offset <= self.offset_end, "the queue offset is inside the queue"
        assert queue_offset >= self.queue_offset, "the queue offset never moves backwards"
        self.queue_offset, self.is_changed = queue_offset, True

    def end_second(self, time_ms: int) -> None:
        """Move the read time past a second that is delivered."""
        assert time_ms == self.read_ms, "the read time moves second by second"
        self.read_ms, self.is_changed = time_ms + self.precision_ms, True

    def pass_second(self) -> None:
        """Move the read time past a second without messages."""
        assert self.read_ms < self.write_ms, "no second is delivered before it is over"
        # Do not set `is_changed`: a broker without timed messages would write its state all the time.
        self.read_ms += self.precision_ms

    def begin_second(self, time_ms: int, *, is_follower: bool) -> None:
        """Move the write time to a second that has begun. Messages for earlier seconds are late from now on."""
        self.write_ms = max(self.write_ms, time_ms)
        # A follower has the read time of its master, and the master's clock may be ahead.
        assert is_follower or self.read_ms <= self.write_ms, "the read time is never after the write time"

    def begin(self) -> None:
        """Start to deliver where the delivery stopped, or at the present time if the clock is earlier."""
        self.place()
        self.keep_delivered()  # before the read time changes
        now_ms = self.floor(self._clock.now_ms())
        if now_ms < self.read_ms:
            _log.warning("the clock, %d, is before %d: timed messages wait again", now_ms, self.read_ms)
            self.read_ms = self.write_ms = now_ms

    def reach_back(self, time_ms: int) -> bool:
        """Move the read time back to the second of a message that was stored before the start and not delivered.
        Return False if this second is too long ago."""
        if time_ms < self._earliest_read_ms:
            return False
        self.read_ms = min(self.read_ms, time_ms)
        return True

    def step_back(self, now_ms: int) -> bool:
        """Continue from the time to which the wall clock was set back. Return True if seconds are repeated.

        Messages that were delivered in the repeated seconds are skipped.
        """
        assert now_ms < self.write_ms, "a clock that was set back is before the current second"
        self.write_ms = now_ms
        if now_ms >= self.read_ms:
            return False
        self.keep_delivered()  # before the read time changes
        self.read_ms, self.is_changed, self.counts_delivered = now_ms, True, False
        return True

    def keep_delivered(self) -> None:
        """Remember which messages were delivered until now, because the read time may move backwards."""
        known = self.checkpoint(is_follower=False)
        time_ms, queue_offset = known.last_read_time_ms, known.master_timer_queue_offset
        later = [one for one in self.delivered_before if one[0] > time_ms or one[1] > queue_offset]
        if all(one[0] < time_ms or one[1] < queue_offset for one in later):
            later.append((time_ms, queue_offset))
        self.delivered_before = tuple(later[-DELIVERED_BEFORE_MAX:])

    def keep_progress(self) -> None:
        """Set the master's progress to this broker's progress, so that delivered messages are skipped."""
        self.master_progress = self.checkpoint(is_follower=False)

    def follow_master(self, progress: TimerCheckpoint) -> None:
        """Adopt the master's progress and read time."""
        self.is_changed |= progress != self.master_progress and progress.master_timer_queue_offset > 0
        self.master_progress, self.read_ms = progress, progress.last_read_time_ms

    def leave_out_delivered(self, progress: TimerCheckpoint) -> None:
        """Skip messages that another member of this group has delivered, unless the other state is older."""
        own = self.master_progress
        if progress.data_version.timestamp >= own.data_version.timestamp and progress.last_read_time_ms:
            self.master_progress, self.counts_delivered = progress, True

    def floor(self, ms: int) -> int:
        return ms - ms % self.precision_ms

    def was_delivered(self, time_ms: int, queue_offset: int) -> bool:
        """Return True if a message of the timer topic was delivered according to the master's progress, before the
        files were rebuilt, or before the clock was set back."""
        progress, before = self.master_progress, self._done_before
        # Compare time and offset: a message after the offset may be for an earlier second, and a message before the
        # offset for a later second.
        if (time_ms < progress.last_read_time_ms and queue_offset < progress.master_timer_queue_offset) or (
            time_ms < before.last_read_time_ms and queue_offset < before.master_timer_queue_offset
        ):
            return True
        return any(time_ms < before_ms and queue_offset < end_offset for before_ms, end_offset in self.delivered_before)

    def count(self, topics: Counter[str], weight: int = 1) -> None:
        """Add messages to the counts of waiting messages by topic. ``weight`` -1: subtract them."""
        if not topics:
            return
        now_ms = self._clock.now_ms()
        for topic, count in topics.items():
            known = self.metrics.timing_count.setdefault(topic, TimingCount())
            known.count += weight * count
            known.time_stamp = now_ms
        self.metrics.data_version.advance(now_ms)

    def count_gone(self, hashes: Counter[int]) -> None:
        """Subtract skipped messages from the counts of waiting messages, by the hashes of their topics.

        The hash is the only known value of a deleted record. (The reference counts its whole timer log again once a
        day.)
        """
        waiting = {java_hash(topic): topic for topic, one in self.metrics.timing_count.items() if one.count > 0}
        self.count(Counter({waiting[one]: count for one, count in hashes.items() if one in waiting}), -1)

    def drop_expired(self) -> None:
        """Delete the files of the timer log that are no longer needed. Raises OSError: the disk refused."""
        self.files.log.drop_before(max(0, self._store.min_physical_offset), self.read_ms - self.window_ms)

    def measure(self, topic: str, seconds: int) -> None:
        """Add a message's delay to the histogram of its topic."""
        known = self.delay_seconds.get(topic)
        if known is None:
            known = self.delay_seconds[topic] = histogram("rocketmq_delay_message_latency")
        known.observe(seconds)

    def copies(self, places: Sequence[tuple[int, int]]) -> list[bytes | memoryview | None]:
        """Return copies of the records at physical offsets with their sizes; None for a deleted record. Read the
        records in one piece if they are close together."""
        start, end, wanted = min(places)[0], sum(max(places)), sum([size for _, size in places])
        stored = None
        if len(places) > 1 and 0 < end - start <= min(4 * wanted, _SPAN_BYTES_MAX):
            stored = self._store.log.copy(start, end - start)
        if stored is None:
            return [self._store.log.copy(at, size) for at, size in places]
        view = memoryview(stored)
        return [view[at - start : at - start + size] for at, size in places]

    def record(self, physical_offset: int, size: int) -> Record | None:
        """Return a record of the timer topic; None if it is deleted, or if the record there has another topic."""
        return self.decoded(self._store.log.copy(physical_offset, size), physical_offset)

    def decoded(self, stored: bytes | memoryview | None, physical_offset: int) -> Record | None:
        """Do the same as `record` for a copy of the record."""
        try:
            record = None if stored is None else decode_record(stored)
        except RecordCorrupt as error:
            _log.error("timed message at %d is skipped: %s", physical_offset, error)
            return None
        return record if record is not None and record.topic == TIMER_TOPIC else None

    def _number_of(self, unit: Unit) -> int | None:
        """Return the queue offset of a unit's message in the timer topic; -1 if the message is deleted, None if its
        record is missing. `TimerFiles.recover` calls this."""
        if unit.physical_offset < self._store.min_physical_offset:
            return -1
        record = self.record(unit.physical_offset, unit.size)
        return None if record is None else record.queue_offset

    # ---- progress for slaves and for the files

    def checkpoint(self, *, is_follower: bool) -> TimerCheckpoint:
        """Return the timer's progress. A follower's progress has the queue offset of its master."""
        known, before = self.files.checkpoint, self._done_before
        if not is_follower and self.queue_offset < before.master_timer_queue_offset:  # the topic is being read again
            return msgspec.structs.replace(
                known,
                last_read_time_ms=before.last_read_time_ms,
                last_timer_queue_offset=self.queue_offset,
                master_timer_queue_offset=before.master_timer_queue_offset,
                data_version=msgspec.structs.replace(known.data_version),
            )
        queue_offset = self.master_progress.master_timer_queue_offset if is_follower else self.queue_offset
        return TimerCheckpoint(
            last_read_time_ms=self.read_ms,
            last_timer_log_flush_position=known.last_timer_log_flush_position,
            last_timer_queue_offset=min(self.queue_offset, queue_offset),
            master_timer_queue_offset=queue_offset,
            data_version=msgspec.structs.replace((self.master_progress if is_follower else known).data_version),
        )

    def take(self, *, is_follower: bool) -> None:
        """Copy the state for `write`."""
        checkpoint = self.checkpoint(is_follower=is_follower)
        if not is_follower:
            checkpoint.data_version.advance(self._clock.now_ms())
        # The read time alone shows the delivery of all messages before it.
        self.files.take(checkpoint, tuple([one for one in self.delivered_before if one[0] > self.read_ms]))
        # The deliveries that this state covers are before the current end of the log. They must be on the disk first.
        self._taken_end = self._store.max_physical_offset
        counts = {topic: msgspec.structs.replace(one) for topic, one in self.metrics.timing_count.items()}
        self._taken_metrics = TimerMetrics(msgspec.structs.replace(self.metrics.data_version), counts)
        self.is_changed = False

    @property
    def is_durable(self) -> bool:
        """Return True if the records that the copied state covers are on the disk."""
        return self._store.durable_offset >= self._taken_end

    def write(self) -> None:
        """Write the copied state. Any thread can call this. Raises OSError: the disk refused. The next call tries
        again. Raises Broken: the timer log lost units after a failed flush, and there is no copied state any more."""
        try:
            self.files.write()
        except UnitsLost as error:
            raise Broken(str(error)) from None
        # Write the counts last: a start counts again if the stored counts do not belong to the timer log.
        metrics = self._taken_metrics
        if metrics.data_version.counter != self._written_counter:
            self._metrics_file.save(metrics)
            self._written_counter = metrics.data_version.counter


class Late(enum.Enum):
    """The action for a message whose second is already over when it arrives."""

    PUT = "stored in its real topic at once, at a master"
    NEXT = "delivered with the second that has begun, at a slave that acts for its master"
    KEPT = "put on the wheel nevertheless, at a slave: the broker that delivers next knows the read time"


class Enqueue:
    """The part that puts messages on the wheel. ``deliver``: stores a message in its real topic, or raises Refused.

    Attributes:
        late: the action for messages whose second is over.
        is_catching_up: True after a start, until the messages from before it are on the wheel. Nothing is delivered
            meanwhile. So every message of the last seven days is put on the wheel, also if its second was delivered.
    """

    def __init__(
        self, state: TimerState, store: MessageStore, settings: StoreSettings, deliver: Callable[[Record], None]
    ) -> None:
        self._state = state
        self._store = store
        self._window = roll_window_slots(settings)
        self._deliver = deliver
        self.late = Late.PUT
        self.is_catching_up = False
        self._ahead: list[tuple[int, str, Unit]] = []

    def run(self, end_offset: int | None) -> bool:
        """Enqueue the next chunk of the timer topic. Return True if there was a chunk. ``end_offset``: the queue offset
        of the master that this broker follows. Raises Refused: the rest of the chunk has to be retried."""
        state = self._state
        count = _CHUNK if end_offset is None else min(_CHUNK, end_offset - state.queue_offset)
        entries = self._store.entries(TIMER_TOPIC, 0, state.queue_offset, count_max=count) if count > 0 else []
        self._ahead.clear()
        for entry, properties in zip(entries, self._properties(entries), strict=True):
            self._sort(entry, properties)
        self._add()
        if entries:
            state.read_up_to(entries[-1][0])
        return bool(entries)

    def _properties(self, entries: list[_Entry]) -> list[bytes]:
        """Return the properties of each record; empty for a deleted record."""
        copies = self._state.copies([(at, size) for _, at, size, _ in entries]) if entries else []
        return [b"" if copy is None else record_properties(memoryview(copy)) for copy in copies]

    def _sort(self, entry: _Entry, properties: bytes) -> None:
        """Add a message to the chunk for the wheel, or deliver it if its second is over."""
        state = self._state
        following, physical_offset, size, _ = entry
        asked, topic = find_property(properties, _OUT_MS), find_property(properties, _REAL_TOPIC)
        if asked is None or topic is None or not INTEGER.fullmatch(asked):
            _log.error("timed message at %d is dropped: its time is %s, its topic %s", physical_offset, asked, topic)
            return
        time_ms = int(asked)
        time_ms -= time_ms % state.precision_ms
        if state.was_delivered(time_ms, following - 1) or following - 1 in state.left_out:
            return
        name, hashed = _named(topic)
        is_marker = _DELETE_KEY in properties and find_property(properties, _DELETE_KEY) is not None
        if state.is_measured:
            self._measure(name, time_ms, physical_offset, size)
        late_before_ms = state.read_ms if self.is_catching_up else state.write_ms
        if time_ms < late_before_ms and self.late is Late.NEXT:
            time_ms = state.write_ms
        is_put = time_ms < late_before_ms and self.late is Late.PUT
        if is_put and not (self.is_catching_up and state.reach_back(time_ms)):
            # First put the earlier messages on the wheel and move the position: if this message is refused, a retry
            # must not put the earlier messages on the wheel again.
            self._add()
            state.read_up_to(following - 1)
            record = None if is_marker else state.record(physical_offset, size)
            if record is not None:
                self._deliver(record)
            state.read_up_to(following)
            return
        slot_ms = self._slot_for(time_ms)
        # The delay may be negative: at a slave (`Late.KEPT`), and at a broker that was off for longer than the window.
        assert slot_ms - state.write_ms <= _DELAY_MS_MAX, "the delay fits into the 32 bits of a unit"
        magic = PLAIN | (ROLL if slot_ms != time_ms else 0) | (DELETE if is_marker else 0)
        unit = Unit(NONE, magic, state.write_ms, slot_ms - state.write_ms, physical_offset, size, hashed)
        self._ahead.append((following, name, unit))

    def _add(self) -> None:
        """Put the messages of the chunk on the wheel. Raises Refused: the disk refused."""
        state, ahead = self._state, self._ahead
        while ahead:
            try:
                count = state.files.add([unit for _, _, unit in ahead])
            except OSError as error:
                raise Refused(f"timer log: errno {error.errno} {error.strerror}") from error
            assert 0 < count <= len(ahead), "each write puts at least one message on the wheel"
            # Move the position after each part: a retry must not put its messages on the wheel again.
            state.read_up_to(ahead[count - 1][0])
            added = ahead[:count]
            del ahead[:count]
            markers = Counter([name for _, name, unit in added if unit.magic & DELETE])
            plain = Counter([name for _, name, unit in added if not unit.magic & DELETE])
            if self.late is not Late.KEPT:  # a slave copies the counts of its master
                state.count(plain)
                state.count(markers, -1)
            state.enqueued += plain + markers

    def _slot_for(self, time_ms: int) -> int:
        """Return the time of the slot for a message: its own time, or an earlier time if the message is rolled."""
        state = self._state
        excess_ms = time_ms - state.write_ms - self._window * state.precision_ms
        if excess_ms < 0:
            return time_ms
        # Use half a window if the next stage would be shorter than a third of a window.
        slots = self._window // 2 if excess_ms < self._window // 3 * state.precision_ms else self._window
        return state.write_ms + slots * state.precision_ms

    def _measure(self, topic: str, time_ms: int, physical_offset: int, size: int) -> None:
        record = self._state.record(physical_offset, size)
        if record is not None:
            self._state.measure(topic, (time_ms - record.born_timestamp) // 1000)


def roll_window_slots(settings: StoreSettings) -> int:
    """Return the largest number of slots between a message on the wheel and the current second.

    This is ``timerRollWindowSlot``, but at most two thirds of the retention of log files (``fileReservedTime``). Then
    the record of a message still exists when the message is due.
    """
    kept = settings.file_reserved_hours * _HOUR_MS * 2 // 3 // settings.timer_precision_ms
    return min(settings.timer_roll_window_slots, _DELAY_MS_MAX // settings.timer_precision_ms, kept or _DELAY_MS_MAX)


@lru_cache(maxsize=4096)
def _named(topic: bytes) -> tuple[str, int]:
    """Return a topic's name and its Java hash."""
    name = topic.decode("utf-8", "replace")
    return name, java_hash(name)
