"""Spans of OpenTelemetry, and their context in messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.otel import Telemetry
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import (
    ProducerSettings,
    PullConsumerSettings,
    PushConsumerSettings,
    StartFrom,
    Tracing,
)
from rmqkit.errors import NoRoute
from rmqkit.protocol.message import Message
from rmqkit.remoting.address import split_address
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster, until

PUSHED = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)


class Spans:
    """A tracer provider that keeps what ended, and a hook upon it."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.hooks = [Telemetry(self.provider)]
        self.tracer = trace.get_tracer("program", tracer_provider=self.provider)

    def named(self, name):
        return [span for span in self._kept.get_finished_spans() if span.name == name]


@pytest.fixture
def spans():
    return Spans()


async def run_program(tmp_path, spans, is_threaded):
    """A message is sent within a span and handled, with a span of the handler's own."""
    handled = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with Standalone(tmp_path / "store") as cluster:
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=PUSHED, hooks=spans.hooks)

        def work(message):
            with spans.tracer.start_as_current_span("work"):
                loop.call_soon_threadsafe(handled.set)
            assert message.properties["traceparent"].startswith("00-")

        async def work_on_loop(message):
            work(message)

        consumer.subscribe("T", handler=work if is_threaded else work_on_loop)
        async with Producer("PG", cluster.namesrv_address, hooks=spans.hooks) as producer:
            with spans.tracer.start_as_current_span("program"):
                await producer.send(Message(topic="T", body=b"12", tags="A", keys=["k"], sharding_key="s"))
        async with consumer:
            await handled.wait()
        spans.broker_address = cluster.broker_address


@pytest.mark.parametrize("is_threaded", [False, True])
async def test_one_trace_leads_from_the_program_that_sends_to_what_a_handler_does(tmp_path, spans, is_threaded):
    await run_program(tmp_path, spans, is_threaded)
    (program,), (send,), (process,), (work,) = map(spans.named, ("program", "send T", "process T", "work"))
    assert len({span.context.trace_id for span in (program, send, process, work)}) == 1
    assert [span.parent.span_id for span in (send, process, work)] == [
        program.context.span_id,
        send.context.span_id,
        process.context.span_id,
    ]


async def test_attributes_follow_the_semantic_conventions(tmp_path, spans):
    await run_program(tmp_path, spans, False)
    (send,), (process,) = spans.named("send T"), spans.named("process T")
    host, port = split_address(spans.broker_address)
    common = {
        "messaging.system": "rocketmq",
        "messaging.destination.name": "T",
        "messaging.destination.partition.id": send.attributes["messaging.destination.partition.id"],
        "messaging.message.id": send.attributes["messaging.message.id"],
        "messaging.message.body.size": 2,
        "messaging.rocketmq.message.tag": "A",
        "messaging.rocketmq.message.keys": ("k",),
        "messaging.rocketmq.message.group": "s",
    }
    assert dict(send.attributes) == common | {
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.rocketmq.client_group": "PG",
        "messaging.rocketmq.message.type": "fifo",
        "server.address": host,
        "server.port": port,
    }
    assert dict(process.attributes) == common | {
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.rocketmq.client_group": "CG",
        "messaging.consumer.group.name": "CG",
    }
    assert (send.kind, process.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert (send.status.status_code, process.status.status_code) == (StatusCode.UNSET, StatusCode.UNSET)


async def test_a_failed_send_is_a_span_with_its_error(spans):
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=spans.hooks) as producer:
        with pytest.raises(NoRoute):
            await producer.send(Message(topic="T", body=b"1"))
    (span,) = spans.named("send T")
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "NoRoute")
    assert [event.name for event in span.events] == ["exception"]


async def test_a_failed_handler_is_a_span_with_its_error_and_the_next_one_is_not_within_it(tmp_path, spans):
    seen = []
    settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, handlers_max=1)
    async with Standalone(tmp_path / "store") as cluster:
        async with Producer("PG", cluster.namesrv_address, hooks=spans.hooks) as producer:
            for body in (b"1", b"2"):
                await producer.send(Message(topic="T", body=body))
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings, hooks=spans.hooks)

        @consumer.on("T")
        async def handle(message):
            seen.append(message.body)
            raise ValueError("no")

        async with consumer:
            await until(lambda: len(spans.named("process T")) >= 2, "two handlers")
    failed = spans.named("process T")[:2]
    assert [span.attributes["error.type"] for span in failed] == ["ValueError"] * 2
    sends = {span.context.span_id: span.context.trace_id for span in spans.named("send T")}
    assert {span.parent.span_id: span.context.trace_id for span in failed} == sends


async def test_batches_are_linked_and_polls_are_received(tmp_path, spans):
    first = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
    async with Standalone(tmp_path / "store") as cluster:
        namesrv, sizes = cluster.namesrv_address, []
        async with Producer("PG", namesrv, hooks=spans.hooks) as producer:
            await producer.send_batch([Message(topic="T", body=b"%d" % i) for i in range(3)])
        consumer = PushConsumer("CG", namesrv, settings=PUSHED, hooks=spans.hooks)

        async def handle(messages):
            sizes.append(len(messages))

        consumer.subscribe("T", handler=handle, batch_max=10)
        async with consumer:
            await until(lambda: sum(sizes) == 3, "the batch")
        async with PullConsumer("CG2", namesrv, settings=first, hooks=spans.hooks) as poller:
            poller.subscribe("T")
            assert len(await poller.poll(10_000)) == 3
    (send,), (process,), (receive,) = map(spans.named, ("send T", "process T", "receive T"))
    assert send.attributes["messaging.batch.message_count"] == 3
    for span in (process, receive):
        assert span.attributes["messaging.batch.message_count"] == 3
        assert [link.context.span_id for link in span.links] == [send.context.span_id] * 3
        assert span.parent is None


async def test_a_sampler_that_wants_nothing_still_hands_the_context_on():
    spans = Spans()
    spans.hooks = [Telemetry(trace.NoOpTracerProvider())]
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, hooks=spans.hooks) as producer:
        cluster.topic("T")
        with spans.tracer.start_as_current_span("program") as program:
            await producer.send(Message(topic="T", body=b"1"))
        (sent,) = cluster.broker.asked(310)
        trace_id = f"{program.get_span_context().trace_id:032x}"
        assert f"traceparent\x0100-{trace_id}-" in sent["i"]


def test_clients_do_not_load_it():
    code = (
        "import sys; from rmqkit import Producer, PushConsumer, PullConsumer, sync; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == "[]"


async def test_the_trace_topic_has_no_spans_of_its_own(spans):
    settings = ProducerSettings(trace=Tracing(batch_count=1))
    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.topic("RMQ_SYS_TRACE_TOPIC")
        async with Producer("PG", cluster.namesrv, settings=settings, hooks=spans.hooks) as producer:
            await producer.send(Message(topic="T", body=b"1"))
            await until(lambda: len(cluster.broker.asked(310)) == 2, "message and trace")
    assert len(spans.named("send T")) == 1
    assert spans.named("send RMQ_SYS_TRACE_TOPIC") == []
