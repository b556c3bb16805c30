"""Queue entries and their bounds: store.md §4."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.store.log.mapped_file import file_name
from rmqkit.store.queues.base import ConsumeQueueBase
from rmqkit.store.queues.batch_queue import BatchQueue
from rmqkit.store.queues.consume_queue import BLANK_ENTRY, ENTRY, ConsumeQueue
from tests.open_files import open_files

FILE_ENTRIES = 10
FILE_BYTES = 200
RECORD_BYTES = 100
TAG_A = 2598919


def new_queue(root: Path) -> ConsumeQueue:
    return ConsumeQueue("TopicTest", 3, root / "consumequeue" / "TopicTest" / "3", FILE_BYTES, {})


def reloaded(root: Path) -> ConsumeQueue:
    queue = new_queue(root)
    queue.queue.load()
    queue.recover()
    return queue


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[ConsumeQueue]:
    queue = new_queue(tmp_path)
    yield queue
    queue.close()


def fill(queue: ConsumeQueue, count: int, first: int = 0) -> ConsumeQueue:
    for i in range(first, first + count):
        queue.append(i, i * RECORD_BYTES, RECORD_BYTES, TAG_A, 0)
    return queue


def content(queue: ConsumeQueue, start: int) -> bytes:
    return queue.queue.path_of(start).read_bytes()


def entry(i: int) -> bytes:
    return ENTRY.pack(i * RECORD_BYTES, RECORD_BYTES, TAG_A)


def test_entry_bytes(queue: ConsumeQueue) -> None:
    queue.append(0, 0x1122334455, 0x1F4, -2, 0)
    assert content(queue, 0)[:20] == bytes.fromhex("0000001122334455 000001f4 fffffffffffffffe")


def test_new_queue_has_no_file(queue: ConsumeQueue, tmp_path: Path) -> None:
    assert (queue.min_offset, queue.max_offset, queue.read(0, 5)) == (0, 0, b"")
    assert list(tmp_path.iterdir()) == []


def test_entries_fill_files_in_order(queue: ConsumeQueue) -> None:
    fill(queue, 12)
    assert content(queue, 0) == b"".join(map(entry, range(10)))
    assert content(queue, FILE_BYTES) == entry(10) + entry(11) + bytes(160)
    assert (queue.max_offset, queue.max_physical_offset) == (12, 1200)


def test_read_ends_with_the_file(queue: ConsumeQueue) -> None:
    fill(queue, 12)
    assert queue.read(8, 5) == entry(8) + entry(9)
    assert queue.read(10, 5) == entry(10) + entry(11)
    assert queue.read(12, 5) == b""


def test_repeated_dispatch_changes_nothing(queue: ConsumeQueue) -> None:
    fill(queue, 5)
    fill(queue, 5)
    assert queue.max_offset == 5 and content(queue, 0)[100:] == bytes(100)


@pytest.mark.parametrize("number", [0, 3, 12])
def test_later_record_with_a_taken_number_takes_its_place(
    queue: ConsumeQueue, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    fill(queue, 14)
    queue.append(number, 9900, 100, 0, 0)
    assert (queue.min_offset, queue.max_offset) == (0, number + 1)
    assert queue.place(number) == (9900, 100)
    assert f"renumbered from {number} on, {14 - number} messages dropped" in caplog.text


def test_queue_renumbered_below_its_first_file(queue: ConsumeQueue) -> None:
    fill(queue, 14)
    queue.drop_expired(1001)
    queue.append(2, 9900, 100, 0, 0)
    assert (queue.min_offset, queue.max_offset, queue.place(2)) == (2, 3, (9900, 100))


def test_number_too_great_is_indexed_at_the_end(queue: ConsumeQueue, caplog: pytest.LogCaptureFixture) -> None:
    fill(queue, 5)
    queue.append(9, 9900, 100, 0, 0)
    assert (
        queue.entry(5) == (9900, 100, 0)
        and "4 messages from 5 on are not in the log: consumers find message 9 under the number 5" in caplog.text
    )


@pytest.mark.parametrize(
    ("number", "physical_offset", "gap_max", "count"),
    [
        (7, 500, 2, 2),
        (7, 500, 1, 0),  # more messages are missing than may be lost
        (7, 499, 2, 0),  # the record is older than the queue: one of a deleted topic
        (5, 500, 2, 0),
        (4, 500, 2, 0),
    ],
)
def test_lost_messages_before_a_record_get_blank_entries(
    number: int, physical_offset: int, gap_max: int, count: int, queue: ConsumeQueue
) -> None:
    fill(queue, 5).fill_gap(number, physical_offset, gap_max)
    assert (queue.max_offset, content(queue, 0)[100:]) == (5 + count, (BLANK_ENTRY * count).ljust(100, b"\0"))


def test_queue_that_begins_later_is_filled_with_blanks(queue: ConsumeQueue) -> None:
    fill(queue, 1, first=23)
    assert [path.name for path in queue.queue.directories[0].iterdir()] == [file_name(400)]
    assert content(queue, 400) == BLANK_ENTRY * 3 + entry(23) + bytes(120)
    assert bytes.fromhex("0000000000000000 7fffffff 0000000000000000") == BLANK_ENTRY
    assert (queue.min_offset, queue.max_offset) == (23, 24)


def test_blanks_count_as_readable_after_a_restart_at_offset_zero(queue: ConsumeQueue, tmp_path: Path) -> None:
    fill(queue, 1, first=23)
    again = reloaded(tmp_path)
    again.correct_min_offset(0)
    assert (again.min_offset, again.max_offset) == (20, 24)
    again.correct_min_offset(100)
    assert again.min_offset == 23


def test_blanks_alone_stand_for_no_record(queue: ConsumeQueue, tmp_path: Path) -> None:
    fill(queue, 1, first=23)
    queue.queue.files[0].write(3 * 20, bytes(20))  # the crash came between the blanks and the first entry
    again = reloaded(tmp_path)
    assert (again.max_offset, again.max_physical_offset) == (23, -1)
    fill(again, 2, first=23)
    assert again.max_offset == 25 and again.entry(24) == ENTRY.unpack(entry(24))


def test_queue_that_begins_at_a_file_start_has_no_blanks(queue: ConsumeQueue) -> None:
    fill(queue, 1, first=20)
    assert content(queue, 400)[:20] == entry(20)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 35, 40])
def test_recovery_finds_the_end(queue: ConsumeQueue, tmp_path: Path, count: int) -> None:
    fill(queue, count)
    again = reloaded(tmp_path)
    assert again.max_offset == count
    assert again.max_physical_offset == (count * RECORD_BYTES if count else -1)
    fill(again, 3, first=count)
    assert again.entry(count + 2) == ENTRY.unpack(entry(count + 2))


@pytest.mark.parametrize("damage", [ENTRY.pack(-1, 100, 0), ENTRY.pack(500, 0, 0), ENTRY.pack(500, -7, 0)])
def test_recovery_stops_at_the_first_invalid_entry(queue: ConsumeQueue, tmp_path: Path, damage: bytes) -> None:
    fill(queue, 9)
    queue.queue.files[0].write(5 * 20, damage)
    again = reloaded(tmp_path)
    assert (again.max_offset, again.max_physical_offset) == (5, 500)
    assert content(again, 0)[100:] == bytes(100), "stale entries never look valid again"


def test_recovery_looks_at_three_files_only(queue: ConsumeQueue, tmp_path: Path) -> None:
    fill(queue, 45)
    queue.queue.files[1].write(0, bytes(20))
    assert reloaded(tmp_path).max_offset == 45
    queue.queue.files[2].write(0, bytes(20))
    assert reloaded(tmp_path).max_offset == 20


@pytest.mark.parametrize(("end", "count"), [(0, 0), (1, 1), (500, 5), (501, 6), (1500, 15), (9999, 25)])
def test_physical_cut_drops_entries_at_or_behind_it(queue: ConsumeQueue, end: int, count: int) -> None:
    fill(queue, 25)
    queue.truncate_physical(end)
    assert queue.max_offset == count
    assert queue.max_physical_offset == (count * RECORD_BYTES if count else -1)
    fill(queue, 2, first=count)
    assert queue.max_offset == count + 2


@pytest.mark.parametrize(
    ("min_physical_offset", "min_offset"), [(0, 0), (1, 1), (100, 1), (900, 9), (950, 10), (2400, 24), (2401, 25)]
)
def test_min_offset_follows_the_log(queue: ConsumeQueue, min_physical_offset: int, min_offset: int) -> None:
    fill(queue, 25)
    queue.correct_min_offset(min_physical_offset)
    assert queue.min_offset == min_offset, "a crash may leave files before the start of the log"


def test_expired_files_are_deleted_but_never_the_last(queue: ConsumeQueue) -> None:
    fill(queue, 25)
    assert queue.drop_expired(900) == 0
    assert queue.drop_expired(901) == 1
    queue.correct_min_offset(950)
    assert (queue.min_offset, queue.max_offset) == (10, 25)
    assert queue.drop_expired(99999) == 1
    queue.correct_min_offset(99999)
    assert (queue.min_offset, queue.max_offset) == (25, 25)


def test_full_disk_leaves_the_queue_as_it_was(queue: ConsumeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, 3)
    monkeypatch.setattr("rmqkit.system.disk.pwrite", lambda descriptor, data, position: 7)
    with pytest.raises(OSError, match="no space left") as raised:
        fill(queue, 1, first=3)
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert queue.max_offset == 3
    assert fill(queue, 1, first=3).entry(3) == ENTRY.unpack(entry(3))


def test_dirty_queues_enter_themselves_once_per_flush(tmp_path: Path) -> None:
    dirty: dict[ConsumeQueueBase, None] = {}
    queue = ConsumeQueue("T", 0, tmp_path / "q", FILE_BYTES, dirty)
    fill(queue, 2)
    assert list(dirty) == [queue]
    queue.sync()
    assert not dirty and queue.queue.unsynced_bytes == 0
    fill(queue, 1, first=2)
    assert list(dirty) == [queue]


def test_destroy_removes_files_and_directory(queue: ConsumeQueue) -> None:
    fill(queue, 12)
    queue.destroy()
    assert not queue.queue.directories[0].exists()


def test_closed_queue_opens_its_file_again(queue: ConsumeQueue) -> None:
    fill(queue, 2)
    queue.close()
    fill(queue, 1, first=2)
    assert queue.read(0, 3) == entry(0) + entry(1) + entry(2)


def test_descriptors_are_given_back(queue: ConsumeQueue, tmp_path: Path) -> None:
    fill(queue, 25)
    assert open_files(tmp_path)
    queue.close()
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("kind", [ConsumeQueue, BatchQueue])
def test_valid_entries_are_counted_as_one_by_one(kind: type[ConsumeQueueBase]) -> None:
    chance = random.Random(7)
    layout = kind.layout
    for _ in range(300):
        fields = [[5, 100, 0, 0, 3, 1, 0, 0][: len(layout.format) - 1] for _ in range(chance.randrange(12))]
        for entry in fields:
            if chance.random() < 0.2:
                field = chance.randrange(len(entry))
                entry[field] = chance.choice([-1, 0, 1, -256, 256])
        raw = b"".join(layout.pack(*entry) for entry in fields)
        expected = next((i for i, entry in enumerate(fields) if not kind.are_valid([tuple(entry)])), len(fields))
        assert kind.valid_count(raw + bytes(chance.randrange(3))) == expected


# ---- entries held in memory


def holding(root: Path, entries_max: int = 1000) -> ConsumeQueue:
    queue = new_queue(root)
    queue.held_bytes_max = entries_max * 20
    return queue


def test_held_entries_are_read_from_memory_and_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[tuple[int, int]] = []
    real = os.pwrite
    counting = lambda fd, data, at: (writes.append((at, len(data))), real(fd, data, at))[1]  # noqa: E731
    monkeypatch.setattr("rmqkit.system.disk.pwrite", counting)
    queue = fill(holding(tmp_path), 4)
    assert (writes, queue.max_offset, queue.max_physical_offset) == ([], 4, 400)
    assert queue.read(1, 2) == entry(1) + entry(2)
    assert queue.read(3, 9) == entry(3)
    assert queue.read(4, 1) == b""
    assert (queue.place(2), queue.place(4), queue.newest_record()) == ((200, 100), (-1, 0), (300, 100))
    queue.write_held()
    queue.write_held()
    assert (writes, queue.has_held) == ([(0, 80)], False)
    fill(queue, 1, first=4)
    assert (queue.read(3, 9), queue.read(4, 9), queue.place(3)) == (entry(3) + entry(4), entry(4), (300, 100))
    assert queue.read(2, 2) == entry(2) + entry(3)


def test_as_many_as_may_be_held_are_written_with_the_next_one(tmp_path: Path) -> None:
    queue = fill(holding(tmp_path, entries_max=3), 3)
    assert (queue.has_held, content(queue, 0)[:20]) == (True, bytes(20))
    fill(queue, 1, first=3)
    assert (queue.has_held, content(queue, 0)[:80]) == (False, b"".join(map(entry, range(4))))


def test_a_refusing_disk_leaves_held_entries_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = fill(holding(tmp_path, entries_max=3), 2)
    monkeypatch.setattr("rmqkit.system.disk.pwrite", lambda descriptor, data, position: 7)
    with pytest.raises(OSError, match="no space left"):
        queue.write_held()
    fill(queue, 1, first=2)
    with pytest.raises(OSError, match="no space left"):
        fill(queue, 1, first=3)
    assert (queue.max_offset, queue.max_physical_offset, queue.read(0, 9)) == (3, 300, b"".join(map(entry, range(3))))
    monkeypatch.undo()
    fill(queue, 1, first=3).close()
    assert content(queue, 0)[:80] == b"".join(map(entry, range(4)))


def test_a_queue_that_holds_entries_stays_dirty_and_open(tmp_path: Path) -> None:
    dirty: dict[ConsumeQueueBase, None] = {}
    queue = ConsumeQueue("T", 0, tmp_path / "q", FILE_BYTES, dirty)
    queue.held_bytes_max = 1000
    fill(queue, 2)
    queue.sync()
    assert list(dirty) == [queue] and not queue.close_idle()
    queue.write_held()
    queue.sync()
    assert not dirty and queue.close_idle()


def append(queue: ConsumeQueue, count: int) -> None:
    for i in range(count):
        queue.append(queue.max_offset, max(0, queue.max_physical_offset), 10, i, 0)


def append_run(queue: ConsumeQueue, count: int) -> None:
    at = max(0, queue.max_physical_offset)
    packed = b"".join(ENTRY.pack(at + i * 10, 10, i) for i in range(count))
    queue.append_run(queue.max_offset, at, at + 10 * count, packed)


STEPS: dict[str, Callable[[ConsumeQueue, int], object]] = {
    "append": append,
    "run": append_run,
    "gap": lambda queue, count: queue.append(queue.max_offset + count, max(0, queue.max_physical_offset), 10, 7, 0),
    "cut": lambda queue, count: queue.truncate_physical(queue.max_physical_offset - 10 * count),
    "write": lambda queue, _: queue.write_held(),
    "sync": lambda queue, _: queue.sync(),
    "close": lambda queue, _: queue.close(),
    "idle": lambda queue, _: queue.close_idle(),
    "expire": lambda queue, count: queue.follow(queue.max_physical_offset - 10 * count),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(1, 12)), max_size=25), st.integers(1, 8))
def test_a_queue_that_holds_entries_is_as_one_that_writes_each(
    tmp_path_factory: pytest.TempPathFactory, done: list[tuple[str, int]], entries_max: int
) -> None:
    root = tmp_path_factory.mktemp("held")
    both = new_queue(root / "each"), holding(root / "held", entries_max)
    for step, value in done:
        found = []
        for queue in both:
            STEPS[step](queue, value)
            facts = queue.min_offset, queue.max_offset, queue.max_physical_offset, queue.newest_record()
            indexes = range(queue.min_offset, queue.max_offset + 2)
            found.append((facts, queue.file_bounds(), [(queue.place(i), queue.read(i, 5)) for i in indexes]))
        assert found[0] == found[1], (step, value)
    files = []
    for queue in both:
        queue.close()
        files.append([(one.path.name, one.path.read_bytes()) for one in queue.queue.files])
    assert files[0] == files[1]


def test_another_thread_may_write_while_the_owner_appends_and_reads(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "q", 2000, {})
    queue.held_bytes_max = 400
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            queue.write_held()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for i in range(1000):
            fill(queue, 1, first=i)
            assert queue.place(i) == (i * RECORD_BYTES, RECORD_BYTES)
            assert queue.read(max(i - 3, i - i % 100), 9) == b"".join(map(entry, range(max(i - 3, i - i % 100), i + 1)))
    finally:
        is_over.set()
        thread.join()
    queue.close()
    assert b"".join(file.path.read_bytes() for file in queue.queue.files) == b"".join(map(entry, range(1000)))
