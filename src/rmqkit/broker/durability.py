"""Answers that wait for the disk (``GroupCommitService``): nothing is acknowledged before its flush round.

Puts come in log order, so the waiting answers form a queue ordered by the physical end of what they wait for. A flush
round wakes the loop once and releases the front of the queue. A round that failed releases everything with the error:
a failed flush is never a success. Loop only, but for `flushed`. Source: store.md §13.1, §13.2.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable

from rmqkit.clock import Clock

__all__ = ["WAITING_MAX", "Durability", "Outcome"]

WAITING_MAX = 10_000
"""Answers that may wait at a time; beyond it sends are refused as busy (the send queue of behaviour.md §2.4)."""

_log = logging.getLogger(__name__)


class Outcome(enum.Enum):
    """How waiting for the disk ended."""

    DURABLE = "durable"
    TIMED_OUT = "timed out"
    FAILED = "failed"


Release = Callable[[Outcome, str], None]


class Durability:
    """The queue of answers that wait for a flush.

    Args:
        timeout_ms: how long an answer may wait (``syncFlushTimeout``).
        on_advance: called on the loop after each round, before its answers go out: a message may be read once it is
            durable, so the dispatcher moves on then.
    """

    def __init__(self, clock: Clock, timeout_ms: int, on_advance: Callable[[], object]) -> None:
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._on_advance = on_advance
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, float, Release]] = deque()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether no further answer may wait."""
        return len(self._waiting) >= WAITING_MAX

    def hold(self, end_offset: int, release: Release) -> None:
        """Call ``release`` when the log is durable up to ``end_offset``, or when that failed or took too long."""
        self._waiting.append((end_offset, self._clock.monotonic_ms() + self._timeout_ms, release))
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._timeout_ms / 1000, self._expire)

    def wait(self, end_offset: int) -> asyncio.Future[tuple[Outcome, str]]:
        """Like `hold`, to be awaited: how it ended, and why it failed."""
        ended: asyncio.Future[tuple[Outcome, str]] = self._loop.create_future()

        def release(outcome: Outcome, reason: str) -> None:
            if not ended.done():
                ended.set_result((outcome, reason))

        self.hold(end_offset, release)
        return ended

    def flushed(self, durable_offset: int, error: OSError | None) -> None:
        """Take the end of a flush round; called from the flush thread, once a round."""
        try:
            self._loop.call_soon_threadsafe(self._release, durable_offset, error)
        except RuntimeError:
            _log.debug("flush round ended after the event loop")

    def _release(self, durable_offset: int, error: OSError | None) -> None:
        if error is None:
            self._on_advance()
        waiting = self._waiting
        while waiting and waiting[0][0] <= durable_offset:
            waiting.popleft()[2](Outcome.DURABLE, "")
        if error is not None:
            while waiting:
                waiting.popleft()[2](Outcome.FAILED, f"flush failed: errno {error.errno} {error.strerror}")

    def _expire(self) -> None:
        self._expiry = None
        now_ms = self._clock.monotonic_ms()
        waiting = self._waiting
        while waiting and waiting[0][1] <= now_ms:
            waiting.popleft()[2](Outcome.TIMED_OUT, "")
        if waiting:
            self._expiry = self._loop.call_later((waiting[0][1] - now_ms) / 1000, self._expire)
