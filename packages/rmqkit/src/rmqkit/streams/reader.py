"""Reads of one stream: the stored events, then new ones as they arrive.

A reader pulls the light queue of the stream. The broker holds a pull until an event arrives. A broker that cannot be
reached is tried again until it is back. A send that a writer repeated may be stored twice: the reader recognizes such
events by their unique keys and yields each once. A reader that resumes reads the keys of the events before its place
first. It sees the last event of a finished stream there, too: if no event follows, the iteration has no event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable

from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import ClientError, EventIdIllegal, NoRoute, PeerRefused, RemotingError, StreamExpired
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import lite_queue_id
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.rpc import Pulled, PullStatus
from rmqkit.streams.event import Event, Place, event_id, event_of

__all__ = ["KEYS_KEPT", "StreamReader"]

_HELD_MS = 15_000
_PULL_MS = 5_000
_PAUSE_SECONDS = 0.5
KEYS_KEPT = 1024
"""At least the number of events in a repeated request, and those of the next."""
_PASSING = (
    ResponseCode.SYSTEM_BUSY,
    ResponseCode.SERVICE_NOT_AVAILABLE,
    ResponseCode.TOPIC_NOT_EXIST,
    ResponseCode.FLOW_CONTROL,
    ResponseCode.NO_PERMISSION,
)
_FLAGS = int(PullFlag.SUBSCRIPTION)
_HOLDS = int(PullFlag.SUBSCRIPTION | PullFlag.SUSPEND)


class StreamReader(AsyncIterator[Event]):
    """The events of one stream, in order. `Streams.read` returns it::

        async for event in streams.read("session-42", after=last_event_id):
            print(event.text)

    Iterate once: over the events, or over `batches`.
    """

    def __init__(
        self,
        runtime: ClientRuntime,
        parent: str,
        stream: str,
        *,
        after: Place | None,
        newest: int | None,
        follows: bool,
        count_max: int,
    ) -> None:
        """``after``: the place after which to read. ``newest``: without a place, the number of stored events to begin
        with; None: all. ``follows``: wait for new events; otherwise stop at the present end."""
        self._runtime = runtime
        self._parent = parent
        self._stream = stream
        self._after = after
        self._newest = newest
        self._follows = follows
        self._count_max = count_max
        self._skips_to = -1 if after is None else after.number
        self._epoch: int | None = None
        self._number = 0
        self._end = 0
        self._ready: list[Event] = []
        self._is_started = self._is_over = False
        self._seen: set[str] = set()
        self._keys: deque[str] = deque()
        self._events = self._iterate()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    def __anext__(self) -> Awaitable[Event]:
        return anext(self._events)

    async def start(self) -> bool:
        """Find the place of the first event, if this was not done before; the iteration does it, too. Return False if
        there is no event to wait for: the stream is finished, and the reader begins after its last event.

        Raises EventIdIllegal: the stream has no such event. Raises StreamExpired: events after the id were deleted.
        Raises ClientError: the streams were closed."""
        if not self._is_started:
            await self._begin()
            self._is_started = True
        return bool(self._ready) or not self._is_over

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Iterate over the events in lists: each has the events that one request fetched, at least one event. Raises
        the errors of `start`."""
        await self.start()
        if self._ready:
            batch, self._ready = self._ready, []
            yield batch
        while not self._is_over and (self._follows or self._number < self._end):
            batch = await self._fetch(holds=self._follows)
            if batch:
                yield batch

    async def _iterate(self) -> AsyncIterator[Event]:
        async for batch in self.batches():
            for event in batch:
                yield event

    async def _begin(self) -> None:
        """Pull first, and skip the events up to the place. Raises StreamExpired, EventIdIllegal: there is no event
        after the given place."""
        after = self._after
        if after is None:
            pulled = await self._pull(0, None, holds=False)
            self._end = pulled.max_offset
            first = pulled.min_offset if self._newest is None else pulled.max_offset - self._newest
            self._number = max(pulled.min_offset, first)
            return
        pulled = await self._pull(after.number + 1, after.epoch, holds=False)
        self._end = pulled.max_offset
        if after.number + 1 > pulled.max_offset:
            why = f"the newest event is {pulled.max_offset - 1}"
            raise EventIdIllegal(self._stream, event_id(self._stream, after), why)
        if after.number + 1 < pulled.min_offset:
            raise self._expired(f"the first stored event is {pulled.min_offset}")
        self._epoch, self._number = after.epoch, max(pulled.min_offset, after.number + 1 - KEYS_KEPT)
        while self._number <= after.number:
            self._ready += await self._fetch(holds=False)

    async def _fetch(self, *, holds: bool) -> list[Event]:
        """Pull once, and return the new events. If the broker has fewer events than were read before, as after a change
        of the master, wait a moment, because such a pull is not held."""
        number = self._number
        pulled = await self._pull(number, self._epoch, holds=holds)
        events = self._taken(pulled)
        if self._number <= number and not (holds and pulled.status is PullStatus.NO_NEW_MESSAGE):
            await asyncio.sleep(_PAUSE_SECONDS)
        return events

    def _taken(self, pulled: Pulled) -> list[Event]:
        """Return the events of an answer that are after the place and not repeated, up to the last event."""
        if pulled.status is PullStatus.OFFSET_ILLEGAL:
            self._number = self._moved(self._number, pulled)
        events: list[Event] = []
        is_last = False
        for message in read_messages(pulled.body) if pulled.status is PullStatus.FOUND else ():
            place, event = event_of(message)
            self._epoch, self._number = place.epoch, place.number + 1
            is_last = event.is_last
            if self._is_repeated(message.msg_id) or place.number <= self._skips_to:
                continue
            self._after = place
            events.append(event)
            if is_last:
                break
        # a last event that was skipped finishes the stream only if no event follows
        self._is_over = is_last and (bool(events and events[-1].is_last) or self._number >= pulled.max_offset)
        return events

    def _moved(self, number: int, pulled: Pulled) -> int:
        """Return the number at which to continue after the broker refused one."""
        if number < pulled.min_offset and self._after is not None and self._after.number + 1 < pulled.min_offset:
            raise self._expired(f"the first stored event is {pulled.min_offset}")
        return pulled.next_begin_offset

    def _expired(self, why: str) -> StreamExpired:
        after = "" if self._after is None else event_id(self._stream, self._after)
        return StreamExpired(self._stream, after, why)

    def _is_repeated(self, key: str) -> bool:
        """Return True if an event with this key was read before."""
        if key in self._seen:
            return True
        self._seen.add(key)
        self._keys.append(key)
        if len(self._keys) > KEYS_KEPT:
            self._seen.discard(self._keys.popleft())
        return False

    async def _pull(self, number: int, epoch: int | None, *, holds: bool) -> Pulled:
        """Pull once. Try again while no broker answers. Raises StreamExpired: the life of the stream is over.
        Raises PeerRefused: the broker refuses the request for good. Raises ClientError: the streams were closed."""
        while True:
            try:
                queue = await self._queue()
                address = await self._runtime.routes.find_address(queue.broker_name, queue.topic)
                header = self._header(queue, number, epoch, holds=holds)
                timeout_ms = _PULL_MS + (_HELD_MS if holds else 0)
                return await self._runtime.calls.pull(address, header, timeout_ms)
            except PeerRefused as error:
                if error.code == ResponseCode.QUERY_NOT_FOUND:
                    raise self._expired("the stream was deleted meanwhile") from None
                if error.code not in _PASSING:
                    raise
            except (RemotingError, NoRoute):
                if not self._runtime.is_running:
                    raise ClientError(f"stream {self._stream}: the streams were closed while it was read") from None
                self._runtime.refresh_routes_soon()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _queue(self) -> MessageQueue:
        queues = await self._runtime.routes.publish_queues(self._parent, "", 0)
        return queues.queues[lite_queue_id(self._stream, len(queues.queues))]

    def _header(self, queue: MessageQueue, number: int, epoch: int | None, *, holds: bool) -> PullMessageRequest:
        return PullMessageRequest(
            consumer_group=TOOLS_GROUP,
            topic=self._parent,
            queue_id=0,  # that of the light queue: Apache's broker reads it from the header
            queue_offset=number,
            max_msg_nums=self._count_max,
            sys_flag=_HOLDS if holds else _FLAGS,
            commit_offset=0,
            suspend_timeout_millis=_HELD_MS if holds else 0,
            sub_version=0,
            subscription="*",
            expression_type="TAG",
            lite_topic=self._stream,
            lite_epoch=epoch,
        )
