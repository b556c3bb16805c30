"""A program whose clients know nothing of tracing: ``python examples/traced.py [HOST:PORT of a name server]``.

``opentelemetry-instrument`` does the same from outside, without the lines of `main`; needs the extra ``otel``.
"""

from __future__ import annotations

import sys
import threading

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rmqkit import ReceivedMessage, sync
from rmqkit.client.observe.instrumentor import RmqkitInstrumentor

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"


def shop() -> None:
    tracer, handled = trace.get_tracer("shop"), threading.Event()
    consumer = sync.PushConsumer("checkout-desk", NAME_SERVERS)

    @consumer.on("Checkouts")
    def bill(message: ReceivedMessage) -> None:
        with tracer.start_as_current_span("write the bill"):
            handled.set()

    with sync.Producer("checkout", NAME_SERVERS) as producer, consumer:
        with tracer.start_as_current_span("checkout"):
            producer.send("Checkouts", b"17")
        handled.wait()


def main() -> None:
    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    RmqkitInstrumentor().instrument()
    shop()
    spans = kept.get_finished_spans()
    print("spans:", ", ".join(sorted(span.name for span in spans)))
    print("one trace:", len({span.context.trace_id for span in spans if span.context}) == 1)


main()
