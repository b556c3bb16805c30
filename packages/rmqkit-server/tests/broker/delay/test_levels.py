"""The times of the delay levels' retries, their offsets, and the records that they skip (behaviour.md §9.2)."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.names import SCHEDULE_TOPIC
from rmqkit.protocol.schemas.brokers import DelayOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, read_all, small_settings

DELAYS_MS = (1000, 5000, 10_000)
REFUSED = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")


class Levels:
    """Three delay levels on a store, on a clock that is set by hand, while the loop's time passes by itself."""

    def __init__(self, root, clock=None):
        self.clock = clock or StandingClock()
        self.polling = LongPolling(self.clock)
        self.store = MessageStore(root, small_settings(), clock=self.clock, on_arrival=self.polling.arrived)
        self.schedule = Schedule(root / "config", self.store, DELAYS_MS, self.polling, self.clock, flushes=False)
        self.schedule.load()
        self.store.open()

    def put(self, level, body=b"x", topic="T"):
        one = self.schedule.schedule(message(topic, 1, body, DELAY=level), level)
        put = self.store.put(one)
        assert put.status is PutStatus.OK
        return put

    def bodies(self):
        return [record.body for record in read_all(self.store, "T", 1)]

    @property
    def offsets(self):
        return self.schedule.offsets().offset_table

    def close(self):
        self.schedule.stop()
        self.polling.close()
        self.store.close()


@pytest.fixture
async def levels(tmp_path):
    levels = Levels(tmp_path)
    yield levels
    levels.close()


# -- times


@pytest.mark.parametrize(("level", "delay_ms"), [(1, 1000), (2, 5000), (3, 10_000), (9, 10_000)])
async def test_a_message_is_delivered_after_the_delay_of_its_level(level, delay_ms, tmp_path):
    levels = Levels(tmp_path, SYSTEM_CLOCK)
    levels.schedule.start()
    levels.put(level)
    await asyncio.sleep((delay_ms - 5) / 1000)
    assert levels.bodies() == []
    await asyncio.sleep(0.02)
    assert (levels.bodies(), levels.offsets) == ([b"x"], {min(level, 3): 1})
    levels.close()


async def test_a_clock_that_is_set_forward_makes_a_message_due_within_a_second(levels):
    levels.put(2)
    levels.schedule.start()
    await asyncio.sleep(0.5)
    levels.clock.ms += 5000
    await asyncio.sleep(0.4)
    assert levels.bodies() == []
    await asyncio.sleep(0.2)
    assert levels.bodies() == [b"x"]


@pytest.mark.parametrize(("back_ms", "delivered_after"), [(0, 7), (60_000, 7)])
async def test_while_the_clock_stands_or_is_set_back_the_time_of_the_loop_counts(back_ms, delivered_after, levels):
    levels.put(2)
    levels.schedule.start()
    await asyncio.sleep(0.5)
    levels.clock.ms -= back_ms
    await asyncio.sleep(4)
    assert levels.bodies() == []
    await asyncio.sleep(delivered_after - 4.5)
    assert levels.bodies() == [b"x"]


