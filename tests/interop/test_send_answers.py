"""The same raw requests to a real Apache broker and to ours: equal codes, remarks, answer fields and stored messages.

Sends in both forms, batches, delays, retries, send-backs and replies, with every field missing, empty, not a number,
negative and beyond its bounds. Where Apache's answer is the text of a Java exception, the code alone is compared.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields, reply, request
from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.protocol.schemas.clients import HeartbeatData, ProducerData
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from tests.interop.apache import ApachePair
from tests.interop.standalone import Standalone
from tests.patience import TIMEOUT_MS

SECONDS_MAX = 150
BATCH = encode_batch([BatchEntry(b"a", b"", 0), BatchEntry(b"b", b"UNIQ_KEY\x01K\x02", 0)])
LONG_NAMES = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
    *("properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes", "batch"),
)
VALUES = ("p", "Answers", "TBW102", "4", "0", "0", "1700000000000", "0", "", "0", "false", "0", "false")
SHORT = dict(zip("abcdefghijklm", VALUES, strict=True))
LONG = dict(zip(LONG_NAMES, VALUES, strict=True))
BACK = {"offset": "0", "group": "back", "delayLevel": "0", "originTopic": "T", "unitMode": "false"}
BACK |= {"maxReconsumeTimes": "16"}
WRONG = ("abc", "", "9" * 20, "-5")
VARYING = re.compile(r"127\.0\.0\.1:\d+|[0-9A-F]{32,}")


@dataclass(frozen=True, slots=True)
class Probe:
    """One request."""

    name: str
    code: int
    fields: dict[str, str]
    body: bytes = b"hello"
    version: int = 493


def short(**changes: str) -> dict[str, str]:
    return {**SHORT, **changes}


def probes(reply_topic: str) -> Iterator[Probe]:
    """Yield every request, in the order of the sends."""
    v2, batch, back = RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE, RequestCode.CONSUMER_SEND_MSG_BACK
    yield Probe("plain", v2, short())
    for code, fields, numbers in (
        (v2, SHORT, "defghjklm"),
        (RequestCode.SEND_MESSAGE, LONG, [name for name in LONG_NAMES[3:] if name != "properties"]),
        (back, BACK, ["offset", "delayLevel", "unitMode", "maxReconsumeTimes"]),
    ):
        for name in fields:
            yield Probe(f"{code.name} without {name}", code, {k: v for k, v in fields.items() if k != name})
        for name in numbers:
            # The queue for a negative id is random.
            for value in WRONG if name not in ("e", "queueId") else WRONG[:3]:
                yield Probe(f"{code.name} {name}={value!r}", code, {**fields, name: value})
    for name, changes in {
        "empty topic": {"b": ""},
        "blank topic": {"b": "  "},
        "illegal topic": {"b": "a b"},
        "long topic": {"b": "x" * 128},
        "forbidden topic": {"b": "SCHEDULE_TOPIC_XXXX"},
        "no template": {"b": "AnswersNew", "c": "nothing"},
        "queue beyond": {"e": "99"},
        "delay": {
            "b": "AnswersDelay",
            "e": "2",
            "i": "DELAY\x011\x02UNIQ_KEY\x01U\x02KEYS\x01k\x02TIMER_DELAY_SEC\x019\x02",
        },
        "delay +1": {"b": "AnswersDelay", "i": "DELAY\x01+1\x02"},
        "delay 99": {"b": "AnswersDelay", "i": "DELAY\x0199\x02"},
        "delay 0": {"b": "AnswersDelay", "i": "DELAY\x010\x02"},
        "delay -1": {"b": "AnswersDelay", "i": "DELAY\x01-1\x02"},
        "delay text": {"i": "DELAY\x01abc\x02"},
        "delay blank": {"i": "DELAY\x01 3\x02"},
        "delay huge": {"i": "DELAY\x0199999999999\x02"},
        "delay of a commit": {"b": "AnswersDelay", "f": "8", "i": "DELAY\x011\x02"},
        "delay of a prepared": {"b": "AnswersDelay", "f": "4", "i": "DELAY\x011\x02"},
        "retry": {"b": "%RETRY%answers", "j": "2", "l": "2"},
        "retry beyond": {"b": "%RETRY%answers", "j": "3", "l": "2", "i": "DELAY\x013\x02"},
        "retry never": {"b": "%RETRY%answers", "l": "-1"},
        "retry of POP": {"b": "%RETRY%answers+T"},
        "retry of no group": {"b": "%RETRY%"},
        "retry queue beyond": {"b": "%RETRY%answers", "e": "5"},
    }.items():
        yield Probe(name, v2, short(**changes))
    yield Probe("retry beyond, old client", v2, short(b="%RETRY%answers", j="3", l="2"), version=100)
    yield Probe("empty body", v2, short(), b"")
    for name, changes in {
        "batch": {},
        "batch with key": {"i": "UNIQ_KEY\x01B\x02"},
        "batch delayed": {"i": "DELAY\x011\x02"},
        "batch delayed by text": {"i": "DELAY\x01x\x02"},
        "batch of a transaction": {"f": "4"},
        "batch of a long topic": {"b": "x" * 128},
        "batch retried": {"b": "%RETRY%answers"},
        "batch retried, long": {"b": "%RETRY%" + "x" * 125},
        "batch that does not say so": {"m": "false"},
    }.items():
        yield Probe(name, batch, short(**{"b": "AnswersBatch", "m": "true", **changes}), BATCH)
    yield Probe("batch in a plain send", v2, short(b="AnswersBatch", m="true"), BATCH)
    yield Probe("batch in the long form", RequestCode.SEND_MESSAGE, {**LONG, "batch": "true"}, BATCH)
    yield Probe("empty batch", batch, short(b="AnswersBatch", m="true"), b"")
    for name, changes in {
        "back from nowhere": {"offset": "1"},
        "back from beyond": {"offset": "999999999"},
        "back of a bad group": {"group": "a b"},
        "back of no group": {"group": ""},
        "back level 1": {"delayLevel": "1"},
        "back level 99": {"delayLevel": "99"},
        "back given up": {"delayLevel": "-1"},
        "back for the last time": {"maxReconsumeTimes": "0"},
    }.items():
        yield Probe(name, back, {**BACK, **changes}, b"")
    yield Probe("back, old client", back, {**BACK, "maxReconsumeTimes": "0"}, b"", version=100)
    policy = b'{"groupName":"policy","groupRetryPolicy":{"type":"CUSTOMIZED","customizedRetryPolicy":{"next":[60000]}}}'
    yield Probe("a group with a retry policy", RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, policy)
    yield Probe("back, whatever the policy", back, {**BACK, "group": "policy"}, b"")
    to_me = "REPLY_TO_CLIENT\x01me@1\x02CORRELATION_ID\x01cc\x02MSG_TYPE\x01reply\x02"
    for name, changes in {
        "reply": {"i": to_me},
        "reply to nobody": {"i": "REPLY_TO_CLIENT\x01you@1\x02"},
        "reply to whom": {"i": ""},
        "reply queue beyond": {"e": "9"},
        "reply any queue": {"e": "-1", "i": to_me},
        "reply queue text": {"e": "x"},
        "reply elsewhere": {"b": "AnswersReply", "i": to_me},
        "reply forbidden": {"b": "SCHEDULE_TOPIC_XXXX", "i": to_me},
    }.items():
        yield Probe(name, RequestCode.SEND_REPLY_MESSAGE_V2, short(**{"b": reply_topic, **changes}), b"answer")
    without_topic = {name: value for name, value in SHORT.items() if name != "b"}
    yield Probe("reply without b", RequestCode.SEND_REPLY_MESSAGE_V2, without_topic)
    whole = {**LONG, "topic": reply_topic, "properties": to_me}
    for name in whole:
        without_name = {k: v for k, v in whole.items() if k != name}
        yield Probe(f"reply in the long form without {name}", RequestCode.SEND_REPLY_MESSAGE, without_name, b"answer")
    for name in ("queueId", "sysFlag", "bornTimestamp", "flag", "reconsumeTimes"):
        for value in WRONG[:3]:
            fields = {**whole, name: value}
            yield Probe(f"reply in the long form {name}={value!r}", RequestCode.SEND_REPLY_MESSAGE, fields, b"answer")
    yield Probe("reply of nothing", RequestCode.SEND_REPLY_MESSAGE_V2, short(b=reply_topic, i=to_me), b"")


AS_IF_MISSING = ("", "0", "false", "4")
"""Apache's broker omits fields from a push that the reply omitted. Our broker fills them in."""

