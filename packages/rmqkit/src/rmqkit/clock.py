"""Clocks as parameters: objects that need the time get a `Clock`.

Wall time (``now_ms``) is used in records and on the wire. Monotonic time (``monotonic_ms``) measures intervals, so that
changes of the wall clock never shorten or extend a timeout.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SteadyClock", "SystemClock"]


class Clock(Protocol):
    """A source of time for objects that measure time or wait."""

    def now_ms(self) -> int:
        """Return milliseconds since the Unix epoch."""
        ...

    def monotonic_ms(self) -> float:
        """Return milliseconds on a scale that never goes back. Only differences are meaningful."""
        ...


class SystemClock:
    """The clocks of the machine."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000.0


class SteadyClock:
    """A clock with a wall time that never goes back while the process runs. Use it in one thread only.

    After the machine's clock was set back, ``now_ms`` continues at the speed of monotonic time until the machine's
    clock has caught up. Deadlines in wall time use this clock, so that setting the clock back does not move them.
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
