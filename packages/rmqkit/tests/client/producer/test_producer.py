"""The producer against our own name server and broker. Source: behaviour.md §7."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_hash, by_sharding_key
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import Batching, ProducerSettings
from rmqkit.errors import ClientError, MessageIllegal, NoRoute, SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.client.peers import SECONDS, Cluster, until


async def test_messages_arrive_as_they_were_sent(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        large = b"0123456789" * 1000
        for body in (b"small", large):
            message = Message(topic="T", body=body, tags="A", keys=["k"], properties={"p": "v"}, flag=3)
            result = await producer.send(message)
            assert result.status is SendStatus.SEND_OK
            async with PullConsumer("CG", cluster.namesrv_address) as consumer:
                (received,) = (await consumer.pull(result.queue, result.queue_offset)).messages
            assert (received.body, received.tags, received.keys, received.flag) == (body, "A", ["k"], 3)
            assert received.properties["p"] == "v"
            assert received.msg_id == result.msg_id
            assert received.offset_msg_id == result.offset_msg_id
            assert received.store_size < 1000, "the large body was stored compressed"


async def test_many_sends_at_a_time_use_every_queue_evenly_and_lose_nothing(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        results = await asyncio.gather(*(producer.send(Message(topic="T", body=b"%d" % i)) for i in range(400)))
        assert len({result.msg_id for result in results}) == 400
        places = {(result.queue.queue_id, result.queue_offset) for result in results}
        assert places == {(queue, offset) for queue in range(4) for offset in range(100)}


async def test_a_batch_lies_together_in_one_queue(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        result = await producer.send_batch([Message(topic="T", body=b"%d" % i, tags="A") for i in range(5)])
        async with PullConsumer("CG", cluster.namesrv_address) as consumer:
            received = (await consumer.pull(result.queue, result.queue_offset)).messages
        assert [message.body for message in received] == [b"0", b"1", b"2", b"3", b"4"]
        assert [message.msg_id for message in received] == result.msg_id.split(",")
        assert [message.offset_msg_id for message in received] == result.offset_msg_id.split(",")


async def test_a_one_way_message_is_stored(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        (queue, *_) = await producer.queues("T")
        await producer.send_one_way(Message(topic="T", body=b"x"), queue=queue)
        result = await producer.send(Message(topic="T", body=b"y"), queue=queue)
        assert result.queue_offset == 1


async def test_queue_and_selector_decide_where_a_message_goes(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queues = await producer.queues("T")
        message = Message(topic="T", body=b"x", sharding_key="TagA")
        assert (await producer.send(message, queue=queues[2])).queue == queues[2]
        assert (await producer.send(message, selector=by_hash("TagA"))).queue == queues[2598919 % 4]
        assert (await producer.send(message, selector=by_sharding_key)).queue == queues[2598919 % 4]


@pytest.mark.parametrize("batches", [False, True])
async def test_a_sharding_key_alone_chooses_the_queue(batches, tmp_path):
    settings = ProducerSettings(batch=Batching(auto=batches))
    async with (
        Standalone(tmp_path / "store") as cluster,
        Producer("PG", cluster.namesrv_address, settings=settings) as producer,
    ):
        queues = await producer.queues("T")
        place = 2598919 % 4
        keyed = [await producer.send("T", b"x", sharding_key="TagA") for _ in range(4)]
        assert [result.queue for result in keyed] == [queues[place]] * 4
        other = queues[place - 1]
        assert (await producer.send("T", b"x", sharding_key="TagA", queue=other)).queue == other
        assert (
            await producer.send("T", b"x", sharding_key="TagA", selector=lambda found, _: found[0])
        ).queue == queues[0]
        await producer.send_one_way("T", b"x", sharding_key="TagA")
        plain = [await producer.send(Message(topic="T", body=b"x")) for _ in range(4)]
        assert {result.queue for result in plain} == set(queues), "messages without a key go to the queues in turn"


async def test_a_message_with_a_delay_level_comes_later(tmp_path):
    levels = StoreSettings(message_delay_level="1s 3s")
    async with (
        Standalone(tmp_path / "store", store=levels) as cluster,
        Producer("PG", cluster.namesrv_address) as producer,
        PullConsumer("CG", cluster.namesrv_address) as consumer,
    ):
        queue = (await producer.queues("T"))[0]
        await producer.send(Message(topic="T", body=b"later", delay_level=2), queue=queue)
        await producer.send(Message(topic="T", body=b"at once"), queue=queue)
        found = []
        async with asyncio.timeout(SECONDS):
            while len(found) < 2:
                found = (await consumer.pull(queue, 0)).messages
                await asyncio.sleep(0.01)
        assert [message.body for message in found] == [b"at once", b"later"]
        assert found[1].store_timestamp - found[1].born_timestamp >= 3000


async def test_what_queue_and_selector_must_not_do_is_reported():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        message = Message(topic="T", body=b"x")
        with pytest.raises(MessageIllegal, match="message for topic T cannot go to a queue of topic U"):
            await producer.send(message, queue=MessageQueue("U", "broker-0", 0))
        with pytest.raises(ClientError, match="the selector chose no queue for a message of topic T"):
            await producer.send(message, selector=lambda queues, message: None)


async def test_a_message_that_waits_for_its_time_is_called_back_where_it_is():
    handle = encode_recall_handle(RecallHandle("T", "broker-1", 1_900_000_000_000, "UK"))
    async with Cluster(2) as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("T")
        answer = {"msgId": "UK"}
        cluster.brokers[1].answer(RequestCode.RECALL_MESSAGE, lambda command: reply(command, fields=answer))
        assert await producer.recall(handle) == "UK"
        (asked,) = cluster.brokers[1].asked(RequestCode.RECALL_MESSAGE)
        assert asked == {"producerGroup": "PG", "topic": "T", "recallHandle": handle, "bname": "broker-1"}
        with pytest.raises(MessageIllegal, match="recall handle 'no' is not"):
            await producer.recall("no")
        elsewhere = encode_recall_handle(RecallHandle("T", "broker-9", 1_900_000_000_000, "UK"))
        with pytest.raises(NoRoute, match="broker broker-9, which has the message to recall, has no route"):
            await producer.recall(elsewhere)


async def test_an_illegal_message_never_reaches_a_socket():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        before = len(cluster.name_server.requests)
        with pytest.raises(MessageIllegal):
            await producer.send(Message(topic="a b", body=b"x"))
        assert len(cluster.name_server.requests) == before


async def test_it_works_only_between_start_and_close():
    async with Cluster() as cluster:
        cluster.topic("T")
        producer = Producer("PG", cluster.namesrv)
        message = Message(topic="T", body=b"x")
        with pytest.raises(ClientError, match="producer of group PG is not started: use it inside 'async with'"):
            await producer.send(message)
        await producer.start()
        await producer.send(message)
        with pytest.raises(ClientError, match="producer of group PG is started already: make a new one"):
            await producer.start()
        await producer.close()
        await producer.close()
        with pytest.raises(ClientError, match="producer of group PG is closed: make a new one"):
            await producer.send(message)
        with pytest.raises(ClientError, match="is closed already"):
            await producer.start()


async def test_closing_leaves_the_group():
    async with Cluster() as cluster:
        cluster.topic("T")
        async with Producer("PG", cluster.namesrv) as producer:
            await producer.send(Message(topic="T", body=b"x"))
            await until(lambda: cluster.heartbeats, "a heartbeat")
        (fields,) = cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)
        assert fields == {"clientID": cluster.heartbeats[0].clientID, "producerGroup": "PG"}


async def test_producers_may_share_a_runtime_which_stays_open():
    async with Cluster() as cluster:
        cluster.topic("T")
        runtime = ClientRuntime(cluster.namesrv)
        await runtime.start()
        async with Producer("one", runtime=runtime) as one, Producer("two", runtime=runtime) as two:
            await one.send(Message(topic="T", body=b"x"))
            await two.send(Message(topic="T", body=b"x"))
            twin = Producer("one", runtime=runtime)
            with pytest.raises(ClientError, match="producer group one exists"):
                await twin.start()
            await one.send(Message(topic="T", body=b"x"))
        assert len(cluster.broker.connections) == 1
        assert cluster.broker.connections[0].is_open
        await runtime.close()


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("", "The specified group is blank."),
        ("a b", "The specified group: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("DEFAULT_PRODUCER", "The specified group: DEFAULT_PRODUCER, is reserved: choose another"),
    ],
)
def test_group_names_are_checked(group, text):
    with pytest.raises(SettingsError) as caught:
        Producer(group, "a:1")
    assert str(caught.value) == text


def test_settings_are_checked():
    with pytest.raises(SettingsError, match=r"retries \(retryTimesWhenSendFailed\) is -2"):
        Producer("PG", "a:1", settings=ProducerSettings(retries=-2))
    with pytest.raises(SettingsError, match="name_servers and runtime cannot be combined"):
        Producer("PG", "a:1", runtime=ClientRuntime("a:1"))
