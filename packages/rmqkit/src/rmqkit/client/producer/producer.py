"""The producer (``DefaultMQProducer``). Source: behaviour.md §7."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence, Sized
from typing import Unpack

from rmqkit.client.observe.hooks import NO_HOOKS, BackgroundHook, Hook, Recall, Sending, SendResult
from rmqkit.client.observe.status import ProducerStatus
from rmqkit.client.producer.accumulator import Accumulator, SendMany
from rmqkit.client.producer.encode import (
    EncodedMessage,
    check_topic,
    encode_message,
    encode_messages,
    reply_address,
    reporting_failure,
    with_bytes,
)
from rmqkit.client.producer.selectors import Selector, by_lite_topic, by_sharding_key
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.handlers import Reply
from rmqkit.client.runtime.lifecycle import Client, keeps_open
from rmqkit.client.runtime.routes import NOT_REGISTERED
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ProducerSettings, Tracing, check
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import ClientError, HeaderError, MessageIllegal, NoRoute, PeerRefused, ReplyTimedOut
from rmqkit.protocol.bodies import Body
from rmqkit.protocol.ids import decode_recall_handle
from rmqkit.protocol.message import Message, MessageFields, ReceivedMessage, message_of
from rmqkit.protocol.properties import TRANSACTION_PREPARED
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.send import RecallMessageRequest
from rmqkit.times import Duration, duration_ms


class Producer(Client):
    """A client that sends messages to topics::

        async with Producer("orders", name_servers="127.0.0.1:9876") as producer:
            result = await producer.send("Orders", b"17", tags="new")

    You can run any number of sends at the same time, in tasks or with `asyncio.gather`. After `close` is called, new
    sends raise ClientError. `close` waits for each running send, at most for the timeout of the send.
    Raises SettingsError: a name, an address or a setting is not valid.

    Args:
        group: the producer group.
        name_servers: ``host:port;host:port``, or a list. None means the environment variable ``NAMESRV_ADDR``, or the
            name server at 127.0.0.1:9876.
        settings: timeouts, retries, compression and more.
        runtime: a runtime with connections that this client shares.
        hooks: objects that are called for every send.
        wait_ready: the longest time that `start` waits until a name server answers and knows a broker, in seconds or as
            a `timedelta`. With 0, `start` does not wait, and only needs a response from a name server.
    """

    closes_last = True

    _kind = "producer"
    _reserved_group = "DEFAULT_PRODUCER"

    def __init__(
        self,
        group: str,
        name_servers: str | Sequence[str] | None = None,
        *,
        settings: ProducerSettings | None = None,
        runtime: ClientRuntime | None = None,
        clock: Clock = SYSTEM_CLOCK,
        hooks: Sequence[Hook] = (),
        wait_ready: Duration = 0,
    ) -> None:
        self.settings = check(settings or ProducerSettings())
        super().__init__(group, name_servers, self.settings, runtime, clock, hooks, wait_ready)
        self._clock = self._runtime.clock
        self._sender = Sender(self._runtime, group, self.settings)
        self._announced: set[str] = set()
        self._endless: set[SendMany] = set()  # sends with a source that may be endless
        self._accumulator: Accumulator | None = None
        if self.settings.batch.auto:
            self._accumulator = Accumulator(
                group, self.settings, deliver=self._send_prepared, next_key=self._next_key, hooks=self._hooks
            )

    @keeps_open
    async def send(
        self,
        message: Message | str,
        body: Body | None = None,
        /,
        *,
        timeout: Duration | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        **fields: Unpack[MessageFields],
    ) -> SendResult:
        """Send a message, and wait until a broker has stored it::

            await producer.send("Orders", b"17", tags="paid", keys=["order-17"])

        Args:
            message: the topic, followed by the body; or a `Message`.
            timeout: seconds or a `timedelta` for all attempts and pauses. It does not include the time in which this
                send waits for other sends. The default is ``send_timeout_ms`` of the settings. With ``batch.auto``, a
                send with this argument is not batched.
            queue: the only queue to which the message can be sent.
            selector: a function that chooses the queue (see `rmqkit.client.producer.selectors`). The message is sent to
                this queue only. The default is `by_sharding_key` for a message with a ``sharding_key``: messages with
                equal keys have the same queue, and their order is preserved.
            fields: the other fields of a `Message`: ``tags``, ``keys``, ``properties``, ``delay``, ``deliver_at``, …

        Raises:
            TypeError: there is no body, or both a `Message` and fields.
            MessageIllegal: the message breaks a rule; nothing was sent.
            NoRoute: no broker accepts messages for the topic.
            PeerRefused: a broker refused the message, and other brokers would refuse it, too.
            SendFailed: every attempt failed.
            ClientError: the producer is not started, or the selector chose no queue.
        """
        message = message_of(message, body, fields)
        if (
            self._accumulator is not None
            and timeout is None
            and self._accumulator.accepts(sized := with_bytes(message))
        ):
            queue, selector = await self._chosen(message, queue, selector), None
            # Check this again: the producer may have been closed during the choice, after its last batches were sent.
            if self._is_started:
                return await self._accumulator.send(sized, queue)
        prepared = self._prepare(message)
        is_keyed = message.sharding_key is not None or message.lite_topic is not None
        if queue is not None or selector is not None or is_keyed:
            with reporting_failure(prepared):
                queue = await self._chosen(message, queue, selector)
        return await self._sender.send(prepared, timeout_ms=self._time(timeout), queue=queue)

    @keeps_open
    async def send_one_way(
        self,
        message: Message | str,
        body: Body | None = None,
        /,
        *,
        timeout: Duration | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        **fields: Unpack[MessageFields],
    ) -> None:
        """Send a message without waiting for a response. If the message is lost, you get no error. The arguments are
        the same as for `send`.
        Raises TypeError, MessageIllegal, NoRoute, ClientError: the same as for `send`.
        Raises ConnectFailed: the broker cannot be reached, or does not read during ``timeout``."""
        message = message_of(message, body, fields)
        prepared = self._prepare(message)
        with reporting_failure(prepared):
            queue = await self._chosen(message, queue, selector)
        await self._sender.send_one_way(prepared, timeout_ms=self._time(timeout), queue=queue)

    @keeps_open
    async def send_batch(
        self, messages: Sequence[Message], *, timeout: Duration | None = None, queue: MessageQueue | None = None
    ) -> SendResult:
        """Send messages of one topic in one request. They are stored one after the other in one queue.
        Raises MessageIllegal: a message breaks a rule, the messages differ in topic or ``wait_store``, or the batch is
        too large.
        Raises NoRoute, PeerRefused, SendFailed, ClientError: the same as for `send`."""
        unique_keys = [message.msg_id or self._next_key() for message in messages]
        prepared = (self._hooks if messages else NO_HOOKS).prepare(
            Sending(self.group, list(messages), is_batch=True),
            lambda own: encode_messages(messages, unique_keys, self._next_key(), self.settings, own),
        )
        if queue is not None or messages[0].lite_topic is not None:
            with reporting_failure(prepared):
                queue = await self._chosen(messages[0], queue, None)
        return await self._sender.send(prepared, timeout_ms=self._time(timeout), queue=queue)

    async def send_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        timeout: Duration | None = None,
        selector: Selector | None = None,
    ) -> list[SendResult]:
        """Send any number of messages to any topics, in batches. Return the results in the order of the messages.

        A batch has up to ``batch.bytes`` bytes (a setting), and is sent to one queue. Several batches are sent at the
        same time. If you pass an asynchronous iterable, a batch waits at most ``batch.delay_ms`` for its next message.
        With a selector or sharding keys, the messages of each chosen queue keep their order. While too many messages
        are being sent, the method reads no more messages. After the producer is closed, it only continues to read if
        the messages are a collection with a length. ``timeout`` applies to each batch.

        Raises SendManyFailed: some messages were not sent. The error contains the result or the error of each message.
        Raises ClientError: the same as for `send`. If your iterable raises an error, this method raises it, too. The
        batches that were being sent at this time may be stored or not."""
        self._check_started()
        timeout_ms = self._time(timeout)

        async def send(prepared: EncodedMessage, queue: MessageQueue | None) -> SendResult:
            return await self._sender.send(prepared, timeout_ms=timeout_ms, queue=queue)

        async def choose(message: Message) -> MessageQueue | None:
            return await self._chosen(message, None, selector)

        sending = SendMany(
            self.group,
            self.settings,
            deliver=send,
            choose=choose,
            chooses_all=selector is not None,
            next_key=self._next_key,
            hooks=self._hooks,
        )
        # A source with a length ends by itself, so the close waits for it. Any other source may be endless and is
        # stopped.
        if isinstance(messages, Sized):
            return await self._send_whole(sending, messages)
        self._endless.add(sending)
        try:
            return await sending.send_all(messages)
        finally:
            self._endless.discard(sending)

    @keeps_open
    async def request(
        self,
        message: Message | str,
        body: Body | None = None,
        /,
        *,
        timeout: Duration | None = None,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        **fields: Unpack[MessageFields],
    ) -> Reply:
        """Send a message, and wait until a consumer has replied to it.

        ``timeout`` is the time for both. The other arguments are the same as for `send`.
        Raises ReplyTimedOut: the message is stored, but no consumer has replied.
        Raises TypeError, MessageIllegal, NoRoute, PeerRefused, SendFailed, ClientError: the same as for `send`."""
        message = message_of(message, body, fields)
        timeout_ms = self._time(timeout)
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        # Use one timeout for sending and waiting, because a reply can arrive before the response to the send.
        with self._runtime.replies.expect(self._runtime.client_id, timeout_ms) as (own, reply):
            prepared = self._prepare(message, own)
            with reporting_failure(prepared):
                queue = await self._chosen(message, queue, selector)
                await self._announce(message.topic)
            await self._sender.send(prepared, timeout_ms=timeout_ms, queue=queue)
            try:
                async with asyncio.timeout((deadline_ms - self._clock.monotonic_ms()) / 1000):
                    return await reply
            except TimeoutError:
                raise ReplyTimedOut(message.topic, timeout_ms) from None

    @keeps_open
    async def reply(
        self,
        request: ReceivedMessage,
        body: Body,
        *,
        properties: Mapping[str, str] | None = None,
        timeout: Duration | None = None,
    ) -> SendResult:
        """Reply to a message that was sent with `request`. Call this in the handler of a consumer.
        Raises NotARequest: the message was not sent with `request`.
        Raises SendFailed: the requester no longer exists, or every attempt failed for another reason.
        Raises MessageIllegal, NoRoute, PeerRefused, ClientError: the same as for `send`."""
        topic, own = reply_address(request)
        prepared = self._prepare(Message(topic=topic, body=body, properties=dict(properties or {})), own)
        prepared.is_reply = True
        return await self._sender.send(prepared, timeout_ms=self._time(timeout))

    @keeps_open
    async def recall(self, recall_handle: str | None) -> str:
        """Cancel a message with ``delay`` or ``deliver_at`` before its time, and return its ``msg_id``.
        Raises MessageIllegal: the handle is not from a `SendResult`. A message without a time has no handle.
        Raises NoRoute: the broker of the message is unknown.
        Raises PeerRefused: the broker refused. It must have ``recallMessageEnable=true``.
        Raises RemotingError: the broker did not answer."""
        # The result of a message without a delay has None here, and programs may pass it on unchecked.
        if not isinstance(recall_handle, str):
            why = "pass the recall_handle of the SendResult of a message with a time of delivery"
            raise MessageIllegal(f"recall_handle is {recall_handle!r}: {why}")
        try:
            handle = decode_recall_handle(recall_handle)
        except HeaderError as error:
            raise MessageIllegal(f"{error}: pass the recall_handle of a SendResult") from None
        # The handle contains only the name of the broker. The route contains its address.
        await self._sender.queues(handle.topic)
        address = self._runtime.routes.address(handle.broker_name)
        if address is None:
            has = f"broker {handle.broker_name}, which has the message to recall"
            raise NoRoute(f"{has}, has no route: {NOT_REGISTERED}")
        header = RecallMessageRequest(
            producer_group=self.group, topic=handle.topic, recall_handle=recall_handle, bname=handle.broker_name
        )
        recall = Recall(self.group, handle.topic, handle.unique_key)
        try:
            msg_id = await self._runtime.calls.recall(address, header)
        except PeerRefused as error:
            recall.error = error
            self._hooks.recalled(recall)
            raise
        self._hooks.recalled(recall)
        return msg_id

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues to which messages of a topic can be sent.
        Raises MessageIllegal: the name of the topic is not valid.
        Raises NoRoute: there are no such queues."""
        self._check_started()
        check_topic(topic)
        return list((await self._sender.queues(topic)).queues)

    def status(self) -> ProducerStatus:
        """Return the known brokers, the connections, and the number of running sends. ``print`` it to get a table."""
        return self._sender.status(self._state.value)

    def _make_trace(self, tracing: Tracing) -> BackgroundHook:
        from rmqkit.client.producer.trace import MessageTrace  # few programs need it, and its import takes time

        return MessageTrace(self._runtime, self.group, "PRODUCE", tracing)

    def _register(self) -> None:
        self._runtime.register_producer(self.group)

    async def _finish(self) -> None:
        # Stop endless sends first, then send waiting batches, then wait for running calls. Each step depends on the
        # previous step.
        refusal = ClientError(f"{self._described} was closed: its messages so far were sent")
        await asyncio.gather(*(sending.close(refusal) for sending in self._endless))
        if self._accumulator is not None:
            await self._accumulator.close()
        await self._calls_ended()
        await self._runtime.unregister_producer(self.group)

    @keeps_open
    async def _send_whole(
        self, sending: SendMany, messages: Iterable[Message] | AsyncIterable[Message]
    ) -> list[SendResult]:
        return await sending.send_all(messages)

    async def _send_prepared(self, prepared: EncodedMessage, queue: MessageQueue | None) -> SendResult:
        return await self._sender.send(prepared, timeout_ms=self.settings.send_timeout_ms, queue=queue)

    def _time(self, timeout: Duration | None) -> float:
        """Return the timeout of a send in ms. None and 0 mean the timeout in the settings. Raises TimeIllegal: the time
        is not valid."""
        return duration_ms(timeout, "timeout") if timeout else self.settings.send_timeout_ms

    def _next_key(self) -> str:
        return self._runtime.keys.next(self._clock.now_ms())

    def _prepare(self, message: Message, own: Mapping[str, str] | None = None) -> EncodedMessage:
        key = message.msg_id or self._next_key()
        if not self._hooks:
            return encode_message(message, key, self.settings, own)
        sending = Sending(self.group, [message], is_half=own is not None and TRANSACTION_PREPARED in own)
        return self._hooks.prepare(
            sending, lambda more: encode_message(message, key, self.settings, {**more, **(own or {})})
        )

    async def _announce(self, topic: str) -> None:
        """Send heartbeats to the brokers of a topic, so that they know this client when they push a reply."""
        if topic not in self._announced:
            await self._sender.queues(topic)
            await self._runtime.heartbeat()
            self._announced.add(topic)

    async def _chosen(
        self, message: Message, queue: MessageQueue | None, selector: Selector | None
    ) -> MessageQueue | None:
        check_topic(message.topic)
        if queue is not None:
            if queue.topic != message.topic:
                why = f"message for topic {message.topic} cannot go to a queue of topic {queue.topic}"
                raise MessageIllegal(f"{why}: choose one of its topic's")
            routes = self._runtime.routes
            if routes.address(routes.broker_of(queue)) is None:
                await self._sender.queues(message.topic)
        elif selector is not None or message.lite_topic is not None or message.sharding_key is not None:
            by_key = by_sharding_key if message.lite_topic is None else by_lite_topic
            queue = (selector or by_key)((await self._sender.queues(message.topic)).queues, message)
            if queue is None:
                raise ClientError(f"the selector chose no queue for a message of topic {message.topic}: return one")
        return queue
