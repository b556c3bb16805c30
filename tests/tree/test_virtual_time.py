"""The loop in virtual time, and the fixtures that run on it."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from tests.virtual_time import VirtualLoop, run
from tests.waiting import until

HOUR = 3600.0


@pytest.fixture
async def server():
    """Start a server that answers a line after an hour."""

    async def answer(reader, writer):
        # asyncio prints a traceback for a cancelled handler
        with contextlib.closing(writer), contextlib.suppress(asyncio.CancelledError):
            line = await reader.readline()
            await asyncio.sleep(HOUR)
            writer.write(line)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


async def test_time_jumps_and_the_clock_with_it():
    began, began_ms, real = asyncio.get_running_loop().time(), SYSTEM_CLOCK.now_ms(), time.monotonic()
    await asyncio.sleep(HOUR)
    assert asyncio.get_running_loop().time() - began == pytest.approx(HOUR, abs=1)
    assert SYSTEM_CLOCK.now_ms() - began_ms == pytest.approx(HOUR * 1000, abs=1000)
    assert time.monotonic() - real < HOUR


async def test_timers_fire_in_their_order():
    fired = []
    loop = asyncio.get_running_loop()
    for seconds in (30.0, 0.001, HOUR, 30.001):
        loop.call_later(seconds, fired.append, seconds)
    await asyncio.sleep(2 * HOUR)
    assert fired == [0.001, 30.0, 30.001, HOUR]


async def test_what_is_on_its_way_over_a_socket_comes_before_a_time_out(server):
    reader, writer = await asyncio.open_connection(*server)
    body = b"x" * 50_000 + b"\n"
    async with asyncio.timeout(HOUR + 1):
        writer.write(body)
        assert await reader.readline() == body
    writer.close()


async def test_a_time_out_comes_when_nothing_else_does(server):
    reader, writer = await asyncio.open_connection(*server)
    writer.write(b"\n")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.readline(), HOUR - 1)
    writer.close()


async def test_no_time_passes_while_a_thread_works():
    began = asyncio.get_running_loop().time()
    ticks = asyncio.create_task(asyncio.sleep(0.05))

    def work():
        spent = time.thread_time() + 0.1
        while time.thread_time() < spent:
            pass

    await asyncio.to_thread(work)
    assert not ticks.done()
    assert asyncio.get_running_loop().time() - began < 0.05
    ticks.cancel()


async def test_conditions_are_looked_at_before_time_jumps():
    done = []
    asyncio.get_running_loop().call_later(10, done.append, 1)
    asyncio.get_running_loop().call_later(HOUR, done.append, 2)
    await until(lambda: done)
    assert done == [1]


def test_time_does_not_go_back_between_two_loops():
    async def later():
        await asyncio.sleep(HOUR)
        return SYSTEM_CLOCK.now_ms(), SYSTEM_CLOCK.monotonic_ms()

    first, second = run(later()), run(later())
    assert second[0] - first[0] == pytest.approx(HOUR * 1000, abs=10_000)
    assert second[1] > first[1]
    assert SYSTEM_CLOCK.now_ms() >= second[0]


@pytest.mark.real_time
async def test_a_marker_requests_real_time():
    assert not isinstance(asyncio.get_running_loop(), VirtualLoop)
