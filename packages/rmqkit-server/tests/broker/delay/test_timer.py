"""Messages for any time: what is stored, when it is delivered, what a crash leaves (store.md §18.2 to §18.6)."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from rmqkit.broker.delay.timer import NOT_ENABLED, schedule_timed
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, TimerMetrics, TimingCount, decode_timer_checkpoint
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.message_store import PutResult, PutStatus
from rmqkit.store.settings import FlushDiskType
from rmqkit.testing.clock import StandingClock
from tests.broker.timed import MAX_SECONDS, NOW_MS, STEP_MS, Timed, now_of, timed
from tests.golden_stores import unpack_golden
from tests.store.stores import golden_settings, message, read_all


@pytest.mark.parametrize(
    ("asked", "ahead_ms"),
    [
        ({"TIMER_DELAY_SEC": 3}, 2990),
        ({"TIMER_DELAY_MS": 3005}, 3000),
        ({"TIMER_DELIVER_MS": 1_800_000_003_005}, 3000),
        ({"TIMER_DELIVER_MS": 1_800_000_003_000}, 2990),
        ({"TIMER_DELAY_SEC": 3, "TIMER_DELAY_MS": 1, "TIMER_DELIVER_MS": 9}, 2990),
        ({"TIMER_DELAY_MS": 7000, "TIMER_DELIVER_MS": 9}, 6990),
        ({"TIMER_DELAY_SEC": MAX_SECONDS}, MAX_SECONDS * 1000 - 10),
    ],
)
async def test_a_message_is_put_aside_until_its_time(tmp_path, asked, ahead_ms):
    """Whole steps are one step earlier, others rounded down: it is delivered when its step is over."""
    one = Timed(tmp_path)
    put = message("T", 3, KEYS="k", **asked)
    put = one.timer.schedule(put)
    assert (put.topic, put.queue_id) == (TIMER_TOPIC, 0)
    assert put.parsed == {
        "KEYS": "k",
        **{name: str(value) for name, value in asked.items()},
        "TIMER_OUT_MS": str(now_of(one) + ahead_ms),
        "REAL_TOPIC": "T",
        "REAL_QID": "3",
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"TIMER_DELAY_SEC": MAX_SECONDS + 1},
        {"TIMER_DELAY_MS": MAX_SECONDS * 1000 + 1},
        {"TIMER_DELIVER_MS": "tomorrow"},
        {"TIMER_DELAY_SEC": ""},
        {"TIMER_DELAY_MS": 0, "TIMER_DEL_UNIQKEY": "K"},
    ],
)
async def test_a_time_that_cannot_be_kept_is_refused(tmp_path, asked):
    one = Timed(tmp_path)
    code, remark = one.timer.schedule(message(**asked))
    assert code == ResponseCode.MESSAGE_ILLEGAL
    assert remark == (
        "timer message illegal, the delay time should not be bigger than the max delay 1000000ms; "
        "or if set del msg, the delay time should be bigger than the current time"
    )


@pytest.mark.parametrize("asked", [{"TIMER_DELAY_MS": "0"}, {"TIMER_DELIVER_MS": "-5"}, {"TIMER_DELAY_SEC": "-1"}])
async def test_a_time_that_is_over_leaves_a_message_as_it_is(tmp_path, asked):
    put = message("T", 3, **asked)
    assert Timed(tmp_path).timer.schedule(put) == put


@pytest.mark.parametrize(
    ("topic", "properties", "refusal"),
    [
        ("T", {"TIMER_DELAY_MS": "5"}, NOT_ENABLED),
        ("T", {"TIMER_DELAY_MS": "5", "TIMER_OUT_MS": "5"}, None),
        (TIMER_TOPIC, {"TIMER_DELAY_MS": "5"}, None),
        ("T", {"TIMER_ROLL_TIMES": "5"}, None),
    ],
)
def test_without_a_timer_only_messages_that_ask_for_a_time_are_refused(topic, properties, refusal):
    one = message(topic, **properties)
    assert schedule_timed(None, one) == (refusal or one)


async def test_a_full_slot_takes_no_more(tmp_path):
    async with timed(tmp_path, timer_slot_count_max=2) as one:
        for _ in range(4):
            put = message("T", 1, TIMER_DELIVER_MS=now_of(one) + 5000)
            one.store.put(one.timer.schedule(put))
        await one.on_wheel(4)
        code, remark = one.timer.schedule(message(TIMER_DELIVER_MS=now_of(one) + 5000))
        assert code == ResponseCode.SYSTEM_ERROR
        assert remark.startswith("timer message is under flow control, max num limit is 4 or ")
        later = one.timer.schedule(message(TIMER_DELIVER_MS=now_of(one) + 6000))
        assert later.topic == TIMER_TOPIC


@pytest.mark.parametrize("flush", list(FlushDiskType))
async def test_messages_come_at_their_time_in_the_order_of_their_step(tmp_path, flush):
    async with timed(tmp_path, flush_disk_type=flush) as one:
        for ahead_ms, body in [(50, b"b1"), (20, b"a1"), (49, b"b2"), (5000, b"late"), (42, b"b3"), (15, b"a2")]:
            one.at(ahead_ms, body)
        await one.on_wheel(6)
        assert one.bodies() == []
        await one.pass_ms(19)
        assert one.bodies() == []
        await one.pass_ms(1)
        await one.until(lambda: one.bodies() == [b"a1", b"a2"])
        await one.pass_ms(30)
        await one.until(lambda: one.bodies() == [b"a1", b"a2", b"b1", b"b2", b"b3"])
        assert one.timer.pending == 1


async def test_a_delivered_message_says_when_it_waited(tmp_path):
    async with timed(tmp_path) as one:
        began_ms = now_of(one)
        one.at(25, TAGS="A", UNIQ_KEY="U")
        await one.on_wheel(1)
        await one.pass_ms(40)
        (record,) = read_all(one.store, "T", 1)
        assert decode_properties(record.properties) == {
            "TAGS": "A",
            "UNIQ_KEY": "U",
            "TIMER_DELIVER_MS": str(began_ms + 25),
            "TIMER_OUT_MS": str(began_ms + 20),
            "TIMER_ENQUEUE_MS": str(began_ms),
            "TIMER_DEQUEUE_MS": str(began_ms + 40),
            "REAL_TOPIC": "T",
            "REAL_QID": "1",
        }


async def test_a_message_that_comes_to_the_wheel_too_late_is_delivered_at_once(tmp_path):
    async with timed(tmp_path) as one:
        late = {"TIMER_OUT_MS": now_of(one) - STEP_MS, "REAL_TOPIC": "T", "REAL_QID": 1}
        one.store.put(message(TIMER_TOPIC, **late))
        one.store.put(message(TIMER_TOPIC, **late, TIMER_DEL_UNIQKEY="K"))
        await one.on_wheel(2)
        (record,) = read_all(one.store, "T", 1)
        assert decode_properties(record.properties)["TIMER_ENQUEUE_MS"] == "9223372036854775807"


async def test_a_slave_is_reported_a_delivery_when_it_has_it(tmp_path):
    async with timed(tmp_path) as one:
        copied = [-1]
        one.timer._copied_offset = lambda: copied[0]

        def told():
            return decode_timer_checkpoint(one.timer.checkpoint()).last_read_time_ms

        assert told() == NOW_MS
        one.at(50)
        await one.on_wheel(1)
        copied[0] = one.store.max_physical_offset
        assert told() == NOW_MS
        await one.pass_ms(50)
        assert one.bodies() == [b"x"]
        assert told() == NOW_MS
        copied[0] = -1  # the link is lost
        assert told() == NOW_MS
        copied[0] = one.store.max_physical_offset
        assert told() == NOW_MS + 50


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_when_the_clock_is_set_back_nothing_comes_early_or_twice(tmp_path, is_restarted):
    clock = StandingClock(NOW_MS)
    async with timed(tmp_path, clock=clock) as one:
        one.at(20_000, b"1")
        await one.on_wheel(1)
        await one.pass_ms(60_000)
        assert one.bodies() == [b"1"]
        clock.ms -= 60_000
        if not is_restarted:
            await waits_until_its_time(one)
    if is_restarted:
        async with timed(tmp_path, clock=clock) as one:
            await waits_until_its_time(one)


@pytest.mark.parametrize("ends", [None, "stopped", "killed"])
async def test_a_message_is_not_repeated_after_the_clock_was_set_back_twice(tmp_path, ends):
    """The broker stops or is killed in the repeated seconds, or is not stopped."""
    clock, root = StandingClock(NOW_MS), tmp_path / "store"
    async with timed(root, clock=clock, killed=ends == "killed") as one:
        one.at(40_000, b"1")
        await one.on_wheel(1)
        await one.pass_ms(60_000)
        for back_ms in (30_000, 40_000):
            one.clock.ms -= back_ms
            await one.until(lambda: one.timer.state.read_ms == one.clock.ms)
            one.at(55_000, b"after %d" % back_ms)
            await one.on_wheel()
        await one.flushed()
        if ends is None:
            await passes_all(one)
    if ends is not None:
        async with timed(root.with_name("killed") if ends == "killed" else root, clock=clock) as one:
            await passes_all(one)


async def passes_all(one):
    await one.pass_ms(50_000)
    await one.pass_ms(50_000)
    await one.until(lambda: len(one.bodies()) >= 3)
    assert one.bodies() == [b"1", b"after 40000", b"after 30000"]
    assert one.timer.pending == 0


async def waits_until_its_time(one):
    one.at(30_000, b"2")
    await one.on_wheel(2)
    assert one.bodies() == [b"1"]
    await one.pass_ms(30_000)
    await one.until(lambda: len(one.bodies()) > 1)
    assert one.bodies() == [b"1", b"2"]


async def test_what_came_before_its_second_was_over_counts_though_the_round_is_late(tmp_path):
    """Nothing is overtaken by what came last, and a marker that was answered is heeded."""
    async with timed(tmp_path) as one:
        one.at(50, b"1", UNIQ_KEY="a")
        one.at(50, b"2", UNIQ_KEY="b")
        await one.on_wheel(2)
        one.at(50, b"3", UNIQ_KEY="c")
        one.at(50, UNIQ_KEY="m", TIMER_DEL_UNIQKEY="T+a")
        await one.pass_ms(50)
        assert one.bodies() == [b"2", b"3"]


@pytest.mark.parametrize("key", ["U2", "T+U2"])
async def test_a_marker_keeps_the_one_message_of_its_key_from_being_delivered(tmp_path, key):
    async with timed(tmp_path) as one:
        for number in (1, 2, 3):
            one.at(50, b"%d" % number, UNIQ_KEY=f"U{number}")
        one.at(50, b"0", UNIQ_KEY="U2", TIMER_DEL_UNIQKEY=key)
        one.at(70, b"another second", UNIQ_KEY="U2")
        await one.on_wheel(5)
        await one.pass_ms(100)
        assert one.bodies() == [b"1", b"3", b"another second"]


@pytest.mark.parametrize("key", ["U2", "T+U2"])
async def test_a_marker_of_one_topic_recalls_no_message_of_another(tmp_path, key):
    """The sender of the marker may have no permission on the other topic."""
    async with timed(tmp_path) as one:
        one.at(50, b"2", UNIQ_KEY="U2")
        one.put(b"0", topic="Own", TIMER_DELIVER_MS=one.clock.ms + 50, UNIQ_KEY="U2", TIMER_DEL_UNIQKEY=key)
        await one.on_wheel(2)
        await one.pass_ms(100)
        assert one.bodies() == [b"2"]


async def test_a_message_far_ahead_waits_in_stages(tmp_path):
    """A window of 200 ms: 250 ms are parked for 100 (the rest would be short), 700 ms for 200, 500, 300."""
    async with timed(tmp_path, timer_roll_window_slots=20) as one:
        one.at(250, b"a")
        one.at(700, b"b")
        await one.on_wheel(2)
        for _ in range(24):
            await one.pass_ms(STEP_MS)
        assert one.bodies() == []
        await one.pass_ms(STEP_MS)
        assert one.bodies() == [b"a"]
        for _ in range(45):
            await one.pass_ms(STEP_MS)
        assert one.bodies() == [b"a", b"b"]
        rolls = [decode_properties(record.properties).get("TIMER_ROLL_TIMES") for record in read_all(one.store, "T", 1)]
        assert rolls[0] == "1"
        assert int(rolls[1]) >= 3
        assert one.timer.pending == 0


async def test_a_second_with_many_messages_takes_many_rounds(tmp_path):
    async with timed(tmp_path, commit_log_file_bytes=1 << 20, timer_log_file_bytes=1 << 16) as one:
        for number in range(600):
            one.at(100, b"%d" % number)
        await one.on_wheel(600)
        await one.pass_ms(100)
        assert one.bodies() == [b"%d" % number for number in range(600)]


async def test_what_the_store_refuses_is_tried_again(tmp_path, monkeypatch, caplog):
    async with timed(tmp_path) as one:
        put, is_full = one.store.put, [True]

        def refuse(message):
            return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="full") if is_full else put(message)

        one.at(20, b"a")
        one.at(20, b"b")
        await one.on_wheel(2)
        monkeypatch.setattr(one.store, "put", refuse)
        one.clock.ms += 20
        await one.until(lambda: "timed messages wait: SERVICE_NOT_AVAILABLE full" in caplog.text)
        is_full.clear()
        await one.until(lambda: one.bodies() == [b"a", b"b"])


async def test_a_refusal_that_lasts_is_reported_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rmqkit.broker.delay.timer._RETRY_MS", 1)
    async with timed(tmp_path) as one:
        put, refused = one.store.put, []

        def refuse(message):
            refused.append(message)
            return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="full")

        for count in (1, 2):
            one.at(20, b"a")
            await one.on_wheel(count)
            refused.clear()
            monkeypatch.setattr(one.store, "put", refuse)
            one.clock.ms += 20
            await one.until(lambda: len(refused) > 2)
            monkeypatch.setattr(one.store, "put", put)
            await one.until(lambda count=count: one.bodies() == [b"a"] * count)
            assert caplog.text.count("timed messages wait") == count


@pytest.mark.parametrize("properties", [{}, {"TIMER_OUT_MS": "x", "REAL_TOPIC": "T"}, {"TIMER_OUT_MS": "5"}])
async def test_what_says_no_time_or_topic_is_dropped(tmp_path, properties, caplog):
    async with timed(tmp_path) as one:
        one.store.put(message(TIMER_TOPIC, 0, **properties))
        one.at(20, b"next")
        await one.on_wheel(2)
        await one.pass_ms(20)
        assert one.bodies() == [b"next"]
        assert "timed message at 0 is dropped" in caplog.text


# -- what is written


async def test_a_broker_without_timed_messages_writes_nothing(tmp_path):
    async with timed(tmp_path) as one:
        one.store.put(message())
        await one.pass_ms(100_000)
        await one.timer.flush_round()
    assert list(tmp_path.glob("timer*")) == []
    assert not (tmp_path / "config" / "timercheck").exists()


@pytest.mark.parametrize("killed", [False, True])
async def test_after_a_restart_nothing_is_lost_and_what_was_flushed_is_not_repeated(tmp_path, killed, caplog):
    clock, root = StandingClock(NOW_MS), tmp_path / "store"
    async with timed(root, killed=killed, clock=clock) as one:
        for number, ahead_ms in enumerate([20, 400, 90_000, 30, 400]):
            one.at(ahead_ms, b"%d" % number)
        await one.on_wheel(5)
        await one.pass_ms(50)
        await one.timer.flush_round()
        await one.until(lambda: one.store.durable_offset == one.store.max_physical_offset)
        await one.timer.flush_round()
        one.at(300, b"behind the checkpoint")
        one.at(400, b"5")
        one.at(300, b"called back", UNIQ_KEY="U")
        one.at(300, b"0", UNIQ_KEY="U", TIMER_DEL_UNIQKEY="U")
        await one.on_wheel(9)
        assert one.bodies() == [b"0", b"3"]
    clock.ms += 5000
    async with timed(root.with_name("killed") if killed else root, clock=clock) as again:
        await again.pass_ms(0)
        assert again.bodies() == [b"0", b"3", b"behind the checkpoint", b"1", b"4", b"5"]
        assert again.timer.pending == 1
        await again.pass_ms(90_000)
        assert again.bodies()[-1] == b"2"
        checkpoint = decode_timer_checkpoint(again.timer.checkpoint())
        assert (checkpoint.last_read_time_ms, checkpoint.last_timer_queue_offset) == (clock.ms, 9)


async def test_what_was_recalled_is_not_delivered_without_a_checkpoint(tmp_path):
    """The process was killed in its first second."""
    clock, root = StandingClock(NOW_MS), tmp_path / "store"
    async with timed(root, killed=True, clock=clock) as one:
        one.at(300, b"called back", UNIQ_KEY="U")
        one.at(300, b"0", UNIQ_KEY="U", TIMER_DEL_UNIQKEY="U")
        one.at(200, b"a")
        await one.on_wheel(3)
    clock.ms += 5000
    async with timed(root.with_name("killed"), clock=clock) as again:
        await again.on_wheel(3)
        await again.pass_ms(0)
        assert again.bodies() == [b"a"]


async def test_without_its_files_the_timer_reads_its_topic_again(tmp_path, caplog):
    """A slave that becomes master has only the checkpoint of its master."""
    clock = StandingClock(NOW_MS)
    async with timed(tmp_path, clock=clock) as one:
        for ahead_ms, body in [(20, b"delivered"), (900, b"waiting")]:
            one.at(ahead_ms, body)
        await one.on_wheel(2)
        await one.pass_ms(50)
    shutil.rmtree(tmp_path / "timerlog")
    (tmp_path / "timerwheel").unlink()
    async with timed(tmp_path, clock=clock) as again:
        await again.on_wheel(2)
        assert again.timer.pending == 1
        await again.pass_ms(1000)
        assert again.bodies() == [b"delivered", b"waiting"]


async def test_the_waiting_messages_are_counted_by_topic(tmp_path):
    async with timed(tmp_path) as one:
        for number, topic in enumerate("AAB"):
            one.put(topic=topic, TIMER_DELIVER_MS=one.clock.ms + 1000, UNIQ_KEY=f"U{number}")
        one.put(b"0", topic="A", TIMER_DELIVER_MS=one.clock.ms + 1000, UNIQ_KEY="U0", TIMER_DEL_UNIQKEY="U0")
        await one.on_wheel(4)
        assert {topic: count.count for topic, count in one.timer.metrics.timing_count.items()} == {"A": 1, "B": 1}
        await one.pass_ms(1000)
        assert {topic: count.count for topic, count in one.timer.metrics.timing_count.items()} == {"A": 0, "B": 0}
    stored = json.loads((tmp_path / "config" / "timermetrics").read_text())
    assert {topic: count["count"] for topic, count in stored["timingCount"].items()} == {"A": 0, "B": 0}


async def test_waiting_messages_are_counted_by_the_time_within_which_they_are_due(tmp_path):
    async with timed(tmp_path) as one:
        # A message due at T is in the slot that begins at T - STEP_MS: the slot has to begin before a bound.
        for ahead_ms in (1000, 5000, 5000 + STEP_MS, 60_000, 60_000 + STEP_MS, 150_000):
            one.at(ahead_ms)
        await one.on_wheel(6)
        counts = await one.timer.due_within_s()
        assert counts == {5: 2, 60: 2, 300: 2, 900: 0, 3600: 0, 14_400: 0, 28_800: 0, 86_400: 0}
        assert one.timer.pending == sum(counts.values())


@pytest.mark.parametrize("follows", [True, False])
async def test_only_a_slave_takes_the_counts_of_its_master(tmp_path, follows):
    async with timed(tmp_path, follows=follows) as broker:
        own = broker.timer.metrics
        copied = TimerMetrics(DataVersion(7, 0, 7), {"T": TimingCount(2, 1)})
        broker.timer.take_counts(copied)
        taken = broker.timer.metrics
        assert (taken.timing_count == copied.timing_count) is follows
        assert (taken.data_version == copied.data_version) is follows
        if not follows:
            assert taken.timing_count == own.timing_count
        broker.timer.take_counts(TimerMetrics(DataVersion(7, 0, 7), {"T": TimingCount(9, 9)}))
        assert broker.timer.metrics.timing_count == taken.timing_count, "a version that is known says nothing new"


async def test_messages_that_retention_deleted_wait_no_longer(tmp_path):
    """Half of them lie in files of the timer log that could go, too; a recalled one was counted off by its marker."""
    options = {"disk_clean_forcibly_percent": 30, "delete_file_batch_max": 100, "timer_roll_window_slots": 60}
    async with timed(tmp_path, percent=lambda path: 60, **options) as one:
        for i in range(20):
            one.at(300 + i % 2 * 100, b"%d" % i + bytes(500), topic="TU"[i % 2], UNIQ_KEY=f"U{i}")
        one.at(400, b"", topic="U", UNIQ_KEY="V", TIMER_DEL_UNIQKEY="U1")
        await one.on_wheel(21)
        one.store.put(message(body=bytes(3000)))
        one.store.put(message(body=bytes(3000)))
        one.at(400, b"kept", topic="T")
        await one.on_wheel(22)
        one.store.retention_round()
        assert one.timer.pending == 20
        await one.flushed()
        await one.pass_ms(500)
        assert one.bodies() == [b"kept"]
        assert {topic: known.count for topic, known in one.timer.metrics.timing_count.items()} == {"T": 0, "U": 0}
        files = len(list((tmp_path / "timerlog").iterdir()))
        one.clock.ms += 60_000
        one.at(400)
        await one.on_wheel(23)
        await one.flushed()
        assert len(list((tmp_path / "timerlog").iterdir())) < files


async def test_what_comes_while_the_state_is_written_is_counted_once_after_a_kill(tmp_path):
    async with timed(tmp_path / "store", killed=True) as one:
        one.at(5000)
        await one.on_wheel(1)
        one.timer._snapshot_state()
        one.at(5000)
        await one.on_wheel(2)
        one.timer.state.write()
    async with timed(tmp_path / "killed") as one:
        await one.on_wheel(2)
        assert one.timer.pending == 2


async def test_a_message_further_ahead_than_a_unit_can_say_waits_in_stages(tmp_path):
    """With coarse steps the roll window is more than a unit's 31 bits of ms."""
    sizes = {"timer_precision_ms": 60_000, "timer_delay_seconds_max": 5_000_000, "timer_roll_window_slots": 172_800}
    async with timed(tmp_path, **sizes) as one:
        one.at(4_000_000_000, b"far")
        await one.on_wheel(1)
        for _ in range(3):
            await one.pass_ms(2_000_000_000)
        assert one.bodies() == [b"far"]


