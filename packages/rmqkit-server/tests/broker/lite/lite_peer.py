"""A lite consumer and producer of bare remoting requests, as a proxy of RocketMQ 5.5 sends them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.ids import decode_lite_counts
from rmqkit.protocol.names import lite_queue
from rmqkit.protocol.properties import decode_properties, encode_properties
from rmqkit.protocol.record import Record, iter_records
from tests.broker.cluster import Cluster

PARENT, GROUP = "LT", "LG"


class Received(msgspec.Struct):
    """One received message. ``tries``: the number of earlier deliveries."""

    lite: str
    body: bytes
    number: int
    tries: int
    handle: str


class LitePeer:
    """A client of a cluster."""

    def __init__(self, cluster: Cluster, client_id: str = "raw1", group: str = GROUP, client: Any = None) -> None:
        self.cluster, self.client_id, self.group = cluster, client_id, group
        self.client = client
        self.attempts = 0

    async def change(self, action: str, *names: str, **fields: Any) -> Command:
        one = {
            "action": action,
            "clientId": self.client_id,
            "group": self.group,
            "liteTopicSet": list(names),
            "topic": PARENT,
            "version": 0,
            **fields,
        }
        return await self.cluster.ask(RequestCode.LITE_SUBSCRIPTION_CTL, {"subscriptionSet": [one]}, client=self.client)

    async def subscribe(self, *names: str, **fields: Any) -> None:
        answer = await self.change("PARTIAL_ADD", *names, **fields)
        assert answer.code == 0, answer.remark

    async def pop_answer(self, count: int = 32, *, invisible_ms: int = 30_000, wait_ms: int = 0, **fields: Any) -> Any:
        given = {
            "clientId": self.client_id,
            "consumerGroup": self.group,
            "topic": PARENT,
            "maxMsgNum": count,
            "invisibleTime": invisible_ms,
            "pollTime": wait_ms,
            "bornTime": int(time.time() * 1000) if not fields.pop("now", 0) else 0,
            **fields,
        }
        given["bornTime"] = self.cluster.standalone.broker.context.clock.now_ms()
        return await self.cluster.ask(RequestCode.POP_LITE_MESSAGE, client=self.client, **given)

    async def pop(self, count: int = 32, **fields: Any) -> list[Received]:
        answer = await self.pop_answer(count, **fields)
        if answer.code != 0:
            assert answer.code == 210, (answer.code, answer.remark)
            return []
        header = decode_fields(answer)
        tries = decode_lite_counts(header["orderCountInfo"])
        return [self._received(*one, header) for one in zip(iter_records(answer.payload), tries, strict=True)]

    def _received(self, record: Record, tries: int, header: dict[str, str]) -> Received:
        properties = decode_properties(record.properties)
        number = int(properties["INNER_MULTI_QUEUE_OFFSET"])
        handle = (
            f"{number} {header['popTime']} {header['invisibleTime']} 999 0 broker-a 0 {number} {record.physical_offset}"
        )
        return Received(properties["__LITE_TOPIC"], record.body, number, tries, handle)

    async def ack(self, *messages: Received) -> list[int]:
        return [(await self.ack_answer(one)).code for one in messages]

    async def ack_answer(self, one: Received, **fields: Any) -> Command:
        given = {
            "consumerGroup": self.group,
            "topic": PARENT,
            "queueId": 0,
            "offset": one.number,
            "extraInfo": one.handle,
            "liteTopic": one.lite,
            **fields,
        }
        return await self.cluster.ask(RequestCode.ACK_MESSAGE, client=self.client, **given)

    async def nack(self, one: Received, ms: int, *, suspend: bool = False) -> Command:
        return await self.cluster.ask(
            RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
            client=self.client,
            consumerGroup=self.group,
            topic=PARENT,
            queueId=0,
            offset=one.number,
            extraInfo=one.handle,
            liteTopic=one.lite,
            invisibleTime=ms,
            suspend="true" if suspend else "false",
        )


async def send(cluster: Cluster, name: str, *bodies: str, topic: str = PARENT, **properties: str) -> list[Command]:
    """Send messages to a lite topic. Return the answers."""
    given = encode_properties({"__LITE_TOPIC": name, **properties}).decode()
    return [await cluster.send(topic, body.encode(), given) for body in bodies]


async def make_parent(cluster: Cluster, name: str = PARENT, **attributes: str) -> None:
    given = {"+message.type": "LITE", **{f"+{key}": value for key, value in attributes.items()}}
    one = {"topicName": name, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "attributes": given}
    answer = await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": [one]})
    assert answer.code == 0, answer.remark


async def make_group(cluster: Cluster, name: str = GROUP, parent: str = PARENT, **attributes: str) -> None:
    given = {"+lite.bind.topic": parent, **{f"+lite.{key}": value for key, value in attributes.items()}}
    body = {"groupName": name, "attributes": given}
    answer = await cluster.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body)
    assert answer.code == 0, answer.remark


@asynccontextmanager
async def lite_cluster(root: Path, **settings: Any) -> AsyncIterator[Cluster]:
    """Run a cluster with the parent LT and the group LG."""
    async with Cluster(root, **settings) as cluster:
        await make_parent(cluster)
        await make_group(cluster)
        yield cluster


def light(name: str) -> str:
    return lite_queue(PARENT, name)
