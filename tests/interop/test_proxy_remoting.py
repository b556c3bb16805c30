"""Remoting clients through `rmq proxy`, in front of Apache's broker and of ours: Apache's Java clients of 5.4.0 and
4.9.4, mqadmin, and our own clients, which know only the proxy's address. Source: grpc.md §11.

The answers of Apache's proxy 5.4.0 at its remoting port are in tests.proxy.test_remoting_port, as literals.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmqkit.admin import Admin
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.interop.apache import TRANSACTION_CONF, ApachePair
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.mqadmin import run_mqadmin
from tests.interop.probe import PROBE_HEAP_MB, ProbeRun, run_probe
from tests.interop.standalone import run_remoting_proxy, run_standalone
from tests.waiting import until

GROUP, FILTERED = "proxied-everything", "proxied-filtered"
RUNS = {"apache-5.4.0": ("apache", "5.4.0"), "ours-4.9.4": ("ours", "4.9.4")}
COUNT = 100
SECONDS = 200.0
CHECKS_MAX = TRANSACTION_CONF["transactionCheckMax"]
QUICK = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=400)


@dataclass(frozen=True, slots=True)
class Place:
    """A proxy and the servers behind it."""

    remoting_addr: str
    namesrv_addr: str
    broker_addr: str


@pytest.fixture(scope="module")
def places(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Place]]:
    theirs, ours = tmp_path_factory.mktemp("theirs"), tmp_path_factory.mktemp("ours")
    conf = ours / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in TRANSACTION_CONF.items()))
    with (
        run_standalone(ours / "store", ours, "--config", str(conf)) as standalone,
        run_remoting_proxy(theirs, apache.namesrv_addr) as before_apache,
        run_remoting_proxy(ours, standalone.namesrv_addr) as before_ours,
    ):
        yield {
            "apache": Place(before_apache, apache.namesrv_addr, apache.broker_addr),
            "ours": Place(before_ours, standalone.namesrv_addr, standalone.broker_addr),
        }


# -- Apache's Java clients


@dataclass(frozen=True, slots=True)
class JavaRuns:
    """The runs of Apache's programs: the probes by name, and the end of the program with transactions."""

    probes: Mapping[str, Future[ProbeRun]]
    transactions: Future[tuple[str, Counter[str]]]


@pytest.fixture(scope="module", autouse=True)
def java(places: Mapping[str, Place], tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaRuns]:
    """Start all programs before the first test: they mostly start Java and wait for transaction checks."""
    kits = {version: kit_or_skip(version) for version in ("5.4.0", "4.9.4")}
    with ThreadPoolExecutor() as threads:
        folders = {name: tmp_path_factory.mktemp(name) for name in ("transactions", *RUNS)}
        probes = {
            name: threads.submit(
                run_probe,
                kits[version],
                "both",
                namesrv=places[place].remoting_addr,
                topic=f"Proxied-{name.replace('.', '_')}",
                count=COUNT,
                consumers={f"{GROUP}-{place}": "*", f"{FILTERED}-{place}": "TagA || TagC"},
                work_dir=folders[name],
            )
            for name, (place, version) in RUNS.items()
        }
        namesrv = places["apache"].remoting_addr
        transactions = threads.submit(run_transactions, kits["5.4.0"], namesrv, folders["transactions"])
        yield JavaRuns(probes, transactions)


def run_transactions(kit: ApacheKit, namesrv: str, work_dir: Path) -> tuple[str, Counter[str]]:
    """Run Apache's transaction producer. Return its error output (empty if it succeeded), and its events, counted."""
    out = work_dir / "out.jsonl"
    arguments = ["run", "--namesrv", namesrv, "--topic", "ProxiedTransactions", "--out", out]
    arguments += ["--checks-max", CHECKS_MAX, "--timeout-seconds", int(SECONDS)]
    command = kit.jvm("interop.TransactionProbe", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * SECONDS)
    failure = f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}" if ended.returncode else ""
    return failure, Counter(json.loads(line)["event"] for line in out.read_text().splitlines())


# -- tools


