"""Wheel, log and checkpoint: the reference's bytes, and what a crash leaves of them (store.md §18.4 to §18.6)."""

from __future__ import annotations

import shutil
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import StoreMismatch
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, encode_timer_checkpoint
from rmqkit.store.log.checkpoint import Checkpoint
from rmqkit.store.timer import check as timer_check
from rmqkit.store.timer.check import Damage
from rmqkit.store.timer.files import (
    CHECKPOINT_FILE_BYTES,
    TimerFiles,
    load_delivered_before,
    load_timer_checkpoint,
    save_timer_checkpoint,
)
from rmqkit.store.timer.log import DELETE, NONE, UNIT_BYTES, Unit
from rmqkit.store.timer.wheel import SLOT_COUNT, WHEEL_BYTES, Slot, TimerWheel
from rmqkit.system import disk as system_disk
from tests.examples import examples
from tests.faults.refusals import BROKEN, NO_SPACE, RefusingDisk
from tests.golden_stores import unpack_golden
from tests.open_files import open_files

FILE_BYTES = 10 * UNIT_BYTES + 16
NOW_MS = 1_795_226_025_000
HASH = java_hash("GoldTimer")
GOLDEN = [(2, 370), (3, 370), (3, 370), (5, 370), (3600, 379), (4, 363), (2, 362)]
"""Seconds ahead and record size of the golden store's seven timer messages."""


def files_in(folder):
    return TimerFiles(folder, log_file_bytes=FILE_BYTES, precision_ms=1000)


def unit(seconds, number=0, *, size=100, magic=1):
    return Unit(NONE, magic, NOW_MS, seconds * 1000, number, size, HASH)


def chain(files, seconds):
    """The physical offsets of a slot, newest first."""
    slot = files.wheel.slot(NOW_MS + seconds * 1000)
    found, position = [], NONE if slot is None else slot.last
    while position != NONE:
        one = files.log.unit(position)
        found.append(one.physical_offset)
        position = one.previous
    return found


def flush(files, read_ms=NOW_MS, queue_offset=0):
    files.take(
        TimerCheckpoint(
            last_read_time_ms=read_ms, last_timer_queue_offset=queue_offset, master_timer_queue_offset=queue_offset
        )
    )
    files.write()


def test_the_same_messages_give_the_bytes_of_the_reference(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path).root
    files, offset = files_in(tmp_path / "ours"), 383367
    (tmp_path / "ours").mkdir()
    for seconds, size in GOLDEN:
        assert files.add([unit(seconds, offset, size=size)]) == 1
        offset += size
    flush(files)
    for name in (f"timerlog/{0:020d}", "timerwheel"):
        assert (tmp_path / "ours" / name).read_bytes() == (golden / name).read_bytes(), name
    files.close()


def test_the_reference_files_are_read(tmp_path):
    files = files_in(unpack_golden("5.4.0", tmp_path).root)
    files.load()
    checkpoint = files.checkpoint
    assert (checkpoint.last_read_time_ms, checkpoint.last_timer_log_flush_position) == (1795226069000, 364)
    assert files.recover(lambda unit: 0) == checkpoint.last_timer_queue_offset == 7
    assert (files.is_lost, files.log.end) == (False, 364)
    assert {seconds: chain(files, seconds) for seconds in (1, 2, 3, 3600)} == {
        1: [],
        2: [385589, 383367],
        3: [384107, 383737],
        3600: [384847],
    }
    assert files.wheel.slot(NOW_MS + 3_600_999) == Slot(NOW_MS + 3_600_000, 208, 208, 1)
    files.close()


def test_a_checkpoint_is_written_as_it_is_read(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path).root / "config" / "timercheck"
    save_timer_checkpoint(tmp_path / "config" / "timercheck", load_timer_checkpoint(golden))
    assert (tmp_path / "config" / "timercheck").read_bytes() == golden.read_bytes()
    assert golden.stat().st_size == CHECKPOINT_FILE_BYTES


