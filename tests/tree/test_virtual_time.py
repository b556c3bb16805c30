"""The loop in virtual time, and the fixtures that run on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.system import threads
from tests.virtual_time import run
from tests.virtual_world import VirtualLoop, VirtualWorld
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


async def test_no_time_passes_while_a_program_ends():
    began = asyncio.get_running_loop().time()
    command = "import os, time; os.close(1); os.close(2); time.sleep(0.2)"

    def work():
        return subprocess.run([sys.executable, "-c", command], capture_output=True, check=True, timeout=60)

    await asyncio.to_thread(work)
    assert asyncio.get_running_loop().time() - began < 0.05


async def test_threads_wait_for_each_other_and_for_the_loop_in_virtual_time():
    begun, may_end = threads.Event(), threads.Event()

    def work():
        begun.set()
        assert not may_end.wait(HOUR)
        time.sleep(HOUR)
        return threads.current_name()

    working = asyncio.create_task(asyncio.to_thread(work))
    await until(begun.is_set)
    assert not working.done()
    assert await working != threads.current_name()
    real = time.monotonic()
    assert SYSTEM_CLOCK.monotonic_ms() / 1000 > real + HOUR


async def test_an_executor_runs_as_many_calls_as_it_has_workers():
    may_end, running = threads.Event(), []

    def work(number):
        running.append(number)
        may_end.wait()

    with ThreadPoolExecutor(2) as pool:
        calls = [asyncio.get_running_loop().run_in_executor(pool, work, number) for number in range(3)]
        await asyncio.sleep(HOUR)
        assert len(running) == 2
        may_end.set()
        await asyncio.gather(*calls)
    assert sorted(running) == [0, 1, 2]


async def test_a_thread_reads_from_a_blocking_socket(server):
    def ask():
        with socket.create_connection(server, timeout=2 * HOUR) as connection:
            connection.sendall(b"line\n")
            return connection.recv(100)

    assert await asyncio.to_thread(ask) == b"line\n"


async def test_a_blocking_socket_gives_up_after_its_time_out(server):
    def ask():
        with socket.create_connection(server, timeout=HOUR / 2) as connection:
            connection.sendall(b"line\n")
            connection.recv(100)

    with pytest.raises(TimeoutError):
        await asyncio.to_thread(ask)


async def test_any_address_of_this_machine_is_reached_and_is_the_peer():
    async def answer(reader, writer):
        peers.append(writer.get_extra_info("peername")[0])
        writer.close()

    peers = []
    async with await asyncio.start_server(answer, "0.0.0.0", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for host, own in (("localhost", None), ("127.0.0.2", None), ("127.0.0.1", ("10.1.2.3", 0))):
            reader, writer = await asyncio.open_connection(host, port, local_addr=own)
            assert await reader.read() == b""
            writer.close()
    assert peers == ["127.0.0.1", "127.0.0.2", "10.1.2.3"]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("second", ["0.0.0.0", "127.0.0.1"])
async def test_two_servers_cannot_have_one_port(server, second):
    with pytest.raises(OSError, match="in use"):
        await asyncio.start_server(print, second, server[1])


async def test_a_half_closed_connection_still_reads():
    async def answer(reader, writer):
        writer.write(b"<" + await reader.read() + b">")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"all")
        writer.write_eof()
        assert await reader.read() == b"<all>"
        writer.close()


def order_of_threads(seed):
    async def main():
        order = []
        await asyncio.gather(*(asyncio.to_thread(work, order, number) for number in range(8)))
        return order

    def work(order, number):
        with lock:
            threads.Event().wait(0.001)
            order.append(number)

    with VirtualWorld(seed) as world:
        lock = threads.Lock()
        return world.run(main())


def test_one_seed_has_one_order_of_threads_and_another_seed_another():
    orders = [order_of_threads(seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[2]) == [*range(8)]


def test_a_test_that_would_wait_for_ever_fails_at_once_and_says_where():
    async def for_ever():
        await asyncio.Event().wait()

    with VirtualWorld(1) as world, pytest.raises(AssertionError, match=r"(?s)nothing is left to do.*in for_ever"):
        world.run(for_ever())


def test_a_condition_that_cannot_hold_fails_at_once():
    with VirtualWorld(1) as world, pytest.raises(AssertionError, match="nothing is left to do"):
        world.run(until(lambda: False))


def test_code_outside_of_the_loop_waits_for_threads_of_its_world():
    with VirtualWorld(1):
        done = threads.Event()
        thread = threads.Thread(done.set, name="t")
        thread.start()
        assert done.wait(HOUR)
        thread.join()
        assert not thread.is_alive()


def test_threads_and_clocks_are_real_again_after_a_world():
    with VirtualWorld(1):
        assert not isinstance(threads.Event(), threading.Event)
    assert isinstance(threads.Event(), threading.Event)
    assert socket.create_connection.__module__ == "socket"


async def test_a_real_thread_that_an_earlier_test_left_sleeps_in_real_time():
    slept = []

    def work() -> None:
        time.sleep(0.001)
        slept.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert slept


async def test_nobody_listens_is_said_as_the_kernel_says_it():
    def connect() -> None:
        socket.create_connection(("127.0.0.1", 9))

    with pytest.raises(ConnectionRefusedError, match="Connection refused"):
        await asyncio.to_thread(connect)


async def test_a_real_thread_must_not_call_the_loop():
    loop, caught = asyncio.get_running_loop(), []

    def call():
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert caught == ["a real thread calls the loop of a simulated world: mark the test real_time"]


async def test_conditions_are_looked_at_before_time_jumps():
    done = []
    asyncio.get_running_loop().call_later(10, done.append, 1)
    asyncio.get_running_loop().call_later(HOUR, done.append, 2)
    await until(lambda: done)
    assert done == [1]


@pytest.mark.virtual_time
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
