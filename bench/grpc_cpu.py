"""The cost of the gRPC endpoint from the socket's bytes to its answers, in a broker of this process. Prints JSON: the
CPU microseconds of a call, or of a received message, the best of the rounds. There are no sockets; the store writes its
log.

    python bench/grpc_cpu.py
    python bench/grpc_cpu.py --beside ../other          also for another checkout, in the same run
    python bench/grpc_cpu.py --profile send             where the time goes

The calls are like those of SDKs: 1 KiB bodies, the usual headers, and headers that change with each call as literals.
The cost of making the calls and reading the answers is not included.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import uvloop
from hpack import Encoder
from hpack.struct import HeaderTuple, NeverIndexedHeaderTuple

from rmqkit.broker.settings import BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.proxy.schema.messages import methods
from rmqkit.proxy.service.endpoint import Endpoint
from rmqkit.proxy.transport.grpc_call import GrpcService
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings

METHODS = {method.name: method for method in methods()}
TOPIC, GROUP = "bench-grpc", "bench-grpc-group"
BODY = bytes(range(256)) * 4
MESSAGES = 4096
CALLS_OF_A_READ = (1, 4, 32)
DATA, HEADERS = 0, 1


class Transport(asyncio.Transport):
    """A transport that stores the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5000) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Any) -> None:
        self.written.append(data)

    def writelines(self, pieces: Any) -> None:
        self.written.extend(pieces)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream_id.to_bytes(4) + payload


class Client:
    """A client with one connection that has no socket."""

    def __init__(self, service: GrpcService, *, is_huffman: bool) -> None:
        self._transport = Transport()
        self._connection = service.connection(clock=SYSTEM_CLOCK)
        self._connection.connection_made(self._transport)
        self._encoder = Encoder()
        self._is_huffman = is_huffman
        self._next_id = 1
        window = frame(8, 0, 0, (1 << 30).to_bytes(4))
        settings = frame(4, 0, 0, (4).to_bytes(2) + (1 << 30).to_bytes(4))
        self._connection.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + window)
        self._profile: cProfile.Profile | None = None

    def call(self, name: str, request: Any) -> bytes:
        """Return the frames of a call."""
        method, number = METHODS[name], self._next_id
        self._next_id += 2
        headers: list[Any] = [
            (":method", "POST"), (":scheme", "http"), (":path", method.path), (":authority", "127.0.0.1:8081"),
            ("te", "trailers"), ("content-type", "application/grpc"), ("user-agent", "grpc-python-asyncio/1.85.0"),
            ("x-mq-client-id", "bench@1@2@3"), ("x-mq-language", "PYTHON"), ("x-mq-client-version", "5.1.2"),
            ("x-mq-protocol", "GRPC_V2"), ("x-mq-namespace", ""), ("grpc-accept-encoding", "identity, deflate, gzip"),
        ]  # fmt: skip
        never = [("grpc-timeout", f"{29_000 + number % 999}m"), ("x-mq-request-id", f"0c12-{number:032x}"),
                 ("x-mq-date-time", f"20261122T{number % 1_000_000:06}Z")]  # fmt: skip
        every = [HeaderTuple(*one) for one in headers] + [NeverIndexedHeaderTuple(*one) for one in never]
        block = self._encoder.encode(every, huffman=self._is_huffman)
        content = request.SerializeToString()
        body = b"\0" + len(content).to_bytes(4) + content
        return frame(HEADERS, 4, number, block) + frame(DATA, 1, number, body)

    async def answers(self, data: bytes, count: int) -> tuple[float, bytes]:
        """Let the endpoint read some bytes. Return the CPU seconds until ``count`` calls are answered, and the written
        bytes.
        """
        written = self._transport.written
        written.clear()
        began, ended, at = time.process_time(), 0, 0
        with self._profile or nullcontext():
            self._connection.data_received(data)
            while True:
                for piece in written[at:]:
                    ended += piece.count(b"grpc-status\x010")
                at = len(written)
                if ended >= count:
                    break
                await asyncio.sleep(0)
        seconds = time.process_time() - began
        return seconds, b"".join(written)

    def profile(self, into: cProfile.Profile | None) -> None:
        self._profile = into


def messages_in(written: bytes) -> Iterator[bytes]:
    """Yield the gRPC messages in some frames, call after call."""
    bodies: dict[int, bytes] = {}
    at = 0
    while at < len(written):
        size, kind, number = (
            int.from_bytes(written[at : at + 3]),
            written[at + 3],
            int.from_bytes(written[at + 5 : at + 9]),
        )
        if kind == DATA:
            bodies[number] = bodies.get(number, b"") + written[at + 9 : at + 9 + size]
        at += 9 + size
    for body in bodies.values():
        at = 0
        while at < len(body):
            size = int.from_bytes(body[at + 1 : at + 5])
            yield body[at + 5 : at + 5 + size]
            at += 5 + size


