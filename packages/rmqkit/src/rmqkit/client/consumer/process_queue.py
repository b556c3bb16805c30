"""The process queue holds messages of one queue that are pulled and not yet consumed (``ProcessQueue``).

The offset of a queue may advance to the lowest message that is still here, never beyond: what is not consumed is
delivered again to whoever gets the queue next. A message that is stuck therefore holds the offset back, and after
``span_max`` offsets also the pulling.

==========  ================================================================================
state       meaning
==========  ================================================================================
held        pulled from, consumed, its offset saved
dropped     not ours any more: no handler starts, those that run may still finish and count
released    gone: what finishes now is delivered again elsewhere
==========  ================================================================================

`window` says how many messages are held ready. It starts with two for each handler, and doubles when handlers had to
wait although the broker had more: slow handlers hold little, fast ones up to ``messages_max``.

Loop only. Costs per message: one dict entry, O(log n) to find the lowest. Source: behaviour.md §8.6, §8.7.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from msgspec import Struct

from rmqkit.client.observe.status import ConsumerStats
from rmqkit.errors import RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue

NOTHING_HELD = -1
"""What `ProcessQueue.remove` returns when there is nothing to conclude an offset from."""

_NO_WINDOW = 1 << 30


class Failure(Struct):
    """The last failure of a handler on a message that is tried again here."""

    message: ReceivedMessage
    error: BaseException


@dataclass(eq=False)
class ProcessQueue:
    """One queue's messages under way; ``body_bytes`` is of all of them.
    From ``messages_max``, ``bytes_max`` or ``span_max`` offsets on there is no room. ``is_scheduled`` says that a
    worker has it in hand or soon will (ordered consumption); ``failure`` what its handler last failed on. ``pulled_ms``
    and ``consumed_ms`` are when it last was, in ms since the epoch, 0 for never; ``stats`` counts for its topic.

    The pull loop keeps here where it is: ``next_offset`` (None before the group's offset is known), ``max_offset`` as
    the last answer said, ``broker_id`` that it suggested, the ``error`` of a pull that got no answer, and
    ``is_taking_over`` while the former owner may still save its offset. ``is_begun`` is set once it knows where to
    begin, or cannot find out now."""

    is_popped: ClassVar[bool] = False
    """Whether it was popped, so that acknowledgements and no offset say how far it is."""

    queue: MessageQueue
    _: KW_ONLY
    messages_max: int
    bytes_max: int
    span_max: int
    window: int = _NO_WINDOW
    next_offset: int | None = None
    stats: ConsumerStats = field(default_factory=lambda: ConsumerStats(0.0))
    max_offset: int | None = None
    broker_id: int = 0
    error: RmqError | None = None
    failure: Failure | None = None
    body_bytes: int = 0
    pulled_ms: int = 0
    consumed_ms: int = 0
    is_taking_over: bool = False
    is_dropped: bool = False
    is_released: bool = False
    is_scheduled: bool = False

    def __post_init__(self) -> None:
        self.is_begun = asyncio.Event()
        self._is_paused = False
        self._messages: dict[int, ReceivedMessage] = {}
        self._offsets: list[int] = []  # a heap; offsets that were removed stay until they come to the top
        self._last_offset = -1
        self._handlers = 0
        self._was_limited = False  # by the window, since the last messages came
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: ReceivedMessage) -> bool:
        # By identity: the same offset may be pulled again, and an old copy's handler must not remove the new one.
        return self._messages.get(message.queue_offset) is message

    @property
    def has_room(self) -> bool:
        # Below half of the window again: else there were a pull for each message.
        most = self.window // 2 + 1 if self._was_limited else self.window
        return (
            len(self._messages) < min(most, self.messages_max)
            and self.body_bytes < self.bytes_max
            and (not self._offsets or self._last_offset - self._offsets[0] < self.span_max)
        )

    @property
    def full(self) -> str | None:
        """The limits that leave no room, as text; None when there is room."""
        held, span = len(self._messages), self._last_offset - self._offsets[0] if self._offsets else 0
        limits = (
            (held, self.messages_max, "messages held"),
            (self.body_bytes, self.bytes_max, "bytes held"),
            (span, self.span_max, "offsets from the first message held to the last"),
        )
        return ", ".join(f"{found} of at most {most} {what}" for found, most, what in limits if found >= most) or None

    @property
    def position(self) -> int | None:
        """The first offset that is not consumed here; None before it is known where to begin."""
        return self._offsets[0] if self._messages else self.next_offset

    def put(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Hold pulled messages; returns those that were not held already, which are to be consumed."""
        new = []
        self._was_limited = False
        for message in messages:
            offset = message.queue_offset
            if offset not in self._messages:
                self._messages[offset] = message
                # Maybe for the second time, while a removed one still lies in the heap: `remove` pops both.
                heapq.heappush(self._offsets, offset)
                self._last_offset = max(self._last_offset, offset)
                self.body_bytes += len(message.body)
                new.append(message)
        return new

    def remove(self, message: ReceivedMessage) -> int:
        """Remove a consumed message; returns the queue's new offset, or `NOTHING_HELD`. Behind the last message held
        this is the offset of the next pull: the broker left out what is before it."""
        if not self._messages:
            return NOTHING_HELD
        if message in self:
            del self._messages[message.queue_offset]
            self.body_bytes -= len(message.body)
            # Lazily: taking an offset out of the middle of a heap would cost O(n) for each message.
            while self._offsets and self._offsets[0] not in self._messages:
                heapq.heappop(self._offsets)
            if not self._messages and self._was_limited:
                self._was_limited = False
                self.window = min(2 * self.window, self.messages_max)
            self._changed.set()
        return self._offsets[0] if self._offsets else max(self._last_offset + 1, self.next_offset or 0)

    def lowest(self, count: int) -> list[ReceivedMessage]:
        """The messages with the lowest offsets, which hold the offset back, at most ``count``."""
        if count == 1:
            return [self._messages[self._offsets[0]]] if self._messages else []
        return [self._messages[offset] for offset in heapq.nsmallest(count, self._messages)]

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest offset held and the highest that ever was; zeros when nothing is held."""
        return (self._offsets[0], self._last_offset) if self._messages else (0, 0)

    @property
    def is_paused(self) -> bool:
        """Return True if the program paused the queue: nothing is pulled or taken in."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._changed.set()

    def drop(self) -> None:
        """Give the queue up: no handler starts any more, those that run may finish and count."""
        self.is_dropped = True
        self.is_begun.set()
        self._changed.set()

    def release(self) -> None:
        """Let nothing count any more that finishes from now on."""
        self.is_dropped = self.is_released = True
        self._changed.set()

    def handler_starts(self) -> None:
        """Count a handler that works on one of the messages until `handler_ends`."""
        self._handlers += 1

    def handler_ends(self) -> None:
        self._handlers -= 1
        assert self._handlers >= 0, "a handler ends once"
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Wait until more may be pulled or the queue is dropped."""
        while (self._is_paused or not self.has_room) and not self.is_dropped:
            self._was_limited |= len(self._messages) >= self.window
            # No await between the check and this, here and below: otherwise a change in between would be slept over.
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_resumed(self) -> None:
        """Wait until the queue is resumed or dropped."""
        while self._is_paused and not self.is_dropped:
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_handlers(self, timeout_ms: float) -> bool:
        """Wait until no handler works on a message of this queue; False when the time is over first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000.0):
                while self._handlers:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._handlers
