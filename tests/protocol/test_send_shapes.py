"""Shapes of send headers: what they read is what the plain decoders read (remoting.md §1.2, §4.3.1, §7.3)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    Frame,
    FrameSplitter,
    decode_command,
    decode_header,
    encode_command,
    header_fields,
)
from rmqkit.protocol.properties import decode_properties, encode_properties, find_keys, in_stored_order
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request
from rmqkit.protocol.templates import SendShapes, learn_shape

STAMPS = encode_properties({"MSG_REGION": "100%", "TRACE_ON": "true", "CLUSTER": "c"})
JAVA = (
    rb'{"code":310,"extFields":{"a":"p","b":"T","c":"TBW102","d":"4","e":"1","f":"0","g":"1795255797666","h":"0",'
    rb'"i":"KEYS\u0001key0\u0002UNIQ_KEY\u0001FD00026E454E0E2F2A692D9FA10000\u0002WAIT\u0001true\u0002TAGS\u0001Tag0'
    rb'\u0002","j":"0","k":"false","m":"false","n":"vm"},"flag":0,"language":"JAVA","opaque":7,'
    rb'"serializeTypeCurrentRPC":"JSON","version":493}'
)
"""As Apache's 5.4.0 producer writes it."""


def frame_of(properties, opaque=1, code=RequestCode.SEND_MESSAGE_V2, flag=0, serialize_type=JSON, **changes):
    kind = SendMessageRequest if code == RequestCode.SEND_MESSAGE else SendMessageV2Request
    sent = msgspec.structs.replace(kind("p", "T", "TBW102", 4, 0, 0, 5, 0, properties), **changes)
    command = Command(code, opaque, flag, header_fields(sent), b"body")
    (frame,) = FrameSplitter().feed(b"".join(encode_command(command, serialize_type)))
    return frame


def learned(frame):
    return learn_shape(frame, STAMPS, {*decode_properties(STAMPS), "DELAY"})


def read(shape, frame):
    """Everything a shape says of a request, None when it does not match."""
    match = shape.match(frame.header)
    if match is None:
        return None
    queue_id, born_timestamp, opaque, *keys = shape.read(match.groups())
    sent = msgspec.structs.replace(
        shape.header, queue_id=int(queue_id), born_timestamp=int(born_timestamp), properties=None
    )
    return sent, int(opaque), tuple(keys), shape.properties % shape.values(match.groups())


def read_plainly(frame):
    command = decode_command(frame)
    sent = decode_header(command, SendMessageRequest if command.code == 10 else SendMessageV2Request)
    ended = sent.properties.encode().removesuffix(b"\x02") + b"\x02"
    stored = in_stored_order(ended + STAMPS)
    bare = msgspec.structs.replace(sent, properties=None)
    return bare, command.opaque, find_keys(stored), stored


def test_the_header_of_a_java_producer_is_read():
    frame = Frame(JSON, JAVA.replace(b"key0", b"a key").replace(b'"e":"1"', b'"e":"3"').replace(b":7,", b":80,"), b"x")
    assert read(learned(Frame(JSON, JAVA, b"x")), frame) == read_plainly(frame)


NAMES = st.sampled_from(["KEYS", "TAGS", "WAIT", "a", "b%d", "x y", "__SHARDINGKEY"])
VALUES = st.text("abz019 %_-#[]{}:,", min_size=1, max_size=6) | st.sampled_from(["ü", 'a"b', "\\", "true", "\\u0002"])


@given(
    st.lists(NAMES, unique=True, max_size=5),
    st.lists(VALUES, min_size=10, max_size=10),
    st.sampled_from([RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2]),
    st.integers(0, 1 << 31),
    st.integers(-1, (1 << 63) - 1),
    st.booleans(),
    st.data(),
)
def test_what_a_shape_reads_is_what_the_plain_decoders_read(names, values, code, opaque, born, is_ended, data):
    values_of = dict(zip(data.draw(st.permutations(["UNIQ_KEY", *names])), values, strict=False))
    first, other = (
        "".join(f"{name}\x01{value}\x02" for name, value in properties.items())[: None if is_ended else -1]
        for properties in (dict.fromkeys(values_of, "true"), values_of)
    )
    shape = learned(frame_of(first, code=code))
    assert shape is not None
    frame = frame_of(other, opaque, code, queue_id=opaque % 9, born_timestamp=born)
    found = read(shape, frame)
    if found is None:
        is_odd = not other.isascii() or '"' in other or "\\" in other or not 0 <= born < 10**18
        assert is_odd or not values_of["UNIQ_KEY"].isalnum() or values_of.get("WAIT", "true") not in ("true", "false")
    else:
        assert found == read_plainly(frame)


