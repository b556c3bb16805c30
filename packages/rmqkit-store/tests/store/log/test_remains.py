"""Data after the end of a log at a start: sound records are refused or set aside, never dropped without a log line."""

from __future__ import annotations

import logging
import shutil
import struct
import sys
from pathlib import Path

import pytest

from rmqkit.errors import StoreDamaged
from rmqkit.protocol.record import Record, iter_records
from rmqkit.store.log.remains import FILLER_BYTES_MAX, FILLER_BYTES_MIN, FOLDER, fillers, is_filler
from rmqkit.store.message_store import MessageStore
from rmqkit.store.offline.check import dump, verify
from rmqkit.store.offline.repair import repair
from tests.store.stores import copy_store, message, opened, put_all, read_all, small_settings, tree

FILE_BYTES = 4096
SIZES = small_settings()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with five log files after a kill. In its checkpoint nothing was flushed."""
    root = tmp_path_factory.mktemp("killed") / "live"
    with opened(root) as store:
        put_all(store, *(message(queue_id=i % 2, body=b"%03d" % i * 90, KEYS=f"k{i}") for i in range(40)))
        assert store.queues.write_held()  # some tests use the copy as a store that was closed in order
        copy_store(root, root.with_name("store"))
    copied = root.with_name("store")
    (copied / "checkpoint").unlink(missing_ok=True)
    for path in (copied / "commitlog").iterdir():
        if (
            not path.stat().st_size
        ):  # a file being created ahead: a start would remove it, which would look like a change
            path.unlink()
    return copied


@pytest.fixture
def store_root(killed: Path, tmp_path: Path) -> Path:
    return copy_store(killed, tmp_path / "store")


def files_of(root: Path) -> list[Path]:
    return [path for path in sorted((root / "commitlog").iterdir()) if any(path.read_bytes())]


def records_of(path: Path) -> list[Record]:
    return list(iter_records(path.read_bytes()))


def bodies(root: Path) -> list[bytes]:
    return [one.body for one in dump(root, SIZES)]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def say_flushed(root: Path) -> None:
    """Mark the log as flushed and the queues as not flushed, so that recovery scans the whole log."""
    later = records_of(files_of(root)[-1])[-1].store_timestamp + 1
    (root / "checkpoint").write_bytes(struct.pack(">5q", later, 0, 0, 0, 0) + bytes(4056))


def readable(store: MessageStore) -> list[bytes]:
    return sorted(record.body for queue_id in (0, 1) for record in read_all(store, "TopicTest", queue_id))


@pytest.mark.parametrize("how", ["zero-filled", "flipped magic", "flipped body", "flipped size"])
def test_records_that_were_on_the_disk_behind_damage_are_no_end_of_the_log(
    store_root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_flushed(store_root)
    files = files_of(store_root)
    was, third = bodies(store_root), records_of(files[1])[2]
    lost = [third.body]
    if how == "zero-filled":
        lost = [record.body for record in records_of(files[1])]
        files[1].write_bytes(bytes(FILE_BYTES))
    else:
        flip(files[1], third.physical_offset % FILE_BYTES + {"magic": 5, "body": 120, "size": 2}[how.split()[1]])
    before = tree(store_root / "commitlog")
    behind = len(was) - was.index(lost[0]) - len(lost)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=f"rmq store repair {store_root}") as caught, opened(store_root):
            pass
        assert f"{behind} sound records of" in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert files[1].name in str(caught.value)
        assert tree(store_root / "commitlog") == before
    kept = [body for body in was if body not in lost]
    assert repair(store_root, SIZES, is_dry_run=False).remaining == []
    assert bodies(store_root) == kept
    say_flushed(store_root)
    with opened(store_root) as store:
        assert readable(store) == kept
        offsets = [record.queue_offset for record in read_all(store, "TopicTest", 1)]
    report = verify(store_root, SIZES)
    assert report.is_sound, report.findings
    assert offsets == [i // 2 for i, body in enumerate(was) if i % 2 and body in kept]
    assert not (store_root / FOLDER).exists()


@pytest.mark.parametrize("is_bulk", [False, True])
def test_numbers_stay_when_a_repaired_log_is_dispatched_again(
    store_root: Path, is_bulk: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = files_of(store_root)[1]
    flip(path, records_of(path)[2].physical_offset % FILE_BYTES + 5)
    repair(store_root, SIZES, is_dry_run=False)
    shutil.rmtree(store_root / "consumequeue")
    monkeypatch.setattr("rmqkit.store.log.recovery.BULK_FROM_BYTES", 0 if is_bulk else 1 << 40)
    with opened(store_root) as store:
        numbers = [record.queue_offset for queue_id in (0, 1) for record in read_all(store, "TopicTest", queue_id)]
        assert len(numbers) == 39 and [store.max_offset("TopicTest", queue_id) for queue_id in (0, 1)] == [20, 20]
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert verify(store_root, SIZES).is_sound


def test_records_that_a_power_cut_left_without_those_before_are_set_aside(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, was = files_of(store_root), bodies(store_root)
    third = records_of(files[1])[2]
    end, count = third.physical_offset, was.index(third.body)
    flip(files[1], end % FILE_BYTES + 120)
    with opened(store_root) as store:
        assert store.max_physical_offset == end and readable(store) == was[:count]
        (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
        assert f"{len(was) - count - 1} sound records of" in said and f"in {len(files) - 1} files" in said
        (put,) = put_all(store, message(body=b"new"))
        assert (put.physical_offset, put.queue_offset) == (end, (count + 1) // 2)
    aside = store_root / FOLDER / f"{end:020d}"
    assert str(aside) in said
    assert bodies(aside)[1:] == was[count + 1 :]  # the first one is the damaged one
    assert bodies(store_root) == [*was[:count], b"new"]
    assert verify(store_root, SIZES).is_sound


def test_setting_aside_twice_at_one_offset_keeps_both(store_root: Path) -> None:
    path = files_of(store_root)[1]
    at = records_of(path)[2].physical_offset
    again = copy_store(store_root, store_root.with_name("again"))
    for root in (store_root, again):
        flip(files_of(root)[1], at % FILE_BYTES + 120)
    with opened(store_root):
        pass
    shutil.rmtree(store_root / "commitlog")
    shutil.copytree(again / "commitlog", store_root / "commitlog")
    (store_root / "abort").touch()
    (store_root / "checkpoint").unlink()
    with opened(store_root):
        pass
    assert sorted(path.name for path in (store_root / FOLDER).iterdir()) == [f"{at:020d}", f"{at:020d}-2"]


def test_a_torn_end_is_reported_with_its_bytes_and_nothing_else_happens(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_flushed(store_root)
    path = files_of(store_root)[-1]
    last = records_of(path)[-1]
    flip(path, last.physical_offset % FILE_BYTES + 120)
    with opened(store_root) as store:
        assert store.max_physical_offset == last.physical_offset
    levels = [(one.levelno, one.getMessage()) for one in caplog.records if "the log is cut" in one.getMessage()]
    assert [level for level, _ in levels] == [logging.WARNING]
    assert f"{last.size} bytes in 1 file" in levels[0][1]
    assert not (store_root / FOLDER).exists()


def test_a_kill_without_damage_is_not_reported_of(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(store_root) as store:
        assert len(readable(store)) == 40
    assert [one.getMessage() for one in caplog.records if one.levelno > logging.INFO] == [
        f"store {store_root} was not closed cleanly: recovering"
    ]


def test_a_lost_end_after_a_stop_in_order_is_an_error_with_its_bytes(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (store_root / "abort").unlink()
    path = files_of(store_root)[-1]
    last = records_of(path)[-1]
    content = path.read_bytes()[: last.physical_offset % FILE_BYTES]
    path.write_bytes(content + bytes(FILE_BYTES - len(content)))
    with opened(store_root) as store:
        assert store.max_physical_offset == last.physical_offset
    assert f"these {last.size} bytes of messages are lost" in caplog.text


def test_exchanged_log_files_are_refused_after_a_stop_in_order(killed: Path, store_root: Path) -> None:
    (store_root / "abort").unlink()
    files = files_of(store_root)
    first, last = files[0].read_bytes(), files[-1].read_bytes()
    files[0].write_bytes(last)
    files[-1].write_bytes(first)
    before, expected = tree(store_root / "commitlog"), bodies(killed)
    with pytest.raises(StoreDamaged, match=f"{files[-1].name} has records of another place"), opened(store_root):
        pass
    assert tree(store_root / "commitlog") == before
    assert [step.action[:26] for step in repair(store_root, SIZES, is_dry_run=True).steps[:2]] == [
        f"named {files[-1].name}",
        f"named {files[0].name}",
    ]
    assert repair(store_root, SIZES, is_dry_run=False).remaining == []
    with opened(store_root) as store:
        assert readable(store) == expected


def test_a_slave_sets_aside_what_its_master_sends_again(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    say_flushed(store_root)
    path = files_of(store_root)[1]
    at = records_of(path)[2].physical_offset
    flip(path, at % FILE_BYTES + 5)
    with opened(store_root, is_replica=True) as store:
        assert store.max_physical_offset == at
    assert (store_root / FOLDER / f"{at:020d}").is_dir()
    assert [one for one in caplog.records if one.levelno == logging.ERROR]


def test_stale_records_that_an_apache_broker_left_are_set_aside_with_a_warning(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its recovery does not clear the bytes that it cuts off: parts of old records follow a newer one."""
    say_flushed(store_root)
    path = files_of(store_root)[-1]
    records = records_of(path)
    content = bytearray(path.read_bytes())
    first_end = records[0].size
    content[56:64] = struct.pack(">q", records[-1].store_timestamp + 1000)
    content[first_end : first_end + 40] = bytes(40)
    path.write_bytes(content)
    with opened(store_root) as store:
        assert store.max_physical_offset == records[0].physical_offset + first_end
    told = [one.levelno for one in caplog.records if "set aside" in one.getMessage()]
    assert told == [logging.WARNING]