def test_pairs_of_delivered_times_follow_the_checkpoint(tmp_path):
    path, known = tmp_path / "timercheck", TimerCheckpoint(last_read_time_ms=5)
    save_timer_checkpoint(path, known, ((9, 1), (7, 2)))
    stored = path.read_bytes()
    assert stored[:56] == encode_timer_checkpoint(known)
    assert stored[56:60] + stored[64:96] == struct.pack(">i4q", 2, 9, 1, 7, 2)
    assert (len(stored), stored[96:]) == (CHECKPOINT_FILE_BYTES, bytes(4000))
    assert load_delivered_before(path) == ((9, 1), (7, 2))
    save_timer_checkpoint(path, known)
    assert load_delivered_before(path) == ()


@pytest.mark.parametrize("at", [56, 59, 60, 64, 80, 95])
def test_damaged_pairs_of_delivered_times_are_left_out(tmp_path, at, caplog):
    path = tmp_path / "timercheck"
    save_timer_checkpoint(path, TimerCheckpoint(last_read_time_ms=5), ((9, 1), (7, 2)))
    stored = bytearray(path.read_bytes())
    stored[at] ^= 0x81
    path.write_bytes(stored)
    assert load_delivered_before(path) == ()
    assert str(path) in caplog.text
    assert load_timer_checkpoint(path).last_read_time_ms == 5


@pytest.mark.parametrize("size", [56, 59, 63])
def test_a_checkpoint_without_room_for_pairs_has_no_pairs(tmp_path, size):
    path = tmp_path / "timercheck"
    path.write_bytes(bytes(size))
    assert load_delivered_before(path) == ()


@pytest.mark.parametrize("size", [0, 1, 55])
def test_a_checkpoint_that_is_cut_off_counts_as_none(tmp_path, size, caplog):
    path = tmp_path / "timercheck"
    path.write_bytes(bytes([1] * size))
    assert load_timer_checkpoint(path).last_read_time_ms == 0
    assert str(path) in caplog.text


def test_a_wheel_of_another_length_is_left_alone(tmp_path):
    (tmp_path / "timerwheel").write_bytes(b"short")
    with pytest.raises(StoreMismatch, match="5 bytes, expected 38707200"):
        TimerWheel(tmp_path / "timerwheel", 1000).load()
    assert WHEEL_BYTES == 38_707_200


def test_a_slot_belongs_to_one_time_only(tmp_path):
    wheel = TimerWheel(tmp_path / "timerwheel", 1000)
    turn_ms = SLOT_COUNT * 1000
    for is_written in (False, True):
        wheel.put(Slot(NOW_MS, 52, 52, 1))
        assert wheel.slot(NOW_MS + 999) == Slot(NOW_MS, 52, 52, 1)
        assert wheel.slot(NOW_MS + turn_ms) is None
        wheel.put(Slot(NOW_MS + turn_ms, 104, 104, 1))
        if is_written:
            wheel.take()
            wheel.write()
        assert wheel.slot(NOW_MS) is None
        assert wheel.slot(NOW_MS + turn_ms) == Slot(NOW_MS + turn_ms, 104, 104, 1)
    wheel.close()


def test_a_marker_takes_one_from_its_slot(tmp_path):
    files = files_in(tmp_path)
    for magic in (1, 1, 1 | DELETE):
        assert files.add([unit(5, magic=magic)]) == 1
    assert files.wheel.slot(NOW_MS + 5000) == Slot(NOW_MS + 5000, 0, 104, 1)
    files.close()


