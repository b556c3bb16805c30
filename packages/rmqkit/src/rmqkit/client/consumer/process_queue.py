"""The process queue: the messages of a queue that are pulled and not yet consumed (``ProcessQueue``).

The offset of a queue can advance to the lowest message in the process queue, but not beyond it: unconsumed messages are
delivered again to the next owner of the queue. Therefore a message that is not consumed holds the offset back, and
after ``span_max`` offsets it also stops the pulls.

==========  ================================================================================
state       meaning
==========  ================================================================================
held        pulled, consumed, its offset saved
dropped     no longer owned: no handler starts, running handlers may still finish and advance the offset
released    gone: messages that are handled now are delivered again elsewhere
==========  ================================================================================

`window` is the number of messages to hold. It starts with two for each handler. It doubles if handlers had to wait
although the broker had more messages. With slow handlers, few messages are held; with fast handlers, up to
``messages_max``.

Use this module only on the event loop. Cost per message: one dict entry, O(log n) to find the lowest.
Source: behaviour.md §8.6, §8.7.
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
"""The result of `ProcessQueue.remove` if no offset can be derived."""

_NO_WINDOW = 1 << 30


class Failure(Struct):
    """The last failure of a handler. This client will call the handler again with the same message."""

    message: ReceivedMessage
    error: BaseException


@dataclass(eq=False)
class ProcessQueue:
    """The held messages of one queue. ``body_bytes`` is the total size of their bodies.
    The queue is full at ``messages_max``, ``bytes_max`` or a span of ``span_max`` offsets. ``is_scheduled`` is True if
    a worker has the queue or will get it (ordered consumption). ``failure`` is the last failure of its handler.
    ``pulled_ms`` and ``consumed_ms`` are the times of the last pull and of the last handler call, in ms since the
    epoch; 0 means never. ``stats`` are the counters of its topic.

    The pull loop stores its state here: ``next_offset`` (None before the group's offset is known), ``max_offset`` and
    ``broker_id`` of the last response, the ``error`` of a failed pull, and ``is_taking_over``, which is True while the
    former owner may still save its offset. ``is_begun`` is set when the start offset is known, or when the first
    attempt to find it has failed."""

    is_popped: ClassVar[bool] = False
    """True if the queue is popped. Then acknowledgements determine its progress, and not an offset."""

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
        self._offsets: list[int] = []  # a heap; removed offsets stay until they reach the top
        self._last_offset = -1
        self._handlers = 0
        self._was_limited = False  # True if the window stopped a pull since the last messages arrived
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, message: ReceivedMessage) -> bool:
        # Compare by identity: the same offset may be pulled again, and the handler of an old copy must not remove the
        # new copy.
        return self._messages.get(message.queue_offset) is message

    @property
    def has_room(self) -> bool:
        # Wait until half of the window is free. Otherwise there would be a pull for each message.
        most = self.window // 2 + 1 if self._was_limited else self.window
        return (
            len(self._messages) < min(most, self.messages_max)
            and self.body_bytes < self.bytes_max
            and (not self._offsets or self._last_offset - self._offsets[0] < self.span_max)
        )

    @property
    def full(self) -> str | None:
        """The limits that are reached, as text; None if the queue is not full."""
        held, span = len(self._messages), self._last_offset - self._offsets[0] if self._offsets else 0
        limits = (
            (held, self.messages_max, "messages held"),
            (self.body_bytes, self.bytes_max, "bytes held"),
            (span, self.span_max, "offsets from the first message held to the last"),
        )
        return ", ".join(f"{found} of at most {most} {what}" for found, most, what in limits if found >= most) or None

    @property
    def position(self) -> int | None:
        """The first offset that is not consumed here; None if the start offset is not known yet."""
        return self._offsets[0] if self._messages else self.next_offset

    def put(self, messages: Iterable[ReceivedMessage]) -> list[ReceivedMessage]:
        """Add pulled messages. Return the messages that were not held before and must be consumed."""
        new = []
        self._was_limited = False
        for message in messages:
            offset = message.queue_offset
            if offset not in self._messages:
                self._messages[offset] = message
                # The heap may have the offset of a removed message twice: `remove` pops both.
                heapq.heappush(self._offsets, offset)
                self._last_offset = max(self._last_offset, offset)
                self.body_bytes += len(message.body)
                new.append(message)
        return new

    def remove(self, message: ReceivedMessage) -> int:
        """Remove a consumed message. Return the queue's new offset, or `NOTHING_HELD`.

        After the last held message, the new offset is the offset of the next pull: all messages before it are consumed
        or do not match the subscription.
        """
        if not self._messages:
            return NOTHING_HELD
        if message in self:
            del self._messages[message.queue_offset]
            self.body_bytes -= len(message.body)
            # Remove offsets lazily: removal from the middle of a heap would cost O(n) for each message.
            while self._offsets and self._offsets[0] not in self._messages:
                heapq.heappop(self._offsets)
            if not self._messages and self._was_limited:
                self._was_limited = False
                self.window = min(2 * self.window, self.messages_max)
            self._changed.set()
        return self._offsets[0] if self._offsets else max(self._last_offset + 1, self.next_offset or 0)

    def lowest(self, count: int) -> list[ReceivedMessage]:
        """Return at most ``count`` messages with the lowest offsets, which hold the queue's offset back."""
        if count == 1:
            return [self._messages[self._offsets[0]]] if self._messages else []
        return [self._messages[offset] for offset in heapq.nsmallest(count, self._messages)]

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest held offset and the greatest offset so far; zeros if no message is held."""
        return (self._offsets[0], self._last_offset) if self._messages else (0, 0)

    @property
    def is_paused(self) -> bool:
        """Return True if the program paused the queue: it is not pulled, and no pulled messages are added."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._changed.set()

    def drop(self) -> None:
        """Give the queue up. No handler starts; running handlers may finish and advance the offset."""
        self.is_dropped = True
        self.is_begun.set()
        self._changed.set()

    def release(self) -> None:
        """Ignore the results of all handlers from now on."""
        self.is_dropped = self.is_released = True
        self._changed.set()

    def handler_starts(self) -> None:
        """Count a handler that works on a message until `handler_ends`."""
        self._handlers += 1

    def handler_ends(self) -> None:
        self._handlers -= 1
        assert self._handlers >= 0, "every end of a handler has a start"
        self._changed.set()

    async def wait_for_room(self) -> None:
        """Wait until the queue is dropped, or is neither full nor paused."""
        while (self._is_paused or not self.has_room) and not self.is_dropped:
            self._was_limited |= len(self._messages) >= self.window
            # There must be no await between check and clear, here and below. Otherwise a change in between would be
            # missed.
            self._changed.clear()
            await self._changed.wait()

    async def wait_until_resumed(self) -> None:
        """Wait until the queue is resumed or dropped."""
        while self._is_paused and not self.is_dropped:
            self._changed.clear()
            await self._changed.wait()

    async def wait_for_handlers(self, timeout_ms: float) -> bool:
        """Wait until no handler works on a message of this queue. Return False after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000.0):
                while self._handlers:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._handlers
