"""The messages that are skipped when the timer topic is read from its start again (store.md §18.6)."""

from __future__ import annotations

import pytest

from rmqkit.broker.delay.survey import Survey
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.schemas.brokers import TimerCheckpoint
from tests.broker.delay.stand import NOW_MS, Stand
from tests.store.stores import message

DUE_MS, LATER_MS = NOW_MS - 500, NOW_MS + 500_000


@pytest.fixture
async def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.close()


def surveyed(stand, *, is_unset=True):
    survey = Survey(stand.state, stand.store, stand.clock, is_unset=is_unset)
    assert not survey.run(float("inf"))
    return survey


def delivered(stand, time_ms, key, *, topic="T", queue=1, mark="TIMER_DEQUEUE_MS"):
    """Store a message as it is after its delivery."""
    properties = {"UNIQ_KEY": key, "TIMER_OUT_MS": time_ms, mark: time_ms}
    stand.store.put(message(topic, queue, **properties))


async def test_a_message_that_is_in_its_queue_is_left_out_once(stand):
    for _ in range(3):
        stand.keep(DUE_MS, UNIQ_KEY="K")
    stand.keep(DUE_MS, UNIQ_KEY="L")
    delivered(stand, DUE_MS, "K")
    survey = surveyed(stand)
    assert (len(survey.left_out), survey.waiting) == (1, 3), "a producer that retried has stored several messages"
    assert survey.left_out < {0, 1, 2}
    delivered(stand, DUE_MS, "K")
    assert surveyed(stand).waiting == 2


@pytest.mark.parametrize(
    "other",
    [
        {"time_ms": DUE_MS - 10},
        {"key": "L"},
        {"queue": 0},
        {"topic": "U"},
        {"mark": "TIMER_ENQUEUE_MS"},
    ],
)
async def test_another_message_in_the_queue_leaves_out_nothing(other, stand):
    stand.keep(DUE_MS, UNIQ_KEY="K")
    delivered(stand, **{"time_ms": DUE_MS, "key": "K"} | other)
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting) == (set(), 1)


async def test_a_message_whose_time_is_not_over_is_not_looked_for(stand):
    stand.keep(NOW_MS, UNIQ_KEY="K")
    stand.keep(NOW_MS + 1, UNIQ_KEY="K")
    delivered(stand, NOW_MS, "K")
    delivered(stand, NOW_MS + 1, "K")
    assert surveyed(stand).left_out == {0}


async def test_without_a_unique_key_a_message_is_left_out_by_the_checkpoint_only(stand):
    stand.keep(DUE_MS)
    stand.keep(DUE_MS)
    stand.store.put(message("T", 1, TIMER_OUT_MS=DUE_MS, TIMER_DEQUEUE_MS=DUE_MS))
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting) == (set(), 2)
    stand.state.master_progress = TimerCheckpoint(last_read_time_ms=NOW_MS, master_timer_queue_offset=1)
    assert surveyed(stand, is_unset=False).waiting == 1


async def test_with_a_checkpoint_the_queues_are_not_searched(stand):
    stand.keep(DUE_MS, UNIQ_KEY="K")
    delivered(stand, DUE_MS, "K")
    survey = surveyed(stand, is_unset=False)
    assert (survey.left_out, survey.waiting, survey.oldest_ms) == (set(), 1, None)


async def test_with_a_checkpoint_only_the_messages_after_it_are_read(stand):
    for _ in range(3):
        stand.keep(LATER_MS)
    stand.state.read_up_to(2)
    assert surveyed(stand, is_unset=False).waiting == 1
    assert surveyed(stand).waiting == 3


# -- stages


async def test_an_earlier_stage_is_left_out_for_each_later_one(stand):
    for rolls in ({}, {}, {"TIMER_ROLL_TIMES": 1}, {"TIMER_ROLL_TIMES": 2}, {"TIMER_ROLL_TIMES": 1}):
        stand.keep(LATER_MS, UNIQ_KEY="K", **rolls)
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting) == ({0, 1, 2}, 2)


