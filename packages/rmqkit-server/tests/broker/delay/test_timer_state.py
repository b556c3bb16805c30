"""The positions and times of the timer, its bounds, and the progress that it reports (store.md §18.3, §18.6)."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from rmqkit.broker.delay.wheel import Enqueue, TimerState, roll_window_slots
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import decode_properties, java_hash
from rmqkit.protocol.schemas.brokers import TimerCheckpoint, TimerMetrics, TimingCount, decode_timer_checkpoint
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings
from rmqkit.testing.clock import StandingClock
from tests.broker.delay.stand import NOW_MS, STEP_MS, Stand
from tests.store.stores import message, small_settings

DAY_MS = 86_400_000
MAX_MS = 1_000_000


@pytest.fixture
async def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.close()


# -- the times that are accepted


@pytest.mark.parametrize(
    ("asked", "unit_ms", "out_ms"),
    [
        (0, 1, None),
        (-1, 1, None),
        (1, 1, NOW_MS),
        (10, 1, NOW_MS),
        (11, 1, NOW_MS + 10),
        (1000, 1000, NOW_MS + MAX_MS - 10),
        (1001, 1000, None),
        (NOW_MS, 0, None),
        (NOW_MS + 1, 0, NOW_MS),
        (NOW_MS + 21, 0, NOW_MS + 20),
        (NOW_MS + MAX_MS, 0, NOW_MS + MAX_MS - 10),
        (NOW_MS + MAX_MS + 1, 0, None),
    ],
)
async def test_a_time_is_kept_from_the_next_millisecond_to_the_longest_delay(asked, unit_ms, out_ms, stand):
    assert stand.timer.kept_until(asked, unit_ms) == out_ms


async def test_with_a_limit_of_messages_for_a_time_each_of_them_is_checked(tmp_path):
    stand = Stand(tmp_path, timer_slot_count_max=(1 << 31) - 2)
    assert stand.timer.kept_until(5000, 1) is None
    stand.close()


@pytest.mark.parametrize(("ahead_ms", "is_accepted"), [(0, False), (1, True), (MAX_MS, True), (MAX_MS + 1, False)])
async def test_a_marker_is_for_a_later_time_and_not_for_too_late_a_one(ahead_ms, is_accepted, stand):
    marker = message("T", TIMER_DELIVER_MS=NOW_MS + ahead_ms, TIMER_DEL_UNIQKEY="K")
    assert isinstance(stand.timer.schedule(marker), tuple) is not is_accepted


@pytest.mark.parametrize(
    ("count", "chance", "is_refused"),
    [
        (0, 0.0, False),
        (1, 0.0, False),
        (2, 0.0, False),
        (3, 0.47, True),
        (3, 0.48, False),
        (4, 0.99, True),
        (5, 0.99, True),
    ],
)
async def test_a_second_refuses_more_messages_the_fuller_it_is(count, chance, is_refused, tmp_path, monkeypatch):
    monkeypatch.setattr("random.random", lambda: chance)
    stand = Stand(tmp_path, timer_slot_count_max=2)
    for _ in range(count):
        stand.keep(NOW_MS + 5000)
    assert stand.timer.enqueue.run(None) is (count > 0)
    refusal = stand.timer.schedule(message("T", TIMER_DELIVER_MS=NOW_MS + 5001))
    assert isinstance(refusal, tuple) is is_refused
    stand.close()


# -- the window


@pytest.mark.parametrize(
    ("hours", "slots", "expected"),
    [(72, 6000, 6000), (72, 1 << 40, 72 * 3_600_000 * 2 // 3 // 10), (1, 1 << 40, 240_000), (0, 1 << 40, 214_748_364)],
)
def test_a_message_waits_on_the_wheel_for_two_thirds_of_the_retention_at_most(hours, slots, expected):
    settings = StoreSettings(file_reserved_hours=hours, timer_precision_ms=10, timer_roll_window_slots=slots)
    assert roll_window_slots(settings) == expected


@pytest.mark.parametrize(
    ("ahead_ms", "slot_ms"),
    [
        (0, 0),
        (59_990, 59_990),
        (60_000, 30_000),
        (79_990, 30_000),
        (80_000, 60_000),
        (500_000, 60_000),
    ],
)
async def test_a_message_beyond_the_window_waits_for_a_stage_that_leaves_a_third_of_it(ahead_ms, slot_ms, stand):
    stand.keep(NOW_MS + ahead_ms)
    assert stand.timer.enqueue.run(None)
    assert [slot.time_ms - NOW_MS for slot in stand.state.files.wheel.slots(NOW_MS, NOW_MS + DAY_MS)] == [slot_ms]


# -- positions and times


async def test_a_new_timer_begins_now(stand):
    state = stand.state
    assert (state.read_ms, state.write_ms, state.queue_offset) == (NOW_MS, NOW_MS, 0)
    assert (state.is_changed, state.needs_survey, state.is_unset) == (False, False, True)
    assert [state.floor(NOW_MS + ms) - NOW_MS for ms in (0, 1, 9, 10, 11)] == [0, 0, 0, 10, 10]


@pytest.mark.parametrize(
    ("stood_ms", "read_ms", "write_ms"),
    [
        (0, 0, 0),
        (15, 0, 0),
        (59_990, 0, 0),
        (60_000, 0, 60_000),
        (6_047_400, 0, 6_047_400),
        (6_047_410, 10, 6_047_410),
        (DAY_MS, DAY_MS - 6_047_400, DAY_MS),
    ],
)
async def test_a_timer_that_stood_still_continues_where_it_stopped_but_not_too_far_back(
    stood_ms, read_ms, write_ms, stand
):
    stand.clock.ms += stood_ms
    stand.state.place()
    assert (stand.state.read_ms - NOW_MS, stand.state.write_ms - NOW_MS) == (read_ms, write_ms)


async def test_the_read_time_follows_the_write_time_second_by_second(stand):
    state = stand.state
    with pytest.raises(AssertionError, match="no second is delivered before it is over"):
        state.pass_second()
    state.begin_second(NOW_MS + 20, is_follower=False)
    state.begin_second(NOW_MS + 10, is_follower=False)
    assert state.write_ms == NOW_MS + 20
    state.pass_second()
    assert (state.read_ms, state.is_changed) == (NOW_MS + 10, False), "an empty second changes no file"
    with pytest.raises(AssertionError, match="the read time moves second by second"):
        state.end_second(NOW_MS + 20)
    state.end_second(NOW_MS + 10)
    assert (state.read_ms, state.is_changed) == (NOW_MS + 20, True)
    with pytest.raises(AssertionError, match="no second is delivered before it is over"):
        state.pass_second()


async def test_a_follower_may_have_a_read_time_after_its_write_time(stand):
    state = stand.state
    state.follow_master(TimerCheckpoint(last_read_time_ms=NOW_MS + 50))
    state.begin_second(NOW_MS + 10, is_follower=True)
    assert (state.read_ms, state.write_ms) == (NOW_MS + 50, NOW_MS + 10)
    with pytest.raises(AssertionError, match="the read time is never after the write time"):
        state.begin_second(NOW_MS + 20, is_follower=False)


async def test_the_queue_offset_never_falls_and_stays_inside_the_queue(stand):
    for _ in range(3):
        stand.keep(NOW_MS + 500)
    state = stand.state
    state.read_up_to(2)
    assert (state.queue_offset, state.is_changed, stand.timer.offset_behind) == (2, True, 1)
    state.read_up_to(2)
    with pytest.raises(AssertionError, match="the queue offset never moves backwards"):
        state.read_up_to(1)
    with pytest.raises(AssertionError, match="the queue offset is inside the queue"):
        state.read_up_to(4)
    for offset, clamped in ((-1, 0), (2, 2), (3, 3), (4, 3)):
        state.queue_offset = offset
        assert (state.clamp(), state.queue_offset) == (3, clamped)


async def test_messages_that_retention_deleted_are_passed_over(stand, monkeypatch):
    for _ in range(4):
        stand.keep(NOW_MS + 500)
    low = stand.store.min_offset
    monkeypatch.setattr(
        stand.store, "min_offset", lambda topic, queue: 2 if (topic, queue) == (TIMER_TOPIC, 0) else low(topic, queue)
    )
    for offset, clamped in ((0, 2), (2, 2), (3, 3), (9, 4)):
        stand.state.queue_offset = offset
        assert (stand.state.clamp(), stand.state.queue_offset) == (4, clamped)
    stand.state.delivered_before = ((NOW_MS + 10, 3), (NOW_MS, 5))
    stand.state.clamp()
    assert stand.state.delivered_before == ((NOW_MS + 10, 3), (NOW_MS, 4))


@pytest.mark.parametrize(
    ("back_ms", "repeats", "read_ms"), [(10, False, NOW_MS), (20, False, NOW_MS), (30, True, NOW_MS - 10)]
)
async def test_a_clock_that_was_set_back_repeats_only_delivered_seconds(back_ms, repeats, read_ms, stand):
    state = stand.state
    for _ in range(3):
        stand.keep(NOW_MS + 500)
    state.read_up_to(3)
    state.is_changed = False
    state.counts_delivered = True
    state.begin_second(NOW_MS + 20, is_follower=False)
    assert state.step_back(NOW_MS + 20 - back_ms) is repeats
    assert (state.read_ms, state.write_ms) == (read_ms, NOW_MS + 20 - back_ms)
    assert (state.is_changed, state.counts_delivered) == (repeats, not repeats)
    assert state.was_delivered(NOW_MS - 10, 2) is repeats
    assert not state.was_delivered(NOW_MS, 2)
    assert not state.was_delivered(NOW_MS - 10, 3)


@pytest.mark.parametrize(("back_slots", "reaches"), [(0, True), (604_740, True), (604_741, False)])
async def test_the_read_time_moves_back_by_at_most_seven_days(back_slots, reaches, stand):
    time_ms = NOW_MS - back_slots * STEP_MS
    assert stand.state.reach_back(time_ms) is reaches
    assert stand.state.read_ms == (time_ms if reaches else NOW_MS)
    stand.state.read_ms = NOW_MS - 604_740 * STEP_MS
    assert stand.state.reach_back(NOW_MS)
    assert stand.state.read_ms == NOW_MS - 604_740 * STEP_MS


@pytest.mark.parametrize(("ahead_ms", "read_ms"), [(-10, -10), (0, 0), (10, 0)])
async def test_a_start_moves_the_read_time_only_back_and_remembers_it(ahead_ms, read_ms, stand):
    state = stand.state
    stand.keep(NOW_MS + 500)
    state.read_up_to(1)
    stand.clock.ms += ahead_ms
    state.begin()
    assert state.read_ms == state.write_ms == NOW_MS + read_ms
    assert state.was_delivered(NOW_MS - 10, 0)
    assert not state.was_delivered(NOW_MS, 0)
    assert not state.was_delivered(NOW_MS - 10, 1)


async def test_with_many_steps_of_the_clock_the_newest_sixteen_are_remembered(stand):
    state = stand.state
    for step in range(18):
        stand.keep(NOW_MS + 500)
        state.read_up_to(step + 1)
        state.read_ms = state.write_ms = NOW_MS - step * 100
        for _ in range(2):  # the second call changes nothing
            state.keep_delivered()
    assert state.delivered_before == tuple((NOW_MS - step * 100, step + 1) for step in range(2, 18))
    state.read_ms = state.write_ms = NOW_MS - 50
    state.keep_delivered()
    assert state.delivered_before == ((NOW_MS - 50, 18),)


async def test_a_clock_that_was_not_set_back_is_a_mistake_of_the_caller(stand):
    with pytest.raises(AssertionError, match="a clock that was set back is before the current second"):
        stand.state.step_back(NOW_MS)


@pytest.mark.parametrize(
    ("time_ms", "offset", "was_delivered"), [(49, 6, True), (50, 6, False), (49, 7, False), (0, 0, True)]
)
async def test_a_message_was_delivered_if_time_and_offset_are_before_the_progress(
    time_ms, offset, was_delivered, stand
):
    stand.state.master_progress = TimerCheckpoint(last_read_time_ms=50, master_timer_queue_offset=7)
    assert stand.state.was_delivered(time_ms, offset) is was_delivered


@pytest.mark.parametrize(
    ("timestamp", "read_ms", "is_adopted"), [(4, 50, False), (5, 50, True), (6, 50, True), (6, 0, False)]
)
async def test_the_progress_of_another_member_is_adopted_unless_it_is_older_or_empty(
    timestamp, read_ms, is_adopted, stand
):
    state = stand.state
    state.master_progress = TimerCheckpoint(last_read_time_ms=1, data_version=DataVersion(timestamp=5))
    progress = TimerCheckpoint(last_read_time_ms=read_ms, data_version=DataVersion(timestamp=timestamp))
    stand.timer.merge_forward(progress)
    assert (state.master_progress == progress, state.counts_delivered) == (is_adopted, is_adopted)


@pytest.mark.parametrize(("offset", "is_changed"), [(0, False), (1, True)])
async def test_a_slave_writes_its_masters_progress_when_it_has_any(offset, is_changed, stand):
    state = stand.state
    progress = TimerCheckpoint(last_read_time_ms=7, master_timer_queue_offset=offset)
    state.follow_master(progress)
    assert (state.is_changed, state.read_ms, state.master_progress) == (is_changed, 7, progress)
    state.is_changed = False
    state.follow_master(msgspec.structs.replace(progress))
    assert not state.is_changed, "the same progress"


@pytest.mark.parametrize("oldest_ms", [None, NOW_MS - 25, NOW_MS + 25])
async def test_a_survey_without_a_checkpoint_begins_at_its_oldest_message_or_now(oldest_ms, stand):
    state = stand.state
    state.needs_survey, state.left_out = True, {1}
    stand.clock.ms += 5
    state.end_survey({2, 3}, oldest_ms)
    assert (state.left_out, state.needs_survey) == ({1, 2, 3}, False)
    assert state.read_ms == (NOW_MS - 30 if oldest_ms == NOW_MS - 25 else NOW_MS)


async def test_a_second_is_the_reason_of_one_rebuild_only(stand):
    assert stand.state.may_rebuild(NOW_MS)
    stand.state.start_over(RuntimeError("damaged"), delivered=())  # type: ignore[arg-type]
    assert not stand.state.may_rebuild(NOW_MS)
    assert stand.state.may_rebuild(NOW_MS + STEP_MS)
    assert (stand.state.queue_offset, stand.state.needs_survey, stand.state.is_changed) == (0, True, True)


# -- counts


async def test_waiting_messages_are_counted_by_topic(stand):
    state = stand.state
    state.count(Counter())
    assert state.metrics.data_version == DataVersion(0, 0, 0)
    state.count(Counter(T=3, U=1))
    stand.clock.ms += 1
    state.count(Counter(T=1), -1)
    assert state.metrics.timing_count == {"T": TimingCount(2, NOW_MS + 1), "U": TimingCount(1, NOW_MS)}
    assert state.metrics.data_version == DataVersion(2, 0, NOW_MS + 1)
    assert stand.timer.pending == 3
    state.count(Counter(U=2), -1)
    assert stand.timer.pending == 2, "a count below 0 does not hide the others"


async def test_skipped_messages_are_subtracted_from_the_topics_that_wait(stand):
    state = stand.state
    state.count(Counter(T=3, U=0))
    state.count_gone(Counter({java_hash("T"): 2, java_hash("U"): 1, 12345: 4}))
    assert {topic: one.count for topic, one in state.metrics.timing_count.items()} == {"T": 1, "U": 0}


async def test_delays_are_measured_by_topic(stand):
    for topic, seconds in (("T", 1), ("T", 100), ("U", 5)):
        stand.state.measure(topic, seconds)
    assert {topic: sum(one.counts) for topic, one in stand.state.delay_seconds.items()} == {"T": 2, "U": 1}


@pytest.mark.parametrize("is_follower", [True, False])
async def test_only_a_slave_replaces_its_counts_and_only_by_another_version(is_follower, stand):
    stand.timer.is_follower = is_follower
    copied = TimerMetrics(DataVersion(3, 0, 5), {"T": TimingCount(7, 1)}, {5: 1})
    stand.timer.take_counts(copied)
    expected = TimerMetrics(DataVersion(3, 0, 5), {"T": TimingCount(7, 1)}) if is_follower else TimerMetrics()
    assert stand.timer.metrics == expected
    stand.timer.take_counts(TimerMetrics(DataVersion(3, 0, 5), {"T": TimingCount(8, 1)}))
    assert stand.timer.metrics == expected


# -- what it reports


async def test_the_delay_of_the_timer_is_that_of_its_oldest_second_and_message(stand):
    timer = stand.timer
    assert (timer.read_behind_ms, timer.offset_behind, timer.enqueue_behind_ms) == (0, 0, 0)
    stand.keep(NOW_MS + 500)
    stand.clock.ms += 25
    assert (timer.read_behind_ms, timer.offset_behind, timer.enqueue_behind_ms) == (20, 1, 25)
    timer.enqueue.run(None)
    assert (timer.offset_behind, timer.enqueue_behind_ms) == (0, 0)
    stand.clock.ms -= 100
    assert timer.read_behind_ms == 0


async def test_messages_are_counted_in_the_first_span_within_which_they_are_due(stand):
    for ahead_ms in (4990, 5000, 59_990):
        stand.keep(NOW_MS + ahead_ms)
    stand.timer.enqueue.run(None)
    counts = await stand.timer.due_within_s()
    assert counts == {5: 1, 60: 2, 300: 0, 900: 0, 3600: 0, 14_400: 0, 28_800: 0, 86_400: 0}


async def test_rates_are_those_since_the_last_sample(stand):
    state = stand.state
    state.enqueued["T"], state.dequeued["T"] = 6, 4
    await stand.timer.flush_round()
    assert stand.timer.rates == [0.0, 0.0], "no time has passed"
    stand.clock.ms += 2000
    await stand.timer.flush_round()
    assert stand.timer.rates == [3.0, 2.0]
    state.enqueued["U"] += 5
    stand.clock.ms += 500
    await stand.timer.flush_round()
    assert stand.timer.rates == [10.0, 0.0]


async def test_an_unchanged_state_is_written_once_a_minute(stand, monkeypatch):
    taken = []
    take = stand.state.take

    def counted(**options):
        taken.append(int(stand.clock.ms) - NOW_MS)
        take(**options)

    monkeypatch.setattr(stand.state, "take", counted)
    await stand.timer.flush_round()
    stand.clock.ms += 60_001
    await stand.timer.flush_round()
    assert taken == [], "a broker without timed messages writes nothing"
    stand.keep(NOW_MS + 500_000)
    stand.timer.enqueue.run(None)
    await stand.on_disk()
    for ms in (0, 59_000, 1000, 1):
        stand.clock.ms += ms
        await stand.timer.flush_round()
    assert taken == [60_001, 120_002]


async def test_the_state_is_written_when_its_records_are_on_the_disk(stand, monkeypatch):
    written = []
    monkeypatch.setattr(stand.state, "write", lambda: written.append(stand.store.durable_offset))
    stand.keep(NOW_MS + 500)
    stand.timer.enqueue.run(None)
    end_offset = stand.store.max_physical_offset
    await stand.timer.flush_round()
    await stand.on_disk()
    await stand.timer.flush_round()
    assert set(written) == {end_offset}


async def test_the_log_is_needed_from_the_oldest_message_that_may_wait(stand):
    assert stand.timer.needed_from() is None
    first = stand.keep(NOW_MS + 500)
    assert stand.timer.needed_from() == first.physical_offset
    stand.timer.enqueue.run(None)
    assert stand.timer.needed_from() == first.physical_offset, "it waits on the wheel"
    stand.clock.ms += 60_001
    second = stand.keep(NOW_MS + 90_000)
    stand.state.read_ms = NOW_MS + 60_001
    assert stand.timer.needed_from() == second.physical_offset
    stand.state.metrics.timing_count.clear()
    stand.timer.enqueue.run(None)
    stand.state.metrics.timing_count.clear()
    assert stand.timer.needed_from() is None


async def test_a_master_reports_the_newest_progress_whose_log_a_slave_has(stand):
    def reported():
        return decode_timer_checkpoint(stand.timer.checkpoint()).last_read_time_ms - NOW_MS

    assert reported() == 0
    places = []
    for step in range(1, 4):
        stand.state.read_ms = NOW_MS + step
        places.append(stand.keep(NOW_MS + 500).end_offset)
        assert reported() == step, "without a slave there is nobody to mislead"
    stand.copied = places[0]
    assert reported() == 3
    for step, copied, expected in ((4, 0, 3), (5, 0, 3), (6, 1, 3), (7, 2, 3)):
        stand.state.read_ms = NOW_MS + step
        stand.keep(NOW_MS + 500)
        stand.copied = places[copied]
        assert reported() == expected
    stand.copied = stand.store.max_physical_offset
    assert reported() == 7
    stand.copied = 0
    stand.state.read_ms = NOW_MS + 8
    stand.keep(NOW_MS + 500)
    assert reported() == 7, "what a slave had once it still has"


async def test_a_master_remembers_no_more_unreported_progress_than_its_bound(stand, monkeypatch):
    monkeypatch.setattr("rmqkit.broker.delay.timer._UNPUBLISHED_MAX", 3)
    stand.copied = 0
    for step in range(1, 6):
        stand.state.read_ms = NOW_MS + step
        stand.keep(NOW_MS + 500)
        assert decode_timer_checkpoint(stand.timer.checkpoint()).last_read_time_ms == NOW_MS + 1
    stand.copied = stand.store.max_physical_offset
    assert decode_timer_checkpoint(stand.timer.checkpoint()).last_read_time_ms == NOW_MS + 3


async def test_a_follower_and_an_acting_master_report_their_newest_progress(stand):
    stand.copied = 0
    stand.keep(NOW_MS + 500)
    stand.timer.checkpoint()
    stand.state.read_ms = NOW_MS + 9
    stand.timer.is_follower = True
    assert decode_timer_checkpoint(stand.timer.checkpoint()).last_read_time_ms == NOW_MS + 9


async def test_a_follower_reports_its_masters_queue_offset_and_a_master_its_own(stand):
    state = stand.state
    for _ in range(3):
        stand.keep(NOW_MS + 500)
    state.read_up_to(2)
    state.master_progress = TimerCheckpoint(master_timer_queue_offset=1, data_version=DataVersion(9, 0, 9))
    own, followed = state.checkpoint(is_follower=False), state.checkpoint(is_follower=True)
    assert (own.last_timer_queue_offset, own.master_timer_queue_offset, own.data_version.counter) == (2, 2, 0)
    assert (followed.last_timer_queue_offset, followed.master_timer_queue_offset) == (1, 1)
    assert followed.data_version == DataVersion(9, 0, 9)
    state.master_progress = TimerCheckpoint(master_timer_queue_offset=3)
    followed = state.checkpoint(is_follower=True)
    assert (followed.last_timer_queue_offset, followed.master_timer_queue_offset) == (2, 3)


# -- the topic


async def test_a_follower_puts_the_messages_of_its_masters_wheel_only(stand):
    for _ in range(3):
        stand.keep(NOW_MS + 500)
    assert not stand.timer.enqueue.run(0)
    assert stand.timer.enqueue.run(2)
    assert stand.state.queue_offset == 2
    assert not stand.timer.enqueue.run(2)
    assert not stand.timer.enqueue.run(1)
    assert stand.timer.enqueue.run(None)
    assert stand.state.queue_offset == 3


@pytest.mark.parametrize("properties", [{"TIMER_OUT_MS": "x"}, {"TIMER_OUT_MS": "1" * 19}])
async def test_a_message_without_a_readable_time_is_dropped_and_the_others_are_not(properties, stand, caplog):
    stand.keep(NOW_MS + 500, **properties)
    stand.keep(NOW_MS + 500)
    stand.timer.enqueue.run(None)
    assert (stand.state.queue_offset, stand.timer.pending) == (2, 1)
    assert [line.partition(":")[0] for line in caplog.messages] == ["timed message at 0 is dropped"]


async def test_messages_that_are_left_out_or_were_delivered_are_not_put_on_the_wheel(stand):
    for _ in range(3):
        stand.keep(NOW_MS + 500)
    stand.state.left_out = {1}
    stand.state.master_progress = TimerCheckpoint(last_read_time_ms=NOW_MS + 501, master_timer_queue_offset=1)
    stand.timer.enqueue.run(None)
    (slot,) = stand.state.files.wheel.slots(NOW_MS, NOW_MS + 1000)
    assert (slot.pending, stand.timer.pending, stand.state.enqueued) == (1, 1, Counter(T=1))


async def test_a_late_message_is_delivered_at_once_and_a_late_marker_is_dropped(stand):
    delivered = []
    enqueue = Enqueue(stand.state, stand.store, stand.settings, lambda record: delivered.append(record.queue_offset))
    for ahead_ms, properties in ((-10, {}), (-10, {"TIMER_DEL_UNIQKEY": "K"}), (0, {}), (-1, {})):
        stand.keep(NOW_MS + ahead_ms, **properties)
    assert enqueue.run(None)
    assert delivered == [0, 3], "a time is rounded down"
    assert (stand.state.queue_offset, stand.timer.pending) == (4, 1)


async def test_a_marker_is_subtracted_from_the_waiting_messages(stand):
    for properties in ({}, {}, {"TIMER_DEL_UNIQKEY": "K"}):
        stand.keep(NOW_MS + 500, **properties)
    stand.timer.enqueue.run(None)
    assert (stand.timer.pending, stand.state.enqueued) == (1, Counter(T=3))


async def test_the_delay_of_a_message_counts_from_its_birth(stand):
    stand.state.is_measured = True
    stand.keep(NOW_MS + 500, born_timestamp=NOW_MS - 2499)
    stand.keep(NOW_MS + 500, born_timestamp=NOW_MS - 2500)
    measured = []
    stand.state.measure = lambda topic, seconds: measured.append((topic, seconds))  # type: ignore[method-assign]
    stand.timer.enqueue.run(None)
    assert measured == [("T", 2), ("T", 3)]


async def test_records_are_read_in_one_piece_or_one_by_one_with_the_same_result(stand):
    puts = [stand.keep(NOW_MS + 500, number=number) for number in range(3)]
    places = [(one.physical_offset, one.end_offset - one.physical_offset) for one in puts]
    expected = [bytes(stand.store.log.copy(*place)) for place in places]
    for chosen in ([0, 1, 2], [2, 0], [1], [0, 2, 1, 0]):
        copies = stand.state.copies([places[one] for one in chosen])
        assert [bytes(copy) for copy in copies] == [expected[one] for one in chosen]
    assert stand.state.copies([(-1, 0), places[0]])[0] is None
    record = stand.state.record(*places[1])
    assert decode_properties(record.properties)["number"] == "1"


async def test_a_record_of_another_topic_is_no_timed_message(stand):
    put = stand.store.put(message("T", 0))
    assert stand.state.record(put.physical_offset, put.end_offset - put.physical_offset) is None
    assert stand.state.record(1 << 40, 100) is None


def test_the_state_of_a_timer_begins_without_progress(tmp_path):
    settings = small_settings(timer_precision_ms=1000, timer_roll_window_slots=60)
    store = MessageStore(tmp_path, settings, clock=StandingClock(NOW_MS))
    state = TimerState(store, settings, StandingClock(NOW_MS))
    assert (state.window_ms, state.precision_ms, state.is_measured) == (60_000, 1000, False)
    assert not state.was_delivered(0, 0)


# ---------------------------------------------------------------- a slave that acted for its master


def _of_master(read_ms, queue_offset):
    version = DataVersion(1, 0, read_ms)
    return TimerCheckpoint(last_read_time_ms=read_ms, master_timer_queue_offset=queue_offset, data_version=version)


async def _acted(stand):
    """Let a slave deliver for its master, and stop when the master returns. Return the slave's progress."""

    async def put(_):
        raise AssertionError("no message is due")

    stand.timer.follow()
    stand.timer.replace_with(_of_master(NOW_MS - 1000, 0))
    stand.timer.start(put)
    await stand.timer.stop_remote()
    stand.timer.stop()
    return stand.state.master_progress


async def test_a_returned_master_gets_the_progress_of_the_slave_that_acted(stand):
    newest = await _acted(stand)
    older = _of_master(NOW_MS - 2000, 0)
    stand.timer.replace_with(older)
    assert stand.state.master_progress == newest
    assert decode_timer_checkpoint(stand.timer.checkpoint()).last_read_time_ms == newest.last_read_time_ms
    stand.timer.replace_with(older)
    assert stand.state.master_progress == older


@pytest.mark.parametrize(("waited_ms", "is_adopted"), [(29_999, False), (30_000, True)])
async def test_a_slave_follows_a_master_that_never_asks_for_its_progress(waited_ms, is_adopted, stand):
    newest = await _acted(stand)
    stand.clock.ms += waited_ms
    older = _of_master(NOW_MS - 2000, 0)
    stand.timer.replace_with(older)
    assert stand.state.master_progress == (older if is_adopted else newest)
