"""Ordered consumption by Apache's Java client while our broker is killed and restarted: in order, without gaps.

The locks of the queues are in memory and lost with the broker. The consumer locks its queues again, and continues from
the stored offsets. Messages after a stored offset are consumed a second time, in order.
"""

import subprocess
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from tests.interop.kit import ApacheKit
from tests.interop.probe import PROBE_HEAP_MB
from tests.interop.standalone import run_standalone
from tests.ports import free_ports

MESSAGES = 240
KILLED_AFTER = (60, 140)


def test_order_holds_and_nothing_is_left_out_while_the_broker_is_killed(apache_kit: ApacheKit, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    name_server, broker, _ = free_ports()
    same_ports = ("--namesrv-port", str(name_server), "--port", str(broker))
    reader: subprocess.Popen[str] | None = None
    try:
        for until in (*KILLED_AFTER, MESSAGES):
            with run_standalone(tmp_path / "store", tmp_path, *same_ports) as running:
                if reader is None:
                    reader = start_reader(apache_kit, running.namesrv_addr, tmp_path)
                assert reader.stdout is not None
                while len(set(seen)) < until:
                    line = reader.stdout.readline()
                    assert line, f"the reader ended after {len(seen)} messages: {errors_of(tmp_path).read_text()}"
                    queue_id, offset = line.split()
                    seen.append((int(queue_id), int(offset)))
                running.process.kill()
    finally:
        if reader is not None:
            reader.kill()
            reader.communicate()

    offsets_by_queue = defaultdict(list)
    for queue_id, offset in seen:
        offsets_by_queue[queue_id].append(offset)
    assert sum(len(set(offsets)) for offsets in offsets_by_queue.values()) == MESSAGES
    for queue_id, offsets in offsets_by_queue.items():
        for before, after in pairwise(offsets):
            assert after <= before + 1, f"queue {queue_id}: {after} came after {before}"
    print(f"{MESSAGES} messages, {len(seen) - MESSAGES} of them a second time, killed {len(KILLED_AFTER)} times")


def start_reader(kit: ApacheKit, namesrv_addr: str, work_dir: Path) -> subprocess.Popen[str]:
    arguments = [namesrv_addr, "Ordered-killed", MESSAGES]
    command = kit.jvm("interop.OrderedReader", arguments, heap_mb=PROBE_HEAP_MB, work_dir=work_dir)
    with errors_of(work_dir).open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)


def errors_of(work_dir: Path) -> Path:
    return work_dir / "reader.err"
