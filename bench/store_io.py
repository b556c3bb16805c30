"""Ways to read, write and prepare log files, compared on one disk; prints JSON, and tables with --markdown.

    python bench/store_io.py [--directory DIR] [--mebibytes 256] [--rounds 3] [--markdown FILE]

Every figure is the median of some rounds, in which the ways take turns. *Hot* pages are in the page cache, *cold* ones
were dropped from it before (``POSIX_FADV_DONTNEED``). A pull is 32 records of 1 KiB, adjacent or with records of other
queues in between. Another process receives the data over loopback TCP. The figures have no limits: they help to choose
defaults.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rmqkit.protocol.record import pack_host
from rmqkit.store.message_store import InnerMessage, MessageStore, PutStatus
from rmqkit.store.settings import StoreSettings

KIB, MIB = 1 << 10, 1 << 20
RECORDS, RECORD_BYTES = 32, 1 * KIB
PULL_BYTES = RECORDS * RECORD_BYTES
HOST = pack_host("127.0.0.1", 10911)
SEED = 1
Figures = dict[str, dict[str, float]]


def drop(descriptor: int) -> None:
    """Drop a file's pages from the cache. They must be written to the disk and not be mapped."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def cost(work: Callable[[], int]) -> tuple[float, float]:
    """Return wall and CPU microseconds per unit of work. ``work`` returns the number of units."""
    wall, cpu = time.perf_counter(), time.thread_time()
    count = work()
    return (time.perf_counter() - wall) / count * 1e6, (time.thread_time() - cpu) / count * 1e6


def medians(rounds: int, ways: dict[str, Callable[[], dict[str, float]]]) -> Figures:
    """Let the ways take turns. Return the median of each figure."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(way())
    return {
        name: {key: round(statistics.median(one[key] for one in all_of_it), 2) for key in all_of_it[0]}
        for name, all_of_it in taken.items()
    }


@contextmanager
def reader() -> Iterator[socket.socket]:
    """Yield a socket whose other end is read by another process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
    pid = os.fork()
    if pid == 0:
        ours.close()
        buffer = bytearray(MIB)
        while theirs.recv_into(buffer):
            pass
        os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


# ---- pulls


def send_all(sender: socket.socket, parts: list[memoryview]) -> None:
    sent = sender.sendmsg(parts)
    if sent < PULL_BYTES:
        sender.sendall(b"".join(parts)[sent:])


