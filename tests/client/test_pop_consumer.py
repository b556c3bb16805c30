"""The pop consumer against scripted brokers. Source: behaviour.md §4.7–§4.12, §8.13; remoting.md §4.6.1."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from rmqkit.client.consuming import ConsumeLater
from rmqkit.client.hooks import Hook
from rmqkit.client.pop_consumer import PopConsumer
from rmqkit.client.push_consumer import PushConsumer
from rmqkit.client.settings import MessageModel, PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError, ConnectFailed, NoRoute, PeerRefused, SettingsError
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.bodies.pop import BatchAckBody
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.record import COMPRESSED
from tests.client.messages import record
from tests.client.peers import Cluster, on_loop, refused, until
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
    records,
)

QUICK = PushConsumerSettings(error_pause_ms=5, suspend_queue_ms=10)
EVERYWHERE = MessageQueue("T", "broker-0", -1)


def quick(**changes) -> PushConsumerSettings:
    return msgspec.structs.replace(QUICK, **changes)


@contextlib.asynccontextmanager
async def handling(cluster: PopCluster, handler, expression: str = "*", *, ordered: bool = False, **settings):
    consumer = PopConsumer("G", cluster.namesrv, settings=quick(**settings), ordered=ordered)
    consumer.subscribe("T", expression, handler)
    async with consumer:
        yield consumer


def held(consumer: PopConsumer) -> int:
    return sum(one.held_messages for one in consumer.status().queues)


class Seen(list):
    """A handler that writes down the offsets it gets, and fails on some."""

    def __init__(self, *, failing: dict[int, Exception] | None = None) -> None:
        super().__init__()
        self.failing = failing or {}

    async def __call__(self, message) -> None:
        self.append(message.queue_offset)
        if message.queue_offset in self.failing:
            raise self.failing[message.queue_offset]


# -- message by message


@on_loop
async def test_a_pop_says_what_the_spec_names():
    async with PopCluster(NOTHING) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        assert not await consumer.pop("T", "A || B", max_count=5, invisible_ms=9000, poll_ms=700)
        (asked,) = cluster.pop.pops
        assert int(asked.pop("bornTime")) > 0
        assert asked == {
            "consumerGroup": "G",
            "topic": "T",
            "queueId": "-1",
            "maxMsgNums": "5",
            "invisibleTime": "9000",
            "pollTime": "700",
            "initMode": "1",
            "expType": "TAG",
            "exp": "A || B",
        }


@on_loop
async def test_nothing_is_told_to_brokers_by_a_consumer_that_only_pops():
    async with PopCluster(NOTHING) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert await consumer.pop("T") == []
        assert cluster.heartbeats == []


@on_loop
async def test_a_group_that_begins_at_the_first_offset_says_so():
    settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
    async with PopCluster(NOTHING) as cluster, PopConsumer("G", cluster.namesrv, settings=settings) as consumer:
        assert await consumer.pop("T") == []
        assert cluster.pop.pops[0]["initMode"] == "0"
        assert cluster.pop.pops[0]["invisibleTime"] == "60000"


@on_loop
async def test_one_ack_goes_alone_and_many_together():
    async with PopCluster(popped(*records(8, 9, 17), start=8)) as cluster, PopConsumer("G", cluster.namesrv) as it:
        first, *others = await it.pop("T")
        await it.ack(first)
        assert cluster.broker.asked(ACK) == [
            {
                "consumerGroup": "G",
                "topic": "T",
                "queueId": "0",
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


@on_loop
async def test_acks_of_several_brokers_go_to_each():
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T", queues=1)
        brokers = [PopBroker(peer, *[popped(*records(i), start=i)] * 2) for i, peer in enumerate(cluster.brokers)]
        async with PopConsumer("G", cluster.namesrv) as consumer:
            messages = [*await consumer.pop("T"), *await consumer.pop("T")]
            assert sorted(one.queue_offset for one in messages) == [0, 1], "they take turns"
            await consumer.ack_many(messages)
        assert [broker.acked for broker in brokers] == [[0], [1]]


@on_loop
async def test_brokers_without_messages_are_asked_without_waiting_but_the_last_one():
    async with Cluster(brokers=3) as cluster:
        cluster.topic("T", queues=1)
        brokers = [PopBroker(peer, NOTHING) for peer in cluster.brokers]
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert await consumer.pop("T", poll_ms=250) == []
        assert sorted(broker.pops[0]["pollTime"] for broker in brokers) == ["0", "0", "250"]


@on_loop
async def test_a_broker_that_is_away_does_not_hide_the_others():
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T", queues=1)
        PopBroker(cluster.brokers[0], popped(*records(0)), NOTHING)
        async with PopConsumer("G", cluster.namesrv) as consumer:
            await consumer._runtime.routes.readable_queues("T")
            await cluster.brokers[1].stop()
            assert len(await consumer.pop("T")) == 1, "asked after the one that is away"
            with pytest.raises(ConnectFailed):
                await consumer.pop("T")  # asked before it


@on_loop
async def test_a_new_invisible_time_makes_a_new_handle():
    async with PopCluster(popped(*records(8), start=8)) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        (message,) = await consumer.pop("T")
        await consumer.change_invisible_time(message, 1500)
        assert cluster.broker.asked(CHANGE) == [
            {
                "consumerGroup": "G",
                "topic": "T",
                "queueId": "0",
                "extraInfo": "8 1795224862948 60000 3 0 broker-0 0 8",
                "offset": "8",
                "invisibleTime": "1500",
            }
        ]
        assert message.properties["POP_CK"] == "8 1795224862949 1500 5 0 broker-0 0 8"


@pytest.mark.parametrize(("mark", "topic"), [("1", "%RETRY%G_T"), ("2", "%RETRY%G+T")])
@on_loop
async def test_what_came_again_is_acknowledged_and_changed_in_its_retry_topic(mark, topic):
    handle = f"5 1795224862948 60000 2 {mark} broker-0 0 8"
    answer = popped(*records(8, POP_CK=handle), startOffsetInfo=f"{mark} 0 5")
    async with PopCluster(answer) as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        (message,) = await consumer.pop("T")
        await consumer.change_invisible_time(message, 1500)
        await consumer.ack(message)
        assert [one["topic"] for one in cluster.broker.asked(CHANGE) + cluster.broker.asked(ACK)] == [topic] * 2
        assert cluster.broker.asked(ACK)[0]["extraInfo"] == f"8 1795224862949 1500 5 {mark} broker-0 0 8"


@on_loop
async def test_what_only_has_a_tag_of_the_same_hash_is_acknowledged():
    answer = popped(*records(0, TAGS="Aa"), *records(1, TAGS="BB"))
    async with PopCluster(answer) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert [one.tags for one in await consumer.pop("T", "BB")] == ["BB"]
        assert cluster.pop.acked == [0]


@on_loop
async def test_a_body_that_cannot_be_unpacked_is_a_dead_letter_and_acknowledged():
    answer = popped(record(0, b"not zlib", sys_flag=COMPRESSED), *records(1))
    async with PopCluster(answer) as cluster:
        async with PopConsumer("G", cluster.namesrv) as consumer:
            assert [one.queue_offset for one in await consumer.pop("T")] == [1]
        assert [(one["offset"], one["delayLevel"]) for one in cluster.broker.asked(SEND_BACK)] == [("1000", "-1")]
        assert cluster.pop.acked == [0]


@on_loop
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


@on_loop
async def test_what_cannot_be_popped_is_said_before_anybody_is_asked():
    async with PopCluster() as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        with pytest.raises(ClientError, match="names no tag"):
            await consumer.pop("T", "||")
        with pytest.raises(ClientError, match="illegal characters"):
            await consumer.pop("T T")
        with pytest.raises(NoRoute, match="no broker lets topic U be read"):
            await consumer.pop("U")
    with pytest.raises(ClientError, match="pop consumer of group G is closed"):
        await consumer.pop("T")


@on_loop
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
        await consumer.change_invisible_time(new, 500)
        await consumer.ack_many([again, new])
        assert [one["topic"] for one in cluster.broker.asked(ACK)] == ["%RETRY%NS%G_NS%T"]
        assert [one["topic"] for one in cluster.broker.asked(CHANGE)] == ["NS%T"]
        (batch,) = [one for one in cluster.broker.requests if one.code == ACK_MANY]
        acks = msgspec.json.decode(batch.body, type=BatchAckBody).acks
        assert [(one.group, one.topic, one.retry) for one in acks] == [("NS%G", "NS%T", "1"), ("NS%G", "NS%T", "0")]


@on_loop
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


@on_loop
async def test_what_a_cancelled_pop_brings_is_given_back():
    async with PopCluster() as cluster, PopConsumer("G", cluster.namesrv) as consumer:
        held = asyncio.Event()
        held_pops = []

        def hold(command):
            held_pops.append(command)
            held.set()

        cluster.broker.answer(POP, hold)
        pop = asyncio.create_task(consumer.pop("T", poll_ms=10_000))
        await held.wait()
        pop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pop
        cluster.broker.connections[-1].send(popped(*records(4), start=4)(held_pops[0]))
        await until(lambda: cluster.pop.changed == [(4, 1000)], "it is given back")


# -- handlers


@on_loop
async def test_returning_acknowledges_and_pops_go_on():
    seen = Seen()
    answers = (popped(*records(0, 1, 2)), NOTHING, popped(*records(3), start=3))
    async with PopCluster(*answers) as cluster, handling(cluster, seen, suspend_ms=1) as consumer:
        await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2, 3], "all acks")
        assert seen == [0, 1, 2, 3]
        assert consumer.held_queues() == {EVERYWHERE}
        await until(lambda: len(cluster.pop.pops) == 4, "one more pop, which is held")
        assert {one["queueId"] for one in cluster.pop.pops} == {"-1"}
        data = cluster.heartbeats[-1].consumerDataSet[0]
        assert (data.consume_type, [one.topic for one in data.subscription_data_set]) == ("CONSUME_POP", ["T"])


@on_loop
async def test_acks_that_come_while_one_is_under_way_go_together():
    async with PopCluster(popped(*records(0)), popped(*records(*range(1, 20)), start=1)) as cluster:
        first = []
        cluster.broker.answer(ACK, first.append)  # not answered yet
        async with handling(cluster, Seen()):
            await until(lambda: first, "the first ack")
            await until(lambda: len(cluster.pop.pops) == 3, "the second pop is answered")
            await until(lambda: first and not cluster.pop.acked, "nothing else goes out")
            cluster.broker.connections[-1].send(reply(first[0]))
            await until(lambda: sorted(cluster.pop.acked) == list(range(1, 20)), "the others")
        (batch,) = [one for one in cluster.broker.requests if one.code == ACK_MANY]
        assert len(msgspec.json.decode(batch.body, type=BatchAckBody).acks) == 1


@on_loop
async def test_a_failure_comes_again_after_the_step_of_its_count():
    failing = {0: ValueError("no"), 1: ValueError("no"), 2: ConsumeLater(3), 3: ConsumeLater(invisible_ms=70)}
    seen = Seen(failing=failing)
    again = record(1, reconsume=4)
    async with PopCluster(popped(*records(0), again, *records(2, 3, 4))) as cluster, handling(cluster, seen):
        await until(lambda: len(cluster.pop.changed) == 4, "four that come again")
        await until(lambda: cluster.pop.acked == [4], "one that does not")
        assert sorted(cluster.pop.changed) == [(0, 10_000), (1, 180_000), (2, 120_000), (3, 70)]


@on_loop
async def test_what_failed_too_often_is_a_dead_letter_before_it_is_acknowledged():
    failing = {0: ValueError("no"), 1: ConsumeLater(-1)}
    seen = Seen(failing=failing)
    answer = popped(record(0, reconsume=2), record(1), record(2, reconsume=3))
    async with PopCluster(answer) as cluster, handling(cluster, seen, retries_max=2):
        await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2], "all are acknowledged")
        sent_back = cluster.broker.asked(SEND_BACK)
        assert sorted(one["offset"] for one in sent_back) == ["1000", "1001", "1002"]
        assert {one["delayLevel"] for one in sent_back} == {"-1"}
        assert seen == [0, 1], "one had its deliveries before"


@on_loop
async def test_what_cannot_be_a_dead_letter_is_not_acknowledged():
    seen = Seen(failing={0: ConsumeLater(-1)})
    async with PopCluster(popped(*records(0, 1))) as cluster:
        cluster.broker.answer(SEND_BACK, refused(1, "disk full"))
        async with handling(cluster, seen):
            await until(lambda: cluster.broker.asked(SEND_BACK), "a try")
            await until(lambda: cluster.pop.acked == [1], "the other one")
        assert cluster.pop.acked == [1]
        assert cluster.pop.changed == []


@on_loop
async def test_an_ack_that_gets_no_answer_is_sent_again(monkeypatch):
    monkeypatch.setattr("rmqkit.client.popping._ACK_PAUSE_MS", 1.0)
    async with PopCluster(popped(*records(0))) as cluster:
        acks = []

        def lose_one(command):
            acks.append(command)
            if len(acks) == 1:
                cluster.broker.connections[-1].close("gone")
                return None
            return reply(command)

        cluster.broker.answer(ACK, lose_one)
        async with handling(cluster, Seen()):
            await until(lambda: len(acks) == 2, "the ack again")


@on_loop
async def test_pops_pause_after_errors_and_when_too_many_wait():
    answers = (refused(1, "system error"), refused(ResponseCode.POLLING_FULL), popped(*records(0)))
    async with PopCluster(*answers) as cluster, handling(cluster, Seen()):
        await until(lambda: cluster.pop.acked == [0], "the message")


@on_loop
async def test_nothing_is_popped_while_enough_is_held():
    gate = asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()

    async with PopCluster(popped(*records(0, 1, 2)), popped(*records(3), start=3)) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=quick(pop_held_max=3))
        consumer.subscribe("T", "*", wait)
        async with consumer:
            await until(lambda: held(consumer) == 3, "three are held")
            assert len(cluster.pop.pops) == 1
            assert consumer.status().queues[0].state.value == "full"
            gate.set()
            await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2, 3], "all acks")


@on_loop
async def test_a_paused_consumer_pops_nothing():
    async with PopCluster(popped(*records(0))) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=QUICK)
        consumer.subscribe("T", "*", Seen())
        consumer.pause()
        async with consumer:
            await until(consumer.held_queues, "a queue")
            assert cluster.pop.pops == []
            consumer.resume()
            await until(lambda: cluster.pop.acked == [0], "the message")


@on_loop
async def test_closing_waits_for_handlers_sends_acks_and_gives_the_rest_back():
    begun, gate = asyncio.Event(), asyncio.Event()

    async def wait(message) -> None:
        begun.set()
        await gate.wait()

    async with PopCluster(popped(*records(0, 1, 2))) as cluster:
        async with handling(cluster, wait, handlers_max=1):
            await begun.wait()
            asyncio.get_running_loop().call_later(0.05, gate.set)
        assert cluster.pop.acked == [0]
        assert sorted(cluster.pop.changed) == [(1, 1000), (2, 1000)]
        assert len(cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)) == 1


@on_loop
async def test_handlers_of_batches_and_functions_in_threads():
    batches: list[list[int]] = []

    def keep(messages) -> None:
        batches.append([one.queue_offset for one in messages])
        if messages[0].queue_offset == 0:
            raise ConsumeLater(messages=messages[1:], invisible_ms=50)

    async with PopCluster(popped(*records(*range(5)))) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=QUICK)
        consumer.on("T", batch_max=3)(keep)
        async with consumer:
            await until(lambda: sorted(cluster.pop.acked) == [0, 3, 4], "what is consumed")
            await until(lambda: sorted(cluster.pop.changed) == [(1, 50), (2, 50)], "what comes again")
        assert sorted(batches) == [[0, 1, 2], [3, 4]]


@on_loop
async def test_a_handler_may_acknowledge_itself():
    async with PopCluster(popped(*records(0, 1))) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=QUICK)

        @consumer.on("T")
        async def handler(message) -> None:
            await consumer.ack(message)
            if message.queue_offset == 0:
                raise ValueError("too late")

        async with consumer:
            await until(lambda: sorted(cluster.pop.acked) == [0, 1], "both")
        assert (sorted(cluster.pop.acked), cluster.pop.changed) == ([0, 1], [])


@on_loop
async def test_iterated_messages_are_acknowledged_as_it_goes_on():
    async with PopCluster(popped(*records(0, 1, 2))) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=QUICK)
        consumer.subscribe("T")

        async def iterate() -> None:
            async with consumer:
                async for message in consumer.messages():
                    if message.queue_offset == 1:
                        await until(lambda: cluster.pop.acked == [0], "the one before")
                        raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            await iterate()
        assert cluster.pop.acked == [0]
        assert sorted(cluster.pop.changed) == [(1, 1000), (2, 1000)], "what was not consumed is given back"


@on_loop
async def test_an_operator_sees_what_is_held():
    gate = asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()

    async with PopCluster(popped(*records(0, 1), rest=7)) as cluster, handling(cluster, wait) as consumer:
        await until(lambda: held(consumer) == 2, "two are held")
        info = consumer._membership.running_info()
        assert info.mq_table == {}
        assert info.mq_pop_table[EVERYWHERE].wait_ack_count == 2
        assert info.mq_pop_table[EVERYWHERE].last_pop_timestamp > 0
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_POP"
        assert consumer.status().backlog == 9
        gate.set()


# -- in order


@on_loop
async def test_in_order_each_queue_is_popped_by_itself_and_only_when_all_is_acknowledged():
    gate, seen = asyncio.Event(), []

    async def wait(message) -> None:
        seen.append(message.queue_offset)
        await gate.wait()

    async with PopCluster(queues=2) as cluster:
        answers = {"0": [popped(*records(0, 1), revive_queue=999)], "1": []}

        def answer(command):
            mine = answers[cluster.broker.asked(POP)[-1]["queueId"]]
            return mine.pop(0)(command) if mine else None

        cluster.broker.answer(POP, answer)
        async with handling(cluster, wait, ordered=True) as consumer:
            await until(lambda: seen == [0], "the first message")
            await until(lambda: len(cluster.pop.pops) == 2, "one pop per queue")
            assert consumer.held_queues() == {MessageQueue("T", "broker-0", i) for i in range(2)}
            assert {(one["queueId"], one["order"]) for one in cluster.pop.pops} == {("0", "true"), ("1", "true")}
            gate.set()
            await until(lambda: len(cluster.pop.pops) == 3, "the next pop of the queue")
            assert sorted(cluster.pop.acked) == [0, 1], "all acks came before"
            assert len({one["attemptId"] for one in cluster.pop.pops}) == 3


@on_loop
async def test_in_order_a_failure_is_repeated_here_and_then_a_dead_letter():
    seen = Seen(failing={1: ValueError("no")})
    async with PopCluster(popped(*records(0, 1, 2), revive_queue=999)) as cluster:
        async with handling(cluster, seen, ordered=True, retries_max=2):
            await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2], "all acks")
        assert seen == [0, 1, 1, 1, 2]
        assert [(one["offset"], one["delayLevel"]) for one in cluster.broker.asked(SEND_BACK)] == [("1001", "-1")]
        assert cluster.pop.changed == []


@on_loop
async def test_in_order_what_cannot_be_a_dead_letter_stands_still():
    seen = Seen(failing={0: ConsumeLater(-1)})
    async with PopCluster(popped(*records(0, 1), revive_queue=999)) as cluster:
        refusals = [refused(1, "disk full")] * 2
        cluster.broker.answer(SEND_BACK, lambda command: (refusals.pop() if refusals else reply)(command))
        async with handling(cluster, seen, ordered=True):
            await until(lambda: sorted(cluster.pop.acked) == [0, 1], "both acks")
        assert seen == [0, 0, 0, 1]


@on_loop
async def test_in_order_an_attempt_keeps_its_name_until_it_is_answered():
    async with PopCluster(refused(1, "lost"), popped(*records(0), revive_queue=999)) as cluster:
        async with handling(cluster, Seen(), ordered=True):
            await until(lambda: len(cluster.pop.pops) == 3, "three pops")
        first, second, third = (one["attemptId"] for one in cluster.pop.pops)
        assert first == second != third


# -- a push consumer whose brokers share out


@on_loop
async def test_a_push_consumer_pops_what_the_broker_says_and_pulls_its_retry_topic():
    seen = Seen()
    async with PopCluster(popped(*records(0))) as cluster:
        cluster.topic("%RETRY%G", queues=1)
        assigned = {"T": ("POP", -1), "%RETRY%G": ("PULL", 0)}

        def assign(command):
            topic = msgspec.json.decode(command.body)["topic"]
            mode, queue_id = assigned[topic]
            queue = {"topic": topic, "brokerName": "broker-0", "queueId": queue_id}
            body = {"messageQueueAssignments": [{"messageQueue": queue, "mode": mode}]}
            return reply(command, body=msgspec.json.encode(body))

        cluster.broker.answer(RequestCode.QUERY_ASSIGNMENT, assign)
        consumer = PushConsumer("G", cluster.namesrv, settings=quick(client_rebalance=False))
        consumer.subscribe("T", "*", seen)
        async with consumer:
            await until(lambda: cluster.pop.acked == [0], "the ack")
            await until(lambda: len(consumer.held_queues()) == 2, "both queues")
            assert consumer.held_queues() == {EVERYWHERE, MessageQueue("%RETRY%G", "broker-0", 0)}
            await until(lambda: cluster.broker.asked(RequestCode.PULL_MESSAGE), "a pull")
        assert cluster.heartbeats[-1].consumerDataSet[0].consume_type == "CONSUME_PASSIVELY"
        assert not cluster.broker.asked(RequestCode.GET_CONSUMER_LIST_BY_GROUP), "nobody else is asked"
