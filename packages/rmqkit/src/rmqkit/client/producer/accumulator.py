"""Many messages in few requests (``ProduceAccumulator``): single sends with ``batch.auto``, and `Producer.send_many`.

==========================================  ========================================================================
a message                                   is sent
==========================================  ========================================================================
of `send`, with ``batch.auto``              in the open batch of its topic, queue, ``wait_store`` and tag
of `send_many`                              in the open batch of its topic and ``wait_store``, or of its queue if a
                                            selector chooses it
delayed, with a priority, or large enough   alone: no batch contains these
to be compressed
of `send`, to a retry topic, or when        alone and immediately, like every send without ``batch.auto``
``batch_total_bytes`` wait already
==========================================  ========================================================================

A batch closes when the next message would make it larger than ``batch.bytes`` or than the maximum size of a message,
``batch.delay_ms`` after its first message, or when its owner closes it. It is passed on once: as a prepared batch, or
with an error for all of its messages. Its messages are stored one after the other in one queue.

Every caller of `send` gets the result of its own message, or the error of the batch. If a caller is cancelled, its
message is sent nevertheless. ``batch.auto`` makes a program slower if it awaits each send before the next one.

`send_many` sends the batches of a chosen queue one after the other to preserve the order. After a failed batch, it
sends nothing more to the queue. While `BATCHES_MAX` batches are in flight, it takes no messages from the program.
Therefore an endless source needs only the memory of these batches and of the results. Use this module only on the event
loop. Source: behaviour.md §7.8, §7.12.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from rmqkit.client.observe.hooks import Hooks, Sending, SendOutcome, SendResult
from rmqkit.client.producer.encode import EncodedMessage, batch_entry, encode_entries, encode_message, with_bytes
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import ClientError, RmqError
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.record import BATCH_ENTRY_BYTES_MIN, BatchEntry
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.remoting.tasks import Tasks

BATCHES_MAX = 32
"""The maximum number of requests of one `Producer.send_many` in flight."""

K = TypeVar("K", bound=Hashable)
P = TypeVar("P")
Send = Callable[[EncodedMessage, MessageQueue | None], Awaitable[SendResult]]
Choose = Callable[[Message], Awaitable[MessageQueue | None]]


class Batch(Struct, Generic[P]):
    """Messages that share one request. For each message, ``places`` contains the place to which its result belongs."""

    queue: MessageQueue | None
    places: list[P] = field(default_factory=list)
    unique_keys: list[str] = field(default_factory=list)
    entries: list[BatchEntry] = field(default_factory=list)
    size: int = 0
    timer: asyncio.TimerHandle | None = None
    sending: Sending | None = None
    on_end: Callable[[SendOutcome], None] | None = None


@dataclass(eq=False)
class OpenBatches(ABC, Generic[K, P]):
    """Open batches, one for each key. Each batch collects messages and is passed on once.

    ``deliver`` sends a prepared batch to the chosen queue, or to any queue if none was chosen. ``next_key`` creates
    unique keys. ``hooks`` get every batch. ``linger_ms`` is the time for which a batch stays open for further messages;
    with 0, only its owner closes it."""

    group: str
    settings: ProducerSettings
    _: KW_ONLY
    deliver: Send
    next_key: Callable[[], str]
    hooks: Hooks
    linger_ms: float = 0.0

    def __post_init__(self) -> None:
        self._open: dict[K, tuple[Message, Batch[P]]] = {}
        self._bytes_max = min(self.settings.batch.bytes, self.settings.limits.message_bytes_max)

    @abstractmethod
    def _start_send(self, batch: Batch[P], prepared: EncodedMessage) -> None:
        """Start to send a closed batch."""

    @abstractmethod
    def _fail(self, batch: Batch[P], error: Exception) -> None:
        """Set the same error for every message of a batch."""

    def _add_to_batch(self, key: K, message: Message, queue: MessageQueue | None, place: P) -> int:
        """Add a message to the open batch of a key. Return the number of bytes that the message needs in the batch.
        Raises MessageIllegal: the message is invalid, or a batch cannot contain it."""
        unique_key = message.msg_id or self.next_key()
        # Check the message before any batch changes: a refused message must not close or start a batch.
        entry = batch_entry(message, unique_key, self.settings)
        size = BATCH_ENTRY_BYTES_MIN + len(entry.body) + len(entry.properties)
        first, batch = self._open.get(key, (message, None))
        if batch is not None and (batch.size + size > self._bytes_max or first.wait_store != message.wait_store):
            self._close_batch(key)
            batch = None
        if batch is None:
            batch = self._begin_batch(key, message, queue)
        if batch.sending is not None:
            if batch.entries:
                batch.sending.messages.append(message)
                # Hooks may have added properties when the batch began. All of its messages get them.
            entry = batch_entry(message, unique_key, self.settings, batch.sending.properties)
        batch.places.append(place)
        batch.unique_keys.append(unique_key)
        batch.entries.append(entry)
        batch.size += size
        return size

    def _begin_batch(self, key: K, message: Message, queue: MessageQueue | None) -> Batch[P]:
        assert key not in self._open, "a key has one open batch"
        batch: Batch[P] = Batch(queue)
        self._open[key] = message, batch
        if self.hooks:
            batch.sending = Sending(self.group, [message], is_batch=True)
            batch.on_end = self.hooks.sending(batch.sending)
        if self.linger_ms:
            batch.timer = asyncio.get_running_loop().call_later(self.linger_ms / 1000, self._close_batch, key)
        return batch

    def _close_batch(self, key: K) -> None:
        """Pass on the open batch of a key if there is one."""
        first, batch = self._open.pop(key, (None, None))
        if first is None or batch is None:
            return
        assert len(batch.places) == len(batch.unique_keys) == len(batch.entries) > 0, "the lists have equal length"
        # Cancel the timer of a batch that is full before its time. Otherwise it would close the next batch of the key
        # too early.
        if batch.timer is not None:
            batch.timer.cancel()
        try:
            prepared = encode_entries(first, batch.entries, batch.unique_keys, self.next_key(), self.settings)
        except RmqError as error:
            if batch.on_end is not None:
                batch.on_end(SendOutcome(error=error))
            self._fail(batch, error)
        else:
            prepared.on_end = batch.on_end
            self._start_send(batch, prepared)

    def _close_all(self) -> None:
        for key in list(self._open):
            self._close_batch(key)

    def _discard_all(self) -> None:
        """Drop the open batches, because no caller waits for them."""
        for _, batch in self._open.values():
            if batch.timer is not None:
                batch.timer.cancel()
        self._open.clear()


def is_large(body: object, settings: ProducerSettings) -> bool:
    """Return True if a body will be compressed. A batch cannot contain such a message. Invalid bodies are refused by
    other checks."""
    return isinstance(body, bytes) and len(body) >= settings.compression.body_bytes_min


def shares(result: SendResult, unique_keys: list[str]) -> list[SendResult]:
    """Split the result of a batch into one result for each message."""
    if len(unique_keys) == 1:
        return [result]
    ids = result.offset_msg_id.split(",")
    ids = ids if len(ids) == len(unique_keys) else ids[:1] * len(unique_keys)  # some brokers return one id for all
    return [
        replace(result, msg_id=key, offset_msg_id=offset_msg_id, queue_offset=result.queue_offset + i)
        for i, (key, offset_msg_id) in enumerate(zip(unique_keys, ids, strict=True))
    ]


class Accumulator(OpenBatches[tuple[str, MessageQueue | None, bool, str | None], "asyncio.Future[SendResult]"]):
    """The open batches in which the single sends of a producer wait for further messages. A place is the future for
    which the caller waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.linger_ms = self.settings.batch.delay_ms
        self._bytes = 0
        self._tasks = Tasks()

    def accepts(self, message: Message) -> bool:
        """Return True if a message can wait for others."""
        return not (
            self._bytes >= self.settings.batch.total_bytes
            or message.goes_alone
            or message.lite_topic is not None
            or is_large(message.body, self.settings)
            or message.topic.startswith(RETRY_PREFIX)
        )

    async def send(self, message: Message, queue: MessageQueue | None) -> SendResult:
        """Send a message together with others. Raises the same errors as `Producer.send`."""
        place: asyncio.Future[SendResult] = asyncio.get_running_loop().create_future()
        key = (message.topic, queue, message.wait_store, message.tags)
        # Use two statements: the addition may close another batch, and a failure of that batch reduces `_bytes`
        # meanwhile.
        size = self._add_to_batch(key, message, queue, place)
        self._bytes += size
        return await place

    async def close(self) -> None:
        """Send the open batches, and wait until every caller has a result or an error."""
        self._close_all()
        await self._tasks.finish()

    def _start_send(self, batch: Batch[asyncio.Future[SendResult]], prepared: EncodedMessage) -> None:
        self._tasks.start(self._send_batch(batch, prepared), "accumulated batch")

    async def _send_batch(self, batch: Batch[asyncio.Future[SendResult]], prepared: EncodedMessage) -> None:
        try:
            result = await self.deliver(prepared, batch.queue)
        except asyncio.CancelledError:  # the loop stops
            for place in batch.places:
                place.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the task's outer edge: the callers get the error
            self._fail(batch, error)
        else:
            self._take_off(batch)
            for place, share in zip(batch.places, shares(result, batch.unique_keys), strict=True):
                if not place.done():  # a cancelled caller does not wait; its message is stored nevertheless
                    place.set_result(share)

    def _fail(self, batch: Batch[asyncio.Future[SendResult]], error: Exception) -> None:
        self._take_off(batch)
        for place in batch.places:
            if not place.done():
                place.set_exception(error)

    def _take_off(self, batch: Batch[asyncio.Future[SendResult]]) -> None:
        self._bytes -= batch.size
        assert self._bytes >= 0, "a batch subtracts only bytes that it added"


