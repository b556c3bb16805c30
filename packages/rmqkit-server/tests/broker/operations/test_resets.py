"""Offsets of groups that an operator resets (behaviour.md §5.2, §5.3, §5.4; remoting.md §10.6)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields, decode_header
from rmqkit.protocol.fastjson import decode_as, loads
from rmqkit.protocol.schemas.offsets import QueryConsumerOffsetRequest, ResetOffsetBody, UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import PullMessageResponse
from tests.broker.cluster import Cluster

RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
CLONE = RequestCode.CLONE_GROUP_OFFSET
COMMIT = RequestCode.UPDATE_CONSUMER_OFFSET
QUERY = RequestCode.QUERY_CONSUMER_OFFSET
BY_TIME = {"group": "g", "topic": "T", "timestamp": 0, "isForce": "true"}
BY_CLIENTS = {"server_side_reset": False}


async def fill(cluster, count=5):
    """A topic with 4 queues and `count` messages in the first, and a group."""
    for _ in range(count):
        await cluster.send()
    await cluster.pull()


async def commit(cluster, offset, queue_id=0, group="g"):
    answer = await cluster.call(COMMIT, UpdateConsumerOffsetRequest(group, "T", queue_id, offset))
    return answer.code, answer.remark


async def committed(cluster, queue_id=0, group="g"):
    return await cluster.number(QUERY, QueryConsumerOffsetRequest(group, "T", queue_id, False))


def targets(answer):
    assert answer.code == 0, answer.remark
    table = decode_as(answer.body, ResetOffsetBody).offset_table
    assert {(queue.topic, queue.broker_name) for queue in table} == {("T", "broker-a")}
    return {queue.queue_id: offset for queue, offset in table.items()}


@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": -1}, {0: 5, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": -7}, {0: 5, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": 1 << 62}, {0: 5, 1: 0, 2: 0, 3: 0}),
        ({"timestamp": "x"}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"queueId": -5}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"queueId": "x"}, {0: 0, 1: 0, 2: 0, 3: 0}),
        ({"queueId": 0, "timestamp": -1}, {0: 5}),
        ({"queueId": 0, "offset": 2}, {0: 2}),
        ({"queueId": 0, "offset": 6}, {0: 6}),
        ({"queueId": 0, "offset": -1}, {0: 0}),
        ({"queueId": 77, "offset": 0}, {77: 0}),
        ({"queueId": 77}, {77: 0}),
        ({"offset": 2}, {0: 0, 1: 0, 2: 0, 3: 0}),  # an offset needs a queue
    ],
)
async def test_where_a_group_is_moved(fields, moved, cluster):
    await fill(cluster)
    assert targets(await cluster.ask(RESET, **(BY_TIME | fields))) == moved
    for queue_id, offset in moved.items():
        assert await committed(cluster, queue_id) == offset


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "none"}, 17, "Topic none does not exist"),
        ({"group": "none"}, 26, "Group none does not exist"),
        ({"queueId": 0, "offset": 7}, 1, "Target offset 7 not in consume queue range [0-5]"),
        ({"queueId": 0, "offset": -2}, 1, "Target offset -2 not in consume queue range [0-5]"),
    ],
)
async def test_refused_resets(fields, code, remark, cluster):
    await fill(cluster)
    await commit(cluster, 3)
    answer = await cluster.ask(RESET, **(BY_TIME | fields))
    assert (answer.code, answer.remark) == (code, remark)
    assert await committed(cluster) == 3
    assert await commit(cluster, 4) == (0, None)


@pytest.mark.parametrize("missing", ["group", "topic"])
async def test_a_reset_has_to_name_group_and_topic(missing, cluster):
    await fill(cluster)
    fields = {name: value for name, value in BY_TIME.items() if name != missing}
    assert (await cluster.ask(RESET, **fields)).code == 1
    assert await commit(cluster, 4) == (0, None)


async def test_a_reset_stands_until_a_pull_takes_it(cluster):
    await fill(cluster)
    await commit(cluster, 5)
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=2)
    assert await commit(cluster, 5) == (0, "Offset has been previously reset")
    assert await committed(cluster) == 2
    assert await commit(cluster, 1, queue_id=1) == (0, None)  # another queue
    assert await commit(cluster, 1, group="TOOLS_CONSUMER") == (0, None)  # another group
    answer = await cluster.pull(offset=5)
    assert (answer.code, answer.remark) == (21, "OFFSET_RESET")
    assert decode_header(answer, PullMessageResponse).next_begin_offset == 2
    assert (await cluster.pull(offset=2)).code == 0
    assert await commit(cluster, 4) == (0, None)
    assert await committed(cluster) == 4


async def test_a_held_pull_learns_of_a_reset_at_once(cluster):
    await fill(cluster)
    consumer = cluster.new_client()
    held = [
        asyncio.ensure_future(cluster.pull(offset=5, flags=4 | 2, suspend_ms=60_000, client=consumer, group=group))
        for group in ("g", "other")
    ]
    while len(cluster.standalone.broker.context.long_polling) < 2:
        await asyncio.sleep(0)
    await cluster.ask(RESET, **BY_TIME)
    answer = await held[0]
    assert (answer.code, decode_header(answer, PullMessageResponse).next_begin_offset) == (21, 0)
    assert len(cluster.standalone.broker.context.long_polling) == 1  # another group was not moved
    await consumer.close()
    await asyncio.gather(*held, return_exceptions=True)


def place(answer):
    """Return the code and the next offset of the answer to a pull."""
    return answer.code, decode_header(answer, PullMessageResponse).next_begin_offset


async def hold(cluster, client, offset, count):
    """Let a client's pull wait at the broker. ``count``: the number of pulls that wait then."""
    held = asyncio.ensure_future(cluster.pull(offset=offset, flags=4 | 2, suspend_ms=60_000, client=client))
    while len(cluster.standalone.broker.context.long_polling) < count:
        await asyncio.sleep(0)
    return held


