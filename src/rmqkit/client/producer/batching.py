"""Many messages in few requests (``ProduceAccumulator``): what `Producer.send_many` does with them.

==============================  ================================================================================
a message                       goes
==============================  ================================================================================
of a topic and ``wait_store``   into the open batch of these, or of its queue when a selector chooses one
delayed, or large enough to be  out alone: batches can do neither
compressed
==============================  ================================================================================

A batch is closed at ``batch_bytes``, ``batch_delay_ms`` after its first message, or at the end (`open_batches`). Its
messages lie one after the other in one queue. With a selector the batches of a queue go out one by one, so that order
is kept, and after a failed one nothing more is sent to it. While `BATCHES_MAX` are under way no message is taken from
the program: a source that never ends costs no more memory than that, apart from the results. Loop only.
Source: behaviour.md §7.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable

from rmqkit.client.observe.hooks import Hooks, Sending, SendOutcome
from rmqkit.client.producer.encode import Outgoing, outgoing
from rmqkit.client.producer.open_batches import Batch, OpenBatches, is_large, shares
from rmqkit.client.producer.sender import SendResult
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import ClientError, RmqError
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
                    Sending(self._group, [message]), lambda own: outgoing(message, unique_key, settings, own)
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

    def _closed(self, batch: Batch[int], prepared: Outgoing | RmqError) -> None:
        if isinstance(prepared, RmqError):
            self._fill(batch.places, [prepared] * len(batch.places))
        else:
            self._start(batch.places, batch.unique_keys, prepared, batch.queue)

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
            self._fill(places, shares(result, unique_keys))

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
        self._open.forget()
        for task in self._tasks:
            task.cancel()
