"""Messages with a delivery time, which rmq_sys_wheel_timer stores until they are due (``TimerMessageStore``).

A message with TIMER_DELAY_SEC, TIMER_DELAY_MS or TIMER_DELIVER_MS is stored in queue 0 of the timer topic. REAL_TOPIC
and REAL_QID contain its topic and queue, and TIMER_OUT_MS contains its time. The timer reads this queue and puts each
message on the wheel (`rmqkit.broker.delay.wheel`). When a second is over, the messages of its slot are stored in their
real topics, in the order of their arrival (`rmqkit.broker.delay.dequeue`). `TimerState` holds the positions of these
two steps.

==============================  ===================================================================================
broker                          its timer
==============================  ===================================================================================
master                          fills the wheel and delivers. After a start it first puts the rest of the topic on the
                                wheel. Then order and markers are right for messages that became due meanwhile
slave                           puts the messages that are on its master's wheel on its own wheel, and delivers nothing
slave that acts for its master  fills the wheel and delivers to the masters of other brokers. Without enableRemoteEscape
                                it continues as a slave, and due messages wait for the master
==============================  ===================================================================================

The state is written every ``timerFlushIntervalMs``, and only after the records that it covers: a crash repeats
deliveries, but loses none. A broker without timed messages writes no state. A refused message is retried after 500 ms.
If the wall clock is set back, the timer repeats these seconds without the messages that it delivered in them. (The
reference delivers new messages for these seconds immediately.)
Use this module only on the event loop. Source: behaviour.md §3.4, §9.3, §10.5; store.md §18.2 to §18.6.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable

from msgspec import UNSET
from msgspec.structs import replace

from rmqkit.broker.dead_letters import DeadLetters
from rmqkit.broker.delay.dequeue import Dequeue
from rmqkit.broker.delay.destination import Destination, OnDelivered, Refused, RemotePut
from rmqkit.broker.delay.survey import Survey
from rmqkit.broker.delay.wheel import INTEGER, Broken, Enqueue, Late, TimerState
from rmqkit.broker.durability import Refusal
from rmqkit.broker.messages import TIMER_NAMES, to_timer
from rmqkit.broker.pull.long_polling import LongPolling, WaitingPull
from rmqkit.clock import Clock
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, TimerMetrics, encode_timer_checkpoint
from rmqkit.store.message_store import InnerMessage, MessageStore
from rmqkit.store.settings import StoreSettings

__all__ = ["NOT_ENABLED", "Timer", "asks_for_time", "schedule_timed"]

NOT_ENABLED = ResponseCode.SYSTEM_ERROR, "accurate timer message is not enabled, timerWheelEnable is false"

_I32_MAX = (1 << 31) - 1
_FILL_MS_MAX = 1.5
_DELIVER_MS_MAX = 4.0
_SET_BACK_MS = 5000
_UNPUBLISHED_MAX = 1000
_RETRY_MS = 500
_BROKEN_MS = 10_000
_WAIT_MS = 86_400_000.0
_QUIET_MS = 60_000
_DROP_MS = 30_000
_UNASKED_MS = 30_000
_BOUNDS_S = (5, 60, 300, 900, 3600, 14_400, 28_800, 86_400)

_log = logging.getLogger(__name__)


def asks_for_time(message: InnerMessage) -> bool:
    """Return True if a message has a delivery time and is not in the timer topic already."""
    properties = message.parsed
    is_kept = property_names.TIMER_OUT_MS in properties or message.topic == TIMER_TOPIC
    return not is_kept and any(name in properties for name in TIMER_NAMES)


def schedule_timed(timer: Timer | None, message: InnerMessage) -> InnerMessage | Refusal:
    """Return a message in the form of the timer topic if it has a delivery time, otherwise unchanged. Return a refusal
    if the message cannot be timed."""
    if not asks_for_time(message):
        return message
    return NOT_ENABLED if timer is None else timer.schedule(message)


class Timer:
    """The timer. It stores messages with a delivery time, puts them on the wheel, and delivers them
    (``TimerMessageStore``).

    Args:
        flushes: True if a message can only be read after a flush (SYNC_FLUSH).
        on_delivered: called with every message that was stored in its real topic, and with its position.
        dead_letters: receives messages that can never be stored in their real topic.
        copied_offset: returns the physical offset up to which a slave has copied the log, or -1 without a slave. The
            timer reports a delivery to slaves only after a slave has copied the delivered message. Otherwise a slave
            that becomes master would skip a message that it does not have.

    Attributes:
        enqueue, dequeue: ``enqueue`` puts messages on the wheel, and ``dequeue`` delivers them.
        state: positions and counts.
        is_follower: True if this timer follows the timer of its master.
        rates: messages per second that were put on the wheel, and that were delivered, since the last sample.
    """

    def __init__(
        self,
        store: MessageStore,
        settings: StoreSettings,
        long_polling: LongPolling,
        clock: Clock,
        *,
        flushes: bool,
        on_delivered: OnDelivered | None = None,
        copied_offset: Callable[[], int] = lambda: -1,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self._copied_offset = copied_offset
        self._copied_before = -1
        self._broken: Broken | None = None
        self._broken_end = 0
        self._is_writing = False
        self._unpublished: deque[tuple[int, TimerCheckpoint]] = deque()
        self._unasked_until_ms = 0.0
        self._store = store
        self._settings = settings
        self._long_polling = long_polling
        self._clock = clock
        self._flushes = flushes
        self.state = TimerState(store, settings, clock)
        self._destination = Destination(store, "timed", on_delivered, dead_letters)
        self.dequeue = Dequeue(self.state, store, clock, self._destination)
        self.enqueue = Enqueue(self.state, store, settings, self.dequeue.deliver_at_once)
        self._backlog_end = self._begun_ms = self._start_end = 0
        self._survey: Survey | None = None
        self._is_held = False
        self._is_running = False
        self.is_follower = False
        self._is_away = False
        self._handle: asyncio.TimerHandle | None = None
        self._wake_ms = 0.0
        self._refusal = ""
        self._flushed_ms = self._dropped_ms = 0.0
        self._sampled: tuple[float, list[int]] = (clock.monotonic_ms(), [0, 0])
        self.rates = [0.0, 0.0]

    # ---- accepting messages

    def schedule(self, message: InnerMessage) -> InnerMessage | Refusal:
        """Return a message in the form of the timer topic, unchanged if its time is over, or a refusal.
        Source: behaviour.md §3.4, §3.5."""
        properties = message.parsed
        now_ms, delay_ms_max = self._clock.now_ms(), self._settings.timer_delay_seconds_max * 1000
        at_ms = _asked_ms(properties, now_ms)
        is_marker = property_names.TIMER_DELETE_KEY in properties
        if at_ms is None or at_ms - now_ms > delay_ms_max or (is_marker and at_ms <= now_ms):
            return ResponseCode.MESSAGE_ILLEGAL, (
                f"timer message illegal, the delay time should not be bigger than the max delay {delay_ms_max}ms; "
                "or if set del msg, the delay time should be bigger than the current time"
            )
        if at_ms <= now_ms:
            return message
        out_ms = self._out_ms(at_ms)
        assert out_ms < at_ms, "the slot's second begins before the delivery time"
        if self._is_full(out_ms):
            most = self._settings.timer_slot_count_max
            return ResponseCode.SYSTEM_ERROR, (
                f"timer message is under flow control, max num limit is {2 * most} or the current value is greater "
                f"than {most} and less than {2 * most}, trigger random flow control"
            )
        return to_timer(message, out_ms)

    def kept_until(self, asked: int, unit_ms: int) -> int | None:
        """Return the TIMER_OUT_MS that `schedule` would set, or None if the caller has to call `schedule`.
        ``asked``: the requested delay in units of ``unit_ms``. If ``unit_ms`` is 0, the time in ms since the epoch."""
        now_ms, settings = self._clock.now_ms(), self._settings
        at_ms = now_ms + asked * unit_ms if unit_ms else asked
        # With a limit of messages per second, `schedule` has to check the slot and to refuse messages.
        is_kept = 0 < at_ms - now_ms <= settings.timer_delay_seconds_max * 1000
        return self._out_ms(at_ms) if is_kept and settings.timer_slot_count_max == _I32_MAX else None

    def _out_ms(self, at_ms: int) -> int:
        return (at_ms - 1) // self.state.precision_ms * self.state.precision_ms

    def _is_full(self, time_ms: int) -> bool:
        most = self._settings.timer_slot_count_max
        slot = self.state.files.wheel.slot(time_ms) if most < _I32_MAX else None
        if slot is None or slot.pending <= most:
            return False
        return slot.pending >= 2 * most or random.random() < (slot.pending - most) / (most + 0.1)

    # ---- state

    def load(self) -> None:
        """Read the counts. The caller opens the store afterwards."""
        self.state.load()

    def recover(self) -> None:
        """Make the files match the store, which was just opened. Close the store if this fails.
        Raises StoreMismatch: a file has the wrong length. Raises OSError: the disk refused."""
        try:
            self.state.recover()
        except BaseException:
            self.state.files.close()
            self._store.close()
            raise

    def checkpoint(self) -> bytes:
        """Return the timer's progress for slaves. A master returns only progress that the log of a slave covers."""
        self._unasked_until_ms = 0.0
        newest, unpublished = self.state.checkpoint(is_follower=self.is_follower), self._unpublished
        copied = self._copied_before = max(self._copied_before, self._copied_offset())
        if self.is_follower or self._destination.remote_put is not None or copied < 0:
            unpublished.clear()
            return encode_timer_checkpoint(newest)
        if len(unpublished) < _UNPUBLISHED_MAX:
            unpublished.append((self._store.max_physical_offset, newest))
        # Find the newest progress that the slave's log covers. With later progress, a slave that becomes master would
        # skip messages that it does not have.
        while len(unpublished) > 1 and unpublished[1][0] <= copied:
            unpublished.popleft()
        return encode_timer_checkpoint(unpublished[0][1])

    def replace_with(self, progress: TimerCheckpoint) -> None:
        """Adopt the master's progress, unless this broker delivers messages itself, or has done so for a master that
        returned and has not requested the progress yet. The returned master's progress would replace the newer one, and
        the master would deliver all messages again."""
        if self.is_follower and self._clock.monotonic_ms() >= self._unasked_until_ms:
            self.state.follow_master(progress)
            self._look_in(0)

    def merge_forward(self, progress: TimerCheckpoint) -> None:
        """Skip messages that another member of this group has delivered, unless the other state is older."""
        self.state.leave_out_delivered(progress)

    def take_counts(self, copied: TimerMetrics) -> None:
        """Replace the counts by the master's, unless this broker delivers messages itself."""
        if self.is_follower and copied.data_version != self.state.metrics.data_version:
            # Drop the counts by due time: each broker calculates them from its own wheel.
            self.state.metrics = replace(copied, due_within_s=UNSET)

    @property
    def metrics(self) -> TimerMetrics:
        """The numbers of waiting messages by topic."""
        return self.state.metrics

    async def due_within_s(self) -> dict[int, int]:
        """Count the messages that are due within each bound in seconds and after the next lower bound. The method reads
        the wheel slot by slot."""
        counts, now_ms, begin_ms = dict[int, int](), self._clock.now_ms(), 0
        for bound in _BOUNDS_S:
            end_ms = bound * 1000
            counts[bound] = self.state.files.wheel.pending(now_ms + begin_ms, now_ms + end_ms)
            begin_ms = end_ms
            await asyncio.sleep(0)
        return counts

    @property
    def pending(self) -> int:
        """The number of messages on the wheel."""
        return sum(max(0, one.count) for one in self.metrics.timing_count.values())

    def needed_from(self) -> int | None:
        """Return the physical offset of the oldest record of the timer topic that may still be delivered, or None. No
        message stays on the wheel for longer than the roll window."""
        queue_offset = self.state.queue_offset
        if self.pending > 0:
            oldest_ms = self.state.read_ms - self.state.window_ms
            queue_offset = min(queue_offset, self._store.offset_by_time(TIMER_TOPIC, 0, oldest_ms))
        queue_offset = max(queue_offset, self._store.min_offset(TIMER_TOPIC, 0))
        entries = self._store.entries(TIMER_TOPIC, 0, queue_offset, count_max=1)
        return entries[0][1] if entries else None

    @property
    def read_behind_ms(self) -> int:
        """The time since the oldest second that was not delivered, in ms."""
        return max(0, self.state.floor(self._clock.now_ms()) - self.state.read_ms)

    @property
    def offset_behind(self) -> int:
        """The number of messages of the timer topic that are not on the wheel yet."""
        return max(0, self._store.max_offset(TIMER_TOPIC, 0) - self.state.queue_offset)

    @property
    def enqueue_behind_ms(self) -> int:
        """The age of the oldest message that is not on the wheel yet, in ms."""
        offset = self.state.queue_offset
        stored_ms = self._store.store_time_at(TIMER_TOPIC, 0, offset) if self.offset_behind else 0
        return max(0, self._clock.now_ms() - stored_ms) if stored_ms > 0 else 0

    async def flush_round(self) -> None:
        """Write the state if its records are on the disk. Otherwise the state waits for a later call.
        Raises OSError: the disk refused. The next call tries again."""
        self._sample()
        now_ms, files = self._clock.monotonic_ms(), self.state.files
        # The positions are not final before a survey, and mean nothing before a rebuild.
        if self.state.needs_survey or self._broken is not None:
            return
        if not files.has_taken and (self.state.is_changed or (self._is_used and now_ms > self._flushed_ms + _QUIET_MS)):
            self._snapshot_state()
        if not files.has_taken:
            return
        if not self.state.is_durable:
            self._store.request_flush()
            return
        self._is_writing = True
        try:
            await asyncio.to_thread(self.state.write)
        except Broken as broken:
            self._note_broken(broken)  # the next `_round` rebuilds: this one may wait for the delivery of a message
            self._look_in(0.0)
            return
        finally:
            self._is_writing = False
        if now_ms > self._dropped_ms + _DROP_MS:
            self._dropped_ms = now_ms
            self.state.drop_expired()

    def persist(self) -> None:
        """Write the state, if the store was closed without a failure, and close the files."""
        # Do not write after a failed flush: the log may lack deliveries that this state covers.
        if self._store.failure is None and self._broken is None:
            try:
                self._persist()
            except Broken as broken:
                self._note_broken(broken)
        if self._broken is not None and self._store.failure is None:
            self._start_over()  # the next start reads the timer topic
        self.state.files.close()

    def _persist(self) -> None:
        # `flush_round` may have copied a state that waits for the disk. Write it first: there is room for one copy.
        if self.state.files.has_taken:
            self.state.write()
        if self._is_used and not self.state.needs_survey:
            self._snapshot_state()
            self.state.write()

    @property
    def _is_used(self) -> bool:
        return self.state.queue_offset > 0

    def _snapshot_state(self) -> None:
        self.state.take(is_follower=self.is_follower)
        self._flushed_ms = self._clock.monotonic_ms()

    def _sample(self) -> None:
        now_ms, (before_ms, before) = self._clock.monotonic_ms(), self._sampled
        if now_ms > before_ms:
            done = [self.state.enqueued.total(), self.state.dequeued.total()]
            seconds = (now_ms - before_ms) / 1000
            self.rates = [(new - old) / seconds for new, old in zip(done, before, strict=True)]
            self._sampled = now_ms, done

    # ---- the rounds

    def start(self, remote_put: RemotePut | None = None) -> None:
        """Start to fill the wheel and to deliver, here or to other brokers. Overdue messages are delivered first."""
        self._destination.remote_put, self.is_follower = remote_put, False
        self.enqueue.late = Late.PUT if remote_put is None else Late.NEXT
        self.state.begin()
        if remote_put is not None:  # the newer version makes the returning master adopt this progress
            self.state.files.checkpoint.data_version.advance(self._clock.now_ms())
        self.dequeue.begin()
        self._run()

    def follow(self) -> None:
        """Start to copy the master's wheel, and deliver nothing."""
        self._destination.remote_put, self.is_follower = None, True
        self.enqueue.late = Late.KEPT
        self.state.needs_survey &= not self.state.is_unset  # the master reports its deliveries
        self._run()

    def _run(self) -> None:
        self._is_running = True
        self._backlog_end = self._start_end = self.state.clamp()
        self._begun_ms = 0
        self._look_in(0)

    def stop(self) -> None:
        self._is_running = False
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None

    async def stop_remote(self) -> None:
        """Stop, wait for running deliveries, and follow the master again. The state is final after the deliveries."""
        self.stop()
        await self._destination.finish()
        self.state.keep_progress()
        self._unasked_until_ms = self._clock.monotonic_ms() + _UNASKED_MS  # a master may never ask
        self.follow()

    def _look_in(self, wait_ms: float) -> None:
        """Schedule a `_round` after some ms, unless an earlier call is scheduled."""
        at_ms = self._clock.monotonic_ms() + wait_ms
        if not self._is_running or self._is_away or (self._handle is not None and self._wake_ms <= at_ms):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._wake_ms = at_ms
        self._handle = asyncio.get_running_loop().call_later(wait_ms / 1000, self._round)

    def _round(self) -> None:
        """Put messages on the wheel and deliver due messages, for a few ms."""
        self._handle = None
        # If messages are stored here, the work is done when `run` returns. A wake-up during the work schedules another
        # call.
        self._is_away = self._destination.is_remote
        self._destination.run(self._work(), "timed messages")

    async def _work(self) -> None:
        state, now_ms = self.state, self._clock.now_ms()
        wait_ms = min(float(state.precision_ms - now_ms % state.precision_ms), 1000.0)
        try:
            if self._broken is not None:
                wait_ms = self._start_over()
            elif await self._proceed(now_ms):
                wait_ms = 0.0
            self._refusal = ""
        except Refused as refused:
            wait_ms = self._refused(refused)
        except Broken as broken:
            self._note_broken(broken)
            wait_ms = self._start_over()
        except Exception:  # noqa: BLE001 - the outer edge of the timer's work: logged and retried later
            _log.exception("cannot process timed messages from queue offset %d on", state.queue_offset)
            wait_ms = _BROKEN_MS
        if self._flushes and state.is_changed:
            self._store.request_flush()
        self._is_away = False
        self._look_in(wait_ms)

    async def _proceed(self, now_ms: int) -> bool:
        """Survey, fill the wheel and deliver, for a few ms. Return True if there is more to do immediately."""
        state = self.state
        if state.needs_survey and self._has_to_survey():
            return True
        # Wake the readers once for all messages: without the batch each put would run the listeners.
        with self._store.batch():
            self.enqueue.is_catching_up = self._is_catching_up
            is_behind, before = self._begin_second(state.floor(now_ms)), state.queue_offset
            # Fill before delivery: a marker that arrived in time has to be on the wheel when its second is delivered.
            has_more = self._fill(self._clock.monotonic_ms() + _FILL_MS_MAX)
            has_more |= is_behind and state.queue_offset > before
            self._end_seconds()
        if self.is_follower or self._is_catching_up:
            return has_more
        return await self.dequeue.run(self._clock.monotonic_ms() + _DELIVER_MS_MAX) or has_more

    @property
    def _is_catching_up(self) -> bool:
        """Return True if messages from before the last start are not on the wheel yet."""
        return not self.is_follower and self.state.queue_offset < self._start_end

    def _has_to_survey(self) -> bool:
        """Continue the survey of a topic that is read again. Return True if the survey is not finished."""
        state = self.state
        if self._survey is None:
            self._survey = Survey(state, self._store, self._clock, is_unset=state.is_unset)
        if self._survey.run(self._clock.monotonic_ms() + _FILL_MS_MAX):
            return True
        state.end_survey(self._survey.left_out, self._survey.oldest_ms)
        if not self.is_follower:
            _log.warning(
                "timer topic: %d messages pending, %d records left out because they were delivered, recalled, or are "
                "earlier stages of a long wait",
                self._survey.waiting,
                len(self._survey.left_out),
            )
        self._survey = None
        return False

    def _note_broken(self, broken: Broken) -> None:
        """Note the reason for a rebuild, and the end of the log that has the deliveries before it."""
        self._broken, self._broken_end = broken, self._store.max_physical_offset

    def _start_over(self) -> float:
        """Rebuild timer log and wheel. The rebuild waits while a thread writes them, while the disk refuses, and until
        the deliveries that its checkpoint covers are on the disk. Return the time until the next `_round` in ms."""
        broken = self._broken
        assert broken is not None, "a rebuild has a reason"
        # While a thread writes the snapshot, the files must not change. Any other snapshot is dropped: its last write
        # failed, or would come with the next `flush_round`.
        if self._is_writing:
            return _RETRY_MS
        if self._store.durable_offset < min(self._broken_end, self._store.max_physical_offset):
            self._store.request_flush()
            return _RETRY_MS
        try:
            self.state.start_over(broken, delivered=self.dequeue.delivered)
        except OSError as error:
            _log.error("timer log and wheel cannot be rebuilt, trying again: %s", error)
            return _RETRY_MS
        self._broken = None
        self.dequeue.begin()
        self._backlog_end = self._start_end = self.state.clamp()
        self._begun_ms = 0
        return 0.0

    def _begin_second(self, now_ms: int) -> bool:
        """Record the end of the timer topic when a second begins. Earlier seconds are delivered only when all messages
        before this end are on the wheel. Otherwise a late `_round` would drop markers and break the order.
        Return True if messages before the last recorded end are not on the wheel yet."""
        if now_ms < self.state.write_ms - _SET_BACK_MS and not self.is_follower:
            self._step_back(now_ms)
        end = self._store.max_offset(TIMER_TOPIC, 0)
        is_behind = self.state.queue_offset < min(self._backlog_end, end) and not self.is_follower
        if not is_behind:
            self._begun_ms, self._backlog_end = max(now_ms, self._begun_ms), end
        return is_behind

    def _step_back(self, now_ms: int) -> None:
        """Continue from the time to which the wall clock was set back. New messages for the repeated seconds are not
        late. Messages that were delivered in the repeated seconds are skipped."""
        _log.warning("the clock was set back from %d to %d: timed messages wait again", self.state.write_ms, now_ms)
        self._begun_ms = now_ms
        if self.state.step_back(now_ms):
            self.dequeue.begin()

    def _end_seconds(self) -> None:
        """Allow the delivery of all earlier seconds if the messages from before the current second are on the wheel."""
        if self.is_follower or self.state.queue_offset >= self._backlog_end:
            self.state.begin_second(self._begun_ms, is_follower=self.is_follower)

    def _refused(self, why: Refused) -> float:
        """Log the reason why messages wait, once for each reason. Return the time until the next try in ms."""
        if str(why) != self._refusal:
            self._refusal = str(why)
            _log.warning("timed messages wait: %s", why)
        return _RETRY_MS

    def _fill(self, until_ms: float) -> bool:
        """Put the next messages of the timer topic on the wheel. Return True if there may be more."""
        end_offset = self.state.master_progress.master_timer_queue_offset if self.is_follower else None
        while self._clock.monotonic_ms() < until_ms:
            if not self.enqueue.run(end_offset):
                return self._wait_for_more(end_offset)
        return True

    def _wait_for_more(self, end_offset: int | None) -> bool:
        state = self.state
        low, high = self._store.min_offset(TIMER_TOPIC, 0), self._store.max_offset(TIMER_TOPIC, 0)
        if state.queue_offset < low:  # these messages were deleted because the disk was full
            state.read_up_to(low)
            return True
        if end_offset is not None and state.queue_offset >= end_offset:
            return False  # wait until the master has more
        if state.queue_offset < high:
            return False  # a failed flush has damaged the next entry: read it again in the next second
        if not self._is_held:
            self._is_held = True
            until_ms = self._clock.monotonic_ms() + _WAIT_MS
            held = WaitingPull(None, state.queue_offset, None, until_ms, self._arrived)
            self._long_polling.hold(TIMER_TOPIC, 0, held)
        return False

    def _arrived(self) -> None:
        self._is_held = False
        self._look_in(0)


def _asked_ms(properties: dict[str, str], now_ms: int) -> int | None:
    """Return the requested delivery time of a message in ms since the epoch; None if it is not a number."""
    for name, unit_ms in zip(TIMER_NAMES, (1000, 1, 0), strict=True):
        text = properties.get(name)
        if text is not None:
            if not INTEGER.fullmatch(text.encode()):
                return None
            return now_ms + int(text) * unit_ms if unit_ms else int(text)
    return None
