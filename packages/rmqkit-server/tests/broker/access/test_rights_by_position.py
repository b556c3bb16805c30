"""Requests that name a message by its log offset need rights on the topic of the message (behaviour.md §9.8)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rmqkit.broker.access.policies import message_at
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.ids import decode_offset_id, offset_id
from rmqkit.protocol.record import BatchEntry, encode_batch, pack_host
from rmqkit.remoting.authentication import AuthenticationSettings, Credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.rights import NotReadable, needed
from rmqkit.standalone import Standalone
from tests.store.stores import message, opened, small_settings

ROOT, ANNA, EVE = (Credentials(access_key=name, secret_key="secret12") for name in ("root", "anna", "eve"))
USERS = AuthenticationSettings(
    enabled=True, initial_user='{"username":"root","password":"secret12"}', authorization_enabled=True
)
BACK, VIEW, END = Code.CONSUMER_SEND_MSG_BACK, Code.VIEW_MESSAGE_BY_ID, Code.END_TRANSACTION
BATCH = [BatchEntry(b"1", b""), BatchEntry(b"2", b"")]
DIRECTLY, RESUME = Code.CONSUME_MESSAGE_DIRECTLY, Code.RESUME_CHECK_HALF_MESSAGE
ID_OF_SEVEN = offset_id(pack_host("127.0.0.1", 10911), 7)
LIGHT = b"INNER_MULTI_DISPATCH\x01%LMQ%x,other\x02"
TO_A = b"REAL_TOPIC\x01A\x02REAL_QID\x010\x02"


def record(topic: str, properties: bytes = b"") -> SimpleNamespace:
    return SimpleNamespace(topic=topic, properties=properties)


@pytest.mark.parametrize(
    ("code", "fields", "at_seven", "expected"),
    [
        (VIEW, {"offset": "7"}, record("A"), ["Topic:A Get|Sub"]),
        (VIEW, {"offset": "7", "topic": "B"}, record("A"), ["Topic:B Get", "Topic:A Get|Sub"]),
        (VIEW, {"offset": "7"}, record("%RETRY%g"), ["Group:g Get|Sub"]),
        (VIEW, {"offset": "7"}, record("SCHEDULE_TOPIC_XXXX", TO_A), ["Topic:A Get|Sub"]),
        (VIEW, {"offset": "7"}, record("rmq_sys_wheel_timer", TO_A), ["Topic:A Get|Sub"]),
        (VIEW, {"offset": "7"}, record("B", TO_A), ["Topic:B Get|Sub"]),
        (VIEW, {"offset": "8"}, record("A"), []),
        (VIEW, {}, record("A"), []),
        (BACK, {"offset": "7", "group": "g"}, record("A"), ["Group:g Sub", "Topic:A Sub"]),
        (BACK, {"offset": "7", "group": "g"}, record("%RETRY%g"), ["Group:g Sub", "Group:g Sub"]),
        (BACK, {"offset": "7", "group": "g"}, record("%RETRY%other"), ["Group:g Sub", "Group:other Sub"]),
        (BACK, {"offset": "7", "group": "g"}, record("A", LIGHT), ["Group:g Sub", "Topic:A or Topic:%LMQ%x Sub"]),
        (VIEW, {"offset": "7"}, record("A", LIGHT), ["Topic:A Get|Sub"]),
        (DIRECTLY, {"consumerGroup": "g", "msgId": ID_OF_SEVEN}, record("A"), ["Group:g Sub", "Topic:A Get|Sub"]),
        (DIRECTLY, {"consumerGroup": "g", "msgId": "seven"}, record("A"), ["Group:g Sub"]),
        (RESUME, {"msgId": ID_OF_SEVEN}, record("RMQ_SYS_TRANS_HALF_TOPIC", TO_A), ["Topic:A Update"]),
        (END, {"commitLogOffset": "7"}, record("RMQ_SYS_TRANS_HALF_TOPIC", TO_A), ["Topic:A Pub"]),
        (END, {"commitLogOffset": "7", "topic": "B"}, record("A"), ["Topic:B Pub", "Topic:A Pub"]),
    ],
)
def test_what_a_position_needs(code, fields, at_seven, expected):
    found = needed(Command(code), fields, "c", {7: at_seven}.get)
    assert [f"{shown(resource)} {'|'.join(sorted(actions))}" for resource, actions in found] == expected


def shown(resource):
    return resource if isinstance(resource, str) else " or ".join(resource)


def test_a_position_that_is_no_number_is_refused():
    with pytest.raises(NotReadable):
        list(needed(Command(VIEW), {"offset": "7.5"}, "c", {7: record("A")}.get))


async def ask(address, user, code, body=b"", **fields):
    client = RemotingClient(credentials=user)
    try:
        return await client.call(address, Command(code, fields=fields, body=body), 10_000)
    finally:
        await client.close()


async def sent(address, properties=""):
    """Send a message to Orders as a user with all permissions, and return its log offset."""
    values = ("p", "Orders", "TBW102", "4", "0", "0", "1700000000000", "0", properties, "0", "false")
    answer = await ask(address, ROOT, Code.SEND_MESSAGE_V2, b"x", **dict(zip("abcdefghijkl", values, strict=False)))
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return str(decode_offset_id(decode_fields(answer)["msgId"])[2])


async def test_who_has_no_right_on_a_topic_cannot_reach_its_messages_by_their_place(tmp_path):
    """Anna reads Orders with her group and sends to it. Eve has her own group and topic, and guesses log offsets."""

    async with Standalone(tmp_path, authentication=USERS) as servers:
        address = servers.broker_address
        for name, resources in (("anna", ("Topic:Orders", "Group:ga")), ("eve", ("Topic:Own", "Group:ge"))):
            made = await ask(address, ROOT, Code.AUTH_CREATE_USER, b'{"password":"secret12"}', username=name)
            entries = [{"resource": each, "actions": ["Pub", "Sub", "Get"], "decision": "Allow"} for each in resources]
            acl = json.dumps({"policies": [{"entries": entries}]}).encode()
            allowed = await ask(address, ROOT, Code.AUTH_CREATE_ACL, acl, subject=f"User:{name}")
            assert (made.code, allowed.code) == (0, 0)
        plain, half = await sent(address, ""), await sent(address, "TRAN_MSG\x01true\x02PGROUP\x01p\x02")
        end = {"producerGroup": "p", "tranStateTableOffset": "0", "commitLogOffset": half, "commitOrRollback": "8"}
        asked = (
            (VIEW, {"offset": plain}),
            (VIEW, {"offset": half, "topic": "Own"}),
            (BACK, {"offset": plain, "delayLevel": "0"}),
            (END, end),
            (END, {**end, "topic": "Own"}),
        )
        for code, fields in asked:
            answer = await ask(address, EVE, code, **fields, group="ge")
            assert answer.code == ResponseCode.NO_PERMISSION, (code, answer.remark)
            assert "Topic:Orders" in answer.remark
        for code, fields in (asked[0], asked[2], asked[3]):
            answer = await ask(address, ANNA, code, **fields, group="ga")
            assert answer.code == ResponseCode.SUCCESS, (code, answer.remark)


def test_a_body_that_looks_like_a_record_is_no_message_and_any_other_is(tmp_path):
    """A body of Eve's could contain the beginning of a record that extends into the messages of others."""
    options = {"is_batch_topic": lambda topic: topic == "Batches"}
    with opened(tmp_path, small_settings(commit_log_file_bytes=1 << 20), **options) as store:
        first = store.put(message(topic="Own", body=b"1"))
        copied = bytes(store.log.record_at(first.physical_offset))
        second = store.put(message(topic="Own", body=b"before" + copied))
        inside = bytes(store.log.record_at(second.physical_offset)).index(copied) + second.physical_offset
        batches = [store.put_batch(message(topic="Batches", body=encode_batch(BATCH), UNIQ_KEY="U")) for _ in range(2)]
        places = [put.physical_offset for put in (first, second, *batches)]
        assert [message_at(store, place).topic for place in places] == ["Own", "Own", "Batches", "Batches"]
        assert bytes(store.log.record_at(inside)) == copied
        with pytest.raises(NotReadable):
            message_at(store, inside)
        assert [message_at(store, place) for place in (-1, inside + 1, 1 << 40)] == [None] * 3
