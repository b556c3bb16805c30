"""The producer (``DefaultMQProducer``). Source: behaviour.md §7."""

from __future__ import annotations

from collections.abc import Sequence

from rmqkit.client.lifecycle import Client
from rmqkit.client.outgoing import Outgoing, check_topic, outgoing, outgoing_batch
from rmqkit.client.runtime import ClientRuntime
from rmqkit.client.selectors import Selector
from rmqkit.client.sender import Sender, SendResult
from rmqkit.client.settings import ProducerSettings, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, MessageIllegal
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.message import Message

__all__ = ["Producer"]


class Producer(Client):
    """Sends messages::

        async with Producer("orders", name_servers="127.0.0.1:9876") as producer:
            result = await producer.send(Message(topic="Orders", body=b"17", tags="new"))

    Any number of sends may be under way at the same time: run many tasks, or `asyncio.gather` them.
    Raises SettingsError: a name or a setting is not legal, or no name server is known.

    Args:
        group: the producer group.
        name_servers: ``host:port;host:port``; None takes the environment's ``NAMESRV_ADDR``.
        settings: time-outs, retries, compression.
        runtime: shares another client's connections instead of having its own.
    """

    _kind = "producer"
    _reserved_group = "DEFAULT_PRODUCER"

    def __init__(
        self,
        group: str,
        name_servers: str | None = None,
        *,
        settings: ProducerSettings | None = None,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = check(settings or ProducerSettings())
        super().__init__(group, name_servers, self.settings, runtime, clock)
        self._keys = self._runtime.keys
        self._clock = self._runtime.clock
        self._sender = Sender(self._runtime, group, self.settings)

    async def send(
        self,
        message: Message,
        *,
        timeout_ms: float | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> SendResult:
        """Send a message and wait until a broker has stored it.

        Args:
            message: what to send.
            timeout_ms: for all tries together; the setting ``send_timeout_ms`` otherwise.
            queue: send there, once.
            selector: chooses the queue (see `rmqkit.client.selectors`), then as above.

        Raises:
            MessageIllegal: the message breaks a rule; nothing was sent.
            NoRoute: no broker takes the topic's messages.
            PeerRefused: a broker refused it in a way that no other broker would change.
            SendFailed: every try failed.
            ClientError: the producer is not started, or the selector chose nothing.
        """
        self._check_started()
        prepared = outgoing(message, self._keys.next(self._clock.now_ms()), self.settings)
        queue = await self._chosen(prepared, message, queue, selector)
        return await self._sender.send(prepared, timeout_ms=timeout_ms or self.settings.send_timeout_ms, queue=queue)

    async def send_one_way(
        self,
        message: Message,
        *,
        timeout_ms: float | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Write a message to a broker's connection and not wait: it may be lost without a word.
        Raises MessageIllegal, NoRoute, ClientError: as `send`.
        Raises ConnectFailed: the broker cannot be reached."""
        self._check_started()
        prepared = outgoing(message, self._keys.next(self._clock.now_ms()), self.settings)
        queue = await self._chosen(prepared, message, queue, selector)
        await self._sender.send_one_way(prepared, timeout_ms=timeout_ms or self.settings.send_timeout_ms, queue=queue)

    async def send_batch(
        self,
        messages: Sequence[Message],
        *,
        timeout_ms: float | None = None,
        queue: MessageQueue | None = None,
    ) -> SendResult:
        """Send messages of one topic in one request; they lie one after the other in one queue.
        Raises MessageIllegal: a message breaks a rule, they differ in topic or ``wait_store``, or are too large
        together.
        Raises NoRoute, PeerRefused, SendFailed, ClientError: as `send`."""
        self._check_started()
        now_ms = self._clock.now_ms()
        unique_keys = [self._keys.next(now_ms) for _ in messages]
        prepared = outgoing_batch(messages, unique_keys, self._keys.next(now_ms), self.settings)
        queue = await self._chosen(prepared, messages[0], queue, None)
        return await self._sender.send(prepared, timeout_ms=timeout_ms or self.settings.send_timeout_ms, queue=queue)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The queues a topic may be sent to.
        Raises MessageIllegal: the topic's name is not legal.
        Raises NoRoute: there are none."""
        self._check_started()
        check_topic(topic)
        return list((await self._sender.queues(topic)).queues)

    def _register(self) -> None:
        self._runtime.register_producer(self.group)

    async def _finish(self) -> None:
        await self._runtime.unregister_producer(self.group)

    async def _chosen(
        self, prepared: Outgoing, message: Message, queue: MessageQueue | None, selector: Selector | None
    ) -> MessageQueue | None:
        if queue is not None:
            if queue.topic != prepared.topic:
                raise MessageIllegal(f"message for topic {prepared.topic} cannot go to a queue of topic {queue.topic}")
            if self._runtime.routes.address(queue.broker_name) is None:
                await self._sender.queues(prepared.topic)
        elif selector is not None:
            queue = selector((await self._sender.queues(prepared.topic)).queues, message)
            if queue is None:
                raise ClientError(f"the selector chose no queue for a message of topic {prepared.topic}")
        return queue
