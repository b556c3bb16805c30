"""Requests of brokers and clients, over the socket (remoting.md §4.2; behaviour.md §1.3–§1.6)."""

from __future__ import annotations

import json
import zlib

import pytest

from rmqkit.errors import ConnectionLost
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, header_fields, request
from rmqkit.protocol.schemas.brokers import (
    BrokerHeartbeat,
    BrokerIdentity,
    BrokerMemberGroupRequest,
    RegisterBrokerBody,
    compress_registration,
)
from rmqkit.protocol.schemas.topics import (
    DataVersion,
    DeleteTopicRequest,
    KVPut,
    RegisterTopicRequest,
    RouteRequest,
    TopicConfig,
    TopicConfigTable,
    TopicQueueMappingInfo,
)
from rmqkit.remoting.client import RemotingClient
from rmqkit.testing.clock import StandingClock
from tests.broker.stranger import Stranger
from tests.elsewhere import BELIEVES_US
from tests.namesrv.running import CALL_TIMEOUT_MS, register_header, registration_body, serving, until

IDENTITY = BrokerIdentity("broker-a", "127.0.0.1:21911", "DefaultCluster", 0)
ROUTE = RequestCode.GET_ROUTEINFO_BY_TOPIC
STRICT_ROUTE = json.loads(
    b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:21911"},"brokerName":"broker-a","cluster":"DefaultCluster",'
    b'"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
"""As in remoting.md §6.4.2."""


async def route_of(ask, topic, **fields):
    return (await ask.result(ROUTE, RouteRequest(topic), fields=fields))[3]


# -- routes


async def test_a_route_is_strict_json_for_new_and_dialect_for_old_clients(ask):
    await ask.register(body_crc32=zlib.crc32(registration_body()) & 0x7FFFFFFF)
    assert json.loads((await ask(ROUTE, RouteRequest("T"))).body) == STRICT_ROUTE
    assert json.loads((await ask(ROUTE, RouteRequest("T"), version=401)).body) == STRICT_ROUTE
    old = await ask(ROUTE, RouteRequest("T"), version=399)
    assert b'"brokerAddrs":{0:"127.0.0.1:21911"}' in old.body
    asked = await ask(ROUTE, RouteRequest("T", accept_standard_json_only=True), version=399)
    assert json.loads(asked.body) == STRICT_ROUTE


async def test_an_unknown_topic_gets_the_reference_s_remark(tmp_path):
    async with serving(tmp_path) as ask:
        answer = await ask(ROUTE, RouteRequest("nope"))
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        assert answer.remark == (
            "No topic route info in name server for the topic: nope\n"
            "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
        )


async def test_routes_wait_for_brokers_after_the_start(tmp_path):
    clock = StandingClock(1000)

    async with serving(tmp_path, clock=clock, need_wait_for_service=True) as ask:
        await ask.register()
        clock.ms += 44_999
        answer = await ask(ROUTE, RouteRequest("T"))
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "name server not ready")
        clock.ms += 1
        assert (await ask(ROUTE, RouteRequest("T"))).code == ResponseCode.SUCCESS


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_the_order_configuration_of_a_topic_is_reported_when_enabled(tmp_path, is_enabled):
    async with serving(tmp_path, order_message_enable=is_enabled) as ask:
        await ask.register()
        await ask(RequestCode.PUT_KV_CONFIG, KVPut("broker-a:4", "ORDER_TOPIC_CONFIG", "T"))
        assert (await route_of(ask, "T")).get("orderTopicConf") == ("broker-a:4" if is_enabled else None)
        assert "orderTopicConf" not in await route_of(ask, "U")


@pytest.mark.parametrize(("supported", "shown"), [(True, {"0": "10.0.0.3:1"}), (False, {"1": "10.0.0.3:1"})])
async def test_a_masterless_group_has_an_acting_master_when_supported(tmp_path, supported, shown):
    async with serving(tmp_path, support_acting_master=supported) as ask:
        await ask.register(broker_id=1, broker_addr="10.0.0.3:1", enable_acting_master=True)
        route = await route_of(ask, "T")
        assert [(broker["brokerAddrs"], broker["enableActingMaster"]) for broker in route["brokerDatas"]] == [
            (shown, True)
        ]
        assert [queue["perm"] for queue in route["queueDatas"]] == [4]


