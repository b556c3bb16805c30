"""Polling in the background: subscribe, assign, seek, commit. Source: behaviour.md §8.14."""

from __future__ import annotations

import asyncio
import functools

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import PullConsumerSettings, StartFrom
from rmqkit.errors import ClientError, PeerRefused
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData, MessageQueue
from rmqkit.standalone import Standalone
from tests.client.inside import coordinator_of, offsets_of, poll_buffer_of
from tests.client.messages import record
from tests.client.peers import Cluster, offset, pulled, refused, until

ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
FIRST = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=10, take_over_pause_ms=0)
BY_HAND = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET, auto_commit=False, persist_interval_ms=10)
STARTS = {("0", "0"), ("1", "0")}
"""Where two queues begin, which may be saved before anything is committed, 10 ms after they are taken."""


class Topic:
    """Ten messages with tags A and B in turn in one queue of topic T."""

    def __init__(self, root) -> None:
        broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", property_filter=True)
        self.cluster = Standalone(root / "store", broker=broker)

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.producer = Producer("PG", self.namesrv)
        await self.producer.start()
        self.queue = (await self.producer.queues("T"))[1]
        await self.send(*range(10))
        return self

    async def __aexit__(self, *exc_info):
        await self.producer.close()
        await self.cluster.__aexit__(*exc_info)

    @property
    def namesrv(self) -> str:
        return self.cluster.namesrv_address

    async def send(self, *numbers):
        for i in numbers:
            message = Message(topic="T", body=b"%d" % i, tags="AB"[i % 2], properties={"number": str(i)})
            await self.producer.send(message, queue=self.queue)

    def consumer(self, settings=FIRST, group="CG"):
        return PullConsumer(group, self.namesrv, settings=settings)

    async def committed(self, group="CG"):
        async with PullConsumer(group, self.namesrv) as reader:
            return await reader.committed(self.queue)


async def numbers(consumer, count):
    """Poll at least ``count`` messages and return their numbers."""
    seen = []
    while len(seen) < count:
        seen += [int(message.body) for message in await consumer.poll(10)]
    return seen


