"""Time as a parameter: whoever needs the time or a pause is given a `Clock`.

Wall time (``now_ms``) is what goes into records and on the wire; monotonic time (``monotonic_ms``) is what
intervals are measured with, so a stepping wall clock never shortens or stretches a time-out.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


class Clock(Protocol):
    """The source of time for parts that measure time or wait."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        ...

    def monotonic_ms(self) -> float:
        """Milliseconds on a scale that never goes back; only differences mean something."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0


class SteadyClock:
    """A clock whose wall time never goes back while the process runs; for one thread.

    After the wall clock was set back, ``now_ms`` continues at the speed of monotonic time until the wall clock has
    caught up. Deadlines that are written as wall time use it: none of them moves when the clock is set back.
    """

    __slots__ = ("_clock", "_now_ms", "_read_ms")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_ms: float = clock.now_ms()
        self._read_ms = clock.monotonic_ms()

    def now_ms(self) -> int:
        monotonic_ms = self._clock.monotonic_ms()
        self._now_ms = max(self._clock.now_ms(), self._now_ms + monotonic_ms - self._read_ms)
        self._read_ms = monotonic_ms
        return int(self._now_ms)

    def monotonic_ms(self) -> float:
        return self._clock.monotonic_ms()


SYSTEM_CLOCK = SystemClock()