@pytest.mark.parametrize("is_owner_held", [True, False])
async def test_the_held_pull_of_the_former_owner_does_not_end_a_reset(is_owner_held, cluster):
    """The former owner throws the answer away: a reset soon after a rebalance was lost for the queues that moved."""
    await fill(cluster)
    former, owner = cluster.new_client(), cluster.new_client()
    held = [await hold(cluster, former, 5, 1)]
    if is_owner_held:
        held.append(await hold(cluster, owner, 5, 2))
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=2)
    assert [place(answer) for answer in await asyncio.gather(*held)] == [(21, 2)] * len(held)
    assert await commit(cluster, 5) == (0, "Offset has been previously reset")
    if not is_owner_held:
        assert place(await cluster.pull(offset=5, client=owner)) == (21, 2)
    assert place(await cluster.pull(offset=2, client=owner)) == (0, 5)
    assert await commit(cluster, 4) == (0, None)
    assert place(await cluster.pull(offset=4, client=owner)) == (0, 5)
    assert await committed(cluster) == 4


async def test_an_owner_whose_held_pull_was_answered_is_sent_again_if_it_pulls_elsewhere(cluster):
    """Several clients behind one connection of a proxy: the held pull may have been another client's."""
    await fill(cluster)
    held = await hold(cluster, cluster.client, 5, 1)
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=2)
    assert place(await held) == (21, 2)
    assert place(await cluster.pull(offset=5)) == (21, 2)
    assert place(await cluster.pull(offset=2)) == (0, 5)
    assert await commit(cluster, 4) == (0, None)


async def test_a_program_that_keeps_its_own_offsets_is_sent_to_the_target_once(cluster):
    await fill(cluster)
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=2)
    assert place(await cluster.pull(offset=4)) == (21, 2)
    assert place(await cluster.pull(offset=4)) == (0, 5)
    assert await commit(cluster, 4) == (0, None)


async def test_an_owner_that_is_at_the_target_is_sent_there_once(cluster):
    """It drops the messages between its committed offset and its next pull."""
    await fill(cluster)
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=4)
    assert place(await cluster.pull(offset=4, flags=4 | 1, commit=1)) == (21, 4)
    assert await committed(cluster) == 4
    assert place(await cluster.pull(offset=4)) == (0, 5)


async def test_a_program_with_a_connection_for_each_pull_is_sent_to_the_target_once(cluster):
    await fill(cluster)
    await cluster.ask(RESET, **BY_TIME, queueId=0, offset=2)
    first, second = cluster.new_client(), cluster.new_client()
    assert place(await cluster.pull(offset=4, client=first)) == (21, 2)
    await first.close()
    assert place(await cluster.pull(offset=4, client=second)) == (0, 5)


async def test_a_second_reset_sends_everybody_again(cluster):
    await fill(cluster)
    for target in (2, 3):
        await cluster.ask(RESET, **BY_TIME, queueId=0, offset=target)
        assert place(await cluster.pull(offset=5)) == (21, target)
    assert place(await cluster.pull(offset=3)) == (0, 5)
    assert place(await cluster.pull(offset=3)) == (0, 5)


# -- by asking the clients


def listener(cluster):
    """Return a client and the list of its notices: topic, group, timestamp, force and the table of each."""
    told = []

    def reset(connection, command: Command):
        fields = decode_fields(command)
        table = loads(command.payload)["offsetTable"]
        assert command.is_one_way
        told.append((fields["topic"], fields["group"], fields["timestamp"], fields["isForce"], table))

    return cluster.new_client({RequestCode.RESET_CONSUMER_CLIENT_OFFSET: reset}), told


