"""Kills of a broker with an archive under mixed load. Afterwards every acknowledged message is at its offset, and no
queue has a message twice.

    python -m tests.faults.archive_mixed --kills 50 --seed 7

The load is plain sends, batches, delayed messages, transactions and pops, while log files are archived and deleted.
After the last kill every queue is read from its first message to its last one, through the archive and the log. Delayed
and committed messages must be delivered. If a kill interrupts a delivery, the message may be in the queue twice, at two
offsets.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from rmqkit.protocol.record import BatchEntry, encode_batch, iter_records
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.verify import verify
from tests.broker.stranger import Answer, Stranger
from tests.ports import free_port

QUEUES = 3
_CREATE_TOPIC, _SEND, _SEND_BATCH, _END, _PULL, _POP, _MAX = 17, 310, 320, 37, 11, 200_050, 30
_SETTINGS = (
    "mappedFileSizeCommitLog=65536",
    "mappedFileSizeConsumeQueue=6000",
    "maxHashSlotNum=500",
    "maxIndexNum=2000",
    "fileReservedTime=0",
    "cleanResourceInterval=500",
    "deleteCommitLogFilesInterval=1",
    "haListenPort=0",
    "grpcServerPort=-1",
    "brokerName=b",
    "brokerIP1=127.0.0.1",
    "messageDelayLevel=1s 2s 3s",
    "deleteWhen=" + ";".join(f"{hour:02}" for hour in range(24)),
)


@dataclass
class Outcome:
    """The result of all kills."""

    kills: int = 0
    acknowledged: int = 0
    delivered: int = 0
    segments: int = 0
    log_begin: int = 0
    lost: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.twice and not self.damaged


class _Load:
    """The acknowledged messages. ``places``: bodies by topic, queue and offset. ``promised``: bodies that the broker
    must deliver later.
    """

    def __init__(self, address: str, choose: random.Random) -> None:
        self._address = address
        self._choose = choose
        self._numbers = itertools.count()
        self.places: dict[tuple[str, int, int], bytes] = {}
        self.promised: set[bytes] = set()

    def _body(self) -> bytes:
        return b"%d " % next(self._numbers) + os.urandom(self._choose.randrange(3000))

    async def _send(
        self, peer: Stranger, topic: str, body: bytes, properties: str, *, flag: int = 0, code: int = _SEND
    ) -> Answer:
        queue_id = self._choose.randrange(QUEUES)
        is_batch = "true" if code == _SEND_BATCH else "false"
        values = ("p", topic, "TBW102", "4", str(queue_id), str(flag), "1700000000000", "0", properties, "0", "false")
        fields = dict(zip("abcdefghijk", values, strict=True)) | {"m": is_batch}
        return await peer.ask(code, body, **fields)

    async def plain(self, peer: Stranger) -> None:
        answer = await self._send(peer, "P", body := self._body(), "KEYS\x01k\x02")
        if answer.code == 0:
            self.places["P", int(answer.fields["queueId"]), int(answer.fields["queueOffset"])] = body

    async def batch(self, peer: Stranger) -> None:
        bodies = [self._body() for _ in range(self._choose.randint(2, 8))]
        content = encode_batch([BatchEntry(body, b"") for body in bodies])
        answer = await self._send(peer, "P", content, "", code=_SEND_BATCH)
        if answer.code == 0:
            first = int(answer.fields["queueOffset"])
            for number, body in enumerate(bodies, first):
                self.places["P", int(answer.fields["queueId"]), number] = body

    async def delayed(self, peer: Stranger) -> None:
        answer = await self._send(peer, "D", body := self._body(), f"DELAY\x01{self._choose.randint(1, 3)}\x02")
        if answer.code == 0:
            self.promised.add(body)

    async def transaction(self, peer: Stranger) -> None:
        answer = await self._send(peer, "X", body := self._body(), "TRAN_MSG\x01true\x02PGROUP\x01p\x02", flag=4)
        if answer.code:
            return
        ended = await peer.ask(
            _END,
            topic="X",
            producerGroup="p",
            tranStateTableOffset=answer.fields["queueOffset"],
            commitLogOffset=str(int(answer.fields["msgId"][16:], 16)),
            commitOrRollback="8",
            fromTransactionCheck="false",
            msgId=answer.fields["msgId"],
            transactionId=answer.fields.get("transactionId", ""),
        )
        if ended.code == 0:
            self.promised.add(body)

    async def pop(self, peer: Stranger) -> None:
        fields = {"consumerGroup": "g", "topic": "P", "queueId": "-1", "maxMsgNums": "8", "invisibleTime": "10000"}
        more = {"pollTime": "0", "bornTime": "1", "initMode": "0", "expType": "TAG", "exp": "*", "order": "false"}
        await peer.ask(_POP, **fields, **more)

    async def run(self, work: Callable[[Stranger], Awaitable[None]]) -> None:
        """Repeat a piece of work until the broker is killed."""
        try:
            async with Stranger(self._address) as peer:
                while True:
                    await work(peer)
        except (OSError, asyncio.IncompleteReadError):
            return


class _Broker:
    """The broker's process."""

    def __init__(self, root: Path, port: int) -> None:
        self._root, self._port = root, port
        self.address = f"127.0.0.1:{port}"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> _Broker:
        settings = [part for one in (*_SETTINGS, f"archive={self._root}/archive") for part in ("--set", one)]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rmqkit", "broker", "--port", str(self._port), "--host", "127.0.0.1"),
            *("--store", str(self._root / "store"), "-n", "127.0.0.1:1", *settings),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line.startswith(b"ready"), line
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