async def test_a_zone_is_all_a_client_sees_when_it_says_so(ask):
    for name, zone in (("a", "east"), ("b", "west")):
        header = register_header(broker_name=name, broker_addr=f"{name}:1", zone_name=zone)
        await ask(RequestCode.REGISTER_BROKER, header, registration_body())
    near = await route_of(ask, "T", __ZONE_MODE="true", __ZONE_NAME="EAST")
    assert [(broker["brokerName"], broker["zoneName"]) for broker in near["brokerDatas"]] == [("a", "east")]
    assert [queue["brokerName"] for queue in near["queueDatas"]] == ["a"]
    for fields in ({}, {"__ZONE_MODE": "false", "__ZONE_NAME": "east"}, {"__ZONE_MODE": "true"}):
        assert len((await route_of(ask, "T", **fields))["brokerDatas"]) == 2


async def test_static_topics_and_filter_servers_are_in_the_route(ask):
    mapping = {
        "bname": "broker-a",
        "currIdMap": {"0": 0, "1": 1},
        "dirty": False,
        "epoch": 7,
        "scope": "__global__",
        "topic": "T",
        "totalQueues": 2,
    }
    body = json.loads(registration_body(topicQueueMappingInfoMap={"T": mapping}))
    body["filterServerList"] = ["127.0.0.1:30000"]
    await ask.register(body=json.dumps(body).encode())
    route = await route_of(ask, "T")
    assert route["topicQueueMappingByBroker"] == {"broker-a": mapping}
    assert route["filterServerTable"] == {"127.0.0.1:21911": ["127.0.0.1:30000"]}
    old = await ask(ROUTE, RouteRequest("T"), version=399)
    assert b'"currIdMap":{0:0,1:1}' in old.body


# -- registration


@pytest.mark.parametrize(
    ("body", "header", "remark"),
    [
        (registration_body(), {"body_crc32": 1}, "crc32 not match"),
        (registration_body("T"), {}, "register broker failed"),
        (b"{oops", {}, "BodyError: JSON body: expected"),
        (b"{oops", {"compressed": True}, "BodyError: zlib body of 5 bytes is damaged"),
    ],
)
async def test_bad_registrations_are_refused(ask, body, header, remark):
    answer = await ask.register(body=body, **header)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert answer.remark.startswith(remark)
    assert ask.server.routes.topics() == []


@pytest.mark.parametrize("says_compressed", [True, False])
@pytest.mark.parametrize("version", [401, 493])
async def test_a_compressed_registration_is_read_with_any_header(tmp_path, version, says_compressed):
    table = TopicConfigTable(DataVersion(1), {name: TopicConfig(name, 3, 4, 6) for name in ("T", "U")})
    table.topic_queue_mapping_info_map = {"T": TopicQueueMappingInfo(topic="T", bname="broker-a")}
    body = compress_registration(RegisterBrokerBody(["127.0.0.1:30000"], table), version=version)

    async with serving(tmp_path) as ask:
        header = register_header(compressed=says_compressed)
        assert (await ask(RequestCode.REGISTER_BROKER, header, body, version=version)).code == ResponseCode.SUCCESS
        route = await route_of(ask, "T")
        assert [queue["readQueueNums"] for queue in route["queueDatas"]] == [3]
        assert route["filterServerTable"] == {"127.0.0.1:21911": ["127.0.0.1:30000"]}
        assert ("topicQueueMappingByBroker" in route) == (version == 493)


async def test_a_broker_before_3_0_11_sends_its_topics_alone(tmp_path):
    body = json.dumps(json.loads(registration_body())["topicConfigSerializeWrapper"]).encode()

    async with serving(tmp_path) as ask:
        assert (await ask(RequestCode.REGISTER_BROKER, register_header(), body, version=36)).code == 0
        assert ask.server.routes.topics() == ["T", "U"]


async def test_a_registration_without_a_body_has_no_topics_and_a_zero_version(ask):
    assert (await ask.register(body=b"")).code == ResponseCode.SUCCESS
    zero = b'{"counter":0,"stateVersion":0,"timestamp":0}'
    answer = await ask(RequestCode.QUERY_DATA_VERSION, IDENTITY, zero)
    assert (decode_fields(answer), json.loads(answer.body)) == ({"changed": "false"}, json.loads(zero))


