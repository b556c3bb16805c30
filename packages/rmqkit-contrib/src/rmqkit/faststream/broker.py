"""The broker object of a FastStream application, and its routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Unpack

from fast_depends import Provider, dependency_provider
from fast_depends.dependencies import Dependant
from faststream._internal.broker import BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import BrokerRouter, SubscriberRoute
from faststream._internal.configs import BrokerConfig
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import CodecProto, DefaultCodec
from faststream.exceptions import IncorrectState, SetupError
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.security import BaseSecurity
from faststream.specification.schema import BrokerSpec, Tag, TagDict

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import Hook, SendResult
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.handlers import Reply
from rmqkit.client.runtime.settings import ProducerSettings, PushConsumerSettings
from rmqkit.errors import NoRoute
from rmqkit.faststream.endpoints import (
    GroupOptions,
    PublisherConfig,
    PublisherSpecConfig,
    PublisherSpecs,
    RocketPublisher,
    RocketSubscriber,
    SubscriberConfig,
    SubscriberSpecConfig,
    SubscriberSpecs,
)
from rmqkit.faststream.messages import (
    MessageOptions,
    RocketMessage,
    RocketPublishCommand,
    decode_one,
    parse_message,
)
from rmqkit.filter import TAG
from rmqkit.protocol.message import ReceivedMessage

__all__ = ["RocketBroker", "RocketRouter"]

_GROUP = "faststream"
_MESSAGE_ID_WIDTH = 32
_ASKED_FOR = "faststream-ping"


class _LogColumns(DefaultLoggerStorage):
    """The format of FastStream's log, with columns for topic and group. A column is as wide as its longest value."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"topic": 5, "group": 5}

    def register_subscriber(self, params: dict[str, Any]) -> None:
        self._widths = {name: max(width, len(params.get(name, ""))) for name, width in self._widths.items()}

    def get_logger(self, *, context: ContextRepo) -> Any:
        logger = self._get_logger_ref()
        if logger is None:
            columns = " | ".join(f"%({name})-{width}s" for name, width in self._widths.items())
            logger = get_broker_logger(
                name="rocketmq",
                default_context=dict.fromkeys(self._widths, ""),
                message_id_ln=_MESSAGE_ID_WIDTH,
                fmt=f"%(asctime)s %(levelname)-8s - {columns} | %(message_id)-{_MESSAGE_ID_WIDTH}s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(logger)
        return logger


class _GroupConsumers:
    """One consumer for each group. The subscribers of a group share the consumer, because members must have equal
    subscriptions."""

    def __init__(
        self, name_servers: str | Sequence[str] | None, settings: PushConsumerSettings | None, hooks: Sequence[Hook]
    ) -> None:
        self._name_servers = name_servers
        self._settings = settings
        self._hooks = hooks
        self._by_group: dict[str, tuple[PushConsumer, GroupOptions]] = {}
        self._is_open = False

    def of(self, group: str, options: GroupOptions) -> PushConsumer:
        """Return the consumer of a group. Raises SetupError: another subscriber of the group has other options."""
        if group not in self._by_group:
            make = PopConsumer if options.pop else PushConsumer
            settings = options.settings or self._settings
            hooks, ordered = self._hooks, options.ordered
            consumer = make(group, self._name_servers, settings=settings, ordered=ordered, hooks=hooks)
            self._by_group[group] = consumer, options
        consumer, first = self._by_group[group]
        if options != first:
            raise SetupError(
                f"subscribers of group {group} have different options, {first} and {options}: they share one consumer, "
                "give them equal ones or another group"
            )
        return consumer

    async def start(self) -> None:
        """Start the consumers that exist now; `start_new` starts the consumers that are created later."""
        self._is_open = True
        await self.start_new()

    async def start_new(self) -> None:
        if self._is_open:
            await asyncio.gather(*(one.start() for one, _ in self._by_group.values() if one.is_new))

    async def close(self) -> None:
        """Stop pulling, wait for handlers, save offsets and leave the groups."""
        self._is_open = False
        consumers = [consumer for consumer, _ in self._by_group.values()]
        self._by_group.clear()
        await asyncio.gather(*(consumer.close() for consumer in consumers))


class RocketProducer:
    """The publisher of one broker. It sends each publish command as a message, after the middlewares."""

    def __init__(self, parser: Any, decoder: Any) -> None:
        self._parser = ParserComposition(parser, parse_message)
        self._decoder = ParserComposition(decoder, decode_one)
        self.codec: CodecProto = DefaultCodec()
        self._serializer: Any = None
        self._producer: Producer | None = None

    def connect(self, producer: Producer, serializer: Any, codec: CodecProto | None) -> None:
        self._producer, self._serializer, self.codec = producer, serializer, codec or DefaultCodec()

    def disconnect(self) -> None:
        self._producer = None

    @property
    def producer(self) -> Producer:
        """The client. Raises IncorrectState: the broker is not connected."""
        if self._producer is None:
            raise IncorrectState("RocketBroker is not connected: start it, or use `async with broker`")
        return self._producer

    async def publish(self, cmd: RocketPublishCommand) -> SendResult:
        message = cmd.message(await self.codec.encode(cmd.body, self._serializer))
        if cmd.request is not None:
            return await self.producer.reply(cmd.request, message.body, properties=message.properties)
        return await self.producer.send(message)

    async def publish_batch(self, cmd: RocketPublishCommand) -> list[SendResult]:
        messages = [cmd.message(await self.codec.encode(body, self._serializer)) for body in cmd.batch_bodies]
        return await self.producer.send_many(messages)

    async def request(self, cmd: RocketPublishCommand) -> Reply:
        message = cmd.message(await self.codec.encode(cmd.body, self._serializer))
        return await self.producer.request(message, timeout=cmd.timeout)


@dataclass(kw_only=True)
class RocketConfig(BrokerConfig):
    """The settings and consumers that the subscribers and publishers of a broker share."""

    group: str = _GROUP
    consumers: _GroupConsumers = field(default_factory=lambda: _GroupConsumers(None, None, ()))


class RocketRegistrator(Registrator[ReceivedMessage, RocketConfig]):
    """The factory of subscribers and publishers, for brokers and routers."""

    # Long: the function declares the options of FastStream and of this package.
    def subscriber(  # type: ignore[override]
        self,
        topic: str,
        expression: str = "*",
        *,
        group: str | None = None,
        expression_type: str = TAG,
        batch_max: int | None = None,
        ordered: bool = False,
        pop: bool = False,
        settings: PushConsumerSettings | None = None,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Dependant] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: CodecProto | None = None,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
        persistent: bool = True,
    ) -> RocketSubscriber:
        """Subscribe handlers to a topic. All subscribers of a group share one consumer, because the members of a group
        must have equal subscriptions. Therefore they need equal ``ordered``, ``pop`` and ``settings``.

        Args:
            topic: the topic; the prefixes of routers are added in front.
            expression: ``*`` for all messages, ``A || B`` for tags, or with ``expression_type="SQL92"`` a SQL92
                expression.
            group: the consumer group; None means the group of the broker.
            expression_type: ``TAG`` or ``SQL92``.
            batch_max: pass lists of at most this number of messages to handlers.
            ordered: handle the messages of a queue one after the other.
            pop: use POP (`PopConsumer`).
            settings: the settings of the group; None means the settings of the broker.
            ack_policy: the treatment of a message if its handler raises. ``NACK_ON_ERROR``, the default: redeliver it.
                ``REJECT_ON_ERROR``: send it to the dead letters. ``ACK``: acknowledge it.
            no_reply: do not send the return values of handlers as replies.
            dependencies, parser, decoder, codec, title, description, include_in_schema, persistent: as in FastStream's
                own brokers.

        Raises SetupError: the policy is ``ACK_FIRST``; RocketMQ acknowledges when a handler has ended.
        """
        config = SubscriberConfig(
            topic=topic,
            group=group or self.config.group,
            expression=expression,
            expression_type=expression_type,
            batch_max=batch_max,
            options=GroupOptions(ordered=ordered, pop=pop, settings=settings),
            no_reply=no_reply,
            _outer_config=self.config,  # type: ignore[arg-type]
            _ack_policy=ack_policy,
        )
        if config.ack_policy is AckPolicy.ACK_FIRST:
            raise SetupError("RocketMQ acknowledges when a handler has ended, not before: use AckPolicy.ACK")
        calls = CallsCollection[Any]()
        described = SubscriberSpecConfig(
            topic=topic, title_=title, description_=description, include_in_schema=include_in_schema
        )
        subscriber = RocketSubscriber(config, SubscriberSpecs(self.config, described, calls), calls)
        super().subscriber(subscriber, persistent=persistent)
        return subscriber.add_call(parser_=parser, decoder_=decoder, dependencies_=dependencies, codec_=codec)

    def publisher(  # type: ignore[override]
        self,
        topic: str,
        *,
        headers: dict[str, Any] | None = None,
        reply_to: str = "",
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
        persistent: bool = True,
        **options: Unpack[MessageOptions],
    ) -> RocketPublisher:
        """Create a publisher for a topic. Use it as a decorator of handlers, or call its `publish`.

        Args:
            topic: the topic; the prefixes of routers are added in front.
            headers: properties of every message.
            reply_to: the topic for answers.
            options: ``tags``, ``keys``, ``sharding_key``, ``priority``, ``delay_level``, ``delay`` and
                ``deliver_at`` of every message, as in `Message`.
            title, description, schema, include_in_schema, persistent: as in FastStream's own brokers.
        """
        config = PublisherConfig(
            topic=topic,
            headers=headers or {},
            reply_to=reply_to,
            options=options,
            _outer_config=self.config,  # type: ignore[arg-type]
        )
        described = PublisherSpecConfig(
            topic=topic, title_=title, description_=description, schema_=schema, include_in_schema=include_in_schema
        )
        publisher = RocketPublisher(config, PublisherSpecs(self.config, described))
        super().publisher(publisher, persistent=persistent)
        return publisher


