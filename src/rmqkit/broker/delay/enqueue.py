"""The timer topic is followed, and each of its messages put on the wheel (``TimerEnqueuePutService``).

=================================  ===========================================================================
a message of the timer topic       then
=================================  ===========================================================================
its second is over already         as `Late` says; a marker is dropped then
more than the roll window ahead    parked nearer; when that comes it is put into the timer topic once more
delivered by another broker         left out (`TimerState.was_delivered`)
says no time, or no topic          dropped and logged
=================================  ===========================================================================

Messages go by the chunk: the log is read in one piece where they lie close together, a chunk's units are written with
one write. Loop only. Source: store.md §18.3, §18.6; behaviour.md §9.3.
"""

from __future__ import annotations

import enum
import logging
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

from rmqkit.broker.delay.timer_state import Refused, TimerState
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.hashing import java_hash
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import find_property
from rmqkit.protocol.record import Record, record_properties
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from rmqkit.store.timer.log import DELETE, NONE, PLAIN, ROLL, Unit

__all__ = ["INTEGER", "Enqueue", "Late"]

INTEGER = re.compile(rb"[+-]?[0-9]{1,18}")
_CHUNK = 256
_DELAY_MS_MAX = (1 << 31) - 1
"""What a unit of the timer log has room for."""

_OUT_MS = property_names.TIMER_OUT_MS.encode()
_REAL_TOPIC = property_names.REAL_TOPIC.encode()
_DELETE_KEY = property_names.TIMER_DELETE_KEY.encode()
_Entry = tuple[int, int, int, int | None]

_log = logging.getLogger(__name__)


class Late(enum.Enum):
    """What becomes of a message whose second is over when it comes."""

    PUT = "put where it belongs at once: at a master"
    NEXT = "goes with the second that has begun: at a slave that acts for its master"
    KEPT = "goes on the wheel all the same, at a slave: who delivers next knows how far that is"


class Enqueue:
    """Puts messages on the wheel of a timer; ``deliver`` puts one where it belongs, or raises Refused."""

    def __init__(
        self, state: TimerState, store: MessageStore, settings: StoreSettings, deliver: Callable[[Record], None]
    ) -> None:
        self._state = state
        self._store = store
        self._window = min(settings.timer_roll_window_slots, _DELAY_MS_MAX // settings.timer_precision_ms)
        self._deliver = deliver
        self.late = Late.PUT
        self._ahead: list[tuple[int, str, Unit]] = []

    def run(self, end_offset: int | None) -> bool:
        """Deal with the next chunk of the timer topic; whether there was one. Raises Refused: its rest is to be tried
        again. ``end_offset``: how far the master is that this broker follows."""
        state = self._state
        count = _CHUNK if end_offset is None else min(_CHUNK, end_offset - state.queue_offset)
        entries = self._store.entries(TIMER_TOPIC, 0, state.queue_offset, count_max=count) if count > 0 else []
        self._ahead.clear()
        for entry, properties in zip(entries, self._properties(entries), strict=True):
            self._sort(entry, properties)
        self._add()
        if entries:
            state.queue_offset, state.is_changed = entries[-1][0], True
        return bool(entries)

    def _properties(self, entries: list[_Entry]) -> list[bytes]:
        """The properties of records; empty for one that is gone."""
        copies = self._state.copies([(at, size) for _, at, size, _ in entries]) if entries else []
        return [b"" if copy is None else record_properties(memoryview(copy)) for copy in copies]

    def _sort(self, entry: _Entry, properties: bytes) -> None:
        """Have one message put on the wheel with its chunk, or where it belongs when its second is over."""
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
        if time_ms < state.write_ms and self.late is Late.NEXT:
            time_ms = state.write_ms
        if time_ms < state.write_ms and self.late is Late.PUT:
            self._add()
            state.queue_offset = following - 1
            record = None if is_marker else state.record(physical_offset, size)
            if record is not None:
                self._deliver(record)
            state.queue_offset, state.is_changed = following, True
            return
        slot_ms = self._slot_for(time_ms)
        magic = PLAIN | (ROLL if slot_ms != time_ms else 0) | (DELETE if is_marker else 0)
        unit = Unit(NONE, magic, state.write_ms, slot_ms - state.write_ms, physical_offset, size, hashed)
        self._ahead.append((following, name, unit))

    def _add(self) -> None:
        """Put on the wheel what waits for it. Raises Refused: the disk takes no more."""
        state, ahead = self._state, self._ahead
        while ahead:
            try:
                count = state.files.add([unit for _, _, unit in ahead])
            except OSError as error:
                raise Refused(f"timer log: errno {error.errno} {error.strerror}") from error
            state.queue_offset, state.is_changed = ahead[count - 1][0], True
            added = ahead[:count]
            del ahead[:count]
            markers = Counter([name for _, name, unit in added if unit.magic & DELETE])
            plain = Counter([name for _, name, unit in added if not unit.magic & DELETE])
            if self.late is not Late.KEPT:  # a slave has its master's counts
                state.count(plain)
                state.count(markers, -1)
            state.enqueued += plain + markers

    def _slot_for(self, time_ms: int) -> int:
        """The time of the slot for a message: its own, or a nearer one."""
        state = self._state
        excess_ms = time_ms - state.write_ms - self._window * state.precision_ms
        if excess_ms < 0:
            return time_ms
        # What is left for the next stage should not be too short.
        slots = self._window // 2 if excess_ms < self._window // 3 * state.precision_ms else self._window
        return state.write_ms + slots * state.precision_ms

    def _measure(self, topic: str, time_ms: int, physical_offset: int, size: int) -> None:
        record = self._state.record(physical_offset, size)
        if record is not None:
            self._state.measure(topic, (time_ms - record.born_timestamp) // 1000)


@lru_cache(maxsize=4096)
def _named(topic: bytes) -> tuple[str, int]:
    """A topic's name and its Java hash."""
    name = topic.decode("utf-8", "replace")
    return name, java_hash(name)