@pytest.mark.parametrize(("fault", "pause_ms"), [(REFUSED, 100), (OSError(5, "Input/output error"), 100)])
async def test_a_message_that_cannot_be_stored_is_retried_every_tenth_of_a_second(fault, pause_ms, levels, monkeypatch):
    loop, tries, put = asyncio.get_running_loop(), [], levels.store.put

    def failing(one):
        tries.append(loop.time())
        if len(tries) > 3:
            return put(one)
        if isinstance(fault, Exception):
            raise fault
        return fault

    levels.put(1)
    levels.clock.ms += 1000
    monkeypatch.setattr(levels.store, "put", failing)
    levels.schedule.start()
    await asyncio.sleep(60)
    assert levels.bodies() == [b"x"]
    pauses = [round((later - earlier) * 1000) for earlier, later in pairwise(tries)]
    expected = pause_ms if isinstance(fault, PutResult) else 10_000
    assert [pause // 10 * 10 for pause in pauses] == [expected] * 3


async def test_a_level_that_cannot_be_read_is_retried_after_ten_seconds(levels, monkeypatch, caplog):
    levels.put(1)
    levels.clock.ms += 1000
    entries, failures = levels.store.entries, [OSError(5, "Input/output error")]

    def failing(topic, queue_id, offset, *, count_max):
        if queue_id == 0 and failures:
            raise failures.pop()
        return entries(topic, queue_id, offset, count_max=count_max)

    monkeypatch.setattr(levels.store, "entries", failing)
    levels.schedule.start()
    await asyncio.sleep(9.9)
    assert levels.bodies() == []
    assert [line for line in caplog.messages if line.startswith("delay")] == ["delay level 1: cannot deliver entry 0"]
    await asyncio.sleep(0.2)
    assert levels.bodies() == [b"x"]


async def test_more_messages_than_one_run_are_delivered_in_their_order(levels):
    for number in range(70):
        levels.put(1, str(number).encode())
    levels.clock.ms += 1000
    levels.schedule.start()
    await asyncio.sleep(0.5)
    assert levels.bodies() == [str(number).encode() for number in range(70)]


async def test_a_stopped_schedule_delivers_nothing_and_continues_after_a_start(levels):
    levels.put(1)
    levels.schedule.start()
    levels.schedule.stop()
    assert not levels.schedule.is_running
    levels.clock.ms += 1000
    await asyncio.sleep(5)
    assert levels.bodies() == []
    levels.schedule.start()
    await asyncio.sleep(0.1)
    assert levels.bodies() == [b"x"]


async def test_a_message_that_arrives_at_an_empty_level_is_noticed_at_once(levels):
    levels.schedule.start()
    await asyncio.sleep(1)
    levels.clock.ms += 100_000
    levels.put(3)
    levels.clock.ms += 10_000
    await asyncio.sleep(1.1)
    assert levels.bodies() == [b"x"]


# -- offsets


async def test_the_log_is_needed_from_the_oldest_message_that_is_not_delivered(levels):
    assert levels.schedule.needed_from() is None
    first, second = levels.put(3), levels.put(1)
    assert first.physical_offset < second.physical_offset
    assert levels.schedule.needed_from() == first.physical_offset
    levels.schedule.replace_with(DelayOffsets(DataVersion(), {3: 1}))
    assert levels.schedule.needed_from() == second.physical_offset
    levels.schedule.replace_with(DelayOffsets(DataVersion(), {3: 1, 1: 1}))
    assert levels.schedule.needed_from() is None


async def test_a_broker_that_delivers_itself_does_not_adopt_offsets(levels):
    levels.put(1)
    levels.schedule.start()
    levels.schedule.replace_with(DelayOffsets(DataVersion(timestamp=5), {1: 1}))
    assert levels.offsets == {}
    levels.schedule.stop()
    levels.schedule.replace_with(DelayOffsets(DataVersion(timestamp=5), {1: 1}))
    assert levels.offsets == {1: 1}


async def test_offsets_that_only_another_member_has_are_adopted_and_zero_is_one_of_them(levels):
    levels.schedule.replace_with(DelayOffsets(DataVersion(timestamp=5), {1: 3}))
    levels.schedule.merge_forward(DelayOffsets(DataVersion(timestamp=5), {2: 0, 3: 1}))
    assert levels.offsets == {1: 3, 2: 0, 3: 1}


@pytest.mark.parametrize(("failure", "is_written"), [(None, True), (OSError(5, "Input/output error"), False)])
async def test_offsets_are_not_written_after_a_failed_flush(failure, is_written, levels, tmp_path, monkeypatch):
    levels.put(1)
    levels.clock.ms += 1000
    levels.schedule.start()
    await asyncio.sleep(0.1)
    levels.schedule.stop()
    monkeypatch.setattr(MessageStore, "failure", failure, raising=False)
    levels.schedule.persist()
    again = Levels(tmp_path / "again")
    again.schedule = Schedule(tmp_path / "config", again.store, DELAYS_MS, again.polling, again.clock, flushes=False)
    again.schedule.load()
    assert again.offsets == ({1: 1} if is_written else {})
    again.close()


async def test_unchanged_offsets_are_not_written_again(levels):
    levels.put(1)
    levels.clock.ms += 1000
    levels.schedule.start()
    await asyncio.sleep(0.1)
    levels.schedule.stop()
    versions = []
    for _ in range(2):
        levels.schedule.persist()
        versions.append(levels.schedule.offsets().data_version.counter)
    assert versions == [1, 1]


@pytest.mark.parametrize(("offset", "corrected", "lines"), [(-1, 0, 1), (0, 0, 0), (2, 2, 0), (3, 2, 1)])
async def test_a_start_moves_an_offset_into_the_range_of_its_queue(offset, corrected, lines, levels, caplog):
    for _ in range(2):
        levels.put(1)
    levels.schedule.replace_with(DelayOffsets(DataVersion(), {1: offset}))
    levels.schedule.start()
    assert levels.offsets.get(1, 0) == corrected
    assert caplog.messages == [f"delay level 1: offset {offset} is not in 0 to 2"] * lines


# -- records


async def test_a_record_of_another_level_or_topic_is_skipped_with_a_log_line(levels, monkeypatch, caplog):
    other = levels.put(2)
    for body in (b"replaced", b"good"):
        levels.put(1, body)
    entries = levels.store.entries

    def mixed(topic, queue_id, offset, *, count_max):
        found = entries(topic, queue_id, offset, count_max=count_max)
        if (topic, queue_id, offset) != (SCHEDULE_TOPIC, 0, 0):
            return found
        return [(1, other.physical_offset, other.end_offset - other.physical_offset, 0), found[1]]

    monkeypatch.setattr(levels.store, "entries", mixed)
    levels.clock.ms += 1000
    levels.schedule.start()
    await asyncio.sleep(0.1)
    assert levels.bodies() == [b"good"]
    assert "delay level 1: message at 0 is skipped: it is one of SCHEDULE_TOPIC_XXXX-1" in caplog.messages
