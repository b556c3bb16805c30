"""Delayed messages: what is stored, when it is delivered, what a restart remembers (store.md §18.1)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from contextlib import asynccontextmanager

import pytest

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.errors import HeaderError
from rmqkit.protocol.names import HALF_TOPIC, SCHEDULE_TOPIC
from rmqkit.protocol.properties import decode_properties, java_hash
from rmqkit.protocol.schemas.brokers import DelayOffsets
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType, delay_level, parse_delay_levels
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import unpack_golden
from tests.store.stores import golden_settings, message, read_all, small_settings
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

LEVELS = "1s 5s 10s"


class Delays:
    """A store with delayed messages, on a clock that is set by hand."""

    def __init__(self, root, *, levels=LEVELS, clock=None, golden=None, **settings):
        self.root = root
        self.clock = clock or StandingClock()
        self.long_polling = LongPolling(self.clock)
        self.settings = golden or small_settings(message_delay_level=levels, **settings)
        self.is_sync = self.settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        loop = asyncio.get_running_loop()
        self.store = MessageStore(
            root,
            self.settings,
            clock=self.clock,
            is_batch_topic=lambda topic: topic == "GoldInnerBatch",
            on_arrival=self.long_polling.arrived,
            on_durable=lambda *_: loop.call_soon_threadsafe(self.store.dispatch),
        )
        delays_ms = parse_delay_levels(self.settings.message_delay_level)
        folder = root / "config"
        self.schedule = Schedule(folder, self.store, delays_ms, self.long_polling, self.clock, flushes=self.is_sync)

    def put(self, level, topic="T", **fields):
        delayed = message(topic, **{"queue_id": 1, "DELAY": level, **fields})
        put = self.store.put(self.schedule.schedule(delayed, level))
        assert put.status is PutStatus.OK
        self.store.request_flush()
        return put

    def records(self, topic="T", queue_id=1):
        return read_all(self.store, topic, queue_id)

    def bodies(self, topic="T", queue_id=1):
        return [record.body for record in self.records(topic, queue_id)]

    async def delivered(self, count, topic="T", queue_id=1):
        """Wait until so many messages are there; what they are."""
        async with asyncio.timeout(SECONDS):
            while self.store.max_offset(topic, queue_id) < count:
                await asyncio.sleep(0.002)
        return self.bodies(topic, queue_id)

    def offsets(self):
        return json.loads(_quoted((self.root / "config" / "delayOffset.json").read_text()))["offsetTable"]


def _quoted(text):
    """Integer keys are written bare."""
    return re.sub(r"(\d+):", r'"\1":', text)


@asynccontextmanager
async def running(root, **settings):
    delays = Delays(root, **settings)
    delays.schedule.load()
    delays.store.open()
    delays.schedule.start()
    try:
        yield delays
    finally:
        delays.schedule.stop()
        delays.store.close()
        delays.schedule.persist()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The wall clock is looked at more often than once in a second."""
    monkeypatch.setattr("rmqkit.broker.delay.levels._LOOK_MS_MAX", 5)
    monkeypatch.setattr("rmqkit.broker.delay.levels._PAUSE_MS_MIN", 0)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("text", "level"), [(None, 0), ("3", 3), ("-1", -1), ("+2", 2), ("2147483647", 2147483647), ("0", 0)]
)
def test_a_delay_level_is_a_number(text, level):
    assert delay_level(text) == level


@pytest.mark.parametrize("text", ["x", "", " 3", "3.0", "2147483648", "99999999999999999999", "٣", "0x1"])
def test_a_delay_level_that_is_no_number_is_refused(text):
    with pytest.raises(HeaderError, match="DELAY"):
        delay_level(text)


