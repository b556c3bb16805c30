"""CPU time that a test may hold against a limit although other programs share the processor.

Of several measurements the least counts, as noise only ever adds. And a limit is for a machine on which a fixed loop
of plain Python takes `LOOP_SECONDS`; where the loop takes longer just then, because the machine is slower, or what runs
beside takes its caches and its clock, the limit is as much higher.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["least_seconds", "slowness"]

LOOP_SECONDS = 0.0033
"""CPU time of `_loop` on the machines that the limits were found on."""


def _loop() -> None:
    total = 0
    for number in range(100_000):
        total += number & 3


def least_seconds(times: int, call: Callable[[], object]) -> float:
    """The least CPU time that a call takes in this thread."""
    return min(_seconds(call) for _ in range(times))


def slowness() -> float:
    """How many times as long as on a quiet machine Python takes now; at least 1."""
    return max(1.0, least_seconds(3, _loop) / LOOP_SECONDS)


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began
