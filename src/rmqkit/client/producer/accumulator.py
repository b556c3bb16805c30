"""Many messages in few requests (``ProduceAccumulator``): single sends with ``auto_batch``, and `Producer.send_many`.

==========================================  ========================================================================
a message                                   goes
==========================================  ========================================================================
of `send`, with ``auto_batch``              into the open batch of its topic, queue, ``wait_store`` and tag
of `send_many`                              into the open batch of its topic and ``wait_store``, or of its queue when a
                                            selector chooses one
delayed, with a priority, or large enough   out alone: no batch carries these
to be compressed
of `send`, to a retry topic, or beyond      out alone and at once, like every send without ``auto_batch``
``batch_total_bytes`` that wait already
==========================================  ========================================================================

A batch closes when the next message would make it larger than ``batch_bytes`` or than a message may be,
``batch_delay_ms`` after its first message, or when its owner says so. It is handed over once: prepared, or with the
error that all of its messages get. Its messages lie one after the other in one queue.

Every caller of `send` gets the result of its own message, or the error of the batch. A caller that is cancelled takes
nothing back: its message goes with the others. A program that awaits one send after the other only gets slower.

`send_many` sends the batches of a chosen queue one by one, so that order is kept, and sends nothing more to a queue
after a failed one. While `BATCHES_MAX` are under way it takes no message from the program: a source that never ends
costs no more memory than that, apart from the results. Loop only. Source: behaviour.md §7.8, §7.12.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.client.observe.hooks import Hooks, Sending, SendOutcome, SendResult
from rmqkit.client.producer.encode import EncodedMessage, batch_entry, encode_entries, encode_message
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import ClientError, RmqError
from rmqkit.protocol.batch import BATCH_ENTRY_BYTES_MIN, BatchEntry
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.tasks import Tasks

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")

_Place = asyncio.Future[SendResult]

BATCHES_MAX = 32

_Send = Callable[[EncodedMessage, MessageQueue | None], Awaitable[SendResult]]
_Choose = Callable[[Message], Awaitable[MessageQueue | None]]
_Key = MessageQueue | tuple[str, bool]


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
    on_end: Callable[[SendOutcome], None] | None = None


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
        closed: Callable[[Batch[P], EncodedMessage | RmqError], None],
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
            batch.on_end = self._hooks.sending(batch.sending)
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
        prepared: EncodedMessage | RmqError
        try:
            keys = batch.unique_keys
            prepared = encode_entries(batch.first, batch.entries, keys, self._next_key(), self._settings)
        except RmqError as error:
            if batch.on_end is not None:
                batch.on_end(SendOutcome(error=error))
            prepared = error
        else:
            prepared.on_end = batch.on_end
        self._closed(batch, prepared)

    def close_all(self) -> None:
        """Hand over every batch."""
        for key in list(self._open):
            self.close(key)

    def discard_all(self) -> None:
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


class Accumulator:
    """What the single sends of one producer wait in.

    Args:
        send: sends what is prepared, to a queue if one is chosen.
        next_key, hooks: as of `OpenBatches`.
    """

    def __init__(
        self,
        group: str,
        settings: ProducerSettings,
        *,
        send: Callable[[EncodedMessage, MessageQueue | None], Awaitable[SendResult]],
        next_key: Callable[[], str],
        hooks: Hooks,
    ) -> None:
        self._settings = settings
        self._send = send
        self._open: OpenBatches[tuple[str, MessageQueue | None, bool, str | None], _Place] = OpenBatches(
            group, settings, hooks=hooks, next_key=next_key, closed=self._closed, linger_ms=settings.batch_delay_ms
        )
        self._bytes = 0
        self._tasks = Tasks()

    def accepts(self, message: Message) -> bool:
        """Whether a message may wait for others."""
        return not (
            self._bytes >= self._settings.batch_total_bytes
            or message.goes_alone
            or is_large(message.body, self._settings)
            or message.topic.startswith(RETRY_PREFIX)
        )

    async def send(self, message: Message, queue: MessageQueue | None) -> SendResult:
        """Send a message together with others. Raises as `Producer.send`."""
        place: _Place = asyncio.get_running_loop().create_future()
        key = (message.topic, queue, message.wait_store, message.tags)
        size = self._open.add(key, message, queue, place)  # which may close, and take off, another batch
        self._bytes += size
        return await place

    async def close(self) -> None:
        """Send what is open, and wait until everybody has a result or an error."""
        self._open.close_all()
        await self._tasks.finish()

    def _closed(self, batch: Batch[_Place], prepared: EncodedMessage | RmqError) -> None:
        if isinstance(prepared, RmqError):
            self._fail(batch, prepared)
        else:
            self._tasks.start(self._run(batch, prepared), "accumulated batch")

    async def _run(self, batch: Batch[_Place], prepared: EncodedMessage) -> None:
        try:
            result = await self._send(prepared, batch.queue)
        except asyncio.CancelledError:  # the loop ends
            for place in batch.places:
                place.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the task's outer edge: whoever waits is told what it was
            self._fail(batch, error)
        else:
            self._bytes -= batch.size
            for place, share in zip(batch.places, shares(result, batch.unique_keys), strict=True):
                if not place.done():
                    place.set_result(share)

    def _fail(self, batch: Batch[_Place], error: Exception) -> None:
        self._bytes -= batch.size
        for place in batch.places:
            if not place.done():
                place.set_exception(error)


class SendManyFailed(ClientError):
    """Some messages of a `Producer.send_many` could not be sent.
    ``results`` has for each message, in their order, its result or the error."""

    def __init__(self, results: list[SendResult | RmqError]) -> None:
        failures = [result for result in results if isinstance(result, RmqError)]
        super().__init__(f"{len(failures)} of {len(results)} messages not sent, the first because: {failures[0]}")
        self.results = results


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
        self._open: OpenBatches[_Key, int] = OpenBatches(
            group, settings, hooks=hooks, next_key=next_key, closed=self._closed
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[MessageQueue, asyncio.Lock] = {}
        self._broken: dict[MessageQueue, RmqError] = {}
        self._results: list[SendResult | RmqError | None] = []
        self._refusal: RmqError | None = None

    async def send_all(self, messages: Iterable[Message] | AsyncIterable[Message]) -> list[SendResult]:
        """Send them; the results are in their order. Raises SendManyFailed: some could not be sent."""
        try:
            if isinstance(messages, AsyncIterable):
                self._open.linger_ms = self._settings.batch_delay_ms
                async for message in messages:
                    if not await self._add(message):
                        break
            else:
                for message in messages:
                    if not await self._add(message):
                        break
            self._open.close_all()
            await asyncio.gather(*self._tasks)
        finally:
            self._stop()
        assert None not in self._results, "every batch fills its places"
        stored = [result for result in self._results if isinstance(result, SendResult)]
        if len(stored) < len(self._results):
            raise SendManyFailed([result for result in self._results if result is not None])
        return stored

    async def close(self, refusal: RmqError) -> None:
        """Send what was taken, and wait for it; the next message is refused, and none taken after it."""
        self._refusal = refusal
        self._open.close_all()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _add(self, message: Message) -> bool:
        """Take a message; whether further ones are taken."""
        place = len(self._results)
        self._results.append(None)
        settings = self._settings
        try:
            queue = None if self._choose is None else await self._choose(message)
            if self._refusal is not None:
                raise self._refusal
            if message.goes_alone or is_large(message.body, settings):
                unique_key = message.msg_id or self._next_key()
                prepared = self._hooks.prepare(
                    Sending(self._group, [message]), lambda own: encode_message(message, unique_key, settings, own)
                )
                if queue is not None:
                    self._open.close(queue)
                self._start([place], [unique_key], prepared, queue)
            else:
                self._open.add(queue or (message.topic, message.wait_store), message, queue, place)
        except RmqError as error:
            self._results[place] = error
        while len(self._tasks) >= BATCHES_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return self._results[place] is None or self._results[place] is not self._refusal

    def _closed(self, batch: Batch[int], prepared: EncodedMessage | RmqError) -> None:
        if isinstance(prepared, RmqError):
            self._fill(batch.places, [prepared] * len(batch.places))
        else:
            self._start(batch.places, batch.unique_keys, prepared, batch.queue)

    def _start(
        self, places: list[int], unique_keys: list[str], prepared: EncodedMessage, queue: MessageQueue | None
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._run(places, unique_keys, prepared, queue))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, places: list[int], unique_keys: list[str], prepared: EncodedMessage, queue: MessageQueue | None
    ) -> None:
        try:
            if queue is None:
                result = await self._send(prepared, None)
            else:
                async with self._turns.setdefault(queue, asyncio.Lock()):
                    result = await self._send_in_turn(prepared, queue)
        except RmqError as error:
            if prepared.on_end is not None:  # one before it in its queue was not sent
                prepared.on_end(SendOutcome(error=error))
            self._fill(places, [error] * len(places))
        else:
            self._fill(places, shares(result, unique_keys))

    async def _send_in_turn(self, prepared: EncodedMessage, queue: MessageQueue) -> SendResult:
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
        self._open.discard_all()
        for task in self._tasks:
            task.cancel()
