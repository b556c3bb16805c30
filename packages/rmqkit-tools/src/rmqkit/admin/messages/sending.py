"""The sending of many messages in chunks, with a result for each message, for ``rmq send`` and ``rmq replay``.

A chunk is sent as a whole before the next chunk is read. So the memory does not grow with the number of messages.
Messages with a queue or a sharding key are sent in order, one request after the other. All other messages are sent at
the same time. If a message for an ordered queue cannot be sent, the later messages for this queue are not sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from rmqkit.admin.calls import MASTER_ID
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.observe.status import ProducerStatus
from rmqkit.client.producer.accumulator import shares
from rmqkit.client.producer.selectors import PlacedMessage, by_place
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import MessageIllegal, NoRoute, PeerRefused, RmqError, SendFailed
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.sentences import _

__all__ = ["CHUNK_COUNT", "ChunkProducer", "OnWait", "Outcome", "Pace", "Silence", "Stop", "is_illegal", "send_chunk"]

CHUNK_COUNT = 256
SILENT_SECONDS = 2.0
"""The time without an answer after which the user is notified."""

_NAMES_MAX = 3
_BATCH_BYTES_MAX = 128 << 10
_LARGE_BYTES = 4096
_CHUNKS_PER_SECOND = 10

Outcome = SendResult | RmqError
OnWait = Callable[[str, int], None]
"""A function that gets the names of the brokers without an answer (``broker a or b``), and the maximum wait in ms."""


class Pace:
    """A limit on the rate of messages per second, measured since the creation of this object. 0: no limit."""

    def __init__(self, per_second: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._per_second = per_second
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        self._count = 0
        self.chunk_count = max(1, min(CHUNK_COUNT, int(per_second / _CHUNKS_PER_SECOND or CHUNK_COUNT)))

    async def passed(self, count: int) -> None:
        """Wait until the rate allows ``count`` more messages."""
        self._count += count
        if self._per_second:
            due_ms = self._started_ms + self._count * 1000 / self._per_second
            await asyncio.sleep(max(0.0, due_ms - self._clock.monotonic_ms()) / 1000)


class Stop:
    """A request to stop the task that created this object, immediately or at the end of a `held` section."""

    def __init__(self) -> None:
        self.is_asked = False
        self._is_held = False
        self._task = asyncio.current_task()

    def ask(self) -> None:
        """Cancel the task. In a `held` section, the first call delays the cancellation to the end of the section."""
        if self._task is not None and (self.is_asked or not self._is_held):
            self._task.cancel()
        self.is_asked = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Enter a section that the first `ask` does not interrupt."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        # A stop inside the section has not cancelled the task.
        if self.is_asked:
            raise asyncio.CancelledError


class Silence:
    """A context manager that calls a function if `heard` is not called for `SILENT_SECONDS`."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._tell)
        return self

    def heard(self) -> None:
        """Restart the timer."""
        self._timer.cancel()
        self.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()


class ChunkProducer(Protocol):
    """The methods of `rmqkit.Producer` that `send_chunk` uses."""

    @property
    def settings(self) -> ProducerSettings: ...
    async def send(self, message: PlacedMessage, *, queue: MessageQueue | None = None) -> SendResult: ...
    async def send_batch(
        self, messages: Sequence[PlacedMessage], *, queue: MessageQueue | None = None
    ) -> SendResult: ...
    async def queues(self, topic: str) -> list[MessageQueue]: ...
    def status(self) -> ProducerStatus: ...


async def send_chunk(
    producer: ChunkProducer,
    messages: Sequence[PlacedMessage],
    *,
    batch_count: int = 1,
    on_wait: OnWait = lambda who, up_to_ms: None,
) -> list[Outcome]:
    """Send messages, up to ``batch_count`` in one request. Return the result or the error of each message, in order."""
    waiting: dict[str, int] = {}

    def tell() -> None:
        on_wait(_named(waiting or _masters(producer)), producer.settings.send_timeout_ms)

    with Silence(tell) as silence:
        return await _send_lanes(producer, messages, batch_count, waiting, silence)


