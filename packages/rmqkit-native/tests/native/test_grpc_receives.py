"""Receives and acks of gRPC: the messages that the compiled core makes of what a pop found are those that protobuf
makes in Python, with the same handles, and what it reads of an ack is what Python reads. The rest is left to Python."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqkit.core import CORE
from rmqkit.errors import RmqError
from rmqkit.protocol.ids import PopQueue, encode_start_offsets
from rmqkit.protocol.message import records_of
from rmqkit.protocol.record import encode_record, pack_host
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.proxy.schema.messages import DecodeError, message_class
from rmqkit.proxy.schema.records import RESERVED_AND_HIDDEN, handles_of, message_of
from rmqkit.proxy.schema.status import Refused
from rmqkit.proxy.service.receiving import read_ack

MESSAGES = CORE.grpc_messages(RESERVED_AND_HIDDEN)
READ_ACK = CORE.read_grpc_ack
Response = message_class("ReceiveMessageResponse")
AckRequest = message_class("AckMessageRequest")
TRIES_MAX = 17
HANDLE = "5 1700000000000 60000 3 0 broker-a 1 7"
USUAL = "UNIQ_KEY\x01ID1\x02PGROUP\x01T\x02TAGS\x01TagA\x02KEYS\x01k1 k2\x02BORN_TIMESTAMP\x0117\x02a\x01b\x02"


def stored(properties=USUAL, topic="T", **changed):
    fields = {
        "queue_id": 1,
        "flag": 0,
        "queue_offset": 7,
        "physical_offset": 4096,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_123,
        "born_host": pack_host("10.0.0.7", 5000),
        "store_timestamp": 1_700_000_000_456,
        "store_host": pack_host("10.0.0.9", 10911),
        "reconsume_times": 0,
        "prepared_transaction_offset": 0,
        "body": b"hello",
        "properties": properties if isinstance(properties, bytes) else properties.encode(),
    }
    return encode_record(topic=topic.encode(), **{**fields, **changed})


def by_python(records, header, broker, topic="T"):
    """Message, id, handle, queue id and offset of each record; None where it is not as it was stored."""
    found = []
    for one in handles_of(list(records_of(records)), header, broker):
        if one.deliveries > TRIES_MAX or one.record.topic != topic:
            return None
        message = message_of(one.record, one.properties, topic, handle=one.handle.text, deliveries=one.deliveries)
        names = message.system_properties.message_id, one.handle.text
        found.append((message, *names, one.handle.pop.queue_id, one.handle.offset))
    return found


def by_core(records, header, broker="broker-a", topic="T", tags=None):
    handle = f"{header.pop_time} {header.invisible_time} {header.revive_qid}"
    return MESSAGES.encode(records, topic, broker, handle, header.start_offset_info or "", TRIES_MAX, tags)


def header_of(starts=(), **fields):
    told = encode_start_offsets({PopQueue("0", queue): offset for queue, offset in starts})
    return PopMessageResponse(
        pop_time=1_700_000_000_000, invisible_time=60_000, revive_qid=3, rest_num=0, start_offset_info=told, **fields
    )


def check(records, header, broker="broker-a"):
    """Compare the messages of an answer; how many the core took."""
    found = by_core(records, header, broker)
    if found is None:
        return 0
    expected = by_python(records, header, broker)
    assert expected is not None and len(found) == len(expected)
    for (frame, *names), (message, *own) in zip(found, expected, strict=True):
        assert names == own
        answer = Response(message=message)
        content = answer.SerializeToString()
        assert frame[:5] == b"\0" + len(content).to_bytes(4)
        if len(message.user_properties) <= 1:  # protobuf puts several in any order
            assert frame[5:] == content
        assert Response.FromString(frame[5:]) == answer
    return len(found)


texts = st.text(max_size=6).map(lambda text: text.replace("\x01", "").replace("\x02", "")) | st.sampled_from(
    ["", "0", "007", "-1", "1700000000123", "1" * 15, "1" * 16, "٣", "a b", " ", "größe", "x" * 140]
)
names = texts | st.sampled_from(
    ["UNIQ_KEY", "TAGS", "KEYS", "DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "__SHARDINGKEY",
     "TRACE_CONTEXT", "_SYS_MSG_PRIORITY_", "TRAN_MSG", "__BORNHOST", "POP_CK", "WAIT", "a", "b"]
)  # fmt: skip
properties = st.dictionaries(names, texts, max_size=6).map(
    lambda some: "".join(f"{name}\x01{value}\x02" for name, value in some.items())
)
int32, int64 = st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
times = st.integers(-(1 << 40), 1 << 41)
fields = st.fixed_dictionaries(
    {"properties": properties | st.just(USUAL)},
    optional={
        "body": st.binary(max_size=130) | st.sampled_from([bytes(size) for size in (55, 56, 63, 64, 119, 120, 2000)]),
        "queue_id": st.integers(0, 3) | int32,
        "queue_offset": st.integers(0, 9) | int64,
        "physical_offset": int64,
        "sys_flag": st.sampled_from([0, 1, 2, 4, 8, 0x40, 0x80, 0x100]),
        "born_timestamp": times,
        "store_timestamp": times,
        "born_host": st.sampled_from([pack_host("1.2.3.4", 5), pack_host("::1", 5), pack_host("0.0.0.0", 0)]),
        "reconsume_times": st.integers(-2, 20),
        "topic": st.sampled_from(["T", "U", "%RETRY%G_T", "größe"]),
    },
)
starts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 62)), max_size=3)


@settings(deadline=None)
@given(st.lists(fields, min_size=1, max_size=4), starts)
def test_messages_are_those_of_protobuf(several, starts):
    check(b"".join(stored(**one) for one in several), header_of(starts))


@settings(deadline=None)
@given(st.data())
def test_changed_bytes_are_read_as_python_reads_them(data):
    records = bytearray(stored() + stored(queue_offset=8))
    for _ in range(data.draw(st.integers(1, 3))):
        records[data.draw(st.integers(0, len(records) - 1))] = data.draw(st.integers(0, 255))
    records = bytes(records[: data.draw(st.integers(0, len(records)))])
    check(records, header_of([(1, 5)]))


def test_what_brokers_store_is_taken():
    records = b"".join(stored(queue_offset=offset) for offset in range(32))
    assert check(records, header_of([(1, 5)])) == 32
    kinds = [
        "TRAN_MSG\x01true\x02",
        "DELAY\x013\x02",
        "TIMER_DELIVER_MS\x011700000000123\x02",
        "__SHARDINGKEY\x01g\x02",
    ]
    for more in [
        *kinds,
        "_SYS_MSG_PRIORITY_\x013\x02",
        "TRACE_CONTEXT\x01t\x02",
        "__BORNHOST\x01h\x02",
        "größe\x01ä\x02",
    ]:
        assert check(stored(USUAL + more), header_of()) == 1, more
    assert check(stored("a\x01b\x02"), header_of()) == 1, "of a client that gives no id"
    assert check(stored(topic="t" * 128), header_of()) == 0
    assert check(b"", header_of()) == 0


@pytest.mark.parametrize(
    "records",
    [
        stored(sys_flag=1),
        stored(born_host=pack_host("::1", 5)),
        stored(USUAL + "POP_CK\x01" + HANDLE + "\x02"),
        stored(topic="%RETRY%G_T"),
        stored(reconsume_times=TRIES_MAX),
        stored(USUAL + "a\x01c\x02"),
        stored(b"a\x01\xff\x02"),
        stored() + b"x",
        stored()[:-1],
    ],
)
def test_what_has_to_be_looked_at_is_left(records):
    assert by_core(records, header_of()) is None


def test_only_tags_that_are_wanted_are_taken():
    assert by_core(stored(), header_of(), tags=["TagA", "TagB"]) is not None
    assert by_core(stored() + stored("TAGS\x01TagC\x02"), header_of(), tags=["TagA", "TagB"]) is None
    assert by_core(stored("a\x01b\x02"), header_of(), tags=["TagA"]) is None


@pytest.mark.parametrize(("topic", "broker"), [("ns%T", "broker-a"), ("T", ""), ("T", "a b")])
def test_odd_names_are_left(topic, broker):
    assert by_core(stored(topic=topic), header_of(), broker, topic) is None


# ---- acks


def ack(handle=HANDLE + " 4096", topic="T", group="G", message_id="ID1"):
    entry = {"message_id": message_id, "receipt_handle": handle}
    return AckRequest(group={"name": group}, topic={"name": topic}, entries=[entry]).SerializeToString()


def check_ack(content):
    """Compare what is read of an ack; whether the core took it."""
    found = READ_ACK(content)
    if found is None:
        return False
    assert found == read_ack(content)
    return True


numbers = st.sampled_from(
    ["0", "1", "8", "2147483647", "9223372036854775807", "9223372036854775808", "-1", "01", "", "x"]
)
words = st.lists(numbers, min_size=7, max_size=11).map(lambda w: " ".join([*w[:4], "0", "broker-a", *w[6:]]))


@given(words | texts, texts, texts, texts)
def test_what_the_core_reads_of_an_ack_is_what_python_reads(handle, topic, group, message_id):
    check_ack(ack(handle, topic, group, message_id))


@given(st.integers(0, 80), st.binary(max_size=3))
def test_damaged_acks_are_read_as_python_reads_them(place, damage):
    content = ack()
    content = content[:place] + damage + content[place + len(damage) :]
    try:
        check_ack(content)
    except (DecodeError, Refused, RmqError) as error:
        pytest.fail(f"the core takes what Python refuses: {error}")


def test_acks_of_one_message_are_taken():
    assert check_ack(ack())
    assert check_ack(ack(HANDLE))
    assert check_ack(ack(HANDLE.replace(" 0 broker", " 2 broker"), message_id=""))
    assert not check_ack(ack() + ack())
    assert not check_ack(ack(HANDLE + " 1 2"))
    assert not check_ack(ack("bla"))
    assert not check_ack(ack(topic="größe"))
    assert not check_ack(b"")