class SendManyFailed(ClientError):
    """An error: some messages of `Producer.send_many` were not sent.
    ``results`` contains the result or the error of each message, in the order of the messages."""

    def __init__(self, results: list[SendResult | RmqError]) -> None:
        failures = [result for result in results if isinstance(result, RmqError)]
        super().__init__(f"{len(failures)} of {len(results)} messages not sent, the first because: {failures[0]}")
        self.results = results


@dataclass(eq=False)
class SendMany(OpenBatches[MessageQueue | tuple[str, bool], int]):
    """One call of `Producer.send_many`. A place is the index of a message among the results.
    ``choose`` returns the queue of a message, or None if any queue is possible. It is called for messages with a
    sharding key; with ``chooses_all``, for every message."""

    choose: Choose | None = None
    chooses_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[MessageQueue, asyncio.Lock] = {}
        self._broken: dict[MessageQueue, RmqError] = {}
        self._results: list[SendResult | RmqError | None] = []
        self._refusal: RmqError | None = None

    async def send_all(self, messages: Iterable[Message] | AsyncIterable[Message]) -> list[SendResult]:
        """Send the messages, and return the results in the order of the messages. Raises SendManyFailed: some messages
        could not be sent."""
        try:
            if isinstance(messages, AsyncIterable):
                # Only an asynchronous source can delay a batch. Any other source fills the batch or ends.
                self.linger_ms = self.settings.batch.delay_ms
                async for message in messages:
                    if not await self._add(message):
                        break
            else:
                for message in messages:
                    if not await self._add(message):
                        break
            self._close_all()
            await asyncio.gather(*self._tasks)
        finally:
            self._discard_all()
            for task in self._tasks:
                task.cancel()
        assert None not in self._results, "every message has a result"
        stored = [result for result in self._results if isinstance(result, SendResult)]
        if len(stored) < len(self._results):
            raise SendManyFailed([result for result in self._results if result is not None])
        return stored

    async def close(self, refusal: RmqError) -> None:
        """Send the accepted messages and wait for them. Refuse the next message, and stop."""
        self._refusal = refusal
        self._close_all()
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _add(self, message: Message) -> bool:
        """Accept a message. Return True if further messages are accepted."""
        place = len(self._results)
        self._results.append(None)
        settings = self.settings
        try:
            queue = None
            is_chosen = message.sharding_key is not None or message.lite_topic is not None
            if self.choose is not None and (self.chooses_all or is_chosen):
                queue = await self.choose(message)
                # Check this after the await: `close` may be called while the program chooses a queue.
            if self._refusal is not None:
                raise self._refusal
            message = with_bytes(message)
            if message.goes_alone or message.lite_topic is not None or is_large(message.body, settings):
                unique_key = message.msg_id or self.next_key()
                prepared = self.hooks.prepare(
                    Sending(self.group, [message]), lambda own: encode_message(message, unique_key, settings, own)
                )
                if queue is not None:
                    self._close_batch(queue)  # earlier messages of the queue are sent first
                self._start_send(Batch(queue, [place], [unique_key]), prepared)
            else:
                self._add_to_batch(queue or (message.topic, message.wait_store), message, queue, place)
        except RmqError as error:
            self._results[place] = error
        while len(self._tasks) >= BATCHES_MAX:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return self._results[place] is None or self._results[place] is not self._refusal

    def _start_send(self, batch: Batch[int], prepared: EncodedMessage) -> None:
        task = asyncio.get_running_loop().create_task(self._send_batch(batch, prepared))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_batch(self, batch: Batch[int], prepared: EncodedMessage) -> None:
        try:
            if batch.queue is None:
                result = await self.deliver(prepared, None)
            else:
                # asyncio's locks are fair, and tasks start in the order of their creation. Therefore batches are sent
                # in the order in which they were closed.
                async with self._turns.setdefault(batch.queue, asyncio.Lock()):
                    result = await self._send_in_turn(prepared, batch.queue)
        except RmqError as error:
            if prepared.on_end is not None:  # not passed to the sender: an earlier batch of its queue failed
                prepared.on_end(SendOutcome(error=error))
            self._fail(batch, error)
        else:
            for place, share in zip(batch.places, shares(result, batch.unique_keys), strict=True):
                assert self._results[place] is None, "each message gets one result"
                self._results[place] = share

    async def _send_in_turn(self, prepared: EncodedMessage, queue: MessageQueue) -> SendResult:
        if queue in self._broken:
            raise self._broken[queue]
        try:
            return await self.deliver(prepared, queue)
        except RmqError as error:
            self._broken[queue] = error
            raise

    def _fail(self, batch: Batch[int], error: Exception) -> None:
        assert isinstance(error, RmqError), "only errors of rmqkit are results"
        for place in batch.places:
            self._results[place] = error
