"""The listening side: one port, its connections, and the housekeeping that closes idle ones. Source: remoting.md §2."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RemotingError
from rmqkit.protocol.frame import FRAME_BYTES_MAX, JSON
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch

__all__ = ["IDLE_MS_MAX", "ListenFailed", "RemotingServer"]

IDLE_MS_MAX = 120_000
"""A connection without traffic for this long is closed (``serverChannelMaxIdleTimeSeconds``)."""

_SWEEP_SECONDS = 5.0
_BACKLOG = 1024

_log = logging.getLogger(__name__)


class ListenFailed(RemotingError):
    """A port cannot be listened on."""


class RemotingServer:
    """Accepts connections on one port and hands their requests to a dispatch; loop only."""

    def __init__(
        self,
        dispatch: Dispatch,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_close: Callable[[Connection], None] | None = None,
        idle_ms_max: int = IDLE_MS_MAX,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        serialize_type: int = JSON,
    ) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self._on_close = on_close
        self._idle_ms_max = idle_ms_max
        self._frame_bytes_max = frame_bytes_max
        self._serialize_type = serialize_type
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.connections: set[Connection] = set()

    async def listen(self, host: str, port: int) -> int:
        """Start to listen and return the port (a free one for 0).

        Raises:
            ListenFailed: the port is taken or the address is not this machine's.
        """
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._connection, host or None, port, backlog=_BACKLOG, reuse_address=True
            )
        except (OSError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or error
            raise ListenFailed(
                f"cannot listen on {host}:{port}: {cause}; choose another port or stop its user"
            ) from error
        self._sweeper = loop.create_task(self._close_idle(), name=f"idle connections of port {port}")
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, write what is queued, close every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._server is not None:
            self._server.close()
        waiting = [connection.closed for connection in self.connections]
        for connection in list(self.connections):
            connection.close()
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=1.0)
            for connection in list(self.connections):
                connection.abort()
            if late:
                await asyncio.wait(late, timeout=1.0)
        await self._dispatch.close()
        if self._server is not None:
            await self._server.wait_closed()

    def _connection(self) -> Connection:
        return Connection(
            self._dispatch,
            clock=self._clock,
            on_open=self.connections.add,
            on_close=self._forget,
            frame_bytes_max=self._frame_bytes_max,
            serialize_type=self._serialize_type,
        )

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._on_close is not None:
            self._on_close(connection)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest_ms = self._clock.monotonic_ms() - self._idle_ms_max
            for connection in [one for one in self.connections if one.active_ms < oldest_ms]:
                connection.close(f"no traffic for {self._idle_ms_max} ms")
