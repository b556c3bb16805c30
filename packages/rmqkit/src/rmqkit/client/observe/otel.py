"""OpenTelemetry spans of sends and handlers. This module needs the extra ``otel``.

=====================  ========  ==================================================================================
span                   kind      parent
=====================  ========  ==================================================================================
``send <topic>``       PRODUCER  the current span when the message or batch is sent; the new span covers all attempts
``process <topic>``    CONSUMER  the span of the message; links to the spans of a batch. Current in the handler
``receive <topic>``    CONSUMER  the current span when messages are polled; links to the spans of the messages
=====================  ========  ==================================================================================

A sent message contains the context of its span in the properties ``traceparent`` and ``tracestate`` (W3C), or in the
properties of the process's propagator. The names follow the semantic conventions for messaging and RocketMQ.
Source: behaviour.md §7.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rmqkit import extras
from rmqkit.client.observe.hooks import ConsumeOutcome, Consumption, Hook, Sending, SendOutcome
from rmqkit.protocol import properties as names
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.remoting.address import split_address
from rmqkit.times import moment_ms

with extras.needed("otel", "rmqkit.client.observe.otel"):
    from opentelemetry import context, propagate, trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
    from opentelemetry.util.types import AttributeValue

__all__ = ["Telemetry"]

_SYSTEM = {"messaging.system": "rocketmq"}


class Telemetry(Hook):
    """A hook that creates spans::

        async with Producer("orders", hooks=[Telemetry()]) as producer:
            ...

    ``tracer_provider``: None means the provider of the process."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer: Tracer = trace.get_tracer("rmqkit", tracer_provider=tracer_provider)

    def sending(self, sending: Sending) -> Callable[[SendOutcome], None] | None:
        """Start the span of a send, and add the context of the span to the sent properties."""
        message = sending.messages[0]
        attributes = _operation("send", message.topic) | {
            "messaging.rocketmq.client_group": sending.group,
            "messaging.rocketmq.message.type": _kind(message, is_half=sending.is_half),
        }
        if not sending.is_batch:
            attributes |= _described(message.tags, _keys(message), message.sharding_key)
            if message.delay_level:
                attributes["messaging.rocketmq.message.delay_time_level"] = message.delay_level
            if message.deliver_at is not None:
                at_ms = moment_ms(message.deliver_at, "deliver_at")
                attributes["messaging.rocketmq.message.delivery_timestamp"] = at_ms
        span = self._tracer.start_span(f"send {message.topic}", kind=SpanKind.PRODUCER, attributes=attributes)
        # Do not change the message object, because the program may send it again in another span.
        propagate.inject(sending.properties, trace.set_span_in_context(span))
        return lambda outcome: _sent(span, sending, outcome)

    def consuming(self, consumption: Consumption) -> Callable[[ConsumeOutcome], None] | None:
        """Start the span of a handler call or of a poll. The span of a handler call is current until the handler
        ends."""
        messages, is_polled = consumption.messages, consumption.is_polled
        first = messages[0]
        operation = "receive" if is_polled else "process"
        attributes = _operation(operation, first.topic) | {
            "messaging.consumer.group.name": consumption.group,
            "messaging.rocketmq.client_group": consumption.group,
            "messaging.destination.partition.id": str(first.queue_id),
        }
        parent = None
        links: list[Link] = []
        if len(messages) == 1:
            attributes |= _described(first.tags, first.keys, first.properties.get(names.SHARDING_KEY))
            attributes |= {"messaging.message.id": first.msg_id, "messaging.message.body.size": len(first.body)}
        else:
            attributes["messaging.batch.message_count"] = len(messages)
        # The span of a poll is a child of the program's current span. It has only links to the spans of the senders, as
        # for a batch.
        if len(messages) == 1 and not is_polled:
            parent = propagate.extract(first.properties, context.get_current())
        else:
            # A span has only one parent, so the span of a batch has links to the spans of its messages.
            links = [link for message in messages if (link := _link(message)) is not None]
        span = self._tracer.start_span(
            f"{operation} {first.topic}", context=parent, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        )
        # Attach the span in the task of the handler, so that spans of the program become its children. `end` runs in
        # the same task.
        token = context.attach(trace.set_span_in_context(span, parent))

        def end(outcome: ConsumeOutcome) -> None:
            context.detach(token)
            _end(span, outcome.error)

        return end


def _sent(span: Span, sending: Sending, outcome: SendOutcome) -> None:
    result = outcome.result
    if outcome.body_bytes:
        span.set_attribute("messaging.message.body.size", outcome.body_bytes)
    # Set this at the end: a batch of `send_many` has only its first message when its span starts.
    if sending.is_batch:
        span.set_attribute("messaging.batch.message_count", len(sending.messages))
    if outcome.address is not None:
        host, port = split_address(outcome.address)
        span.set_attributes({"server.address": host, "server.port": port})
    if result is not None:
        span.set_attribute("messaging.destination.partition.id", str(result.queue.queue_id))
        if not sending.is_batch:
            span.set_attribute("messaging.message.id", result.msg_id)
    _end(span, outcome.error)


def _end(span: Span, error: BaseException | None) -> None:
    if error is not None:
        span.record_exception(error)
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()


def _operation(operation: str, topic: str) -> dict[str, AttributeValue]:
    return {
        **_SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _described(tag: str | None, keys: list[str], sharding_key: str | None) -> Mapping[str, AttributeValue]:
    described: dict[str, AttributeValue] = {}
    if tag:
        described["messaging.rocketmq.message.tag"] = tag
    if keys:
        described["messaging.rocketmq.message.keys"] = keys
    if sharding_key:
        described["messaging.rocketmq.message.group"] = sharding_key
    return described


def _keys(message: Message) -> list[str]:
    return message.keys.split(" ") if isinstance(message.keys, str) else list(message.keys)


def _kind(message: Message, *, is_half: bool) -> str:
    if is_half:
        return "transaction"
    if message.is_delayed:
        return "delay"
    return "normal" if message.sharding_key is None else "fifo"


def _link(message: ReceivedMessage) -> Link | None:
    span = trace.get_current_span(propagate.extract(message.properties)).get_span_context()
    return Link(span) if span.is_valid else None
