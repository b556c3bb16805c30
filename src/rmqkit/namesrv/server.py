"""A running name server: its port, its table, and the scan for silent brokers."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.namesrv.handlers import namesrv_dispatch
from rmqkit.namesrv.routes import RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.server import RemotingServer

__all__ = ["NameServer"]

_log = logging.getLogger(__name__)


class NameServer:
    """Starts and stops everything a name server is made of.

    Attributes:
        address: where it listens, as ``host:port`` others can use; set by `start`.
        routes: the table, for inspection.
    """

    def __init__(self, settings: NamesrvSettings, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self.routes = RouteTable(clock.monotonic_ms)
        self._server = RemotingServer(namesrv_dispatch(self.routes), clock=clock, on_close=self._connection_closed)
        self._scan: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenFailed: the port is taken.
        """
        port = await self._server.listen(self._settings.bind_address, self._settings.listen_port)
        self.address = join_address(advertised_ip(self._settings.bind_address), port)
        self._scan = asyncio.create_task(self._drop_silent(), name="silent brokers")

    async def stop(self) -> None:
        """Close every connection and the port."""
        if self._scan is not None:
            self._scan.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._scan
        await self._server.close()

    def _connection_closed(self, connection: Connection) -> None:
        keys = self.routes.registered_over(connection)
        if keys:
            _log.info("brokers %s left: their connection closed", [address for _, address in keys])
            self.routes.unregister(keys)

    async def _drop_silent(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scan_interval_ms / 1000)
            for key, live in self.routes.silent():
                _log.warning("broker %s at %s was silent for %d ms", live.broker_name, key[1], live.timeout_ms)
                self.routes.unregister([key])
                if isinstance(live.connection, Connection):
                    live.connection.close("its broker was silent")
