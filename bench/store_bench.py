"""What the store costs per message, in CPU microseconds of the calling thread; prints JSON.

    python bench/store_bench.py [--messages 100000] [--body-bytes 1024] [--directory /var/tmp]

``put`` includes dispatch to the consume queue; ``get_32`` reads 32 messages that lie in memory; ``put_sync`` waits for
the disk in groups of 64. Every figure is the best of some rounds. Compare runs of one machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rmqkit.protocol.batch import BatchEntry, encode_batch
from rmqkit.protocol.record import pack_host
from rmqkit.store.message_store import MessageStore, PutMessage, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings

HOST = pack_host("127.0.0.1", 10911)
ROUNDS = 5
QUEUES = 4


def message(body: bytes, properties: bytes, queue_id: int) -> PutMessage:
    return PutMessage("BenchTopic", queue_id, body, properties, 0, 0, 1_700_000_000_000, HOST, HOST)


def cpu_us(work: Callable[[], int]) -> float:
    """CPU microseconds of this thread per unit of work; ``work`` returns how many it did."""
    start = time.thread_time_ns()
    count = work()
    return (time.thread_time_ns() - start) / count / 1000


def best(work: Callable[[], int]) -> float:
    return round(min(cpu_us(work) for _ in range(ROUNDS)), 3)


def put(store: MessageStore, messages: list[PutMessage], count: int) -> int:
    for i in range(count):
        assert store.put(messages[i % QUEUES]).status is PutStatus.OK
    return count


def put_batch(store: MessageStore, batch: PutMessage, members: int, count: int) -> int:
    for _ in range(count):
        assert store.put_batch(batch).status is PutStatus.OK
    return count * members


def get(store: MessageStore, count: int, codes: frozenset[int] | None) -> int:
    end = store.max_offset("BenchTopic", 0) - 32
    for i in range(count):
        assert len(store.get("BenchTopic", 0, i * 7 % end, count_max=32, codes=codes).records) == 32
    return count


def run_async(root: Path, settings: StoreSettings, count: int, messages: list[PutMessage]) -> dict[str, float]:
    arrived = 0

    def on_arrival(arrivals: list[object]) -> None:
        nonlocal arrived
        arrived += len(arrivals)

    store = MessageStore(root, settings, on_arrival=on_arrival)
    store.open()
    members = [BatchEntry(messages[0].body, messages[0].properties)] * 64
    batch = message(encode_batch(members), b"", 0)
    figures = {
        "put": best(lambda: put(store, messages, count)),
        "put_batch_64_per_message": best(lambda: put_batch(store, batch, 64, count // 64)),
        "get_32": best(lambda: get(store, 2000, None)),
        "get_32_tag": best(lambda: get(store, 2000, frozenset((2598919,)))),
        "get_32_old": best(lambda: get(store, 2000, None)),
    }
    assert arrived == ROUNDS * (count + count // 64 * 64)
    start = time.perf_counter()
    store.close()
    figures["close_ms"] = round((time.perf_counter() - start) * 1000, 1)
    start = time.perf_counter()
    store = MessageStore(root, settings)
    store.open()
    figures["open_ms"] = round((time.perf_counter() - start) * 1000, 1)
    store.close()
    return figures


def run_sync(root: Path, settings: StoreSettings, count: int, messages: list[PutMessage]) -> dict[str, float]:
    flushed = threading.Event()
    store = MessageStore(root, settings, on_durable=lambda offset, error: flushed.set())
    store.open()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(count // 64):
        for i in range(64):
            end = store.put(messages[i % QUEUES]).end_offset
            store.request_flush()
        while store.durable_offset < end:
            flushed.wait(1)
            flushed.clear()
        store.dispatch()
    figures = {
        "put_sync_wall_us": round((time.perf_counter() - start) / count * 1e6, 3),
        "put_sync_process_cpu_us": round((time.process_time() - cpu) / count * 1e6, 3),
    }
    store.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    seed = 1
    body = random.Random(seed).randbytes(options.body_bytes)
    properties = b"TAGS\x01TagA\x02UNIQ_KEY\x01AC11000100002A9F0000000000000001\x02CLUSTER\x01DefaultCluster\x02"
    messages = [message(body, properties, i) for i in range(QUEUES)]
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        figures = run_async(
            Path(folder, "async"), StoreSettings(message_index_enable=False), options.messages, messages
        )
        sync = StoreSettings(message_index_enable=False, flush_disk_type=FlushDiskType.SYNC_FLUSH)
        figures |= run_sync(Path(folder, "sync"), sync, 64 * 200, messages)
    about = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count(), "seed": seed}
    print(json.dumps({"about": about, "body_bytes": options.body_bytes, "us": figures}, indent=2))


if __name__ == "__main__":
    main()
