"""The rates at which a topic is pulled and consumed. Source: behaviour.md §8.15."""

from __future__ import annotations

import pytest

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.observe.status import ConsumerStats
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import reply
from tests.client.inside import coordinator_of
from tests.client.messages import record
from tests.client.peers import Cluster, pulled, until

QUICK = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, take_over_pause_ms=0)


def test_rates_are_of_the_last_minute_and_failures_of_the_last_hour():
    stats = ConsumerStats(0.0)
    stats.pulls, stats.pull_ms, stats.pulled = 2, 30.0, 60
    stats.calls, stats.call_ms, stats.consumed, stats.failed = 10, 5.0, 20, 4
    status = stats.status(20_000.0)
    assert (status.pull_rt, status.pull_tps, status.consume_rt) == (15.0, 3.0, 0.5)
    assert (status.consume_ok_tps, status.consume_failed_tps, status.consume_failed_msgs) == (1.0, 0.2, 4)
    for at_ms in range(20_000, 100_000, 1000):
        stats.sample(at_ms)
    stats.consumed += 6
    status = stats.status(100_000.0)
    assert (status.pull_tps, status.consume_rt, status.consume_ok_tps) == (0.0, 0.0, 0.1)
    assert status.consume_failed_msgs == 4
    for at_ms in range(100_000, 4_000_000, 10_000):
        stats.sample(at_ms)
    assert stats.status(4_000_000.0).consume_failed_msgs == 0


async def test_rates_count_what_is_pulled_and_what_handlers_make_of_it():
    answers = [lambda command: pulled(command, 0, 3, b"".join(record(offset) for offset in range(3)))]
    seen = []

    async def handler(message):
        seen.append(message)
        if message.queue_offset == 1:
            raise ValueError("broken")

    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        cluster.broker.answer(RequestCode.PULL_MESSAGE, lambda command: answers.pop()(command) if answers else None)
        cluster.broker.answer(RequestCode.CONSUMER_SEND_MSG_BACK, reply)
        consumer = PushConsumer("CG", cluster.namesrv, settings=QUICK)
        consumer.subscribe("T", "*", handler)
        async with consumer:
            await until(lambda: len(seen) == 3, "three calls")
            stats = coordinator_of(consumer).assigned.stats["T"]
            await until(lambda: stats.calls == 3, "their ends")
            assert (stats.pulls, stats.pulled, stats.consumed, stats.failed) == (1, 3, 2, 1)
            table = coordinator_of(consumer).running_info().status_table
            assert table["T"].consume_failed_msgs == 1
            assert table["T"].pull_tps == pytest.approx(1.5 * table["T"].consume_ok_tps)
            assert table["T"].consume_ok_tps == pytest.approx(2 * table["T"].consume_failed_tps)
