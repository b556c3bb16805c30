"""The gRPC endpoint under load: CPU of the server for each message, ours and that of a running Apache proxy in one run.

    python bench/grpc_bench.py --json
    python bench/grpc_bench.py --other 127.0.0.1:8081 --pid 4711 --messages 20000

Sends of 1 KiB with 32 in flight, then receives of 32 with an ack for each message. The other proxy has a topic
``bench-grpc`` of type NORMAL. The load is made by grpc's own client in this process, which costs as much as a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[1]))

from rmqkit.admin import Admin
from rmqkit.proxy.messages import methods
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ

TOPIC, GROUP = "bench-grpc", "bench-grpc-group"
IN_FLIGHT = 32
METHODS = {method.name: method for method in methods()}
METADATA = (("x-mq-client-id", "bench"), ("x-mq-language", "PYTHON"), ("x-mq-client-version", "5.1.2"))
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    """Anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


class Load:
    """Calls over one channel to one endpoint."""

    def __init__(self, channel: grpc.aio.Channel, pid: int, messages: int) -> None:
        self._channel = channel
        self._pid = pid
        self._messages = messages

    def _stub(self, name: str) -> Any:
        method = METHODS[name]
        kinds = {(False, False): "unary_unary", (False, True): "unary_stream", (True, True): "stream_stream"}
        make = getattr(self._channel, kinds[method.streams_requests, method.streams_responses])
        serializers = {
            "request_serializer": method.request.SerializeToString,
            "response_deserializer": method.response.FromString,
        }
        return make(method.path, **serializers)

    async def settle(self) -> None:
        """Open a stream with a consumer's settings, as receives need it at Apache's."""
        self._stream = self._stub("Telemetry")(metadata=METADATA)
        subscription = {"group": {"name": GROUP}, "subscriptions": [{"topic": {"name": TOPIC}}]}
        settings = {"client_type": 3, "subscription": subscription}
        await self._stream.write(METHODS["Telemetry"].request(settings=settings))
        await self._stream.read()

    async def send(self, count: int) -> None:
        left, stub, body = iter(range(count)), self._stub("SendMessage"), bytes(1024)

        async def keep_sending() -> None:
            for number in left:
                message = {
                    "topic": {"name": TOPIC},
                    "body": body,
                    "system_properties": {"message_id": f"ID{number}", "message_type": 1, "body_encoding": 1},
                }
                request = METHODS["SendMessage"].request(messages=[message])
                answer = await stub(request, metadata=METADATA, timeout=30)
                assert answer.status.code == 20000, answer.status

        await asyncio.gather(*(keep_sending() for _ in range(IN_FLIGHT)))

    async def receive(self, count: int) -> None:
        receive, ack, got = self._stub("ReceiveMessage"), self._stub("AckMessage"), 0
        request = METHODS["ReceiveMessage"].request(
            group={"name": GROUP}, message_queue={"topic": {"name": TOPIC}}, batch_size=32
        )
        request.invisible_duration.seconds = 600
        request.filter_expression.type, request.filter_expression.expression = 1, "*"
        while got < count:
            items = [item async for item in receive(request, metadata=METADATA, timeout=30)]
            messages = [item.message for item in items if item.WhichOneof("content") == "message"]
            got += len(messages)

            async def acknowledge(message: Any) -> None:
                entry = {
                    "message_id": message.system_properties.message_id,
                    "receipt_handle": message.system_properties.receipt_handle,
                }
                names = {"group": {"name": GROUP}, "topic": {"name": TOPIC}}
                answer = await ack(METHODS["AckMessage"].request(entries=[entry], **names), metadata=METADATA)
                assert answer.status.code == 20000, answer.status

            await asyncio.gather(*map(acknowledge, messages))

    async def measure(self, work: Any) -> dict[str, float]:
        loop = asyncio.get_running_loop()
        cpu, began = cpu_seconds(self._pid), loop.time()
        await work(self._messages)
        seconds = loop.time() - began
        return {
            "cpu_us": round((cpu_seconds(self._pid) - cpu) / self._messages * 1e6, 1),
            "messages_per_second": round(self._messages / seconds),
        }


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", help="host:port of another endpoint")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-bench-")))
        ports = ("--namesrv-port", "0", "--port", "0", "--set", "grpcServerPort=0")
        command = [RMQ, "standalone", *ports, "--store", folder / "store"]
        process = stack.enter_context(ServerProcess(command, folder / "log"))
        ready = process.wait_ready(r"^ready namesrv=(\S+) broker=(\S+) grpc=(\S+) store=", READY_SECONDS)
        async with Admin(ready[1]) as admin:
            await admin.topics.create(TOPIC, broker=ready[2])
        peers = {"ours": (ready[3], process.pid)}
        if options.other:
            peers["other"] = (options.other, options.pid)
        loads = {}
        for name, (address, pid) in peers.items():
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            loads[name] = Load(channel, pid, options.messages)
            await loads[name].settle()
            await loads[name].send(500)
            await loads[name].receive(500)
        for name in loads:
            told[name] = {"send": [], "receive and ack": [], "anonymous_mb": 0.0}
        for number in range(options.rounds):
            for name, load in loads.items():
                for what, work in (("send", load.send), ("receive and ack", load.receive)):
                    figures = await load.measure(work)
                    told[name][what].append(figures)
                    print(f"round {number}, {name}, {what}: {figures}", file=sys.stderr)
        for name, (_, pid) in peers.items():
            told[name]["anonymous_mb"] = round(memory_mb(pid), 1)
    print(json.dumps(told, indent=None if options.json else 1))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
