"""Popped messages in a client, and the time until they lapse. Source: behaviour.md §4.11, §8.13."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.consume import Listener
from rmqkit.client.consumer.offsets import RemoteOffsetStore
from rmqkit.client.consumer.process_queue import NOTHING_HELD
from rmqkit.client.observe.hooks import NO_HOOKS
from rmqkit.client.observe.status import ConsumerStats
from rmqkit.client.pop.service import OrderlyPopConsumeService, PopConsumeService
from rmqkit.client.pop.session import PopProcessQueue, PopSession
from rmqkit.client.runtime.runtime import ClientRuntime
from rmqkit.client.runtime.settings import Popping, PushConsumerSettings
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.testing.clock import StandingClock
from tests.client.messages import received
from tests.client.peers import SECONDS, refused, until
from tests.client.pops import ACK, CHANGE, PopCluster

EVERYWHERE = MessageQueue("T", "broker-0", -1)
HANDLE = "0 1795224862948 60000 3 0 broker-0 0 {}"


def message(offset: int, **fields):
    return received(offset, properties={"POP_CK": HANDLE.format(offset)}, **fields)


class PoppedQueue:
    """The popped messages of a group, with the workers that handle them, against a scripted broker."""

    def __init__(self, handler=None, *, clock=None, is_ordered: bool = False, **settings) -> None:
        self.cluster = PopCluster()
        self.handler = handler
        self.clock = clock
        self.is_ordered = is_ordered
        self.settings = PushConsumerSettings(**settings)

    async def __aenter__(self):
        await self.cluster.__aenter__()
        clock = {} if self.clock is None else {"clock": self.clock}
        self.runtime = ClientRuntime(self.cluster.namesrv, **clock)
        await self.runtime.routes.refresh("T")
        self.pops = PopSession(self.runtime, "G", self.settings, is_ordered=self.is_ordered)
        listener = Listener(self.handler) if self.handler else None
        what = (
            self.runtime,
            "G",
            RemoteOffsetStore(self.runtime, "G"),
            self.settings,
            lambda topic: listener,
            NO_HOOKS,
        )
        self.consuming = (OrderlyPopConsumeService if self.is_ordered else PopConsumeService)(*what)
        self.held = self.queue()
        self.pops.start()
        self.consuming.start()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.consuming.close()
        await self.pops.close()
        await self.runtime.close()
        await self.cluster.__aexit__(*exc_info)

    def queue(self) -> PopProcessQueue:
        return self.pops.process_queue(EVERYWHERE, bytes_max=1 << 20, stats=ConsumerStats(0.0))

    def take(self, *messages) -> None:
        self.consuming.put(self.held, self.held.put(messages))


# -- the process queue


async def test_equal_offsets_of_different_queues_are_different_messages():
    async with PoppedQueue() as it:
        one, other = message(7), message(7, queue_id=1)
        it.held.put([one, other])
        assert (len(it.held), it.held.lowest(5), it.held.body_bytes) == (2, [one, other], 8)
        assert it.held.remove(one) == 1
        assert it.held.remove(one) == NOTHING_HELD
        assert (one in it.held, other in it.held) == (False, True)
        assert (it.held.position, it.held.bounds) == (1, (0, 0))
        it.held.remove(other)


async def test_there_is_room_up_to_the_limit_and_in_order_only_for_one_pop():
    async with PoppedQueue(pop=Popping(held_max=3)) as it:
        it.held.put([message(0), message(1)])
        assert it.held.has_room
        it.held.put([message(2)])
        assert not it.held.has_room
        assert it.held.full == "3 of at most 3 messages held"
    async with PoppedQueue(is_ordered=True) as it:
        assert it.held.has_room
        it.held.put([message(0)])
        assert not it.held.has_room


@pytest.mark.parametrize(("after_ms", "due"), [(29_000, []), (31_000, [1]), (60_000, [])])
async def test_time_is_due_to_be_renewed_in_its_second_half(after_ms, due):
    clock = StandingClock()
    async with PoppedQueue(clock=clock) as it:
        it.held.put([message(1)])
        clock.ms += after_ms
        assert [one.queue_offset for one in it.held.due(clock.ms)] == due
        assert len(it.held) == (after_ms < 60_000), "when it is over the message is not held any more"


async def test_time_is_not_renewed_beyond_the_consume_time_out():
    clock = StandingClock()
    async with PoppedQueue(clock=clock, consume_timeout_minutes=1, pop=Popping(invisible_ms=60_000)) as it:
        it.held.put([message(1)])
        it.held.leases[id(it.held.lowest(1)[0])].expires_ms += 60_000
        clock.ms += 100_000
        assert it.held.due(clock.ms) == []
        assert len(it.held) == 1
        clock.ms += 20_000
        assert it.held.due(clock.ms) == []
        assert len(it.held) == 0


async def test_in_order_everything_lapses_together():
    clock = StandingClock()
    async with PoppedQueue(clock=clock, is_ordered=True) as it:
        it.held.put([message(1)])
        clock.ms += 30_000
        it.held.put([message(2)])
        clock.ms += 31_000
        assert it.held.due(clock.ms) == []
        assert len(it.held) == 0


# -- renewing


async def test_a_long_handler_keeps_its_message_and_acknowledges_it_by_the_newest_handle():
    gate = asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()

    clock = StandingClock()
    async with PoppedQueue(wait, clock=clock, pop=Popping(invisible_ms=60)) as it:
        it.take(message(4))
        for renewals in (1, 2):
            clock.ms += 40
            await until(lambda: len(it.cluster.pop.changed) == renewals, "one more renewal")  # noqa: B023
            await until(lambda: it.held.due(clock.ms) == [], "its answer")
        assert it.cluster.pop.changed == [(4, 60), (4, 60)]
        gate.set()
        await until(lambda: it.cluster.pop.acked, "the ack")
        (ack,) = it.cluster.broker.asked(ACK)
        assert ack["extraInfo"] == "4 1795224862950 60 5 0 broker-0 0 4"


async def test_a_message_whose_properties_a_program_took_away_ends_no_renewal_of_others():
    clock = StandingClock()
    async with PoppedQueue(clock=clock, pop=Popping(invisible_ms=60)) as it:
        it.held.put([message(4), message(5)])
        it.held.lowest(1)[0].properties.clear()
        for renewals in (1, 2):
            clock.ms += 40
            await until(lambda: len(it.cluster.pop.changed) == renewals, "one more renewal")  # noqa: B023
        assert it.cluster.pop.changed == [(5, 60), (5, 60)]


async def test_what_lapses_because_no_broker_answers_is_not_acknowledged():
    gate, ended = asyncio.Event(), asyncio.Event()

    async def wait(message) -> None:
        await gate.wait()
        ended.set()

    clock = StandingClock()
    async with PoppedQueue(wait, clock=clock, pop=Popping(invisible_ms=60)) as it:
        it.cluster.broker.answer(CHANGE, refused(1, "busy"))
        it.take(message(4))
        clock.ms += 40
        await until(lambda: it.cluster.broker.asked(CHANGE), "a renewal")
        clock.ms += 40
        await until(lambda: not len(it.held), "it lapses")
        gate.set()
        await ended.wait()
        it.take(message(5))
        await until(lambda: it.cluster.pop.acked, "the next one")
        assert it.cluster.pop.acked == [5]


async def test_a_message_that_is_consumed_during_its_renewal_is_acknowledged_by_both_handles():
    gate, held = asyncio.Event(), []

    async def wait(message) -> None:
        await gate.wait()

    clock = StandingClock()
    async with PoppedQueue(wait, clock=clock, pop=Popping(invisible_ms=60)) as it:
        answer = it.cluster.broker._answers[CHANGE]
        it.cluster.broker.answer(CHANGE, held.append)
        it.take(message(4))
        clock.ms += 40
        await until(lambda: held, "a renewal is under way")
        gate.set()
        await until(lambda: it.cluster.pop.acked == [4], "the first ack")
        it.cluster.broker.connections[-1].send(answer(held[0]))
        await until(lambda: it.cluster.pop.acked == [4, 4], "the second ack")
        handles = [one["extraInfo"] for one in it.cluster.broker.asked(ACK)]
        assert handles == [HANDLE.format(4), "4 1795224862949 60 5 0 broker-0 0 4"]


async def test_what_waits_in_a_queue_that_was_given_up_is_given_back():
    begun, gate = asyncio.Event(), asyncio.Event()

    async def wait(message) -> None:
        begun.set()
        await gate.wait()

    async with PoppedQueue(wait, clock=StandingClock(), pop=Popping(invisible_ms=60), handlers_max=1) as it:
        it.take(message(4), message(5))
        await begun.wait()
        it.held.drop()
        await until(lambda: (5, 1000) in it.cluster.pop.changed, "the one that waited")
        gate.set()
        await until(lambda: it.cluster.pop.acked == [4], "the one that was handled")


async def test_what_lapsed_while_it_waited_for_a_handler_is_not_handled():
    seen, gate = [], asyncio.Event()

    async def wait(message) -> None:
        seen.append(message.queue_offset)
        await gate.wait()

    async with PoppedQueue(wait, handlers_max=1) as it:
        first, second, third = message(1), message(2), message(3)
        it.take(first, second, third)
        await until(lambda: seen == [1], "the first one")
        it.held.remove(second)
        gate.set()
        await until(lambda: it.cluster.pop.acked == [1, 3] or it.cluster.pop.acked == [3, 1], "the others")
        assert seen == [1, 3]


# -- acks and changes


async def test_an_ack_that_is_refused_is_not_repeated():
    async with PoppedQueue() as it:
        it.cluster.broker.answer(ACK, refused(208, "offset is illegal"))
        it.pops.ack_soon(message(1))
        await it.pops.flush()
        assert len(it.cluster.broker.asked(ACK)) == 1


async def test_a_change_of_the_program_holds_the_message_so_long():
    clock = StandingClock()
    async with PoppedQueue(clock=clock) as it:
        one = message(1)
        it.held.put([one])
        await it.pops.change_invisible_time(one, 200_000)
        clock.ms += 150_000
        assert it.held.due(clock.ms) == []
        assert one in it.held


async def test_a_change_that_a_renewal_overtook_acknowledges_the_other_delivery():
    held = []
    async with PoppedQueue() as it:
        answer = it.cluster.broker._answers[CHANGE]
        one = message(1)
        it.cluster.broker.answer(CHANGE, held.append)
        changing = asyncio.create_task(it.pops.change_invisible_time(one, 500))
        await until(lambda: held, "the change is under way")
        one.properties["POP_CK"] = "1 1795224862999 60000 5 0 broker-0 0 1"
        it.cluster.broker.connections[-1].send(answer(held[0]))
        await changing
        await until(lambda: it.cluster.broker.asked(ACK), "an ack")
        assert it.cluster.broker.asked(ACK)[0]["extraInfo"] == "1 1795224862999 60000 5 0 broker-0 0 1"
        assert one.properties["POP_CK"] == "1 1795224862949 500 5 0 broker-0 0 1"


async def test_in_order_a_change_is_no_other_delivery():
    async with PoppedQueue(is_ordered=True) as it:
        one = message(1)
        answer = it.cluster.broker._answers[CHANGE]

        def overtaken(command):
            one.properties["POP_CK"] = "1 1795224862999 60000 999 0 broker-0 0 1"
            return answer(command)

        it.cluster.broker.answer(CHANGE, overtaken)
        await it.pops.change_invisible_time(one, 500)
        await it.pops.flush()
        assert it.cluster.broker.asked(ACK) == []


async def test_a_broker_that_is_not_known_is_looked_for():
    async with PopCluster() as cluster:
        runtime = ClientRuntime(cluster.namesrv)
        await PopSession(runtime, "G", PushConsumerSettings()).ack([message(1)])
        assert cluster.pop.acked == [1]
        await runtime.close()


async def test_what_is_held_of_all_queues_is_given_back_together():
    async with PoppedQueue() as it:
        held = []
        it.cluster.broker.answer(CHANGE, held.append)
        it.runtime.calls.timeout_ms = 1000.0 * SECONDS
        queues = [it.held, it.queue()]
        for offset, queue in enumerate(queues):
            queue.put([message(offset)])
        closing = asyncio.create_task(it.pops.close())
        await until(lambda: len(held) == 2, "both messages", SECONDS / 2)
        for command in held:
            it.cluster.broker.connections[-1].send(it.cluster.pop._change(command))
        await closing
