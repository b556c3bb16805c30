"""The seam to threads and to the process."""

from __future__ import annotations

import os
import threading

import pytest

from rmqkit.system import process, threads


def test_a_thread_is_a_daemon_with_its_name_and_arguments() -> None:
    seen: list[tuple[int, str, bool]] = []

    def run(number: int) -> None:
        seen.append((number, threads.current_name(), threading.current_thread().daemon))

    thread = threads.Thread(run, (7,), name="store-test")
    thread.start()
    thread.join()
    assert seen == [(7, "store-test", True)] and not thread.is_alive()


def test_an_empty_queue_raises_empty_after_its_timeout() -> None:
    queue: threads.Queue[int] = threads.Queue()
    queue.put(1)
    assert queue.get(timeout=1) == 1
    with pytest.raises(threads.Empty):
        queue.get(timeout=0.001)


def test_a_pool_returns_results_and_names_its_threads() -> None:
    with threads.Pool(1, "store-test") as pool:
        future: threads.Future[str] = pool.submit(threads.current_name)
        assert future.result(60).startswith("store-test")


def test_names_are_replaced_until_the_context_ends() -> None:
    with threads.replaced({"Lock": lambda: "lock"}), process.replaced({"number": lambda: 7}):
        assert (threads.Lock(), process.number()) == ("lock", 7)
    assert threads.Lock is threading.Lock and process.number() == os.getpid()


@pytest.mark.parametrize("name", ["Empty", "Future", "replaced", "Semaphore"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"has no '{name}' to replace"), threads.replaced({name: print}):
        raise AssertionError
