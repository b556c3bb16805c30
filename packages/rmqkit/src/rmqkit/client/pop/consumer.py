"""The pop consumer. Brokers record the receiver of each message, not of each queue, so every member may read every
queue.

=====================  =========================================================================================
a program calls        the consumer
=====================  =========================================================================================
`on`, `subscribe`      pops in the background and calls handlers, or passes messages to `messages`
only `pop`             does nothing by itself: the program acknowledges, and sets the time of the next delivery
=====================  =========================================================================================
=====================  =========================================================================================

Source: behaviour.md §4.7–§4.15, §8.13; remoting.md §4.6.1.
"""

from __future__ import annotations

from collections.abc import Collection

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.session import ANY_QUEUE, PopSession
from rmqkit.client.runtime.lifecycle import keeps_open
from rmqkit.errors import ClientError, RemotingError
from rmqkit.filter import TAG, subscription
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.times import Duration, duration_ms


class PopConsumer(PushConsumer):
    """A consumer that does not own queues: any member of the group gets the next message. All members must pop::

        consumer = PopConsumer("billing", name_servers="127.0.0.1:9876")

        @consumer.on("Orders", "new || changed")
        async def bill(message: ReceivedMessage) -> None:
            ...                                   # return to acknowledge the message, raise to get it again later

        await consumer.run()                      # until SIGINT or SIGTERM

    or message by message::

        async with PopConsumer("billing", name_servers="127.0.0.1:9876") as consumer:
            for message in await consumer.pop("Orders", invisible_time=30):
                ...
                await consumer.ack(message)       # without ack in time, the message is delivered again

    While a handler or `messages` holds a message, the message stays invisible to others. A message from `pop` is
    invisible only for its invisible time. With ``ordered``, only one member at a time has messages of a queue, until it
    has acknowledged all of them. ``allocate`` determines how brokers distribute queues if an operator has enabled this:
    `averagely` or `averagely_by_circle`. Every coroutine method raises RemotingError if a broker does not answer, and
    PeerRefused if a broker refuses. Everything else is the same as for `PushConsumer`. Raises SettingsError: the same
    as for `PushConsumer`, or the settings require broadcasting."""

    _kind = "pop consumer"
    _only_pops = True
    _turn = 0

    async def pop(
        self,
        topic: str,
        expression: str = "*",
        *,
        max_count: int = 32,
        invisible_time: Duration | None = None,
        wait: Duration = 0,
        queue: MessageQueue | None = None,
        expression_type: str = TAG,
    ) -> list[ReceivedMessage]:
        """Return at most ``max_count`` messages. Other members do not get them during the invisible time.

        A broker may return fewer. The consumer sends requests to the brokers in turn until one has messages. The last
        broker waits for the first message.
        Args:
            topic: the topic; its retries are included.
            expression: ``*`` for all messages, ``A || B`` for tags, or with ``expression_type="SQL92"`` a SQL92
                expression.
            max_count: 1 to 32.
            invisible_time: seconds or a `timedelta`; None means ``pop.invisible_ms`` of the settings.
            wait: the longest time that the broker waits for a message, in seconds or as a `timedelta`; 0 means no wait.
            queue: the only queue to pop from; None means all queues. An ordered consumer should pass a queue.
            expression_type: ``TAG`` or ``SQL92``.
        """
        self._check_started()
        try:
            wanted = subscription(topic, expression, expression_type=expression_type)
        except ValueError as error:
            raise ClientError(str(error)) from None
        poll_ms, invisible_ms = round(duration_ms(wait, "wait")), self.settings.pop.invisible_ms
        if invisible_time is not None:
            invisible_ms = round(duration_ms(invisible_time, "invisible_time"))
        queues = [queue] if queue is not None else await self._next_brokers(topic)
        for one in queues:
            is_last = one is queues[-1]
            try:
                popped = await self._pop_session.pop(
                    one, wanted, count=max_count, invisible_ms=invisible_ms, poll_ms=poll_ms if is_last else 0
                )
            except RemotingError:
                # An unreachable broker must not prevent the delivery of the messages of the others.
                if is_last:
                    raise
                continue
            for message in popped.unwanted:
                self._pop_session.ack_soon(message)
            for message in popped.unreadable:
                await self._service.unreadable(message)
                self._pop_session.ack_soon(message)
            if popped.messages:
                self._hooks.polled(self.group, popped.messages)
                return popped.messages
        return []

    @keeps_open
    async def ack(self, message: ReceivedMessage) -> None:
        """Acknowledge a message. A handler can do this before it returns.
        Raises ClientError: the message was not popped."""
        await self._pop_session.ack([message])

    @keeps_open
    async def ack_many(self, messages: Collection[ReceivedMessage]) -> None:
        """Acknowledge messages with one request for each broker. Raises ClientError: a message was not popped."""
        await self._pop_session.ack(messages)

    @keeps_open
    async def change_invisible_time(
        self, message: ReceivedMessage, invisible_time: Duration, *, suspend: bool = False
    ) -> None:
        """Change the invisible time of a message: seconds or a `timedelta`. The message is delivered again after this
        time, unless you acknowledge it.

        With ``suspend`` this delivery does not increase ``message.reconsume_times``: use it to put a message off
        without a failure. Brokers older than 5.5 count the delivery.
        Raises ClientError: the message was not popped, or the time is not valid."""
        invisible_ms = round(duration_ms(invisible_time, "invisible_time"))
        await self._pop_session.change_invisible_time(message, invisible_ms, suspend=suspend)

    def _check_started(self) -> None:
        if not self._is_in_handler:
            super()._check_started()  # during the close, running handlers may still acknowledge

    @property
    def _pop_session(self) -> PopSession:
        assert self._session is not None, "a pop consumer has a session"
        return self._session

    async def _next_brokers(self, topic: str) -> list[MessageQueue]:
        """Return the queues to pop: one entry for each broker or, in ordered consumption, for each queue. Each call
        moves the start of the list to the next entry."""
        queues = await self._runtime.routes.readable_queues(topic)
        if not self._is_ordered:
            queues = [MessageQueue(topic, name, ANY_QUEUE) for name in sorted({queue.broker_name for queue in queues})]
        self._turn += 1
        start = self._turn % len(queues)
        return queues[start:] + queues[:start]
