"""Bounds on what is under way."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.remoting.client import Permits


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_permits_are_taken_while_there_are_some_and_then_in_line():
    permits = Permits(2)
    assert permits.take_now()
    assert await permits.take(0)
    assert not permits.take_now()
    waiting = [asyncio.create_task(permits.take(60_000)) for _ in range(2)]
    await settled()
    permits.give_back()
    await settled()
    assert [task.done() for task in waiting] == [True, False]
    permits.give_back()
    assert await waiting[1]
    assert permits.free == 0


async def test_bytes_are_a_bound_of_their_own():
    permits = Permits(10, 100)
    assert permits.take_now(60)
    assert not permits.take_now(41)
    assert permits.take_now(40)
    assert (permits.free, permits.free_bytes) == (8, 0)
    assert permits.take_now(), "a call without bytes"
    for size in (60, 40, 0):
        permits.give_back(size)
    assert (permits.free, permits.free_bytes) == (10, 100)


async def test_a_large_call_is_not_overtaken_by_a_small_one():
    permits = Permits(10, 100)
    assert permits.take_now(80)
    large = asyncio.create_task(permits.take(60_000, 90))
    await settled()
    small = asyncio.create_task(permits.take(60_000, 10))
    await settled()
    assert not permits.take_now(1)
    permits.give_back(80)
    assert await large
    assert await small
    assert (permits.free, permits.free_bytes) == (8, 0)


async def test_a_call_larger_than_everything_goes_alone():
    permits = Permits(10, 100)
    assert permits.take_now(1)
    large = asyncio.create_task(permits.take(60_000, 1000))
    await settled()
    assert not large.done()
    permits.give_back(1)
    assert await large
    assert (permits.free, permits.free_bytes) == (9, 0)
    permits.give_back(1000)
    assert (permits.free, permits.free_bytes) == (10, 100)


@pytest.mark.parametrize("how", ["time", "cancelled"])
async def test_when_one_in_line_gives_up_those_behind_it_have_their_turn(how):
    permits = Permits(10, 100)
    assert permits.take_now(80)
    large = asyncio.create_task(permits.take(1 if how == "time" else 60_000, 90))
    await settled()
    small = asyncio.create_task(permits.take(60_000, 20))
    await settled()
    if how == "time":
        assert await large is False
    else:
        large.cancel()
    assert await small
    permits.give_back(20)
    permits.give_back(80)
    assert (permits.free, permits.free_bytes) == (10, 100)


async def test_a_turn_that_came_with_the_cancellation_is_given_back():
    permits = Permits(1)
    assert permits.take_now()
    waiting = asyncio.create_task(permits.take(60_000))
    await settled()
    permits.give_back()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert permits.free == 1
