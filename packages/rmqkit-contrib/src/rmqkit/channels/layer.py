"""The channel layer: `StreamChannelLayer`, for the setting ``CHANNEL_LAYERS`` of Django.

Its channels are those of consumers (`new_channel`): a channel belongs to one process, whose id is in its name, and only
this process receives from it. Groups contain such channels of any processes. Channels without a process, which Channels
has for background workers, are refused: several processes would have to share them. `rmqkit.kombu` is for such work.

Channels calls a layer on several event loops: that of the server, and short ones in threads of synchronous code. The
streams run on one loop in a thread of rmqkit, and messages wait in an `Inbox` that all loops can use.

A message is delivered at most once: it is dropped when its channel is full, when it expires, and when the process of
its channel stops.
"""

from __future__ import annotations

import asyncio
import copy
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from channels.exceptions import ChannelFull
from channels.layers import BaseChannelLayer

from rmqkit.channels.exchange import Exchange
from rmqkit.channels.inbox import Inbox
from rmqkit.client.runtime.process import portal
from rmqkit.client.runtime.settings import ClientSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import MessageIllegal, SettingsError
from rmqkit.streams import Streams
from rmqkit.streams import open as open_streams
from rmqkit.streams.embedded import EmbeddedStreams, embedded

__all__ = ["StreamChannelLayer"]

T = TypeVar("T")


