"""Name server and broker in one process, for development and tests (``rmq standalone``)."""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec

from rmqkit.broker.server import Broker
from rmqkit.broker.settings import STANDALONE, BrokerSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.metrics import ExporterType
from rmqkit.namesrv.server import KV_FILE, NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.authentication import AuthenticationSettings
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Configuration, load
from rmqkit.store.settings import StoreSettings

__all__ = ["Standalone"]


def _usual() -> BrokerSettings:
    """Return the default settings of the broker."""
    given = {"listenPort": "0", "bindAddress": "127.0.0.1", **STANDALONE}
    settings: BrokerSettings = load([BrokerSettings], given, source="a Standalone's settings").values[0]
    return settings


class Standalone:
    """A name server, and a broker that registers at it.

    ``async with Standalone(...)`` starts and stops both servers; port 0 means a free port.

    Args:
        store_root: the store's directory, created if missing.
        namesrv: settings of the name server; the default ``kv_config_path`` is in the broker's ``config`` directory.
        broker: settings of the broker; ``namesrv_addr`` is set by `start`.
        tls: TLS of both ports; None means disabled.
        client_tls: TLS for connections between name server and broker; None means plain connections.
        authentication: the users of the broker; the name server accepts registrations signed by the inner user.
        configurations: the settings that operators can read and change, of the name server and of the broker.

    Attributes:
        namesrv, broker: the two servers; ``broker.context`` is the state for request handlers.
    """

    def __init__(
        self,
        store_root: Path,
        *,
        namesrv: NamesrvSettings | None = None,
        broker: BrokerSettings | None = None,
        store: StoreSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        tls: ServerTls | None = None,
        client_tls: ClientTls | None = None,
        authentication: AuthenticationSettings | None = None,
        configurations: tuple[Configuration | None, Configuration | None] = (None, None),
    ) -> None:
        self._broker_settings = broker or _usual()
        namesrv = namesrv or NamesrvSettings(listen_port=0, bind_address="127.0.0.1")
        namesrv.kv_config_path = namesrv.kv_config_path or str(store_root / "config" / KV_FILE)
        if namesrv.exporter_type is ExporterType.PROM and namesrv.exporter_port == self._broker_settings.exporter_port:
            namesrv.exporter_port += bool(namesrv.exporter_port)  # one file configures both servers: use the next port
        authentication = _with_inner(authentication)
        self.namesrv = NameServer(
            namesrv,
            clock,
            tls=tls,
            client_tls=client_tls,
            authentication=authentication,
            configuration=configurations[0] or Configuration([namesrv]),
        )
        self.broker = Broker(
            self._broker_settings,
            store or StoreSettings(),
            store_root,
            clock=clock,
            tls=tls,
            client_tls=client_tls,
            authentication=authentication,
            configuration=configurations[1],
        )

    @property
    def namesrv_address(self) -> str:
        """Address of the name server for clients, as ``host:port``."""
        return self.namesrv.address

    @property
    def broker_address(self) -> str:
        """Address of the broker for clients, as ``host:port``."""
        return self.broker.address

    @property
    def metrics_addresses(self) -> tuple[str, str]:
        """Addresses of the ports for Prometheus of name server and broker; empty without metrics."""
        return self.namesrv.metrics_address, self.broker.metrics_address

    async def start(self) -> None:
        """Start both servers, and return when the broker is registered.
        Raises StoreError, ListenFailed: both servers are stopped."""
        await self.namesrv.start()
        self._broker_settings.namesrv_addr = self.namesrv.address
        try:
            await self.broker.start()
        except BaseException:
            await self.namesrv.stop()
            raise

    async def stop(self) -> None:
        """Stop both servers, the broker first."""
        try:
            await self.broker.stop()
        finally:
            await self.namesrv.stop()

    async def __aenter__(self) -> Standalone:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


def _with_inner(authentication: AuthenticationSettings | None) -> AuthenticationSettings | None:
    """Return the settings with an inner user for requests between the two servers, by default a new random user."""
    if authentication is None or not authentication.enabled or authentication.inner_credentials:
        return authentication
    credentials = {"accessKey": f"standalone-{secrets.token_hex(8)}", "secretKey": secrets.token_hex(16)}
    return msgspec.structs.replace(authentication, inner_credentials=msgspec.json.encode(credentials).decode())
