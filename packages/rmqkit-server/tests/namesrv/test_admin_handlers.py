"""Operators' requests, over the socket (behaviour.md §1.7; remoting.md §4.2)."""

from __future__ import annotations

import json

import pytest

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.schemas.topics import (
    BrokerNameRequest,
    ClusterRequest,
    DeleteTopicRequest,
    KVKey,
    KVNamespace,
    KVPut,
    RouteRequest,
)
from rmqkit.remoting.address import AdminAddresses
from tests.elsewhere import BELIEVES_US, ask_from_elsewhere
from tests.namesrv.running import register_header, registration_body, serving

OK = ResponseCode.SUCCESS
ERROR = ResponseCode.SYSTEM_ERROR
LISTS = [
    (RequestCode.GET_TOPICS_BY_CLUSTER, ClusterRequest("DefaultCluster")),
    (RequestCode.GET_UNIT_TOPIC_LIST, None),
    (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, None),
    (RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, None),
]
GUARDED = [
    (RequestCode.PUT_KV_CONFIG, KVPut("v", "NS", "k"), b""),
    (RequestCode.DELETE_KV_CONFIG, KVKey("NS", "k"), b""),
    (RequestCode.WIPE_WRITE_PERM_OF_BROKER, BrokerNameRequest("broker-a"), b""),
    (RequestCode.ADD_WRITE_PERM_OF_BROKER, BrokerNameRequest("broker-a"), b""),
    (RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("T"), b""),
    (RequestCode.UPDATE_NAMESRV_CONFIG, None, b"orderMessageEnable=true"),
]


async def test_kv_values_are_put_read_listed_and_deleted(tmp_path):
    async with serving(tmp_path) as ask:
        assert await ask.result(RequestCode.PUT_KV_CONFIG, KVPut("v1", "NS", "k")) == (OK, None, {}, None)
        await ask(RequestCode.PUT_KV_CONFIG, KVPut("v2", "NS", "l"))
        assert await ask.result(RequestCode.GET_KV_CONFIG, KVKey("NS", "k")) == (OK, None, {"value": "v1"}, None)
        listed = await ask.result(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace("NS"))
        assert listed == (OK, None, {}, {"table": {"k": "v1", "l": "v2"}})
        assert json.loads((tmp_path / "kvConfig.json").read_bytes()) == {"configTable": {"NS": {"k": "v1", "l": "v2"}}}
        for key in ("k", "k", "l"):
            assert (await ask(RequestCode.DELETE_KV_CONFIG, KVKey("NS", key))).code == OK
        emptied = await ask.result(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace("NS"))
        assert emptied == (OK, None, {}, {"table": {}})