async def test_a_delayed_message_is_stored_under_its_level_and_delivered_when_it_is_due(root):
    async with running(root) as delays:
        delays.put(2, body=b"later", TAGS="A", TIMER_DELAY_SEC=9, a="b", flag=7, reconsume_times=3)
        (stored,) = delays.records(SCHEDULE_TOPIC, 1)
        wanted = {"DELAY": "2", "REAL_TOPIC": "T", "REAL_QID": "1", "TAGS": "A", "a": "b"}
        assert decode_properties(stored.properties) == wanted
        ((_, _, _, due_ms),) = delays.store.entries(SCHEDULE_TOPIC, 1, 0, count_max=9)
        assert due_ms == stored.store_timestamp + 5000 == delays.clock.ms + 5000

        delays.clock.ms += 4999
        await asyncio.sleep(0.05)
        assert delays.store.max_offset("T", 1) == 0
        delays.clock.ms += 1
        assert await delays.delivered(1) == [b"later"]
        (copy,) = delays.records()
        assert decode_properties(copy.properties) == wanted
        assert (copy.flag, copy.reconsume_times, copy.born_timestamp) == (7, 3, stored.born_timestamp)
        assert (copy.born_host, copy.store_host) == (stored.born_host, stored.store_host)
        assert copy.store_timestamp == delays.clock.ms
        assert [entry[3] for entry in delays.store.entries("T", 1, 0, count_max=9)] == [java_hash("A")]


async def test_a_level_above_the_last_counts_as_the_last(root):
    async with running(root) as delays:
        delays.put(99)
        (stored,) = delays.records(SCHEDULE_TOPIC, 2)
        assert decode_properties(stored.properties)["DELAY"] == "3"


async def test_each_level_delivers_in_the_order_of_its_queue(root):
    async with running(root) as delays:
        for number in range(60):
            delays.put(1 + number % 2, body=b"%d" % number)
        delays.clock.ms += 1000
        assert await delays.delivered(30) == [b"%d" % number for number in range(0, 60, 2)]
        delays.clock.ms += 4000
        assert sorted(await delays.delivered(60), key=int) == [b"%d" % number for number in range(60)]


async def test_a_level_that_was_empty_for_long_delivers_again(root):
    async with running(root) as delays:
        for round_number in range(3):
            delays.put(1, body=b"%d" % round_number)
            delays.clock.ms += 86_400_000
            assert len(await delays.delivered(round_number + 1)) == round_number + 1


async def test_a_restart_delivers_what_became_due_meanwhile_and_nothing_twice(root):
    async with running(root) as delays:
        delays.put(1, body=b"before")
        delays.put(2, body=b"meanwhile")
        delays.put(3, body=b"after")
        delays.clock.ms += 1000
        await delays.delivered(1)
    assert delays.offsets() == {"1": 1}
    delays.clock.ms += 5000
    async with running(root, clock=delays.clock) as again:
        assert await again.delivered(2) == [b"before", b"meanwhile"]
        again.clock.ms += 5000
        assert await again.delivered(3) == [b"before", b"meanwhile", b"after"]
    assert again.offsets() == {"1": 1, "2": 1, "3": 1}


@pytest.mark.virtual_time
def test_without_the_offset_file_everything_is_delivered_again_and_said(root, caplog):
    path = root / "config" / "delayOffset.json"

    async def scenario():
        async with running(root) as delays:
            delays.put(1)
            delays.put(2)
            delays.clock.ms += 5000
            await delays.delivered(2)
        assert caplog.messages == [], "a new broker has no such file, and makes it"
        path.unlink()
        path.with_name("delayOffset.json.bak").unlink()
        async with running(root, clock=delays.clock) as again:
            assert len(await again.delivered(4)) == 4
            # as a broker that becomes master a second time
            again.schedule.stop()
            again.schedule.start()
        (said,) = caplog.messages
        assert said.startswith(f"{path} is missing, and so is its backup: 2 messages of {SCHEDULE_TOPIC} are delivered")

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario())


@pytest.mark.virtual_time
def test_with_a_backup_of_the_offset_file_only_what_it_does_not_know_is_delivered_again(root, caplog):
    path = root / "config" / "delayOffset.json"

    async def scenario():
        async with running(root) as delays:
            delays.put(1)
            delays.clock.ms += 1000
            await delays.delivered(1)
        path.rename(path.with_name("delayOffset.json.bak"))
        async with running(root, clock=delays.clock) as again:
            again.put(1)
            again.clock.ms += 1000
            assert len(await again.delivered(2)) == 2
        assert caplog.messages == [f"{path} is missing: using its backup, which may be older"]

    with caplog.at_level(logging.WARNING):
        run_virtual(scenario())


