"""A clock whose wall time a test sets, while monotonic time continues."""

from __future__ import annotations

from rmqkit.clock import SYSTEM_CLOCK

__all__ = ["SetClock"]


class SetClock:
    """The clock of the system or of a virtual loop, with wall time ``ahead_ms`` later."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return SYSTEM_CLOCK.now_ms() + self.ahead_ms

    def monotonic_ms(self) -> float:
        return SYSTEM_CLOCK.monotonic_ms()
