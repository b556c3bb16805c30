"""The transient pool: appended bytes are in memory, and readable only after their commit. Source: store.md §13.5."""

from __future__ import annotations

import ctypes
import errno
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.log.transient_pool import TransientPool
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.examples import chosen_seed
from tests.sources import ROOT
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings
from tests.store.test_flush import wait_until

NEVER_MS = 3_600_000


def pool_settings(**changes: Any) -> StoreSettings:
    """Return the settings of a pool whose thread commits nothing by itself: the tests commit."""
    waits = {"commit_interval_ms": NEVER_MS, "flush_interval_ms": NEVER_MS}
    return small_settings(**({"transient_store_pool": True} | waits | changes))


def bodies(store: MessageStore) -> list[bytes]:
    return [record.body for record in read_all(store, "TopicTest")]


def test_message_is_readable_when_it_is_committed(tmp_path: Path) -> None:
    seen: list[Any] = []
    told: list[bool] = []
    with opened(tmp_path / "s", pool_settings(), on_arrival=seen.extend, on_committed=lambda: told.append(True)) as s:
        put = put_all(s, message())[0]
        assert s.max_physical_offset == put.end_offset and s.dispatched_offset == 0
        assert s.get("TopicTest", 0, 0, count_max=1).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert s.log.record_at(0) is None and seen == [] and told == []
        s.flusher.commit()
        assert told == [True]
        s.dispatch()
        assert [arrival.queue_offset for arrival in seen] == [0]
        assert bodies(s) == [b"hello"] and s.log.record_at(0) is not None
        s.flusher.commit()
        assert told == [True], "no bytes were appended since"


def test_commits_and_flushes_come_by_themselves_from_two_threads(tmp_path: Path) -> None:
    at_once = {"commit_interval_ms": 1, "commit_thorough_interval_ms": 1, "flush_interval_ms": 1}
    queues = {"queue_flush_interval_ms": 1, "queue_flush_thorough_interval_ms": 1}
    settings = pool_settings(**at_once, **queues, flush_thorough_interval_ms=1)
    committed = threading.Event()
    names: list[str] = []

    def on_committed() -> None:
        names.append(threading.current_thread().name)
        committed.set()

    before = set(threading.enumerate())
    with opened(tmp_path / "s", settings, on_committed=on_committed) as store:
        end = put_all(store, message())[0].end_offset
        assert committed.wait(60)
        store.dispatch()
        wait_until(lambda: store.durable_offset == end and not store.queues.dirty)
        own = {thread.name for thread in set(threading.enumerate()) - before}
        assert names == ["store-commit"]
        assert {name for name in own if not name.startswith("store-allocate")} == {"store-commit", "store-flush"}


def test_few_bytes_wait_for_a_thorough_round(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings(commit_log_file_bytes=1 << 20)) as store:
        put_all(store, message())
        store.flusher.commit(4 * 4096)
        assert store.log.committed_offset == 0
        end = put_all(store, message(body=bytes(17_000)))[0].end_offset
        store.flusher.commit(4 * 4096)
        assert store.log.committed_offset == end


def test_flush_covers_what_was_committed_and_no_more(tmp_path: Path) -> None:
    clock = StandingClock()
    with opened(tmp_path / "s", pool_settings(), clock=clock) as store:
        first = put_all(store, message())[0]
        store.flusher.commit()
        clock.ms += 1000
        put_all(store, message())
        store.flusher.flush_log()
        assert store.durable_offset == first.end_offset
        assert store._checkpoint.physic_timestamp == first.store_timestamp


def fill(root: Path, settings: StoreSettings) -> None:
    """Puts of many sizes over many files, with commits now and then."""
    chance = random.Random(5)
    with opened(root, settings, clock=StandingClock()) as store:
        for number in range(200):
            if number % 10 == 9:
                body = encode_batch([BatchEntry(b"%d" % number, b"TAGS\x01A\x02")] * chance.randrange(1, 9))
                assert store.put_batch(message(body=body)).status is PutStatus.OK
            else:
                put_all(store, message(body=chance.randbytes(chance.randrange(700)), queue_id=number % 3))
            store.flusher.commit(chance.choice([0, 4096]))


