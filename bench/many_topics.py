"""The cost of creating topics in a broker that has many topics already, and of the start of such a broker. Prints JSON.

    python bench/many_topics.py [--known 1000 10000 50000] [--topics 500] [--in-flight 64] [--other CHECKOUT]

For each number of known topics, a name server and a broker start on a store with these topics. "start" has the CPU time
and the memory of the broker when it is ready. Then a client creates further topics one after another, and then several
at a time. The figures are the CPU time of broker and name server per topic, and the median time of a request. With
``--other``, the servers of another checkout take turns with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.topics import CreateTopicRequest, DataVersion, TopicConfig, TopicConfigTable
from rmqkit.remoting.client import RemotingClient, expect_success
from rmqkit.store.files import JsonFile
from tests.interop.standalone import run_broker, run_name_server

TIMEOUT_MS = 60_000
SETTLE_SECONDS = 2.0
STOP_SECONDS = 60


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024, 1)


async def create(address: str, names: list[str], in_flight: int) -> list[float]:
    """Create topics, ``in_flight`` requests at a time. Return the milliseconds of each request."""
    client, left = RemotingClient(), iter(names)
    spent_ms: list[float] = []

    async def one_caller() -> None:
        for name in left:
            header = CreateTopicRequest(name, "TBW102", 4, 4, 6, "SINGLE_TAG")
            command = request(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
            begin = time.perf_counter()
            expect_success(await client.call(address, command, TIMEOUT_MS), address)
            spent_ms.append((time.perf_counter() - begin) * 1000)

    await asyncio.gather(*(one_caller() for _ in range(in_flight)))
    await client.close()
    return spent_ms


def measure(known: int, topics: int, in_flight: int) -> dict[str, Any]:
    """Start servers on a store with ``known`` topics, and create further topics."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name:
        folder = Path(name)
        table = {one: TopicConfig(one, 4, 4) for one in (f"Known-{number:06}" for number in range(known))}
        file = JsonFile(folder / "store" / "config" / "topics.json")
        file.save(TopicConfigTable(DataVersion(known, 0, 1), table))
        with (  # adds system topics, as only the first start does
            run_name_server(folder) as (_, names_address),
            run_broker(folder / "store", folder, names_address, {}) as (broker, _),
        ):
            broker.stop(signal.SIGTERM, STOP_SECONDS)
        begin = time.perf_counter()
        with (
            run_name_server(folder) as (name_server, names_address),
            run_broker(folder / "store", folder, names_address, {}) as (broker, address),
        ):
            figures: dict[str, Any] = {
                "start": {
                    "seconds": round(time.perf_counter() - begin, 2),
                    "broker_cpu_s": round(cpu_seconds(broker.pid), 2),
                    "broker_mb": memory_mb(broker.pid),
                }
            }
            for label, callers in (("one_by_one", 1), (f"{in_flight}_in_flight", in_flight)):
                time.sleep(SETTLE_SECONDS)
                before = cpu_seconds(broker.pid), cpu_seconds(name_server.pid)
                spent_ms = asyncio.run(create(address, [f"{label}-{number}" for number in range(topics)], callers))
                after = cpu_seconds(broker.pid), cpu_seconds(name_server.pid)
                ours, theirs = ((end - start) * 1000 / topics for start, end in zip(before, after, strict=True))
                figures[label] = {
                    "broker_cpu_ms": round(ours, 2),
                    "name_server_cpu_ms": round(theirs, 2),
                    "median_ms": round(statistics.median(spent_ms), 2),
                    "max_ms": round(max(spent_ms), 1),
                }
            figures["broker_mb_after"] = memory_mb(broker.pid)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--known", type=int, nargs="+", default=[1000, 10_000, 50_000], help="topics before the start")
    parser.add_argument("--topics", type=int, default=500, help="topics to create")
    parser.add_argument("--in-flight", type=int, default=64, help="requests at a time")
    parser.add_argument("--other", type=Path, help="another checkout of rmqkit to compare with")
    arguments = parser.parse_args()
    sides = {"this": ""}
    if arguments.other is not None:
        sides["other"] = ":".join(map(str, sorted(arguments.other.resolve().glob("packages/rmqkit*/src"))))
    figures: dict[str, dict[int, Any]] = {side: {} for side in sides}
    for known in arguments.known:
        for side, path in sides.items():
            os.environ["PYTHONPATH"] = path
            figures[side][known] = measure(known, arguments.topics, arguments.in_flight)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"bench": "many_topics", "figures": figures, "machine": machine}, indent=2))


if __name__ == "__main__":
    main()