@examples(8)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 1 | DELETE])), max_size=40), st.integers(1, 40))
def test_a_chunk_is_put_on_the_wheel_as_its_messages_are(tmp_path_factory, messages, chunk):
    folder = tmp_path_factory.mktemp("timer")
    (folder / "runs").mkdir()
    (folder / "singles").mkdir()
    units = [unit(seconds, number, magic=magic) for number, (seconds, magic) in enumerate(messages)]
    runs, singles = files_in(folder / "runs"), files_in(folder / "singles")
    for one in units:
        assert singles.add([one]) == 1
    for first in range(0, len(units), chunk):
        part = units[first : first + chunk]
        while part:
            part = part[runs.add(part) :]
    flush(runs)
    assert list(runs.log.scan(0)) == list(singles.log.scan(0))
    for files in (runs, singles):  # of one the slots are in the file, of the other in memory
        for begin, end in ((0, 5), (1, 2), (2, 4), (-10_000, 2)):
            wanted = sum(-1 if magic & DELETE else 1 for seconds, magic in messages if begin <= seconds < end)
            assert files.wheel.pending(NOW_MS + begin * 1000, NOW_MS + end * 1000) == wanted
        files.close()
    shutil.rmtree(folder)


SECONDS = st.lists(st.integers(1, 4), max_size=25)


@examples(30)
@given(SECONDS, SECONDS, st.sampled_from(["nothing", "log", "log and wheel"]))
def test_after_a_kill_the_messages_behind_the_checkpoint_are_put_on_the_wheel_once(
    tmp_path_factory, before, behind, written
):
    """Recovery drops them and says from which message of the topic to go on."""
    folder = tmp_path_factory.mktemp("timer")
    files = files_in(folder)
    for number, seconds in enumerate(before):
        assert files.add([unit(seconds, number)]) == 1
    flush(files, queue_offset=len(before))
    for number, seconds in enumerate(behind, len(before)):
        assert files.add([unit(seconds, number)]) == 1
    if written != "nothing":
        files.take(TimerCheckpoint(last_read_time_ms=NOW_MS, last_timer_queue_offset=len(before) + len(behind)))
        files.log.sync()
    if written == "log and wheel":
        files.wheel.write()
    files.close()

    again = files_in(folder)
    again.load()
    all_seconds = [*before, *behind]
    assert again.recover(lambda unit: unit.physical_offset) == len(before)
    assert again.is_lost is False
    for number in range(len(before), len(all_seconds)):
        assert again.add([unit(all_seconds[number], number)]) == 1
    for seconds in range(1, 5):
        wanted = [number for number, one in enumerate(all_seconds) if one == seconds]
        assert chain(again, seconds) == wanted[::-1]
        slot = again.wheel.slot(NOW_MS + seconds * 1000)
        assert (slot.pending if slot else 0) == len(wanted)
    again.close()
    shutil.rmtree(folder)


def test_units_behind_the_position_that_belong_before_the_queue_offset_are_linked(tmp_path):
    """The reference notes its position before it flushes."""
    files = files_in(tmp_path)
    for number in range(5):
        assert files.add([unit(1, number)]) == 1
    flush(files, queue_offset=4)
    files.checkpoint.last_timer_log_flush_position = 2 * UNIT_BYTES
    save_timer_checkpoint(tmp_path / "config" / "timercheck", files.checkpoint)
    files.close()
    again = files_in(tmp_path)
    again.load()
    assert (again.recover(lambda unit: unit.physical_offset), chain(again, 1)) == (4, [3, 2, 1, 0])
    again.close()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_wheel_that_is_missing_or_empty_is_made_from_the_log(is_empty, tmp_path):
    """A power cut, or a full disk, leaves the name without the length."""
    files = files_in(tmp_path)
    for number in range(25):
        assert files.add([unit(number % 2 + 1, number)]) == 1
    flush(files, read_ms=NOW_MS + 2000, queue_offset=25)
    files.close()
    (tmp_path / "timerwheel").unlink()
    if is_empty:
        (tmp_path / "timerwheel").touch()
    again = files_in(tmp_path)
    again.load()
    assert not (tmp_path / "timerwheel").exists()
    assert again.recover(lambda unit: unit.physical_offset) == 25
    assert chain(again, 2) == list(range(23, 0, -2))
    assert again.wheel.slot(NOW_MS + 1000) is None, "it was delivered"
    again.close()


