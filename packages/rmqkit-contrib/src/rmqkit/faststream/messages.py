"""Messages between FastStream and the clients.

The first acknowledgement call on a message decides what happens to the message in RocketMQ:

===================================  ==================================================================================
call                                 result
===================================  ==================================================================================
``ack``                              the message is consumed
``nack``                             the message is delivered again after a delay, as often as the group retries; then
                                     the message goes to the dead letters
``reject``                           the message goes to the dead letters immediately, with the reason as property
no call (a handler with              the message is delivered again
``AckPolicy.MANUAL``)
===================================  ==================================================================================
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from faststream.message import AckStatus, StreamMessage, decode_message
from faststream.response.publish_type import PublishType
from faststream.response.response import BatchPublishCommand, PublishCommand, Response

from rmqkit.client.consumer.consume import ConsumeLater, Reject
from rmqkit.client.runtime.handlers import Reply
from rmqkit.protocol import properties as names
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.properties import own_properties
from rmqkit.times import Duration, Moment

CONTENT_TYPE, CORRELATION_ID, REPLY_TO = "content-type", "correlation_id", "reply_to"
"""Names of headers, as in FastStream's own brokers."""

_REQUESTER = "the requester"
_NULL = b"null"
_JSON = "application/json"


class Delivery:
    """The outcome of the messages that a subscriber received. Only the first call of `settle` has an effect."""

    def __init__(self) -> None:
        self.status: AckStatus | None = None
        self.error: BaseException | None = None
        self._delay_level = 0
        self._delay: Duration | None = None
        self._reason: str | None = None

    def settle(
        self, status: AckStatus, *, delay_level: int = 0, delay: Duration | None = None, reason: str | None = None
    ) -> None:
        if self.status is None:
            self.status = status
            self._delay_level, self._delay, self._reason = delay_level, delay, reason

    def finish(self) -> None:
        """Return if the messages are consumed.
        Raises ConsumeLater: the messages are redelivered, or sent to the dead letters."""
        if self.status is AckStatus.REJECTED:
            raise Reject(self._reason) from self.error
        if self.status is not AckStatus.ACKED:
            raise ConsumeLater(self._delay_level, delay=self._delay)


delivery_here: contextvars.ContextVar[Delivery | None] = contextvars.ContextVar("delivery_here", default=None)
"""The current delivery, in a context variable because parsers are called only with the message."""


