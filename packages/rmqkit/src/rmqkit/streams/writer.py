"""Appends to streams.

The events of one stream are sent one request at a time. Events that are appended while a request is under way wait and
share the next request, so that a fast writer needs few requests, and the order of the calls is the order of the events.
"""

from __future__ import annotations

import asyncio
import contextlib

from msgspec import Struct, field

from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.producer.producer import Producer
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message
from rmqkit.remoting.tasks import Tasks
from rmqkit.streams.event import Place, event_id

__all__ = ["StreamWriter"]

_BATCH_EVENTS_MAX = 512
_BATCH_BYTES_MAX = 512 << 10


class _Waiting(Struct):
    message: Message
    size: int
    done: asyncio.Future[str]


class _Lane(Struct):
    """The events of one stream that wait for a request. ``sending``: the task that sends them."""

    waiting: list[_Waiting] = field(default_factory=list)
    room: asyncio.Event | None = None
    sending: asyncio.Task[None] | None = None


class StreamWriter:
    """The writer of all streams of a parent topic.

    Args:
        producer: a started producer.
        linger_ms: how long the first waiting event waits for more events.
        waiting_max: number of events of a stream that may wait; further calls of `append` wait for room.
    """

    def __init__(self, producer: Producer, *, linger_ms: float, waiting_max: int) -> None:
        self._producer = producer
        self._linger_ms = linger_ms
        self._waiting_max = waiting_max
        self._lanes: dict[str, _Lane] = {}
        self._tasks = Tasks()

    async def append(self, message: Message) -> str:
        """Store an event, and return its id; an empty text at a broker that does not return the place of an event.
        Raises the errors of `Producer.send`."""
        stream = message.lite_topic
        assert stream is not None, "an event has a stream"
        lane = self._lanes.setdefault(stream, _Lane())
        while len(lane.waiting) >= self._waiting_max:
            lane.room = lane.room or asyncio.Event()
            await lane.room.wait()
            lane = self._lanes.setdefault(stream, lane)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        size = len(message.body) if isinstance(message.body, bytes | str) else 0
        lane.waiting.append(_Waiting(message, size, done))
        if lane.sending is None:
            lane.sending = self._tasks.own(self._send_all(stream, lane), f"stream {stream}")
        return await done

    async def close(self) -> None:
        """Wait until all events are stored or refused."""
        await self._tasks.finish()

    async def _send_all(self, stream: str, lane: _Lane) -> None:
        """Send the waiting events of a stream until none remains."""
        try:
            while lane.waiting:
                if self._linger_ms > 0:
                    await asyncio.sleep(self._linger_ms / 1000)
                batch = _taken(lane.waiting)
                if lane.room is not None:
                    lane.room.set()
                    lane.room = None
                await self._send(stream, batch)
        finally:
            lane.sending = None
            if self._lanes.get(stream) is lane and not lane.waiting:
                del self._lanes[stream]

    async def _send(self, stream: str, batch: list[_Waiting]) -> None:
        messages = [one.message for one in batch]
        try:
            if len(messages) == 1:
                result = await self._producer.send(messages[0])
            else:
                result = await self._producer.send_batch(messages)
        except RmqError as error:
            for one in batch:
                if not one.done.done():
                    one.done.set_exception(error)
            return
        for i, one in enumerate(batch):
            with contextlib.suppress(asyncio.InvalidStateError):  # the caller was cancelled
                one.done.set_result(_id(stream, result, i))


def _taken(waiting: list[_Waiting]) -> list[_Waiting]:
    """Remove the events of the next request from the waiting events."""
    count = size = 0
    for one in waiting[:_BATCH_EVENTS_MAX]:
        size += one.size
        if count and size > _BATCH_BYTES_MAX:
            break
        count += 1
    taken = waiting[:count]
    del waiting[:count]
    return taken


def _id(stream: str, result: SendResult, index: int) -> str:
    if result.lite_offset is None:
        return ""
    return event_id(stream, Place(result.lite_epoch or 1, result.lite_offset + index))