class StreamChannelLayer(BaseChannelLayer):  # type: ignore[misc] # Channels has no types
    """A channel layer over streams.

    Args:
        name_servers: the addresses of the name servers.
        folder: instead of ``name_servers``: a folder for servers inside this process, see `rmqkit.streams.embedded`.
            Further processes of the machine connect to the first one.
        parent: the topic below which the streams are.
        expiry: seconds after which a message that was not received is dropped. Its channel leaves its groups.
        group_expiry: seconds after which a channel leaves a group.
        capacity: number of messages that may wait in a channel.
        channel_capacity: capacities by channel name, with ``*`` as wildcard.
        settings: settings of the connections, such as TLS and credentials.

    Raises SettingsError: an argument is not valid."""

    extensions = ("groups", "flush")

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        folder: str | None = None,
        parent: str = "Channels",
        expiry: float = 60,
        group_expiry: float = 86_400,
        capacity: int = 100,
        channel_capacity: Mapping[str, int] | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        super().__init__(expiry=expiry, capacity=capacity)
        for name, value in {"expiry": expiry, "group_expiry": group_expiry, "capacity": capacity}.items():
            if value <= 0:
                raise SettingsError(f"{name}={value} must be more than 0")
        if folder is not None and (name_servers is not None or settings is not None):
            raise SettingsError(f"folder={folder} has servers of its own: leave out name_servers and settings")
        self.channel_capacity = self.compile_capacities(channel_capacity or {})
        self.group_expiry = group_expiry
        self._name_servers = name_servers
        self._folder = folder
        self._parent = parent
        self._settings = settings
        self._lifetime = max(60.0, min(group_expiry, 3600.0), expiry)
        self._source()  # checks the arguments
        self._exchange: Exchange | None = None
        self._inbox = Inbox(SYSTEM_CLOCK)
        self._process = ""
        self._pid = 0

    async def send(self, channel: str, message: dict[str, Any]) -> None:
        """Send a message to a channel of a consumer. Raises ChannelFull: the channel is of this process, and full.
        Raises MessageIllegal: the channel belongs to no process, or the message cannot be stored.
        Raises SendFailed, NoRoute: no broker stored the message."""
        assert isinstance(message, dict), "a message is a dict"
        assert "__asgi_channel__" not in message, "the key __asgi_channel__ belongs to Channels"
        exchange, process = self._own(), self._process_of(channel)
        if process != self._process:
            data = _encoded(message)
            await self._call(lambda: exchange.send(process, channel, data))
            return
        expires_ms = SYSTEM_CLOCK.now_ms() + self.expiry * 1000
        if not self._inbox.put(
            channel, copy.deepcopy(message), expires_ms=expires_ms, capacity=self.get_capacity(channel)
        ):
            raise ChannelFull(channel)

    async def receive(self, channel: str) -> dict[str, Any]:
        """Return the first message of a channel of this process. Wait until there is one.
        Raises MessageIllegal: the channel belongs to another process, or to none."""
        if self._process_of(channel) != self._process:
            raise MessageIllegal(f"channel {channel} belongs to another process: only that process can receive from it")
        return await self._inbox.receive(channel)

    async def new_channel(self, prefix: str = "specific") -> str:
        """Return the name of a new channel of this process."""
        exchange = self._own()
        await self._call(exchange.open)
        return f"{prefix.rstrip('.')}.{self._process}!{uuid.uuid4().hex}"

    async def group_add(self, group: str, channel: str) -> None:
        """Add a channel to a group. A channel of this process gets the messages that are sent after this call."""
        self.require_valid_group_name(group)
        exchange, process = self._own(), self._process_of(channel)
        if process == self._process:
            await self._call(lambda: exchange.join(group, channel))
        else:
            await self._call(lambda: exchange.join_elsewhere(process, group, channel, joins=True))

    async def group_discard(self, group: str, channel: str) -> None:
        """Remove a channel from a group, if it is a member."""
        self.require_valid_group_name(group)
        exchange, process = self._own(), self._process_of(channel)
        if process == self._process:
            await self._call(lambda: exchange.leave(group, channel))
        else:
            await self._call(lambda: exchange.join_elsewhere(process, group, channel, joins=False))

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        """Send a message to all channels of a group. Full channels do not get it.
        Raises MessageIllegal: the message cannot be stored. Raises SendFailed, NoRoute: no broker stored it."""
        assert isinstance(message, dict), "a message is a dict"
        self.require_valid_group_name(group)
        exchange, data = self._own(), _encoded(message)
        await self._call(lambda: exchange.send_group(group, data))

    async def flush(self) -> None:
        """Drop all messages for channels of this process, and remove its channels from all groups."""
        exchange = self._own()
        await self._call(exchange.clear)
        self._inbox.clear()

    async def close(self) -> None:
        """Close the connections. The next call of another method opens new ones."""
        if self._exchange is not None and self._pid == os.getpid():
            exchange, self._exchange = self._exchange, None
            await self._call(exchange.close)

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a coroutine function on the loop of the streams."""
        return await asyncio.wrap_future(portal().submit(work))

    def _own(self) -> Exchange:
        """Return the exchange of this process. A child of a fork gets one of its own."""
        if self._exchange is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._process = uuid.uuid4().hex[:20]
            self._inbox = Inbox(SYSTEM_CLOCK)
            self._exchange = Exchange(
                self._source,
                self._process,
                self._inbox,
                self.get_capacity,
                expiry_ms=self.expiry * 1000,
                group_expiry_ms=self.group_expiry * 1000,
                clock=SYSTEM_CLOCK,
            )
            portal().close_at_exit(self._exchange)
        return self._exchange

    def _source(self) -> Streams | EmbeddedStreams:
        """Return the streams, not yet open."""
        if self._folder is not None:
            return embedded(self._folder, self._parent, expire_after=self._lifetime)
        return open_streams(self._name_servers, self._parent, expire_after=self._lifetime, settings=self._settings)

    def _process_of(self, channel: str) -> str:
        """Return the process in the name of a channel. Raises TypeError: the name is not allowed.
        Raises MessageIllegal: it has no process."""
        self.require_valid_channel_name(channel)
        owner, mark, _ = channel.partition("!")
        _, dot, process = owner.rpartition(".")
        if not (mark and dot and process):
            raise MessageIllegal(
                f"channel {channel} belongs to no process: use a channel of new_channel(), or Celery for workers"
            )
        return process


def _encoded(message: dict[str, Any]) -> bytes:
    """Return a message as MessagePack. Raises MessageIllegal: it has a value of another type."""
    try:
        return msgspec.msgpack.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageIllegal(f"a message of a channel cannot be stored: {error}") from None
