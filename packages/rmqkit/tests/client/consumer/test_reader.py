"""Reading a topic without a group while its broker stops, starts, and gets more queues; and `ConnectedClients.read`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

import rmqkit
from rmqkit.admin import Admin
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer import reader as reader_module
from rmqkit.client.consumer.pull import PullConsumer, PullResult
from rmqkit.client.consumer.reader import Start, TopicReader, Wanted
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings
from rmqkit.errors import ClientError, ConnectFailed, NoRoute, PeerRefused, SettingsError, TimeIllegal
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import TOOLS_GROUP
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.rpc import PullStatus
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.client.messages import received
from tests.client.peers import Cluster, until
from tests.ports import free_port


@asynccontextmanager
async def a_broker(namesrv, root, port=0):
    settings = BrokerSettings(listen_port=port, bind_address="127.0.0.1", broker_name="broker-a", namesrv_addr=namesrv)
    broker = Broker(settings, StoreSettings(commit_log_file_bytes=1 << 20), root)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


@asynccontextmanager
async def clients():
    """A name server; a producer and a consumer of it that look at routes all the time."""
    namesrv = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1"))
    await namesrv.start()
    runtime = ClientRuntime(namesrv.address, settings=ClientSettings(route_interval_ms=50))
    await runtime.start()
    try:
        async with (
            PullConsumer(TOOLS_GROUP, runtime=runtime) as consumer,
            Producer("PG", runtime=runtime, settings=ProducerSettings(template_queue_count=1)) as producer,
        ):
            yield namesrv.address, runtime, consumer, producer
    finally:
        await runtime.close()
        await namesrv.stop()


@pytest.mark.real_time
async def test_reading_outlives_a_restart_of_the_broker_and_sees_new_queues(tmp_path):
    notes = []
    async with AsyncExitStack() as stack:
        namesrv, runtime, consumer, producer = await stack.enter_async_context(clients())
        port = free_port(-2, 1)
        async with a_broker(namesrv, tmp_path, port):
            await producer.send(Message(topic="T", body=b"before"))
            await until(lambda: runtime.routes.subscribe_queues("T"), "the topic is known")
            reader = await stack.enter_async_context(
                TopicReader(consumer, "T", Start(offset=0), Wanted(), notes.append)
            )
            assert [one.body for one in await reader.next()] == [b"before"]
        await until(lambda: notes, "the broker is away")
        await stack.enter_async_context(a_broker(namesrv, tmp_path, port))
        await until(lambda: len(notes) == 2, "the broker is back")
        await producer.send(Message(topic="T", body=b"after"))
        assert [one.body for one in await reader.next()] == [b"after"]
        async with Admin(namesrv) as admin:
            await admin.topics.create("T", broker="broker-a", read_queues=3, write_queues=3)
        await until(lambda: len(runtime.routes.subscribe_queues("T")) == 3, "there are more queues")
        await producer.send(Message(topic="T", body=b"new"), queue=MessageQueue("T", "broker-a", 2))
        assert [(one.body, one.queue_id) for one in await reader.next()] == [(b"new", 2)]
    assert notes[0].startswith("broker broker-a: ")
    assert notes[0].endswith("; trying again")
    assert notes[1] == "broker broker-a answers again"


@pytest.mark.real_time
async def test_messages_that_are_gone_are_reported_and_wrong_queues_refused(tmp_path):
    notes = []
    async with clients() as (namesrv, runtime, consumer, producer), a_broker(namesrv, tmp_path):
        await producer.send(Message(topic="T", body=b"0"))
        await until(lambda: runtime.routes.subscribe_queues("T"), "the topic is known")
        with pytest.raises(SettingsError, match="topic T has no queue 7: it has broker-a:0"):
            await TopicReader(consumer, "T", Start(), Wanted(queues=["7"]), notes.append).__aenter__()
        (queue,) = await consumer.queues("T")
        pulled = await consumer.pull(queue, 99)
        reader = TopicReader(consumer, "T", Start(), Wanted(), notes.append)
        assert await reader._take(queue, 99, pulled, None) == pulled.next_begin_offset == 1
    assert notes == ["broker-a:0 has no offset 99 (any more), continuing at 1"]


class ManyQueues:
    """A consumer of a topic with very many queues, of which each has one message or none; pulls are held for good."""

    def __init__(self, count, stored):
        self.all = [MessageQueue("T", "broker-a", number) for number in range(count)]
        self.stored, self.pulled, self.in_flight, self.in_flight_max = stored, 0, 0, 0

    async def queues(self, topic):
        return self.all

    async def min_offset(self, queue):
        return 0

    async def max_offset(self, queue):
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return self.stored

    async def pull(self, queue, offset, expression, *, wait, **how):
        if wait:
            self.pulled += 1
            await asyncio.Event().wait()
        one = received(0, b"%d" % queue.queue_id)
        return PullResult(PullStatus.FOUND, 1, 0, 1, [one])


@pytest.mark.parametrize(("start", "stored"), [(Start(), 0), (Start(offset=0), 1)])
@pytest.mark.real_time
async def test_of_very_many_queues_a_few_at_a_time_are_asked(start, stored, monkeypatch):
    monkeypatch.setattr(reader_module, "_QUEUES_PER_NOTE", 200)
    notes, consumer = [], ManyQueues(500, stored)
    async with TopicReader(consumer, "T", start, Wanted(), notes.append) as reader:
        if stored:
            seen = [message.body for _ in consumer.all for message in await reader.next()]
            assert len(set(seen)) == 500
        await until(lambda: consumer.pulled == 500, "every queue is followed")
    assert 1 < consumer.in_flight_max <= 64 * 2
    assert notes == [f"{n}00 of 500 queues of T have answered" for n in (2, 4)]


# -- rmqkit.connect().read


@asynccontextmanager
async def orders(root, **broker):
    """A connection to servers with a topic of two queues: 0, 2, 4 in queue 0, and 1, 3, 5 in queue 1."""
    settings = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="broker-a", **broker)
    async with Standalone(root, broker=settings) as servers, Admin(servers.namesrv_address) as admin:
        await admin.topics.create("Orders", broker="broker-a", read_queues=2, write_queues=2)
        async with rmqkit.connect(servers.namesrv_address, wait_ready=30) as mq, mq.producer("shop") as producer:
            for number in range(6):
                queue = MessageQueue("Orders", "broker-a", number % 2)
                tag = "big" if number > 3 else "small"
                await producer.send("Orders", b"%d" % number, tags=tag, keys=[f"key-{number}"], queue=queue)
            yield mq, producer


async def bodies(messages):
    return b"".join([message.body async for message in messages])


async def test_reading_begins_with_what_is_stored_and_continues_with_what_arrives(tmp_path):
    async with orders(tmp_path) as (mq, producer):
        seen, offsets = [], {}
        async with contextlib.aclosing(mq.read("Orders")) as messages:
            async for message in messages:
                seen.append(message.body)
                offsets[MessageQueue("Orders", "broker-a", message.queue_id)] = message.queue_offset + 1
                if len(seen) == 6:
                    assert sorted(seen) == [b"%d" % number for number in range(6)]
                    await producer.send("Orders", b"new")
                if len(seen) == 7:
                    break
        assert seen[-1] == b"new"
        await producer.send("Orders", b"later")
        assert await bodies(mq.read("Orders", start=offsets, stop_at_end=True)) == b"later"
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("reading of")]


async def test_stored_messages_come_in_the_order_of_their_store_times(tmp_path):
    async with orders(tmp_path) as (mq, _):
        read = [
            (one.store_timestamp, one.queue_id, one.queue_offset) async for one in mq.read("Orders", stop_at_end=True)
        ]
    assert [time for time, *_ in read] == sorted(time for time, *_ in read)
    assert [offset for _, queue, offset in read if queue == 0] == [0, 1, 2]


async def test_the_end_is_where_the_queues_ended_when_the_loop_began(tmp_path):
    async with orders(tmp_path) as (mq, producer):
        seen = []
        async for message in mq.read("Orders", stop_at_end=True):
            seen.append(message.body)
            await producer.send("Orders", b"new")
        assert len(seen) == 6 and b"new" not in seen


async def test_brokers_and_readers_filter(tmp_path):
    async with orders(tmp_path, property_filter=True) as (mq, _):

        async def read(*expression, **how):
            return sorted(await bodies(mq.read("Orders", *expression, stop_at_end=True, **how)))

        assert await read("big") == sorted(b"45")
        assert await read("TAGS = 'big'", expression_type="SQL92") == sorted(b"45")
        assert await read("small || other", keys=["key-2", "key-5"]) == sorted(b"2")
        assert await read(start=datetime.now(UTC) + timedelta(hours=1)) == []
        assert await read(start=time.time() - 3600) == await read(start=timedelta(hours=1)) == sorted(b"012345")
        assert await read(start={MessageQueue("Orders", "broker-a", 1): 2}) == sorted(b"0245")


async def test_a_broker_without_sql92_is_named_with_the_remedy(tmp_path):
    async with orders(tmp_path) as (mq, _):
        with pytest.raises(ClientError, match="set enablePropertyFilter=true there, or choose by tags"):
            await bodies(mq.read("Orders", "a = 1", expression_type="SQL92", stop_at_end=True))


WRONG = [
    ({"topic": "a b"}, "illegal characters"),
    ({"expression": "||"}, r"contains no tag: use '\*' or 'A \|\| B'"),
    ({"expression_type": "XPath"}, "give 'TAG' or 'SQL92'"),
    ({"keys": "key-1"}, r"give a list, for example \['key-1'\]"),
    ({"start": 17}, r"start is 17: give 'first', 'new', a datetime"),
    ({"start": "begin"}, "give 'first', 'new'"),
    ({"start": True}, "give 'first', 'new'"),
    ({"start": {"broker-a:0": 17}}, r"offsets as \{MessageQueue"),
    ({"start": {MessageQueue("Orders", "b", 0): "17"}}, r"offsets as \{MessageQueue"),
    ({"start": datetime(2026, 1, 1)}, "give it a time zone"),
    ({"start": time.time() * 1000}, "not a time in seconds"),
    ({"start": timedelta(hours=-1)}, "must be 0 seconds or more"),
    ({"start": "new", "stop_at_end": True}, "reads nothing"),
    ({"group": "a b"}, "a b"),
]


async def test_wrong_arguments_fail_at_once_with_the_remedy():
    async with Cluster() as cluster, rmqkit.connect(cluster.namesrv) as mq:
        for arguments, text in WRONG:
            with pytest.raises((SettingsError, TimeIllegal), match=text):
                mq.read(**({"topic": "Orders"} | arguments))
        with pytest.raises(NoRoute, match="create it, or send a message to it first"):
            await bodies(mq.read("Orders"))
    with pytest.raises(ClientError, match="the connection is closed"):
        mq.read("Orders")


async def test_closing_the_connection_ends_every_loop_and_so_does_cancelling(tmp_path):
    async with orders(tmp_path) as (mq, _), contextlib.aclosing(mq.read("Orders")) as half:
        await anext(half)
        own = len(followers())
        loops = [asyncio.create_task(bodies(mq.read("Orders", start=start))) for start in ("first", "new")]
        cancelled = asyncio.create_task(bodies(mq.read("Orders")))
        await until(lambda: len(followers()) == own + 6, "three loops follow two queues each")
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled() and len(followers()) == own + 4
        await mq.__aexit__(None, None, None)
        assert [sorted(await one) for one in loops] == [sorted(b"012345"), []]
        assert not followers()
        assert len([one async for one in half]) < 6, "the loop ends"


def followers():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("reading of")]


class Failing(ManyQueues):
    """A consumer of two queues with a message each, of which one broker fails at first, and later has less."""

    def __init__(self, *errors):
        super().__init__(2, 2)
        self.errors = list(errors)

    async def max_offset(self, queue):
        if queue.queue_id == 1 and self.errors:
            raise self.errors.pop(0)
        return 2

    async def pull(self, queue, offset, expression, *, wait, **how):
        assert not wait, "a reader that stops at the end waits for no message"
        one = received(offset, b"%d" % queue.queue_id)
        return PullResult(PullStatus.FOUND, offset + 1, 0, 2 - queue.queue_id, [one])


async def test_a_broker_that_is_away_does_not_end_a_reader_that_stops_at_the_end(monkeypatch):
    monkeypatch.setattr(reader_module, "_PAUSE_SECONDS", 0)
    notes, away = [], [ConnectFailed("b:1", "refused")] * 3
    async with TopicReader(Failing(*away), "T", Start(offset=0), Wanted(), notes.append, stop_at_end=True) as reader:
        seen = b"".join([one.body for __ in range(3) for one in await reader.next()])
        assert sorted(seen) == sorted(b"001"), "of queue 1 the broker has lost a message"
        assert await reader.next() == await reader.next() == []
    assert [note.partition(": ")[0] for note in notes] == ["broker broker-a", "broker broker-a answers again"]


async def test_a_refusal_is_raised_before_the_end():
    refused = PeerRefused(ResponseCode.NO_PERMISSION, "no", "b:1")
    consumer = Failing(*[refused] * 4)
    async with TopicReader(consumer, "T", Start(offset=0), Wanted(), print, stop_at_end=True) as reader:
        assert [[one.body for one in await reader.next()] for __ in range(2)] == [[b"0"]] * 2
        with pytest.raises(PeerRefused):
            await reader.next()
        assert await reader.next() == []


class Growing(ManyQueues):
    """A consumer of one queue that gets a second message between the question for its end and the first pull."""

    async def pull(self, queue, offset, expression, **how):
        return PullResult(PullStatus.FOUND, 2, 0, 2, [received(0, b"stored"), received(1, b"later")])


async def test_a_reader_that_stops_at_the_end_gives_nothing_stored_later():
    async with TopicReader(Growing(1, 1), "T", Start(offset=0), Wanted(), print, stop_at_end=True) as reader:
        assert [one.body for one in await reader.next()] == [b"stored"]
        assert await reader.next() == []


class Refusing(ManyQueues):
    """A consumer whose broker is away at first, gives as many pulls as a reader holds, and then refuses."""

    is_away = True

    async def max_offset(self, queue):
        if self.is_away:
            self.is_away = False
            raise ConnectFailed("b:1", "refused")
        return self.stored

    async def pull(self, queue, offset, expression, **how):
        if offset == 8:
            raise PeerRefused(ResponseCode.NO_PERMISSION, "no", "b:1")
        return PullResult(PullStatus.FOUND, offset + 1, 0, self.stored, [received(offset)])


async def test_a_refusal_behind_as_many_pulls_as_are_held_is_not_lost():
    async with TopicReader(Refusing(1, 20), "T", Start(offset=0), Wanted(), print, stop_at_end=True) as reader:
        for _ in range(100):
            await asyncio.sleep(0)  # the follower gets as far as it can
        assert [len(await reader.next()) for _ in range(8)] == [1] * 8
        with pytest.raises(PeerRefused):
            await reader.next()
