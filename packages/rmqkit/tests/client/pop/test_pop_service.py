"""The pop consumer's handlers, in order and not, against scripted brokers. Source: behaviour.md §4.12–§4.15, §8.13."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from rmqkit.client.consumer.consume import ConsumeLater, Reject
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.runtime.settings import Popping, Pulling
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, reply
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.pop import BatchAckBody
from tests.client.inside import coordinator_of
from tests.client.messages import record
from tests.client.peers import refused, until
from tests.client.pops import (
    ACK,
    ACK_MANY,
    CHANGE,
    EVERYWHERE,
    NOTHING,
    POP,
    QUICK,
    SEND_BACK,
    PopCluster,
    popped,
    quick,
    records,
)


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


# -- handlers


async def test_returning_acknowledges_and_pops_continue():
    seen = Seen()
    answers = (popped(*records(0, 1, 2)), NOTHING, popped(*records(3), start=3))
    async with PopCluster(*answers) as cluster, handling(cluster, seen, pull=Pulling(suspend_ms=1)) as consumer:
        await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2, 3], "all acks")
        assert seen == [0, 1, 2, 3]
        assert consumer.held_queues() == {EVERYWHERE}
        await until(lambda: len(cluster.pop.pops) == 4, "one more pop, which is held")
        assert {one["queueId"] for one in cluster.pop.pops} == {"-1"}
        data = cluster.heartbeats[-1].consumerDataSet[0]
        assert (data.consume_type, [one.topic for one in data.subscription_data_set]) == ("CONSUME_POP", ["T"])


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


async def test_a_failure_is_redelivered_after_the_step_of_its_count():
    failing = {0: ValueError("no"), 1: ValueError("no"), 2: ConsumeLater(3), 3: ConsumeLater(delay=0.07)}
    seen = Seen(failing=failing)
    again = record(1, reconsume=4)
    async with PopCluster(popped(*records(0), again, *records(2, 3, 4))) as cluster, handling(cluster, seen):
        await until(lambda: len(cluster.pop.changed) == 4, "four that come again")
        await until(lambda: cluster.pop.acked == [4], "one that does not")
        assert sorted(cluster.pop.changed) == [(0, 10_000), (1, 180_000), (2, 120_000), (3, 70)]


async def test_a_failure_of_a_queue_that_was_released_meanwhile_is_redelivered():
    goes_on, begun = asyncio.Event(), asyncio.Event()

    async def handle(message) -> None:
        begun.set()
        await goes_on.wait()
        raise ValueError("no")

    async with PopCluster(popped(*records(0))) as cluster, handling(cluster, handle) as consumer:
        await begun.wait()
        (process_queue,) = coordinator_of(consumer).process_queues.values()
        process_queue.release()
        goes_on.set()
        await until(lambda: cluster.pop.changed == [(0, 10_000)], "the message is delivered again later")
        assert len(process_queue) == 0  # nothing renews its invisible time


async def test_a_message_that_its_handler_suspends_never_becomes_a_dead_letter():
    seen = Seen(failing={0: ConsumeLater(delay=0.07, suspend=True), 1: ConsumeLater(delay=0.07)})
    answer = popped(record(0, reconsume=2), record(1, reconsume=1))
    async with PopCluster(answer) as cluster, handling(cluster, seen, retries_max=2):
        await until(lambda: len(cluster.pop.changed) == 2, "both come again")
        asked = [(one["offset"], one.get("suspend")) for one in cluster.broker.asked(CHANGE)]
        assert sorted(asked) == [("0", "true"), ("1", None)]
        assert cluster.broker.asked(SEND_BACK) == []


async def test_what_failed_too_often_is_a_dead_letter_before_it_is_acknowledged():
    failing = {0: ValueError("no"), 1: Reject()}
    seen = Seen(failing=failing)
    answer = popped(record(0, reconsume=2), record(1), record(2, reconsume=3))
    async with PopCluster(answer) as cluster, handling(cluster, seen, retries_max=2):
        await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2], "all are acknowledged")
        sent_back = cluster.broker.asked(SEND_BACK)
        assert sorted(one["offset"] for one in sent_back) == ["1000", "1001", "1002"]
        assert {one["delayLevel"] for one in sent_back} == {"-1"}
        assert seen == [0, 1], "one had its deliveries before"


async def test_what_cannot_be_a_dead_letter_is_not_acknowledged():
    seen = Seen(failing={0: Reject()})
    async with PopCluster(popped(*records(0, 1))) as cluster:
        cluster.broker.answer(SEND_BACK, refused(1, "disk full"))
        async with handling(cluster, seen):
            await until(lambda: cluster.broker.asked(SEND_BACK), "a try")
            await until(lambda: cluster.pop.acked == [1], "the other one")
        assert cluster.pop.acked == [1]
        assert cluster.pop.changed == []


async def test_an_ack_that_gets_no_answer_is_sent_again(monkeypatch):
    monkeypatch.setattr("rmqkit.client.pop.session._ACK_PAUSE_MS", 1.0)
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


async def test_pops_pause_after_errors_and_when_too_many_wait():
    answers = (refused(1, "system error"), refused(ResponseCode.POLLING_FULL), popped(*records(0)))
    async with PopCluster(*answers) as cluster, handling(cluster, Seen()):
        await until(lambda: cluster.pop.acked == [0], "the message")


def by_a_clock_ahead(*then):
    """An answer of a broker whose clock is 20 s ahead: a pop with an earlier end is late, another gets an answer."""
    waiting = list(then)

    def answer(command):
        fields = decode_fields(command)
        left_ms = int(fields["bornTime"]) + int(fields["pollTime"]) - (SYSTEM_CLOCK.now_ms() + 20_000)
        late = refused(ResponseCode.POLLING_TIMEOUT, "the broker[10.0.0.1] pop message is timeout too much")
        return late(command) if left_ms < -500 else waiting.pop(0)(command)

    return answer


async def test_a_broker_whose_clock_is_ahead_delivers_too_and_is_named_once(caplog):
    nothing = refused(ResponseCode.POLLING_TIMEOUT, "no message")
    ahead = by_a_clock_ahead(popped(*records(0)), nothing, popped(*records(1), start=1))
    async with PopCluster(*[ahead] * 6) as cluster, handling(cluster, Seen()):
        await until(lambda: cluster.pop.acked == [0, 1], "both messages")
        polls = [one["pollTime"] for one in cluster.pop.pops]
        assert polls[:6] == ["15000", "0"] * 3
    (warned,) = [one.getMessage() for one in caplog.records if "clock" in one.getMessage()]
    assert warned.startswith("group G: broker-0 finds pops too late and does not wait for messages")


async def test_nothing_is_popped_while_enough_is_held():
    gate = asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()

    async with PopCluster(popped(*records(0, 1, 2)), popped(*records(3), start=3)) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=quick(pop=Popping(held_max=3)))
        consumer.subscribe("T", "*", wait)
        async with consumer:
            await until(lambda: held(consumer) == 3, "three are held")
            assert len(cluster.pop.pops) == 1
            assert consumer.status().queues[0].state.value == "full"
            gate.set()
            await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2, 3], "all acks")


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


async def test_handlers_of_batches_and_functions_in_threads():
    batches: list[list[int]] = []

    def keep(messages) -> None:
        batches.append([one.queue_offset for one in messages])
        if messages[0].queue_offset == 0:
            raise ConsumeLater(messages=messages[1:], delay=0.05)

    async with PopCluster(popped(*records(*range(5)))) as cluster:
        consumer = PopConsumer("G", cluster.namesrv, settings=QUICK)
        consumer.on("T", batch_max=3)(keep)
        async with consumer:
            await until(lambda: sorted(cluster.pop.acked) == [0, 3, 4], "what is consumed")
            await until(lambda: sorted(cluster.pop.changed) == [(1, 50), (2, 50)], "what comes again")
        assert sorted(batches) == [[0, 1, 2], [3, 4]]


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


async def test_iterated_messages_are_acknowledged_as_it_continues():
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


async def test_an_operator_sees_what_is_held():
    gate = asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()

    async with PopCluster(popped(*records(0, 1), rest=7)) as cluster, handling(cluster, wait) as consumer:
        await until(lambda: held(consumer) == 2, "two are held")
        info = coordinator_of(consumer).running_info()
        assert info.mq_table == {}
        assert info.mq_pop_table[EVERYWHERE].wait_ack_count == 2
        assert info.mq_pop_table[EVERYWHERE].last_pop_timestamp > 0
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_POP"
        assert consumer.status().backlog == 9
        gate.set()


# -- in order


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


async def test_in_order_a_failure_is_repeated_here_and_then_a_dead_letter():
    seen = Seen(failing={1: ValueError("no")})
    async with PopCluster(popped(*records(0, 1, 2), revive_queue=999)) as cluster:
        async with handling(cluster, seen, ordered=True, retries_max=2):
            await until(lambda: sorted(cluster.pop.acked) == [0, 1, 2], "all acks")
        assert seen == [0, 1, 1, 1, 2]
        assert [(one["offset"], one["delayLevel"]) for one in cluster.broker.asked(SEND_BACK)] == [("1001", "-1")]
        assert cluster.pop.changed == []


async def test_in_order_what_cannot_be_a_dead_letter_stands_still():
    seen = Seen(failing={0: Reject()})
    async with PopCluster(popped(*records(0, 1), revive_queue=999)) as cluster:
        refusals = [refused(1, "disk full")] * 2
        cluster.broker.answer(SEND_BACK, lambda command: (refusals.pop() if refusals else reply)(command))
        async with handling(cluster, seen, ordered=True):
            await until(lambda: sorted(cluster.pop.acked) == [0, 1], "both acks")
        assert seen == [0, 0, 0, 1]


async def test_in_order_an_attempt_keeps_its_name_until_it_is_answered():
    async with PopCluster(refused(1, "lost"), popped(*records(0), revive_queue=999)) as cluster:
        async with handling(cluster, Seen(), ordered=True):
            await until(lambda: len(cluster.pop.pops) == 3, "three pops")
        first, second, third = (one["attemptId"] for one in cluster.pop.pops)
        assert first == second != third


# -- a push consumer whose brokers share out


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
