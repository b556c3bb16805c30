"""Renews what push consumers hold (``ReceiptHandleManager``, ``ReceiptHandleGroup``).

A consumer that asks with ``auto_renew`` does not say how long its handlers take. What it received is hidden for a
minute, and its time is extended while it is held. Acks need nothing of this table: it knows the newest handle of a
message, where an ack has an older one. Loop only. Source: grpc.md §8.2.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

from rmqkit.clock import Clock
from rmqkit.errors import RmqError
from rmqkit.proxy.records import Handle
from rmqkit.proxy.status import Code, Refused

__all__ = ["ROUND_SECONDS", "Renewals"]

ROUND_SECONDS = 5.0
_AHEAD_MS = 10_000
_HELD_MS_MAX = 3 * 3_600_000
_FAILURES_MAX = 3
_EXTENSIONS_MS = tuple(minutes * 60_000 for minutes in (1, 3, 5, 10, 30, 60))
_GONE_MS = 1000
_PER_CLIENT_MAX = 100_000
_TOTAL_MAX = 500_000
_AT_ONCE = 64

_log = logging.getLogger(__name__)

_Key = tuple[str, str, str, str, int, int]


@dataclass(slots=True)
class _Held:
    topic: str
    handle: Handle
    since_ms: int
    extended: int = 0
    failures: int = 0
    renewing: asyncio.Future[None] | None = None


_NOTHING: dict[_Key, _Held] = {}


class Changing(Protocol):
    """What changes an invisible time."""

    async def change(self, group: str, topic: str, handle: Handle, invisible_ms: int) -> Handle:
        """The new handle. Raises RmqError."""

    async def retry_ms(self, group: str, deliveries: int) -> int:
        """What the group waits before a delivery comes again."""


class Renewals:
    """The newest handles of what clients hold."""

    def __init__(self, changing: Changing, clock: Clock) -> None:
        self._changing = changing
        self._clock = clock
        self._held: dict[str, dict[_Key, _Held]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, client_id: str, group: str, topic: str, message_id: str, handle: Handle) -> None:
        """Hold a message for a client. Beyond what is kept of one client, or in all, it is not renewed."""
        held = self._held.setdefault(client_id, {})
        key = _key(group, message_id, handle)
        if key not in held:
            if len(held) >= _PER_CLIENT_MAX or self._count >= _TOTAL_MAX:
                return
            self._count += 1
        held[key] = _Held(topic, handle, self._clock.now_ms())

    def newest(self, client_id: str, group: str, message_id: str, handle: Handle) -> Handle | None:
        """The newest handle of a message that may be held; None while it is renewed."""
        held = self._held.get(client_id, _NOTHING).get(_key(group, message_id, handle))
        if held is None:
            return handle
        return held.handle if held.renewing is None else None

    def drop(self, client_id: str, group: str, message_id: str, handle: Handle) -> None:
        """Stop holding a message that is not being renewed, if it is held."""
        if self._held.get(client_id, {}).pop(_key(group, message_id, handle), None) is not None:
            self._count -= 1

    async def take(self, client_id: str, group: str, message_id: str, handle: Handle) -> Handle:
        """Stop holding a message; its newest handle."""
        held = self._held.get(client_id, {}).pop(_key(group, message_id, handle), None)
        if held is None:
            return handle
        self._count -= 1
        # An ack with the handle of before would be one too few: the message came again, although it was acknowledged.
        if held.renewing is not None:
            await held.renewing
        return held.handle

    async def round(self, is_online: set[str]) -> None:
        """Extend what is about to end, and give back what nobody holds any more. ``is_online``: ids of clients that are
        members of their group."""
        now_ms = self._clock.now_ms()
        due: list[tuple[str, _Key, _Held]] = []
        for client_id, held in list(self._held.items()):
            if client_id not in is_online:
                await self.release(client_id)
                continue
            if not held and self._held.get(client_id) is held:
                del self._held[client_id]
            due += [(client_id, key, one) for key, one in held.items() if one.handle.expires_ms - now_ms <= _AHEAD_MS]
        for start in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._renew(*one, now_ms) for one in due[start : start + _AT_ONCE]))

    async def release(self, client_id: str) -> None:
        """Have what a client holds come again soon."""
        held = self._held.pop(client_id, {})
        self._count -= len(held)
        assert self._count >= 0, "what is given back was held"
        for key, one in held.items():
            # By the handle of before it would come twice: now, and when what it was renewed for is over.
            if one.renewing is not None:
                await one.renewing
            try:
                await self._changing.change(key[0], one.topic, one.handle, _GONE_MS)
            except RmqError as error:
                _log.info(
                    "message %s was not returned; it is delivered again when its invisible time is over: %s",
                    key[1],
                    error,
                )

    async def release_all(self) -> None:
        """Have everything come again soon: the endpoint closes."""
        for client_id in list(self._held):
            await self.release(client_id)

    async def _renew(self, client_id: str, key: _Key, held: _Held, now_ms: int) -> None:
        # Others were given back or renewed first. What was acknowledged meanwhile would come again.
        if self._held.get(client_id, {}).get(key) is not held:
            return
        is_last = now_ms - held.since_ms > _HELD_MS_MAX
        held.renewing = asyncio.get_running_loop().create_future()
        extension_ms = _EXTENSIONS_MS[min(held.extended, len(_EXTENSIONS_MS) - 1)]
        try:
            if is_last:
                extension_ms = await self._changing.retry_ms(key[0], 1)
            handle = await self._changing.change(key[0], held.topic, held.handle, extension_ms)
        except RmqError as error:
            held.failures += 1
            is_last = held.failures > _FAILURES_MAX or (
                isinstance(error, Refused) and error.code is Code.INVALID_RECEIPT_HANDLE
            )
            _log.info("cannot extend the invisible time of message %s of client %s: %s", key[1], client_id, error)
        else:
            held.handle = handle
            held.extended += 1
            held.failures = 0
        finally:
            held.renewing.set_result(None)
            held.renewing = None
        # It may have been acknowledged while the broker was asked.
        if is_last and self._held.get(client_id, {}).get(key) is held:
            del self._held[client_id][key]
            self._count -= 1


def _key(group: str, message_id: str, handle: Handle) -> _Key:
    pop = handle.pop
    return group, message_id, pop.retry, pop.broker_name, pop.queue_id, handle.offset
