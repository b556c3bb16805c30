"""The wall clock is set while delayed messages wait: a level neither stands still nor delivers early."""

from __future__ import annotations

import asyncio

import pytest

from tests.broker.delay.test_schedule import Delays
from tests.set_clock import SetClock
from tests.virtual_time import run as run_virtual

pytestmark = pytest.mark.virtual_time

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
STEPS = [HOUR_MS, -HOUR_MS, DAY_MS, -DAY_MS, -7_000]


def run(tmp_path, scenario):
    async def running():
        delays = Delays(tmp_path / "store", clock=SetClock())
        delays.schedule.load()
        delays.store.open()
        delays.schedule.start()
        try:
            return await scenario(delays)
        finally:
            delays.schedule.stop()
            delays.store.close()

    return run_virtual(running())


async def seconds_until(delays, count, since):
    while delays.store.max_offset("T", 1) < count:
        await asyncio.sleep(0.05)
    return round(asyncio.get_running_loop().time() - since, 1)


@pytest.mark.parametrize("step_ms", [step for step in STEPS if step < 0])
def test_a_clock_that_is_set_back_neither_delays_nor_hastens_a_level(tmp_path, step_ms):
    async def scenario(delays):
        since = asyncio.get_running_loop().time()
        delays.put(3, body=b"before")
        await asyncio.sleep(4)
        delays.put(3, body=b"before, later")
        await asyncio.sleep(2)
        delays.clock.ahead_ms += step_ms
        await asyncio.sleep(2)
        delays.put(3, body=b"after")
        return [await seconds_until(delays, count, since) for count in (1, 2, 3)], delays.bodies()

    seconds, bodies = run(tmp_path, scenario)
    assert bodies == [b"before", b"before, later", b"after"]
    assert [due <= late <= due + 1.2 for due, late in zip((10, 14, 18), seconds, strict=True)] == [True] * 3, seconds


@pytest.mark.parametrize("step_ms", [step for step in STEPS if step > 0])
def test_a_clock_that_is_set_forward_makes_messages_due_within_a_second(tmp_path, step_ms):
    async def scenario(delays):
        delays.put(3, body=b"before")
        await asyncio.sleep(2)
        since = asyncio.get_running_loop().time()
        delays.clock.ahead_ms += step_ms
        before = await seconds_until(delays, 1, since)
        delays.put(3, body=b"after")
        return before, await seconds_until(delays, 2, since) - before

    before, after = run(tmp_path, scenario)
    assert before <= 1.2
    assert 10 <= after <= 11.2


def test_a_message_that_was_stored_before_the_clock_was_set_back_and_the_start_is_due_at_once(tmp_path):
    async def first(delays):
        delays.put(3, body=b"before")

    run(tmp_path, first)

    async def second(delays):
        return await seconds_until(delays, 1, asyncio.get_running_loop().time())

    class Earlier(SetClock):
        def __init__(self):
            self.ahead_ms = -HOUR_MS

    async def running():
        delays = Delays(tmp_path / "store", clock=Earlier())
        delays.schedule.load()
        delays.store.open()
        delays.schedule.start()
        try:
            return await second(delays)
        finally:
            delays.schedule.stop()
            delays.store.close()

    assert run_virtual(running()) <= 1.2
