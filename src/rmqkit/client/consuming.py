"""Running handlers on pulled messages, and what becomes of a message after (``ConsumeMessageConcurrentlyService``).

==========================  ==================================================================================
a handler …                 then
==========================  ==================================================================================
returns                     the message is consumed
raises                      the broker is asked to deliver it again later (CONSUMER_SEND_MSG_BACK): the message
                            here is consumed, a copy comes through ``%RETRY%<group>`` after the delay of its level
… and that fails            the copy is sent to the retry topic by ourselves
… and that fails, too       it stays, holds the offset back, and is handled again after 5 s
runs longer than 15 min     as if it had raised; its outcome does not matter any more
==========================  ==================================================================================

A fixed number of workers takes messages in the order they were pulled; nothing is started per message. A coroutine
function runs on the loop, a plain function in a thread. Loop only. Source: behaviour.md §8.8, remoting.md §9.5.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from rmqkit.client.offsets import GroupOffsets
from rmqkit.client.outgoing import outgoing_retry
from rmqkit.client.process_queue import NOTHING_HELD, ProcessQueue
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.sender import Sender
from rmqkit.client.settings import ProducerSettings, PushConsumerSettings
from rmqkit.client.tasks import Tasks
from rmqkit.errors import RmqError
from rmqkit.protocol import properties as names
from rmqkit.protocol.headers.clients import ConsumerSendBackRequest
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX

__all__ = ["AsyncHandler", "ConsumeLater", "Consuming", "Handler", "HandlerOf"]

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]
AsyncHandler = Callable[[ReceivedMessage], Awaitable[object]]
HandlerOf = Callable[[str], AsyncHandler | None]
"""The handler of a topic; None when messages of it are taken by `Consuming.next`."""

_TO_DEAD_LETTERS = -1
_RETRIES_MAX = 16
_EXPIRED_LEVEL = 3
_EXPIRED_PER_ROUND = 16
_INNER_PRODUCER = "CLIENT_INNER_PRODUCER"

_log = logging.getLogger(__name__)
_Item = tuple[ProcessQueue, ReceivedMessage]


class ConsumeLater(Exception):
    """A handler raises this to choose when it gets the message again.

    Args:
        delay_level: 1 to 18 for the broker's delay levels, 0 lets the broker choose, -1 for the dead letters.
    """

    def __init__(self, delay_level: int = 0) -> None:
        super().__init__(f"message is to be consumed again at delay level {delay_level}")
        self.delay_level = delay_level


class Consuming:
    """The workers of one push consumer."""

    def __init__(
        self,
        runtime: ClientRuntime,
        group: str,
        offsets: GroupOffsets,
        settings: PushConsumerSettings,
        handler_of: HandlerOf,
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._offsets = offsets
        self._settings = settings
        self._handler_of = handler_of
        self._retries_max = _RETRIES_MAX if settings.retries_max < 0 else settings.retries_max
        self._resend = Sender(runtime, _INNER_PRODUCER, ProducerSettings())
        self._ready: asyncio.Queue[_Item] = asyncio.Queue()
        self._taken_by_hand: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._again: set[asyncio.TimerHandle] = set()
        self._tasks = Tasks()
        self._threads = ThreadPoolExecutor(settings.handlers_max, thread_name_prefix=f"rmqkit {group}")

    def start(self) -> None:
        """Begin to handle messages."""
        for number in range(self._settings.handlers_max):
            self._tasks.start(self._work(), f"handler {number} of group {self._group}")

    async def close(self) -> None:
        """Stop; handlers that still run are cancelled, threads finish by themselves."""
        for timer in self._again:
            timer.cancel()
        self._again.clear()
        await self._tasks.close()
        self._taken_by_hand.put_nowait(None)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def on_loop(self, handler: Handler | None) -> AsyncHandler | None:
        """A handler as the workers call it: a coroutine function as it is, any other callable in a thread."""
        if handler is None:
            return None
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
            return cast("AsyncHandler", handler)
        return functools.partial(self._in_thread, handler)

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Have messages handled that the process queue holds."""
        for message in messages:
            original = message.properties.get(names.RETRY_TOPIC)
            if original is not None and message.topic.startswith(RETRY_PREFIX):
                message.topic = original
            ready = self._taken_by_hand if self._handler_of(message.topic) is None else self._ready
            ready.put_nowait((process_queue, message))

    async def next(self) -> _Item | None:
        """The next message of a topic without handler, for `consumed`; None when this is closed."""
        while True:
            item = await self._taken_by_hand.get()
            if item is None:
                self._taken_by_hand.put_nowait(None)  # for others that wait
                return None
            if not item[0].is_dropped:
                return item

    def consumed(self, process_queue: ProcessQueue, message: ReceivedMessage) -> None:
        """A message is done with: let the offset advance."""
        offset = process_queue.remove(message)
        if offset != NOTHING_HELD and not process_queue.is_released:
            self._offsets.raise_to(process_queue.queue, offset)

    async def send_back(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Have a message delivered again later; whether broker or retry topic took it."""
        try:
            await self._send_back(message, delay_level)
        except RmqError as error:
            _log.warning("message %s of %s cannot be sent back: %s", message.msg_id, message.topic, error)
            return await self._send_to_retry_topic(message)
        return True

    async def to_dead_letters(self, message: ReceivedMessage) -> None:
        """Have the broker put a message to the group's dead letters. Raises RemotingError, PeerRefused: it did not."""
        await self._send_back(message, _TO_DEAD_LETTERS)

    async def expire(self, process_queue: ProcessQueue) -> None:
        """Send back the messages whose handlers take longer than the consume time-out."""
        oldest_ms = self._runtime.clock.now_ms() - self._settings.consume_timeout_minutes * 60_000
        for message in process_queue.lowest(_EXPIRED_PER_ROUND):
            started_ms = int(message.properties.get(names.CONSUME_START_TIME, "0"))
            if not started_ms or started_ms > oldest_ms:
                return
            _log.warning("message %s of %s is handled since %d: sent back", message.msg_id, message.topic, started_ms)
            if not await self.send_back(message, _EXPIRED_LEVEL):
                return
            self.consumed(process_queue, message)

    async def _work(self) -> None:
        while True:
            process_queue, message = await self._ready.get()
            if process_queue.is_dropped:
                continue
            process_queue.handler_starts()
            try:
                await self._handle(process_queue, message)
            finally:
                process_queue.handler_ends()

    async def _handle(self, process_queue: ProcessQueue, message: ReceivedMessage) -> None:
        message.properties[names.CONSUME_START_TIME] = str(self._runtime.clock.now_ms())
        handler = self._handler_of(message.topic)
        try:
            assert handler is not None, f"messages of topic {message.topic} are taken by hand"
            await handler(message)
        except _ThreadsClosed:
            return  # the interpreter is ending: the message is not consumed
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            await self._failed(process_queue, message, error)
        except Exception as error:  # noqa: BLE001 - the outer edge of a handler: the message is delivered again
            await self._failed(process_queue, message, error)
        else:
            self.consumed(process_queue, message)

    async def _in_thread(self, handler: Handler, message: ReceivedMessage) -> None:
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, handler, message)
        except RuntimeError as error:
            raise _ThreadsClosed from error
        outcome: Any = await running
        if inspect.isawaitable(outcome):
            await outcome

    async def _failed(self, process_queue: ProcessQueue, message: ReceivedMessage, error: BaseException) -> None:
        if message not in process_queue or process_queue.is_released:
            return  # it expired and was sent back, or somebody else has the queue
        delay_level = error.delay_level if isinstance(error, ConsumeLater) else 0
        chosen = isinstance(error, ConsumeLater)
        _log.log(
            logging.DEBUG if chosen else logging.WARNING,
            "handler failed on message %s of %s, offset %d in queue %d of %s, time %d",
            message.msg_id,
            message.topic,
            message.queue_offset,
            message.queue_id,
            message.broker_name,
            message.reconsume_times + 1,
            exc_info=None if chosen else error,
        )
        if await self.send_back(message, delay_level):
            self.consumed(process_queue, message)
        else:
            message.reconsume_times += 1
            self._handle_again(process_queue, message)

    def _handle_again(self, process_queue: ProcessQueue, message: ReceivedMessage) -> None:
        def put() -> None:
            self._again.discard(timer)
            self._ready.put_nowait((process_queue, message))

        timer = asyncio.get_running_loop().call_later(self._settings.local_retry_ms / 1000.0, put)
        self._again.add(timer)

    async def _send_back(self, message: ReceivedMessage, delay_level: int) -> None:
        header = ConsumerSendBackRequest(
            offset=message.physical_offset,
            group=self._group,
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=self._retries_max,
        )
        address = self._runtime.routes.address(message.broker_name or "") or message.store_host
        await self._runtime.calls.send_back(address, header)

    async def _send_to_retry_topic(self, message: ReceivedMessage) -> bool:
        try:
            prepared = outgoing_retry(message, self._group, self._retries_max)
            await self._resend.send(prepared, timeout_ms=ProducerSettings().send_timeout_ms)
        except (RmqError, ValueError) as error:
            _log.warning("message %s of %s stays here: %s", message.msg_id, message.topic, error)
            return False
        return True


class _ThreadsClosed(Exception):
    """No thread takes a handler any more."""


def _is_cancelled() -> bool:
    """Whether the running task itself is to end, and not something its handler waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
