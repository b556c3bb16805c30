"""Apache's broker 5.5 opens a store of 5.5 that our broker used in between until it was killed.

A broker of 5.5 begins its recovery at the log file that ``logicsPhysicalOffset`` of the check point names. With
``enableAcceleratedRecovery`` it refuses to start when that number is 0. Source: store.md §8.1, delta-5.5.md §3.
"""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rmqkit import Message, Producer
from tests.interop.apache import ApachePair, log_end, open_store_with_apache
from tests.interop.conftest import kit_or_skip
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_standalone
from tests.interop.test_store_moves import CONF, TOPIC, new_folder, read
from tests.patience import producing

COUNT = 200


@pytest.fixture(scope="module")
def kit() -> ApacheKit:
    return kit_or_skip("5.5.0")


@contextmanager
def opened(kit: ApacheKit, folder: Path, *, is_accelerated: bool = False) -> Iterator[ApachePair]:
    accelerated = str(is_accelerated).lower()
    # A broker of 5.5 writes the number in thorough flushes only, once a minute by default.
    conf = {**CONF, "enableAcceleratedRecovery": accelerated, "flushConsumeQueueThoroughInterval": 100}
    with open_store_with_apache(kit, folder / "store", folder, conf) as pair:
        yield pair


async def send(namesrv: str, mark: str) -> None:
    async with Producer("movers", namesrv, settings=producing()) as producer:
        await producer.send(Message(topic=TOPIC, body=b"first", tags=mark))
        await asyncio.gather(
            *(producer.send(Message(topic=TOPIC, body=b"%d" % i * 300, tags=mark)) for i in range(1, COUNT))
        )


def logics_physical_offset(folder: Path) -> int:
    number: int = struct.unpack_from(">q", (folder / "store/checkpoint").read_bytes(), 40)[0]
    return number


@pytest.fixture(scope="module")
def killed(kit: ApacheKit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of 5.5 that lost its last log file and that our broker opened, filled and left by a kill."""
    folder = new_folder(tmp_path_factory.mktemp("checkpoint") / "killed")
    with opened(kit, folder) as theirs:
        asyncio.run(send(theirs.namesrv_addr, "theirs"))
        theirs.stop_broker()
    (folder / "store/abort").touch()
    assert logics_physical_offset(folder) > 0, "a broker of 5.5 writes the field when it stops"
    newest = max(path for path in (folder / "store/commitlog").iterdir() if any(path.read_bytes()))
    newest.write_bytes(bytes(newest.stat().st_size))  # now the number of 5.5 is greater than the end of the log
    with run_standalone(folder / "store", folder, "-c", str(folder / "ours.conf")) as ours:
        end_when_opened = log_end(ours.broker_addr)
        assert logics_physical_offset(folder) == end_when_opened
        asyncio.run(send(ours.namesrv_addr, "ours"))
        end = log_end(ours.broker_addr)
        ours.process.kill()
    assert 0 < end_when_opened <= logics_physical_offset(folder) <= end
    return folder


@pytest.mark.parametrize("is_accelerated", [False, True], ids=["by-time", "accelerated"])
def test_apache_5_5_recovers_a_store_that_was_killed_under_ours(
    kit: ApacheKit, killed: Path, tmp_path: Path, is_accelerated: bool
) -> None:
    theirs_folder, ours_folder = (Path(shutil.copytree(killed, tmp_path / name)) for name in ("theirs", "ours"))
    with run_standalone(ours_folder / "store", ours_folder, "-c", str(ours_folder / "ours.conf")) as ours:
        expected = asyncio.run(read(ours.namesrv_addr))
        ours.stop()
    assert sum(tags == "ours" for _, _, tags, _ in expected[1].values()) == COUNT
    with opened(kit, theirs_folder, is_accelerated=is_accelerated) as theirs:
        assert asyncio.run(read(theirs.namesrv_addr)) == expected
