"""POP strings and recall handles (remoting.md §4.6.1, §7.6)."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import HeaderError
from rmqkit.protocol import ids
from rmqkit.protocol.ids import (
    OrderKey,
    PopHandle,
    PopQueue,
    RecallHandle,
    decode_recall_handle,
    encode_recall_handle,
)

HANDLE = PopHandle(
    check_point_offset=0,
    pop_time=1795224862948,
    invisible_time=60000,
    revive_queue_id=0,
    retry="0",
    broker_name="broker-a",
    queue_id=0,
    queue_offset=0,
)


def test_the_strings_of_a_real_broker_are_read_and_written():
    queue = PopQueue("0", 0)
    assert ids.decode_start_offsets("0 0 0") == {queue: 0}
    assert ids.encode_start_offsets({queue: 0}) == "0 0 0"
    assert ids.decode_message_offsets("0 0 0,1,2,3,4") == {queue: [0, 1, 2, 3, 4]}
    assert ids.encode_message_offsets({queue: range(5)}) == "0 0 0,1,2,3,4"
    assert ids.decode_pop_handle("0 1795224862948 60000 0 0 broker-a 0 0") == HANDLE
    assert ids.encode_pop_handle(HANDLE) == "0 1795224862948 60000 0 0 broker-a 0 0"


def test_several_queues_are_joined():
    offsets = {PopQueue("0", 3): 7, PopQueue("1", 0): 0, PopQueue("2", 0): 9}
    assert ids.encode_start_offsets(offsets) == "0 3 7;1 0 0;2 0 9"
    assert ids.decode_start_offsets("0 3 7;1 0 0;2 0 9") == offsets
    assert ids.decode_start_offsets("") == ids.decode_message_offsets("") == ids.decode_order_counts("") == {}


def test_deliveries_are_counted_by_queue_or_by_message():
    counts = {OrderKey("0", 3): 2, OrderKey("0", 3, 17): 5}
    assert ids.encode_order_counts(counts) == "0 3 2;0 qo3%17 5"
    assert ids.decode_order_counts("0 3 2;0 qo3%17 5") == counts


def test_counts_of_a_lite_pop() -> None:
    """The texts are those of a broker 5.5.0."""
    for text, counts in (("0;0", [(0, 0), (1, 0)]), ("0 qo0%1 4;0 qo0%2 4;0", [(1, 4), (2, 4), (0, 0)])):
        assert ids.encode_lite_counts(counts) == text
        assert ids.decode_lite_counts(text) == [count for _, count in counts]
    assert ids.decode_lite_counts("") == []
    for broken in ("x", "0;", "0 qo0%1 x", str(2**63)):
        with pytest.raises(HeaderError):
            ids.decode_lite_counts(broken)


def test_the_bits_of_a_batch_ack():
    assert base64.b64encode(ids.encode_acked(10, [11, 19])) == b"AgI="
    assert ids.decode_acked(10, base64.b64decode("AgI=")) == [11, 19]
    assert ids.encode_acked(10, []) == b""


@pytest.mark.parametrize("offset", [9, 10 + 65536])
def test_an_ack_far_from_its_pop_is_refused(offset):
    with pytest.raises(ValueError, match=str(offset)):
        ids.encode_acked(10, [offset])


def test_a_batch_ack_of_too_many_bits_is_a_header_error():
    with pytest.raises(HeaderError, match="8193 bytes"):
        ids.decode_acked(0, bytes(8193))


@given(st.integers(0, 2**62), st.sets(st.integers(0, 2000)))
def test_acks_survive(start, distances):
    offsets = sorted(start + distance for distance in distances)
    assert ids.decode_acked(start, ids.encode_acked(start, offsets)) == offsets


DECODERS = [
    ids.decode_start_offsets,
    ids.decode_message_offsets,
    ids.decode_order_counts,
    ids.decode_pop_handle,
]


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "text",
    [" ", ";", "0 0", "0 0 x", "3 0 0", "0 0 0;", "0 0 0 0", "0  0", "0 0 9223372036854775808", "0 0 ٣", "0 qo1% 2"],
)
def test_a_broken_string_is_a_header_error(decode, text):
    with pytest.raises(HeaderError):
        decode(text)


@pytest.mark.parametrize(
    "text",
    ["", "1 2 3 4 0 b", "1 2 3 4 0  5", "1 2 3 4 0 b 5 6 x 8", "1 2 3 4 0 b 5 6 x", "1 2 3 4 9 b 5", "1 2 3 x 0 b 5"],
)
def test_a_broken_handle_is_a_header_error(text):
    with pytest.raises(HeaderError):
        ids.decode_pop_handle(text)


def test_a_handle_may_end_with_the_record_s_place_in_the_log():
    assert ids.decode_pop_handle("1 2 3 4 0 b 5 6 7") == ids.decode_pop_handle("1 2 3 4 0 b 5 6")


@pytest.mark.parametrize("rest", ["8", "x", "", "8 9  x"])
def test_what_follows_the_ninth_word_of_a_handle_is_not_read(rest):
    assert ids.decode_pop_handle(f"1 2 3 4 0 b 5 6 7 {rest}") == ids.decode_pop_handle("1 2 3 4 0 b 5 6")


@given(st.text(" ;,%qo0123456789-", max_size=30))
def test_any_text_is_read_or_a_header_error(text):
    for decode in DECODERS:
        try:
            decode(text)
        except HeaderError as error:
            assert str(error)


INT64 = st.integers(-(2**63), 2**63 - 1)
QUEUES = st.builds(PopQueue, st.sampled_from("012"), INT64)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters=" "), min_size=1, max_size=9)


@given(st.dictionaries(QUEUES, st.lists(INT64, min_size=1, max_size=5), max_size=4))
def test_message_offsets_survive(offsets):
    assert ids.decode_message_offsets(ids.encode_message_offsets(offsets)) == offsets


@given(st.builds(PopHandle, **dict.fromkeys(("check_point_offset", "pop_time", "invisible_time"), INT64),
                 revive_queue_id=INT64, retry=st.sampled_from("012"), broker_name=NAMES, queue_id=INT64,
                 queue_offset=st.none() | INT64))  # fmt: skip
def test_handles_survive(handle):
    assert ids.decode_pop_handle(ids.encode_pop_handle(handle)) == handle


def test_a_broker_name_with_a_blank_cannot_be_written():
    with pytest.raises(ValueError, match="blanks"):
        ids.encode_pop_handle(
            PopHandle(**{**{f: getattr(HANDLE, f) for f in HANDLE.__struct_fields__}, "broker_name": "a b"})
        )
    with pytest.raises(ValueError, match="blanks"):
        encode_recall_handle(RecallHandle("T", "a b", 1, "K"))


RECALL = RecallHandle("T", "broker-a", 1700000000000, "7F00000100002A139A5A0C7D8A7B0001")


def test_a_recall_handle_is_base64url_of_five_words():
    text = encode_recall_handle(RECALL)
    assert base64.urlsafe_b64decode(text) == b"v1 T broker-a 1700000000001 7F00000100002A139A5A0C7D8A7B0001"
    assert decode_recall_handle(text) == decode_recall_handle(text.rstrip("=")) == RECALL


@pytest.mark.parametrize("plain", ["", "v2 T b 1 K", "v1 T b 1", "v1 T b x K", "v1 T b ٣ K", "v1 T b 1 K x"])
def test_what_is_no_recall_handle_is_a_header_error(plain):
    with pytest.raises(HeaderError):
        decode_recall_handle(base64.urlsafe_b64encode(plain.encode()).decode())


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda noise: base64.urlsafe_b64encode(noise).decode()))
def test_any_text_is_a_recall_handle_or_a_header_error(text):
    try:
        decode_recall_handle(text)
    except HeaderError as error:
        assert str(error)


@given(st.builds(RecallHandle, NAMES, NAMES, st.integers(0, 2**62), NAMES))
def test_recall_handles_survive(handle):
    assert decode_recall_handle(encode_recall_handle(handle)) == handle
