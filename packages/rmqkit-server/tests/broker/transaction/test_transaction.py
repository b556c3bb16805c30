"""Half and op messages as they lie in the store (store.md §19.1–19.4)."""

from __future__ import annotations

import pytest

from rmqkit.broker.messages import committed, is_half, to_half
from rmqkit.broker.transaction.half import (
    COLLECTED_MAX,
    half_at,
    immunity_ms,
)
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC
from rmqkit.protocol.op_messages import op_offsets
from tests.broker.half_messages import HalfMessages
from tests.store.inside import appender_of
from tests.store.stores import HOST, message, read_all

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def halves(tmp_path):
    with HalfMessages(tmp_path / "store") as opened:
        yield opened


def op_bodies(halves):
    return [record.body for record in halves.records(OP_HALF_TOPIC)]


def test_a_half_message_keeps_where_it_is_meant_to_go():
    half = to_half(message("T", 3, sys_flag=0x4 | 0x1, flag=7, UNIQ_KEY="K", TAGS="a"))
    assert (half.topic, half.queue_id, half.sys_flag, half.flag) == (HALF_TOPIC, 0, 0x1, 7)
    assert half.parsed == {
        "UNIQ_KEY": "K",
        "TAGS": "a",
        "__transactionId__": "K",
        "REAL_TOPIC": "T",
        "REAL_QID": "3",
    }


def test_what_a_client_says_about_the_real_place_does_not_count():
    half = to_half(message("T", 3, REAL_TOPIC="Other", REAL_QID="9", __transactionId__="forged"))
    assert half.parsed == {"REAL_TOPIC": "T", "REAL_QID": "3"}


@pytest.mark.parametrize(
    ("properties", "reconsume_times", "expected"),
    [
        ({"TRAN_MSG": "true"}, 0, True),
        ({"TRAN_MSG": "TRUE"}, 0, True),
        ({"TRAN_MSG": "true"}, 3, True),
        ({"TRAN_MSG": "true", "DELAY": "2"}, 0, True),
        ({"TRAN_MSG": "true", "DELAY": "2"}, 1, False),
        ({"TRAN_MSG": "true", "DELAY": "0"}, 1, True),
        ({"TRAN_MSG": "yes"}, 0, False),
        ({"XTRAN_MSG": "true"}, 0, False),
        ({}, 0, False),
    ],
)
def test_which_messages_are_half_messages(properties, reconsume_times, expected):
    assert is_half(message(reconsume_times=reconsume_times, **properties)) is expected


def test_commit_puts_the_message_where_it_was_meant_to_go(halves):
    halves.half(b"first")
    put = halves.half(b"second", flag=7, sys_flag=0x1, TAGS="a")
    half = half_at(halves.store, put.physical_offset)
    real = committed(half)
    assert (real.topic, real.queue_id, real.body, real.flag, real.sys_flag) == ("T", 3, b"second", 7, 0x8 | 0x1)
    assert real.prepared_transaction_offset == put.physical_offset > 0
    assert (real.born_timestamp, real.born_host, real.store_host) == (halves.clock.ms, HOST, HOST)
    assert real.parsed == {
        "TRAN_MSG": "true",
        "PGROUP": "p",
        "UNIQ_KEY": "K-second",
        "__transactionId__": "K-second",
        "TAGS": "a",
    }


def test_a_half_message_without_a_real_place_cannot_be_committed(halves):
    place = {"REAL_TOPIC": "T", "REAL_QID": "x"}
    put = halves.store.put(message(HALF_TOPIC, 0, **place))
    assert committed(half_at(halves.store, put.physical_offset)) is None
    put = halves.store.put(message(HALF_TOPIC, 0, REAL_QID="1"))
    assert committed(half_at(halves.store, put.physical_offset)) is None


