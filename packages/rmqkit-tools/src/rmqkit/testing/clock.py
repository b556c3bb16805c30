"""Clocks for tests: a clock that stands still, and a running clock that can be moved forward.

A `VirtualClock` belongs to the loop of a test's servers. When a test moves the clock, only some times jump:

===================  ==========================================================================  =====
time                 use                                                                         jumps
===================  ==========================================================================  =====
``now_ms``           store times, delays, ages of half messages and of files                     yes
timers of the loop   periodic work: transaction checks, retention, registration                  yes
``monotonic_ms``     liveness: heartbeats, idle connections, queue locks, time-outs of requests  no
===================  ==========================================================================  =====

Clients under test use real time. If liveness jumped too, ten virtual minutes would disconnect all clients.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TypeVar, TypeVarTuple, Unpack

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.errors import SettingsError

__all__ = ["LoopThread", "StandingClock", "VirtualClock"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_STRIDES_MAX = 600
_TURNS = 12
"""Loop iterations after each step: enough for a request between two servers and the effects of its answer."""
_TIMERS_MAX = 10_000


class StandingClock:
    """A `rmqkit.clock.Clock` that stands still until a test moves it, for unit tests. ``ms``: both times."""

    def __init__(self, ms: float = 1_800_000_000_000.0) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return int(self.ms)

    def monotonic_ms(self) -> float:
        return float(self.ms)


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time can be moved forward."""

    passed_seconds = 0.0

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def time(self) -> float:
        return super().time() + self.passed_seconds

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        heapq.heappush(self._times, when)
        if len(self._times) > _TIMERS_MAX:
            self.next_timer()
        return super().call_at(when, callback, *args, context=context)

    def next_timer(self) -> float:
        """Return the time of the next timer that is not due yet, even if cancelled; infinity without a timer."""
        now = self.time()
        while self._times and self._times[0] <= now:
            heapq.heappop(self._times)
        return self._times[0] if self._times else float("inf")


class LoopThread:
    """A thread with a virtual loop; `run` and `close` can be called from any other thread."""

    def __init__(self, name: str) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call a coroutine function on the loop and wait for its result."""

        async def awaited() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result()

    def close(self) -> None:
        """Cancel the tasks of the loop, and stop its executor, the loop and the thread."""
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, _VirtualLoop), "the runner creates a virtual loop"
        self.loop = loop
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()


class VirtualClock:
    """The time of the servers on a loop: real time plus the time that a test has added."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread

    def now_ms(self) -> int:
        """Return the time of the servers, in ms since the epoch."""
        return SYSTEM_CLOCK.now_ms() + round(self._thread.loop.passed_seconds * 1000)

    def now(self) -> float:
        """Return the time of the servers in seconds since the epoch, like ``time.time()`` of the program.

        The time of the program does not jump. To make it jump, use ``monkeypatch.setattr("time.time", rmq_clock.now)``.
        """
        return self.now_ms() / 1000

    def monotonic_ms(self) -> float:
        return SYSTEM_CLOCK.monotonic_ms()

    def advance(
        self, *, milliseconds: float = 0, seconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0
    ) -> None:
        """Move the time forward, and return when the due timers have run.

        The time moves from timer to timer, in at most some hundred steps: in ten minutes, a periodic task of one minute
        runs ten times. Deliveries may still be in progress afterwards; the asserts wait for them.
        Raises SettingsError: the time is negative.
        """
        total = milliseconds / 1000 + seconds + 60 * minutes + 3600 * hours + 86_400 * days
        if total < 0:
            raise SettingsError(f"the clock cannot go back by {-total:g} s: give a time that passes")
        self._thread.run(lambda: self._pass(total))

    async def _pass(self, seconds: float) -> None:
        loop = self._thread.loop
        target, stride_min = loop.passed_seconds + seconds, seconds / _STRIDES_MAX
        while (left := target - loop.passed_seconds) > 0:
            ahead = max(loop.next_timer() - loop.time(), stride_min)
            loop.passed_seconds = target if ahead >= left else loop.passed_seconds + ahead
            for _ in range(_TURNS):
                await asyncio.sleep(0)
