"""Batches that still take messages: what `batching` and `accumulator` have in common.

A batch is closed when the next message would make it larger than ``batch_bytes``, or than a message may be,
``linger_ms`` after its first message, or when its owner says so. It is handed over once, prepared, or with the error
that it has for all of its messages. Loop only. Source: behaviour.md §7.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.client.observe.hooks import Hooks, Sending, SendOutcome
from rmqkit.client.producer.encode import Outgoing, batch_entry, outgoing_entries
from rmqkit.client.producer.sender import SendResult
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.batch import BATCH_ENTRY_BYTES_MIN, BatchEntry
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message

__all__ = ["Batch", "OpenBatches", "is_large", "shares"]

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")


class Batch(Struct, Generic[P]):
    """Messages that go out together; ``places`` are where the result of each is wanted."""

    first: Message
    queue: MessageQueue | None
    places: list[P] = field(default_factory=list)
    unique_keys: list[str] = field(default_factory=list)
    entries: list[BatchEntry] = field(default_factory=list)
    size: int = 0
    timer: asyncio.TimerHandle | None = None
    sending: Sending | None = None
    tell: Callable[[SendOutcome], None] | None = None


class OpenBatches(Generic[K, P]):
    """The open batches of one owner, by key.

    Args:
        hooks: are told of every batch.
        next_key: gives out unique keys.
        closed: takes a batch that is closed, and what it is as a request.
    """

    def __init__(
        self,
        group: str,
        settings: ProducerSettings,
        *,
        hooks: Hooks,
        next_key: Callable[[], str],
        closed: Callable[[Batch[P], Outgoing | RmqError], None],
        linger_ms: float = 0.0,
    ) -> None:
        self._group = group
        self._settings = settings
        self._hooks = hooks
        self._next_key = next_key
        self._closed = closed
        self._open: dict[K, Batch[P]] = {}
        self._bytes_max = min(settings.batch_bytes, settings.message_bytes_max)
        self.linger_ms = linger_ms

    def add(self, key: K, message: Message, queue: MessageQueue | None, place: P) -> int:
        """Put a message into the open batch of a key; returns its bytes there.
        Raises MessageIllegal: it breaks a rule, or a batch cannot hold it."""
        unique_key = message.msg_id or self._next_key()
        entry = batch_entry(message, unique_key, self._settings)
        size = BATCH_ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        batch = self._open.get(key)
        if batch is not None and (batch.size + size > self._bytes_max or batch.first.wait_store != message.wait_store):
            self.close(key)
            batch = None
        if batch is None:
            batch = self._open[key] = self._begin(key, message, queue)
        if batch.sending is not None:
            if batch.entries:
                batch.sending.messages.append(message)
            entry = batch_entry(message, unique_key, self._settings, batch.sending.properties)
        batch.places.append(place)
        batch.unique_keys.append(unique_key)
        batch.entries.append(entry)
        batch.size += size
        return size

    def _begin(self, key: K, message: Message, queue: MessageQueue | None) -> Batch[P]:
        batch: Batch[P] = Batch(message, queue)
        if self._hooks:
            batch.sending = Sending(self._group, [message], is_batch=True)
            batch.tell = self._hooks.sending(batch.sending)
        if self.linger_ms:
            batch.timer = asyncio.get_running_loop().call_later(self.linger_ms / 1000, self.close, key)
        return batch

    def close(self, key: K) -> None:
        """Hand over the open batch of a key, if there is one."""
        batch = self._open.pop(key, None)
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
        prepared: Outgoing | RmqError
        try:
            keys = batch.unique_keys
            prepared = outgoing_entries(batch.first, batch.entries, keys, self._next_key(), self._settings)
        except RmqError as error:
            if batch.tell is not None:
                batch.tell(SendOutcome(error=error))
            prepared = error
        else:
            prepared.tell = batch.tell
        self._closed(batch, prepared)

    def close_all(self) -> None:
        """Hand over every batch."""
        for key in list(self._open):
            self.close(key)

    def forget(self) -> None:
        """Drop what is open; nobody waits for it any more."""
        for batch in self._open.values():
            if batch.timer is not None:
                batch.timer.cancel()
        self._open.clear()


def is_large(body: object, settings: ProducerSettings) -> bool:
    """Whether it will be compressed, which no batch is; what cannot be a body is left to the checks."""
    return isinstance(body, bytes) and len(body) >= settings.compress_body_bytes


def shares(result: SendResult, unique_keys: list[str]) -> list[SendResult]:
    """Each message's share of the result of its batch."""
    if len(unique_keys) == 1:
        return [result]
    ids = result.offset_msg_id.split(",")
    ids = ids if len(ids) == len(unique_keys) else ids[:1] * len(unique_keys)  # some brokers name one for all
    return [
        replace(result, msg_id=key, offset_msg_id=offset_msg_id, queue_offset=result.queue_offset + i)
        for i, (key, offset_msg_id) in enumerate(zip(unique_keys, ids, strict=True))
    ]
