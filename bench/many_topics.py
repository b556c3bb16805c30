"""The cost of creating many topics in one broker, one after the other and several at a time. Prints JSON.

python bench/many_topics.py [--topics 5000] [--in-flight 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.topics import CreateTopicRequest
from rmqkit.remoting.client import RemotingClient, expect_success
from tests.interop.standalone import run_standalone

TIMEOUT_MS = 60_000


async def create(address: str, names: list[str], in_flight: int) -> float:
    """Create topics, ``in_flight`` requests at a time. Return the seconds."""
    client, left = RemotingClient(), iter(names)

    async def one_caller() -> None:
        for name in left:
            command = request(
                RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopicRequest(name, "TBW102", 4, 4, 6, "SINGLE_TAG")
            )
            expect_success(await client.call(address, command, TIMEOUT_MS), address)

    begin = time.perf_counter()
    await asyncio.gather(*(one_caller() for _ in range(in_flight)))
    seconds = time.perf_counter() - begin
    await client.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topics", type=int, default=5000)
    parser.add_argument("--in-flight", type=int, default=64)
    arguments = parser.parse_args()
    figures = {}
    for in_flight in (1, arguments.in_flight):
        names = [f"BenchTopic-{number:05}" for number in range(arguments.topics)]
        with tempfile.TemporaryDirectory() as folder, run_standalone(Path(folder, "store"), Path(folder)) as server:
            seconds = asyncio.run(create(server.broker_addr, names, in_flight))
        figures[f"{in_flight} in flight"] = {"seconds": round(seconds, 2), "per second": round(len(names) / seconds)}
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({"topics": arguments.topics, "figures": figures, "machine": machine}, indent=2))


if __name__ == "__main__":
    main()
