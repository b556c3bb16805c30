"""Avoided brokers, and the duration of the avoidance. Source: behaviour.md §7.5."""

from __future__ import annotations

import pytest

from rmqkit.client.producer.faults import FaultTable
from rmqkit.client.producer.sender import Sender
from rmqkit.client.runtime.routes import PublishQueues
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.testing.clock import StandingClock
from tests.client.peers import refused, stored
from tests.client.producer.test_sender import MESSAGE, Sending


def queues(*brokers: str) -> PublishQueues:
    return PublishQueues([MessageQueue("T", broker, i) for broker in brokers for i in range(2)])


def picked(table: FaultTable, offered: PublishQueues, last: str | None = None) -> set[str]:
    return {table.pick(offered, last).broker_name for _ in offered.queues}


@pytest.mark.parametrize(
    ("latency_ms", "avoided_ms"),
    [(0, 0), (549, 0), (550, 2000), (1799, 2000), (1800, 5000), (3000, 6000), (5000, 10_000), (15_000, 30_000)],
)
def test_the_slower_a_broker_was_the_longer_it_is_avoided(latency_ms, avoided_ms):
    clock = StandingClock(1000)
    table = FaultTable(clock)
    table.note("a", latency_ms)
    clock.ms += avoided_ms - 1
    assert picked(table, queues("a", "b")) == ({"b"} if avoided_ms else {"a", "b"})
    clock.ms += 1
    assert picked(table, queues("a", "b")) == {"a", "b"}


def test_a_failed_send_counts_as_ten_seconds_and_a_good_one_shortens_nothing():
    clock = StandingClock(1000)
    table = FaultTable(clock)
    table.note("a", 1, is_isolated=True)
    table.note("a", 600)
    clock.ms += 9999
    assert picked(table, queues("a", "b")) == {"b"}
    clock.ms += 1
    assert picked(table, queues("a", "b")) == {"a", "b"}


def test_when_all_are_avoided_a_reachable_one_is_taken_and_at_last_any():
    table = FaultTable(StandingClock(1000))
    table.note("a", 1, is_isolated=True, is_reachable=False)
    table.note("b", 1, is_isolated=True)
    assert picked(table, queues("a", "b")) == {"b"}
    assert picked(table, queues("a", "b"), last="b") == {"a", "b"}
    table.note("b", 1, is_isolated=True, is_reachable=False)
    assert picked(table, queues("a", "b")) == {"a", "b"}
    table.note("a", 1)
    assert picked(table, queues("a", "b")) == {"a"}


def test_on_a_retry_the_last_broker_is_left_out():
    assert picked(FaultTable(StandingClock(1000)), queues("a", "b", "c"), last="b") == {"a", "c"}


async def test_it_is_off_unless_requested():
    async with Sending(2) as it:
        it.answer(refused(ResponseCode.SYSTEM_BUSY), stored)
        for _ in range(8):
            await it.sender.send(MESSAGE, timeout_ms=30_000)
        assert it.tries()[0] > 1


async def test_a_broker_that_failed_once_gets_nothing_more_for_a_while():
    async with Sending(2, avoid_slow_brokers=True) as it:
        it.answer(refused(ResponseCode.SYSTEM_BUSY), stored)
        for _ in range(20):
            assert (await it.sender.send(MESSAGE, timeout_ms=30_000)).queue.broker_name == "broker-1"
        assert it.tries()[0] <= 1
        await it.sender.send(MESSAGE, timeout_ms=30_000, queue=MessageQueue("T", "broker-1", 0))
        assert isinstance(it.sender, Sender)
        assert len(it.cluster.brokers[1].asked(RequestCode.SEND_MESSAGE_V2)) == 21
