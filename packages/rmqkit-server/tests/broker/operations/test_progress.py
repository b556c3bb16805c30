"""The progress of groups, and counters: 208, 303, 308, 315, 317 (remoting.md §4.4, §6.4.9, §6.4.13, §6.7)."""

from __future__ import annotations

import time

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.offsets import (
    BrokerStatsData,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeTimeSpans,
    CorrectionOffsets,
    TopicStatsTable,
    UpdateConsumerOffsetRequest,
)

PROGRESS = RequestCode.GET_CONSUME_STATS
SPANS = RequestCode.QUERY_CONSUME_TIME_SPAN
CORRECTION = RequestCode.QUERY_CORRECTION_OFFSET
ALL = RequestCode.GET_BROKER_CONSUME_STATS
COUNTER = RequestCode.VIEW_BROKER_STATS_DATA
DAY_MS = 86_400_000


async def commit(cluster, offset, topic="T", group="g", queue_id=0):
    await cluster.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group=group)
    header = UpdateConsumerOffsetRequest(group, topic, queue_id, offset)
    assert (await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)).code == 0


async def progress(cluster, **fields):
    """Topic and queue id → broker offset, committed offset, pull offset, store time of the last consumed."""
    answer = await cluster.ask(PROGRESS, **fields)
    assert answer.code == 0
    return {
        (queue.topic, queue.queue_id): (o.broker_offset, o.consumer_offset, o.pull_offset, o.last_timestamp)
        for queue, o in decode_as(answer.body, ConsumeStats).offset_table.items()
    }


async def test_how_far_a_group_is(cluster):
    before_ms = SYSTEM_CLOCK.now_ms()
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


@pytest.mark.parametrize(("topics", "shown"), [(("U",), {"U"}), (("T", "U"), {"T", "U"})])
async def test_what_a_group_online_no_longer_subscribes_to_is_left_out(topics, shown, cluster):
    for topic in ("T", "U"):
        await cluster.send(topic)
        await cluster.heartbeat("c0", (topic, "*"))
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", topic, 0, 1))
    await cluster.heartbeat("c1", *((topic, "*") for topic in topics))
    assert {topic for topic, _ in await progress(cluster, consumerGroup="g")} == shown


# ---- all groups


async def all_groups(cluster, **fields):
    """Group → topics with their queues that have messages, and the sums."""
    answer = await cluster.ask(ALL, **fields)
    assert answer.code == 0
    found = decode_as(answer.body, ConsumeStatsList)
    assert found.broker_addr == cluster.standalone.broker_address
    return {
        group: [
            {
                (q.topic, q.queue_id): (o.broker_offset, o.consumer_offset)
                for q, o in one.offset_table.items()
                if o.broker_offset
            }
            for one in several
        ]
        for groups in found.consume_stats_list
        for group, several in groups.items()
    }, (found.total_diff, found.total_inflight_diff)


async def test_how_far_all_groups_are(cluster):
    ordered = {"topicConfigList": [{"topicName": "O", "order": True}]}
    await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, ordered)
    for topic in ("T", "O"):
        for _ in range(3):
            await cluster.send(topic)
        await commit(cluster, 1, topic)
    await commit(cluster, 2, group="h")
    await cluster.pull(1, count=1, group="g")
    table, sums = await all_groups(cluster, isOrder="false")
    assert table["g"] == [{("T", 0): (3, 1)}, {("O", 0): (3, 1)}]
    assert table["h"] == [{("T", 0): (3, 2)}]
    assert table["TOOLS_CONSUMER"] == []
    assert sums == (5, 1)
    table, sums = await all_groups(cluster, isOrder="true")
    assert (table["g"], table["h"], sums) == ([{("O", 0): (3, 1)}], [], (2, 0))
    assert await all_groups(cluster) == await all_groups(cluster, isOrder="x")


# ---- times


