"""The delivery of a second: the order of its messages, what is left out, and what is retried (store.md §18.6)."""

from __future__ import annotations

from collections import Counter

import pytest

from rmqkit.broker.delay.destination import Refused
from rmqkit.broker.delay.wheel import Broken
from rmqkit.protocol.names import TIMER_TOPIC
from rmqkit.protocol.properties import decode_properties, java_hash
from rmqkit.protocol.schemas.brokers import TimerCheckpoint
from rmqkit.store.message_store import PutResult, PutStatus
from rmqkit.store.timer.log import NONE, PLAIN, Unit
from tests.broker.delay.stand import NOW_MS, Stand

DUE_MS = NOW_MS + 500


@pytest.fixture
async def stand(tmp_path):
    stand = Stand(tmp_path)
    yield stand
    stand.close()


def fill(stand, *bodies, time_ms=DUE_MS, **properties):
    """Store messages for a time and put them on the wheel. Return start and end of their records."""
    puts = [stand.keep(time_ms, body=body.encode(), **properties) for body in bodies]
    while stand.timer.enqueue.run(None):
        pass
    return [(put.physical_offset, put.end_offset) for put in puts]


async def test_a_second_is_delivered_in_the_order_of_arrival_when_it_is_over(stand, caplog):
    fill(stand, "a", "b")
    fill(stand, "later", time_ms=DUE_MS + 10)
    fill(stand, "c")
    stand.clock.ms += 509
    assert not await stand.deliver()
    assert (stand.bodies(), stand.state.read_ms, stand.timer.pending) == ([], DUE_MS, 4)
    stand.clock.ms += 1
    assert not await stand.deliver()
    assert (stand.bodies(), stand.state.read_ms, stand.timer.pending) == ([b"a", b"b", b"c"], DUE_MS + 10, 1)
    assert (stand.state.dequeued, stand.state.is_changed) == (Counter(T=3), True)
    assert caplog.messages == []


async def test_a_delivered_message_has_the_times_when_it_came_and_left(stand):
    fill(stand, "a", name="kept")
    stand.clock.ms += 600
    await stand.deliver()
    (record,) = stand.records()
    assert decode_properties(record.properties) == {
        "name": "kept",
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
        "TIMER_OUT_MS": str(DUE_MS),
        "TIMER_ENQUEUE_MS": str(NOW_MS),
        "TIMER_DEQUEUE_MS": str(NOW_MS + 600),
    }


async def test_a_message_that_is_due_before_it_was_on_the_wheel_is_delivered_at_once(stand):
    fill(stand, "a", time_ms=NOW_MS - 10)
    (record,) = stand.records()
    assert decode_properties(record.properties)["TIMER_ENQUEUE_MS"] == "9223372036854775807"
    assert (stand.state.dequeued, stand.timer.pending) == (Counter(T=1), 0)


