"""``rmq bench wire``: the cost of encoding and decoding a command, and of a request over real sockets.

The server of the socket cases is a separate process (this module as a program). The figure is its CPU time, so that a
slow or busy client changes nothing. The budgets are from the design's speed table.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import timeit
from collections.abc import Callable
from typing import Any

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    FrameSplitter,
    decode_command,
    decode_header,
    each_frame,
    encode_command,
    reply,
    request,
)
from rmqkit.protocol.schemas.send import SendMessageResponse, SendMessageV2Request
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer

__all__ = ["measure"]

_CHUNK_FRAMES = 64
_REPEATS = 5
_ECHO = 1
_BODY = bytes(128)

_PROPERTIES = "UNIQ_KEY\x017F00000100002A139A5A0C7D8A7B0001\x02WAIT\x01true\x02TAGS\x01TagA\x02KEYS\x01order-1\x02"
_FACTS = 4, 3, 0, 1_700_000_000_000, 0, _PROPERTIES, 0, False, None, False, "broker-a"
_SEND = SendMessageV2Request("producer-group", "TopicTest", "TBW102", *_FACTS)


def measure(*, connections: int, requests: int) -> list[dict[str, Any]]:
    """Return all figures, each with its budget.

    Args:
        connections: number of idle connections to hold.
        requests: number of requests of the socket cases.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", __name__], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None, "stdout is piped"
        address = server.stdout.readline().strip()
        return [*_codec_figures(), *asyncio.run(_socket_figures(address, server.pid, connections, requests))]
    finally:
        server.communicate()  # the server exits when its input is closed


def _codec_figures() -> list[dict[str, Any]]:
    command = request(RequestCode.SEND_MESSAGE_V2, _SEND, bytes(1024))
    answer = SendMessageResponse("7F00000100002A9F0000000000000000", 3, 1000, "7F00000100002A139A5A0C7D8A7B0001")
    response = reply(command, header=answer, fields={"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"})
    return [
        _figure("decode SEND_MESSAGE_V2, JSON header", _decode_us(command, JSON), "us", 4),
        _figure("decode SEND_MESSAGE_V2, binary header", _decode_us(command, ROCKETMQ), "us", 8),
        _figure("encode its reply", _per_call_us(lambda: encode_command(response), 1), "us", 1.5),
    ]


def _decode_us(command: Command, serialize_type: int) -> float:
    """Return the time to split a chunk of frames and decode each into its typed header, per frame."""
    chunk = b"".join(encode_command(command, serialize_type)) * _CHUNK_FRAMES
    splitter = FrameSplitter()

    def decode() -> None:
        for frame in each_frame(splitter.feed(chunk)):
            decode_header(decode_command(frame), SendMessageV2Request)

    return _per_call_us(decode, _CHUNK_FRAMES)


def _per_call_us(function: Callable[[], object], calls: int) -> float:
    number = max(1, 20_000 // calls)
    return min(timeit.repeat(function, number=number, repeat=_REPEATS)) / number / calls * 1e6


async def _socket_figures(address: str, pid: int, connections: int, requests: int) -> list[dict[str, Any]]:
    pipelined_us = await _echo_us(address, pid, requests, in_flight=256)
    alone_us = await _echo_us(address, pid, max(1, requests // 4), in_flight=1)
    idle_kib = await _idle_kib(address, pid, connections)
    return [
        _figure("echo, server CPU, 256 in flight", pipelined_us, "us", 12),
        _figure("echo, server CPU, one at a time", alone_us, "us", 40),
        _figure(f"memory per idle connection, {connections}", idle_kib, "KiB", 32),
    ]


async def _echo_us(address: str, pid: int, requests: int, *, in_flight: int) -> float:
    """Return the server CPU time per echo request."""
    client = RemotingClient()
    connection = await client.connection(address)
    numbers = iter(range(requests))

    async def one_caller() -> None:
        for _ in numbers:
            await connection.call(request(_ECHO, body=_BODY), 30_000)

    await connection.call(request(_ECHO), 30_000)
    before_ns = _cpu_ns(pid)
    await asyncio.gather(*(one_caller() for _ in range(in_flight)))
    spent_ns = _cpu_ns(pid) - before_ns
    await client.close()
    return spent_ns / requests / 1000


async def _idle_kib(address: str, pid: int, count: int) -> float:
    """Return the growth of the server's memory per connection that sent one request and is idle."""
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    before_bytes = _resident_bytes(pid)
    held: list[Connection] = []
    for _ in range(count):
        _, connection = await loop.create_connection(lambda: Connection(Router()), host, int(port))
        await connection.call(request(_ECHO), 30_000)
        held.append(connection)
    grown_bytes = _resident_bytes(pid) - before_bytes
    for connection in held:
        connection.abort()
    return grown_bytes / max(1, count) / 1024


def _cpu_ns(pid: int) -> int:
    with open(f"/proc/{pid}/schedstat") as file:
        return int(file.read().split()[0])


def _resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _figure(what: str, value: float, unit: str, budget: float) -> dict[str, Any]:
    return {"figure": what, "value": round(value, 2), "unit": unit, "budget": budget}


def allow_connections() -> None:
    """Raise the limit of open files to the highest value that the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve() -> None:
    """Run an echo server on a free port, until standard input ends."""
    dispatch = Router()
    dispatch.register(_ECHO, lambda connection, command: reply(command, body=command.body))
    server = RemotingServer(dispatch)
    print(f"127.0.0.1:{await server.listen('127.0.0.1', 0)}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    import uvloop

    allow_connections()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve())
