"""Time as a parameter: whoever needs the time or a pause is given a `Clock`.

Wall time (``now_ms``) is what goes into records and on the wire; monotonic time (``monotonic_ms``) is what
intervals are measured with, so a stepping wall clock never shortens or stretches a time-out.
Source: style.md §11.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock"]


class Clock(Protocol):
    """What parts that deal with time are given."""

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


SYSTEM_CLOCK = SystemClock()
