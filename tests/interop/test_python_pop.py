"""Our pop consumer, and Java's, with a real Apache broker with default settings for POP, and with ours.

Apache's broker redelivers a message about three seconds after its invisible time, because of its timer and its revive
loop, both 1 s. Source: behaviour.md §4.7–§4.15, §8.13.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from rmqkit import sync
from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.hooks import SendResult
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import Popping, Pulling, StartFrom
from rmqkit.errors import NoRoute
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.message import Message, ReceivedMessage
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.pop import MessageRequestMode
from tests.client.peers import until
from tests.interop.apache import BROKER_NAME, ApachePair, ask
from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB, run_probe
from tests.interop.standalone import run_standalone
from tests.interop.suite.consuming import POLL_SECONDS, SECONDS, popped_at_last
from tests.patience import producing, pulling, pushing

FIRST = pushing(start_from=StartFrom.FIRST_OFFSET)
QUICK = msgspec.structs.replace(FIRST, rebalance_interval_ms=200, suspend_queue_ms=10)
INVISIBLE_SECONDS = 10
"""For tests that wait for its end: long enough to pop all messages, and acknowledge or renew them, on a busy
machine.
"""
MIXED_MESSAGES = 2000


@dataclass(frozen=True)
class Servers:
    """A name server and a broker, Apache's or ours."""

    namesrv_addr: str
    broker_addr: str
    is_ours: bool


PEERS = ("ours", "apache")


@pytest.fixture(scope="module")
def peers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Servers]]:
    """Run our servers, and Apache's if Java is here."""
    found: dict[str, Servers] = {}
    with contextlib.suppress(pytest.skip.Exception):
        pair: ApachePair = request.getfixturevalue("apache")
        found["apache"] = Servers(pair.namesrv_addr, pair.broker_addr, is_ours=False)
    work_dir = tmp_path_factory.mktemp("ours")
    conf = work_dir / "broker.conf"
    conf.write_text(f"brokerName={BROKER_NAME}\nenablePropertyFilter=true\ndefaultTopicQueueNums=4\n")
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf)) as running:
        found["ours"] = Servers(running.namesrv_addr, running.broker_addr, is_ours=True)
        yield found
        running.stop()


@pytest.fixture(scope="module", params=PEERS)
def servers(peers: dict[str, Servers], request: pytest.FixtureRequest) -> Servers:
    if request.param not in peers:
        request.getfixturevalue("apache")  # skips the test, with the reason
    return peers[request.param]


Scenario = Callable[[Servers], Coroutine[None, None, None]]
Outcome = Callable[[Scenario], None]


