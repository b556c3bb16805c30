"""The push consumer (``DefaultMQPushConsumer``): its messages are pulled in the background.

::

    GroupCoordinator ──> ProcessQueue ──> workers (ConcurrentConsumeService, OrderlyConsumeService) ──> handler
                                                                              └── Offsets <── lowest remaining message

The close runs in the other direction: pulls stop, handlers finish, offsets are saved, the client leaves the group.
Source: behaviour.md §8.3, §8.8, §8.10, §8.12; remoting.md §9.5, §9.6.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

from rmqkit.client.consumer import watch as watchdog
from rmqkit.client.consumer.allocate import Allocate, averagely
from rmqkit.client.consumer.consume import ConcurrentConsumeService, DeadLetters, Listener
from rmqkit.client.consumer.context import ConsumerContext
from rmqkit.client.consumer.group import Consumer, GroupCoordinator, offsets_of
from rmqkit.client.consumer.ordered import ClientQueueLocks, OrderlyConsumeService
from rmqkit.client.consumer.poll import MessageStream
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.consumer.retry import Retry
from rmqkit.client.consumer.subscribe import Dedupe, Seen, Subscribing, body_decoder, handler_fault
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.pop.service import OrderlyPopConsumeService, PopConsumeService, PopGroupCoordinator
from rmqkit.client.pop.session import PopSession
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PushConsumerSettings, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter import TAG
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import RETRY_PREFIX, retry_topic
from rmqkit.remoting.tasks import Tasks
from rmqkit.times import Duration

_BATCH_MAX = 1024
_READER_SECONDS = 1.0
"""The time until messages without a handler cause a warning. A program may begin to iterate after the start."""

_NO_SUBSCRIPTION = "has no subscription and gets no messages: call subscribe() or on()"
_log = logging.getLogger(__name__)


class PushConsumer(Subscribing, Consumer):
    """A consumer that handles messages as a member of a group::

        consumer = PushConsumer("billing", name_servers="127.0.0.1:9876")

        @consumer.on("Orders", "new || changed")
        async def bill(message: ReceivedMessage) -> None:
            ...                                   # return to acknowledge the message, raise to get it again later

        await consumer.run()                      # until SIGINT or SIGTERM

    The members of a group share the queues. They must have the same subscriptions and the same ``allocate`` function
    (see `rmqkit.client.consumer.allocate`). With ``ordered``, the messages of a queue are handled one after the other,
    and no other member owns the queue at the same time. If the handler raises, it is called with the same message again
    before the next message. With ``message_model=MessageModel.BROADCASTING`` in the settings, every member gets every
    message at most once, and stores its own offsets. The other arguments are the same as for a `Producer`.
    Raises SettingsError: a name, an address or a setting is not valid."""

    _kind = "consumer"
    _only_pops = False

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None = None,
        *,
        settings: PushConsumerSettings | None = None,
        ordered: bool = False,
        allocate: Allocate = averagely,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        wait_ready: Duration = 0,
    ) -> None:
        self.settings = settings = check(settings or PushConsumerSettings())
        if self._only_pops and settings.is_broadcasting:
            raise SettingsError(
                "message_model is BROADCASTING: pop delivers each message to one member, use a PushConsumer"
            )
        super().__init__(group, name_servers, settings, runtime, clock, hooks, wait_ready)
        runtime = self._runtime
        self._is_ordered = ordered
        self._is_watched = False
        self._listeners: dict[str, Listener | None] = {}
        self._faults: dict[str, str] = {}
        self._is_entered = False
        offsets = offsets_of(runtime, group, settings)
        is_shared_by_brokers = not (settings.client_rebalance or ordered or settings.is_broadcasting)
        session = (
            PopSession(runtime, group, settings, is_ordered=ordered)
            if self._only_pops or is_shared_by_brokers
            else None
        )
        self._session = session
        locks = ClientQueueLocks(runtime, group) if ordered and not (settings.is_broadcasting or session) else None
        kinds = {
            (False, False): ConcurrentConsumeService,
            (True, False): OrderlyConsumeService,
            (False, True): PopConsumeService,
            (True, True): OrderlyPopConsumeService,
        }
        self._service = kinds[ordered, session is not None](
            runtime, group, offsets, settings, self._listener_of, self._hooks
        )
        if isinstance(self._service, OrderlyConsumeService):
            self._service.locks = locks
        kind = "CONSUME_POP" if self._only_pops else "CONSUME_PASSIVELY"
        context = ConsumerContext(runtime, group, settings, offsets, self._service, allocate, kind, locks, ordered)
        self._coordinator = (
            GroupCoordinator(context)
            if session is None
            else PopGroupCoordinator(context, session, only_pops=self._only_pops)
        )
        self._tasks = Tasks()
        self._streams = []
        if not settings.is_broadcasting and not self._only_pops:
            self._coordinator.subscribe(retry_topic(group), "*", TAG)
            self._listeners[retry_topic(group)] = None

    # -- called by programs

    def _subscribe(
        self,
        topic: str,
        expression: str,
        handler: Callable[..., object] | None,
        expression_type: str,
        body: Any,
        batch_max: int | None,
        dedupe: Dedupe | Seen | None,
        retry: Retry | None,
    ) -> None:
        if batch_max is not None and not 1 <= batch_max <= _BATCH_MAX:
            raise SettingsError(f"batch_max is {batch_max}: it must be at least 1 and at most {_BATCH_MAX}")
        if dedupe is not None and (batch_max is not None or self.settings.is_broadcasting):
            what = "batch_max" if batch_max is not None else "broadcasting"
            raise SettingsError(f"dedupe for topic {topic} cannot be combined with {what}: remove one of them")
        asked = {
            "ordered consumption": self._is_ordered or None,
            f"body={body!r}": body,
            "dedupe": dedupe,
            "retry": retry,
        }
        needs = [name for name, value in asked.items() if value is not None]
        if handler is None and needs:
            raise SettingsError(f"{needs[0]} of topic {topic} has no handler: give one")
        self._faults.pop(topic, None)
        if handler is not None and (fault := handler_fault(handler, body, batch_max)) is not None:
            self._faults[topic] = f"subscription to topic {topic}: {fault}"
            if not self.is_new:
                raise SettingsError(self._faults.pop(topic))
        decode = None if body is None else body_decoder(body, topic)
        listener = self._service.on_loop(handler, batch_max, decode, dedupe, retry)
        self._coordinator.subscribe(topic, expression, expression_type)
        self._listeners[topic] = listener

    def unsubscribe(self, topic: str) -> None:
        """Stop consuming a topic. The consumer gives up its queues immediately."""
        self._listeners.pop(topic, None)
        self._faults.pop(topic, None)
        super().unsubscribe(topic)

    def messages(self) -> MessageStream:
        """Iterate with ``async for`` over the messages of topics that have no handler.

        A message is acknowledged when you request the next message, or when the consumer is closed without an
        exception. Otherwise it is delivered again to another consumer of the group.
        """
        return self._stream_of(self._service)

    # -- internals

    async def __aenter__(self) -> Self:
        # The program may subscribe inside the ``with`` block. `_warn_without_reader` logs a missing subscription.
        self._is_entered = True
        return await super().__aenter__()

    @property
    def _has_subscription(self) -> bool:
        # A consumer that only calls `PopConsumer.pop` passes its topic there.
        return self._only_pops or not all(topic.startswith(RETRY_PREFIX) for topic in self._listeners)

    def _check_ready(self) -> None:
        for fault in self._faults.values():
            raise SettingsError(fault)
        if not self._has_subscription and not self._is_entered:
            raise SettingsError(f"{self._described} {_NO_SUBSCRIPTION} before the start")

    def _register(self) -> None:
        self._runtime.register_consumer(self.group, self._coordinator)

    async def _open(self) -> None:
        # Start the handlers after the member has joined. Handlers can block the loop only after this.
        await self._coordinator.open()
        self._service.start()
        watchdog.watch_loop()
        self._is_watched = True
        if self._session is not None:
            self._session.start()
        if not self._only_pops:
            self._tasks.start(self._warn_without_reader(), f"start of group {self.group}")
        self._tasks.start(self._expire(), f"consume time-outs of group {self.group}")
        if self._is_ordered:
            self._tasks.start(self._renew_locks(), f"locks of group {self.group}")

    async def _finish(self) -> None:
        # The order is: pulls stop, handlers finish, acknowledgements are sent, offsets are saved, the client leaves the
        # group. The next owner of a queue must find the offset of the last handler.
        await self._tasks.close()
        if self._is_watched:
            self._is_watched = False
            watchdog.unwatch_loop()
        await self._coordinator.stop()
        process_queues = list(self._coordinator.process_queues.values())
        idle = await asyncio.gather(*(one.wait_for_handlers(self.settings.drain_ms) for one in process_queues))
        for stream in self._streams:
            stream.settle()
        still_handled = [
            one.queue
            for one, is_idle in zip(process_queues, idle, strict=True)
            if not is_idle and self._is_in_thread(one)
        ]
        await self._service.close()
        await self._calls_ended()
        if self._session is not None:
            await self._session.close()
        await self._coordinator.leave(still_handled)

    def _is_in_thread(self, process_queue: ProcessQueue) -> bool:
        """Return True if the running handler runs in a thread, where nothing can cancel it."""
        return any((self._listener_of(one.topic) or _NOT_SUBSCRIBED).is_threaded for one in process_queue.lowest(1))

    @property
    def _is_in_handler(self) -> bool:
        return self._service.is_at_work_here

    def _listener_of(self, topic: str) -> Listener | None:
        listener = self._listeners.get(topic, _NOT_SUBSCRIBED)
        return self._without_topic() if listener is None and topic == retry_topic(self.group) else listener

    def _without_topic(self) -> Listener | None:
        """Return the handler of messages that were sent to the retry topic directly, and so have no original topic.
        If there is only one handler, return it. If a topic has no handler, return None (the stream). With several
        handlers, these messages become dead letters; otherwise they would hold the offset of the retry topic for ever.
        """
        found = {id(one): one for topic, one in self._listeners.items() if topic != retry_topic(self.group)}
        if not found or None in found.values():
            return None
        return next(iter(found.values())) if len(found) == 1 else _OF_NO_TOPIC

    async def _warn_without_reader(self) -> None:
        """Log topics that nothing reads, a moment after the start, because programs may still subscribe or iterate."""
        await asyncio.sleep(_READER_SECONDS)
        topics = [topic for topic in self._coordinator.subscriptions if not topic.startswith(RETRY_PREFIX)]
        if not topics:
            _log.warning("%s %s", self._described, _NO_SUBSCRIPTION)
        unread = [topic for topic in topics if topic in self._listeners and self._listeners[topic] is None]
        if unread and not self._streams:
            said = "%s has no handler for topic %s, and nothing iterates messages(): give subscribe() a handler"
            _log.warning(said, self._described, ", ".join(unread))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.settings.consume_timeout_minutes * 60.0)
            for process_queue in list(self._coordinator.process_queues.values()):
                await self._service.expire(process_queue)

    async def _renew_locks(self) -> None:
        while True:
            await asyncio.sleep(self.settings.lock_interval_ms / 1000.0)
            await self._coordinator.renew_locks()


async def _not_subscribed(message: ReceivedMessage) -> None:
    """Handle messages that are delivered again although the subscription of their topic was removed. The error sends
    the message back, so that a member with a subscription gets it."""
    raise ClientError(f"topic {message.topic} is not subscribed any more")


async def _of_no_topic(message: ReceivedMessage) -> None:
    """Refuse a message that was sent to the retry topic directly, because it is not clear which handler should get
    it."""
    reason = f"it was sent to {message.topic} itself, has no property RETRY_TOPIC, and several topics have handlers"
    raise DeadLetters([(message, reason)])


_NOT_SUBSCRIBED = Listener(_not_subscribed)
_OF_NO_TOPIC = Listener(_of_no_topic)
