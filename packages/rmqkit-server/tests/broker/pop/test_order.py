"""The table of messages that groups have popped in order (behaviour.md §4.14), on a clock that stands still."""

from __future__ import annotations

import pytest

from rmqkit.broker.pop.order import OrderTable
from rmqkit.testing.clock import StandingClock

NOW_MS = 1_800_000_000_000
DAY_MS = 86_400_000
PLACE = ("T", "g", 0)


@pytest.fixture
def clock():
    return StandingClock(NOW_MS)


@pytest.fixture
def table(tmp_path, clock):
    return OrderTable(tmp_path, clock)


def popped(table, *offsets, attempt_id=None, pop_time=NOW_MS, invisible_ms=1000):
    return table.popped(*PLACE, [*offsets], attempt_id=attempt_id, pop_time=pop_time, invisible_ms=invisible_ms)


def ack(table, offset, pop_time=NOW_MS, committed=0):
    return table.ack(*PLACE, offset, pop_time, committed=committed)


def test_a_pop_blocks_its_queue_until_its_invisible_time_is_over(table, clock):
    popped(table, 5, 6)
    assert table.blocked_until(*PLACE) == NOW_MS + 1000
    clock.ms += 999
    assert table.blocked_until(*PLACE) == NOW_MS + 1000
    clock.ms += 1
    assert table.blocked_until(*PLACE) is None


@pytest.mark.parametrize("place", [("U", "g", 0), ("T", "h", 0), ("T", "g", 1)])
def test_a_pop_blocks_no_other_topic_group_or_queue(table, place):
    popped(table, 5)
    assert table.blocked_until(*place) is None
    table.remove_queue(*place)
    assert table.blocked_until(*PLACE) is not None
    table.remove_queue(*PLACE)
    assert table.blocked_until(*PLACE) is None


def test_the_message_that_is_hidden_longest_counts(table, clock):
    popped(table, 5, 6, 8)
    table.change(*PLACE, 6, NOW_MS, NOW_MS + 3000)
    table.change(*PLACE, 8, NOW_MS, NOW_MS + 2000)
    assert table.blocked_until(*PLACE) == NOW_MS + 3000
    ack(table, 6)
    assert table.blocked_until(*PLACE) == NOW_MS + 2000
    clock.ms += 2000
    assert table.blocked_until(*PLACE) is None


@pytest.mark.parametrize(("offset", "pop_time"), [(7, NOW_MS), (6, NOW_MS - 1), (6, NOW_MS + 1)])
def test_a_new_time_for_a_message_of_another_pop_changes_nothing(table, offset, pop_time):
    popped(table, 5, 6, 8)
    table.change(*PLACE, offset, pop_time, NOW_MS + 3000)
    assert table.blocked_until(*PLACE) == NOW_MS + 1000


@pytest.mark.parametrize(
    ("before", "attempt", "is_free"), [("a", "a", True), ("a", "b", False), ("a", None, False), (None, None, False)]
)
def test_a_blocked_queue_is_free_for_the_same_attempt_only(table, before, attempt, is_free):
    popped(table, 5, attempt_id=before)
    assert (table.blocked_until(*PLACE, attempt) is None) is is_free


def test_deliveries_are_counted_for_each_message_and_once_for_an_attempt(table):
    assert popped(table, 5, 6, attempt_id="a") == {}
    assert popped(table, 5, 6, attempt_id="a") == {}
    assert popped(table, 6, 7, attempt_id="b") == {6: 1}
    assert popped(table, 6, 7, attempt_id="b") == {6: 1}
    assert popped(table, 6, 7, 8) == {6: 2, 7: 1}
    assert popped(table, 6, 8) == {6: 3, 8: 1}, "two pops without an attempt are two deliveries"
    assert popped(table, 20) == {}


def test_the_delivery_after_a_suspension_does_not_count(table, tmp_path, clock):
    popped(table, 5, 6, attempt_id="a")
    table.suspend(*PLACE, NOW_MS)
    table.suspend(*PLACE, NOW_MS)
    table.persist()
    table = OrderTable(tmp_path, clock)
    table.load()
    assert popped(table, 5, 6, attempt_id="b") == {}
    assert popped(table, 5, 6, attempt_id="c") == {5: 1, 6: 1}
    table.suspend(*PLACE, NOW_MS)
    assert popped(table, 5, 6, 7, attempt_id="d") == {5: 1, 6: 1}
    assert popped(table, 5, 6, 7, attempt_id="e") == {5: 2, 6: 2, 7: 1}


def test_a_suspension_with_a_handle_of_another_pop_changes_nothing(table):
    popped(table, 5)
    table.suspend(*PLACE, NOW_MS - 1)
    assert popped(table, 5) == {5: 1}
    table.suspend("U", "g", 0, NOW_MS)


def test_the_offset_goes_to_the_first_message_that_is_not_acknowledged(table):
    popped(table, 5, 6, 9)
    assert [ack(table, offset) for offset in (6, 5, 9)] == [5, 9, 10]


def test_an_ack_of_another_pop_counts_for_nothing(table):
    popped(table, 5, 6)
    assert ack(table, 5, NOW_MS - 1) is ack(table, 5, NOW_MS + 1) is None
    with pytest.raises(ValueError, match="7"):
        ack(table, 7)
    assert ack(table, 6) == 5


@pytest.mark.parametrize(("offset", "answer"), [(4, None), (5, 6), (6, None)])
def test_without_its_pop_only_the_committed_message_can_be_acknowledged(table, offset, answer):
    assert ack(table, offset, committed=5) == answer


def test_pops_are_written_for_a_day(table, clock):
    popped(table, 5)
    clock.ms += 1
    table.popped("T", "g", 1, [7], attempt_id=None, pop_time=clock.ms, invisible_ms=1000)
    clock.ms += DAY_MS - 1
    assert {key: [*queues] for key, queues in table.snapshot().table.items()} == {"T@g": [0, 1]}
    clock.ms += 1
    assert {key: [*queues] for key, queues in table.snapshot().table.items()} == {"T@g": [1]}
    clock.ms += 1
    assert table.snapshot().table == {}


@pytest.mark.parametrize(("set_back_ms", "blocked_ms"), [(0, 1000), (500, 1000), (-400, 600), (-1000, None)])
def test_after_a_restart_a_pop_is_hidden_for_its_invisible_time_at_most(
    table, clock, tmp_path, set_back_ms, blocked_ms
):
    popped(table, 5, 6)
    table.persist()
    clock.ms -= set_back_ms
    again = OrderTable(tmp_path, clock)
    again.load()
    until_ms = again.blocked_until(*PLACE)
    assert (until_ms and until_ms - clock.ms) == blocked_ms
    assert ack(again, 5) == 6
