"""A slave of either maker follows a master of either maker: the same bytes, the same tables, and readable without it.

| Master | Slaves | Messages |
|---|---|---|
| Apache 5.4.0 | ours; Apache 5.4.0, which shows that the reference passes these tests | every kind |
| ours | Apache 5.4.0 and Apache 4.9.4 | every kind that our broker serves: no timers |
| Apache 4.9.4 | ours | single ones and batches |

All masters are SYNC_MASTERs with two copies. Our broker is killed (SIGKILL) and restarted during the test: a slave
while the log grows, a master after all sends. At the end the master stops, and each slave is read through a name server
that knows no other broker. The groups run at the same time, because Apache's slave copies its master's tables a minute
after its start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rmqkit import Message, Producer, PullConsumer
from rmqkit.client.observe.hooks import SendStatus
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.record import (
    COMPRESSED,
    COMPRESSION_MASK,
    INNER_BATCH,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    BatchEntry,
    encode_batch,
)
from rmqkit.protocol.schemas.brokers import HaRuntimeInfo
from tests.interop.apache import ask, is_member
from tests.interop.asking import Asked, answers, differences
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.mixture import (
    DEAD_TOPIC,
    FALLBACK_TOPIC,
    GIVEN_UP_TOPIC,
    INNER_BATCH_TOPIC,
    TOPICS,
    Places,
    Stored,
    Tallies,
    create_topics,
    read_with_java,
    read_with_ours,
    send_bulk,
    send_every_kind,
    stored_in,
    tallies,
)
from tests.interop.replicas import (
    CAUGHT_UP_SECONDS,
    POLL_SECONDS,
    SLAVE_TIMEOUT_SECONDS,
    Replica,
    derived_differences,
    frozen,
    log_difference,
    message_count,
    missing_tables,
    restarted,
    run_replica,
    wait_caught_up,
)
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_name_server
from tests.patience import producing, pulling

OURS, NEW, OLD = "rmqkit", "5.4.0", "4.9.4"
RESUMED_COUNT, ASKING_COUNT = 400, 4
TABLES_SECONDS = 300
SEND_SECONDS, GONE_SECONDS, OFFSETS_SECONDS = 300, 150, 150
OK, LATE = SendStatus.SEND_OK, SendStatus.FLUSH_SLAVE_TIMEOUT


SEND = dict(zip("abcdefghijklm", ("p", "Answers", "TBW102", 4, 0, 0, 1, 0, "", 0, "false", 0, "false"), strict=True))
PULL: Mapping[str, object] = {
    "consumerGroup": "asker",
    "topic": "Answers",
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 1,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subscription": "*",
    "subVersion": 1,
    "expressionType": "TAG",
}
BACK = {"offset": 0, "group": "asker", "delayLevel": 0, "originTopic": "Answers", "unitMode": "false"}
END = {"producerGroup": "p", "tranStateTableOffset": 0, "commitLogOffset": 0, "commitOrRollback": 8}
QUEUE = {"topic": "Answers", "queueId": 0}
ASKED = [
    Asked(RequestCode.SEND_MESSAGE_V2, SEND, b"x"),
    Asked(RequestCode.SEND_BATCH_MESSAGE, {**SEND, "m": "true"}, encode_batch([BatchEntry(b"x", b"", 0)])),
    Asked(RequestCode.CONSUMER_SEND_MSG_BACK, {**BACK, "maxReconsumeTimes": 16}),
    Asked(RequestCode.END_TRANSACTION, {**END, "fromTransactionCheck": "false", "msgId": "x", "transactionId": "x"}),
    *(Asked(RequestCode.PULL_MESSAGE, {**PULL, "queueOffset": offset}) for offset in (0, 1, 1 << 40, -5)),
    Asked(RequestCode.PULL_MESSAGE, {**PULL, "topic": "nothing"}),
    *(Asked(code, QUEUE) for code in (RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET)),
    Asked(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 0}),
    Asked(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 0}),
    Asked(RequestCode.UPDATE_CONSUMER_OFFSET, {**QUEUE, "consumerGroup": "asker", "commitOffset": 1}),
    Asked(RequestCode.QUERY_CONSUMER_OFFSET, {**QUEUE, "consumerGroup": "asker"}),
    Asked(RequestCode.QUERY_CONSUMER_OFFSET, {**QUEUE, "consumerGroup": "nobody"}),
]
"""Requests that a slave without a master refuses or serves."""


@dataclass(frozen=True)
class Plan:
    """A master and its slaves (versions are Apache's).

    Attributes:
        count: number of messages, without the rare kinds.
        is_mixed: True if the rare kinds are sent.
        killed_at_bytes: length of the log when our broker is killed; 0: it is killed and restarted after all sends.
    """

    master: str
    slaves: tuple[str, ...]
    count: int
    is_mixed: bool = True
    killed_at_bytes: int = 0


PLANS = {
    "apache": Plan(NEW, (OURS, NEW), 12_000, killed_at_bytes=2 << 20),
    "ours": Plan(OURS, (NEW, OLD), 12_000),
    "apache-4.9": Plan(OLD, (OURS,), 2_000, is_mixed=False),
}
PAIRS = [(name, slave) for name, plan in PLANS.items() for slave in plan.slaves]


@dataclass(frozen=True)
class Answers:
    """The answers to a message, a batch, and a message that does not wait, sent together."""

    statuses: list[SendStatus]
    seconds: float


@dataclass(frozen=True)
class Copy:
    """The state of one slave at the end."""

    missing_tables: dict[str, object]
    log_difference: str | None
    derived_differences: list[str]
    expected: Places
    read: Places
    resumed: Places
    read_by_java: Tallies
    answers: list[Command]


@dataclass(frozen=True)
class Outcome:
    """The state of one master and its slaves at the end."""

    statuses: Counter[SendStatus]
    answers: dict[str, Answers]
    committed: dict[int, int]
    stored: Stored
    copies: dict[str, Copy]


@dataclass
class Group:
    """One running master and its slaves. The name server of each slave knows only this slave and the master."""

    plan: Plan
    java: ApacheKit
    folder: Path
    stack: ExitStack
    master: Replica
    slaves: dict[str, Replica]
    name_servers: dict[str, str]

    @property
    def name_server(self) -> str:
        """Return any of the name servers, for requests to the master."""
        return next(iter(self.name_servers.values()))

    def send(self) -> Counter[SendStatus]:
        """Send the bulk, and every kind at the same time. Return the statuses of the bulk."""
        if not self.plan.is_mixed:
            return asyncio.run(send_bulk(self.name_server, self.plan.count))
        with ThreadPoolExecutor(max_workers=1) as pool:
            with_timer = self.plan.master != OURS
            kinds = pool.submit(
                send_every_kind, self.java, self.name_server, self.master.address, self.folder, with_timer=with_timer
            )
            statuses = asyncio.run(send_bulk(self.name_server, self.plan.count))
            kinds.result()
            return statuses

    def wait_for_log(self, size: int) -> None:
        wait_until(lambda: self.master.log_end >= size, SEND_SECONDS, f"log of {size} bytes", poll_seconds=POLL_SECONDS)

    @property
    def ours(self) -> Replica:
        return self.master if self.plan.master == OURS else self.slaves[OURS]

    def restart_ours(self) -> None:
        """Kill our broker if it still runs, restart it, and wait until all brokers are connected again."""
        if self.plan.master == OURS:
            offsets = self.master.store / "config/consumerOffset.json"
            wait_until(lambda: is_in(offsets, b"@resumed"), OFFSETS_SECONDS, f"committed offsets in {offsets}")
        self.ours.process.kill()
        if self.plan.master == OURS:
            self.master = self.stack.enter_context(restarted(self.ours, list(self.name_servers.values()), 0))
        else:
            self.slaves[OURS] = self.stack.enter_context(restarted(self.ours, [self.name_servers[OURS]], 1))
        asyncio.run(ask_for_copies(self.name_server))  # from now on messages reach only connected slaves
        wait_caught_up(self.master, self.slaves.values())
        # Of several links from one address, a later one is valid only after the earlier ones have reported again.
        if self.plan.master == OURS:
            wait_until(self._all_count, CAUGHT_UP_SECONDS, "copies of all slaves that count", poll_seconds=POLL_SECONDS)

    def _all_count(self) -> bool:
        status = decode_as(ask(self.master.address, Command(RequestCode.GET_BROKER_HA_STATUS)).payload, HaRuntimeInfo)
        return status.in_sync_slave_nums == len(self.slaves)

    def answers(self) -> dict[str, Answers]:
        """Return the answers while one slave, or all of them, are stopped."""
        standing_still = {name: [slave] for name, slave in self.slaves.items() if len(self.slaves) > 1}
        found = {}
        for name, slaves in {**standing_still, "all": list(self.slaves.values())}.items():
            with frozen(*slaves):
                found[name] = asyncio.run(ask_for_copies(self.name_server))
        return found

    def copy(self, name: str, end: int, stored: Stored, missing: dict[str, object], committed: int) -> Copy:
        """Return the state of a slave after its master stopped."""
        slave, known, master = self.slaves[name], self.name_servers[name], self.master.store
        wait_until(lambda: not is_member(known, self.master.address), GONE_SECONDS, "end of the master's registration")
        topics = stored.readable_topics()
        expected = stored.of(topics)
        count = sum(map(len, expected.values()))
        read = asyncio.run(read_with_ours(known, "reader", topics, count))
        resumed = asyncio.run(read_with_ours(known, "resumed", ["Resumed"], RESUMED_COUNT - committed))
        is_first = name == self.plan.slaves[0]
        read_by_java = read_with_java(self.java, known, "java", topics, count, self.folder) if is_first else {}
        told = asyncio.run(answers(slave.address, ASKED))
        slave.stop()  # the stop writes the rest of its index
        log, derived = log_difference(master, slave.store, end), derived_differences(master, slave.store)
        return Copy(missing, log, derived, expected, read, resumed, read_by_java, told)


@contextmanager
def running(plan: Plan, kits: dict[str, ApacheKit | None], folder: Path) -> Iterator[Group]:
    """Run the master with its topics, and its slaves."""
    java = kits[NEW]
    assert java is not None
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        folders = {slave: folder / f"slave-{slave}" for slave in plan.slaves}
        for one in folders.values():
            one.mkdir(parents=True)
        known = {slave: stack.enter_context(run_name_server(one))[1] for slave, one in folders.items()}
        master = stack.enter_context(run_replica(kits[plan.master], folder / "master", list(known.values())))
        create_topics(master.address)

        def start(slave: str) -> Replica:
            return stack.enter_context(run_replica(kits[slave], folders[slave] / "broker", [known[slave]], broker_id=1))

        slaves = dict(zip(plan.slaves, pool.map(start, plan.slaves), strict=True))
        yield Group(plan, java, folder, stack, master, slaves, known)


def follow(plan: Plan, kits: dict[str, ApacheKit | None], folder: Path) -> Outcome:
    """Run one master and its slaves until every slave was read after the master stopped."""
    with running(plan, kits, folder) as group, ThreadPoolExecutor() as pool:
        tables_deadline = time.monotonic() + TABLES_SECONDS
        slaves = group.slaves.values()
        asyncio.run(ask_for_copies(group.name_server))  # the answer may be late: there may be no slave yet
        wait_caught_up(group.master, slaves)
        committed = asyncio.run(leave_in_the_middle(group.name_server))
        sending = pool.submit(group.send)
        if plan.killed_at_bytes:
            group.wait_for_log(plan.killed_at_bytes)
            group.ours.process.kill()
        statuses = sending.result()
        group.restart_ours()
        told = group.answers()
        missing = [missing_tables(group.master, slave, tables_deadline) for slave in slaves]
        wait_caught_up(group.master, slaves)
        end = group.master.log_end
        group.master.stop()
        stored = stored_in(group.master.store, end)
        copies = pool.map(
            lambda name, tables: group.copy(name, end, stored, tables, sum(committed.values())), group.slaves, missing
        )
        return Outcome(statuses, told, committed, stored, dict(zip(group.slaves, copies, strict=True)))


def is_in(file: Path, text: bytes) -> bool:
    try:
        return text in file.read_bytes()
    except FileNotFoundError:
        return False


async def ask_for_copies(namesrv: str) -> Answers:
    async with Producer("answers", namesrv, settings=producing(retries=0)) as producer:
        started = time.monotonic()
        results = await asyncio.gather(
            producer.send(Message(topic="Answers", body=b"single")),
            producer.send_batch([Message(topic="Answers", body=b"batch")] * 2),
            producer.send(Message(topic="Answers", body=b"no wait", wait_store=False)),
        )
        return Answers([result.status for result in results], time.monotonic() - started)


async def leave_in_the_middle(namesrv: str) -> dict[int, int]:
    """Consume the first messages of each queue with a group that commits to the master. Return its offsets."""
    offsets = {}
    async with (
        Producer("resumed", namesrv, settings=producing()) as producer,
        PullConsumer("resumed", namesrv, settings=pulling()) as consumer,
    ):
        queues = await consumer.queues("Resumed")
        for queue in queues:
            each = [Message(topic="Resumed", body=b"%d" % i) for i in range(RESUMED_COUNT // len(queues))]
            await producer.send_batch(each, queue=queue)
            pulled = await consumer.pull(queue, 0)
            await consumer.commit(queue, pulled.next_begin_offset)
            offsets[queue.queue_id] = pulled.next_begin_offset
    return offsets


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    """Run all groups at the same time."""
    root = tmp_path_factory.mktemp("replication")
    kits = {OURS: None, NEW: kit_or_skip(NEW), OLD: kit_or_skip(OLD)}
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(follow, plan, kits, root / name) for name, plan in PLANS.items()}


@pytest.fixture(params=PLANS)
def outcome(runs: dict[str, Future[Outcome]], request: pytest.FixtureRequest) -> Outcome:
    return runs[request.param].result()


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[1]}-under-{pair[0]}")
def copy(runs: dict[str, Future[Outcome]], request: pytest.FixtureRequest) -> Copy:
    name, slave = request.param
    return runs[name].result().copies[slave]


def test_every_send_is_answered_with_a_second_copy(outcome: Outcome) -> None:
    assert set(outcome.statuses) == {OK}


@pytest.mark.parametrize("plan", [name for name, plan in PLANS.items() if plan.is_mixed])
def test_the_mixture_has_every_kind(runs: dict[str, Future[Outcome]], plan: str) -> None:
    stored = runs[plan].result().stored
    assert stored.count >= PLANS[plan].count
    system_topics = {topic for topic, _ in stored.places} - set(stored.readable_topics())
    wanted = {"SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", GIVEN_UP_TOPIC}
    if PLANS[plan].master != OURS:
        wanted.add("rmq_sys_wheel_timer")
    assert system_topics >= wanted
    assert {DEAD_TOPIC, FALLBACK_TOPIC, "%RETRY%kinds-retry", *TOPICS} - {"KindTimer"} <= set(stored.readable_topics())
    flags = {flag for _, flag in stored.kinds}
    assert {flag & COMPRESSION_MASK for flag in flags if flag & COMPRESSED} == {0x100, 0x200, 0x300}
    assert any(flag & INNER_BATCH for flag in flags)
    assert any(flag & TRANSACTION_MASK == TRANSACTION_COMMIT for flag in flags)


def test_the_log_is_its_master_s_byte_for_byte(copy: Copy) -> None:
    assert copy.log_difference is None


@pytest.mark.parametrize(("plan", "slave"), [pair for pair in PAIRS if OLD not in (PLANS[pair[0]].master, pair[1])])
def test_queues_and_index_are_its_master_s(runs: dict[str, Future[Outcome]], plan: str, slave: str) -> None:
    """Except for the topic of batches in Apache's slave: it creates plain queues before it knows their type."""
    names = runs[plan].result().copies[slave].derived_differences
    assert [name for name in names if slave == OURS or INNER_BATCH_TOPIC not in name] == []


def test_topics_groups_and_offsets_are_its_master_s(copy: Copy) -> None:
    assert copy.missing_tables == {}


def test_a_group_reads_everything_without_the_master(copy: Copy) -> None:
    assert copy.read == copy.expected


def test_a_java_group_reads_everything_without_the_master(outcome: Outcome) -> None:
    copy = next(iter(outcome.copies.values()))
    assert copy.read_by_java == tallies(copy.expected)


def test_it_refuses_and_serves_what_apache_s_slave_does(runs: dict[str, Future[Outcome]]) -> None:
    copies = runs["apache"].result().copies
    assert differences(list(zip(ASKED, copies[NEW].answers, copies[OURS].answers, strict=True))) == {}


def test_a_group_continues_where_it_was_at_the_master(outcome: Outcome) -> None:
    for copy in outcome.copies.values():
        assert copy.resumed == {
            (topic, queue_id): {offset: at for offset, at in queue.items() if offset >= outcome.committed[queue_id]}
            for (topic, queue_id), queue in copy.expected.items()
            if topic == "Resumed"
        }


def test_an_answer_waits_for_one_copy_and_not_for_longer_than_the_time_limit(outcome: Outcome) -> None:
    for who, told in outcome.answers.items():
        is_late = who == "all"
        assert told.statuses == ([LATE, LATE, OK] if is_late else [OK, OK, OK]), f"{who} stood still"
        assert not is_late or told.seconds >= SLAVE_TIMEOUT_SECONDS - 0.1
    asked_count = 2 + len(outcome.answers)  # at the start, and after our broker restarted
    assert len(outcome.stored.places["Answers", 0]) == asked_count * ASKING_COUNT


@pytest.mark.parametrize(("maker", "answer"), [(OURS, LATE), (OLD, SendStatus.SLAVE_NOT_AVAILABLE)])
def test_a_sync_master_without_slaves_stores_and_says_so(maker: str, answer: SendStatus, tmp_path: Path) -> None:
    kit = None if maker == OURS else kit_or_skip(maker)
    with (
        run_name_server(tmp_path) as (_, known),
        run_replica(kit, tmp_path / "master", [known]) as master,
    ):
        create_topics(master.address)
        assert asyncio.run(ask_for_copies(known)).statuses == [answer, answer, OK]
        # Apache's broker writes its queues a moment after it answered.
        wait_until(lambda: message_count(master.address, "Answers") == ASKING_COUNT, SEND_SECONDS, "all messages")
