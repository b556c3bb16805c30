"""Pops of lite topics that found nothing and wait.

A client has one line of waiting pops. When one of its lite topics becomes dirty, its oldest pop is retried in the next
loop tick. A pop whose time is over is answered with POLLING_TIMEOUT. Use this module only on the event loop.
Source: lite.md §7.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rmqkit.broker.lite.subscriptions import LiteClient
from rmqkit.broker.settings import BrokerSettings
from rmqkit.remoting.connection import Connection

__all__ = ["LiteWaiting", "WaitingLitePop"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class WaitingLitePop:
    """One waiting pop. ``retry``: pops again; if it finds nothing and the argument is True, it waits again."""

    client: LiteClient
    connection: Connection
    until_ms: float
    retry: Callable[[bool], None]
    timer: asyncio.TimerHandle | None = field(default=None, init=False)


class LiteWaiting:
    """All waiting pops of lite topics."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._connections: dict[Connection, dict[WaitingLitePop, None]] = {}
        self._woken: dict[WaitingLitePop, None] = {}
        self._count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return self._count

    def hold(self, held: WaitingLitePop, seconds: float) -> bool:
        """Hold a pop. Return False if too many pops wait, or if the broker stops."""
        settings = self._settings
        if self._is_closed or self._count >= settings.pops_held_max:
            return False
        if len(held.client.waiting) >= settings.pops_held_per_queue_max:
            return False
        held.client.waiting[held] = None
        self._connections.setdefault(held.connection, {})[held] = None
        self._count += 1
        held.timer = self._loop.call_later(max(0.0, seconds), self._retry, held, False)
        return True

    def wake(self, clients: Iterable[LiteClient]) -> None:
        """Retry the oldest pop of the first of these clients that has a waiting pop."""
        for client in clients:
            for held in client.waiting:
                if held in self._woken:
                    continue
                if not self._woken:
                    self._loop.call_soon(self._retry_woken)
                self._woken[held] = None
                return

    def connection_closed(self, connection: Connection) -> None:
        """Drop the pops of a closed connection."""
        for held in list(self._connections.get(connection, ())):
            self._drop(held)

    def close(self) -> None:
        """Answer all waiting pops when the broker stops."""
        self._is_closed = True
        for held in [held for several in self._connections.values() for held in several]:
            self._retry(held, False)

    def _retry_woken(self) -> None:
        woken, self._woken = self._woken, {}
        for held in woken:
            self._retry(held, True)

    def _retry(self, held: WaitingLitePop, may_hold: bool) -> None:
        if held not in held.client.waiting:
            return
        self._drop(held)
        try:
            held.retry(may_hold)
        except Exception:  # noqa: BLE001 - the outer edge of a held request: a fault of one must not reach others
            _log.exception("cannot answer a waiting pop of lite topics by %s", held.client.client_id)

    def _drop(self, held: WaitingLitePop) -> None:
        assert held.timer is not None, "a held pop has a timer"
        held.timer.cancel()
        self._woken.pop(held, None)
        del held.client.waiting[held]
        own = self._connections[held.connection]
        del own[held]
        if not own:
            del self._connections[held.connection]
        self._count -= 1
