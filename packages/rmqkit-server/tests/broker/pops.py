"""Pops, acks and other requests of a client that stores handles."""

from __future__ import annotations

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.ids import NORMAL_TOPIC, PopQueue, decode_pop_handle, decode_start_offsets
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.schemas.pop import (
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    ChangeInvisibleTimeResponse,
    PopMessageRequest,
    PopMessageResponse,
)
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.remoting.client import RemotingClient


def context_of(cluster):
    return cluster.standalone.broker.context


def now_ms():
    return SYSTEM_CLOCK.now_ms()


class Client:
    """A client that `pop` and `ack` can use in place of a cluster."""

    def __init__(self, address):
        self.address = address
        self.client = RemotingClient()

    async def call(self, code, header=None, body=b"", client=None):
        return await self.client.call(self.address, request(code, header, body), 60_000)

    async def send(self, body):
        header = SendMessageV2Request("p", "T", "TBW102", 4, int(body) % 4, 0, 1, 0, properties="")
        assert (await self.call(RequestCode.SEND_MESSAGE_V2, header, body)).code == 0


class Popped:
    """An answer to a pop, with the messages by their body and the handles that a client makes of it."""

    def __init__(self, answer, broker_name):
        self.code, self.remark = answer.code, answer.remark
        self.header = decode_header(answer, PopMessageResponse)
        self.messages = {one.body.decode(): one for one in read_messages(answer.body)} if answer.body else {}
        self.handles = {}
        starts = decode_start_offsets(self.header.start_offset_info or "")
        for body, one in self.messages.items():
            start = starts.get(PopQueue(NORMAL_TOPIC, one.queue_id), -1)
            header = self.header
            own = (
                f"{start} {header.pop_time} {header.invisible_time} {header.revive_qid} 0 {broker_name} {one.queue_id}"
            )
            self.handles[body] = one.properties.get("POP_CK", f"{own} {one.queue_offset}")

    def __iter__(self):
        return iter(self.messages)


async def pop(cluster, broker_name="broker-a", **fields):
    wanted = {
        "consumer_group": "g",
        "topic": "T",
        "queue_id": -1,
        "max_msg_nums": 32,
        "invisible_time": 60_000,
        "poll_time": 0,
        "born_time": now_ms(),
        "init_mode": 0,
        "exp_type": "TAG",
        "exp": "*",
    }
    return Popped(await cluster.call(RequestCode.POP_MESSAGE, PopMessageRequest(**wanted | fields)), broker_name)


def named(handle, group="g", topic="T"):
    """Return the header fields of a request about a popped message."""
    decoded = decode_pop_handle(handle)
    mark = {"0": "", "1": "_", "2": "+"}[decoded.retry]
    return {
        "consumer_group": group,
        "topic": f"%RETRY%{group}{mark}{topic}" if mark else topic,
        "queue_id": decoded.queue_id,
        "extra_info": handle,
        "offset": decoded.queue_offset,
    }


async def ack(cluster, handle, **fields):
    return await cluster.call(RequestCode.ACK_MESSAGE, AckMessageRequest(**named(handle) | fields))


async def change(cluster, handle, invisible_ms, **fields):
    header = ChangeInvisibleTimeRequest(**named(handle) | {"invisible_time": invisible_ms} | fields)
    answer = await cluster.call(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, header)
    return answer.code, decode_header(answer, ChangeInvisibleTimeResponse)


async def sent(cluster, *bodies, **fields):
    for body in bodies:
        assert (await cluster.send(body=body.encode(), **fields)).code == 0