def test_files_are_those_of_a_store_without_a_pool(tmp_path: Path) -> None:
    fill(tmp_path / "plain", small_settings())
    fill(tmp_path / "pool", pool_settings(transient_store_pool_size=3))
    for plain in sorted(path for path in (tmp_path / "plain").rglob("*") if path.parent.name in "012 commitlog"):
        if plain.is_file():
            assert (tmp_path / "pool" / plain.relative_to(tmp_path / "plain")).read_bytes() == plain.read_bytes(), plain
    assert len(list((tmp_path / "pool" / "commitlog").iterdir())) > 10, "buffers were used again"


def test_put_without_a_free_buffer_is_refused_as_busy(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings(transient_store_pool_size=1)) as store:
        put_all(store, message(body=bytes(3000)))
        for _ in range(2):
            refused = store.put(message(body=bytes(3000)))
            assert refused.status is PutStatus.OS_PAGE_CACHE_BUSY
            assert refused.reason == "all buffers of the transient store pool wait to be committed"
        store.flusher.commit()
        assert put_all(store, message(body=bytes(3000)))[0].physical_offset == 4096
        store.flusher.commit()
        assert [len(body) for body in bodies(store)] == [3000, 3000]


def test_put_without_memory_for_a_buffer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with opened(tmp_path / "s", pool_settings()) as store:
        monkeypatch.setattr("rmqkit.store.log.transient_pool.mmap.mmap", fail)
        assert store.put(message()).reason == "no new log file: errno 12 Cannot allocate memory"
        monkeypatch.undo()
        put_all(store, message())


def test_synchronous_flush_has_no_pool(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings(flush_disk_type=FlushDiskType.SYNC_FLUSH)) as store:
        assert store.log.pool is None
        put_all(store, message())
        assert store.log.record_at(0) is not None


def test_refused_commit_loses_nothing_and_stops_puts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s", pool_settings()) as store:
        put_all(store, message(body=b"1"))
        store.flusher.commit()
        put_all(store, message(body=b"2"))

        def fail(self: MappedFile, position: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(MappedFile, "write", fail)
        store.flusher.commit()
        refused = store.put(message(body=b"3"))
        assert refused.status is PutStatus.SERVICE_NOT_AVAILABLE and not store.is_writable
        assert refused.reason == "log cannot be written: errno 28 No space left on device"
        assert bodies(store) == [b"1"]
        monkeypatch.undo()
        store.flusher.commit()
        put_all(store, message(body=b"4"))
        store.flusher.commit()
        assert bodies(store) == [b"1", b"2", b"4"]


def test_commit_that_stays_refused_leaves_the_abort_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "s", pool_settings()) as store:
        put_all(store, message(body=b"kept"))
        store.flusher.commit()
        put_all(store, message(body=b"lost"))

        def fail(least_bytes: int) -> bool:
            raise OSError(errno.EIO, "Input/output error")

        assert store.log.pool is not None
        monkeypatch.setattr(store.log.pool, "commit", fail)
        store.close()
    assert (tmp_path / "s" / "abort").exists()
    with opened(tmp_path / "s") as store:
        assert bodies(store) == [b"kept"]


def test_clean_stop_commits_everything(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings()) as store:
        put_all(store, *(message(body=bytes(n)) for n in (3000, 2000, 1)))
    assert not (tmp_path / "s" / "abort").exists()
    with opened(tmp_path / "s") as store:
        assert [len(body) for body in bodies(store)] == [3000, 2000, 1]


def test_crash_loses_only_what_was_not_committed(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings()) as store:
        put_all(store, message(body=b"1"), message(body=b"2"))
        store.flusher.commit()
        store.dispatch()
        put_all(store, message(body=b"3"), message(body=bytes(3700)))  # the last one is in the next file
        copy = copy_store(store.root, tmp_path / "copy")
    with opened(copy, pool_settings()) as store:
        assert bodies(store) == [b"1", b"2"]
        assert put_all(store, message(body=b"4"))[0].queue_offset == 2
        store.flusher.commit()
        assert bodies(store) == [b"1", b"2", b"4"]


# ---- buffers


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck")) * 1024


def new_file(folder: Path, start: int = 0) -> MappedFile:
    return MappedFile.create(folder / f"{start:020d}", start, 8192)


def test_buffers_are_locked_in_memory(tmp_path: Path) -> None:
    pool, file, before = TransientPool(2, 8192), new_file(tmp_path), locked_bytes()
    pool.lock_buffers()
    assert locked_bytes() == before, "memory is allocated when it is needed"
    pool.lend(file)
    pool.lock_buffers()
    assert locked_bytes() == before + 8192
    file.close()