async def test_a_store_of_the_reference_continues(tmp_path, caplog):
    """One golden message waits for its hour, six are delivered."""
    golden = unpack_golden("5.4.0", tmp_path)
    caplog.set_level(logging.ERROR)
    due_ms = 1795229625440
    clock = StandingClock(due_ms - 1500)
    async with timed(golden.root, clock=clock, golden=golden_settings(golden)) as one:
        before = [[record.body for record in read_all(one.store, "GoldTimer", queue)] for queue in (0, 1)]
        assert one.timer.pending == 1
        clock.ms = due_ms + 600
        await one.until(lambda: one.store.max_offset("GoldTimer", 0) > len(before[0]))
        assert [record.body for record in read_all(one.store, "GoldTimer", 0)] == [*before[0], b"timer in 3600 s"]
        assert [record.body for record in read_all(one.store, "GoldTimer", 1)] == before[1]
        assert one.timer.pending == 0
    assert [one.message for one in caplog.records if one.name.startswith(("rmqkit.broker.", "rmqkit.store."))] == []


# -- at a slave


def told(one, read_ms, queue_offset, counter=1):
    """Return the timer checkpoint that a master sends."""
    return TimerCheckpoint(
        last_read_time_ms=now_of(one) + read_ms,
        master_timer_queue_offset=queue_offset,
        data_version=DataVersion(counter, 0, now_of(one) + counter),
    )


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_slave_has_on_its_wheel_what_its_master_has_and_continues_from_there(tmp_path, restarts):
    """Also as the master of its own store. What the master delivered is left out, what it never saw is not."""
    clock = StandingClock(NOW_MS)
    async with timed(tmp_path, clock=clock, follows=True) as slave:
        for ahead_ms, body in [(20, b"delivered"), (500, b"late"), (900, b"waiting"), (20, b"behind the master")]:
            slave.at(ahead_ms, body)
        slave.timer.replace_with(told(slave, 100, 1))
        await slave.until(lambda: slave.timer.state.queue_offset == 1)
        clock.ms += 600
        slave.timer.replace_with(told(slave, -500, 3, counter=2))
        slave.timer.take_counts(TimerMetrics(DataVersion(7, 0, 7), {"T": TimingCount(2, 1)}))
        await slave.until(lambda: slave.timer.state.queue_offset == 3)
        assert (slave.bodies(), slave.timer.pending) == ([], 2)
        stored = decode_timer_checkpoint(slave.timer.checkpoint())
        assert (stored.last_timer_queue_offset, stored.master_timer_queue_offset, stored.data_version.counter) == (
            3,
            3,
            2,
        )
        if not restarts:
            slave.timer.stop()
            slave.timer.start()
            await slave.until(lambda: len(slave.bodies()) == 2)
            await slave.pass_ms(400)
            assert slave.bodies() == [b"behind the master", b"late", b"waiting"]
            return
    async with timed(tmp_path, clock=clock) as master:
        await master.until(lambda: len(master.bodies()) == 2)
        await master.pass_ms(400)
        assert master.bodies() == [b"behind the master", b"late", b"waiting"]
        assert master.timer.pending == 0


