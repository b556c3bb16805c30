"""The streams of a channel layer.

=========================  =========================================================================================
stream                     events
=========================  =========================================================================================
``p-<process>``            messages for the channels of one process. The header ``channel`` has the channel
``g-<group>``              messages for a group. Each process with a member reads it and gives each of its members a
                           copy, so a message to a group is one event, however many members there are
=========================  =========================================================================================

A process reads a group from the moment at which its first channel joins. Another process may add a channel of this
process to a group: it sends an event with the headers ``channel``, ``group`` and ``join`` (``1`` or ``0``) and no
message to the stream of this process.

Messages are in MessagePack. A message expires a fixed time after the broker stored it, so the clocks of the machines
may differ by less than this time. A message for a full channel is dropped. If a stream expires while it is read, the
reader continues with the next life of the stream. A reader that a broker refuses permanently is logged and tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from rmqkit.channels.inbox import Inbox
from rmqkit.clock import Clock
from rmqkit.errors import ClientError, EventIdIllegal, RmqError, StreamExpired
from rmqkit.remoting.tasks import Tasks
from rmqkit.streams import Event, StreamReader, Streams, stream_name
from rmqkit.streams.embedded import EmbeddedStreams

__all__ = ["Exchange"]

logger = logging.getLogger(__name__)

_PAUSE_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_NOTHING = b"\xc0"
"""MessagePack's nil."""


class _Group(Struct):
    """``members``: the channels of this process, with the wall time in ms at which each joined."""

    members: dict[str, float]
    reading: asyncio.Task[None]