def test_refused_lock_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Libc:
        def __init__(self, *args: Any, **options: Any) -> None:
            ctypes.set_errno(errno.ENOMEM)

        def mlock(self, address: Any, size: Any) -> int:
            return -1

    monkeypatch.setattr(ctypes, "CDLL", Libc)
    pool, files = TransientPool(2, 8192), [new_file(tmp_path), new_file(tmp_path, 8192)]
    for file in files:
        pool.lend(file)
        pool.lock_buffers()
        file.close()
    assert [record.message for record in caplog.records] == [
        "transient store pool: buffer of 8192 bytes cannot be locked in RAM, errno 12: raise RLIMIT_MEMLOCK"
    ]


def test_buffer_comes_back_when_its_file_is_full_and_committed(tmp_path: Path) -> None:
    pool, file = TransientPool(1, 8192), new_file(tmp_path)
    pool.lend(file)
    pool.append(b"x" * 100)
    pool.commit(0)
    pool.end_file()
    with pytest.raises(BlockingIOError):
        pool.lend(new_file(tmp_path, 8192))
    assert pool.commit(0)
    pool.reserve()
    assert (file.wrote, pool.committed_offset) == (8192, 8192)
    assert file.read(0, 101) == b"x" * 100 + b"\0"
    file.close()


# ---- SIGKILL

CHILD = f"""
import os, sys
from pathlib import Path
from rmqkit.store.message_store import MessageStore, PutStatus
from tests.store.stores import message, small_settings

pool = dict(transient_store_pool=True, flush_interval_ms={NEVER_MS})
store = MessageStore(
    Path(sys.argv[1]), small_settings(**pool, commit_interval_ms=1, commit_thorough_interval_ms=1)
)
store.open()
number = int(sys.argv[2])
while True:
    if store.put(message(body=b"%08d" % number + bytes(number % 500))).status is PutStatus.OK:
        number += 1
    os.write(1, b"%08d %08d\\n" % (number, store.max_offset("TopicTest", 0)))
"""
"""A program that puts numbered messages until it is killed, and prints the number of readable ones after each put."""


@pytest.mark.faults
def test_killed_process_keeps_what_was_readable(tmp_path: Path) -> None:
    seed = chosen_seed()
    chance = random.Random(seed)
    root, count = tmp_path / "s", 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(count)], stdout=subprocess.PIPE, cwd=ROOT
        ) as child:
            assert child.stdout is not None
            lines, enough = [child.stdout.readline()], count + chance.randrange(1, 300)
            while int(lines[-1].split()[1]) < enough:  # an empty line, from a child that ended, is an IndexError
                lines.append(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().splitlines(keepends=True)
        put, readable = map(int, [line for line in lines if line.endswith(b"\n")][-1].split())
        with opened(root) as store:
            numbers = [int(body[:8]) for body in bodies(store)]
        assert numbers == list(range(len(numbers)))
        assert enough <= readable <= len(numbers) <= put + 1
        count = len(numbers)


def test_record_that_waits_in_the_pool_can_be_read_by_its_place_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "s", pool_settings()) as s:
        first, second = put_all(s, message(body=b"first"), message(body=b"second"))
        for put in (first, second):
            size = put.end_offset - put.physical_offset
            waiting = s.log.appended_record_at(put.physical_offset)
            assert waiting is not None and len(waiting) == size
            s.flusher.commit()
            assert bytes(s.log.appended_record_at(put.physical_offset) or b"") == bytes(waiting)
        # Bytes inside a record, and bytes behind the end, are no record.
        assert s.log.appended_record_at(first.physical_offset + 1) is None
        assert s.log.appended_record_at(second.end_offset) is None


@pytest.mark.parametrize(
    ("offset", "size", "found"),
    [
        (100, 3, b"abc"),
        (101, 2, b"bc"),
        (102, 1, b"c"),
        (102, 2, None),
        (99, 2, None),
        (103, 1, None),
        (100, 0, None),
        (100, -1, None),
    ],
)
def test_slice_of_the_pool_ends_where_the_appended_bytes_end(
    tmp_path: Path, offset: int, size: int, found: bytes | None
) -> None:
    pool = TransientPool(1, 16)
    pool.lend(MappedFile(tmp_path / "00000000000000000100", 100, 16, wrote=0))
    pool.append(b"abc")
    assert pool.slice(offset, size) == found
