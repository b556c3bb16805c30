"""Ordered consumption: one after the other, in place, by one member at a time. Source: behaviour.md §2.7, §8.10."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest

from rmqkit.client.consumer.consume import ConsumeLater, Reject
from rmqkit.client.consumer.ordered import ClientQueueLocks
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import MessageModel, PushConsumerSettings, StartFrom
from rmqkit.errors import SettingsError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import LockBody, LockedQueues, MessageQueue
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.standalone import Standalone
from rmqkit.system import threads
from tests.client.inside import coordinator_of, runtime_of
from tests.client.messages import record
from tests.client.peers import Cluster, offset, pulled, until

LOCK, UNLOCK, PULL = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ, RequestCode.PULL_MESSAGE
SAVE, SEND_BACK = RequestCode.UPDATE_CONSUMER_OFFSET, RequestCode.CONSUMER_SEND_MSG_BACK
QUICK = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, suspend_queue_ms=10, take_over_pause_ms=0)


async def send(producer, queue, *numbers):
    for number in numbers:
        await producer.send(Message(topic="T", body=b"%d" % number), queue=queue)


def ordered(cluster, settings=QUICK, group="CG"):
    return PushConsumer(group, cluster.namesrv_address, settings=settings, ordered=True)


async def test_each_queue_is_handled_one_after_the_other_and_queues_side_by_side(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        for queue in await producer.queues("T"):
            await send(producer, queue, *range(20))
        seen, running, together = defaultdict(list), set(), set()
        consumer = ordered(cluster)

        @consumer.on("T")
        async def handler(message):
            assert message.queue_id not in running, "two handlers in one queue"
            running.add(message.queue_id)
            together.add(frozenset(running))
            await asyncio.sleep(0)
            running.discard(message.queue_id)
            seen[message.queue_id].append(int(message.body))

        async with consumer:
            await until(lambda: sum(map(len, seen.values())) == 80, "all messages")
        assert dict(seen) == {i: list(range(20)) for i in range(4)}
        assert max(map(len, together)) > 1, "different queues run at the same time"


async def test_a_failure_is_redelivered_in_place_before_what_follows(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[0]
        await send(producer, queue, *range(5))
        seen = []
        consumer = ordered(cluster)

        @consumer.on("T")
        async def handler(message):
            seen.append((int(message.body), message.reconsume_times))
            if message.body == b"2" and message.reconsume_times < 3:
                raise ValueError("not yet")

        async with consumer:
            await until(lambda: (4, 0) in seen, "the last message")
        assert seen == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (4, 0)]
        async with PullConsumer("CG", cluster.namesrv_address) as reader:
            assert await reader.committed(queue) == 5


@pytest.mark.parametrize(("retries_max", "error", "times"), [(2, ValueError("never"), 3), (-1, Reject(), 1)])
async def test_what_is_given_up_goes_to_the_dead_letters_and_the_queue_moves_on(tmp_path, retries_max, error, times):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queue = (await producer.queues("T"))[0]
        await send(producer, queue, *range(3))
        seen = []
        consumer = ordered(cluster, msgspec.structs.replace(QUICK, retries_max=retries_max))

        @consumer.on("T")
        async def handler(message):
            seen.append(int(message.body))
            if message.body == b"1":
                raise error

        async with consumer, PullConsumer("reader", cluster.namesrv_address) as reader:
            await until(lambda: 2 in seen, "the message behind")
            (dead,) = (await reader.pull((await reader.queues("%DLQ%CG"))[0], 0)).messages
        assert seen == [0, *[1] * times, 2]
        assert (dead.body, dead.properties["RETRY_TOPIC"]) == (b"1", "T")


async def test_a_batch_stays_in_order_and_what_is_named_is_redelivered_with_all_behind_it(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, (await producer.queues("T"))[0], *range(10))
        calls = []
        consumer = ordered(cluster)

        @consumer.on("T", batch_max=4)
        async def handler(messages):
            calls.append([int(message.body) for message in messages])
            if len(calls) == 1:
                raise ConsumeLater(messages=[messages[1]])

        async with consumer:
            await until(lambda: calls and calls[-1][-1] == 9, "the last message")
        assert calls == [[0, 1, 2, 3], [1, 2, 3, 4], [5, 6, 7, 8], [9]]


async def test_a_plain_function_keeps_the_order(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        await send(producer, (await producer.queues("T"))[0], *range(20))
        seen = []
        consumer = ordered(cluster)
        consumer.subscribe("T", "*", lambda message: seen.append((int(message.body), threads.current_name())))
        async with consumer:
            await until(lambda: len(seen) == 20, "all messages")
        assert [number for number, _ in seen] == list(range(20))
        assert threads.current_name() not in {thread for _, thread in seen}


async def test_a_second_member_takes_over_in_order_and_never_at_the_same_time(tmp_path):
    async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
        queues = await producer.queues("T")
        seen, running = defaultdict(list), set()

        async def handler(message):
            assert message.queue_id not in running, "two members in one queue"
            running.add(message.queue_id)
            await asyncio.sleep(0.001)
            running.discard(message.queue_id)
            seen[message.queue_id].append(int(message.body))

        one, two = ordered(cluster), ordered(cluster)
        for consumer in (one, two):
            consumer.subscribe("T", "*", handler)

        def share(consumer):
            return sum(queue.topic == "T" for queue in consumer.held_queues())

        async with one:
            for queue in queues:
                await send(producer, queue, *range(50))
            async with two:
                for queue in queues:
                    await send(producer, queue, *range(50, 100))
                await until(lambda: (share(one), share(two)) == (2, 2), "two queues each")
            for queue in queues:
                await send(producer, queue, *range(100, 150))
            await until(lambda: all(seen[queue.queue_id][-1:] == [149] for queue in queues), "everything")
        for numbers in seen.values():
            assert set(numbers) == set(range(150))
            assert all(after <= before + 1 for before, after in pairwise(numbers))
            assert len(numbers) == 150, "an orderly hand-over repeats nothing"


class Broker:
    """A scripted broker with three messages in one queue, which grants locks while ``grants`` is true."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.grants = True
        self.messages = record(0) + record(1) + record(2)

    async def __aenter__(self):
        await self.cluster.__aenter__()
        self.cluster.topic("T", queues=1)
        broker = self.cluster.broker
        broker.answer(LOCK, self.lock)
        broker.answer(UNLOCK, reply)
        broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda command: offset(command, self.saved()))
        broker.answer(PULL, self.pull)
        return self

    async def __aexit__(self, *exc_info):
        await self.cluster.__aexit__(*exc_info)

    def lock(self, command):
        asked = msgspec.json.decode(command.body, type=LockBody)
        return reply(command, body=msgspec.json.encode(LockedQueues(asked.queues if self.grants else [])))

    def pull(self, command):
        first = int(self.cluster.broker.asked(PULL)[-1]["queueOffset"])
        return pulled(command, 0, 3, self.messages) if first == 0 else None

    def saved(self):
        return max((int(fields["commitOffset"]) for fields in self.cluster.broker.asked(SAVE)), default=0)

    def codes(self):
        return [command.code for command in self.cluster.broker.requests]

    def consumer(self, **settings):
        values = {"suspend_queue_ms": 10, "rebalance_interval_ms": 10, **settings}
        return PushConsumer("CG", self.cluster.namesrv, settings=PushConsumerSettings(**values), ordered=True)