@pytest.mark.parametrize(
    "later",
    [
        {"TIMER_ROLL_TIMES": 2},
        {"TIMER_ROLL_TIMES": 1, "UNIQ_KEY": "L"},
        {"TIMER_ROLL_TIMES": 1, "REAL_QID": 0},
        {"TIMER_ROLL_TIMES": "x"},
        {"TIMER_ROLL_TIMES": 1, "TIMER_DEL_UNIQKEY": "K"},
    ],
)
async def test_a_stage_of_another_message_leaves_out_nothing(later, stand):
    stand.keep(LATER_MS, UNIQ_KEY="K")
    stand.keep(LATER_MS, **{"UNIQ_KEY": "K"} | later)
    assert surveyed(stand).left_out == set()


@pytest.mark.parametrize(("ahead_ms", "left_out"), [(29_999, set()), (30_000, {0})])
async def test_a_message_may_have_stages_from_half_the_window_on(ahead_ms, left_out, stand):
    stand.keep(NOW_MS + ahead_ms, UNIQ_KEY="K")
    stand.keep(NOW_MS + ahead_ms, UNIQ_KEY="K", TIMER_ROLL_TIMES=1)
    assert surveyed(stand).left_out == left_out


# -- markers


async def test_a_marker_and_its_message_are_both_not_waiting(stand):
    stand.keep(LATER_MS, UNIQ_KEY="K")
    stand.keep(LATER_MS, UNIQ_KEY="M", TIMER_DEL_UNIQKEY="K")
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting) == (set(), 0)


@pytest.mark.parametrize(
    ("marker", "left_out"),
    [
        ({"TIMER_DEL_UNIQKEY": "K"}, {0}),
        ({"TIMER_DEL_UNIQKEY": "T+K"}, {0}),
        ({"TIMER_DEL_UNIQKEY": "U+K"}, set()),
        ({"TIMER_DEL_UNIQKEY": "K", "REAL_TOPIC": "U"}, set()),
        ({"TIMER_DEL_UNIQKEY": "K", "TIMER_OUT_MS": DUE_MS - 10}, set()),
    ],
)
async def test_a_message_that_was_recalled_before_its_time_is_left_out(marker, left_out, stand):
    stand.keep(DUE_MS, UNIQ_KEY="K")
    properties = {"REAL_TOPIC": "T", "REAL_QID": 0, "TIMER_OUT_MS": DUE_MS, "UNIQ_KEY": "M"}
    stand.store.put(message(TIMER_TOPIC, 0, **properties | marker))
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting) == (left_out, -len(left_out))


# -- where to begin


async def test_the_oldest_time_is_that_of_a_message_that_may_wait(stand):
    assert surveyed(stand).oldest_ms is None
    stand.keep(LATER_MS - 480_000)
    assert surveyed(stand).oldest_ms is None, "it is ahead, and has no stages"
    stand.keep(LATER_MS)
    assert surveyed(stand).oldest_ms == NOW_MS, "a stage may be due from the time when it was stored"
    stand.keep(DUE_MS, UNIQ_KEY="K")
    stand.keep(DUE_MS - 10, UNIQ_KEY="L")
    assert surveyed(stand).oldest_ms == DUE_MS - 10
    delivered(stand, DUE_MS - 10, "L")
    assert surveyed(stand).oldest_ms == DUE_MS


async def test_damaged_messages_are_neither_counted_nor_left_out(stand):
    for damage in ({"TIMER_OUT_MS": "x"}, {"TIMER_OUT_MS": "-5"}):
        stand.keep(LATER_MS, **damage)
    stand.store.put(message(TIMER_TOPIC, 0, TIMER_OUT_MS=LATER_MS, REAL_TOPIC="T"))
    stand.store.put(message(TIMER_TOPIC, 0, TIMER_OUT_MS=LATER_MS, REAL_QID=1))
    survey = surveyed(stand)
    assert (survey.left_out, survey.waiting, survey.oldest_ms) == (set(), 0, None)


async def test_a_survey_continues_where_its_time_was_up_and_ignores_later_messages(stand):
    for _ in range(25):
        stand.keep(LATER_MS)
    survey = Survey(stand.state, stand.store, stand.clock, is_unset=True)
    stand.keep(LATER_MS)
    steps = 0
    while survey.run(0):
        steps += 1
    assert (survey.waiting, steps) == (25, 3), "a read ends with a file of the queue, which has ten entries"
