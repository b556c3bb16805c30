"""Flushes: the time at which a message is durable, and errors of the disk. Source: store.md §13."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rmqkit.store import flush
from rmqkit.store.message_store import GetStatus, MessageStore, PutStatus
from rmqkit.store.settings import FlushDiskType
from rmqkit.system import disk
from rmqkit.testing.clock import StandingClock
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings
from tests.waiting import SECONDS


def sync_settings(**changes: Any) -> Any:
    return small_settings(flush_disk_type=FlushDiskType.SYNC_FLUSH, flush_interval_ms=3_600_000, **changes)


class Rounds:
    """An ``on_durable`` callback that collects its calls."""

    def __init__(self) -> None:
        self.told: list[tuple[int, OSError | None]] = []
        self.thread = ""
        self._changed = threading.Condition()

    def __call__(self, offset: int, error: OSError | None) -> None:
        with self._changed:
            self.told.append((offset, error))
            self.thread = threading.current_thread().name
            self._changed.notify_all()

    def wait(self, test: Callable[[tuple[int, OSError | None]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(test, self.told)), SECONDS), self.told


class Gate:
    """A stand-in for fdatasync of log files. It counts calls, blocks until ``open`` is set, and raises ``error``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.error: OSError | None = None
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        real = os.fdatasync

        def fdatasync(descriptor: int) -> None:
            self.count += 1
            self.entered.set()
            assert self.open.wait(SECONDS)
            if self.error is not None:
                raise self.error
            real(descriptor)

        monkeypatch.setattr("rmqkit.system.disk.sync_data", fdatasync)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def wait_until(test: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not test():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


def test_requested_round_covers_what_was_put(tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        end = put_all(store, message(), message())[-1].end_offset
        assert store.durable_offset == 0
        store.request_flush()
        rounds.wait(lambda told: told == (end, None))
        assert store.durable_offset == end
        assert rounds.thread == "store-flush"


def test_one_round_serves_everybody_who_waits(tmp_path: Path, gate: Gate) -> None:
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        gate.open.clear()
        gate.entered.clear()
        first = put_all(store, message())[0]
        store.request_flush()
        assert gate.entered.wait(SECONDS)
        gate.count = 0
        for _ in range(5):  # all puts happen during the first flush
            last = put_all(store, message())[0]
            store.request_flush()
        gate.open.set()
        rounds.wait(lambda told: told == (last.end_offset, None))
        assert gate.count == 1
        assert [told for told in rounds.told if told[0] > first.end_offset] == [(last.end_offset, None)]


def test_round_covers_files_that_were_rolled(tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        end = put_all(store, *(message(body=bytes(1500)) for _ in range(7)))[-1].end_offset
        store.request_flush()
        rounds.wait(lambda told: told == (end, None))
        assert store.log.queue.unsynced_bytes == 0


def test_synchronous_message_is_readable_when_it_is_on_the_disk(tmp_path: Path) -> None:
    rounds = Rounds()
    seen: list[Any] = []
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds, on_arrival=seen.extend) as store:
        result = put_all(store, message())[0]
        assert store.get("TopicTest", 0, 0, count_max=1).status is GetStatus.NO_MESSAGE_IN_QUEUE
        assert seen == []
        store.request_flush()
        rounds.wait(lambda told: told[0] == result.end_offset)
        store.dispatch()
        assert [one.queue_offset for one in seen] == [0]
        assert store.get("TopicTest", 0, 0, count_max=1).status is GetStatus.FOUND


def test_close_makes_durable_and_reports(tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        end = put_all(store, message())[0].end_offset
    assert rounds.told[-1] == (end, None)
    with opened(tmp_path / "s", sync_settings()) as store:
        assert len(read_all(store, "TopicTest")) == 1
        assert store.durable_offset == end


def test_asynchronous_rounds_come_by_themselves(tmp_path: Path) -> None:
    settings = small_settings(flush_interval_ms=1, flush_thorough_interval_ms=1)
    with opened(tmp_path / "s", settings) as store:
        end = put_all(store, message())[0].end_offset
        wait_until(lambda: store.durable_offset == end)


def test_few_dirty_bytes_wait_for_a_thorough_round(tmp_path: Path, gate: Gate) -> None:
    settings = small_settings(commit_log_file_bytes=1 << 20, flush_interval_ms=1, flush_thorough_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message())
        end = put_all(store, *(message(body=bytes(2000)) for _ in range(9)))[-1].end_offset
        wait_until(lambda: store.durable_offset > 0)
        assert store.durable_offset >= 4 * 4096 or store.durable_offset == end


def test_queues_and_checkpoint_are_flushed_by_themselves(tmp_path: Path) -> None:
    settings = small_settings(queue_flush_interval_ms=1, queue_flush_thorough_interval_ms=1, flush_interval_ms=1)
    with opened(tmp_path / "s", settings) as store:
        timestamp = put_all(store, message())[0].store_timestamp
        store.request_flush()
        wanted = timestamp.to_bytes(8, "big") * 2
        path = tmp_path / "s" / "checkpoint"
        wait_until(lambda: path.exists() and path.read_bytes()[:16] == wanted)
        assert not store.queues.dirty


def test_a_caller_can_flush_the_log_itself(tmp_path: Path, gate: Gate) -> None:
    with opened(tmp_path / "s", sync_settings()) as store:
        end = put_all(store, message())[0].end_offset
        assert store.flush_log()
        assert store.durable_offset == end
        gate.count = 0
        assert store.flush_log(), "everything is on the disk"
        assert gate.count == 0


def test_a_caller_sees_that_the_log_cannot_be_flushed(tmp_path: Path, gate: Gate) -> None:
    with opened(tmp_path / "s", sync_settings()) as store:
        put_all(store, message())
        gate.error = OSError(errno.EIO, "Input/output error")
        assert not store.flush_log()
        assert store.durable_offset == 0
        gate.error = None


# ---- a disk that refuses


@pytest.fixture
def broken(tmp_path: Path, gate: Gate) -> Iterator[tuple[MessageStore, Rounds, int]]:
    """Yield a store whose second flush was refused, and the end of its durable bytes."""
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        durable = put_all(store, message(body=b"durable"))[0].end_offset
        store.request_flush()
        rounds.wait(lambda told: told == (durable, None))
        store.dispatch()
        gate.error = OSError(errno.EIO, "Input/output error")
        put_all(store, message(body=b"lost"))
        store.request_flush()
        rounds.wait(lambda told: told[1] is not None)
        yield store, rounds, durable


def test_a_refused_flush_is_tried_again_without_a_request(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush, "_RETRY_MS", 1)
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        end = put_all(store, message())[0].end_offset
        gate.error = OSError(errno.EIO, "Input/output error")
        store.request_flush()
        rounds.wait(lambda told: told[1] is not None)
        gate.error = None
        rounds.wait(lambda told: told == (end, None))
        assert store.is_writable


def test_a_flush_is_requested_again_once_a_second_after_a_refusal(tmp_path: Path, gate: Gate) -> None:
    rounds, clock = Rounds(), StandingClock()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds, clock=clock) as store:
        put_all(store, message())
        gate.error = OSError(errno.EIO, "Input/output error")
        store.flusher.flush_log()
        clock.ms += 999
        store.flusher.request_again()
        assert rounds.told == []
        clock.ms += 1
        store.flusher.request_again()
        rounds.wait(lambda told: told[1] is not None)
        gate.error = None


def test_refused_flush_is_reported_and_moves_nothing(broken: tuple[MessageStore, Rounds, int]) -> None:
    store, rounds, durable = broken
    assert rounds.told[-1][0] == durable == store.durable_offset
    assert store.failure is rounds.told[-1][1] is not None
    assert not store.is_writable


def test_later_puts_are_refused_with_the_number(broken: tuple[MessageStore, Rounds, int]) -> None:
    store, _, _ = broken
    for result in (store.put(message()), store.put_batch(message())):
        assert result.status is PutStatus.SERVICE_NOT_AVAILABLE
        assert result.reason == "flush failed: errno 5 Input/output error"


def test_refused_flush_counts_only_after_its_bytes_were_written_again(
    broken: tuple[MessageStore, Rounds, int], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rounds, durable = broken
    end, real, written = store.max_physical_offset, os.pwrite, list[tuple[int, int]]()

    def pwrite(descriptor: int, data: bytes, position: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().parent.name == "commitlog":
            written.append((position, len(data)))
        return real(descriptor, data, position)

    monkeypatch.setattr("rmqkit.system.disk.pwrite", pwrite)
    for _ in range(2):  # a second refusal in a row changes nothing
        rounds.told.clear()
        store.request_flush()
        rounds.wait(lambda told: told[1] is not None)
        assert store.durable_offset == durable
    gate.error = None
    store.request_flush()
    rounds.wait(lambda told: told == (end, None))
    assert written == [(durable, end - durable)] * 3, "the kernel may have marked the pages as clean"
    assert store.failure is None and store.put(message(body=b"after")).status is PutStatus.OK


@pytest.mark.parametrize("is_replica_like", [False, True], ids=["at a record", "inside a record"])
def test_bytes_that_the_page_cache_dropped_are_not_taken_for_flushed(
    broken: tuple[MessageStore, Rounds, int], gate: Gate, caplog: pytest.LogCaptureFixture, is_replica_like: bool
) -> None:
    """XFS and btrfs return the former bytes of the disk."""
    store, rounds, durable = broken
    if is_replica_like:
        store.flusher.durable_offset -= 20
    with (store.root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(durable)
        file.write(bytes(store.max_physical_offset - durable))
    gate.error = None
    rounds.told.clear()
    store.request_flush()
    rounds.wait(lambda told: told[1] is not None)
    assert store.durable_offset <= durable
    assert "dropped bytes that it could not write" in caplog.text and "restart the broker" in caplog.text
    assert store.put(message()).status is PutStatus.SERVICE_NOT_AVAILABLE
    store.close()
    assert (store.root / "abort").exists(), "the next start recovers"


def test_what_is_not_durable_never_becomes_readable(broken: tuple[MessageStore, Rounds, int]) -> None:
    store, _, _ = broken
    assert [record.body for record in read_all(store, "TopicTest")] == [b"durable"]


def test_next_start_recovers_after_a_refused_flush(
    broken: tuple[MessageStore, Rounds, int], gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    store, _, durable = broken
    store.close()  # which tries again
    assert any("errno 5 Input/output error" in record.message for record in caplog.get_records("setup"))
    assert (store.root / "abort").exists()
    gate.error = None
    with opened(store.root, sync_settings()) as again:
        assert again.put(message()).status is PutStatus.OK
        assert again.log.record_at(0) is not None and durable > 0


def queues_only(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Refuse fdatasync of queue files alone. Return the bytes written to them."""
    gated, real, written = disk.sync_data, disk.pwrite, list[tuple[str, int]]()

    def fdatasync(descriptor: int) -> None:
        if "consumequeue" in str(path := Path(f"/proc/self/fd/{descriptor}").readlink()):
            gated(descriptor)
        else:
            assert path

    def pwrite(descriptor: int, data: bytes, position: int) -> int:
        if "consumequeue" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            written.append((threading.current_thread().name, len(data)))
        return real(descriptor, data, position)

    monkeypatch.setattr("rmqkit.system.disk.sync_data", fdatasync)
    monkeypatch.setattr("rmqkit.system.disk.pwrite", pwrite)
    return written


def test_refused_queue_flush_holds_back_the_checkpoint_and_nothing_else(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = queues_only(gate, monkeypatch)
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        flusher, checkpoint = store.flusher, tmp_path / "s" / "checkpoint"
        put_all(store, message())
        flusher.flush_queues()
        before = checkpoint.read_bytes()[8:16]
        gate.error = OSError(errno.EIO, "Input/output error")
        put_all(store, *(message() for _ in range(3)))
        for _ in range(2):
            flusher.flush_queues()
            assert flusher.behind is not None and store.failure is None
            assert checkpoint.read_bytes()[8:16] == before
        put_all(store, message())
        gate.error = None
        written.clear()
        flusher.flush_queues()
        assert flusher.behind is None and checkpoint.read_bytes()[8:16] > before
        assert [size for _, size in written] == [20, 4 * 20], "the new entry, and all bytes that were not on the disk"
        assert len(read_all(store, "TopicTest")) == 5
    told = [record.getMessage() for record in caplog.records if "cannot flush " in record.message]
    assert len(told) == 1
    assert not (tmp_path / "s" / "abort").exists()


def test_queue_entries_that_the_page_cache_dropped_stop_the_store(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues_only(gate, monkeypatch)
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(), message())
        gate.error = OSError(errno.EIO, "Input/output error")
        store.flusher.flush_queues()
        with (tmp_path / "s" / "consumequeue" / "TopicTest" / "0" / f"{0:020d}").open("r+b") as file:
            file.seek(20)
            file.write(bytes(20))
        gate.error = None
        store.flusher.flush_queues()
        assert store.put(message()).status is PutStatus.SERVICE_NOT_AVAILABLE
    assert (tmp_path / "s" / "abort").exists(), "the next start recovers"
    with opened(tmp_path / "s", settings) as store:
        assert len(read_all(store, "TopicTest")) == 2


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("function", ["sync_data", "pwrite"])
def test_a_thread_that_fails_in_any_way_ends_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, is_pooled: bool
) -> None:
    """Without the thread acknowledged messages would never be flushed."""
    rounds, threads, real = Rounds(), ("store-flush", "store-queues", "store-commit"), getattr(disk, function)

    def fail(*arguments: Any) -> Any:
        if threading.current_thread().name in threads:
            raise MemoryError
        return real(*arguments)

    settings = small_settings(
        flush_interval_ms=1,
        flush_least_pages=0,
        commit_interval_ms=1,
        commit_least_pages=0,
        queue_flush_interval_ms=1,
        queue_flush_thorough_interval_ms=1,
        transient_store_pool=is_pooled,
    )
    with opened(tmp_path / "s", settings, on_durable=rounds) as store:
        monkeypatch.setattr(disk, function, fail)
        put_all(store, message())
        rounds.wait(lambda told: told[1] is not None)
        monkeypatch.undo()
        assert store.put(message()).reason == "flush failed: errno 5 MemoryError()"
    assert (tmp_path / "s" / "abort").exists()


def test_copy_taken_after_durable_holds_the_message(tmp_path: Path) -> None:
    rounds = Rounds()
    with opened(tmp_path / "s", sync_settings(), on_durable=rounds) as store:
        end = put_all(store, message(body=b"kept"))[0].end_offset
        store.request_flush()
        rounds.wait(lambda told: told == (end, None))
        copy = copy_store(store.root, tmp_path / "copy")
    with opened(copy) as store:
        assert [record.body for record in read_all(store, "TopicTest")] == [b"kept"]


@pytest.mark.parametrize("codes", [None, frozenset({7})], ids=["all", "a tag"])
def test_a_reader_waits_at_an_entry_that_the_page_cache_dropped(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, codes: frozenset[int] | None
) -> None:
    """It moved past the entry, and the message, which the next start finds again, was never consumed."""
    queues_only(gate, monkeypatch)
    settings = small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, message(), message(), message())
        gate.error = OSError(errno.EIO, "Input/output error")
        store.flusher.flush_queues()
        with (tmp_path / "s" / "consumequeue" / "TopicTest" / "0" / f"{0:020d}").open("r+b") as file:
            file.seek(20)
            file.write(bytes(40))
        gate.error = None
        for _ in range(2):
            found = store.get("TopicTest", 0, 0, codes=codes, count_max=32)
            assert (found.count, found.next_begin_offset) == (1 if codes is None else 0, 1)
            found = store.get("TopicTest", 0, 1, codes=codes, count_max=32)
            assert (found.status, found.next_begin_offset) == (GetStatus.OFFSET_FOUND_NULL, 1)
            assert [entry[0] for entry in store.entries("TopicTest", 0, 0, count_max=9)] == [1]
            assert store.entries("TopicTest", 0, 1, count_max=9) == []
            store.flusher.flush_queues()  # it finds the loss
    with opened(tmp_path / "s", settings) as store:
        assert len(read_all(store, "TopicTest")) == 3


def test_records_that_the_page_cache_dropped_are_not_returned(tmp_path: Path, gate: Gate) -> None:
    with opened(tmp_path / "s", small_settings(flush_interval_ms=3_600_000)) as store:
        put_all(store, message(body=b"one"), message(body=b"two"))
        gate.error = OSError(errno.EIO, "Input/output error")
        store.flusher.flush_log()
        with (tmp_path / "s" / "commitlog" / f"{0:020d}").open("r+b") as file:
            file.write(bytes(2000))
        found = store.get("TopicTest", 0, 0, count_max=32)
        assert (found.status, found.records) == (GetStatus.MESSAGE_WAS_REMOVING, [])
        gate.error = None
