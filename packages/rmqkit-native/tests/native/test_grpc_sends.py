"""The compiled core and plain gRPC sends: its results equal those of protobuf and the checks in Python, and it leaves
refused, unusual and unknown sends to them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.protocol.properties import PROPERTIES_BYTES_MAX, decode_properties, encode_properties
from rmqkit.proxy.schema.checks import BODY_BYTES_MAX, check_messages, timestamp_ms
from rmqkit.proxy.schema.messages import DecodeError, message_class
from rmqkit.proxy.schema.records import properties_of, type_of
from rmqkit.proxy.schema.status import Code, Refused
from rmqkit.proxy.service.sending import plain_sends
from tests.examples import examples

Request = message_class("SendMessageRequest")
HOST = "10.0.0.7:5000"
READER = plain_sends()
SYSTEM = {"message_id": "ID1", "message_type": 1, "body_encoding": 1, "born_host": "h", "queue_id": 0}
TIME = {"seconds": 1_700_000_000, "nanos": 123_456_789}


def encoded(body=b"hello", topic="T", user=(), **system):
    message = {"topic": {"name": topic}, "body": body, "user_properties": dict(user)}
    return Request(messages=[{**message, "system_properties": {**SYSTEM, **system}}]).SerializeToString()


def by_python(content):
    """Return the values of a plain send; None for other sends."""
    try:
        asked = Request.FromString(content)
        check_messages(asked.messages, 1_700_000_000_000)
        (message,) = asked.messages
        properties = properties_of(message, HOST)
        born_ms = timestamp_ms(message.system_properties.born_timestamp, Code.BAD_REQUEST)
    except (DecodeError, Refused, ValueError):
        return None
    if type_of(properties) not in ("NORMAL", "FIFO") or message.system_properties.body_encoding == 2:
        return None
    if len(encode_properties(properties)) > PROPERTIES_BYTES_MAX - 256:
        return None
    system = message.system_properties
    return message.topic.name, system.message_id, system.message_group, properties, message.body, born_ms


def by_core(content):
    found = READER.read(content, HOST)
    if found is None:
        return None
    topic, message_id, group, properties, body, born_ms = found
    pairs = decode_properties(properties.encode())
    assert encode_properties(pairs).decode() == properties
    return topic, message_id, group, pairs, body, born_ms


def test_what_sdks_send_is_plain():
    content = encoded(tag="TagA", keys=["k1", "k2"], born_timestamp=TIME, user={"a": "b", "ä": "ö"}.items())
    topic, message_id, group, properties, body, born_ms = by_core(content)
    assert (topic, message_id, group, body, born_ms) == ("T", "ID1", "", b"hello", 1_700_000_000_123)
    own = ["UNIQ_KEY", "PGROUP", "RECONSUME_TIME", "TAGS", "__BORNHOST", "BORN_TIMESTAMP", "KEYS"]
    assert list(properties)[:7] == own
    assert set(properties) == {*own, "a", "ä"}
    assert by_core(content) == by_python(content)
    assert by_core(encoded(message_group="g", message_type=2)) == by_python(encoded(message_group="g", message_type=2))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        encoded() * 2,
        encoded(body=b""),
        encoded(body=bytes(BODY_BYTES_MAX + 1)),
        encoded(message_id=""),
        encoded(message_id="a\1b"),
        encoded(tag="a|b"),
        encoded(tag=" "),
        encoded(keys=["\x7f"]),
        encoded(message_type=4),
        encoded(body_encoding=2),
        encoded(priority=1),
        encoded(delivery_timestamp=TIME),
        encoded(message_group="g" * 64),
        encoded(born_timestamp={"seconds": -1}),
        encoded(user=[("KEYS", "x")]),
        encoded(user=[("__SHARDINGKEY", "x")]),
        encoded(user=[("TRACE_CONTEXT", "x")]),
        encoded(user=[("a", "\x85")]),
        encoded(user=[(f"n{number}", "x") for number in range(129)]),
        encoded(user=[("a", "x" * 16_385)]),
        encoded() + b"\x10\x01",
        encoded()[:-1],
    ],
)
def test_others_are_left_to_python(content):
    assert by_core(content) is None


TEXTS = st.text(max_size=6) | st.sampled_from(["a", "a b", " ", "T", "KEYS", "TAGS", "__SHARDINGKEY", "DELAY", "ä"])
TIMES = st.fixed_dictionaries(
    {}, optional={"seconds": st.integers(-5, 1 << 41), "nanos": st.integers(-5, 1_000_000_001)}
)
SYSTEMS = st.fixed_dictionaries(
    {"message_id": TEXTS},
    optional={
        "tag": TEXTS,
        "keys": st.lists(TEXTS, max_size=3),
        "message_type": st.integers(0, 6),
        "body_encoding": st.integers(0, 3),
        "born_timestamp": TIMES,
        "born_host": TEXTS,
        "queue_id": st.integers(-1, 3),
        "delivery_attempt": st.integers(-2, 3),
        "message_group": TEXTS,
        "trace_context": TEXTS,
        "priority": st.integers(-1, 2),
        "delivery_timestamp": TIMES,
        "receipt_handle": TEXTS,
        "store_host": TEXTS,
    },
)


@examples(200)
@given(
    SYSTEMS,
    st.dictionaries(TEXTS, TEXTS, max_size=3),
    st.binary(max_size=3),
    st.integers(0, 400),
    st.binary(max_size=2),
)
def test_what_the_core_takes_is_what_python_makes_of_it(system, user, body, place, damage):
    message = {"topic": {"name": "T"}, "body": body, "user_properties": user, "system_properties": system}
    content = Request(messages=[message]).SerializeToString()
    content = content[:place] + damage + content[place + len(damage) :]
    found = by_core(content)
    assert found is None or found == by_python(content)