def run(scenario: Coroutine[None, None, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(600):
            await scenario

    asyncio.run(main())


async def send(namesrv: str, topic: str, numbers: range) -> None:
    """Send messages. Return when they can be read: Apache's queues are written after its log."""
    async with (
        Producer(f"PG-{topic}", namesrv, settings=producing()) as producer,
        PullConsumer(f"PG-{topic}-end", namesrv, settings=pulling()) as reader,
        asyncio.timeout(SECONDS),
    ):
        for sent in await asyncio.gather(
            *(
                producer.send(Message(topic=topic, body=b"%d" % i, tags="AB"[i % 2], properties={"number": str(i)}))
                for i in numbers
            )
        ):
            while not await is_readable(reader, sent):
                await asyncio.sleep(POLL_SECONDS)


async def is_readable(reader: PullConsumer, sent: SendResult) -> bool:
    with contextlib.suppress(NoRoute):  # name servers know a new topic after a moment
        return await reader.max_offset(sent.queue) > sent.queue_offset
    return False


async def popped(consumer: PopConsumer, topic: str, count: int, **options: object) -> dict[int, ReceivedMessage]:
    """Pop ``count`` messages and return them by their number."""
    found: dict[int, ReceivedMessage] = {}
    async with asyncio.timeout(SECONDS):
        while len(found) < count:
            try:
                messages = await consumer.pop(topic, wait=1, **options)
            except NoRoute:  # name servers know a new topic after a moment
                await asyncio.sleep(0.05)
                continue
            found |= {int(one.body): one for one in messages}
    return found


async def redelivery(servers: Servers) -> None:
    await send(servers.namesrv_addr, "PopTimes", range(8))
    async with PopConsumer("CG-pop-times", servers.namesrv_addr, settings=FIRST) as consumer:
        first = await popped(consumer, "PopTimes", 8, invisible_time=INVISIBLE_SECONDS)
        assert {(one.reconsume_times, one.topic) for one in first.values()} == {(0, "PopTimes")}
        await consumer.ack(first[0])
        await consumer.ack_many([first[1], first[2], first[3]])
        await consumer.change_invisible_time(first[4], 60)
        await consumer.change_invisible_time(first[5], 1)
        await consumer.change_invisible_time(first[6], INVISIBLE_SECONDS / 2)
        await consumer.ack(first[6])  # by its new handle
        again = await popped(consumer, "PopTimes", 2, invisible_time=60)
        assert {number: (one.reconsume_times, one.topic) for number, one in again.items()} == {
            5: (1, "PopTimes"),
            7: (1, "PopTimes"),
        }
        # Redelivered messages are acknowledged in the retry topic through which they came.
        await consumer.ack_many([*again.values(), first[4]])
        assert await consumer.pop("PopTimes", wait=0.5) == []


async def retries_of_the_second_version(servers: Servers) -> None:
    def configure(value: str) -> None:
        conf = f"enableRetryTopicV2={value}\npopResponseReturnActualRetryTopic={value}".encode()
        assert ask(servers.broker_addr, Command(RequestCode.UPDATE_BROKER_CONFIG, body=conf)).code == 0

    configure("true")
    try:
        await send(servers.namesrv_addr, "PopSecond", range(3))
        async with PopConsumer("CG-pop-second", servers.namesrv_addr, settings=FIRST) as consumer:
            await popped(consumer, "PopSecond", 3, invisible_time=INVISIBLE_SECONDS)
            again = await popped(consumer, "PopSecond", 3, invisible_time=60)
            assert {(one.topic, one.reconsume_times) for one in again.values()} == {("PopSecond", 1)}
            assert {one.properties["POP_CK"].split()[4] for one in again.values()} == {"2"}
            await consumer.ack_many([again[0], again[1]])
            await consumer.change_invisible_time(again[2], 0.5)
            assert list(await popped(consumer, "PopSecond", 1)) == [2], "only this message is delivered a third time"
    finally:
        configure("false")


def test_a_pop_waits_for_a_message(servers: Servers) -> None:
    async def scenario() -> None:
        async with (
            PopConsumer("CG-pop-waits", servers.namesrv_addr, settings=FIRST) as consumer,
            Producer("PG-pop-waits", servers.namesrv_addr, settings=producing()) as producer,
        ):
            await producer.send(Message(topic="PopWaits", body=b"0"))
            await consumer.ack_many((await popped(consumer, "PopWaits", 1)).values())
            waiting = asyncio.create_task(
                popped_at_last(lambda: consumer.pop("PopWaits", wait=20), is_ours=servers.is_ours)
            )
            assert await consumer.pop("PopWaits") == []
            await producer.send(Message(topic="PopWaits", body=b"1"))
            (message,) = await waiting
            assert message.body == b"1"
            await consumer.ack(message)

    run(scenario())


def test_tags_and_sql_choose_what_is_popped(servers: Servers) -> None:
    async def scenario() -> None:
        await send(servers.namesrv_addr, "PopChosen", range(10))
        for group, expression, kind, wanted in (
            ("CG-pop-tags", "B || C", "TAG", {1, 3, 5, 7, 9}),
            ("CG-pop-sql", "number BETWEEN 3 AND 4", "SQL92", {3, 4}),
        ):
            async with PopConsumer(group, servers.namesrv_addr, settings=FIRST) as consumer:
                found = await popped(consumer, "PopChosen", len(wanted), expression=expression, expression_type=kind)
                assert set(found) == wanted
                assert await consumer.pop("PopChosen", expression, expression_type=kind) == []
                await consumer.ack_many(found.values())

    run(scenario())


async def handling(servers: Servers) -> None:
    namesrv, seen = servers.namesrv_addr, defaultdict[int, list[int]](list)
    await send(namesrv, "PopHandled", range(200))
    settings = msgspec.structs.replace(QUICK, retries_max=1, pop=Popping(invisible_ms=INVISIBLE_SECONDS * 1000))
    consumer = PopConsumer("CG-pop-handled", namesrv, settings=settings)
    long_ones = asyncio.Event()

    @consumer.on("PopHandled")
    async def handler(message: ReceivedMessage) -> None:
        number = int(message.body)
        seen[number].append(message.reconsume_times)
        match number:
            case 5:
                raise ConsumeLater(delay=0.1)  # two times, then the message is a dead letter
            case 6:
                await long_ones.wait()  # longer than the invisible time

    async with (
        consumer,
        PullConsumer("CG-pop-reader", namesrv, settings=pulling()) as reader,
        PopConsumer("CG-pop-control", namesrv, settings=FIRST) as control,
    ):
        await until(lambda: len(seen) == 200, "every message", SECONDS)
        await popped(control, "PopHandled", 1, max_count=1, invisible_time=INVISIBLE_SECONDS)
        await popped(control, "PopHandled", 199, invisible_time=60)
        dead: list[ReceivedMessage] = []
        async with asyncio.timeout(SECONDS):
            while not dead:
                with contextlib.suppress(NoRoute):
                    (queue,) = await reader.queues("%DLQ%CG-pop-handled")
                    dead = (await reader.pull(queue, 0, wait=1)).messages
                await asyncio.sleep(0.05)
        # Messages that are not renewed are redelivered. The message whose handler takes long would have been too by
        # now.
        await popped(control, "PopHandled", 1)
        long_ones.set()
    assert [one.body for one in dead] == [b"5"]
    assert {number: times for number, times in seen.items() if times != [0]} == {5: [0, 1]}


async def closing(servers: Servers) -> None:
    namesrv, begun = servers.namesrv_addr, asyncio.Event()
    await send(namesrv, "PopGivenBack", range(8))
    settings = msgspec.structs.replace(FIRST, handlers_max=1, drain_ms=10)  # invisible for a minute
    consumer = PopConsumer("CG-pop-back", namesrv, settings=settings)

    @consumer.on("PopGivenBack")
    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with consumer:
        await asyncio.wait_for(begun.wait(), SECONDS)
        await until(lambda: consumer.status().queues[0].held_messages == 8, "all are held", SECONDS)
    async with PopConsumer("CG-pop-back", namesrv, settings=FIRST) as other:
        found = await popped(other, "PopGivenBack", 8)
        assert {one.reconsume_times for one in found.values()} == {0}, "a suspended delivery does not count"
        await other.ack_many(found.values())


def test_messages_are_iterated(servers: Servers) -> None:
    async def scenario() -> None:
        await send(servers.namesrv_addr, "PopIterated", range(20))
        consumer = PopConsumer("CG-pop-iterated", servers.namesrv_addr, settings=QUICK)
        consumer.subscribe("PopIterated")
        seen: list[int] = []
        async with consumer, asyncio.timeout(SECONDS):
            async for message in consumer.messages():
                seen.append(int(message.body))
                if len(seen) == 20:
                    break
        assert sorted(seen) == list(range(20))
        async with PopConsumer("CG-pop-iterated", servers.namesrv_addr, settings=FIRST) as other:
            assert await other.pop("PopIterated", wait=0.5) == []

    run(scenario())


def test_members_pop_in_order_one_after_the_other(servers: Servers) -> None:
    async def scenario() -> None:
        namesrv = servers.namesrv_addr
        await send(namesrv, "PopOrdered", range(600))
        seen: defaultdict[int, list[int]] = defaultdict(list)
        running: set[int] = set()

        async def handler(one: ReceivedMessage) -> None:
            assert one.queue_id not in running, "a queue has one handler at a time"
            running.add(one.queue_id)
            await asyncio.sleep(0.001)
            running.discard(one.queue_id)
            seen[one.queue_id].append(one.queue_offset)
            if one.queue_offset == 7 and one.reconsume_times < 2:
                raise ValueError("not yet")

        members = [PopConsumer("CG-pop-ordered", namesrv, settings=QUICK, ordered=True) for _ in range(2)]
        for member in members:
            member.subscribe("PopOrdered", "*", handler)
        async with members[0], members[1]:
            await until(lambda: sum(len(set(offsets)) for offsets in seen.values()) == 600, "everything", SECONDS)
        for offsets in seen.values():
            assert offsets == [*range(7), 7, 7, *range(7, len(offsets) - 2)]

    run(scenario())


def test_an_ordered_pop_is_blocked_until_all_of_it_is_acknowledged(servers: Servers) -> None:
    async def scenario() -> None:
        namesrv = servers.namesrv_addr
        await send(namesrv, "PopBlocked", range(40))
        async with (
            PopConsumer("CG-pop-blocked", namesrv, settings=FIRST, ordered=True) as one,
            PopConsumer("CG-pop-blocked", namesrv, settings=FIRST, ordered=True) as two,
        ):
            queue = MessageQueue("PopBlocked", BROKER_NAME, 0)
            is_ours = servers.is_ours
            first = await popped_at_last(lambda: one.pop("PopBlocked", queue=queue, max_count=3), is_ours=is_ours)
            assert [message.queue_offset for message in first] == [0, 1, 2]
            assert await two.pop("PopBlocked", queue=queue) == []
            await one.ack_many(first[:2])
            assert await two.pop("PopBlocked", queue=queue) == []
            waiting = asyncio.create_task(
                popped_at_last(lambda: two.pop("PopBlocked", queue=queue, max_count=3, wait=20), is_ours=is_ours)
            )
            await one.change_invisible_time(first[2], 0.5)
            again = await waiting  # the message that was not acknowledged, and the ones after it
            assert [(message.queue_offset, message.reconsume_times) for message in again] == [(2, 1), (3, 0), (4, 0)]
            await two.ack_many(again)
            (after,) = await popped_at_last(
                lambda: one.pop("PopBlocked", queue=queue, max_count=1, wait=20), is_ours=is_ours
            )
            assert after.queue_offset == 5

    run(scenario())


def test_a_java_producers_messages_are_popped(servers: Servers, apache_kit: ApacheKit, tmp_path: Path) -> None:
    sent = run_probe(apache_kit, "send", namesrv=servers.namesrv_addr, topic="PopFromJava", work_dir=tmp_path, count=40)
    assert sent.exit_code == 0, sent.outcome
    wanted = {one.msg_id: (one.body_bytes, one.tags) for one in sent.sent}

    async def scenario() -> None:
        seen: dict[str, tuple[int, str | None]] = {}
        consumer = PopConsumer("CG-pop-java", servers.namesrv_addr, settings=QUICK)

        @consumer.on("PopFromJava")
        async def handler(one: ReceivedMessage) -> None:
            seen[one.msg_id] = (len(one.body), one.tags)

        async with consumer:
            await until(lambda: len(seen) >= len(wanted), "every message", SECONDS)
        assert seen == wanted

    run(scenario())


def test_java_and_python_members_share_what_is_popped(servers: Servers, apache_kit: ApacheKit, tmp_path: Path) -> None:
    """A Java push consumer in mode POP, our push consumer in this mode and our pop consumer: every message goes to one
    of them.
    """
    topic, group = "PopMixed", "CG-pop-mixed"

    async def scenario(java: list[int]) -> None:
        python: defaultdict[str, list[int]] = defaultdict(list)
        settings = msgspec.structs.replace(QUICK, client_rebalance=False, pop=Popping(invisible_ms=60_000))
        members = {
            "push": PushConsumer(group, servers.namesrv_addr, settings=settings),
            "pop": PopConsumer(group, servers.namesrv_addr, settings=settings),
        }
        for name, member in members.items():

            @member.on(topic)
            async def handler(one: ReceivedMessage, name: str = name) -> None:
                python[name].append(int(one.body))
                await asyncio.sleep(0.01)

        def counted() -> Counter[int]:
            return Counter([*java, *python["push"], *python["pop"]])

        await until(lambda: java == [0], "the Java member pops", SECONDS)
        async with members["push"] as push, members["pop"] as pop:
            await until(
                lambda: any(one.queue_id == -1 for one in push.held_queues()), "the push consumer pops", SECONDS
            )
            for end in range(201, MIXED_MESSAGES, 200):
                await send(servers.namesrv_addr, topic, range(end - 200, end))
                await until(lambda end=end: len(counted()) == end, "every message", SECONDS)
                if end > 400 and len(java) > 1 and all(python[name] for name in members):
                    break
            assert {one.queue_id for one in pop.held_queues()} == {-1}
        assert len(java) > 1, "the Java member got messages"
        assert python["push"], "our push consumer got messages"
        assert python["pop"], "our pop consumer got messages"
        assert set(counted().values()) == {1}, "every message goes to one member"

    run(send(servers.namesrv_addr, topic, range(1)))
    create_group(servers, group)
    run(set_mode(servers, topic, group, "POP"))
    with java_reader(servers, apache_kit, tmp_path, topic, group) as java:
        run(scenario(java))


async def switching(servers: Servers) -> None:
    """Popped messages without an acknowledgement are pulled from the retry topic of POP."""
    topic, group, namesrv = "PopSwitched", "CG-pop-switched", servers.namesrv_addr
    await send(namesrv, topic, range(8))
    create_group(servers, group)
    await set_mode(servers, topic, group, "POP")
    seen: defaultdict[int, list[int]] = defaultdict(list)
    settings = msgspec.structs.replace(
        QUICK, client_rebalance=False, route_interval_ms=200, pull=Pulling(suspend_ms=500)
    )
    consumer = PushConsumer(group, namesrv, settings=settings)

    @consumer.on(topic)
    async def handler(one: ReceivedMessage) -> None:
        assert one.topic == topic
        seen[int(one.body)].append(one.reconsume_times)
        if int(one.body) == 3 and len(seen[3]) == 1:
            raise ConsumeLater(delay=2)

    def held() -> set[tuple[str, int]]:
        return {(one.topic, one.queue_id) for one in consumer.held_queues() if one.topic != f"%RETRY%{group}"}

    async with consumer:
        await until(lambda: len(seen) == 8, "every message", SECONDS)
        assert held() == {(topic, -1)}
        await set_mode(servers, topic, group, "PULL")
        await until(lambda: {(topic, i) for i in range(4)} <= held(), "it pulls", SECONDS)
        await until(lambda: len(seen[3]) == 2, "the one that failed", SECONDS)
        await send(namesrv, topic, range(8, 16))
        await until(lambda: len(seen) == 16, "the new messages", SECONDS)
        await set_mode(servers, topic, group, "POP")
        await until(lambda: held() == {(topic, -1)}, "it pops again", SECONDS)
        await send(namesrv, topic, range(16, 24))
        await until(lambda: len(seen) == 24, "the last messages", SECONDS)
    assert {number: times for number, times in seen.items() if times != [0]} == {3: [0, 1]}


def test_the_sync_facade_pops(servers: Servers) -> None:
    run(send(servers.namesrv_addr, "PopSync", range(4)))
    with sync.PopConsumer("CG-pop-sync", servers.namesrv_addr, settings=FIRST) as consumer:
        found: list[ReceivedMessage] = []
        while len(found) < 4:
            found += consumer.pop("PopSync", wait=2)
        consumer.change_invisible_time(found[0], 60)
        consumer.ack(found[0])
        consumer.ack_many(found[1:])
        assert consumer.pop("PopSync") == []


def test_the_example_shows_how_workers_share(servers: Servers) -> None:
    command = [sys.executable, Path(__file__).parents[2] / "examples" / "pop.py", servers.namesrv_addr]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["popped: by hand", "jobs done: 100", "done again: ['7']"]


# -- scenarios that mostly wait for invisible times


WAITING = (redelivery, handling, closing, switching)
Errors = dict[tuple[Scenario, bool], BaseException | None]
"""The error of each scenario, with our broker (True) and with Apache's."""


def run_together(scenarios: Sequence[Scenario], peers: dict[str, Servers]) -> Errors:
    """Run scenarios at the same time, with both brokers."""
    found: Errors = {}

    async def run_all() -> None:
        runs = [(scenario, servers) for scenario in scenarios for servers in peers.values()]
        ended = await asyncio.gather(*(scenario(servers) for scenario, servers in runs), return_exceptions=True)
        for (scenario, servers), error in zip(runs, ended, strict=True):
            found[scenario, servers.is_ours] = error

    run(run_all())
    return found


@pytest.fixture(scope="module", autouse=True)
def waiting(peers: dict[str, Servers]) -> Iterator[Future[Errors]]:
    """Start the scenarios that wait before the first test."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(run_together, WAITING, peers)


@pytest.fixture(scope="module")
def errors(waiting: Future[Errors], peers: dict[str, Servers]) -> Errors:
    """Return the errors of all scenarios. The last scenario changes settings of the brokers, so it runs alone."""
    return waiting.result() | run_together([retries_of_the_second_version], peers)


@pytest.fixture
def outcome(errors: Errors, servers: Servers) -> Outcome:
    """Return a function that raises the error of a scenario with the broker of the test."""

    def check(scenario: Scenario) -> None:
        if (error := errors[scenario, servers.is_ours]) is not None:
            raise error

    return check


def test_what_is_not_acknowledged_in_time_is_redelivered(outcome: Outcome) -> None:
    outcome(redelivery)


def test_retry_topics_of_the_second_version_are_acknowledged(outcome: Outcome) -> None:
    """Also for a broker that returns messages with their retry topic, and leaves the handles to the client."""
    outcome(retries_of_the_second_version)


def test_handlers_acknowledge_fail_take_long_and_give_up(outcome: Outcome) -> None:
    outcome(handling)


def test_closing_gives_back_what_no_handler_began_with(outcome: Outcome) -> None:
    outcome(closing)


def test_a_group_changes_from_popping_to_pulling(outcome: Outcome) -> None:
    outcome(switching)


# -- operators, and Java


def create_group(servers: Servers, group: str) -> None:
    body = msgspec.json.encode(SubscriptionGroupConfig(group_name=group))
    answer = ask(servers.broker_addr, Command(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body))
    assert answer.code == 0, answer.remark


async def set_mode(servers: Servers, topic: str, group: str, mode: str) -> None:
    runtime = ClientRuntime(servers.namesrv_addr, settings=FIRST)
    try:
        await runtime.calls.set_request_mode(
            servers.broker_addr, MessageRequestMode(topic=topic, consumer_group=group, mode=mode)
        )
    finally:
        await runtime.close()


@contextlib.contextmanager
def java_reader(servers: Servers, kit: ApacheKit, work_dir: Path, topic: str, group: str) -> Iterator[list[int]]:
    """Run a Java member. Yield the growing list of its message numbers."""
    command = kit.jvm(
        "interop.PopReader", [servers.namesrv_addr, topic, group], heap_mb=PROBE_HEAP_MB, work_dir=work_dir
    )
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    numbers: list[int] = []

    def read() -> None:
        assert reader.stdout is not None
        numbers.extend(map(int, reader.stdout))

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield numbers
    finally:
        reader.kill()
        reading.join()
        reader.communicate()