class Exchange:
    """The streams of a channel layer, and the groups of this process. Loop only.

    Args:
        source: returns the result of `rmqkit.streams.open` or `embedded`.
        process: the id of this process in the names of its channels.
        inbox: the channels of this process.
        capacity: returns the capacity of a channel.
        expiry_ms: how long a message exists.
        group_expiry_ms: how long a channel is a member of a group.
    """

    def __init__(
        self,
        source: Callable[[], Streams | EmbeddedStreams],
        process: str,
        inbox: Inbox,
        capacity: Callable[[str], int],
        *,
        expiry_ms: float,
        group_expiry_ms: float,
        clock: Clock,
    ) -> None:
        self._source = source
        self._process = process
        self._inbox = inbox
        self._capacity = capacity
        self._expiry_ms = expiry_ms
        self._group_expiry_ms = group_expiry_ms
        self._clock = clock
        self._opened: Streams | EmbeddedStreams | None = None
        self._streams: Streams | None = None
        self._opening = asyncio.Lock()
        self._joining: dict[str, asyncio.Lock] = {}
        self._groups: dict[str, _Group] = {}
        self._tasks = Tasks()

    async def open(self) -> Streams:
        """Connect, and begin to read the stream of this process. A second call has no effect.
        Raises NoRoute, ClientError: no broker answers."""
        async with self._opening:
            if self._streams is None:
                self._opened = self._source()
                self._streams = await self._opened.__aenter__()
                name = _process_stream(self._process)
                try:
                    events = await self._follow(name)
                except BaseException:
                    await self._disconnect()
                    raise
                self._tasks.start(self._read(name, events, self._accept), name)
                self._tasks.start(self._expire(), "expiry of channels")
            return self._streams

    async def close(self) -> None:
        """Stop all readers, and close the connections."""
        async with self._opening:
            await self._tasks.close()
            self._groups.clear()
            await self._disconnect()

    async def _disconnect(self) -> None:
        if self._opened is not None:
            opened, self._opened, self._streams = self._opened, None, None
            await opened.__aexit__(None, None, None)

    async def _follow(self, name: str) -> StreamReader:
        """Return a reader of the events that are stored in a stream after this call.
        Raises ClientError: no broker answers."""
        assert self._streams is not None, "a reader has streams"
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                events = self._streams.read(name, new=True)
                await events.start()
                return events
        except TimeoutError:
            raise ClientError(f"stream {name} of channels: no broker answered in {_ANSWER_SECONDS:g} s") from None

    async def send(self, process: str, channel: str, data: bytes) -> None:
        """Send a message to a channel of another process."""
        await (await self.open()).append(_process_stream(process), data, headers={"channel": channel})

    async def send_group(self, group: str, data: bytes) -> None:
        """Send a message to a group."""
        await (await self.open()).append(_group_stream(group), data)

    async def join_elsewhere(self, process: str, group: str, channel: str, *, joins: bool) -> None:
        """Add a channel of another process to a group, or remove it."""
        headers = {"channel": channel, "group": group, "join": "1" if joins else "0"}
        await (await self.open()).append(_process_stream(process), _NOTHING, headers=headers)

    async def join(self, group: str, channel: str) -> None:
        """Add a channel of this process to a group. It gets the messages that are sent after this call."""
        await self.open()
        async with self._joining.setdefault(group, asyncio.Lock()):
            found = self._groups.get(group)
            if found is None:
                name = _group_stream(group)
                events = await self._follow(name)
                reading = self._tasks.start(self._read(name, events, lambda event: self._deliver(group, event)), name)
                found = self._groups[group] = _Group({}, reading)
            found.members[channel] = self._clock.now_ms()
            self._joining.pop(group, None)

    async def leave(self, group: str, channel: str) -> None:
        """Remove a channel of this process from a group."""
        found = self._groups.get(group)
        if found is not None:
            found.members.pop(channel, None)
            if not found.members:
                del self._groups[group]
                found.reading.cancel()

    async def clear(self) -> None:
        """Remove all channels of this process from all groups."""
        for group, found in list(self._groups.items()):
            for channel in tuple(found.members):
                await self.leave(group, channel)

    @property
    def group_count(self) -> int:
        """The number of groups with a channel of this process."""
        return len(self._groups)

    async def _read(self, name: str, events: StreamReader, accept: Callable[[Event], Any]) -> None:
        """Read a stream until the task is cancelled."""
        assert self._streams is not None, "a reader has streams"
        after: str | None = None
        while True:
            try:
                async for event in events:
                    after = event.id
                    change = accept(event)
                    if change is not None:
                        await change
            except (StreamExpired, EventIdIllegal):
                after = None  # every event of its next life is new
            except (KeyError, msgspec.MsgspecError) as error:
                logger.warning("stream %s of channels: event %s is no message: %r", name, after, error)
            except RmqError as error:
                logger.warning("stream %s of channels cannot be read: %s", name, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            events = self._streams.read(name, after=after)

    def _accept(self, event: Event) -> Any:
        """Put a message for a channel of this process into the inbox. Return a call for a change of a group."""
        channel, group = event.headers["channel"], event.headers.get("group")
        if group is not None:
            return (self.join if event.headers["join"] == "1" else self.leave)(group, channel)
        self._put(channel, event, msgspec.msgpack.decode(event.data))
        return None

    def _deliver(self, group: str, event: Event) -> None:
        """Put a message for a group into the inbox for each member."""
        found = self._groups.get(group)
        for channel in found.members if found is not None else ():
            self._put(channel, event, msgspec.msgpack.decode(event.data))

    def _put(self, channel: str, event: Event, message: dict[str, Any]) -> None:
        expires_ms = event.stored_ms + self._expiry_ms
        if expires_ms > self._clock.now_ms():
            self._inbox.put(channel, message, expires_ms=expires_ms, capacity=self._capacity(channel))

    async def _expire(self) -> None:
        """Drop expired messages and members. A channel that does not read its messages leaves its groups."""
        while True:
            await asyncio.sleep(self._expiry_ms / 1000)
            unread = set(self._inbox.drop_expired())
            joined_ms = self._clock.now_ms() - self._group_expiry_ms
            for group, found in list(self._groups.items()):
                for channel, joined in list(found.members.items()):
                    if channel in unread or joined <= joined_ms:
                        await self.leave(group, channel)


def _process_stream(process: str) -> str:
    return stream_name(process, prefix="p-")


def _group_stream(group: str) -> str:
    return stream_name(group, prefix="g-")
