"""``rmq bench broker``: sends and pulls over sockets, and their cost in the broker's process.

The load is raw requests from one Python process, so rates show the limit of that process. The important figure is the
broker's CPU time per message, of a broker that the command starts or of the process in ``--pid``, which may be
Apache's: run the command once for each. (A checkout's ``make bench T=broker`` puts both under the same Java load.)
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import ExitStack
from typing import Any

from bench.commands.loaded import TIMEOUT_MS, cpu_seconds, create_topic, expect, find_broker
from bench.commands.served import serve_standalone
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection

__all__ = ["measure"]

_QUEUES = 4
_BATCH = 32
_PULL = 32
_LATENCY_MESSAGES_MAX = 5000
_LATENCY_PER_SECOND = 1000
_HELD = 10_000
_GROUPS = 1_000
_SETTLING_SECONDS = 2.0
_PROPERTIES = "TAGS\x01TagA\x02WAIT\x01true\x02"
_IN_FLIGHT = {1: 10, 8: 2, 64: 1, 256: 1}
"""Number of concurrent sends → divisor of the number of messages."""

Figure = dict[str, Any]


def measure(*, name_servers: str | None, pid: int | None, messages: int, body_bytes: int) -> list[Figure]:
    """Return all figures, of the first broker that the name servers know or of a new one.
    Raises RmqError: the broker cannot be reached, refuses, or does not become ready."""
    with ExitStack() as stack:
        if name_servers is None:
            name_servers, pid = stack.enter_context(serve_standalone())
        return asyncio.run(
            _Load(name_servers.split(";")[0], pid, messages, random.Random(1).randbytes(body_bytes)).run()
        )


class _Load:
    def __init__(self, name_server: str, pid: int | None, messages: int, body: bytes) -> None:
        self._name_server = name_server
        self._pid = pid
        self._messages = messages
        self._body = body
        self._topic = f"BenchBroker-{os.getpid()}"
        self._client = RemotingClient()
        self._broker: Connection

    async def run(self) -> list[Figure]:
        try:
            await self._connect()
            count, crowd = self._messages, f"{_HELD:,} pulls of {_GROUPS:,} groups held"
            figures = [
                await self._timed(f"sends, {in_flight} in flight", self._sends(count // part, in_flight))
                for in_flight, part in _IN_FLIGHT.items()
            ]
            figures.append(
                await self._timed(f"sends in batches of {_BATCH}, 8 in flight", self._batches(count // _BATCH, 8))
            )
            figures.append(await self._timed(f"pulls of {_PULL} from the backlog", self._backlog()))
            figures.append(await self._latency())
            figures.append(await self._timed("sends, 256 in flight, nobody else there", self._sends(count, 256)))
            held = await self._crowd()
            await asyncio.sleep(_SETTLING_SECONDS)  # the broker stores its new groups
            figures.append(await self._timed(f"sends, 256 in flight, {crowd}", self._sends(count, 256)))
            for pull in held:
                pull.cancel()
            return figures
        finally:
            await self._client.close()

    async def _connect(self) -> None:
        """Find a broker and create the topic in it."""
        broker = await find_broker(self._client, self._name_server)
        self._broker = await self._client.connection(broker.broker_addrs[0])
        await create_topic(self._broker, self._topic, _QUEUES)

    def _send(self, queue_id: int, body: bytes, *, batch: bool = False, topic: str = "") -> asyncio.Future[Command]:
        facts = queue_id, 0, time.time_ns() // 1_000_000, 0, _PROPERTIES, 0
        header = SendMessageV2Request("bench", topic or self._topic, "TBW102", 4, *facts, batch=batch)
        code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
        return self._broker.call(request(code, header, body), TIMEOUT_MS)

    def _pull(self, topic: str, queue_id: int, offset: int, group: str = "bench") -> asyncio.Future[Command]:
        flags = PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        header = PullMessageRequest(group, topic, queue_id, offset, _PULL, flags, 0, 4 * TIMEOUT_MS, 0, "*")
        return self._broker.call(request(RequestCode.PULL_MESSAGE, header), 8 * TIMEOUT_MS)

    async def _sends(self, count: int, in_flight: int) -> int:
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for number in left:
                expect(await self._send(number % _QUEUES, self._body))

        await _all(one_after_the_other() for _ in range(in_flight))
        return count

    async def _batches(self, count: int, in_flight: int) -> int:
        body, left = encode_batch([BatchEntry(self._body, b"", 0)] * _BATCH), iter(range(count))

        async def one_after_the_other() -> None:
            for number in left:
                expect(await self._send(number % _QUEUES, body, batch=True))

        await _all(one_after_the_other() for _ in range(in_flight))
        return count * _BATCH

    async def _backlog(self) -> int:
        """Read all messages sent so far."""

        async def read(queue_id: int) -> int:
            offset, end = 0, 1
            while offset < end:
                numbers = decode_header(expect(await self._pull(self._topic, queue_id, offset)), PullMessageResponse)
                offset, end = numbers.next_begin_offset, numbers.max_offset
            return offset

        return sum(await _all(map(read, range(_QUEUES))))

    async def _latency(self) -> Figure:
        """Return milliseconds from before a send until the waiting pull's answer is read."""
        topic, took_ms = f"{self._topic}-latency", list[float]()
        count = min(_LATENCY_MESSAGES_MAX, self._messages)
        await create_topic(self._broker, topic, 1)
        expect(await self._send(0, b"0", topic=topic))

        async def receive() -> None:
            offset = 1
            while len(took_ms) < count:
                answer = expect(await self._pull(topic, 0, offset))
                now_ns = time.perf_counter_ns()
                took_ms.extend((now_ns - int(message.body)) / 1e6 for message in read_messages(answer.payload))
                offset = decode_header(answer, PullMessageResponse).next_begin_offset

        async def send() -> None:
            started, sends = time.perf_counter(), []
            for number in range(count):
                await asyncio.sleep(max(0.0, started + number / _LATENCY_PER_SECOND - time.perf_counter()))
                sends.append(self._send(0, b"%d" % time.perf_counter_ns(), topic=topic))
            for answer in sends:
                expect(await answer)

        async def both() -> int:
            await asyncio.gather(receive(), send())
            return count

        figure = await self._timed(f"sends that end a held pull, {_LATENCY_PER_SECOND}/s", both())
        cuts = statistics.quantiles(took_ms, n=100)
        return figure | {"p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)}

    async def _crowd(self) -> list[asyncio.Future[Command]]:
        """Start pulls of many groups that wait on other queues."""
        topics = [f"{self._topic}-other{number}" for number in range(_HELD // _GROUPS)]
        for topic in topics:
            await create_topic(self._broker, topic, _GROUPS)
        held = [self._pull(t, queue_id, 0, f"{self._topic}-{queue_id}") for queue_id in range(_GROUPS) for t in topics]
        expect(await self._send(0, self._body))  # its answer comes after the answers to pulls that do not wait
        if any(pull.done() for pull in held):
            raise RmqError(f"{sum(pull.done() for pull in held)} of {_HELD} pulls were not held")
        return held

    async def _timed(self, what: str, work: Coroutine[Any, Any, int]) -> Figure:
        cpu, started = cpu_seconds(self._pid), time.perf_counter()
        count = await work
        seconds, cpu = time.perf_counter() - started, cpu_seconds(self._pid) - cpu
        cost = {"broker_cpu_us": round(cpu / count * 1e6, 1)} if self._pid is not None else {}
        return {"load": what, "messages": count, "messages_per_second": round(count / seconds), **cost}


async def _all(works: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*works)
