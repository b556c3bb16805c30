"""The harness itself: a real broker opens the store of another one; the probe detects missing messages; no server
survives killed tests."""

import subprocess
import sys
from pathlib import Path

from tests.interop.apache import ApachePair, open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.interop.probe import Received, run_probe
from tests.interop.server_process import wait_until

COUNT = 60
ROOT = Path(__file__).parents[2]
KILLED = """
import os, pathlib, signal, sys
from tests.interop.server_process import ServerProcess
servers = [ServerProcess(["sleep", "1000"], pathlib.Path(sys.argv[1])) for _ in range(3)]
servers[1].stop(signal.SIGTERM, 100)
print(*(server.pid for server in servers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def by_place(messages: list[Received]) -> dict[tuple[int, int], tuple[int, str, str]]:
    """Index messages by place, without offset message ids: these contain the store host, and the second broker has
    another port.
    """
    return {
        (message.queue_id, message.queue_offset): (message.physical_offset, message.msg_id, message.body_sha256)
        for message in messages
    }


def test_a_store_of_a_killed_broker_opens_in_another(apache_kit: ApacheKit, tmp_path: Path) -> None:
    store_dir = tmp_path / "store"
    with open_store_with_apache(apache_kit, store_dir, tmp_path) as first:
        before = run_probe(
            apache_kit,
            "both",
            namesrv=first.namesrv_addr,
            topic="Moved",
            count=COUNT,
            consumers={"mover": "*"},
            work_dir=tmp_path,
        )
        assert before.exit_code == 0, before.outcome
        first.kill_broker()
    assert (store_dir / "abort").exists(), "a killed broker leaves the abort file"

    with open_store_with_apache(apache_kit, store_dir, tmp_path) as second:
        after = run_probe(apache_kit, "read", namesrv=second.namesrv_addr, topic="Moved", work_dir=tmp_path)

    assert after.exit_code == 0, after.outcome
    assert len(after.received) == COUNT + len(after.queues) == sum(queue.max_offset for queue in after.queues)
    assert {queue.min_offset for queue in after.queues} == {0}
    assert by_place(after.received) == by_place(before.received)


def test_the_probe_says_what_is_missing(apache: ApachePair, tmp_path: Path) -> None:
    run = run_probe(
        apache.kit,
        "consume",
        namesrv=apache.namesrv_addr,
        topic="NothingThere",
        consumers={"hopeful": "*:10"},
        timeout_seconds=1,
        work_dir=tmp_path,
    )

    assert run.exit_code == 1, run.outcome
    assert [(summary.complete, summary.text) for summary in run.summaries] == [(False, "hopeful 0 of 10")]


def test_servers_end_with_tests_that_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "server.log")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert ended.returncode == -9
    pids = ended.stdout.split()
    assert len(pids) == 3
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), 30, f"end of process {pid}")


def is_running(pid: str) -> bool:
    """Return False for a zombie process, which only waits until its exit code is read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False
