"""Appending and rolling: store.md §2, §3.6."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rmqkit.protocol.record import encode_record
from rmqkit.store.log.commit_log import CommitLog, log_directories
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import MappedFile
from rmqkit.store.settings import StoreSettings
from tests.store.inside import next_file_of
from tests.store.stores import HOST, HOST_V6, small_settings

FILE_BYTES = 1024


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CommitLog]:
    log = CommitLog(tmp_path, small_settings(commit_log_file_bytes=FILE_BYTES))
    log.queue.load()
    log.resume()
    yield log
    log.close()


def record_of(size: int, physical_offset: int, *, store_timestamp: int = 7, born_host: bytes = HOST) -> bytes:
    record = encode_record(
        topic=b"T",
        queue_id=0,
        flag=0,
        queue_offset=0,
        physical_offset=physical_offset,
        sys_flag=0,
        born_timestamp=1,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=HOST,
        reconsume_times=0,
        prepared_transaction_offset=0,
        body=bytes(size - 92 - (12 if born_host is HOST_V6 else 0)),
        properties=b"",
    )
    assert len(record) == size
    return record


def append(log: CommitLog, size: int, **fields: int) -> int:
    offset = log.place(size)
    log.append(record_of(size, offset), fields.get("store_timestamp", 7))
    return offset


def content(log: CommitLog, start: int) -> bytes:
    return log.queue.path_of(start).read_bytes()


def test_empty_log(log: CommitLog) -> None:
    assert (log.min_offset, log.max_offset) == (-1, 0)
    assert log.record_at(0) is None


def test_records_lie_one_behind_the_other(log: CommitLog) -> None:
    assert [append(log, 200), append(log, 300), append(log, 100)] == [0, 200, 500]
    assert log.max_offset == 600
    assert content(log, 0)[:600] == record_of(200, 0) + record_of(300, 200) + record_of(100, 500)
    assert content(log, 0)[600:] == bytes(FILE_BYTES - 600)


def test_record_that_leaves_eight_bytes_still_fits(log: CommitLog) -> None:
    append(log, 500)
    assert append(log, FILE_BYTES - 500 - 8) == 500


def test_record_that_leaves_seven_bytes_rolls_behind_a_blank(log: CommitLog) -> None:
    append(log, 500)
    assert append(log, FILE_BYTES - 500 - 7) == FILE_BYTES
    assert content(log, 0)[500:] == bytes.fromhex("0000020c cbd43194") + bytes(516)
    assert log.max_offset == FILE_BYTES + 517


def test_blank_fills_exactly_the_last_eight_bytes(log: CommitLog) -> None:
    append(log, FILE_BYTES - 8)
    append(log, 100)
    assert content(log, 0)[-8:] == bytes.fromhex("00000008 cbd43194")


def test_next_file_is_there_before_it_is_needed(log: CommitLog) -> None:
    append(log, 500)
    next_file_of(log).close()  # waits for the thread that creates the file
    assert not log.queue.path_of(FILE_BYTES).exists(), "an unused file goes when the log is closed"
    assert log.queue.path_of(0).exists()


def test_clean_close_leaves_no_unused_file(tmp_path: Path, log: CommitLog) -> None:
    append(log, 100)
    log.close()
    assert [path.name for path in (tmp_path / "commitlog").iterdir()] == ["0" * 20]


def test_files_are_made_ahead_by_another_thread(log: CommitLog) -> None:
    append(log, 100)
    made = next_file_of(log)._made
    assert made is not None
    assert made.result(60).path == log.queue.path_of(FILE_BYTES)


def test_slice_stays_inside_what_was_written(log: CommitLog) -> None:
    append(log, 200)
    assert log.slice(0, 200) == record_of(200, 0)
    assert log.slice(0, 201) is None
    assert log.slice(200, 1) is None
    assert log.slice(-1, 1) is None
    assert log.slice(0, 0) is None
    assert log.slice(0, -5) is None


def test_record_at_its_offset_only(log: CommitLog) -> None:
    append(log, 200)
    append(log, 300)
    assert log.record_at(200) == record_of(300, 200)
    assert log.record_at(201) is None
    assert log.record_at(500) is None


def test_slices_survive_close_and_delete(log: CommitLog) -> None:
    append(log, 200)
    record = log.record_at(0)
    log.close()
    log.queue.destroy()
    assert record == record_of(200, 0)


def test_store_timestamp_of_both_layouts(log: CommitLog) -> None:
    log.append(record_of(200, log.place(200), store_timestamp=1234), 1234)
    log.append(record_of(200, log.place(200), store_timestamp=5678, born_host=HOST_V6), 5678)
    assert (log.store_timestamp(0, 200), log.store_timestamp(200, 200)) == (1234, 5678)
    assert log.store_timestamp(400, 200) == -1
    assert log.store_timestamp(0, 20) == -1


def test_failed_write_leaves_the_log_as_it_was(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, 200)

    def fail(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rmqkit.system.disk.pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        append(log, 300)
    monkeypatch.undo()
    assert log.max_offset == 200
    assert append(log, 100) == 200


def test_failed_creation_can_be_tried_again(log: CommitLog, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, 1000)
    next_file_of(log).close()

    def fail(queue: FileQueue, start: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileQueue, "create", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            append(log, 300)
    monkeypatch.undo()
    assert append(log, 300) == FILE_BYTES
    assert content(log, 0)[1000:1008] == bytes.fromhex("00000018 cbd43194")


def test_log_continues_where_it_ended(tmp_path: Path, log: CommitLog) -> None:
    append(log, 200)
    log.close()
    again = CommitLog(tmp_path, small_settings(commit_log_file_bytes=FILE_BYTES))
    again.queue.load()
    again.queue.truncate(200)
    again.resume()
    assert append(again, 300) == 200
    assert append(again, 600) == FILE_BYTES
    again.close()


def test_directories_come_from_the_settings(tmp_path: Path) -> None:
    assert log_directories(tmp_path, StoreSettings()) == ([tmp_path / "commitlog"], [])
    several = StoreSettings(store_path_commit_log="/b, /a,/c", read_only_commit_log_store_paths="/c")
    assert log_directories(tmp_path, several) == ([Path("/a"), Path("/b")], [Path("/c")])


def test_several_directories_share_the_files(tmp_path: Path) -> None:
    settings = small_settings(commit_log_file_bytes=FILE_BYTES, store_path_commit_log=f"{tmp_path}/b,{tmp_path}/a")
    log = CommitLog(tmp_path, settings)
    log.resume()
    for _ in range(3):
        append(log, 900)
    log.close()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [f"{0:020d}", f"{2 * FILE_BYTES:020d}"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == [f"{FILE_BYTES:020d}"]


# ---- the thread that makes files


def threads_that(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Return the list of threads that call a method of `MappedFile` from now on."""
    seen: list[str] = []
    real = getattr(MappedFile, name)

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread().name.rpartition("_")[0])
        return real(*args, **options)

    monkeypatch.setattr(MappedFile, name, noted)
    return seen


