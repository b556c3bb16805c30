"""Pulls that found nothing wait here for a message (``PullRequestHoldService``).

Held pulls are grouped by topic and queue. The dispatcher's news of a queue answers those it concerns in the same tick;
the ones nobody needed are answered when their time is up. Nothing is polled: one timer stands for the earliest end.
A pull whose connection is gone is dropped. Loop only. Source: behaviour.md §4.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rmqkit.clock import Clock
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import Arrival

__all__ = ["HELD_MAX", "Held", "LongPolling"]

HELD_MAX = 100_000
"""Pulls that may wait at a time; beyond it they are refused as busy (the pull queue of behaviour.md §2.4)."""

_LOOK_SECONDS_MIN = 0.05


@dataclass(slots=True)
class Held:
    """One waiting pull.

    Attributes:
        queue_offset: the first offset it wants.
        codes: the tag codes it wants, or None for all.
        until_ms: monotonic time of its last try.
        retry: reads once more and answers, whatever comes of it.
    """

    connection: Connection
    queue_offset: int
    codes: frozenset[int] | None
    until_ms: float
    retry: Callable[[], None]


class LongPolling:
    """The waiting pulls of a broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._held: dict[tuple[str, int], list[Held]] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_at_ms = float("inf")

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no further pull may wait."""
        return self._count >= HELD_MAX

    def hold(self, topic: str, queue_id: int, held: Held) -> None:
        """Keep a pull until a message for it comes or its time is up."""
        self._held.setdefault((topic, queue_id), []).append(held)
        self._count += 1
        if held.until_ms < self._look_at_ms:
            self._look_by(held.until_ms)

    def arrived(self, arrivals: list[Arrival]) -> None:
        """Answer the pulls that wait for one of these messages."""
        if not self._held:
            return
        for arrival in arrivals:
            waiting = self._held.get((arrival.topic, arrival.queue_id))
            if waiting is None:
                continue
            woken = [held for held in waiting if _concerns(held, arrival)]
            if woken:
                self._keep((arrival.topic, arrival.queue_id), [held for held in waiting if held not in woken])
                for held in woken:
                    held.retry()

    def close(self) -> None:
        """Answer everything that waits, as the broker stops."""
        held = [one for waiting in self._held.values() for one in waiting]
        self._held.clear()
        self._count = 0
        if self._timer is not None:
            self._timer.cancel()
        for one in held:
            one.retry()

    def connection_closed(self, connection: Connection) -> None:
        """Drop the pulls of a connection that is gone."""
        for key, waiting in list(self._held.items()):
            if any(held.connection is connection for held in waiting):
                self._keep(key, [held for held in waiting if held.connection is not connection])

    def _keep(self, key: tuple[str, int], waiting: list[Held]) -> None:
        self._count -= len(self._held.get(key, ())) - len(waiting)
        if waiting:
            self._held[key] = waiting
        else:
            self._held.pop(key, None)

    def _look_by(self, at_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at_ms = at_ms
        seconds = max(_LOOK_SECONDS_MIN, (at_ms - self._clock.monotonic_ms()) / 1000)
        self._timer = self._loop.call_later(seconds, self._end_waiting)

    def _end_waiting(self) -> None:
        now_ms = self._clock.monotonic_ms()
        self._timer, self._look_at_ms = None, float("inf")
        ended: list[Held] = []
        for key, waiting in list(self._held.items()):
            over = [held for held in waiting if held.until_ms <= now_ms]
            if over:
                ended.extend(over)
                self._keep(key, [held for held in waiting if held.until_ms > now_ms])
        for held in ended:
            held.retry()
        if self._held:
            self._look_by(min(held.until_ms for waiting in self._held.values() for held in waiting))


def _concerns(held: Held, arrival: Arrival) -> bool:
    if arrival.queue_offset < held.queue_offset:
        return False
    return held.codes is None or arrival.tags_code in held.codes
