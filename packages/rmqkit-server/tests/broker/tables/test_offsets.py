"""Consumer offsets and queue bounds (behaviour.md §5.2, remoting.md §4.3.3)."""

from __future__ import annotations

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.fastjson import decode_as, loads
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import (
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    TopicStatsTable,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.schemas.topics import CreateTopicRequest
from rmqkit.rpc import BrokerCalls
from tests.broker.cluster import Cluster
from tests.virtual_time import run as run_virtual


@pytest.mark.virtual_time
def test_committed_offsets_survive_a_restart(tmp_path):
    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            await cluster.send()
            await cluster.pull()
            for offset in (5, 3):  # a smaller one is accepted
                update = UpdateConsumerOffsetRequest("g", "T", 0, offset)
                assert (await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, update)).code == 0

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            query = QueryConsumerOffsetRequest("g", "T", 0)
            assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, query) == 3
            assert [m.body for m in read_messages((await cluster.pull()).body)] == [b"hello"]

    run_virtual(first())
    run_virtual(second())
    stored = loads((tmp_path / "store/config/consumerOffset.json").read_bytes())
    assert stored["offsetTable"] == {"T@g": {"0": 3}}
    assert stored["groupTopicMap"] == {"g": ["T"]}
    assert "pullOffsetTable" not in stored


async def test_without_a_committed_offset_the_rule_of_the_first_message_holds(cluster):
    await cluster.send()
    for queue_id, zero, code in [(0, None, 0), (0, True, 0), (0, False, 22), (1, False, 22)]:
        header = QueryConsumerOffsetRequest("new", "T", queue_id, zero)
        assert (await cluster.call(RequestCode.QUERY_CONSUMER_OFFSET, header)).code == code


async def test_a_new_group_begins_at_0_in_a_queue_that_is_still_empty(cluster):
    """Without an offset a client requests the maximum, and a message that arrives in between is never delivered."""
    await cluster.send(queue_id=0)
    assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("new", "T", 1)) == 0


@pytest.mark.parametrize(("topic", "queue_id"), [("none", 0), ("T", 4), ("T", -1)])
async def test_a_queue_that_does_not_exist_has_no_offset(topic, queue_id, cluster):
    await cluster.send()
    header = QueryConsumerOffsetRequest("new", topic, queue_id)
    assert (await cluster.call(RequestCode.QUERY_CONSUMER_OFFSET, header)).code == 22


async def test_a_new_group_has_no_offset_in_a_queue_whose_first_messages_are_deleted(monkeypatch, cluster):
    await cluster.send()
    for bounds in [(1, 1), (1, 5)]:  # all of its messages are deleted, or some
        monkeypatch.setattr(cluster.standalone.broker.context.store, "bounds", lambda *_, bounds=bounds: bounds)
        header = QueryConsumerOffsetRequest("new", "T", 0)
        assert (await cluster.call(RequestCode.QUERY_CONSUMER_OFFSET, header)).code == 22


@pytest.mark.parametrize(
    ("header", "code", "remark"),
    [
        (UpdateConsumerOffsetRequest("nobody", "T", 0, 1), 26, "Group nobody not exist!"),
        (UpdateConsumerOffsetRequest("g", "none", 0, 1), 17, "Topic none not exist!"),
        (UpdateConsumerOffsetRequest("g", "T", None, 1), 29, "QueueId is null, topic is T"),
        (UpdateConsumerOffsetRequest("g", "T", 0), 29, "Offset is null, topic is T"),
    ],
)
async def test_refused_commits(header, code, remark, cluster):
    await cluster.send()
    await cluster.pull()
    answer = await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)
    assert (answer.code, answer.remark) == (code, remark)


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"queueId": "x"}, 29, "QueueId is null, topic is T"),
        ({"queueId": ""}, 29, "QueueId is null, topic is T"),
        ({"commitOffset": "x"}, 29, "Offset is null, topic is T"),
        ({"commitOffset": 1 << 65}, 29, "Offset is null, topic is T"),
        ({"consumerGroup": ""}, 26, "Group  not exist!"),
        ({"topic": ""}, 17, "Topic  not exist!"),
        ({"queueId": -1, "commitOffset": -3}, 0, None),
        ({"queueId": 99, "commitOffset": 1 << 62}, 0, None),
    ],
)
async def test_commits_with_odd_fields(fields, code, remark, cluster):
    await cluster.send()
    await cluster.pull()
    good = {"consumerGroup": "g", "topic": "T", "queueId": 0, "commitOffset": 1}
    answer = await cluster.ask(RequestCode.UPDATE_CONSUMER_OFFSET, **(good | fields))
    assert (answer.code, answer.remark) == (code, remark)
    assert (await cluster.ask(RequestCode.UPDATE_CONSUMER_OFFSET)).code == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, 1),
        ({"consumerGroup": "g", "topic": "T"}, 1),
        ({"consumerGroup": "g", "topic": "T", "queueId": "x"}, 1),
        ({"consumerGroup": "g", "topic": "T", "queueId": 1 << 40}, 1),
        ({"consumerGroup": "g", "topic": "T", "queueId": 0}, 0),
        ({"consumerGroup": "g", "topic": "T", "queueId": 0, "setZeroIfNotFound": "x"}, 22),
        ({"consumerGroup": "g", "topic": "T", "queueId": -1}, 22),
        ({"consumerGroup": "g", "topic": "none", "queueId": 0}, 22),
    ],
)
async def test_queries_with_odd_fields(fields, code, cluster):
    await cluster.send()
    assert (await cluster.ask(RequestCode.QUERY_CONSUMER_OFFSET, **fields)).code == code
    await cluster.pull()
    # A negative offset counts as none.
    await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", "T", 0, -3))
    assert await cluster.number(RequestCode.QUERY_CONSUMER_OFFSET, QueryConsumerOffsetRequest("g", "T", 0)) == 0


