"""`Producer.send_many`. Source: behaviour.md §7.8."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.accumulator import BATCHES_MAX, SendManyFailed
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_sharding_key
from rmqkit.client.runtime.settings import Batching, ProducerSettings, SendLimits
from rmqkit.errors import ClientError, MessageIllegal, NoRoute, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster, refused, stored, until

BATCH, SINGLE = RequestCode.SEND_BATCH_MESSAGE, RequestCode.SEND_MESSAGE_V2


def numbered(count, topic="T", **fields):
    return [Message(topic=topic, body=b"%d" % i, **fields) for i in range(count)]


async def test_every_message_gets_the_result_of_its_own_place(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await producer.send(Message(topic="U", body=b"first"))
        messages = [Message(topic="TU"[i % 2], body=b"%d" % i, keys=[f"k{i}"]) for i in range(2000)]
        messages[7].body = b"large" * 2000
        messages[8].wait_store = False
        results = await producer.send_many(messages)
        assert {result.status for result in results} == {SendStatus.SEND_OK}
        async with PullConsumer("CG", cluster.namesrv_address) as consumer:
            found = {}
            for queue in {result.queue for result in results}:
                offset = 0
                while (pulled := await consumer.pull(queue, offset)).messages:
                    found |= {(queue, one.queue_offset): one for one in pulled.messages}
                    offset = pulled.next_begin_offset
        for message, result in zip(messages, results, strict=True):
            one = found[result.queue, result.queue_offset]
            assert (one.body, one.keys, one.topic) == (message.body, message.keys, message.topic)
            assert (one.msg_id, one.offset_msg_id) == (result.msg_id, result.offset_msg_id)


async def test_few_requests_carry_many_messages():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        results = await producer.send_many(numbered(1000))
        assert len(results) == len({result.msg_id for result in results}) == 1000
        assert len(cluster.broker.asked(BATCH)) < 10
        sizes = [len(command.body) for command in cluster.broker.requests if command.code == BATCH]
        assert max(sizes) <= producer.settings.batch.bytes


async def test_nothing_to_send_is_nothing_sent():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        assert await producer.send_many([]) == []
        assert cluster.broker.requests == []


async def test_delayed_large_and_prioritized_messages_go_out_alone():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        await producer.send_many([*numbered(2), Message(topic="T", body=b"x", delay_level=3)])
        await producer.send_many([Message(topic="T", body=bytes(5000))])
        await producer.send_many([Message(topic="T", body=b"x", priority=3)])
        delayed, large, prioritized = cluster.broker.asked(SINGLE)
        assert "_SYS_MSG_PRIORITY_\x013\x02" in prioritized["i"]
        assert "DELAY\x013\x02" in delayed["i"]
        assert large["f"] == "769"
        assert len(cluster.broker.asked(BATCH)) == 1


async def test_a_slow_source_waits_no_longer_than_the_delay_for_company():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")

        async def source():
            yield Message(topic="T", body=b"1")
            yield Message(topic="T", body=b"2")
            await until(lambda: cluster.broker.asked(BATCH), "the first batch, while the source goes on")
            yield Message(topic="T", body=b"3")

        assert len(await producer.send_many(source())) == 3
        assert len(cluster.broker.asked(BATCH)) == 2


async def test_no_more_is_taken_than_can_be_under_way():
    settings = ProducerSettings(batch=Batching(bytes=1))
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T")
        held, taken = [], 0
        cluster.broker.answer(BATCH, held.append)

        def source():
            nonlocal taken
            for message in numbered(100):
                taken += 1
                yield message

        sending = asyncio.create_task(producer.send_many(source()))
        await until(lambda: len(held) == BATCHES_MAX, "as many as may be")
        assert taken == BATCHES_MAX + 1  # each batch is closed by the message after it
        cluster.broker.answer(BATCH, stored)
        for command in held:
            cluster.broker.connections[0].send(stored(command))
        assert len(await sending) == taken == 100


@pytest.mark.parametrize("selector", [None, by_sharding_key])
async def test_messages_of_a_key_keep_their_order(selector, tmp_path):
    settings = ProducerSettings(batch=Batching(bytes=300))
    async with (
        Standalone(tmp_path / "store") as cluster,
        Producer("PG", cluster.namesrv_address, settings=settings) as producer,
    ):
        messages = [Message(topic="T", body=b"%d" % i, sharding_key=f"k{i % 7}") for i in range(210)]
        for message in messages[::10]:
            message.body *= 5000  # these go out alone
        for message in messages[::15]:
            message.wait_store = False  # and these not with others
        results = await producer.send_many(messages, selector=selector)
        for key in range(7):
            places = [(result.queue, result.queue_offset) for result in results[key::7]]
            assert len({queue for queue, _ in places}) == 1
            assert places == sorted(places)


async def test_after_a_failure_a_chosen_queue_gets_nothing_more():
    settings = ProducerSettings(batch=Batching(bytes=1), retries=0)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T", queues=1)
        cluster.broker.answer(BATCH, refused(ResponseCode.SYSTEM_BUSY, "busy"))
        with pytest.raises(SendManyFailed, match=r"5 of 5 messages not sent, the first because: .*code 2: busy"):
            await producer.send_many(numbered(5), selector=lambda queues, message: queues[0])
        assert len(cluster.broker.asked(BATCH)) == 1


async def test_a_failure_reports_what_became_of_each_message():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        wrong = [Message(topic="T", body=body) for body in (b"", None, "text")]
        messages = [*numbered(2), *wrong, Message(topic="New", body=b"x"), *numbered(1)]
        with pytest.raises(
            SendManyFailed, match="4 of 7 messages not sent, the first because: body of a mess"
        ) as caught:
            await producer.send_many(messages)
        stored_, also, *illegal, no_route, last = caught.value.results
        assert {stored_.status, also.status, last.status} == {SendStatus.SEND_OK}
        assert [type(error) for error in illegal] == [MessageIllegal] * 3
        assert isinstance(no_route, NoRoute)


async def test_an_error_of_the_source_ends_it():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")

        def source():
            yield from numbered(3)
            raise KeyError("row")

        with pytest.raises(KeyError):
            await producer.send_many(source())
        await producer.send_many(numbered(1))
        assert len(cluster.broker.asked(BATCH)) == 1


async def test_a_message_with_an_id_of_its_own_keeps_it():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        message = Message(topic="T", body=b"x", msg_id="mine")
        assert (await producer.send(message)).msg_id == "mine"
        assert [result.msg_id for result in await producer.send_many([message])] == ["mine"]
        assert "UNIQ_KEY\x01mine\x02" in cluster.broker.asked(SINGLE)[0]["i"]


async def test_sends_beyond_the_bound_wait_in_line_and_say_so_when_their_time_is_over():
    settings = ProducerSettings(limits=SendLimits(sends_max=10), line_timeout_ms=200)
    async with Cluster() as cluster, Producer("PG", cluster.namesrv, settings=settings) as producer:
        cluster.topic("T")
        held = []
        cluster.broker.answer(SINGLE, held.append)
        sending = [asyncio.create_task(producer.send(message, timeout=20)) for message in numbered(10)]
        await until(lambda: len(held) == 10, "ten under way")
        with pytest.raises(SendFailed) as caught:
            await producer.send(Message(topic="T", body=b"x"))
        assert str(caught.value) == (
            "message for topic T not sent: 200 ms in line behind 10 sends (backPressureForAsyncSendNum): slow down"
        )
        assert isinstance(caught.value.cause, ClientError)
        assert len(held) == 10
        cluster.broker.answer(SINGLE, stored)
        for command in held:
            cluster.broker.connections[0].send(stored(command))
        assert len(await asyncio.gather(*sending)) == 10