def pulls(path: Path, count: int, rounds: int, *, stride: int) -> Figures:
    """Measure pulls at random places. Their records begin ``stride`` bytes apart."""
    size = path.stat().st_size
    chooser = random.Random(SEED)
    run_bytes = PULL_BYTES if stride == RECORD_BYTES else RECORD_BYTES
    starts = [chooser.randrange(size // (RECORDS * stride)) * RECORDS * stride for _ in range(count)]
    runs = [range(at, at + RECORDS * stride, max(stride, run_bytes)) for at in starts]
    records = [range(at, at + RECORDS * stride, stride) for at in starts]

    def sliced(sender: socket.socket, descriptor: int, places: list[range], size_of_each: int) -> None:
        with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as view:
            for offsets in places:
                send_all(sender, [view[at : at + size_of_each] for at in offsets])

    def copied(sender: socket.socket, descriptor: int) -> None:
        for offsets in runs:
            send_all(sender, [memoryview(os.pread(descriptor, run_bytes, at)) for at in offsets])

    def sent(sender: socket.socket, descriptor: int) -> None:
        for offsets in runs:
            for at in offsets:
                done = 0
                while done < run_bytes:
                    done += os.sendfile(sender.fileno(), descriptor, at + done, run_bytes - done)

    def way(pull: Callable[[socket.socket, int], None]) -> dict[str, float]:
        def all_pulls(sender: socket.socket, descriptor: int) -> int:
            pull(sender, descriptor)
            return count

        with reader() as sender, path.open("rb") as file:
            drop(file.fileno())
            cold_wall, cold_cpu = cost(lambda: all_pulls(sender, file.fileno()))
            hot_wall, hot_cpu = cost(lambda: all_pulls(sender, file.fileno()))
        return {"hot CPU µs": hot_cpu, "hot µs": hot_wall, "cold CPU µs": cold_cpu, "cold µs": cold_wall}

    ways: dict[str, Callable[[], dict[str, float]]] = {
        "mapped, a slice per record": lambda: way(lambda to, file: sliced(to, file, records, RECORD_BYTES)),
        "pread": lambda: way(copied),
        "sendfile": lambda: way(sent),
    }
    if stride == RECORD_BYTES:
        ways["mapped, one slice"] = lambda: way(lambda to, file: sliced(to, file, runs, run_bytes))
    return medians(rounds, ways)


# ---- advice


def advice(path: Path, count: int, rounds: int) -> Figures:
    """Measure cold reads of a mapping, sequential and at random places, for each kind of advice to the kernel."""
    size = path.stat().st_size
    chooser = random.Random(SEED)
    places = [chooser.randrange(size // PULL_BYTES) * PULL_BYTES for _ in range(count)]

    def touch(view: memoryview, offsets: list[int]) -> int:
        for at in offsets:
            bytes(view[at : at + PULL_BYTES])
        return len(offsets)

    def way(told: int | None) -> dict[str, float]:
        found = {}
        for name, offsets in (("in order", list(range(0, size, PULL_BYTES))), ("at random", places)):
            with path.open("rb") as file:
                drop(file.fileno())
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
                    if told is not None:
                        mapping.madvise(told)
                    with memoryview(mapping) as view:
                        wall, _ = cost(lambda view=view, offsets=offsets: touch(view, offsets))  # type: ignore[misc]
            found[f"{name}, MiB/s"] = PULL_BYTES / MIB / wall * 1e6
        return found

    return medians(
        rounds,
        {
            "nothing": lambda: way(None),
            "MADV_RANDOM": lambda: way(mmap.MADV_RANDOM),
            "MADV_SEQUENTIAL": lambda: way(mmap.MADV_SEQUENTIAL),
            "MADV_WILLNEED": lambda: way(mmap.MADV_WILLNEED),
        },
    )


# ---- new files


def sparse(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def allocated(descriptor: int, size: int) -> None:
    os.posix_fallocate(descriptor, 0, size)


def warmed(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)
    for at in range(0, size, MIB):
        os.pwrite(descriptor, bytes(MIB), at)
    os.fdatasync(descriptor)


def preparation(folder: Path, mebibytes: int, rounds: int) -> Figures:
    """Measure the creation of a log file, and appends of 1 KiB with an ``fdatasync`` every 64 KiB."""

    def way(prepare: Callable[[int, int], None]) -> dict[str, float]:
        path = folder / "new"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        began = time.perf_counter()
        prepare(descriptor, mebibytes * MIB)
        made_ms = (time.perf_counter() - began) * 1000
        record, syncs, appends = bytes(RECORD_BYTES), [], []
        for at in range(0, 8 * MIB, RECORD_BYTES):
            began = time.perf_counter()
            os.pwrite(descriptor, record, at)
            appends.append(time.perf_counter() - began)
            if (at + RECORD_BYTES) % (64 * KIB) == 0:
                began = time.perf_counter()
                os.fdatasync(descriptor)
                syncs.append(time.perf_counter() - began)
        os.close(descriptor)
        path.unlink()
        return {
            "made ms": made_ms,
            "append µs": statistics.median(appends) * 1e6,
            "fdatasync ms": statistics.median(syncs) * 1e3,
            "slowest ms": max(syncs) * 1e3,
        }

    return medians(
        rounds,
        {"sparse": lambda: way(sparse), "fallocate": lambda: way(allocated), "warmed": lambda: way(warmed)},
    )


# ---- old files


def deletion(folder: Path, mebibytes: int, rounds: int) -> Figures:
    """Measure how long the deletion of a log file blocks the caller: with its last descriptor, or with another one
    open.
    """

    def way(is_held: bool) -> dict[str, float]:
        path = folder / "old"
        with path.open("wb") as file:
            for _ in range(mebibytes):
                file.write(bytes(MIB))
            os.fsync(file.fileno())
        held = os.open(path, os.O_RDONLY) if is_held else -1
        began = time.perf_counter()
        path.unlink()
        unlinked = time.perf_counter()
        if is_held:
            os.close(held)
        return {"unlink ms": (unlinked - began) * 1e3, "last close ms": (time.perf_counter() - unlinked) * 1e3}

    return medians(rounds, {"unlink alone": lambda: way(is_held=False), "one stays open": lambda: way(is_held=True)})


# ---- the store


def pool(folder: Path, count: int, rounds: int) -> Figures:
    """Measure puts of 1 KiB under ASYNC_FLUSH, with the transient store pool and without."""

    def way(is_on: bool) -> dict[str, float]:
        root = folder / "store"
        settings = StoreSettings(
            commit_log_file_bytes=256 * MIB, message_index_enable=False, transient_store_pool=is_on
        )
        store = MessageStore(root, settings)
        store.open()
        body, taken = random.Random(SEED).randbytes(RECORD_BYTES), []
        messages = [InnerMessage("Bench", i, body, b"TAGS\x01TagA\x02", 0, 0, 0, HOST, HOST) for i in range(4)]
        cpu = time.thread_time()
        for number in range(count):
            began = time.perf_counter()
            put = store.put(messages[number % 4])
            while put.status is PutStatus.OS_PAGE_CACHE_BUSY:  # waiting for a buffer or a file is part of the time
                put = store.put(messages[number % 4])
            taken.append(time.perf_counter() - began)
            assert put.status is PutStatus.OK, put
        cpu = (time.thread_time() - cpu) / count
        store.close()
        shutil.rmtree(root)
        taken.sort()
        return {
            "put CPU µs": cpu * 1e6,
            "median µs": taken[count // 2] * 1e6,
            "99.9 % µs": taken[count * 999 // 1000] * 1e6,
            "slowest ms": taken[-1] * 1e3,
        }

    return medians(rounds, {"pool off": lambda: way(is_on=False), "pool on": lambda: way(is_on=True)})


# ---- output


def disk_of(folder: Path) -> dict[str, str]:
    """Return the kernel's data about the disk, if there is any."""
    device = folder.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue")
    if not queue.exists():
        queue = queue.parent.parent / "queue"  # the queue of the disk, for a partition
    names = {"scheduler": "scheduler", "read-ahead KiB": "read_ahead_kb", "rotational": "rotational"}
    return {name: (queue / file).read_text().strip() for name, file in names.items() if (queue / file).exists()}


def table(title: str, figures: Figures) -> str:
    columns = list(next(iter(figures.values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    lines += [f"| {name} | {' | '.join(f'{row[key]:,.4g}' for key in columns)} |" for name, row in figures.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the files")
    parser.add_argument("--pulls", type=int, default=2000)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--markdown", type=Path, help="write tables to this file, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        path, content = folder / "log", random.Random(SEED)
        with path.open("wb") as file:
            for _ in range(options.mebibytes):
                file.write(content.randbytes(MIB))
        figures = {
            "Pull of 32 neighbours": pulls(path, options.pulls, options.rounds, stride=RECORD_BYTES),
            "Pull of every fourth record": pulls(path, options.pulls, options.rounds, stride=4 * RECORD_BYTES),
            "Told about a cold mapping": advice(path, options.pulls, options.rounds),
            "A new file": preparation(folder, options.mebibytes, options.rounds),
            "Deleting a file": deletion(folder, options.mebibytes, options.rounds),
            "A put of 1 KiB, ASYNC_FLUSH": pool(folder, options.messages, options.rounds),
        }
        about = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "kernel": platform.release().partition("-")[0],
            "cpus": os.cpu_count(),
            "disk": disk_of(folder),
            "seed": SEED,
            "mebibytes": options.mebibytes,
        }
    if options.markdown:
        options.markdown.write_text("\n".join(table(title, found) for title, found in figures.items()))
    print(json.dumps({"about": about, "figures": figures}, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