async def test_a_slave_learns_its_master(ask):
    assert decode_fields(await ask.register()) == {}
    answer = await ask.register(broker_id=1, broker_addr="127.0.0.1:21921")
    assert decode_fields(answer) == {"haServerAddr": "127.0.0.1:21912", "masterAddr": "127.0.0.1:21911"}


async def test_the_order_topics_come_with_the_answer(ask):
    assert (await ask.register()).body == b""
    put = KVPut("broker-a:4", "ORDER_TOPIC_CONFIG", "T")
    await ask(RequestCode.PUT_KV_CONFIG, put)
    assert (await ask.register()).body == b'{"table":{"T":"broker-a:4"}}'
    await ask(RequestCode.DELETE_KV_CONFIG, fields={"namespace": "ORDER_TOPIC_CONFIG", "key": "T"})
    assert (await ask.register()).body == b'{"table":{}}'
    await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"returnOrderTopicConfigToBroker=false")
    assert (await ask.register()).body == b""


async def test_topics_no_longer_sent_are_forgotten_when_configured(tmp_path):
    async with serving(tmp_path, delete_topic_with_registration=True) as ask:
        await ask.register("T", "U")
        await ask.register(body=registration_body("SELF_TEST_TOPIC", "T", "X", counter=3))
        assert ask.server.routes.topics() == ["SELF_TEST_TOPIC", "T", "X"]


# -- signs of life


async def test_a_data_version_is_compared(ask):
    same = b'{"counter":2,"stateVersion":0,"timestamp":1795224574705}'
    before = await ask(RequestCode.QUERY_DATA_VERSION, IDENTITY, same)
    assert (decode_fields(before), before.body) == ({"changed": "true"}, b"")
    await ask.register()
    after = await ask(RequestCode.QUERY_DATA_VERSION, IDENTITY, same)
    assert (decode_fields(after), after.body) == ({"changed": "false"}, same)
    other = await ask(RequestCode.QUERY_DATA_VERSION, IDENTITY, same.replace(b'"counter":2', b'"counter":3'))
    assert (decode_fields(other), other.body) == ({"changed": "true"}, same)
    assert (await ask(RequestCode.QUERY_DATA_VERSION, IDENTITY)).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize("code", [RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION, None])
async def test_a_sign_of_life_keeps_a_broker_and_silence_removes_it(tmp_path, code):
    clock = StandingClock(1000)

    async with serving(tmp_path, clock=clock) as ask:
        connection = await ask.client.connection(ask.server.address)
        await ask.register(heartbeat_timeout_millis=1000)
        clock.ms += 900
        if code == RequestCode.BROKER_HEARTBEAT:
            heartbeat = BrokerHeartbeat("DefaultCluster", "127.0.0.1:21911", "broker-a")
            assert (await ask(code, heartbeat)).code == ResponseCode.SUCCESS
        elif code is not None:
            connection.send(request(code, IDENTITY, b'{"counter":2}', one_way=True))
            await ask(RequestCode.GET_BROKER_CLUSTER_INFO)
        clock.ms += 200
        ask.server.drop_silent()
        if code is not None:
            assert ask.server.routes.topics() == ["T", "U"]
            clock.ms += 900
            ask.server.drop_silent()
        await until(lambda: not ask.server.routes.topics())
        await connection.closed


async def test_the_heartbeat_of_an_unknown_broker_is_answered(ask):
    answer = await ask(RequestCode.BROKER_HEARTBEAT, BrokerHeartbeat("C", "127.0.0.1:1", "nobody"))
    assert answer.code == ResponseCode.SUCCESS
    assert ask.server.routes.clusters().cluster_addr_table == {}


async def test_the_scan_runs_by_itself(tmp_path):
    clock = StandingClock(1000)

    async with serving(tmp_path, clock=clock, scan_interval_ms=100) as ask:
        await ask.register()
        clock.ms += 120_001
        await until(lambda: not ask.server.routes.topics())


# -- leaving


async def test_a_broker_is_gone_with_its_good_bye(ask):
    await ask.register()
    assert (await ask(RequestCode.UNREGISTER_BROKER, IDENTITY)).code == ResponseCode.SUCCESS
    await until(lambda: not ask.server.routes.topics())


