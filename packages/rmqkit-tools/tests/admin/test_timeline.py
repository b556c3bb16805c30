"""Timelines over the literal facts of `tests.admin.test_explain`: every cause has one, and it is in order."""

from __future__ import annotations

import pytest

from rmqkit.admin.diagnosis.causes import Cause, Facts, judge
from rmqkit.admin.diagnosis.timeline import Event, merged, timeline
from tests.admin.test_explain import (
    CASES,
    HALF,
    NOW_MS,
    RETRIED,
    SCHEDULED,
    TO_RETRY,
    TRACE,
    facts,
    message,
    nothing,
    place,
)


@pytest.mark.parametrize("case", CASES)
def test_every_cause_has_a_timeline_in_order(case: str) -> None:
    known, cause, _ = CASES[case]
    events = timeline(known)
    keys = [(event.is_due, event.at_ms) for event in events]
    assert keys == sorted(keys)
    assert judge(known).cause is cause
    assert bool(events) == (known.message is not None or bool(known.copies))
    assert all(event.what and event.source for event in events)


def test_all_causes_are_among_the_cases() -> None:
    assert {cause for _, cause, _ in CASES.values()} >= set(Cause) - {Cause.NOT_IN_CLUSTER}


def words(known: Facts) -> list[str]:
    return [event.what for event in timeline(known)]


def test_a_message_that_waits() -> None:
    assert words(facts()) == ["sent by its producer", "stored in Orders", "group has not reached it: 7 before it"]


def test_a_message_that_was_consumed_with_a_trace() -> None:
    told = words(facts(place=place(18), traces=[TRACE]))
    assert told[-2:] == ["handler began: success after 3 ms", "group is past it: its offset is 18, past 17"]


def test_a_message_that_failed_and_is_redelivered() -> None:
    events = timeline(facts(copies=[TO_RETRY], due_ms=NOW_MS + 9_000, place=place(18)))
    assert [event.what for event in events[-2:]] == ["failed: retry 2 follows later", "will be delivered"]
    assert (events[-1].is_due, events[-1].at_ms) == (True, NOW_MS + 9_000)
    assert words(facts(copies=[RETRIED]))[-1] == "retry 2 can be consumed"


def test_a_delayed_and_a_half_message() -> None:
    late = nothing(copies=[SCHEDULED], due_ms=NOW_MS - 60_000)
    assert words(late) == ["its time came", "sent by its producer", "waiting for its delay"]
    assert words(nothing(copies=[HALF])) == [
        "sent by its producer",
        "half message: its producer was asked, check 4",
    ]


def test_a_dead_letter() -> None:
    dead = message("%DLQ%billing", retries=16)
    silent = "given up after 16 failed tries, its consumer gave no reason: it is a dead letter"
    assert silent in words(facts(copies=[dead]))
    dead.properties |= {"rmqkit_reason": "ValueError: no stock", "rmqkit_handler": "shop.bill"}
    told = "given up after 16 failed tries, ValueError: no stock in shop.bill: it is a dead letter"
    assert told in words(facts(copies=[dead]))
    hidden = "given up after 16 failed tries, its reason is hidden from you here: it is a dead letter"
    assert hidden in words(facts(copies=[dead], hides_bodies=True))


def test_timelines_of_several_groups_are_one() -> None:
    one, other = timeline(facts()), timeline(facts(place=place(18)))
    joined = merged([one, other])
    assert len(joined) == len(one) + len(other) - 2  # sent and stored are the same for both
    assert merged([[Event(2, "b", source="s"), Event(1, "a", source="s", is_due=True)]])[0].what == "b"
