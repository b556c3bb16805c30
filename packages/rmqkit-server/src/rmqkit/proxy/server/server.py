"""A proxy: a gRPC endpoint for the brokers of some name servers (``ProxyStartup`` in cluster mode).

Source: grpc.md §11.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

from msgspec import field

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import SettingsError
from rmqkit.metrics import ExporterType
from rmqkit.proxy.remote.remote_backend import HEARTBEAT_SECONDS, RemoteBackend
from rmqkit.proxy.remote.remoting_port import RemotingPort
from rmqkit.proxy.remote.users import ProxyUserSettings
from rmqkit.proxy.service.endpoint import Endpoint
from rmqkit.proxy.service.lite_subscriptions import LiteLimits
from rmqkit.proxy.transport.grpc_call import GrpcService
from rmqkit.remoting.address import AdminAddresses, advertised_ip, join_address
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.limits import GRPC_CALLS, GRPC_CALLS_MAX, ConnectionSettings, Limits
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tasks import repeat
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Setting

if TYPE_CHECKING:  # loads prometheus-client, which a proxy without metrics does not need
    from rmqkit.proxy.server.metrics import ProxyMetrics

__all__ = ["Proxy", "ProxySettings"]

_log = logging.getLogger(__name__)


class ProxyMode(enum.Enum):
    """The place of the brokers: in a cluster, or in the process of the proxy."""

    CLUSTER = "cluster"
    LOCAL = "local"

    @classmethod
    def _missing_(cls, value: object) -> ProxyMode | None:
        return next((one for one in cls if isinstance(value, str) and value.lower() == one.value), None)


class ProxySettings(ConnectionSettings, kw_only=True):
    """Settings of a proxy, with the keys of ``rmq-proxy.json``."""

    namesrv_addr: Annotated[str, Setting("namesrvAddr", "name servers as host:port;host:port")] = ""
    grpc_port: Annotated[
        int, Setting("grpcServerPort", "gRPC port for the 5.x SDKs; 0 means a free port", low=0, high=65535)
    ] = 8081
    grpc_calls_max: Annotated[int, GRPC_CALLS] = GRPC_CALLS_MAX
    lite_renewed_max: Annotated[
        int,
        Setting(
            "maxLiteRenewNumPerChannel",
            "unacknowledged messages of a lite consumer, above which it gets no more until it acknowledges some",
            low=1,
            high=100_000,
        ),
    ] = 100
    lite_adds_per_second_max: Annotated[
        int,
        Setting(
            "maxSyncLiteSubscriptionRate",
            "requests in a second to subscribe to more lite topics, from all clients together",
            low=1,
        ),
    ] = 5000
    remoting_port: Annotated[
        int,
        Setting(
            "remotingListenPort",
            "port for clients of the remoting protocol; 0 means a free port, -1 none",
            low=-1,
            high=65535,
        ),
    ] = 8080
    remoting_host: Annotated[
        str,
        Setting(
            "remotingAccessAddr",
            "host in the routes that clients get; default: the address that the client has reached",
        ),
    ] = ""
    mode: Annotated[
        ProxyMode,
        Setting(
            "proxyMode",
            "cluster: brokers are other processes; `rmq broker` itself can serve gRPC",
            only="cluster",
        ),
    ] = ProxyMode.CLUSTER
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    proxy_addresses: Annotated[
        AdminAddresses,
        Setting(
            "proxyProtocolAddresses",
            "load balancers whose PROXY protocol header is trusted: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("none"))


class Proxy:
    """A running proxy.

    Args:
        users: settings for users; None means no authentication, and unsigned requests to brokers.
        tls: TLS for SDKs; None means that TLS connections are refused.
        client_tls: TLS for connections to name servers and brokers; None means plain connections.

    Attributes:
        address: address for SDKs, as ``host:port``; set by `start`.
        remoting_address: address for remoting clients; empty if there is no remoting port.
    """

    def __init__(
        self,
        settings: ProxySettings,
        users: ProxyUserSettings | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        tls: ServerTls | None = None,
        client_tls: ClientTls | None = None,
    ) -> None:
        self._settings = settings
        self._users = users or ProxyUserSettings()
        self._clock = clock
        self._tls = tls
        self._client_tls = client_tls
        self._stack = AsyncExitStack()
        self._stopping = asyncio.Event()
        self._metrics: ProxyMetrics | None = None
        self.address = ""
        self.remoting_address = ""

    @property
    def metrics_address(self) -> str:
        """Address of the port for Prometheus; empty without metrics."""
        return "" if self._metrics is None else self._metrics.address

    async def start(self) -> None:
        """Bind the ports and accept connections.
        Raises ListenFailed; SettingsError: no name server is set, or the settings for users are not valid."""
        settings = self._settings
        addresses = [one.strip() for one in settings.namesrv_addr.split(";") if one.strip()]
        if not addresses:
            raise SettingsError("a proxy needs a name server: set namesrvAddr or -n")
        try:
            if settings.exporter_type is ExporterType.PROM:
                from rmqkit.proxy.server.metrics import ProxyMetrics

                self._metrics = ProxyMetrics(settings, self._clock)
                self._stack.push_async_callback(self._metrics.close)
                await self._metrics.bind(settings.bind_address)
            limits = Limits(settings)
            server = self._server(Router(), limits)
            port = await server.bind(settings.bind_address, settings.grpc_port)
            self.address = join_address(advertised_ip(settings.bind_address), port)
            backend = RemoteBackend(
                addresses,
                self._clock,
                lambda router, inner: RemotingClient(
                    router, clock=self._clock, tls=self._client_tls, credentials=inner
                ),
                self._users,
            )
            self._stack.push_async_callback(backend.close)
            if self._users.inner_credentials and not self._users.authentication_enabled:
                _log.warning(
                    "authenticationEnabled is not set: anyone who reaches %s has the rights of the brokers' own user",
                    self.address,
                )
            servers = [server]
            if settings.remoting_port >= 0:
                servers.append(await self._listen_to_remoting(backend, limits))
            lite_limits = LiteLimits(settings.lite_renewed_max, settings.lite_adds_per_second_max)
            endpoint = Endpoint(backend, self._clock, port=port, lite_limits=lite_limits)
            endpoint.start()
            beating = repeat(backend.heartbeat, name="heartbeat", seconds=HEARTBEAT_SECONDS, end=self._stopping)
            heartbeats = asyncio.create_task(beating, name="heartbeat")
            self._stack.push_async_callback(asyncio.wait, [heartbeats])
            # Callbacks run in reverse order: drain, ports, endpoint, heartbeats, connections to brokers.
            self._stack.push_async_callback(endpoint.stop)
            for one in servers:  # closed before the endpoint, so that no call arrives while the endpoint stops
                self._stack.push_async_callback(one.close)
            self._stack.push_async_callback(endpoint.drain)
            for one in servers:  # both ports accept gRPC, as in Apache's proxy
                one.http2 = GrpcService(endpoint, calls_max=settings.grpc_calls_max).connection
                await one.serve()
            if self._metrics is not None:
                await self._metrics.serve(endpoint, servers, self.address)
        except BaseException:
            await self.stop()
            raise

    def _server(
        self, router: Router, limits: Limits, on_close: Callable[[Connection], None] | None = None
    ) -> RemotingServer:
        return RemotingServer(
            router,
            clock=self._clock,
            on_close=on_close,
            tls=self._tls,
            balancers=lambda: self._settings.proxy_addresses,
            limits=limits,
        )

    async def _listen_to_remoting(self, backend: RemoteBackend, limits: Limits) -> RemotingServer:
        """Bind the port for remoting clients. Raises ListenFailed."""
        settings = self._settings
        # The server needs the handlers before it binds its port, so the port number in routes is set afterwards.
        port = RemotingPort(
            backend,
            lambda router: RemotingClient(router, clock=self._clock, tls=self._client_tls),
            host=settings.remoting_host,
        )
        self._stack.push_async_callback(port.close)
        server = self._server(port.router, limits, port.closed)
        port.port = await server.bind(settings.bind_address, settings.remoting_port)
        self.remoting_address = join_address(advertised_ip(settings.bind_address), port.port)
        return server

    async def stop(self) -> None:
        """Accept no more calls, release the messages that clients hold, and close all connections."""
        self._stopping.set()
        await self._stack.aclose()

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