async def test_subscribed_messages_are_polled_and_their_offsets_saved_unasked(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.subscribe("T")
        async with consumer:
            assert await numbers(consumer, 10) == list(range(10))
            assert await consumer.poll(0.001) == []
            saved = offsets_of(consumer)._sent
            await until(lambda: it.queue in saved and saved[it.queue][0] == 10, "saved")
        assert await it.committed() == 10


async def test_what_was_polled_last_counts_when_the_program_comes_back_or_ends_well(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.subscribe("T")
        polled = []

        async def program():
            async with consumer:
                polled.append(await consumer.poll(10, max_count=3))
                polled.append(await consumer.poll(10, max_count=3))
                raise ValueError("no stock")

        with pytest.raises(ValueError, match="no stock"):
            await program()
        assert [len(messages) for messages in polled] == [3, 3]
        assert await it.committed() == 3
        again = it.consumer()
        again.subscribe("T")
        async with again:
            assert (await again.poll(10))[0].body == b"3"


async def test_two_members_share_a_topic(tmp_path):
    async with Topic(tmp_path) as it:
        one, two = it.consumer(), it.consumer()
        for consumer in (one, two):
            consumer.subscribe("T")
            await consumer.start()
        await until(lambda: [len(consumer.held_queues()) for consumer in (one, two)] == [2, 2], "two queues each")
        assert not one.held_queues() & two.held_queues()
        for consumer in (one, two):
            await consumer.close()


async def test_assigned_queues_are_read_whoever_else_reads_them(tmp_path):
    async with Topic(tmp_path) as it:
        for _ in range(2):
            consumer = it.consumer(BY_HAND)
            consumer.assign([it.queue], "B")
            async with consumer:
                assert await numbers(consumer, 5) == [1, 3, 5, 7, 9]
                assert consumer.held_queues() == {it.queue}
        assert not await it.committed(), "a young queue's unsaved offset is told as 0"


async def test_tags_and_sql_choose(tmp_path):
    async with Topic(tmp_path) as it:
        by_tag, by_sql = it.consumer(group="tag"), it.consumer(group="sql")
        by_tag.subscribe("T", "A")
        by_sql.subscribe("T", "number BETWEEN 3 AND 5", expression_type="SQL92")
        async with by_tag, by_sql:
            assert await numbers(by_tag, 5) == [0, 2, 4, 6, 8]
            assert await numbers(by_sql, 3) == [3, 4, 5]
        wrong = it.consumer()
        wrong.subscribe("T", "number BETWEEN", expression_type="SQL92")
        with pytest.raises(PeerRefused):
            await wrong.start()


async def test_without_auto_commit_only_commit_saves(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer(BY_HAND)
        consumer.subscribe("T")
        async with consumer:
            await numbers(consumer, 10)
            assert not await consumer.committed(it.queue)
            await consumer.commit()
            assert await consumer.committed(it.queue) == 10
            await it.send(10)
            await numbers(consumer, 1)
        assert await it.committed() == 10


async def test_seeking_moves_back_and_forth(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.assign([it.queue])
        async with consumer:
            read = await numbers(consumer, 10)
            await consumer.seek(it.queue, 7)
            assert await numbers(consumer, 3) == read[7:]
            await consumer.seek_to_begin(it.queue)
            assert await numbers(consumer, 10) == read
            await consumer.seek_to_end(it.queue)
            await it.send(10)
            assert await numbers(consumer, 1) == [10]
            await consumer.seek_to_time(it.queue, 0)
            await consumer.commit()
            assert await consumer.committed(it.queue) == 0
            assert await numbers(consumer, 11) == [*read, 10]


async def test_what_cannot_be_sought_is_reported(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.assign([it.queue])
        other = MessageQueue("T", it.queue.broker_name, 0)
        async with consumer:
            await until(consumer.held_queues, "the queue")
            with pytest.raises(ClientError, match="seek offset = 11, min offset = 0, max offset = 10"):
                await consumer.seek(it.queue, 11)
            with pytest.raises(ClientError, match="is not owned by this member of group CG"):
                await consumer.seek(other, 0)


async def test_what_was_pulled_before_a_seek_is_not_given_out(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.assign([it.queue])
        async with consumer:
            await consumer.poll(10, max_count=2)
            await consumer.seek(it.queue, 9)
            assert await numbers(consumer, 1) == [9]


async def test_paused_queues_give_nothing_until_they_are_resumed(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.subscribe("T")
        async with consumer:
            await numbers(consumer, 10)
            consumer.pause(it.queue)
            await it.send(10)
            assert await consumer.poll(0.3) == []
            consumer.resume(it.queue)
            assert await numbers(consumer, 1) == [10]


async def test_messages_are_iterated_until_the_end(tmp_path):
    async with Topic(tmp_path) as it:
        consumer = it.consumer()
        consumer.subscribe("T")
        seen = []

        async def read():
            async for message in consumer.messages():
                number = int(message.body)
                seen.append(number)

        await consumer.start()
        reading = asyncio.create_task(read())
        await until(lambda: len(seen) == 10, "all messages")
        await consumer.close()
        await reading
        assert seen == list(range(10))
        assert await it.committed() == 10


async def test_a_topic_may_be_subscribed_and_given_up_after_the_start(tmp_path):
    async with Topic(tmp_path) as it, it.consumer() as consumer:
        with pytest.raises(ClientError, match="has no queues to poll: subscribe to a topic or assign queues"):
            await consumer.poll()
        consumer.subscribe("T")
        assert len(await numbers(consumer, 10)) == 10
        consumer.unsubscribe("T")
        await until(lambda: not consumer.held_queues(), "no queues")


def test_subscribing_and_assigning_exclude_each_other():
    queue = MessageQueue("T", "b", 0)
    first, second = PullConsumer("CG", "a:1"), PullConsumer("CG", "a:1")
    first.subscribe("T")
    with pytest.raises(ClientError, match=r"Subscribe and assign are mutually exclusive\."):
        first.assign([queue])
    second.assign([queue])
    with pytest.raises(ClientError, match=r"Subscribe and assign are mutually exclusive\."):
        second.subscribe("T")


async def test_a_topic_subscribed_after_the_start_while_no_name_server_answers_is_read_later(caplog):
    async with Cluster() as cluster, PullConsumer("CG", cluster.namesrv, settings=FIRST) as consumer:
        cluster.name_server.answer(ROUTE, refused(1, "still starting"))
        consumer.subscribe("T")
        await until(lambda: cluster.name_server.asked(ROUTE), "the question for the route")
        cluster.topic("T", queues=1)
        cluster.name_server.answer(ROUTE, cluster._route)
        cluster.broker.answer(RequestCode.PULL_MESSAGE, lambda command: pulled(command, 0, 1, record(0)))
        assert len(await consumer.poll(30)) == 1
    assert "still starting" in caplog.text


def seeker(cluster):
    """A consumer by hand, and two queues of a hundred messages to seek in."""
    cluster.topic("T", queues=2)
    for code, value in (RequestCode.GET_MIN_OFFSET, 0), (RequestCode.GET_MAX_OFFSET, 100):
        cluster.broker.answer(code, functools.partial(offset, value=value))
    return PullConsumer("CG", cluster.namesrv, settings=BY_HAND)


async def test_a_queue_that_was_sought_and_is_somebody_elses_now_is_not_committed():
    async with Cluster() as cluster:
        consumer = seeker(cluster)
        consumer.subscribe("T")
        async with consumer:
            await until(lambda: len(consumer.held_queues()) == 2, "both queues")
            for queue in consumer.held_queues():
                await consumer.seek(queue, 5)
            cluster.heartbeats.append(HeartbeatData(clientID="zzz", consumerDataSet=[ConsumerData(group_name="CG")]))
            coordinator_of(consumer).rebalance_soon()
            await until(lambda: len(consumer.held_queues()) == 1, "the other one is somebody else's")
            await consumer.commit()
            committed = cluster.broker.asked(RequestCode.UPDATE_CONSUMER_OFFSET)
            places = [(one["queueId"], one["commitOffset"]) for one in committed]
            assert set(places) - STARTS == {("0", "5")}
            assert [place for place in places if place[0] == "0"][-1] == ("0", "5")


async def test_where_the_program_sought_before_it_held_a_queue_does_not_come_back():
    async with Cluster() as cluster:
        consumer = seeker(cluster)
        async with consumer:
            one, other = await consumer.queues("T")
            consumer.assign([one])
            poll_buffer_of(consumer).seek(one, None, 5)  # as `seek` does while the queue is not held
            await until(consumer.held_queues, "the queue")
            await consumer.seek(one, 7)
            consumer.assign([other])
            await until(lambda: list(consumer.held_queues()) == [other], "the other queue")
            await consumer.commit()
            committed = cluster.broker.asked(RequestCode.UPDATE_CONSUMER_OFFSET)
            assert {(request["queueId"], request["commitOffset"]) for request in committed} <= STARTS


async def test_a_group_that_the_runtime_has_already_is_refused_also_later():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.start()
        one, two = (PullConsumer("CG", runtime=runtime) for _ in range(2))
        one.subscribe("T")
        async with one, two:
            with pytest.raises(ClientError, match="consumer group CG exists in client"):
                two.subscribe("T")
            three = PullConsumer("CG", runtime=runtime)
            three.subscribe("T")
            with pytest.raises(ClientError, match="consumer group CG exists in client"):
                await three.start()
            await runtime.heartbeat()
            assert [one.group_name for one in cluster.heartbeats[-1].consumerDataSet] == ["CG"], "the first one is here"
        await runtime.close()


async def test_a_commit_for_somebody_elses_queue_is_not_repeated_later():
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        consumer = PullConsumer("CG", cluster.namesrv, settings=BY_HAND)
        consumer.subscribe("T")
        async with consumer:
            await until(consumer.held_queues, "the queue")
            (queue,) = consumer.held_queues()
            cluster.heartbeats.append(HeartbeatData(clientID="0", consumerDataSet=[ConsumerData(group_name="CG")]))
            coordinator_of(consumer).rebalance_soon()
            await until(lambda: not consumer.held_queues(), "it is somebody else's")
            await consumer.commit(queue, 5)
        told = [one["commitOffset"] for one in cluster.broker.asked(RequestCode.UPDATE_CONSUMER_OFFSET)]
        assert told.count("5") == 1, "the program said it once; it is not said again when the consumer is closed"