def test_the_plain_way_sees_the_same_without_numpy(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_flushed(store_root)
    files_of(store_root)[1].write_bytes(bytes(FILE_BYTES))
    monkeypatch.setattr("rmqkit.store.log.recovery.has_numpy", lambda: False)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(StoreDamaged, match="sound records"), opened(store_root):
        pass


@pytest.mark.parametrize(
    "size", [FILLER_BYTES_MIN, FILLER_BYTES_MIN + 1, 200, FILLER_BYTES_MAX, FILLER_BYTES_MAX + 1, 3 * FILLER_BYTES_MAX]
)
def test_fillers_are_records_that_fill_a_stretch(size: int) -> None:
    packed = b"".join(fillers(5000, size, 77))
    assert len(packed) == size
    position = 0
    for record in iter_records(packed):
        assert is_filler(record) and record.size <= FILLER_BYTES_MAX and record.store_timestamp == 77
        assert record.physical_offset == 5000 + position
        position += record.size
    assert position == size


def test_exchanged_older_log_files_are_refused_although_a_clean_start_does_not_walk_over_them(store_root: Path) -> None:
    (store_root / "abort").unlink()
    files = files_of(store_root)
    first, second = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    before = tree(store_root)
    with pytest.raises(StoreDamaged, match=f"{files[0].name}, {files[1].name} has records of another place"):
        MessageStore(store_root, SIZES).open()
    assert {name for name, _ in tree(store_root).items() ^ before.items()} <= {"lock"}
    assert repair(store_root, SIZES, is_dry_run=False).remaining == []
    with opened(store_root) as store:
        assert len(readable(store)) == 40


def test_a_zero_filled_older_file_is_an_error_of_a_clean_start(
    store_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (store_root / "abort").unlink()
    (store_root / "queueends").unlink()  # as Apache's broker closes a store
    path = files_of(store_root)[1]
    path.write_bytes(bytes(FILE_BYTES))
    with opened(store_root):
        pass
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert f"{path} begins with no record: messages of up to {FILE_BYTES} bytes" in said


def test_a_missing_last_file_is_an_error_of_a_clean_start(store_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (store_root / "abort").unlink()
    path = files_of(store_root)[-1]
    lost = records_of(path)
    for one in sorted((store_root / "commitlog").iterdir()):
        if one.name >= path.name:
            one.unlink()
    with opened(store_root) as store:
        assert store.max_physical_offset < lost[0].physical_offset
    assert "bytes of messages are lost" in caplog.text
