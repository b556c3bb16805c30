"""Messages by id and by key. Source: behaviour.md §8.16; remoting.md §4.3.6."""

from __future__ import annotations

import contextlib

import pytest

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.errors import ClientError, NoRoute, PeerRefused
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.message import Message
from rmqkit.protocol.record import pack_host
from rmqkit.standalone import Standalone
from tests.client.peers import Cluster


@contextlib.asynccontextmanager
async def stored(root, *messages):
    """Messages in our own broker, what their sends gave, and a consumer."""
    async with Standalone(root / "store") as cluster:
        async with Producer("PG", cluster.namesrv_address) as producer:
            sent = [await producer.send(message) for message in messages]
        async with PullConsumer("CG", cluster.namesrv_address) as consumer:
            yield sent, consumer


def keyed(body, *keys):
    return Message(topic="T", body=body, keys=keys)


async def test_a_message_is_found_by_either_id(tmp_path):
    async with stored(tmp_path, keyed(b"0"), keyed(b"1")) as (sent, consumer):
        for msg_id in (sent[1].offset_msg_id, sent[1].msg_id):
            found = await consumer.view_message("T", msg_id)
            assert (found.body, found.msg_id, found.broker_name) == (b"1", sent[1].msg_id, sent[1].queue.broker_name)


async def test_an_unknown_id_finds_nothing(tmp_path):
    async with stored(tmp_path, keyed(b"0")) as (sent, consumer):
        elsewhere = sent[0].offset_msg_id[:16] + f"{1 << 40:016X}"
        for msg_id in (elsewhere, "0" * 32, "no id"):
            assert await consumer.view_message("T", msg_id) is None


async def test_the_message_of_an_id_has_to_be_of_the_topic(tmp_path):
    other = Message(topic="Other", body=b"1")
    async with stored(tmp_path, keyed(b"0"), other) as (sent, consumer):
        assert await consumer.view_message("T", sent[1].offset_msg_id) is None
        assert (await consumer.view_message("Other", sent[1].offset_msg_id)).body == b"1"


async def test_an_id_of_an_address_that_is_no_broker_is_not_asked_there():
    async with Cluster() as cluster, Cluster() as elsewhere:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.QUERY_MESSAGE, lambda command: reply(command, ResponseCode.QUERY_NOT_FOUND))
        ip, port = elsewhere.broker.address.split(":")
        async with PullConsumer("CG", cluster.namesrv) as consumer:
            with pytest.raises(ClientError, match="which no broker of topic T has now"):
                await consumer.view_message("T", offset_id(pack_host(ip, int(port)), 0))
        assert elsewhere.broker.requests == []
        assert cluster.broker.asked(RequestCode.QUERY_MESSAGE)[0]["_UNIQUE_KEY_QUERY"] == "true"


async def test_an_id_that_is_not_of_the_last_days_is_looked_for_in_all():
    async with Cluster() as cluster:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.QUERY_MESSAGE, lambda command: reply(command, ResponseCode.QUERY_NOT_FOUND))
        async with PullConsumer("CG", cluster.namesrv) as consumer:
            assert await consumer.view_message("T", "0" * 32) is None
        recent, every = (int(one["beginTimestamp"]) for one in cluster.broker.asked(RequestCode.QUERY_MESSAGE))
        assert recent > 0
        assert every == 0


async def test_keys_are_compared_exactly_and_the_oldest_come_first(tmp_path):
    messages = [keyed(b"0", "Aa"), keyed(b"1", "BB"), keyed(b"2", "BB", "Aa")]
    async with stored(tmp_path, *messages) as (_, consumer):
        assert [one.body for one in await consumer.query_messages("T", "Aa")] == [b"0", b"2"]
        assert [one.body for one in await consumer.query_messages("T", "BB", max_count=1)] in ([b"1"], [b"2"])
        assert await consumer.query_messages("T", "no such key") == []


async def test_a_topic_that_does_not_exist_is_reported(tmp_path):
    async with stored(tmp_path) as (_, consumer):
        with pytest.raises(NoRoute, match="no broker has topic T"):
            await consumer.query_messages("T", "k")


async def test_a_broker_that_refuses_counts_only_when_nobody_else_found_anything():
    async with Cluster(brokers=2) as cluster:
        cluster.topic("T")
        cluster.broker.answer(RequestCode.QUERY_MESSAGE, lambda command: reply(command, ResponseCode.QUERY_NOT_FOUND))
        async with PullConsumer("CG", cluster.namesrv) as consumer:
            with pytest.raises(PeerRefused, match="not scripted"):
                await consumer.query_messages("T", "k")
