"""The cost of many queues: memory of each, open files, and seconds of a start. Prints JSON.

    python bench/many_queues.py [--queues 50000] [--directory /var/tmp]

Fills a store with one message in each queue, stops it, starts it again in a new process, and there puts into and reads
from every queue. Memory is the process's own (``RssAnon``), without mapped pages.
"""

from __future__ import annotations

import argparse
import gc
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


def own_bytes() -> int:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def place(number: int) -> tuple[str, int]:
    return f"BenchTopic-{number // QUEUES_PER_TOPIC:05}", number % QUEUES_PER_TOPIC


def put_all(store: MessageStore, queues: range) -> int:
    """Put one message into each queue. Return the highest number of open files."""
    most = 0
    for number in queues:
        message = InnerMessage(*place(number), b"x" * 100, b"TAGS\x01TagA\x02", 0, 0, 1_700_000_000_000, HOST, HOST)
        put = store.put(message)
        assert put.status is PutStatus.OK, f"queue {number}: {put}"
        if number % 500 == 0:
            most = max(most, open_files())
    return max(most, open_files())


def new_store(root: Path) -> MessageStore:
    return MessageStore(root, StoreSettings(message_index_enable=False))


def fill(root: Path, queues: int, portion: int) -> None:
    for start in range(0, queues, portion):
        store = new_store(root)
        store.open()
        put_all(store, range(start, min(start + portion, queues)))
        store.close()


def measure(root: Path, queues: int) -> dict[str, float]:
    """Start on a filled store and use every queue."""
    store, before, began, cpu = new_store(root), own_bytes(), time.perf_counter(), time.process_time()
    store.open()
    figures: dict[str, float] = {
        "start_seconds": round(time.perf_counter() - began, 2),
        "start_cpu_seconds": round(time.process_time() - cpu, 2),
    }
    figures["bytes_per_queue"] = round((own_bytes() - before) / queues)
    figures["open_files_after_start"] = open_files()
    began = time.perf_counter()
    figures["open_files_after_puts"] = put_all(store, range(queues))
    figures["put_us"] = round((time.perf_counter() - began) / queues * 1e6, 1)
    began, most = time.perf_counter(), 0
    for number in range(queues):
        assert len(store.get(*place(number), 0, count_max=32).records) == 2
        if number % 500 == 0:
            most = max(most, open_files())
    figures["get_us"] = round((time.perf_counter() - began) / queues * 1e6, 1)
    figures["open_files_after_gets"] = max(most, open_files())
    figures["bytes_per_queue_used"] = round((own_bytes() - before) / queues)
    began = time.perf_counter()
    store.close()
    figures["stop_seconds"] = round(time.perf_counter() - began, 2)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--queues", type=int, default=50_000)
    parser.add_argument("--portion", type=int, default=10_000, help="queues filled before the store is closed once")
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.queues)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        fill(Path(folder), options.queues, options.portion)
        command = [sys.executable, __file__, "--measure", folder, "--queues", str(options.queues)]
        figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    about = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    print(json.dumps({"about": about, "queues": options.queues, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
