"""``rmq bench pop``: the cost of pops and acks in a broker's process, of ours and, in the same run, of any other
broker.

All brokers have the same messages. In every round the same consumers load one broker after the other, each with its own
connection and as a new group, so that it gets all messages. The figure is the CPU time of the broker's process per
popped and acknowledged message, the median of the rounds. The first rounds only warm up a JVM. The invisible time is
longer than the run, so work after it is not counted (if all messages are acknowledged, our broker does nothing then,
and Apache's reads check points and acks again).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import Struct

from bench.commands.loaded import TIMEOUT_MS, ask, cpu_seconds, create_topic, expect, find_broker
from bench.commands.served import serve_standalone
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, request
from rmqkit.protocol.ids import (
    PopHandle,
    PopQueue,
    decode_message_offsets,
    decode_start_offsets,
    encode_acked,
    encode_pop_handle,
)
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.pop import AckMessageRequest, BatchAck, BatchAckBody, PopMessageRequest, PopMessageResponse
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection

__all__ = ["measure"]

_QUEUES = 8
_CONSUMERS = 4
_BATCH = 32
_INVISIBLE_MS = 3_600_000
_EMPTY_MAX = 10_000
_WARM_UPS = 2
_COST = "broker_cpu_us"

Figure = dict[str, Any]
Tell = Callable[[str], None]


class Load(Struct, frozen=True):
    """The number of messages of a pop, the kind of acks, and the share of all messages."""

    name: str
    count: int
    is_together: bool
    share: float = 1.0


_LOADS = (
    Load("pops of 32, an ack for each message", _BATCH, is_together=False),
    Load("pops of 32, an ack for each pop", _BATCH, is_together=True),
    Load("pops of 1, an ack for each", 1, is_together=False, share=0.2),
)
_LATENCY = "pops of 32 from a warm queue, one at a time"


def measure(
    *, name_servers: str | None, pid: int | None, messages: int, body_bytes: int, rounds: int, tell: Tell
) -> list[Figure]:
    """Return all figures, of a new broker of ours and, if ``name_servers`` is given, of the first broker that these
    know. ``pid``: the process of that broker. Raises RmqError: a broker cannot be reached, refuses, or is not ready."""
    with ExitStack() as stack:
        places: dict[str, tuple[str, int | None]] = {"ours": stack.enter_context(serve_standalone())}
        if name_servers is not None:
            places["other"] = name_servers.split(";")[0], pid
        body = random.Random(1).randbytes(body_bytes)
        return asyncio.run(_run(places, messages, body, rounds, tell))


async def _run(
    places: dict[str, tuple[str, int | None]], messages: int, body: bytes, rounds: int, tell: Tell
) -> list[Figure]:
    peers = {name: _Peer(*place, messages) for name, place in places.items()}
    taken: dict[str, dict[str, list[Figure]]] = {load.name: {name: [] for name in peers} for load in _LOADS}
    latencies: dict[str, list[float]] = {name: [] for name in peers}
    try:
        for peer in peers.values():
            await peer.prepare(body)
        for turn in range(-_WARM_UPS, rounds):
            for load in _LOADS:
                for name, peer in peers.items():
                    figure = await peer.take(load)
                    tell(f"round {turn}, {load.name}, {name}: {figure}")
                    if turn >= 0:
                        taken[load.name][name].append(figure)
            for name, peer in peers.items():
                took_ms = await peer.latencies()
                if turn >= 0:
                    latencies[name] += took_ms
    finally:
        for peer in peers.values():
            await peer.close()
    return [row for load, by_peer in taken.items() for row in _medians(load, by_peer)] + _percentiles(latencies)


def _medians(load: str, by_peer: dict[str, list[Figure]]) -> list[Figure]:
    """Return a row for each broker; that of ours has the ratio of its messages per CPU second to the other's."""
    rows: list[Figure] = [
        {
            "load": load,
            "broker": peer,
            **{what: round(statistics.median(one[what] for one in rounds), 1) for what in rounds[0]},
        }
        for peer, rounds in by_peer.items()
    ]
    if len(rows) > 1 and _COST in rows[1]:
        rows[0]["per_cpu_second_to_other"] = round(rows[1][_COST] / rows[0][_COST], 2)
    return rows


def _percentiles(latencies: dict[str, list[float]]) -> list[Figure]:
    rows: list[Figure] = []
    for peer, took_ms in latencies.items():
        cuts = statistics.quantiles(took_ms, n=100)
        rows.append({"load": _LATENCY, "broker": peer, "p50_ms": round(cuts[49], 2), "p99_ms": round(cuts[98], 2)})
    return rows


class _Popped(Struct):
    """Messages of one queue that arrived together, with their handles for acks."""

    queue: PopQueue
    offsets: list[int]
    handle: PopHandle


