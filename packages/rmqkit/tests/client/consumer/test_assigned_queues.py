"""Pauses, and the effect of a close on running handlers. Source: behaviour.md §8.10, §8.12."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rmqkit.client.consumer.assignment import Pauses
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.errors import ClientError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import LockBody, LockedQueues, MessageQueue
from rmqkit.standalone import Standalone
from rmqkit.system import threads
from tests.client.inside import coordinator_of, offsets_of, poll_buffer_of, service_of
from tests.client.messages import record
from tests.client.peers import Cluster, offset, pulled, until

ONE, TWO, THREE = (MessageQueue("T", "broker-0", queue_id) for queue_id in range(3))
LOCK, UNLOCK, PULL = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ, RequestCode.PULL_MESSAGE


def paused(*calls):
    pauses = Pauses()
    for is_paused, *queues in calls:
        pauses.set(queues, is_paused=is_paused)
    return {queue for queue in (ONE, TWO, THREE) if queue in pauses}


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([], set()),
        ([(True, ONE)], {ONE}),
        ([(True, ONE), (True, ONE), (False, ONE)], set()),
        ([(True, ONE), (False, TWO)], {ONE}),
        ([(True,)], {ONE, TWO, THREE}),
        ([(True,), (False, ONE)], {TWO, THREE}),
        ([(True,), (False, ONE), (True, ONE)], {ONE, TWO, THREE}),
        ([(True,), (False, ONE), (True,)], {ONE, TWO, THREE}),
        ([(True, ONE), (True,), (False, TWO)], {ONE, THREE}),
        ([(True, ONE), (True,), (False,)], set()),
    ],
)
def test_queues_are_paused_by_name_or_all_together(calls, found):
    assert paused(*calls) == found


class Ordered:
    """An ordered consumer of one queue whose handler was begun, with 10 ms to end when it is closed."""

    def __init__(self, handler) -> None:
        self.cluster = Cluster()
        self.handler = handler

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T", queues=1)
        broker, answers = self.cluster.broker, [record(0)]
        broker.answer(PULL, lambda command: pulled(command, 0, 1, answers.pop()) if answers else None)
        broker.answer(LOCK, self.grant)
        broker.answer(UNLOCK, reply)
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, drain_ms=10)
        self.consumer = PushConsumer("CG", self.cluster.namesrv, settings=settings, ordered=True)
        self.consumer.subscribe("T", "*", self.handler)
        await self.consumer.start()
        return self

    async def __aexit__(self, *exc_info):
        await self.consumer.close()
        await self.cluster.__aexit__(*exc_info)

    def grant(self, command):
        queues = msgspec.json.decode(command.body, type=LockBody).queues
        return reply(command, body=msgspec.json.encode(LockedQueues(queues)))

    @property
    def unlocked(self):
        bodies = [one.body for one in self.cluster.broker.requests if one.code == UNLOCK]
        return [queue for body in bodies for queue in msgspec.json.decode(body, type=LockBody).queues]


async def test_a_handler_in_a_thread_that_outlives_the_closing_keeps_its_queue_and_is_reported(caplog):
    gate, running = threads.Event(), threads.Event()

    def handler(message):
        running.set()
        gate.wait()

    try:
        async with Ordered(handler) as it:
            await until(running.is_set, "the handler")
            await it.consumer.close()
            assert it.unlocked == []
    finally:
        gate.set()
    assert f"group CG: the handler of {ONE} is still at work in its thread" in caplog.text
    assert "60 s after it was last renewed: allow it more than drain_ms" in caplog.text


async def test_a_coroutine_that_outlives_the_closing_is_cancelled_and_its_queue_given_back(caplog):
    running, ended = asyncio.Event(), []

    async def handler(message):
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(message)

    async with Ordered(handler) as it:
        await running.wait()
        await it.consumer.close()
        assert len(ended) == 1
        assert it.unlocked == [ONE]
    assert "still at work" not in caplog.text


async def test_one_queue_continues_while_all_others_are_paused(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queues = await producer.queues("T")
        await producer.send(Message(topic="T", body=b"first"), queue=queues[0])
        seen = []
        settings = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0)
        consumer = PushConsumer("CG", cluster.namesrv_address, settings=settings)

        @consumer.on("T")
        async def handler(message):
            seen.append(message.queue_id)

        async with consumer:
            await until(lambda: seen == [0] and set(queues) <= consumer.held_queues(), "all queues")
            consumer.pause()
            consumer.resume(queues[2])
            for queue in queues:
                await producer.send(Message(topic="T", body=b"x"), queue=queue)
            await until(lambda: seen[1:], "the queue that goes on")
            assert seen == [0, 2]
            consumer.resume()
            await until(lambda: sorted(seen) == [0, 0, 1, 2, 3], "all queues")


def pulls(queue):
    """Return the running pull loops of a queue."""
    return [one for one in asyncio.all_tasks() if one.get_name() == f"pull {queue} for group CG"]


async def test_a_rebalance_while_a_reset_waits_for_a_handler_leaves_one_pull_of_the_queue_there():
    gate, running, saved = asyncio.Event(), asyncio.Event(), [0]

    async def handler(message):
        running.set()
        await gate.wait()

    def save(command):
        saved.append(int(decode_fields(command)["commitOffset"]))
        return reply(command)

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(PULL, lambda command: None if running.is_set() else pulled(command, 0, 1, record(0)))
        cluster.broker.answer(RequestCode.UPDATE_CONSUMER_OFFSET, save)
        cluster.broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda command: offset(command, saved[-1]))
        consumer = PushConsumer("CG", cluster.namesrv, settings=PushConsumerSettings(take_over_pause_ms=0))
        consumer.subscribe("T", "*", handler)
        async with consumer:
            await running.wait()
            reset = asyncio.create_task(coordinator_of(consumer).reset_offsets({ONE: 100}))
            await until(lambda: not pulls(ONE), "the end of the pull")
            await coordinator_of(consumer)._share_out()
            gate.set()
            await reset
            await until(
                lambda: any(one["queueOffset"] == "100" for one in cluster.broker.asked(PULL)), "the pull at the offset"
            )
            assert saved[-1] == 100
            assert len(pulls(ONE)) == 1


async def test_seeks_at_the_same_time_leave_one_pull_of_the_queue_at_the_last_offset():
    async with Cluster() as cluster, PullConsumer("CG", cluster.namesrv) as consumer:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.GET_MIN_OFFSET, lambda command: offset(command, 0))
        cluster.broker.answer(RequestCode.GET_MAX_OFFSET, lambda command: offset(command, 9))
        consumer.assign([ONE])
        await until(lambda: cluster.broker.asked(PULL), "the first pull")
        await asyncio.gather(*(consumer.seek(ONE, at) for at in (3, 5)))
        await until(lambda: cluster.broker.asked(PULL)[-1]["queueOffset"] == "5", "the pull at the last offset")
        assert len(pulls(ONE)) == 1


async def test_a_seek_in_a_queue_that_is_being_given_away_is_refused_and_leaves_nothing_behind():
    async with Cluster() as cluster, PullConsumer("CG", cluster.namesrv) as consumer:
        cluster.topic("T", queues=1)
        consumer.subscribe("T")
        await until(lambda: cluster.broker.asked(PULL), "the first pull")
        held, gate, saving = coordinator_of(consumer).assigned, asyncio.Event(), asyncio.Event()

        async def save(queue):
            saving.set()
            await gate.wait()

        offsets_of(consumer).save = save
        giving = asyncio.create_task(held.give_up(ONE))
        await saving.wait()
        seeking = asyncio.create_task(coordinator_of(consumer).start_at(ONE, 3))
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(ClientError, match="is not owned by this member of group CG"):
            await seeking
        await giving
        assert held._starts == {}, "it would begin there when it comes back, hours later"


@pytest.mark.parametrize("kind", ["handled", "iterated", "polled"])
async def test_what_waits_of_a_queue_that_starts_over_is_let_go(kind):
    async def busy(message):
        await asyncio.Event().wait()

    def pull(command):
        is_first = decode_fields(command)["queueOffset"] == "0"
        return pulled(command, 0, 4, b"".join(map(record, range(4)))) if is_first else None

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(PULL, pull)
        if kind == "polled":
            consumer = PullConsumer("CG", cluster.namesrv)
            consumer.subscribe("T")
        else:
            consumer = PushConsumer("CG", cluster.namesrv, settings=PushConsumerSettings(handlers_max=1, drain_ms=0))
            consumer.subscribe("T", handler=busy if kind == "handled" else None)
        async with consumer:
            coordinator = coordinator_of(consumer)
            for _ in range(3):
                await until(lambda: len(coordinator.process_queues.get(ONE, ())) == 4, "all messages")
                await coordinator.start_at(ONE, 0)
            waiting = {
                "handled": lambda: service_of(consumer)._ready.qsize(),
                "iterated": lambda: service_of(consumer)._unhandled.qsize(),
                "polled": lambda: len(poll_buffer_of(consumer)._ready),
            }[kind]
            assert waiting() == 0
            await until(waiting, "they come again")
