"""The watchdog: stalled queues, with the start and the reason of the stall. Source: behaviour.md §8.6, §8.10, §8.12."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import msgspec
import pytest

from rmqkit.client.consumer.process_queue import Failure, ProcessQueue
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.consumer.watch import QueueWatch
from rmqkit.client.observe.status import QueueState
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PullConsumerSettings, Pulling, PushConsumerSettings, StartFrom
from rmqkit.errors import ConnectFailed, PeerRefused
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import LockedQueues, MessageQueue
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of
from tests.client.messages import received
from tests.client.peers import Cluster, refused, until

QUEUE = MessageQueue("T", "broker-0", 0)
NOW_MS = 1_700_000_000_000
NOW = "2023-11-14T22:13:20Z"
REFUSED = PeerRefused(16, "the broker does not permit to pull message", "127.0.0.1:10911")
UNREACHABLE = ConnectFailed("127.0.0.1:10911", "Connection refused")


class Clock:
    def __init__(self):
        self.passed_ms = 0

    def now_ms(self):
        return NOW_MS + self.passed_ms

    def monotonic_ms(self):
        return 5000.0 + self.passed_ms


class Locks:
    def __init__(self, *held, **errors):
        self.held = set(held)
        self.errors = errors

    def is_held(self, queue):
        return queue in self.held

    def error_of(self, queue):
        return self.errors.get(queue.broker_name)


class Watched:
    """One queue with offset 7 to consume and 10 as its maximum, and its watchdog, which waits for 10 s."""

    def __init__(self, locks=None, wanted=(), **limits):
        limits = {"messages_max": 1000, "bytes_max": 1 << 20, "span_max": 2000, **limits}
        self.queue = ProcessQueue(QUEUE, next_offset=7, **limits)
        self.queue.max_offset = 10
        self.clock = Clock()
        self.held = SimpleNamespace(process_queues={} if wanted else {QUEUE: self.queue}, stats={})
        member = SimpleNamespace(
            group="CG",
            runtime=SimpleNamespace(clock=self.clock),
            settings=PushConsumerSettings(),
            consume_service=SimpleNamespace(waits_for=lambda message: "its turn"),
            locks=locks,
        )
        self.watch = QueueWatch(member, self.held, lambda: set(wanted))
        self.watch.statuses()

    def take(self, *offsets):
        messages = self.queue.put([received(offset) for offset in offsets])
        self.queue.next_offset = offsets[-1] + 1
        return messages

    def after(self, passed_ms):
        self.clock.passed_ms += passed_ms
        return self.watch.statuses()[0]

    def told(self, passed_ms):
        status = self.after(passed_ms)
        return status.state, status.reason, status.is_stalled


def test_a_queue_without_backlog_is_caught_up_however_long():
    it = Watched()
    it.queue.max_offset = 7
    assert it.told(60_000) == (QueueState.CAUGHT_UP, "", False)
    it.queue.max_offset = 10
    it.take(7)
    assert it.told(9_999) == (QueueState.MOVING, "", False), "the time without backlog does not count"
    assert it.told(1)[2], "the handler had its time"


def test_a_queue_whose_offset_rises_moves():
    it = Watched()
    messages = it.take(7, 8, 9)
    for message in messages[:2]:
        assert it.told(9_999) == (QueueState.MOVING, "", False)
        it.queue.remove(message)
    status = it.after(9_999)
    assert (status.consumed_offset, status.pulled_offset, status.max_offset, status.backlog) == (9, 10, 10, 1)
    assert (status.held_messages, status.held_bytes, status.is_stalled) == (1, 4, False)


def test_a_busy_handler_is_reported_with_its_message():
    it = Watched()
    it.take(7)[0].properties["CONSUME_START_TIME"] = str(NOW_MS)
    assert it.told(9_999) == (QueueState.MOVING, "", False)
    status = it.after(1)
    reason = f"the handler works on message id-7 at offset 7 since {NOW}"
    assert (status.state, status.reason, status.is_stalled) == (QueueState.BUSY, reason, True)
    assert status.since_ms == NOW_MS


def test_a_message_that_no_handler_has_begun_with_waits_for_its_turn():
    it = Watched()
    it.take(7)
    assert it.told(10_000) == (QueueState.WAITING_FOR_TURN, "message id-7 at offset 7 waits for its turn", True)


def test_a_handler_that_fails_again_and_again_is_reported_with_its_error():
    it = Watched()
    (message,) = it.take(7)
    message.reconsume_times = 3
    it.queue.failure = Failure(message, ValueError("no stock"))
    reason = "the handler failed 3 times on message id-7 at offset 7: ValueError: no stock"
    assert it.told(10_000) == (QueueState.FAILING, reason, True)
    it.queue.failure = Failure(received(6), ValueError("of another message"))
    assert it.told(0)[0] is QueueState.WAITING_FOR_TURN


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ({"messages_max": 2}, "2 of at most 2 messages held"),
        ({"bytes_max": 8}, "8 of at most 8 bytes held"),
        ({"span_max": 1}, "1 of at most 1 offsets from the first message held to the last"),
    ],
    ids=["messages", "bytes", "span"],
)
def test_flow_control_is_reported_with_its_limit_and_with_what_holds_it_back(limits, limit):
    it = Watched(**limits)
    it.take(7, 8)
    assert it.told(0) == (QueueState.FULL, limit, False)
    assert it.told(10_000) == (QueueState.FULL, f"{limit}; message id-7 at offset 7 waits for its turn", True)


@pytest.mark.parametrize(("error", "state"), [(REFUSED, QueueState.REFUSED), (UNREACHABLE, QueueState.UNREACHABLE)])
def test_a_broker_that_refuses_or_does_not_answer_is_reported_with_its_error(error, state):
    it = Watched()
    it.queue.max_offset = 7
    it.watch.statuses()
    it.queue.error = error
    assert it.told(0) == (state, str(error), False)
    status = it.after(10_000)
    assert (status.state, status.is_stalled) == (state, True), "the backlog is not known any more"
    assert status.since_ms == NOW_MS
    it.queue.error = None
    assert it.told(0) == (QueueState.CAUGHT_UP, "", False)


def test_a_paused_queue_is_reported_and_stands_still_only_with_a_backlog():
    it = Watched()
    it.queue.is_paused = True
    assert it.told(10_000) == (QueueState.PAUSED, "the program paused it: call resume() to continue", True)
    it.queue.max_offset = 7
    assert it.told(0)[2] is False
    it.queue.max_offset = 10
    it.queue.is_paused = False
    it.take(7)
    assert it.told(0) == (QueueState.MOVING, "", False), "the pause does not count"


def test_a_queue_that_is_taken_over_or_given_up_is_reported():
    it = Watched()
    it.queue.is_taking_over = True
    assert it.told(0) == (QueueState.TAKING_OVER, "its former owner may still save", False)
    assert it.told(10_000)[2]
    it.queue.is_taking_over = False
    it.queue.drop()
    assert it.told(0)[:2] == (QueueState.TAKING_OVER, "it is released when its handlers have finished")


@pytest.mark.parametrize("wanted", [(), (QUEUE,)], ids=["held", "wanted"])
def test_a_lock_that_another_member_has_is_reported(wanted):
    it = Watched(Locks(), wanted)
    assert it.told(10_000) == (QueueState.WAITING_FOR_LOCK, "another member of the group has it", True)
    it = Watched(Locks(**{"broker-0": UNREACHABLE}), wanted)
    assert it.told(10_000) == (QueueState.UNREACHABLE, f"its lock cannot be acquired: {UNREACHABLE}", True)
    it = Watched(Locks(**{"broker-0": REFUSED}), wanted)
    assert it.told(10_000) == (QueueState.WAITING_FOR_LOCK, str(REFUSED), True)


def test_each_change_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    it = Watched()
    (message,) = it.take(7)
    for _ in range(3):
        it.clock.passed_ms += 10_000
        it.watch.report()
    it.queue.error = UNREACHABLE
    for _ in range(3):
        it.clock.passed_ms += 10_000
        it.watch.report()
    it.queue.error = None
    it.queue.remove(message)
    for _ in range(3):
        it.watch.report()
    place = f"group CG: {QUEUE}"
    assert [one.getMessage() for one in caplog.records] == [
        (
            f"{place} stands still since {NOW} at offset 7, backlog 3: waiting for turn, message id-7 at offset 7 "
            "waits for its turn"
        ),
        f"{place} stands still since 2023-11-14T22:14:00Z at offset 7, backlog 3: unreachable, {UNREACHABLE}",
        f"{place} moves again, at offset 8",
    ]
    assert [one.levelname for one in caplog.records] == ["WARNING", "WARNING", "INFO"]


# -- in consumers

SETTINGS = {
    "start_from": StartFrom.FIRST_OFFSET,
    "take_over_pause_ms": 0,
    "stall_after_ms": 40,
    "pull": Pulling(error_pause_ms=10),
}
QUICK = PushConsumerSettings(**SETTINGS)


def states(consumer):
    return {one.queue: one.state for one in consumer.status().queues if one.queue.topic == "T"}


async def stalled_at_last(consumer, is_wanted=lambda one: True):
    """Wait for the status of a stalled queue that ``is_wanted`` accepts. The first report may have another reason."""
    found = []
    await until(lambda: found.extend(filter(is_wanted, consumer.status().stalled)) or found, "the report")
    return found[0]


async def test_a_handler_that_hangs_is_reported_until_it_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO, "rmqkit.client.consumer.watch")
    gate = asyncio.Event()
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[1]
        sent = await producer.send(Message(topic="T", body=b"x"), queue=queue)
        # Long enough for the handler to have begun on a busy machine.
        settings = msgspec.structs.replace(QUICK, stall_after_ms=400)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings)
        consumer.subscribe("T", "*", lambda message: gate.wait())
        async with consumer:
            await until(lambda: "stands still" in caplog.text, "the report")
            (stalled,) = consumer.status().stalled
            assert (stalled.queue, stalled.state, stalled.backlog) == (queue, QueueState.BUSY, 1)
            assert f"the handler works on message {sent.msg_id} at offset 0 since " in stalled.reason
            info = coordinator_of(consumer).running_info().user_consumer_info
            assert info[f"T {queue.broker_name} 1"] == f"busy: {stalled.reason}"
            text = str(consumer.status())
            assert text.startswith("consumer of group CG, client ")
            assert " queues, backlog 1, 1 stand still\n" in text
            assert text.count("\n") == len(consumer.status().queues) + 1
            assert consumer.status().missing_topics == []
            gate.set()
            await until(lambda: "moves again" in caplog.text, "the end of the report")
            await until(lambda: set(states(consumer).values()) == {QueueState.CAUGHT_UP}, "everything is consumed")
        assert [one.levelname for one in caplog.records if one.name == "rmqkit.client.consumer.watch"] == [
            "WARNING",
            "INFO",
        ]
        assert consumer.status().state == "closed"


async def test_an_ordered_queue_that_fails_is_reported_as_failing(tmp_path):
    def handler(message):
        raise ValueError("no stock")

    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await producer.send(Message(topic="T", body=b"x"))
        settings = msgspec.structs.replace(QUICK, suspend_queue_ms=10)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings, ordered=True)
        consumer.subscribe("T", "*", handler)
        async with consumer:
            stalled = await stalled_at_last(consumer, lambda one: one.state is QueueState.FAILING)
            assert stalled.reason.endswith("ValueError: no stock")


async def test_messages_that_nobody_requests_are_reported(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await producer.send(Message(topic="T", body=b"x"))
        polling = PullConsumer("one", cluster.namesrv_address, settings=PullConsumerSettings(**SETTINGS))
        iterating = PushConsumer("other", cluster.namesrv_address, settings=QUICK)
        polling.subscribe("T")
        iterating.subscribe("T")
        async with polling, iterating:
            for consumer, what in ((polling, "poll or iterate"), (iterating, "iterate")):
                stalled = await stalled_at_last(consumer)
                assert stalled.state is QueueState.WAITING_FOR_TURN
                assert stalled.reason.endswith(f" waits for the program to {what} further")
            assert len(await polling.poll()) == 1
            assert await polling.poll(0.001) == []
            await until(lambda: set(states(polling).values()) == {QueueState.CAUGHT_UP}, "everything is consumed")


async def test_more_queues_than_handlers_wait_for_their_turn(tmp_path):
    gate = asyncio.Event()
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        for queue in await producer.queues("T"):
            await producer.send(Message(topic="T", body=b"x"), queue=queue)
        settings = msgspec.structs.replace(QUICK, handlers_max=1)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings)
        consumer.subscribe("T", "*", lambda message: gate.wait())
        async with consumer:
            await stalled_at_last(consumer, lambda one: one.state is QueueState.BUSY)
            await until(lambda: len(consumer.status().stalled) == 4, "the others")
            busy, *waiting = sorted(consumer.status().stalled, key=lambda one: one.state.value)
            assert busy.state is QueueState.BUSY
            assert {one.reason.partition(" waits for ")[2] for one in waiting} == {
                "a free handler: all 1 are at work (consumeThreadMax)"
            }
            gate.set()


async def test_paused_queues_are_reported(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[1]
        await producer.send(Message(topic="T", body=b"x"), queue=queue)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=QUICK)
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            await until(lambda: len(states(consumer)) == 4, "the queues")
            consumer.pause()
            assert set(states(consumer).values()) == {QueueState.PAUSED}
            consumer.resume(queue)
            assert [one for one, state in states(consumer).items() if state is not QueueState.PAUSED] == [queue]


class Answering:
    """A consumer of group CG at a scripted broker with one queue of topic T."""

    def __init__(self, *, ordered=False, **answers):
        self.cluster = Cluster()
        self.answers = {RequestCode[name]: answer for name, answer in answers.items()}
        self.ordered = ordered

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T", queues=1)
        for code, answer in self.answers.items():
            self.cluster.broker.answer(code, answer)
        self.consumer = PushConsumer("CG", self.cluster.namesrv, settings=QUICK, ordered=self.ordered)
        self.consumer.subscribe("T", "*", lambda message: None)
        await self.consumer.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.consumer.close()
        await self.cluster.__aexit__(*exc_info)

    async def stalled(self, is_wanted=lambda one: True):
        stalled = await stalled_at_last(self.consumer, is_wanted)
        assert stalled.queue == QUEUE
        return stalled


async def test_a_refused_pull_is_reported_with_code_and_remark():
    async with Answering(PULL_MESSAGE=refused(16, "group CG may not read")) as it:
        stalled = await it.stalled()
        assert stalled.state is QueueState.REFUSED
        assert stalled.reason.startswith(f"{it.cluster.broker.address} answered with code 16: group CG may not read")


async def test_an_unreachable_broker_is_reported_with_address_and_error_and_then_that_it_is_back():
    async with Answering() as it:
        broker = it.cluster.broker
        host, _, port = broker.address.rpartition(":")
        await until(lambda: broker.asked(RequestCode.PULL_MESSAGE), "a pull")
        await broker.stop()
        told = f"cannot connect to {host}:{port}: Connection refused"
        stalled = await it.stalled(lambda one: one.reason.startswith(told))
        assert stalled.state is QueueState.UNREACHABLE


async def test_a_lock_that_cannot_be_had_is_reported():
    async with Answering(
        ordered=True, LOCK_BATCH_MQ=lambda command: reply(command, body=msgspec.json.encode(LockedQueues([])))
    ) as it:
        stalled = await it.stalled()
        assert (stalled.state, stalled.reason) == (QueueState.WAITING_FOR_LOCK, "another member of the group has it")
        assert stalled.consumed_offset is stalled.backlog is None
    async with Answering(ordered=True, LOCK_BATCH_MQ=refused(1, "disk is full")) as it:
        await it.stalled(lambda one: one.reason == f"{it.cluster.broker.address} answered with code 1: disk is full")
