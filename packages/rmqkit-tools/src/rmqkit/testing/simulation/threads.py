"""Threads, locks, events, queues and pools of simulated processes: the functions of `rmqkit.system.threads`.

Each thread is a greenlet. A wait gives up control until another thread changes the object. The seed decides how soon
the thread goes on, and so which of several waiting threads is first.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from rmqkit.system.threads import Empty
from rmqkit.testing.simulation.scheduler import Scheduler, ThreadOfControl

__all__ = ["Future", "Lock", "functions"]

_SWITCH_SECONDS = 0.00002


def functions(world: Scheduler) -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in the seam."""
    kinds = {"Event": Event, "Lock": Lock, "RLock": RLock, "Queue": Queue, "Pool": Pool, "Thread": Thread}
    by_name: dict[str, Callable[..., Any]] = {name: functools.partial(kind, world) for name, kind in kinds.items()}
    by_name["current_name"] = lambda: "outside" if world.actor is None else world.actor.name
    return by_name


class _Waited:
    """Something that actors wait for."""

    def __init__(self, world: Scheduler) -> None:
        self._world = world
        self._waiters: dict[ThreadOfControl, None] = {}
        self._chance = world.thread_chance

    def _wait_until(self, is_true: Callable[[], bool], timeout: float | None) -> bool:
        """Return True when a condition is true, or False after a timeout in seconds."""
        world = self._world
        world.check_open()
        end = None if timeout is None else world.now + timeout
        while not is_true():
            if end is not None and world.now >= end:
                return False
            actor = world.actor
            if actor is None:
                return world.wait_outside(is_true, end)
            self._waiters[actor] = None
            if end is not None:
                actor.alarm(end - world.now)
            actor.wait()
            self._waiters.pop(actor, None)
        return True

    def _changed(self) -> None:
        """Let the waiting actors look again."""
        waiters, self._waiters = self._waiters, {}
        for actor in waiters:
            actor.wake(_SWITCH_SECONDS * (0.1 + self._chance.random()))


class Lock(_Waited):
    """A lock."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__(world)
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        limit = None if blocking and timeout < 0 else max(0.0, timeout if blocking else 0.0)
        if not self._wait_until(lambda: self._owner is None, limit):
            return False
        self._owner = self._world.actor or self
        return True

    def release(self) -> None:
        self._owner = None
        self._changed()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class RLock(Lock):
    """A lock that its holder can acquire again."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_held = self._owner is not None and self._owner is (self._world.actor or self)
        if not is_held and not super().acquire(blocking, timeout):
            return False
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().release()


class Event(_Waited):
    """A flag."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__(world)
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._changed()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._wait_until(lambda: self._is_set, timeout)


class Queue(_Waited):
    """An unbounded queue."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__(world)
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._changed()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._wait_until(lambda: bool(self._items), timeout if block else 0.0):
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Thread:
    """A thread of the current process."""

    def __init__(self, world: Scheduler, target: Callable[..., object], args: Iterable[Any] = (), *, name: str) -> None:
        self._world = world
        self._target = functools.partial(target, *args)
        self._end = Event(world)
        self._actor: ThreadOfControl | None = None
        self.name = name

    def start(self) -> None:
        process = self._world.current_process
        assert process is not None, "a thread belongs to a simulated process"
        self._actor = process.thread(self._run, self.name)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._end.set()

    def join(self, timeout: float | None = None) -> None:
        self._end.wait(timeout)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._end.is_set()


class Future(concurrent.futures.Future[Any]):
    """The result of a call in a pool. ``result`` waits in the simulation."""

    def __init__(self, world: Scheduler) -> None:
        super().__init__()
        self._done = Event(world)
        self.add_done_callback(lambda _: self._done.set())

    def result(self, timeout: float | None = None) -> Any:
        if not self._done.wait(timeout):
            raise concurrent.futures.TimeoutError
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self._done.wait(timeout):
            raise concurrent.futures.TimeoutError
        return super().exception(0)


class Pool(concurrent.futures.Executor):
    """A pool of threads of the current process."""

    def __init__(self, world: Scheduler, max_workers: int | None = None, thread_name_prefix: str = "pool") -> None:
        self._world = world
        self._workers = max_workers or 4
        self._thread_name_prefix = thread_name_prefix
        self._running = 0
        self._waiting: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._idle = Event(world)
        self._idle.set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future = Future(self._world)
        self._waiting.append((future, functools.partial(fn, *args, **kwargs)))
        self._idle.clear()
        if self._running < self._workers:
            self._running += 1
            process = self._world.current_process
            assert process is not None, "a pool belongs to a simulated process"
            process.thread(self._work, self._thread_name_prefix)
        return future

    def _work(self) -> None:
        while self._waiting:
            future, call = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - who asked for the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)
        self._running -= 1
        if not self._running:
            self._idle.set()

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        futures = [self.submit(fn, *arguments) for arguments in zip(*iterables, strict=False)]
        return (future.result(timeout) for future in futures)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future, _ in self._waiting:
                future.cancel()
        if wait:
            self._idle.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