async def test_a_message_that_is_refused_at_once_is_retried_and_those_before_it_are_not_repeated(stand, monkeypatch):
    stand.keep(DUE_MS)
    stand.keep(NOW_MS - 10, body=b"late")
    put, refusals = stand.store.put, [PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")]
    monkeypatch.setattr(stand.store, "put", lambda one: refusals.pop() if refusals else put(one))
    with pytest.raises(Refused, match="no space"):
        stand.timer.enqueue.run(None)
    assert (stand.state.queue_offset, stand.timer.pending, stand.bodies()) == (1, 1, [])
    assert stand.timer.enqueue.run(None)
    assert (stand.state.queue_offset, stand.timer.pending, stand.bodies()) == (2, 1, [b"late"])


async def test_messages_after_a_refused_one_are_delivered_with_it_later(stand, monkeypatch):
    fill(stand, *"abc")
    stand.clock.ms += 510
    put, refusals = stand.store.put, [PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")]
    with monkeypatch.context() as patch:
        patch.setattr(stand.store, "put_run", lambda messages: None)
        patch.setattr(stand.store, "put", lambda one: refusals.pop() if refusals and one.body == b"b" else put(one))
        with pytest.raises(Refused, match="no space"):
            await stand.deliver()
    assert (stand.bodies(), stand.timer.pending, stand.state.read_ms) == ([b"a"], 2, DUE_MS)
    assert len(stand.timer.dequeue.delivered) == 1
    assert not await stand.deliver()
    assert (stand.bodies(), stand.timer.pending) == ([b"a", b"b", b"c"], 0)


async def test_a_delivery_stops_after_128_messages_when_its_time_is_up(stand):
    fill(stand, *map(str, range(200)))
    stand.clock.ms += 510
    counts = [(await stand.deliver(until_ms=0), stand.store.max_offset("T", 1)) for _ in range(4)]
    assert counts == [(True, 0), (True, 128), (True, 200), (False, 200)], "the first call reads the chain"
    assert stand.bodies() == [str(number).encode() for number in range(200)]


async def test_a_delivery_passes_256_empty_seconds_when_its_time_is_up(stand):
    stand.clock.ms += 3000
    assert await stand.deliver(until_ms=0)
    assert stand.state.read_ms == NOW_MS + 2560
    assert not await stand.deliver()
    assert stand.state.read_ms == NOW_MS + 3000


async def test_messages_that_were_delivered_before_are_left_out_and_no_longer_counted(stand):
    fill(stand, *"abc")
    stand.state.left_out = {1}
    stand.state.master_progress = TimerCheckpoint(last_read_time_ms=DUE_MS + 1, master_timer_queue_offset=1)
    stand.state.counts_delivered = True
    stand.clock.ms += 510
    await stand.deliver()
    assert stand.bodies() == [b"c"]
    assert (stand.timer.pending, stand.state.dequeued) == (1, Counter(T=1)), "b was subtracted when it was delivered"


@pytest.mark.parametrize(
    ("marker", "delivered"),
    [
        ({"TIMER_DEL_UNIQKEY": "K1"}, [b"b"]),
        ({"TIMER_DEL_UNIQKEY": "T+K1"}, [b"b"]),
        ({"TIMER_DEL_UNIQKEY": "K3"}, [b"a", b"b"]),
        ({"TIMER_DEL_UNIQKEY": "U+K1"}, [b"a", b"b"]),
    ],
)
async def test_a_marker_cancels_the_message_of_its_key(marker, delivered, stand):
    for body, key in ((b"a", "K1"), (b"b", "K2")):
        stand.keep(DUE_MS, body=body, UNIQ_KEY=key)
    stand.keep(DUE_MS, body=b"marker", UNIQ_KEY="M", **marker)
    stand.timer.enqueue.run(None)
    stand.clock.ms += 510
    await stand.deliver()
    assert stand.bodies() == delivered


async def test_a_marker_of_another_second_cancels_nothing(stand):
    fill(stand, "a", UNIQ_KEY="K")
    fill(stand, "marker", time_ms=DUE_MS + 10, TIMER_DEL_UNIQKEY="K")
    stand.clock.ms += 600
    await stand.deliver()
    assert stand.bodies() == [b"a"]


async def test_a_message_of_a_stage_stays_timed_and_counts_its_stages(stand):
    fill(stand, "a", time_ms=NOW_MS + 150_000)
    stand.clock.ms += 60_010
    await stand.deliver()
    assert stand.bodies() == []
    (_, rolled) = stand.records(TIMER_TOPIC, 0)
    properties = decode_properties(rolled.properties)
    assert (properties["TIMER_ROLL_TIMES"], properties["TIMER_OUT_MS"]) == ("1", str(NOW_MS + 150_000))
    assert (properties["TIMER_ENQUEUE_MS"], properties["TIMER_DEQUEUE_MS"]) == (str(NOW_MS), str(NOW_MS + 60_010))
    stand.timer.enqueue.run(None)
    stand.clock.ms += 60_010
    await stand.deliver()
    (*_, rolled) = stand.records(TIMER_TOPIC, 0)
    assert decode_properties(rolled.properties)["TIMER_ROLL_TIMES"] == "2"
    stand.timer.enqueue.run(None)
    stand.clock.ms += 60_010
    await stand.deliver()
    assert (stand.bodies(), stand.timer.pending) == ([b"a"], 0)


async def test_an_acting_master_sends_a_message_of_a_stage_for_its_own_time(stand):
    sent = []

    async def remote_put(one):
        sent.append((one.topic, one.queue_id, one.parsed))
        return True

    fill(stand, "a", time_ms=NOW_MS + 150_000, name="kept", TIMER_DELAY_MS=150_001)
    stand.timer.start(remote_put)
    stand.timer.stop()
    stand.clock.ms += 60_010
    await stand.deliver()
    assert sent == [
        ("T", 1, {"name": "kept", "REAL_TOPIC": "T", "REAL_QID": "1", "TIMER_DELIVER_MS": str(NOW_MS + 150_010)})
    ]


async def test_a_message_whose_unit_is_of_another_topic_is_delivered_with_a_warning(stand, caplog):
    ((physical_offset, end_offset),) = fill(stand, "a")
    stand.state.files.wheel.clear()
    unit = Unit(NONE, PLAIN, NOW_MS, 500, physical_offset, end_offset - physical_offset, java_hash("U"))
    assert stand.state.files.add([unit]) == 1
    stand.clock.ms += 510
    await stand.deliver()
    assert stand.bodies() == [b"a"]
    assert [line.partition(",")[0] for line in caplog.messages] == [f"timed message at {physical_offset} is for T"]


async def test_a_record_that_is_missing_rebuilds_the_wheel_once_for_a_second(stand):
    fill(stand, "a")
    unit = Unit(NONE, PLAIN, NOW_MS, 500, 1 << 30, 100, java_hash("T"))
    assert stand.state.files.add([unit]) == 1
    stand.clock.ms += 510
    with pytest.raises(Broken, match="the commit log has no timed message of 100 bytes at 1073741824"):
        await stand.deliver()
    assert stand.bodies() == []
    stand.timer.dequeue.begin()
    with pytest.raises(Broken):
        await stand.deliver()


async def test_a_message_without_a_real_queue_is_dropped_and_the_others_are_delivered(stand, caplog):
    stand.keep(DUE_MS, body=b"a", REAL_QID="x")
    fill(stand, "b")
    stand.clock.ms += 510
    await stand.deliver()
    assert stand.bodies() == [b"b"]
    assert [line.partition(":")[0] for line in caplog.messages] == ["timed message at 0 is dropped"]
