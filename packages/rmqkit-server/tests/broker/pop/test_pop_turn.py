"""Check points and acks of one loop tick: they share one write, and offsets move after it (behaviour.md §4.8)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.protocol.codes import ResponseCode
from rmqkit.store.message_store import PutResult, PutStatus
from tests.broker.pops import ack, context_of, now_ms, pop, sent


async def warm(cluster):
    """Put a message into every queue of the revive topic, so that all queues take part in shared writes."""
    log = context_of(cluster).pop.check_points
    for queue in range(8):
        log.add("T", "warm", 0, [queue], pop_time=queue, invisible_ms=1 << 50, queue=queue)


def mark(log, offset, group="g"):
    arguments = {"pop_time": offset, "invisible_ms": 1 << 50, "queue": log.next_queue()}
    return log.new("T", group, 0, [offset], **arguments, before=offset, after=offset + 1)


async def test_what_a_turn_brings_is_one_write(monkeypatch, cluster):
    await warm(cluster)
    own = context_of(cluster)
    log, store, counts = own.pop.check_points, own.store, []
    put_run = store.put_run
    monkeypatch.setattr(store, "put_run", lambda messages: counts.append(len(messages)) or put_run(messages))
    monkeypatch.setattr(store, "put", lambda message: pytest.fail("put alone"))
    own.offsets.commit("g", "T", 0, 0)
    puts, acked = log.store([mark(log, 0), mark(log, 1)], {("T", "warm", 0, 4, 4): [4], ("T", "x", 0, 0, 0): [0]})
    assert counts == [3]
    assert acked[0].end_offset > puts[1].end_offset > puts[0].end_offset
    assert (acked[1], own.offsets.get("g", "T", 0), len(log)) == (None, 2, 9)


@pytest.mark.parametrize("fault", [False, True])
async def test_what_is_refused_is_not_given_away_and_popped_again(monkeypatch, fault, cluster):
    await sent(cluster, *"abc")
    own = context_of(cluster)
    put = own.store.put

    def refuses(message):
        if not message.topic.startswith("rmq_sys_REVIVE"):
            return put(message)
        if fault:
            raise OSError(5, "Input/output error")
        return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason="no space")

    with monkeypatch.context() as patch:
        patch.setattr(own.store, "put", refuses)
        patch.setattr(own.store, "put_run", lambda messages: None)
        several = await asyncio.gather(*(pop(cluster, max_msg_nums=1) for _ in range(2)))
    assert {one.code for one in several} == {ResponseCode.SYSTEM_ERROR}
    assert ("Input/output" if fault else "no space") in several[0].remark
    assert (own.offsets.get("g", "T", 0), len(own.pop.check_points), own.pop.check_points.in_flight) == (0, 0, {})
    assert list(await pop(cluster)) == ["a", "b", "c"]


async def test_behind_a_check_point_that_is_refused_no_other_of_its_queue_is_stored(monkeypatch, cluster):
    own = context_of(cluster)
    log, put = own.pop.check_points, own.store.put
    refusals = iter([PutResult(PutStatus.OS_PAGE_CACHE_BUSY, reason="busy")])
    monkeypatch.setattr(own.store, "put_run", lambda messages: None)
    monkeypatch.setattr(own.store, "put", lambda message: next(refusals, None) or put(message))
    for group in "gh":
        own.offsets.commit(group, "T", 0, 0)
    puts, _ = log.store([mark(log, 0), mark(log, 0, "h"), mark(log, 1)], {})
    assert [put.status is PutStatus.OK for put in puts] == [False, True, False]
    assert [own.offsets.get(group, "T", 0) for group in "gh"] == [0, 1]
    assert log.in_flight == {("T", "h", 0): 1}


async def test_a_group_that_is_moved_before_the_turn_ends_stays_where_it_was_moved_to(cluster):
    own = context_of(cluster)
    own.offsets.commit("g", "T", 0, 5)
    marked = mark(own.pop.check_points, 5)
    own.offsets.reset("g", "T", 0, 2)
    own.pop.check_points.store([marked], {})
    assert own.offsets.get("g", "T", 0) == 2


async def test_pops_of_one_turn_share_a_queue_out(cluster):
    await sent(cluster, *"abcdef")
    several = await asyncio.gather(*(pop(cluster, max_msg_nums=1) for _ in range(8)))
    assert sorted(body for one in several for body in one) == list("abcdef")
    answers = await asyncio.gather(*(ack(cluster, handle) for one in several for handle in one.handles.values()))
    assert {answer.code for answer in answers} == {0}
    assert (len(context_of(cluster).pop.check_points), context_of(cluster).offsets.get("g", "T", 0)) == (0, 6)


class Peer:
    """A connection that writes its gathered data, or cannot write."""

    def __init__(self, fault=None):
        self.peer, self.fault = "peer", fault
        self.gathered, self.written = None, []

    def cork(self):
        self.gathered = []

    def flush(self):
        if self.fault is not None:
            raise self.fault
        self.written, self.gathered = self.gathered, None


async def test_a_turn_writes_its_answers_whichever_connection_fails(cluster):
    def answer(key, put, waiting):
        for connection, command in waiting:
            connection.gathered.append((command, put))

    turn, peers = context_of(cluster).pop.batch, [Peer(), Peer(OSError("gone")), Peer()]
    for number, peer in enumerate(peers):
        turn.ack(("T", "x", 0, 0, number % 2), 0, peer, number, answer)
    turn.end()
    assert [peer.written for peer in peers] == [[(0, None)], [], [(2, None)]]


async def test_messages_of_one_answer_have_one_pop_time(monkeypatch, cluster):
    """One of the two queues has a pop of this millisecond already, as after a reset."""

    own, time = context_of(cluster), now_ms()
    own.settings.higher_queues_first = False
    await sent(cluster, "a")
    await sent(cluster, "b", queue_id=1)
    own.pop.check_points.add("T", "g", 1, [0], pop_time=time, invisible_ms=60_000, queue=0)
    monkeypatch.setattr("random.random", lambda: 0.0)
    monkeypatch.setattr(own.pop, "clock", type("Still", (), {"now_ms": staticmethod(lambda: time)}))
    first, second = await pop(cluster), await pop(cluster)
    assert (list(first), list(second)) == (["a"], ["b"])
    for handle in (first.handles | second.handles).values():
        assert (await ack(cluster, handle)).code == 0
    assert list(own.pop.check_points.pending) == [("T", "g", 1, 0, time)]
