"""Threads, locks, events, queues and pools of simulated processes."""

import asyncio
from collections.abc import Callable

import pytest

from rmqkit.client.runtime.process import portal
from rmqkit.system import threads
from rmqkit.testing.simulation import World


def run(work: Callable[[], None], *, seed: int = 1, until: float = 100.0) -> World:
    """Run a function in the main thread of a process."""

    async def main() -> None:
        work()
        await asyncio.sleep(50)

    with World(seed) as world:
        process = world.process("a", main)
        world.run(until=until)
        assert process.error is None, process.error
        assert not world.errors
        return world


def test_a_lock_has_one_holder_at_a_time() -> None:
    lock, inside, most = None, [0], [0]

    def work() -> None:
        nonlocal lock
        lock = threads.Lock()
        pause = threads.Event()

        def hold() -> None:
            for _ in range(5):
                with lock:
                    inside[0] += 1
                    most[0] = max(inside[0], most[0])
                    pause.wait(0.01)
                    inside[0] -= 1

        several = [threads.Thread(hold, name=f"t{number}") for number in range(4)]
        for one in several:
            one.start()
        for one in several:
            one.join()
        assert not any(one.is_alive() for one in several)

    run(work)
    assert most == [1]


def test_the_seed_decides_which_thread_is_first() -> None:
    orders = set()
    for seed in range(20):
        order: list[str] = []

        def work(order: list[str] = order) -> None:
            lock = threads.Lock()

            def note() -> None:
                with lock:
                    order.append(threads.current_name())

            with lock:
                several = [threads.Thread(note, name=f"t{number}") for number in range(3)]
                for one in several:
                    one.start()
                threads.Event().wait(1)
            for one in several:
                one.join()

        run(work, seed=seed)
        orders.add(tuple(order))
    assert len(orders) > 1


def test_waits_end_at_their_timeouts() -> None:
    seen: list[object] = []

    def work() -> None:
        event, queue = threads.Event(), threads.Queue()
        seen.append(event.wait(3))
        with pytest.raises(threads.Empty):
            queue.get(timeout=2)
        event.set()
        queue.put("item")
        seen.extend((event.wait(3), queue.get(timeout=2)))

    run(work)
    assert seen == [False, True, "item"]


def test_a_waiting_main_thread_stops_its_event_loop() -> None:
    ticks: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1, lambda: ticks.append(loop.time()))
        threads.Event().wait(5)
        await asyncio.sleep(1)

    with World(1) as world:
        world.process("a", main)
        world.run(until=20)
    assert ticks == [pytest.approx(5, abs=0.01)]


def test_a_lock_is_taken_again_by_its_holder_only_if_it_is_reentrant() -> None:
    def work() -> None:
        again = threads.RLock()
        with again, again:
            pass
        assert threads.Lock().acquire(timeout=1)
        lock = threads.Lock()
        assert lock.acquire()
        assert not lock.acquire(timeout=1)

    run(work)


def test_a_pool_runs_its_calls_and_hands_over_their_results() -> None:
    def work() -> None:
        with threads.Pool(2, "pool") as pool:
            assert list(pool.map(lambda number: number * 2, range(10))) == list(range(0, 20, 2))
            failed = pool.submit(lambda: [][1])
            with pytest.raises(IndexError):
                failed.result(timeout=5)
            pause = threads.Event()
            slow = pool.submit(lambda: pause.wait(10))
            with pytest.raises(TimeoutError):
                slow.result(timeout=1)
        assert slow.done()

    run(work)


def test_a_call_in_an_executor_returns_to_its_loop() -> None:
    results: list[object] = []

    async def main() -> None:
        results.append(await asyncio.to_thread(threads.current_name))
        results.append(await asyncio.gather(asyncio.to_thread(lambda: [][1]), return_exceptions=True))

    with World(1) as world:
        world.process("a", main)
        world.run(until=5)
    assert results[0] == "executor"
    assert isinstance(results[1][0], IndexError)  # type: ignore[index]


def test_threads_of_a_killed_process_do_nothing_more() -> None:
    counts = [0]

    async def main() -> None:
        pause = threads.Event()

        def count() -> None:
            while not pause.wait(1):
                counts[0] += 1

        threads.Thread(count, name="counter").start()
        await asyncio.sleep(1000)

    with World(1) as world:
        process = world.process("a", main)
        world.at(10.5, process.kill)
        world.run(until=100)
        assert counts == [10]


def test_a_blocking_program_gets_results_and_errors_of_its_loop_through_a_portal_of_its_own() -> None:
    found: dict[str, object] = {}

    async def refused() -> None:
        raise ValueError("no")

    async def sum_of(one: int, other: int) -> int:
        await asyncio.sleep(1)
        return one + other

    def work(name: str) -> None:
        used = portal()
        with pytest.raises(ValueError, match="no"):
            used.run(refused)
        found[name] = (used, used is portal(), used.run(lambda: sum_of(1, 2)))

    async def main(name: str) -> None:
        await asyncio.get_running_loop().run_in_executor(None, work, name)
        with pytest.raises(RuntimeError, match="its own loop"):
            portal().run(refused)

    with World(1) as world:
        processes = [world.process(name, lambda name=name: main(name)) for name in ("a", "b")]
        world.run(until=10.0)
        assert [process.error for process in processes] == [None, None]
        assert not world.errors
    assert [(same, result) for _, same, result in found.values()] == [(True, 3), (True, 3)]  # type: ignore[misc]
    assert len({id(used) for used, *_ in found.values()}) == 2  # type: ignore[misc]
