"""A survey of the timer topic. It finds the messages to skip when the topic is read again from its start.

================================  ===================================================================================
skipped                           recognized by
================================  ===================================================================================
an earlier stage of a long wait   a later record of the same message in the timer topic, with a TIMER_ROLL_TIMES that is
                                  greater by 1
a delivered or recalled message   with a checkpoint: time and queue offset (`TimerState.was_delivered`). Without a
                                  checkpoint: a copy with TIMER_DEQUEUE_MS in its real queue, or its marker in the timer
                                  topic
================================  ===================================================================================

The survey reads the topic in slices of a few ms. Only timed messages wait for the survey. Real topic and queue, unique
key and time identify a message. A message without a unique key is skipped only because of the checkpoint.
Use this module only on the event loop. Source: store.md §18.6.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from rmqkit.broker.delay.wheel import TimerState
from rmqkit.clock import Clock
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record, record_properties
from rmqkit.store.message_store import MessageStore

__all__ = ["Survey"]

_CHUNK = 128
_OUT_MS = property_names.TIMER_OUT_MS.encode()
_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_REAL_QUEUE_ID = property_names.REAL_QUEUE_ID.encode()
_DELETE_KEY = property_names.TIMER_DELETE_KEY.encode()
_UNIQ_KEY = property_names.UNIQ_KEY.encode()


class _Message(NamedTuple):
    """The values that identify a message in the timer topic."""

    topic: bytes
    queue_id: bytes
    key: bytes
    out_ms: bytes


class Survey:
    """One survey of the timer topic.

    Args:
        is_unset: True if no checkpoint has the time up to which messages were delivered. Then the survey reads the
            whole topic.

    Attributes:
        left_out: the queue offsets of the timer topic to skip.
        waiting: the number of messages to deliver, without recalled messages.
        oldest_ms: the earliest time for which a message may wait; None if no message waits.
    """

    def __init__(self, state: TimerState, store: MessageStore, clock: Clock, *, is_unset: bool) -> None:
        self._state = state
        self._store = store
        self._clock = clock
        self._now_ms = clock.now_ms()
        self._is_unset = is_unset
        self.left_out: set[int] = set()
        self.waiting = 0
        self.oldest_ms: int | None = None
        self._stages: defaultdict[tuple[_Message, bool, int], list[int]] = defaultdict(list)
        self._due: defaultdict[_Message, list[int]] = defaultdict(list)
        self._recalled: set[_Message] = set()
        self._early: list[tuple[int, int]] = []
        # Read only messages that were stored before the survey: later messages are not delivered yet.
        self._end = store.max_offset(TIMER_TOPIC, 0)
        self._steps = self._run()

    def run(self, until_ms: float) -> bool:
        """Continue until a time. Return True if there is more to do."""
        return any(self._clock.monotonic_ms() >= until_ms for _ in self._steps)

    def _run(self) -> Iterator[None]:
        begin = 0 if self._is_unset else self._state.queue_offset
        offset = max(begin, self._store.min_offset(TIMER_TOPIC, 0))
        while offset < self._end:
            entries = self._store.entries(TIMER_TOPIC, 0, offset, count_max=min(_CHUNK, self._end - offset))
            if not entries:
                break
            copies = self._state.copies([(at, size) for _, at, size, _ in entries])
            for (_, at, _, _), copy in zip(entries, copies, strict=True):
                record = self._state.decoded(copy, at)
                if record is not None:
                    self._note(record)
            assert entries[-1][0] > offset, "each read moves the offset forward"
            offset = entries[-1][0]
            yield
        if self._is_unset:
            yield from self._look_for_delivered()
        self.oldest_ms = min([ms for ms, number in self._early if number not in self.left_out], default=None)

    def _note(self, record: Record) -> None:
        properties, number = record.properties, record.queue_offset
        out_ms, topic = find_property(properties, _OUT_MS), find_property(properties, _REAL_TOPIC)
        key, queue_id = find_property(properties, _UNIQ_KEY), find_property(properties, _REAL_QUEUE_ID)
        if out_ms is None or topic is None or queue_id is None or not out_ms.isdigit():
            return
        state, time_ms = self._state, int(out_ms)
        if state.was_delivered(state.floor(time_ms), number):
            return
        deleted = find_property(properties, _DELETE_KEY)
        may_roll = time_ms - record.store_timestamp >= state.window_ms // 2
        if self._is_unset and time_ms <= self._now_ms:
            self._early.append((time_ms, number))
        elif self._is_unset and may_roll:
            self._early.append((record.store_timestamp, number))
        self.waiting += 1 if deleted is None else -1
        if key is None:
            return
        message = _Message(topic, queue_id, key, out_ms)
        rolls = find_property(properties, b"TIMER_ROLL_TIMES") or b"0"
        stage = int(rolls) if rolls.isdigit() else 0
        # Skip one earlier stage per record: a producer that retried may have stored two messages with the same key, and
        # both have to be delivered.
        earlier = self._stages.get((message, deleted is not None, stage - 1)) if stage else None
        if earlier:
            self._leave_out(earlier.pop(), is_marker=deleted is not None)
        if may_roll or stage:
            self._stages[message, deleted is not None, stage].append(number)
        if self._is_unset and time_ms <= self._now_ms:
            if deleted is None:
                self._due[message].append(number)
            else:
                self._recalled.add(_Message(topic, b"", deleted.removeprefix(topic + b"+"), out_ms))

    def _leave_out(self, number: int, *, is_marker: bool = False) -> None:
        self.left_out.add(number)
        self.waiting += 1 if is_marker else -1

    def _look_for_delivered(self) -> Iterator[None]:
        """Skip overdue messages that are already in their real queue."""
        queues: defaultdict[tuple[bytes, bytes], int] = defaultdict(lambda: self._now_ms)
        for message, numbers in self._due.items():
            if message._replace(queue_id=b"") in self._recalled:  # a marker is valid only for its own topic
                for number in set(numbers) - self.left_out:
                    self._leave_out(number)
            at = message.topic, message.queue_id
            # Read from the time of the earliest message: no message was delivered before its time.
            queues[at] = min(queues[at], int(message.out_ms))
        for (topic, queue_id), from_ms in queues.items():
            if queue_id.isdigit():
                yield from self._look_into(topic, queue_id, from_ms)

    def _look_into(self, topic: bytes, queue_id: bytes, from_ms: int) -> Iterator[None]:
        name, number = topic.decode("utf-8", "replace"), int(queue_id)
        offset = max(self._store.offset_by_time(name, number, from_ms), self._store.min_offset(name, number))
        while entries := self._store.entries(name, number, offset, count_max=_CHUNK):
            copies = self._state.copies([(at, size) for _, at, size, _ in entries])
            for copy in copies:
                properties = b"" if copy is None else record_properties(memoryview(copy))
                if b"TIMER_DEQUEUE_MS\x01" in properties:
                    key, out_ms = find_property(properties, _UNIQ_KEY), find_property(properties, _OUT_MS)
                    waiting = self._due.get(_Message(topic, queue_id, key or b"", out_ms or b""))
                    if waiting:
                        delivered = waiting.pop()
                        if delivered not in self.left_out:
                            self._leave_out(delivered)
            offset = entries[-1][0]
            yield