def test_only_a_half_message_is_found_as_one(halves):
    put = halves.half()
    other = halves.store.put(message("T", 0))
    assert half_at(halves.store, put.physical_offset).queue_offset == 0
    for wrong in (put.physical_offset + 1, put.physical_offset + 4, other.physical_offset, -1, 1 << 40, -(1 << 62)):
        assert half_at(halves.store, wrong) is None


def test_offsets_are_collected_and_written_as_one_op_message(halves):
    for offset in (17, 18, 21):
        halves.ops.add(0, offset)
    assert op_bodies(halves) == []
    assert halves.ops.holds(0, 18)
    halves.ops.write()
    halves.ops.write()
    (op,) = halves.records(OP_HALF_TOPIC)
    assert (op.body, op.properties) == (b"17,18,21,", b"WAIT\x01true\x02TAGS\x01d\x02")
    assert (op.queue_id, op.sys_flag, op.flag, op.born_timestamp) == (0, 0, 0, halves.clock.ms)
    assert op.born_host == op.store_host == HOST
    assert not halves.ops.holds(0, 18)


def test_a_decision_is_held_until_its_op_message_can_be_read(halves, monkeypatch):
    halves.ops.add(0, 18)
    with monkeypatch.context() as not_on_the_disk_yet:
        not_on_the_disk_yet.setattr(type(halves.store), "dispatched_offset", 0)
        halves.ops.write()
        assert halves.ops.holds(0, 18)
    assert not halves.ops.holds(0, 18)


def test_each_half_queue_has_its_own_op_messages(halves):
    halves.ops.add(0, 1)
    halves.ops.add(2, 1)
    assert halves.ops.holds(2, 1)
    assert not halves.ops.holds(1, 1)
    halves.ops.write()
    assert [read_all(halves.store, OP_HALF_TOPIC, queue_id)[0].body for queue_id in (0, 2)] == [b"1,", b"1,"]


def test_too_much_for_one_op_message_is_written_at_once(halves):
    count = 4096 // 5 + 1  # "1000," and so on
    for offset in range(1000, 1000 + count):
        assert op_bodies(halves) == []
        halves.ops.add(0, offset)
    (body,) = op_bodies(halves)
    assert len(body) == 4100
    assert not halves.ops.holds(0, 1000)
    halves.ops.add(0, 5)
    assert len(op_bodies(halves)) == 1


def test_what_the_store_refuses_stays_collected(halves):
    halves.ops.write()
    appender_of(halves.store).refusal = "no room"
    for offset in range(COLLECTED_MAX):
        assert not halves.ops.is_full
        halves.ops.add(0, offset)
    assert halves.ops.is_full
    assert halves.ops.holds(0, 7)
    appender_of(halves.store).refusal = ""
    halves.ops.write()
    assert not halves.ops.is_full
    bodies = op_bodies(halves)
    assert max(map(len, bodies)) <= 4096 + 6
    assert [int(piece) for body in bodies for piece in body.split(b",")[:-1]] == list(range(COLLECTED_MAX))


@pytest.mark.parametrize(
    ("body", "offsets"),
    [(b"17", [17]), (b"17,18,21,", [17, 18, 21]), (b"", []), (b",,", []), (b"a,-1,5,\xff,99999999999999999999", [5])],
)
def test_op_bodies_of_every_version_are_read(halves, body, offsets):
    halves.store.put(message(OP_HALF_TOPIC, 0, body, TAGS="d"))
    (op,) = read_all(halves.store, OP_HALF_TOPIC, 0)
    assert op_offsets(op) == offsets


def test_only_the_tag_d_says_that_a_half_message_is_decided(halves):
    halves.store.put(message(OP_HALF_TOPIC, 0, b"17,", TAGS="x"))
    (op,) = read_all(halves.store, OP_HALF_TOPIC, 0)
    assert op_offsets(op) == []


@pytest.mark.parametrize(("seconds", "expected"), [("10", 10_000), ("0", 0), ("-1", 6000), ("abc", 6000), ("", 6000)])
def test_immunity_in_seconds(seconds, expected):
    assert immunity_ms(seconds, 6000) == expected
