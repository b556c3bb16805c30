"""OpenTelemetry's instrumentor, as programs and ``opentelemetry-instrument`` use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import Hook
from rmqkit.client.observe.instrumentor import RmqkitInstrumentor
from rmqkit.client.observe.otel import Telemetry
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.client.peers import standalone, until

FIRST = PushConsumerSettings(take_over_pause_ms=0, start_from=StartFrom.FIRST_OFFSET)
SECONDS_MAX = 200

PROGRAM = """
import sys, threading
from rmqkit import Message, PushConsumerSettings, StartFrom, sync

done = threading.Event()
consumer = sync.PushConsumer("CG", sys.argv[1], settings=PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET))
consumer.subscribe("Orders", "*", lambda message: done.set())
with sync.Producer("PG", sys.argv[1]) as producer, consumer:
    producer.send(Message(topic="Orders", body=b"17"))
    done.wait()
"""


@pytest.fixture
def spans():
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    instrumentor = RmqkitInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield kept
    if instrumentor.is_instrumented_by_opentelemetry:
        instrumentor.uninstrument()


def names(spans) -> list[str]:
    return sorted(span.name for span in spans.get_finished_spans())


async def test_clients_are_traced_from_then_on_until_it_ends(tmp_path, spans):
    got = []
    async with Standalone(tmp_path / "store") as cluster:
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=FIRST)
        consumer.subscribe("Orders", "*", got.append)
        async with Producer("PG", cluster.namesrv_address) as producer, consumer:
            await producer.send(Message(topic="Orders", body=b"17"))
            await until(lambda: got, "the order")
        assert names(spans) == ["process Orders", "send Orders"]
        process, send = sorted(spans.get_finished_spans(), key=lambda span: span.name)
        assert process.parent.span_id == send.context.span_id
        RmqkitInstrumentor().uninstrument()
        spans.clear()
        async with Producer("PG", cluster.namesrv_address) as producer:
            await producer.send(Message(topic="Orders", body=b"18"))
        assert names(spans) == []


async def test_a_client_with_a_hook_of_its_own_is_traced_once(tmp_path, spans):
    class Other(Hook):
        calls = 0

        def sending(self, sending) -> None:
            self.calls += 1

    own, other = InMemorySpanExporter(), Other()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(own))
    async with Standalone(tmp_path / "store") as cluster:
        for hooks in ([Telemetry(provider)], [other]):
            async with Producer("PG", cluster.namesrv_address, hooks=hooks) as producer:
                await producer.send(Message(topic="Orders", body=b"17"))
    assert (names(own), names(spans), other.calls) == (["send Orders"], ["send Orders"], 1)


def test_opentelemetry_instrument_traces_a_program_that_knows_nothing_of_it(tmp_path):
    (tmp_path / "app.py").write_text(PROGRAM)
    command = [Path(sys.executable).with_name("opentelemetry-instrument"), sys.executable, str(tmp_path / "app.py")]
    chosen = {"OTEL_TRACES_EXPORTER": "console", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    with standalone(tmp_path) as address:
        done = subprocess.run(
            [*command, address], capture_output=True, text=True, timeout=SECONDS_MAX, env={**os.environ, **chosen}
        )
    assert done.returncode == 0, done.stderr
    spans, at, decoder = [], 0, json.JSONDecoder()
    while (at := done.stdout.find("{", at)) >= 0:
        span, at = decoder.raw_decode(done.stdout, at)
        spans.append(span)
    assert sorted(span["name"] for span in spans) == ["process Orders", "send Orders"]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
