"""Answers that wait for the disk and for copies (store.md §13.2, §14, §21.5)."""

from __future__ import annotations

import asyncio
import errno

import pytest

from rmqkit.broker import durability
from rmqkit.broker.durability import Durability, Outcome
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.testing.clock import StandingClock
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

FLUSH_MS, SLAVE_MS = 5000, 3000
DISK_ERROR = OSError(errno.EIO, "Input/output error")


def loop_ms():
    return asyncio.get_running_loop().time() * 1000


class Disk:
    """The part of a store that answers need. It records the methods that were called."""

    def __init__(self):
        self.durable_offset = 0
        self.told: list[str] = []

    def request_flush(self):
        self.told.append("flush")

    def dispatch(self):
        self.told.append("dispatch")


class Slaves:
    """The confirmed offset of the copies. ``asked``: the number of reads of it."""

    lacks_replicas = False

    def __init__(self):
        self.offset = 0
        self.asked = 0

    def confirmed_offset(self):
        self.asked += 1
        return self.offset


class Waiting:
    """A `Durability` and how the answers held by it ended, in order."""

    def __init__(self, *, flushes=True, copies=True, copies_timeout_ms=lambda: SLAVE_MS, clock=None):
        self.clock, self.disk, self.slaves = clock or StandingClock(), Disk(), Slaves()
        self.durability = Durability(
            self.disk,
            self.clock,
            flush_timeout_ms=(lambda: FLUSH_MS) if flushes else None,
            copies=self.slaves if copies else None,
            copies_timeout_ms=copies_timeout_ms,
        )
        self.ended: list[tuple[int, Outcome, str]] = []

    def hold(self, *end_offsets):
        for end in end_offsets:
            self.durability.hold(end, lambda outcome, reason, end=end: self.ended.append((end, outcome, reason)))

    async def flush(self, offset, error=None):
        """A flush round ends."""
        self.disk.durable_offset = offset
        await asyncio.to_thread(self.durability.flushed, offset, error)
        await asyncio.sleep(0)

    def ack(self, offset):
        """A slave reports."""
        self.slaves.offset = offset
        self.durability.replicated()

    def pass_time(self, ms):
        """Some time passes; what runs out in it ends."""
        self.clock.ms += ms
        self.durability._expire()

    @property
    def outcomes(self):
        return [(end, outcome) for end, outcome, _ in self.ended]


async def test_a_round_releases_all_it_covers_in_order():
    it = Waiting(copies=False)
    it.hold(100, 200, 300)
    assert it.disk.told == ["flush"] * 3
    await it.flush(200)
    assert it.ended == [(100, Outcome.DURABLE, ""), (200, Outcome.DURABLE, "")]
    assert it.disk.told[-1] == "dispatch"
    await it.flush(300)
    assert it.outcomes[-1] == (300, Outcome.DURABLE)


async def test_what_is_durable_may_be_read_before_its_answer_goes():
    it = Waiting(copies=False)
    it.durability.hold(100, lambda outcome, reason: it.disk.told.append("answer"))
    await it.flush(100)
    assert it.disk.told == ["flush", "dispatch", "answer"]


async def test_a_failed_round_fails_what_it_did_not_cover_and_nothing_else():
    it = Waiting(copies=False)
    it.hold(100, 200, 300)
    await it.flush(100, DISK_ERROR)
    reason = "flush failed: errno 5 Input/output error"
    assert it.ended == [
        (100, Outcome.DURABLE, ""),
        (200, Outcome.FAILED, reason),
        (300, Outcome.FAILED, reason),
    ]
    assert "dispatch" not in it.disk.told


async def test_copies_never_make_up_for_a_failed_flush():
    it = Waiting()
    it.hold(100, 200)
    it.ack(200)
    await it.flush(100, DISK_ERROR)
    assert it.outcomes == [(100, Outcome.DURABLE), (200, Outcome.FAILED)]


async def test_what_is_on_the_disk_continues_waiting_for_copies_after_a_failed_round():
    it = Waiting()
    it.hold(100, 200)
    await it.flush(100, DISK_ERROR)
    assert it.outcomes == [(200, Outcome.FAILED)]
    it.ack(100)
    assert it.outcomes[1:] == [(100, Outcome.DURABLE)]


@pytest.mark.parametrize("disk_first", [True, False])
async def test_both_disk_and_copies_are_waited_for(disk_first):
    it = Waiting()
    it.hold(100)
    if disk_first:
        await it.flush(100)
    else:
        it.ack(100)
    assert it.ended == []
    if disk_first:
        it.ack(100)
    else:
        await it.flush(100)
    assert it.outcomes == [(100, Outcome.DURABLE)]


async def test_without_flush_only_copies_are_waited_for():
    it = Waiting(flushes=False)
    it.hold(100, 200)
    assert it.disk.told == []
    it.ack(150)
    assert it.outcomes == [(100, Outcome.DURABLE)]
    it.ack(200)
    assert it.outcomes[1:] == [(200, Outcome.DURABLE)]


async def test_a_disk_that_takes_too_long():
    it = Waiting(copies=False)
    it.hold(100)
    it.pass_time(FLUSH_MS - 1)
    assert it.ended == []
    it.hold(200)
    it.pass_time(1)
    assert it.outcomes == [(100, Outcome.TIMED_OUT)]
    await it.flush(200)
    assert it.outcomes[1:] == [(200, Outcome.DURABLE)]


async def test_slaves_that_take_too_long():
    it = Waiting()
    it.hold(100)
    await it.flush(100)
    it.pass_time(SLAVE_MS - 1)
    assert it.ended == []
    it.pass_time(1)
    assert it.outcomes == [(100, Outcome.REPLICA_TIMED_OUT)]


