"""Renewals while clients acknowledge messages and leave. Source: grpc.md §8.2."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.ids import PopHandle
from rmqkit.proxy.schema.records import Handle
from rmqkit.proxy.service.lite_subscriptions import LiteLimits, LiteSubscriptions
from rmqkit.proxy.service.receipt_handles import Renewals
from rmqkit.proxy.service.receiving import Receiving
from tests.set_clock import SetClock
from tests.waiting import until


class Slow:
    """Invisible time changes, held until `go_on` is set. ``changed``: offset and invisible time of each, in order."""

    def __init__(self):
        self.changed = []
        self.go_on = asyncio.Event()

    async def change(self, group, topic, handle, invisible_ms):
        self.changed.append((handle.offset, invisible_ms, handle.pop.pop_time))
        await self.go_on.wait()
        now_ms = SYSTEM_CLOCK.now_ms()
        return Handle(structs.replace(handle.pop, pop_time=now_ms, invisible_time=invisible_ms), 0)

    async def retry_ms(self, group, deliveries):
        return 1000


def handle_of(offset):
    pop = PopHandle(
        check_point_offset=0,
        pop_time=SYSTEM_CLOCK.now_ms(),
        invisible_time=5000,
        revive_queue_id=0,
        retry="0",
        broker_name="broker-a",
        queue_id=0,
        queue_offset=offset,
    )
    return Handle(pop, 0)


@pytest.fixture
def slow():
    return Slow()


def held(slow, *clients, each=1):
    renewals = Renewals(slow, SYSTEM_CLOCK)
    for number, client in enumerate(clients):
        for offset in range(number * each, (number + 1) * each):
            renewals.add(client, "G", "T", f"M{offset}", handle_of(offset))
    return renewals


async def test_what_was_acknowledged_while_others_were_renewed_is_not(slow):
    renewals = held(slow, "c1", each=65)  # more than are renewed at once
    round_ = asyncio.create_task(renewals.round({"c1"}))
    await until(lambda: slow.changed, "the round has begun")
    assert len(slow.changed) == 64
    await renewals.take("c1", "G", "M64", handle_of(64))
    slow.go_on.set()
    await round_
    assert 64 not in {offset for offset, *_ in slow.changed}, "an acknowledged message is not redelivered"
    assert len(renewals) == 64


async def test_who_leaves_while_another_ones_messages_are_given_back(slow):
    renewals = held(slow, "gone", "leaves", "stays")
    await renewals.take("leaves", "G", "M1", handle_of(1))
    renewals.add("leaves", "G", "T", "M1", handle_of(1))
    round_ = asyncio.create_task(renewals.round({"leaves", "stays"}))
    await until(lambda: slow.changed, "the round gives back")
    leaving = asyncio.create_task(renewals.release("leaves"))
    await until(lambda: len(slow.changed) == 2, "it is given back, too")
    slow.go_on.set()
    await asyncio.gather(round_, leaving)
    assert [(offset, ms) for offset, ms, _ in slow.changed] == [(0, 1000), (1, 1000), (2, 60_000)], slow.changed
    assert len(renewals) == 1


async def test_who_leaves_empty_handed_meanwhile(slow):
    renewals = held(slow, "gone", "leaves")
    await renewals.take("leaves", "G", "M1", handle_of(1))
    round_ = asyncio.create_task(renewals.round({"leaves"}))
    await until(lambda: slow.changed, "the round gives back")
    await renewals.release("leaves")
    slow.go_on.set()
    await round_


async def test_what_is_given_back_while_it_is_renewed_comes_soon(slow):
    renewals = held(slow, "c1")
    round_ = asyncio.create_task(renewals.round({"c1"}))
    await until(lambda: slow.changed, "it is being renewed")
    leaving = asyncio.create_task(renewals.release("c1"))
    await asyncio.sleep(1)
    slow.go_on.set()
    await asyncio.gather(round_, leaving)
    (_, renewed_ms, old), (_, given_back_ms, new) = slow.changed
    assert (renewed_ms, given_back_ms) == (60_000, 1000)
    assert new > old, "by the handle that the renewal brought"
    assert len(renewals) == 0


async def test_a_clock_that_is_set_back_does_not_put_a_renewal_off(slow):
    clock = SetClock()
    renewals = Receiving(slow, LiteSubscriptions(slow, clock, LiteLimits()), clock).renewals
    renewals._changing = slow
    renewals.add("c1", "G", "T", "M0", handle_of(0))
    clock.ahead_ms -= 3_600_000
    slow.go_on.set()
    await renewals.round({"c1"})
    assert [offset for offset, *_ in slow.changed] == [0]
