"""SIGKILL at any instant loses nothing that was acknowledged, under either way of flushing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import FlushDiskType
from tests.store.stores import message, opened, read_all, small_settings

KILLS = 6
ROUNDS_MAX = 400

CHILD = """
import os, sys
from pathlib import Path
from tests.store.test_kill import run_child
run_child(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def run_child(root: Path, flush_disk_type: str, first: int) -> None:
    """Put numbered messages until somebody kills us; print each number when it is acknowledged."""
    store = MessageStore(root, small_settings(flush_disk_type=FlushDiskType(flush_disk_type)))
    store.open()
    for number in range(first, first + 1_000_000):
        put = store.put(message(queue_id=number % 3, body=b"%08d" % number + bytes(number % 700), KEYS=f"k{number}"))
        if flush_disk_type == "SYNC_FLUSH":
            store.request_flush()
            while store.durable_offset < put.end_offset:
                os.sched_yield()
        os.write(1, b"%08d\n" % number)


@pytest.mark.faults
@pytest.mark.parametrize("flush_disk_type", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_nothing_acknowledged_is_lost(tmp_path: Path, flush_disk_type: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    root, acknowledged = tmp_path / "s", -1
    for _ in range(KILLS):
        acknowledged = _run_and_kill(root, flush_disk_type, acknowledged + 1, chance.randrange(1, ROUNDS_MAX))
        with opened(root) as store:
            numbers = sorted(
                int(record.body[:8]) for queue_id in range(3) for record in read_all(store, "TopicTest", queue_id)
            )
            # one more may have been stored without its acknowledgement having come out
            assert numbers in (list(range(acknowledged + 1)), list(range(acknowledged + 2)))
            for number in numbers[-20:]:
                assert store.query("TopicTest", f"k{number}", 8, 0, 1 << 62).physical_offsets
            acknowledged = numbers[-1]


def _run_and_kill(root: Path, flush_disk_type: str, first: int, after: int) -> int:
    """Let a process put messages, kill it after some acknowledgements, and return the last number acknowledged."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), flush_disk_type, str(first)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(after)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
    assert lines[0], "the process began"
    return int([line for line in lines if line.endswith(b"\n")][-1])
