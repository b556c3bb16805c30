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
    """Return the settings of a broker of which nobody set anything."""
    given = {"listenPort": "0", "bindAddress": "127.0.0.1", **STANDALONE}
    settings: BrokerSettings = load([BrokerSettings], given, source="a Standalone's settings").values[0]
    return settings


class Standalone:
    """A name server and a broker that knows it.

    ``async with Standalone(...)`` starts both and stops them; port 0 picks a free one.

    Args:
        store_root: the store's directory, made when missing.
        namesrv: ``kv_config_path`` is put beside the broker's tables unless it is set.
        broker: ``namesrv_addr`` is set here.
        tls: what both ports do about TLS; None means disabled.
        client_tls: how the broker reaches the name server, and it the broker; None means plain.
        authentication: whose requests the broker takes; the name server takes what is signed by its own, only.
        configurations: what operators are shown and may change, of the name server and of the broker.

    Attributes:
        namesrv, broker: the two servers; ``broker.context`` is the state that requests find.
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
            namesrv.exporter_port += bool(namesrv.exporter_port)  # one file speaks of both, each has a port of its own
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
        """Return where clients find the name server, as ``host:port``."""
        return self.namesrv.address

    @property
    def broker_address(self) -> str:
        """Return where clients reach the broker, as ``host:port``."""
        return self.broker.address

    @property
    def metrics_addresses(self) -> tuple[str, str]:
        """Return where Prometheus reads the metrics of name server and broker, if it may."""
        return self.namesrv.metrics_address, self.broker.metrics_address

    async def start(self) -> None:
        """Start both; the broker is registered when this returns.
        Raises StoreError, ListenFailed: nothing is left running."""
        await self.namesrv.start()
        self._broker_settings.namesrv_addr = self.namesrv.address
        try:
            await self.broker.start()
        except BaseException:
            await self.namesrv.stop()
            raise

    async def stop(self) -> None:
        """Stop both, the broker first."""
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
    """The users, with one for what the two servers say to each other: where nobody named it, of this process alone."""
    if authentication is None or not authentication.enabled or authentication.inner_credentials:
        return authentication
    credentials = {"accessKey": f"standalone-{secrets.token_hex(8)}", "secretKey": secrets.token_hex(16)}
    return msgspec.structs.replace(authentication, inner_credentials=msgspec.json.encode(credentials).decode())
