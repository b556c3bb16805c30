"""Pauses between tries that grow, with chance in them, so that callers who failed together do not come back together.

The n-th pause lies between half of and all of ``first_ms * 2**n``, at most ``most_ms``. No clock and no loop: whoever
tries again waits by itself.
"""

from __future__ import annotations

import random

__all__ = ["Backoff"]


class Backoff:
    """The pauses of one series of tries."""

    __slots__ = ("_most_ms", "_next_ms")

    def __init__(self, first_ms: float, most_ms: float) -> None:
        assert 0 < first_ms <= most_ms, f"a first pause of {first_ms} ms is not within {most_ms} ms"
        self._next_ms = first_ms
        self._most_ms = most_ms

    def next_ms(self) -> float:
        """How long to wait before the next try."""
        bound_ms = self._next_ms
        self._next_ms = min(2 * bound_ms, self._most_ms)
        return bound_ms * random.uniform(0.5, 1.0)
