"""Groups: changed without losing what was set, and how far they are over several brokers."""

from __future__ import annotations

import pytest

from rmqkit.admin.cluster.clients import Clients
from rmqkit.admin.cluster.groups import END_MS
from rmqkit.errors import PeerRefused, UnknownName
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import ConsumerRunningInfo, MessageQueue, PopProcessQueueInfo
from rmqkit.protocol.schemas.groups import GroupRetryPolicy
from tests.admin.things import BROKERS, make_topic, send

SIDES = ("broker-a", "broker-a", "broker-b", "broker-b")


pytestmark = pytest.mark.real_time  # the servers are in another thread


async def test_a_change_leaves_the_rest_as_it_is(admin):
    policy = GroupRetryPolicy(type="EXPONENTIAL")
    attributes = {"+priority.factor": "3"}
    await admin.groups.update("changing", {"retry_max_times": 3, "attributes": attributes}, "broker-a")
    await admin.groups.update("changing", {"consume_enable": False, "group_retry_policy": policy}, "broker-a")
    both = await admin.groups.update("changing", {"retry_queue_nums": 2}, cluster="DefaultCluster")

    assert [*both] == [*BROKERS]
    first, other = both.values()
    assert (first.retry_max_times, first.consume_enable, first.retry_queue_nums) == (3, False, 2)
    assert (first.group_retry_policy.type, first.attributes) == ("EXPONENTIAL", {"priority.factor": "3"})
    assert (other.retry_max_times, other.consume_enable, other.retry_queue_nums) == (16, True, 2)
    removed = await admin.groups.update("changing", {"attributes": {"-priority.factor": ""}}, "broker-a")
    assert removed["broker-a"].attributes == {}


async def test_an_illegal_group_is_refused(admin):
    with pytest.raises(PeerRefused, match="contains illegal characters"):
        await admin.groups.update("a.b", {}, "broker-a")


async def test_a_group_is_deleted_with_its_topics(admin):
    await admin.groups.update("deleted", {}, cluster="DefaultCluster")
    await make_topic(admin, "%RETRY%deleted")

    assert await admin.groups.delete("deleted", cluster="DefaultCluster") == [*BROKERS]

    assert "%RETRY%deleted" not in await admin.calls.topic_names()
    with pytest.raises(UnknownName, match="has no group deleted"):
        await admin.groups.delete("deleted", cluster="DefaultCluster")


async def test_progress_is_that_of_all_brokers(admin):
    await make_topic(admin, "Progress")
    await send(admin, *[Message(topic="Progress", body=b"x") for _ in range(12)])
    await admin.groups.update("NS%behind", {}, cluster="DefaultCluster")
    for broker, offset in (("broker-a", 2), ("broker-b", 3)):
        address = await admin.calls.address(broker)
        await admin.calls.commit_offset(address, "NS%behind", MessageQueue("Progress", broker, 1), offset)

    found = await admin.groups.progress("NS%behind", clients=True)

    assert [(one.broker_name, one.queue_id, one.diff) for one in found.queues] == [
        ("broker-a", 0, 3),
        ("broker-a", 1, 1),
        ("broker-b", 0, 3),
        ("broker-b", 1, 0),
    ]
    assert (found.diff_total, found.inflight_total) == (7, 0)
    rows = {row.group: row for row in await admin.groups.summaries()}
    assert (rows["NS%behind"].diff_total, rows["NS%behind"].count) == (7, 0)
    assert "TOOLS_CONSUMER" not in rows
    await admin.groups.update("idle", {}, "broker-b")
    assert (await admin.groups.progress("idle")).queues == []
    for topic in ("", "Progress"):
        with pytest.raises(UnknownName, match="NS%behind"):
            await admin.groups.progress("NS%behin", topic)