@pytest.mark.parametrize(("offset", "count"), [(-5, 1), (10**12, 0)])
async def test_an_offset_outside_its_queue_is_corrected(root, offset, count):
    async with running(root) as delays:
        delays.put(1)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "delayOffset.json").write_text(f'{{"offsetTable":{{1:{offset},-3:7,40:1}}}}')
    delays.clock.ms += 1000
    async with running(root, clock=delays.clock) as again:
        again.put(1)
        again.clock.ms += 1000
        await again.delivered(count + 1)


async def test_a_delay_made_shorter_delivers_at_once_what_is_farther_off(root):
    async with running(root, levels="1h 2h") as delays:
        delays.put(2, body=b"was two hours")
    async with running(root, levels="1h 1s", clock=delays.clock) as again:
        assert await again.delivered(1) == [b"was two hours"]


async def test_a_level_taken_from_the_table_delivers_when_its_messages_said(root):
    async with running(root) as delays:
        delays.put(3, body=b"third")
    async with running(root, levels="1s", clock=delays.clock) as again:
        again.clock.ms += 9999
        await asyncio.sleep(0.05)
        assert again.store.max_offset("T", 1) == 0
        again.clock.ms += 1
        assert await again.delivered(1) == [b"third"]


async def test_a_clock_set_back_delivers_at_once_what_it_put_too_far_off(root):
    async with running(root) as delays:
        delays.put(1)
        delays.clock.ms -= 3_600_000
        await delays.delivered(1)


async def test_a_store_that_refuses_is_tried_again_with_the_same_message(root, monkeypatch):
    async with running(root) as delays:
        for number in range(3):
            delays.put(1, body=b"%d" % number)
        refusals = iter([PutStatus.OS_PAGE_CACHE_BUSY, PutStatus.SERVICE_NOT_AVAILABLE])
        put = delays.store.put

        def reluctant(wanted):
            status = next(refusals, None)
            return put(wanted) if status is None else PutResult(status, reason="not now")

        monkeypatch.setattr(delays.store, "put", reluctant)
        delays.clock.ms += 1000
        async with asyncio.timeout(SECONDS):
            while delays.store.max_offset("T", 1) < 3:
                await asyncio.sleep(0.002)
                delays.clock.ms += 10
        assert delays.bodies() == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("topic", "dead"), [("T", "%DLQ%CID_RMQ_SYS_UNDELIVERABLE"), ("%RETRY%g", "%DLQ%g"), ("%RETRY%g+T", "%DLQ%g")]
)
async def test_what_can_never_be_stored_goes_to_dead_letters_and_holds_up_nothing(
    root, monkeypatch, caplog, topic, dead
):
    async with running(root) as delays:
        delays.put(1, topic=topic, body=b"bad", name="kept")
        delays.put(1, body=b"good")
        delays.put(1, topic=HALF_TOPIC)
        put = delays.store.put
        illegal = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="too long")
        monkeypatch.setattr(
            delays.store, "put", lambda one: illegal if (one.body, one.topic) == (b"bad", topic) else put(one)
        )
        with caplog.at_level(logging.ERROR):
            delays.clock.ms += 1000
            assert await delays.delivered(1) == [b"good"]
            async with asyncio.timeout(SECONDS):
                while delays.schedule.offsets().offset_table.get(1) != 3:
                    await asyncio.sleep(0.002)
        [letter] = delays.records(dead, 0)
        properties = decode_properties(letter.properties)
        reason = f"delayed message for {topic} cannot be stored: MESSAGE_ILLEGAL, too long"
        assert (letter.body, properties["name"], properties["DLQ_ORIGIN_TOPIC"]) == (b"bad", "kept", topic)
        assert properties["rmqkit_reason"] == reason
        assert f"{reason}; it is in {dead} at 0" in caplog.text
        assert delays.store.max_offset(HALF_TOPIC, 1) == 0


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_dead_letters_that_refuse_too_are_tried_with_fewer_properties(root, monkeypatch, caplog, count):
    """``count``: how many copies are refused; the third is the message as it was."""
    async with running(root) as delays:
        delays.put(1, body=b"bad", name="kept")
        put, refused = delays.store.put, []
        full = PutResult(PutStatus.PROPERTIES_SIZE_EXCEEDED, reason="no room")

        def refuse(one):
            if one.topic == "T" or len(refused) < count:
                refused.extend([one] if one.topic != "T" else [])
                return full
            return put(one)

        monkeypatch.setattr(delays.store, "put", refuse)
        delays.clock.ms += 1000
        async with asyncio.timeout(SECONDS):
            while delays.schedule.offsets().offset_table.get(1) != 1:
                await asyncio.sleep(0.002)
        letters = delays.records("%DLQ%CID_RMQ_SYS_UNDELIVERABLE", 0)
        assert [one.body for one in letters] == [b"bad"] * (count < 3)
        assert all("rmqkit_reason" not in decode_properties(one.properties) for one in letters)
        assert ("so it is lost" in caplog.text) == (count == 3)


