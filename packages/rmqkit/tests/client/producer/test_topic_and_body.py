"""Methods that send take a topic and a body, or a `Message`."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import Struct

from rmqkit import Message, Producer
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import MessageFields, message_of
from rmqkit.protocol.properties import decode_properties
from tests.client.peers import Cluster, until


class Order(Struct):
    id: int


async def test_a_topic_and_a_body_are_a_message():
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("Orders")
        await producer.send("Orders", b"17", tags="paid", keys=["order-17"], properties={"n": "1"}, timeout=2)
        await producer.send_one_way("Orders", Order(18), delay=timedelta(seconds=1.5), flag=7)
        await until(lambda: len(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)) == 2, "the one-way send")
        sent = cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)
        assert [one["b"] for one in sent] == ["Orders", "Orders"]
        properties = [decode_properties(one["i"].encode()) for one in sent]
        assert properties[0].items() >= {"TAGS": "paid", "KEYS": "order-17", "n": "1"}.items()
        assert (properties[1]["TIMER_DELAY_MS"], sent[1]["h"]) == ("1500", "7")


@pytest.mark.parametrize(
    ("arguments", "fields", "fault"),
    [
        (("Orders",), {}, "the message for topic 'Orders' has no body: give it as the second argument"),
        ((Message(topic="Orders", body=b"x"), b"y"), {}, "a Message has its body and its fields already"),
        ((Message(topic="Orders", body=b"x"),), {"tags": "paid"}, "a Message has its body and its fields already"),
        ((b"x",), {}, "b'x' is not a message: give a topic and a body, or a Message"),
        ((None, b"x"), {}, "None is not a message"),
        (("Orders", b"x"), {"tag": "paid"}, "'tag'"),
    ],
)
@pytest.mark.parametrize("method", ["send", "send_one_way", "request"])
async def test_other_arguments_are_refused_before_anything_is_sent(method, arguments, fields, fault):
    async with Cluster() as cluster, Producer("PG", cluster.namesrv) as producer:
        cluster.topic("Orders")
        with pytest.raises(TypeError) as caught:
            await getattr(producer, method)(*arguments, **fields)
        assert fault in str(caught.value)
        assert cluster.broker.asked(RequestCode.SEND_MESSAGE_V2) == []


def test_every_field_of_a_message_can_be_given():
    assert {"topic", "body", *MessageFields.__annotations__} == set(Message.__struct_fields__)
    message = Message(topic="Orders", body=b"x")
    assert message_of(message, None, {}) is message
