"""A topic that is followed while its broker goes, comes back, and gets more queues."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rmqkit.admin import Admin
from rmqkit.admin import tail as tail_module
from rmqkit.admin.tail import TOOLS_GROUP, Start, Tail, Wanted
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.pull import PullConsumer, PullResult
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import ClientSettings, ProducerSettings
from rmqkit.errors import SettingsError
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.rpc import PullStatus
from rmqkit.store.settings import StoreSettings
from tests.client.messages import received
from tests.client.peers import until
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
async def test_a_tail_outlives_a_restart_of_the_broker_and_sees_new_queues(tmp_path):
    notes = []
    async with AsyncExitStack() as stack:
        namesrv, runtime, consumer, producer = await stack.enter_async_context(clients())
        port = free_port(-2, 1)
        async with a_broker(namesrv, tmp_path, port):
            await producer.send(Message(topic="T", body=b"before"))
            await until(lambda: runtime.routes.subscribe_queues("T"), "the topic is known")
            tail = await stack.enter_async_context(Tail(consumer, "T", Start(offset=0), Wanted(), notes.append))
            assert [one.body for one in await tail.next()] == [b"before"]
        await until(lambda: notes, "the broker is away")
        await stack.enter_async_context(a_broker(namesrv, tmp_path, port))
        await until(lambda: len(notes) == 2, "the broker is back")
        await producer.send(Message(topic="T", body=b"after"))
        assert [one.body for one in await tail.next()] == [b"after"]
        async with Admin(namesrv) as admin:
            await admin.topics.create("T", broker="broker-a", read_queues=3, write_queues=3)
        await until(lambda: len(runtime.routes.subscribe_queues("T")) == 3, "there are more queues")
        await producer.send(Message(topic="T", body=b"new"), queue=MessageQueue("T", "broker-a", 2))
        assert [(one.body, one.queue_id) for one in await tail.next()] == [(b"new", 2)]
    assert notes[0].startswith("broker broker-a: ")
    assert notes[0].endswith("; trying again")
    assert notes[1] == "broker broker-a answers again"


@pytest.mark.real_time
async def test_messages_that_are_gone_are_told_and_wrong_queues_refused(tmp_path):
    notes = []
    async with clients() as (namesrv, runtime, consumer, producer), a_broker(namesrv, tmp_path):
        await producer.send(Message(topic="T", body=b"0"))
        await until(lambda: runtime.routes.subscribe_queues("T"), "the topic is known")
        with pytest.raises(SettingsError, match="topic T has no queue 7: it has broker-a:0"):
            await Tail(consumer, "T", Start(), Wanted(queues=["7"]), notes.append).__aenter__()
        (queue,) = await consumer.queues("T")
        pulled = await consumer.pull(queue, 99)
        tail = Tail(consumer, "T", Start(), Wanted(), notes.append)
        assert await tail._take(queue, 99, pulled) == pulled.next_begin_offset == 1
    assert notes == ["broker-a:0 has no offset 99 (any more), going on at 1"]


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
    monkeypatch.setattr(tail_module, "_QUEUES_PER_NOTE", 200)
    notes, consumer = [], ManyQueues(500, stored)
    async with Tail(consumer, "T", start, Wanted(), notes.append) as tail:
        if stored:
            seen = [message.body for _ in consumer.all for message in await tail.next()]
            assert len(set(seen)) == 500
        await until(lambda: consumer.pulled == 500, "every queue is followed")
    assert 1 < consumer.in_flight_max <= 64 * 2
    assert notes == [f"{n}00 of 500 queues of T told what they have" for n in (2, 4)]