async def test_who_pops_has_every_queue_of_a_broker(admin):
    await make_topic(admin, "Shared")
    await admin.groups.update("sharing", {}, cluster="DefaultCluster")
    for broker in BROKERS:
        queue = MessageQueue("Shared", broker, 0)
        await admin.calls.commit_offset(await admin.calls.address(broker), "sharing", queue, 0)
    held = {MessageQueue("Shared", "broker-a", -1): PopProcessQueueInfo()}

    async def running(self, group):
        return {"x": ConsumerRunningInfo(mq_pop_table=held), "y": ConsumerRunningInfo(mq_pop_table=held), "z": None}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clients, "running", running)
        found = await admin.groups.progress("sharing", clients=True)

    assert [one.client for one in found.queues] == ["x y", "x y", None, None]


async def test_what_is_exported_has_topics_and_groups(admin):
    await make_topic(admin, "Exported", ["broker-b"])
    found = await admin.groups.metadata(cluster="DefaultCluster")
    assert "Exported" in found["broker-b"].topic_config_table
    assert "Exported" not in found["broker-a"].topic_config_table
    assert "TOOLS_CONSUMER" in found["broker-a"].subscription_group_table


async def test_offsets_are_moved_at_every_broker(admin):
    """broker-b has its clients move themselves: with none online, the tool writes the offsets."""
    await make_topic(admin, "Moved")
    sent = await send(admin, *[Message(topic="Moved", body=b"x") for _ in range(12)])
    await admin.groups.update("moving", {}, cluster="DefaultCluster")
    for one in sent[:4]:
        address = await admin.calls.address(one.broker_name)
        await admin.calls.commit_offset(address, "moving", MessageQueue("Moved", one.broker_name, one.queue_id), 1)

    async def places():
        return [
            (one.broker_name, one.consumer_offset) for one in (await admin.groups.progress("moving", "Moved")).queues
        ]

    moved = await admin.offsets.reset("moving", "Moved", END_MS)
    assert [(one.broker_name, one.offset) for one in moved] == [*zip(SIDES, [3] * 4, strict=True)] == await places()
    moved = await admin.offsets.reset("moving", "Moved", 1, is_forced=False)
    assert [(one.broker_name, one.offset) for one in moved] == [*zip(SIDES, [0] * 4, strict=True)] == await places()
    for broker, queue_id in (("broker-a", 1), ("broker-b", 0)):
        (one,) = await admin.offsets.reset("moving", "Moved", 0, broker=broker, queue_id=queue_id, offset=2)
        assert (one.broker_name, one.queue_id, one.offset) == (broker, queue_id, 2)
    assert await places() == [*zip(SIDES, [0, 2, 2, 0], strict=True)]
    with pytest.raises(PeerRefused, match="not in consume queue range"):
        await admin.offsets.reset("moving", "Moved", 0, broker="broker-a", queue_id=1, offset=9)


async def test_offsets_are_cloned_only_where_there_are_some(admin):
    await make_topic(admin, "Cloned")
    await send(admin, *[Message(topic="Cloned", body=b"x") for _ in range(8)])
    for group in ("source", "target", "empty"):
        await admin.groups.update(group, {}, cluster="DefaultCluster")
    address = await admin.calls.address("broker-a")
    await admin.calls.commit_offset(address, "source", MessageQueue("Cloned", "broker-a", 0), 1)
    await admin.offsets.reset("target", "Cloned", END_MS, broker="broker-a")

    rows = await admin.offsets.clone("source", "target", "Cloned")

    assert [(row.broker_name, row.queue_id, row.offset) for row in rows] == [("broker-a", 0, 1)]
    found = await admin.groups.progress("target", "Cloned")
    assert [one.consumer_offset for one in found.queues if one.broker_name == "broker-a"] == [1, 2]
    with pytest.raises(UnknownName, match="no offset of group empty"):
        await admin.offsets.clone("empty", "target", "Cloned")
    with pytest.raises(PeerRefused, match="create the group"):
        await admin.offsets.clone("source", "nobody", "Cloned")
