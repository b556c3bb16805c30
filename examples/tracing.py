"""The way of a message as a trace: ``python examples/tracing.py [HOST:PORT of a name server]`` (extra ``otel``).

The spans of OpenTelemetry go to the screen here; programs export them to where theirs are. The trace topic has the same
for RocketMQ's own tools: ``mqadmin queryMsgTraceById -i <msg_id>``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from rmqkit import (
    Producer,
    ProducerSettings,
    PullConsumer,
    PushConsumer,
    PushConsumerSettings,
    ReceivedMessage,
    Tracing,
)
from rmqkit.client.observe.otel import Telemetry
from rmqkit.protocol.trace import decode_traces

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
TRACED = ProducerSettings(trace=Tracing())
CONSUMED = PushConsumerSettings(trace=Tracing())


def line(span: ReadableSpan) -> str:
    """A span in few words; without a formatter the exporter prints all of it."""
    assert span.context is not None
    return f"{'child' if span.parent else 'root'} span: {span.name}\n"


async def main() -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    hooks: Sequence[Telemetry] = [Telemetry(provider)]
    handled = asyncio.Event()
    consumer = PushConsumer("billing", NAME_SERVERS, settings=CONSUMED, hooks=hooks)

    @consumer.on("Bills")
    async def bill(message: ReceivedMessage) -> None:
        with trace.get_tracer("billing", tracer_provider=provider).start_as_current_span("write the bill"):
            handled.set()

    async with Producer("shop", NAME_SERVERS, settings=TRACED, hooks=hooks) as producer:
        with trace.get_tracer("shop", tracer_provider=provider).start_as_current_span("checkout"):
            sent = await producer.send("Bills", b"17", keys=["order-17"])
    async with consumer:
        await handled.wait()

    async with PullConsumer("auditors", NAME_SERVERS) as reader:
        for message in await reader.query_messages("RMQ_SYS_TRACE_TOPIC", sent.msg_id):
            for record in decode_traces(message.body):
                print("trace topic:", type(record).__name__, record.group)


asyncio.run(main())
