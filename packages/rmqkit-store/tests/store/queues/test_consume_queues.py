"""The table of queues: the queues with open files, and the reads at a start. Source: store.md §4, §12.2."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmqkit.errors import StoreMismatch
from rmqkit.store.log import file_queue
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.queues.queue_ext import ExtUnit
from rmqkit.store.queues.table import ConsumeQueues, open_file_limit
from rmqkit.system import disk
from tests.open_files import open_files
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings

OPEN_MAX = 20
QUEUES = 100


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the flushes: these tests check only which files are open."""
    monkeypatch.setattr("rmqkit.system.disk.sync_data", lambda fd: None)
    monkeypatch.setattr("rmqkit.system.disk.sync_file", lambda fd: None)


@pytest.fixture
def queues(tmp_path: Path) -> Iterator[ConsumeQueues]:
    queues = ConsumeQueues(tmp_path, small_settings())
    queues.open_max = OPEN_MAX
    yield queues
    queues.close()


def index(queues: ConsumeQueues, queue_id: int, number: int = 0) -> None:
    queues.obtain("T", queue_id).append(number, 1000 * (number + 1) + queue_id, 1, 7, 0)


def test_queues_on_the_disk_give_back_their_files(queues: ConsumeQueues, tmp_path: Path) -> None:
    for queue_id in range(QUEUES):
        index(queues, queue_id)
        queues.sync()
        assert len(open_files(tmp_path)) <= OPEN_MAX + 1


def test_reading_many_queues_keeps_few_files_open(queues: ConsumeQueues, tmp_path: Path) -> None:
    for queue_id in range(QUEUES):
        index(queues, queue_id)
    queues.sync()
    for queue_id in range(QUEUES):
        assert queues.obtain("T", queue_id).entry(0) == (1000 + queue_id, 1, 7)
    assert len(open_files(tmp_path)) <= OPEN_MAX + 1


def test_queue_that_was_closed_appends_behind_its_end(queues: ConsumeQueues) -> None:
    for number in range(12):  # 10 entries fill a file
        for queue_id in range(QUEUES):
            index(queues, queue_id, number)
        queues.sync()
    for queue_id in range(QUEUES):
        queue = queues.obtain("T", queue_id)
        assert [queue.entry(i)[0] for i in range(13)] == [1000 * (i + 1) + queue_id for i in range(12)] + [-1]


def test_round_flushes_every_queue_when_too_many_are_open(queues: ConsumeQueues) -> None:
    for queue_id in range(OPEN_MAX):
        index(queues, queue_id)
    queues.sync(least_bytes=8192)
    assert len(queues.dirty) == OPEN_MAX, "none of them has two pages to flush"
    index(queues, OPEN_MAX)
    queues.sync(least_bytes=8192)
    assert not queues.dirty


def test_owner_waits_for_the_disk_when_there_are_twice_too_many(queues: ConsumeQueues, tmp_path: Path) -> None:
    for queue_id in range(QUEUES):  # and no flush cycle runs
        index(queues, queue_id)
        assert len(open_files(tmp_path)) <= 2 * OPEN_MAX
    assert len(queues.dirty) == 2 * OPEN_MAX
    assert 0 not in {queue.queue_id for queue in queues.dirty}, "the file opened first is closed first"


