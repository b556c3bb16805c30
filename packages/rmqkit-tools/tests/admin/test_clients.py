"""Information about connected clients, and the verdict on a group."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.admin.cluster.clients import heard, verdict
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.pop.consumer import PopConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.errors import ConnectFailed, PeerRefused, UnknownName
from rmqkit.filter import subscription
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.schemas.clients import (
    ConsumerConnection,
    ConsumerRunningInfo,
    MessageQueue,
    PopProcessQueueInfo,
    ProcessQueueInfo,
)
from tests.admin.things import make_topic
from tests.client.inside import runtime_of

NOW_MS = 1_700_000_000_000
Q0, Q1 = MessageQueue("T", "broker-a", 0), MessageQueue("T", "broker-a", 1)
RETRY = MessageQueue("%RETRY%G", "broker-a", 0)
HELD = ProcessQueueInfo()
STUCK = ProcessQueueInfo(cached_msg_count=3, last_consume_timestamp=NOW_MS - 61_000)


def info(table, expression="*", **more):
    return ConsumerRunningInfo(subscription_set=[subscription("T", expression)], mq_table=table, **more)


@pytest.mark.parametrize(
    ("clients", "troubles"),
    [
        ({"x": info({Q0: HELD}), "y": info({Q1: HELD})}, []),
        ({"x": info({Q0: HELD, Q1: HELD}), "y": None}, ["y does not answer"]),
        ({"x": info({Q0: HELD})}, ["queue 1 of T on broker-a is with no client"]),
        (
            {"x": info({Q0: HELD, Q1: HELD}), "y": info({Q1: HELD})},
            ["queue 1 of T on broker-a is with x and y"],
        ),
        ({"x": info({Q0: HELD, Q1: HELD}), "y": info({Q1: ProcessQueueInfo(droped=True)})}, []),
        ({"x": info({Q0: HELD, Q1: HELD, RETRY: HELD}), "y": info({RETRY: HELD})}, []),
        ({"x": info({}, mq_pop_table={Q0: PopProcessQueueInfo()})}, []),
        (
            {"x": info({Q0: HELD}), "y": info({Q1: HELD}, "A || B")},
            ["y subscribes to T with TAG A || B, x with TAG *"],
        ),
        (
            {"x": info({Q0: STUCK, Q1: HELD})},
            ["x has handled nothing for 61 s and holds 3 messages of queue 0 of T on broker-a"],
        ),
        (
            {"x": info({Q0: ProcessQueueInfo(locked=True), Q1: HELD}, properties={"PROP_CONSUMEORDERLY": "true"})},
            ["x has no lock of queue 1 of T on broker-a"],
        ),
        ({}, ["queue 0 of T on broker-a is with no client", "queue 1 of T on broker-a is with no client"]),
    ],
)
def test_the_verdict_names_what_is_wrong(clients, troubles):
    connection = ConsumerConnection(message_model="CLUSTERING", consume_type="CONSUME_PASSIVELY")

    found = verdict(connection, clients, [Q0, Q1], NOW_MS)

    assert (found.troubles, found.same_subscription) == (troubles, "subscribes" not in "".join(troubles))


def test_who_broadcasts_or_pulls_need_not_share_queues():
    for model, kind in (("BROADCASTING", "CONSUME_PASSIVELY"), ("CLUSTERING", "CONSUME_ACTIVELY")):
        connection = ConsumerConnection(message_model=model, consume_type=kind)
        assert verdict(connection, {"x": info({}), "y": info({})}, [Q0, Q1], NOW_MS).troubles == []


@pytest.mark.real_time
async def test_one_answer_is_enough_and_the_telling_error_is_raised():
    async def ask(address):
        if address == "up":
            return 1
        raise ConnectFailed(address, "down") if address == "down" else PeerRefused(206, "not here", address)

    assert await heard(["down", "up", "none"], ask) == {"up": 1}
    with pytest.raises(PeerRefused):
        await heard(["none", "down"], ask)
    with pytest.raises(ConnectFailed):
        await heard(["none", "down"], ask, expected=206)


async def status_when(admin, group, is_so):
    """The status of a group as soon as something holds of it."""
    while True:
        try:
            found = await admin.clients.status(group)
            if is_so(found):
                return found
        except PeerRefused as error:
            assert error.code == ResponseCode.CONSUMER_NOT_ONLINE
        await asyncio.sleep(0.01)


@pytest.mark.real_time
async def test_a_group_that_is_online(admin, name_servers):
    await make_topic(admin, "NS%Online")
    async with (
        PushConsumer("NS%online", name_servers) as one,
        PushConsumer("NS%online", name_servers) as other,
        Producer("NS%producers", name_servers) as producer,
    ):
        for consumer in (one, other):
            consumer.subscribe("NS%Online", "*", lambda message: None)
        await producer.queues("NS%Online")
        every = [MessageQueue("NS%Online", f"broker-{n}", q) for n in "ab" for q in (0, 1)]

        def is_shared(found):  # the members are asked one after the other, a queue may move in between
            held = [queue for info in found.clients.values() for queue in info.mq_table]
            return len(found.clients) == 2 and sorted(q for q in held if q.topic[0] == "N") == every

        await status_when(admin, "NS%online", lambda found: not found.verdict.troubles and is_shared(found))
        client = one.status().client_id
        stacks = (await admin.clients.running("NS%online", client, stacks=True))[client].jstack
        assert "thread MainThread" in stacks
        with pytest.raises(UnknownName, match="has no client nobody"):
            await admin.clients.running("NS%online", "nobody")
        await runtime_of(producer).heartbeat()
        rows = [row for row in await admin.clients.all_producers() if row.group == "NS%producers"]
        assert {row.broker_name for row in rows} == {"broker-a", "broker-b"}
        assert [row.client_id for row in await admin.clients.producers("NS%producers")] == [rows[0].client_id]
    with pytest.raises(UnknownName, match="no producer group NS%producer:"):
        await admin.clients.producers("NS%producer")


@pytest.mark.real_time
async def test_a_group_that_pops_is_reported_as_any_other(admin, name_servers):
    await make_topic(admin, "Popped")
    with pytest.raises(PeerRefused) as refused:
        await admin.clients.status("popping")
    assert refused.value.code == ResponseCode.CONSUMER_NOT_ONLINE
    async with PopConsumer("popping", name_servers) as consumer:
        consumer.subscribe("Popped", "*", lambda message: None)
        found = await status_when(admin, "popping", lambda found: found.clients)
        assert found.connection.consume_type == "CONSUME_POP"
        assert [group.group for group in await admin.groups.summaries()].count("popping") == 1