async def test_what_is_not_there_is_said_in_the_reference_s_words(ask):
    missing = await ask(RequestCode.GET_KV_CONFIG, KVKey("NS", "k"))
    assert (missing.code, missing.remark) == (ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: NS Key: k")
    missing = await ask(RequestCode.GET_KVLIST_BY_NAMESPACE, KVNamespace("NS"))
    assert (missing.code, missing.remark) == (ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: NS")
    for header in (KVPut("v", None, "k"), KVPut("v", "NS", None)):
        refused = await ask(RequestCode.PUT_KV_CONFIG, header)
        assert (refused.code, refused.remark) == (ERROR, "namespace or key is null")
    assert (await ask(RequestCode.DELETE_KV_CONFIG, KVKey("NS", "k"))).code == OK


async def test_kv_values_outlive_the_server(tmp_path):
    async with serving(tmp_path) as ask:
        await ask(RequestCode.PUT_KV_CONFIG, KVPut("broker-a:4", "ORDER_TOPIC_CONFIG", "T"))
    async with serving(tmp_path) as ask:
        answer = await ask(RequestCode.GET_KV_CONFIG, KVKey("ORDER_TOPIC_CONFIG", "T"))
        assert decode_fields(answer) == {"value": "broker-a:4"}


async def test_a_value_the_disk_refuses_is_an_error_and_not_there(tmp_path):
    async with serving(tmp_path, kv_config_path=str(tmp_path / "folder" / "kvConfig.json")) as ask:
        (tmp_path / "folder").write_text("not a folder")
        refused = await ask(RequestCode.PUT_KV_CONFIG, KVPut("v", "NS", "k"))
        assert refused.code == ERROR
        assert refused.remark.startswith("StoreUnavailable: cannot write ")
        assert (await ask(RequestCode.GET_KV_CONFIG, KVKey("NS", "k"))).code == ResponseCode.QUERY_NOT_FOUND


async def test_write_permission_is_wiped_and_added(ask):
    await ask.register()
    for code, name, perm in (
        (RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount", 4),
        (RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount", 6),
    ):
        assert decode_fields(await ask(code, BrokerNameRequest("broker-a"))) == {name: "2"}
        assert {queue.perm for topic in ("T", "U") for queue in ask.server.routes.route(topic).queue_datas} == {perm}
        assert decode_fields(await ask(code, BrokerNameRequest("nobody"))) == {name: "0"}


async def test_a_topic_is_deleted_in_one_cluster_or_everywhere(ask):
    await ask.register()
    await ask.register(broker_name="b", broker_addr="10.0.0.2:1", cluster_name="Other")
    await ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest("T", "Other"))
    assert [queue.broker_name for queue in ask.server.routes.route("T").queue_datas] == ["broker-a"]
    for header in (DeleteTopicRequest("U"), DeleteTopicRequest("U"), DeleteTopicRequest("T", "")):
        assert (await ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, header)).code == OK
    assert ask.server.routes.topics() == []


async def test_topics_are_listed(ask):
    await ask.register(body=registration_body("Unit", "Both", flags=3))
    body = registration_body("Sub", "Both", flags=2)
    header = register_header(broker_name="b", broker_addr="10.0.0.2:1", cluster_name="Other")
    await ask(RequestCode.REGISTER_BROKER, header, body)
    for code, header, topics in (
        (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, None, ["Both", "Sub", "Unit"]),
        (RequestCode.GET_TOPICS_BY_CLUSTER, ClusterRequest("Other"), ["Both", "Sub"]),
        (RequestCode.GET_TOPICS_BY_CLUSTER, ClusterRequest("nobody"), []),
        (RequestCode.GET_UNIT_TOPIC_LIST, None, ["Both", "Unit"]),
        (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, None, ["Both", "Sub", "Unit"]),
        (RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, None, ["Sub"]),
    ):
        assert await ask.result(code, header) == (OK, None, {}, {"topicList": topics})


async def test_the_system_topics_are_the_names_of_clusters_and_brokers(ask):
    assert (await ask.result(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS))[3] == {"topicList": []}
    await ask.register()
    assert (await ask.result(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS))[3] == {
        "topicList": ["DefaultCluster", "broker-a"],
        "brokerAddr": "127.0.0.1:21911",
    }


async def test_lists_are_switched_off(ask):
    await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"enableAllTopicList=false\nenableTopicList=false")
    for code, header in [(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, None), *LISTS]:
        answer = await ask(code, header)
        assert (answer.code, answer.remark) == (ERROR, "disable")
    assert (await ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)).code == OK


# -- settings


async def test_settings_are_reported_sorted_a_line_each_as_they_are_now(tmp_path):
    async with serving(tmp_path) as ask:
        lines = (await ask(RequestCode.GET_NAMESRV_CONFIG)).body.decode().splitlines()
        keys = [line.partition("=")[0] for line in lines]
        assert keys == sorted(keys)
        assert {
            "configBlackList=configBlackList;configStorePath;kvConfigPath",
            "deleteTopicWithBrokerRegistration=false",
            "enableAllTopicList=true",
            "enableTopicList=true",
            f"kvConfigPath={tmp_path / 'kvConfig.json'}",
            f"listenPort={ask.server.address.rpartition(':')[2]}",
            "needWaitForService=false",
            "notifyMinBrokerIdChanged=false",
            "orderMessageEnable=false",
            "returnOrderTopicConfigToBroker=true",
            "scanNotActiveBrokerInterval=5000",
            "supportActingMaster=false",
            "unRegisterBrokerQueueCapacity=3000",
            "waitSecondsForService=45",
        } <= set(lines)


