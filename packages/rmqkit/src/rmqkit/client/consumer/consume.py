"""The consume service, which runs handlers on pulled messages in any order (``ConsumeMessageConcurrentlyService``).

==========================  ==================================================================================
a handler …                 effect
==========================  ==================================================================================
returns                     the message is consumed
raises                      the client requests a later delivery from the broker (CONSUMER_SEND_MSG_BACK): this
                            message is consumed, and a copy arrives through ``%RETRY%<group>`` after the delay of
                            its level
… and the request fails     the client itself sends the copy to the retry topic
… and the send fails, too   the message stays, holds the offset back, and is handled again after 5 s
runs longer than 15 min     the same as if the handler had raised; its later result is ignored
==========================  ==================================================================================

If a handler of batches raises, all messages of the batch fail, unless `ConsumeLater` names the failed messages. A body
that does not fit the type of the handler goes to the dead letters before the handler gets the other messages of the
batch. In broadcasting, no message is delivered again, and a failure is only logged. A fixed number of workers takes the
messages in the order of the pulls; no task is started per message. Coroutine functions run on the loop, plain functions
in a thread.
Use this module only on the event loop. Source: behaviour.md §8.8, remoting.md §9.5.
"""

from __future__ import annotations

import asyncio
import bisect
import contextvars
import functools
import inspect
import itertools
import logging
import operator
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from msgspec import Struct

from rmqkit import rpc
from rmqkit.client.consumer.offsets import OffsetStore
from rmqkit.client.consumer.process_queue import NOTHING_HELD, Failure, ProcessQueue
from rmqkit.client.consumer.reasons import Reason, handler_name, text_of, traceback_of
from rmqkit.client.consumer.retry import Retry
from rmqkit.client.consumer.subscribe import Dedupe, Seen, is_async, once, takes_two
from rmqkit.client.observe.hooks import NO_HOOKS, ConsumeOutcome, Consumption, Hooks
from rmqkit.client.producer.encode import encode_dead_letter, encode_retry
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, PushConsumerSettings
from rmqkit.errors import BodyMismatch, ClientError, RmqError
from rmqkit.protocol import properties as names
from rmqkit.protocol.codes import version_number
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX, without_namespace
from rmqkit.protocol.schemas.clients import ConsumeMessageDirectlyResult
from rmqkit.protocol.schemas.send import ConsumerSendBackRequest
from rmqkit.protocol.trace import ConsumeReturn
from rmqkit.remoting.tasks import Tasks, is_cancelled
from rmqkit.times import Duration, duration_ms


class Listener(Struct):
    """A handler in the form that workers call on the loop. Its argument is a message, or a list of at most
    ``batch_max`` messages. If ``decode`` is set, the argument is the decoded body or the list of decoded bodies.
    ``takes_messages`` adds the messages as a second argument. If ``is_deduped`` is set, the message precedes all other
    arguments. ``name`` is stored with dead letters. If ``retry`` is None, the retries in the settings apply."""

    call: Callable[..., Awaitable[object]]
    batch_max: int | None = None
    is_threaded: bool = False
    decode: Callable[[bytes], Any] | None = None
    takes_messages: bool = False
    is_deduped: bool = False
    name: str = ""
    retry: Retry | None = None

    def arguments(self, messages: list[ReceivedMessage]) -> tuple[Any, ...]:
        """Return the arguments of the handler call. Raises DeadLetters: some bodies cannot be decoded."""
        is_one = self.batch_max is None
        given = messages[0] if is_one else messages
        if self.decode is None:
            return (given, given) if self.is_deduped else (given,)
        values, misfits = [], []
        for message in messages:
            try:
                values.append(self.decode(message.body))
            except BodyMismatch as error:
                misfits.append((message, str(error)))
        if misfits:
            raise DeadLetters(misfits)
        value = values[0] if is_one else values
        arguments = (value, given) if self.takes_messages else (value,)
        return (given, *arguments) if self.is_deduped else arguments


