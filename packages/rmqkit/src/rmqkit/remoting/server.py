"""The server side of the transport: a port, its connections, and the task that closes idle connections.
Source: remoting.md §2."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.remoting.address import AdminAddresses, IpAddress
from rmqkit.remoting.connection import Connection, Link
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.listening import ListeningPort
from rmqkit.remoting.router import Router
from rmqkit.remoting.sniffer import ProtocolSniffer
from rmqkit.remoting.tasks import Tasks
from rmqkit.remoting.tls import ServerTls

# The time without traffic after which a connection is closed (``serverChannelMaxIdleTimeSeconds``).
IDLE_MS_MAX = 120_000

_SWEEP_SECONDS = 5.0
_DRAIN_LOOK_SECONDS = 0.05
_WARNINGS_MAX = 100
_NOBODY = AdminAddresses("none")

_log = logging.getLogger(__name__)


class RemotingServer:
    """A server that accepts connections on one port and passes their requests to a router. Use it only on the event
    loop.
    ``balancers``: called for each PROXY preamble; returns the addresses of trusted load balancers.
    ``limits``: the limits of all connections together. Several ports can share limits.

    Attributes:
        http2: makes the protocol of a connection that begins like HTTP/2. None if the port does not support HTTP/2.
    """

    def __init__(
        self,
        router: Router,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_open: Callable[[], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
        idle_ms_max: int = IDLE_MS_MAX,
        tls: ServerTls | None = None,
        accepts_proxy: bool = True,
        balancers: Callable[[], AdminAddresses] = lambda: _NOBODY,
        connection: Callable[..., Connection] = Connection,
        limits: Limits | None = None,
    ) -> None:
        self._router = router
        self._make_connection = connection
        self._clock = clock
        self._on_open = on_open
        self._on_close = on_close
        self._idle_ms_max = idle_ms_max
        self._tls = tls
        self._accepts_proxy = accepts_proxy
        self._balancers = balancers
        self._unbelieved: set[str] = set()
        self._port: ListeningPort | None = None
        self._tasks = Tasks()
        self.limits = limits or Limits()
        self._addresses: dict[Link, IpAddress | None] = {}
        self.http2: Callable[..., Link] | None = None
        self.connections: set[Link] = set()

    async def listen(self, host: str, port: int) -> int:
        """Reserve a port, accept connections, and return the number of the port. Port 0 means any free port.
        Raises ListenFailed: the port is in use, or the address does not belong to this machine."""
        bound = await self.bind(host, port)
        await self.serve()
        return bound

    async def bind(self, host: str, port: int) -> int:
        """Reserve a port without accepting connections, and return its number. Port 0 means any free port.
        Raises ListenFailed: see `listen`."""
        self._port = await ListeningPort.bind(self._connection, host, port)
        return self._port.number

    async def serve(self) -> None:
        """Accept connections on the port that `bind` reserved.
        Raises ListenFailed: another process has begun to listen on the port since then."""
        assert self._port is not None, "the port was bound"
        await self._port.open()
        self._tasks.start(self._close_idle(), "idle connections")

    async def drain(self, grace_ms: int) -> None:
        """Answer new requests with GO_AWAY until all connections are closed or ``grace_ms`` has passed."""
        # Running requests are completed. Clients that get GO_AWAY connect to other servers.
        self._router.go_away()
        until_ms = self._clock.monotonic_ms() + grace_ms
        while (self.connections or not self._router.is_idle) and self._clock.monotonic_ms() < until_ms:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_SECONDS)

    async def close(self) -> None:
        """Stop listening, write the queued bytes and close every connection."""
        await self._tasks.close()
        if self._port is not None:
            self._port.close()
        waiting = [connection.closed for connection in self.connections]
        for connection in list(self.connections):
            connection.close()
        # Limit the wait, because a peer that reads nothing would delay the stop for ever.
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=1.0)
            for connection in list(self.connections):
                connection.abort()
            if late:
                await asyncio.wait(late, timeout=1.0)
        await self._router.close()
        if self._port is not None:
            await self._port.wait_closed()

    def _connection(self) -> Connection:
        return self._make_connection(
            self._router,
            clock=self._clock,
            on_open=self._remember,
            on_close=self._forget,
            limits=self.limits,
            sniffer=ProtocolSniffer(self._tls, accepts_proxy=self._accepts_proxy, believes=self._believes),
            upgrade=self._upgrade if self.http2 is not None else None,
        )

    def _upgrade(self, connection: Connection, data: bytes) -> None:
        assert self.http2 is not None, "the port speaks HTTP/2"
        other = self.http2(clock=self._clock, on_open=self._remember, on_close=self._forget, limits=self.limits)
        connection.hand_over(other)
        other.plain_received(data)

    def _believes(self, hops: Sequence[IpAddress]) -> bool:
        """Return True if a PROXY preamble from these hops is trusted."""
        if self._balancers().include(hops):
            return True
        source = str(hops[0]) if hops else "?"
        if source not in self._unbelieved and len(self._unbelieved) < _WARNINGS_MAX:
            self._unbelieved.add(source)
            _log.warning(
                "%s sent a PROXY preamble, but is not in proxyProtocolAddresses=%s: the address in it is ignored",
                source,
                self._balancers(),
            )
        return False

    def _remember(self, connection: Link) -> None:
        self.connections.add(connection)
        self._addresses[connection] = address = connection.hops[0] if connection.hops else None
        if not self.limits.opened(connection, address):
            connection.abort()  # `_forget` subtracts this connection later
        if self._port is not None and not self._port.is_open:
            connection.abort()  # the port closed during the accept, and nothing else would close this connection
        if self._on_open is not None and isinstance(connection, Connection):  # not after a hand-over
            self._on_open()

    def _forget(self, connection: Link) -> None:
        self.connections.discard(connection)
        # Use the address that was counted, because a preamble may have changed the hops.
        self.limits.closed(connection, self._addresses.pop(connection))
        if self._on_close is not None and isinstance(connection, Connection):
            self._on_close(connection)

    async def _close_idle(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            oldest_ms = self._clock.monotonic_ms() - self._idle_ms_max
            for connection in list(self.connections):
                if connection.active_ms < oldest_ms:
                    connection.close(f"no traffic for {self._idle_ms_max} ms")
                elif connection.active_ms < oldest_ms + self._idle_ms_max / 2:
                    connection.probe()
                elif connection.frame_since_ms is not None and connection.frame_since_ms < oldest_ms:
                    connection.close(f"a frame is incomplete after {self._idle_ms_max} ms")