async def test_hot_settings_are_changed(ask):
    body = b"# from an operator\nwaitSecondsForService = 7\nsupportActingMaster: true\n"
    assert (await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=body)).code == OK
    lines = (await ask(RequestCode.GET_NAMESRV_CONFIG)).body.decode().splitlines()
    assert {"waitSecondsForService=7", "supportActingMaster=true"} <= set(lines)


ROUTE = RouteRequest("T", accept_standard_json_only=True)


@pytest.mark.parametrize(
    ("change", "question", "after"),
    [
        (b"enableAllTopicList=false", (RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, None), ERROR),
        (b"enableTopicList=false", (RequestCode.GET_UNIT_TOPIC_LIST, None), ERROR),
        (b"needWaitForService=true", (RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE), ERROR),
        (
            b"needWaitForService=true\nwaitSecondsForService=0",
            (RequestCode.GET_ROUTEINFO_BY_TOPIC, ROUTE),
            OK,
        ),
    ],
)
async def test_a_changed_setting_has_its_effect_at_once(ask, change, question, after):
    await ask.register()
    assert (await ask(*question)).code == OK
    assert (await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=change)).code == OK
    assert (await ask(*question)).code == after


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        *(
            (
                f"orderMessageEnable=true\n{key}=x".encode(),
                ResponseCode.NO_PERMISSION,
                "Can not update config in black list.",
            )
            for key in (
                *("configBlackList", "configStorePath", "kvConfigPath", "rocketmqHome", "listenPort"),
                "adminAllowedAddresses",
            )
        ),
        (b"\xff=1", ERROR, "string2Properties error"),
        (b"orderMessageEnable=\\u00zz", ERROR, "string2Properties error"),
        (b"orderMessageEnable=yes", ERROR, "request: orderMessageEnable=yes must be true or false"),
        (b"waitSecondsForService=-1", ERROR, "request: waitSecondsForService=-1 must be a whole number at least 0"),
        (
            b"orderMessageEnable=true\norderMesageEnable=true",
            ERROR,
            "unknown key orderMesageEnable, did you mean orderMessageEnable?; nothing was changed",
        ),
    ],
)
async def test_settings_that_cannot_be_changed_leave_the_others_alone(ask, body, code, remark):
    before = (await ask(RequestCode.GET_NAMESRV_CONFIG)).body
    answer = await ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=body)
    assert (answer.code, answer.remark) == (code, remark)
    assert (await ask(RequestCode.GET_NAMESRV_CONFIG)).body == before


# -- who may


@pytest.mark.parametrize(("code", "header", "body"), GUARDED)
async def test_a_peer_on_another_machine_changes_nothing(tmp_path, code, header, body):
    async with serving(tmp_path, **BELIEVES_US) as ask:
        await ask.register()
        before = (await ask(RequestCode.GET_NAMESRV_CONFIG)).body
        answer = await ask_from_elsewhere(ask.server.address, request(code, header, body))
        assert answer.code == ResponseCode.NO_PERMISSION
        assert answer.remark == (
            "10.1.2.3:5000 may not change this server: adminAllowedAddresses=loopback; "
            "ask at 127.0.0.1 on its machine, or add the address to that setting"
        )
        assert (await ask(RequestCode.GET_NAMESRV_CONFIG)).body == before
        assert {queue.perm for queue in ask.server.routes.route("T").queue_datas} == {6}
        assert not (tmp_path / "kvConfig.json").exists()
        assert (await ask_from_elsewhere(ask.server.address, request(RequestCode.GET_NAMESRV_CONFIG))).code == OK


@pytest.mark.parametrize("addresses", ["any", "loopback,10.1.2.0/24"])
@pytest.mark.parametrize(("code", "header", "body"), GUARDED)
async def test_an_operator_lets_others_change_it(tmp_path, code, header, body, addresses):
    async with serving(tmp_path, admin_addresses=AdminAddresses(addresses), **BELIEVES_US) as ask:
        assert (await ask_from_elsewhere(ask.server.address, request(code, header, body))).code == OK
