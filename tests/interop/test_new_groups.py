"""Messages that are sent while a consumer of a new group starts: every one of them is delivered.

Apache's brokers have no offset for an empty queue. The Java client 4.9 then requests the maximum of the queue, and
skips the messages that arrive between the two requests: about 5 % here. The client 5.4 skips none.
"""

import subprocess
from pathlib import Path

import pytest

from tests.faults.spark.servers import set_queues
from tests.interop.conftest import kit_or_skip
from tests.interop.standalone import Standalone

GROUPS = 30
QUEUES = 8
HEAP_MB = 300
SECONDS_MAX = 120
"""The time after which the program counts the missing messages."""


@pytest.mark.parametrize("version", ["4.9.4", "5.4.0"])
def test_a_new_group_gets_what_is_sent_while_its_consumer_starts(
    standalone: Standalone, version: str, tmp_path: Path
) -> None:
    topics = [f"New-groups-{version.replace('.', '_')}-{number}" for number in range(GROUPS)]
    for topic in topics:
        set_queues(standalone.broker_addr, topic, QUEUES)
    arguments = [standalone.namesrv_addr, SECONDS_MAX, *topics]
    command = kit_or_skip(version).jvm("interop.NewGroups", arguments, heap_mb=HEAP_MB, work_dir=tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"sent {GROUPS * 10} missed 0"
