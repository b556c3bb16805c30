"""The source files that a request enters, in the order of the first entry.

``python -m tests.tree.walks`` prints them for a plain send, a pull that finds a message, a pop with its ack, and a scan
of a store by one Spark task. Requests are traced in the broker, from the received bytes to the sent bytes. The client
is a plain socket. Objects that the first requests create, such as the queues of the revive topic, exist already. A scan
is traced without Spark.

The program prints two counts: of all files, and of the files in `broker/`. Only code that handles the request itself is
counted. Code that is only notified is not: the statistics, listeners of the dispatcher (waiting pulls and
pops, slaves), the clock, and periodic work.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from rmqkit.spark.source.store import read_part, read_plan, store_options, store_parts
from rmqkit.testing import LocalCluster
from tests.golden_stores import unpack_golden
from tests.sources import FOLDERS, place

HEADER = {"language": "JAVA", "version": 401, "opaque": 1, "flag": 0, "serializeTypeCurrentRPC": "JSON"}
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
TOLD = (
    "store/dispatcher._tell",
    "broker/statistics",
    "broker/counts",
    "broker/recorder",
    "clock",
    "remoting/tasks",
    "broker/delay/timer",
)
REVIVE_QUEUES = 8
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
    """Return walk → files below `rmqkit`, without their suffix."""
    with LocalCluster() as cluster:
        cluster.create_topic("T", queues=1)
        host, port = cluster.brokers[0].address.split(":")
        with socket.create_connection((host, int(port))) as peer:
            for _ in range(REVIVE_QUEUES):  # each queue of the revive topic receives check points in its turn
                ask(peer, 310, SEND, b"body")
                pop_and_ack(peer)
            for _ in range(2):  # objects that the first request creates exist for the next one
                ask(peer, 310, SEND, b"body")
                found = {"send": followed(cluster, lambda: [ask(peer, 310, SEND, b"body")])}
                found["pull"] = followed(cluster, lambda: [ask(peer, 11, PULL)])
                pop_and_ack(peer)
                found["pop"] = followed(cluster, lambda: pop_and_ack(peer))
    found["scan"] = scanned()
    return found


def scanned() -> list[str]:
    """Return the files that one task enters for a store that Apache's broker wrote."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        root = unpack_golden("5.4.0", Path(folder)).root
        for _ in range(2):
            sys.setprofile(walk.enter)
            try:
                options = store_options({"path": str(root)})
                plan = read_plan(options, [])
                assert [batch for part in store_parts(options) for batch in read_part(part, plan)]
            finally:
                sys.setprofile(None)
    return list(walk.entered)


def pop_and_ack(peer: socket.socket) -> None:
    fields = pop(peer)
    offset = fields["msgOffsetInfo"].split(" ")[2]
    begin = fields["startOffsetInfo"].split(" ")[2]
    handle = f"{begin} {fields['popTime']} {fields['invisibleTime']} {fields['reviveQid']} 0 broker 0 {offset}"
    ask(peer, 200051, {"consumerGroup": "g", "topic": "T", "queueId": "0", "extraInfo": handle, "offset": offset})


def pop(peer: socket.socket) -> dict[str, str]:
    return ask(peer, 200050, {**POP, "bornTime": str(time.time_ns() // 1_000_000)})


def ask(peer: socket.socket, code: int, fields: dict[str, str], body: bytes = b"") -> dict[str, str]:
    """Send a request and return the header fields of its answer."""
    encoded = json.dumps({**HEADER, "code": code, "extFields": fields}, separators=(",", ":")).encode()
    peer.sendall(struct.pack(">ii", 4 + len(encoded) + len(body), len(encoded)) + encoded + body)
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack(">i", data[:4])[0]:
        data += peer.recv(1 << 16)
    length = struct.unpack(">i", data[4:8])[0] & 0xFFFFFF
    header = json.loads(data[8 : 8 + length])
    assert header["code"] == 0, header
    answered: dict[str, str] = header.get("extFields") or {}
    return answered


def followed(cluster: LocalCluster, work: Callable[[], object]) -> list[str]:
    walk = Walk()
    cluster.look(lambda: sys.setprofile(walk.enter))
    work()
    cluster.look(lambda: sys.setprofile(None))
    return list(walk.entered)


class Walk:
    """A profiler of one thread: the files entered while `enter` is set."""

    def __init__(self) -> None:
        self.entered: dict[str, None] = {}
        self._names: dict[CodeType, str] = {}
        self._told: FrameType | None = None

    def enter(self, called: FrameType, event: str, argument: object) -> None:
        if self._told is not None:
            if event == "return" and called is self._told:
                self._told = None
            return
        if event != "call":
            return
        code = called.f_code
        if code not in self._names:
            path = Path(code.co_filename)
            is_ours = code.co_name != "<module>" and any(path.is_relative_to(one) for one in FOLDERS.values())
            self._names[code] = str(place(path).with_suffix("")) if is_ours else ""
        name = self._names[code]
        if name in TOLD or f"{name}.{code.co_name}" in TOLD:
            self._told = called
        elif name and not name.startswith("testing/"):
            self.entered.setdefault(name)


if __name__ == "__main__":
    for walk, files in walks().items():
        in_broker = sum(name.startswith("broker/") for name in files)
        print(f"{walk}: all {len(files)} files, in broker/ {in_broker}\n  " + "\n  ".join(files))
