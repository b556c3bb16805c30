"""The same raw requests to a real Apache broker and to ours, and the comparison of the answers.

Requests of a scenario go over one connection to each broker. Codes are compared, and bodies that are JSON or records.
Remarks are compared unless Apache's remark is the text of a Java exception.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.message import read_messages
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.router import Router
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.interop.apache import BROKER_NAME, CLUSTER
from tests.patience import TIMEOUT_MS

TIMES = re.compile(rb"127\.0\.0\.1:\d+|\b\d{13}\b|\d{4}-\d\d-\d\d#[\d:]+")
OF_THE_MOMENT = re.compile(rb'("(?:physicOffset|delayTime|consumeTps|topicPutTps)":)[-\d.E]+')
OWN_FIELDS = (
    *("msgId", "transactionId", "queueOffset", "indexLastUpdatePhyoffset", "indexLastUpdateTimestamp"),
    *("totalTopicNum", "totalGroupNum"),
)
EXCEPTION = re.compile(r"(java|com|org)\.|Cannot |Index \d+ out|not set any response code")
SECONDS_MAX = 150
OWN_PROPERTIES = ("UNIQ_KEY", "CLUSTER", "__transactionId__")


PULL_ALL: dict[str, object] = {
    "queueId": 0,
    "queueOffset": 0,
    "maxMsgNums": 32,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 1000,
    "subVersion": 0,
    "subscription": "*",
}
"""The fields of a pull of all messages of queue 0, without group and topic."""


@dataclass(frozen=True)
class Asked:
    """One request; `body` is JSON or ready bytes.

    A field of ``@msgId``, ``@physical`` or ``@queue`` is taken from the answer to the last sent message; ``@queue+1``
    is one more. An awaited request is repeated until it succeeds.
    """

    code: int
    fields: Mapping[str, object] = field(default_factory=dict)
    body: object = b""
    is_awaited: bool = False

    def __str__(self) -> str:
        shown = "" if self.body == b"" else f" {self.body!s:.60}"
        return f"{Code(self.code).name}{dict(self.fields)}{shown}"

    def command(self, sent: Mapping[str, str]) -> Command:
        body = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        fields = {name: filled(str(value), sent) for name, value in self.fields.items()}
        return Command(self.code, fields=fields or None, body=body)


def filled(value: str, sent: Mapping[str, str]) -> str:
    name, plus, number = value.partition("+")
    if name not in sent:
        return value
    return str(int(sent[name]) + int(number)) if plus else sent[name]


def without(fields: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in names}


def odd(
    code: int, good: Mapping[str, object], *numbers: str, kept: str = "", but: tuple[object, ...] = ()
) -> list[Asked]:
    """Return requests with every field missing in turn, and every number missing, empty, not a number, negative and
    huge.

    `kept` is never missing: Apache reads a missing group as a group named "null", our broker requires a name.
    """
    values = [value for value in ("", "x", -1, -(1 << 31), (1 << 31) - 1, 1 << 70) if value not in but]
    return [
        *(Asked(code, without(good, name)) for name in good if name != kept),
        *(Asked(code, {**good, name: value}) for name in numbers for value in values),
        Asked(code),
    ]


async def answers(address: str, asked: list[Asked]) -> list[Command]:
    dispatch = Router()
    dispatch.register(Code.NOTIFY_CONSUMER_IDS_CHANGED, lambda connection, command: None)
    client = RemotingClient(dispatch)
    found, sent = [], {}
    try:
        for one in asked:
            async with asyncio.timeout(SECONDS_MAX):
                answer = await client.call(address, one.command(sent), TIMEOUT_MS)
                while one.is_awaited and answer.code != 0:
                    answer = await client.call(address, one.command(sent), TIMEOUT_MS)
            fields = decode_fields(answer)
            if one.code == Code.SEND_MESSAGE_V2 and answer.code == 0:
                sent = {"@msgId": fields["msgId"], "@queue": fields["queueOffset"]}
                sent["@physical"] = str(int(fields["msgId"][16:], 16))
            found.append(answer)
        return found
    finally:
        await client.close()


Pairs = dict[str, list[tuple[Asked, Command, Command]]]
"""Scenario → request, Apache's answer, ours."""


