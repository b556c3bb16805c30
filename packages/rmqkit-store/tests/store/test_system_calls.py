"""A store where fdatasync, posix_fallocate and posix_fadvise are missing, as on macOS."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.system import disk

BLOCK = 4096


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the list of calls on a system without these three calls and with F_FULLFSYNC."""
    made: list[tuple[str, int]] = []
    for name in ("fdatasync", "posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: made.append(("fcntl", command)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: made.append(("fsync", descriptor)))
    return made


def test_a_sync_goes_past_the_cache_of_the_disk(calls: list[tuple[str, int]]) -> None:
    disk.sync_data(7)
    disk.sync_file(7)
    assert calls == [("fcntl", 51), ("fcntl", 51)]


def test_a_file_system_that_does_not_know_it_gets_fsync(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter([errno.ENOTSUP, errno.EIO])

    def refuse(descriptor: int, command: int) -> None:
        raise OSError(number := next(numbers), os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    disk.sync_data(7)
    assert calls == [("fsync", 7)]
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync_data(7)
    assert calls == [("fsync", 7)]


def test_blocks_are_reserved_without_a_change_of_what_is_there(calls: list[tuple[str, int]], tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+b") as file:
        os.ftruncate(file.fileno(), 64 * BLOCK)
        os.pwrite(file.fileno(), b"kept", 3 * BLOCK - 2)
        before = (tmp_path / "file").read_bytes()
        disk.reserve(file.fileno(), 32 * BLOCK)
        assert (tmp_path / "file").read_bytes() == before
        assert os.fstat(file.fileno()).st_blocks * 512 >= 32 * BLOCK
        disk.reserve(file.fileno(), 65 * BLOCK)
        assert os.fstat(file.fileno()).st_size == 65 * BLOCK
        disk.drop_cached(file.fileno(), 0, BLOCK)


def test_a_disk_without_room_refuses_a_reservation(
    calls: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "pwrite", refuse)
    with open(tmp_path / "file", "w+b") as file, pytest.raises(OSError, match="No space left"):
        disk.reserve(file.fileno(), BLOCK)


BROKER = """
import asyncio, fcntl, os, sys
from pathlib import Path
synced, real = [], os.fsync
for name in ("fdatasync", "posix_fallocate", "posix_fadvise", "fallocate", "sched_getaffinity", "pidfd_open"):
    vars(os).pop(name, None)
fcntl.F_FULLFSYNC = 51
fcntl.fcntl = lambda descriptor, command: (synced.append(command), real(descriptor))
import rmqkit.broker.server
from rmqkit import Message, Producer
from rmqkit.standalone import Standalone
from rmqkit.store.settings import FlushDiskType, StoreSettings
sys.platform = "darwin"

async def round(count):
    store = StoreSettings(
        flush_disk_type=FlushDiskType.SYNC_FLUSH, commit_log_file_bytes=1 << 20, warm_mapped_file=True
    )
    async with Standalone(Path(sys.argv[1]), store=store) as both:
        async with Producer("p", both.namesrv_address) as producer:
            for number in range(count):
                print((await producer.send(Message(topic="T", body=b"%d" % number, keys=("k",)))).status.name)
        print(both.broker.context.store.failure)

asyncio.run(round(3))
asyncio.run(round(2))
print(set(synced), len(synced) > 5)
"""


def test_a_broker_stores_flushes_and_starts_again_there(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", BROKER, tmp_path], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n") == ["SEND_OK"] * 3 + ["None"] + ["SEND_OK"] * 2 + ["None", "{51} True", ""]