async def test_a_level_waits_while_the_dead_letters_are_refused_for_now(root, monkeypatch):
    async with running(root) as delays:
        delays.put(1, body=b"bad")
        put, is_busy = delays.store.put, [True]

        def refuse_for_now(one):
            if one.topic == "T":
                return PutResult(PutStatus.MESSAGE_ILLEGAL)
            return PutResult(PutStatus.SERVICE_NOT_AVAILABLE) if is_busy[0] else put(one)

        monkeypatch.setattr(delays.store, "put", refuse_for_now)
        delays.clock.ms += 1000
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert delays.schedule.offsets().offset_table.get(1, 0) == 0
        is_busy[0] = False
        async with asyncio.timeout(SECONDS):
            while delays.schedule.offsets().offset_table.get(1) != 1:
                delays.clock.ms += 1000
                await asyncio.sleep(0.002)
        assert [one.body for one in delays.records("%DLQ%CID_RMQ_SYS_UNDELIVERABLE", 0)] == [b"bad"]


async def test_a_lowered_message_size_does_not_refuse_what_was_accepted(root):
    async with running(root, message_bytes_max=2000) as delays:
        delays.put(1, body=b"x" * 2000)
    async with running(root, message_bytes_max=1024, clock=delays.clock) as again:
        refused = again.store.put(message(body=b"x" * 1025))
        assert refused.status is PutStatus.MESSAGE_ILLEGAL
        again.clock.ms += 1000
        assert await again.delivered(1) == [b"x" * 2000]


async def test_a_level_that_fails_is_tried_again_and_holds_up_no_other(root, monkeypatch, caplog):
    async with running(root) as delays:
        delays.put(1, body=b"first")
        delays.put(2, body=b"second")
        entries, failures = delays.store.entries, iter([True])

        def failing(topic, queue_id, queue_offset, *, count_max):
            if queue_id == 0 and next(failures, False):
                raise OSError("cannot be read")
            return entries(topic, queue_id, queue_offset, count_max=count_max)

        monkeypatch.setattr(delays.store, "entries", failing)
        delays.clock.ms += 5000
        assert await delays.delivered(1) == [b"second"]
        assert "delay level 1: cannot deliver entry 0" in caplog.text
        delays.clock.ms += 10_000
        assert await delays.delivered(2) == [b"second", b"first"]