STORED = [
    *(("AnswersDelay", 0, 4), ("AnswersDelay", 2, 1), ("AnswersBatch", 0, 7), ("%RETRY%answers", 0, 2)),
    *(("%DLQ%answers", 0, 2), ("%RETRY%back", 0, 1), ("%DLQ%back", 0, 4), ("SCHEDULE_TOPIC_XXXX", 17, 2)),
    *(("SCHEDULE_TOPIC_XXXX", 0, 4), ("SCHEDULE_TOPIC_XXXX", 2, 12), ("AnswersReply", 0, 1)),
]
"""Queues whose messages are compared, and the numbers of messages to wait for."""


async def ask_all(address: str, cluster: str) -> dict[str, object]:
    """Return a broker's answers to every probe, its pushes, and its stored messages."""
    pushed: list[object] = []

    def take(connection: object, command: Command) -> Command:
        fields = decode_fields(command)
        changing = {
            name: fields.pop(name) for name in ("storeTimestamp", "properties", "bornHost", "storeHost", "topic")
        }
        assert all(changing.values())
        told = sorted((name, value) for name, value in fields.items() if value not in AS_IF_MISSING)
        pushed.append((told, bytes(command.payload)))
        return reply(command)

    dispatch = Router()
    dispatch.register(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, take)
    client = RemotingClient(dispatch)
    heartbeat = HeartbeatData(clientID="me@1", producerDataSet=[ProducerData("requesters")])
    await client.call(address, request(RequestCode.HEART_BEAT, body=msgspec.json.encode(heartbeat)), TIMEOUT_MS)
    found: dict[str, object] = {}
    starts = {(topic, queue_id): await _end(client, address, topic, queue_id) for topic, queue_id, _ in STORED}
    base = 0
    for probe in probes(f"{cluster}_REPLY_TOPIC"):
        fields = probe.fields
        if probe.code == RequestCode.CONSUMER_SEND_MSG_BACK and fields.get("offset") == "0":
            fields = {**fields, "offset": str(base)}
        command = Command(probe.code, fields=fields, body=probe.body, version=probe.version)
        answer = await client.call(address, command, TIMEOUT_MS)
        if probe.name == "plain":
            base = int(decode_fields(answer)["msgId"][16:], 16)
        found[probe.name] = _comparable(answer, cluster)
    for topic, queue_id, count in STORED:
        found[f"stored in {topic}-{queue_id}"] = await _stored(
            client, address, topic, queue_id, starts[topic, queue_id], count
        )
    found["pushed"] = pushed
    await client.close()
    return found


