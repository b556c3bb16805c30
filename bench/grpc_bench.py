"""Our gRPC endpoint and Apache's proxy 5.4.0 in local mode under the same client load in one run. Prints JSON.

    python bench/grpc_bench.py                             our broker's endpoint, `rmq proxy`, and Apache's; minutes
    python bench/grpc_bench.py --out bench/figures/grpc.json
    python bench/grpc_bench.py --without-apache --rounds 1 --messages 500 --held 100

=========================  ============================================================================================
send                       1 KiB, 32 in flight
receive and ack            receives of 32, and an ack for each message
one message                p50 from the send, and from when it was stored (whole ms), until a held receive of a push
                           consumer has it
held receives              their memory, and CPU while they wait, of one core
ready                      ms from the start of `rmq standalone` with the port for gRPC, and without it and its extra
=========================  ============================================================================================

All servers run all the time, and one is loaded at a time. A round runs all loads with all servers; the figures are
medians of the rounds. CPU is user + system of all processes that handle a message: for `rmq proxy` this includes the
broker behind it. The first rounds only warm up a JVM. The load is grpc's own client in this process, which costs as
much as a server. Needs Java 17 and Maven, as `tests/interop` does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.commands.loaded import cpu_seconds
from rmqkit.admin import Admin
from rmqkit.proxy.schema.messages import methods
from tests.interop.grpc.apache_proxy import prepare_proxy, run_apache_proxy
from tests.interop.kit import default_version
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ, run_proxy

TOPIC, QUIET_TOPIC, GROUP = "bench-grpc", "bench-grpc-quiet", "bench-grpc-group"
BODY_BYTES = 1024
IN_FLIGHT = 32
PAUSE_SECONDS = 0.02
"""Pause between two messages whose latency is measured."""
HELD_OF_ONE_CLIENT = 100
METHODS = {method.name: method for method in methods()}

OK, NOT_FOUND = 20000, 40401
"""Codes of a receive's answer: with messages, or without."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Server:
    """A gRPC server. ``pids``: all processes that handle a message."""

    name: str
    grpc_addr: str
    namesrv_addr: str
    broker_addr: str
    pids: tuple[int, ...]

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes so far."""
        return sum(map(cpu_seconds, self.pids))

    def memory_mb(self) -> float:
        """Return the anonymous memory of its processes."""
        found = 0
        for pid in self.pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
        return found / 1024


class Load:
    """Calls over one connection to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        # Channels to one address share a connection unless they differ.
        self._channel = grpc.aio.insecure_channel(server.grpc_addr, [("grpc.use_local_subchannel_pool", 1)])
        self._stream: Any = None
        self._numbers = itertools.count()

    def _stub(self, name: str) -> Any:
        method = METHODS[name]
        kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
        make = getattr(self._channel, kinds[method.streams_requests, method.streams_responses])
        return make(method.path, method.request.SerializeToString, method.response.FromString)

    async def join(self, client: str = "bench", topic: str = TOPIC) -> None:
        """Open a stream with a push consumer's settings, which Apache's proxy needs for receives."""
        stream = self._stub("Telemetry")(metadata=of_client(client))
        subscription = {"group": {"name": GROUP}, "subscriptions": [{"topic": {"name": topic}}]}
        await stream.write(METHODS["Telemetry"].request(settings={"client_type": 2, "subscription": subscription}))
        await stream.read()
        self._stream = stream  # keep it: a stream is open only while it is referenced

    async def close(self) -> None:
        """Close the connection, and all calls with it."""
        await self._channel.close()

    async def send_one(self) -> None:
        identity = {"message_id": f"ID{next(self._numbers)}", "message_type": 1, "body_encoding": 1}
        message = {"topic": {"name": TOPIC}, "body": bytes(BODY_BYTES), "system_properties": identity}
        request = METHODS["SendMessage"].request(messages=[message])
        answer = await self._stub("SendMessage")(request, metadata=of_client(), timeout=30)
        assert answer.status.code == 20000, answer.status

    async def send(self, count: int) -> None:
        left = iter(range(count))

        async def keep_sending() -> None:
            for _ in left:
                await self.send_one()

        await asyncio.gather(*(keep_sending() for _ in range(IN_FLIGHT)))

    async def receive_one(self, client: str = "bench", topic: str = TOPIC) -> list[Any]:
        """Return the messages of one receive of a push consumer."""
        queue = {"topic": {"name": topic}, "broker": {"name": "broker-a"}}
        request = METHODS["ReceiveMessage"].request(
            group={"name": GROUP}, message_queue=queue, batch_size=32, auto_renew=True
        )
        request.filter_expression.type, request.filter_expression.expression = 1, "*"
        request.long_polling_timeout.seconds = 20
        call = self._stub("ReceiveMessage")(request, metadata=of_client(client), timeout=30)
        items = [item async for item in call]
        codes = {item.status.code for item in items if item.WhichOneof("content") == "status"}
        assert codes <= {OK, NOT_FOUND}, f"a receive of {client} was answered {codes}"
        return [item.message for item in items if item.WhichOneof("content") == "message"]

    async def ack(self, message: Any) -> None:
        system = message.system_properties
        entry = {"message_id": system.message_id, "receipt_handle": system.receipt_handle}
        names = {"group": {"name": GROUP}, "topic": {"name": TOPIC}}
        request = METHODS["AckMessage"].request(entries=[entry], **names)
        answer = await self._stub("AckMessage")(request, metadata=of_client())
        assert answer.status.code == 20000, answer.status

    async def receive(self, count: int) -> None:
        got = 0
        while got < count:
            messages = await self.receive_one()
            got += len(messages)
            await asyncio.gather(*map(self.ack, messages))

    async def cost(self, work: Any, count: int) -> Figures:
        """Return the CPU time per message, and the messages per second."""
        cpu, began = self.server.cpu_seconds(), time.perf_counter()
        await work(count)
        seconds, cpu_seconds = time.perf_counter() - began, self.server.cpu_seconds() - cpu
        return {"cpu_us": cpu_seconds / count * 1e6, "messages_per_second": count / seconds}

    async def latency(self, count: int) -> Figures:
        """Return the ms until a waiting receive gets the sent message, one message at a time."""
        after_send, after_store = [], []
        for _ in range(count):
            held = asyncio.ensure_future(self.receive_one())
            await asyncio.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            sending = asyncio.ensure_future(self.send_one())
            (message,) = await held
            after_send.append((time.perf_counter() - began) * 1000)
            after_store.append(time.time() * 1000 - message.system_properties.store_timestamp.ToMilliseconds())
            await sending
            await self.ack(message)
        return {"p50_ms": statistics.median(after_send), "p50_ms_after_stored": statistics.median(after_store)}

    async def held(self, count: int, seconds: float) -> Figures:
        """Return the cost of receives that wait for a message which does not arrive."""
        memory = self.server.memory_mb()
        clients = [Load(self.server) for _ in range(-(-count // HELD_OF_ONE_CLIENT))]
        for number, client in enumerate(clients):
            await client.join(f"bench-{number}", QUIET_TOPIC)
        waiting = [
            asyncio.ensure_future(client.receive_one(f"bench-{number}", QUIET_TOPIC))
            for _, (number, client) in zip(range(count), itertools.cycle(enumerate(clients)), strict=False)
        ]
        # One send, so that the server has handled all of them, and its first work for them.
        await self.send_one()
        await asyncio.sleep(seconds / 5)
        cpu, began = self.server.cpu_seconds(), time.perf_counter()
        await asyncio.sleep(seconds)
        at_rest = (self.server.cpu_seconds() - cpu) / (time.perf_counter() - began) * 100
        more = self.server.memory_mb() - memory
        assert not any(receive.done() for receive in waiting), "every receive waits"
        for client in clients:
            await client.close()
        await asyncio.gather(*waiting, return_exceptions=True)
        await self.receive(1)
        return {"more_mb": more, "cpu_percent": at_rest}


def of_client(client: str = "bench") -> tuple[tuple[str, str], ...]:
    return (("x-mq-client-id", client), ("x-mq-language", "PYTHON"), ("x-mq-client-version", "5.1.2"))


async def measure(servers: list[Server], options: argparse.Namespace) -> dict[str, dict[str, Figures]]:
    """Return medians by load and server."""
    taken: dict[str, dict[str, list[Figures]]] = {}
    async with AsyncExitStack() as stack:
        loads = []
        for server in servers:
            async with Admin(server.namesrv_addr) as admin:
                for topic in (TOPIC, QUIET_TOPIC):
                    await admin.topics.create(topic, broker=server.broker_addr)
                await admin.groups.update(GROUP, {}, server.broker_addr)
            loads.append(load := Load(server))
            stack.push_async_callback(load.close)
        for turn in range(-options.warm_ups, options.rounds):
            for what in ("send", "receive and ack", "one message", "held receives"):
                for load in loads:
                    await load.join()  # Apache's proxy forgets a client that is silent for two minutes
                    match what:
                        case "send":
                            figures = await load.cost(load.send, options.messages)
                        case "receive and ack":
                            figures = await load.cost(load.receive, options.messages)
                        case "one message":
                            figures = await load.latency(options.latencies)
                        case _:
                            figures = await load.held(options.held, options.held_seconds)
                    print(f"round {turn}, {what}, {load.server.name}: {figures}", file=sys.stderr)
                    if turn >= 0:
                        taken.setdefault(what, {}).setdefault(load.server.name, []).append(figures)
    return {what: {name: medians(rounds) for name, rounds in by_name.items()} for what, by_name in taken.items()}


def medians(rounds: list[Figures]) -> Figures:
    return {what: round(statistics.median(one[what] for one in rounds), 2) for what in rounds[0]}


def ratios(figures: dict[str, dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """Return ratios of ours to Apache's: messages per CPU second, and the time of one message."""
    found: dict[str, dict[str, float]] = {}
    for what, key in (("send", "cpu_us"), ("receive and ack", "cpu_us"), ("one message", "p50_ms")):
        by_name = dict(figures[what])
        if (apache := by_name.pop("apache", None)) is not None:
            for name, ours in by_name.items():
                ratio = apache[key] / ours[key] if key == "cpu_us" else ours[key] / apache[key]
                label = f"{what}: {'messages per CPU second' if key == 'cpu_us' else 'time'}, to Apache's"
                found.setdefault(label, {})[name] = round(ratio, 2)
    return found


@contextmanager
def standalone(folder: Path, grpc_port: int) -> Iterator[tuple[ServerProcess, dict[str, str]]]:
    """Run a name server and a broker of ours. Yield the process and the addresses of its ready line."""
    folder.mkdir()
    command = [RMQ, "standalone", "--namesrv-port", "0", "--port", "0", "--store", folder / "store"]
    command += ["--set", f"grpcServerPort={grpc_port}", "--set", "brokerName=broker-a"]
    with ServerProcess(command, folder / "log") as process:
        line = process.wait_ready(r"^ready (.*)$", READY_SECONDS)[1]
        yield process, dict(word.split("=", 1) for word in line.split())


@contextmanager
def running(folder: Path, *, with_apache: bool) -> Iterator[list[Server]]:
    """Run all servers: a broker with its endpoint, `rmq proxy` in front of another broker, and Apache's proxy."""
    with ExitStack() as stack:
        process, told = stack.enter_context(standalone(folder / "ours", 0))
        found = [Server("ours", told["grpc"], told["namesrv"], told["broker"], (process.pid,))]
        behind, told = stack.enter_context(standalone(folder / "behind", -1))
        proxy, address = stack.enter_context(run_proxy(folder / "behind", told["namesrv"], {}))
        found.append(Server("rmq proxy", address, told["namesrv"], told["broker"], (proxy.pid, behind.pid)))
        if with_apache:
            kit = replace(prepare_proxy(default_version()), is_short_lived=False)
            (folder / "apache").mkdir()
            process, place = stack.enter_context(run_apache_proxy(kit, folder / "apache"))
            found.append(Server("apache", place.grpc_addr, place.namesrv_addr, place.broker_addr, (process.pid,)))
        yield found


def ready_ms(folder: Path, starts: int) -> dict[str, float]:
    """Return the ms until `rmq standalone` is ready, with the gRPC port and without it, started in turn."""
    taken: dict[str, list[float]] = {"with gRPC": [], "without": []}
    for number in range(starts):
        for name, port in (("with gRPC", 0), ("without", -1)):
            with standalone(folder / f"start{port}-{number}", port) as (process, _):
                taken[name].append(process.ready_seconds * 1000)
    return {name: round(statistics.median(ms), 1) for name, ms in taken.items()}


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000, help="of the loads that cost CPU, in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-ups", type=int, default=2, help="rounds before them")
    parser.add_argument("--latencies", type=int, default=100, help="messages whose way is timed, in a round")
    parser.add_argument("--held", type=int, default=1000, help="receives that wait")
    parser.add_argument(
        "--held-seconds", type=float, default=10.0, help="for so long their CPU is measured, 15 at most"
    )
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--without-apache", action="store_true")
    parser.add_argument("--out", type=Path, help="write the figures to a file, too")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name:
        folder = Path(name)
        ready = ready_ms(folder, options.starts)
        with running(folder, with_apache=not options.without_apache) as servers:
            figures = asyncio.run(measure(servers, options))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
    asked = {"messages": options.messages, "body_bytes": BODY_BYTES, "rounds": options.rounds, "held": options.held}
    told = {"ratios": ratios(figures), "figures": figures, "ready_ms": ready}
    return {"bench": "grpc", **asked, **machine, **told}


def main() -> int:
    options = parsed(sys.argv[1:])
    text = json.dumps(run(options), indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