def test_of_a_long_log_all_is_looked_at_only_when_the_totals_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(timer_check, "EXACT_UNITS_MAX", 10)
    files = files_in(tmp_path)
    for number in range(25):
        assert files.add([unit(number % 5 + 1, number)]) == 1
    flush(files, queue_offset=25)
    files.close()
    slot = (NOW_MS + 2000) // 1000 % SLOT_COUNT * 32
    for is_damaged in (False, True):
        if is_damaged:
            with open(tmp_path / "timerwheel", "r+b") as file:
                file.seek(slot)
                file.write(bytes(32))
        again = files_in(tmp_path)
        again.load()
        assert again.recover(lambda unit: unit.physical_offset, total=25) == 25
        assert (again.waiting is not None, bool(again.fault), again.is_lost) == (is_damaged, is_damaged, False)
        assert chain(again, 2) == [21, 16, 11, 6, 1]
        again.close()


def test_a_log_that_is_missing_has_the_topic_read_from_its_start(tmp_path, caplog):
    files = files_in(tmp_path)
    assert files.add([unit(1)]) == 1
    flush(files, read_ms=NOW_MS + 3000, queue_offset=9)
    files.close()
    shutil.rmtree(tmp_path / "timerlog")
    again = files_in(tmp_path)
    again.load()
    assert (again.recover(lambda unit: 0), again.is_lost) == (0, True)
    assert again.wheel.slot(NOW_MS + 1000) is None
    assert "from its start" in caplog.text
    again.close()


def test_a_log_without_units_is_not_missing_after_messages_that_a_master_delivered(tmp_path):
    files = files_in(tmp_path)
    flush(files, queue_offset=7)
    files.close()
    again = files_in(tmp_path)
    again.load()
    assert again.check(None) == (Damage.NONE, "")
    assert again.recover(lambda unit: None) == 7
    assert not again.is_lost
    assert again.add([unit(5, 1)]) == 1
    flush(again, queue_offset=8)
    assert chain(again, 5) == [1]
    again.close()


def test_a_timer_without_messages_has_no_log(tmp_path):
    files = files_in(tmp_path)
    flush(files)
    assert not files.log.queue.files
    files.close()


def test_a_record_that_the_commit_log_lost_ends_the_timer_log(tmp_path):
    files = files_in(tmp_path)
    for number in range(3):
        assert files.add([unit(1, number)]) == 1
    flush(files, queue_offset=3)
    files.checkpoint.last_timer_log_flush_position = UNIT_BYTES
    save_timer_checkpoint(tmp_path / "config" / "timercheck", files.checkpoint)
    files.close()
    again = files_in(tmp_path)
    again.load()
    again.recover(lambda unit: None if unit.physical_offset == 1 else unit.physical_offset)
    assert (chain(again, 1), again.log.end) == ([0], UNIT_BYTES)
    again.close()


def test_a_short_write_of_the_wheel_is_finished_or_refused(tmp_path):
    """A full disk took 7 bytes of a page, and the slots of that page counted as written."""
    wheel = TimerWheel(tmp_path / "timerwheel", 1000)
    slot = Slot(NOW_MS, 52, 104, 2)
    wheel.put(slot)
    wheel.take()
    with RefusingDisk().installed() as disk:
        disk.refuse(NO_SPACE, "pwrite", path="timerwheel", taken_bytes=7, times=1)
        with pytest.raises(OSError, match="No space"):
            wheel.write()
        assert wheel.slot(NOW_MS) == slot
        wheel.write()
    wheel.close()
    again = TimerWheel(tmp_path / "timerwheel", 1000)
    assert again.load() and again.slot(NOW_MS) == slot
    again.close()


@pytest.mark.parametrize("operation", ["truncate", "sync_file"])
def test_a_wheel_that_cannot_be_made_is_made_by_a_later_write(tmp_path, operation):
    wheel = TimerWheel(tmp_path / "timerwheel", 1000)
    wheel.put(Slot(NOW_MS, 52, 104, 2))
    wheel.take()
    with RefusingDisk().installed() as disk:
        disk.refuse(NO_SPACE, operation)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                wheel.write()
            assert open_files(tmp_path) == [], "a descriptor is given back each time"
        disk.repair()
        wheel.write()
    assert (tmp_path / "timerwheel").stat().st_size == WHEEL_BYTES
    wheel.close()