ListenerOf = Callable[[str], Listener | None]
"""A function that returns the listener of a topic, or None if the program iterates over the messages of the topic
(`ConcurrentConsumeService.next`)."""

_TO_DEAD_LETTERS = -1
_GIVEN_UP = "its handler gave it up without a reason"
_HAS_TIMER = version_number(5, 0, 0)
_LEVEL_SECONDS = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The default delay levels of brokers (``messageDelayLevel``)."""
_EXPIRED_LEVEL = 3
_EXPIRED_PER_ROUND = 16
_INNER_PRODUCER = "CLIENT_INNER_PRODUCER"

_log = logging.getLogger(__name__)
_Item = tuple[ProcessQueue, ReceivedMessage]
_topic_of = operator.attrgetter("topic")
_at_work: contextvars.ContextVar[ConcurrentConsumeService | None] = contextvars.ContextVar("_at_work", default=None)


def _level_after(delay_ms: int) -> int:
    """Return the shortest delay level that is at least as long as a delay, or the last level."""
    return min(bisect.bisect_left(_LEVEL_SECONDS, delay_ms / 1000), len(_LEVEL_SECONDS) - 1) + 1


class ConsumeLater(Exception):
    """An exception that a handler raises to choose the time of the next delivery of a message.

    In ordered consumption, the queue waits at the first message that is to be delivered again, and a delay level has no
    effect.

    Args:
        delay_level: 1 to 18 for a delay level of the broker; 0 lets the broker choose. For popped messages, a level
            is a step of the retry delays of POP.
        messages: the messages of a batch that are delivered again; None means all. The others are acknowledged.
        delay: an exact delay instead of a level: seconds or a `timedelta`. Pushed messages wait in the timer of the
            broker, with a precision of seconds. A broker without a timer (4.x) uses the next longer delay level.
        suspend: the delivery of a popped message does not count as a retry. A broker older than 5.5 counts it. For
            pulled messages the option has no effect.

    Raises ValueError: both a delay and a level are set, or the level is negative.
    Raises TimeIllegal: the delay is not valid.
    """

    reason: str | None = None

    def __init__(
        self,
        delay_level: int = 0,
        messages: Collection[ReceivedMessage] | None = None,
        *,
        delay: Duration | None = None,
        suspend: bool = False,
    ) -> None:
        if delay is not None and delay_level:
            raise ValueError(f"delay={delay!r} and delay_level={delay_level} cannot be combined: give one")
        if delay_level < 0:
            raise ValueError(f"delay_level={delay_level}: give 0 to 18, or raise Reject() for the dead letters")
        when = f"at delay level {delay_level}" if delay is None else f"after {delay!r}"
        super().__init__(f"to be consumed again {when}")
        self.delay_level = delay_level
        self.messages = messages
        self.suspend = suspend
        self.delay_ms = None if delay is None else round(duration_ms(delay, "delay"))


class Reject(ConsumeLater):
    """An exception that a handler raises to send a message to the dead letters immediately, for example
    ``raise Reject("no such customer")``.

    Args:
        reason: the reason, at most 1,000 characters, stored in the property ``rmqkit_reason``. None uses the
            exception in ``raise … from``.
        messages: the messages of a batch that are rejected; None means all. The others are acknowledged.
    """

    def __init__(self, reason: str | None = None, messages: Collection[ReceivedMessage] | None = None) -> None:
        super().__init__(messages=messages)
        self.args = () if reason is None else (reason,)
        self.delay_level = -1
        self.reason = reason


class DeadLetters(Exception):
    """Messages that no handler can process, each with its reason."""

    def __init__(self, found: list[tuple[ReceivedMessage, str]]) -> None:
        super().__init__(found[0][1])
        self.messages = [message for message, _ in found]
        self.reasons = {id(message): reason for message, reason in found}


@dataclass(eq=False)
class ConcurrentConsumeService:
    """The ``handlers_max`` workers that run the handlers of one push consumer."""

    _is_ordered: ClassVar[bool] = False
    _retries_unless_set: ClassVar[int] = 16

    runtime: ClientRuntime
    group: str
    offsets: OffsetStore
    settings: PushConsumerSettings
    listener_of: ListenerOf
    hooks: Hooks = NO_HOOKS

    def __post_init__(self) -> None:
        settings = self.settings
        self._run = self._outcome_with_hooks if self.hooks else self._outcome
        self._now_ms = self.runtime.clock.now_ms
        self._begun_ms, self._begun_text = 0, "0"
        self._retries_max = self._retries_unless_set if settings.retries_max < 0 else settings.retries_max
        self._resend = Sender(self.runtime, _INNER_PRODUCER, ProducerSettings(retries=2))
        self._ready: asyncio.Queue[tuple[ProcessQueue, list[ReceivedMessage]]] = asyncio.Queue()
        self._unhandled: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._timers: set[asyncio.TimerHandle] = set()
        self._tasks = Tasks()
        self._threads = ThreadPoolExecutor(settings.handlers_max, thread_name_prefix=f"rmqkit {self.group}")

    def start(self) -> None:
        for number in range(self.settings.handlers_max):
            self._tasks.start(self._work(), f"handler {number} of group {self.group}")

    async def close(self) -> None:
        """Stop the workers. Running coroutine handlers are cancelled. Handlers in threads run until they return."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        await self._tasks.close()
        self._unhandled.put_nowait(None)
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_at_work_here(self) -> bool:
        """Return True if the caller is a handler of this service, or a task that a handler started."""
        return _at_work.get() is self

    def on_loop(
        self,
        handler: Callable[..., object] | None,
        batch_max: int | None = None,
        decode: Callable[[bytes], Any] | None = None,
        dedupe: Dedupe | Seen | None = None,
        retry: Retry | None = None,
    ) -> Listener | None:
        """Wrap a handler for the workers. A coroutine function is called on the loop, any other callable in a
        thread."""
        if handler is None:
            return None
        name = handler_name(handler)
        takes_messages, is_deduped = decode is not None and takes_two(handler), dedupe is not None
        if dedupe is not None:
            handler = once(handler, dedupe, self.group)
        is_threaded = not is_async(handler)
        call = functools.partial(self._in_thread, handler) if is_threaded else handler
        on_loop = cast("Callable[..., Awaitable[object]]", call)
        return Listener(on_loop, batch_max, is_threaded, decode, takes_messages, is_deduped, name, retry)

    def put(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Put messages of a process queue into the buffer of the workers."""
        # Restore topics before the grouping: the handler of the original topic of a message handles its retries.
        for message in messages:
            if names.RETRY_TOPIC in message.properties:
                restore_topic(message, self.runtime.namespace)
        for topic, some in itertools.groupby(messages, key=_topic_of):
            listener = self.listener_of(topic)
            if listener is None:
                for message in some:
                    self._unhandled.put_nowait((process_queue, message))
            elif listener.batch_max is None:
                for message in some:
                    self._ready.put_nowait((process_queue, [message]))
            else:
                while batch := list(itertools.islice(some, listener.batch_max)):
                    self._ready.put_nowait((process_queue, batch))

    def drop_stale(self) -> None:
        """Discard buffered messages of queues that this member no longer owns. Without this, frequent rebalances could
        fill the buffer.
        """
        queues: tuple[asyncio.Queue[Any], ...] = (self._ready, self._unhandled)
        for queue in queues:
            # Remove all items and put them back in order. There is no await, so no worker sees an empty queue.
            for item in [queue.get_nowait() for _ in range(queue.qsize())]:
                if item is None or not item[0].is_dropped:
                    queue.put_nowait(item)

    def advance_to(self, process_queue: ProcessQueue, offset: int) -> None:
        """Raise the offset of a queue without held messages."""
        self.offsets.raise_to(process_queue.queue, offset)

    async def unreadable(self, message: ReceivedMessage) -> None:
        """Send a message to the dead letters because its body cannot be unpacked.
        Raises RemotingError, PeerRefused: the send failed, and the caller must try again."""
        if not self.settings.is_broadcasting:
            await self._send_back(message, _TO_DEAD_LETTERS)

    def waits_for(self, message: ReceivedMessage) -> str:
        """Return the reason, as text for operators, why a message is not handled yet."""
        if self.listener_of(message.topic) is None:
            return "the program to iterate further"
        return f"a free handler: all {self.settings.handlers_max} are at work (consumeThreadMax)"

    async def next(self) -> _Item | None:
        """Wait for the next message of a topic without a handler. The caller passes it to `consumed`.

        Return None when the service is closed.
        """
        while True:
            item = await self._unhandled.get()
            if item is None:
                self._unhandled.put_nowait(None)  # wake other waiting callers
                return None
            if not item[0].is_dropped and item[1] in item[0]:
                return item

    def consumed(self, process_queue: ProcessQueue, *messages: ReceivedMessage) -> None:
        """Remove consumed messages and raise the queue's offset to the lowest remaining message."""
        offset = NOTHING_HELD
        for message in messages:
            offset = process_queue.remove(message)
        # A released queue may have a new owner. An old commit must not change the offset of the new owner.
        if offset != NOTHING_HELD and not process_queue.is_released:
            self.offsets.raise_to(process_queue.queue, offset)

    async def send_back(self, message: ReceivedMessage, delay_level: int, reason: Reason | None = None) -> bool:
        """Request a later delivery of a message. If a reason is passed, send the message to the dead letters.

        Return True if the broker or the retry topic accepted the message.
        """
        try:
            await self._send_back(message, delay_level, reason)
        except RmqError as error:
            _log.warning("cannot send back message %s of %s: %s", message.msg_id, message.topic, error)
            return await self._send_to_retry_topic(message)
        return True

    async def expire(self, process_queue: ProcessQueue) -> None:
        """Send back the messages of handlers that exceed the consume time-out."""
        if self.settings.is_broadcasting:
            return
        oldest_ms = self.runtime.clock.now_ms() - self.settings.consume_timeout_minutes * 60_000
        for message in process_queue.lowest(_EXPIRED_PER_ROUND):
            started_ms = int(message.properties.get(names.CONSUME_START_TIME, "0"))
            # Check the messages in order, as Java does. Messages after the first recent message do not hold the offset
            # back.
            if not started_ms or started_ms > oldest_ms:
                return
            _log.warning(
                "message %s of %s has been handled since %d: sending it back", message.msg_id, message.topic, started_ms
            )
            # Send the message back before it is removed: after a crash in between, it is delivered twice. In the other
            # order it would be lost.
            if not await self.send_back(message, _EXPIRED_LEVEL, self._reason_of_expiry(message)):
                return
            self.consumed(process_queue, message)

    async def consume_directly(self, message: ReceivedMessage) -> ConsumeMessageDirectlyResult:
        """Run the handler once on the request of an operator (code 309). Nothing is saved or sent back.
        Raises ClientError: the topic has no handler."""
        restore_topic(message, self.runtime.namespace)
        listener = self.listener_of(message.topic)
        if listener is None:
            raise ClientError(f"topic {message.topic} has no handler: its messages are iterated")
        begun = time.perf_counter()  # not the client's clock: operators need the real duration
        error = await self._outcome(listener, [message])
        result = "CR_SUCCESS"
        if error is not None:
            result = "CR_LATER" if isinstance(error, ConsumeLater) else "CR_THROW_EXCEPTION"
        return ConsumeMessageDirectlyResult(
            order=self._is_ordered,
            consume_result=result,
            remark=None if error is None else f"{type(error).__name__}: {error}",
            spent_time_mills=round((time.perf_counter() - begun) * 1000.0),
        )

    async def _work(self) -> None:
        _at_work.set(self)
        while True:
            process_queue, messages = await self._ready.get()
            if process_queue.is_dropped:
                continue  # another member gets these messages
            # There must be no await between the check and this call: giving up a queue waits for every counted handler.
            process_queue.handler_starts()
            try:
                await self._handle(process_queue, messages)
            except _ThreadsClosed:
                pass  # the interpreter exits: the messages are not consumed
            except Exception as error:  # noqa: BLE001 - the outer edge of a worker, which must not stop
                pause_ms = self.settings.local_retry_ms
                said = "messages of %s are handled again in %d ms, because their results could not be processed"
                _log.error(said, process_queue.queue, pause_ms, exc_info=error)
                self._call_later(pause_ms, functools.partial(self._ready.put_nowait, (process_queue, messages)))
            finally:
                process_queue.handler_ends()

    async def _handle(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        error = await self._call(process_queue, messages)
        if error is None:
            self.consumed(process_queue, *messages)
        else:
            await self._failed(process_queue, messages, error)

    async def _call(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> BaseException | None:
        """Call the handler and count the call. Return the exception, or None if the handler returned."""
        listener = self.listener_of(messages[0].topic)
        assert listener is not None, f"messages of topic {messages[0].topic} have no handler"
        process_queue.consumed_ms = begun_ms = self._now_ms()
        # Format the time once per millisecond, not once per message.
        if begun_ms != self._begun_ms:
            self._begun_ms, self._begun_text = begun_ms, str(begun_ms)
        for message in messages:
            message.properties[names.CONSUME_START_TIME] = self._begun_text
        error = await self._run(listener, messages)
        stats = process_queue.stats
        stats.calls += 1
        stats.call_ms += max(0, self._now_ms() - begun_ms)
        if error is None:
            stats.consumed += len(messages)
        else:
            stats.failed += len(error.messages if isinstance(error, DeadLetters) else messages)
        return error

    async def _outcome(self, listener: Listener, messages: list[ReceivedMessage]) -> BaseException | None:
        """Call the handler. Return the exception, or None if the handler returned."""
        try:
            await listener.call(*listener.arguments(messages))
        except _ThreadsClosed:
            raise
        except asyncio.CancelledError as error:
            # If the worker is cancelled, raise the error. If the handler awaited something that was cancelled, the
            # handler has failed.
            if is_cancelled():
                raise
            return error
        except Exception as error:  # noqa: BLE001 - the outer edge of a handler: the messages are delivered again
            return error
        return None

    async def _outcome_with_hooks(self, listener: Listener, messages: list[ReceivedMessage]) -> BaseException | None:
        """Call the hooks, then the handler, then the hooks again with the outcome."""
        clock, outcome = self.runtime.clock, ConsumeOutcome()
        begun_ms = clock.monotonic_ms()
        on_end = self.hooks.consuming(Consumption(self.group, messages))
        try:
            outcome.error = await self._outcome(listener, messages)
        except BaseException as error:
            outcome.error = error
            raise
        finally:
            if outcome.error is not None and not isinstance(outcome.error, ConsumeLater):
                outcome.returned = ConsumeReturn.EXCEPTION
            elif clock.monotonic_ms() - begun_ms >= self.settings.consume_timeout_minutes * 60_000:
                outcome.returned = ConsumeReturn.TIME_OUT
            elif outcome.error is not None:
                outcome.returned = ConsumeReturn.FAILED
            on_end(outcome)
        return outcome.error

    async def _in_thread(self, handler: Callable[..., object], *arguments: Any) -> None:
        # Copy the context for `is_at_work_here` and for the spans of OpenTelemetry.
        context = contextvars.copy_context()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._threads, context.run, handler, *arguments)
        except RuntimeError as error:
            raise _ThreadsClosed from error
        # Outside of the ``try``: a RuntimeError of the handler itself is an ordinary failure.
        outcome: Any = await running
        if inspect.isawaitable(outcome):
            await outcome

    async def _failed(self, process_queue: ProcessQueue, messages: list[ReceivedMessage], error: BaseException) -> None:
        others, failed = _split(messages, error)
        if not isinstance(error, DeadLetters):
            self.consumed(process_queue, *others)
        elif others:
            self._ready.put_nowait((process_queue, others))  # the handler was not called with these messages yet
        # If a message is missing here, it has expired and was sent back, or another member owns the queue. A popped
        # message has no other owner: if this member ignored the failure, it would continue to renew the invisible time.
        is_ours = process_queue.is_popped or not process_queue.is_released
        failed = [message for message in failed if is_ours and message in process_queue]
        if not failed:
            return
        log_failure(failed, error)
        await asyncio.gather(*(self._retry_message(process_queue, message, error) for message in failed))

    def _when(self, message: ReceivedMessage, error: BaseException) -> tuple[int, int | None]:
        """Return the delay until the next delivery of a failed message: a delay level, and the exact ms or None."""
        if isinstance(error, DeadLetters):
            return _TO_DEAD_LETTERS, None
        delay_ms = None
        if isinstance(error, ConsumeLater):
            if error.delay_level:
                return error.delay_level, None
            delay_ms = error.delay_ms
        listener = self.listener_of(message.topic)
        if delay_ms is None and listener is not None and listener.retry is not None:
            delay_ms = listener.retry.delay_ms(message.reconsume_times)
        return (0, None) if delay_ms is None else (_level_after(delay_ms), delay_ms)

    def _retries_of(self, message: ReceivedMessage) -> int:
        """Return the number of retries of a message before it goes to the dead letters. -1 means no limit."""
        listener = self.listener_of(message.topic)
        if listener is None or listener.retry is None or listener.retry.times is None:
            return self._retries_max
        return listener.retry.times

    async def _retry_message(self, process_queue: ProcessQueue, message: ReceivedMessage, error: BaseException) -> None:
        level, delay_ms = self._when(message, error)
        reason = self.reason_of(error, message) if self._is_last(message, level) else None
        if (
            self.settings.is_broadcasting
            or (delay_ms is not None and reason is None and await self._has_timed(message, delay_ms))
            or await self.send_back(message, level, reason)
        ):
            self.consumed(process_queue, message)
        else:
            message.reconsume_times += 1
            # The watchdog reports this failure while the message holds the offset back.
            process_queue.failure = Failure(message, error)
            self._call_later(self.settings.local_retry_ms, lambda: self._ready.put_nowait((process_queue, [message])))

    def _call_later(self, pause_ms: float, action: Callable[[], None]) -> None:
        def act() -> None:
            self._timers.discard(timer)
            action()

        timer = asyncio.get_running_loop().call_later(pause_ms / 1000.0, act)
        self._timers.add(timer)

    def _is_last(self, message: ReceivedMessage, level: int) -> bool:
        """Return True if a failed message must go to the dead letters now."""
        return level == _TO_DEAD_LETTERS or 0 <= self._retries_of(message) <= message.reconsume_times

    def reason_of(self, error: BaseException, message: ReceivedMessage) -> Reason:
        """Return the reason that is stored when a failed message goes to the dead letters."""
        listener = self.listener_of(message.topic)
        name, tries = "" if listener is None else listener.name, message.reconsume_times + 1
        if isinstance(error, DeadLetters):
            return Reason(error.reasons[id(message)], handler=name, tries=tries)
        if isinstance(error, ConsumeLater):
            if error.reason or error.__cause__ is None:
                return Reason(error.reason or _GIVEN_UP, handler=name, tries=tries)
            error = error.__cause__
        return Reason(text_of(error), traceback_of(error), name, tries)

    def _reason_of_expiry(self, message: ReceivedMessage) -> Reason | None:
        if not self._is_last(message, _EXPIRED_LEVEL):
            return None
        listener = self.listener_of(message.topic)
        minutes = self.settings.consume_timeout_minutes
        text = f"the handler took longer than {minutes} minutes (consumeTimeout)"
        return Reason(text, handler="" if listener is None else listener.name, tries=message.reconsume_times + 1)

    async def _send_back(self, message: ReceivedMessage, delay_level: int, reason: Reason | None = None) -> None:
        if reason is not None and await self._send_to_dead_letters(message, reason):
            return
        header = ConsumerSendBackRequest(
            offset=message.physical_offset,
            group=self.group,
            delay_level=delay_level,
            origin_msg_id=message.msg_id,
            origin_topic=message.topic,
            unit_mode=False,
            max_reconsume_times=self._retries_of(message),
            bname=message.broker_name,
        )
        # Use the address in the record if there is no other: it was the broker's address when the message was stored.
        address = self.runtime.routes.address(message.broker_name or "") or message.store_host
        await self.runtime.calls.send_back(address, header)

    async def _send_to_dead_letters(self, message: ReceivedMessage, reason: Reason) -> bool:
        """Send a message to the dead letters with a reason. Return True if the message is stored.

        A broker may refuse the message: the reason may make the properties too long, and a body that was compressed is
        now sent uncompressed.
        """
        try:
            prepared = encode_dead_letter(message, self.group, reason.properties(), self.runtime.namespace)
            await self._resend.send(prepared, timeout_ms=rpc.SEND_BACK_TIMEOUT_MS)
        except (RmqError, ValueError) as error:
            said = "message %s of %s goes to the dead letters without its reason, %s: %s"
            _log.warning(said, message.msg_id, message.topic, reason.text, error)
            return False
        return True

    async def _has_timed(self, message: ReceivedMessage, delay_ms: int) -> bool:
        """Send a message to the retry topic with an exact time. Return True if the timer of a broker accepted it. A
        send-back request can only contain a delay level."""
        address = self.runtime.routes.address(message.broker_name or "") or message.store_host
        if self.runtime.broker_versions.get(address, 0) < _HAS_TIMER:
            return False
        try:
            retries_max, namespace = self._retries_of(message), self.runtime.namespace
            prepared = encode_retry(message, self.group, retries_max, namespace, delay_ms=delay_ms)
            await self._resend.send(prepared, timeout_ms=rpc.SEND_BACK_TIMEOUT_MS)
        except (RmqError, ValueError) as error:
            said = "message %s of %s is redelivered after a delay level instead of %d ms: %s"
            _log.warning(said, message.msg_id, message.topic, delay_ms, error)
            return False
        return True

    async def _send_to_retry_topic(self, message: ReceivedMessage) -> bool:
        try:
            prepared = encode_retry(message, self.group, self._retries_of(message), self.runtime.namespace)
            await self._resend.send(prepared, timeout_ms=rpc.SEND_BACK_TIMEOUT_MS)
        except (RmqError, ValueError) as error:
            _log.warning("message %s of %s stays on this client: %s", message.msg_id, message.topic, error)
            return False
        return True


def _split(
    messages: list[ReceivedMessage], error: BaseException
) -> tuple[list[ReceivedMessage], list[ReceivedMessage]]:
    """Return the messages of a batch that did not fail, and the messages that failed."""
    if not isinstance(error, ConsumeLater | DeadLetters) or error.messages is None:
        return [], messages
    again = {id(message) for message in error.messages}
    return (
        [message for message in messages if id(message) not in again],
        [message for message in messages if id(message) in again],
    )


def log_failure(failed: list[ReceivedMessage], error: BaseException) -> None:
    first, chosen = failed[0], isinstance(error, ConsumeLater)
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    if isinstance(error, DeadLetters):
        said = "message %s of %s, offset %d in queue %d of %s%s, does not fit its handler: %s"
        place = (first.queue_offset, first.queue_id, first.broker_name)
        _log.warning(said, first.msg_id, first.topic, *place, more, error)
        return
    _log.log(
        logging.DEBUG if chosen else logging.WARNING,
        "handler failed on message %s of %s, offset %d in queue %d of %s, try %d%s",
        first.msg_id,
        first.topic,
        first.queue_offset,
        first.queue_id,
        first.broker_name,
        first.reconsume_times + 1,
        more,
        exc_info=None if chosen else error,
    )


def restore_topic(message: ReceivedMessage, namespace: str) -> None:
    """Replace the retry topic of a message by its original topic, because handlers expect the original topic."""
    original = message.properties.get(names.RETRY_TOPIC)
    if original is not None and message.topic.startswith(RETRY_PREFIX):
        message.topic = without_namespace(namespace, original)


class _ThreadsClosed(Exception):
    """The thread pool is shut down and accepts no handler."""
