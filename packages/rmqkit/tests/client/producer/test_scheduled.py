"""Scheduled pulls of one queue. Source: behaviour.md §8.1."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.loop import PullSchedule, ScheduledPull
from rmqkit.client.consumer.process_queue import ProcessQueue
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.errors import ClientError, SettingsError
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.system import threads
from tests.client.inside import runtime_of
from tests.client.peers import Cluster, until

QUEUE = MessageQueue("T", "broker-0", 0)


def held() -> ProcessQueue:
    return ProcessQueue(QUEUE, messages_max=1000, bytes_max=1 << 20, span_max=2000)


async def test_calls_follow_one_another_until_the_queue_is_dropped():
    process_queue, calls = held(), []

    async def task(queue):
        calls.append(queue)
        if len(calls) == 3:
            process_queue.drop()
        return 0

    await ScheduledPull(PullSchedule(task, 60_000.0), process_queue, 60_000.0).run(0.0)
    assert calls == [QUEUE] * 3


async def test_without_an_answer_the_usual_pause_follows_and_after_an_error_its_own():
    process_queue, calls = held(), []

    async def task(queue):
        calls.append(queue)
        if len(calls) == 2:
            raise ValueError("not this time")
        if len(calls) == 3:
            process_queue.drop()

    await ScheduledPull(PullSchedule(task, 1.0), process_queue, 1.0).run(1.0)
    assert len(calls) == 3


async def test_a_plain_function_is_called_in_a_thread():
    process_queue, names = held(), []

    def task(queue):
        names.append(threads.current_name())
        process_queue.drop()
        return 0

    await ScheduledPull(PullSchedule(task, 0.0), process_queue, 0.0).run(0.0)
    assert names != [threads.current_name()]


async def test_a_paused_queue_is_not_called():
    process_queue, calls = held(), []
    process_queue.is_paused = True

    async def task(queue):
        calls.append(queue)
        process_queue.drop()
        return 0

    running = asyncio.create_task(ScheduledPull(PullSchedule(task, 0.0), process_queue, 0.0).run(0.0))
    await asyncio.sleep(0)
    assert calls == []
    process_queue.is_paused = False
    await running
    assert calls == [QUEUE]


async def test_the_call_under_way_finishes_when_the_pulling_is_cancelled():
    begun, release, finished = asyncio.Event(), asyncio.Event(), []

    async def task(queue):
        begun.set()
        await release.wait()
        finished.append(queue)
        return 0

    running = asyncio.create_task(ScheduledPull(PullSchedule(task, 0.0), held(), 0.0).run(0.0))
    await begun.wait()
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert finished == [QUEUE]


async def test_a_member_calls_for_each_of_its_queues_and_pulls_nothing_itself():
    async with Cluster() as cluster:
        cluster.topic("T", queues=3)
        calls: set[int] = set()

        async def task(queue):
            calls.add(queue.queue_id)
            return 1

        consumer = PullConsumer("CG", cluster.namesrv)
        consumer.schedule("T", task)
        async with consumer:
            await until(lambda: calls == {0, 1, 2}, "a call for each queue")
        assert cluster.broker.asked(11) == []


async def test_scheduling_and_assigning_exclude_each_other_and_topics_have_rules():
    async with Cluster() as cluster:
        consumer = PullConsumer("CG", cluster.namesrv)
        with pytest.raises(SettingsError):
            consumer.schedule("no topic", print)
        consumer.assign([QUEUE])
        with pytest.raises(ClientError, match="mutually exclusive"):
            consumer.schedule("T", print)


async def test_a_listener_that_raises_is_logged_and_reported_again(caplog):
    async with Cluster() as cluster:
        cluster.topic("T", queues=1)
        told = []

        def listener(queues, held):
            told.append((len(queues), len(held)))
            raise ValueError("no room")

        consumer = PullConsumer("CG", cluster.namesrv)
        consumer.subscribe("T")
        consumer.on_queues_changed("T", listener)
        async with consumer:
            await until(lambda: told == [(1, 1)], "the first queue")
            cluster.topic("T", queues=2)
            runtime_of(consumer).refresh_routes_soon()
            await until(lambda: told[-1] == (2, 2), "the second queue")
    assert "queue listener of topic T, group CG failed" in caplog.text
