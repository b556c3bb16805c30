"""Renewal of the messages that push consumers hold (``ReceiptHandleManager``, ``ReceiptHandleGroup``).

A consumer that receives with ``auto_renew`` does not send the time that its handlers need. Its messages are hidden for
a minute, and the endpoint extends this time while the consumer holds the messages. The table has the newest handle of
each message, for acks that contain an older handle. Use this module only on the event loop. Source: grpc.md §8.2.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from rmqkit.clock import Clock
from rmqkit.errors import RmqError
from rmqkit.proxy.schema.records import Handle, read_handle
from rmqkit.proxy.schema.status import Code, Refused

__all__ = ["ROUND_SECONDS", "HeldKey", "Renewals"]

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

HeldKey = tuple[str, str, str, str, int, int]
"""Group, message id, and the message's fields in a handle: kind of topic, broker, queue id, offset."""


@dataclass(slots=True)
class _Held:
    """A held message. ``known``: its newest handle; a text is decoded when needed, because few handles are renewed."""

    topic: str
    known: Handle | str
    expires_ms: int
    since_ms: int
    extended: int = 0
    failures: int = 0
    renewing: asyncio.Future[None] | None = None

    @property
    def handle(self) -> Handle:
        if isinstance(self.known, str):
            self.known = read_handle(self.known)
        return self.known

    @property
    def text(self) -> str:
        return self.known if isinstance(self.known, str) else self.known.text


_NOTHING: dict[HeldKey, _Held] = {}


class Changing(Protocol):
    """The calls that renewals need: to change an invisible time, and to look up a retry wait."""

    async def change(self, group: str, topic: str, handle: Handle, invisible_ms: int) -> Handle:
        """Change an invisible time and return the new handle. Raises RmqError."""

    async def retry_ms(self, group: str, deliveries: int) -> int:
        """Return the wait of the group before a redelivery, in ms."""


class Renewals:
    """The newest handles of the messages that clients hold."""

    def __init__(self, changing: Changing, clock: Clock) -> None:
        self._changing = changing
        self._clock = clock
        self._held: dict[str, dict[HeldKey, _Held]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, client_id: str) -> int:
        """Return the number of messages that a client holds."""
        return len(self._held.get(client_id, _NOTHING))

    def add(self, client_id: str, group: str, topic: str, message_id: str, handle: Handle) -> None:
        """Store a message that a client holds. Above the limits per client and in total, the message is not renewed."""
        self.add_texts(client_id, topic, [(_key(group, message_id, handle), handle)], handle.expires_ms)

    def add_texts(
        self, client_id: str, topic: str, several: Iterable[tuple[HeldKey, Handle | str]], expires_ms: int
    ) -> None:
        """Store several messages whose handles expire at the same time, without decoding the handles."""
        held, now_ms = self._held.setdefault(client_id, {}), self._clock.now_ms()
        for key, handle in several:
            if key not in held:
                if len(held) >= _PER_CLIENT_MAX or self._count >= _TOTAL_MAX:
                    return
                self._count += 1
            held[key] = _Held(topic, handle, expires_ms, now_ms)

    def let_go(self, client_id: str, key: HeldKey, text: str) -> bool:
        """Remove a message, if it is stored. Return False, without a change, if the message is being renewed or has a
        newer handle."""
        held = self._held.get(client_id, _NOTHING)
        one = held.get(key)
        if one is not None:
            if one.renewing is not None or one.text != text:
                return False
            del held[key]
            self._count -= 1
        return True

    async def take(self, client_id: str, group: str, message_id: str, handle: Handle) -> Handle:
        """Remove a message, and return its newest handle; ``handle`` if the message is not stored."""
        held = self._held.get(client_id, {}).pop(_key(group, message_id, handle), None)
        if held is None:
            return handle
        self._count -= 1
        # Wait for the new handle: after an ack with the old handle the message would be redelivered.
        if held.renewing is not None:
            await held.renewing
        return held.handle

    async def round(self, is_online: set[str]) -> None:
        """Extend handles that expire soon, and release the messages of clients that left. ``is_online``: ids of the
        clients that are members of their group."""
        now_ms = self._clock.now_ms()
        due: list[tuple[str, HeldKey, _Held]] = []
        for client_id, held in list(self._held.items()):
            if client_id not in is_online:
                await self.release(client_id)
                continue
            if not held and self._held.get(client_id) is held:
                del self._held[client_id]
            due += [(client_id, key, one) for key, one in held.items() if one.expires_ms - now_ms <= _AHEAD_MS]
        for start in range(0, len(due), _AT_ONCE):
            await asyncio.gather(*(self._renew(*one, now_ms) for one in due[start : start + _AT_ONCE]))

    async def release(self, client_id: str) -> None:
        """Release the messages that a client holds: the broker redelivers them after a second."""
        # Remove the messages from the table before the first await: neither `round` nor an ack must find them any more.
        held = self._held.pop(client_id, {})
        self._count -= len(held)
        assert self._count >= 0, "the released messages were counted"
        for key, one in held.items():
            # Wait for the new handle: with the old handle the message would be delivered twice, now and after the
            # renewed time.
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
        """Release all held messages, when the endpoint closes."""
        for client_id in list(self._held):
            await self.release(client_id)

    async def _renew(self, client_id: str, key: HeldKey, held: _Held, now_ms: int) -> None:
        # The message may have been acked while other messages were renewed. Its renewal would cause a redelivery.
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
            held.known, held.expires_ms = handle, handle.expires_ms
            held.extended += 1
            held.failures = 0
        finally:
            held.renewing.set_result(None)
            held.renewing = None
        # The message may have been acked during the request.
        if is_last and self._held.get(client_id, {}).get(key) is held:
            del self._held[client_id][key]
            self._count -= 1


def _key(group: str, message_id: str, handle: Handle) -> HeldKey:
    pop = handle.pop
    return group, message_id, pop.retry, pop.broker_name, pop.queue_id, handle.offset
