"""Registrations at name servers, and the use of their answers (behaviour.md §1.7, §2.3)."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from rmqkit.broker.registration import Registration
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, reply
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.brokers import decode_registration
from rmqkit.protocol.schemas.topics import BrokerData, DataVersion, QueueData, TopicConfig, TopicRoute
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tls import ClientTls, ServerTls, ServerTlsSettings, Tls, TlsMode
from tests.broker.cluster import Cluster
from tests.certificates import OPENSSL, REASON, make_certificate
from tests.client.peers import Peer, until
from tests.virtual_time import run as run_virtual


async def ask_namesrv(cluster, code, **fields):
    return await cluster.client.call(cluster.standalone.namesrv_address, Command(code, fields=fields), 60_000)


async def routed(cluster, topic):
    while (answer := await ask_namesrv(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)).code != 0:
        await asyncio.sleep(0)
    (queues,) = decode_as(answer.body, TopicRoute).queue_datas
    return queues


async def with_topics(cluster, names):
    """Return the broker's topics, some of which the name server knows."""
    topics = cluster.standalone.broker.context.topics
    for name in names:
        topics.put(TopicConfig(topic_name=name, perm=6))
    await cluster.standalone.broker.context.topics_published()
    return topics


async def test_a_change_that_was_answered_is_routed(cluster):
    for perm in (6, 4, 6, 2):
        topics = [{"topicName": "T", "perm": perm}]
        await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": topics})
        answer = await ask_namesrv(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
        assert [queues.perm for queues in decode_as(answer.body, TopicRoute).queue_datas] == [perm]


async def test_changes_that_come_close_together_are_all_routed(cluster):
    """Two registrations must not have the same version: name servers ignore the second one."""

    topics = await with_topics(cluster, "AB")
    topics.put(TopicConfig(topic_name="A", perm=4))
    await asyncio.sleep(0)  # its registration is about to begin
    topics.put(TopicConfig(topic_name="B", perm=4))
    await asyncio.sleep(0)
    await cluster.standalone.broker.context.topics_published()
    assert [(await routed(cluster, name)).perm for name in "AB"] == [4, 4]


async def test_a_change_is_routed_although_another_is_reported_while_it_is_written(cluster):
    topics = await with_topics(cluster, "AB")
    written = asyncio.ensure_future(topics.put_shared(TopicConfig(topic_name="B", perm=4)))
    topics.put(TopicConfig(topic_name="A", perm=4))
    await asyncio.sleep(0)  # B is about to be written, and the registration of A begins
    await written
    await cluster.standalone.broker.context.topics_published()
    assert [(await routed(cluster, name)).perm for name in "AB"] == [4, 4]


async def test_the_last_of_the_changes_of_one_topic_is_routed_and_none_of_one_that_is_gone(cluster):
    topics = cluster.standalone.broker.context.topics
    shared = asyncio.ensure_future(topics.put_shared(TopicConfig("A", perm=2), TopicConfig("B", perm=2)))
    await asyncio.sleep(0)  # the shared ones are about to be written
    topics.put(TopicConfig("A", perm=4))
    topics.remove("B")
    await shared
    await cluster.standalone.broker.context.topics_published()
    assert (await routed(cluster, "A")).perm == topics.get("A").perm == 4
    assert topics.get("B") is None
    assert (await ask_namesrv(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="B")).code == 17


@pytest.mark.parametrize("compressed", [False, True])
async def test_topics_are_registered_whole_and_one_by_one(compressed, tmp_path):
    async with Cluster(tmp_path / "store", broker={"compressed_register": compressed}) as cluster:
        assert (await routed(cluster, "TBW102")).write_queue_nums == 8
        await cluster.ask(
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": [{"topicName": "T", "perm": 4}]}
        )
        assert (await routed(cluster, "T")).perm == 4


@pytest.mark.virtual_time
def test_topics_that_name_servers_list_as_ordered_are_marked(tmp_path):
    async def order(cluster, topic):
        return json.loads((await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic=topic)).body)["order"]

    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            topics = [{"topicName": "T"}, {"topicName": "U"}, {"topicName": "V", "order": True}]
            await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": topics})
            for topic in ("T", "none"):
                key = {"namespace": "ORDER_TOPIC_CONFIG", "key": topic}
                await ask_namesrv(cluster, RequestCode.PUT_KV_CONFIG, **key, value="broker-a:4")
            registration = cluster.standalone.broker.parts.registration
            assert await registration.register() == 1
            assert [await order(cluster, topic) for topic in "TUV"] == [True, False, True]
            await ask_namesrv(cluster, RequestCode.DELETE_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="T")
            await registration.register()
            assert await order(cluster, "T")  # a mark stays, as with 5.x

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            assert [await order(cluster, topic) for topic in "TUV"] == [True, False, True]

    run_virtual(first())
    run_virtual(second())