def test_files_are_warmed_by_the_thread_that_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_that(monkeypatch, "warm")
    log = CommitLog(tmp_path, small_settings(commit_log_file_bytes=FILE_BYTES, warm_mapped_file=True))
    log.resume()
    append(log, 900)
    append(log, 900)
    assert all(file.path.stat().st_blocks for file in log.queue.files)
    log.close()
    assert len(seen) >= 2 and set(seen) == {"store-allocate"}
    assert content(log, 0)[908:] == bytes(FILE_BYTES - 908)


def test_disk_without_room_for_a_warm_file_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rmqkit.system.disk.reserve", fail)
    log = CommitLog(tmp_path, small_settings(commit_log_file_bytes=FILE_BYTES, warm_mapped_file=True))
    log.resume()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            append(log, 300)
    assert list((tmp_path / "commitlog").iterdir()) == []
    monkeypatch.undo()
    assert append(log, 300) == 0
    log.close()


def test_file_that_takes_too_long_is_waited_for_once(
    tmp_path: Path, log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, 900)
    next_file_of(log).close()
    go_on = threading.Event()
    create = log.queue.create
    monkeypatch.setattr("rmqkit.store.log.commit_log._CREATE_TIMEOUT_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(FileQueue, "create", lambda queue, start: (go_on.wait(60), create(start))[1])
        with pytest.raises(TimeoutError, match="not created after"):
            append(log, 900)
        for _ in range(2):
            with pytest.raises(BlockingIOError, match="still being created"):
                append(log, 900)
        go_on.set()
        made = next_file_of(log)._made
        assert made is not None
        assert made.result(60).start == FILE_BYTES
    monkeypatch.setattr("rmqkit.store.log.commit_log._CREATE_TIMEOUT_SECONDS", 20.0)
    assert append(log, 900) == FILE_BYTES
