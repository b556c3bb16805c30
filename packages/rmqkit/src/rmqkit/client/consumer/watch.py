"""Watchdogs: queues that do not advance, since when and why; and handlers that block an event loop.

==================  ============================================================================================
a queue is          condition
==================  ============================================================================================
moving, caught up   its offset rises; it has no backlog
paused              the program paused it
taking over         its former owner may still save its offset
waiting for lock    another member of the group has the broker's lock (ordered consumption), or the lock expired
unreachable         no broker answers, or no route names one
refused             the broker answers with a code
full                a limit of held messages stops the pulls (flow control)
failing             its handler fails repeatedly on the first message
busy                its handler works on the first message
waiting for turn    no handler has begun with the first message, or the program does not poll it
==================  ============================================================================================

A queue is *stalled* if its first unconsumed offset has not changed for ``stall_after_ms``, and its backlog is not empty
or not known. The last three states are reported only for stalled queues. Each change causes one log line. A check costs
some comparisons for each queue, and nothing for each message.

An event loop is *blocked* if it has not called a due callback for a second: a blocking handler stops everything else. A
thread checks the loop four times a second. It takes the stack of the loop's thread (`sys._current_frames`), and logs
the innermost place and the place in the code of the program. It logs nothing while asyncio waits for sockets, or if the
thread itself was late, because then the whole process was stopped. Each loop has one such thread, from the start of its
first consumer to the end of its last consumer. Source: behaviour.md §8.6, §8.10, §8.12.
"""

from __future__ import annotations

import asyncio
import logging
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from msgspec import Struct

from rmqkit.client.consumer.assignment import AssignedQueues
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.observe.status import SAMPLE_INTERVAL_MS, QueueState, QueueStatus, utc
from rmqkit.errors import PeerRefused
from rmqkit.protocol.properties import CONSUME_START_TIME
from rmqkit.protocol.schemas.clients import MessageQueue

_log = logging.getLogger(__name__)
_FINE = frozenset((QueueState.MOVING, QueueState.CAUGHT_UP))
_SILENT = frozenset((QueueState.UNREACHABLE, QueueState.REFUSED, QueueState.WAITING_FOR_LOCK, QueueState.TAKING_OVER))
"""States in which the backlog is unknown."""
_BLOCKED = _SILENT | {QueueState.PAUSED}
_REPORTED_LATE = frozenset((QueueState.FAILING, QueueState.BUSY, QueueState.WAITING_FOR_TURN))

STILL_SECONDS = 1.0
"""The time in seconds for which a loop may be blocked before this is logged."""
_LOOKS = 4
"""The number of checks in this time."""
_LIBRARY = (
    *(f"{path}{os.sep}" for path in sys.modules[__name__.partition(".")[0]].__path__),
    f"{Path(asyncio.__file__).parent}{os.sep}",
    selectors.__file__,
)
_SAID = (
    "the event loop was blocked for %.1f s in %s: make a blocking handler a plain function, which runs in a "
    "thread, or await asyncio.to_thread(...)"
)

_watchdogs: dict[asyncio.AbstractEventLoop, LoopWatchdog] = {}


class _Seen(Struct):
    """The result of the last check of a queue. The times are monotonic."""

    position: int | None
    moved_ms: float
    state: QueueState
    since_ms: float
    reported: QueueState | None = None


