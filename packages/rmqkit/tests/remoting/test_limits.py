"""The limits of all connections of a server: exact bounds, and figures that agree with what each connection holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.remoting.limits import ConnectionSettings, Limits

MIB = 1 << 20
BOUND = 32 * MIB
SETTINGS = ConnectionSettings(
    connections_max=16, connections_per_address_max=16, incomplete_bytes_max=BOUND, unsent_bytes_max=BOUND
)


class Peer:
    """A connection that reports its end when it is cut, as the real one does."""

    def __init__(self, limits: Limits, name: str = "10.0.0.1:1") -> None:
        self.limits = limits
        self.peer = name
        self.unsent_bytes = 0
        self.reasons: list[str] = []

    def cut(self, reason: str) -> None:
        self.reasons.append(reason)
        self.limits.closed(self, None)

    def holds(self, unsent_bytes: int) -> None:
        self.unsent_bytes = unsent_bytes
        self.limits.note_waiting(self, unsent_bytes)


@pytest.fixture
def limits() -> Limits:
    return Limits(SETTINGS)


def opened(limits: Limits, count: int) -> list[Peer]:
    peers = [Peer(limits, f"10.0.0.{number}:1") for number in range(count)]
    assert all(limits.opened(peer, None) for peer in peers)
    return peers


# -- how many there are


def test_as_many_connections_as_the_limit_are_accepted(limits: Limits) -> None:
    peers = opened(limits, 16)
    extra = Peer(limits)
    assert not limits.opened(extra, None)
    assert (limits.count, limits.refused) == (17, {"all": 1, "address": 0})
    limits.closed(extra, None)
    limits.closed(peers[0], None)
    assert limits.opened(Peer(limits), None)
    assert limits.count == 16


def test_an_address_has_a_limit_of_its_own() -> None:
    limits = Limits(ConnectionSettings(connections_max=64, connections_per_address_max=16))
    for number in range(16):
        assert limits.opened(Peer(limits, f"one:{number}"), "10.0.0.1")
    assert limits.opened(Peer(limits), "10.0.0.2")
    extra = Peer(limits)
    assert not limits.opened(extra, "10.0.0.1")
    assert limits.refused == {"all": 0, "address": 1}
    limits.closed(extra, "10.0.0.1")
    assert not limits.opened(Peer(limits), "10.0.0.1"), "a refused connection frees only its own place"


# -- incomplete frames


def test_the_oldest_incomplete_frame_is_cut_beyond_the_bound(limits: Limits) -> None:
    first, second, third = opened(limits, 3)
    limits.note_incomplete(first, 10 * MIB, is_new=True)
    limits.note_incomplete(second, 22 * MIB, is_new=True)
    assert (limits.incomplete_bytes, limits.cut) == (BOUND, 0), "exactly the bound is not too much"
    limits.note_incomplete(third, 1, is_new=True)
    assert [len(one.reasons) for one in (first, second, third)] == [1, 0, 0]
    assert (limits.incomplete_bytes, limits.cut, limits.count) == (22 * MIB + 1, 1, 2)
    assert first.reasons == [f"incomplete frames take more than maxIncompleteFrameBytes={BOUND}"]


def test_a_new_frame_makes_a_connection_the_youngest_and_more_of_the_same_frame_does_not(limits: Limits) -> None:
    first, second, third = opened(limits, 3)
    for peer in (first, second):
        limits.note_incomplete(peer, 10 * MIB, is_new=True)
    limits.note_incomplete(first, 12 * MIB, is_new=True)
    limits.note_incomplete(second, 13 * MIB, is_new=False)
    assert limits.incomplete_bytes == 25 * MIB
    limits.note_incomplete(third, 8 * MIB, is_new=True)
    assert [len(one.reasons) for one in (first, second, third)] == [0, 1, 0]


def test_a_connection_without_a_frame_before_counts_from_nothing(limits: Limits) -> None:
    (peer,) = opened(limits, 1)
    limits.note_incomplete(peer, 5, is_new=False)
    assert limits.incomplete_bytes == 5
    limits.note_incomplete(peer, 0, is_new=False)
    assert limits.incomplete_bytes == 0


# -- answers that peers do not take


def test_beyond_the_bound_those_that_hold_most_are_cut(limits: Limits) -> None:
    peers = opened(limits, 8)
    for number, peer in enumerate(peers, 1):
        assert not any(one.reasons for one in peers), "28 MiB are not too much"
        peer.holds(number * MIB)
    assert [len(peer.reasons) for peer in peers] == [0, 0, 0, 0, 0, 0, 1, 1]
    reason = f"answers that peers do not take are more than maxUnsentBytes={BOUND}; it holds"
    assert [peers[7].reasons, peers[6].reasons] == [[f"{reason} {8 * MIB}"], [f"{reason} {7 * MIB}"]]
    assert (limits.unsent_bytes, limits.cut_unsent, limits.count) == (21 * MIB, 2, 6)


def test_a_quarter_of_the_bound_is_made_free(limits: Limits) -> None:
    peers = opened(limits, 9)
    for peer in peers[:8]:
        peer.holds(4 * MIB)
    assert (limits.unsent_bytes, limits.cut_unsent) == (BOUND, 0), "exactly the bound is not too much"
    peers[8].holds(1)
    assert (limits.cut_unsent, limits.unsent_bytes) == (3, 20 * MIB + 1)
    assert limits.unsent_bytes <= BOUND - BOUND // 4 < limits.unsent_bytes + 4 * MIB, "no more than needed"


def test_peers_that_took_their_answers_meanwhile_are_not_cut(limits: Limits) -> None:
    peers = opened(limits, 9)
    for peer in peers[:8]:
        peer.holds(4 * MIB)
    for peer in peers[:4]:
        peer.unsent_bytes = 0  # taken, and not reported
    peers[8].holds(1)
    assert (limits.cut_unsent, limits.unsent_bytes) == (0, 16 * MIB + 1)


def test_a_connection_that_closes_gives_back_what_it_held(limits: Limits) -> None:
    first, second = opened(limits, 2)
    for peer in (first, second):
        peer.holds(3)
        limits.note_incomplete(peer, 4, is_new=True)
    limits.closed(first, None)
    assert (limits.count, limits.unsent_bytes, limits.incomplete_bytes) == (1, 3, 4)


@pytest.mark.parametrize(("extra", "cut"), [(0, 0), (1, 2)])
def test_peers_are_cut_only_if_more_than_seven_eighths_of_the_bound_are_still_unread(extra: int, cut: int) -> None:
    limits = Limits(SETTINGS)
    peers = opened(limits, 9)
    for peer in peers[:8]:
        peer.holds(4 * MIB)
    peers[0].unsent_bytes, peers[1].unsent_bytes = 0, 4 * MIB - 1  # taken, and not reported
    peers[8].holds(1 + extra)
    assert (limits.cut_unsent, limits.unsent_bytes) == (cut, 28 * MIB + extra - cut * 4 * MIB)


def test_no_more_are_cut_when_exactly_a_quarter_of_the_bound_is_free(limits: Limits) -> None:
    for peer in opened(limits, 9):
        peer.holds(4 * MIB)
    assert (limits.cut_unsent, limits.unsent_bytes) == (3, 24 * MIB)


def test_at_most_256_connections_are_cut_at_once() -> None:
    settings = ConnectionSettings(unsent_bytes_max=512 * MIB)
    limits = Limits(settings)
    peers = opened(limits, 300)
    for number, peer in enumerate(peers):
        peer.holds(MIB + number)
    settings.unsent_bytes_max = BOUND
    peers[0].holds(MIB)
    assert limits.cut_unsent == 256
    assert [bool(peer.reasons) for peer in peers] == [False] * 44 + [True] * 256
    peers[0].holds(MIB)
    assert limits.cut_unsent == 277, "the 23 that stay hold less than 24 MiB; 24 would hold a little more"


def test_a_connection_reports_its_end_once_only(limits: Limits) -> None:
    (peer,) = opened(limits, 1)
    with pytest.raises(AssertionError, match="at most as many connections close as were opened"):
        limits.closed(peer, "10.0.0.1")
    limits = Limits(SETTINGS)
    opened(limits, 2)
    limits.closed(peer, None)
    limits.closed(peer, None)
    assert limits.count == 0
    with pytest.raises(AssertionError, match="at most as many connections close as were opened"):
        limits.closed(peer, None)


def test_the_metrics_have_the_figures_of_now(limits: Limits) -> None:
    peers = opened(limits, 16)
    limits.opened(Peer(limits), None)
    limits.note_incomplete(peers[0], 5, is_new=True)
    peers[1].holds(7)
    peers[1].unsent_bytes = 3  # read since
    assert limits.gather() == {
        "rmqkit_incomplete_frame": {(): 5},
        "rmqkit_connections_refused_total": {("all",): 1, ("address",): 0},
        "rmqkit_connections_cut_total": {(): 0},
        "rmqkit_unsent": {(): 3},
        "rmqkit_connections_cut_unsent_total": {(): 0},
    }


def test_a_later_report_of_a_connection_replaces_its_former_one(limits: Limits) -> None:
    (peer,) = opened(limits, 1)
    for held in (5, 9, 9, 2):
        peer.holds(held)
        limits.note_incomplete(peer, held, is_new=False)
        assert (limits.unsent_bytes, limits.incomplete_bytes) == (held, held)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["waits", "frame", "new", "closes"]), st.integers(0, 20 * MIB)),
        max_size=40,
    )
)
def test_figures_are_the_sums_of_what_connections_hold(steps: list[tuple[int, str, int]]) -> None:
    limits = Limits(SETTINGS)
    peers = opened(limits, 5)
    unsent, frames = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    for number, step, held in steps:
        peer = peers[number]
        if peer.reasons:
            continue
        match step:
            case "waits":
                unsent[peer] = held
                peer.holds(held)
            case "closes":
                peer.cut("it left")
            case _:
                frames[peer] = held
                limits.note_incomplete(peer, held, is_new=step == "new")
        still_open = [one for one in peers if not one.reasons]
        assert limits.count == len(still_open)
        assert limits.unsent_bytes == sum(unsent[one] for one in still_open) <= BOUND
        assert limits.incomplete_bytes == sum(frames[one] for one in still_open) <= BOUND