async def _send_lanes(
    producer: ChunkProducer,
    messages: Sequence[PlacedMessage],
    batch_count: int,
    waiting: dict[str, int],
    silence: Silence,
) -> list[Outcome]:
    """Send a chunk like `send_chunk`. ``waiting`` has the number of unfinished queues of each broker."""
    outcomes: dict[int, Outcome] = {}
    lanes: dict[MessageQueue | None, list[int]] = {}
    for number, message in enumerate(messages):
        try:
            queue = by_place(await producer.queues(message.topic), message) if message.is_placed else None
        except RmqError as error:
            outcomes[number] = error
        else:
            lanes.setdefault(queue, []).append(number)

    async def work(requests: Iterator[list[int]], queue: MessageQueue | None) -> None:
        if queue is not None:
            waiting[queue.broker_name] = waiting.get(queue.broker_name, 0) + 1
        for numbers in requests:
            some = [messages[number] for number in numbers]
            sent = await _send(producer, some, queue)
            silence.heard()
            outcomes.update(zip(numbers, sent, strict=True))
            # After a failed send, send no more to the queue: later messages would be stored before the failed message.
            if queue is not None and isinstance(sent[-1], (SendFailed, NoRoute)):
                outcomes.update({number: sent[-1] for rest in requests for number in rest})
        if queue is not None and (left := waiting.pop(queue.broker_name) - 1):
            waiting[queue.broker_name] = left

    async with asyncio.TaskGroup() as tasks:
        for queue, numbers in lanes.items():
            requests = _requests(messages, numbers, batch_count)
            for lane in [requests] if queue is not None else [iter([one]) for one in requests]:
                tasks.create_task(work(lane, queue), name=_("send of a chunk"))
    return [outcomes[number] for number in range(len(messages))]


def _masters(producer: ChunkProducer) -> set[str]:
    """Return the names of the known masters, which may receive a message."""
    return {one.name for one in producer.status().brokers if one.broker_id == MASTER_ID}


def _named(names: Collection[str]) -> str:
    some = sorted(names)
    if not some:
        return _("a broker that accepts the topic")
    more = [_("{count} more", count=len(some) - _NAMES_MAX)] if len(some) > _NAMES_MAX else []
    return _("broker {value}", value=" or ".join([*some[:_NAMES_MAX], *more]))


def _requests(messages: Sequence[PlacedMessage], numbers: Sequence[int], batch_count: int) -> Iterator[list[int]]:
    """Yield the numbers of the messages of each request. Consecutive messages of the same topic share a request.
    Delayed messages, messages with a priority and large messages (which may be compressed) are sent alone."""
    together: list[int] = []
    size, topic = 0, ""
    for number in numbers:
        message = messages[number]
        is_alone = message.goes_alone or len(message.body) >= _LARGE_BYTES
        size += len(message.body)
        if together and (is_alone or len(together) == batch_count or size > _BATCH_BYTES_MAX or message.topic != topic):
            yield together
            together, size = [], len(message.body)
        together.append(number)
        topic = "" if is_alone else message.topic
    if together:
        yield together


async def _send(
    producer: ChunkProducer, messages: Sequence[PlacedMessage], queue: MessageQueue | None
) -> Sequence[Outcome]:
    try:
        if len(messages) == 1:
            return [await producer.send(messages[0], queue=queue)]
        sent = await producer.send_batch(messages, queue=queue)
        return shares(sent, sent.msg_id.split(","))
    except RmqError as error:
        if len(messages) == 1 or not is_illegal(error):
            return [error] * len(messages)
    # A message of the batch is illegal. No message was stored, so send each message alone.
    return [(await _send(producer, [one], queue))[0] for one in messages]


def is_illegal(error: RmqError) -> bool:
    """Return True if every broker would refuse the message."""
    return isinstance(error, MessageIllegal) or (
        isinstance(error, PeerRefused) and error.code == ResponseCode.MESSAGE_ILLEGAL
    )
