"""Delivery of the due messages on the wheel (``TimerDequeueGetService``, ``TimerDequeuePutMessageService``).

The broker reads the chain of a second from its last unit to its first. Then it stores the messages in batches, oldest
first.

=================================  ===========================================================================
due message                        action
=================================  ===========================================================================
a message                          stored in REAL_TOPIC-REAL_QID, with TIMER_ENQUEUE_MS and TIMER_DEQUEUE_MS
a message that was rolled          stored in the timer topic again, with TIMER_ROLL_TIMES. An acting master cannot store
                                   messages: it sends the message to its topic at another broker for the same time
with TIMER_DEL_UNIQKEY (a marker)  cancels one message of the same second with this unique key (RECALL_MESSAGE)
delivered by another broker        skipped (`TimerState.was_delivered`)
a unit or its record is missing    timer log and wheel are rebuilt from the timer topic, once for each second
no room for the new properties     stored without the properties of the timer that are no longer needed
the store refuses the message      retried without limit (the reference gives up after three attempts)
can never be stored                sent to the dead letters (`Destination.put`)
=================================  ===========================================================================

Use this module only on the event loop. Source: store.md §18.6; behaviour.md §9.3, §10.5.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from rmqkit.broker.delay.destination import Destination
from rmqkit.broker.delay.wheel import Broken, TimerState
from rmqkit.broker.messages import TIMER_NAMES, message_from
from rmqkit.clock import Clock
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import find_property, in_stored_order, java_hash
from rmqkit.protocol.record import Record
from rmqkit.store.message_store import InnerMessage, MessageStore
from rmqkit.store.timer.log import NONE, ROLL, Unit

__all__ = ["Dequeue"]

_AT_ONCE = (1 << 63) - 1
"""The value of TIMER_ENQUEUE_MS in a message that never was on the wheel."""

_RUN = 128
_SLOTS_PER_LOOK = 256
_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_DELETE_KEY = property_names.TIMER_DELETE_KEY.encode()
_UNIQ_KEY = property_names.UNIQ_KEY.encode()
_ROLL_TIMES = b"TIMER_ROLL_TIMES"
_has_new_name = re.compile(rb"TIMER_(?:EN|DE)QUEUE_MS\x01|" + re.escape(property_names.PROPERTY_CRC.encode())).search

_NOT_NEEDED = (
    *TIMER_NAMES,
    property_names.REAL_TOPIC,
    property_names.REAL_QUEUE_ID,
    "TIMER_ENQUEUE_MS",
    "TIMER_ROLL_TIMES",
)
"""Properties that a delivered message does not need."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Due:
    """The slot that is being delivered.

    Attributes:
        next_unit: the position of the next unit of its chain to read.
        positions: the positions of its messages, newest first. Delivered messages are removed from the end.
        done: the positions of the delivered messages.
        deleted: the topic, a ``+`` and the unique key of each recalled message.
        markers: the number of markers by topic hash. Each marker was subtracted from its topic's count on arrival.
    """

    time_ms: int
    next_unit: int
    positions: array[int] = field(default_factory=lambda: array("q"))
    done: array[int] = field(default_factory=lambda: array("q"))
    deleted: set[bytes] = field(default_factory=set)
    markers: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class _Ready:
    """A due message to put. ``topic``: its real topic, for the counts. ``is_roll``: True if it goes to the timer topic
    again."""

    message: InnerMessage
    topic: str
    is_roll: bool