@pytest.mark.parametrize(
    "frame",
    [
        frame_of("UNIQ_KEY\x01K\x02", flag=2),
        frame_of("UNIQ_KEY\x01K\x02", flag=1),
        frame_of("UNIQ_KEY\x01K\x02", code=RequestCode.SEND_BATCH_MESSAGE),
        frame_of("UNIQ_KEY\x01K\x02", batch=True),
        frame_of("UNIQ_KEY\x01K\x02", topic="%RETRY%g"),
        frame_of("UNIQ_KEY\x01K\x02", sys_flag=4),
        frame_of("UNIQ_KEY\x01K\x02", sys_flag=0x80),
        frame_of("UNIQ_KEY\x01K\x02", serialize_type=ROCKETMQ),
        frame_of("UNIQ_KEY\x01K\x02", queue_id=-1),
        frame_of("UNIQ_KEY\x01K\x02DELAY\x013\x02"),
        frame_of("UNIQ_KEY\x01K\x02CLUSTER\x01x\x02"),
        frame_of("UNIQ_KEY\x01K\x02a\x01b\x02a\x01c\x02"),
        frame_of("UNIQ_KEY\x01K\x02a\x01\x02"),
        frame_of("UNIQ_KEY\x01K\x02a\x01b\x01c\x02"),
        frame_of("UNIQ_KEY\x01K\x02\x02"),
        frame_of("UNIQ_KEY\x01K\x02ü\x01b\x02"),
        frame_of("TAGS\x01a\x02"),
        frame_of(None),
        Frame(JSON, JAVA.replace(b'"e":"1"', b'"e":"1","e":"2"'), b"x"),
        Frame(JSON, JAVA.replace(b'"opaque":7', b'"opaque":7,"opaque":8'), b"x"),
        Frame(JSON, JAVA.replace(b'"opaque":7', b'"remark":{"opaque":7}'), b"x"),
        Frame(JSON, JAVA.replace(b'"e":"1"', b'"x":{"e":"1"}'), b"x"),
        Frame(JSON, JAVA.replace(b'"d":"4",', b""), b"x"),
        Frame(JSON, JAVA[:-1], b"x"),
    ],
)
def test_nothing_but_plain_sends_has_a_shape(frame):
    assert learned(frame) is None


@given(st.integers(0, len(JAVA) - 1), st.integers(0, 255))
def test_a_header_that_differs_elsewhere_is_no_match_or_means_the_same(at, octet):
    frame = Frame(JSON, JAVA[:at] + bytes([octet]) + JAVA[at + 1 :], b"x")
    found = read(learned(Frame(JSON, JAVA, b"x")), frame)
    assert found is None or found == read_plainly(frame)


def test_shapes_are_learned_more_and_more_seldom():
    shapes = SendShapes(STAMPS, ["DELAY"])
    known = [
        sum(shapes.find(frame_of(f"UNIQ_KEY\x01K\x02p{number}\x01v\x02")) is not None for _ in range(20))
        for number in range(3)
    ]
    assert known == [19, 11, 3]
    assert shapes.find(frame_of("UNIQ_KEY\x01K2\x02p0\x01w\x02", opaque=9)) is not None


@pytest.mark.parametrize(
    ("name", "unit_ms"), [("TIMER_DELAY_SEC", 1000), ("TIMER_DELAY_MS", 1), ("TIMER_DELIVER_MS", 0)]
)
def test_a_message_for_a_time_is_a_shape_and_one_with_a_delay_level_is_none(name, unit_ms):
    shapes, properties = SendShapes(STAMPS, ["DELAY"]), f"UNIQ_KEY\x01K\x02{name}\x0112\x02"
    assert [shapes.find(frame_of(f"{properties}DELAY\x013\x02")) for _ in range(2)] == [None, None]
    assert shapes.find(frame_of(properties)) is None
    shape, values = shapes.find(frame_of(properties, opaque=7))
    at, unit = shape.asks
    assert (values[at], unit) == (b"12", unit_ms)
    stored = properties + "TIMER_OUT_MS\x0134\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02"
    assert shape.properties % shape.values((*values, b"34")) == in_stored_order(stored.encode() + STAMPS)
