"""What of POP is pending in memory: check points by the moment at which their messages come again.

Moments are slots of `_SLOT_MS`, in a heap; most check points leave their slot long before, as they are acknowledged.
Loop only. Source: behaviour.md §4.12.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from msgspec import Struct

from rmqkit.clock import Clock
from rmqkit.store.message_store import PutMessage

__all__ = ["AckKey", "ExpiryWheel", "InFlightPop", "NewCheckPoint", "QueueKey"]

_SLOT_MS = 100

AckKey = tuple[str, str, int, int, int]
"""What acks name a pop by: topic, group, queue id, start offset, pop time."""

QueueKey = tuple[str, str, int]
"""Topic, group and queue id."""


class InFlightPop(Struct, eq=False):
    """Messages of one pop of one queue that are not all acknowledged.

    Attributes:
        key: what acks name it by.
        left: their queue offsets.
        due_ms: when they come again, ms since the epoch.
        revive_offset: of its check point in the revive queue, -1 until it is stored.
        unwritten: acknowledged, but no record says so yet.
    """

    key: AckKey
    queue_key: QueueKey
    left: set[int]
    due_ms: int
    revive_queue_id: int
    revive_offset: int
    unwritten: list[int] = []

    @property
    def topic(self) -> str:
        return self.key[0]

    @property
    def group(self) -> str:
        return self.key[1]

    @property
    def queue_id(self) -> int:
        return self.key[2]

    @property
    def pop_time(self) -> int:
        return self.key[4]


class NewCheckPoint(Struct):
    """A check point that is to be stored, and the group's offset before and behind what was popped."""

    pending: InFlightPop
    message: PutMessage
    before: int
    after: int


class ExpiryWheel:
    """InFlightPop check points by when they are due."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._slots: dict[int, dict[InFlightPop, None]] = {}
        self._numbers: list[int] = []

    def due(self) -> Iterator[InFlightPop]:
        """The check points whose time has come, each until it leaves or is postponed.
        What is neither comes up again a moment later, behind the others."""
        end, numbers = self._clock.now_ms() // _SLOT_MS, self._numbers
        while numbers and numbers[0] < end:
            slot = self._slots[numbers[0]]
            if slot:
                pending = next(iter(slot))
                self.postpone(pending, _SLOT_MS)
                yield pending
            else:
                del self._slots[heapq.heappop(numbers)]

    def late(self) -> Iterator[tuple[InFlightPop, int]]:
        """The check points whose time is over, and by how many ms."""
        now_ms = self._clock.now_ms()
        for slot in [slot for number, slot in self._slots.items() if number * _SLOT_MS <= now_ms]:
            yield from ((pending, now_ms - pending.due_ms) for pending in slot if pending.due_ms < now_ms)

    def postpone(self, pending: InFlightPop, ms: int) -> None:
        """Have a check point come up later, also where the clock was set back."""
        self.leave(pending)
        pending.due_ms = max(pending.due_ms, self._clock.now_ms()) + ms
        self.enter(pending)

    def enter(self, pending: InFlightPop) -> None:
        """Have a check point come up when it is due."""
        number = pending.due_ms // _SLOT_MS
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = {}
            heapq.heappush(self._numbers, number)
        slot[pending] = None

    def leave(self, pending: InFlightPop) -> None:
        """Forget a check point."""
        slot = self._slots.get(pending.due_ms // _SLOT_MS)
        if slot is not None:
            slot.pop(pending, None)