class _Acknowledged(StreamMessage[Any]):
    """The base class of single messages and batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._delivery = delivery_here.get()

    async def ack(self) -> None:
        """Acknowledge the message as consumed."""
        self._settle(AckStatus.ACKED)
        await super().ack()

    async def nack(self, *, delay_level: int = 0, delay: Duration | None = None) -> None:
        """Request the redelivery of the message: after a delay level (0 lets the broker choose), or after ``delay``, a
        number of seconds or a `timedelta`."""
        self._settle(AckStatus.NACKED, delay_level=delay_level, delay=delay)
        await super().nack()

    async def reject(self, reason: str | None = None) -> None:
        """Send the message to the dead letters. If the reason is None, the exception of the handler is the reason."""
        self._settle(AckStatus.REJECTED, reason=reason)
        await super().reject()

    def _settle(self, status: AckStatus, **how: Any) -> None:
        if self._delivery is not None:
            self._delivery.settle(status, **how)


class RocketMessage(_Acknowledged):
    """A received message. A handler gets this object if it has a parameter ``message: RocketMessage``.
    ``raw_message``: the `ReceivedMessage`; for a response to a request, the `Reply`.
    ``headers``: the properties that the sending program set."""

    raw_message: ReceivedMessage | Reply


class RocketBatchMessage(_Acknowledged):
    """The messages of a batch. An acknowledgement call applies to all of them."""

    raw_message: list[ReceivedMessage]


async def parse_message(message: ReceivedMessage | Reply) -> RocketMessage:
    """Convert a client's message to FastStream's message."""
    headers = own_properties(message.properties)
    is_request = bool(message.properties.get(names.REPLY_TO_CLIENT)) and isinstance(message, ReceivedMessage)
    return RocketMessage(
        raw_message=message,
        body=message.body,
        headers=headers,
        content_type=headers.get(CONTENT_TYPE),
        correlation_id=headers.get(CORRELATION_ID),
        message_id=message.properties.get(names.UNIQ_KEY),
        reply_to=_REQUESTER if is_request else headers.get(REPLY_TO, ""),
    )


async def decode_one(message: StreamMessage[Any]) -> Any:
    return decode_message(message)


async def parse_batch(messages: list[ReceivedMessage]) -> RocketBatchMessage:
    """Convert a batch of messages to one message."""
    headers = [own_properties(message.properties) for message in messages]
    return RocketBatchMessage(
        raw_message=messages,
        body=[message.body for message in messages],
        headers=headers[0] if headers else {},
        batch_headers=headers,
    )


# FastStream recognizes a subscriber of batches by the name of this function.
async def decode_batch(message: StreamMessage[list[ReceivedMessage]]) -> list[Any]:
    return [decode_message(await parse_message(one)) for one in message.raw_message]


class MessageOptions(TypedDict, total=False):
    """The options of a message besides its body and headers; see `Message`."""

    tags: str | None
    keys: Sequence[str]
    sharding_key: str | None
    priority: int | None
    delay_level: int
    delay: Duration | None
    deliver_at: Moment | None


class RocketResponse(Response):
    """A return value of a handler with options for the published message::

        return RocketResponse(bill, tags="new")

    Args:
        options: ``tags``, ``keys``, ``sharding_key``, ``priority``, ``delay_level``, ``delay``, ``deliver_at``, as in
            `Message`.
    """

    def __init__(
        self,
        body: Any,
        *,
        headers: dict[str, Any] | None = None,
        correlation_id: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(body, headers=headers, correlation_id=correlation_id)
        self.options = cast("MessageOptions", options)

    def as_publish_command(self) -> RocketPublishCommand:
        return RocketPublishCommand(
            self.body,
            headers=self.headers,
            correlation_id=self.correlation_id,
            options=self.options,
            _publish_type=PublishType.PUBLISH,
        )


class RocketPublishCommand(BatchPublishCommand):
    """One publication, as passed through the middlewares."""

    def __init__(
        self,
        body: Any,
        /,
        *bodies: Any,
        _publish_type: PublishType,
        topic: str = "",
        headers: dict[str, Any] | None = None,
        reply_to: str = "",
        correlation_id: str | None = None,
        timeout: float | None = None,
        options: MessageOptions | None = None,
    ) -> None:
        super().__init__(
            body,
            *bodies,
            destination=topic,
            headers=headers,
            reply_to=reply_to,
            correlation_id=correlation_id,
            _publish_type=_publish_type,
        )
        self.timeout = timeout
        self.options: MessageOptions = options or {}
        self.request: ReceivedMessage | None = None
        """The request to reply to."""

    @classmethod
    def from_cmd(cls, cmd: PublishCommand, *, batch: bool = False) -> RocketPublishCommand:
        if isinstance(cmd, RocketPublishCommand):
            return cmd
        body, bodies = cls._parse_bodies(cmd.body, batch=batch)
        return cls(
            body,
            *bodies,
            topic=cmd.destination,
            headers=cmd.headers,
            reply_to=cmd.reply_to,
            correlation_id=cmd.correlation_id,
            _publish_type=cmd.publish_type,
        )

    def message(self, encoded: tuple[bytes, str | None]) -> Message:
        """Return a message with an encoded body. None becomes JSON's ``null``, because RocketMQ refuses empty
        bodies."""
        body, content_type = encoded if self.body is not None or encoded[0] else (_NULL, _JSON)
        headers: Mapping[str, Any] = {
            CONTENT_TYPE: content_type,
            CORRELATION_ID: self.correlation_id,
            REPLY_TO: self.reply_to,
            **self.headers,
        }
        # Readers drop a property without a value.
        properties = {name: str(value) for name, value in headers.items() if value not in (None, "")}
        return Message(topic=self.destination, body=body, properties=properties, **self.options)