async def test_an_acting_master_sends_what_is_due_elsewhere_and_the_master_leaves_that_out(tmp_path):
    """The second stage of a long wait is somebody else's, too. What the other broker refuses is tried again."""
    clock, sent, refused = StandingClock(NOW_MS), [], [True]

    async def put(message):
        if refused:
            refused.clear()
            return False
        sent.append((message.topic, message.body, decode_properties(message.properties)))
        return True

    async with timed(tmp_path / "slave", clock=clock, follows=True, timer_roll_window_slots=20) as slave:
        for ahead_ms, body in [(100, b"due"), (90, b"first"), (500, b"in two stages"), (160, b"waiting")]:
            slave.at(ahead_ms, body)
        slave.timer.replace_with(told(slave, 0, 1))
        await slave.until(lambda: slave.timer.state.queue_offset == 1)
        clock.ms += 120
        slave.timer.start(put)
        await slave.until(lambda: len(sent) == 2)
        late = message(TIMER_TOPIC, 0, b"late", TIMER_OUT_MS=NOW_MS + 50, REAL_TOPIC="T", REAL_QID=1)
        assert slave.store.put(late).status is PutStatus.OK
        await slave.until(lambda: slave.timer.offset_behind == 0)
        clock.ms += 100
        await slave.until(lambda: len(sent) == 5)
        bodies = [body for _, body, _ in sent]
        assert bodies == [b"first", b"due", b"late", b"waiting", b"in two stages"]
        assert {topic for topic, _, _ in sent} == {"T"}
        again = sent[4][2]
        assert again["TIMER_DELIVER_MS"] == str(NOW_MS + 500) and "TIMER_OUT_MS" not in again
        await slave.timer.stop_remote()
        acted = decode_timer_checkpoint(slave.timer.checkpoint())
        assert slave.timer.is_follower
        assert (acted.last_read_time_ms, acted.master_timer_queue_offset) == (NOW_MS + 220, slave.kept())
        assert acted.data_version.timestamp >= NOW_MS

    clock.ms = NOW_MS
    async with timed(tmp_path / "master", clock=clock) as master:
        for ahead_ms, body in [(100, b"due"), (90, b"late"), (50, b"not copied")]:
            master.at(ahead_ms, body)
        await master.on_wheel(3)
        acted.master_timer_queue_offset = 2
        master.timer.merge_forward(acted)
        master.timer.merge_forward(TimerCheckpoint(last_read_time_ms=1, data_version=DataVersion(0, 0, 1)))
        await master.pass_ms(300)
        assert master.bodies() == [b"not copied"]
        assert master.timer.pending == 0


