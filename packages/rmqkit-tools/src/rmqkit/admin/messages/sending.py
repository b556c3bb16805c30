"""Many messages sent in chunks, each with its own result, for ``rmq send`` and ``rmq replay``.

A chunk is sent as a whole before the next one is read, so that memory is the same for any number of messages. Messages
that request a queue, or have a sharding key, are sent one request after the other in their order; all others at the
same time. If one of the ordered messages cannot be sent, the messages after it are not tried: each would wait as long
again.
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
"""How long a broker may be waited for without a word."""

_NAMES_MAX = 3
_BATCH_BYTES_MAX = 128 << 10
_LARGE_BYTES = 4096
_CHUNKS_PER_SECOND = 10

Outcome = SendResult | RmqError
OnWait = Callable[[str, int], None]
"""Told who does not answer, as ``broker a or b``, and up to how many ms they are waited for."""


class Pace:
    """The maximum rate of messages: so many a second since the pace was made; 0: no limit."""

    def __init__(self, per_second: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._per_second = per_second
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        self._count = 0
        self.chunk_count = max(1, min(CHUNK_COUNT, int(per_second / _CHUNKS_PER_SECOND or CHUNK_COUNT)))

    async def passed(self, count: int) -> None:
        """Wait until so many more messages were allowed to go."""
        self._count += count
        if self._per_second:
            due_ms = self._started_ms + self._count * 1000 / self._per_second
            await asyncio.sleep(max(0.0, due_ms - self._clock.monotonic_ms()) / 1000)


class Stop:
    """A wish to end the task that made this: at once where it waits, but not before the end of what it `held`."""

    def __init__(self) -> None:
        self.is_asked = False
        self._is_held = False
        self._task = asyncio.current_task()

    def ask(self) -> None:
        """End with CancelledError; asked a second time, wherever it is."""
        if self._task is not None and (self.is_asked or not self._is_held):
            self._task.cancel()
        self.is_asked = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Not in the middle of this."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        # Asked meanwhile: it was kept from the task then, so the task has to be ended here.
        if self.is_asked:
            raise asyncio.CancelledError


class Silence:
    """Calls a function when nothing was heard for `SILENT_SECONDS`, once each time; a context manager, on a loop."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(SILENT_SECONDS, self._tell)
        return self

    def heard(self) -> None:
        """Start the timer again."""
        self._timer.cancel()
        self.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._timer.cancel()


class ChunkProducer(Protocol):
    """The part of `rmqkit.Producer` that sends chunks."""

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
    """Send messages, up to ``batch_count`` in one request; the result or the error of each, in their order."""
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
    """Send a chunk like `send_chunk`; ``waiting`` has the brokers of chosen queues that have not answered yet."""
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
            # Nothing more to a queue after a failed send, or what follows would be stored in front of it.
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
    """The brokers that a message may go to, as far as they are known."""
    return {one.name for one in producer.status().brokers if one.broker_id == MASTER_ID}


def _named(names: Collection[str]) -> str:
    some = sorted(names)
    if not some:
        return _("a broker that takes the topic")
    more = [_("{count} more", count=len(some) - _NAMES_MAX)] if len(some) > _NAMES_MAX else []
    return _("broker {value}", value=" or ".join([*some[:_NAMES_MAX], *more]))


def _requests(messages: Sequence[PlacedMessage], numbers: Sequence[int], batch_count: int) -> Iterator[list[int]]:
    """Which messages go together: neighbours of one topic. Some go alone: delayed ones, those
    with a priority, and such as may be compressed."""
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
    # One of them is illegal: nothing is stored, and the others can go.
    return [(await _send(producer, [one], queue))[0] for one in messages]


def is_illegal(error: RmqError) -> bool:
    """Return True if no broker would ever take the message."""
    return isinstance(error, MessageIllegal) or (
        isinstance(error, PeerRefused) and error.code == ResponseCode.MESSAGE_ILLEGAL
    )
