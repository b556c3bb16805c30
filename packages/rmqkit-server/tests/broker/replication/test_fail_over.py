"""A group whose master stops and restarts: its route, its work without the master, and the view of consumers.

Source: behaviour.md §10.2, §10.4, §10.5; remoting.md §10.2.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter

import msgspec
import pytest

from rmqkit.broker.replication.tables import SlaveSync
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import HoldLimits, ProducerSettings, Pulling, PushConsumerSettings, StartFrom
from rmqkit.errors import ConnectFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.broker.groups_of_brokers import SECONDS, Brokers
from tests.client.inside import runtime_of
from tests.client.peers import until
from tests.virtual_time import run as run_virtual

ACTING = {"acts_as_master": True, "transaction_timeout_ms": 500, "transaction_check_interval_ms": 200}
QUICK = {"route_interval_ms": 100, "heartbeat_interval_ms": 200}
SENDING = ProducerSettings(**QUICK)
CONSUMING = PushConsumerSettings(
    start_from=StartFrom.FIRST_OFFSET,
    pull=Pulling(error_pause_ms=50),
    take_over_pause_ms=0,
    persist_interval_ms=100,
    suspend_queue_ms=50,
    **QUICK,
)


def on_brokers(test):
    """Run a coroutine function as a test, with a deadline."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        async def main():
            async with asyncio.timeout(3 * SECONDS):
                await test(*args, **kwargs)

        run_virtual(main())

    return run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("rmqkit.broker.replication.acting_master._LOOK_MS", 50)
    monkeypatch.setattr("rmqkit.broker.replication.tables._PERIOD_MS", 100.0)


class Seen:
    """A handler that counts bodies. It fails at the first delivery of bodies that begin with ``retry``."""

    def __init__(self):
        self.times = Counter()
        self.brokers = {}

    async def __call__(self, message):
        self.times[message.body] += 1
        self.brokers[message.body] = message.broker_name
        if message.body.startswith(b"retry") and not message.reconsume_times:
            raise ValueError("to be retried")

    def consumer(self, brokers, group="G", **options):
        consumer = PushConsumer(group, brokers.name_server.address, settings=CONSUMING, **options)
        consumer.subscribe("T", "*", self)
        return consumer

    async def all(self, *bodies):
        await until(lambda: set(bodies) <= self.times.keys(), f"{bodies}; there are {self.times}", SECONDS)


async def create(brokers, *names):
    for name in names:
        topics = b'{"topicConfigList":[{"topicName":"T","readQueueNums":2,"writeQueueNums":2}]}'
        assert (await brokers.ask(name, RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, topics)).code == 0


async def gone(brokers, topic="T", name="a"):
    """Wait until the route names the slave in place of the master."""
    slave = brokers.running[f"{name}-1"].address
    while await brokers.addresses(topic, name) != {0: slave}:
        await asyncio.sleep(0.01)


async def back(brokers, name="a"):
    """Wait until the route has the master again, and the slave has found it and follows."""
    while (await brokers.addresses("T", name)).get(0) != brokers.running[f"{name}-0"].address:
        await asyncio.sleep(0.01)
    await brokers.until_copied(f"{name}-0", f"{name}-1")


def queue(broker, queue_id=0):
    return MessageQueue("T", broker, queue_id)


def undecided(commit_when_asked):
    return {"execute": lambda message, argument: None, "check": lambda message: commit_when_asked[0]}