async def test_when_the_messages_of_a_group_were_stored(cluster):
    before_ms = SYSTEM_CLOCK.now_ms()
    for _ in range(3):
        await cluster.send()
    await commit(cluster, 2)
    spans = decode_as((await cluster.ask(SPANS, topic="T", group="g")).body, ConsumeTimeSpans).consume_time_span_set
    first, *empty = spans
    assert [span.message_queue.queue_id for span in spans] == [0, 1, 2, 3]
    assert before_ms <= first.min_time_stamp <= first.consume_time_stamp <= first.max_time_stamp < before_ms + DAY_MS
    assert 0 <= first.delay_time < DAY_MS
    local = time.strftime("%Y-%m-%d#%H:%M:%S", time.localtime(first.max_time_stamp // 1000))
    assert first.max_time_stamp_str == f"{local}:{first.max_time_stamp % 1000:03d}"
    assert {(s.min_time_stamp, s.max_time_stamp, s.consume_time_stamp, s.delay_time) for s in empty} == {
        (-1, -1, -1, 0)
    }
    (stranger, *_) = decode_as((await cluster.ask(SPANS, topic="T")).body, ConsumeTimeSpans).consume_time_span_set
    assert (stranger.consume_time_stamp, stranger.delay_time) == (first.min_time_stamp, 0)
    answer = await cluster.ask(SPANS, topic="none", group="g")
    assert (answer.code, answer.remark) == (17, "topic[none] not exist")
    assert (await cluster.ask(SPANS, group="g")).code == 1


# ---- corrections


@pytest.mark.parametrize(
    ("fields", "offsets"),
    [
        ({"compareGroup": "ahead"}, {0: 1, 1: 0}),
        ({"compareGroup": "behind"}, {0: 1, 1: 0}),
        ({"compareGroup": "none"}, {0: 1, 1: 0}),
        ({}, {0: 1, 1: 0}),
        ({"compareGroup": "ahead", "filterGroups": "behind,x"}, {0: 3, 1: 0}),
        ({"compareGroup": "behind", "filterGroups": "behind"}, {0: (1 << 63) - 1, 1: 0}),
        ({"compareGroup": "ahead", "topic": "none"}, {}),
    ],
)
async def test_the_offset_of_the_group_that_is_furthest_behind(fields, offsets, cluster):
    await cluster.send()
    await commit(cluster, 3, group="ahead")
    await commit(cluster, 0, group="ahead", queue_id=1)
    await commit(cluster, 1, group="behind")
    await commit(cluster, -1, group="below")  # its messages are deleted already
    answer = await cluster.ask(CORRECTION, **{"topic": "T", **fields})
    assert answer.code == 0
    assert decode_as(answer.body, CorrectionOffsets).correction_offsets == offsets
    assert (await cluster.ask(CORRECTION, compareGroup="g")).code == 1
    assert (await progress(cluster, consumerGroup="behind"))["T", 0][1] == 1  # no group is missing


# ---- counters


async def counted(cluster, name, key):
    answer = await cluster.ask(COUNTER, statsName=name, statsKey=key)
    if answer.code:
        assert (answer.code, answer.remark) == (1, f"The stats <{name}> <{key}> not exist")
        return None
    found = decode_as(answer.body, BrokerStatsData)
    assert found.stats_minute.sum == found.stats_hour.sum == found.stats_day.sum
    return found.stats_minute.sum


async def test_what_comes_and_goes_is_counted(cluster):
    assert await counted(cluster, "TOPIC_PUT_NUMS", "T") is None
    for _ in range(3):
        await cluster.send()
    await cluster.pull(count=2)
    await cluster.pull(2)
    await cluster.pull(3)
    message_offset = 0
    await cluster.ask(RequestCode.CONSUMER_SEND_MSG_BACK, offset=message_offset, group="g", delayLevel=18)
    assert await counted(cluster, "TOPIC_PUT_NUMS", "T") == 3
    assert await counted(cluster, "TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX") == 1
    assert await counted(cluster, "BROKER_PUT_NUMS", "DefaultCluster") == 3  # without messages sent back
    assert await counted(cluster, "GROUP_GET_NUMS", "T@g") == 3
    assert await counted(cluster, "BROKER_GET_NUMS", "DefaultCluster") == 3
    assert await counted(cluster, "SNDBCK_PUT_NUMS", "T@g") == 1
    bounds = decode_as((await cluster.ask(RequestCode.GET_TOPIC_STATS_INFO, topic="T")).body, TopicStatsTable)
    assert bounds.topic_put_tps > 0
    stats = decode_as((await cluster.ask(PROGRESS, consumerGroup="g", topic="T")).body, ConsumeStats)
    assert stats.consume_tps > 0
    await cluster.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic="T")
    for name, key in [("TOPIC_PUT_NUMS", "T"), ("GROUP_GET_NUMS", "T@g"), ("SNDBCK_PUT_NUMS", "T@g")]:
        assert await counted(cluster, name, key) is None
    answer = await cluster.ask(COUNTER)
    assert (answer.code, answer.remark) == (1, "The stats <null> <null> not exist")
