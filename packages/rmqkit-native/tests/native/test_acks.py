"""Acks that come one behind the other: what the compiled core reads of them is what the Python decoders read, and what
it leaves is handled frame by frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import FrameSplitter, encode_command, frames_of, request
from rmqkit.protocol.schemas.pop import AckMessageRequest
from tests.native.equal import CORE, check_acks

HANDLE = "5 1700000000000 60000 3 0 broker-a 1 7"


def ack(fields=None, *, opaque=7, flag=0, body=b"", code=RequestCode.ACK_MESSAGE):
    header = AckMessageRequest(consumer_group="g", topic="T", queue_id=1, extra_info=HANDLE, offset=7)
    command = request(code, header, body)
    command.fields |= fields or {}
    command.fields = {name: value for name, value in command.fields.items() if value is not None}
    command.opaque, command.flag = opaque, flag
    return b"".join(bytes(piece) for piece in encode_command(command))


numbers = st.sampled_from(["0", "1", "8", "2147483647", "9223372036854775807"])
odd = st.sampled_from(["", "-1", "+1", "01", "2147483648", "9223372036854775808", "x", " 1", "größe", '"', "\\", None])
words = st.lists(numbers, min_size=9, max_size=9).map(lambda w: " ".join([*w[:4], "1", "broker-ä", *w[6:]]))
handles = st.one_of(words, st.just(HANDLE + " 12"), st.just(HANDLE[:-2]), st.just(HANDLE + " 1 2"), odd)
changes = st.fixed_dictionaries(
    {},
    optional={
        "topic": st.sampled_from(["T", "Größe", "%RETRY%g_T", "a b"]),
        "consumerGroup": st.sampled_from(["g", "h", "\\"]),
        "queueId": st.one_of(numbers, odd),
        "offset": st.one_of(numbers, odd),
        "extraInfo": handles,
        "bname": st.sampled_from(["broker-a", '"', None]),
        "ns": st.just("x"),
    },
)


@given(st.lists(st.tuples(changes, st.integers(0, 2**31 - 1)), min_size=1, max_size=6))
def test_what_the_core_takes_it_reads_as_python_does(several):
    check_acks(b"".join(ack(fields, opaque=opaque) for fields, opaque in several))


@given(st.data())
def test_changed_bytes_are_read_as_python_reads_them(data):
    frame = bytearray(ack() * 2)
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    check_acks(bytes(frame))


def test_acks_of_a_pop_are_taken_together():
    several = [ack({"offset": str(5 + at), "extraInfo": f"{HANDLE[:-1]}{5 + at}"}, opaque=at) for at in range(3)]
    data = b"".join(several)
    assert check_acks(data) == 3
    assert CORE.read(data).pops == [("T", "g", 1, 5, 1700000000000, 3, [5, 6, 7], [0, 1, 2])]
    assert check_acks(data + ack({"topic": "U"})) == 4
    (unit,) = FrameSplitter(sends=CORE).feed(data)
    assert len(frames_of(unit)) == 3


@pytest.mark.parametrize(
    "frame",
    [ack(flag=2), ack(body=b"x"), ack(code=RequestCode.PEEK_MESSAGE), ack({"offset": "-1"}), ack({"topic": None})],
)
def test_what_is_not_plain_is_left(frame):
    assert CORE.read(frame) is None
    assert check_acks(ack() + frame) == 1