async def test_an_answer_that_cannot_be_read_changes_nothing(cluster):
    registration = cluster.standalone.broker.parts.registration
    version = cluster.standalone.broker.context.topics.data_version
    for body in (b"{", b"[]", b'{"table":{"TBW102":7'):
        registration._mark_ordered(Command(0, body=body))
    assert cluster.standalone.broker.context.topics.data_version == version


async def test_name_servers_are_asked_what_they_know(cluster):
    registration = cluster.standalone.broker.parts.registration
    assert not await registration.is_outdated()
    cluster.standalone.broker.context.topics.data_version.advance(1)
    assert await registration.is_outdated()
    await registration.register()
    assert not await registration.is_outdated()
    registration.name_servers.append("127.0.0.1:1")  # nobody listens there
    assert await registration.is_outdated()
    registration.name_servers.pop()


class Registered:
    """A registration at name servers whose answers the test sets."""

    def __init__(self, root, name_servers=1, tls=None, client_tls=None, **settings):
        self.name_servers = [Peer(tls) for _ in range(name_servers)]
        self.settings = BrokerSettings(broker_name="bk", cluster_name="C1", broker_id=1, **settings)
        self.topics = TopicTable(
            root, self.settings, SYSTEM_CLOCK, lambda changed: self.registration.topics_changed(changed)
        )
        self.client = RemotingClient(tls=client_tls)

    async def __aenter__(self):
        for name_server in self.name_servers:
            name_server.answer(RequestCode.REGISTER_BROKER, reply)
            name_server.answer(RequestCode.UNREGISTER_BROKER, reply)
            await name_server.start()
        self.settings.namesrv_addr = ";".join(peer.address for peer in self.name_servers)
        self.registration = Registration(
            self.settings, self.topics, self.client, address="127.0.0.1:1", ha_address="127.0.0.1:2"
        )
        return self

    async def __aexit__(self, *exc_info):
        await self.registration.stop()
        await self.client.close()
        for name_server in self.name_servers:
            await name_server.stop()


@pytest.mark.skipif(OPENSSL is None, reason=REASON)
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_name_server_that_encrypts_otherwise_is_named(tmp_path, caplog, is_encrypted):
    own = make_certificate(tmp_path, "server")
    server = ServerTls(ServerTlsSettings(mode=TlsMode.ENFORCING, certificate=own.certificate, key=own.key))
    plain = ServerTls(ServerTlsSettings(mode=TlsMode.DISABLED))
    client = ClientTls(Tls(verify=False)) if is_encrypted else None
    async with Registered(tmp_path, tls=plain if is_encrypted else server, client_tls=client) as it:
        assert await it.registration.register() == 0
        address = it.name_servers[0].address
    wants = (
        "does not encrypt; leave TLS out (tls.enable=false)"
        if is_encrypted
        else "wants TLS; use --tls (tls.enable=true)"
    )
    assert f"{address} did not take REGISTER_BROKER (103): {address}: it {wants}" in caplog.text


OWN = {"brokerName": "bk", "brokerAddr": "127.0.0.1:1", "clusterName": "C1"}


async def test_a_broker_that_may_act_as_master_is_soon_missed_and_gives_signs_of_life(tmp_path):
    async with Registered(tmp_path, acts_as_master=True) as it:
        await it.registration.start()
        (name_server,) = it.name_servers
        (fields,) = name_server.asked(RequestCode.REGISTER_BROKER)
        assert (fields["enableActingMaster"], fields["heartbeatTimeoutMillis"]) == ("true", "10000")
        await until(lambda: name_server.asked(RequestCode.QUERY_DATA_VERSION), "a sign of life")
        beat = next(c for c in name_server.requests if c.code == RequestCode.QUERY_DATA_VERSION)
        assert (beat.is_one_way, decode_fields(beat)) == (True, {**OWN, "brokerId": "1"})
        assert decode_as(beat.payload, DataVersion) == it.topics.data_version
        it.settings.old_name_servers = False
        await until(lambda: name_server.asked(RequestCode.BROKER_HEARTBEAT), "another sign of life")
        assert name_server.asked(RequestCode.BROKER_HEARTBEAT) == [OWN]


