"""An event loop in virtual time: when no work is left, its time jumps to the next timer.

Servers and clients of one process run on it, and `rmqkit.clock.SYSTEM_CLOCK` follows it in all threads. A wait of
minutes costs no time, and a busy machine delays no test: time stands still while one of these works:

=====================================  =================================================================================
a callback or task that can go on      always
bytes and connections on loopback      the kernel hands over within `_SETTLE_SECONDS` what was written; what cannot be
                                       written yet, like a call in an executor, is given `_STUCK_SECONDS` to get on
a thread that runs or reads the disk   until it sleeps (``/proc``; elsewhere the loop waits a little longer instead)
a thread that waits for the GIL        it gets it within `_YIELD_SECONDS`, or is seen to be ready to run
=====================================  =================================================================================

The loop does not wait for processes, or for threads that sleep in real time. Tests of these use a real loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import inspect
import math
import os
import selectors
import sys
import termios
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rmqkit.clock import SystemClock

T = TypeVar("T")

_SETTLE_SECONDS = 0.001
_YIELD_SECONDS = 0.00005
_STUCK_SECONDS = 0.2
_TURN_SECONDS = 1e-5
"""Time that passes in each loop iteration, so that code which yields until a time is reached stops."""
_HAS_PROC = Path("/proc/self/task").exists()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that runs timers in order as soon as all work before them is done."""

    def __init__(self, ahead_seconds: float = 0.0) -> None:
        self._passed = 0.0
        self._base = time.monotonic() + ahead_seconds
        self._wall = time.time() + ahead_seconds
        self._calls = 0
        self._idle: list[asyncio.Future[None]] = []
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._base + self._passed

    def now_ms(self) -> int:
        """Wall time in milliseconds."""
        return int((self._wall + self._passed) * 1000)

    def go_on(self, seconds: float) -> None:
        """Advance the time."""
        self._passed += seconds

    @property
    def has_calls(self) -> bool:
        """Return True if calls in an executor have not returned yet."""
        return self._calls > 0

    async def idle(self) -> None:
        """Wait until the loop has no work left and would jump."""
        future = self.create_future()
        self._idle.append(future)
        await future

    def wake_idle(self) -> bool:
        """Wake all callers of `idle`. Return True if there were any."""
        waiting, self._idle = self._idle, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        return bool(waiting)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        self._calls += 1
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: object) -> None:
        self._calls -= 1


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """A selector that jumps to the next timer instead of waiting, after it has checked that no event is coming."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._happened = time.monotonic()
        self._has_woken = False
        self._is_settled = False
        self._has_changed = True
        self._threads = _Threads()
        self._writing: set[int] = set()
        self._unacknowledged: dict[int, int] = {}
        """Socket → the bytes that the other side had not acknowledged. Listening sockets and pipes have none."""

    def register(self, *args: Any) -> Any:
        self._has_changed = True
        key = super().register(*args)
        if (count := _unacknowledged(key.fd)) is not None:
            self._unacknowledged[key.fd] = count
        return self._noted(key)

    def modify(self, *args: Any) -> Any:
        return self._noted(super().modify(*args))

    def unregister(self, *args: Any) -> Any:
        self._has_changed = True  # the end of a closed connection may be in transit, and no call shows that
        key = super().unregister(*args)
        self._unacknowledged.pop(key.fd, None)
        self._writing.discard(key.fd)
        return key

    def close(self) -> None:
        super().close()
        self._threads.close()

    def _noted(self, key: selectors.SelectorKey) -> selectors.SelectorKey:
        (self._writing.add if key.events & selectors.EVENT_WRITE else self._writing.discard)(key.fd)
        return key

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        is_settled, self._is_settled = self._is_settled, False
        if events or (timeout is not None and timeout <= 0):
            self._loop.go_on(_TURN_SECONDS)
            self._happened = time.monotonic()
            return events
        seconds = self._settle_seconds
        if not is_settled and timeout is not None and not self._has_written():
            seconds = 0.0
            time.sleep(_YIELD_SECONDS)
        while not is_settled or timeout is None:
            events = super().select(seconds)
            seconds = self._settle_seconds
            if events:
                self._happened = time.monotonic()
                self._has_changed = True  # more data may be in transit: the kernel was not given its full time
                return events
            is_settled = not self._is_worked_on()
            if is_settled and not self._has_woken and self._loop.wake_idle():
                self._has_woken = self._is_settled = True  # the woken callers run first, and then time jumps
                return []
            if timeout is None:
                self._has_woken = False
        self._has_woken = False
        self._loop.go_on(timeout)
        return []

    @property
    def _settle_seconds(self) -> float:
        """Return the time that data in the kernel may take to arrive."""
        if not _HAS_PROC:
            return 5 * _SETTLE_SECONDS
        # Without another descriptor than the loop's own pipe there is no connection. Only threads write to the pipe,
        # and these are checked.
        return _SETTLE_SECONDS if len(self.get_map()) > 1 else 0.0

    def _has_written(self) -> bool:
        """Return True if bytes may be in transit that were not there at the last call. The peer acknowledges bytes that
        it read with a delay."""
        has_written, self._has_changed = self._has_changed or not _HAS_PROC, False
        for fd, before in self._unacknowledged.items():
            count = _unacknowledged(fd) or 0
            if count != before:
                self._unacknowledged[fd] = count
                has_written |= count > 0
        return has_written

    def _is_worked_on(self) -> bool:
        """Return True if work is in progress that may wake the loop."""
        if self._threads.work():
            self._happened = time.monotonic()
            return True
        is_stuck = time.monotonic() - self._happened >= _STUCK_SECONDS
        return not is_stuck and (self._loop.has_calls or bool(self._writing))


def _unacknowledged(fd: int) -> int | None:
    """Return how many bytes of a connection the other side has not acknowledged; None if it is not a connection."""
    try:
        return int.from_bytes(fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return None


class _Threads:
    """The other threads of this process, which the loop checks before each jump.

    The file of each thread in ``/proc`` stays open: opening it costs six times as much as reading it.
    """

    def __init__(self) -> None:
        self._files: dict[int, int] = {}

    def work(self) -> bool:
        """Return True if another thread runs, could run, or waits for the disk."""
        own = threading.get_native_id()
        numbers = (thread.native_id for thread in threading.enumerate())
        return any(number not in (None, own) and self._state(number) in b"RD" for number in numbers)

    def _state(self, number: int) -> bytes:
        """Return the letter of a thread's state, ``-`` if the thread has exited."""
        file = self._files.get(number)
        try:
            if file is None:
                file = self._files[number] = os.open(f"/proc/self/task/{number}/stat", os.O_RDONLY)
            return os.pread(file, 64, 0).rpartition(b") ")[2][:1]
        except OSError:
            if file is None:
                return b"-"
        os.close(self._files.pop(number))
        return self._state(number)  # a new thread may have the number

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()


