"""``rmq bench timer``: a million waiting timed messages, in our broker and, in the same run, in another one.

====================  ==============================================================================================
load                  figures
====================  ==============================================================================================
sends for later       messages for whole seconds of the next hours, 256 sends in flight; per wall second until
                      all are on the wheel, and the broker's cost of sends and wheel together
due                   a steady stream that becomes due over the next seconds, while the others wait. The error is the
                      store time of the delivered copy minus the requested second
wheel again           our broker only: its timer files are deleted, and it starts on its store: the cost of putting
                      stored messages on the wheel, without sends
====================  ==============================================================================================

Memory is that of the broker's process (``VmRSS``), divided into its own (``RssAnon``) and pages of files. Growth is
from before the first message to the highest measured value. The load is a Python program on the same machine, so the
costs say more than the rates. ``bench/delay_bench.py`` measures the same for delay levels.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.commands.loaded import TIMEOUT_MS, ask, cpu_seconds, create_topic, find_broker
from bench.commands.served import serve_standalone
from rmqkit.errors import RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.record import iter_records
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest, PullMessageResponse
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.schemas.topics import KVTable
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection

__all__ = ["DUE_SECONDS", "Later", "Waiting", "measure"]

DUE_SECONDS = range(2, 11)
"""Seconds until the messages of the stream become due."""

_HOURS = 9
_QUEUES = 4
_IN_FLIGHT = 256
_AT_ONCE = 10
_OVERTIME_SECONDS = 120
_POLL_SECONDS = 0.05
_DUE_BYTES = 17

Figure = dict[str, Any]
Later = Callable[[int, float], tuple[float, str]]
"""Number of a message and time of its send in ms → its due time in ms, and its properties."""


def measure(
    *,
    name_servers: str | None,
    pid: int | None,
    pending: int,
    rate: int,
    seconds: int,
    body_bytes: int,
    tell: Callable[[str], None],
) -> list[Figure]:
    """Return all figures, of a new broker of ours and, if ``name_servers`` is given, of the first broker that these
    know. ``pid``: the process of that broker. Raises RmqError: a broker cannot be reached, refuses, or is not ready."""
    body = os.urandom(max(body_bytes, _DUE_BYTES))
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        store = Path(folder) / "store"
        with serve_standalone(store) as (name_server, own_pid):
            figures = asyncio.run(_loads("ours", Waiting(name_server, own_pid, body), pending, rate, seconds, tell))
        for name in ("timerlog", "timerwheel", "config/timercheck"):
            with suppress(FileNotFoundError):
                path = store / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with serve_standalone(store) as (name_server, own_pid):
            figures += asyncio.run(_anew(Waiting(name_server, own_pid, body), tell))
    if name_servers is not None:
        other = Waiting(name_servers.split(";")[0], pid, body)
        figures += asyncio.run(_loads("other", other, pending, rate, seconds, tell))
    return figures


async def _loads(
    broker: str, load: Waiting, pending: int, rate: int, seconds: int, tell: Callable[[str], None]
) -> list[Figure]:
    try:
        await load.connect()
        filled = {"load": "sends for later", "broker": broker, **await load.fill(pending, _in_hours, is_timed=True)}
        tell(f"{broker}: {filled}")
        due = {"load": f"due, {rate}/s", "broker": broker, **await load.become_due(rate, seconds, _in_seconds)}
        tell(f"{broker}: {due}")
        return [filled, due]
    finally:
        await load.close()


async def _anew(load: Waiting, tell: Callable[[str], None]) -> list[Figure]:
    """Measure the rebuild of the wheel. Return no figure if all messages were on the wheel before the first
    measurement.
    """
    try:
        await load.connect()
        count, cost = await load.behind(), load.cost()
        await load.until_on_wheel()
        figures = [{"load": "wheel again", "broker": "ours", **cost(count)}] if count else []
        tell(f"ours: {figures}")
        return figures
    finally:
        await load.close()


def _in_hours(number: int, now_ms: float) -> tuple[float, str]:
    return _whole_second(now_ms + (number % _HOURS + 1) * 3_600_000 + number % 3600 * 1000)


def _in_seconds(number: int, now_ms: float) -> tuple[float, str]:
    return _whole_second(now_ms + DUE_SECONDS[number % len(DUE_SECONDS)] * 1000)


def _whole_second(ms: float) -> tuple[float, str]:
    due_ms = (int(ms) // 1000 + 1) * 1000
    return due_ms, f"TIMER_DELIVER_MS\x01{due_ms}\x02"


class Waiting:
    """A broker with waiting messages, and its consumer. ``pid``: None if its cost is unknown."""

    def __init__(self, name_server: str, pid: int | None, body: bytes) -> None:
        self._name_server = name_server
        self._pid = pid
        self._body = body
        self._topic = f"BenchTimer-{os.getpid()}"
        self._client = RemotingClient()
        self._broker: Connection
        self._empty: dict[str, float] = {}
        self._highest: dict[str, float] = {}

    async def connect(self) -> None:
        """Find the broker and create the topic. Raises RmqError: it fails."""
        broker = await find_broker(self._client, self._name_server)
        self._broker = await self._client.connection(broker.broker_addrs[0])
        await create_topic(self._broker, self._topic, _QUEUES)
        self._empty = self._highest = self._memory()

    async def close(self) -> None:
        await self._client.close()

    async def fill(self, count: int, later: Later, *, is_timed: bool) -> Figure:
        """Send messages that wait. ``is_timed``: on the timer's wheel, where all of them are when this returns."""
        left, cost = iter(range(count)), self.cost()

        async def one_after_the_other() -> None:
            for number in left:
                await self._send(number, later)

        await asyncio.gather(*(one_after_the_other() for _ in range(_IN_FLIGHT)))
        if is_timed:
            await self.until_on_wheel()
        self._look()
        return {**(cost(count) if count else {}), **self._growth()}

    async def become_due(self, rate: int, seconds: int, later: Later) -> Figure:
        """Send a steady stream of messages that become due soon. Measure how late they are delivered, and consumed."""
        total, cost = rate * seconds, self.cost()
        arrivals: asyncio.Queue[tuple[float, float]] = asyncio.Queue()
        pulls = [asyncio.create_task(self._pull(queue_id, arrivals)) for queue_id in range(_QUEUES)]
        sending = asyncio.create_task(self._stream(rate, total, later))
        errors_ms: list[float] = []
        seen_ms: list[float] = []
        try:
            async with asyncio.timeout(seconds + _OVERTIME_SECONDS):
                for number in range(total):
                    error_ms, late_ms = await arrivals.get()
                    errors_ms.append(error_ms)
                    seen_ms.append(late_ms)
                    if number % rate == 0:
                        self._look()
        except TimeoutError:
            raise RmqError(f"{len(errors_ms)} of {total} messages were delivered in time") from None
        finally:
            for one in (*pulls, sending):
                one.cancel()
            await asyncio.gather(*pulls, sending, return_exceptions=True)
        figures = {f"error_{name}": value for name, value in _percentiles(errors_ms).items()}
        figures |= {f"seen_{name}": value for name, value in _percentiles(seen_ms).items()}
        return {**cost(total), **figures, **self._growth()}

    async def behind(self) -> int:
        """Return the number of stored messages that are not on the wheel yet."""
        answer = await ask(self._broker, request(RequestCode.GET_BROKER_RUNTIME_INFO))
        return int(decode_as(answer.payload, KVTable).table["timerOffsetBehind"])

    async def until_on_wheel(self) -> None:
        while await self.behind():  # noqa: ASYNC110 - only the broker knows
            await asyncio.sleep(_POLL_SECONDS)

    def cost(self) -> Callable[[int], Figure]:
        """Start measuring. Return a function that returns the cost of a number of messages."""
        cpu, started = cpu_seconds(self._pid), time.perf_counter()

        def of(count: int) -> Figure:
            seconds = time.perf_counter() - started
            figure: Figure = {"messages": count, "messages_per_second": round(count / seconds)}
            if self._pid is not None:
                cpu_us = (cpu_seconds(self._pid) - cpu) / count * 1e6
                figure |= {"broker_cpu_us": round(cpu_us, 1), "per_cpu_second": round(1e6 / cpu_us)}
            return figure

        return of

    # -- inside

    async def _send(self, number: int, later: Later) -> None:
        """Send one message with the usual properties of a producer. Its body begins with its due time."""
        now_ms = time.time_ns() / 1e6
        due_ms, properties = later(number, now_ms)
        queue_id = number % _QUEUES
        properties = f"UNIQ_KEY\x01{int(now_ms * 1000):016X}{number:016X}\x02WAIT\x01true\x02{properties}"
        header = SendMessageV2Request(
            "bench", self._topic, "TBW102", _QUEUES, queue_id, 0, int(now_ms), 0, properties=properties
        )
        body = f"{due_ms:0{_DUE_BYTES}.3f}".encode() + self._body[_DUE_BYTES:]
        await ask(self._broker, request(RequestCode.SEND_MESSAGE_V2, header, body))

    async def _stream(self, rate: int, total: int, later: Later) -> None:
        start = time.monotonic()
        for first in range(0, total, _AT_ONCE):
            await asyncio.sleep(start + first / rate - time.monotonic())
            await asyncio.gather(*(self._send(n, later) for n in range(first, min(first + _AT_ONCE, total))))

    async def _pull(self, queue_id: int, arrivals: asyncio.Queue[tuple[float, float]]) -> None:
        """Record how late, in ms, messages of a queue are stored and consumed."""
        offset, flags = 0, PullFlag.SUBSCRIPTION | PullFlag.SUSPEND
        while True:
            header = PullMessageRequest("bench", self._topic, queue_id, offset, 32, flags, 0, 15_000, 0, "*")
            found = await self._broker.call(request(RequestCode.PULL_MESSAGE, header), TIMEOUT_MS)
            now_ms = time.time_ns() / 1e6
            offset = decode_header(found, PullMessageResponse).next_begin_offset
            if found.code == ResponseCode.SUCCESS:
                for record in iter_records(found.payload):
                    due_ms = float(record.body[:_DUE_BYTES])
                    arrivals.put_nowait((record.store_timestamp - due_ms, now_ms - due_ms))

    def _memory(self) -> dict[str, float]:
        """Return resident memory of the broker's process in MB: all of it, its own, pages of files."""
        if self._pid is None:
            return {}
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        fields = dict(line.partition(":")[::2] for line in lines)
        return {name: int(fields[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon", "RssFile")}

    def _look(self) -> None:
        self._highest = {name: max(now, self._highest[name]) for name, now in self._memory().items()}

    def _growth(self) -> Figure:
        names = {"VmRSS": "rss_growth_mb", "RssAnon": "anonymous_growth_mb", "RssFile": "file_pages_growth_mb"}
        return {names[name]: round(high - self._empty[name], 1) for name, high in self._highest.items()}


def _percentiles(values_ms: list[float]) -> dict[str, float]:
    ordered = sorted(values_ms)
    shares = (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 1) for name, share in shares}
