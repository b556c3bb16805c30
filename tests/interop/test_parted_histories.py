"""Our slave with a master of Apache's whose log differs from an offset on: the slave logs the offset, and serves
nothing.

It compares the logs with VIEW_MESSAGE_BY_ID. Each release answers this request differently at an offset where no record
begins.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rmqkit import Message, Producer
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command
from tests.interop.apache import ask
from tests.interop.conftest import kit_or_skip
from tests.interop.replicas import create_topic, restarted, run_replica
from tests.interop.server_process import wait_until
from tests.interop.standalone import run_name_server
from tests.patience import producing
from tests.ports import free_ports

TOPIC = "Parted"
PARTED_SECONDS = 150
PULL = {
    "consumerGroup": "asker",
    "topic": TOPIC,
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "1",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "1",
}


async def send(namesrv: str, mark: str, count: int) -> None:
    """Send messages. There are no slaves yet to wait for."""
    async with Producer("parting", namesrv, settings=producing()) as producer:
        each = (Message(topic=TOPIC, body=f"{mark} {i}".encode(), wait_store=False) for i in range(count))
        await asyncio.gather(*map(producer.send, each))


@pytest.mark.parametrize("version", ["5.4.0", "4.9.4"])
def test_our_slave_follows_no_other_history_and_says_where_they_part(version: str, tmp_path: Path) -> None:
    kit = kit_or_skip(version)
    with run_name_server(tmp_path) as (_, known):
        with run_replica(None, tmp_path / "ours", [known]) as ours:
            create_topic(ours.address, TOPIC, 1)
            asyncio.run(send(known, "both", 100))
            common = ours.log_end
            ours.stop()
        shutil.copytree(ours.store, tmp_path / "theirs/store")
        with restarted(ours, [known], 0) as ours:
            asyncio.run(send(known, "ours", 50))
            end = ours.log_end
            ours.stop()
        with run_replica(kit, tmp_path / "theirs", [known], ports=free_ports()[1:]):
            asyncio.run(send(known, "theirs", 200))
            with restarted(ours, [known], 1) as slave:
                said = f"the log is not its master's from physical offset {common} on"
                wait_until(lambda: said in slave.process.log.read_text(), PARTED_SECONDS, f"{said!r} in its log")
                assert (
                    ask(slave.address, Command(RequestCode.PULL_MESSAGE, fields=PULL)).code == ResponseCode.SYSTEM_BUSY
                )
                assert slave.log_end == end > common, "the slave's log does not shrink"
                slave.stop()