@pytest.mark.parametrize("code", [29, 30, 31, 32])
async def test_bounds_with_odd_fields(code, cluster):
    for fields in ({}, {"topic": "T"}, {"topic": "T", "queueId": "x"}, {"topic": "T", "queueId": 1 << 40}):
        assert (await cluster.ask(code, timestamp=0, **fields)).code == 1
    assert (await cluster.ask(29, topic="T", queueId=0, timestamp="x")).code == 1
    odd = {"topic": "T", "queueId": -5, "timestamp": 1 << 62, "boundaryType": "zz"}
    assert (await cluster.ask(code, **odd)).code == 0


async def test_bounds_and_times_of_a_queue(cluster):
    before = SYSTEM_CLOCK.now_ms()
    for _ in range(3):
        await cluster.send()
    queue = QueueRequest("T", 0)
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, queue) == 3
    assert await cluster.number(RequestCode.GET_MIN_OFFSET, queue) == 0
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("none", 0)) == 0
    search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    assert await cluster.number(search, SearchOffsetRequest("T", 0, before - 1)) == 0
    assert await cluster.number(search, SearchOffsetRequest("T", 0, before + 3_600_000)) == 3
    assert await cluster.number(search, SearchOffsetRequest("T", 0, before + 3_600_000, "upper")) == 2
    times = [await cluster.call(RequestCode.GET_EARLIEST_MSG_STORETIME, QueueRequest("T", q)) for q in (0, 1)]
    earliest, none = (int(decode_fields(answer)["timestamp"]) for answer in times)
    assert before <= earliest <= before + 60_000
    assert none == -1


# ---- bounds of queues (remoting.md §4.4, §6.4.9)


BOUNDS = RequestCode.GET_TOPIC_STATS_INFO


async def test_the_bounds_of_a_topic(cluster):
    before_ms = SYSTEM_CLOCK.now_ms()
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


async def test_the_minimum_of_a_batch_queue_that_is_still_empty_is_minus_one(cluster):
    """Apache's broker answers the same, and its clients know it; ours take it for 0."""
    create = CreateTopicRequest("B", "TBW102", 2, 2, 6, "SINGLE_TAG", attributes="+queue.type=BatchCQ")
    assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, create)).code == 0
    batch = encode_batch([BatchEntry(b"one", b"UNIQ_KEY\x01K1\x02")])
    sent = await cluster.send(
        "B", batch, "UNIQ_KEY\x01B\x02", code=RequestCode.SEND_BATCH_MESSAGE, batch=True, queue_id=1
    )
    assert sent.code == 0, sent.remark
    await cluster.send()
    asked = [("B", 0), ("B", 1), ("T", 0), ("T", 1), ("none", 0)]
    found = [await cluster.number(RequestCode.GET_MIN_OFFSET, QueueRequest(*one)) for one in asked]
    assert found == [-1, 0, 0, 0, 0]
    calls = BrokerCalls(cluster.client, 60_000)
    queue = MessageQueue("B", "broker-a", 0)
    assert await calls.min_offset(cluster.standalone.broker_address, queue) == 0
