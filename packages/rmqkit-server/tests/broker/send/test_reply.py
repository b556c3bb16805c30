"""Request-reply: a reply reaches the producer that asked, is stored, and fails with the reference's remarks."""

from __future__ import annotations

import asyncio

import msgspec

from rmqkit.broker.durability import Durability, Outcome
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields, decode_header, reply, request
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.clients import HeartbeatData, ProducerData, UnregisterClientRequest
from rmqkit.protocol.schemas.send import PushReplyRequest, SendMessageResponse
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.store.settings import FlushDiskType
from tests.broker.cluster import Cluster
from tests.waiting import SECONDS

TOPIC = "DefaultCluster_REPLY_TOPIC"
TO_ME = "REPLY_TO_CLIENT\x01me@1\x02CORRELATION_ID\x01cc\x02MSG_TYPE\x01reply\x02"
STAMPS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}


class Requester:
    """A producer that waits for replies."""

    def __init__(self, cluster, code=ResponseCode.SUCCESS):
        self.code = code
        self.pushed: list[Command] = []
        dispatch = Router()
        dispatch.register(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, self.take)
        self.client = RemotingClient(dispatch)
        self.cluster = cluster

    def take(self, connection, command):
        self.pushed.append(command)
        return None if self.code is None else reply(command, self.code)

    async def register(self, *groups, client_id="me@1"):
        data = HeartbeatData(clientID=client_id, producerDataSet=[ProducerData(group) for group in groups])
        await self.cluster.call(RequestCode.HEART_BEAT, body=msgspec.json.encode(data), client=self.client)

    async def __aenter__(self):
        await self.register("requesters")
        return self

    async def __aexit__(self, *exc_info):
        await self.client.close()


async def send_reply(cluster, properties=TO_ME, body=b"answer", **fields):
    fields = {"code": RequestCode.SEND_REPLY_MESSAGE_V2, "topic": TOPIC, **fields}
    return await cluster.send(body=body, properties=properties, **fields)


async def test_a_reply_is_pushed_to_who_asked_and_stored(cluster):
    async with Requester(cluster) as requester:
        answered = await send_reply(cluster, flag=7, reconsume_times=2)
        answer = decode_header(answered, SendMessageResponse)
        assert (answered.code, answered.remark, answer.queue_id, answer.queue_offset) == (0, None, 0, 0)
        (pushed,) = requester.pushed
        header = decode_header(pushed, PushReplyRequest)
        assert (pushed.payload, header.topic, header.producer_group, header.flag) == (b"answer", TOPIC, "p", 7)
        assert (header.born_timestamp, header.reconsume_times) == (1_700_000_000_000, 2)
        assert header.born_host.startswith("127.0.0.1:")
        assert header.store_host == cluster.standalone.broker_address
        properties = decode_properties(header.properties.encode())
        asked = {"REPLY_TO_CLIENT": "me@1", "CORRELATION_ID": "cc", "MSG_TYPE": "reply", **STAMPS}
        assert properties.pop("PUSH_REPLY_TIME") == str(header.store_timestamp)
        assert properties == asked
    (message,) = read_messages((await cluster.pull(topic=TOPIC)).body)
    assert (message.offset_msg_id, message.body, message.flag) == (answer.msg_id, b"answer", 7)
    assert message.properties == asked


async def test_the_long_form_of_the_header_does_the_same(cluster):
    async with Requester(cluster) as requester:
        fields = {"producerGroup": "p", "topic": TOPIC, "queueId": "-1", "sysFlag": "0", "bornTimestamp": "1"}
        fields |= {"flag": "0", "properties": TO_ME}
        command = Command(RequestCode.SEND_REPLY_MESSAGE, fields=fields, body=b"x")
        answer = await cluster.client.call(cluster.standalone.broker_address, command, 60_000)
        assert (answer.code, len(requester.pushed)) == (0, 1)


async def test_without_storing_the_answer_has_no_id(tmp_path):
    async with Cluster(tmp_path / "store", broker={"store_replies": False}) as cluster:
        async with Requester(cluster):
            answered = await send_reply(cluster)
            assert decode_fields(answered) == {"msgId": "0", "queueId": "0", "queueOffset": "0", **STAMPS}
            lost = await send_reply(cluster, "REPLY_TO_CLIENT\x01you@1\x02")
            assert decode_fields(lost) == STAMPS
        assert (await cluster.pull(topic=TOPIC)).code == ResponseCode.PULL_NOT_FOUND


