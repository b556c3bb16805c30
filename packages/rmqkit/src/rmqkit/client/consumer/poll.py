"""The poll buffer: pulled messages that wait for the next poll of the program (``DefaultLitePullConsumer.poll``).

Returned messages count as consumed only when the program polls again, commits or closes. If the program fails before
that, the messages are delivered again. Use this module only on the event loop. Source: behaviour.md §8.14.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rmqkit.client.consumer.offsets import OffsetStore
from rmqkit.client.consumer.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.errors import ClientError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import ConsumeMessageDirectlyResult, MessageQueue

_Item = tuple[ProcessQueue, ReceivedMessage]


class PollBuffer:
    """A buffer of pulled messages that also stores the program's position in each queue.
    With ``auto_commit``, a new position is passed to the offset store immediately. Otherwise the caller saves the
    result of `positions`."""

    def __init__(self, offsets: OffsetStore, *, auto_commit: bool) -> None:
        self._offsets = offsets
        self._auto_commit = auto_commit
        self._ready: deque[tuple[ProcessQueue, list[ReceivedMessage]]] = deque()
        self._given: list[tuple[ProcessQueue, list[ReceivedMessage]]] = []
        self._positions: dict[ProcessQueue, int] = {}
        self._sought: dict[MessageQueue, int] = {}
        self._arrived = asyncio.Event()
        self._is_closed = False

    async def poll(self, timeout_ms: float | None, count_max: int | None) -> list[ReceivedMessage]:
        """Return the next messages, all of one queue. The messages of the previous call count as consumed.

        Return an empty list after the timeout.
        """
        self.settle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000.0):
                while not self._is_closed:
                    if (given := self._next(count_max)) is not None:
                        self._given.append(given)
                        return list(given[1])
                    self._arrived.clear()  # no await since the check: no arrival is missed
                    await self._arrived.wait()
        return []

    async def next(self) -> _Item | None:
        """Wait for one message. The caller passes it to `consumed`. Return None when the buffer is closed."""
        while not self._is_closed:
            if (given := self._next(1)) is not None:
                return given[0], given[1][0]
            self._arrived.clear()
            await self._arrived.wait()
        return None

    def consumed(self, process_queue: ProcessQueue, *messages: ReceivedMessage) -> None:
        """Remove consumed messages and advance the position of their queue."""
        offset = NOTHING_HELD
        for message in messages:
            offset = process_queue.remove(message)
        if offset != NOTHING_HELD:
            self.advance_to(process_queue, offset)

    def settle(self) -> None:
        """Mark returned messages as consumed."""
        given, self._given = self._given, []
        for process_queue, messages in given:
            self.consumed(process_queue, *messages)

    def abandon(self) -> None:
        """Leave returned messages unconsumed, so that they are delivered again."""
        self._given.clear()

    def seek(self, queue: MessageQueue, process_queue: ProcessQueue | None, offset: int) -> None:
        """Set the position of a queue. ``process_queue`` is the restarted queue, or None if this member does not own it
        yet.
        """
        # Messages returned before the seek must not change the position when the next poll marks them as consumed.
        self._given = [one for one in self._given if one[0].queue != queue]
        if process_queue is None:
            self._sought[queue] = offset
        else:
            self._sought.pop(queue, None)
            self._positions[process_queue] = offset
        if self._auto_commit:
            self._offsets.set_to(queue, offset)

    def positions(self) -> dict[MessageQueue, int]:
        """Return the positions of owned queues from which the program got messages, and the positions set by seeks."""
        self._positions = {one: offset for one, offset in self._positions.items() if not one.is_released}
        return self._sought | {one.queue: offset for one, offset in self._positions.items()}

    def close(self) -> None:
        """Return no more messages, and wake waiting callers."""
        self._is_closed = True
        self._arrived.set()

    # -- called by the pull loops

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        if messages:
            self._ready.append((process_queue, messages))
            self._arrived.set()

    def drop_stale(self) -> None:
        self._ready = deque(one for one in self._ready if not one[0].is_dropped)

    def advance_to(self, process_queue: ProcessQueue, offset: int) -> None:
        if not process_queue.is_released:
            # Each process queue has its own position: messages of the queue before a seek must not change the position
            # of the queue after the seek.
            assert offset >= self._positions.get(process_queue, offset), "a position only rises, except by a seek"
            self._positions[process_queue] = offset
            self._sought.pop(process_queue.queue, None)
            if self._auto_commit:
                self._offsets.set_to(process_queue.queue, offset)

    async def unreadable(self, message: ReceivedMessage) -> None:
        """Skip a message because its body cannot be unpacked. The pull loop has logged it."""

    def waits_for(self, message: ReceivedMessage) -> str:
        return "the program to poll or iterate further"

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Refuse the message. Raises ClientError: always, because there is no handler."""
        raise ClientError(f"message {message.msg_id} has no handler: this consumer polls")

    def _next(self, count_max: int | None) -> tuple[ProcessQueue, list[ReceivedMessage]] | None:
        while self._ready:
            process_queue, messages = self._ready.popleft()
            if process_queue.is_dropped:
                continue
            if count_max is not None and len(messages) > count_max:
                self._ready.appendleft((process_queue, messages[count_max:]))
                messages = messages[:count_max]
            return process_queue, messages
        return None


class StreamSource(Protocol):
    """The source of the messages of a `MessageStream`."""

    async def next(self) -> _Item | None:
        """Wait for the next message. Return None if there are no more messages."""
        ...

    def consumed(self, process_queue: ProcessQueue, *messages: ReceivedMessage) -> None:
        """Mark messages as consumed."""
        ...


class MessageStream:
    """The messages of a consumer, one after the other; see `PushConsumer.messages` and `PullConsumer.messages`."""

    def __init__(self, source: StreamSource, on_given: Callable[[ReceivedMessage], None]) -> None:
        self._source = source
        self._on_given = on_given
        self._given: tuple[ProcessQueue, ReceivedMessage] | None = None

    def __aiter__(self) -> MessageStream:
        return self

    async def __anext__(self) -> ReceivedMessage:
        self.settle()
        self._given = await self._source.next()
        if self._given is None:
            raise StopAsyncIteration
        self._on_given(self._given[1])
        return self._given[1]

    def settle(self) -> None:
        """Mark the last returned message as consumed."""
        given, self._given = self._given, None
        if given is not None:
            self._source.consumed(*given)

    def abandon(self) -> None:
        """Leave the last returned message unconsumed."""
        self._given = None
