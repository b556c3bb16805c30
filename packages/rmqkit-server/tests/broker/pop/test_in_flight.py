"""The due times of pops in flight, their records in the revive topic, and their counters (behaviour.md §4.9, §4.12)."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.broker.pop.in_flight import ExpiryWheel, InFlightPop, PopCounts, ReviveRecords
from rmqkit.broker.settings import BrokerSettings
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.store.message_store import PutStatus
from rmqkit.testing.clock import StandingClock

HOST = pack_host("10.0.0.1", 10911)


def in_flight(due_ms, start=0, *, queue=3):
    return InFlightPop(("T", "g", 2, start, 900), ("T", "g", 2), {start}, due_ms, queue, -1)


@pytest.fixture
def clock():
    return StandingClock(1000)


@pytest.fixture
def wheel(clock):
    return ExpiryWheel(clock)


# -- due times


@pytest.mark.parametrize("due_ms", [1000, 1001, 1099])
def test_a_pop_is_due_when_its_slot_of_100_ms_is_over(due_ms, wheel, clock):
    one = in_flight(due_ms)
    wheel.enter(one)
    for now_ms, expected in ((due_ms, []), (1099, []), (1100, [one])):
        clock.ms = now_ms
        assert list(wheel.due()) == expected


def test_pops_are_due_in_the_order_of_their_slots_and_those_of_a_slot_in_the_order_of_their_arrival(wheel, clock):
    several = [in_flight(due_ms) for due_ms in (1350, 1120, 1310, 1110, 1400)]
    for one in several:
        wheel.enter(one)
    clock.ms = 1400
    found = []
    for one in wheel.due():
        found.append(several.index(one))
        wheel.leave(one)
    assert found == [1, 3, 0, 2]
    assert list(wheel.due()) == []


def test_a_pop_that_its_caller_leaves_is_due_again_after_the_next_slot(wheel, clock):
    one = in_flight(1000)
    wheel.enter(one)
    clock.ms = 1250
    assert list(wheel.due()) == [one]
    assert one.due_ms == 1350
    for now_ms, expected in ((1399, []), (1400, [one])):
        clock.ms = now_ms
        assert list(wheel.due()) == expected


@pytest.mark.parametrize(("now_ms", "due_ms"), [(900, 1030), (1000, 1030), (1500, 1530)])
def test_a_pop_is_postponed_from_its_time_or_from_now_whichever_is_later(now_ms, due_ms, wheel, clock):
    one, other = in_flight(1000), in_flight(1000)
    wheel.enter(one)
    wheel.enter(other)
    clock.ms = now_ms
    wheel.postpone(one, 30)
    assert (one.due_ms, other.due_ms) == (due_ms, 1000)
    clock.ms = 1600
    found = []
    for due in wheel.due():
        found.append(due)
        wheel.leave(due)
    assert len(found) == 2
    assert {id(due) for due in found} == {id(one), id(other)}


def test_a_pop_that_left_is_not_due_and_leaves_only_once(wheel, clock):
    one, other = in_flight(1000), in_flight(1000)
    wheel.enter(one)
    wheel.enter(other)
    for _ in range(2):
        wheel.leave(one)
    wheel.leave(in_flight(5000))
    clock.ms = 1100
    assert list(wheel.due()) == [other]


def test_a_pop_is_late_from_the_first_millisecond_after_its_time(wheel, clock):
    several = [in_flight(due_ms) for due_ms in (1000, 1001, 1050, 1100, 1200)]
    for one in several:
        wheel.enter(one)
    for now_ms, expected in (
        (1000, {}),
        (1001, {0: 1}),
        (1100, {0: 100, 1: 99, 2: 50}),
        (1101, {0: 101, 1: 100, 2: 51, 3: 1}),
    ):
        clock.ms = now_ms
        assert {several.index(one): late_ms for one, late_ms in wheel.late()} == expected


def test_two_pops_with_equal_fields_are_two_pops():
    assert in_flight(1) != in_flight(1)


def test_a_pop_has_the_names_of_its_key():
    one = in_flight(1000, 7)
    assert (one.topic, one.group, one.queue_id, one.pop_time, one.unwritten) == ("T", "g", 2, 900, [])


# -- records


@pytest.fixture
def records(clock):
    return ReviveRecords("REVIVE", BrokerSettings(broker_name="b"), clock, HOST)


def test_a_check_point_has_the_distances_of_its_messages(records):
    record = records.check_point(in_flight(1500, 7), [7, 9, 12], 600)
    assert (record.topic, record.queue_id, record.born_timestamp) == ("REVIVE", 3, 1000)
    assert (record.flag, record.sys_flag, record.born_host, record.store_host) == (0, 0, HOST, HOST)
    assert decode_properties(record.properties) == {
        "TIMER_DELIVER_MS": "1000",
        "UNIQ_KEY": "T@2@7@g@900@b@ck",
        "TAGS": "ck",
    }
    assert record.keys == (b"T@2@7@g@900@b@ck", b"", b"ck")
    assert msgspec.json.decode(record.body, type=PopCheckPoint) == PopCheckPoint(
        broker_name="b",
        group="g",
        diffs=[0, 2, 5],
        invisible_time=600,
        count=3,
        pop_time=900,
        queue_id=2,
        revive_time=1500,
        start_offset=7,
        topic="T",
    )


@pytest.mark.parametrize(
    ("offsets", "tag", "key", "offset"),
    [([9], "ack", "T@2@9@g@900@b@ack", 9), ([9, 7], "bAck", "T@2@-1@g@900@b@ack", -1)],
)
def test_an_ack_of_one_message_has_its_offset_and_one_of_several_a_list(offsets, tag, key, offset, records):
    record = records.ack(in_flight(1500, 7), offsets)
    properties = decode_properties(record.properties)
    assert (record.queue_id, properties["UNIQ_KEY"], properties["TAGS"]) == (3, key, tag)
    assert record.keys == (key.encode(), b"", tag.encode())
    expected = StoredAck(
        ack_offset=offset, broker_name="b", group="g", pop_time=900, queue_id=2, start_offset=7, topic="T"
    )
    if len(offsets) > 1:
        expected.ack_offsets = offsets
    assert msgspec.json.decode(record.body, type=StoredAck) == expected


def test_records_of_no_message_or_of_a_message_before_the_first_are_mistakes_of_the_caller(records):
    with pytest.raises(AssertionError, match="an ack has at least one offset"):
        records.ack(in_flight(1500, 7), [])
    with pytest.raises(AssertionError, match="no offset is less than the start offset"):
        records.check_point(in_flight(1500, 7), [7, 6], 600)


@pytest.mark.parametrize("separator", ["\x01", "\x02"])
def test_a_name_with_a_separator_of_properties_is_refused(separator, records):
    one = in_flight(1500, 7)
    one.key = (f"T{separator}", "g", 2, 7, 900)
    with pytest.raises(ValueError, match="contains the separator 0x01 or 0x02"):
        records.check_point(one, [7], 600)


# -- counters


def test_puts_are_counted_by_topic_group_kind_and_status():
    counts = PopCounts()
    counts.has_put("T", "g", "CK", PutStatus.OK)
    counts.has_put("T", "g", "CK", PutStatus.OK)
    counts.has_put("T", "g", "ACK", PutStatus.OK, 3)
    counts.has_put("T", "g", "ACK", PutStatus.MESSAGE_ILLEGAL, 2)
    assert counts.put == {
        ("T", "g", "CK", "PUT_OK"): 2,
        ("T", "g", "ACK", "PUT_OK"): 3,
        ("T", "g", "ACK", "MESSAGE_ILLEGAL"): 2,
    }


def test_counters_of_deleted_topics_are_dropped_and_the_others_stay():
    counts = PopCounts()
    for topic in "TU":
        counts.put[topic, "g", "CK", "PUT_OK"] = 1
        counts.done[topic, "g", "CK", "0"] = 2
        counts.revived[topic, "g", "PUT_OK"] = 3
    counts.drop_topics(lambda topic: topic == "T")
    assert (counts.put, counts.done, counts.revived) == (
        {("U", "g", "CK", "PUT_OK"): 1},
        {("U", "g", "CK", "0"): 2},
        {("U", "g", "PUT_OK"): 3},
    )