def _comparable(answer: Command, cluster: str) -> tuple[int, str | None, list[tuple[str, str]]]:
    """Return code, remark and fields, without values that differ between two brokers."""
    remark = answer.remark and VARYING.sub("*", answer.remark.replace(cluster, "CLUSTER"))
    fields = decode_fields(answer)
    fields.pop("queueOffset", None)  # compared with the stored messages
    shown = sorted((name, VARYING.sub("*", value)) for name, value in fields.items())
    if answer.code == 1 and not fields:
        remark = "(an exception)"
    return answer.code, remark, shown


async def _end(client: RemotingClient, address: str, topic: str, queue_id: int) -> int:
    """Return the end offset of a queue. Tests share the broker, and other tests send delayed messages too."""
    fields = {"topic": topic, "queueId": str(queue_id)}
    answer = await client.call(address, Command(RequestCode.GET_MAX_OFFSET, fields=fields), TIMEOUT_MS)
    return int(decode_fields(answer).get("offset", 0))


async def _stored(
    client: RemotingClient, address: str, topic: str, queue_id: int, start: int, count: int
) -> list[object]:
    """Return the messages of a queue; for a retry topic without those of level 3, whose delays differ between the two
    brokers.
    """
    messages: list[ReceivedMessage] = []
    offset = start
    async with asyncio.timeout(SECONDS_MAX):
        while len(messages) < count:
            fields = {"consumerGroup": "reader", "topic": topic, "queueId": str(queue_id), "maxMsgNums": "32"}
            fields |= {
                "queueOffset": str(offset),
                "sysFlag": "6",
                "commitOffset": "0",
                "subVersion": "0",
            }
            fields |= {"suspendTimeoutMillis": "1000", "subscription": "*", "expressionType": "TAG"}
            answer = await client.call(address, Command(RequestCode.PULL_MESSAGE, fields=fields), TIMEOUT_MS)
            found = read_messages(answer.payload) if answer.code == 0 else []
            offset += len(found)
            messages += [m for m in found if topic[0] != "%" or m.properties.get("DELAY") != "3"]
    unlike = ("UNIQ_KEY", "ORIGIN_MESSAGE_ID", "CLUSTER")
    return [
        (m.body, m.flag, m.sys_flag, m.reconsume_times, {k: v for k, v in m.properties.items() if k not in unlike})
        for m in messages
    ]


@pytest.fixture(scope="module")
def answers(apache: ApachePair, standalone: Standalone) -> tuple[dict[str, object], dict[str, object]]:
    """Return the answers of Apache's broker and of ours."""
    theirs = asyncio.run(ask_all(apache.broker_addr, "InteropCluster"))
    return theirs, asyncio.run(ask_all(standalone.broker_addr, "DefaultCluster"))


def test_every_request_is_answered_as_apache_answers_it(answers: tuple[dict[str, object], dict[str, object]]) -> None:
    theirs, ours = answers
    assert len(theirs) > 150
    assert {name: (theirs[name], one) for name, one in ours.items() if one != theirs[name]} == {}
