"""The messages that wait in the channels of one process.

A channel exists while a message or a receiver waits in it. Messages arrive on the event loop of the streams; receivers
may wait on other event loops, in other threads. A receiver takes its message on its own loop, so a receiver that is
cancelled loses no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import Any

from msgspec import Struct, field

from rmqkit.clock import Clock

__all__ = ["Inbox"]

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class _Channel(Struct):
    """``messages``: with the time in ms at which each expires."""

    messages: deque[tuple[float, dict[str, Any]]] = field(default_factory=deque)
    waiters: deque[_Waiter] = field(default_factory=deque)


class Inbox:
    """The channels of this process. Every method may be called from any thread; a lock guards the channels."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._channels: dict[str, _Channel] = {}

    def put(self, channel: str, message: dict[str, Any], *, expires_ms: float, capacity: int) -> bool:
        """Add a message to a channel. Return False if the channel is full. ``expires_ms``: wall time in ms."""
        with self._lock:
            found = self._channels.setdefault(channel, _Channel())
            _drop_expired(found, self._clock.now_ms())
            if len(found.messages) >= capacity:
                return False
            found.messages.append((expires_ms, message))
            _wake(found)
        return True

    async def receive(self, channel: str) -> dict[str, Any]:
        """Return the first message of a channel. Wait until there is one."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                found = self._channels.setdefault(channel, _Channel())
                _drop_expired(found, self._clock.now_ms())
                if found.messages:
                    _, message = found.messages.popleft()
                    self._forget_if_unused(channel, found)
                    return message
                waiter: _Waiter = (loop, loop.create_future())
                found.waiters.append(waiter)
            try:
                await waiter[1]
            except asyncio.CancelledError:
                with self._lock:
                    if waiter in found.waiters:
                        found.waiters.remove(waiter)
                    elif found.messages:
                        _wake(found)
                    self._forget_if_unused(channel, found)
                raise

    def drop_expired(self) -> list[str]:
        """Drop the expired messages of all channels. Return the channels that had one: nobody reads them."""
        expired = []
        now_ms = self._clock.now_ms()
        with self._lock:
            for name, channel in list(self._channels.items()):
                if _drop_expired(channel, now_ms):
                    expired.append(name)
                self._forget_if_unused(name, channel)
        return expired

    def clear(self) -> None:
        """Drop all messages."""
        with self._lock:
            for name, channel in list(self._channels.items()):
                channel.messages.clear()
                self._forget_if_unused(name, channel)

    @property
    def channel_count(self) -> int:
        """The number of channels with a message or a receiver."""
        with self._lock:
            return len(self._channels)

    def _forget_if_unused(self, name: str, channel: _Channel) -> None:
        if not channel.messages and not channel.waiters and self._channels.get(name) is channel:
            del self._channels[name]


def _drop_expired(channel: _Channel, now_ms: float) -> int:
    """Drop the expired messages at the head of a channel. Return their number."""
    count = 0
    while channel.messages and channel.messages[0][0] <= now_ms:
        channel.messages.popleft()
        count += 1
    return count


def _wake(channel: _Channel) -> None:
    """Wake the receiver that waits longest."""
    while channel.waiters:
        loop, future = channel.waiters.popleft()
        with contextlib.suppress(RuntimeError):  # its loop is closed
            loop.call_soon_threadsafe(_resolve, future)
            return


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
