"""The pull consumer (``DefaultMQPullConsumer``): programs read queues themselves and save offsets themselves.

It is not a member of a group that shares queues: it announces no subscription, so each pull carries its own.
Source: behaviour.md §8.1; remoting.md §4.3.2, §4.3.3.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.client.calls import PullStatus
from rmqkit.client.lifecycle import Client
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.settings import PullConsumerSettings, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, ConnectFailed, NoRoute
from rmqkit.filter.subscription import TAG, matches_tags, subscription
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.headers.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.names import topic_fault

__all__ = ["PullConsumer", "PullResult"]


class PullResult(Struct):
    """What a pull found.

    Attributes:
        next_begin_offset: where to pull next, whatever the status.
        min_offset, max_offset: of the queue; the maximum is one past the last message.
        messages: those that match the expression.
    """

    status: PullStatus
    next_begin_offset: int
    min_offset: int
    max_offset: int
    messages: list[ReceivedMessage]


class PullConsumer(Client):
    """Reads queues::

        async with PullConsumer("audit", name_servers="127.0.0.1:9876") as consumer:
            for queue in await consumer.queues("Orders"):
                offset = await consumer.committed(queue) or await consumer.min_offset(queue)
                result = await consumer.pull(queue, offset)
                ...
                await consumer.commit(queue, result.next_begin_offset)

    Every method raises RemotingError when a broker does not answer and PeerRefused when it refuses.
    Raises SettingsError: a name or a setting is not legal, or no name server is known.

    Args:
        group: whose offsets `committed` and `commit` are about.
        name_servers: ``host:port;host:port``; None takes the environment's ``NAMESRV_ADDR``.
        settings: time-outs.
        runtime: shares another client's connections instead of having its own.
    """

    _kind = "pull consumer"
    _reserved_group = "DEFAULT_CONSUMER"

    def __init__(
        self,
        group: str,
        name_servers: str | None = None,
        *,
        settings: PullConsumerSettings | None = None,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = check(settings or PullConsumerSettings())
        super().__init__(group, name_servers, self.settings, runtime, clock)
        self._clock = self._runtime.clock
        self._suggested: dict[MessageQueue, int] = {}

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues of a topic, sorted.
        Raises ClientError: the topic's name is not legal.
        Raises NoRoute: it does not exist."""
        self._check_started()
        fault = topic_fault(topic)
        if fault is not None:
            raise ClientError(fault)
        if not self._runtime.routes.subscribe_queues(topic):
            await self._runtime.routes.refresh(topic)
        queues = self._runtime.routes.subscribe_queues(topic)
        if not queues:
            raise NoRoute(f"no broker lets topic {topic} be read: create it, or send a message to it first")
        return queues

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        expression: str = "*",
        *,
        max_count: int = 32,
        suspend_ms: int = 0,
        expression_type: str = TAG,
    ) -> PullResult:
        """Read a queue from an offset on.
        Raises ClientError: the expression names no tag.
        Raises BodyError: a message's body is damaged.

        Args:
            expression: which tags; ``*`` for everything.
            max_count: how many messages at most; a broker may give fewer.
            suspend_ms: how long the broker may wait for a message when there is none.
        """
        address = await self._address(queue, self._suggested.get(queue, 0))
        try:
            wanted = subscription(queue.topic, expression, expression_type=expression_type)
        except ValueError as error:
            raise ClientError(str(error)) from None
        header = PullMessageRequest(
            consumer_group=self.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=offset,
            max_msg_nums=max_count,
            sys_flag=int(PullFlag.SUBSCRIPTION | (PullFlag.SUSPEND if suspend_ms else 0)),
            commit_offset=0,
            suspend_timeout_millis=suspend_ms,
            sub_version=self._clock.now_ms(),
            subscription=wanted.sub_string,
            expression_type=wanted.expression_type,
            bname=queue.broker_name,
        )
        pulled = await self._runtime.calls.pull(address, header, self.settings.pull_timeout_ms + suspend_ms)
        self._suggested[queue] = pulled.suggested_broker_id
        messages = read_messages(pulled.body, queue.broker_name) if pulled.status is PullStatus.FOUND else []
        return PullResult(
            pulled.status,
            pulled.next_begin_offset,
            pulled.min_offset,
            pulled.max_offset,
            [message for message in messages if matches_tags(wanted, message.tags)],
        )

    async def min_offset(self, queue: MessageQueue) -> int:
        """The first message that is still stored."""
        return await self._runtime.calls.min_offset(await self._address(queue), queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """One past the last message."""
        return await self._runtime.calls.max_offset(await self._address(queue), queue)

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The first message stored at or after a time, in ms since the epoch."""
        return await self._runtime.calls.search_offset(await self._address(queue), queue, timestamp_ms)

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group is, None when the broker has no offset of it."""
        return await self._runtime.calls.committed_offset(await self._address(queue), self.group, queue)

    async def commit(self, queue: MessageQueue, offset: int) -> None:
        """Save where the group is: the next message it wants; it may go back.

        A broker refuses it for a group it does not know; the group's first pull makes it known.
        """
        await self._runtime.calls.commit_offset(await self._address(queue), self.group, queue, offset)

    async def _address(self, queue: MessageQueue, broker_id: int = 0) -> str:
        self._check_started()
        routes = self._runtime.routes
        found = routes.any_address(queue.broker_name, broker_id)
        if found is None:
            await routes.refresh(queue.topic)
            found = routes.any_address(queue.broker_name, broker_id)
        if found is None:
            raise ConnectFailed(queue.broker_name, f"no route of topic {queue.topic} names a broker of that name")
        return found[1]
