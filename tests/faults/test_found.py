"""Faults that the simulated power cuts found, one short test each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rmqkit.errors import StoreUnavailable
from rmqkit.protocol.record import BatchEntry, decode_record, encode_batch
from rmqkit.store.files import JsonFile
from rmqkit.store.index.index import MessageIndex
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.offline import check as fsck
from rmqkit.store.queues.consume_queue import ENTRY
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.system import disk
from rmqkit.testing.clock import StandingClock
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings


def quiet(**changes: Any) -> StoreSettings:
    return small_settings(flush_interval_ms=3_600_000, queue_flush_interval_ms=3_600_000, **changes)


class Synced:
    """The files that were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        real = os.fdatasync

        def fdatasync(descriptor: int) -> None:
            self.names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
            real(descriptor)

        monkeypatch.setattr("rmqkit.system.disk.sync_data", fdatasync)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    return Synced(monkeypatch)


def test_file_before_an_empty_last_one_is_synced(tmp_path: Path, synced: Synced) -> None:
    """A flush between a roll and the first record of the new file."""
    queue = FileQueue([tmp_path / "q"], 100, setting="size", root=tmp_path)
    first = queue.create(0)
    queue.append(first)
    first.write(0, b"data")
    first.wrote = 100
    second = queue.create(100)
    second.is_named_durably = True
    queue.append(second)
    assert queue.unsynced_bytes == 100
    queue.sync()
    assert f"{0:020d}" in synced.names and first.synced == 100
    queue.close()


def test_zeros_of_a_cut_at_the_start_of_a_file_reach_the_disk(tmp_path: Path, synced: Synced) -> None:
    queue = FileQueue([tmp_path / "q"], 100, setting="size", root=tmp_path)
    for start in (0, 100, 200):
        file = queue.create(start)
        file.write(0, b"x" * 100)
        file.wrote = file.synced = 100
        file.is_named_durably = True
        queue.append(file)
    queue.truncate(100)
    queue.sync()
    assert f"{100:020d}" in synced.names
    queue.close()


def crash(store: MessageStore, to: Path) -> Path:
    """Return a copy of a store as a kill leaves it."""
    return copy_store(store.root, to)


def test_torn_properties_end_the_log(tmp_path: Path) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=b"first"), message(body=b"second", long="x" * 900))
        at = store.get("TopicTest", 0, 1, count_max=1)
        record = decode_record(at.records[0])
        left = crash(store, tmp_path / "left")
    path = left / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    sector = -(-(record.physical_offset + 200) // 512) * 512
    content[sector : sector + 512] = bytes(512)  # in the middle of the properties
    path.write_bytes(content)
    with opened(left, quiet()) as store:
        assert [one.body for one in read_all(store, "TopicTest")] == [b"first"]


@pytest.mark.parametrize("properties", [b"K\x01v\0", b"K\x01" + bytes(512) + b"\x02"])
def test_properties_that_look_torn_are_not_stored(tmp_path: Path, properties: bytes) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        assert store.put(message(string=properties)).status is PutStatus.MESSAGE_ILLEGAL
        batch = encode_batch([BatchEntry(b"sound", b""), BatchEntry(b"odd", properties)])
        assert store.put_batch(message(body=batch)).status is PutStatus.MESSAGE_ILLEGAL
        assert store.put(message(string=b"")).status is PutStatus.OK


def test_record_without_properties_at_a_sector_boundary_is_sound(tmp_path: Path) -> None:
    """The length of its properties, two zero bytes, may be in the next sector."""
    with opened(tmp_path / "s", quiet()) as store:
        overhead = put_all(store, message(body=b"", string=b""))[0].end_offset
        bodies = [b"x" * (512 - 2 * overhead + shift) for shift in range(4)]
        for body in bodies:
            put_all(store, message(body=body, string=b""))
            pad = -store.max_physical_offset % 512
            put_all(store, message(body=b"y" * ((pad - overhead) % 512 + overhead), string=b""))
        count = store.max_offset("TopicTest", 0)
        left = crash(store, tmp_path / "left")
    with opened(left, quiet()) as store:
        assert store.max_offset("TopicTest", 0) == count


def test_torn_entry_is_made_again(tmp_path: Path) -> None:
    """An entry in two sectors has lost its tag code, or the upper part of its physical offset."""
    settings = quiet(consume_queue_file_bytes=2000, commit_log_file_bytes=65_536)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, *(message(body=b"%d" % i, TAGS="red") for i in range(40)))
        assert store.queues.write_held()
        left = crash(store, tmp_path / "left")
    path = left / "consumequeue" / "TopicTest" / "0" / f"{0:020d}"
    whole = path.read_bytes()
    index = 512 // ENTRY.size  # entry 25 starts at 500
    for torn in (whole[:512] + bytes(1488), whole[: index * 20] + bytes(12) + whole[512:]):
        path.write_bytes(torn)
        with opened(copy_store(left, tmp_path / f"left-{torn[512:] == bytes(1488)}"), settings) as store:
            assert [one.body for one in read_all(store, "TopicTest")] == [b"%d" % i for i in range(40)]
            again = store.root / "consumequeue" / "TopicTest" / "0" / path.name
            assert again.read_bytes() == whole


