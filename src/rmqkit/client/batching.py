"""Many messages in few requests (``ProduceAccumulator``): what `Producer.send_many` does with them.

==============================  ================================================================================
a message                       goes
==============================  ================================================================================
of a topic and ``wait_store``   into the open batch of these, or of its queue when a selector chooses one
delayed, or large enough to be  out alone: batches can do neither
compressed
==============================  ================================================================================

A batch is closed at ``batch_bytes``, ``batch_delay_ms`` after its first message, or at the end. Its messages lie one
after the other in one queue. With a selector the batches of a queue go out one by one, so that order is kept, and after
a failed one nothing more is sent to it. While `BATCHES_MAX` are under way no message is taken from the program: a
source that never ends costs no more memory than that, apart from the results. Loop only. Source: behaviour.md §7.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.client.hooks import Hooks, Sending, SendOutcome
from rmqkit.client.outgoing import Outgoing, batch_entry, outgoing, outgoing_entries
from rmqkit.client.sender import SendResult
from rmqkit.client.settings import ProducerSettings
from rmqkit.errors import ClientError, RmqError
from rmqkit.protocol.batch import BATCH_ENTRY_BYTES_MIN, BatchEntry
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message

__all__ = ["BATCHES_MAX", "Batching", "SendManyFailed"]

BATCHES_MAX = 32

_Send = Callable[[Outgoing, MessageQueue | None], Awaitable[SendResult]]
_Choose = Callable[[Message], Awaitable[MessageQueue | None]]
_Key = MessageQueue | tuple[str, bool]


class SendManyFailed(ClientError):
    """Some messages of a `Producer.send_many` could not be sent.
    ``results`` has for each message, in their order, its result or the error."""

    def __init__(self, results: list[SendResult | RmqError]) -> None:
        failures = [result for result in results if isinstance(result, RmqError)]
        super().__init__(f"{len(failures)} of {len(results)} messages not sent, the first because: {failures[0]}")
        self.results = results


class _Batch(Struct):
    """Messages that go out together; ``places`` are theirs among the results."""

    first: Message
    queue: MessageQueue | None
    places: list[int] = field(default_factory=list)
    unique_keys: list[str] = field(default_factory=list)
    entries: list[BatchEntry] = field(default_factory=list)
    size: int = 0
    timer: asyncio.TimerHandle | None = None
    sending: Sending | None = None
    tell: Callable[[SendOutcome], None] | None = None


class Batching:
    """One call of `Producer.send_many`.

    Args:
        send: sends what is prepared, to a queue if one is chosen.
        choose: the queue of a message; None leaves it to the sender.
        next_key: gives out unique keys.
        hooks: are told of every batch.
    """

    def __init__(
        self,
        group: str,
        settings: ProducerSettings,
        *,
        send: _Send,
        choose: _Choose | None,
        next_key: Callable[[], str],
        hooks: Hooks,
    ) -> None:
        self._group = group
        self._settings = settings
        self._hooks = hooks
        self._send = send
        self._choose = choose
        self._next_key = next_key
        self._linger_ms = 0.0
        self._open: dict[_Key, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[MessageQueue, asyncio.Lock] = {}
        self._broken: dict[MessageQueue, RmqError] = {}
        self._results: list[SendResult | RmqError | None] = []

    async def send_all(self, messages: Iterable[Message] | AsyncIterable[Message]) -> list[SendResult]:
        """Send them; the results are in their order. Raises SendManyFailed: some could not be sent."""
        try:
            if isinstance(messages, AsyncIterable):
                self._linger_ms = self._settings.batch_delay_ms
                async for message in messages:
                    await self._add(message)
            else:
                for message in messages:
                    await self._add(message)
            for key in list(self._open):
                self._close(key)
            await asyncio.gather(*self._tasks)
        finally:
            self._stop()
        assert None not in self._results, "every batch fills its places"
        stored = [result for result in self._results if isinstance(result, SendResult)]
        if len(stored) < len(self._results):
            raise SendManyFailed([result for result in self._results if result is not None])
        return stored

    async def _add(self, message: Message) -> None:
        place = len(self._results)
        self._results.append(None)
        settings = self._settings
        unique_key = message.msg_id or self._next_key()
        try:
            queue = None if self._choose is None else await self._choose(message)
            if message.is_delayed or _is_large(message.body, settings):
                prepared = self._hooks.prepare(
                    Sending(self._group, [message]), lambda own: outgoing(message, unique_key, settings, own)
                )
                if queue in self._open:
                    self._close(queue)
                self._start([place], [unique_key], prepared, queue)
            else:
                self._put(message, queue, place, unique_key, batch_entry(message, unique_key, settings))
        except RmqError as error:
            self._results[place] = error
        while len(self._tasks) >= BATCHES_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def _put(
        self, message: Message, queue: MessageQueue | None, place: int, unique_key: str, entry: BatchEntry
    ) -> None:
        key = queue or (message.topic, message.wait_store)
        size = BATCH_ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        batch = self._open.get(key)
        if batch is not None and (
            batch.size + size > self._settings.batch_bytes or batch.first.wait_store != message.wait_store
        ):
            self._close(key)
            batch = None
        if batch is None:
            batch = self._open[key] = _Batch(message, queue)
            if self._hooks:
                batch.sending = Sending(self._group, [message], is_batch=True)
                batch.tell = self._hooks.sending(batch.sending)
            if self._linger_ms:
                loop = asyncio.get_running_loop()
                batch.timer = loop.call_later(self._linger_ms / 1000, self._close, key)
        if batch.sending is not None:
            if batch.entries:
                batch.sending.messages.append(message)
            entry = batch_entry(message, unique_key, self._settings, batch.sending.properties)
        batch.places.append(place)
        batch.unique_keys.append(unique_key)
        batch.entries.append(entry)
        batch.size += size

    def _close(self, key: _Key) -> None:
        """Send an open batch."""
        batch = self._open.pop(key)
        if batch.timer is not None:
            batch.timer.cancel()
        try:
            keys = batch.unique_keys
            prepared = outgoing_entries(batch.first, batch.entries, keys, self._next_key(), self._settings)
        except RmqError as error:
            if batch.tell is not None:
                batch.tell(SendOutcome(error=error))
            self._fill(batch.places, [error] * len(batch.places))
        else:
            prepared.tell = batch.tell
            self._start(batch.places, keys, prepared, batch.queue)

    def _start(self, places: list[int], unique_keys: list[str], prepared: Outgoing, queue: MessageQueue | None) -> None:
        task = asyncio.get_running_loop().create_task(self._run(places, unique_keys, prepared, queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, places: list[int], unique_keys: list[str], prepared: Outgoing, queue: MessageQueue | None
    ) -> None:
        try:
            if queue is None:
                result = await self._send(prepared, None)
            else:
                async with self._turns.setdefault(queue, asyncio.Lock()):
                    result = await self._send_in_turn(prepared, queue)
        except RmqError as error:
            if prepared.tell is not None:  # one before it in its queue was not sent
                prepared.tell(SendOutcome(error=error))
            self._fill(places, [error] * len(places))
        else:
            self._fill(places, _shares(result, unique_keys))

    async def _send_in_turn(self, prepared: Outgoing, queue: MessageQueue) -> SendResult:
        if queue in self._broken:
            raise self._broken[queue]
        try:
            return await self._send(prepared, queue)
        except RmqError as error:
            self._broken[queue] = error
            raise

    def _fill(self, places: Iterable[int], results: Iterable[SendResult | RmqError]) -> None:
        for place, result in zip(places, results, strict=True):
            self._results[place] = result

    def _stop(self) -> None:
        for batch in self._open.values():
            if batch.timer is not None:
                batch.timer.cancel()
        for task in self._tasks:
            task.cancel()


def _is_large(body: object, settings: ProducerSettings) -> bool:
    """Whether it will be compressed; what cannot be a body is left to the checks."""
    return isinstance(body, bytes) and len(body) >= settings.compress_body_bytes


def _shares(result: SendResult, unique_keys: list[str]) -> list[SendResult]:
    """Each message's share of the result of its batch."""
    if len(unique_keys) == 1:
        return [result]
    ids = result.offset_msg_id.split(",")
    ids = ids if len(ids) == len(unique_keys) else ids[:1] * len(unique_keys)  # some brokers name one for all
    return [
        replace(result, msg_id=key, offset_msg_id=offset_msg_id, queue_offset=result.queue_offset + i)
        for i, (key, offset_msg_id) in enumerate(zip(unique_keys, ids, strict=True))
    ]
