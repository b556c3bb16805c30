"""The endpoints that ``broker.subscriber`` and ``broker.publisher`` create, and their part of the AsyncAPI page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

from faststream._internal.configs import (
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.publisher import PublisherProto, PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream.exceptions import FeatureNotSupportedException
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import PublishCommand, Response
from faststream.response.publish_type import PublishType
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, PublisherSpec, SubscriberSpec

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.faststream.messages import (
    Delivery,
    MessageOptions,
    RocketMessage,
    RocketPublishCommand,
    decode_batch,
    decode_one,
    delivery_here,
    parse_batch,
    parse_message,
)
from rmqkit.filter import TAG
from rmqkit.protocol.message import ReceivedMessage

__all__ = ["RocketPublisher", "RocketSubscriber"]


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """The consume options of a group. All subscribers of the group in one broker have equal options."""

    ordered: bool = False
    pop: bool = False
    settings: PushConsumerSettings | None = None


class Consumers(Protocol):
    """The consumers of a broker, by group."""

    def of(self, group: str, options: GroupOptions) -> PushConsumer: ...
    async def start_new(self) -> None: ...


@dataclass(kw_only=True)
class SubscriberConfig(SubscriberUsecaseConfig):
    topic: str
    group: str
    expression: str = "*"
    expression_type: str = TAG
    batch_max: int | None = None
    options: GroupOptions = field(default_factory=GroupOptions)

    @property
    def ack_policy(self) -> AckPolicy:
        if self._ack_policy is not EMPTY:
            return self._ack_policy
        policy: AckPolicy = self._outer_config.ack_policy
        return AckPolicy.NACK_ON_ERROR if policy is EMPTY else policy


@dataclass(kw_only=True)
class SubscriberSpecConfig(SubscriberSpecificationConfig):
    topic: str


class SubscriberSpecs(SubscriberSpecification[Any, SubscriberSpecConfig]):
    """The channel of a subscriber."""

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def channel_labels(self) -> list[str]:
        return [self.topic]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        message = MessageSpec(title=f"{self.name}:Message", payload=resolve_payloads(self.get_payloads()))
        operation = Operation(message=message, bindings=None)
        spec = SubscriberSpec(address=self.topic, description=self.description, operation=operation, bindings=None)
        return {self.name: spec}


class RocketSubscriber(SubscriberUsecase[Any]):
    """The handlers of one topic, made by `RocketBroker.subscriber`. Handlers receive messages, or lists of messages."""

    def __init__(self, config: SubscriberConfig, specification: SubscriberSpecs, calls: CallsCollection[Any]) -> None:
        is_batch = config.batch_max is not None
        config.parser = parse_batch if is_batch else parse_message
        config.decoder = decode_batch if is_batch else decode_one
        super().__init__(config, specification, calls)  # type: ignore[arg-type]
        self._config = config
        self._consumer: PushConsumer | None = None

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self._config.topic}"

    @property
    def group(self) -> str:
        return self._config.group

    @property
    def is_batch(self) -> bool:
        """Return True if handlers receive lists."""
        return self._config.batch_max is not None

    async def start(self) -> None:
        """Subscribe at the group's consumer. The consumer starts after the broker has started all subscribers."""
        await super().start()
        if self.calls and self._consumer is None:
            config, consumers = self._config, self._consumers
            self._consumer = consumers.of(self.group, config.options)
            handle = self._named_handler()
            self._consumer._subscribe(
                self.topic, config.expression, handle, config.expression_type, None, config.batch_max, None, None
            )
            await consumers.start_new()
        self._post_start()

    async def stop(self) -> None:
        """Unsubscribe the topic, and wait for running handlers."""
        if self._consumer is not None:
            if not self._consumer.is_closed:
                self._consumer.unsubscribe(self.topic)
            self._consumer = None
        await super().stop()

    async def process_message(self, msg: Any) -> Response:
        try:
            return await super().process_message(msg)
        except BaseException as error:
            if (delivery := delivery_here.get()) is not None:
                delivery.error = error
            raise

    async def get_one(self, *, timeout: float = 5) -> StreamMessage[Any] | None:
        """Raise FeatureNotSupportedException; use `rmqkit.PullConsumer` to receive single messages."""
        raise FeatureNotSupportedException("RocketBroker has no get_one: use rmqkit.PullConsumer, or a handler")

    def __aiter__(self) -> AsyncIterator[StreamMessage[Any]]:
        """Raise FeatureNotSupportedException, like `get_one`."""
        raise FeatureNotSupportedException("RocketBroker cannot be iterated: use rmqkit.PushConsumer.messages")

    def get_log_context(self, message: StreamMessage[Any] | None) -> dict[str, str]:
        return {"topic": self.topic, "group": self.group, "message_id": getattr(message, "message_id", "")}

    @property
    def _consumers(self) -> Consumers:
        consumers: Consumers = self._outer_config.consumers  # type: ignore[attr-defined]
        return consumers

    def _make_response_publisher(self, message: StreamMessage[Any]) -> Iterable[PublisherProto]:
        return (ReplyPublisher(message, producer=self._outer_config.producer),)

    def _named_handler(self) -> Callable[[Any], Awaitable[None]]:
        """Return `_handle` with the name of the program's function, for dead letters and logs."""

        async def handle(received: ReceivedMessage | list[ReceivedMessage]) -> None:
            await self._handle(received)

        handle.__module__, handle.__qualname__ = "", self.calls[0].name
        return handle

    async def _handle(self, received: ReceivedMessage | list[ReceivedMessage]) -> None:
        """Handle the messages that the client received. Raises ConsumeLater: the messages are not consumed."""
        delivery = Delivery()
        token = delivery_here.set(delivery)
        try:
            await self.consume(received)  # logs exceptions of handlers instead of raising them
        finally:
            delivery_here.reset(token)
        delivery.finish()


