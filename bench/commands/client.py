"""``rmq bench client``: the client's CPU time per message, and the latency of messages.

CPU times are user + system of this process, the smallest of some rounds, which depends least on other load. Rates
depend on the broker and the machine. Import times are those of whole interpreters minus that of an empty one.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench.commands.served import serve_standalone
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import Batching, ProducerSettings, PushConsumerSettings, StartFrom
from rmqkit.protocol.message import Message, ReceivedMessage

__all__ = ["measure"]

_ROUNDS = 3
_TASKS = 64
_SMALL_BODY_BYTES = 100
_LATENCY_SECONDS = 5.0
_LATENCY_PER_SECOND = 500
_IMPORT_RUNS = 7
_PROGRAMS = {"import rmqkit": "import rmqkit", "import both clients": "from rmqkit import Producer, PushConsumer"}

Figure = dict[str, Any]
Work = Callable[[], Awaitable[object]]


def measure(*, name_servers: str | None, messages: int, body_bytes: int) -> list[Figure]:
    """Return all figures, with the broker of some name servers or a new one.
    Raises RmqError: the broker cannot be reached, or does not become ready."""
    with ExitStack() as stack:
        addresses = name_servers or stack.enter_context(serve_standalone())[0]
        figures = _run(_Bench(addresses, messages, body_bytes).figures())
    return [*figures, *_import_times()]


def _run(figures: Any) -> list[Figure]:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(figures)
    return uvloop.run(figures)


class _Bench:
    def __init__(self, name_servers: str, count: int, body_bytes: int) -> None:
        self._name_servers = name_servers
        self._count = count
        self._body = random.Random(1).randbytes(body_bytes)
        self._small_body = self._body[:_SMALL_BODY_BYTES]

    async def figures(self) -> list[Figure]:
        best: dict[str, Figure] = {}
        batches = Producer("bench-auto", self._name_servers, settings=ProducerSettings(batch=Batching(auto=True)))
        async with Producer("bench-client", self._name_servers) as producer, batches:
            for number in range(_ROUNDS):
                topic = f"BenchClient-{os.getpid()}-{number}"
                await producer.send(Message(topic=topic, body=self._body))
                size, small = f"{len(self._body):,} B", f"{len(self._small_body)} B"
                works = {
                    f"awaited sends in {_TASKS} tasks, {size}": partial(self._sends, producer, topic),
                    f"the same with batch.auto, {size}": partial(self._sends, batches, f"{topic}-auto"),
                    f"send_many, {small}": partial(self._sends_many, producer, f"{topic}-many"),
                    f"consumed, no-op handler, {size}": partial(self._consumes, topic, self._count + 1),
                    f"consumed, no-op handler, {small}": partial(self._consumes, f"{topic}-many", self._count),
                }
                for what, work in works.items():
                    figure = await _timed(what, work, self._count)
                    if what not in best or figure["client_cpu_us"] < best[what]["client_cpu_us"]:
                        best[what] = figure
            latency = await self._latency(producer)
        return [*best.values(), latency]

    async def _sends(self, producer: Producer, topic: str) -> None:
        left = iter(range(self._count))

        async def one_after_the_other() -> None:
            for _ in left:
                await producer.send(Message(topic=topic, body=self._body))

        await asyncio.gather(*(one_after_the_other() for _ in range(_TASKS)))

    async def _sends_many(self, producer: Producer, topic: str) -> None:
        await producer.send_many(Message(topic=topic, body=self._small_body) for _ in range(self._count))

    async def _consumes(self, topic: str, count: int) -> None:
        left = count
        everything = asyncio.Event()
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
        consumer = PushConsumer(f"bench-{topic}", self._name_servers, settings=settings)

        @consumer.on(topic)
        async def handler(message: ReceivedMessage) -> None:
            nonlocal left
            left -= 1
            if not left:
                everything.set()

        async with consumer:
            await everything.wait()

    async def _latency(self, producer: Producer) -> Figure:
        """Return milliseconds from before the send to the handler, at a steady rate."""
        topic = f"BenchClient-{os.getpid()}-latency"
        await producer.send(Message(topic=topic, body=b"0"))
        took_ms: list[float] = []
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
        consumer = PushConsumer(f"bench-{topic}", self._name_servers, settings=settings)
        reads, everything = asyncio.Event(), asyncio.Event()
        count = int(_LATENCY_SECONDS * _LATENCY_PER_SECOND)

        @consumer.on(topic)
        async def handler(message: ReceivedMessage) -> None:
            took_ms.append((time.perf_counter_ns() - int(message.body)) / 1e6)
            reads.set()
            if len(took_ms) > count:
                everything.set()

        async with consumer:
            await reads.wait()
            started = time.perf_counter()
            sends = []
            for number in range(count):
                await asyncio.sleep(max(0.0, started + number / _LATENCY_PER_SECOND - time.perf_counter()))
                message = Message(topic=topic, body=b"%d" % time.perf_counter_ns())
                sends.append(asyncio.create_task(producer.send(message)))
            await asyncio.gather(*sends, everything.wait())
        cuts = statistics.quantiles(took_ms[1:], n=100)
        what = f"send to handler at {_LATENCY_PER_SECOND}/s"
        return {"what": what, "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}


async def _timed(what: str, work: Work, count: int) -> Figure:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"what": what, "client_cpu_us": round(cpu / count * 1e6, 2), "messages_per_second": round(count / wall)}


def _import_times() -> Iterator[Figure]:
    bare = _seconds("pass")
    for what, program in _PROGRAMS.items():
        yield {"what": what, "ms": round((_seconds(program) - bare) * 1000, 1)}


def _seconds(program: str) -> float:
    """Return the smallest time of some interpreters that run a program."""

    def once() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        return time.perf_counter() - started

    return min(once() for _ in range(_IMPORT_RUNS))