async def test_a_queue_is_locked_before_it_is_read_and_unlocked_after_its_offset_is_saved():
    async with Broker() as it:
        seen = []
        consumer = it.consumer()
        consumer.subscribe("T", "*", lambda message: seen.append(message.queue_offset))
        async with consumer:
            await until(lambda: len(seen) == 3, "three messages")
            codes = it.codes()
            assert codes.index(LOCK) < codes.index(RequestCode.QUERY_CONSUMER_OFFSET) < codes.index(PULL)
            body = msgspec.json.decode(next(c.body for c in it.cluster.broker.requests if c.code == LOCK))
            assert body == {
                "clientId": runtime_of(consumer).client_id,
                "consumerGroup": "CG",
                "mqSet": [{"topic": "T", "brokerName": "broker-0", "queueId": 0}],
                "onlyThisBroker": False,
            }
        codes = it.codes()
        assert it.saved() == 3
        assert codes.index(SAVE) < codes.index(UNLOCK) < codes.index(RequestCode.UNREGISTER_CLIENT)


async def test_a_locked_queue_needs_no_pause_since_its_former_owner_saved_before_it_unlocked():
    async with Broker() as it:
        consumer = it.consumer(take_over_pause_ms=60_000, rebalance_interval_ms=60_000)
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            await until(lambda: PULL in it.codes(), "the queue is read")
            queue = MessageQueue("T", "broker-0", 0)
            await coordinator_of(consumer).change_queues([], [queue], is_shared=True)
            pulls = it.codes().count(PULL)
            await coordinator_of(consumer).change_queues([queue], [], is_shared=True)
            await until(lambda: it.codes().count(PULL) > pulls, "the queue is read again")


async def test_a_queue_that_somebody_else_has_is_not_read_until_it_is_free():
    async with Broker() as it:
        it.grants = False
        seen = []
        consumer = it.consumer()
        consumer.subscribe("T", "*", lambda message: seen.append(message.queue_offset))
        async with consumer:
            await until(lambda: it.codes().count(LOCK) >= 2, "it asks again")
            assert (consumer.held_queues(), it.codes().count(PULL)) == (set(), 0)
            it.grants = True
            await until(lambda: len(seen) == 3, "three messages")


