"""Route look-ups in our name server and in Apache's in one run: answers per CPU second. Prints JSON.

    python bench/namesrv_bench.py            needs Java 17 and Maven, for the other side

Both get the same 100 topics from the same registration. 16 connections request them, with several requests in flight on
each. The servers take turns, and the figure is the CPU time of the whole server process, so that neither a slow client
nor a busy machine changes the comparison. The first round warms both up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.brokers import RegisterBrokerBody, RegisterBrokerRequest
from rmqkit.protocol.schemas.topics import DataVersion, TopicConfig, TopicConfigTable, TopicRequest
from rmqkit.remoting.client import RemotingClient, expect_success
from tests.interop.apache import NAME_SERVER_HEAP_MB
from tests.interop.kit import default_version, prepare
from tests.interop.server_process import ServerProcess
from tests.ports import free_port

IN_FLIGHT = 8
READY_SECONDS = 60


async def register(client: RemotingClient, address: str, topics: list[str]) -> None:
    table = TopicConfigTable(DataVersion(1, 0, 1), {name: TopicConfig(name, 8, 8) for name in topics})
    body = msgspec.json.encode(RegisterBrokerBody(topic_config_serialize_wrapper=table))
    header = RegisterBrokerRequest("broker-a", "127.0.0.1:10911", "DefaultCluster", 0, ha_server_addr="127.0.0.1:10912")
    expect_success(await client.call(address, request(RequestCode.REGISTER_BROKER, header, body), 10_000), address)


async def ask(address: str, topics: list[str], connections: int, requests: int) -> None:
    """Send ``requests`` look-ups over ``connections`` connections."""
    numbers = iter(range(requests))
    clients = [RemotingClient() for _ in range(connections)]

    async def one_caller(client: RemotingClient) -> None:
        for i in numbers:
            header = TopicRequest(topics[i % len(topics)])
            command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
            expect_success(await client.call(address, command, 30_000), address)

    await asyncio.gather(*(one_caller(client) for client in clients for _ in range(IN_FLIGHT)))
    for client in clients:
        await client.close()


async def measure(servers: dict[str, tuple[str, int]], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return answers per CPU second of each server, one value a round."""
    topics = [f"Topic-{i}" for i in range(arguments.topics)]
    client = RemotingClient()
    figures: dict[str, list[float]] = {name: [] for name in servers}
    for address, _ in servers.values():
        await register(client, address, topics)
    for round_number in range(arguments.rounds + 1):
        for name, (address, pid) in servers.items():
            before = cpu_seconds(pid)
            await ask(address, topics, arguments.connections, arguments.requests)
            if round_number:
                figures[name].append(arguments.requests / (cpu_seconds(pid) - before))
    await client.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--requests", type=int, default=40_000, help="look-ups a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    kit = prepare(default_version())
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name:
        folder = Path(name)
        port = free_port()
        (folder / "namesrv.conf").write_text(f"listenPort={port}\nbindAddress=127.0.0.1\n")
        java = kit.jvm(
            "org.apache.rocketmq.namesrv.NamesrvStartup",
            ["-c", folder / "namesrv.conf"],
            heap_mb=NAME_SERVER_HEAP_MB,
            work_dir=folder,
        )
        rmq = Path(sys.executable).with_name("rmq")
        with (
            ServerProcess(java, folder / "apache.log", {**os.environ, "ROCKETMQ_HOME": str(folder)}) as theirs,
            ServerProcess([rmq, "namesrv", "--host", "127.0.0.1", "--port", "0"], folder / "ours.log") as ours,
        ):
            theirs.wait_ready("boot success", READY_SECONDS)
            address = ours.wait_ready(r"^ready namesrv=(\S+)", READY_SECONDS)[1]
            servers = {"rmqkit": (address, ours.pid), f"apache {kit.version}": (f"127.0.0.1:{port}", theirs.pid)}
            figures = uvloop.run(measure(servers, arguments))
    rates = {name: round(statistics.median(values)) for name, values in figures.items()}
    ours_rate, theirs_rate = rates.values()
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    settings = dict(vars(arguments).items())
    ratio = round(ours_rate / theirs_rate, 2)
    print(json.dumps({"bench": "namesrv", **settings, **machine, "answers_per_cpu_second": rates, "ratio": ratio}))


if __name__ == "__main__":
    main()
