"""`TestRocketBroker`, which calls handlers in the test's own task, without a broker and without sockets."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock

from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound

from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.faststream.broker import RocketBroker, RocketProducer
from rmqkit.faststream.endpoints import RocketPublisher, RocketSubscriber
from rmqkit.faststream.messages import RocketPublishCommand
from rmqkit.protocol import properties as names
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue

__all__ = ["TestRocketBroker"]

_REQUEST_SECONDS = 3.0


class TestRocketBroker(TestBroker[RocketBroker, EnterType], broker=RocketBroker):
    """A test broker that runs the handlers of a broker in a test::

        async with TestRocketBroker(broker) as br:
            await br.publish({"id": 17}, "Orders")
            bill.mock.assert_called_once_with({"id": 17})

    Every group that subscribes to the topic gets the message. If a group has several subscribers, the first one gets
    the message. The test broker ignores tags and SQL92 expressions and does not wait for delays. It does not deliver
    an unacknowledged message again: ``publish`` raises the error that the handler raised. ``with_real=True`` uses a
    real broker (see `rmqkit.testing`).
    """

    __test__ = False

    def create_publisher_fake_subscriber(
        self, broker: RocketBroker, publisher: RocketPublisher
    ) -> tuple[RocketSubscriber, bool]:
        for subscriber in _subscribers(self.brokers):
            if subscriber.topic == publisher.topic:
                return subscriber, True
        group = f"faststream-test-{uuid.uuid4().hex}"
        return broker.subscriber(publisher.topic, group=group, persistent=False), False

    @contextmanager
    def _patch_producer(self, broker: RocketBroker) -> Iterator[None]:
        with change_producer(broker.config.broker_config, _InMemory(broker, self.brokers)):
            yield

    async def _fake_connect(self, broker: RocketBroker, *args: Any, **kwargs: Any) -> Any:
        return AsyncMock()


class _InMemory(RocketProducer):
    """A producer that calls the handlers of a topic instead of sending."""

    def __init__(self, broker: RocketBroker, brokers: tuple[RocketBroker, ...]) -> None:
        super().__init__(broker._parser, broker._decoder)
        self._brokers = brokers
        self._serializer = broker.config.fd_config._serializer
        self.codec = broker.config.broker_codec or self.codec
        self._sent = 0

    async def publish(self, cmd: RocketPublishCommand) -> SendResult:
        message = cmd.message(await self.codec.encode(cmd.body, self._serializer))
        received = self._received(message)
        for subscriber in self._of(message.topic):
            await subscriber.process_message([received] if subscriber.is_batch else received)
        return self._result(received)

    async def publish_batch(self, cmd: RocketPublishCommand) -> list[SendResult]:
        received = [
            self._received(cmd.message(await self.codec.encode(body, self._serializer))) for body in cmd.batch_bodies
        ]
        for subscriber in self._of(cmd.destination):
            for messages in [received] if subscriber.is_batch else received:
                await subscriber.process_message(messages)
        return [self._result(one) for one in received]

    async def request(self, cmd: RocketPublishCommand) -> Any:
        message = cmd.message(await self.codec.encode(cmd.body, self._serializer))
        for subscriber in self._of(message.topic):
            received: Any = self._received(message)
            async with asyncio.timeout(cmd.timeout or _REQUEST_SECONDS):
                response = await subscriber.process_message([received] if subscriber.is_batch else received)
            reply = RocketPublishCommand.from_cmd(response.as_publish_command())
            return self._received(reply.message(await self.codec.encode(reply.body, self._serializer)))
        raise SubscriberNotFound

    def _of(self, topic: str) -> list[RocketSubscriber]:
        """Return one subscriber of each group, because a broker delivers a message once per group."""
        subscribers = [one for one in _subscribers(self._brokers) if one.topic == topic]
        return list({one.group: one for one in reversed(subscribers)}.values())

    def _received(self, message: Message) -> ReceivedMessage:
        self._sent += 1
        body = message.body
        assert isinstance(body, bytes), "the codec returns bytes"
        msg_id, now_ms = f"{self._sent:032X}", SYSTEM_CLOCK.now_ms()
        return ReceivedMessage(
            topic=message.topic,
            broker_name="test",
            queue_id=0,
            queue_offset=self._sent,
            msg_id=msg_id,
            offset_msg_id=msg_id,
            body=body,
            properties={**message.wire_properties(), names.UNIQ_KEY: msg_id},
            flag=0,
            sys_flag=0,
            body_crc=0,
            store_size=len(body),
            physical_offset=self._sent,
            born_timestamp=now_ms,
            born_host="127.0.0.1:0",
            store_timestamp=now_ms,
            store_host="127.0.0.1:0",
            reconsume_times=0,
            prepared_transaction_offset=0,
        )

    def _result(self, received: ReceivedMessage) -> SendResult:
        queue = MessageQueue(received.topic, "test", 0)
        return SendResult(SendStatus.SEND_OK, received.msg_id, received.offset_msg_id, queue, received.queue_offset)


def _subscribers(brokers: tuple[RocketBroker, ...]) -> list[RocketSubscriber]:
    return [one for broker in brokers for one in broker.subscribers if isinstance(one, RocketSubscriber)]
