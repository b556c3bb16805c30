"""Locks on queues for ordered consumption (``RebalanceLockManager``): one client of a group consumes a queue at a time.

A lock lives 60 s after it was last asked for; its owner renews it every 20 s. Loop only. Source: behaviour.md §2.7.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rmqkit.clock import Clock
from rmqkit.protocol.schemas.clients import MessageQueue

__all__ = ["LOCK_MS_MAX", "QueueLocks"]

LOCK_MS_MAX = 60_000
"""How long a lock lives that is not renewed."""


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: float


class QueueLocks:
    """Group → queue → who holds it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._groups: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock what is free, expired or the client's own; returns the queues it holds now."""
        now_ms = self._clock.monotonic_ms()
        locks = self._groups.setdefault(group, {})
        granted: list[MessageQueue] = []
        for queue in queues:
            held = locks.get(queue)
            if held is None or held.client_id == client_id or _is_expired(held, now_ms):
                locks[queue] = _Lock(client_id, now_ms)
                granted.append(queue)
        return granted

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        locks = self._groups.get(group, {})
        for queue in queues:
            held = locks.get(queue)
            if held is not None and held.client_id == client_id:
                del locks[queue]
        if not locks:
            self._groups.pop(group, None)

    def drop_expired(self) -> None:
        """Forget the locks that nobody renewed."""
        now_ms = self._clock.monotonic_ms()
        for group, locks in list(self._groups.items()):
            kept = {queue: held for queue, held in locks.items() if not _is_expired(held, now_ms)}
            if kept:
                self._groups[group] = kept
            else:
                del self._groups[group]

    def is_any_held(self, group: str) -> bool:
        """Whether a group holds a lock that is not expired: then it consumes in order."""
        locks = self._groups.get(group)
        if not locks:
            return False
        now_ms = self._clock.monotonic_ms()
        return any(not _is_expired(held, now_ms) for held in locks.values())


def _is_expired(held: _Lock, now_ms: float) -> bool:
    return now_ms - held.renewed_ms > LOCK_MS_MAX