async def test_a_backlog_does_not_keep_the_loop_from_its_work(root, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.delay.levels._ROUND_MS_MAX", 1.5)  # one run of messages a round
    async with running(root) as delays:
        ticks = 0
        monkeypatch.setattr(delays.clock, "monotonic_ms", _every_call_later())
        for number in range(200):
            delays.put(1 + number % 3)
        delays.clock.ms += 10_000
        async with asyncio.timeout(SECONDS):
            while delays.store.max_offset("T", 1) < 200:
                await asyncio.sleep(0)
                ticks += 1
        assert ticks > 200 // 32


def _every_call_later():
    """A monotonic clock on which a millisecond passes between any two looks."""
    now_ms = 0.0

    def monotonic_ms():
        nonlocal now_ms
        now_ms += 1.0
        return now_ms

    return monotonic_ms


async def test_offsets_are_written_when_the_copies_before_them_are_on_the_disk(root, monkeypatch):
    async with running(root, flush_interval_ms=3_600_000) as delays:
        delays.put(1)
        delays.clock.ms += 1000
        await delays.delivered(1)
        durable_offset = 0
        monkeypatch.setattr(MessageStore, "durable_offset", property(lambda store: durable_offset))
        await delays.schedule.persist_round()
        assert delays.offsets() == {}
        durable_offset = delays.store.max_physical_offset
        delays.put(1)
        delays.clock.ms += 1000
        await delays.delivered(2)
        await delays.schedule.persist_round()  # the second copy is not on the disk
        assert delays.offsets() == {"1": 1}
        durable_offset = delays.store.max_physical_offset
        await delays.schedule.persist_round()
        assert delays.offsets() == {"1": 2}


async def test_offsets_of_another_member_move_levels_forward_only(root):
    delays = Delays(root)
    delays.schedule.load()
    delays.schedule.replace_with(DelayOffsets(DataVersion(timestamp=5), {1: 7, 2: 3, 4: 9}))
    delays.schedule.merge_forward(DelayOffsets(DataVersion(timestamp=5), {1: 4, 2: 8, 3: 2}))
    merged = {1: 7, 2: 8, 3: 2, 4: 9}
    assert delays.schedule.offsets().offset_table == merged
    assert delays.offsets() == {str(level): offset for level, offset in merged.items()}


async def test_an_older_table_of_offsets_changes_nothing(root):
    delays = Delays(root)
    delays.schedule.load()
    delays.schedule.replace_with(DelayOffsets(DataVersion(timestamp=5), {1: 7}))
    delays.schedule.merge_forward(DelayOffsets(DataVersion(timestamp=4), {1: 8}))
    delays.schedule.merge_forward(DelayOffsets(None, {1: 9}))
    assert delays.schedule.offsets().offset_table == {1: 7}


async def test_under_sync_flush_messages_are_delivered_too(root):
    async with running(root, flush_disk_type=FlushDiskType.SYNC_FLUSH) as delays:
        for number in range(3):
            delays.put(1, body=b"%d" % number)
        delays.clock.ms += 1000
        assert await delays.delivered(3) == [b"0", b"1", b"2"]
        delays.put(1, body=b"3")
        delays.clock.ms += 1000
        assert await delays.delivered(4) == [b"0", b"1", b"2", b"3"]


async def test_with_extension_files_the_due_time_comes_from_them(root):
    async with running(root, enable_consume_queue_ext=True, consume_queue_ext_file_bytes=4096) as delays:
        delays.put(2)
        delays.clock.ms += 4999
        await asyncio.sleep(0.05)
        assert delays.store.max_offset("T", 1) == 0
        delays.clock.ms += 1
        await delays.delivered(1)


async def test_what_apache_left_pending_is_delivered(tmp_path):
    golden = unpack_golden("5.4.0", tmp_path)

    delays = Delays(golden.root, golden=golden_settings(golden))
    delays.schedule.load()
    assert delays.schedule.offsets().offset_table == {1: 3, 2: 1, 3: 3, 6: 0, 9: 0, 18: 0}
    delays.store.open()
    waiting = {level: delays.store.max_offset(SCHEDULE_TOPIC, level - 1) for level in (1, 2, 3, 6, 9, 18)}
    assert waiting == {1: 3, 2: 1, 3: 3, 6: 1, 9: 1, 18: 2}
    delays.schedule.start()  # on a clock for which all of it is due
    async with asyncio.timeout(SECONDS):
        while delays.schedule.offsets().offset_table != waiting:
            await asyncio.sleep(0.002)
    tags = [decode_properties(record.properties)["TAGS"] for record in delays.records("GoldDelay", 0)]
    assert tags == ["d2", "d6", "d18", "over"]
    delays.schedule.stop()
    delays.store.close()