class Dequeue:
    """The delivery of the due messages of a timer."""

    def __init__(self, state: TimerState, store: MessageStore, clock: Clock, destination: Destination) -> None:
        self._state = state
        self._store = store
        self._clock = clock
        self._destination = destination
        self._due: _Due | None = None
        self._changed: set[int] = set()

    def begin(self) -> None:
        """Forget the second that is being delivered, so that the next step reads it again."""
        self._due = None

    @property
    def delivered(self) -> Sequence[int]:
        """The positions of the units of the current second that were delivered."""
        return self._due.done if self._due is not None else ()

    async def run(self, until_ms: float) -> bool:
        """Deliver messages until a time. Return True if there are more.
        Raises Refused: a message has to be retried.
        Raises Broken: a unit or its record is missing. Rebuilding timer log and wheel loses no message."""
        while (due := self._next(until_ms)) is not None:
            if due:
                handed = await self._destination.put([None if one is None else one.message for one in due])
                # Messages after the first refused message are delivered again, even if another broker stored them.
                if passed := handed.passed:
                    self._done(due[:passed])
                if handed.failure is not None:
                    raise handed.failure
            if self._clock.monotonic_ms() >= until_ms:
                return True
        return False

    def deliver_at_once(self, record: Record) -> None:
        """Store a message that became due before it was put on the wheel. Raises Refused: the message has to be
        retried."""
        ready = None if self._is_changed(record) else self._ready(record, _AT_ONCE, is_roll=False)
        self._changed.discard(record.physical_offset)
        if ready is not None:
            if (failure := self._destination.put_here([ready.message]).failure) is not None:
                raise failure
            self._state.dequeued[ready.topic] += 1

    # ---- finding

    def _next(self, until_ms: float) -> list[_Ready | None] | None:
        """Return the next messages of one second. A None in the list is in the place of a message that is not
        delivered. Return an empty list when the time is up, and None when all past seconds were delivered."""
        state, looks = self._state, 0
        while (due := self._due) is None:
            if state.read_ms >= state.write_ms:
                return None
            slot = state.files.wheel.slot(state.read_ms)
            if slot is not None:
                self._due = _Due(state.read_ms, slot.last)
                continue
            state.pass_second()
            looks += 1
            if looks % _SLOTS_PER_LOOK == 0 and self._clock.monotonic_ms() >= until_ms:
                return []
        if not self._walk(due, until_ms):
            return []
        if not due.positions:
            self._end_second()
            return []
        return self._found(due, due.positions[: -_RUN - 1 : -1])

    def _walk(self, due: _Due, until_ms: float) -> bool:
        """Read a slot's chain. Return True if the end of the chain was reached."""
        log, count = self._state.files.log, 0
        while due.next_unit != NONE:
            unit = log.unit(due.next_unit)
            # A chain that leads forward, or into another second, is damaged and might never end.
            if unit is None or unit.time_ms != due.time_ms or unit.previous >= due.next_unit:
                if due.next_unit >= log.queue.min_offset:
                    self._miss(due, f"no unit for {due.time_ms} at {due.next_unit}, its chain ends")
                due.next_unit = NONE
                break
            if not unit.is_delete or not self._delete(due, unit):
                assert not due.positions or due.next_unit < due.positions[-1], "the positions of a chain descend"
                due.positions.append(due.next_unit)
            due.next_unit = unit.previous
            count += 1
            if count % _RUN == 0 and self._clock.monotonic_ms() >= until_ms:
                return due.next_unit == NONE
        return True

    def _miss(self, due: _Due, what: str) -> None:
        """Log missing data, which a rebuild did not find. Raises Broken: there was no rebuild for this second yet."""
        if self._state.may_rebuild(due.time_ms):
            raise Broken(what)
        _log.error("timed messages are skipped: %s", what)

    def _delete(self, due: _Due, unit: Unit) -> bool:
        """Record which message a marker deletes. Return False if the unit's record is a message, not a marker."""
        # Check the record, too: a wrong bit in the unit must not drop a message.
        record = self._state.record(unit.physical_offset, unit.size)
        key = None if record is None else find_property(record.properties, _DELETE_KEY)
        if record is not None and key is None:
            return False
        due.markers[unit.topic_hash] += 1
        if record is not None and key is not None:
            due.deleted.add(_deleted_name(record, key))
        return True

    def _found(self, due: _Due, positions: Sequence[int]) -> list[_Ready | None]:
        """Return the message to put for each unit. Read the records in one piece where possible."""
        state = self._state
        units = [self._unit(due, position) for position in positions]
        copies = state.copies([(-1, 0) if unit is None else (unit.physical_offset, unit.size) for unit in units])
        return [
            None if unit is None else self._at(due, unit, state.decoded(copy, unit.physical_offset))
            for unit, copy in zip(units, copies, strict=True)
        ]

    def _unit(self, due: _Due, position: int) -> Unit | None:
        """Return a unit of the chain again. Return None if it was deleted or damaged since the chain was read."""
        log = self._state.files.log
        unit = log.unit(position)
        if unit is not None and unit.time_ms == due.time_ms:
            return unit
        if position >= log.queue.min_offset:
            self._miss(due, f"no unit for {due.time_ms} at {position} any more")
        return None

    def _at(self, due: _Due, unit: Unit, record: Record | None) -> _Ready | None:
        """Return the message to put for a unit, or None if no message has to be put."""
        if record is None:
            if unit.physical_offset >= self._store.min_physical_offset:
                where = f"{unit.size} bytes at {unit.physical_offset}"
                self._miss(due, f"the commit log has no timed message of {where}")
            return None
        if self._is_deleted(due, record) or record.queue_offset in self._state.left_out:
            return None
        if self._state.was_delivered(due.time_ms, record.queue_offset) or self._is_changed(record):
            return None
        is_roll = bool(unit.magic & ROLL)
        if is_roll and self._destination.is_remote:
            return self._sent_again(record)
        ready = self._ready(record, unit.write_ms, is_roll=is_roll)
        if ready is not None and _hash_of(ready.topic) != unit.topic_hash:
            _log.warning(
                "timed message at %d is for %s, but its unit in the timer log is for another topic: one was changed",
                *(record.physical_offset, ready.topic),
            )
        return ready

    def _is_changed(self, record: Record) -> bool:
        """Return True if a body does not match its CRC. Such a message is not copied, because the copy would get a new
        CRC. Log the message once."""
        if record.has_sound_body or not self._store.checks_bodies:
            return False
        if record.physical_offset not in self._changed:
            self._changed.add(record.physical_offset)
            _log.error(
                "timed message at %d for %s is not delivered: its body does not match its CRC, %08x",
                *(record.physical_offset, find_property(record.properties, _REAL_TOPIC), record.body_crc),
            )
        return True

    def _is_deleted(self, due: _Due, record: Record) -> bool:
        if not due.deleted:
            return False
        key = find_property(record.properties, _UNIQ_KEY)
        return key is not None and _deleted_name(record, key) in due.deleted

    # ---- messages to put

    def _ready(self, record: Record, enqueued_ms: int, *, is_roll: bool) -> _Ready | None:
        """Return the message to put into its real topic, or into the timer topic again. Return None if it has no real
        topic."""
        place = self._destination.place_of(record)
        if place is None:
            return None
        enqueued, dequeued = str(enqueued_ms), str(self._clock.now_ms())
        # REAL_TOPIC, REAL_QID and TIMER_OUT_MS stay in the copy, as in the reference. A survey recognizes delivered
        # messages by TIMER_OUT_MS and TIMER_DEQUEUE_MS.
        changes: dict[str, str | None] = {"TIMER_ENQUEUE_MS": enqueued, "TIMER_DEQUEUE_MS": dequeued}
        if is_roll:
            times = find_property(record.properties, _ROLL_TIMES) or b"0"
            changes["TIMER_ROLL_TIMES"] = str(int(times) + 1 if times.isdigit() else 1)
            message = message_from(record, topic=TIMER_TOPIC, queue_id=0, changes=changes)
            if len(message.properties) > self._store.properties_bytes_max:
                # Drop the properties that requested the time, which is in TIMER_OUT_MS now. They take more bytes than
                # TIMER_ROLL_TIMES.
                changes = {"TIMER_ROLL_TIMES": changes["TIMER_ROLL_TIMES"], **dict.fromkeys(TIMER_NAMES)}
                message = message_from(record, topic=TIMER_TOPIC, queue_id=0, changes=changes)
        # Replace properties that a rolled message has already. Drop the CRC of the old properties.
        elif _has_new_name(record.properties) or not record.properties.endswith(b"\x02"):
            message = message_from(record, topic=place[0], queue_id=place[1], changes=changes)
        else:  # the same result, at a third of the cost
            message = message_from(record, topic=place[0], queue_id=place[1])
            added = f"TIMER_ENQUEUE_MS\x01{enqueued}\x02TIMER_DEQUEUE_MS\x01{dequeued}\x02"
            message.string = in_stored_order(record.properties + added.encode())
        if not is_roll and len(message.properties) > self._store.properties_bytes_max:
            # A survey needs TIMER_DEQUEUE_MS (31 bytes). The dropped properties have at least 41 bytes.
            changes = {**dict.fromkeys(_NOT_NEEDED), "TIMER_DEQUEUE_MS": dequeued}
            message = message_from(record, topic=place[0], queue_id=place[1], changes=changes)
        return _Ready(message, place[0], is_roll)

    def _sent_again(self, record: Record) -> _Ready | None:
        """Return a message that is not due yet in the form in which a producer sends it, with the same second."""
        place, time = self._destination.place_of(record), find_property(record.properties, b"TIMER_OUT_MS")
        if place is None or time is None:
            return None
        changes: dict[str, str | None] = dict.fromkeys((*TIMER_NAMES, property_names.TIMER_OUT_MS))
        # Add one slot: the other broker subtracts 1 ms and rounds down, which leads to the same second.
        changes[property_names.TIMER_DELIVER_MS] = str(int(time) + self._state.precision_ms)
        return _Ready(message_from(record, topic=place[0], queue_id=place[1], changes=changes), place[0], is_roll=True)

    # ---- after delivery

    def _done(self, group: list[_Ready | None]) -> None:
        """Remove the oldest messages of the current second after their delivery."""
        due = self._due
        assert due is not None, "a second is being delivered"
        taken = zip(group, due.positions[: -len(group) - 1 : -1], strict=True)
        gone = Counter(filter(None, [self._left_out(due, position) for ready, position in taken if ready is None]))
        if gone:
            self._state.count_gone(gone - due.markers)
            due.markers -= gone
        due.done.extend(due.positions[-len(group) :])
        # The messages were put before this line: refused messages stay in the list and are put again.
        del due.positions[-len(group) :]
        topics = Counter([one.topic for one in group if one is not None])
        self._state.dequeued.update(topics)
        self._state.count(topics, -1)
        if not due.positions:
            self._end_second()

    def _left_out(self, due: _Due, position: int) -> int | None:
        """Return the topic hash of a unit if its record is deleted or damaged, or was delivered before but is counted.
        Otherwise return None."""
        state = self._state
        unit = state.files.log.unit(position)
        is_left_out = unit is not None and (
            unit.physical_offset < self._store.min_physical_offset or unit.physical_offset in self._changed
        )
        if unit is not None:
            self._changed.discard(unit.physical_offset)
        if unit is not None and state.counts_delivered and not is_left_out:
            record = state.record(unit.physical_offset, unit.size)
            is_left_out = record is not None and state.was_delivered(due.time_ms, record.queue_offset)
        return unit.topic_hash if unit is not None and is_left_out else None

    def _end_second(self) -> None:
        due, self._due = self._due, None
        assert due is not None, "a second is being delivered"
        assert not due.positions, "all messages of the second are delivered"
        self._state.end_second(due.time_ms)


def _deleted_name(record: Record, key: bytes) -> bytes:
    """Return topic and unique key. Both are the same in a marker and in its message.

    A marker has the key alone, or its own topic and the key. A marker never matches a message of another topic, because
    its sender may have no permission for the other topic.
    """
    topic = (find_property(record.properties, _REAL_TOPIC) or b"") + b"+"
    return topic + key.removeprefix(topic)


@lru_cache(maxsize=4096)
def _hash_of(topic: str) -> int:
    return java_hash(topic)
