"""A running name server: its port, its tables, and its periodic work, started and stopped in order.

The start reads the KV file, starts the removal of brokers, and opens the port. The stop ends, in this order, the scan,
the port with its connections, the waiting removals, and the connections for notices. Source: behaviour.md §1.1, §1.4.

`NameServerMetrics` are the values for Prometheus: latencies of requests, and sizes of the tables. Apache's name server
has no metrics; the settings here are the same as for a broker. Use this module only on the event loop.
Source: behaviour.md §9.10.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.metrics import ExporterType, Gathered, histogram
from rmqkit.namesrv.admin_handlers import AdminHandlers
from rmqkit.namesrv.brokers import Claims, Notices, Unregistration
from rmqkit.namesrv.handlers import BrokerHandlers, KeyValues, RouteHandlers
from rmqkit.namesrv.routes import MemberChange, RouteTable
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, inner_credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.router import Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tasks import Tasks
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Configuration

KV_FILE = "kvConfig.json"

_log = logging.getLogger(__name__)


class NameServer:
    """A name server, which starts and stops all its parts.

    Args:
        tls: TLS of the port; None means disabled.
        client_tls: TLS for connections to brokers; None means plain connections.
        authentication: settings for the signatures of brokers' requests, and of notices to brokers.
        settings: the name server fills in an empty ``kv_config_path`` and a ``listen_port`` of 0.
        configuration: the settings that requests show and change; None means all, without storing changes in a file.

    Attributes:
        address: address for clients, as ``host:port``; set by `start`.
        routes: the table, for inspection.
    """

    def __init__(
        self,
        settings: NamesrvSettings,
        clock: Clock = SYSTEM_CLOCK,
        *,
        tls: ServerTls | None = None,
        client_tls: ClientTls | None = None,
        authentication: AuthenticationSettings | None = None,
        configuration: Configuration | None = None,
    ) -> None:
        settings.kv_config_path = settings.kv_config_path or str(Path.home() / "namesrv" / KV_FILE)
        self._settings = settings
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        self._kv = KeyValues(Path(settings.kv_config_path).expanduser())
        self._tasks = Tasks()
        self._notices: Notices | None = None
        self.routes = RouteTable(clock.monotonic_ms)
        self._unregistration = Unregistration(
            self.routes, capacity=settings.unregister_queue_capacity, on_change=self._lowest_id_changed
        )
        dispatch = Router()
        RouteHandlers(settings, self.routes, self._kv, self._is_ready).register(dispatch)
        users = authentication or AuthenticationSettings()
        claims = Claims(settings, self.routes, Authentication.of(users, clock))
        BrokerHandlers(settings, self.routes, self._kv, self._unregistration, self._lowest_id_changed, claims).register(
            dispatch
        )
        configuration = configuration or Configuration([settings, users])
        AdminHandlers(settings, self.routes, self._kv, configuration).register(dispatch)
        self._metrics: NameServerMetrics | None = None
        if settings.exporter_type is ExporterType.PROM:
            self._metrics = NameServerMetrics(settings, self.routes, dispatch, clock)
        self._server = RemotingServer(
            dispatch,
            clock=clock,
            on_close=self._connection_closed,
            tls=tls,
            balancers=lambda: settings.proxy_addresses,
            limits=Limits(settings),
            connection=Connection if self._metrics is None else self._metrics.connection,
        )
        self._client_tls = client_tls
        self._credentials = inner_credentials(users.inner_credentials)
        self.address = ""

    @property
    def metrics_address(self) -> str:
        """Address of the port for Prometheus; empty without metrics."""
        return "" if self._metrics is None else self._metrics.address

    async def start(self) -> None:
        """Read the KV file, and listen.
        Raises StoreMismatch, StoreUnavailable: the KV file cannot be read.
        Raises ListenFailed: the port is in use."""
        self._kv.load()
        client = RemotingClient(clock=self._clock, tls=self._client_tls, credentials=self._credentials)
        self._notices = Notices(client)
        self._started_ms = self._clock.monotonic_ms()
        self._unregistration.start()
        try:
            if self._metrics is not None:
                await self._metrics.bind()
            port = await self._server.listen(self._settings.bind_address, self._settings.listen_port)
        except BaseException:
            await self.stop()
            raise
        # As in Apache's name server, operators see the chosen port in the settings, in place of 0.
        self._settings.listen_port = port
        self.address = join_address(advertised_ip(self._settings.bind_address), port)
        if self._metrics is not None:
            await self._metrics.serve(self._server, self.address)
        self._tasks.start(self._keep_scanning(), "silent brokers")

    async def stop(self) -> None:
        """Close every connection and the port."""
        await self._tasks.close()
        if self._metrics is not None:
            await self._metrics.close()
        await self._server.close()
        # Stop after the port: each connection that closes adds its brokers to this queue.
        await self._unregistration.stop()
        if self._notices is not None:
            await self._notices.stop()

    def drop_silent(self) -> None:
        """Queue the removal of brokers that were silent for too long, and close their connections."""
        for departure in self.routes.silent():
            _log.warning("broker %s at %s was silent for too long", departure.broker_name, departure.address)
            self._unregistration.submit(departure)
            if isinstance(departure.connection, Connection):
                # The connection is probably half-open. A live broker notices the close and registers again.
                departure.connection.close("its broker was silent")

    # -- inside

    def _is_ready(self) -> bool:
        """Return True if routes can be answered: after a start, brokers need time to register."""
        if not self._settings.need_wait_for_service:
            return True
        return self._clock.monotonic_ms() - self._started_ms >= self._settings.wait_for_service_seconds * 1000

    def _connection_closed(self, connection: Connection) -> None:
        for departure in self.routes.registered_over(connection):
            _log.info("broker %s at %s left: its connection closed", departure.broker_name, departure.address)
            self._unregistration.submit(departure)

    def _lowest_id_changed(self, change: MemberChange) -> None:
        if self._settings.notify_min_broker_id_changed and self._notices is not None:
            self._notices.send(change)

    async def _keep_scanning(self) -> None:
        while True:
            await asyncio.sleep(self._settings.scan_interval_ms / 1000)
            self.drop_silent()


class NameServerMetrics:
    """The metrics of a name server, and their port.
    ``connection``: makes connections that count requests. ``address``: address of the port, set by `bind`."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, dispatch: Router, clock: Clock) -> None:
        # Imported here, because the exporter loads prometheus-client, which a server without metrics does not need.
        from rmqkit.exporter import Exporter, Meter, MeteredConnection, lane_values

        self._lane_values = lane_values
        self._settings = settings
        self._routes = routes
        self._dispatch = dispatch
        self._clock = clock
        self._meter = Meter()
        self._lag_ms = histogram("rmqkit_event_loop_lag")
        self._servers: list[RemotingServer] = []
        self._exporter = Exporter()
        self.connection = partial(MeteredConnection, meter=self._meter)

    @property
    def address(self) -> str:
        return self._exporter.address

    async def bind(self) -> None:
        """Bind the port. Raises ListenFailed: the port is in use, or the address is not local."""
        settings = self._settings
        await self._exporter.bind(settings.exporter_host or settings.bind_address, settings.exporter_port)

    async def serve(self, server: RemotingServer, node_id: str) -> None:
        self._servers.append(server)
        common = {**self._settings.metric_labels.pairs, "node_type": "nameserver", "node_id": node_id}
        await self._exporter.serve(self.gather, common, self._lag_ms, self._clock)

    async def close(self) -> None:
        await self._exporter.close()

    async def gather(self) -> Gathered:
        """Return the current values."""
        clusters = self._routes.clusters()
        brokers = clusters.broker_addr_table.values()
        lanes = {lane.name: (lane.requests, lane.requests_max) for lane in self._dispatch.lanes}
        return {
            "rocketmq_rpc_latency": self._meter.gather(),
            "rmqkit_event_loop_lag": {(): self._lag_ms},
            "rmqkit_namesrv_clusters": {(): len(clusters.cluster_addr_table)},
            "rmqkit_namesrv_brokers": {(): sum(len(broker.broker_addrs) for broker in brokers)},
            "rmqkit_namesrv_topics": {(): len(self._routes.topics())},
            **self._lane_values(lanes, self._servers),
        }
