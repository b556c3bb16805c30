"""The pop consumer, message by message, against scripted brokers. Source: behaviour.md §4.7–§4.12, §8.13."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.client.observe.hooks import Hook
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.runtime.settings import MessageModel, PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError, ConnectFailed, NoRoute, PeerRefused, SettingsError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.record import COMPRESSED
from rmqkit.protocol.schemas.pop import BatchAckBody
from tests.client.inside import runtime_of
from tests.client.messages import record
from tests.client.peers import Cluster, refused, until
from tests.client.pops import (
    ACK,
    ACK_MANY,
    CHANGE,
    NOTHING,
    POP,
    SEND_BACK,
    PopBroker,
    PopCluster,
    popped,
    quick,
    records,
)

# -- message by message


async def test_a_pop_says_what_the_spec_names():
    async with PopCluster(NOTHING) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        assert not await consumer.pop("T", "A || B", max_count=5, invisible_time=9, wait=0.7)
        (asked,) = cluster.pop.pops
        assert int(asked.pop("bornTime")) > 0
        assert asked == {
            "consumerGroup": "G",
            "topic": "T",
            "queueId": "-1",
            "maxMsgNums": "5",
            "invisibleTime": "9000",
            "pollTime": "700",
            "initMode": "0",
            "expType": "TAG",
            "exp": "A || B",
            "bname": "broker-0",
        }


async def test_a_pop_without_a_wait_is_late_by_no_clock():
    async with PopCluster(NOTHING) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        assert not await consumer.pop("T")
        (asked,) = cluster.pop.pops
        assert (asked["pollTime"], asked["bornTime"]) == ("0", str(1 << 62))


async def test_nothing_is_reported_to_brokers_by_a_consumer_that_only_pops():
    async with PopCluster(NOTHING) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert await consumer.pop("T") == []
        assert cluster.heartbeats == []


async def test_a_group_that_begins_with_new_messages_says_so():
    settings = PushConsumerSettings(start_from=StartFrom.NEW_MESSAGES)
    async with PopCluster(NOTHING) as cluster, PopConsumer("G", cluster.namesrv, settings=settings) as consumer:
        assert await consumer.pop("T") == []
        assert cluster.pop.pops[0]["initMode"] == "1"
        assert cluster.pop.pops[0]["invisibleTime"] == "60000"


async def test_one_ack_goes_alone_and_many_together():
    async with PopCluster(popped(*records(8, 9, 17), start=8)) as cluster, PopConsumer("G", cluster.namesrv) as it:
        first, *others = await it.pop("T")
        await it.ack(first)
        assert cluster.broker.asked(ACK) == [
            {
                "consumerGroup": "G",
                "topic": "T",
                "queueId": "0",
                "bname": "broker-0",
                "extraInfo": "8 1795224862948 60000 3 0 broker-0 0 8",
                "offset": "8",
            }
        ]
        await it.ack_many(others)
        (request,) = [one for one in cluster.broker.requests if one.code == ACK_MANY]
        assert msgspec.json.decode(request.body) == {
            "brokerName": "broker-0",
            "acks": [
                {
                    "c": "G",
                    "t": "T",
                    "r": "0",
                    "so": 8,
                    "q": 0,
                    "rq": 3,
                    "pt": 1795224862948,
                    "it": 60000,
                    "b": "AgI=",
                }
            ],
        }
        await it.ack_many([])


async def test_acks_of_several_brokers_go_to_each():
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T", queues=1)
        brokers = [PopBroker(peer, *[popped(*records(i), start=i)] * 2) for i, peer in enumerate(cluster.brokers)]
        async with PopConsumer("G", cluster.namesrv) as consumer:
            messages = [*await consumer.pop("T"), *await consumer.pop("T")]
            assert sorted(one.queue_offset for one in messages) == [0, 1], "they take turns"
            await consumer.ack_many(messages)
        assert [broker.acked for broker in brokers] == [[0], [1]]


async def test_brokers_without_messages_are_asked_without_waiting_but_the_last_one():
    async with Cluster(brokers=3) as cluster:
        cluster.topic("T", queues=1)
        brokers = [PopBroker(peer, NOTHING) for peer in cluster.brokers]
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert await consumer.pop("T", wait=0.25) == []
        assert sorted(broker.pops[0]["pollTime"] for broker in brokers) == ["0", "0", "250"]


async def test_a_broker_that_is_away_does_not_hide_the_others():
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T", queues=1)
        PopBroker(cluster.brokers[0], popped(*records(0)), NOTHING)
        async with PopConsumer("G", cluster.namesrv) as consumer:
            await runtime_of(consumer).routes.readable_queues("T")
            await cluster.brokers[1].stop()
            assert len(await consumer.pop("T")) == 1, "asked after the one that is away"
            with pytest.raises(ConnectFailed):
                await consumer.pop("T")  # asked before it


async def test_a_new_invisible_time_makes_a_new_handle():
    async with PopCluster(popped(*records(8), start=8)) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        (message,) = await consumer.pop("T")
        await consumer.change_invisible_time(message, 1.5)
        assert cluster.broker.asked(CHANGE) == [
            {
                "consumerGroup": "G",
                "topic": "T",
                "queueId": "0",
                "bname": "broker-0",
                "extraInfo": "8 1795224862948 60000 3 0 broker-0 0 8",
                "offset": "8",
                "invisibleTime": "1500",
            }
        ]
        assert message.properties["POP_CK"] == "8 1795224862949 1500 5 0 broker-0 0 8"


async def test_a_suspension_is_sent_with_the_new_invisible_time():
    async with PopCluster(popped(*records(8), start=8)) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        (message,) = await consumer.pop("T")
        await consumer.change_invisible_time(message, 1.5, suspend=True)
        assert [one["suspend"] for one in cluster.broker.asked(CHANGE)] == ["true"]


@pytest.mark.parametrize(("mark", "topic"), [("1", "%RETRY%G_T"), ("2", "%RETRY%G+T")])
async def test_what_came_again_is_acknowledged_and_changed_in_its_retry_topic(mark, topic):
    handle = f"5 1795224862948 60000 2 {mark} broker-0 0 8"
    answer = popped(*records(8, POP_CK=handle), startOffsetInfo=f"{mark} 0 5")
    async with PopCluster(answer) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        (message,) = await consumer.pop("T")
        await consumer.change_invisible_time(message, 1.5)
        await consumer.ack(message)
        assert [one["topic"] for one in cluster.broker.asked(CHANGE) + cluster.broker.asked(ACK)] == [topic] * 2
        assert cluster.broker.asked(ACK)[0]["extraInfo"] == f"8 1795224862949 1500 5 {mark} broker-0 0 8"


async def test_what_only_has_a_tag_of_the_same_hash_is_acknowledged():
    answer = popped(*records(0, TAGS="Aa"), *records(1, TAGS="BB"))
    async with PopCluster(answer) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert [one.tags for one in await consumer.pop("T", "BB")] == ["BB"]
        assert cluster.pop.acked == [0]


async def test_a_body_that_cannot_be_unpacked_is_a_dead_letter_and_acknowledged():
    answer = popped(record(0, b"not zlib", sys_flag=COMPRESSED), *records(1))
    async with PopCluster(answer) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert [one.queue_offset for one in await consumer.pop("T")] == [1]
        assert [(one["offset"], one["delayLevel"]) for one in cluster.broker.asked(SEND_BACK)] == [("1000", "-1")]
        assert cluster.pop.acked == [0]


async def test_refusals_reach_the_program():
    answers = (refused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "no group"), refused(ResponseCode.POLLING_FULL))
    async with PopCluster(*answers, popped(*records(0))) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        with pytest.raises(PeerRefused, match="no group"):
            await consumer.pop("T")
        assert await consumer.pop("T") == []
        (message,) = await consumer.pop("T")
        cluster.broker.answer(ACK, refused(ResponseCode.NO_MESSAGE, "offset is illegal"))
        with pytest.raises(PeerRefused, match="offset is illegal"):
            await consumer.ack(message)


async def test_what_cannot_be_popped_is_said_before_anybody_is_asked():
    async with PopCluster() as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        with pytest.raises(ClientError, match="contains no tag"):
            await consumer.pop("T", "||")
        with pytest.raises(ClientError, match="illegal characters"):
            await consumer.pop("T T")
        with pytest.raises(NoRoute, match="no broker lets topic U be read"):
            await consumer.pop("U")
    with pytest.raises(ClientError, match="pop consumer of group G is closed"):
        await consumer.pop("T")


async def test_brokers_know_names_with_the_namespace_and_programs_without():
    handle = "5 1795224862948 60000 2 1 broker-0 0 8"
    answer = popped(record(8, topic="NS%T", POP_CK=handle), record(9, topic="NS%T"), start=9)
    settings = PushConsumerSettings(namespace="NS")
    async with PopCluster(answer) as cluster, PopConsumer("G", cluster.namesrv, settings=settings) as consumer:
        cluster.topic("NS%T", queues=1)
        again, new = await consumer.pop("T")
        assert (cluster.pop.pops[0]["topic"], cluster.pop.pops[0]["consumerGroup"]) == ("NS%T", "NS%G")
        assert (again.topic, new.topic) == ("T", "T")
        await consumer.ack(again)
        await consumer.change_invisible_time(new, 0.5)
        await consumer.ack_many([again, new])
        assert [one["topic"] for one in cluster.broker.asked(ACK)] == ["%RETRY%NS%G_NS%T"]
        assert [one["topic"] for one in cluster.broker.asked(CHANGE)] == ["NS%T"]
        (batch,) = [one for one in cluster.broker.requests if one.code == ACK_MANY]
        acks = msgspec.json.decode(batch.body, type=BatchAckBody).acks
        assert [(one.group, one.topic, one.retry) for one in acks] == [("NS%G", "NS%T", "1"), ("NS%G", "NS%T", "0")]


async def test_hooks_hear_of_popped_messages():
    heard: list[tuple[str, bool, list[int]]] = []

    class Listening(Hook):
        def consuming(self, consumption):
            offsets = [one.queue_offset for one in consumption.messages]
            heard.append((consumption.group, consumption.is_polled, offsets))

    async with (
        PopCluster(popped(*records(0, 1))) as cluster,
        PopConsumer("G", cluster.namesrv, hooks=[Listening()]) as consumer,
    ):
        await consumer.pop("T")
    assert heard == [("G", True, [0, 1])]


def test_broadcasting_cannot_be_popped():
    with pytest.raises(SettingsError, match="message_model is BROADCASTING"):
        PopConsumer("G", "127.0.0.1:1", settings=quick(message_model=MessageModel.BROADCASTING))


async def test_what_a_cancelled_pop_brings_is_given_back():
    async with PopCluster() as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        held = asyncio.Event()
        held_pops = []

        def hold(command):
            held_pops.append(command)
            held.set()

        cluster.broker.answer(POP, hold)
        pop = asyncio.create_task(consumer.pop("T", wait=10))
        await held.wait()
        pop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pop
        cluster.broker.connections[-1].send(popped(*records(4), start=4)(held_pops[0]))
        await until(lambda: cluster.pop.changed == [(4, 1000)], "it is given back")