class _Peer:
    """A broker under load."""

    def __init__(self, name_server: str, pid: int | None, messages: int) -> None:
        self._name_server = name_server
        self._pid = pid
        self._messages = messages
        self._topic = f"BenchPop-{os.getpid()}"
        self._groups = 0
        self._broker_name = ""
        self._clients = [RemotingClient() for _ in range(_CONSUMERS)]
        self._connections: list[Connection] = []

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def prepare(self, body: bytes) -> None:
        """Find a broker, create the topic in it and fill it."""
        broker = await find_broker(self._clients[0], self._name_server)
        self._broker_name = broker.broker_name
        self._connections = [await client.connection(broker.broker_addrs[0]) for client in self._clients]
        await create_topic(self._connections[0], self._topic, _QUEUES)
        batch = encode_batch([BatchEntry(body, b"", 0)] * _BATCH)
        for number in range(self._messages // _BATCH):
            facts = number % _QUEUES, 0, time.time_ns() // 1_000_000, 0, "WAIT\x01true\x02", 0
            sent = SendMessageV2Request("bench", self._topic, "TBW102", 4, *facts, batch=True)
            await self._ask(0, request(RequestCode.SEND_BATCH_MESSAGE, sent, batch))

    async def take(self, load: Load) -> Figure:
        """Pop and acknowledge messages with a new group."""
        group, left = self._new_group(), int(self._messages * load.share) // _BATCH * _BATCH
        count, empty = left, 0

        async def consume(consumer: int) -> None:
            nonlocal left, empty
            while left > 0:
                popped = await self._pop(consumer, group, load.count)
                left -= sum(len(one.offsets) for one in popped)
                empty += not popped
                if empty > _EMPTY_MAX:
                    raise RmqError(f"{self._broker_name} gave nothing {empty} times, {left} messages before the end")
                await self._ack(consumer, group, popped, is_together=load.is_together)

        cpu, started = cpu_seconds(self._pid), time.perf_counter()
        await asyncio.gather(*map(consume, range(_CONSUMERS)))
        seconds, cpu = time.perf_counter() - started, cpu_seconds(self._pid) - cpu
        cost = {} if self._pid is None else {_COST: round(cpu / (count - left) * 1e6, 1)}
        return cost | {"messages_per_second": round((count - left) / seconds)}

    async def latencies(self) -> list[float]:
        """Return the milliseconds of each pop, for all messages."""
        group, took_ms, left = self._new_group(), list[float](), self._messages // _BATCH * _BATCH
        while left > 0:
            started = time.perf_counter()
            popped = await self._pop(0, group, _BATCH)
            took_ms.append((time.perf_counter() - started) * 1000)
            left -= sum(len(one.offsets) for one in popped)
            await self._ack(0, group, popped, is_together=True)
        return took_ms

    # -- inside

    def _new_group(self) -> str:
        self._groups += 1
        return f"{self._topic}-{self._groups}"

    async def _pop(self, consumer: int, group: str, count: int) -> list[_Popped]:
        header = PopMessageRequest(
            consumer_group=group,
            topic=self._topic,
            queue_id=-1,
            max_msg_nums=count,
            invisible_time=_INVISIBLE_MS,
            poll_time=0,
            born_time=time.time_ns() // 1_000_000,
            init_mode=0,
            exp_type="TAG",
            exp="*",
        )
        command = request(RequestCode.POP_MESSAGE, header)
        answer = await self._connections[consumer].call(command, TIMEOUT_MS)
        if answer.code in (ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND):
            return []  # with Apache's broker: another consumer has locked the queues
        told = decode_header(expect(answer), PopMessageResponse)
        starts = decode_start_offsets(told.start_offset_info or "")
        return [
            _Popped(queue, offsets, self._handle(told, queue, starts[queue]))
            for queue, offsets in decode_message_offsets(told.msg_offset_info or "").items()
        ]

    def _handle(self, told: PopMessageResponse, queue: PopQueue, start_offset: int) -> PopHandle:
        return PopHandle(
            check_point_offset=start_offset,
            pop_time=told.pop_time,
            invisible_time=told.invisible_time,
            revive_queue_id=told.revive_qid,
            retry=queue.retry,
            broker_name=self._broker_name,
            queue_id=queue.queue_id,
        )

    async def _ack(self, consumer: int, group: str, popped: list[_Popped], *, is_together: bool) -> None:
        commands = [self._ack_of(group, one, offset) for one in popped for offset in one.offsets]
        if is_together and popped:
            body = BatchAckBody(broker_name=self._broker_name, acks=[self._batch_ack_of(group, one) for one in popped])
            commands = [Command(RequestCode.BATCH_ACK_MESSAGE, body=msgspec.json.encode(body))]
        await asyncio.gather(*(self._ask(consumer, command) for command in commands))

    def _ack_of(self, group: str, popped: _Popped, offset: int) -> Command:
        header = AckMessageRequest(
            consumer_group=group,
            topic=self._topic,
            queue_id=popped.queue.queue_id,
            extra_info=f"{encode_pop_handle(popped.handle)} {offset}",
            offset=offset,
        )
        return request(RequestCode.ACK_MESSAGE, header)

    def _batch_ack_of(self, group: str, popped: _Popped) -> BatchAck:
        handle = popped.handle
        return BatchAck(
            group=group,
            topic=self._topic,
            retry=popped.queue.retry,
            start_offset=handle.check_point_offset,
            queue_id=popped.queue.queue_id,
            revive_queue_id=handle.revive_queue_id,
            pop_time=handle.pop_time,
            invisible_time=handle.invisible_time,
            acked=encode_acked(handle.check_point_offset, popped.offsets),
        )

    async def _ask(self, consumer: int, command: Command) -> Command:
        return await ask(self._connections[consumer], command)
