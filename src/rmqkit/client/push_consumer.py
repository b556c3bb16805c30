"""The push consumer (``DefaultMQPushConsumer``, clustering, concurrent): what is pushed is pulled in the background.

::

    routes, members change ──> rebalance ──> one PullLoop per queue ──> ProcessQueue ──> workers ──> handler
                                                    └── GroupOffsets <── lowest message left ──┘

Closing goes the other way round: pulling stops, handlers finish, offsets are saved, the group is left.
Source: behaviour.md §8.3, §8.4, §8.6–8.9; remoting.md §9.5, §9.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.client.allocate import Allocate, averagely
from rmqkit.client.consuming import AsyncHandler, Consuming, Handler
from rmqkit.client.lifecycle import Client
from rmqkit.client.offsets import GroupOffsets
from rmqkit.client.process_queue import ProcessQueue
from rmqkit.client.pulling import PullLoop
from rmqkit.client.rebalance import Rebalance
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.settings import PushConsumerSettings, check
from rmqkit.client.tasks import Tasks, keep_doing
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, SettingsError
from rmqkit.filter.subscription import TAG, is_tag_type, subscription
from rmqkit.protocol.bodies.clients import ConsumerData, MessageQueue, SubscriptionData
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import retry_topic, topic_fault

__all__ = ["MessageStream", "PushConsumer"]

H = TypeVar("H", bound=Handler)

_INCOMPLETE_PAUSE_MS = 1000.0
_HAND_OVER_MS = 300.0
"""How long running handlers may hold up giving a queue away; its next owner waits 500 ms."""

_MIB = 1 << 20


class _Subscription(Struct):
    data: SubscriptionData
    handler: AsyncHandler | None


class PushConsumer(Client):
    """Consumes messages as a member of a group::

        consumer = PushConsumer("billing", name_servers="127.0.0.1:9876")

        @consumer.on("Orders", "new || changed")
        async def bill(message: ReceivedMessage) -> None:
            ...                                   # returning consumes the message, raising has it come again

        async with consumer:
            await stop_signal.wait()

    Args:
        group: the consumer group; its members share the queues and must have equal subscriptions.
        name_servers: ``host:port;host:port``; None takes the environment's ``NAMESRV_ADDR``.
        settings: where to begin, flow control, number of handlers at work.
        allocate: how queues are shared out (see `rmqkit.client.allocate`); equal in all members.
        runtime: shares another client's connections instead of having its own.

    Raises:
        SettingsError: a name or a setting is not legal, or no name server is known.
    """

    _kind = "consumer"
    _reserved_group = "DEFAULT_CONSUMER"

    def __init__(
        self,
        group: str,
        name_servers: str | None = None,
        *,
        settings: PushConsumerSettings | None = None,
        allocate: Allocate = averagely,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = check(settings or PushConsumerSettings())
        super().__init__(group, name_servers, self.settings, runtime, clock)
        self._clock = self._runtime.clock
        self._offsets = GroupOffsets(self._runtime, group)
        self._consuming = Consuming(self._runtime, group, self._offsets, self.settings, self._handler_of)
        self._rebalance = Rebalance(self._runtime, group, allocate, self)
        self._subscriptions: dict[str, _Subscription] = {}
        self._process_queues: dict[MessageQueue, ProcessQueue] = {}
        self._pulls: dict[MessageQueue, asyncio.Task[None]] = {}
        self._tasks = Tasks()
        self._wake = asyncio.Event()
        self._streams: list[MessageStream] = []
        self._put_subscription(retry_topic(group), "*", None, TAG)

    # -- what programs call

    def subscribe(
        self, topic: str, expression: str = "*", handler: Handler | None = None, *, expression_type: str = TAG
    ) -> None:
        """Subscribe to a topic, or replace its subscription; before or after the start.
        Raises SettingsError: topic or expression are not legal.

        Args:
            topic: it need not exist yet.
            expression: ``*`` for everything, ``A || B`` for some tags, an SQL92 text with ``expression_type="SQL92"``.
            handler: called with each message: a coroutine function on the loop, a plain function in a thread. It
                may be called twice for a message. Without a handler messages come through `messages`.
            expression_type: ``TAG`` or ``SQL92``. A broker that cannot filter by an SQL92 expression makes `start`
                fail; one that is subscribed later is only logged.
        """
        fault = topic_fault(topic)
        if fault is not None:
            raise SettingsError(fault)
        self._put_subscription(topic, expression, handler, expression_type)
        if self._is_started:
            self._runtime.routes.watch(topic)
            self._runtime.refresh_routes_soon()
            self._runtime.heartbeat_soon()
            self.rebalance_soon()

    def on(self, topic: str, expression: str = "*", *, expression_type: str = TAG) -> Callable[[H], H]:
        """`subscribe` as a decorator of the handler. Raises SettingsError: topic or expression are not legal."""

        def decorate(handler: H) -> H:
            self.subscribe(topic, expression, handler, expression_type=expression_type)
            return handler

        return decorate

    def unsubscribe(self, topic: str) -> None:
        """Give up a topic; its queues go with the next rebalance, at once."""
        if self._subscriptions.pop(topic, None) is not None and self._is_started:
            self._runtime.routes.unwatch(topic)
            self._runtime.heartbeat_soon()
            self.rebalance_soon()

    def messages(self) -> MessageStream:
        """The messages of topics subscribed without a handler, for ``async for``.

        A message counts as consumed when the next one is asked for, or when the consumer is closed without an
        exception. One that was not is delivered again to the next consumer of the group.
        """
        stream = MessageStream(self._consuming)
        self._streams.append(stream)
        return stream

    def held_queues(self) -> set[MessageQueue]:
        """The queues this consumer has of its group's."""
        return set(self._process_queues)

    # -- what the runtime and the rebalance call

    def consumer_data(self) -> ConsumerData:
        """The group and its subscriptions, as heartbeats say them."""
        return ConsumerData(
            group_name=self.group,
            consume_from_where=self.settings.start_from.value,
            subscription_data_set=[one.data for one in self._subscriptions.values()],
        )

    def rebalance_soon(self) -> None:
        """Look at who owns which queue with the next turn of the loop."""
        self._wake.set()

    async def change_queues(self, taken: list[MessageQueue], given_up: list[MessageQueue], *, is_shared: bool) -> None:
        """Give up queues, tell the brokers about the newest subscriptions, then begin to pull the new queues."""
        await asyncio.gather(*(self._give_up(queue) for queue in given_up))
        self._renew_versions({queue.topic for queue in (*taken, *given_up)})
        await self._runtime.heartbeat()
        pause_ms = float(self.settings.take_over_pause_ms) if is_shared else 0.0
        for queue in taken:
            self._take(queue, pause_ms)

    # -- inside

    def _register(self) -> None:
        self._runtime.register_consumer(self.group, self)

    async def _open(self) -> None:
        for topic in list(self._subscriptions):
            self._runtime.routes.watch(topic)
            await self._runtime.routes.refresh(topic)
        await self._check_expressions()
        await self._runtime.heartbeat()
        self._consuming.start()
        self._tasks.start(
            keep_doing(self._share_out, wake=self._wake, name=f"rebalance of group {self.group}"),
            f"rebalance of group {self.group}",
        )
        self._tasks.start(self._save_offsets(), f"offsets of group {self.group}")
        self._tasks.start(self._expire(), f"consume time-outs of group {self.group}")

    async def _finish(self) -> None:
        await self._tasks.close()
        process_queues = list(self._process_queues.values())
        for process_queue in process_queues:
            process_queue.drop()
        await asyncio.gather(*(one.wait_for_handlers(self.settings.drain_ms) for one in process_queues))
        for stream in self._streams:
            stream.settle()
        await self._consuming.close()
        await self._offsets.save_all()
        for topic in self._subscriptions:
            self._runtime.routes.unwatch(topic)
        await self._runtime.unregister_consumer(self.group)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for stream in self._streams:
                stream.abandon()
        await self.close()

    def _put_subscription(self, topic: str, expression: str, handler: Handler | None, expression_type: str) -> None:
        try:
            data = subscription(topic, expression, expression_type=expression_type, version=self._clock.now_ms())
        except ValueError as error:
            raise SettingsError(f"subscription to topic {topic}: {error}") from None
        self._subscriptions[topic] = _Subscription(data, self._consuming.on_loop(handler))

    async def _check_expressions(self) -> None:
        """Have a broker say whether it can filter by the expressions that are not tags."""
        for topic, one in self._subscriptions.items():
            brokers = self._runtime.routes.brokers_of(topic)
            if not is_tag_type(one.data.expression_type) and brokers:
                address = self._runtime.routes.any_address(brokers[0])
                assert address is not None, "a broker of a route has an address"
                await self._runtime.calls.check_subscription(address[1], self._runtime.client_id, self.group, one.data)

    def _handler_of(self, topic: str) -> AsyncHandler | None:
        one = self._subscriptions.get(topic)
        return _not_subscribed if one is None else one.handler

    def _subscription_of(self, topic: str) -> SubscriptionData | None:
        one = self._subscriptions.get(topic)
        return None if one is None else one.data

    async def _share_out(self) -> float:
        for queue in [queue for queue, pull in self._pulls.items() if pull.done()]:
            await self._give_up(queue)  # its loop ended by an error: the queue begins anew
        is_complete = await self._rebalance.share_out(sorted(self._subscriptions))
        return self.settings.rebalance_interval_ms if is_complete else _INCOMPLETE_PAUSE_MS

    def _take(self, queue: MessageQueue, pause_ms: float) -> None:
        settings = self.settings
        process_queue = ProcessQueue(
            queue,
            messages_max=settings.held_messages_max,
            bytes_max=settings.held_mib_max * _MIB,
            span_max=settings.span_max,
        )
        loop = PullLoop(
            self._runtime,
            self.group,
            process_queue,
            subscription_of=self._subscription_of,
            offsets=self._offsets,
            consuming=self._consuming,
            settings=settings,
            on_illegal=self._offset_illegal,
        )
        self._process_queues[queue] = process_queue
        self._pulls[queue] = self._tasks.start(loop.run(pause_ms), f"pull {queue} for group {self.group}")

    async def _give_up(self, queue: MessageQueue) -> None:
        """Stop pulling, let handlers finish for a moment, save the offset so that the next owner starts there."""
        process_queue = self._process_queues.get(queue)
        if process_queue is None:
            return  # its offset was illegal, just now
        process_queue.drop()
        pull = self._pulls[queue]
        pull.cancel()
        await asyncio.wait([pull])
        await process_queue.wait_for_handlers(_HAND_OVER_MS)
        await self._let_go(process_queue)

    async def _offset_illegal(self, process_queue: ProcessQueue, offset: int) -> None:
        process_queue.drop()
        self._offsets.freeze(process_queue.queue, offset)
        await self._let_go(process_queue)
        self.rebalance_soon()

    async def _let_go(self, process_queue: ProcessQueue) -> None:
        process_queue.release()
        await self._offsets.save(process_queue.queue)
        self._offsets.forget(process_queue.queue)
        self._process_queues.pop(process_queue.queue, None)
        self._pulls.pop(process_queue.queue, None)

    def _renew_versions(self, topics: set[str]) -> None:
        now_ms = self._clock.now_ms()
        for topic in topics & self._subscriptions.keys():
            one = self._subscriptions[topic]
            one.data = replace(one.data, sub_version=max(now_ms, one.data.sub_version + 1))

    async def _save_offsets(self) -> None:
        while True:
            await asyncio.sleep(self.settings.persist_interval_ms / 1000.0)
            await self._offsets.send_changed()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.settings.consume_timeout_minutes * 60.0)
            for process_queue in list(self._process_queues.values()):
                await self._consuming.expire(process_queue)


async def _not_subscribed(message: ReceivedMessage) -> None:
    """The handler of messages that come again after their topic was given up: a member that has it may get them."""
    raise ClientError(f"topic {message.topic} is not subscribed any more")


class MessageStream:
    """The messages of a consumer, one after the other; see `PushConsumer.messages`."""

    def __init__(self, consuming: Consuming) -> None:
        self._consuming = consuming
        self._given: tuple[ProcessQueue, ReceivedMessage] | None = None

    def __aiter__(self) -> MessageStream:
        return self

    async def __anext__(self) -> ReceivedMessage:
        self.settle()
        self._given = await self._consuming.next()
        if self._given is None:
            raise StopAsyncIteration
        return self._given[1]

    def settle(self) -> None:
        """The message given last is consumed."""
        given, self._given = self._given, None
        if given is not None:
            self._consuming.consumed(*given)

    def abandon(self) -> None:
        """The message given last is not consumed."""
        self._given = None