@pytest.mark.parametrize(
    ("fields", "moved"),
    [
        ({}, 0),
        ({"timestamp": -1}, 5),
        ({"timestamp": -7}, 0),
        ({"timestamp": -1, "isForce": "false"}, 3),  # never forward
        ({"timestamp": -1, "isForce": "x"}, 3),
        ({"isForce": "false"}, 0),
        ({"queueId": 0, "offset": 2}, 0),  # only times are known here
    ],
)
async def test_clients_are_asked_to_move(fields, moved, tmp_path):
    async with Cluster(tmp_path / "store", broker=BY_CLIENTS) as cluster:
        await fill(cluster)
        for queue_id, offset in enumerate((3, 0, 0, 0)):
            await commit(cluster, offset, queue_id)
        client, told = listener(cluster)
        await cluster.heartbeat("c1", ("T", "*"), client=client)
        answer = await cluster.ask(RESET, **(BY_TIME | fields))
        assert targets(answer) == {0: moved, 1: 0, 2: 0, 3: 0}
        assert await committed(cluster) == 3  # the clients move the offsets
        while not told:
            await asyncio.sleep(0)
        topic, group, timestamp, _, table = told[0]
        assert (topic, group, timestamp) == ("T", "g", str((BY_TIME | fields)["timestamp"]))
        assert sorted(table.values()) == sorted([moved, 0, 0, 0])
        await client.close()


async def test_clients_in_c_get_a_list(tmp_path):
    async with Cluster(tmp_path / "store", broker=BY_CLIENTS) as cluster:
        await fill(cluster)
        for queue_id in range(4):
            await commit(cluster, 0, queue_id)
        client, told = listener(cluster)
        body = b'{"clientID":"c","consumerDataSet":[{"groupName":"g"}]}'
        beat = Command(RequestCode.HEART_BEAT, body=body, language="CPP")
        await client.call(cluster.standalone.broker_address, beat, 60_000)
        await cluster.ask(RESET, **(BY_TIME | {"timestamp": -1}))
        while not told:
            await asyncio.sleep(0)
        table = told[0][-1]
        assert table[0] == {"topic": "T", "brokerName": "broker-a", "queueId": 0, "offset": 5}
        await client.close()


async def test_what_clients_cannot_be_reported(tmp_path):
    async with Cluster(tmp_path / "store", broker=BY_CLIENTS) as cluster:
        await fill(cluster)
        steps = []
        for prepare in (lambda: asyncio.sleep(0), lambda: commit(cluster, 0, 0), lambda: commit(cluster, 0, 1)):
            await prepare()
            steps.append(await cluster.ask(RESET, **BY_TIME))
        assert {(step.code, step.remark) for step in steps} == {(1, "THe consumer group <g> not exist")}
        for queue_id in (2, 3):
            await commit(cluster, 0, queue_id)
        answer = await cluster.ask(RESET, **BY_TIME)
        remark = "Consumer not online, so can not reset offset, Group: g Topic: T Timestamp: 0"
        assert (answer.code, answer.remark) == (206, remark)
        answer = await cluster.ask(RESET, **(BY_TIME | {"topic": "none"}))
        assert answer.code == 17
        assert answer.remark == "[reset-offset] reset offset failed, no topic in this broker. topic=none"


# -- clones


@pytest.mark.parametrize(
    ("subscribed", "fields", "offset"),
    [
        (None, {"topic": "T"}, 3),
        (None, {}, 3),
        (None, {"topic": "none"}, None),
        (None, {"srcGroup": "none"}, None),
        (("T",), {"topic": "T"}, 3),
        (("U",), {"topic": "T"}, None),  # online without this topic: its stored offset has no use
        (("U",), {"topic": "T", "offline": "true"}, 3),
    ],
)
async def test_a_group_gets_the_offsets_of_another(subscribed, fields, offset, cluster):
    await fill(cluster)
    await commit(cluster, 3)
    if subscribed is not None:
        await cluster.heartbeat("c1", *((topic, "*") for topic in subscribed))
    assert (await cluster.ask(CLONE, **({"srcGroup": "g", "destGroup": "twin"} | fields))).code == 0
    assert await committed(cluster, group="twin") == (-99 if offset is None else offset)
    await commit(cluster, 4)
    assert await committed(cluster, group="twin") == (-99 if offset is None else offset)


@pytest.mark.parametrize("missing", ["srcGroup", "destGroup"])
async def test_a_clone_has_to_name_both_groups(missing, cluster):
    fields = {"srcGroup": "g", "destGroup": "twin", "topic": "T"}
    assert (await cluster.ask(CLONE, **{k: v for k, v in fields.items() if k != missing})).code == 1
