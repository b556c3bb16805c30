"""Messages before they are sent. Source: behaviour.md §7.3, §7.6, §7.8; remoting.md §7.2, §7.5."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.client.producer.encode import check_topic, encode_message, encode_messages, encode_retry
from rmqkit.client.runtime.settings import Compressing, CompressionType, ProducerSettings, SendLimits
from rmqkit.errors import MessageIllegal
from rmqkit.protocol.compression import decompress
from rmqkit.protocol.message import Message
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import decode_batch
from tests.client.messages import received

SETTINGS = ProducerSettings()


def test_a_message_carries_its_tag_keys_properties_and_unique_key():
    message = Message(topic="T", body=b"x", tags="TagA", keys=["k1", "k2"], properties={"colour": "red"}, flag=9)
    prepared = encode_message(message, "UK", SETTINGS)
    assert (prepared.topic, prepared.body, prepared.flag, prepared.sys_flag) == ("T", b"x", 9, 0)
    assert prepared.msg_id == "UK"
    assert decode_properties(prepared.properties.encode()) == {
        "colour": "red",
        "KEYS": "k1 k2",
        "TAGS": "TagA",
        "WAIT": "true",
        "UNIQ_KEY": "UK",
    }


@pytest.mark.parametrize(
    ("compression", "sys_flag"),
    [(CompressionType.ZLIB, 0x301), (CompressionType.LZ4, 0x101), (CompressionType.ZSTD, 0x201)],
)
def test_bodies_from_4096_bytes_on_are_compressed(compression, sys_flag):
    settings = ProducerSettings(compression=Compressing(type=compression))
    below, above = (encode_message(Message(topic="T", body=b"a" * size), "UK", settings) for size in (4095, 4096))
    assert (below.sys_flag, len(below.body)) == (0, 4095)
    assert above.sys_flag == sys_flag
    assert len(above.body) < 200
    assert decompress(above.body, above.sys_flag) == b"a" * 4096


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"delay_level": 3}, "DELAY", "3"),
        ({"delay": 1.5}, "TIMER_DELAY_MS", "1500"),
        ({"delay": timedelta(minutes=2)}, "TIMER_DELAY_MS", "120000"),
        ({"delay": 0}, "TIMER_DELAY_MS", "0"),
        ({"deliver_at": 1_900_000_000.25}, "TIMER_DELIVER_MS", "1900000000250"),
        (
            {"deliver_at": datetime(2030, 3, 17, 19, 46, 40, tzinfo=timezone(timedelta(hours=2)))},
            "TIMER_DELIVER_MS",
            "1900000000000",
        ),
        ({"sharding_key": "customer-7"}, "__SHARDINGKEY", "customer-7"),
        ({"priority": 0}, "_SYS_MSG_PRIORITY_", "0"),
        ({"priority": 7}, "_SYS_MSG_PRIORITY_", "7"),
    ],
    ids=[
        "level",
        "after",
        "after a timedelta",
        "after nothing",
        "at",
        "at a datetime",
        "sharding key",
        "lowest priority",
        "priority",
    ],
)
def test_delays_the_sharding_key_and_the_priority_are_properties(fields, name, value):
    prepared = encode_message(Message(topic="T", body=b"x", **fields), "UK", SETTINGS)
    assert decode_properties(prepared.properties.encode()) == {name: value, "WAIT": "true", "UNIQ_KEY": "UK"}


def test_what_asks_something_of_the_broker_is_added():
    prepared = encode_message(Message(topic="T", body=b"x"), "UK", SETTINGS, {"TRAN_MSG": "true"})
    assert decode_properties(prepared.properties.encode())["TRAN_MSG"] == "true"


def test_a_body_that_would_not_get_smaller_stays_as_it_is():
    body = random.Random(1).randbytes(5000)
    prepared = encode_message(Message(topic="T", body=body), "UK", SETTINGS)
    assert (prepared.body, prepared.sys_flag) == (body, 0)


@pytest.mark.parametrize(
    ("topic", "text"),
    [
        ("", "The specified topic is blank."),
        ("a b", "The specified topic: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"),
        ("t" * 128, f"The specified topic: {'t' * 128}, is longer than topic max length: 127"),
        (
            "SCHEDULE_TOPIC_XXXX",
            "Sending message to topic[SCHEDULE_TOPIC_XXXX] is forbidden: only the broker writes to it",
        ),
    ],
)
def test_topics_are_checked(topic, text):
    with pytest.raises(MessageIllegal) as caught:
        check_topic(topic)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"body": b""}, "body of a message for topic T is empty: it must have at least one byte"),
        (
            {"body": "text"},
            (
                "body of a message for topic T is str: it must be bytes, a msgspec Struct, a dataclass or a pydantic "
                "model"
            ),
        ),
        (
            {"body": bytes(1002)},
            (
                "body of a message for topic T has 1002 bytes, 2 more than the limit of 1000 (maxMessageSize; "
                "--max-bytes on the command line): split it, or raise the limit here and at the brokers"
            ),
        ),
        (
            {"properties": {"TAGS": "x"}},
            "message for topic T: property name TAGS belongs to RocketMQ: choose another",
        ),
        (
            {"properties": {"a": "\x01"}},
            "message for topic T: a property name or value contains the separator 0x01 or 0x02: remove it",
        ),
        (
            {"properties": {"a": "x" * 32760}},
            (
                "properties of a message for topic T have 32785 bytes, 18 more than the limit of 32767: move some to "
                "the body"
            ),
        ),
        (
            {"keys": ["a b"]},
            "message for topic T: keys ['a b'] must be words without blanks: a blank separates them",
        ),
        (
            {"delay_level": -1},
            "message for topic T: delay_level=-1, delay=None, deliver_at=None: give one, not negative",
        ),
        (
            {"delay_level": 1, "delay": 5},
            "message for topic T: delay_level=1, delay=5, deliver_at=None: give one, not negative",
        ),
        ({"priority": -1}, "message for topic T: priority=-1 must be from 0 to 2147483647"),
        *(
            (
                {"priority": 1, **other},
                "message for topic T: a message with a delay or a sharding key has no priority: leave one of them out",
            )
            for other in ({"delay": 5}, {"sharding_key": "k"})
        ),
    ],
    ids=[
        *("empty", "text", "large", "reserved", "separator", "properties", "keys", "negative delay", "two delays"),
        *("negative priority", "delayed priority", "ordered priority"),
    ],
)
def test_messages_are_checked_and_the_text_says_by_how_much(fields, text):
    with pytest.raises(MessageIllegal) as caught:
        encode_message(
            Message(**{"topic": "T", "body": b"x", **fields}),
            "UK",
            ProducerSettings(limits=SendLimits(message_bytes_max=1000)),
        )
    assert str(caught.value) == text


def test_other_buffers_are_taken_as_bytes():
    assert encode_message(Message(topic="T", body=bytearray(b"ab")), "UK", SETTINGS).body == b"ab"


def test_a_batch_is_entries_with_their_own_unique_keys():
    messages = [Message(topic="T", body=b"1", tags="A"), Message(topic="T", body=b"22", flag=5)]
    prepared = encode_messages(messages, ["U1", "U2"], "UB", SETTINGS)
    assert (prepared.is_batch, prepared.msg_id, prepared.sys_flag) == (True, "U1,U2", 0)
    assert decode_properties(prepared.properties.encode()) == {"UNIQ_KEY": "UB", "WAIT": "true"}
    first, second = decode_batch(prepared.body)
    assert (first.body, second.body, second.flag) == (b"1", b"22", 5)
    assert decode_properties(first.properties) == {"TAGS": "A", "WAIT": "true", "UNIQ_KEY": "U1"}
    assert decode_properties(second.properties) == {"WAIT": "true", "UNIQ_KEY": "U2"}


def test_a_batch_is_never_compressed():
    prepared = encode_messages([Message(topic="T", body=bytes(5000))], ["U1"], "UB", SETTINGS)
    assert prepared.sys_flag == 0
    assert len(prepared.body) > 5000


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "a batch has no messages: give at least one"),
        (
            [Message(topic="T", body=b"1"), Message(topic="U", body=b"1")],
            "a batch has one topic and one wait_store: found U, True besides T, True",
        ),
        (
            [Message(topic="T", body=b"1"), Message(topic="T", body=b"1", wait_store=False)],
            "a batch has one topic and one wait_store: found T, False besides T, True",
        ),
        (
            [Message(topic="%RETRY%G", body=b"1")],
            "a batch cannot be sent to retry topic %RETRY%G: send its messages one by one",
        ),
        (
            [Message(topic="T", body=b"1"), Message(topic="T", body=b"1", delay=0.005)],
            "a batch for topic T cannot hold delayed messages: send them one by one",
        ),
        (
            [Message(topic="T", body=b"1"), Message(topic="T", body=b"1", priority=0)],
            "a batch for topic T cannot hold messages with a priority: send them one by one",
        ),
        (
            [Message(topic="T", body=bytes(90)), Message(topic="T", body=bytes(90))],
            "batch of 2 messages for topic T has 268 bytes, 68 more than the limit of 200: split it",
        ),
    ],
    ids=["none", "topics", "wait", "retry", "delay", "priority", "large"],
)
def test_batches_are_checked(messages, text):
    with pytest.raises(MessageIllegal) as caught:
        encode_messages(
            messages, ["U1", "U2"][: len(messages)], "UB", ProducerSettings(limits=SendLimits(message_bytes_max=200))
        )
    assert str(caught.value) == text


def test_a_message_sent_to_the_retry_topic_remembers_where_it_came_from():
    message = received(7, reconsume_times=2, flag=4, properties={"UNIQ_KEY": "UK", "MIN_OFFSET": "0", "a": "b"})
    prepared = encode_retry(message, "G", 16)
    assert (prepared.topic, prepared.body, prepared.flag) == ("%RETRY%G", b"body", 4)
    assert (prepared.reconsume_times, prepared.retries_max) == (3, 16)
    assert decode_properties(prepared.properties.encode()) == {
        "UNIQ_KEY": "UK",
        "a": "b",
        "RETRY_TOPIC": "T",
        "ORIGIN_MESSAGE_ID": message.offset_msg_id,
        "DELAY": "5",
    }


def test_a_retry_with_an_exact_time_forgets_the_times_before():
    """A broker takes a message with TIMER_OUT_MS for one that its timer has delivered."""
    marks = {"TIMER_OUT_MS": "1", "TIMER_DELAY_MS": "2", "TIMER_ENQUEUE_MS": "3", "TIMER_ROLL_TIMES": "1", "DELAY": "3"}
    prepared = encode_retry(received(7, properties={"a": "b", **marks}), "G", 16, delay_ms=7000)
    found = decode_properties(prepared.properties.encode())
    assert {name: found[name] for name in ("a", "TIMER_DELAY_MS", "RETRY_TOPIC")} == {
        "a": "b",
        "TIMER_DELAY_MS": "7000",
        "RETRY_TOPIC": "T",
    }
    assert not found.keys() & (marks.keys() - {"TIMER_DELAY_MS"})


@given(st.binary(min_size=1, max_size=9000), st.sampled_from(CompressionType))
def test_what_is_sent_is_what_will_be_read(body, compression):
    prepared = encode_message(
        Message(topic="T", body=body), "UK", ProducerSettings(compression=Compressing(type=compression))
    )
    assert decompress(prepared.body, prepared.sys_flag) == body
