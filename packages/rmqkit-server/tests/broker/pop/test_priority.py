"""Messages with a priority: their queue at the send, and the order in which they are popped."""

from __future__ import annotations

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import CreateTopicRequest, TopicConfig
from tests.broker.cluster import Cluster
from tests.broker.pops import context_of, pop

PRIORITY = "_SYS_MSG_PRIORITY_"
SENDS = {
    f"{PRIORITY}\x010\x02": ("0", "0"),
    f"{PRIORITY}\x012\x02": ("2", "2"),
    f"{PRIORITY}\x0199\x02": ("3", "99"),
    f"{PRIORITY}\x01+3\x02": ("3", "+3"),
    f"{PRIORITY}\x013\x02TRAN_MSG\x01false\x02": ("3", "3"),
    f"{PRIORITY}\x01-1\x02": ("1", "-1"),
    f"{PRIORITY}\x01x\x02": ("1", "x"),
    f"{PRIORITY}\x019999999999\x02": ("1", "9999999999"),
    f"{PRIORITY}\x013\x02__SHARDINGKEY\x01k\x02": ("1", None),
    "": ("1", None),
}
"""What is sent to queue 1 of 4 → the queue it goes to, and the priority that it keeps."""


async def made(cluster, topic="T", attributes="+message.type=PRIORITY"):
    header = CreateTopicRequest(topic, "TBW102", 4, 4, 6, "SINGLE_TAG", attributes=attributes)
    return await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)


def prioritized(priority):
    return f"{PRIORITY}\x01{priority}\x02"


async def sent(cluster, *priorities, topic="T"):
    for priority in priorities:
        answer = await cluster.send(topic, body=f"{priority}".encode(), properties=prioritized(priority))
        assert answer.code == 0


@pytest.mark.parametrize("attributes", ["", "+message.type=PRIORITY"])
async def test_a_priority_chooses_the_queue_and_is_dropped_beside_another_kind(attributes, cluster):
    assert (await made(cluster, attributes=attributes)).code == 0
    for number, (properties, (queue_id, _)) in enumerate(SENDS.items()):
        answer = await cluster.send(body=str(number).encode(), properties=properties, queue_id=1)
        assert (answer.code, decode_fields(answer)["queueId"]) == (0, queue_id)
    popped = await pop(cluster)
    for number, (queue_id, kept) in enumerate(SENDS.values()):
        message = popped.messages[str(number)]
        assert (str(message.queue_id), message.properties.get(PRIORITY)) == (queue_id, kept)


@pytest.mark.parametrize(
    "properties", ["TRAN_MSG\x01true\x02PGROUP\x01p\x02", "DELAY\x011\x02", "TIMER_DELAY_MS\x019\x02"]
)
async def test_what_is_put_aside_first_has_no_priority(properties, cluster):
    await made(cluster)
    sys_flag = 4 if "TRAN_MSG" in properties else 0
    answer = await cluster.send(properties=prioritized(3) + properties, queue_id=1, sys_flag=sys_flag)
    assert (answer.code, decode_fields(answer)["queueId"]) == (0, "1")


@pytest.mark.parametrize(("downwards", "order"), [(True, "3210"), (False, "0123")])
async def test_the_highest_priority_is_popped_first_each_time(downwards, order, tmp_path):
    async with Cluster(tmp_path / "store", broker={"higher_queues_first": downwards}) as cluster:
        await made(cluster)
        await sent(cluster, 0, 1, 2, 3)
        for group in map(str, range(10)):
            assert "".join(await pop(cluster, consumer_group=group)) == order


async def test_a_topic_of_another_type_is_popped_from_any_queue_on(cluster):
    await made(cluster, attributes="")
    await sent(cluster, 0, 1, 2, 3)
    firsts = {"".join(await pop(cluster, consumer_group=str(group))) for group in range(60)}
    assert firsts == {"3210", "0321", "1032", "2103"}


async def test_a_group_may_give_up_the_order(cluster):
    await made(cluster)
    await sent(cluster, 0, 1, 2, 3)
    for number in range(60):
        config = SubscriptionGroupConfig(group_name=str(number), attributes={"priority.factor": "0"})
        await context_of(cluster).groups.put_shared(config)
    firsts = {next(iter(await pop(cluster, consumer_group=str(group)))) for group in range(60)}
    assert firsts == set("0123")


@pytest.mark.parametrize(("percent", "order"), [(0, "3210r"), (100, "r3210")])
async def test_retries_come_last_unless_a_setting_wants_them_first(percent, order, tmp_path):
    async with Cluster(
        tmp_path / "store", broker={"pop_retry_percent_by_priority": percent, "pop_retry_percent": 100 - percent}
    ) as cluster:
        await made(cluster)
        await sent(cluster, 0, 1, 2, 3)
        for group in map(str, range(10)):
            context_of(cluster).topics.put(
                TopicConfig(topic_name=f"%RETRY%{group}_T", read_queue_nums=1, write_queue_nums=1)
            )
            await cluster.send(f"%RETRY%{group}_T", body=b"r")
            assert "".join(await pop(cluster, consumer_group=group)) == order


@pytest.mark.parametrize(("percent", "order"), [(25, "3210r"), (26, "r3210")])
async def test_a_share_of_pops_takes_retries_first(percent, order, tmp_path, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.pop.read.random.random", lambda: 0.25)
    async with Cluster(tmp_path / "store", broker={"pop_retry_percent_by_priority": percent}) as cluster:
        await made(cluster)
        await sent(cluster, 0, 1, 2, 3)
        context_of(cluster).topics.put(TopicConfig(topic_name="%RETRY%g_T", read_queue_nums=1, write_queue_nums=1))
        await cluster.send("%RETRY%g_T", body=b"r")
        assert "".join(await pop(cluster)) == order


async def test_a_topic_whose_messages_are_to_be_compacted_is_refused(tmp_path):
    async with Cluster(tmp_path / "store") as cluster:
        answer = await made(cluster, attributes="+cleanup.policy=COMPACTION")
        assert answer.code == 29
        assert answer.remark == (
            "cleanup.policy=COMPACTION is not supported: messages are deleted by their age, not by their keys; "
            "create the topic without it"
        )
        assert context_of(cluster).topics.get("T") is None
        assert (await made(cluster, attributes="+cleanup.policy=DELETE")).code == 0
