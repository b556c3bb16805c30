"""The judge of the fault tests finds each kind of fault."""

from __future__ import annotations

import pytest

from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.errors import HeaderError, SendFailed
from rmqkit.protocol.schemas.clients import MessageQueue
from tests.faults.client.ledger import Arrival, Ledger, Place, longest_stall
from tests.faults.client.proxy import FrameCursor


def ledger_of(*numbers: int) -> Ledger:
    """Return a ledger in which each number is stored at the offset of the same number."""
    ledger = Ledger()
    for number in numbers:
        queue = MessageQueue("T", "broker-a", 0)
        ledger.sent(number, SendResult(SendStatus.SEND_OK, f"K{number}", "", queue, number))
    return ledger


def arrival(number: int, *, at: float = 0.0, offset: int | None = None, member: str = "m") -> Arrival:
    return Arrival(number, Place("broker-a/0", number if offset is None else offset), member, at)


def test_what_was_acknowledged_and_never_came_is_lost() -> None:
    ledger = ledger_of(1, 2, 3)
    ledger.note("g", arrival(1))
    ledger.note("g", arrival(3))
    assert ledger.lost("g") == {2}


def test_what_was_never_sent_is_a_stranger_and_what_is_in_doubt_is_not() -> None:
    ledger = ledger_of(1)
    ledger.failed(2, SendFailed("T", [], ValueError()))
    for number in (1, 2, 3):
        ledger.note("g", arrival(number))
    assert (ledger.strangers("g"), ledger.lost("g"), ledger.undocumented) == ({3}, set(), [])


def test_an_error_that_send_does_not_document_is_reported() -> None:
    ledger, error = Ledger(), HeaderError("?")
    ledger.failed(1, error)
    assert ledger.undocumented == [error]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (arrival(1, at=0.01, offset=7), "stored twice"),
        (arrival(1, at=0.01, member="n"), "taken over"),
        (arrival(1, at=3.0), "taken over"),
        (arrival(1, at=0.01), "unexplained"),
        (Arrival(1, Place("broker-a/0", 9), "m", 1.0, is_retried=True), "sent back"),
    ],
)
def test_duplicates_are_explained_by_place_and_member(second: Arrival, why: str) -> None:
    ledger = ledger_of(1)
    ledger.note("g", arrival(1))
    ledger.note("g", second)
    assert ledger.duplicates("g") == {why: 1}
    assert ledger.oldest_taken_over("g") == (second.at if why == "taken over" else 0.0)


def test_order_may_go_back_and_must_not_leave_out() -> None:
    ledger = ledger_of()
    for at, number in enumerate([0, 1, 2, 1, 2, 3, 5]):
        ledger.note("g", arrival(number, at=at))
    assert ledger.order_broken("g") == ["broker-a/0: 5 was handled after 3"]


@pytest.mark.parametrize(
    ("stored", "consumed", "outages", "seconds"),
    [
        ([(0, 0), (1, 1)], [(0.5, 0), (1.5, 1)], [], 0.5),  # no message waited from 0.5 to 1
        ([(0, 0), (0, 1), (0, 2)], [(1, 0), (4, 1), (5, 2)], [], 3),  # the queue stood still from 1 to 4
        ([(0, 0), (2, 1)], [(9, 0), (9, 1)], [], 9),
        ([(0, 0), (2, 1)], [(9, 0), (9, 1)], [(1, 8)], 1),  # only the time after the outage counts
        ([(0, 0), (2, 1)], [(9, 0), (9, 1)], [(1, 8), (8, 20)], 0),
        ([(5, 0)], [(1, 0)], [], 0),  # the message arrived before the answer to the send
        ([(0, 0), (0, 1)], [(1, 0), (2, 0), (6, 1)], [], 4),  # repeated arrivals count as consumption too
    ],
)
def test_a_queue_stands_still_while_something_waits(
    stored: list[tuple[float, int]],
    consumed: list[tuple[float, int]],
    outages: list[tuple[float, float]],
    seconds: float,
) -> None:
    assert longest_stall(stored, consumed, outages).seconds == seconds


def test_what_is_stored_is_held_against_what_was_acknowledged() -> None:
    ledger, place = ledger_of(1), Place("broker-a/0", 1)
    ledger.check_stored({1: [(place, "K1")]}, tries=1)
    for stored in (
        {},
        {1: [(Place("broker-a/0", 2), "K1")]},
        {1: [(place, "other")]},
        {1: [(place, "K1")], 2: [(Place("broker-a/0", 2), "K2")]},
        {1: [(place, "K1"), (Place("broker-a/0", 2), "K1")]},
    ):
        with pytest.raises(AssertionError):
            ledger.check_stored(stored, tries=1)


def test_the_cursor_knows_where_frames_end() -> None:
    frames = b"".join(length.to_bytes(4) + bytes(length) for length in (1, 10, 300))
    whole, steps = FrameCursor(), FrameCursor()
    whole.feed(frames)
    inside = []
    for byte in frames:
        steps.feed(bytes([byte]))
        inside.append(steps.inside)
    assert (whole.inside, steps.inside) == (0, 0)
    assert inside == [1, 2, 3, 4, 0, *range(1, 14), 0, *range(1, 304), 0]
    whole.feed(frames[:-1])
    assert whole.inside == 303
