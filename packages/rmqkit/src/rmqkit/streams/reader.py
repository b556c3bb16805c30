"""Reads of one stream: the stored events, then new ones as they arrive.

A reader pulls the light queue of the stream. The broker holds a pull until an event arrives. A broker that cannot be
reached is tried again until it is back. A send that a writer repeated may be stored twice: the reader recognizes such
events by their unique keys and yields each once. A reader that resumes reads the keys of the events before its place
first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.errors import EventIdIllegal, NoRoute, PeerRefused, RemotingError, StreamExpired
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.properties import lite_queue_id
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.rpc import Pulled, PullStatus
from rmqkit.streams.event import Event, Place, event_id, event_of

__all__ = ["StreamReader"]

_HELD_MS = 15_000
_PULL_MS = 5_000
_PAUSE_SECONDS = 0.5
_KEYS_KEPT = 1024
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


class StreamReader:
    """A reader of one stream.

    Args:
        after: the place after which to read; None for the start, or for new events.
        is_new: read only events that are stored from now on.
    """

    def __init__(
        self, runtime: ClientRuntime, parent: str, stream: str, *, after: Place | None, is_new: bool, count_max: int
    ) -> None:
        self._runtime = runtime
        self._parent = parent
        self._stream = stream
        self._after = after
        self._is_new = is_new
        self._count_max = count_max
        self._seen: set[str] = set()
        self._keys: deque[str] = deque()

    async def events(self, *, follows: bool) -> AsyncIterator[Event]:
        """Yield the events of the stream in order, up to the last one of a finished stream. ``follows``: wait for new
        events; otherwise stop at the present end."""
        epoch, number = await self._begin()
        skips_to = -1 if self._after is None else self._after.number
        end: int | None = None
        while True:
            pulled = await self._pull(number, epoch, holds=follows)
            if end is None and not follows:
                end = pulled.max_offset
            if pulled.status is PullStatus.OFFSET_ILLEGAL:
                number = self._moved(number, pulled)
            for message in read_messages(pulled.body) if pulled.status is PullStatus.FOUND else ():
                place, event = event_of(message)
                epoch, number = place.epoch, place.number + 1
                if self._is_repeated(message.msg_id) or place.number <= skips_to:
                    continue
                self._after = place
                yield event
                if event.is_last:
                    return
            if end is not None and number >= end:
                return

    async def _begin(self) -> tuple[int | None, int]:
        """Return the life and the number to pull first. Raises StreamExpired, EventIdIllegal: there is no event after
        the given place."""
        if self._after is None:
            pulled = await self._pull(0, None, holds=False)
            return None, pulled.max_offset if self._is_new else pulled.min_offset
        after = self._after
        pulled = await self._pull(after.number + 1, after.epoch, holds=False)
        if after.number + 1 > pulled.max_offset:
            why = f"the newest event is {pulled.max_offset - 1}"
            raise EventIdIllegal(self._stream, event_id(self._stream, after), why)
        if after.number + 1 < pulled.min_offset:
            raise self._expired(f"the first stored event is {pulled.min_offset}")
        return after.epoch, max(pulled.min_offset, after.number + 1 - _KEYS_KEPT)

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
        if len(self._keys) > _KEYS_KEPT:
            self._seen.discard(self._keys.popleft())
        return False

    async def _pull(self, number: int, epoch: int | None, *, holds: bool) -> Pulled:
        """Pull once. Try again while no broker answers. Raises StreamExpired: the life of the stream is over.
        Raises PeerRefused: the broker refuses the request for good."""
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