def test_files_that_wait_for_the_disk_stay_open(queues: ConsumeQueues, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file was closed before the flush, an error of its write-back could be lost."""
    for queue_id in range(OPEN_MAX):
        index(queues, queue_id)
    files = [queue.queue.files[0] for queue in queues]
    synced: list[int] = []
    monkeypatch.setattr("rmqkit.system.disk.sync_data", synced.append)
    descriptors = [file.fd for file in files]
    index(queues, OPEN_MAX)
    queues.sync()
    assert set(descriptors) <= set(synced)


def failing(error: OSError) -> Callable[[int], None]:
    def fail(fd: int) -> None:
        raise error

    return fail


def test_disk_that_refuses_the_owner_is_asked_again_with_the_bytes_written_again(
    queues: ConsumeQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue_id in range(2 * OPEN_MAX):
        index(queues, queue_id)
    with monkeypatch.context() as patch:
        patch.setattr("rmqkit.system.disk.sync_data", failing(OSError(errno.EIO, "Input/output error")))
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                index(queues, 2 * OPEN_MAX)
    refused = [queue for queue in queues if queue.queue.refused()]
    assert refused and set(refused) <= set(queues.dirty)
    written, real = list[int](), os.pwrite
    monkeypatch.setattr(
        "rmqkit.system.disk.pwrite", lambda fd, data, at: (written.append(len(data)), real(fd, data, at))[1]
    )
    index(queues, 2 * OPEN_MAX)
    queues.sync()
    assert written == [20] * (len(refused) + 1) and not queues.dirty
    assert not [queue for queue in queues if queue.queue.refused()]


def test_store_refuses_messages_while_it_cannot_open_a_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(queue_flush_interval_ms=3_600_000, flush_interval_ms=3_600_000, flush_least_pages=10_000)
    with opened(tmp_path / "store", settings) as store:
        store.queues.open_max = OPEN_MAX
        put_all(store, *(message(queue_id=i) for i in range(2 * OPEN_MAX)))
        with monkeypatch.context() as patch:
            patch.setattr("rmqkit.system.disk.sync_data", failing(OSError(errno.EIO, "Input/output error")))
            assert store.put(message(queue_id=99)).status is PutStatus.OK, "it is in the log"
            assert store.put(message(queue_id=0)).status is PutStatus.SERVICE_NOT_AVAILABLE
        assert store.put(message(queue_id=0)).status is PutStatus.OK
        assert store.max_offset("TopicTest", 99) == 1
    assert not (tmp_path / "store" / "abort").exists()
    with opened(tmp_path / "store", settings) as store:
        assert [store.max_offset("TopicTest", i) for i in [*range(2 * OPEN_MAX), 99]] == [2, *[1] * (2 * OPEN_MAX)]


def test_queue_read_through_all_its_files_keeps_two_open(queues: ConsumeQueues, tmp_path: Path) -> None:
    for number in range(95):
        index(queues, 0, number)
    queues.sync()
    queue = queues.obtain("T", 0)
    for number in range(95):
        assert queue.place(number)[1] == 1
    assert len(open_files(tmp_path)) <= 2


def test_extension_files_are_given_back_too(tmp_path: Path) -> None:
    queues = ConsumeQueues(tmp_path, small_settings(enable_consume_queue_ext=True, consume_queue_ext_file_bytes=100))
    queues.open_max = OPEN_MAX
    for number in range(6):
        for queue_id in range(QUEUES):
            index(queues, queue_id, number)
        queues.sync()
    assert len(open_files(tmp_path)) <= 4 * (OPEN_MAX + 1)
    for queue in queues:
        for number in range(6):
            assert queue.tags_code(queue.entry(number)[2]) == 7
    assert len(open_files(tmp_path)) <= 4 * (OPEN_MAX + 1)
    queues.close()
    assert len(open_files(tmp_path)) == 0


def test_store_with_more_queues_than_files_may_be_open(tmp_path: Path) -> None:
    """The test puts, flushes, reads, crashes and stops with few descriptors."""
    settings = small_settings(
        queue_flush_interval_ms=20, enable_consume_queue_ext=True, consume_queue_ext_file_bytes=4096
    )
    store = MessageStore(tmp_path / "store", settings)
    store.open()
    store.queues.open_max = OPEN_MAX
    for _ in range(3):
        put_all(store, *(message(queue_id=i, body=b"%d" % i) for i in range(QUEUES)))
    for i in range(QUEUES):
        assert [record.body for record in read_all(store, "TopicTest", i)] == [b"%d" % i] * 3
    assert len(open_files(tmp_path / "store" / "consumequeue")) <= 4 * OPEN_MAX
    crashed = copy_store(tmp_path / "store", tmp_path / "crashed")
    store.close()
    for root in (crashed, tmp_path / "store"):
        with opened(root, settings) as again:
            assert sum(again.max_offset("TopicTest", i) for i in range(QUEUES)) == 3 * QUEUES


def test_deleted_topic_leaves_no_open_file(queues: ConsumeQueues, tmp_path: Path) -> None:
    for queue_id in range(5):
        index(queues, queue_id)
    queues.delete_topic("T")
    assert len(open_files(tmp_path)) == 0 and not queues.dirty and not (tmp_path / "consumequeue" / "T").exists()


def test_start_lists_every_directory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        put_all(store, *(message(queue_id=i) for i in range(10)))
    sizes = disk.file_sizes
    listed: list[str] = []

    def list_and_note(path: Path) -> list[tuple[str, int]]:
        listed.append(str(path))
        return sizes(path)

    monkeypatch.setattr(disk, "file_sizes", list_and_note)
    with opened(tmp_path):
        folder = str(tmp_path / "consumequeue" / "TopicTest")
        assert sorted(path for path in listed if path.startswith(folder + "/")) == sorted(
            f"{folder}/{i}" for i in range(10)
        )


def test_directory_that_is_no_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "consumequeue" / "T" / "zero").mkdir(parents=True)
    with pytest.raises(StoreMismatch, match="zero is not a queue"):
        ConsumeQueues(tmp_path, small_settings()).check()


def test_queue_whose_only_file_is_empty_begins_at_0(tmp_path: Path) -> None:
    path = tmp_path / "consumequeue/T/0" / f"{0:020}"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(200))
    with opened(tmp_path) as store:
        assert store.bounds("T", 0) == (0, 0)
        put_all(store, message("T"))
        assert store.bounds("T", 0) == (0, 1)
        assert [record.queue_offset for record in read_all(store, "T")] == [0]


def test_limit_of_open_files_is_raised_to_what_is_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = before[0] // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, before[1]))
    try:
        limit = open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit > lower
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_bound_follows_from_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.store.queues.table.open_file_limit", lambda: 20_000)
    for ext, expected in ((False, 2500), (True, 1250)):
        queues = ConsumeQueues(tmp_path, small_settings(enable_consume_queue_ext=ext))
        queues.load()
        assert queues.open_max == expected


def test_address_in_a_closed_extension_is_read(tmp_path: Path) -> None:
    queues = ConsumeQueues(tmp_path, small_settings(enable_consume_queue_ext=True))
    index(queues, 0)
    queues.sync()
    queue = queues.obtain("T", 0)
    assert queue.close_idle()
    assert queue.unit(queue.entry(0)[2]) == ExtUnit(7, 0)
    queues.close()


def test_recovery_waits_for_each_directory_once_and_for_many_queues_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "store") as store:
        put_all(store, *(message(f"T{i // 8}", queue_id=i % 8) for i in range(64)))
        copy_store(store.root, tmp_path / "crashed")
    shutil.rmtree(tmp_path / "crashed" / "consumequeue")
    synced: list[Path] = []
    threads: set[str] = set()
    sync = file_queue.sync_directory

    def counting(directory: Path) -> None:
        synced.append(directory)
        threads.add(threading.current_thread().name)
        sync(directory)

    monkeypatch.setattr(file_queue, "sync_directory", counting)
    with opened(tmp_path / "crashed") as store:
        queues = [path for path in synced if path.is_relative_to(tmp_path / "crashed" / "consumequeue")]
        assert len(queues) == len(set(queues)) == 64 + 8 + 1
        assert {name for name in threads if name.startswith("store-recovery")}
        assert all(queue.queue.files[-1].is_idle for queue in store.queues)
