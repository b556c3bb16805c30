"""Heartbeats, members and queue locks (behaviour.md §2.6, §2.7; remoting.md §4.3.4, §9.3)."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, reply, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import RegisterBrokerBody, RegisterBrokerRequest
from rmqkit.protocol.schemas.clients import ConsumerGroupRequest, UnregisterClientRequest
from rmqkit.protocol.schemas.pull import PullFlag
from rmqkit.protocol.schemas.topics import TopicRequest, TopicRoute
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from tests.broker.cluster import Cluster

MEMBERS = RequestCode.GET_CONSUMER_LIST_BY_GROUP
BEAT = RequestCode.HEART_BEAT
LOCK, UNLOCK = RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ
QUEUE = {"topic": "T", "brokerName": "broker-a", "queueId": 0}
OTHER_QUEUE = {"topic": "T", "brokerName": "broker-a", "queueId": 1}


def consumer(group="g", topics=("T",), **fields):
    subscriptions = [{"topic": topic, "subString": "*", "subVersion": 1} for topic in topics]
    return {"groupName": group, "subscriptionDataSet": subscriptions, **fields}


async def beat(cluster, *consumers, client_id="c1", fingerprint=0, without=False, client=None):
    """Send a heartbeat and return IS_SUB_CHANGE of the answer."""
    data = {"clientID": client_id, "consumerDataSet": [*consumers]}
    data |= {"heartbeatFingerprint": fingerprint, "withoutSub": without}
    fields = decode_fields(await cluster.ask(BEAT, data, client))
    assert fields["IS_SUPPORT_HEART_BEAT_V2"] == "true"
    return fields["IS_SUB_CHANGE"] == "true"


async def members(cluster, group="g"):
    answer = await cluster.call(MEMBERS, ConsumerGroupRequest(group))
    if answer.code == 0:
        return sorted(json.loads(answer.body)["consumerIdList"])
    assert (answer.code, answer.remark) == (1, f"no consumer for this group, {group}")
    return []


async def noticed(cluster, count):
    while len(cluster.notices) < count:
        await asyncio.sleep(0)
    assert len(cluster.notices) == count


async def test_members_of_a_group_are_listed_and_reported_of_changes(cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    other = cluster.new_client()
    await cluster.heartbeat("c2", ("T", "*"), client=other)
    assert await members(cluster) == ["c1", "c2"]
    await noticed(cluster, 3)  # c1 on its own, then c1 and c2
    await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c2", None, "g"), client=other)
    await noticed(cluster, 4)
    await other.close()
    assert set(cluster.notices) == {"g"}
    await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1", "p", "g"))
    assert await members(cluster) == []


async def test_a_closed_connection_leaves_its_groups(cluster):
    other = cluster.new_client()
    await cluster.heartbeat("c1", ("T", "*"))
    await cluster.heartbeat("c2", ("T", "*"), client=other)
    await noticed(cluster, 3)
    await other.close()
    await noticed(cluster, 4)
    assert await members(cluster) == ["c1"]


async def test_only_what_concerns_the_queues_is_reported(cluster):
    await beat(cluster, consumer())
    await noticed(cluster, 1)
    await beat(cluster, consumer())  # nothing new
    await beat(cluster, consumer(), client_id="renamed")  # the same connection: replaced, no change
    assert await members(cluster) == ["renamed"]
    changed = consumer()
    changed["subscriptionDataSet"][0] |= {"subString": "A", "subVersion": 2}
    await beat(cluster, changed)  # another expression
    await beat(cluster, consumer(group="b", messageModel="BROADCASTING"))
    await members(cluster)
    await noticed(cluster, 1)
    await beat(cluster, consumer(topics=("T", "U")))  # one more topic
    await noticed(cluster, 2)
    await beat(cluster, consumer(topics=("U",)))  # one topic less
    await noticed(cluster, 3)


@pytest.mark.parametrize("switched_off", ["at the broker", "for the group"])
async def test_notices_may_be_switched_off(switched_off, tmp_path):
    async with Cluster(tmp_path / "store", broker={"notify_consumers": switched_off != "at the broker"}) as cluster:
        if switched_off == "for the group":
            quiet = {"groupName": "g", "notifyConsumerIdsChangedEnable": False}
            await cluster.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, quiet)
        await beat(cluster, consumer())
        await beat(cluster, consumer(topics=("U",)))
        assert await members(cluster) == ["c1"]
        assert cluster.notices == []


async def test_changes_may_be_reported_together_later(tmp_path):
    async with Cluster(tmp_path / "store", broker={"notify_at_once": False}) as cluster:
        clients = cluster.standalone.broker.context.clients
        await beat(cluster, consumer(), consumer(group="gone"))
        await beat(cluster, consumer(topics=("U",)))
        await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1", None, "gone"))
        assert await members(cluster) == ["c1"]
        assert cluster.notices == []
        clients.notify_changes()
        await noticed(cluster, 1)
        clients.notify_changes()
        assert await members(cluster) == ["c1"]
        assert cluster.notices == ["g"]


async def test_a_connection_that_says_nothing_disturbs_nobody(cluster):
    host, _, port = cluster.standalone.broker_address.rpartition(":")
    _, silent = await asyncio.open_connection(host, int(port))
    _, halved = await asyncio.open_connection(host, int(port))
    halved.write(b"\x00\x00\x01")  # the beginning of a frame
    await halved.drain()
    assert (await cluster.send()).code == 0
    assert len((await cluster.pull()).body) > 0
    clients = cluster.standalone.broker.context.clients
    clients.close_silent()  # it never was a client
    assert clients.all_producers == {}
    for writer in (silent, halved):
        writer.close()
        await writer.wait_closed()


async def test_a_silent_client_is_sent_away(cluster):
    other = cluster.new_client()
    await cluster.heartbeat("c2", ("T", "*"), client=other)
    clients = cluster.standalone.broker.context.clients
    clients.close_silent()
    assert await members(cluster) == ["c2"]
    cluster.standalone.broker.context.settings.client_silent_ms_max = -1
    clients.close_silent()
    assert await members(cluster) == []
    await other.close()


async def test_a_heartbeat_makes_the_retry_topic_and_the_name_server_knows_it(cluster):
    create = {"topicConfigList": [{"topicName": "T", "order": True}]}
    await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, create)
    await beat(cluster, consumer(unitMode=True))
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("%RETRY%g"))
    while True:
        answer = await cluster.client.call(cluster.standalone.namesrv_address, command, 60_000)
        if answer.code == 0:
            break
    (queues,) = decode_as(answer.body, TopicRoute).queue_datas
    assert (queues.broker_name, queues.read_queue_nums, queues.perm, queues.topic_sys_flag) == ("broker-a", 1, 6, 2)
    retry = json.loads((await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic="%RETRY%g")).body)
    assert retry["order"]  # as one of its topics is


async def test_consumers_that_may_not_be_are_skipped(tmp_path):
    async with Cluster(
        tmp_path / "store", broker={"auto_create_group": False, "reject_pull_consumers": True}
    ) as cluster:
        await beat(cluster, consumer(group="unknown"), consumer(group="CID_RMQ_SYS_x"))
        assert await members(cluster, "unknown") == []
        assert await members(cluster, "CID_RMQ_SYS_x") == ["c1"]
        await cluster.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "pulls"})
        await beat(cluster, consumer(group="pulls", consumeType="CONSUME_ACTIVELY"))
        assert await members(cluster, "pulls") == []
        await beat(cluster, consumer(group="pulls"))
        assert await members(cluster, "pulls") == ["c1"]


async def test_fingerprints_stand_for_subscriptions(cluster):
    assert await beat(cluster, consumer())  # without a fingerprint always everything
    assert await beat(cluster, consumer(), fingerprint=7)  # the first after one without
    assert not await beat(cluster, consumer(topics=()), fingerprint=7, without=True)
    await cluster.send()
    assert (await cluster.pull(flags=PullFlag(0))).code == 0  # the subscription is still there
    assert await beat(cluster, consumer(), fingerprint=8)
    assert not await beat(cluster, consumer(), fingerprint=8)
    assert not await beat(cluster, consumer(group="new"), fingerprint=9)


async def test_a_fingerprint_of_a_group_that_is_not_known_requests_its_subscriptions(cluster):
    for _ in range(2):
        assert await beat(cluster, consumer(topics=()), fingerprint=7, without=True)
    assert not await beat(cluster, consumer(), fingerprint=7)
    assert not await beat(cluster, consumer(topics=()), fingerprint=7, without=True)
    await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1", None, "g"))
    assert await beat(cluster, consumer(topics=()), fingerprint=7, without=True)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"clientID":"c","consumerDataSet":[{}]}'])
async def test_a_heartbeat_that_cannot_be_read_changes_nothing(body, cluster):
    assert (await cluster.ask(BEAT, body)).code == 1
    assert (await cluster.ask(RequestCode.GET_ALL_PRODUCER_INFO)).body == b'{"data":{}}'


async def test_good_byes_of_strangers_and_members_of_nothing(cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    for fields in ({}, {"clientID": "zz", "consumerGroup": "none", "producerGroup": "none"}, {"clientID": ""}):
        assert (await cluster.ask(RequestCode.UNREGISTER_CLIENT, **fields)).code == 0
    # The connection of another client is not in the group.
    other = cluster.new_client()
    await cluster.ask(RequestCode.UNREGISTER_CLIENT, client=other, clientID="c1", consumerGroup="g")
    await other.close()
    assert await members(cluster) == ["c1"]
    assert await members(cluster, "") == []
    assert (await cluster.ask(MEMBERS)).code == 1


async def lock(cluster, *queues, client_id="c1", group="g", code=LOCK):
    answer = await cluster.ask(code, {"consumerGroup": group, "clientId": client_id, "mqSet": [*queues]})
    assert answer.code == 0
    return [queue["queueId"] for queue in json.loads(answer.body)["lockOKMQSet"]] if code == LOCK else None


async def test_a_queue_is_locked_by_one_client_at_a_time(cluster):
    assert await lock(cluster, QUEUE) == [0]
    assert await lock(cluster, QUEUE, OTHER_QUEUE, client_id="c2") == [1]
    assert await lock(cluster, QUEUE, client_id="c2", group="other") == [0]
    await lock(cluster, QUEUE, client_id="c2", code=UNLOCK)  # not its own
    assert await lock(cluster, QUEUE, client_id="c2") == []
    await lock(cluster, QUEUE, code=UNLOCK)
    assert await lock(cluster, QUEUE, client_id="c2") == [0]
    assert await lock(cluster) == []


async def test_a_consumer_that_dies_holding_a_lock_keeps_it_until_it_expires(cluster):
    other = cluster.new_client()
    await cluster.heartbeat("c1", ("T", "*"), client=other)
    assert await lock(cluster, QUEUE) == [0]
    await other.close()
    while await members(cluster):
        await asyncio.sleep(0)
    assert await lock(cluster, QUEUE, client_id="c2") == []
    locks = cluster.standalone.broker.context.queue_locks
    (held,) = locks.groups["g"].values()
    held.renewed_ms -= 60_001
    assert await lock(cluster, QUEUE, client_id="c2") == [0]


class Namesake:
    """A second broker with the same name, for the name server and for lock requests."""

    def __init__(self, refused=()):
        self.refused = refused
        self.asked = []
        self.dispatch = Router()
        self.dispatch.register(LOCK, self.answer)
        self.dispatch.register(UNLOCK, self.answer)
        self.server = RemotingServer(self.dispatch)

    def answer(self, connection, command):
        body = json.loads(command.payload)
        self.asked.append((command.code, body["onlyThisBroker"], [queue["queueId"] for queue in body["mqSet"]]))
        granted = [queue for queue in body["mqSet"] if queue["queueId"] not in self.refused]
        return reply(command, body=json.dumps({"lockOKMQSet": granted}).encode())

    async def register(self, cluster, broker_id):
        address = f"127.0.0.1:{await self.server.listen('127.0.0.1', 0)}"
        header = RegisterBrokerRequest(
            broker_name="broker-a",
            broker_addr=address,
            cluster_name="DefaultCluster",
            broker_id=broker_id,
            ha_server_addr="",
        )
        body = msgspec.json.encode(RegisterBrokerBody())
        command = request(RequestCode.REGISTER_BROKER, header, body)
        answer = await cluster.client.call(cluster.standalone.namesrv_address, command, 60_000)
        assert answer.code == 0, answer.remark


async def test_strict_locks_need_most_of_the_brokers_of_a_name(tmp_path):
    async with Cluster(tmp_path / "store", broker={"strict_locks": True, "replica_count": 3}) as cluster:
        settings = cluster.standalone.broker.context.settings
        agrees, refuses = Namesake(), Namesake(refused=(1,))
        await agrees.register(cluster, 1)
        await refuses.register(cluster, 2)
        assert await lock(cluster, QUEUE, OTHER_QUEUE) == [0, 1]  # two of three have agreed to queue 1
        assert agrees.asked == refuses.asked == [(LOCK, True, [0, 1])]
        agrees.refused = (1,)
        assert await lock(cluster, QUEUE, OTHER_QUEUE) == [0]
        await lock(cluster, QUEUE, code=UNLOCK)
        assert agrees.asked[-1] == refuses.asked[-1] == (UNLOCK, True, [0])
        await agrees.server.close()
        assert await lock(cluster, QUEUE) == [0]  # one is away
        await refuses.server.close()
        assert await lock(cluster, QUEUE) == []
        only = {"consumerGroup": "g", "clientId": "c1", "mqSet": [QUEUE], "onlyThisBroker": True}
        assert json.loads((await cluster.ask(LOCK, only)).body)["lockOKMQSet"] == [QUEUE]  # as namesakes ask
        settings.strict_locks = False
        assert await lock(cluster, QUEUE) == [0]


@pytest.mark.parametrize("code", [LOCK, UNLOCK])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"{}", {"clientId": "c", "mqSet": [QUEUE]}, {"consumerGroup": "g", "mqSet": [QUEUE]}]
)
async def test_a_lock_request_that_cannot_be_read(code, body, cluster):
    assert (await cluster.ask(code, body)).code == 1
    assert await lock(cluster, QUEUE, client_id="c2") == [0]


async def test_an_unknown_request_is_not_supported(cluster):
    answer = await cluster.call(4711)
    assert (answer.code, answer.remark) == (3, " request type 4711 not supported")


async def test_a_request_without_its_fields_names_the_first_missing_one(cluster):
    answer = await cluster.call(RequestCode.PULL_MESSAGE)
    assert (answer.code, "consumerGroup" in answer.remark) == (1, True)