def test_units_of_entries_before_a_torn_address_stay(tmp_path: Path) -> None:
    """The lower half of an address is lost: it looks like the address of the first unit, and so do all later units."""
    settings = quiet(
        enable_consume_queue_ext=True,
        consume_queue_ext_file_bytes=128,
        consume_queue_file_bytes=2000,
        commit_log_file_bytes=8192,
    )
    clock = StandingClock()
    with opened(tmp_path / "s", settings, clock=clock) as store:
        for i in range(77):
            put_all(store, message(body=b"%d" % i + bytes(250), TAGS=f"t{i}"))
            clock.ms += 1000
        store.flusher.flush_log()
        store.flusher.flush_queues()  # entries of older log files are not rebuilt
        left = crash(store, tmp_path / "left")
    path = left / "consumequeue" / "TopicTest" / "0" / f"{0:020d}"
    whole = path.read_bytes()
    path.write_bytes(whole[:1536] + bytes(464))  # entry 76 starts at 1520
    with opened(left, settings) as store:
        assert [one.body[:2].rstrip(b"\0") for one in read_all(store, "TopicTest")] == [b"%d" % i for i in range(77)]
        again = store.root / "consumequeue" / "TopicTest" / "0" / path.name
        assert again.read_bytes() == whole
    assert fsck.verify(left, settings).is_sound


def test_queue_that_lost_entries_of_removed_records_keeps_its_numbers(tmp_path: Path) -> None:
    settings = quiet(disk_clean_forcibly_percent=30, delete_file_batch_max=1)
    with opened(tmp_path / "s", settings, disk_used_percent=lambda path: 60) as store:
        put_all(store, *(message(body=b"%d" % i + bytes(700)) for i in range(12)))
        store.retention_round()
        first = store.min_offset("TopicTest", 0)
        assert first > 3
        left = crash(store, tmp_path / "left")
    path = left / "consumequeue" / "TopicTest" / "0" / f"{0:020d}"
    path.write_bytes(path.read_bytes()[:40] + bytes(160))  # entries 2 and 3 never reached the disk
    with opened(left, settings) as store:
        assert [one.queue_offset for one in read_all(store, "TopicTest")] == list(range(first, 12))
        assert put_all(store, message())[0].queue_offset == 12


@pytest.mark.parametrize("is_batch", [False, True])
def test_queue_of_a_topic_made_again_holds_the_new_messages(tmp_path: Path, is_batch: bool) -> None:
    """The log still has the messages of the old topic, with the same offsets."""

    def put(store: MessageStore, text: bytes) -> None:
        body = encode_batch([BatchEntry(text, b""), BatchEntry(text, b"")])
        for _ in range(5):
            put = store.put_batch if is_batch else store.put
            assert put(message(body=body if is_batch else text, UNIQ_KEY="U")).status is PutStatus.OK

    with opened(tmp_path / "s", quiet(), is_batch_topic=lambda topic: is_batch) as store:
        put(store, b"old")
        store.delete_topic("TopicTest")
        put(store, b"new")
        left = crash(store, tmp_path / "left")
    with opened(left, quiet(), is_batch_topic=lambda topic: is_batch) as store:
        found = read_all(store, "TopicTest")
        assert len(found) == 5 and all(b"new" in one.body for one in found)
        assert (store.min_offset("TopicTest", 0), store.max_offset("TopicTest", 0)) == (0, 10 if is_batch else 5)
    assert fsck.verify(left, quiet()).is_sound


def test_crash_with_many_log_files_since_the_checkpoint_leaves_no_gap(tmp_path: Path) -> None:
    settings = quiet()
    with opened(tmp_path / "s", settings) as store:
        for i in range(40):
            put_all(store, message(body=b"%d" % i + bytes(1500)))
        store.flusher.flush_log()
        left = crash(store, tmp_path / "left")
    assert len(list((left / "commitlog").iterdir())) > 10
    shutil.rmtree(left / "consumequeue")  # none of the queue was flushed
    with opened(left, settings) as store:
        assert [one.queue_offset for one in read_all(store, "TopicTest")] == list(range(40))


def test_empty_queue_file_of_a_crash_is_made_again(tmp_path: Path) -> None:
    """File names can reach the disk before the file lengths."""
    settings = quiet(consume_queue_file_bytes=200)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, *(message(body=b"%d" % i) for i in range(35)))
        left = crash(store, tmp_path / "left")
    (left / "consumequeue" / "TopicTest" / "0" / f"{200:020d}").write_bytes(b"")
    with opened(left, settings) as store:
        assert [one.queue_offset for one in read_all(store, "TopicTest")] == list(range(35))