async def test_a_broker_is_gone_with_its_connection(ask):
    other = RemotingClient()
    register = request(RequestCode.REGISTER_BROKER, register_header(), registration_body())
    await other.call(ask.server.address, register, CALL_TIMEOUT_MS)
    assert ask.server.routes.topics() == ["T", "U"]
    await other.close()
    await until(lambda: not ask.server.routes.topics())


async def test_a_good_bye_that_does_not_fit_the_queue_is_refused(tmp_path):
    async with serving(tmp_path, unregister_queue_capacity=1) as ask:
        connection = await ask.client.connection(ask.server.address)
        calls = [connection.call(request(RequestCode.UNREGISTER_BROKER, IDENTITY), CALL_TIMEOUT_MS) for _ in range(3)]
        answers = [await call for call in calls]  # one write, so one tick at the server
        assert [(answer.code, answer.remark) for answer in answers] == [(0, None), (1, None), (1, None)]


# -- groups, clusters, single topics


async def test_the_members_of_a_group_have_their_true_ids(tmp_path):
    async with serving(tmp_path, support_acting_master=True) as ask:
        await ask.register(broker_id=1, enable_acting_master=True)
        group = await ask(RequestCode.GET_BROKER_MEMBER_GROUP, BrokerMemberGroupRequest("C", "broker-a"))
        assert group.body == (
            b'{"brokerMemberGroup":{"brokerAddrs":{1:"127.0.0.1:21911"},"brokerName":"broker-a","cluster":"C"}}'
        )
        nobody = await ask(RequestCode.GET_BROKER_MEMBER_GROUP, BrokerMemberGroupRequest("C", "nobody"))
        assert nobody.body == b'{"brokerMemberGroup":{"brokerAddrs":{},"brokerName":"nobody","cluster":"C"}}'


async def test_brokers_are_notified_from_where_each_member_of_a_group_registered(tmp_path):
    async with serving(tmp_path, **BELIEVES_US) as ask:
        group = "rmq_sys_SYNC_BROKER_MEMBER_broker-a"
        await ask.register("T", group)
        assert decode_fields(await ask(ROUTE, RouteRequest("T"))) == {}
        slave = register_header(broker_id=1, broker_addr="10.0.0.3:1")
        async with Stranger(ask.server.address, b"PROXY TCP4 10.1.2.3 10.0.0.1 5000 9876\r\n") as elsewhere:
            fields = header_fields(slave)
            assert (await elsewhere.ask(RequestCode.REGISTER_BROKER, registration_body(), **fields)).code == 0
            told = decode_fields(await ask(ROUTE, RouteRequest(group)))
            assert told == {"rmqRegisteredFrom": '{"10.0.0.3:1":"10.1.2.3","127.0.0.1:21911":"127.0.0.1"}'}


async def test_clusters_are_reported_in_the_dialect(ask):
    await ask.register()
    answer = await ask(RequestCode.GET_BROKER_CLUSTER_INFO)
    assert b'"brokerAddrs":{0:"127.0.0.1:21911"}' in answer.body
    assert b'"clusterAddrTable":{"DefaultCluster":["broker-a"]}' in answer.body


@pytest.mark.parametrize("flag", ["topicSysFlag", "topicSynFlag"])
async def test_one_topic_is_registered_by_its_queues(tmp_path, flag):
    queue = {"brokerName": "broker-a", "perm": 6, "readQueueNums": 2, "writeQueueNums": 2, flag: 1}

    async with serving(tmp_path) as ask:
        await ask.register()
        body = json.dumps({"queueDatas": [queue]}).encode()
        answer = await ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, RegisterTopicRequest("NEW"), body)
        assert answer.code == ResponseCode.SUCCESS
        (known,) = (await route_of(ask, "NEW"))["queueDatas"]
        assert known == {name: value for name, value in queue.items() if name != flag} | {"topicSysFlag": 1}
        assert (await ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("NEW"))).code == 0
        assert "NEW" not in ask.server.routes.topics()


@pytest.mark.parametrize("code", [301, 302, 12345])
async def test_codes_nobody_sends_any_more_are_not_supported(ask, code):
    answer = await ask(code)
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert answer.remark == f" request type {code} not supported"


async def test_a_stopped_server_answers_nobody(ask):
    connection = await ask.client.connection(ask.server.address)
    await ask.server.stop()
    with pytest.raises(ConnectionLost):
        await connection.call(request(RequestCode.GET_BROKER_CLUSTER_INFO), CALL_TIMEOUT_MS)
