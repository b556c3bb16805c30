"""CPU time that a test may hold against a limit although other programs share the processor.

The smallest of several measurements is used, because noise only ever adds time. A limit holds for a machine on which a
fixed loop of plain Python takes `LOOP_SECONDS`. If the loop takes longer now, because the machine is slower or other
programs use its caches and its clock, the limit is raised by the same factor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["least_seconds", "slowness"]

LOOP_SECONDS = 0.0033
"""CPU time of `_loop` on the machines on which the limits were measured."""


def _loop() -> None:
    total = 0
    for number in range(100_000):
        total += number & 3


def least_seconds(times: int, call: Callable[[], object]) -> float:
    """Return the smallest CPU time that a call takes in this thread."""
    return min(_seconds(call) for _ in range(times))


def slowness() -> float:
    """Return the factor by which Python is slower now than on a quiet machine, at least 1."""
    return max(1.0, least_seconds(3, _loop) / LOOP_SECONDS)


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began