@on_brokers
async def test_what_is_due_goes_to_another_master_and_nothing_comes_twice_when_the_master_is_back(tmp_path):
    store = {"message_delay_level": "1s 2s"}
    async with Brokers(tmp_path, store=store, remote_escape=True, **ACTING) as brokers:
        for name in ("a-0", "a-1", "b-0"):
            await brokers.start(name)
        await create(brokers, "a-0")
        brokers.context("a-0").schedule.stop()  # however slow the machine is, the master delivers nothing in time
        seen, answers = Seen(), [TransactionState.UNKNOWN]
        transactions = TransactionProducer("P", brokers.name_server.address, settings=SENDING, **undecided(answers))
        namesrv = brokers.name_server.address
        async with seen.consumer(brokers), Producer("Q", namesrv, settings=SENDING) as producer, transactions:
            await producer.send(Message(topic="T", body=b"plain"), queue=queue("a"))
            await seen.all(b"plain")
            await producer.send(Message(topic="T", body=b"retry"), queue=queue("a"))
            await producer.send(Message(topic="T", body=b"delayed", delay_level=1), queue=queue("a", 1))
            await transactions.send_in_transaction(Message(topic="T", body=b"half"))
            await create(brokers, "b-0")
            await seen.all(b"retry")
            await brokers.until_copied("a-0", "a-1")
            await until(lambda: brokers.context("a-1").topics.get("T"), "the topic at the slave")
            await brokers.crash("a-0")
            await gone(brokers)
            (shown,) = [data for data in (await brokers.route("T")).queue_datas if data.broker_name == "a"]
            assert shown.perm == 4
            answers[0] = TransactionState.COMMIT
            await until(lambda: seen.times[b"retry"] == 2, f"the retry; there are {seen.times}", SECONDS)
            await seen.all(b"delayed", b"half")
            assert seen.brokers == {b"plain": "a", b"retry": "b", b"delayed": "b", b"half": "b"}

            await brokers.start("a-0")
            await back(brokers)
            assert not brokers.running["a-1"].parts.slave.acting.is_acting
            ours, theirs = (brokers.context(name).schedule.offsets().offset_table for name in ("a-0", "a-1"))
            assert ours == theirs and ours
            master = brokers.running["a-0"].address
            await until(lambda: runtime_of(producer).routes.address("a") == master, "the producer's new route")
            await producer.send(Message(topic="T", body=b"delayed again", delay_level=1), queue=queue("a"))
            await seen.all(b"delayed again")
            assert seen.brokers[b"delayed again"] == "a"
        assert {body: n for body, n in seen.times.items() if n != 1 and body != b"half"} == {b"retry": 2}


async def codes(brokers, name):
    """Return a slave's answers to clients that use it as the master."""
    send = {"a": "P", "b": "T", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0}
    half = {"i": "TRAN_MSG\x01true\x02PGROUP\x01P\x02", **send}
    back = {"offset": 0, "group": "G", "delayLevel": 0, "originMsgId": "", "originTopic": "T", "unitMode": "false"}
    end = {"producerGroup": "P", "tranStateTableOffset": 0, "commitLogOffset": 0, "commitOrRollback": 8}
    asked = {
        "send": (RequestCode.SEND_MESSAGE_V2, send),
        "half": (RequestCode.SEND_MESSAGE_V2, half),
        "back": (RequestCode.CONSUMER_SEND_MSG_BACK, back),
        "end": (RequestCode.END_TRANSACTION, {**end, "msgId": "", "fromTransactionCheck": "true"}),
    }
    return {what: await brokers.ask(name, code, b"x", **fields) for what, (code, fields) in asked.items()}


@on_brokers
async def test_without_escape_everything_due_waits_until_the_master_is_back(tmp_path):
    async with Brokers(tmp_path, store={"message_delay_level": "1s"}, **ACTING) as brokers:
        for name in ("a-0", "a-1"):
            await brokers.start(name)
        await create(brokers, "a-0")
        brokers.context("a-0").schedule.stop()  # however slow the machine is, the master delivers nothing in time
        seen, answers = Seen(), [TransactionState.UNKNOWN]
        transactions = TransactionProducer("P", brokers.name_server.address, settings=SENDING, **undecided(answers))
        async with seen.consumer(brokers), transactions:
            await transactions.send(Message(topic="T", body=b"delayed", delay_level=1))
            await transactions.send_in_transaction(Message(topic="T", body=b"half"))
            due_ms = brokers.context("a-0").clock.now_ms() + 1000
            await brokers.until_copied("a-0", "a-1")
            await until(lambda: "T" in slave_topics(brokers) and "G" in brokers.context("a-1").groups, "the tables")
            await brokers.crash("a-0")
            await gone(brokers)
            await until(lambda: brokers.running["a-1"].parts.slave.acting.is_acting, "acting")
            answers[0] = TransactionState.COMMIT
            store = brokers.context("a-1").store
            end = store.max_physical_offset
            await until(lambda: brokers.context("a-1").clock.now_ms() > due_ms + 200, "the time it was due")
            assert (store.max_physical_offset, seen.times) == (end, {})
            answered = await codes(brokers, "a-1")
            assert {what: answer.code for what, answer in answered.items()} == {
                "send": ResponseCode.SERVICE_NOT_AVAILABLE,
                "half": ResponseCode.SERVICE_NOT_AVAILABLE,
                "back": ResponseCode.SYSTEM_ERROR,
                "end": ResponseCode.SLAVE_NOT_AVAILABLE,
            }
            assert answered["back"].remark == "no master available along with 127.0.0.1"
            await brokers.start("a-0")
            await back(brokers)
            await seen.all(b"delayed", b"half")
        assert seen.times == {b"delayed": 1, b"half": 1}


