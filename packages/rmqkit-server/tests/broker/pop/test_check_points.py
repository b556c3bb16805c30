"""The check points of a broker on a small store: their acks, the revive group's offset, and a restart (behaviour.md
§4.7, §4.9, §4.12)."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from rmqkit.broker.pop.check_points import CheckPointStore, PopWriteBatch, revive_topic
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.protocol.properties import decode_properties
from rmqkit.protocol.schemas.pop import PopCheckPoint, StoredAck
from rmqkit.store.message_store import MessageStore, PutResult, PutStatus
from rmqkit.testing.clock import StandingClock
from tests.store.stores import HOST, message, read_all, small_settings

REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
REVIVE_GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
NOW_MS = 1_800_000_000_000
REFUSED = PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")


class Broker:
    """The parts of a broker that check points need, with two revive queues."""

    def __init__(self, folder, **settings):
        self.clock = StandingClock(NOW_MS)
        self.settings = BrokerSettings(broker_name="b", **settings)
        self.store = MessageStore(folder, small_settings(consume_queue_file_bytes=20_000), clock=self.clock)
        self.groups = GroupTable(folder / "config", self.settings, self.clock)
        self.offsets = OffsetTable(folder / "config", self.clock)
        self.store.open()
        self.log = self.loaded()

    def loaded(self, *, offsets_at_ms=1 << 62, groups_at_ms=1 << 62):
        """Return the check points that a start reads from the store."""
        log = CheckPointStore(self.store, self.groups, self.offsets, self.settings, self.clock, HOST)
        log.load(2, offsets_at_ms=offsets_at_ms, groups_at_ms=groups_at_ms)
        return log

    def popped(self, *offsets, queue=0, group="g", invisible_ms=1000, time=NOW_MS):
        """Store a check point and return its key."""
        put = self.log.add("T", group, 0, [*offsets], pop_time=time, invisible_ms=invisible_ms, queue=queue)
        assert put.status is PutStatus.OK
        return "T", group, 0, offsets[0], time

    def new(self, *offsets, group="g", queue=0, before=-1, after=-1):
        arguments = {"pop_time": NOW_MS, "invisible_ms": 1000, "queue": queue, "before": before, "after": after}
        return self.log.new("T", group, 0, [*offsets], **arguments)

    def committed(self, queue=0):
        """Return the revive group's offset after the log has moved it."""
        self.log.commit()
        return self.offsets.get(REVIVE_GROUP, REVIVE, queue)

    def put(self, tag, body, queue=0):
        """Put a record of another program into the revive topic."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.store.put(message(REVIVE, queue, data, TAGS=tag))

    def tags(self, queue=0):
        return [decode_properties(one.properties)["TAGS"] for one in read_all(self.store, REVIVE, queue)]


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path)
    yield broker
    broker.store.close()


@pytest.fixture
def merging(tmp_path):
    broker = Broker(tmp_path, pop_buffer_merge=True)
    yield broker
    broker.store.close()


def check_point(start=0, *, count=1, diffs=(0,), acked=0, time=NOW_MS, group="g"):
    return PopCheckPoint(
        acked_bits=acked,
        broker_name="b",
        group=group,
        diffs=list(diffs) or None,
        invisible_time=1000,
        count=count,
        pop_time=time,
        queue_id=0,
        revive_time=time + 1000,
        start_offset=start,
        topic="T",
    )


def stored_ack(offset, start=0, **fields):
    place = {"broker_name": "b", "group": "g", "pop_time": NOW_MS, "queue_id": 0, "start_offset": start, "topic": "T"}
    return StoredAck(ack_offset=offset, **(place | fields))


# -- queues of the revive topic


def test_a_suspension_is_in_the_record_and_a_restart_reads_it(broker):
    for number, suspends in enumerate((True, False)):
        times = {"pop_time": NOW_MS, "invisible_ms": 1000}
        broker.log.add("T", "g", 0, [number], **times, queue=0, suspends=suspends)
    bodies = [json.loads(one.body) for one in read_all(broker.store, REVIVE, 0)]
    assert [one.get("sp") for one in bodies] == [True, None]
    broker.put("ck", bodies[0] | {"so": 2, "sp": False})  # 5.5 writes the field in each check point
    broker.clock.ms += 2000
    loaded = {one.key[3]: one.is_suspended for one in broker.loaded().due()}
    assert loaded == {0: True, 1: False, 2: False}


def test_pops_use_the_revive_queues_in_turn(broker):
    assert [broker.log.next_queue() for _ in range(5)] == [0, 1, 0, 1, 0]
    assert [broker.log.has_queue(number) for number in (-1, 0, 1, 2)] == [False, True, True, False]
    assert revive_topic("C") == "rmq_sys_REVIVE_LOG_C"


# -- acks


def test_an_ack_is_stored_once_and_only_for_messages_in_flight(broker):
    key = broker.popped(5, 7)
    assert broker.log.pending == {key: {5, 7}}
    assert broker.log.in_flight == {("T", "g", 0): 2}
    results = broker.log.ack({key: [7, 9], ("T", "g", 0, 5, NOW_MS + 1): [5], ("T", "h", 0, 5, NOW_MS): [5]})
    assert [one and one.status for one in results] == [PutStatus.OK, None, None]
    assert (broker.log.pending, broker.log.in_flight) == ({key: {5}}, {("T", "g", 0): 1})
    assert broker.log.ack({key: [7]}) == [None]
    assert broker.tags() == ["ck", "ack"]
    assert broker.log.ack({key: [7, 5]})[0].status is PutStatus.OK
    assert (len(broker.log), broker.log.pending, broker.log.in_flight) == (0, {}, {})
    assert broker.log.counts.put == {("T", "g", "CK", "PUT_OK"): 1, ("T", "g", "ACK", "PUT_OK"): 2}
    assert broker.log.counts.done == {("T", "g", "CK", "0"): 1, ("T", "g", "ACK", "0"): 2}


def test_an_ack_of_a_pop_that_is_not_stored_yet_changes_nothing(broker):
    new = broker.new(5)
    assert broker.log.ack({new.pending.key: [5]}) == [None]
    assert (len(broker.log), broker.log.in_flight, broker.tags()) == (1, {("T", "g", 0): 1}, [])


def test_an_ack_that_the_store_refuses_leaves_its_message_in_flight(broker, monkeypatch):
    key = broker.popped(5)
    monkeypatch.setattr(broker.store, "put", lambda message: REFUSED)
    assert broker.log.ack({key: [5]}) == [REFUSED]
    assert broker.log.pending == {key: {5}}
    assert broker.log.counts.put["T", "g", "ACK", "SERVICE_NOT_AVAILABLE"] == 1
    assert broker.log.counts.done == {}


def test_a_key_is_taken_while_its_pop_is_in_flight(broker):
    key = broker.popped(5)
    assert broker.log.is_taken(*key)
    assert not broker.log.is_taken("T", "g", 0, 5, NOW_MS + 1)
    with pytest.raises(AssertionError, match="pending pops have different keys"):
        broker.new(5)
    broker.log.ack({key: [5]})
    assert not broker.log.is_taken(*key)


def test_a_check_point_that_cannot_be_made_leaves_nothing_in_flight(broker):
    with pytest.raises(ValueError, match="contains the separator"):
        broker.new(5, group="g\x01")
    assert (len(broker.log), broker.log.in_flight) == (0, {})


def test_a_pop_that_is_not_stored_cannot_be_completed(broker):
    new = broker.new(5)
    with pytest.raises(AssertionError, match="a completed check point is stored"):
        broker.log.revived(new.pending, [5])


# -- several records with one write


@pytest.mark.parametrize("is_together", [True, False])
def test_check_points_are_stored_before_the_acks_of_the_same_tick(is_together, broker, monkeypatch):
    key = broker.popped(1)
    broker.popped(2, queue=1)
    broker.offsets.commit("g", "T", 0, 3)
    if not is_together:
        monkeypatch.setattr(broker.store, "put_run", lambda messages: None)
    first, second = broker.new(3, 4, before=3, after=5), broker.new(5, before=5, after=6, queue=1)
    puts, acks = broker.log.store([first, second], {key: [1], ("T", "g", 0, 9, 9): [9]})
    assert [put.queue_offset for put in puts] == [1, 1]
    assert [acks[0].queue_offset, acks[1]] == [2, None]
    assert puts[0].physical_offset < puts[0].end_offset <= puts[1].physical_offset < puts[1].end_offset
    assert puts[1].end_offset <= acks[0].physical_offset
    assert (broker.tags(0), broker.tags(1)) == (["ck", "ck", "ack"], ["ck", "ck"])
    assert broker.offsets.get("g", "T", 0) == 6
    assert (broker.committed(0), broker.committed(1)) == (0, None), "the first pending records are 1 and 0"


def test_a_group_that_was_moved_meanwhile_or_whose_offset_stays_is_not_moved(broker):
    broker.offsets.commit("g", "T", 0, 7)
    broker.log.store([broker.new(3, before=3, after=4)], {})
    assert broker.offsets.get("g", "T", 0) == 7
    broker.log.store([broker.new(7, before=7, after=7)], {})
    broker.log.store([broker.new(8)], {})
    assert broker.offsets.get("g", "T", 0) == 7


def test_after_a_refused_check_point_the_others_of_its_queue_are_refused_and_all_leave(broker, monkeypatch):
    monkeypatch.setattr(broker.store, "put_run", lambda messages: None)
    put, refusals = broker.store.put, [REFUSED]
    monkeypatch.setattr(broker.store, "put", lambda one: refusals.pop() if refusals else put(one))
    for group in "gh":
        broker.offsets.commit(group, "T", 0, 3)
    several = [broker.new(3, before=3, after=4), broker.new(3, group="h", before=3, after=4)]
    several.append(broker.new(4, before=4, after=5))
    puts, _ = broker.log.store(several, {})
    assert [one.status is PutStatus.OK for one in puts] == [False, True, False]
    assert [broker.offsets.get(group, "T", 0) for group in "gh"] == [3, 4]
    assert broker.log.in_flight == {("T", "h", 0): 1}
    assert broker.log.counts.put["T", "g", "CK", "SERVICE_NOT_AVAILABLE"] == 2


def test_withdrawn_check_points_are_those_that_were_not_stored(broker):
    stored, refused, waiting = broker.new(3), broker.new(4), broker.new(5, 6)
    broker.log.store([stored], {})
    broker.log.withdraw([refused])
    broker.log.withdraw([stored, refused, waiting])
    assert broker.log.pending == {stored.pending.key: {3}}
    assert broker.log.in_flight == {("T", "g", 0): 1}
    broker.new(4)
    broker.log.withdraw([refused])
    assert len(broker.log) == 2, "another pop with the same key stays"


# -- the revive group's offset


def test_the_revive_offset_is_that_of_the_record_before_the_first_pending_one(broker):
    first, second, third = (broker.popped(offset) for offset in (1, 2, 3))
    assert (broker.committed(), broker.committed(1)) == (None, None)
    broker.log.ack({second: [2]})  # record 3
    assert broker.committed() is None
    broker.log.ack({first: [1]})  # record 4
    assert broker.committed() == 1
    broker.log.ack({third: [3]})  # record 5
    assert (broker.committed(), broker.committed(1)) == (5, None)
    assert broker.log.needed_from() is None


def test_the_log_is_needed_from_the_oldest_record_that_a_restart_reads(broker):
    assert broker.log.needed_from() is None
    first, second = broker.popped(1), broker.popped(2)
    other = broker.popped(3, queue=1)
    places = [record.physical_offset for queue in (0, 1) for record in read_all(broker.store, REVIVE, queue)]
    broker.log.commit()
    assert broker.log.needed_from() == places[0]
    broker.log.ack({first: [1]})
    broker.log.commit()
    assert broker.log.needed_from() == places[1]
    broker.log.ack({second: [2], other: [3]})
    broker.log.commit()
    assert broker.log.needed_from() is None


def test_an_unchanged_revive_offset_is_not_committed_again(broker):
    first = broker.popped(1)
    broker.log.ack({first: [1]})
    assert broker.committed() == 1
    broker.offsets.snapshot()
    broker.log.commit()
    assert not broker.offsets.is_dirty


# -- delayed acks


def test_delayed_acks_are_stored_with_the_next_write_and_hold_the_revive_offset(merging):
    log = merging.log
    first, second = merging.popped(1, 2), merging.popped(5)
    other = merging.popped(7, queue=1)
    assert log.ack({first: [1]}) == [None]
    assert log.ack({first: [2], second: [5], other: [7]}) == [None] * 3
    assert (log.pending, log.in_flight, log.buffered) == ({}, {}, (3, 4))
    assert log.is_taken(*first)
    with pytest.raises(AssertionError, match="no unwritten acks of another pop have this key"):
        merging.new(1)
    assert merging.tags() == ["ck", "ck"]
    assert merging.committed() is None, "a restart must read the check point whose acks are not stored"
    log.write_acks()
    assert (merging.tags(), merging.tags(1)) == (["ck", "ck", "bAck", "ack"], ["ck", "ack"])
    assert (log.buffered, log.is_taken(*first)) == ((0, 0), False)
    assert (merging.committed(), merging.committed(1)) == (3, 1)
    assert merging.loaded().pending == {}


def test_a_delayed_ack_of_a_later_pop_holds_the_revive_offset_there(merging):
    first, second = merging.popped(1), merging.popped(5)
    merging.log.ack({first: [1]})
    merging.log.write_acks()
    merging.log.ack({second: [5]})
    assert merging.committed() == 0
    third = merging.popped(9)
    merging.log.write_acks()
    assert merging.committed() == 2
    assert merging.loaded().pending == {third: {9}}


def test_delayed_acks_that_the_store_refuses_are_stored_later(merging, monkeypatch):
    first, second = merging.popped(1), merging.popped(5)
    merging.log.ack({first: [1], second: [5]})
    put, refusals = merging.store.put, [REFUSED]
    with monkeypatch.context() as patch:
        patch.setattr(merging.store, "put_run", lambda messages: None)
        patch.setattr(merging.store, "put", lambda one: refusals.pop() if refusals else put(one))
        merging.log.write_acks()
    assert merging.log.buffered == (1, 1)
    assert (merging.log.is_taken(*first), merging.log.is_taken(*second)) == (True, False)
    merging.log.write_acks()
    assert (merging.log.buffered, merging.tags()) == ((0, 0), ["ck", "ck", "ack", "ack"])
    merging.log.write_acks()
    assert len(merging.tags()) == 4


def test_a_redelivery_whose_record_is_refused_is_recorded_later(broker, monkeypatch):
    key = broker.popped(1, 2, 3)
    broker.clock.ms += 1100
    (pending,) = broker.log.due()
    broker.log.revived(pending, [1])
    assert (broker.tags(), broker.log.buffered) == (["ck", "ack"], (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(broker.store, "put", lambda message: REFUSED)
        broker.log.revived(pending, [2, 3])
    assert (broker.log.pending, broker.log.buffered) == ({}, (1, 2))
    assert broker.loaded().pending == {key: {2, 3}}
    broker.log.write_acks()
    assert broker.loaded().pending == {}


# -- due and late


def test_late_check_points_are_counted_by_revive_queue(broker):
    broker.popped(1, invisible_ms=1000)
    broker.popped(2, invisible_ms=1500)
    broker.popped(3, invisible_ms=1000, queue=1)
    assert broker.log.late == {0: (0, 0), 1: (0, 0)}
    broker.clock.ms += 1700
    assert broker.log.late == {0: (2, 700), 1: (1, 700)}


def test_an_acknowledged_pop_is_not_due_and_a_postponed_one_later(broker):
    first, second = broker.popped(1), broker.popped(2)
    broker.log.ack({first: [1]})
    broker.clock.ms += 1100
    (pending,) = broker.log.due()
    assert pending.key == second
    broker.log.postpone(pending, 5000)
    broker.clock.ms += 5000
    assert list(broker.log.due()) == []
    broker.clock.ms += 300
    assert list(broker.log.due()) == [pending]


# -- a restart, and records of other programs


def test_a_restart_reads_what_is_pending_from_the_record_after_the_committed_one(broker):
    first, second = broker.popped(1, 2), broker.popped(5)
    other = broker.popped(8, 9, queue=1)
    broker.log.ack({first: [1, 2], other: [9]})
    broker.log.commit()
    again = broker.loaded()
    assert again.pending == broker.log.pending == {second: {5}, other: {8}}
    assert again.in_flight == {("T", "g", 0): 2}
    broker.offsets.commit(REVIVE_GROUP, REVIVE, 0, 1)
    assert broker.loaded().pending == {other: {8}}, "record 1 is the second check point"


@pytest.mark.parametrize("committed", [2, 3, 9])
def test_a_revive_offset_whose_records_a_power_cut_took_is_lowered_to_the_last_record(broker, committed):
    broker.log.ack({broker.popped(1): [1]})
    broker.offsets.commit(REVIVE_GROUP, REVIVE, 0, committed)
    broker.log = broker.loaded()
    assert broker.offsets.get(REVIVE_GROUP, REVIVE, 0) == 1
    key = broker.popped(5)
    assert broker.committed() == 1
    assert broker.loaded().pending == {key: {5}}


def test_a_revive_offset_of_an_empty_queue_is_no_offset(broker):
    broker.offsets.commit(REVIVE_GROUP, REVIVE, 0, 0)
    broker.log = broker.loaded()
    assert broker.offsets.get(REVIVE_GROUP, REVIVE, 0) is None
    key = broker.popped(5)
    assert broker.loaded().pending == {key: {5}}


def test_own_records_are_not_read_again_and_those_of_others_are(broker):
    broker.popped(1)
    broker.put("ck", check_point(10))
    key = broker.popped(2)
    broker.log.follow()
    assert set(broker.log.pending) == {("T", "g", 0, start, NOW_MS) for start in (1, 2, 10)}
    assert broker.log.in_flight == {("T", "g", 0): 3}
    broker.log.ack({key: [2]})
    assert broker.committed() is None
    for start in (1, 10):
        broker.log.ack({("T", "g", 0, start, NOW_MS): [start]})
    assert broker.committed() == 5


def test_the_record_of_another_program_holds_the_revive_offset_in_the_order_of_the_records(broker):
    first = broker.popped(1)
    broker.put("ck", check_point(10))
    third = broker.popped(2)
    broker.log.follow()
    broker.log.ack({first: [1], third: [2]})
    assert broker.committed() == 0, "record 1 is pending"


def test_records_of_others_wait_while_acks_are_delayed(merging):
    key = merging.popped(1)
    merging.log.ack({key: [1]})
    merging.put("ck", check_point(10))
    merging.log.follow()
    assert merging.log.pending == {}
    merging.log.write_acks()
    merging.log.follow()
    assert merging.log.pending == {("T", "g", 0, 10, NOW_MS): {10}}


@pytest.mark.parametrize(
    ("ack", "left"),
    [
        (stored_ack(10, 10), {12}),
        (stored_ack(-1, 10, ack_offsets=[12]), {10}),
        (stored_ack(11, 10), {10, 12}),
        (stored_ack(10, 10, pop_time=NOW_MS - 1), {10, 12}),
        (stored_ack(10, 9), {10, 12}),
        (stored_ack(10, 10, group="h"), {10, 12}),
        (stored_ack(10, 10, queue_id=1), {10, 12}),
    ],
)
def test_an_ack_of_another_program_counts_for_its_pop_only(ack, left, broker):
    broker.put("ck", check_point(10, count=2, diffs=[0, 2]))
    broker.put("ack" if ack.ack_offset >= 0 else "bAck", ack)
    broker.log.follow()
    assert broker.log.pending == {("T", "g", 0, 10, NOW_MS): left}
    assert broker.log.in_flight == {("T", "g", 0): len(left)}


@pytest.mark.parametrize(("offset", "left"), [(-1, {0}), (0, {2})])
def test_the_list_of_an_ack_counts_only_if_its_offset_is_negative(offset, left, broker):
    broker.put("ck", check_point(0, count=2, diffs=[0, 2]))
    broker.put("bAck", stored_ack(offset, 0, ack_offsets=[2]))
    broker.log.follow()
    assert broker.log.pending == {("T", "g", 0, 0, NOW_MS): left}


def test_a_check_point_of_which_all_is_acknowledged_is_not_pending(broker):
    broker.put("ck", check_point(10, count=2, diffs=[0, 2], acked=0b11))
    broker.put("ck", check_point(20, count=2, diffs=[0, 2], acked=0b10))
    broker.log.follow()
    assert broker.log.pending == {("T", "g", 0, 20, NOW_MS): {20}}


def test_records_that_cannot_be_read_are_logged_and_skipped(broker, caplog):
    for tag, body in (("ck", b"rubbish"), ("ack", b"{}"), ("other", b"rubbish"), ("ck", check_point(10))):
        broker.put(tag, body)
    broker.log.follow()
    assert list(broker.log.pending) == [("T", "g", 0, 10, NOW_MS)]
    assert [one.partition(":")[0] for one in caplog.messages] == [
        "revive queue 0 has a message that is neither check point nor ack"
    ] * 2


@pytest.mark.parametrize(("at_ms", "end"), [(NOW_MS - 1, 13), (NOW_MS, None), (NOW_MS + 1, None)])
def test_a_pop_after_the_last_write_of_the_offsets_moves_its_group_at_a_start(at_ms, end, broker):
    broker.put("ck", check_point(10, count=2, diffs=[0, 2]))
    broker.loaded(offsets_at_ms=at_ms)
    assert broker.offsets.get("g", "T", 0) == end


@pytest.mark.parametrize("diffs", [(0, 1, 2), ()])
@pytest.mark.parametrize(("committed", "end"), [(None, 13), (0, 13), (12, 13), (13, 13), (14, 14)])
def test_a_start_moves_a_group_forward_only(committed, end, diffs, broker):
    broker.put("ck", check_point(10, count=3, diffs=diffs))
    if committed is not None:
        broker.offsets.commit("g", "T", 0, committed)
    broker.loaded(offsets_at_ms=NOW_MS - 1)
    assert broker.offsets.get("g", "T", 0) == end


@pytest.mark.parametrize(
    ("offsets_at_ms", "groups_at_ms", "is_created"),
    [(NOW_MS - 1, NOW_MS, True), (NOW_MS, NOW_MS - 1, True), (NOW_MS, NOW_MS, False)],
)
def test_a_group_that_popped_since_the_last_write_is_created_again(offsets_at_ms, groups_at_ms, is_created, broker):
    broker.put("ck", check_point(10))
    broker.loaded(offsets_at_ms=offsets_at_ms, groups_at_ms=groups_at_ms)
    assert ("g" in broker.groups) is is_created


def test_after_the_start_records_move_no_group(broker):
    log = broker.loaded(offsets_at_ms=0, groups_at_ms=0)
    broker.put("ck", check_point(10))
    log.follow()
    assert list(log.pending) == [("T", "g", 0, 10, NOW_MS)]
    assert (broker.offsets.get("g", "T", 0), "g" in broker.groups) == (None, False)


@pytest.mark.parametrize(("time", "due_ms"), [(NOW_MS - 600, 400), (NOW_MS, 1000), (NOW_MS + 5000, 1000)])
def test_a_pop_of_the_future_is_hidden_from_now_on(time, due_ms, broker):
    broker.put("ck", check_point(10, time=time))
    broker.log.follow()
    broker.clock.ms += due_ms
    assert list(broker.log.due()) == []
    broker.clock.ms += 100
    assert len(list(broker.log.due())) == 1


# -- the batch of one tick


class Peer:
    """A connection that records its answers."""

    def __init__(self, name="peer"):
        self.peer = name
        self.is_corked = False
        self.writes = []
        self.answers = []

    def cork(self):
        self.is_corked = True

    def flush(self):
        self.writes.append([*self.answers])
        self.answers.clear()


class Stored:
    """The results that check points return, and what was withdrawn."""

    def __init__(self, puts=(), acks=(), fault=None):
        self.puts, self.acks, self.fault = puts, acks, fault
        self.calls, self.withdrawn = [], []

    def store(self, new, acks):
        self.calls.append((new, acks))
        if self.fault is not None:
            raise self.fault
        return list(self.puts), list(self.acks)

    def withdraw(self, new):
        self.withdrawn += new


def placed(name, after):
    """Return a check point of queue ``name``."""
    pending = type("Pending", (), {"queue_key": name})
    return type("New", (), {"pending": pending, "after": after})


def put_at(offset):
    return PutResult(PutStatus.OK, offset, offset + 1, offset)


async def test_each_pop_of_a_tick_gets_its_last_result_or_its_first_refusal():
    other = PutResult(PutStatus.OS_PAGE_CACHE_BUSY, reason="busy")
    stored = Stored([put_at(1), put_at(2), REFUSED, put_at(4), other, put_at(6)])
    batch, peer, results = PopWriteBatch(stored), Peer(), []
    new = [placed(name, number) for number, name in enumerate("abcdea")]
    for part in (new[:2], new[2:5], new[5:]):
        batch.pop(peer, part, results.append)
    assert batch.next_offsets == {"a": 5, "b": 1, "c": 2, "d": 3, "e": 4}
    assert (stored.calls, results) == ([], [])
    await asyncio.sleep(0)
    assert stored.calls == [(new, {})]
    assert results == [put_at(2), REFUSED, put_at(6)]
    assert (batch.next_offsets, peer.is_corked, len(peer.writes)) == ({}, True, 1)
    await asyncio.sleep(0)
    assert len(stored.calls) == 1, "the next tick has nothing to store"


async def test_acks_of_one_pop_are_stored_together_and_each_pop_gets_its_result():
    stored = Stored(acks=[put_at(1), None])
    batch, answered = PopWriteBatch(stored), []
    first, second = Peer("first"), Peer("second")

    def answer(key, put, waiting):
        answered.append((key, put, waiting))

    batch.ack("A", 5, first, "command", answer)
    batch.ack_all("B", [1, 2], second, [77, 78], answer)
    batch.ack("A", 6, second, "other", answer)
    batch.ack_all("A", [7], first, [79], answer)
    await asyncio.sleep(0)
    assert stored.calls == [([], {"A": [5, 6, 7], "B": [1, 2]})]
    assert answered == [
        ("A", put_at(1), [(first, "command"), (second, "other"), (first, [79])]),
        ("B", None, [(second, [77, 78])]),
    ]
    assert (len(first.writes), len(second.writes)) == (1, 1)


async def test_a_fault_of_the_store_is_the_answer_to_all_of_the_tick_and_withdraws_their_check_points(caplog):
    stored = Stored(fault=OSError(5, "Input/output error"))
    batch, peer, results = PopWriteBatch(stored), Peer(), []
    new = [placed(name, 1) for name in "abc"]
    batch.pop(peer, new[:1], results.append)
    batch.pop(peer, new[1:], results.append)
    batch.ack("A", 5, peer, "command", lambda key, put, waiting: results.append(put))
    batch.end()
    assert {(one.status, one.reason) for one in results} == {
        (PutStatus.SERVICE_NOT_AVAILABLE, "OSError: [Errno 5] Input/output error")
    }
    assert (len(results), stored.withdrawn, batch.next_offsets) == (3, new, {})
    assert caplog.messages == ["cannot store 3 check points and the acks of 1 pops"]


async def test_an_answer_that_fails_keeps_no_other_from_its_peer(caplog):
    stored = Stored([put_at(1), put_at(2)], [put_at(3), put_at(4)])
    batch, peer, results = PopWriteBatch(stored), Peer(), []

    def fail(*results):
        raise ValueError("boom")

    batch.pop(peer, [placed("a", 1)], fail)
    batch.pop(peer, [placed("b", 1)], results.append)
    batch.ack("A", 5, peer, "command", fail)
    batch.ack("B", 5, peer, "command", lambda key, put, waiting: results.append(put))
    batch.end()
    assert results == [put_at(2), put_at(4)]
    assert caplog.messages == ["cannot answer a pop", "cannot answer acks of A"]
    assert len(peer.writes) == 1


async def test_a_request_that_arrives_while_others_are_answered_belongs_to_the_next_tick():
    stored = Stored(acks=[put_at(1)])
    batch, peer, answered = PopWriteBatch(stored), Peer(), []

    def answer(key, put, waiting):
        answered.append(key)
        if key == "A":
            batch.ack("B", 6, peer, "command", answer)

    batch.ack("A", 5, peer, "command", answer)
    await asyncio.sleep(0)
    assert answered == ["A"]
    await asyncio.sleep(0)
    assert [acks for _, acks in stored.calls] == [{"A": [5]}, {"B": [6]}]
    assert answered == ["A", "B"]


async def test_a_pop_without_check_points_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="a pop without check points is answered at once"):
        PopWriteBatch(Stored()).pop(Peer(), [], lambda put: None)