def test_extension_without_its_queue_is_forgotten(tmp_path: Path) -> None:
    settings = quiet(enable_consume_queue_ext=True, consume_queue_ext_file_bytes=4096)
    with opened(tmp_path / "s", settings) as store:
        put_all(store, *(message(body=b"%d" % i) for i in range(5)))
        left = crash(store, tmp_path / "left")
    shutil.rmtree(left / "commitlog")
    shutil.rmtree(left / "consumequeue")
    with opened(left, settings) as store:
        put_all(store, message())
    content = (left / "consumequeue_ext" / "TopicTest" / "0" / f"{0:020d}").read_bytes()
    assert len(content.rstrip(b"\0")) <= 20, "one unit, followed by zeros"


def test_names_of_new_directories_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.add(str(Path(f"/proc/self/fd/{descriptor}").readlink().relative_to(tmp_path)))
        real(descriptor)

    monkeypatch.setattr("rmqkit.system.disk.sync_file", fsync)
    with opened(tmp_path / "new" / "s", quiet()) as store:
        put_all(store, message())
        store.flusher.flush_log()
        store.flusher.flush_queues()
        parts = ["s", "s/commitlog", "s/consumequeue", "s/consumequeue/TopicTest", "s/consumequeue/TopicTest/0"]
        assert {".", "new", *(f"new/{part}" for part in parts)} <= synced


def test_full_index_file_stays_after_a_crash_only_with_what_the_log_has_too(tmp_path: Path) -> None:
    index = MessageIndex(tmp_path / "index", 16, 4)
    for number in range(4):
        index.put("T", number * 100, 1000 + number, b"KEYS\x01k%d\x02" % number)
    index.enter()
    assert len(index.files) == 2 and index.sync_full(200) == 0  # the file holds the record at 200
    assert index.sync_full(300) == 1002
    index.close()
    again = MessageIndex(tmp_path / "index", 16, 4)
    again.load(clean=False, durable_timestamp=1003)
    assert [file.end_offset for file in again.files] == [200], "a file that is not full is dropped"
    again.close()


def test_empty_index_file_is_no_reason_not_to_start(tmp_path: Path) -> None:
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(KEYS="k"))
        store.query("TopicTest", "k", 8, 0, 1 << 62)
        left = crash(store, tmp_path / "left")
    (left / "index" / "20990101000000000").touch()
    with opened(left, quiet()) as store:
        assert store.query("TopicTest", "k", 8, 0, 1 << 62).physical_offsets == [0]


def test_empty_configuration_never_becomes_the_backup(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "c.json")
    file.save({"number": 1})
    file.save({"number": 2})
    file.path.write_bytes(b"")
    assert file.load(dict) == {"number": 1}
    assert file.path.read_bytes() == file.backup.read_bytes()


def test_first_configuration_is_never_half_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(5, "the power failed")

    file = JsonFile(tmp_path / "c.json")
    with monkeypatch.context() as patch:
        patch.setattr("rmqkit.system.disk.sync_file", fsync)
        with pytest.raises(StoreUnavailable):
            file.save({"number": 1})
    assert not file.path.exists() and file.load(dict) is None


def test_stop_on_a_disk_that_deletes_nothing_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MessageStore(tmp_path / "s", quiet(flush_disk_type=FlushDiskType.SYNC_FLUSH))
    store.open()
    put_all(store, message())
    real = disk.remove

    def remove(path: Any, **keywords: Any) -> None:
        if "commitlog" in str(path):
            raise OSError(30, "Read-only file system")
        real(path, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove", remove)
        store.close()
    with opened(tmp_path / "s", quiet()) as store:
        assert len(read_all(store, "TopicTest")) == 1


def test_blank_that_a_clean_start_takes_away_is_gone_on_the_disk_too(tmp_path: Path, synced: Synced) -> None:
    """If the blank file came back, the log would continue after lost records."""
    with opened(tmp_path / "s", quiet()) as store:
        put_all(store, message(body=bytes(2000)), message(body=bytes(2500)))
    (tmp_path / "s" / "commitlog" / f"{4096:020d}").unlink()
    synced.names.clear()
    with opened(tmp_path / "s", quiet()):
        assert f"{0:020d}" in synced.names


def test_clock_set_back_does_not_make_unflushed_entries_count_as_flushed(tmp_path: Path) -> None:
    clock = StandingClock()
    with opened(tmp_path / "s", quiet(), clock=clock) as store:
        put_all(store, message(body=bytes(2500)))
        clock.ms += 10_000
        put_all(store, message(body=bytes(200)))
        store.flusher.flush_log()
        store.flusher.flush_queues()
        clock.ms -= 5000  # still later than the first file's begin
        put_all(store, *(message(body=b"%d" % i + bytes(2500)) for i in range(3)))
        store.flusher.flush_log()
        left = crash(store, tmp_path / "left")
    path = left / "consumequeue" / "TopicTest" / "0" / f"{0:020d}"
    path.write_bytes(path.read_bytes()[:40] + bytes(160))
    with opened(left, quiet()) as store:
        assert [one.queue_offset for one in read_all(store, "TopicTest")] == list(range(5))
