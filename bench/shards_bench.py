"""Measures the gain of `rmq broker --shards N` on the cores of this machine. Prints JSON.

    python bench/shards_bench.py                     one shard and two, in turn
    python bench/shards_bench.py --shards 4 --clients 4

One shard and N shards run all the time, each under its own parent. One of the two is loaded at a time, by the same
number of client processes, each for one shard. A client writes prepared frames and counts answers, so it needs a
fraction of the broker's CPU time. But both use the same cores, so both are reported:

=====================  ===============================================================================================
figure                 how it is taken
=====================  ===============================================================================================
broker_cpu_us          user + system of all shards per message, including the kernel's work for sockets
client_cpu_us          the same of the clients
broker_cores           CPU seconds of the shards by seconds: 1 is what one shard can use at most
gain                   messages a second of N shards by those of one, the median of the rounds' ratios
gain_possible          the limit of the cores: cores / (broker + client CPU of a message) by the rate of one shard
=====================  ===============================================================================================

The first round is a warm-up and not counted; the figures are medians of the others. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from bench.ha_load import Load
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import RMQ, run_name_server

HOST = "127.0.0.1"
LOADS = {"pipelined": (4, 32), "64 connections": (64, 1)}
"""Load → connections of each client, and concurrent sends on each of them."""

READY_SECONDS, STOP_SECONDS = 60, 30

_load: Load
_barrier: Any  # a multiprocessing barrier, in the process of a client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2, help="a multiple of --shards")
    parser.add_argument("--messages", type=int, default=60_000, help="of one measurement")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the stores are")
    arguments = parser.parse_args()
    if arguments.clients % arguments.shards:
        parser.error(f"--clients {arguments.clients} is no multiple of --shards {arguments.shards}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=arguments.directory)))
        clients = Clients(arguments.clients, arguments.messages, arguments.body_bytes)  # before sockets exist
        stack.enter_context(clients.pool)
        _, name_servers = stack.enter_context(run_name_server(folder))
        layouts = [stack.enter_context(sharded(folder, name_servers, count)) for count in (1, arguments.shards)]
        figures = measure(layouts, clients, arguments.rounds)
    asked = {key: value for key, value in vars(arguments).items() if key != "directory"}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    print(json.dumps({"bench": "shards", **asked, **machine, "figures": figures}, indent=1))


@dataclass
class Layout:
    """Some running shards."""

    addresses: Sequence[str]
    pids: Sequence[int]

    def cpu_seconds(self) -> float:
        return sum(map(cpu_seconds, self.pids))


@contextmanager
def sharded(folder: Path, name_servers: str, count: int) -> Iterator[Layout]:
    store = folder / f"store-{count}"
    command: list[str | Path] = [
        RMQ,
        "broker",
        "--shards",
        str(count),
        "--host",
        HOST,
        "--port",
        "0",
        "-n",
        name_servers,
    ]
    command += ["--store", store, "--set", f"brokerName=of-{count}"]
    with ServerProcess(command, folder / f"shards-{count}.log") as parent:
        ready = parent.wait_ready(r"^ready broker=(\S+) ", READY_SECONDS)
        pids = [int((store / f"shard-{index}" / "abort").read_text()) for index in range(count)]
        yield Layout(ready[1].split(","), pids)
        parent.stop(signal.SIGTERM, STOP_SECONDS)


class Clients:
    """Processes that load brokers together."""

    def __init__(self, count: int, messages: int, body_bytes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.count = count
        self.messages = messages // count * count
        self.pool = ProcessPoolExecutor(count, context, _make_load, (body_bytes, context.Barrier(count)))
        list(self.pool.map(_meet, range(count)))  # each process has made its frames, and each gets one job

    def run(self, layout: Layout, connections: int, under_way: int) -> dict[str, float]:
        """Send all messages, evenly to all shards."""
        share, addresses = self.messages // self.count, layout.addresses
        before, began = layout.cpu_seconds(), time.perf_counter()
        jobs = [
            self.pool.submit(_send, addresses[number % len(addresses)], share, connections, under_way)
            for number in range(self.count)
        ]
        client_seconds = sum(job.result() for job in jobs)
        seconds, broker_seconds = time.perf_counter() - began, layout.cpu_seconds() - before
        return {
            "messages_per_second": self.messages / seconds,
            "broker_cpu_us": broker_seconds / self.messages * 1e6,
            "client_cpu_us": client_seconds / self.messages * 1e6,
            "broker_cores": broker_seconds / seconds,
        }


def _make_load(body_bytes: int, barrier: Any) -> None:
    global _load, _barrier
    _load, _barrier = Load(body_bytes), barrier


def _meet(_: int) -> None:
    _barrier.wait()


def _send(address: str, count: int, connections: int, under_way: int) -> float:
    """Send one client's share. Return its CPU seconds."""
    _barrier.wait()  # so that no client does the work of two
    before = time.process_time()
    _load.run(address, count, connections, under_way)
    return time.process_time() - before


def measure(layouts: Sequence[Layout], clients: Clients, rounds: int) -> dict[str, Any]:
    """Return median figures by load and number of shards, and the gain of the shards."""
    taken: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for load, (connections, under_way) in LOADS.items():
            runs = [clients.run(layout, connections, under_way) for layout in layouts]
            print(f"{turn} {load} {runs}", file=sys.stderr)
            if turn:
                taken[load].append(runs)
    return {load: _summary([len(layout.addresses) for layout in layouts], runs) for load, runs in taken.items()}


def _summary(counts: Sequence[int], rounds: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    by_count = [
        {key: statistics.median(runs[at][key] for runs in rounds) for key in rounds[0][at]} for at in range(len(counts))
    ]
    one, many = by_count
    cpu_us = many["broker_cpu_us"] + many["client_cpu_us"]
    gains = [runs[1]["messages_per_second"] / runs[0]["messages_per_second"] for runs in rounds]
    shown = [{key: round(value, 2) for key, value in figures.items()} for figures in by_count]
    return {
        **{f"{count} shard{'s' * (count > 1)}": figures for count, figures in zip(counts, shown, strict=True)},
        "gain": round(statistics.median(gains), 2),
        "gain_possible": round((os.cpu_count() or 1) / cpu_us * 1e6 / one["messages_per_second"], 2),
    }


if __name__ == "__main__":
    main()