async def test_a_reply_that_reaches_nobody_says_so_and_is_stored(cluster):
    async with Requester(cluster, code=ResponseCode.SYSTEM_ERROR):
        for properties, remark in (
            ("REPLY_TO_CLIENT\x01you@1\x02", "push reply message fail, channel of <you@1> not found."),
            ("", "reply message properties[REPLY_TO_CLIENT] is null"),
            (TO_ME, "push reply message to me@1fail."),
        ):
            answered = await send_reply(cluster, properties)
            assert (answered.code, answered.remark) == (1, remark)
            assert decode_fields(answered).keys() == {"msgId", "queueId", "queueOffset", *STAMPS}
    assert len(read_messages((await cluster.pull(topic=TOPIC)).body)) == 3


async def test_a_requester_that_does_not_answer_is_waited_for_only_so_long(monkeypatch, cluster):
    monkeypatch.setattr("rmqkit.broker.send.reply._PUSH_TIMEOUT_MS", 50)

    async with Requester(cluster, code=None):
        answered = await send_reply(cluster)
        assert (answered.code, answered.remark) == (1, "push reply message to me@1fail.")


async def test_a_requester_that_left_is_not_found_and_one_that_came_back_is(cluster):
    remark = "push reply message fail, channel of <me@1> not found."

    async with Requester(cluster) as requester:
        await requester.register("more")
        header = UnregisterClientRequest(clientID="me@1", producerGroup="requesters")
        await cluster.call(RequestCode.UNREGISTER_CLIENT, header, client=requester.client)
        assert (await send_reply(cluster)).code == 0  # it is still in the other group
        header = UnregisterClientRequest(clientID="me@1", producerGroup="more")
        await cluster.call(RequestCode.UNREGISTER_CLIENT, header, client=requester.client)
        assert (await send_reply(cluster)).remark == remark
        await requester.register("requesters")
        assert (await send_reply(cluster)).code == 0
    async with asyncio.timeout(SECONDS):
        while (await send_reply(cluster)).remark != remark:  # until the broker has seen that it closed
            await asyncio.sleep(0.01)


async def test_a_reply_passes_the_checks_of_a_send(cluster):
    for fields, code, remark in (
        ({"topic": ""}, 29, "The specified topic is blank."),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, 16, "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden."),
        ({"topic": "new", "default_topic": ""}, 17, None),
        ({"queue_id": 9}, 29, None),
        ({"body": b""}, 1, "the message has no body"),
    ):
        answered = await send_reply(cluster, **fields)
        assert answered.code == code
        assert remark is None or answered.remark == remark
    for fields in ({}, {"b": TOPIC}, {"b": TOPIC, "e": "x", "f": "0", "g": "1", "h": "0"}):
        command = Command(RequestCode.SEND_REPLY_MESSAGE_V2, fields=fields, body=b"x")
        answered = await cluster.client.call(cluster.standalone.broker_address, command, 60_000)
        assert answered.code == ResponseCode.SYSTEM_ERROR


async def test_a_one_way_reply_is_pushed_and_not_answered(cluster):
    async with Requester(cluster) as requester:
        fields = {"b": TOPIC, "e": "0", "f": "0", "g": "1", "h": "0", "i": TO_ME}
        command = request(RequestCode.SEND_REPLY_MESSAGE_V2, body=b"x", one_way=True)
        command.fields = fields
        await cluster.client.send_one_way(cluster.standalone.broker_address, command, 60_000)
        async with asyncio.timeout(SECONDS):
            while not requester.pushed:
                await asyncio.sleep(0.002)


async def test_a_reply_whose_flush_failed_counts_as_not_stored(monkeypatch, tmp_path):
    async def failed():
        return Outcome.FAILED, "flush failed"

    async with (
        Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
        Requester(cluster) as requester,
    ):
        monkeypatch.setattr(Durability, "has", lambda it, end: False)
        monkeypatch.setattr(Durability, "wait", lambda it, end: failed())
        answer = await send_reply(cluster)
        assert (answer.code, len(requester.pushed)) == (0, 1)  # it was pushed all the same
        assert decode_header(answer, SendMessageResponse).msg_id == "0"


async def test_under_sync_flush_a_stored_reply_is_on_disk_when_it_is_answered(tmp_path):
    async with (
        Cluster(tmp_path / "store", store={"flush_disk_type": FlushDiskType.SYNC_FLUSH}) as cluster,
        Requester(cluster),
    ):
        assert (await send_reply(cluster)).code == 0
        store = cluster.standalone.broker.context.store
        assert store.durable_offset == store.max_physical_offset > 0
