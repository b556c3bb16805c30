"""Plain sends read by plain Python (the compiled core's twin): remoting.md §1.2, §1.3, §4.3.1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.command import JSON, REQUEST_HEADER_BYTES_MAX, ROCKETMQ
from tests.cpu import least_seconds, slowness
from tests.native.equal import NOT_PLAIN, STAMPS, TIMED, TWIN, check_stream, has_room, twin_takes
from tests.native.sends import changes, odd_strings, plain_strings, send, string, strings


@given(strings, changes, st.binary(max_size=40), st.sampled_from([JSON, ROCKETMQ]), st.sampled_from([10, 310, 320, 11]))
def test_what_is_taken_is_what_the_decoders_say(text, fields, body, kind, code):
    data = send({"i": text, **fields}, code=code, body=body, kind=kind)
    twin_takes(data)
    check_stream(data + data[:50])


@given(plain_strings, st.binary(min_size=1, max_size=2000), st.sampled_from([JSON, ROCKETMQ]))
def test_what_is_plain_is_taken(text, body, kind):
    assert twin_takes(send({"i": text}, body=body, kind=kind)) == has_room(text)


@given(odd_strings)
def test_what_requests_more_is_left(text):
    pairs = [piece.split("\x01") for piece in text.split("\x02")[:-1]]
    is_plain = all(name and value for name, value in pairs) and len(dict(pairs)) == len(pairs)
    is_plain = is_plain and dict(pairs).keys().isdisjoint([*NOT_PLAIN, *STAMPS, *TIMED])
    taken = twin_takes(send({"i": text}))
    assert taken == is_plain or not dict(pairs).keys().isdisjoint(TIMED)


@given(st.data())
def test_changed_bytes_are_read_as_the_decoders_read_them(data):
    whole = bytearray(send({"i": data.draw(strings)}, kind=data.draw(st.sampled_from([JSON, ROCKETMQ]))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    twin_takes(bytes(whole))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_left(data):
    twin_takes(data)
    check_stream(data)


def test_a_name_that_is_looked_for_among_very_many_costs_little():
    text = string([(f"{at:05}", "v") for at in range(26_000)])
    data = send({"i": text}, kind=ROCKETMQ)
    assert len(data) < REQUEST_HEADER_BYTES_MAX
    assert TWIN.read(data, 0) is None
    assert least_seconds(3, lambda: TWIN.read(data, 0)) < 0.5 * slowness()  # quadratic it is seconds


def test_as_many_as_are_requested():
    one = send()
    assert [len(TWIN.read(one * 3, 0, count) or ()) for count in (1, 2, 5)] == [1, 2, 3]


def test_a_broker_whose_name_holds_a_blank_gives_no_handle():
    sends = TWIN.read(send({"i": string([("TIMER_DELIVER_MS", "17")])}), 0)
    assert sends is not None
    with pytest.raises(ValueError, match="without blanks"):
        sends.keep([1], "rmq_sys_wheel_timer", "broker a")