# ---- the product's clock

_real_now_ms, _real_monotonic_ms = SystemClock.now_ms, SystemClock.monotonic_ms
_running: list[VirtualLoop] = []
_ahead_seconds = 0.0
"""The time by which the loops of this test are ahead of real time. It does not fall back between two loops."""


def _now_ms(clock: SystemClock) -> int:
    return _running[-1].now_ms() if _running else _real_now_ms(clock) + math.ceil(_ahead_seconds * 1000)


def _monotonic_ms(clock: SystemClock) -> float:
    return _running[-1].time() * 1000 if _running else _real_monotonic_ms(clock) + _ahead_seconds * 1000


SystemClock.now_ms, SystemClock.monotonic_ms = _now_ms, _monotonic_ms  # type: ignore[method-assign]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in virtual time."""
    with _Runner() as runner:
        return runner.run(main)


class _Runner:
    """`asyncio.Runner` in virtual time, with the product's clock."""

    def __init__(self) -> None:
        self._loop = VirtualLoop(_ahead_seconds)
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        self.run = self._runner.run

    def __enter__(self) -> _Runner:
        _running.append(self._loop)
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _ahead_seconds
        try:
            self._runner.close()
        finally:
            self._loop.close()
            _running.remove(self._loop)
            _ahead_seconds = max(_ahead_seconds, self._loop.time() - time.monotonic())


# ---- the plug-in: each coroutine test runs with its fixtures on a new loop

_RUNNER = pytest.StashKey[_Runner]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_time: a coroutine test that waits for processes or threads in real time")


def _runner_of(item: pytest.Item) -> Any:
    if _RUNNER not in item.stash:
        runner = asyncio.Runner() if item.get_closest_marker("real_time") else _Runner()
        item.stash[_RUNNER] = runner.__enter__()
    return item.stash[_RUNNER]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if (given := getattr(pyfuncitem.obj, "hypothesis", None)) and inspect.iscoroutinefunction(given.inner_test):
        test = given.inner_test
        given.inner_test = functools.wraps(test)(lambda *args, **kwargs: run(test(*args, **kwargs)))  # a loop each
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    _runner_of(pyfuncitem).run(pyfuncitem.obj(**arguments))
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> object | None:
    """Run an asynchronous generator as a fixture of one test."""
    if not inspect.isasyncgenfunction(fixturedef.func):
        return None
    assert fixturedef.scope == "function", f"{fixturedef.argname}: a loop belongs to one test"
    runner = _runner_of(request.node)
    generator = fixturedef.func(**{name: request.getfixturevalue(name) for name in fixturedef.argnames})

    async def end() -> None:
        assert await anext(generator, None) is None, f"{fixturedef.argname} yields twice"

    async def begin() -> object:
        return await anext(generator)

    value = runner.run(begin())
    fixturedef.addfinalizer(lambda: runner.run(end()))
    fixturedef.cached_result = (value, fixturedef.cache_key(request), None)
    return value


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Close the loop after the fixtures. The next test starts at the present time."""
    global _ahead_seconds
    try:
        return (yield)
    finally:
        if (runner := item.stash.get(_RUNNER, None)) is not None:
            del item.stash[_RUNNER]
            runner.__exit__(None, None, None)
        _ahead_seconds = 0.0
