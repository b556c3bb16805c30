"""Messages found by what an id may be, and what is done with them."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.admin import Admin
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.errors import ClientError, ConnectFailed, PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.message import Message
from rmqkit.protocol.names import HALF_TOPIC
from rmqkit.protocol.schemas.send import SendMessageV2Request
from tests.admin.test_clients import status_when
from tests.admin.things import find_when_indexed, make_topic, send
from tests.client.peers import SECONDS

pytestmark = pytest.mark.real_time  # the servers are in another thread

NOBODY = "127.0.0.1:1"


async def test_an_id_is_tried_as_what_it_can_be(admin):
    await make_topic(admin, "Ids")
    first, second = await send(
        admin, Message(topic="Ids", body=b"1", keys=["k"]), Message(topic="Ids", body=b"2", keys=["k", "l"], tags="A")
    )
    await find_when_indexed(admin, "Ids", second.msg_id)

    for name, topic in ((first.offset_msg_id, ""), (first.offset_msg_id.lower(), "Ids"), (first.msg_id, "Ids")):
        found = await admin.messages.find(name, topic)
        assert (found.body, found.broker_name, found.msg_id) == (b"1", first.broker_name, first.msg_id)
    assert [one.body for one in await admin.messages.by_key("Ids", "k")] == [b"1", b"2"]
    assert [one.body for one in await admin.messages.by_key("Ids", "l")] == [b"2"]
    assert len(await admin.messages.by_key("Ids", "k", end_ms=1)) == 0


async def test_an_id_that_is_two_things_has_to_be_said(admin):
    await make_topic(admin, "Twice")
    (first,) = await send(admin, Message(topic="Twice", body=b"1"))
    await send(admin, Message(topic="Twice", body=b"2", msg_id=first.offset_msg_id))
    await find_when_indexed(admin, "Twice", first.offset_msg_id)

    with pytest.raises(SettingsError, match="offset message id of a message in topic Twice and the unique key of one"):
        await admin.messages.find(first.offset_msg_id, "Twice")
    assert (await admin.messages.find(first.offset_msg_id, "Twice", "offset")).body == b"1"
    assert (await admin.messages.find(first.offset_msg_id, "Twice", "key")).body == b"2"
    assert (await admin.messages.find(first.offset_msg_id)).body == b"1"


async def test_an_id_that_is_nothing_is_reported_with_what_it_was_tried_as(admin):
    await make_topic(admin, "Nothing")
    (sent,) = await send(admin, Message(topic="Nothing", body=b"1", keys=["known"]))
    await find_when_indexed(admin, "Nothing", sent.msg_id)
    beyond, elsewhere = sent.offset_msg_id[:16] + "0" * 11 + "FFFFF", "C0000201" + sent.offset_msg_id[8:]
    for name, topic, expected in (
        (sent.msg_id, "", "its port would be [0-9]+; as a unique key it needs its topic"),
        ("x", "Nothing", "it is not an offset message id.*; topic Nothing has no message with that unique key or key"),
        ("known", "Nothing", "as a key topic Nothing has it 1 times: rmq message by-key Nothing known"),
        (beyond, "", f"it is of 127.0.0.1:[0-9]+, which has no message at {0xFFFFF}"),
        (elsewhere, "", "it is of 192.0.2.1:[0-9]+, which no broker of the cluster has"),
    ):
        with pytest.raises(UnknownName, match=expected) as unknown:
            await admin.messages.find(name, topic)
        assert name in str(unknown.value)
        assert "\n" not in str(unknown.value)
    with pytest.raises(UnknownName, match="has no topic Nothin: did you mean Nothing"):
        await admin.messages.find("x", "Nothin")


async def test_a_broker_that_is_away_hides_nothing(admin):
    await make_topic(admin, "Away", ["broker-a"])
    (sent,) = await send(admin, Message(topic="Away", body=b"1"))
    await find_when_indexed(admin, "Away", sent.msg_id)
    asked = {"gone": NOBODY, "broker-a": await admin.calls.address("broker-a")}

    assert len(await admin.messages.by_key("Away", sent.msg_id, is_unique=True, brokers=asked)) == 1
    with pytest.raises(ConnectFailed):
        await admin.messages.by_key("Away", "other", is_unique=True, brokers=asked)


async def test_a_place_in_a_queue(admin):
    await make_topic(admin, "Places")
    await send(admin, *[Message(topic="Places", body=b"%d" % n) for n in range(8)])

    assert (await admin.messages.at("Places", "broker-b", 1, 1)).body == b"7"
    with pytest.raises(UnknownName, match="queue 1 of Places on broker-b has no message at offset 2; it has 0 to 1"):
        await admin.messages.at("Places", "broker-b", 1, 2)
    with pytest.raises(UnknownName, match="it has no messages"):
        await admin.messages.at("Places", "broker-b", 7, 0)
    with pytest.raises(UnknownName, match="no broker broker-x"):
        await admin.messages.at("Places", "broker-x", 0, 0)
    await make_topic(admin, "Silent")
    empty = await admin.messages.entries("Silent", 0, 5, broker="broker-a")
    assert (empty.queue_data, empty.min_queue_index, empty.max_queue_index) == ([], 0, 0)
    entries = await admin.messages.entries("Places", 0, 1, broker="broker-a")
    assert (len(entries.queue_data), entries.max_queue_index) == (1, 2)
    with pytest.raises(SettingsError, match="name one with -b: broker-a, broker-b"):
        await admin.messages.entries("Places", 0, 1)
    with pytest.raises(UnknownName, match="Index 5 of 0@Places is not exist"):
        await admin.messages.entries("Places", 0, 5, broker="broker-a")
    with pytest.raises(PeerRefused, match="9@Places is not exist"):
        await admin.messages.entries("Places", 9, 0, broker="broker-a")


async def test_a_place_in_a_light_queue(admin):
    await make_topic(admin, "Heavy")
    address = await admin.calls.address("broker-b")
    for number, properties in enumerate(["", "INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%b\x02"]):
        header = SendMessageV2Request("p", "Heavy", "TBW102", 4, 1, 0, 1, 0, properties=properties)
        await admin.calls.ask(address, RequestCode.SEND_MESSAGE_V2, header, body=b"%d" % number)
    found = await admin.messages.at("%LMQ%b", "broker-b", 0, 0)
    assert (found.topic, found.queue_offset, found.body) == ("Heavy", 1, b"1")
    with pytest.raises(UnknownName, match="queue 0 of %LMQ%b on broker-b has no message at offset 1; it has 0 to 0"):
        await admin.messages.at("%LMQ%b", "broker-b", 0, 1)


async def test_a_message_is_sent_to_the_place_it_names_and_again_with_what_it_had(admin):
    await make_topic(admin, "Sent")
    message = Message(topic="Sent", body=b"x" * 5000, tags="T", keys=["a", "b"], properties={"own": "1"}, flag=7)
    first = await admin.messages.send(message, broker="broker-b", queue_id=1)
    assert (first.broker_name, first.queue_id, first.queue_offset, first.send_result) == ("broker-b", 1, 0, "SEND_OK")

    again = await admin.messages.resend(await admin.messages.find(first.offset_msg_id))

    assert again.msg_id == first.msg_id
    one, other = [await admin.messages.find(sent.offset_msg_id) for sent in (first, again)]
    assert (one.body, one.tags, one.keys, one.flag, one.properties["own"]) == (b"x" * 5000, "T", ["a", "b"], 7, "1")
    assert (other.body, other.properties, other.flag) == (one.body, one.properties, one.flag)
    with pytest.raises(ClientError, match="topic Sent has no queue 9 on broker-a to send to"):
        await admin.messages.send(message, broker="broker-a", queue_id=9)
    with pytest.raises(UnknownName, match="no topic Send"):
        await admin.messages.send(Message(topic="Send", body=b"1"))


async def test_a_client_handles_a_message_again(admin, name_servers):
    await make_topic(admin, "Pushed", ["broker-b"])
    (sent,) = await send(admin, Message(topic="Pushed", body=b"again"))
    handled = []
    async with PushConsumer("pushed", name_servers) as consumer:
        consumer.subscribe("Pushed", "*", lambda message: handled.append(message.body))
        (client,) = (await status_when(admin, "pushed", lambda found: found.clients)).clients
        message = await admin.messages.find(sent.offset_msg_id)
        before = len(handled)
        assert (await admin.messages.push(message, "pushed", client)).consume_result == "CR_SUCCESS"
        assert len(handled) > before
        with pytest.raises(UnknownName, match="group pushed has no client nobody"):
            await admin.messages.push(message, "pushed", "nobody")


async def test_a_half_message_is_asked_about_again(name_servers):
    async with (
        Admin(name_servers) as admin,
        TransactionProducer(
            "halves",
            name_servers,
            execute=lambda message, argument: TransactionState.UNKNOWN,
            check=lambda message: TransactionState.UNKNOWN,
        ) as producer,
    ):
        await make_topic(admin, "Halves")
        sent = await producer.send_half(Message(topic="Halves", body=b"half"))
        masters = await admin.calls.masters()

        async def copies(count):
            async with asyncio.timeout(SECONDS):
                while True:
                    found = await admin.messages.by_key(HALF_TOPIC, sent.msg_id, is_unique=True, brokers=masters)
                    if len(found) == count:
                        return found
                    await asyncio.sleep(0.01)

        await copies(1)
        assert (await admin.messages.resume(sent.msg_id)).msg_id == sent.msg_id
        first, second = await copies(2)
        assert second.properties["TRANSACTION_CHECK_TIMES"] == "0"
        assert (await admin.messages.resume(first.offset_msg_id)).offset_msg_id == first.offset_msg_id
        with pytest.raises(UnknownName, match="no message nobody"):
            await admin.messages.resume("nobody")
