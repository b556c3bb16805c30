"""Measures our client: sends with several in flight, batches, consumption. Prints JSON.

    python bench/client_bench.py                              against an `rmq standalone` started here
    python bench/client_bench.py --namesrv 127.0.0.1:9876     against any name server and broker
        --server-pid 4711                                     … and the CPU time of its broker's process

CPU times are user + system of this process (and of the broker's) per message; wall-clock rates depend on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import uvloop

from rmqkit import Message, Producer, PushConsumer, PushConsumerSettings, StartFrom

IN_FLIGHT = ((256, 1.0), (8, 0.5), (1, 0.1))
"""Sends under way at a time, and the share of the messages that are sent so."""

BATCH = 64
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namesrv", help="host:port; a standalone is started when this is missing")
    parser.add_argument("--server-pid", type=int, help="process whose CPU time is measured, too")
    parser.add_argument("--messages", type=int, default=50_000, help="of one run with 256 in flight")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3, help="rounds over all measurements; the median counts")
    arguments = parser.parse_args()
    with server(arguments.namesrv, arguments.server_pid) as (namesrv, pid):
        figures = uvloop.run(measure(namesrv, pid, arguments))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    print(json.dumps({"bench": "client", "body_bytes": arguments.body_bytes, **machine, "figures": figures}, indent=1))


@contextlib.contextmanager
def server(namesrv: str | None, pid: int | None) -> Iterator[tuple[str, int | None]]:
    """The name server's address and the broker's process."""
    if namesrv is not None:
        yield namesrv, pid
        return
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(Path(folder) / "store")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None, "stdout is piped"
            ready = dict(word.split("=", 1) for word in process.stdout.readline().split()[1:])
            yield ready["namesrv"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def measure(namesrv: str, pid: int | None, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    body = os.urandom(arguments.body_bytes)
    rounds: dict[str, list[dict[str, float]]] = {}
    async with Producer("bench", namesrv) as producer:
        for number in range(arguments.runs):
            topic = f"Bench-{os.getpid()}-{number}"
            await producer.send(Message(topic=topic, body=body))
            stored = 1
            for in_flight, share in IN_FLIGHT:
                count = max(1, int(arguments.messages * share))
                work = sending(producer, topic, body, count, in_flight)
                rounds.setdefault(f"send, {in_flight} in flight", []).append(await timed(work, count, pid))
                stored += count
            batches = arguments.messages // BATCH
            work = batching(producer, topic, body, batches)
            rounds.setdefault(f"send, batches of {BATCH}", []).append(await timed(work, batches * BATCH, pid))
            stored += batches * BATCH
            work = consuming(namesrv, topic, stored)
            rounds.setdefault("consume, coroutine handler", []).append(await timed(work, stored, pid))
    return [
        {"what": what, **{key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}}
        for what, runs in rounds.items()
    ]


async def timed(work: Callable[[], Awaitable[None]], count: int, pid: int | None) -> dict[str, float]:
    gc.collect()
    wall, cpu, server_cpu = time.perf_counter(), time.process_time(), cpu_seconds(pid)
    await work()
    wall, cpu, server_cpu = time.perf_counter() - wall, time.process_time() - cpu, cpu_seconds(pid) - server_cpu
    figures = {"messages_per_second": count / wall, "client_cpu_us_per_message": cpu / count * 1e6}
    return figures if pid is None else {**figures, "server_cpu_us_per_message": server_cpu / count * 1e6}


def cpu_seconds(pid: int | None) -> float:
    """User + system time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def sending(producer: Producer, topic: str, body: bytes, count: int, in_flight: int) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                await producer.send(Message(topic=topic, body=body))

        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))

    return work


def batching(producer: Producer, topic: str, body: bytes, batches: int) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        left = iter(range(batches))

        async def one_after_the_other() -> None:
            for _ in left:
                await producer.send_batch([Message(topic=topic, body=body) for _ in range(BATCH)])

        await asyncio.gather(*(one_after_the_other() for _ in range(8)))

    return work


def consuming(namesrv: str, topic: str, count: int) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        left = count
        everything = asyncio.Event()
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
        consumer = PushConsumer(f"bench-{topic}", namesrv, settings=settings)

        @consumer.on(topic)
        async def handler(message: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                everything.set()

        async with consumer:
            await everything.wait()

    return work


if __name__ == "__main__":
    main()