async def test_an_answer_that_slaves_delay_still_waits_for_the_disk():
    it = Waiting()
    it.hold(100, 200)
    it.pass_time(SLAVE_MS)
    assert it.ended == []
    await it.flush(100)
    assert it.outcomes == [(100, Outcome.REPLICA_TIMED_OUT)]
    it.pass_time(FLUSH_MS - SLAVE_MS)
    assert it.outcomes[1:] == [
        (200, Outcome.REPLICA_TIMED_OUT)
    ]  # both timeouts have expired: the outcome names the slaves


async def test_a_disk_that_is_late_is_reported_when_the_copies_are_there():
    it = Waiting()
    it.hold(100)
    it.ack(100)
    it.pass_time(FLUSH_MS)
    assert it.outcomes == [(100, Outcome.TIMED_OUT)]


async def test_time_runs_out_by_itself(monkeypatch):
    it = Waiting(flushes=False, copies_timeout_ms=lambda: 20)
    waiting = it.durability.wait(100)
    it.clock.ms += 20
    assert await asyncio.wait_for(waiting, SECONDS) == (Outcome.REPLICA_TIMED_OUT, "")


async def test_the_timer_is_set_again_for_those_that_came_later():
    it = Waiting(flushes=False, copies_timeout_ms=lambda: 20)
    first = it.durability.wait(100)
    it.clock.ms += 10
    second = it.durability.wait(200)
    it.clock.ms += 10
    assert (await asyncio.wait_for(first, SECONDS))[0] is Outcome.REPLICA_TIMED_OUT
    assert not second.done()
    it.clock.ms += 10
    assert (await asyncio.wait_for(second, SECONDS))[0] is Outcome.REPLICA_TIMED_OUT


async def test_a_time_that_is_made_shorter_counts_for_answers_that_wait():
    times_ms = [1_000_000]
    it = Waiting(flushes=False, copies_timeout_ms=lambda: times_ms[-1])
    waiting = it.durability.wait(100)
    times_ms.append(20)
    it.clock.ms += 20
    assert (await asyncio.wait_for(waiting, SECONDS))[0] is Outcome.REPLICA_TIMED_OUT


@pytest.mark.virtual_time
@pytest.mark.parametrize(("slave_ms", "looks"), [(500, 1), (1000, 1), (2500, 3)])
def test_waiting_answers_are_checked_once_a_second_and_when_a_time_is_over(slave_ms, looks):
    async def scenario():
        it, begun = Waiting(flushes=False, copies_timeout_ms=lambda: slave_ms, clock=SYSTEM_CLOCK), loop_ms()
        assert await it.durability.wait(100) == (Outcome.REPLICA_TIMED_OUT, "")
        assert round(loop_ms() - begun) == slave_ms
        assert it.slaves.asked in (looks, looks + 1), "a float may make a check come a moment too early"

    run_virtual(scenario())


@pytest.mark.virtual_time
def test_the_time_of_a_later_answer_runs_from_its_own_put():
    async def scenario():
        it, begun = Waiting(flushes=False, copies_timeout_ms=lambda: 900, clock=SYSTEM_CLOCK), loop_ms()
        first = it.durability.wait(100)
        await asyncio.sleep(0.3)
        second = it.durability.wait(200)
        await first
        assert (round(loop_ms() - begun), second.done()) == (900, False)
        await second
        assert round(loop_ms() - begun) == 1200
        assert it.slaves.asked <= 4, "a float may make a check come a moment too early"

    run_virtual(scenario())


async def test_a_hold_without_an_answer_is_a_fault_of_its_caller():
    with pytest.raises(AssertionError, match="a release sends at least one answer"):
        Waiting().durability.hold(100, lambda outcome, reason: None, answers=0)


async def test_one_look_at_the_copies_releases_many():
    it = Waiting(flushes=False)
    it.hold(*range(1, 1001))
    it.ack(1000)
    assert (len(it.ended), it.slaves.asked) == (1000, 1)
    it.ack(2000)
    assert it.slaves.asked == 1  # nobody waits


async def test_whether_an_answer_has_to_wait():
    it = Waiting()
    assert not it.durability.has(100)
    it.disk.durable_offset = 100
    assert (it.durability.is_on_disk(100), it.durability.has(100)) == (True, False)
    it.slaves.offset = 100
    assert it.durability.has(100)
    assert not it.durability.has(101)


@pytest.mark.parametrize("flushes", [True, False])
async def test_a_put_that_waits_for_nothing_wakes_the_flush_thread_only_where_flushes_are_waited_for(flushes):
    it = Waiting(flushes=flushes)
    it.durability.wake()
    assert it.disk.told == (["flush"] if flushes else [])


@pytest.mark.parametrize("copies", [True, False])
async def test_too_few_replicas_are_a_matter_of_slaves(copies):
    it = Waiting(copies=copies)
    assert not it.durability.lacks_replicas
    it.slaves.lacks_replicas = True
    assert it.durability.lacks_replicas is copies


async def test_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(durability, "WAITING_MAX", 3)

    it = Waiting(copies=False)
    it.hold(1, 2)
    assert not it.durability.is_full
    it.hold(3)
    assert it.durability.is_full
    await it.flush(1)
    assert not it.durability.is_full


async def test_who_no_longer_waits_is_passed_over():
    it = Waiting(copies=False)
    given_up, waiting = it.durability.wait(100), it.durability.wait(100)
    given_up.cancel()
    await it.flush(100)
    assert await waiting == (Outcome.DURABLE, "")
