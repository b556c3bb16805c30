"""How far queues are filled and groups have come (remoting.md §4.4, §6.4.9)."""

from __future__ import annotations

import time

import pytest

from rmqkit.protocol.bodies.stats import ConsumeStats, TopicStatsTable
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.offsets import UpdateConsumerOffsetRequest

BOUNDS = RequestCode.GET_TOPIC_STATS_INFO
PROGRESS = RequestCode.GET_CONSUME_STATS


def test_the_bounds_of_a_topic(run):
    async def scenario(cluster):
        before_ms = int(time.time() * 1000)
        for _ in range(3):
            await cluster.send()
        table = decode_as((await cluster.ask(BOUNDS, topic="T")).body, TopicStatsTable).offset_table
        found = {queue.queue_id: (bounds.min_offset, bounds.max_offset) for queue, bounds in table.items()}
        assert found == {0: (0, 3), 1: (0, 0), 2: (0, 0), 3: (0, 0)}
        times = {queue.queue_id: bounds.last_update_timestamp for queue, bounds in table.items()}
        assert before_ms <= times[0] < before_ms + 60_000
        assert times[1] == 0
        assert {queue.broker_name for queue in table} == {"broker-a"}
        answer = await cluster.ask(BOUNDS, topic="none")
        assert (answer.code, answer.remark) == (17, "topic[none] not exist")
        assert (await cluster.ask(BOUNDS)).code == 1

    run(scenario)


async def progress(cluster, **fields):
    """Topic and queue id → broker offset, committed offset, pull offset, store time of the last consumed."""
    answer = await cluster.ask(PROGRESS, **fields)
    assert answer.code == 0
    return {
        (queue.topic, queue.queue_id): (o.broker_offset, o.consumer_offset, o.pull_offset, o.last_timestamp)
        for queue, o in decode_as(answer.body, ConsumeStats).offset_table.items()
    }


def test_how_far_a_group_is(run):
    async def scenario(cluster):
        before_ms = int(time.time() * 1000)
        for topic in ("T", "U"):
            for _ in range(3):
                await cluster.send(topic)
        await cluster.pull(count=2)
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", "T", 0, 1))
        found = await progress(cluster, consumerGroup="g")
        assert set(found) == {("T", queue_id) for queue_id in range(4)}
        assert found["T", 0][:3] == (3, 1, 2)
        assert before_ms <= found["T", 0][3] < before_ms + 60_000
        assert found["T", 1] == (0, 0, 0, 0)
        assert await progress(cluster, consumerGroup="g", topic="T") == found
        assert await progress(cluster, consumerGroup="g", topicList="T;none") == found
        assert (await progress(cluster, consumerGroup="g", topic="U"))["U", 0] == (3, 0, 0, 0)
        for fields in ({"consumerGroup": "none"}, {"consumerGroup": ""}, {"consumerGroup": "g", "topic": "none"}):
            assert await progress(cluster, **fields) == {}
        assert (await cluster.ask(PROGRESS)).code == 1

    run(scenario)


@pytest.mark.parametrize(("topics", "shown"), [(("U",), {"U"}), (("T", "U"), {"T", "U"})])
def test_what_a_group_online_no_longer_subscribes_to_is_left_out(run, topics, shown):
    async def scenario(cluster):
        for topic in ("T", "U"):
            await cluster.send(topic)
            await cluster.heartbeat("c0", (topic, "*"))
            await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", topic, 0, 1))
        await cluster.heartbeat("c1", *((topic, "*") for topic in topics))
        assert {topic for topic, _ in await progress(cluster, consumerGroup="g")} == shown

    run(scenario)