async def test_other_brokers_are_missed_late_and_give_none(tmp_path):
    async with Registered(tmp_path) as it:
        await it.registration.start()
        (fields,) = it.name_servers[0].asked(RequestCode.REGISTER_BROKER)
        assert fields["enableActingMaster"] == "false" and "heartbeatTimeoutMillis" not in fields
        assert it.registration._beat is None


async def test_the_members_of_a_group_are_those_that_any_name_server_knows(tmp_path):
    async with Registered(tmp_path, name_servers=4) as it:
        refuses, *answering, late = it.name_servers
        refuses.answer(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, lambda command: reply(command, ResponseCode.TOPIC_NOT_EXIST, "no route")
        )
        await late.stop()
        for peer, addresses in zip(answering, ({0: "m:1"}, {0: "m:1", 1: "127.0.0.1:1"}), strict=True):
            brokers = [BrokerData("C1", "bk", addresses), BrokerData("C1", "other", {2: "o:1"})]
            route = msgspec.json.encode(TopicRoute([QueueData("bk", 1, 1, 1)], brokers))
            peer.answer(RequestCode.GET_ROUTEINFO_BY_TOPIC, lambda command, route=route: reply(command, body=route))
        assert await it.registration.members() == {0: "m:1", 1: "127.0.0.1:1"}
        asked = answering[0].asked(RequestCode.GET_ROUTEINFO_BY_TOPIC)
        assert asked == [{"topic": "rmq_sys_SYNC_BROKER_MEMBER_bk", "acceptStandardJsonOnly": "true"}]


def told_topics(name_server):
    """Return the topics of every registration that a name server received."""
    sent = [one for one in name_server.requests if one.code == RequestCode.REGISTER_BROKER]
    bodies = [decode_registration(one.payload, is_compressed=False, version=one.version) for one in sent]
    return [sorted(body.topic_config_serialize_wrapper.topic_config_table) for body in bodies]


@pytest.mark.parametrize("how", ["refused", "connection lost"])
async def test_a_name_server_that_missed_a_change_is_reported_everything_with_the_next_one(tmp_path, how):
    """With only the later change the name server would get the table's version and ignore the missed change."""
    async with Registered(tmp_path, name_servers=2) as it:
        one, other = it.name_servers
        await it.registration.start()
        it.topics.put(TopicConfig("A", perm=6))
        await it.registration.settled()
        if how == "refused":
            one.answer(RequestCode.REGISTER_BROKER, lambda command: reply(command, ResponseCode.SYSTEM_ERROR, "busy"))
        else:
            one.answer(RequestCode.REGISTER_BROKER, lambda command: one.connections[-1].abort())
        it.topics.put(TopicConfig("A", perm=4))
        await it.registration.settled()
        one.answer(RequestCode.REGISTER_BROKER, reply)
        for name in "BC":
            it.topics.put(TopicConfig(name, perm=6))
            await it.registration.settled()
        assert told_topics(one) == [[], ["A"], ["A"], ["A", "B"], ["C"]]
        assert told_topics(other) == [[], ["A"], ["A"], ["B"], ["C"]]


async def test_a_change_that_comes_while_the_first_registration_is_answered_is_reported(tmp_path):
    async with Registered(tmp_path) as it:
        (name_server,) = it.name_servers
        name_server.answer(RequestCode.REGISTER_BROKER, lambda command: None)
        starting = asyncio.ensure_future(it.registration.start())
        await until(lambda: name_server.requests, "the first registration")
        name_server.answer(RequestCode.REGISTER_BROKER, reply)
        it.topics.put(TopicConfig("A"))
        await it.registration.settled()
        assert told_topics(name_server) == [[], ["A"]]
        name_server.connections[-1].send(reply(name_server.requests[0]))
        assert await starting == 1


async def test_a_change_after_the_good_bye_is_not_reported(tmp_path):
    async with Registered(tmp_path) as it:
        await it.registration.start()
        await it.registration.stop()
        it.topics.put(TopicConfig("A"), TopicConfig("B"))
        await it.registration.settled()
        assert told_topics(it.name_servers[0]) == [[]]