def slave_topics(brokers):
    return brokers.context("a-1").topics.snapshot().topic_config_table


def committed(brokers, name):
    return [brokers.context(name).offsets.get("G", "T", queue_id) or 0 for queue_id in range(2)]


@on_brokers
async def test_a_consumer_continues_at_a_classic_slave_and_goes_back(tmp_path):
    """Without an acting master, the route has the slave under its own id, and offsets committed there stay there."""
    async with Brokers(tmp_path) as brokers:
        for name in ("a-0", "a-1"):
            await brokers.start(name)
        await create(brokers, "a-0")
        async with Producer("P", brokers.name_server.address, settings=SENDING) as producer:

            async def send(*numbers):
                for number in numbers:
                    await producer.send(Message(topic="T", body=b"%d" % number), queue=queue("a", number % 2))

            await send(*range(10))
            seen = Seen()
            async with seen.consumer(brokers):
                await seen.all(*(b"%d" % number for number in range(10)))
            assert committed(brokers, "a-0") == [5, 5]
            await send(*range(10, 20))
            await brokers.until_copied("a-0", "a-1")
            await until(lambda: committed(brokers, "a-1") == [5, 5], "the offsets at the slave")
            await brokers.crash("a-0")
            while await brokers.addresses("T", "a") != {1: brokers.running["a-1"].address}:
                await asyncio.sleep(0.01)
            async with seen.consumer(brokers):
                await seen.all(*(b"%d" % number for number in range(20)))
                await until(lambda: committed(brokers, "a-1") == [10, 10], "the offsets the slave is told")
                await brokers.start("a-0")
                await brokers.running["a-1"].parts.registration.register()  # as every 30 s
                await back(brokers)
                master = brokers.running["a-0"].address
                await until(lambda: runtime_of(producer).routes.address("a") == master, "the producer's new route")
                await send(*range(20, 30))
                await seen.all(*(b"%d" % number for number in range(30)))
                await until(lambda: committed(brokers, "a-0") == [15, 15], "the offsets the master is told")
        assert set(seen.times.values()) == {1}