class QueueWatch:
    """A watchdog for the queues of one member. ``unlocked`` returns the queues that are assigned to the member but not
    locked for it."""

    def __init__(
        self, context: ConsumerContext, held: AssignedQueues, unlocked: Callable[[], set[MessageQueue]]
    ) -> None:
        self._context = context
        self._held = held
        self._unlocked = unlocked
        self._clock = context.runtime.clock
        self._stall_after_ms = context.settings.stall_after_ms
        self._seen: dict[MessageQueue, _Seen] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(self._stall_after_ms / 2, SAMPLE_INTERVAL_MS) / 1000.0)
            self.report()
            for stats in self._held.stats.values():
                stats.sample(self._clock.monotonic_ms())

    def report(self) -> None:
        """Log every queue that has just stalled, is stalled for a new reason, or advances again."""
        for status in self.statuses():
            seen = self._seen[status.queue]
            if status.is_stalled and seen.reported is not status.state:
                seen.reported = status.state
                _log.log(
                    logging.INFO if status.state is QueueState.PAUSED else logging.WARNING,
                    "group %s: %s stands still since %s at offset %s, backlog %s: %s, %s",
                    self._context.group,
                    status.queue,
                    utc(status.since_ms),
                    status.consumed_offset,
                    "unknown" if status.backlog is None else status.backlog,
                    status.state.value,
                    status.reason,
                )
            elif seen.reported is not None and not status.is_stalled:
                seen.reported = None
                _log.info(
                    "group %s: %s moves again, at offset %s", self._context.group, status.queue, status.consumed_offset
                )

    def statuses(self) -> list[QueueStatus]:
        """Return the present state of every queue, sorted by queue."""
        missing = self._unlocked() - self._held.process_queues.keys()
        found = [self._status(queue, one) for queue, one in self._held.process_queues.items()]
        found += [self._status(queue, None) for queue in missing]
        self._seen = {one.queue: self._seen[one.queue] for one in found}
        return sorted(found, key=lambda one: one.queue)

    def _status(self, queue: MessageQueue, process_queue: ProcessQueue | None) -> QueueStatus:
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.now_ms()
        status = QueueStatus(queue=queue, state=QueueState.WAITING_FOR_LOCK)
        if process_queue is not None:
            status.consumed_offset, status.pulled_offset = process_queue.position, process_queue.next_offset
            status.max_offset = process_queue.max_offset
            status.held_messages, status.held_bytes = len(process_queue), process_queue.body_bytes
        seen = self._seen.get(queue)
        if seen is None:
            seen = self._seen[queue] = _Seen(status.consumed_offset, now_ms, QueueState.MOVING, now_ms)
        elif seen.position != status.consumed_offset:
            seen.position, seen.moved_ms = status.consumed_offset, now_ms
        blocked = self._blocked(queue, process_queue)
        if blocked is None and seen.state in _BLOCKED:
            # The queue has just been unblocked. The time before this does not count for a stall.
            seen.moved_ms = now_ms
        is_slow = now_ms - seen.moved_ms >= self._stall_after_ms
        status.state, status.reason = blocked or self._judged(status, process_queue, is_slow=is_slow)
        if status.state is QueueState.CAUGHT_UP:
            seen.moved_ms, is_slow = now_ms, False
        status.is_stalled = is_slow and status.state not in _FINE and (status.backlog != 0 or status.state in _SILENT)
        if status.state is not seen.state:
            # A state that is reported only for stalled queues began when the queue stopped advancing.
            seen.state, seen.since_ms = status.state, seen.moved_ms if status.state in _REPORTED_LATE else now_ms
        status.since_ms = wall_ms - round(now_ms - seen.since_ms)
        return status

    def _blocked(self, queue: MessageQueue, one: ProcessQueue | None) -> tuple[QueueState, str] | None:
        """Return the state and the reason if a queue must not be pulled or handled, otherwise None."""
        locks = self._context.locks
        if locks is not None and not locks.is_held(queue):
            error = locks.error_of(queue)
            if error is not None and not isinstance(error, PeerRefused):
                return QueueState.UNREACHABLE, f"its lock cannot be acquired: {error}"
            return QueueState.WAITING_FOR_LOCK, "another member of the group has it" if error is None else str(error)
        if one is None:
            return QueueState.TAKING_OVER, "its lock was just granted"
        if one.is_paused:
            return QueueState.PAUSED, "the program paused it: call resume() to continue"
        if one.is_taking_over or one.is_dropped:
            who = (
                "it is released when its handlers have finished"
                if one.is_dropped
                else "its former owner may still save"
            )
            return QueueState.TAKING_OVER, who
        if one.error is not None:
            is_refused = isinstance(one.error, PeerRefused)
            return QueueState.REFUSED if is_refused else QueueState.UNREACHABLE, str(one.error)
        return None

    def _judged(self, status: QueueStatus, one: ProcessQueue | None, *, is_slow: bool) -> tuple[QueueState, str]:
        """Return the state and the reason of a queue that is not blocked."""
        assert one is not None, "a queue that is not held is blocked"
        if not len(one):
            return QueueState.MOVING if status.backlog else QueueState.CAUGHT_UP, ""
        state, reason = self._of_message(one) if is_slow else (QueueState.MOVING, "")
        full = one.full
        if full is not None:
            return QueueState.FULL, f"{full}; {reason}" if reason else full
        return state, reason

    def _of_message(self, process_queue: ProcessQueue) -> tuple[QueueState, str]:
        message, failure = process_queue.lowest(1)[0], process_queue.failure
        name = f"message {message.msg_id} at offset {message.queue_offset}"
        if failure is not None and failure.message is message:
            error, times = failure.error, message.reconsume_times
            return QueueState.FAILING, f"the handler failed {times} times on {name}: {type(error).__name__}: {error}"
        started_ms = message.properties.get(CONSUME_START_TIME)
        if started_ms is not None:
            return QueueState.BUSY, f"the handler works on {name} since {utc(int(started_ms))}"
        return QueueState.WAITING_FOR_TURN, f"{name} waits for {self._context.consume_service.waits_for(message)}"