class RocketBroker(RocketRegistrator, BrokerUsecase[ReceivedMessage, Producer, RocketConfig]):
    """The connection of a FastStream application to RocketMQ.

    Args:
        name_servers: ``host:port;host:port``; None means the environment variable ``NAMESRV_ADDR``.
        group: the producer group, and the consumer group of subscribers without ``group``.
        producer_settings: the settings of the producer.
        consumer_settings: the settings of groups whose subscribers have no ``settings``.
        hooks: hooks of the producer and the consumers, for example `rmqkit.client.observe.otel.Telemetry`.
        specification_url: the address on the AsyncAPI page; None means ``name_servers``.
        graceful_timeout, ack_policy, dependencies, parser, decoder, codec, middlewares, routers, security, protocol,
            protocol_version, description, tags, logger, log_level, apply_types, serializer, provider, context: as in
            FastStream's own brokers. ``security`` is only for the AsyncAPI page: give the clients their keys and
            certificates in the settings.
    """

    # Long: the function declares the options of FastStream and of this package.
    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        group: str = _GROUP,
        producer_settings: ProducerSettings | None = None,
        consumer_settings: PushConsumerSettings | None = None,
        hooks: Sequence[Hook] = (),
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        dependencies: Sequence[Dependant] = (),
        parser: Any = None,
        decoder: Any = None,
        codec: CodecProto | None = None,
        middlewares: Sequence[Any] = (),
        routers: Iterable[RocketRegistrator] = (),
        security: BaseSecurity | None = None,
        specification_url: str | None = None,
        protocol: str = "rocketmq",
        protocol_version: str | None = None,
        description: str | None = None,
        tags: Iterable[Tag | TagDict] = (),
        logger: Any = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: Any = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
    ) -> None:
        self._name_servers = name_servers
        self._producer_settings = producer_settings
        self._hooks = hooks
        named = name_servers if name_servers is None or isinstance(name_servers, str) else ";".join(name_servers)
        url = specification_url or named or "localhost:9876"
        super().__init__(
            config=RocketConfig(
                group=group,
                consumers=_GroupConsumers(name_servers, consumer_settings, hooks),
                producer=RocketProducer(parser, decoder),  # type: ignore[arg-type]
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=_LogColumns),
                fd_config=FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider or dependency_provider,
                    context=context or ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                url=url.split(";"),
                protocol=protocol,
                protocol_version=protocol_version,
                description=description,
                tags=tags,
                security=security,
            ),
            routers=routers,
        )

    @property
    def producer(self) -> Producer:
        """The client for publishing. Raises IncorrectState: the broker is not connected."""
        own: RocketProducer = self.config.producer  # type: ignore[assignment]
        return own.producer

    async def start(self) -> None:
        """Connect, and start to consume."""
        await self.connect()
        await super().start()
        await self.config.consumers.start()

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop consuming, wait for handlers, then disconnect, so that the last messages of handlers are sent."""
        await self.config.consumers.close()
        await super().stop(exc_type, exc_val, exc_tb)
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self.config.producer.disconnect()  # type: ignore[attr-defined]

    async def publish(
        self,
        message: Any,
        topic: str,
        *,
        headers: dict[str, Any] | None = None,
        reply_to: str = "",
        correlation_id: str | None = None,
        **options: Unpack[MessageOptions],
    ) -> SendResult:
        """Publish a message. Unlike ``@broker.publisher`` and ``broker.publisher(...)``, this call is not on the
        AsyncAPI page. Raises the errors of `Producer.send`.

        Args:
            message: a value that FastStream can encode.
            topic: the topic.
            headers: properties of the message.
            reply_to: the topic for answers.
            correlation_id: None means a new id.
            options: ``tags``, ``keys``, ``sharding_key``, ``priority``, ``delay_level``, ``delay``,
                ``deliver_at``, as in `Message`. Messages with the same sharding key are sent to one queue.
        """
        cmd = RocketPublishCommand(
            message,
            topic=topic,
            headers=headers,
            reply_to=reply_to,
            correlation_id=correlation_id or self.config.id_generator(),
            options=options,
            _publish_type=PublishType.PUBLISH,
        )
        result: SendResult = await self._basic_publish(cmd, producer=self.config.producer)
        return result

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: Any,
        topic: str,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Unpack[MessageOptions],
    ) -> list[SendResult]:
        """Publish messages with as few requests as possible. Raises the errors of `Producer.send_many`."""
        cmd = RocketPublishCommand(
            *messages,
            topic=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            options=options,
            _publish_type=PublishType.PUBLISH,
        )
        results: list[SendResult] = await self._basic_publish_batch(cmd, producer=self.config.producer)
        return results

    async def request(  # type: ignore[override]
        self,
        message: Any,
        topic: str,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        timeout: float = 3.0,
        **options: Unpack[MessageOptions],
    ) -> RocketMessage:
        """Publish a message and wait for the return value of its handler. Raises the errors of `Producer.request`.

        Args:
            timeout: seconds for sending and waiting together.
        """
        cmd = RocketPublishCommand(
            message,
            topic=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            timeout=timeout,
            options=options,
            _publish_type=PublishType.REQUEST,
        )
        reply: RocketMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply

    async def ping(self, timeout: float | None) -> bool:
        """Return True if a name server answers within ``timeout`` seconds; None means the timeout of a send."""
        if self._connection is None:
            return False
        try:
            async with asyncio.timeout(timeout):
                await self._connection.ping()
        except (NoRoute, TimeoutError):
            return False
        return True

    async def _connect(self) -> Producer:
        producer = Producer(self.config.group, self._name_servers, settings=self._producer_settings, hooks=self._hooks)
        await producer.start()
        config = self.config
        config.producer.connect(producer, config.fd_config._serializer, config.broker_codec)  # type: ignore[attr-defined]
        return producer


class RocketRouter(RocketRegistrator, BrokerRouter[ReceivedMessage, RocketConfig]):
    """Subscribers and publishers for a broker to include: ``broker.include_router(router)``.

    Args:
        prefix: added before the topics.
        handlers: functions with arguments for `subscriber`, as in FastStream's own routers.
        group: the consumer group of subscribers without ``group``.
        dependencies, middlewares, routers, parser, decoder, include_in_schema, ack_policy: as in FastStream.
    """

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[SubscriberRoute] = (),
        *,
        group: str = _GROUP,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[RocketRegistrator] = (),
        parser: Any = None,
        decoder: Any = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = EMPTY,
    ) -> None:
        super().__init__(
            handlers=handlers,
            config=RocketConfig(
                group=group,
                prefix=prefix,
                broker_middlewares=middlewares,
                broker_dependencies=dependencies,
                broker_parser=parser,
                broker_decoder=decoder,
                include_in_schema=include_in_schema,
                ack_policy=ack_policy,
            ),
            routers=routers,
        )
