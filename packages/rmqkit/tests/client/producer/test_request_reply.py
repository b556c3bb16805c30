"""Request-reply against our own broker. Source: behaviour.md §3.8, §7.10."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.handlers import PendingReplies
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import MessageIllegal, NotARequest, ReplyTimedOut, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, request
from rmqkit.protocol.compression import Compression, compress
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.send import PushReplyRequest
from rmqkit.standalone import Standalone
from tests.client.messages import received
from tests.client.peers import Cluster

SECONDS = 60_000


class Replying:
    """A standalone, a requesting and a replying producer, and a task that replies to what comes to topic T."""

    def __init__(self, root, answer=lambda message: message.body.upper()):
        self.cluster = Standalone(root / "store")
        self.answer = answer
        self.requests = []

    async def __aenter__(self):
        await self.cluster.start()
        self.producer = Producer("PG", self.cluster.namesrv_address)
        self.replier = Producer("RG", self.cluster.namesrv_address)
        await self.producer.start()
        await self.replier.start()
        self.task = asyncio.create_task(self.reply_to_all())
        return self

    async def __aexit__(self, *exc_info):
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.producer.close()
        await self.replier.close()
        await self.cluster.stop()

    async def reply_to_all(self):
        await self.replier.send(Message(topic="T", body=b"so that the topic exists"))
        async with PullConsumer("CG", self.cluster.namesrv_address) as consumer:
            offsets = dict.fromkeys(await consumer.queues("T"), 0)
            while True:
                for queue in offsets:
                    result = await consumer.pull(queue, offsets[queue])
                    offsets[queue] = result.next_begin_offset
                    for message in result.messages:
                        if "CORRELATION_ID" in message.properties and (body := self.answer(message)) is not None:
                            self.requests.append(message)
                            await self.replier.reply(message, body, properties={"by": "me"})
                await asyncio.sleep(0.005)


async def test_every_request_gets_its_own_reply(tmp_path):
    async with Replying(tmp_path) as it:
        requests = [it.producer.request(Message(topic="T", body=b"a%d" % i), timeout=SECONDS / 1000) for i in range(20)]
        replies = await asyncio.gather(*requests)
        assert [reply.body for reply in replies] == [b"A%d" % i for i in range(20)]
        assert {reply.properties["by"] for reply in replies} == {"me"}
        assert {request.properties["TTL"] for request in it.requests} == {str(SECONDS)}
        assert {reply.properties["MSG_TYPE"] for reply in replies} == {"reply"}
        assert all(int(reply.properties["ARRIVE_TIME"]) >= reply.born_timestamp for reply in replies)


async def test_a_large_reply_travels_compressed(tmp_path):
    async with Replying(tmp_path, lambda message: b"0123456789" * 10_000) as it:
        reply = await it.producer.request(Message(topic="T", body=b"x"), timeout=SECONDS / 1000)
        assert reply.body == b"0123456789" * 10_000


async def test_without_a_reply_the_error_says_that_the_message_is_stored(tmp_path):
    async with Replying(tmp_path, lambda message: None) as it:
        with pytest.raises(ReplyTimedOut) as caught:
            await it.producer.request(Message(topic="T", body=b"x"), timeout=1.5)
        assert caught.value.code == 10006
        assert str(caught.value) == (
            "the request for topic T was stored, and no reply came within 1500 ms: does a consumer of the topic reply?"
        )


async def test_a_request_that_is_not_sent_fails_as_a_send():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        with pytest.raises(MessageIllegal):
            await producer.request(Message(topic="T", body=b""))


async def test_a_reply_to_who_is_gone_fails_with_the_brokers_words(tmp_path):
    async with Replying(tmp_path) as it:
        lost = received(0, properties={"CLUSTER": "DefaultCluster", "CORRELATION_ID": "c", "REPLY_TO_CLIENT": "nobody"})
        with pytest.raises(SendFailed, match="push reply message fail, channel of <nobody> not found"):
            await it.replier.reply(lost, b"x")


@pytest.mark.parametrize("missing", ["CLUSTER", "CORRELATION_ID", "REPLY_TO_CLIENT"])
async def test_only_requests_are_replied_to(missing):
    properties = dict.fromkeys({"CLUSTER", "CORRELATION_ID", "REPLY_TO_CLIENT"} - {missing}, "x")
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        with pytest.raises(NotARequest, match=f"create reply message fail, message id-0 has no property {missing}"):
            await producer.reply(received(0, properties=properties), b"x")


def pushed(correlation_id: str, body: bytes, sys_flag: int = 0) -> Command:
    header = PushReplyRequest(
        "RG", "R", "TBW102", 4, 0, sys_flag, 0, 0, f"CORRELATION_ID\x01{correlation_id}\x02",
        born_host="127.0.0.1:1", store_host="127.0.0.1:2", store_timestamp=0,
    )  # fmt: skip
    return request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body)


async def test_late_doubled_and_unreadable_replies_harm_nobody():
    pending = PendingReplies(SYSTEM_CLOCK)
    with pending.expect("me", 1000) as (properties, reply):
        own = properties["CORRELATION_ID"]
        assert pending.accept_reply(None, pushed("another", b"x")).code == ResponseCode.SUCCESS
        unreadable = pending.accept_reply(None, pushed(own, b"no zlib", 0x301))
        assert (unreadable.code, unreadable.remark) == (ResponseCode.SYSTEM_ERROR, "process reply message fail")
        assert not reply.done()
        assert pending.accept_reply(None, pushed(own, compress(b"first", Compression.ZLIB, 5), 0x301)).code == 0
        assert pending.accept_reply(None, pushed(own, b"second")).code == 0
        assert (await reply).body == b"first"
    assert pending.accept_reply(None, pushed(own, b"late")).code == 0
