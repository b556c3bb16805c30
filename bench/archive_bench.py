"""An archive compared with its log: the same messages read from both, in one run. Prints JSON.

    python bench/archive_bench.py --mib 512 --queues 16

==========  ==========================================================================================================
seal        CPU seconds and bytes of a segment for each GiB of log
read        MiB a second, and CPU µs a message, of a consumer that reads all queues in turns of 32 messages: from the
            log through `MessageStore.get`, and from a folder through `Archive.get`
cold seek   CPU ms until the first 32 messages from a random offset are read, with nothing of the segment in memory
==========  ==========================================================================================================
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rmqkit.store.archive.archive import Archive
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.seal import Work, seal
from rmqkit.store.message_store import GetResult, MessageStore
from rmqkit.store.settings import StoreSettings
from tests.store.stores import message

TOPIC = "bench-archive"
FILE_BYTES = 128 << 20


def fill(store: MessageStore, mib: int, queues: int) -> int:
    """Store messages of 1 KiB of text that compresses as JSON does. Return their number."""
    choose, count = random.Random(1), mib * 1024 * 1024 // 1200
    words = [b'"%s":%d' % (bytes(choose.choices(b"abcdefghij", k=6)), choose.randrange(10**6)) for _ in range(4000)]
    for number in range(count):
        body = b",".join(choose.choices(words, k=70))[:1000]
        names = {"KEYS": f"k{number}", "TAGS": f"t{number % 5}", "UNIQ_KEY": f"7F000001A2B418B4AAC2{number:012X}"}
        store.put(message(topic=TOPIC, queue_id=number % queues, body=body, **names))
    return count


def read(get: Callable[[int, int], GetResult], queues: int, ends: list[int]) -> dict[str, float]:
    """Read everything, 32 messages of a queue and then 32 of the next."""
    offsets, count, size = [0] * queues, 0, 0
    cpu, began = time.process_time(), time.perf_counter()
    while any(offset < end for offset, end in zip(offsets, ends, strict=True)):
        for queue_id in range(queues):
            if offsets[queue_id] < ends[queue_id]:
                found = get(queue_id, offsets[queue_id])
                offsets[queue_id] = found.next_begin_offset
                count += len(found.records)
                size += found.size
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return {"mib_per_second": round(size / seconds / 2**20, 1), "cpu_us": round(cpu_seconds / count * 1e6, 2)}


def run(folder: Path, mib: int, queues: int, seeks: int) -> dict[str, object]:
    settings = StoreSettings(commit_log_file_bytes=FILE_BYTES)
    store = MessageStore(folder / "store", settings)
    store.open()
    count = fill(store, mib, queues)
    store.flusher.flush_log()
    place = Folder(folder / "archive")
    cpu, stored, files = time.process_time(), 0, store.log.queue.files[:-1]
    for file in files:
        stored += seal(Work(str(file.path), file.start, "", "", with_tags=False), place).size
    gib = len(files) * FILE_BYTES / 2**30
    sealing = {
        "cpu_seconds_per_gib": round((time.process_time() - cpu) / gib, 1),
        "share": round(stored / gib / 2**30, 3),
    }
    archive = Archive(place)
    archive.refresh()
    ends = [archive._queues[TOPIC, queue_id].ends[-1] for queue_id in range(queues)]
    from_log = read(lambda queue_id, at: store.get(TOPIC, queue_id, at, count_max=32), queues, ends)
    from_archive = read(
        lambda queue_id, at: archive.get(TOPIC, queue_id, at, count_max=32, bytes_max=1 << 18), queues, ends
    )
    choose, taken = random.Random(2), []
    for _ in range(seeks):
        cold = Archive(place)
        cold.refresh()
        queue_id = choose.randrange(queues)
        began = time.process_time()
        cold.get(TOPIC, queue_id, choose.randrange(ends[queue_id]), count_max=32, bytes_max=1 << 18)
        taken.append((time.process_time() - began) * 1000)
    store.close()
    return {
        "bench": "archive",
        "messages": count,
        "queues": queues,
        "seal": sealing,
        "read": {"log": from_log, "archive": from_archive},
        "cold_seek_cpu_ms": {"p50": round(statistics.median(taken), 2), "most": round(max(taken), 2)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--queues", type=int, default=16)
    parser.add_argument("--seeks", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rmq-bench-archive-") as folder:
        print(json.dumps(run(Path(folder), options.mib, options.queues, options.seeks), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