def send_request(number: int) -> Any:
    system = {"message_id": f"01{number:030X}", "message_type": 1, "body_encoding": 1, "tag": "TagA", "keys": ["k1"]}
    message = {"topic": {"name": TOPIC}, "body": BODY, "system_properties": system, "user_properties": {"a": "b"}}
    request = METHODS["SendMessage"].request(messages=[message])
    request.messages[0].system_properties.born_timestamp.FromMilliseconds(1_700_000_000_000 + number)
    request.messages[0].system_properties.born_host = "bench-host"
    return request


async def send(client: Client, calls: int, count: int) -> float:
    seconds = 0.0
    for first in range(0, count, calls):
        data = b"".join(client.call("SendMessage", send_request(first + one)) for one in range(calls))
        more, written = await client.answers(data, calls)
        seconds += more
    for content in messages_in(written):
        answer = METHODS["SendMessage"].response.FromString(content)
        assert answer.status.code == 20000, answer
    return seconds / count


async def receive(
    client: Client, calls: int, count: int, profiles: dict[str, cProfile.Profile | None]
) -> tuple[float, float]:
    """Return the CPU seconds per message, for receives of 32 and for the acks."""
    receiving = acking = 0.0
    got = 0
    queue = {"topic": {"name": TOPIC}, "broker": {"name": "broker-a"}}
    names = {"group": {"name": GROUP}, "topic": {"name": TOPIC}}
    while got < count:
        request = METHODS["ReceiveMessage"].request(
            group={"name": GROUP}, message_queue=queue, batch_size=32, auto_renew=True
        )
        request.filter_expression.type, request.filter_expression.expression = 1, "*"
        request.long_polling_timeout.seconds = 20
        client.profile(profiles.get("receive"))
        seconds, written = await client.answers(client.call("ReceiveMessage", request), 1)
        client.profile(profiles.get("ack"))
        receiving += seconds
        items = map(METHODS["ReceiveMessage"].response.FromString, messages_in(written))
        acks = []
        for item in items:
            if item.WhichOneof("content") == "message":
                system = item.message.system_properties
                entry = {"message_id": system.message_id, "receipt_handle": system.receipt_handle}
                acks.append(METHODS["AckMessage"].request(entries=[entry], **names))
        assert acks, "there are messages to acknowledge"
        got += len(acks)
        for first in range(0, len(acks), calls):
            some = acks[first : first + calls]
            seconds, written = await client.answers(b"".join(client.call("AckMessage", one) for one in some), len(some))
            acking += seconds
    for content in messages_in(written):
        assert METHODS["AckMessage"].response.FromString(content).status.code == 20000
    return receiving / got, acking / got


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a")
    best: dict[str, float] = {}
    async with Standalone(folder, broker=broker, store=StoreSettings(commit_log_file_bytes=1 << 28)) as servers:
        servers.broker.context.topics.put(TopicConfig(TOPIC, read_queue_nums=8, write_queue_nums=8))
        router = Router()
        servers.broker.parts.add_handlers([router], Router(), "")
        endpoint = Endpoint(servers.broker.parts.grpc_backend(router), SYSTEM_CLOCK, port=8081)
        endpoint.start()
        client = Client(GrpcService(endpoint), is_huffman=options.huffman)
        profile = cProfile.Profile() if options.profile else None
        for turn in range(options.rounds + 1):
            for calls in CALLS_OF_A_READ:
                taken = {}
                gc.collect()
                client.profile(profile if options.profile == "send" and calls == 4 else None)
                taken[f"send, {calls} of a read"] = await send(client, calls, options.messages)
                gc.collect()
                profiles = {options.profile: profile} if calls == 4 else {}
                received, acked = await receive(client, calls, options.messages, profiles)
                taken["receive of 32, a message"], taken[f"ack, {calls} of a read"] = received, acked
                client.profile(None)
                if turn:
                    best |= {name: min(seconds * 1e6, best.get(name, 1e9)) for name, seconds in taken.items()}
        await endpoint.drain()
        await endpoint.stop()
    if profile is not None:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
    return {name: round(us, 1) for name, us in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1024, help="of a load, in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--beside", type=Path, help="the folder of another checkout")
    parser.add_argument("--profile", choices=("send", "receive", "ack"))
    parser.add_argument("--huffman", action="store_true", help="texts of headers as Go's SDK writes them")
    parser.add_argument("--plain", action="store_true", help="only the figures of this checkout, for one that asks")
    options = parser.parse_args()
    run = asyncio.Runner(loop_factory=uvloop.new_event_loop).run
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as name:
        figures = {"us": run(measure(Path(name) / "store", options))}
    if options.beside is not None:
        command = [sys.executable, __file__, "--plain", "--messages", str(options.messages)]
        command += ["--rounds", str(options.rounds), *(["--huffman"] if options.huffman else [])]
        sources = sorted(options.beside.resolve().glob("packages/*/src"))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
        told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        figures["us_beside"] = json.loads(told.stdout)["us"]
    print(json.dumps({"bench": "grpc_cpu", "messages": options.messages, **figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
