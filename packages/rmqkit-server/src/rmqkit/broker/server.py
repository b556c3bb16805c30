"""A running broker. It starts and stops ports, services and periodic work in order.

A start binds the ports, makes the parts (`rmqkit.broker.assembly`), reads the tables, recovers the store, listens, and
registers. A stop has the order of `rmqkit.broker.context.Stage`. Source: behaviour.md §2.1, §2.2.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit import extras
from rmqkit.broker.archive import ROUND_SECONDS
from rmqkit.broker.assembly import Assembly
from rmqkit.broker.context import BrokerContext, Lifecycle, Stage
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.pull.handler import SLOW_ROUND_SECONDS, stop_slow_groups
from rmqkit.broker.replication.role import SlaveRole, check_address, check_role, sync_with_group, warn_of_ha_port
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.statistics import SAMPLE_SECONDS
from rmqkit.broker.tables.groups import ROUND_SECONDS as UNUSED_ROUND_SECONDS
from rmqkit.broker.tables.groups import drop_unused_groups
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.broker.unused_settings import UnusedSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RmqError
from rmqkit.metrics import ExporterType
from rmqkit.protocol.command import Command
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, inner_credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.router import Refusal, Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Configuration
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts
    from rmqkit.exporter import Exporter

__all__ = ["Broker"]

_CLIENT_SWEEP_SECONDS = 10.0
_FILTER_PERSIST_SECONDS = 10.0
_NOTIFY_SECONDS = 15.0
_WRITE_NEW_SECONDS = 1.0
_FIRST_RETENTION_SECONDS = 60.0
_REVIVE_SECONDS = 0.25
_VIP_BELOW = 2
_GRACE_MS = 30_000

_MakeDispatch = Callable[[Refusal | None], Router]

_log = logging.getLogger(__name__)


class Broker:
    """One broker with its own store.

    Args:
        settings: the broker's settings. ``broker_name`` and ``broker_ip1`` are set if they are empty.
        store_settings: the settings of the store.
        store_root: ``storePathRootDir``.
        tls: TLS of the ports; None: disabled.
        client_tls: TLS of connections to name servers; None: plain connections.
        authentication: the settings for checks of signatures, and for the broker's own signature.
        configuration: the settings for operators. None: changes last until the broker stops.
        dispatch: makes the router of each port. Tests inject faults there.

    Attributes:
        configuration: the settings that operators see and change.
        limits: the limits of connections. Connections above the limits are refused.
        address: the address for clients, as ``host:port``. `start` sets it.
        metrics_address: the address for Prometheus, if enabled. `start` sets it.
        grpc_address: the address for 5.x SDKs, if enabled. `start` sets it.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        store_settings: StoreSettings,
        store_root: Path,
        *,
        clock: Clock = SYSTEM_CLOCK,
        tls: ServerTls | None = None,
        client_tls: ClientTls | None = None,
        authentication: AuthenticationSettings | None = None,
        configuration: Configuration | None = None,
        dispatch: _MakeDispatch = Router,
    ) -> None:
        self._settings = settings
        self._store_settings = store_settings
        self._store_root = store_root
        self._clock = clock
        self._tls = tls
        self._client_tls = client_tls
        self._authentication = authentication or AuthenticationSettings()
        self.configuration = configuration or Configuration(
            [settings, store_settings, self._authentication, UnusedSettings()]
        )
        self._dispatch = dispatch
        self.limits = Limits(settings)
        self._lifecycle = Lifecycle()
        self._parts: Assembly | None = None
        self._counts: Counts | None = None
        self.address = ""
        self.metrics_address = ""
        self.grpc_address = ""

    @property
    def parts(self) -> Assembly:
        """The parts of the broker, for inspection on its loop. The broker must be started."""
        assert self._parts is not None, "the broker is started"
        return self._parts

    @property
    def context(self) -> BrokerContext:
        """The state of the broker, for inspection on its loop. The broker must be started."""
        return self.parts.context

    async def start(self) -> None:
        """Open the store, listen and register.
        Raises StoreError, ListenFailed: all started parts are stopped again."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop in the order of `Stage`: the store closes after all parts that write to it. If steps fail, run the
        remaining steps and raise the first failure at the end."""
        await self._lifecycle.stop()

    # -- inside

    # Long: the order of a start is in one place, and each stop is next to its start.
    async def _start(self) -> None:
        settings = self._settings
        settings.broker_name = settings.broker_name or socket.gethostname()
        settings.broker_ip1 = settings.broker_ip1 or advertised_ip(settings.bind_address)
        check_address(settings)
        check_role(settings)
        authentication = Authentication.of(self._authentication, self._clock)
        refusal = partial(self._refusal, authentication) if authentication is not None else None
        dispatch, vip_dispatch = self._dispatch(refusal), self._dispatch(refusal)
        exporter = await self._bind_exporter()
        servers = [self._server(dispatch)]
        port = await self._bind(servers[0], settings.listen_port)  # fails before any write if the port is in use
        # Port 0 has no VIP port: the system chooses the port, and the port number minus two may be in use.
        if settings.listen_port > _VIP_BELOW:
            servers.append(self._server(vip_dispatch))
            await self._bind(servers[1], settings.listen_port - _VIP_BELOW)
        self.address = join_address(settings.broker_ip1, port)
        grpc_dispatch = self._dispatch(refusal)
        grpc_server = await self._bind_grpc(grpc_dispatch)
        client = RemotingClient(
            clock=self._clock,
            tls=self._client_tls,
            credentials=inner_credentials(self._authentication.inner_credentials),
        )
        parts = self._parts = Assembly(
            settings=settings,
            store_settings=self._store_settings,
            store_root=self._store_root,
            clock=self._clock,
            configuration=self.configuration,
            authentication=self._authentication,
            tls=self._tls,
            client_tls=self._client_tls,
            address=self.address,
            port=port,
            client=client,
            counts=self._counts,
        )
        context, lifecycle = parts.context, self._lifecycle
        lifecycle.on_stop(
            Stage.STORE, context.store.close
        )  # before the load: the store has to close if a table cannot be read
        parts.load()
        lifecycle.on_stop(Stage.DELIVERED, context.persist_delivered)
        lifecycle.on_stop(Stage.TABLES, context.persist)
        lifecycle.on_stop(Stage.CLIENTS, client.close)
        lifecycle.on_stop(Stage.CLIENTS, context.long_polling.close)
        # After the load: a slave reports its offset immediately and gets data of the log, which has to be recovered.
        ha_address = await self._listen_for_slaves(port)
        registration = parts.register_with(ha_address)
        local_dispatch = Router()  # for calls that the gRPC endpoint has accepted
        parts.add_handlers([dispatch, grpc_dispatch, local_dispatch], vip_dispatch, ha_address)
        dispatch.batch = vip_dispatch.batch = grpc_dispatch.batch = context.store.batch
        self.configuration.listeners.append(self._settings_changed)
        if authentication is not None:
            parts.authorize(authentication)
        # Write the tables before the registration: system topics that the load added have to be on the disk.
        context.persist()
        # Take the first sample now: messages that are in the queues before this start are not counted.
        context.statistics.sample()
        self._free_disk(context.store)
        # Serve before the registration: the port has to be open when clients read the route.
        for server in servers:
            await server.serve()
        # Register this after `long_polling` and the client, so that it runs first: clients leave while requests wait.
        lifecycle.on_stop(Stage.CLIENTS, partial(self._drain, servers))
        await sync_with_group(context, registration, client, ha_address)
        # Register the stop before the start: if the start fails halfway, the broker has to unregister again.
        lifecycle.on_stop(Stage.REGISTRATION, registration.stop)
        await registration.start()
        if parts.slave is None:
            self._start_services(context)
        else:
            self._start_following(parts.slave)
        if grpc_server is not None:
            await self._serve_grpc(grpc_server, local_dispatch)
        if exporter is not None:
            await self._serve_metrics(exporter, dispatch, servers)
        self._start_rounds(context)

    def _start_rounds(self, context: BrokerContext) -> None:
        """Start the periodic work of masters and slaves."""
        settings, every = self._settings, self._lifecycle.every
        every(_WRITE_NEW_SECONDS, context.topics.write_new, "new topics")
        every(_WRITE_NEW_SECONDS, context.groups.write_new, "new groups")
        every(_FILTER_PERSIST_SECONDS, context.filters.persist_round, "filter table")
        every(settings.offset_persist_interval_ms / 1000, context.offsets.persist_round, "offset table")
        every(settings.delay_offset_persist_interval_ms / 1000, context.schedule.persist_round, "delay offsets")
        every(UNUSED_ROUND_SECONDS, partial(drop_unused_groups, context), "unused groups")
        every(_CLIENT_SWEEP_SECONDS, context.clients.close_silent, "silent clients")
        every(_NOTIFY_SECONDS, context.clients.notify_changes, "consumer changes")
        every(_CLIENT_SWEEP_SECONDS, context.queue_locks.drop_expired, "expired queue locks")
        every(SAMPLE_SECONDS, context.statistics.sample, "statistics")
        every(SLOW_ROUND_SECONDS, partial(stop_slow_groups, context), "slow groups", SLOW_ROUND_SECONDS)
        if context.lite is not None:
            self._lifecycle.on_stop(Stage.SERVICES, context.lite.close)
            every(settings.lite_expiry_interval_ms / 1000, context.lite.expire, "lite topics")
            every(settings.lite_client_check_interval_ms / 1000, context.lite.drop_silent, "silent lite clients")
            every(_WRITE_NEW_SECONDS, context.lite.save, "lite tables")
        if context.archive is not None:
            self._lifecycle.on_stop(Stage.CLIENTS, context.archive.close)
            every(ROUND_SECONDS, context.archive.round, "archive", 0)
            self._lifecycle.on_stop(Stage.ROUNDS, context.archive.stop)  # runs before the wait for `round`
        retention_seconds = self._store_settings.clean_resource_interval_ms / 1000
        every(retention_seconds, context.store.retention_round, "retention", _FIRST_RETENTION_SECONDS)

    @staticmethod
    def _free_disk(store: MessageStore) -> None:
        """Run a retention cycle before the first message if a disk is too full."""
        try:
            if store.retention.lacks_space():
                store.retention_round()
        except (RmqError, OSError) as error:
            _log.error("retention: a round failed: %s", error)

    def _server(self, dispatch: Router) -> RemotingServer:
        return RemotingServer(
            dispatch,
            clock=self._clock,
            on_open=self._connection_opened,
            on_close=self._connection_closed,
            tls=self._tls,
            accepts_proxy=self._settings.proxy_protocol,
            balancers=lambda: self._settings.proxy_addresses,
            limits=self.limits,
            connection=Connection if self._counts is None else self._counts.connection,
        )

    async def _bind_exporter(self) -> Exporter | None:
        """Bind the port for Prometheus and make the counters. Return None if metrics are off."""
        settings = self._settings
        if settings.exporter_type is ExporterType.DISABLE:
            return None
        from rmqkit.broker.counts import Counts
        from rmqkit.exporter import Exporter

        exporter, self._counts = Exporter(), Counts(self._clock)
        self._lifecycle.on_stop(Stage.PORTS, exporter.close)
        await exporter.bind(settings.exporter_host or settings.bind_address, settings.exporter_port)
        self.metrics_address = exporter.address
        return exporter

    async def _serve_metrics(self, exporter: Exporter, dispatch: Router, servers: list[RemotingServer]) -> None:
        from rmqkit.broker.metrics import BrokerMetrics

        assert self._counts is not None, "an exporter serves counters"
        copies = None if self.parts.master is None else self.parts.master.copies
        metrics = BrokerMetrics(self._counts, self.context, copies, dispatch, servers)
        await exporter.serve(metrics.gather, metrics.common(), self._counts.lag_ms, self._clock)

    async def _bind_grpc(self, dispatch: Router) -> RemotingServer | None:
        """Bind the port for 5.x SDKs. Other clients can use this port, too. Return None if the port is off.
        Raises ExtraMissing: a package for gRPC is missing. Raises ListenFailed: the port is in use."""
        settings = self._settings
        if settings.grpc_port < 0:
            return None
        if settings.broker_role is BrokerRole.SLAVE:
            _log.info("a slave has no gRPC port, because clients cannot pop from it")
            return None
        if self._authentication.enabled and self._authentication.full_signatures_only:
            said = "the gRPC port %d stays closed: fullSignatureRequired=true, and calls of gRPC cannot be signed so"
            _log.warning(said, settings.grpc_port)
            return None
        with extras.needed("grpc", f"grpcServerPort={settings.grpc_port} (-1 for no such port)"):
            import rmqkit.proxy.transport.grpc_call  # noqa: F401
        server = self._server(dispatch)
        port = await self._bind(server, settings.grpc_port)
        self.grpc_address = join_address(settings.broker_ip1, port)
        return server

    async def _serve_grpc(self, server: RemotingServer, router: Router) -> None:
        from rmqkit.proxy.service.endpoint import Endpoint
        from rmqkit.proxy.transport.grpc_call import GrpcService

        port = int(self.grpc_address.rpartition(":")[2])
        backend = self.parts.grpc_backend(router)
        endpoint = Endpoint(backend, self._clock, port=port)
        endpoint.start()
        self._lifecycle.on_stop(Stage.CLIENTS, endpoint.stop)
        self._lifecycle.on_stop(Stage.CLIENTS, server.close)  # runs before `endpoint.stop`: no new calls arrive then
        self._lifecycle.on_stop(Stage.CLIENTS, endpoint.drain)
        server.http2 = GrpcService(endpoint, calls_max=self._settings.grpc_calls_max).connection
        await server.serve()

    async def _bind(self, server: RemotingServer, port: int) -> int:
        self._lifecycle.on_stop(Stage.PORTS, server.close)
        return await server.bind(self._settings.bind_address, port)

    def _connection_opened(self) -> None:
        self.context.statistics.add("CHANNEL_ACTIVITY", "CONNECT")

    def _connection_closed(self, connection: Connection) -> None:
        self.parts.connection_closed(connection)

    async def _listen_for_slaves(self, port: int) -> str:
        """Open the HA port of a master. Return the HA address that the broker registers."""
        settings = self._settings
        ha_port = settings.ha_listen_port or (port + 1 if settings.listen_port else 0)
        master = self.parts.master
        if master is not None:
            warn_of_ha_port(settings, self._tls, has_users=self._authentication.enabled)
            self._lifecycle.on_stop(Stage.REPLICATION, master.close)
            ha_port = await master.start(settings.bind_address, ha_port)
        return join_address(settings.broker_ip2 or settings.broker_ip1, ha_port)

    def _start_services(self, context: BrokerContext) -> None:
        """Start a master's services: delayed and timed messages, op messages, check-back, POP."""
        settings = self._settings
        check_back = CheckBack(context)
        self._lifecycle.on_stop(Stage.OP_MESSAGES, context.ops.write)
        self._lifecycle.every(settings.transaction_op_interval_ms / 1000, context.ops.write, "op messages")
        self._lifecycle.every(settings.transaction_check_interval_ms / 1000, check_back.round, "transaction check")
        self._lifecycle.on_stop(Stage.ROUNDS, check_back.stop)  # runs before the wait for `round`
        context.schedule.start()
        if context.timer is not None:
            context.timer.start()
            self._flush_timer(context.timer)
        assert context.pop is not None, "a master pops"
        if context.archive is not None:
            needs = [context.schedule.needed_from, check_back.needed_from, context.pop.check_points.needed_from]
            context.archive.needs = needs if context.timer is None else [*needs, context.timer.needed_from]
        self._lifecycle.on_stop(Stage.SERVICES, context.pop.close)
        self._lifecycle.every(_REVIVE_SECONDS, context.pop.revive.round, "pop revive")
        self._lifecycle.every(_FILTER_PERSIST_SECONDS, context.pop.orders.persist_round, "ordered pops")
        self._lifecycle.on_stop(Stage.SERVICES, context.schedule.stop)

    def _flush_timer(self, timer: Timer) -> None:
        self._lifecycle.every(self._store_settings.timer_flush_interval_ms / 1000, timer.flush_round, "timer flush")
        self._lifecycle.on_stop(Stage.SERVICES, timer.stop)

    def _start_following(self, slave: SlaveRole) -> None:
        if self.context.timer is not None:
            self.context.timer.follow()
            self._flush_timer(self.context.timer)
        self._lifecycle.on_stop(Stage.SERVICES, slave.close)
        if self._settings.ha_master_address:
            slave.follow(slave.tables.master, None)
        # Set this last: before name servers have answered, it is unknown if there is a master to compare the log with.
        slave.is_registered = True
        if slave.acting is not None:
            self._lifecycle.on_stop(Stage.SERVICES, slave.acting.close)
            slave.acting.start()

    async def _drain(self, servers: list[RemotingServer]) -> None:
        if self._settings.graceful_shutdown:
            for server in reversed(servers):
                await server.drain(_GRACE_MS)

    def _settings_changed(self, keys: Sequence[str]) -> None:
        """Apply settings that were changed while the broker runs."""
        if "brokerPermission" in keys:
            self.context.topics.register_all()  # sets a new version: name servers ignore a version that they have
        if self.parts.master is not None and "haAllowedAddresses" in keys:
            self.parts.master.addresses_changed()
        if "autoCreateTopicEnable" in keys:
            self.context.topics.add_system_topics()

    def _refusal(self, authentication: Authentication, connection: Connection, command: Command) -> str | None:
        """Return the remark for a refused request, or None. If the inner user or a super user signed the request,
        record its address for replication, because slaves sign in this way."""
        remark, master = authentication.refusal(connection, command), self.parts.master
        if remark is None and master is not None and connection.hops and authentication.is_trusted(connection.user):
            # Use the last hop, which is the peer of the socket: the peer can write any other hops.
            master.signed(connection.hops[-1])
        return remark