def test_mqadmin_finds_routes_and_members(apache_kit: ApacheKit, places: Mapping[str, Place], tmp_path: Path) -> None:
    place = places["apache"]

    async def asked() -> list[str]:
        async with Producer("PG", place.remoting_addr) as producer:
            await producer.send(Message(topic="ProxiedTools", body=b"x"))
        consumer = PushConsumer("proxied-tools", place.remoting_addr, settings=QUICK)
        consumer.subscribe("ProxiedTools", "*", lambda message: None)
        async with consumer:
            await until(consumer.held_queues, "queues", SECONDS)
            commands = [
                ["topicRoute", "-t", "ProxiedTools", "-n", place.remoting_addr],
                ["consumerConnection", "-g", "proxied-tools", "-b", place.remoting_addr, "-n", place.namesrv_addr],
                ["consumerConnection", "-g", "proxied-tools", "-b", place.broker_addr, "-n", place.namesrv_addr],
                ["consumerStatus", "-g", "proxied-tools", "-i", consumer.status().client_id, "-n", place.namesrv_addr],
            ]
            return await asyncio.to_thread(run_mqadmin, apache_kit, commands, tmp_path)

    route, at_proxy, at_broker, status = asyncio.run(asked())
    assert place.remoting_addr in route
    assert place.broker_addr not in route
    assert "ProxiedTools" in at_proxy
    assert at_proxy == at_broker
    assert "ProxiedTools" in status, "a broker's request reaches the client through the proxy"


# -- our own clients


@pytest.mark.parametrize("name", ["apache", "ours"])
def test_our_clients_send_and_receive(places: Mapping[str, Place], name: str) -> None:
    asyncio.run(_exchange(places[name], name))


async def _exchange(place: Place, name: str) -> None:
    topic, proxy = f"ProxiedOwn-{name}", place.remoting_addr
    async with Admin(place.namesrv_addr) as admin:
        await admin.topics.create(topic, read_queues=2, write_queues=2)
    seen: defaultdict[int, list[int]] = defaultdict(list)
    ordered = PushConsumer("proxied-ordered", proxy, settings=QUICK, ordered=True)
    received: list[int] = []
    pushed = PushConsumer("proxied-pushed", proxy, settings=QUICK)

    @ordered.on(topic)
    async def in_order(message: ReceivedMessage) -> None:
        seen[message.queue_id].append(int(message.body))

    @pushed.on(topic)
    async def push(message: ReceivedMessage) -> None:
        received.append(int(message.body))

    checked: list[bytes] = []

    def check(message: ReceivedMessage) -> TransactionState:
        checked.append(message.body)
        return TransactionState.COMMIT

    async with Producer("PG", proxy) as producer, ordered, pushed, PopConsumer("proxied-popped", proxy) as popping:
        for queue in await producer.queues(topic):
            for number in range(10):
                await producer.send(Message(topic=topic, body=b"%d" % number), queue=queue)
        popped: list[int] = []
        async with asyncio.timeout(SECONDS):
            while len(popped) < 20:
                messages = await popping.pop(topic, max_count=4, invisible_time=60, wait=1)
                await popping.ack_many(messages)
                popped += [int(message.body) for message in messages]
        await until(lambda: sum(map(len, seen.values())) == len(received) == 20, "all messages", SECONDS)
        assert list(seen.values()) == [list(range(10))] * 2
        assert Counter(popped) == Counter(received) == Counter([*range(10)] * 2)
        transactional = TransactionProducer(
            "proxied-transactions", proxy, execute=lambda message, argument: TransactionState.UNKNOWN, check=check
        )
        async with transactional:
            await transactional.send_in_transaction(Message(topic=topic, body=b"99"))
            await until(lambda: 99 in received, "the message that was asked about", SECONDS)
        assert checked == [b"99"]


# -- the programs, which have run beside the other tests


@pytest.mark.parametrize("name", RUNS)
def test_a_java_client_sends_and_receives(java: JavaRuns, name: str) -> None:
    run, (place, _) = java.probes[name].result(), RUNS[name]
    assert run.exit_code == 0, run.outcome
    sent = {message.msg_id for message in run.sent}
    assert len(sent) == len(run.sent) > COUNT
    assert Counter(message.msg_id for message in run.received_by(f"{GROUP}-{place}")) == Counter(sent)
    assert 0 < len(run.received_by(f"{FILTERED}-{place}")) < len(sent)


def test_a_java_producer_is_asked_about_its_transactions(java: JavaRuns) -> None:
    failure, events = java.transactions.result()
    assert not failure
    assert (events["sent"], events["received"], events["question"] > 0) == (11, 6, True), events
