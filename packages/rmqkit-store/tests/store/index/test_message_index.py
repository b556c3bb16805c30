"""Keys on disk, in one or several index files: store.md §7."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.core import CORE
from rmqkit.errors import StoreMismatch
from rmqkit.protocol.properties import decode_properties, encode_properties, find_keys
from rmqkit.protocol.record import decode_record
from rmqkit.store.dispatcher import DispatchRequest
from rmqkit.store.index import index as message_index
from rmqkit.store.index.file import HEADER, IndexFile, key_hash, key_hashes
from rmqkit.store.index.index import KeyRows, MessageIndex, missing_files
from rmqkit.store.index.property_columns import PropertyColumns
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline.check import verify
from rmqkit.store.offline.repair import repair
from rmqkit.testing.clock import StandingClock
from tests.examples import examples
from tests.golden_stores import unpack_golden
from tests.open_files import open_files
from tests.store.stores import copy_store, golden_settings, message, opened, put_all, small_settings

SLOTS, ENTRIES = 4, 5
NOW = 1_795_226_023_017
ALL_TIME = (0, 1 << 62)


def new_index(folder: Path, *, tags_as_keys: bool = True) -> MessageIndex:
    return MessageIndex(folder / "index", SLOTS, ENTRIES, tags_as_keys=tags_as_keys)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[MessageIndex]:
    index = new_index(tmp_path)
    yield index
    index.close()


def put(index: MessageIndex, keys: str, offset: int, timestamp: int = NOW) -> None:
    index.put("T", offset, timestamp, encode_properties({"KEYS": keys}))
    index.enter()


def find(index: MessageIndex, key: str, count_max: int = 64, begin: int = 0, end: int = 1 << 62) -> list[int]:
    return index.query("T", key, count_max, begin, end).physical_offsets


def names(index: MessageIndex) -> list[str]:
    return sorted(path.name for path in index.directory.iterdir())


# ---- bytes


def test_empty_directory_until_the_first_message(index: MessageIndex) -> None:
    assert find(index, "k") == [] and not index.directory.exists()


def test_header_slots_and_entries(index: MessageIndex) -> None:
    put(index, "a b", 1000, NOW)
    put(index, "a", 2000, NOW + 2500)
    content = index.files[0].file.path.read_bytes()
    assert len(content) == 40 + 4 * SLOTS + 20 * ENTRIES
    slots = [key_hash("T", key) % SLOTS for key in "ab"]
    used = len(set(slots))
    assert struct.unpack_from(">qqqqii", content) == (NOW, NOW + 2500, 1000, 2000, used, 4)
    entries = [struct.unpack_from(">iqii", content, 40 + 4 * SLOTS + 20 * i) for i in range(4)]
    assert entries[0] == (0, 0, 0, 0)
    assert entries[1] == (key_hash("T", "a"), 1000, 0, 0)
    assert entries[2] == (key_hash("T", "b"), 1000, 0, 1 if used == 1 else 0)
    assert entries[3] == (key_hash("T", "a"), 2000, 2, 2 if used == 1 else 1)
    newest = struct.unpack_from(f">{SLOTS}i", content, 40)
    assert newest[slots[0]] == 3


def test_keys_of_a_message(index: MessageIndex) -> None:
    index.put("T", 7, NOW, encode_properties({"UNIQ_KEY": "UNIQUE", "KEYS": " one  two ", "TAGS": "red"}))
    index.enter()
    assert index.files[0].index_count == 5
    for key in ("UNIQUE", "one", "two", "T#red"):
        assert find(index, key) == [7]
    assert find(index, "") == [] and find(index, "red") == []


def test_tags_are_left_out_on_request(tmp_path: Path) -> None:
    index = new_index(tmp_path, tags_as_keys=False)
    index.put("T", 7, NOW, b"TAGS\x01red\x02")
    index.enter()
    assert index.files == ()  # a file comes with its first key
    index.close()


def test_file_is_named_by_local_time(index: MessageIndex) -> None:
    put(index, "a", 1)
    name = names(index)[0]
    assert len(name) == 17 and name.endswith("017")


def test_full_file_is_followed_by_one_that_begins_where_it_ended(index: MessageIndex) -> None:
    for i in range(5):
        put(index, "a", i * 100, NOW + i * 1000)
    assert len(names(index)) == 2
    first, second = index.files
    assert first.is_full and first.index_count == ENTRIES, "one entry is never used"
    header = struct.unpack_from(">qqqqii", second.file.path.read_bytes())
    assert header == (NOW + 4000, NOW + 4000, 400, 400, 1, 2)
    entry = struct.unpack_from(">iqii", second.file.path.read_bytes(), 40 + 4 * SLOTS + 20)
    assert entry == (key_hash("T", "a"), 400, 1, 0), "the first entry's seconds count from the end of the file before"
    assert find(index, "a") == [0, 100, 200, 300, 400]


def test_files_of_one_millisecond_get_different_names(index: MessageIndex) -> None:
    for i in range(14):
        put(index, "a", i)
    assert len(names(index)) == 4
    assert names(index) == [file.file.path.name for file in index.files]


def test_repeated_records_are_ignored(index: MessageIndex) -> None:
    put(index, "a", 100)
    put(index, "a", 200)
    put(index, "a", 100)
    assert find(index, "a") == [100, 200]


def test_clock_that_steps_back_counts_as_no_time(index: MessageIndex) -> None:
    put(index, "a", 100, NOW)
    put(index, "a", 200, NOW - 50_000)
    assert find(index, "a", begin=NOW - 1, end=NOW + 1) == []
    assert find(index, "a") == [100, 200]


def test_disk_that_refuses(index: MessageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    put(index, "a", 100)

    def fail(descriptor: int, data: bytes, position: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rmqkit.system.disk.pwrite", fail)
    with pytest.raises(OSError, match="No space left"):
        put(index, "a", 200)
    monkeypatch.undo()
    put(index, "a", 200)
    assert find(index, "a") == [100, 200]


def refuse(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(bool(CORE.fault), reason="rows come from the compiled core")
@pytest.mark.parametrize("function", ["put_hashed", "create"])
def test_rows_of_the_core_that_a_full_disk_refused_are_entered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    index = MessageIndex(tmp_path / "index", 64, 400)
    for first in (1000, 2000):
        index.enter()
        index.put_rows(key_rows([hashed("T", first + i, NOW, b"KEYS\x01k\x02") for i in range(3)]))
        with monkeypatch.context() as patch:
            patch.setattr(IndexFile, function, refuse)
            for _ in range(2 if function == "put_hashed" or first == 1000 else 0):
                with pytest.raises(OSError, match="No space"):
                    index.enter()
    index.put_rows(key_rows([hashed("T", 3000, NOW, b"KEYS\x01k\x02")]))
    index.put("T", 4000, NOW, b"KEYS\x01k\x02")
    assert find(index, "k") == [1000, 1001, 1002, 2000, 2001, 2002, 3000, 4000]
    assert index.files[0].slots_used == 1
    index.close()


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_refused_runs_leave_the_file_of_runs_that_were_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """Before, a second try also counted the slots of the first one, and began at the wrong time."""
    index = MessageIndex(tmp_path / "index", 64, 400)
    count = 10
    offsets, times = np.arange(count, dtype="i8") * 100 + 700, np.arange(count, dtype="i8") * 2000 + NOW
    hashes = np.arange(count, dtype="i8") * 7 + 3
    for _ in range(tries):
        with monkeypatch.context() as patch:
            patch.setattr("rmqkit.system.disk.pwrite", refuse)
            with pytest.raises(OSError, match="No space"):
                index.put_run(offsets, times, np.arange(count), hashes)
    index.put_run(offsets, times, np.arange(count), hashes)
    index.enter()
    header = (index.directory / names(index)[0]).read_bytes()[: HEADER.size]
    assert HEADER.unpack(header) == (NOW, NOW + 18_000, 700, 1600, 10, 11)
    index.close()


@pytest.mark.parametrize("function", ["_create", "_enter_hashed", "_enter"])
def test_unexpected_error_of_the_index_does_not_stop_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    """The index leaves the unreadable file unchanged, and reads the keys from the log."""

    def fail(*arguments: object) -> None:
        raise AssertionError("numbers begin at 1")

    clock = StandingClock(NOW)
    with opened(tmp_path / "s", small_settings(queue_flush_interval_ms=3_600_000), clock=clock) as store:
        put_all(store, message(KEYS="k0"))
        assert store.query("TopicTest", "k0", 8, *ALL_TIME).physical_offsets
        with monkeypatch.context() as patch:
            patch.setattr(MessageIndex, function, fail)
            patch.setattr(MessageIndex, "_has_columns", lambda index: False)
            for i in range(1, 6):
                clock.ms += 1500
                put_all(store, message(KEYS=f"k{i}"))
                assert store.get("TopicTest", 0, i, count_max=1).records
        clock.ms += 1500
        put_all(store, message(KEYS="k6"))
        found = [store.query("TopicTest", f"k{i}", 8, *ALL_TIME).physical_offsets for i in range(7)]
        assert [len(one) for one in found] == [1] * 7
    failures = [record for record in caplog.records if record.exc_info]
    assert len(failures) <= 1, "one traceback, however often it happens"
    report = verify(tmp_path / "s", small_settings())
    assert report.is_sound, report.findings


def test_keys_wait_for_those_of_the_next_messages(index: MessageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    put(index, "first", 0)
    writes: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(
        "rmqkit.system.disk.pwrite", lambda fd, data, at: (writes.append(len(data)), real(fd, data, at))[1]
    )
    for i in range(3):
        index.put("T", 100 + i, NOW, b"KEYS\x01k\x02")
    assert writes == []
    index.enter()
    assert writes == [3 * 20, 40], "entries and header; slots go through a mapping"
    assert find(index, "k") == [100, 101, 102]


def test_many_keys_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_index, "_WAITING_MAX", 32)
    index = MessageIndex(tmp_path / "index", 64, 400)
    for i in range(40):
        index.put("T", i, NOW, b"KEYS\x01k\x02")
    assert index.files[0].index_count == 33
    index.close()


@pytest.mark.parametrize("keys", ["k " * 2000, "k" * 32_000])
def test_messages_of_many_or_long_keys_are_entered_before_there_are_many(tmp_path: Path, keys: str) -> None:
    one = MessageIndex(tmp_path / "index", 1000, 1_000_000)
    waiting: list[int] = []
    for i in range(60):
        one.put("T", i * 33_000, NOW, encode_properties({"KEYS": keys}))
        waiting.append(len(one._waiting))
    assert max(waiting) <= 18
    one.close()


def test_keys_wait_a_second_at_most_when_messages_come(index: MessageIndex) -> None:
    for i, milliseconds in enumerate((0, 1000, 1001, 1002)):
        index.put("T", i, NOW + milliseconds, b"KEYS\x01k\x02")
    assert index.files[0].index_count == 4


def test_disk_without_room_for_the_slots(index: MessageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rmqkit.system.disk.reserve", refuse)
    with pytest.raises(OSError, match="No space left"):
        put(index, "a", 100)
    monkeypatch.undo()
    put(index, "a", 200)
    assert find(index, "a") == [100, 200]


def test_a_next_file_that_cannot_begin_is_not_left_behind(
    index: MessageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index retries while the disk is full. Each try could leave a descriptor, and a file that ends queries."""
    put(index, "a b c d", 100)
    real, before = os.pwrite, names(index)

    def refuse(descriptor: int, data: bytes, position: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name not in before:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    monkeypatch.setattr("rmqkit.system.disk.pwrite", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            put(index, "e", 200, NOW + 1)
    assert [path.name for path in (tmp_path / "index").iterdir()] == before
    assert len(set(open_files(tmp_path))) == len(open_files(tmp_path)) == 1
    monkeypatch.undo()
    assert (find(index, "a"), find(index, "e")) == ([100], [200])


def test_chains_are_whole_for_who_reads_beside_the_broker(index: MessageIndex, tmp_path: Path) -> None:
    for i in range(3):
        put(index, "a", i * 100)
    index.put("T", 300, NOW, b"KEYS\x01a\x02")
    beside = new_index(tmp_path)
    beside.load(clean=True, durable_timestamp=0)
    assert find(beside, "a") == [0, 100, 200]
    beside.close()


# ---- asking


def test_newest_entries_come_first_into_the_limit_and_are_sorted(index: MessageIndex) -> None:
    for i in range(9):
        put(index, "a", i * 100)
    assert find(index, "a", count_max=3) == [600, 700, 800]


def test_times_are_compared_by_the_second(index: MessageIndex) -> None:
    for i in range(3):
        put(index, "a", i * 100, NOW + i * 10_000)
    assert find(index, "a", begin=NOW + 10_000, end=NOW + 20_000) == [100, 200]
    assert find(index, "a", begin=NOW, end=NOW + 9_999) == [0]
    assert find(index, "a", begin=NOW + 20_001) == []


def test_damaged_chain_ends(index: MessageIndex) -> None:
    put(index, "a", 100)
    put(index, "a", 200)
    file = index.files[0].file
    file.write(40 + 4 * SLOTS + 20 * 2 + 16, struct.pack(">i", 2))
    assert find(index, "a") == [200]
    file.write(40, struct.pack(f">{SLOTS}i", *[99] * SLOTS))
    assert find(index, "a") == []


# ---- load


def test_clean_load_continues(index: MessageIndex, tmp_path: Path) -> None:
    for i in range(6):
        put(index, "a", i * 100)
    again = new_index(tmp_path)
    again.load(clean=True, durable_timestamp=0)
    put(again, "a", 600)
    assert find(again, "a") == [i * 100 for i in range(7)]
    again.close()


def test_crash_leaves_only_flushed_full_files(index: MessageIndex, tmp_path: Path) -> None:
    for i in range(6):
        put(index, "a", i * 100, NOW + i)
    again = new_index(tmp_path)
    again.load(clean=False, durable_timestamp=index.sync_full(1 << 62))
    assert [file.end_timestamp for file in again.files] == [NOW + 3]
    assert find(again, "a") == [0, 100, 200, 300]
    assert len(names(index)) == 1
    again.close()


def test_sync_full_covers_each_full_file_once(index: MessageIndex) -> None:
    assert index.sync_full(1 << 62) == 0
    for i in range(10):
        put(index, "a", i, NOW + i)
    assert index.sync_full(1 << 62) == NOW + 7
    assert index.sync_full(1 << 62) == 0


def test_other_size_is_refused(index: MessageIndex, tmp_path: Path) -> None:
    put(index, "a", 1)
    with pytest.raises(StoreMismatch, match=r"maxHashSlotNum 4 and maxIndexNum 6 make 176"):
        MessageIndex(tmp_path / "index", SLOTS, 6).check()


def test_names_that_are_no_numbers_are_skipped(index: MessageIndex, tmp_path: Path) -> None:
    put(index, "a", 1)
    (index.directory / "notes.txt").write_text("mine")
    again = new_index(tmp_path)
    again.check()
    again.load(clean=True, durable_timestamp=0)
    assert len(again.files) == 1
    again.close()


def test_expired_files_go_but_never_the_newest(index: MessageIndex) -> None:
    for i in range(9):
        put(index, "a", i * 100)
    assert index.drop_expired(300) == 0
    assert index.drop_expired(301) == 1
    assert index.drop_expired(1 << 60) == 1
    assert len(names(index)) == 1 and find(index, "a") == [800]


# ---- a file that is missing

KEYED = small_settings(hash_slot_count=SLOTS, index_entry_count=ENTRIES)


def keyed_store(folder: Path, *, is_clean: bool) -> tuple[Path, list[Path]]:
    """A store of three index files, stopped or killed, and the files."""
    with opened(folder / "s", KEYED) as store:
        put_all(store, *(message(KEYS="k") for _ in range(10)))
        store.query("TopicTest", "k", 64, *ALL_TIME)
        assert store.flusher.failure is None
        store.flusher.flush_log()
        store.flusher.flush_queues()
        root = store.root if is_clean else copy_store(store.root, folder / "killed")
        assert root.joinpath("indexfiles").is_file()
    return root, sorted(root.joinpath("index").iterdir())


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_missing_file_is_reported_at_every_start_and_by_verify(tmp_path: Path, caplog, is_clean: bool) -> None:
    root, files = keyed_store(tmp_path, is_clean=is_clean)
    assert verify(root, KEYED).is_sound
    files[0].unlink()
    for _ in range(2):
        assert [(one.kind, one.path) for one in verify(root, KEYED).findings] == [("file missing", str(files[0]))]
        caplog.clear()
        with opened(root, KEYED) as store:
            assert len(store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets) == 6
        (told,) = [text for text in caplog.messages if "is missing or empty" in text]
        assert str(files[0]) in told and "run: rmq store rebuild /" in told
    repair(root, KEYED, is_dry_run=False)
    caplog.clear()
    assert verify(root, KEYED).is_sound
    with opened(root, KEYED) as store:
        assert len(store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets) == 10
    assert not [text for text in caplog.messages if "is missing or empty" in text]


HEADERS = {"beginTimestamp": (0, "q"), "endTimestamp": (8, "q"), "beginPhyOffset": (16, "q"), "endPhyOffset": (24, "q")}
HEADERS["indexCount"] = (36, "i")


@pytest.mark.parametrize("bit", [0, 1, 30])
@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize(("number", "is_clean"), [(0, True), (0, False), (1, True), (-1, True)])
def test_a_changed_header_is_found_and_set_right(tmp_path: Path, caplog, name, number, is_clean, bit) -> None:
    root, files = keyed_store(tmp_path, is_clean=is_clean)
    at, form = HEADERS[name]
    content = files[number].read_bytes()
    (value,) = struct.unpack_from(f">{form}", content, at)
    files[number].write_bytes(
        content[:at] + struct.pack(f">{form}", value ^ 1 << bit) + content[at + struct.calcsize(form) :]
    )
    found = verify(root, KEYED).findings
    assert any((one.kind, one.path) == ("index header", str(files[number])) for one in found), found
    for is_told in (True, False):
        caplog.clear()
        with opened(root, KEYED) as store:
            assert len(store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets) == 10
            put_all(store, message(KEYS="other"))
        told = [text for text in caplog.messages if f"{name} is {value ^ 1 << bit}, not {value}" in text]
        assert bool(told) is is_told and all(str(files[number]) in text for text in told)
    assert verify(root, KEYED).is_sound


def test_a_file_of_zeros_is_reported(tmp_path: Path, caplog) -> None:
    root, files = keyed_store(tmp_path, is_clean=True)
    files[0].write_bytes(bytes(files[0].stat().st_size))
    assert not verify(root, KEYED).is_sound
    with opened(root, KEYED):
        pass
    assert f"header of index file {files[0]}: indexCount is 1, and there is no entry" in caplog.text


def test_the_newest_file_is_missed_after_a_clean_stop_alone(tmp_path: Path) -> None:
    root, files = keyed_store(tmp_path, is_clean=True)
    files[-1].unlink()
    assert not verify(root, KEYED).is_sound
    (root / "abort").touch()
    assert verify(root, KEYED).is_sound, "a start after a kill rebuilds the file from the log or deletes it"


def test_an_expired_file_is_not_missed(index: MessageIndex, tmp_path: Path) -> None:
    for i in range(9):
        put(index, "a", i * 100)
    index.sync(1 << 62)
    index.drop_expired(301)
    assert not missing_files(index.directory, clean=True, log_start=301)
    assert missing_files(index.directory, clean=True, log_start=300)


def test_a_disk_that_refuses_the_note_costs_only_the_note(index: MessageIndex, monkeypatch, caplog) -> None:
    def refuse(path: Path, note: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(index, "a", 1)
    monkeypatch.setattr(message_index, "write_note", refuse)
    index.sync(1 << 62)
    assert "indexfiles; missing index files would not be noticed" in caplog.text


# ---- in the store


def test_messages_are_found_by_key(tmp_path: Path) -> None:
    clock = StandingClock()
    with opened(tmp_path / "s", clock=clock) as store:
        results = put_all(store, *(message(KEYS=f"order-{i % 3} all", UNIQ_KEY=f"U{i}") for i in range(9)))
        offsets = [result.physical_offset for result in results]
        found = store.query("TopicTest", "order-1", 64, *ALL_TIME)
        assert found.physical_offsets == offsets[1::3]
        assert (found.last_update_timestamp, found.last_update_offset) == (clock.ms, offsets[-1])
        assert store.query("TopicTest", "U4", 64, *ALL_TIME).physical_offsets == [offsets[4]]
        assert store.query("Other", "U4", 64, *ALL_TIME).physical_offsets == []
        assert len(store.query("TopicTest", "all", 4, *ALL_TIME).physical_offsets) == 4
    with opened(tmp_path / "s") as store:
        assert store.query("TopicTest", "order-2", 64, *ALL_TIME).physical_offsets == offsets[2::3]


def test_limit_of_the_settings_holds(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(query_count_max=2)) as store:
        put_all(store, *(message(KEYS="k") for _ in range(5)))
        assert len(store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets) == 2


def test_rolled_back_records_have_no_keys(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put_all(store, message(KEYS="k", sys_flag=0xC), message(KEYS="k", sys_flag=0x4))
        assert len(store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets) == 1


def test_index_can_be_switched_off(tmp_path: Path) -> None:
    with opened(tmp_path / "s", small_settings(message_index_enable=False)) as store:
        put_all(store, message(KEYS="k"))
        assert store.query("TopicTest", "k", 64, *ALL_TIME).physical_offsets == []
    assert not (tmp_path / "s" / "index").exists()


def test_keys_come_back_after_a_crash(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        offsets = [result.physical_offset for result in put_all(store, *(message(KEYS="k") for _ in range(70)))]
        copy = copy_store(store.root, tmp_path / "copy")
    with opened(copy, small_settings(query_count_max=1000)) as store:
        assert store.query("TopicTest", "k", 1000, *ALL_TIME).physical_offsets == offsets


# ---- the golden stores


def rebuilt(name: str, tmp_path: Path, **changes: str) -> tuple[Path, Path]:
    """The golden store and one whose index was made from the same log alone."""
    golden = unpack_golden(name, tmp_path)
    root = tmp_path / "again"
    root.mkdir()
    (golden.root / "commitlog").rename(root / "commitlog")
    (root / "abort").touch()
    store = MessageStore(root, golden_settings(golden, **changes), is_batch_topic="GoldInnerBatch".__eq__)
    store.open()
    store.close()
    return golden.root, root


def index_contents(root: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((root / "index").iterdir())]


@pytest.mark.parametrize(
    ("name", "changes"), [("5.4.0", {}), ("5.4.0-ipv6-crc", {}), ("4.9.4", {"indexTagsEnable": "false"})]
)
def test_index_comes_out_byte_for_byte(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    golden, again = rebuilt(name, tmp_path, **changes)
    assert index_contents(again) == index_contents(golden)


@pytest.mark.parametrize("name", ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"])
def test_golden_key_queries(tmp_path: Path, name: str) -> None:
    golden = unpack_golden(name, tmp_path)
    with opened(golden.root, golden_settings(golden), is_batch_topic="GoldInnerBatch".__eq__) as store:
        for asked in golden.manifest["queryByKey"]:
            found = store.query(asked["topic"], asked["key"], 64, *ALL_TIME)
            kept = [offset for offset in found.physical_offsets if _has_key(store, offset, asked)]
            if asked.get("unique"):
                # A unique key finds the newest copy. Members' keys do not distinguish inner batches.
                assert set(asked["physicalOffsets"]) <= set(kept), asked
            elif "error" not in asked:
                assert kept == asked["physicalOffsets"], asked


def _has_key(store: MessageStore, offset: int, asked: dict[str, str]) -> bool:
    record = decode_record(store.log.record_at(offset) or b"")
    properties = decode_properties(record.properties)
    name = "UNIQ_KEY" if asked.get("unique") else "KEYS"
    return record.topic == asked["topic"] and asked["key"] in properties.get(name, "").split(" ")


# ---------------------------------------------------------------- many records at once


@examples(30)
@given(
    records=st.lists(st.tuples(st.lists(st.sampled_from("abcdefg"), max_size=4), st.integers(0, 5000)), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    again=st.integers(0, 4),
)
def test_runs_leave_the_files_that_single_puts_leave(tmp_path_factory, records, cuts, again):
    """The test mixes runs and single puts, and repeats some records."""
    folder = tmp_path_factory.mktemp("runs")
    one_by_one, mixed = (MessageIndex(folder / name, 3, 8) for name in ("single", "mixed"))
    offsets = np.cumsum([100] * len(records)).astype("i8")
    times = np.cumsum([1_700_000_000_000, *(step for _, step in records)])[: len(records)].astype("i8")
    properties = [f"KEYS\x01{' '.join(words)}\x02".encode() for words, _ in records]
    for row, encoded in enumerate(properties):
        one_by_one.put("T", int(offsets[row]), int(times[row]), encoded)
    one_by_one.enter()
    bounds = sorted({0, *(min(cut, len(records)) for cut in cuts), len(records)})
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        if number % 3 == 1:
            for row in range(low, high):
                mixed.put("T", int(offsets[row]), int(times[row]), properties[row])
        elif number % 3 == 2 and not CORE.fault:
            for row in range(low, high):
                one = hashed("T", int(offsets[row]), int(times[row]), properties[row])
                if row % 3:
                    mixed.put_rows(key_rows([one]))
                else:
                    mixed.put_all([one])
            if again % 2:
                mixed.enter()
        else:
            low = max(0, low - again)
            found = [find_keys(one) for one in properties]
            keys = [(row, h) for row in range(low, high) for h in key_hashes("T", found[row], with_tags=True)]
            rows, hashes = np.array(keys, "i8").reshape(-1, 2).T
            mixed.put_run(offsets[low:high], times[low:high], rows - low, hashes)
    mixed.enter()
    for index in (one_by_one, mixed):
        index.close()
    assert [path.read_bytes() for path in sorted((folder / "single").glob("*"))] == [
        path.read_bytes() for path in sorted((folder / "mixed").glob("*"))
    ]
    assert [path.name for path in sorted((folder / "single").glob("*"))] == [
        path.name for path in sorted((folder / "mixed").glob("*"))
    ]


def hashed(topic, physical_offset, store_timestamp, properties):
    """Return the dispatch request of a record that the core read."""
    hashes = key_hashes(topic, find_keys(properties), with_tags=True)
    packed = struct.pack(f"={len(hashes)}i", *hashes)
    return DispatchRequest(topic, 0, 0, 0, store_timestamp, physical_offset, 99, 0, properties, 1, None, packed)


def key_rows(records):
    """Return the core's key rows of several records that were stored together."""
    counts, first, last = [len(one.hashes) // 4 for one in records], records[0], records[-1]
    places = [(one.physical_offset, one.store_timestamp, count) for one, count in zip(records, counts, strict=True)]
    rows = b"".join([struct.pack("=qqI", *place) + one.hashes for one, place in zip(records, places, strict=True)])
    return KeyRows(first.physical_offset, last.physical_offset, first.store_timestamp, len(records), sum(counts), rows)


_VALUES = st.sampled_from(["a", "b", "a b", "é", "x" * 70, "7F0000010C9D18B4AAC2" + "0" * 12, "T#t"])
_PROPERTIES = st.dictionaries(st.sampled_from(["KEYS", "UNIQ_KEY", "TAGS", "other"]), _VALUES, max_size=4)


@examples(25)
@given(
    messages=st.lists(st.tuples(st.sampled_from("TU"), _PROPERTIES, st.sampled_from([0, 0, 1, 900])), max_size=25),
    room=st.integers(0, 3),
)
def test_numpy_and_the_core_leave_the_files_that_the_plain_code_leaves(tmp_path_factory, messages, room):
    """This includes new files that the disk refuses and the index retries."""
    folder = tmp_path_factory.mktemp("columns")
    names = ["plain", "columns", *([] if CORE.fault else ["core", "rows"])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_index, "_COLUMNS_MIN", 0)
        for name in names:
            index = MessageIndex(folder / name, 3, 8)
            patch.setattr(index, "_has_columns", lambda name=name: name == "columns")
            patch.setattr(index, "_create", _refusing(index._create, room))
            now, together = 1_700_000_000_000, list[DispatchRequest]()
            for row, (topic, properties, milliseconds) in enumerate([*messages, ("", {}, 1)]):
                now += milliseconds
                encoded = encode_properties(properties)
                with contextlib.suppress(OSError):
                    if name == "rows":
                        # Records with the same time were stored together. A refusal is no reason to leave this one out.
                        several, together = together, [*together, hashed(topic, row * 100, now, encoded)]
                        if several and several[0].store_timestamp != now:
                            together = together[-1:]
                            index.put_rows(key_rows(several))
                    elif row == len(messages):
                        pass
                    elif name == "core":
                        index.put_all([hashed(topic, row * 100, now, encoded)])
                    else:
                        index.put(topic, row * 100, now, encoded)
            for _ in range(60):
                with contextlib.suppress(OSError):
                    index.enter()
            index.close()
    plain, *others = [[path.read_bytes() for path in sorted((folder / name).glob("*"))] for name in names]
    assert all(one == plain for one in others)


def _refusing(create, room):
    """Let the index create this number of files, refuse the next one, and repeat."""
    calls = itertools.count(1)

    def refuse(now_ms):
        if room and next(calls) % (room + 1) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(now_ms)

    return refuse


@pytest.mark.parametrize("time_ms", [-(1 << 63), -1, 1 << 60])
def test_a_file_of_a_record_whose_time_is_none_has_a_name_all_the_same(time_ms):
    name = message_index.file_name(time_ms, "")
    assert (len(name), name.isdecimal()) == (17, True)
    assert message_index.file_name(time_ms, name) > name


_VALUES = st.sampled_from([b"", b"a", b"key b", b" c  d ", "schl\u00fcssel".encode(), b"x" * 70])


@examples(30)
@given(st.lists(st.tuples(_VALUES, _VALUES, _VALUES), min_size=1, max_size=20), st.booleans())
def test_keys_that_a_put_knew_have_the_hashes_of_those_that_are_searched(keys, with_tags):
    strings = [b"UNIQ_KEY\x01%b\x02A\x01b\x02KEYS\x01%b\x02TAGS\x01%b\x02" % one for one in keys]
    topic = np.arange(len(keys)) % 2
    searched = PropertyColumns(strings).keys(["T", "U"], topic, with_tags=with_tags)
    known = PropertyColumns.of_keys(keys).keys(["T", "U"], topic, with_tags=with_tags)
    assert [column.tolist() for column in known] == [column.tolist() for column in searched]
