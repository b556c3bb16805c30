"""The time until a store is ready after its process was killed. Prints JSON.

    python bench/recovery_bench.py [--cases queues,log,no-checkpoint] [--queues 16000] [--mebibytes 2048]

==============  ======================================================================================================
case            recovered data
==============  ======================================================================================================
queues          one message in each of many queues, none of them flushed
log             a log of 1 KiB records with two keys each in 8 queues, killed under load
no-checkpoint   the same without its checkpoint: everything is dispatched again
==============  ======================================================================================================

A process writes each store and exits without closing it, and another process opens it; `open_seconds` is the time of
`MessageStore.open`. The data is in the page cache and partly not on the disk, as after a kill.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rmqkit.protocol.record import pack_host
from rmqkit.store.message_store import InnerMessage, MessageStore, PutStatus
from rmqkit.store.settings import StoreSettings

HOST = pack_host("127.0.0.1", 10911)
QUEUES_PER_TOPIC = 8
CASES = ("queues", "log", "no-checkpoint")
BORN_MS = 1_700_000_000_000


def new_store(root: Path) -> MessageStore:
    return MessageStore(root, StoreSettings())


def put(store: MessageStore, topic: str, queue_id: int, body: bytes, properties: bytes) -> None:
    message = InnerMessage(topic, queue_id, body, properties, 0, 0, BORN_MS, HOST, HOST)
    result = store.put(message)
    assert result.status is PutStatus.OK, result


def fill_queues(root: Path, queues: int) -> None:
    store = new_store(root)
    store.open()
    for number in range(queues):
        topic = f"BenchTopic-{number // QUEUES_PER_TOPIC:05}"
        put(store, topic, number % QUEUES_PER_TOPIC, b"x" * 100, b"UNIQ_KEY\x01%032x\x02" % number)
    os._exit(0)


def fill_log(root: Path, mebibytes: int) -> None:
    store = new_store(root)
    store.open()
    body = os.urandom(800)
    number = 0
    while store.max_physical_offset < mebibytes << 20:
        properties = b"UNIQ_KEY\x01%032X\x02KEYS\x01order-%d\x02TAGS\x01t%d\x02" % (number, number, number % 4)
        put(store, "BenchTopic", number % QUEUES_PER_TOPIC, body, properties)
        number += 1
    os._exit(0)


def measure(root: Path) -> dict[str, float]:
    store, began, cpu = new_store(root), time.perf_counter(), time.process_time()
    store.open()
    figures = {
        "open_seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "log_mebibytes": store.max_physical_offset >> 20,
    }
    os._exit(_print(figures))


def _print(figures: dict[str, float]) -> int:
    print(json.dumps(figures), flush=True)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--queues", type=int, default=16_000)
    parser.add_argument("--mebibytes", type=int, default=2048)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--do", choices=("fill-queues", "fill-log", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do == "fill-queues":
        fill_queues(options.root, options.queues)
    elif options.do == "fill-log":
        fill_log(options.root, options.mebibytes)
    elif options.do == "measure":
        measure(options.root)
    found: dict[str, dict[str, float]] = {}
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            sizes = ["--queues", str(options.queues), "--mebibytes", str(options.mebibytes)]
            command = [sys.executable, __file__, "--root", folder, *sizes, "--do"]
            subprocess.run([*command, "fill-queues" if case == "queues" else "fill-log"], check=True)
            if case == "no-checkpoint":
                (Path(folder) / "checkpoint").unlink(missing_ok=True)
            measured = subprocess.run([*command, "measure"], check=True, capture_output=True, text=True)
            found[case] = json.loads(measured.stdout)
    about = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    print(json.dumps({"about": about, "queues": options.queues, "figures": found}, indent=2))


if __name__ == "__main__":
    main()
