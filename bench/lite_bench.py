"""Lite topics and streams: many names, appends, waiting readers, and many sessions at once. Prints JSON.

    python bench/lite_bench.py [--only topics append reader sessions] [--names 1000000] [--sessions 10000]

===========  ==========================================================================================================
part         figures
===========  ==========================================================================================================
topics       memory per idle lite topic, files and descriptors of the broker; starts after a clean stop and a SIGKILL,
             with the first append and read after each
append       an event of 200 bytes, 64 sessions writing: milliseconds at 20 events a second of each session, and without
             a pause, which is the time in the queue of the client. Without a pause also the CPU time of the broker per
             event, and the same of a send to an ordinary topic
reader       milliseconds from the call of `append`, and from its return, to the event at a reader that waits
sessions     a writer and a reader for each session, in two processes; each reader connects again twice. Every event
             is checked: nothing lost, repeated or out of order
===========  ==========================================================================================================

With ``--apache``, the parts ``append`` and ``reader`` run at Apache's broker, too. That needs Java 17 and Maven.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.client.producer.producer import Producer
from rmqkit.protocol.message import Message
from rmqkit.streams import Streams
from rmqkit.streams import open as open_streams
from tests.interop.standalone import run_standalone

PARENT = "Sessions"
EVENT_BYTES = 200

Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--names", type=int, default=1_000_000, help="lite topics of the part topics")
    parser.add_argument("--writers", type=int, default=64, help="sessions that write in the part append")
    parser.add_argument("--events", type=int, default=50_000, help="events of the part append")
    parser.add_argument("--sessions", type=int, default=10_000, help="sessions of the part sessions")
    parser.add_argument("--rate", type=int, default=20, help="events of a session in a second")
    parser.add_argument(
        "--burst", type=int, default=10, help="events that a writer of the part sessions appends at once"
    )
    parser.add_argument("--seconds", type=int, default=30, help="seconds of events of the part sessions")
    parser.add_argument("--apache", action="store_true", help="measure append and reader at Apache's broker, too")
    arguments = parser.parse_args()
    figures = {part: PARTS[part](arguments) for part in arguments.only}
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"bench": "lite", "figures": figures, "machine": machine}, indent=2))


# ---------------------------------------------------------------- many names


def topics(arguments: argparse.Namespace) -> Figures:
    """Create lite topics with one event each, and start the broker again."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name:
        folder = Path(name)
        store = folder / "store"
        with run_standalone(store, folder) as server:
            pid = server.process.pid
            empty_mb, spent = anonymous_mb(pid), cpu_seconds(pid)
            begin = time.perf_counter()
            asyncio.run(create(server.namesrv_addr, arguments.names))
            seconds = time.perf_counter() - begin
            figures: Figures = {
                "names": arguments.names,
                "created_per_second": round(arguments.names / seconds),
                "broker_cpu_us_per_name": round((cpu_seconds(pid) - spent) * 1e6 / arguments.names, 1),
                "bytes_per_name": round((anonymous_mb(pid) - empty_mb) * 2**20 / arguments.names),
                "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            }
            begin = time.perf_counter()
            server.stop()
            figures["stop_seconds"] = round(time.perf_counter() - begin, 1)
        figures["lite_files"] = sum(path.is_file() for path in (store / "lite").rglob("*"))
        figures["lite_mb"] = round(sum(path.stat().st_size for path in (store / "lite").rglob("*")) / 2**20, 1)
        figures["after_clean_stop"] = started(store, folder, arguments.names, kills=True)
        figures["after_sigkill"] = started(store, folder, arguments.names, kills=False)
        return figures


async def create(name_servers: str, count: int) -> None:
    """Send one event to each of ``count`` lite topics, with some requests at a time."""
    async with open_streams(name_servers, PARENT), Producer("bench", name_servers=name_servers) as producer:
        numbers = iter(range(count))

        async def one_caller() -> None:
            for number in numbers:
                await producer.send(Message(topic=PARENT, lite_topic=f"session-{number:08}", body=b"x" * 100))

        await asyncio.gather(*(one_caller() for _ in range(128)))


def started(store: Path, folder: Path, names: int, *, kills: bool) -> Figures:
    """Start the broker, and read and append. Kill it after more appends, or let it be stopped."""
    begin = time.perf_counter()
    with run_standalone(store, folder) as server:
        seconds = time.perf_counter() - begin
        pid = server.process.pid
        spent = cpu_seconds(pid)
        first_ms = asyncio.run(first_use(server.namesrv_addr, names))
        figures = {
            "start_seconds": round(seconds, 1),
            "start_cpu_seconds": round(spent, 1),
            "first_append_and_read_ms": round(first_ms, 1),
            "bytes_per_name": round(anonymous_mb(pid) * 2**20 / names),
        }
        if kills:
            os.kill(pid, signal.SIGKILL)
        return figures


async def first_use(name_servers: str, names: int) -> float:
    """Return the milliseconds of an append to an old stream, and a read of all its events."""
    async with open_streams(name_servers, PARENT) as streams:
        begin = time.perf_counter()
        await streams.append(f"session-{names // 2:08}", b"again")
        found = [event.data async for event in streams.read(f"session-{names // 2:08}", follow=False)]
        assert (found[0], found[-1]) == (b"x" * 100, b"again"), "an old event and the new one are there"
        return (time.perf_counter() - begin) * 1000


def anonymous_mb(pid: int) -> float:
    """Return the memory of a process without the pages of files, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


# ---------------------------------------------------------------- both brokers


@contextmanager
def ours() -> Iterator[tuple[str, int]]:
    """Run our broker. Yield the address of the name server and the broker's process id."""
    with (
        tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder,
        run_standalone(Path(folder, "store"), Path(folder)) as server,
    ):
        yield server.namesrv_addr, server.process.pid


@contextmanager
def apache() -> Iterator[tuple[str, int]]:
    """Run Apache's broker with light queues. Yield what `ours` yields."""
    from broker_bench import APACHE_CONF

    from tests.interop.apache import open_store_with_apache
    from tests.interop.kit import default_version, prepare

    kit = replace(prepare(default_version()), is_short_lived=False)
    conf = APACHE_CONF | {"enableLmq": "true", "enableMultiDispatch": "true"}
    with (
        tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder,
        open_store_with_apache(kit, Path(folder, "store"), Path(folder), conf) as pair,
    ):
        yield pair.namesrv_addr, pair.broker.pid


def at_both(measure: Callable[[str, int, argparse.Namespace], Awaitable[Figures]]) -> Callable[..., Figures]:
    """Return a part that measures our broker, and Apache's if that is wanted."""

    def part(arguments: argparse.Namespace) -> Figures:
        figures = {}
        for name, run in {"ours": ours, "apache": apache}.items():
            if name == "ours" or arguments.apache:
                with run() as (name_servers, pid):
                    figures[name] = asyncio.run(measure(name_servers, pid, arguments))
        return figures

    return part


async def append(name_servers: str, pid: int, arguments: argparse.Namespace) -> Figures:
    """Append events and send ordinary messages in turns, so that other load affects both."""
    spent_ms: dict[str, list[float]] = {"append": [], "send": []}
    broker_s = dict.fromkeys(spent_ms, 0.0)
    async with open_streams(name_servers, PARENT) as streams, Producer("bench", name_servers=name_servers) as producer:
        body = os.urandom(EVENT_BYTES)
        works: dict[str, Callable[[int], Awaitable[Any]]] = {
            "append": lambda session: streams.append(f"writer-{session}", body),
            "send": lambda session: producer.send(Message(topic="Ordinary", body=body)),
        }
        await works["send"](0)
        await written(works["append"], arguments.writers, arguments.events // 10)  # a warm-up
        taken = await written(works["append"], arguments.writers, 200 * arguments.writers, pause_s=1 / arguments.rate)
        cuts = statistics.quantiles(taken, n=100)
        paced = {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
        for turn in range(11):
            for name, work in works.items():
                before = cpu_seconds(pid)
                taken = await written(work, arguments.writers, arguments.events // 10)
                if turn:  # the first turn is a warm-up
                    spent_ms[name] += taken
                    broker_s[name] += cpu_seconds(pid) - before
    figures: Figures = {}
    for name, taken in spent_ms.items():
        cuts = statistics.quantiles(taken, n=100)
        cpu_us = broker_s[name] * 1e6 / len(taken)
        figures[name] = {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2), "broker_cpu_us": round(cpu_us, 1)}
    figures["paced"] = paced
    figures["cpu_append_by_send"] = round(broker_s["append"] / broker_s["send"], 2)
    return figures


async def written(
    work: Callable[[int], Awaitable[Any]], writers: int, count: int, *, pause_s: float = 0
) -> list[float]:
    """Do some work from several sessions, each with a pause. Return the milliseconds of each piece of work."""
    spent_ms: list[float] = []
    start = time.perf_counter()

    async def one_writer(session: int) -> None:
        for number in range(count // writers):
            if pause_s:
                await asyncio.sleep(start + pause_s * (number + session / writers) - time.perf_counter())
            begin = time.perf_counter()
            await work(session)
            spent_ms.append((time.perf_counter() - begin) * 1000)

    await asyncio.gather(*map(one_writer, range(writers)))
    return spent_ms


async def reader(name_servers: str, pid: int, arguments: argparse.Namespace) -> Figures:
    """Append an event every 5 ms to one of a few streams with a waiting reader each."""
    came: dict[str, float] = {}
    returned: dict[str, float] = {}
    arrived: dict[str, float] = {}
    async with open_streams(name_servers, PARENT) as streams:

        async def one_reader(session: str) -> None:
            async for event in streams.read(session):
                arrived[event.text] = time.perf_counter()

        sessions = [f"reader-{number}" for number in range(8)]
        for session in sessions:
            came[session] = time.perf_counter()
            await streams.append(session, session)
        readers = [asyncio.create_task(one_reader(session)) for session in sessions]
        await asyncio.sleep(1)
        arrived.clear()
        for number, session in zip(range(2000), itertools.cycle(sessions), strict=False):
            text = f"{session} {number}"
            came[text] = time.perf_counter()
            await streams.append(session, text)
            returned[text] = time.perf_counter()
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.5)
        for one in readers:
            one.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert len(arrived) == 2000, f"{len(arrived)} of 2000 events came"
    figures = {}
    for name, since in (("from_call", came), ("from_return", returned)):
        cuts = statistics.quantiles([(at - since[text]) * 1000 for text, at in arrived.items()], n=100)
        figures[name] = {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}
    return figures


# ---------------------------------------------------------------- many sessions


def sessions(arguments: argparse.Namespace) -> Figures:
    """Run writers in one process and readers in another."""
    count = arguments.rate * arguments.seconds
    with ours() as (name_servers, pid):
        queue: multiprocessing.Queue[tuple[str, Figures]] = multiprocessing.get_context("spawn").Queue()
        programs = [
            multiprocessing.get_context("spawn").Process(target=target, args=(name_servers, arguments, count, queue))
            for target in (write_sessions, read_sessions)
        ]
        asyncio.run(prepare_parent(name_servers))
        spent, begin = cpu_seconds(pid), time.perf_counter()
        for program in programs:
            program.start()
        found = dict(queue.get() for _ in programs)
        for program in programs:
            program.join()
        broker_s = cpu_seconds(pid) - spent
        return {
            "sessions": arguments.sessions,
            "events": arguments.sessions * count,
            "wanted_seconds": arguments.seconds,
            "seconds": round(time.perf_counter() - begin, 1),
            "broker_cpu_s": round(broker_s, 1),
            "broker_cpu_us_per_event": round(broker_s * 1e6 / arguments.sessions / count, 1),
            "broker_mb": round(anonymous_mb(pid)),
            **found["writers"],
            **found["readers"],
        }


async def prepare_parent(name_servers: str) -> None:
    async with open_streams(name_servers, PARENT):
        pass


def write_sessions(name_servers: str, arguments: argparse.Namespace, count: int, queue: Any) -> None:
    """Append the events of all sessions at their rate, or as fast as the broker allows."""

    async def one_writer(streams: Streams, session: str) -> None:
        start = time.perf_counter() + hash(session) % 1000 / 1000 * arguments.burst / arguments.rate
        for first in range(0, count, arguments.burst):
            await asyncio.sleep(max(0, start + first / arguments.rate - time.perf_counter()))
            numbers = range(first, min(first + arguments.burst, count))
            await asyncio.gather(
                *(
                    streams.append(session, f"{number} ".ljust(EVENT_BYTES), last=number == count - 1)
                    for number in numbers
                )
            )

    async def all_writers() -> None:
        async with open_streams(name_servers, PARENT) as streams:
            await asyncio.gather(*(one_writer(streams, f"s-{number}") for number in range(arguments.sessions)))

    asyncio.run(all_writers())
    queue.put(("writers", {"writers_cpu_s": round(time.process_time(), 1)}))


def read_sessions(name_servers: str, arguments: argparse.Namespace, count: int, queue: Any) -> None:
    """Read all sessions, and connect again after each third of the events. Count the events that are not the next."""
    wrong = 0

    async def one_reader(streams: Streams, session: str) -> None:
        nonlocal wrong
        expected, after = 0, None
        for part in (1, 2, 3):
            async for event in streams.read(session, after=after):
                wrong += int(event.text) != expected
                expected, after = expected + 1, event.id
                if part < 3 and expected >= count * part // 3:
                    break
        wrong += expected != count

    async def all_readers() -> None:
        async with open_streams(name_servers, PARENT) as streams:
            await asyncio.gather(*(one_reader(streams, f"s-{number}") for number in range(arguments.sessions)))

    asyncio.run(all_readers())
    queue.put(("readers", {"wrong_events": wrong, "readers_cpu_s": round(time.process_time(), 1)}))


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "topics": topics,
    "append": at_both(append),
    "reader": at_both(reader),
    "sessions": sessions,
}

if __name__ == "__main__":
    main()
