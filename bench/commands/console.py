"""``rmq bench console``: the speed and the cost of the web console with a real broker with many topics and groups.

==================  ==================================================================================================
row                 what is measured
==================  ==================================================================================================
first page          CPU seconds of ``rmq standalone --console`` until its overview shows the broker
lists               ms of each list page at the server (``Server-Timing``), the median of many; no request to a broker
round               CPU seconds of one round of the watcher: the first, which requests everything, and the next ones
turn                the longest CPU time of one iteration of the event loop in a round, in ms
search              ms of a search without a match in one large topic, continued until its end
open pages          share of a core for a number of open pages that refresh themselves
sends               messages per second that the broker stores, in turn with a running and a stopped console
memory              MiB resident of the console's process, at the end
==================  ==================================================================================================

Groups have offsets and one client each, so that the console can show lags, ages and members. To measure sends without a
console its process is stopped (SIGSTOP), so that nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from bench.commands.loaded import TIMEOUT_MS, cpu_seconds, create_topic, expect
from bench.commands.served import serve_standalone
from rmqkit.admin import Admin
from rmqkit.cli.servers.serve import settle
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.console.watch.history import History
from rmqkit.console.watch.watcher import Watcher
from rmqkit.errors import RmqError
from rmqkit.filter import subscription
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, MessageQueue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import RemotingClient

__all__ = ["measure"]

_QUEUES, _TOPICS_OF_A_GROUP = 4, 5
_IN_FLIGHT = 64
_BATCH = 250
_BIG = "BenchSearched"
_SEARCHES = 4
_CLIENTS_MAX = 200
_ROUNDS = 3
_STARTS = 3
_FIRST_S, _HELD_MS = 2.0, 50
_SEND_SECONDS = 3.0
_LISTS = ("", "topics", "topics?sort=lag", "groups", "groups?sort=age", "brokers", "ha", "clients")
_LIVE = ("", "topics", "groups", "brokers", "ha", "clients", "topics/BenchTopic-00000", "groups/bench-group-0000")
_MEMORY_MIB, _LIST_MS, _ROUND_S, _OPEN_PERCENT, _SENDS_PERCENT, _SEARCH_MS = 120, 200, 0.5, 10, 2, 3_500
_LIST_MS_OF_MANY = 300
"""The limit with more than 1,000 topics."""

Figure = dict[str, Any]


def measure(
    *,
    topics: int,
    groups: int,
    messages: int,
    asks: int,
    pages: int,
    seconds: float,
    pairs: int,
    tell: Callable[[str], object],
) -> list[Figure]:
    """Return all figures, of a new broker and console. Raises RmqError: one of them does not become ready."""
    tell("the first page")
    first = min((_first_page() for _ in range(_STARTS)), key=lambda figure: float(figure["measured"]))
    with serve_standalone() as (name_servers, broker):
        load = _Load(name_servers, broker, topics, groups, messages, tell)
        return [first, *asyncio.run(load.run(asks=asks, pages=pages, seconds=seconds, pairs=pairs))]


@contextmanager
def _serve_console(name_servers: str) -> Iterator[tuple[str, int]]:
    """Run a console for a cluster. Yield its address and process id. Raises RmqError: it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        command = [sys.executable, "-m", "rmqkit", "console", "-n", name_servers, "--port", "0"]
        command += ["--audit", str(Path(folder) / "audit.jsonl"), "--state", str(Path(folder) / "state")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "stdout is piped"
            try:
                line = process.stdout.readline()
                if not line.startswith("ready console="):
                    raise RmqError(f"the console did not become ready, it said {line!r}")
                yield line.split("http://")[1].strip().rstrip("/"), process.pid
            finally:
                process.send_signal(signal.SIGCONT)
                process.terminate()


def _first_page() -> Figure:
    """Measure from the start of both processes to the overview. Raises RmqError: they do not become ready, or the page
    is empty.
    """
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        command = [sys.executable, "-m", "rmqkit", "standalone", "--host", "127.0.0.1", "--port", "0"]
        command += ["--namesrv-port", "0", "--store", str(Path(folder) / "store"), "--console", "--console-port", "0"]
        own = {**os.environ, "XDG_STATE_HOME": folder, "RMQCONF_grpcServerPort": "-1"}
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own) as process:
            try:
                assert process.stdout is not None, "stdout is piped"
                line = next((line for line in process.stdout if "console=" in line), "")
                if not line:
                    raise RmqError("rmq standalone --console ended before its console was ready")
                console = line.split("http://")[1].strip().rstrip("/")
                ms, text = _get(console, "/local/")
                while "/local/brokers/" not in text and time.perf_counter() - began < TIMEOUT_MS / 1000:
                    time.sleep(0.01)
                    ms, text = _get(console, "/local/")
                passed_s = round(time.perf_counter() - began, 2)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                cpu_s = [round(cpu_seconds(pid), 2) for pid in (process.pid, *map(int, children))]
            finally:
                process.terminate()
    more = {"passed_s": passed_s, "page_ms": round(ms, 1), "broker_s": cpu_s[0], "console_s": round(sum(cpu_s[1:]), 2)}
    return _figure("start of standalone to the first overview", round(sum(cpu_s), 2), "s of CPU", _FIRST_S, **more)


