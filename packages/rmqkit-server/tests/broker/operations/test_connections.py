"""Connected clients, and requests that the broker forwards to them (remoting.md §4.4, §4.5)."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.broker.operations import clients
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode
from rmqkit.protocol.command import decode_fields, decode_header, reply
from rmqkit.protocol.fastjson import decode_as, dumps
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import ConsumerStatus
from rmqkit.protocol.schemas.send import SendMessageResponse

CONSUMERS = RequestCode.GET_CONSUMER_CONNECTION_LIST
PRODUCERS = RequestCode.GET_PRODUCER_CONNECTION_LIST
STATUS = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS
INFO = RequestCode.GET_CONSUMER_RUNNING_INFO
DIRECTLY = RequestCode.CONSUME_MESSAGE_DIRECTLY
FROM_CLIENT = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT


async def test_the_members_of_a_consumer_group(cluster):
    await cluster.heartbeat("c1", ("T", "A || B"), consume_from_where="CONSUME_FROM_FIRST_OFFSET")
    shown = json.loads((await cluster.ask(CONSUMERS, consumerGroup="g")).body)
    (member,) = shown.pop("connectionSet")
    address = member.pop("clientAddr")
    assert member == {"clientId": "c1", "language": "PYTHON", "version": CURRENT_VERSION}
    assert address.startswith("127.0.0.1:")
    assert set(shown.pop("subscriptionTable")) == {"T"}
    assert shown == {
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
    }


@pytest.mark.parametrize("name", ["none", ""])
async def test_a_group_without_members(name, cluster):
    answer = await cluster.ask(CONSUMERS, consumerGroup=name)
    assert (answer.code, answer.remark) == (206, f"the consumer group[{name}] not online")
    answer = await cluster.ask(PRODUCERS, producerGroup=name)
    assert (answer.code, answer.remark) == (1, f"the producer group[{name}] not exist")
    assert [(await cluster.ask(code)).code for code in (CONSUMERS, PRODUCERS)] == [1, 1]


async def test_the_members_of_producer_groups(cluster):
    before_ms = SYSTEM_CLOCK.now_ms()
    await cluster.heartbeat("c1")
    (member,) = json.loads((await cluster.ask(PRODUCERS, producerGroup="p")).body)["connectionSet"]
    assert (member["clientId"], member["language"]) == ("c1", "PYTHON")
    (known,) = json.loads((await cluster.ask(RequestCode.GET_ALL_PRODUCER_INFO)).body)["data"]["p"]
    assert (known["clientId"], known["remoteIP"]) == ("c1", "/" + member["clientAddr"])
    assert before_ms - 60_000 < known["lastUpdateTimestamp"] < before_ms + 60_000


def consumer(cluster, **answers):
    """A client that sends prepared answers and records the requests."""
    asked = []

    def answer(connection, command):
        asked.append((command.code, decode_fields(command), command.payload))
        return reply(command, 0, "hello", fields={"a": "b"}, body=answers.get("body", b"{}"))

    return cluster.new_client(dict.fromkeys((INFO, DIRECTLY, FROM_CLIENT), answer)), asked


async def test_a_question_and_its_answer_are_handed_on_as_they_are(cluster):
    client, asked = consumer(cluster, body=b'{"jstack":"x"}')
    await cluster.heartbeat("c1", ("T", "*"), client=client)
    fields = {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "x"}
    answer = await cluster.ask(INFO, **fields)
    assert (answer.code, answer.remark, answer.body) == (0, "hello", b'{"jstack":"x"}')
    assert decode_fields(answer) == {"a": "b"}
    assert asked == [(INFO, fields, b"")]
    await client.close()


async def test_a_message_is_consumed_directly(cluster):
    sent = decode_header(await cluster.send(body=b"once more"), SendMessageResponse)
    client, asked = consumer(cluster)
    await cluster.heartbeat("c1", ("T", "*"), client=client)
    fields = {"consumerGroup": "g", "clientId": "c1", "msgId": sent.msg_id, "topic": "T"}
    assert (await cluster.ask(DIRECTLY, **fields)).code == 0
    ((_, handed_on, record),) = asked
    assert handed_on == fields | {"brokerName": "broker-a", "topicSysFlag": "0", "groupSysFlag": "0"}
    assert [message.body for message in read_messages(record)] == [b"once more"]
    await client.close()


@pytest.mark.parametrize(
    ("message_id", "remark"),
    [
        ("zz", "offset message id 'zz' has 2 characters: it must have 32 or 56"),
        ("", "offset message id '' has 0 characters: it must have 32 or 56"),
        ("7F00000100002A9F" + "00" * 7 + "FF", "can not find message by the offset, 255"),
        ("7F00000100002A9F" + "FF" * 8, "can not find message by the offset, -1"),
        ("7F00000100002A9F7F" + "FF" * 7, f"can not find message by the offset, {(1 << 63) - 1}"),
    ],
)
async def test_a_message_that_is_not_there_is_not_consumed(message_id, remark, cluster):
    client, asked = consumer(cluster)
    await cluster.heartbeat("c1", ("T", "*"), client=client)
    answer = await cluster.ask(DIRECTLY, consumerGroup="g", clientId="c1", msgId=message_id)
    assert (answer.code, answer.remark, asked) == (1, remark, [])
    await client.close()


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"consumerGroup": "g", "clientId": "zz"}, "<g> <zz>"),
        ({"consumerGroup": "none", "clientId": "c1"}, "<none> <c1>"),
        ({"consumerGroup": "g"}, "<g> <null>"),
        ({"consumerGroup": "", "clientId": ""}, "<> <>"),
    ],
)
async def test_a_client_that_is_not_there_is_not_asked(fields, shown, cluster):
    await cluster.heartbeat("c1", ("T", "*"))
    answer = await cluster.ask(INFO, **fields)
    assert (answer.code, answer.remark) == (1, f"The Consumer {shown} not online")
    assert (await cluster.ask(INFO)).code == 1


async def test_a_client_that_says_nothing_or_goes(monkeypatch, cluster):
    monkeypatch.setattr(clients, "_RELAY_TIMEOUT_MS", 100)
    monkeypatch.setattr(clients, "_STATUS_TIMEOUT_MS", 100)

    client = cluster.new_client(dict.fromkeys((INFO, FROM_CLIENT), lambda connection, command: None))
    await cluster.heartbeat("c1", ("T", "*"), client=client)
    answer = await cluster.ask(INFO, consumerGroup="g", clientId="c1")
    assert answer.code == 207
    assert answer.remark.startswith("consumer <g> <c1> Timeout: ")
    answer = await cluster.ask(STATUS, group="g", topic="T")
    assert (answer.code, decode_as(answer.body, ConsumerStatus).consumer_table) == (0, {})
    monkeypatch.setattr(clients, "_RELAY_TIMEOUT_MS", 10_000)
    asking = asyncio.ensure_future(cluster.ask(INFO, consumerGroup="g", clientId="c1"))
    while not any(c._calls for c in cluster.standalone.broker.context.clients.consumers("g").members):
        await asyncio.sleep(0)
    await client.close()
    answer = await asking
    assert answer.code == 1
    assert answer.remark.startswith("invoke consumer <g> <c1> Exception: ")


@pytest.mark.parametrize(
    ("client_addr", "asked_ids"), [(None, {"c1", "c2"}), ("", {"c1", "c2"}), ("c2", {"c2"}), ("x", set())]
)
async def test_where_the_members_of_a_group_are(client_addr, asked_ids, cluster):
    fields = {} if client_addr is None else {"clientAddr": client_addr}
    body = dumps(ConsumerStatus(message_queue_table={MessageQueue("T", "b", 1): 7}))
    clients = {name: consumer(cluster, body=body)[0] for name in ("c1", "c2")}
    for name, client in clients.items():
        await cluster.heartbeat(name, ("T", "*"), client=client)
    answer = await cluster.ask(STATUS, group="g", topic="T", **fields)
    table = decode_as(answer.body, ConsumerStatus).consumer_table
    assert set(table) == asked_ids
    assert all(list(queues.values()) == [7] for queues in table.values())
    for client in clients.values():
        await client.close()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messageQueueTable":7}'])
async def test_an_answer_that_cannot_be_read_counts_as_none(body, cluster):
    client, _ = consumer(cluster, body=body)
    await cluster.heartbeat("c1", ("T", "*"), client=client)
    answer = await cluster.ask(STATUS, group="g", topic="T")
    assert (answer.code, decode_as(answer.body, ConsumerStatus).consumer_table) == (0, {})
    await client.close()


async def test_nobody_to_ask(cluster):
    answer = await cluster.ask(STATUS, group="none", topic="T")
    assert (answer.code, answer.remark) == (1, "No Any Consumer online in the consumer group: [none]")
    assert (await cluster.ask(STATUS)).code == 1
