"""The listening side: one port, its connections, and the housekeeping that closes idle ones. Source: remoting.md §2."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RemotingError, RequestTimedOut
from rmqkit.protocol.command import Command
from rmqkit.protocol.frame import FRAME_BYTES_MAX, JSON
from rmqkit.remoting.address import join_address
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.remoting.opening import Opening
from rmqkit.remoting.permits import SERVER_CALLS_MAX, Permits
from rmqkit.remoting.tls import ServerTls

__all__ = ["IDLE_MS_MAX", "ListenFailed", "RemotingServer"]

IDLE_MS_MAX = 120_000
"""A connection without traffic for this long is closed (``serverChannelMaxIdleTimeSeconds``)."""

_SWEEP_SECONDS = 5.0
_DRAIN_LOOK_SECONDS = 0.05
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
        tls: ServerTls | None = None,
        accepts_proxy: bool = True,
    ) -> None:
        self._dispatch = dispatch
        self._clock = clock
        self._on_close = on_close
        self._idle_ms_max = idle_ms_max
        self._frame_bytes_max = frame_bytes_max
        self._serialize_type = serialize_type
        self._tls = tls
        self._accepts_proxy = accepts_proxy
        self._permits = Permits(SERVER_CALLS_MAX)
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self.connections: set[Connection] = set()

    async def listen(self, host: str, port: int) -> int:
        """Take a port and accept connections on it; returns the port (a free one for 0).
        Raises ListenFailed: the port is taken or the address is not this machine's."""
        bound = await self.bind(host, port)
        await self.serve()
        return bound

    async def bind(self, host: str, port: int) -> int:
        """Take a port without accepting connections yet; returns it (a free one for 0).
        Raises ListenFailed: as `listen`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._connection, host or None, port, backlog=_BACKLOG, reuse_address=True, start_serving=False
            )
        except (OSError, OverflowError) as error:
            cause = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            where = join_address(host, port)
            raise ListenFailed(f"cannot listen on {where}: {cause}; choose another port or stop its user") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Accept connections on the port that `bind` took."""
        assert self._server is not None, "bind comes first"
        await self._server.start_serving()
        self._sweeper = asyncio.get_running_loop().create_task(self._close_idle(), name="idle connections")

    async def call(self, connection: Connection, command: Command, timeout_ms: float) -> Command:
        """Call a connected client; at most `SERVER_CALLS_MAX` of these are under way at a time.
        Raises RequestTimedOut: no answer, or no permit, within ``timeout_ms``.
        Raises ConnectionLost: the client went first."""
        started_ms = self._clock.monotonic_ms()
        if not await self._permits.take(timeout_ms):
            raise RequestTimedOut(connection.peer, command.code, timeout_ms)
        try:
            return await connection.call(command, timeout_ms - (self._clock.monotonic_ms() - started_ms))
        finally:
            self._permits.give_back()

    async def drain(self, grace_ms: int) -> None:
        """Send peers away that know GO_AWAY, until they are gone or ``grace_ms`` has passed."""
        self._dispatch.go_away()
        until_ms = self._clock.monotonic_ms() + grace_ms
        while (self.connections or not self._dispatch.is_idle) and self._clock.monotonic_ms() < until_ms:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_SECONDS)

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
            opening=Opening(self._tls, accepts_proxy=self._accepts_proxy),
        )

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._on_close is not None:
            self._on_close(connection)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest_ms = self._clock.monotonic_ms() - self._idle_ms_max
            for connection in list(self.connections):
                if connection.active_ms < oldest_ms:
                    connection.close(f"no traffic for {self._idle_ms_max} ms")
                elif connection.frame_since_ms is not None and connection.frame_since_ms < oldest_ms:
                    connection.close(f"a frame is not whole after {self._idle_ms_max} ms")