class _Load:
    def __init__(
        self, name_servers: str, broker: int, topics: int, groups: int, messages: int, tell: Callable[[str], object]
    ) -> None:
        self._name_servers, self._broker = name_servers, broker
        self._topics = [f"BenchTopic-{number:05}" for number in range(topics)]
        self._groups = [f"bench-group-{number:04}" for number in range(groups)]
        self._messages = messages
        self._tell = tell
        self._client = RemotingClient()
        self._clients: list[RemotingClient] = []

    async def run(self, *, asks: int, pages: int, seconds: float, pairs: int) -> list[Figure]:
        async with Admin(self._name_servers, timeout_ms=TIMEOUT_MS) as admin, contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._close)
            (self._address,) = (await admin.calls.masters()).values()
            (self._name,) = await admin.calls.masters()
            await self._fill(admin)
            await stack.enter_async_context(_again(self._beat, 20.0))
            figures = await self._rounds()
            with _serve_console(self._name_servers) as (console, process):
                await self._settled(console)
                figures += [await asyncio.to_thread(self._list, console, page, asks) for page in _LISTS]
                figures += await asyncio.to_thread(self._search, console)
                figures.append(await self._open(console, process, pages, seconds))
                figures.append(await self._sends(console, process, pairs, seconds))
                figures.append(_figure("memory of the console's process", _mib(process), "MiB", _MEMORY_MIB))
        return figures

    async def _close(self) -> None:
        await asyncio.gather(self._client.close(), *(one.close() for one in self._clients))

    # -- the cluster

    async def _fill(self, admin: Admin) -> None:
        self._tell(f"making {len(self._topics):,} topics, {len(self._groups):,} groups, {self._messages:,} messages")
        broker = await self._client.connection(self._address)
        await _each(self._topics, lambda topic: create_topic(broker, topic, _QUEUES))
        body = b"%-100d" % 0
        await _each(self._topics, lambda topic: self._send(topic, 0, body))
        await _each(self._groups, self._make_group)
        places = [
            (group, MessageQueue(topic, self._name, queue))
            for number, group in enumerate(self._groups)
            for topic in self._read_by(number)
            for queue in range(_QUEUES)
        ]
        await _each(places, lambda one: admin.calls.commit_offset(self._address, one[0], one[1], 0))
        await create_topic(broker, _BIG, _QUEUES)
        batch = encode_batch([BatchEntry(body, b"", 0)] * _BATCH)
        await _each(
            range(-(-self._messages // _BATCH)), lambda number: self._send(_BIG, number % _QUEUES, batch, batch=True)
        )

    def _read_by(self, group: int) -> list[str]:
        return [self._topics[(group * _TOPICS_OF_A_GROUP + n) % len(self._topics)] for n in range(_TOPICS_OF_A_GROUP)]

    async def _make_group(self, group: str) -> None:
        body = msgspec.json.encode(SubscriptionGroupConfig(group_name=group))
        command = request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
        expect(await self._client.call(self._address, command, TIMEOUT_MS))

    async def _send(self, topic: str, queue: int, body: bytes, *, batch: bool = False) -> None:
        now_ms = time.time_ns() // 1_000_000
        header = SendMessageV2Request("bench", topic, "TBW102", 4, queue, 0, now_ms, 0, "", 0, batch=batch)
        code = RequestCode.SEND_BATCH_MESSAGE if batch else RequestCode.SEND_MESSAGE_V2
        expect(await self._client.call(self._address, request(code, header, body), TIMEOUT_MS))

    async def _beat(self) -> None:
        """Send heartbeats of one client of each group, each over its own connection."""
        while len(self._clients) < min(len(self._groups), _CLIENTS_MAX):
            self._clients.append(RemotingClient())
        for number, client in enumerate(self._clients):
            own = [subscription(topic, "*") for topic in self._read_by(number)]
            consumer = ConsumerData(group_name=self._groups[number], subscription_data_set=own)
            data = HeartbeatData(clientID=f"10.0.0.1@{number}", consumerDataSet=[consumer])
            await client.call(
                self._address, request(RequestCode.HEART_BEAT, body=msgspec.json.encode(data)), TIMEOUT_MS
            )

    # -- figures

    async def _rounds(self) -> list[Figure]:
        """Measure the watcher's rounds in this process by their CPU time."""
        self._tell("rounds of the watcher")
        settle()  # as in the console's process
        async with Admin(self._name_servers, timeout_ms=3_000) as admin:
            watcher, cpu_s, held_s = Watcher(admin), [], [0.0]
            watcher.followers.append(History(None, SYSTEM_CLOCK).follow)
            for _ in range(1 + _ROUNDS):
                watcher.look(topics=self._topics[:100], groups=self._groups[:100])
                began = time.process_time()
                await watcher.round()
                cpu_s.append(round(time.process_time() - began, 3))
            # A separate watcher, because measuring each loop iteration costs time too.
            later = Watcher(admin)
            later.followers.append(History(None, SYSTEM_CLOCK).follow)
            turns = asyncio.create_task(_turns(held_s))
            await later.round()
            turns.cancel()
            snapshot = watcher.snapshot
        known = {"topics": len(snapshot.topics), "groups": len(snapshot.groups), "lags": len(snapshot.lags)}
        if known["lags"] < len(self._groups) * min(_TOPICS_OF_A_GROUP, len(self._topics)):
            raise RmqError(f"the snapshot knows {known}: not every group has its lags")
        first, *next_ones = cpu_s
        return [
            _figure("first round of the watcher", first, "s of CPU", _ROUND_S, **known),
            _figure("the next rounds, the longest", max(next_ones), "s of CPU", _ROUND_S),
            _figure("the longest turn of the event loop", round(1000 * max(held_s), 1), "ms of CPU", _HELD_MS),
        ]

    async def _settled(self, console: str) -> None:
        """Wait until the console has a snapshot of everything."""
        async with asyncio.timeout(60):
            while True:
                found = await asyncio.to_thread(_get, console, "/local/groups?format=json")
                if json.loads(found[1])["groups"]["total"] >= len(self._groups):
                    return
                await asyncio.sleep(0.5)

    def _list(self, console: str, page: str, asks: int) -> Figure:
        connection = http.client.HTTPConnection(console, timeout=60)
        before = _requests(console)
        ms = sorted(_get(console, f"/local/{page}", connection)[0] for _ in range(asks))
        asked = _requests(console) - before
        connection.close()
        budget = _LIST_MS if len(self._topics) <= 1_000 else _LIST_MS_OF_MANY
        # The watcher continues meanwhile. Requests beyond those of its rounds would come from the pages.
        more = {"ms_max": round(ms[-1], 1), "requests_of_the_watcher": asked}
        return _figure(f"list /{page}", round(statistics.median(ms), 1), "ms", budget, **more)

    def _search(self, console: str) -> list[Figure]:
        self._tell("searches without a match")
        figures, cursor, left = [], "", -1
        for number in range(_SEARCHES):
            path = f"/local/topics/{_BIG}/messages?tags=none&format=json" + (
                f"&cursor={quote(cursor)}" if cursor else ""
            )
            ms, text = _get(console, path)
            found = json.loads(text)
            if number and found["total"] != left:
                raise RmqError(f"the search continues with {found['total']:,} messages and not with {left:,}")
            cursor, left = found["cursor"], found["total"] - found["examined"]
            more = {"examined": found["examined"], "left": left, "stopped": found["stopped"]}
            figures.append(_figure(f"search {number + 1} without a match", round(ms), "ms", _SEARCH_MS, **more))
            if not cursor:
                break
        return figures

    async def _open(self, console: str, process: int, pages: int, seconds: float) -> Figure:
        """Measure open pages, the same number of each kind, each with a stream of refreshes."""
        self._tell(f"{pages} open pages, {seconds:g} s")
        streams = [asyncio.create_task(_follow(console, f"/local/{_LIVE[n % len(_LIVE)]}")) for n in range(pages)]
        try:
            await asyncio.sleep(min(3.0, seconds))  # the first renderings belong to the page loads
            began, cpu_s = time.perf_counter(), cpu_seconds(process)
            await asyncio.sleep(seconds)
            share = (cpu_seconds(process) - cpu_s) / (time.perf_counter() - began)
            for one in streams:
                if one.done():
                    one.result()  # raises the error of the stream, or:
                    raise RmqError(f"{sum(one.done() for one in streams)} of {pages} streams ended")
        finally:
            for one in streams:
                one.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        return _figure(f"{pages} open pages", round(100 * share, 1), "% of a core", _OPEN_PERCENT)

    async def _sends(self, console: str, process: int, pairs: int, seconds: float) -> Figure:
        """Measure sends in turn with a console that has an open page, and without a console."""
        self._tell(f"sends with and without a console, {pairs} times {2 * _SEND_SECONDS:g} s")
        watching = asyncio.create_task(_follow(console, "/local/"))
        rates: dict[bool, list[float]] = {True: [], False: []}
        costs: dict[bool, list[float]] = {True: [], False: []}
        await self._send_for(min(1.0, seconds))
        for number in range(2 * pairs):
            is_running = number % 4 in (0, 3)  # with, without, without, with: a drift affects both alike
            os.kill(process, signal.SIGCONT if is_running else signal.SIGSTOP)
            cpu_s, began = cpu_seconds(self._broker), time.perf_counter()
            sent = await self._send_for(min(seconds, _SEND_SECONDS))
            rates[is_running].append(sent / (time.perf_counter() - began))
            costs[is_running].append((cpu_seconds(self._broker) - cpu_s) / sent * 1e6)
        os.kill(process, signal.SIGCONT)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        # Disturbances of the machine last longer than a pair. So each pair has its own ratio, and the figure is their
        # median.
        ratio = statistics.median(one / other for one, other in zip(rates[True], rates[False], strict=True))
        rate_with, rate_without = (statistics.median(rates[one]) for one in (True, False))
        cpu_with, cpu_without = (statistics.median(costs[one]) for one in (True, False))
        more = {"per_second_with": round(rate_with), "per_second_without": round(rate_without)}
        cpu = {"broker_cpu_us_with": round(cpu_with, 1), "broker_cpu_us_without": round(cpu_without, 1)}
        less = round(100 * (1 - ratio), 1)
        return _figure("sends beside a console with open pages", less, "% fewer", _SENDS_PERCENT, **more, **cpu)

    async def _send_for(self, seconds: float) -> int:
        end, sent, body = time.perf_counter() + seconds, 0, bytes(1024)

        async def one_after_the_other(queue: int) -> None:
            nonlocal sent
            while time.perf_counter() < end:
                await self._send(self._topics[0], queue, body)
                sent += 1

        await asyncio.gather(*(one_after_the_other(number % _QUEUES) for number in range(_IN_FLIGHT)))
        return sent


async def _turns(held_s: list[float]) -> None:
    """Record the CPU time of this thread in each iteration of the event loop."""
    began = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        held_s.append(now - began)
        began = now


def _figure(what: str, measured: float, unit: str, budget: float, **more: Any) -> Figure:
    return {"what": what, "measured": measured, "unit": unit, "budget": budget, "more": more}


async def _each(things: Iterable[Any], work: Callable[[Any], Awaitable[object]]) -> None:
    """Run work for each thing, a limited number at a time."""
    left = iter(things)

    async def one_after_the_other() -> None:
        for one in left:
            await work(one)

    await asyncio.gather(*(one_after_the_other() for _ in range(_IN_FLIGHT)))


@asynccontextmanager
async def _again(work: Callable[[], Awaitable[None]], pause_s: float) -> AsyncIterator[None]:
    """Run work now, and again after each pause."""
    await work()

    async def go_on() -> None:
        while True:
            await asyncio.sleep(pause_s)
            await work()

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _get(console: str, path: str, connection: http.client.HTTPConnection | None = None) -> tuple[float, str]:
    """Return the ms that the server needed for a page, and its text. Raises RmqError: it is an error page."""
    kept = connection or http.client.HTTPConnection(console, timeout=60)
    kept.request("GET", path)
    answer = kept.getresponse()
    text = answer.read().decode()
    if connection is None:
        kept.close()
    if answer.status != 200:
        raise RmqError(f"{path} answered {answer.status}")
    return float((answer.getheader("server-timing") or "").rpartition("=")[2]), text


def _requests(console: str) -> int:
    return sum(one["requests"] for one in json.loads(_get(console, "/about?format=json")[1])["costs"])


async def _follow(console: str, path: str) -> None:
    """Read the refreshes of a page, until cancelled."""
    host, _, port = console.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET /events?path={quote(path, safe='')} HTTP/1.1\r\nHost: {console}\r\n\r\n".encode())
        if b" 200 " not in (status := await reader.readline()):
            raise RmqError(f"the stream of {path} answered {status!r}")
        while await reader.read(1 << 16):
            pass
    finally:
        writer.close()


def _mib(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return round(int(fields["VmRSS"].split()[0]) / 1024, 1)
