"""A name server over its socket (remoting.md §4.2)."""

from __future__ import annotations

import asyncio
import json
import zlib

import pytest

from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.headers.registration import BrokerIdentity, RegisterBrokerRequest
from rmqkit.protocol.headers.topics import TopicRequest
from rmqkit.remoting.client import RemotingClient

BODY = json.dumps(
    {
        "filterServerList": [],
        "topicConfigSerializeWrapper": {
            "dataVersion": {"counter": 2, "stateVersion": 0, "timestamp": 1795224574705},
            "topicConfigTable": {
                name: {"topicName": name, "perm": 6, "readQueueNums": 4, "writeQueueNums": 4} for name in ("T", "U")
            },
        },
    }
).encode()


def run(scenario):
    async def main():
        server = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1"))
        await server.start()
        client = RemotingClient()

        async def call(code, header=None, body=b"", version=493):
            command = request(code, header, body)
            command.version = version
            return await client.call(server.address, command, 5000)

        try:
            await scenario(call, server)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


def register_header(**changes):
    fields = {"broker_name": "broker-a", "broker_addr": "127.0.0.1:21911", "cluster_name": "DefaultCluster"}
    return RegisterBrokerRequest(**{**fields, "broker_id": 0, "ha_server_addr": "127.0.0.1:21912", **changes})


def test_a_registered_topic_has_a_route_in_strict_json_for_new_and_dialect_for_old_clients():
    async def scenario(call, server):
        crc = zlib.crc32(BODY) & 0x7FFFFFFF
        registered = await call(RequestCode.REGISTER_BROKER, register_header(body_crc32=crc), BODY)
        assert (registered.code, decode_fields(registered)) == (ResponseCode.SUCCESS, {})
        strict = await call(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("T"))
        assert json.loads(strict.body) == {
            "brokerDatas": [
                {
                    "brokerAddrs": {"0": "127.0.0.1:21911"},
                    "brokerName": "broker-a",
                    "cluster": "DefaultCluster",
                    "enableActingMaster": False,
                }
            ],
            "filterServerTable": {},
            "queueDatas": [
                {"brokerName": "broker-a", "perm": 6, "readQueueNums": 4, "topicSysFlag": 0, "writeQueueNums": 4}
            ],
        }
        old = await call(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("T"), version=399)
        assert b'"brokerAddrs":{0:"127.0.0.1:21911"}' in old.body
        asked = await call(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("T", accept_standard_json_only=True), version=399
        )
        assert json.loads(asked.body) == json.loads(strict.body)

    run(scenario)


def test_an_unknown_topic_gets_the_reference_s_remark():
    async def scenario(call, server):
        answer = await call(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("nope"))
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        assert answer.remark == (
            "No topic route info in name server for the topic: nope\n"
            "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
        )

    run(scenario)


@pytest.mark.parametrize(
    ("body", "header", "remark"),
    [
        (BODY, {"body_crc32": 1}, "crc32 not match"),
        (BODY.replace(b'"U"', b'"T"'), {}, "register broker failed"),
        (b"{oops", {}, "BodyError: JSON body: expected"),
    ],
)
def test_bad_registrations_are_refused(body, header, remark):
    async def scenario(call, server):
        answer = await call(RequestCode.REGISTER_BROKER, register_header(**header), body)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark.startswith(remark)
        assert server.routes.topics() == []

    run(scenario)


def test_a_slave_learns_its_master():
    async def scenario(call, server):
        await call(RequestCode.REGISTER_BROKER, register_header(), BODY)
        slave = register_header(broker_id=1, broker_addr="127.0.0.1:21921")
        answer = await call(RequestCode.REGISTER_BROKER, slave, BODY)
        assert decode_fields(answer) == {"haServerAddr": "127.0.0.1:21912", "masterAddr": "127.0.0.1:21911"}

    run(scenario)


def test_a_data_version_is_compared():
    async def scenario(call, server):
        identity = BrokerIdentity("broker-a", "127.0.0.1:21911", "DefaultCluster", 0)
        same = b'{"counter":2,"stateVersion":0,"timestamp":1795224574705}'
        before = await call(RequestCode.QUERY_DATA_VERSION, identity, same)
        assert (decode_fields(before), before.body) == ({"changed": "true"}, b"")
        await call(RequestCode.REGISTER_BROKER, register_header(), BODY)
        after = await call(RequestCode.QUERY_DATA_VERSION, identity, same)
        assert (decode_fields(after), json.loads(after.body)) == ({"changed": "false"}, json.loads(same))

    run(scenario)


def test_a_broker_is_gone_with_its_good_bye_or_its_connection():
    async def scenario(call, server):
        await call(RequestCode.REGISTER_BROKER, register_header(), BODY)
        await call(RequestCode.UNREGISTER_BROKER, BrokerIdentity("broker-a", "127.0.0.1:21911", "DefaultCluster", 0))
        assert server.routes.topics() == []
        other = RemotingClient()
        await other.call(server.address, request(RequestCode.REGISTER_BROKER, register_header(), BODY), 5000)
        assert server.routes.topics() == ["T", "U"]
        await other.close()
        while server.routes.topics():
            await asyncio.sleep(0)

    run(scenario)
