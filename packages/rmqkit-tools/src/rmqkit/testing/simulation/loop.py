"""The event loop of a simulated process. The world runs it; it never waits in real time.

Callbacks run in the order in which they were registered, as asyncio promises. The loop runs all callbacks that are due,
then waits for its next timer or for the world. Signals, subprocesses, files and real sockets are not supported.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from rmqkit.testing.simulation.scheduler import Program

__all__ = ["SimulatedLoop"]

T = TypeVar("T")
_TURNS_MAX = 1000
_TURNS_SECONDS = 0.001
"""Time that passes after `_TURNS_MAX` turns without a pause, for code that yields until a time is reached."""
_RESOLUTION = 1e-9


class _Task(asyncio.Task[T]):
    """A task with a hash that does not depend on its address."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number  # first: the interpreter puts the task into a set
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[T]):
    """A future with a hash that does not depend on its address."""

    def __init__(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        super().__init__(loop=loop)
        self._number = number

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The event loop of one process.

    Attributes:
        work_seconds: the least CPU time of one run of the loop.
        is_idle: True while the loop waits for a callback. Then no callback is in the middle of a call of the disk.
    """

    work_seconds = 0.00002

    def __init__(self, process: Program) -> None:
        self._process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._handler: Callable[..., object] | None = None
        self._work = self._world.chance("work", process.name, process.number)
        self._tasks: list[asyncio.Task[Any]] = []
        self._swept = 0
        self.is_idle = True
        self._free_at = 0.0

    # ---- running

    def run(self) -> None:
        """Run callbacks until the process ends. The greenlet of the process's main thread runs this function."""
        while self._process.is_alive:
            self.is_idle = False
            self._run_ready()
            self._wait()

    def _run_ready(self) -> None:
        turns = 0
        while self._collect():
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
            turns += 1
            if turns % _TURNS_MAX == 0:
                self._process.main.spend(_TURNS_SECONDS)

    def _collect(self) -> bool:
        """Make due timers ready. Return True if there is work."""
        end = self._world.now + _RESOLUTION
        while self._timers and self._timers[0][0] <= end:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._ready.append(timer)
        return bool(self._ready)

    def _wait(self) -> None:
        work = self.work_seconds * (1 + 9 * self._work.random() ** 4)
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        main, world = self._process.main, self._world
        self._free_at = world.now + work
        if self._timers:
            main.alarm(max(self._timers[0][0] - world.now, work))
        self.is_idle = True
        main.wait()

    def _wake(self) -> None:
        """Run soon: a callback is ready. Nothing happens while the loop runs, or waits for the disk."""
        if self.is_idle:
            self.is_idle = False  # the next callback wakes nobody
            self._process.main.wake(max(0.0, self._free_at - self._world.now))

    def discard(self) -> None:
        """Close all coroutines. The world calls this when it is closed."""
        self._ready.clear()
        self._timers.clear()
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
        self._tasks.clear()

    # ---- asyncio's interface

    def time(self) -> float:
        return self._world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self._process.is_alive:
            self._ready.append(handle)
            self._wake()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is dropped when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self, next(self._numbers))

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task: asyncio.Task[T] = _Task(coro, loop=self, name=name, context=context, number=next(self._numbers))
        self._tasks.append(task)
        if len(self._tasks) >= 2 * self._swept + 64:
            self._tasks = [one for one in self._tasks if not one.done()]
            self._swept = len(self._tasks)
        return task

    @property
    def running_tasks(self) -> int:
        """The number of tasks that are not done."""
        return sum(not task.done() for task in self._tasks)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function in a thread of its own. ``executor`` only names the thread."""
        future: asyncio.Future[T] = self.create_future()
        name = getattr(executor, "_thread_name_prefix", "") or "executor"
        self._process.thread(functools.partial(self._executed, future, functools.partial(func, *args)), name)
        return future

    def _executed(self, future: asyncio.Future[T], work: Callable[[], T]) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the waiting task gets it
            self.call_soon_threadsafe(_set_exception, future, error)
        else:
            self.call_soon_threadsafe(_set_result, future, result)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        return [(2, 1, 6, "", (host, port))]

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self._world.network.connect(self._process, protocol_factory, host, port)

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        return self._world.network.serve(self._process, protocol_factory, [sock])

    def close_soon(self, generator: Any) -> None:
        """Close an asynchronous generator that was dropped."""
        self._tasks.append(self.create_task(generator.aclose()))

    async def shutdown_asyncgens(self) -> None:
        """Do nothing: a generator is closed when its last reference is gone."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing: every call has a thread of its own."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(self, context)
        elif self._process.is_alive:
            error = context.get("exception")
            said = f"{self._process.name}: {context.get('message')}: {error!r}"
            self._process.unhandled.append(said)
            self._world.errors.append(said)
            self._world.note("unhandled", said)

    default_exception_handler = call_exception_handler

    def set_exception_handler(self, handler: Callable[..., object] | None) -> None:
        self._handler = handler

    def get_exception_handler(self) -> Callable[..., object] | None:
        return self._handler

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Do nothing: there is no debug mode."""

    def get_task_factory(self) -> None:
        return None

    def is_running(self) -> bool:
        return self._process.is_alive

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:  # type: ignore[override]
        """Do nothing: a simulated process gets no signals; see `Process.kill` and `Process.pause`."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _close(coroutine: Any) -> None:
    """Close a coroutine of a dead process. Its ``finally`` blocks may wait, and may call seams, which raise."""
    try:
        coroutine.close()
    except BaseException:  # noqa: BLE001 - an error of a dead process
        return
