"""The load of a cluster: reports of literal snapshots, and snapshots of two brokers."""

from __future__ import annotations

import pytest

from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.diagnosis.top import GroupRow, QueueEnds, QueueOffset, Sampler, Snapshot, TopicRow, compare
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.admin.things import make_topic, send

HERE, THERE = MessageQueue("Orders", "a", 0), MessageQueue("Orders", "b", 0)
RETRIES = MessageQueue("%RETRY%audit", "a", 0)
BROKER = BrokerRow(cluster_name="C", broker_name="a", broker_id=0, addr="127.0.0.1:1", disk_ratio=0.5)


def snapshot(seconds, queues, groups=(), **more):
    return Snapshot(
        monotonic_ms=seconds * 1000.0,
        now_ms=1_700_000_000_000 + seconds * 1000,
        answered=more.pop("answered", frozenset("ab")),
        queues={queue: QueueEnds(*ends) for queue, ends in queues.items()},
        groups={("audit", queue): QueueOffset(*place) for queue, place in dict(groups).items()},
        servers=frozenset({"C", "a", "b"}),
        **more,
    )


def test_rates_are_differences_of_offsets_over_all_queues():
    before = snapshot(0, {HERE: (0, 100), THERE: (0, 10)}, {HERE: (90, 100), THERE: (10, 10)})
    after = snapshot(
        4,
        {HERE: (20, 140), THERE: (0, 12)},
        {HERE: (110, 140), THERE: (12, 12)},
        ages_ms={("audit", "Orders"): 1500},
        members={"audit": 2},
        brokers=[BROKER],
    )
    report = compare(before, after)
    assert (report.time_ms, report.span_ms, report.brokers) == (1_700_000_004_000, 4000, [BROKER])
    assert report.topics == [TopicRow(topic="Orders", in_per_second=10.5, out_per_second=5.5, stored=132, groups=1)]
    assert report.groups == [
        GroupRow(group="audit", topic="Orders", out_per_second=5.5, lag=30, age_ms=1500, members=2)
    ]


def test_a_broker_that_was_away_gives_no_rate():
    before = snapshot(0, {}, answered=frozenset())
    after = snapshot(1, {HERE: (0, 1_000_000)}, {HERE: (999_999, 1_000_000)})
    (topic,), (group,) = compare(before, after).topics, compare(before, after).groups
    assert (topic.in_per_second, topic.out_per_second, topic.stored) == (None, None, 1_000_000)
    assert (group.out_per_second, group.lag) == (None, 1)


def test_a_new_topic_counts_from_zero_and_a_new_group_from_its_first_offset():
    before = snapshot(0, {}, {THERE: (0, 500)})
    after = snapshot(2, {HERE: (0, 8)}, {HERE: (500, 500), THERE: (500, 500)})
    report = compare(before, after)
    assert report.topics[0].in_per_second == 4.0
    assert report.groups[0].out_per_second == 0.0, "where it began is not known"


def test_what_went_back_counts_as_nothing_and_no_time_gives_no_rate():
    before, after = (
        snapshot(0, {HERE: (0, 90)}, {HERE: (80, 90)}),
        snapshot(1, {HERE: (0, 5)}, {HERE: (2, 5)}),
    )
    report = compare(before, after)
    assert (report.topics[0].in_per_second, report.groups[0].out_per_second) == (0.0, 0.0)
    assert compare(before, before).topics[0].in_per_second is None


def test_topics_of_the_system_are_left_out_and_retries_shown_while_there_are_any():
    names = "rmq_sys_X", "SCHEDULE_TOPIC_XXXX", "C", "b", "C_REPLY_TOPIC", "%DLQ%audit", "%RETRY%audit", "Orders"
    queues = {MessageQueue(name, "a", 0): (0, 1) for name in names}
    idle, waiting = snapshot(1, queues, {RETRIES: (1, 1)}), snapshot(1, queues, {RETRIES: (0, 1)})
    assert [row.topic for row in compare(idle, idle).topics] == ["Orders"]
    assert len(compare(idle, idle, system=True).topics) == len(names)
    assert compare(idle, idle).groups == []
    assert [row.topic for row in compare(idle, waiting).groups] == ["%RETRY%audit"]


@pytest.mark.real_time  # the servers are in another thread
async def test_a_look_finds_what_all_brokers_have(admin):
    await make_topic(admin, "Looked")
    await send(admin, *[Message(topic="Looked", body=b"x") for _ in range(8)])
    await admin.groups.update("looker", {}, cluster="DefaultCluster")
    queue = MessageQueue("Looked", "broker-a", 0)
    address = await admin.calls.address("broker-a")
    await admin.calls.commit_offset(address, "looker", queue, 1)

    sampler = Sampler(admin)
    found = await sampler.look()

    assert {one: ends.end for one, ends in found.queues.items() if one.topic == "Looked"} == {
        MessageQueue("Looked", broker, queue_id): 2 for broker in ("broker-a", "broker-b") for queue_id in (0, 1)
    }
    assert found.groups["looker", queue] == QueueOffset(1, 2)
    assert found.ages_ms["looker", "Looked"] > 0
    assert found.answered == {"broker-a", "broker-b"} and found.servers == {"DefaultCluster", "broker-a", "broker-b"}
    assert [(row.broker_name, row.trouble) for row in found.brokers] == [("broker-a", ""), ("broker-b", "")]
    report = compare(found, await sampler.look())
    assert [row.stored for row in report.topics if row.topic == "Looked"] == [8]
    (group,) = [row for row in report.groups if row.group == "looker"]
    assert (group.out_per_second, group.lag, group.members) == (0.0, 3, 0)
