"""Damaged timer files: waiting messages are delivered, delivered ones are not repeated, and the damage is logged."""

from __future__ import annotations

import asyncio
import logging
import shutil

import pytest

from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.brokers import encode_timer_checkpoint
from rmqkit.store.queues.consume_queue import ENTRY_BYTES
from rmqkit.store.timer.files import load_timer_checkpoint
from rmqkit.store.timer.log import UNIT_BYTES
from rmqkit.store.timer.wheel import WHEEL_BYTES
from rmqkit.system import threads
from rmqkit.testing.clock import StandingClock
from tests.broker.timed import NOW_MS, STEP_MS, timed
from tests.faults.refusals import BROKEN, RefusingDisk

COUNT = 60
LOG_BYTES = 5400
AHEAD_MS = 400


def bodies_of(numbers):
    return [b"%d" % number for number in numbers]


async def stopped_store(root, clock, **options):
    """Stopped in order: of 60 messages for 20 seconds those of the first five are delivered, one is recalled."""
    async with timed(root, clock=clock, timer_log_file_bytes=LOG_BYTES, **options) as one:
        for number in range(COUNT):
            one.at(AHEAD_MS + number // 3 * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        one.at(AHEAD_MS + 19 * STEP_MS, b"0", UNIQ_KEY="M", TIMER_DEL_UNIQKEY=f"U{COUNT - 1}")
        await one.on_wheel(COUNT + 1)
        await one.pass_ms(AHEAD_MS + 4 * STEP_MS)
        assert one.bodies() == bodies_of(range(15))
        assert one.timer.pending == 44


async def waits(one, count):
    await one.until(lambda: one.timer.offset_behind == 0 and one.timer.pending == count)


def write_at(path, position, data):
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def first_log(root):
    return min((root / "timerlog").iterdir())


def zero_wheel(root):
    with open(root / "timerwheel", "wb") as file:
        file.truncate(WHEEL_BYTES)


def zero_half_wheel(root):
    slot = (NOW_MS + AHEAD_MS + 10 * STEP_MS) // STEP_MS % (WHEEL_BYTES // 32)
    write_at(root / "timerwheel", slot * 32, bytes(32 * 20))


def no_wheel(root):
    (root / "timerwheel").unlink()


def point_elsewhere(root):
    """A slot ends at a unit of another second."""
    slot = (NOW_MS + AHEAD_MS + 10 * STEP_MS) // STEP_MS % (WHEEL_BYTES // 32)
    write_at(root / "timerwheel", slot * 32 + 16, (16 * UNIT_BYTES).to_bytes(8, "big"))


def zero_unit(root):
    write_at(first_log(root), 40 * UNIT_BYTES, bytes(UNIT_BYTES))


def flip_delay(root):
    """The unit says another second."""
    write_at(first_log(root), 40 * UNIT_BYTES + 26, b"\x7f")


def flip_previous(root):
    write_at(first_log(root), 40 * UNIT_BYTES + 10, b"\x01")


def flip_place(root):
    """The unit says another place of the commit log."""
    write_at(first_log(root), 40 * UNIT_BYTES + 30, b"\x01")


def zero_log(root):
    first_log(root).write_bytes(bytes(LOG_BYTES))


def no_log(root):
    shutil.rmtree(root / "timerlog")


def zero_wheel_and_unit(root):
    zero_wheel(root)
    zero_unit(root)


def zero_check(root):
    (root / "config" / "timercheck").write_bytes(bytes(4096))


def no_check(root):
    (root / "config" / "timercheck").unlink()


def nothing_left(root):
    zero_wheel(root)
    zero_log(root)
    zero_check(root)


FROM_LOG, FROM_TOPIC, FROM_QUEUES = "rebuilt from the timer log", "reading the timer topic from its start", "left out"
DAMAGES = [
    (zero_wheel, FROM_LOG),
    (zero_half_wheel, FROM_LOG),
    (no_wheel, FROM_LOG),
    (point_elsewhere, FROM_TOPIC),
    (zero_unit, FROM_TOPIC),
    (flip_delay, FROM_TOPIC),
    (flip_previous, FROM_TOPIC),
    (flip_place, FROM_TOPIC),
    (zero_log, FROM_TOPIC),
    (no_log, FROM_TOPIC),
    (zero_wheel_and_unit, FROM_TOPIC),
    (zero_check, FROM_QUEUES),
    (no_check, FROM_QUEUES),
    (nothing_left, FROM_QUEUES),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=lambda one: getattr(one, "__name__", ""))
async def test_what_waits_is_delivered_once_whatever_is_damaged(tmp_path, damage, said, caplog):
    clock = StandingClock(NOW_MS)
    await stopped_store(tmp_path, clock)
    damage(tmp_path)
    caplog.clear()
    for steps, pending, then, delivered in ((5, 44, 29, 30), (15, 29, 0, COUNT - 1)):  # half after one more start
        async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as again:
            await waits(again, pending)
            await again.pass_ms(steps * STEP_MS)
            await waits(again, then)
            assert again.bodies() == bodies_of(range(delivered))
    warnings = [one.message for one in caplog.records if one.levelno >= logging.WARNING and "timer" in one.message]
    assert any(said in one for one in warnings), warnings
    assert any("44 messages pending" in one for one in warnings), warnings


async def test_a_sound_store_says_nothing_and_keeps_its_log(tmp_path, caplog):
    clock = StandingClock(NOW_MS)
    await stopped_store(tmp_path, clock)
    before = first_log(tmp_path).read_bytes()
    caplog.clear()
    async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as again:
        assert (again.timer.pending, again.timer.offset_behind) == (44, 0)
    assert first_log(tmp_path).read_bytes() == before
    assert [one.message for one in caplog.records if "timer" in one.name] == []


async def test_counts_that_are_wrong_or_unreadable_are_rebuilt(tmp_path, caplog):
    clock, path = StandingClock(NOW_MS), tmp_path / "config" / "timermetrics"
    await stopped_store(tmp_path, clock)
    for content in (b'{"timingCount":{"T":{"count":7}}}', b"{", b"\0" * 99, None):
        path.with_name("timermetrics.bak").unlink(missing_ok=True)
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as again:
            assert {topic: one.count for topic, one in again.timer.metrics.timing_count.items()} == {"T": 44}
            again.timer.state.is_changed = True
            await again.timer.flush_round()


@pytest.mark.parametrize("found_by", ["flush", "delivery", "stop"])
async def test_units_that_the_page_cache_drops_after_a_failed_flush_are_read_again(tmp_path, caplog, found_by):
    clock = StandingClock(NOW_MS)
    async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as one:
        for number in range(30):
            one.at(AHEAD_MS + number * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        await one.on_wheel(30)
        await one.pass_ms(AHEAD_MS + 4 * STEP_MS)
        assert one.bodies() == bodies_of(range(5))
        one.store.flusher.flush_log()
        one.timer.state.is_changed = True
        with RefusingDisk().installed() as disk:
            disk.refuse(BROKEN, "sync_data", path="timerlog", times=1)
            with pytest.raises(OSError, match="Input/output"):
                await one.timer.flush_round()
            write_at(first_log(tmp_path), 9 * UNIT_BYTES, bytes(UNIT_BYTES))
            if found_by != "stop":
                disk.refuse(BROKEN, "open", path="timercheck", times=1)  # of the rebuild
            if found_by == "flush":
                await one.timer.flush_round()
            if found_by == "delivery":
                one.timer.state.files.log._block = b""  # it was read before the damage
            if found_by != "stop":
                await one.pass_ms(40 * STEP_MS)
                await one.until(lambda: one.timer.pending == 0 and len(one.bodies()) == 30)
    if found_by == "stop":
        async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as one:
            await one.pass_ms(40 * STEP_MS)
            await one.until(lambda: one.timer.pending == 0 and len(one.bodies()) == 30)
            assert one.bodies() == bodies_of(range(30))
    else:
        assert one.bodies() == bodies_of(range(30))
    said = [record.getMessage() for record in caplog.records if FROM_TOPIC in record.getMessage()]
    why = "no unit for" if found_by == "delivery" else "the system dropped bytes that it could not write"
    assert said and all(why in one for one in said)


async def test_a_chain_that_ends_while_the_broker_runs_is_made_good(tmp_path, caplog):
    """Also when half of its second is delivered already: that half does not come twice."""
    async with timed(tmp_path, timer_log_file_bytes=60_000) as one:
        for number in range(400):
            one.at(AHEAD_MS + number % 2 * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        await one.on_wheel(400)
        write_at(first_log(tmp_path), 301 * UNIT_BYTES, bytes(UNIT_BYTES))  # of the later second
        write_at(
            first_log(tmp_path), 300 * UNIT_BYTES + 30, b"\x01"
        )  # of the first second, in a field that only the record can disprove
        await one.pass_ms(AHEAD_MS + 2 * STEP_MS)
        await one.until(lambda: len(one.bodies()) >= 400 and one.timer.pending == 0)
        assert one.bodies() == bodies_of([*range(0, 400, 2), *range(1, 400, 2)])
    assert caplog.text.count(FROM_TOPIC) == 1


@pytest.mark.parametrize("damage", [bytes(UNIT_BYTES), None], ids=["zeros", "another unit"])
async def test_a_unit_that_is_damaged_after_its_chain_was_read_is_made_good(tmp_path, damage, caplog):
    """The chain is read from newest to oldest, partly from memory, and its units are read again for the delivery."""
    async with timed(tmp_path, timer_log_file_bytes=60_000) as one:
        for number in range(400):
            one.at(AHEAD_MS + number % 2 * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        await one.on_wheel(400)
        assert one.timer.state.files.log.unit(398 * UNIT_BYTES) is not None  # in memory from now on
        other = first_log(tmp_path).read_bytes()[397 * UNIT_BYTES :][:UNIT_BYTES]
        write_at(first_log(tmp_path), 398 * UNIT_BYTES, other if damage is None else damage)
        await one.pass_ms(AHEAD_MS + 2 * STEP_MS)
        await one.until(lambda: one.timer.pending == 0)
        assert one.bodies() == bodies_of([*range(0, 400, 2), *range(1, 400, 2)])
    assert caplog.text.count(FROM_TOPIC) == 1


async def test_a_rebuild_begins_after_the_deliveries_before_it_are_on_the_disk(tmp_path, monkeypatch):
    """Its checkpoint covers them. After a power cut they would be lost otherwise."""
    seen = []
    async with timed(tmp_path, timer_log_file_bytes=LOG_BYTES) as one:
        for number in range(3):
            one.at(AHEAD_MS + number * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        await one.on_wheel(3)
        start_over = one.timer.state.files.start_over

        def look(*args):
            seen.append((len(one.bodies()), one.store.durable_offset, one.store.max_physical_offset))
            start_over(*args)

        monkeypatch.setattr(one.timer.state.files, "start_over", look)
        write_at(first_log(tmp_path), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
        await one.pass_ms(AHEAD_MS + 3 * STEP_MS)
        await one.until(lambda: len(one.bodies()) == 3)
    ((delivered, durable, end),) = seen
    assert delivered == 2
    assert durable == end


async def test_a_rebuild_waits_for_the_thread_that_writes_the_state(tmp_path, monkeypatch):
    may_end = threads.Event()
    async with timed(tmp_path, timer_log_file_bytes=LOG_BYTES) as one:
        for number in range(3):
            one.at(AHEAD_MS + number * STEP_MS, b"%d" % number, UNIQ_KEY=f"U{number}")
        await one.on_wheel(3)
        await one.until(lambda: one.store.durable_offset == one.store.max_physical_offset)
        write = one.timer.state.files.write
        monkeypatch.setattr(one.timer.state.files, "write", lambda: may_end.wait() and write())
        writing = asyncio.create_task(one.timer.flush_round())
        await one.until(lambda: one.timer.state.files.has_taken)
        write_at(first_log(tmp_path), 2 * UNIT_BYTES, bytes(UNIT_BYTES))
        one.clock.ms += AHEAD_MS + 3 * STEP_MS
        await one.until(lambda: len(one.bodies()) == 2)
        await asyncio.sleep(60)
        has_waited, delivered = one.timer.state.files.has_taken, len(one.bodies())
        may_end.set()
        await writing
        assert (has_waited, delivered) == (True, 2)
        await one.until(lambda: len(one.bodies()) == 3)


async def test_an_entry_that_a_failed_flush_has_damaged_is_read_again_in_the_next_second(tmp_path, monkeypatch):
    """Not without a pause: it stays damaged until a restart."""
    reads = []
    async with timed(tmp_path, timer_log_file_bytes=LOG_BYTES, timer_precision_ms=1000) as one:
        one.timer.stop()
        for number in range(3):
            one.at(2000, b"%d" % number, UNIQ_KEY=f"U{number}")
        one.store.dispatch()
        with RefusingDisk().installed() as disk:
            disk.refuse(BROKEN, "sync_data", path="consumequeue")
            one.store.flusher.flush_queues()
        (path,) = (tmp_path / "consumequeue" / TIMER_TOPIC / "0").iterdir()
        sound = path.read_bytes()[: 3 * ENTRY_BYTES]
        write_at(path, ENTRY_BYTES, bytes(ENTRY_BYTES))
        run = one.timer.enqueue.run
        monkeypatch.setattr(one.timer.enqueue, "run", lambda *args: reads.append(1) or run(*args))
        one.timer.start()
        await asyncio.sleep(20)
        assert (one.timer.offset_behind, len(one.bodies())) == (2, 0)
        assert 10 <= len(reads) <= 50
        write_at(path, 0, sound)
        await one.pass_ms(5000)
        await one.until(lambda: one.timer.pending == 0)
        assert sorted(one.bodies()) == bodies_of(range(3))


async def test_an_earlier_stage_of_a_long_wait_is_not_delivered_beside_the_later_one(tmp_path):
    clock = StandingClock(NOW_MS)
    options = {"timer_log_file_bytes": LOG_BYTES, "timer_roll_window_slots": 20}
    async with timed(tmp_path, clock=clock, **options) as one:
        one.at(500, b"long", UNIQ_KEY="U")
        await one.on_wheel(1)
        await one.pass_ms(250)
        await one.on_wheel(2)
        assert (one.bodies(), one.timer.pending) == ([], 1)
    zero_log(tmp_path)
    async with timed(tmp_path, clock=clock, **options) as again:
        for _ in range(4):
            await again.pass_ms(100)
        await again.until(lambda: again.timer.pending == 0)
        assert again.bodies() == [b"long"]


async def test_a_kill_while_the_topic_is_read_again_loses_nothing_and_repeats_nothing(tmp_path):
    clock, root = StandingClock(NOW_MS), tmp_path / "store"
    await stopped_store(root, clock)
    zero_log(root)
    async with timed(root, clock=clock, timer_log_file_bytes=LOG_BYTES, killed=True) as again:
        state = again.timer.state
        again.timer.stop()
        assert state.needs_survey
        while again.timer._has_to_survey():
            pass
        again.timer.enqueue.run(20)  # half of it
        assert 0 < state.queue_offset < COUNT
        state.is_changed = True
        await again.timer.flush_round()
        await again.until(lambda: again.store.durable_offset == again.store.max_physical_offset)
        await again.timer.flush_round()
        written = load_timer_checkpoint(root / "config" / "timercheck")
        assert (written.last_timer_queue_offset, written.master_timer_queue_offset) == (state.queue_offset, COUNT + 1)
    async with timed(tmp_path / "killed", clock=clock, timer_log_file_bytes=LOG_BYTES) as third:
        await third.on_wheel()
        await third.pass_ms(16 * STEP_MS)
        await third.until(lambda: third.timer.pending == 0)
        assert third.bodies() == bodies_of(range(COUNT - 1))


async def test_a_time_far_behind_its_own_date_is_no_checkpoint(tmp_path):
    """Every message would count as delivered."""
    clock, path = StandingClock(NOW_MS), tmp_path / "config" / "timercheck"
    await stopped_store(tmp_path, clock)
    known = load_timer_checkpoint(path)
    known.last_read_time_ms |= 1 << 50
    write_at(path, 0, encode_timer_checkpoint(known))
    async with timed(tmp_path, clock=clock, timer_log_file_bytes=LOG_BYTES) as again:
        assert again.store.max_offset(TIMER_TOPIC, 0) == COUNT + 1
        await again.pass_ms(16 * STEP_MS)
        await again.until(lambda: again.timer.pending == 0)
        assert again.bodies() == bodies_of(range(COUNT - 1))
