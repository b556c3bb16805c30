"""`examples/cluster`: one command, six servers; a master is killed under it, and Ctrl-C stops the rest."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

from rmqkit import Message, Producer, PushConsumer
from rmqkit.errors import SendFailed
from tests.interop.server_process import ServerProcess, wait_until
from tests.patience import producing, pushing

PROGRAM = Path(__file__).parents[2] / "examples/cluster/cluster.py"
SECONDS_MAX = 150
COUNT = 40


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def send(producer: Producer, count: int) -> dict[str, set[str]]:
    """Send until ``count`` messages are stored. Return the bodies by broker."""
    taken: dict[str, set[str]] = {}
    deadline = asyncio.get_running_loop().time() + SECONDS_MAX
    while sum(map(len, taken.values())) < count:
        assert asyncio.get_running_loop().time() < deadline, taken
        body = os.urandom(8).hex()
        try:
            result = await producer.send(Message(topic="Orders", body=body.encode()))
        except SendFailed:
            continue
        if result.status.name == "SEND_OK":
            taken.setdefault(result.queue.broker_name, set()).add(body)
    return taken


async def consume(namesrv: str, wanted: set[str]) -> set[str]:
    consumer, received, done = PushConsumer("billing", namesrv, settings=pushing()), set(), asyncio.Event()

    @consumer.on("Orders")
    async def bill(message):
        received.add(message.body.decode())
        if received >= wanted:
            done.set()

    async with consumer:
        await asyncio.wait_for(done.wait(), SECONDS_MAX)
    return received


def test_nothing_acknowledged_is_lost_with_a_master(tmp_path):
    command = [sys.executable, PROGRAM, tmp_path / "cluster", "--port", 0, "--broker-port", 0]
    with ServerProcess(command, tmp_path / "log") as process:
        process.wait_ready("^Ctrl-C stops all", SECONDS_MAX)
        table = process.log.read_text()
        namesrv = re.search(r"NAMESRV_ADDR='(\S+)'", table)[1]
        rows = re.findall(r"│ (\S+) +│ (name server|master|slave) +│ (127\.0\.0\.1:\d+) │ (\d+)", table)
        assert [row[1] for row in rows] == ["name server"] * 2 + ["master"] * 2 + ["slave"] * 2
        assert namesrv == ";".join(row[2] for row in rows[:2])
        pids = {row[0]: int(row[3]) for row in rows}

        async def scenario():
            async with Producer("shop", namesrv, settings=producing()) as producer:
                before = await send(producer, COUNT)
                assert set(before) == {"broker-a", "broker-b"}
                os.kill(pids["broker-a-master"], signal.SIGKILL)
                told = "broker-a-master ended with -9"
                await asyncio.to_thread(wait_until, lambda: told in process.log.read_text(), SECONDS_MAX, told)
                after = await send(producer, COUNT // 4)
                assert set(after) == {"broker-b"}
            wanted = set().union(*before.values(), *after.values())
            assert await consume(namesrv, wanted) >= wanted

        asyncio.run(scenario())
        assert process.stop(signal.SIGINT, SECONDS_MAX) == 0
        assert process.log.read_text().endswith("stopping\nstopped\n")
        assert not any(is_running(pid) for pid in pids.values())
