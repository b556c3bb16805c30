"""Entries of a ledger, and the packing of half messages. No broker."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import BodyError
from rmqkit.spark.sink.ledger import Batch, Entry, Half, Kind, Low, Written, pack_halves, progress, unpack_halves

LEASE_MS = 1000
BATCH = Batch("q", 7)
LOWS = (Low("T", "broker-a", 0, 17),)


def ledger(*entries: tuple[int, Entry]) -> list[Written]:
    """Entries at offsets 0, 1, … stored at the given times."""
    return [Written(entry, offset, stored_ms, stored_ms) for offset, (stored_ms, entry) in enumerate(entries)]


def decision(claimant: str, *parts: int) -> Entry:
    return Entry(Kind.DECISION, BATCH, claimant, parts=parts, lows=LOWS)


def claim(claimant: str) -> Entry:
    return Entry(Kind.CLAIM, BATCH, claimant)


def test_nothing_is_known_of_a_new_sink() -> None:
    now = progress(ledger((0, Entry(Kind.DONE, Batch("other", 9)))), BATCH, LEASE_MS)
    assert (now.is_known, now.is_decided, now.is_past, now.is_done) == (False, False, False, False)
    assert (now.holder, now.since, now.held_ms, now.aborted_ms) == ("", -1, 0, -1)
    assert now.decision == -1


def test_entries_of_other_sinks_are_passed_over() -> None:
    others = [Entry(Kind.DONE, Batch("other", batch_id)) for batch_id in (6, 7, 8)]
    now = progress(ledger((0, others[0]), (1, decision("a", 1)), (2, others[1]), (3, others[2])), BATCH, LEASE_MS)
    assert (now.is_known, now.decision, now.is_done, now.is_past) == (True, 1, False, False)


def test_the_first_decision_counts() -> None:
    now = progress(ledger((0, decision("a", 1, 2)), (1, decision("b", 3))), BATCH, LEASE_MS)
    assert (now.decision, now.decided_by, now.parts, now.lows) == (0, "a", (1, 2), LOWS)
    assert (now.holder, now.since, now.held_ms) == ("a", 0, 0)


@pytest.mark.parametrize(
    ("claims", "holder", "since", "held_ms"),
    [
        ([(999, "b")], "a", 0, 0),
        ([(1000, "b")], "b", 1, 1000),
        ([(500, "a"), (1400, "b")], "a", 0, 500),
        ([(500, "a"), (1500, "b")], "b", 2, 1500),
        ([(1000, "b"), (1500, "a")], "b", 1, 1000),
        ([(1000, "b"), (2000, "a")], "a", 2, 2000),
        ([(400, "b"), (1000, "b"), (1200, "c")], "b", 2, 1000),
    ],
)
def test_a_lease_continues_only_when_it_ran_out(
    claims: list[tuple[int, str]], holder: str, since: int, held_ms: int
) -> None:
    entries = ledger((0, decision("a")), *((at, claim(who)) for at, who in claims))
    now = progress(entries, BATCH, LEASE_MS)
    assert (now.holder, now.since, now.held_ms) == (holder, since, held_ms)


def test_a_claim_of_an_open_batch_is_nothing() -> None:
    assert progress(ledger((0, claim("a"))), BATCH, LEASE_MS).holder == ""


def test_later_batches_say_that_the_sink_went_on() -> None:
    for kind, is_past in ((Kind.DONE, True), (Kind.DECISION, True), (Kind.PART, False), (Kind.ABORTED, False)):
        assert progress(ledger((0, Entry(kind, Batch("q", 8)))), BATCH, LEASE_MS).is_past is is_past
    before = progress(ledger((0, Entry(Kind.DONE, Batch("q", 6)))), BATCH, LEASE_MS)
    assert (before.is_past, before.is_known) == (False, True), "the sink is known by an earlier batch"


def test_rows_that_are_gone_are_added_by_the_next_decision() -> None:
    entries = ledger((0, decision("a", 1)), (1, Entry(Kind.GONE, BATCH, rows=("0/3",))))
    assert progress(entries, BATCH, LEASE_MS).gone == {"0/3"}
    entries = ledger((0, decision("a", 1)), (1, Entry(Kind.GONE, BATCH, rows=("0/3",))), (2000, decision("b", 5)))
    now = progress(entries, BATCH, LEASE_MS)
    assert (now.parts, now.gone, now.lows, now.holder) == ((1, 5), frozenset(), LOWS, "b")


def test_an_abort_is_dated_and_the_end_is_the_end() -> None:
    now = progress(ledger((5, Entry(Kind.ABORTED, BATCH)), (9, Entry(Kind.DONE, BATCH))), BATCH, LEASE_MS)
    assert (now.aborted_ms, now.is_done) == (5, True)


def test_an_abort_after_the_decision_has_no_effect() -> None:
    entries = ledger((5, Entry(Kind.ABORTED, BATCH)), (7, decision("a", 1)), (9, Entry(Kind.ABORTED, BATCH)))
    now = progress(entries, BATCH, LEASE_MS)
    assert (now.is_decided, now.aborted_ms) == (True, entries[0].born_ms)


def test_the_newest_abort_counts() -> None:
    entries = ledger(*((at, Entry(Kind.ABORTED, BATCH)) for at in (5, 9, 7)))
    assert progress(entries, BATCH, LEASE_MS).aborted_ms == 9


@pytest.mark.parametrize("key", ["q/7/0/12", "q/7/order 12"])
def test_a_row_s_key_names_its_batch(key: str) -> None:
    assert Batch.of_key(key) == BATCH
    assert key.startswith(BATCH.prefix)


@pytest.mark.parametrize("key", ["", "q", "q/7", "q/x/1", "/7/1", "7F0000010B2C18B4AAC21F8A7B3C0000"])
def test_other_keys_name_none(key: str) -> None:
    assert Batch.of_key(key) is None


def test_entries_are_what_was_encoded() -> None:
    entry = Entry(Kind.DECISION, BATCH, "me", (b"x",), (1, 2), LOWS, ("0/1",))
    assert Entry.decode(entry.encode()) == entry
    with pytest.raises(BodyError, match="is not a ledger entry"):
        Entry.decode(entry.encode()[:-1])


def test_entries_keep_their_bytes() -> None:
    """A sink of an earlier version reads the entries of its batch after an upgrade."""
    entry = Entry(Kind.DECISION, BATCH, "me", parts=(1,), lows=LOWS)
    assert msgspec.msgpack.decode(entry.encode()) == {
        "kind": "decision",
        "batch": {"sink_id": "q", "batch_id": 7},
        "claimant": "me",
        "parts": [1],
        "lows": [["T", "broker-a", 0, 17]],
    }


def test_values_of_the_ledger_can_be_members_of_a_set() -> None:
    entry = Entry(Kind.CLAIM, BATCH)
    values = [BATCH, Half("0/1", "T", "b", -1, 1, 2), LOWS[0], entry, Written(entry, 0, 1, 2)]
    assert len({*values, *values}) == len(values)
    assert sorted([Batch("q", 8), Batch("p", 9), BATCH]) == [Batch("p", 9), BATCH, Batch("q", 8)]


def test_a_piece_whose_columns_differ_in_length_is_refused() -> None:
    columns = ([("T", "b", -1)], ["0/1", "0/2"], [0, 0], [1, 1], [2, 2])
    assert len(unpack_halves(zlib.compress(msgspec.msgpack.encode(columns)))) == 2
    for short in range(1, 5):
        cut = [column[:1] if at == short else column for at, column in enumerate(columns)]
        with pytest.raises(BodyError, match="not half messages"):
            unpack_halves(zlib.compress(msgspec.msgpack.encode(cut)))


HALVES = st.lists(
    st.builds(
        Half,
        st.text(max_size=5),
        st.sampled_from(["T", "U"]),
        st.sampled_from(["broker-a", "broker-b"]),
        st.integers(-1, 3),
        st.integers(0, 1 << 62),
        st.integers(0, 1 << 62),
    ),
    max_size=20,
)


@given(HALVES)
def test_half_messages_are_what_was_packed(halves: list[Half]) -> None:
    assert [half for piece in pack_halves(halves) for half in unpack_halves(piece)] == halves


def test_half_messages_take_few_bytes() -> None:
    halves = [Half(f"3/{number}", "T", "broker-a", -1, number, number * 317) for number in range(25_000)]
    pieces = pack_halves(halves)
    assert len(pieces) == 3
    assert sum(map(len, pieces)) < 4 * len(halves)


@given(st.binary(max_size=60), st.integers(0, 40))
def test_other_bytes_are_no_half_messages(junk: bytes, cut: int) -> None:
    good = pack_halves([Half("0/1", "T", "b", -1, 1, 2)])[0]
    for packed in (junk, good[:cut] if cut < len(good) else junk):
        with pytest.raises(BodyError, match="not half messages"):
            unpack_halves(packed)
