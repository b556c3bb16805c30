"""A client that asks the name servers right after its heartbeat finds its group's retry topic there, and right after a
send the topic that was made for it."""

from __future__ import annotations

import msgspec

from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.clients import ConsumerData, HeartbeatData
from rmqkit.protocol.schemas.send import SendMessageRequest
from rmqkit.protocol.schemas.topics import RouteRequest
from rmqkit.remoting.client import RemotingClient
from rmqkit.standalone import Standalone


async def test_name_servers_know_the_retry_topic_when_a_heartbeat_is_answered(tmp_path):
    client = RemotingClient()
    async with Standalone(tmp_path / "store") as both:
        found = []
        for number in range(20):
            group = f"told-{number}"
            data = HeartbeatData(clientID=f"c{number}", consumerDataSet=[ConsumerData(group_name=group)])
            beat = request(RequestCode.HEART_BEAT, body=msgspec.json.encode(data))
            assert (await client.call(both.broker_address, beat, 60_000)).code == ResponseCode.SUCCESS
            route = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest(topic=f"%RETRY%{group}"))
            found.append((await client.call(both.namesrv_address, route, 60_000)).code)
        assert found == [ResponseCode.SUCCESS] * 20
        await client.close()


async def test_name_servers_know_a_new_topic_when_its_first_send_is_answered(tmp_path):
    client = RemotingClient()
    async with Standalone(tmp_path / "store") as both:
        found = []
        for number in range(20):
            topic = f"sent-{number}"
            sent = SendMessageRequest(
                producer_group="g",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=0,
                flag=0,
            )
            send = request(RequestCode.SEND_MESSAGE, sent, b"body")
            assert (await client.call(both.broker_address, send, 60_000)).code == ResponseCode.SUCCESS
            route = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, RouteRequest(topic=topic))
            found.append((await client.call(both.namesrv_address, route, 60_000)).code)
        assert found == [ResponseCode.SUCCESS] * 20
        await client.close()