@pytest.mark.parametrize("name", ["checkpoint", "timercheck"])
def test_a_short_write_of_a_checkpoint_is_finished_or_refused(tmp_path, name):
    one, path = Checkpoint(tmp_path / "checkpoint"), tmp_path / name
    one.reach(physic=7, logics=8, index=9)
    wanted = TimerCheckpoint(last_read_time_ms=5, last_timer_queue_offset=3)

    def save():
        return one.save() if name == "checkpoint" else save_timer_checkpoint(path, wanted)

    with RefusingDisk().installed() as disk:
        disk.refuse(NO_SPACE, "pwrite", path=name, taken_bytes=7, times=1)
        with pytest.raises(OSError, match="No space"):
            save()
        save()
    if name == "checkpoint":
        again = Checkpoint(path)
        again.load()
        assert (again.physic_timestamp, again.logics_timestamp, again.index_timestamp) == (7, 8, 9)
    else:
        assert load_timer_checkpoint(path).last_timer_queue_offset == 3


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 25])
def test_a_refused_timer_log_is_written_again_also_over_several_files(tmp_path, count):
    files = files_in(tmp_path)
    with RefusingDisk().installed() as disk:
        for number in range(count):  # 10 units fill a file
            files.add([unit(number + 1, number)])
        disk.refuse(BROKEN, "sync_data", path="timerlog", times=2)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                files.log.sync()
        files.log.sync()
    assert not files.log.queue.refused() and files.log.queue.unsynced_bytes == 0
    files.close()


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_sync_refused_after_a_start_or_a_cut_is_repeated(tmp_path, is_cut):
    files = files_in(tmp_path)
    files.add([unit(1, 0), unit(2, 1)])
    flush(files, queue_offset=2)
    if is_cut:
        files.start_over(files.checkpoint, ())
    files.close()
    again = files_in(tmp_path)
    again.load()
    again.recover(lambda unit: unit.physical_offset)
    again.add([unit(3, 2)])
    with RefusingDisk().installed() as disk:
        disk.refuse(BROKEN, "sync_data", path="timerlog", times=1)
        with pytest.raises(OSError, match="Input/output"):
            again.log.sync()
        again.log.sync()
    assert not again.log.queue.refused() and again.log.queue.unsynced_bytes == 0
    again.close()


def test_units_after_the_checkpoint_are_written_again_after_a_start(tmp_path):
    files = files_in(tmp_path)
    files.add([unit(1, 0)])
    flush(files, queue_offset=3)
    files.add([unit(2, 1), unit(3, 2)])
    files.log.sync()
    files.close()
    again = files_in(tmp_path)
    again.load()
    again.recover(lambda unit: unit.physical_offset)
    written, pwrite = [], system_disk.pwrite

    def write(descriptor, data, position):
        written.append((position, len(data)))
        return pwrite(descriptor, data, position)

    with system_disk.replaced({"pwrite": write}):
        again.log.sync()
    assert written == [(UNIT_BYTES, 2 * UNIT_BYTES)], "an earlier sync of them may have failed"
    again.close()


def test_units_that_the_page_cache_dropped_are_not_taken_for_flushed(tmp_path):
    files = files_in(tmp_path)
    files.add([unit(1, 0), unit(2, 1)])
    with RefusingDisk().installed() as disk:
        disk.refuse(BROKEN, "sync_data", path="timerlog", times=1)
        with pytest.raises(OSError, match="Input/output"):
            files.log.sync()
        files.log.sync()
        files.add([unit(3, 2)])
        disk.refuse(BROKEN, "sync_data", path="timerlog", times=1)
        with pytest.raises(OSError, match="Input/output"):
            files.log.sync()
        with next((tmp_path / "timerlog").iterdir()).open("r+b") as file:
            file.seek(2 * UNIT_BYTES)
            file.write(bytes(UNIT_BYTES))
        for _ in range(2):
            with pytest.raises(OSError, match="dropped bytes"):
                files.log.sync()
    files.close()
