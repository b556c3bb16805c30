"""Which files of `src` a request enters at the broker, in the order it first enters them.

``python -m tests.tree.walks`` prints them for a plain send, a pull that finds a message, and a pop with its ack. Calls
on the servers' thread are followed, from the bytes that come in to those that go out; the client is a plain socket.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from pathlib import Path
from types import CodeType, FrameType

import rmqkit
from rmqkit.testing import LocalCluster
from tests.broker.stranger import frame

ROOT = str(Path(rmqkit.__file__).parent) + "/"
SEND = {
    "a": "p",
    "b": "T",
    "c": "TBW102",
    "d": "4",
    "e": "0",
    "f": "0",
    "h": "0",
    "g": "1700000000000",
    "i": "UNIQ_KEY\x017F000001\x02WAIT\x01true",
    "j": "0",
    "k": "false",
    "m": "false",
}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "0",
}
POP = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "maxMsgNums": "1",
    "invisibleTime": "60000",
    "pollTime": "0",
    "initMode": "0",
    "expType": "TAG",
    "exp": "*",
}


def walks() -> dict[str, list[str]]:
    """Walk → files below `src/rmqkit`, without their ending."""
    with LocalCluster() as cluster:
        cluster.create_topic("T", queues=1)
        host, port = cluster.brokers[0].address.split(":")
        with socket.create_connection((host, int(port))) as peer:
            for _ in range(2):  # what is made at the first request is there at the next
                ask(peer, 310, SEND, b"body")
                found = {"send": followed(cluster, lambda: [ask(peer, 310, SEND, b"body")])}
                found["pull"] = followed(cluster, lambda: [ask(peer, 11, PULL)])
                pop(peer)
                found["pop and ack"] = followed(cluster, lambda: pop_and_ack(peer))
        return found


def pop_and_ack(peer: socket.socket) -> None:
    fields = pop(peer)
    offset = fields["msgOffsetInfo"].split(" ")[2]
    begin = fields["startOffsetInfo"].split(" ")[2]
    handle = f"{begin} {fields['popTime']} {fields['invisibleTime']} {fields['reviveQid']} 0 broker 0 {offset}"
    ask(peer, 200051, {"consumerGroup": "g", "topic": "T", "queueId": "0", "extraInfo": handle, "offset": offset})


def pop(peer: socket.socket) -> dict[str, str]:
    return ask(peer, 200050, {**POP, "bornTime": str(time.time_ns() // 1_000_000)})


def ask(peer: socket.socket, code: int, fields: dict[str, str], body: bytes = b"") -> dict[str, str]:
    """Send a request and return the fields of its answer."""
    peer.sendall(frame(code, fields, body))
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">i", data[:4])[0]:
        data += peer.recv(1 << 16)
    length = struct.unpack(">i", data[4:8])[0] & 0xFFFFFF
    header = json.loads(data[8 : 8 + length])
    assert header["code"] == 0, header
    answered: dict[str, str] = header.get("extFields") or {}
    return answered


def followed(cluster: LocalCluster, work: object) -> list[str]:
    entered: dict[str, None] = {}
    seen: set[CodeType] = set()

    def enter(called: FrameType, event: str, argument: object) -> None:
        code = called.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            if code.co_filename.startswith(ROOT):
                entered.setdefault(code.co_filename.removeprefix(ROOT).removesuffix(".py"))

    cluster.look(lambda: sys.setprofile(enter))
    assert callable(work)
    work()
    cluster.look(lambda: sys.setprofile(None))
    return [name for name in entered if not name.startswith("testing/")]


if __name__ == "__main__":
    for walk, files in walks().items():
        print(f"{walk}: {len(files)} files\n  " + "\n  ".join(files))