def at_the_limit(topic, **asked):
    """A value that fills the properties of a timed message, as it is stored, to the last byte."""
    own = {"TIMER_OUT_MS": "1" * 13, "REAL_TOPIC": topic, "REAL_QID": "1", "UNIQ_KEY": "u"} | asked
    return "x" * (PROPERTIES_BYTES_MAX - len(encode_properties(own | {"a": "x"})) + 1)


async def test_a_message_with_the_largest_body_and_many_properties_is_delivered(tmp_path):
    async with timed(tmp_path / "s", commit_log_file_bytes=16 << 20) as one:
        body, value = bytes(range(256)) * (1 << 14), "x" * (30 << 10)
        one.put(body, a=value, TIMER_DELIVER_MS=now_of(one) + 20)
        await one.on_wheel(1)
        await one.pass_ms(40)
        (record,) = read_all(one.store, "T", 1)
        assert record.body == body
        assert decode_properties(record.properties)["a"] == value


@pytest.mark.parametrize("room", [0, 1, 30, 31, 61, 62, 63, 70])
@pytest.mark.parametrize("asks", ["TIMER_DELAY_MS", "TIMER_DELAY_SEC", "TIMER_DELIVER_MS"])
async def test_a_message_at_the_limit_of_properties_is_delivered(tmp_path, room, asks):
    """The timer adds 62 bytes when it is due; the message was acknowledged, and dropped then."""
    async with timed(tmp_path / "s", commit_log_file_bytes=1 << 20) as one:
        asked = {asks: {"TIMER_DELAY_MS": "1", "TIMER_DELAY_SEC": "1"}.get(asks, str(now_of(one) + 5))}
        value = at_the_limit("T", **asked)[room:]
        one.put(b"big", a=value, UNIQ_KEY="u", **asked)
        one.put(b"small", **asked)
        await one.on_wheel(2)
        await one.pass_ms(2000)
        assert sorted(one.bodies()) == [b"big", b"small"]
        [record] = [record for record in read_all(one.store, "T", 1) if record.body == b"big"]
        properties = decode_properties(record.properties)
        assert properties["a"] == value and "TIMER_DEQUEUE_MS" in properties and "TIMER_OUT_MS" in properties
        assert ("TIMER_ENQUEUE_MS" in properties) == (room >= 62)


async def test_a_parked_message_at_the_limit_of_properties_is_delivered(tmp_path):
    """Each stage of a long wait counts itself."""
    async with timed(tmp_path / "s", timer_roll_window_slots=20, commit_log_file_bytes=1 << 20) as one:
        asked = {"TIMER_DELAY_MS": "900"}
        value = at_the_limit("T", **asked)
        one.put(b"big", a=value, UNIQ_KEY="u", **asked)
        await one.on_wheel(1)
        for _ in range(100):
            await one.pass_ms(STEP_MS)
        assert one.kept() > 1, "it was parked more than once"
        assert one.bodies() == [b"big"]
        assert decode_properties(read_all(one.store, "T", 1)[0].properties)["a"] == value


async def test_a_lowered_message_size_does_not_refuse_what_was_accepted(tmp_path):
    async with timed(tmp_path / "s", message_bytes_max=2000) as one:
        one.at(100, b"x" * 2000)
        one.at(100, b"small")
        await one.on_wheel(2)
    async with timed(tmp_path / "s", message_bytes_max=1024, clock=one.clock) as again:
        await again.pass_ms(500)
        assert sorted(again.bodies()) == [b"small", b"x" * 2000]