async def test_a_lock_whose_answer_does_not_come_before_the_end_is_given_back():
    async with Broker() as it:
        it.cluster.broker.answer(LOCK, lambda command: None)
        consumer = it.consumer()
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            await until(lambda: LOCK in it.codes(), "it asks")
        (body,) = (msgspec.json.decode(c.body) for c in it.cluster.broker.requests if c.code == UNLOCK)
        assert body["mqSet"] == [{"topic": "T", "brokerName": "broker-0", "queueId": 0}]


async def test_a_lock_that_is_being_given_back_is_not_renewed():
    async with Broker() as it:
        it.cluster.broker.answer(UNLOCK, lambda command: None)  # under way for as long as this takes
        consumer = it.consumer(api_timeout_ms=1500)
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            await until(lambda: len(consumer.held_queues()) == 1, "the queue is held")
            consumer.unsubscribe("T")
            await until(lambda: UNLOCK in it.codes(), "the lock is given back")
            await coordinator_of(consumer).renew_locks()
            codes = it.codes()
            assert LOCK not in codes[codes.index(UNLOCK) :]


async def test_pulls_of_an_ordered_queue_commit_nothing_as_one_may_arrive_after_the_last_save():
    async with Broker() as it:
        it.cluster.broker.answer(RequestCode.QUERY_CONSUMER_OFFSET, lambda command: offset(command, 2))
        consumer = it.consumer()
        consumer.subscribe("T", "*", lambda message: None)
        async with consumer:
            await until(lambda: it.cluster.broker.asked(PULL), "a pull")
        (asked,) = it.cluster.broker.asked(PULL)
        assert (asked["queueOffset"], asked["commitOffset"]) == ("2", "2")
        assert not int(asked["sysFlag"]) & PullFlag.COMMIT_OFFSET


async def test_a_lost_lock_restarts_the_queue_and_saves_nothing():
    async with Broker() as it:
        gate, running = asyncio.Event(), []
        consumer = it.consumer(lock_interval_ms=10)

        @consumer.on("T")
        async def handler(message):
            running.append(message.queue_offset)
            await gate.wait()

        async with consumer:
            await until(lambda: running == [0], "the first handler")
            it.grants = False
            await until(lambda: not consumer.held_queues(), "the queue is gone")
            gate.set()
            it.grants = True
            await until(lambda: running[1:] == [0, 1, 2], "all from where the group was")
            assert SAVE not in it.codes()[: it.codes().index(UNLOCK) if UNLOCK in it.codes() else None]


async def test_no_handler_begins_in_a_queue_that_went_while_its_lock_was_requested():
    async with Broker() as it:
        seen = []
        consumer = it.consumer(rebalance_interval_ms=60_000)
        consumer.subscribe("T", "*", lambda message: seen.append(message.queue_offset))
        coordinator, locks, taken = coordinator_of(consumer), coordinator_of(consumer)._context.locks, []

        async def lock_late(queues):
            taken.append(coordinator.process_queues[queues[0]])
            await coordinator.assigned.drop(queues[0])
            return await ClientQueueLocks.lock(locks, queues)

        def pull_without_lock(command):
            locks._granted_ms.clear()
            locks.lock = lock_late
            return it.pull(command)

        it.cluster.broker.answer(PULL, pull_without_lock)
        async with consumer:
            await until(lambda: taken, "the question for the lock")
            assert await taken[0].wait_for_handlers(30_000)
            assert locks.is_held(taken[0].queue)
        assert seen == []


async def test_a_queue_is_kept_until_its_handler_has_ended():
    async with Broker() as it:
        gate, running = asyncio.Event(), []
        consumer = it.consumer(rebalance_interval_ms=60_000)

        @consumer.on("T")
        async def handler(message):
            running.append(message.queue_offset)
            await gate.wait()

        async with consumer:
            await until(lambda: running == [0], "the first handler")
            queue = MessageQueue("T", "broker-0", 0)
            await coordinator_of(consumer).change_queues([], [queue], is_shared=True)
            assert consumer.held_queues() == {queue}, "no other member may overtake the handler"
            assert UNLOCK not in it.codes()
            gate.set()
            coordinator_of(consumer).rebalance_soon()
            await until(lambda: UNLOCK in it.codes(), "the queue is given back")
            assert running[0] == 0
            assert it.cluster.broker.asked(SAVE)[0]["commitOffset"] == "1"


async def test_broadcasting_needs_no_locks(tmp_path):
    async with Broker() as it:
        seen = []
        consumer = it.consumer(
            message_model=MessageModel.BROADCASTING, offsets_dir=str(tmp_path), start_from=StartFrom.FIRST_OFFSET
        )
        consumer.subscribe("T", "*", lambda message: seen.append(message.queue_offset))
        async with consumer:
            await until(lambda: len(seen) == 3, "three messages")
        assert LOCK not in it.codes()
        assert SEND_BACK not in it.codes()


def test_a_handler_is_needed():
    consumer = PushConsumer("CG", "a:1", ordered=True)
    with pytest.raises(SettingsError, match="ordered consumption of topic T has no handler: give one"):
        consumer.subscribe("T")