class LoopWatchdog:
    """A watchdog for the running loop; it ends when `stop` is called. ``users`` is the number of consumers that use
    it.
    """

    def __init__(self, still_seconds: float = STILL_SECONDS) -> None:
        self.users = 0
        self._still_seconds = still_seconds
        self._pause = still_seconds / _LOOKS
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._beaten = time.monotonic()
        self._ended = threading.Event()
        self._timer: asyncio.Handle = self._loop.call_soon(self._beat)
        self._thread = threading.Thread(target=self._run, name="rmqkit watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join(1.0)  # the thread wakes up immediately

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._timer = self._loop.call_later(self._pause, self._beat)

    def _run(self) -> None:
        reported = looked = 0.0
        while not self._ended.wait(self._pause):
            before, looked = looked, time.monotonic()
            is_late = before and looked - before > 2 * self._pause
            beaten = self._beaten
            if is_late or beaten == reported or looked - beaten < self._still_seconds + self._pause:
                continue
            frame = sys._current_frames().get(self._loop_thread)
            places = list(_places(frame))
            # Compare again: the stack may have been taken just after the loop continued.
            if beaten == self._beaten and places:
                reported = beaten
                _log.warning(_SAID, looked - beaten, ", now ".join(places))


def watch_loop() -> None:
    """Watch the running loop. Each call requires a later call of `unwatch_loop`."""
    loop = asyncio.get_running_loop()
    if loop not in _watchdogs:
        for ended in [one for one in _watchdogs if one.is_closed()]:
            _watchdogs.pop(ended).stop()
        _watchdogs[loop] = LoopWatchdog(STILL_SECONDS)
    _watchdogs[loop].users += 1


def unwatch_loop() -> None:
    """Undo one call of `watch_loop`."""
    loop = asyncio.get_running_loop()
    watchdog = _watchdogs.get(loop)
    if watchdog is None:
        return
    watchdog.users -= 1
    assert watchdog.users >= 0, "a watchdog without users has stopped"
    if not watchdog.users:
        _watchdogs.pop(loop).stop()


def _places(frame: FrameType | None) -> Iterator[str]:
    """Yield the place in the program that blocks the loop, and the innermost place. Yield nothing while the loop is
    idle."""
    innermost = frame
    while frame is not None and not _is_called_by_library(frame):
        frame = frame.f_back
    if frame is not None and innermost is not None:
        yield _place(frame)
        if innermost is not frame:
            yield _place(innermost)


def _is_called_by_library(frame: FrameType) -> bool:
    """Return True if a frame belongs to the program, and its caller belongs to asyncio or rmqkit."""
    caller = frame.f_back
    if caller is None or frame.f_code.co_filename.startswith(_LIBRARY):
        return False
    return caller.f_code.co_filename.startswith(_LIBRARY)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
