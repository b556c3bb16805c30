"""Held pulls (behaviour.md §4.4)."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rmqkit.broker.pull import long_polling
from rmqkit.broker.pull.long_polling import LongPolling, WaitingPull
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.store.message_store import DispatchRequest
from tests.virtual_time import run as run_virtual
from tests.waiting import SECONDS

pytestmark = pytest.mark.virtual_time


def arrival(queue_offset=0, *, topic="T", queue_id=0, tags_code=0, count=1, properties=b""):
    return DispatchRequest(topic, queue_id, queue_offset, tags_code, 0, 0, 100, 0, properties, count)


class Waiting:
    """Held pulls by name, and who was answered."""

    def __init__(self):
        self.held = LongPolling(SYSTEM_CLOCK)
        self.answered: list[str] = []

    def hold(self, name, *, wait_ms=60_000, queue_id=0, connection=None, **wanted):
        until_ms = SYSTEM_CLOCK.monotonic_ms() + wait_ms
        wanted = {"queue_offset": 0, "codes": None} | wanted
        one = WaitingPull(connection or object(), until_ms=until_ms, retry=lambda: self.answered.append(name), **wanted)
        self.held.hold("T", queue_id, one)

    async def until(self, *names):
        async with asyncio.timeout(SECONDS):
            while self.answered != list(names):
                await asyncio.sleep(0.005)


def in_loop(scenario):
    async def main():
        waiting = Waiting()
        await scenario(waiting)
        waiting.held.close()

    run_virtual(main())


def test_only_the_pulls_a_message_concerns_are_answered_at_once_and_in_order():
    async def scenario(waiting):
        waiting.hold("all")
        waiting.hold("later offset", queue_offset=1)
        waiting.hold("its tag", codes=frozenset({7}))
        waiting.hold("other tag", codes=frozenset({8}))
        waiting.hold("other queue", queue_id=1)
        waiting.hold("its properties", wants=lambda one: one.properties == b"p")
        waiting.hold("other properties", wants=lambda one: False)
        waiting.held.arrived([arrival(tags_code=7, properties=b"p")])
        assert waiting.answered == ["all", "its tag", "its properties"]
        assert len(waiting.held) == 4

    in_loop(scenario)


def test_an_inner_batch_concerns_who_waits_for_one_of_its_messages():
    async def scenario(waiting):
        waiting.hold("inside", queue_offset=4)
        waiting.hold("behind", queue_offset=5)
        waiting.held.arrived([arrival(2, count=3)])
        assert waiting.answered == ["inside"]

    in_loop(scenario)


def test_answers_that_make_further_messages_readable_do_not_nest():
    """Each answer reads, and the store reports the next message of a long read meanwhile."""

    async def scenario(waiting):
        depth, deepest, left = 0, 0, iter(range(1, 2000))

        def answer(tag):
            nonlocal depth, deepest
            depth, deepest = depth + 1, max(deepest, depth + 1)
            if (following := next(left, None)) is not None:
                waiting.held.arrived([arrival(following, tags_code=following, queue_id=following)])
            depth -= 1
            waiting.answered.append(tag)

        until_ms = SYSTEM_CLOCK.monotonic_ms() + 60_000
        for tag in range(2000):
            codes = frozenset({tag})
            waiting.held.hold("T", tag, WaitingPull(object(), 0, codes, until_ms, lambda tag=tag: answer(tag)))
        waiting.held.arrived([arrival()])
        assert waiting.answered == list(range(2000))
        assert deepest == 1

    in_loop(scenario)


def test_a_moved_group_wakes_only_its_own_pulls_of_that_queue():
    async def scenario(waiting):
        waiting.hold("moved", group="g")
        waiting.hold("other group", group="h")
        waiting.hold("other queue", group="g", queue_id=1)
        waiting.held.wake("T", 0, "g")
        assert waiting.answered == ["moved"]
        assert len(waiting.held) == 2

    in_loop(scenario)


@pytest.mark.parametrize("wait_ms", [1, 0, -1, -(1 << 63)])
def test_a_pull_is_answered_when_its_time_is_up(wait_ms):
    async def scenario(waiting):
        waiting.hold("long")
        waiting.hold("short", wait_ms=wait_ms)
        await waiting.until("short")
        assert len(waiting.held) == 1

    in_loop(scenario)


def test_a_wait_may_be_as_long_as_a_client_likes():
    async def scenario(waiting):
        waiting.hold("for ever", wait_ms=(1 << 63) - 1)
        waiting.held.arrived([arrival()])
        assert waiting.answered == ["for ever"]

    in_loop(scenario)


def test_who_waits_for_a_day_over_and_over_leaves_nothing_behind():
    async def scenario(waiting):
        for _ in range(10):
            waiting.hold("for a day", wait_ms=86_400_000)
            waiting.held.arrived([arrival()])
            await asyncio.sleep(1)
        assert len(waiting.answered) == 10
        assert waiting.held.timer_count == 0
        waiting.hold("soon", wait_ms=1000)
        waiting.held.arrived([arrival()])
        assert waiting.held.timer_count == 1, "for the next pull that ends then"
        await asyncio.sleep(2)
        assert waiting.held.timer_count == 0

    in_loop(scenario)


def test_a_pull_that_messages_passed_by_is_answered_soon(monkeypatch):
    monkeypatch.setattr(long_polling, "PASSED_BY_MS", 1)

    async def scenario(waiting):
        waiting.hold("passed by", codes=frozenset({8}))
        waiting.hold("untouched", queue_offset=1, codes=frozenset({8}))
        waiting.held.arrived([arrival(tags_code=7)])
        assert waiting.answered == []
        await waiting.until("passed by")
        assert len(waiting.held) == 1

    in_loop(scenario)


def test_who_holds_again_while_being_answered_waits_on():
    async def scenario(waiting):
        def again():
            waiting.answered.append("once")
            waiting.hold("twice", queue_offset=1, wait_ms=1)

        waiting.held.hold("T", 0, WaitingPull(None, 0, None, SYSTEM_CLOCK.monotonic_ms(), again))
        await waiting.until("once", "twice")
        assert len(waiting.held) == 0

    in_loop(scenario)


def test_the_pulls_of_a_closed_connection_are_dropped():
    async def scenario(waiting):
        gone, other = object(), object()
        waiting.hold("gone", connection=gone)
        waiting.hold("gone, too", connection=gone, queue_id=1, wait_ms=1)
        waiting.hold("other", connection=other)
        waiting.held.connection_closed(gone)
        waiting.held.connection_closed(gone)
        assert len(waiting.held) == 1
        waiting.held.arrived([arrival(), arrival(queue_id=1)])
        assert waiting.answered == ["other"]

    in_loop(scenario)


def test_an_answer_that_closes_another_ones_connection_is_the_only_one():
    async def scenario(waiting):
        connection = object()

        def close():
            waiting.held.connection_closed(connection)

        waiting.held.hold("T", 0, WaitingPull(None, 0, None, SYSTEM_CLOCK.monotonic_ms() + 60_000, close))
        assert len(waiting.held) == 0  # a part of the broker, no client
        waiting.hold("closed", connection=connection)
        waiting.held.arrived([arrival()])
        assert waiting.answered == []
        assert len(waiting.held) == 0

    in_loop(scenario)


def test_a_pull_that_cannot_be_answered_does_not_stop_the_sender(caplog):
    async def scenario(waiting):
        def fail():
            raise OSError("disk")

        waiting.held.hold("T", 0, WaitingPull(None, 0, None, SYSTEM_CLOCK.monotonic_ms() + 60_000, fail))
        waiting.hold("next")
        with caplog.at_level(logging.CRITICAL):
            waiting.held.arrived([arrival()])
        assert waiting.answered == ["next"]

    in_loop(scenario)


def test_stopping_answers_everybody():
    async def scenario(waiting):
        waiting.hold("one")
        waiting.hold("two", queue_id=1)
        waiting.held.close()
        assert waiting.answered == ["one", "two"]

    in_loop(scenario)


def test_a_message_looks_at_the_pulls_of_its_own_queue_only():
    async def scenario(waiting):
        looked: list[int] = []
        for queue_id in range(1000):
            waiting.hold("x", queue_id=queue_id, wants=lambda one, own=queue_id: bool(looked.append(own)))
        waiting.held.arrived([arrival(queue_id=7)])
        assert looked == [7]

    in_loop(scenario)
