"""Handles, queues of message groups, and digests: the vectors of grpc.md §17."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import java_hash
from rmqkit.proxy.schema.records import jump_hash, read_handle
from rmqkit.proxy.schema.status import Code, Refused

GROUPS = ["a", "b", "mg", "c", "hello", "order-1", "order-2", "fifoMessageGroup", "ä"]


def test_groups_have_the_hashes_and_queues_of_the_reference():
    assert java_hash("order-1") == -1207111310
    assert [jump_hash(group, 4) for group in GROUPS] == [0, 0, 2, 2, 3, 3, 2, 2, 2]
    assert [jump_hash(group, 8) for group in GROUPS] == [0, 5, 2, 2, 4, 3, 2, 2, 4]


def test_a_handle_names_a_message():
    handle = read_handle("0 1795363617329 10000 4 0 broker-0 2 5 48733")
    assert (handle.pop.queue_id, handle.offset, handle.physical_offset) == (2, 5, 48733)
    assert handle.expires_ms == 1795363627329
    assert handle.text == "0 1795363617329 10000 4 0 broker-0 2 5 48733"
    assert handle.topic_of("T", "G") == "T"
    assert read_handle("6 1795363826457 10000 999 1 broker-0 2 6 97182").topic_of("T", "G") == "%RETRY%G_T"
    assert read_handle("6 1795363826457 10000 999 2 broker-0 2 6").topic_of("T", "G") == "%RETRY%G+T"


def test_handles_of_eight_and_of_ten_words_are_read():
    assert read_handle("0 1 2 3 0 b 2 5").physical_offset == -1
    assert read_handle("0 1 2 3 0 b 2 5 0 48733").physical_offset == 48733


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bla",
        "0 1 2 3 0 b 2",
        "0 1 2 3 0 b 2 5 6 7 8",
        "0 1 2 3 9 b 2 5 6",
        "0 1 2 3 0 b -1 5 6",
        "0 1 2 3 0 b 2 -5 6",
        "0 1 2 3 0 b 2 5 99999999999999999999",
        f"0 1 2 3 0 b 2 {1 << 64} 6",
        "0 1 2 3 0 b 2 x 6",
        "0 1 2 3 0 " + "b" * 100_000 + " 2 5 6",
    ],
)
def test_what_is_no_handle_is_refused(text):
    with pytest.raises(Refused) as caught:
        read_handle(text)
    assert caught.value.code is Code.INVALID_RECEIPT_HANDLE


@given(st.text(max_size=80) | st.lists(st.integers().map(str) | st.text(max_size=3), max_size=12).map(" ".join))
def test_any_text_is_a_handle_or_refused(text):
    try:
        handle = read_handle(text)
    except Refused as error:
        assert error.code is Code.INVALID_RECEIPT_HANDLE
    else:
        assert read_handle(handle.text) == handle