async def _bodies(peer: Stranger, topic: str, queue_id: int) -> list[tuple[int, bytes]]:
    """Return offsets and bodies of a queue, from the first message to the last one."""
    answer = await peer.ask(_MAX, topic=topic, queueId=str(queue_id))
    end, offset, found = int(answer.fields["offset"]), 0, list[tuple[int, bytes]]()
    while offset < end:
        fields = {"queueOffset": str(offset), "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0"}
        more = {"suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0", "consumerGroup": "reader"}
        answer = await peer.ask(_PULL, topic=topic, queueId=str(queue_id), **fields, **more)
        if answer.code == 2:  # the broker has not listed the archive yet
            await asyncio.sleep(0.2)
            continue
        assert answer.code in (0, 20, 21), f"{topic}-{queue_id} at {offset}: {answer.code} {answer.remark}"
        found += [(one.queue_offset, bytes(one.body)) for one in iter_records(answer.body)] if answer.body else []
        assert int(answer.fields["nextBeginOffset"]) > offset, f"{topic}-{queue_id} stays at {offset}"
        offset = int(answer.fields["nextBeginOffset"])
    return found


async def _create(address: str) -> None:
    async with Stranger(address) as peer:
        for topic in "PDX":
            fields = {"readQueueNums": str(QUEUES), "writeQueueNums": str(QUEUES), "perm": "6", "order": "false"}
            more = {"defaultTopic": "TBW102", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0"}
            assert (await peer.ask(_CREATE_TOPIC, topic=topic, **fields, **more)).code == 0


async def _check(root: Path, broker: _Broker, load: _Load, outcome: Outcome) -> None:
    places: dict[tuple[str, int, int], bytes] = {}
    for _ in range(60):  # until the delayed messages are delivered
        places.clear()
        async with Stranger(broker.address) as peer:
            for topic, queue_id in itertools.product("PDX", range(QUEUES)):
                rows = await _bodies(peer, topic, queue_id)
                numbers = [number for number, _ in rows]
                if numbers != list(range(len(numbers))):
                    outcome.twice.append(
                        f"{topic}-{queue_id} has numbers that are not 0 to {len(numbers) - 1}, in order"
                    )
                places |= {(topic, queue_id, number): body for number, body in rows}
        came = set(places.values())
        if load.promised <= came:
            break
        await asyncio.sleep(1)
    outcome.delivered = len(places)
    outcome.lost += [str(place) for place, body in load.places.items() if places.get(place) != body]
    outcome.lost += [f"{body[:8]!r} never came" for body in load.promised - came]
    plain = [body for (topic, _, _), body in places.items() if topic == "P"]
    if len(plain) != len(set(plain)):
        outcome.twice.append(f"{len(plain) - len(set(plain))} messages are twice in topic P")
    log = root / "store" / "commitlog"
    outcome.log_begin = int(min(path.name for path in log.iterdir() if re.fullmatch(r"\d{20}", path.name)))
    report = verify(Folder(root / "archive" / "b"))
    outcome.segments, outcome.damaged = report.segments, [str(problem) for problem in report.problems]


async def _run(root: Path, kills: int, seed: int) -> Outcome:
    choose, outcome = random.Random(seed), Outcome(kills)
    broker = _Broker(root, free_port(-2, 1))
    load = _Load(broker.address, choose)
    for number in range(kills):
        async with broker:
            if not number:
                await _create(broker.address)
            works = (load.plain, load.plain, load.batch, load.delayed, load.transaction, load.pop)
            loads = [asyncio.create_task(load.run(work)) for work in works]
            await asyncio.sleep(choose.uniform(0.5, 2.5))
        await asyncio.gather(*loads)
    outcome.acknowledged = len(load.places) + len(load.promised)
    async with broker:
        await _check(root, broker, load, outcome)
    return outcome


def run(root: Path, kills: int, seed: int) -> Outcome:
    """Kill ``kills`` brokers, then read everything back."""
    return asyncio.run(_run(root, kills, seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmq-archive-mixed-") as folder:
        outcome = run(Path(folder), options.kills, options.seed)
    print(outcome)
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
