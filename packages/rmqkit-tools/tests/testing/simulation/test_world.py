"""Processes, time and the trace of a simulated world."""

import asyncio
import time

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.system import process as own_process
from rmqkit.testing.simulation import World


def test_waits_cost_no_time_and_end_in_their_order() -> None:
    ended: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append((name, SYSTEM_CLOCK.monotonic_ms() / 1000))

    with World(1) as world:
        world.process("slow", lambda: wait("slow", 3600))
        world.process("fast", lambda: wait("fast", 60))
        world.run(until=4000)

    assert [name for name, _ in ended] == ["fast", "slow"]
    assert ended[0][1] == pytest.approx(60, abs=0.01)


def test_run_stops_when_its_condition_is_true() -> None:
    with World(1) as world:
        world.process("a", lambda: asyncio.sleep(100))
        assert world.run(until=50, unless=lambda: world.now >= 50) is False
        assert world.run(until=1000, unless=lambda: world.processes[0].ended) is True
        assert world.now == pytest.approx(100, abs=0.01)


def test_each_process_has_its_own_number_and_wall_clock() -> None:
    seen: dict[str, tuple[int, int]] = {}

    async def look(name: str) -> None:
        await asyncio.sleep(1)
        seen[name] = own_process.number(), SYSTEM_CLOCK.now_ms()

    with World(1) as world:
        world.machine("late").skew_ms = -5000
        world.process("right", lambda: look("right"))
        world.process("late", lambda: look("late"))
        world.run(until=10)

    assert seen["right"][0] != seen["late"][0]
    assert seen["right"][1] - seen["late"][1] == pytest.approx(5000, abs=5)


def test_a_killed_process_runs_no_finally_and_no_callback() -> None:
    happened: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
            happened.append("went on")
        finally:
            if world.now < 50:
                happened.append("finally")

    with World(1) as world:
        process = world.process("a", work)
        world.at(5, process.kill)
        world.run(until=49)
        assert happened == []
        assert not process.is_alive


def test_a_paused_process_goes_on_where_it_stood() -> None:
    times: list[float] = []

    async def tick() -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            times.append(world.now)

    with World(1) as world:
        process = world.process("a", tick)
        world.at(1.5, lambda: process.pause(10))
        world.run(until=60)

    assert times[0] == pytest.approx(1, abs=0.01)
    assert times[1] == pytest.approx(11.5, abs=0.01)
    assert len(times) == 4


def test_the_end_of_main_is_the_end_of_the_process() -> None:
    ended: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().call_later(5, ended.append, "timer")
        await asyncio.sleep(1)

    with World(1) as world:
        process = world.process("a", main)
        process.on_end = lambda one: ended.append(one.name)
        world.run(until=60)

    assert ended == ["a"]
    assert (process.ended, process.error, process.is_alive) == (True, None, False)


def test_an_error_that_no_program_expects_is_an_error_of_the_world() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a defect")

    async def refuse() -> None:
        raise OSError("a full disk")

    with World(1) as world:
        world.process("defect", fail)
        world.process("refused", refuse)
        world.run(until=1)

    assert world.errors == ["defect ended: ZeroDivisionError('a defect')"]


def test_an_unhandled_error_of_a_callback_is_an_error_of_the_world() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: [][1])
        await asyncio.sleep(1)

    with World(1) as world:
        world.process("a", main)
        world.run(until=5)

    assert len(world.errors) == 1
    assert "IndexError" in world.errors[0]


def test_code_that_yields_until_a_time_ends() -> None:
    async def spin() -> None:
        end = asyncio.get_running_loop().time() + 0.05
        while asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0)

    with World(1) as world:
        process = world.process("a", spin)
        assert world.run(until=10, unless=lambda: process.ended)


def story_of(seed: int) -> tuple[str, list[str]]:
    """Run two processes that talk, and return the trace and the story."""
    with World(seed, keeps_story=True) as world:
        host = world.machine("server").host

        async def serve() -> None:
            from rmqkit.remoting import listening

            class Echo(asyncio.Protocol):
                def connection_made(self, transport: asyncio.BaseTransport) -> None:
                    self.transport = transport

                def data_received(self, data: bytes) -> None:
                    self.transport.write(data)  # type: ignore[attr-defined]

            port = await listening.ListeningPort.bind(Echo, host, 5000)
            await port.open()
            await asyncio.sleep(1000)

        async def talk() -> None:
            await asyncio.sleep(0.1)
            heard = asyncio.Event()

            class Client(asyncio.Protocol):
                def data_received(self, data: bytes) -> None:
                    heard.set()

            transport, _ = await asyncio.get_running_loop().create_connection(Client, host, 5000)
            for number in range(20):
                transport.write(b"%d" % number)
                await asyncio.sleep(0.001)
            await heard.wait()

        world.process("server", serve)
        world.process("client", talk)
        world.run(until=10)
        return world.trace, world.story or []


def test_a_seed_repeats_a_run_and_another_seed_does_not() -> None:
    assert story_of(7) == story_of(7)
    assert story_of(7)[0] != story_of(8)[0]


def test_nothing_of_the_world_stays_after_it() -> None:
    before = SYSTEM_CLOCK.now_ms(), time.thread_time
    with World(1) as world:
        world.process("a", lambda: asyncio.sleep(10_000))
        world.run(until=9000)
        assert abs(SYSTEM_CLOCK.now_ms() - before[0]) > 1000
    assert abs(SYSTEM_CLOCK.now_ms() - before[0]) < 60_000
    assert time.thread_time is before[1]