def answers_of_both(scenarios: dict[str, list[Asked]], apache_addr: str, root: Path) -> Pairs:
    """Send every scenario to Apache's broker and to a new broker of ours, and return the answers."""
    broker = BrokerSettings(
        listen_port=0, bind_address="127.0.0.1", broker_name=BROKER_NAME, cluster_name=CLUSTER, property_filter=True
    )

    async def run() -> Pairs:
        async with Standalone(root, broker=broker, store=StoreSettings(commit_log_file_bytes=1 << 20)) as standalone:
            found = {}
            for name, asked in scenarios.items():
                theirs = await answers(apache_addr, asked)
                found[name] = list(zip(asked, theirs, await answers(standalone.broker_address, asked), strict=True))
            return found

    return asyncio.run(run())


def differences(pairs: list[tuple[Asked, Command, Command]]) -> dict[str, list[object]]:
    """Return the different answers of the two brokers."""
    return {
        str(asked): [(answer.code, answer.remark, shown(answer)) for answer in (theirs, ours)]
        for asked, theirs, ours in pairs
        if not is_same(theirs, ours) and not is_own_failure(asked, theirs)
    }


def is_own_failure(asked: Asked, theirs: Command) -> bool:
    """Return True if Apache's broker failed by itself, with an exception without text. This happens at times when it
    cleans queues of topics that are being created."""
    return asked.code == Code.CLEAN_EXPIRED_CONSUMEQUEUE and theirs.code == 1 and not theirs.remark


def is_same(theirs: Command, ours: Command) -> bool:
    """Return True if the answers agree in everything except exception texts and values that change with time."""
    remarks = [re.sub(r"127\.0\.0\.1:\d+|by the offset, \d+", "", answer.remark or "") for answer in (theirs, ours)]
    is_exception = EXCEPTION.match(remarks[0]) is not None
    return (theirs.code, shown(theirs)) == (ours.code, shown(ours)) and (is_exception or remarks[0] == remarks[1])


def shown(answer: Command) -> tuple[dict[str, str], object]:
    """Return fields and body without ids, addresses, positions and times."""
    fields = {name: value for name, value in decode_fields(answer).items() if name not in OWN_FIELDS}
    body = bytes(answer.payload)
    if body[4:6] == b"\xda\xa3":
        return fields, [
            (
                m.topic,
                m.queue_id,
                m.queue_offset,
                m.body,
                {k: v for k, v in m.properties.items() if k not in OWN_PROPERTIES},
            )
            for m in read_messages(body)
        ]
    return fields, own_part(loads(OF_THE_MOMENT.sub(rb"\1 0", TIMES.sub(b"0", body)))) if body[:1] in (
        b"{",
        b"[",
    ) else body


def own_part(body: Any) -> object:
    """Return the part of a broker's tables that belongs to this test: all tests share Apache's broker."""
    if not isinstance(body, dict):
        return body
    if "consumeStatsList" in body:
        # Apache's broker leaves the pull offsets at 0 here, ours returns the real ones.
        return {
            (group, tuple(sorted(queue.items()))): {**offsets, "pullOffset": 0}
            for groups in body["consumeStatsList"]
            for group, several in groups.items()
            if group.startswith("codes_")
            for stats in several
            for queue, offsets in stats["offsetTable"].items()
        }
    if not body.keys().isdisjoint(("topicConfigTable", "subscriptionGroupTable", "groupTopicMap")):
        return sorted(body)
    if "topicList" in body:
        return sorted(topic for topic in body["topicList"] if "ROCKSDB" not in topic and topic != "DefaultCluster")
    if "data" in body:
        return sorted(body)
    if "statsMinute" in body:
        return sorted((name, sorted(item)) for name, item in body.items())
    return body