@dataclass(kw_only=True)
class PublisherConfig(PublisherUsecaseConfig):
    topic: str
    headers: dict[str, Any]
    reply_to: str
    options: MessageOptions


@dataclass(kw_only=True)
class PublisherSpecConfig(PublisherSpecificationConfig):
    topic: str


class PublisherSpecs(PublisherSpecification[Any, PublisherSpecConfig]):
    """The channel of a publisher."""

    @property
    def topic(self) -> str:
        return f"{self._outer_config.prefix}{self.config.topic}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.topic}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        operation = Operation(message=MessageSpec(title=f"{self.name}:Message", payload=payload), bindings=None)
        described = self.config.description_
        return {self.name: PublisherSpec(address=self.topic, description=described, operation=operation, bindings=None)}


class RocketPublisher(PublisherUsecase):
    """The publisher of one topic, made by `RocketBroker.publisher`. As a decorator it publishes the return values of a
    handler."""

    def __init__(self, config: PublisherConfig, specification: PublisherSpecs) -> None:
        super().__init__(config, specification)  # type: ignore[arg-type]
        self._config = config

    @property
    def topic(self) -> str:
        """The topic, with the prefixes of its routers."""
        return f"{self._outer_config.prefix}{self._config.topic}"

    async def publish(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: dict[str, Any] | None = None,
        reply_to: str = "",
        correlation_id: str | None = None,
        **options: Unpack[MessageOptions],
    ) -> SendResult:
        """Publish a message like `RocketBroker.publish`, by default with the publisher's topic, headers and options."""
        cmd = self._command(message, topic, PublishType.PUBLISH, headers, correlation_id, options)
        cmd.reply_to = reply_to or self._config.reply_to
        producer = self._outer_config.producer
        result: SendResult = await self._basic_publish(cmd, producer=producer, _extra_middlewares=())
        return result

    async def request(
        self,
        message: Any,
        topic: str = "",
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        timeout: float = 3.0,
        **options: Unpack[MessageOptions],
    ) -> RocketMessage:
        """Publish a message and wait for the return value of its handler, like `RocketBroker.request`."""
        cmd = self._command(message, topic, PublishType.REQUEST, headers, correlation_id, options)
        cmd.timeout = timeout
        reply: RocketMessage = await self._basic_request(cmd, producer=self._outer_config.producer)
        return reply

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        """Publish the return value of a handler."""
        own = RocketPublishCommand.from_cmd(cmd)
        own.destination = self.topic
        own.add_headers(self._config.headers, override=False)
        own.reply_to = own.reply_to or self._config.reply_to
        own.options = self._config.options | own.options
        producer = self._outer_config.producer
        await self._basic_publish(own, producer=producer, _extra_middlewares=_extra_middlewares)

    def _command(
        self,
        message: Any,
        topic: str,
        kind: PublishType,
        headers: dict[str, Any] | None,
        correlation_id: str | None,
        options: MessageOptions,
    ) -> RocketPublishCommand:
        return RocketPublishCommand(
            message,
            topic=topic or self.topic,
            headers=self._config.headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            options=self._config.options | options,
            _publish_type=kind,
        )


class ReplyPublisher(FakePublisher):
    """The publisher of a handler's return value, to the waiting client or to the topic in ``reply_to``."""

    def __init__(self, message: StreamMessage[Any], *, producer: Any) -> None:
        super().__init__(producer=producer)
        self._message = message

    def patch_command(self, cmd: PublishCommand) -> RocketPublishCommand:
        own = RocketPublishCommand.from_cmd(super().patch_command(cmd))
        raw = self._message.raw_message
        if self._message.headers.get("reply_to") == self._message.reply_to:
            own.destination = self._message.reply_to
        else:
            own.request = raw
        return own