@on_brokers
async def test_ordered_consumers_have_their_locks_at_the_acting_master_and_at_the_master_again(tmp_path):
    async with Brokers(tmp_path, **ACTING) as brokers:
        for name in ("a-0", "a-1"):
            await brokers.start(name)
        await create(brokers, "a-0")
        handled, gate = {0: [], 1: []}, asyncio.Event()

        async def handler(message):
            if len(handled[message.queue_id]) >= 5:
                await gate.wait()
            handled[message.queue_id].append(int(message.body))

        settings = msgspec.structs.replace(
            CONSUMING,
            lock_interval_ms=100,
            pull=Pulling(count=1, error_pause_ms=50),
            limits=HoldLimits(held_messages_max=1),
        )
        async with Producer("P", brokers.name_server.address, settings=SENDING) as producer:
            for number in range(40):
                await producer.send(Message(topic="T", body=b"%d" % number), queue=queue("a", number % 2))
            consumers = [PushConsumer("G", brokers.name_server.address, settings=settings, ordered=True) for _ in "ab"]
            for consumer in consumers:
                consumer.subscribe("T", "*", handler)
            async with consumers[0], consumers[1]:
                await until(lambda: sum(map(len, handled.values())) == 10, "the first ones")
                await brokers.until_copied("a-0", "a-1")
                await until(lambda: "T" in slave_topics(brokers) and committed(brokers, "a-1") != [0, 0], "the tables")
                await brokers.crash("a-0")
                await gone(brokers)
                await until(lambda: brokers.context("a-1").queue_locks.is_any_held("G"), "locks at the slave")
                gate.set()
                await until(lambda: all(len(numbers) >= 20 for numbers in handled.values()), "all that is there")
                await brokers.start("a-0")
                await back(brokers)
                await until(lambda: brokers.context("a-0").queue_locks.is_any_held("G"), "locks at the master")
                master = brokers.running["a-0"].address
                await until(lambda: runtime_of(producer).routes.address("a") == master, "the producer's new route")
                for number in range(40, 50):
                    await producer.send(Message(topic="T", body=b"%d" % number), queue=queue("a", number % 2))
                await until(lambda: {48, 49} <= {numbers[-1] for numbers in handled.values()}, f"the rest: {handled}")
        for queue_id, numbers in handled.items():
            first_seen = list(dict.fromkeys(numbers))
            # Messages that a member was handling when the master stopped may be repeated among later messages.
            assert first_seen == list(range(queue_id, 50, 2)), "each queue is consumed in order, without gaps"


@on_brokers
async def test_whoever_comes_back_takes_over_what_was_acknowledged_meanwhile(tmp_path):
    """The master stops, then the first slave. They restart one after the other, each with its own tables."""
    async with Brokers(tmp_path, **ACTING) as brokers:
        for name in ("a-0", "a-1", "a-2"):
            await brokers.start(name)
        await create(brokers, "a-0")
        tables = [brokers.context(name) for name in ("a-1", "a-2")]
        await until(lambda: all(context.topics.get("T") for context in tables), "the topic at the slaves")
        await brokers.crash("a-0")
        await until(lambda: brokers.running["a-1"].parts.slave.acting.is_acting, "the first slave")
        assert not brokers.running["a-2"].parts.slave.acting.is_acting
        await brokers.crash("a-1")
        await until(lambda: brokers.running["a-2"].parts.slave.acting.is_acting, "the second slave")
        assert await brokers.addresses("T", "a") == {0: brokers.running["a-2"].address}
        brokers.context("a-2").offsets.commit("G", "T", 0, 7)
        await brokers.start("a-1")
        assert brokers.context("a-1").offsets.get("G", "T", 0) == 7
        await until(lambda: not brokers.running["a-2"].parts.slave.acting.is_acting, "the second slave's end")
        await until(lambda: brokers.running["a-1"].parts.slave.acting.is_acting, "the first slave again")
        brokers.context("a-1").offsets.commit("G", "T", 0, 9)
        await brokers.start("a-0")
        assert brokers.context("a-0").offsets.get("G", "T", 0) == 9
        # The slave started while its master was away, so it asks the name servers whether this broker is its master.
        await until(lambda: not brokers.running["a-1"].parts.slave.acting.is_acting, "the first slave's end")
        await until(lambda: brokers.context("a-2").offsets.get("G", "T", 0) == 9, "the master's table at the slave")


@on_brokers
async def test_a_slave_serves_a_topic_that_its_master_died_without_telling_of(tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.replication.tables._ASK_AGAIN_SECONDS", 0.01)

    async def unheard(self, master):
        raise ConnectFailed(master, "it is gone")

    async with Brokers(tmp_path, **ACTING) as brokers:
        for name in ("a-0", "a-1"):
            await brokers.start(name)
        await until(lambda: brokers.running["a-1"].parts.slave.log.is_following, "the link")
        monkeypatch.setattr(SlaveSync, "_copy_topics", unheard)
        await create(brokers, "a-0")
        async with Producer("P", brokers.name_server.address, settings=SENDING) as producer:
            for queue_id in (0, 1):
                await producer.send(Message(topic="T", body=b"%d" % queue_id), queue=queue("a", queue_id))
        await brokers.until_copied("a-0", "a-1")
        await brokers.crash("a-0")
        await gone(brokers)
        seen = Seen()
        async with seen.consumer(brokers):
            await seen.all(b"0", b"1")
