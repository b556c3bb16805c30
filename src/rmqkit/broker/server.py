"""A running broker: its store, tables, port, registration and periodic work, started and stopped in order.

Start: check and open the store (recovery), load the tables, listen, register. Stop: leave the name servers, stop
listening, answer held pulls, write the tables, close the store last. Source: behaviour.md §2.1, §2.2.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit.broker.access.policies import Authorization, message_at
from rmqkit.broker.access.users import AccessHandlers, AccessTable
from rmqkit.broker.context import BrokerContext, Lifecycle, Stage
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.recall import RecallHandlers
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.operations.brokers import ConfigHandlers, RuntimeInfoHandlers, UnsupportedHandlers
from rmqkit.broker.operations.clients import ClientHandlers, ConnectionHandlers
from rmqkit.broker.operations.groups import GroupHandlers, ProgressHandlers
from rmqkit.broker.operations.offsets import OffsetHandlers, ResetHandlers
from rmqkit.broker.operations.topics import TopicHandlers
from rmqkit.broker.pop.assignment import PopAssignmentHandlers
from rmqkit.broker.pop.handlers import PopAckHandlers, PopHandlers
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.handler import SLOW_ROUND_SECONDS, PullHandlers, stop_slow_groups
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.pull.query import QueryHandlers
from rmqkit.broker.registration import Registration
from rmqkit.broker.replication.master import HaMaster, waits_for_copies
from rmqkit.broker.replication.role import (
    ReplicationHandlers,
    SlaveRole,
    check_address,
    check_role,
    sync_with_group,
    warn_of_ha_port,
)
from rmqkit.broker.send.handler import RefusalHandlers, SendHandlers
from rmqkit.broker.send.reply import ReplyHandlers
from rmqkit.broker.send.send_back import SendBackHandlers
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.statistics import SAMPLE_SECONDS, Statistics
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.filters import FilterTable
from rmqkit.broker.tables.groups import ROUND_SECONDS as UNUSED_ROUND_SECONDS
from rmqkit.broker.tables.groups import GroupTable, drop_unused_groups
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.check_back import CheckBack
from rmqkit.broker.transaction.half import OpMessages
from rmqkit.broker.transaction.handlers import TransactionHandlers
from rmqkit.broker.unused_settings import UnusedSettings
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import RmqError
from rmqkit.filter import sql92
from rmqkit.metrics.exposition import ExporterType
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, codes_of, inner_credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.router import Refusal, Router
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Configuration
from rmqkit.store.delay_levels import parse_delay_levels
from rmqkit.store.message_store import DispatchRequest, MessageStore, PutMessage, PutResult
from rmqkit.store.settings import FlushDiskType, StoreSettings

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts
    from rmqkit.remoting.exporter import Exporter

__all__ = ["Broker"]

_CLIENT_SWEEP_SECONDS = 10.0
_FILTER_PERSIST_SECONDS = 10.0
_TELL_CHANGES_SECONDS = 15.0
_WRITE_NEW_SECONDS = 1.0
_FIRST_RETENTION_SECONDS = 60.0
_REVIVE_SECONDS = 0.25
_VIP_BELOW = 2
_GRACE_MS = 30_000
_DISPATCHES_PER_SAMPLE = 64

# What every port answers; pulls are answered by one port only.
_HANDLERS = (
    *(ReplyHandlers, TransactionHandlers, OffsetHandlers, QueryHandlers, ClientHandlers, TopicHandlers),
    *(GroupHandlers, ConnectionHandlers, ResetHandlers, ProgressHandlers, RuntimeInfoHandlers, ConfigHandlers),
    *(AccessHandlers, RecallHandlers),
)

# What a master answers to messages; a slave takes none.
_MESSAGE_HANDLERS = (SendHandlers, SendBackHandlers)

_MakeDispatch = Callable[[Refusal | None], Router]

_log = logging.getLogger(__name__)


class Broker:
    """One broker with its own store.

    Args:
        settings: ``broker_name`` and ``broker_ip1`` are filled in when empty.
        store_settings: sizes and flush rules.
        store_root: ``storePathRootDir``.
        tls: what the ports do about TLS; None means disabled.
        client_tls: used towards name servers; None means plain.
        authentication: whose requests are taken, and how the broker signs its own.
        configuration: the settings, as operators are shown them and may change them; None: until it stops.
        dispatch: makes what answers requests, one for each port; tests put faults there.

    Attributes:
        address: where clients reach it, as ``host:port``; set by `start`.
        metrics_address: where Prometheus reads its metrics, if it may; set by `start`.
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
        self._configuration = configuration or Configuration(
            [settings, store_settings, self._authentication, UnusedSettings()]
        )
        self._dispatch = dispatch
        self._limits = Limits(settings)
        self._lifecycle = Lifecycle()
        self._context: BrokerContext | None = None
        self._registration: Registration | None = None
        self._master: HaMaster | None = None
        self._slave: SlaveRole | None = None
        self._counts: Counts | None = None
        self._durability: Durability | None = None
        self.address = ""
        self.metrics_address = ""

    @property
    def context(self) -> BrokerContext:
        """What it is made of, for inspection on its loop; it has to be started."""
        assert self._context is not None, "the broker is started"
        return self._context

    async def start(self) -> None:
        """Open the store, listen and register.
        Raises StoreError, ListenFailed: nothing was started or everything was stopped again."""
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop in the order of `Stage`: the store closes behind all that writes to it. A step that fails does not keep
        the others from being done; then the first failure is raised."""
        await self._lifecycle.stop()

    # -- inside

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
        port = await self._bind(servers[0], settings.listen_port)  # a port in use is found before anything is written
        if settings.listen_port > _VIP_BELOW:
            servers.append(self._server(vip_dispatch))
            await self._bind(servers[1], settings.listen_port - _VIP_BELOW)
        self.address = join_address(settings.broker_ip1, port)
        client = RemotingClient(
            clock=self._clock, tls=self._client_tls, credentials=inner_credentials(self._authentication)
        )
        await asyncio.to_thread(sql92.prepare)  # the first heartbeat with an expression would hold the loop for 0.1 s
        context = self._context = self._open(port, client)
        lifecycle = self._lifecycle
        lifecycle.on_stop(Stage.DELIVERED, context.persist_delivered)
        lifecycle.on_stop(Stage.TABLES, context.persist)
        lifecycle.on_stop(Stage.CLIENTS, client.close)
        lifecycle.on_stop(Stage.CLIENTS, context.long_polling.close)
        ha_address = await self._listen_for_slaves(port)
        registration = self._registration = self._registration_of(context, client, ha_address)
        self._add_handlers(context, ha_address, dispatch, vip_dispatch)
        dispatch.batch = vip_dispatch.batch = context.store.batch
        self._configuration.listeners.append(self._settings_changed)
        if authentication is not None:
            context.access.add(authentication.initial)
            authentication.users = lambda: context.access.users
            if self._authentication.authorization_enabled:
                free = codes_of(self._authentication.authorization_white_list)
                inner, lies_at = authentication.inner_name, partial(message_at, context.store)
                authorization = Authorization(context.access, settings.cluster_name, inner, free, lies_at)
                authentication.authorize = authorization.refusal
                context.clients.may_be_asked = lambda producer, member, topic: authorization.may_publish(
                    member.user, topic, producer.addresses
                )
        context.persist()
        context.statistics.sample()
        self._look_at_disk(context.store)
        for server in servers:
            await server.serve()
        lifecycle.on_stop(Stage.CLIENTS, partial(self._drain, servers))
        await sync_with_group(context, registration, client, ha_address)
        lifecycle.on_stop(Stage.REGISTRATION, registration.stop)
        await registration.start()
        if self._slave is None:
            self._start_services(context)
        else:
            self._start_following(self._slave)
        if exporter is not None:
            await self._serve_metrics(exporter, context, dispatch, servers)
        self._lifecycle.every(_WRITE_NEW_SECONDS, context.topics.write_new, "new topics")
        self._lifecycle.every(_WRITE_NEW_SECONDS, context.groups.write_new, "new groups")
        self._lifecycle.every(_FILTER_PERSIST_SECONDS, context.filters.persist_round, "filter table")
        self._lifecycle.every(settings.offset_persist_interval_ms / 1000, context.offsets.persist_round, "offset table")
        self._lifecycle.every(
            settings.delay_offset_persist_interval_ms / 1000, context.schedule.persist_round, "delay offsets"
        )
        self._lifecycle.every(UNUSED_ROUND_SECONDS, partial(drop_unused_groups, context), "unused groups")
        self._lifecycle.every(_CLIENT_SWEEP_SECONDS, context.clients.close_silent, "silent clients")
        self._lifecycle.every(_TELL_CHANGES_SECONDS, context.clients.tell_changes, "consumer changes")
        self._lifecycle.every(_CLIENT_SWEEP_SECONDS, context.queue_locks.drop_expired, "expired queue locks")
        retention_seconds = self._store_settings.clean_resource_interval_ms / 1000
        self._lifecycle.every(SAMPLE_SECONDS, context.statistics.sample, "statistics")
        self._lifecycle.every(SLOW_ROUND_SECONDS, partial(stop_slow_groups, context), "slow groups", SLOW_ROUND_SECONDS)
        self._lifecycle.every(retention_seconds, context.store.retention_round, "retention", _FIRST_RETENTION_SECONDS)

    @staticmethod
    def _look_at_disk(store: MessageStore) -> None:
        """Have the first retention round before the first message where a disk is over its mark."""
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
            limits=self._limits,
            connection=Connection if self._counts is None else self._counts.connection,
        )

    async def _bind_exporter(self) -> Exporter | None:
        """Take the port that Prometheus reads, and count from now on; None where metrics are not wanted."""
        settings = self._settings
        if settings.exporter_type is ExporterType.DISABLE:
            return None
        from rmqkit.broker.counts import Counts
        from rmqkit.remoting.exporter import Exporter

        exporter, self._counts = Exporter(), Counts(self._clock)
        self._lifecycle.on_stop(Stage.PORTS, exporter.close)
        await exporter.bind(settings.exporter_host or settings.bind_address, settings.exporter_port)
        self.metrics_address = exporter.address
        return exporter

    async def _serve_metrics(
        self, exporter: Exporter, context: BrokerContext, dispatch: Router, servers: list[RemotingServer]
    ) -> None:
        from rmqkit.broker.metrics import BrokerMetrics

        assert self._counts is not None, "an exporter has something to tell"
        metrics = BrokerMetrics(self._counts, context, self._master, dispatch, servers)
        await exporter.serve(metrics.gather, metrics.common(), self._counts.lag_ms, self._clock)

    async def _bind(self, server: RemotingServer, port: int) -> int:
        self._lifecycle.on_stop(Stage.PORTS, server.close)
        return await server.bind(self._settings.bind_address, port)

    def _connection_opened(self) -> None:
        if self._context is not None:
            self._context.statistics.add("CHANNEL_ACTIVITY", "CONNECT")

    def _connection_closed(self, connection: Connection) -> None:
        if self._context is not None:
            self._context.statistics.add("CHANNEL_ACTIVITY", "CLOSE")
            self._context.clients.connection_closed(connection)
            self._context.long_polling.connection_closed(connection)
            if self._context.pop is not None:
                self._context.pop.connection_closed(connection)

    def _open(self, port: int, client: RemotingClient) -> BrokerContext:
        """Read the tables and recover the store; nothing is written when that fails."""
        context = self._assemble(port)
        if context.settings.broker_role is BrokerRole.SLAVE:
            self._slave = SlaveRole(context, client, self._store_root, flushes=self._is_sync, tls=self._client_tls)
        self._lifecycle.on_stop(Stage.STORE, context.store.close)  # also if what is read next cannot be
        _load(context)
        return context

    def _assemble(self, port: int) -> BrokerContext:
        """Join the store, the tables and the services; nothing is read yet."""
        settings, store_settings, clock, counts = self._settings, self._store_settings, self._clock, self._counts
        folder, has_light = self._store_root / "config", store_settings.enable_light_queues
        identity = OwnAddress(settings.broker_ip1, pack_host(settings.broker_ip1, port))
        long_polling = LongPolling(clock)
        topics = TopicTable(folder, settings, clock, self._topics_changed, has_light=has_light)
        groups = GroupTable(folder, settings, clock, has_light=has_light)
        offsets = OffsetTable(folder, clock, has_light=has_light)
        filters = FilterTable(folder, settings, clock)
        is_late = self._is_sync or store_settings.transient_store_pool
        arrivals = _Arrivals(counts, sample_every=1 if is_late else _DISPATCHES_PER_SAMPLE)
        arrivals.listeners.append(long_polling.arrived)
        store = self._make_store(topics, filters, arrivals)
        pop_service: PopService | None = None
        if settings.broker_role is not BrokerRole.SLAVE:
            self._master = self._make_master(store)
            pop_service = PopService(folder, store, topics, groups, offsets, settings, clock, identity.store_host)
            arrivals.listeners += [pop_service.arrived, self._log_advanced]
        has_copies = waits_for_copies(settings)
        self._durability = Durability(
            store,
            clock,
            flush_timeout_ms=(lambda: store_settings.sync_flush_timeout_ms) if self._is_sync else None,
            copies=self._master if has_copies else None,
            copies_timeout_ms=lambda: settings.slave_timeout_ms,
        )
        statistics = Statistics(store, settings.cluster_name, clock, topics.is_system)
        schedule = Schedule(
            folder,
            store,
            parse_delay_levels(store_settings.message_delay_level),
            long_polling,
            clock,
            flushes=self._is_sync,
            on_delivered=statistics.delivered if counts is None else partial(_count_delivered, statistics, counts),
        )
        timer = Timer(
            store,
            store_settings,
            long_polling,
            clock,
            flushes=self._is_sync,
            on_delivered=statistics.moved,
            copied_offset=lambda: -1 if self._master is None else self._master.replicated_offset(2),
        )
        timer.state.is_measured = counts is not None
        return BrokerContext(
            settings=settings,
            store_settings=store_settings,
            configuration=self._configuration,
            address=self.address,
            identity=identity,
            clock=clock,
            access=AccessTable(folder, identity.ip),
            store=store,
            topics=topics,
            groups=groups,
            offsets=offsets,
            clients=ClientTable(settings, clock, filters),
            filters=filters,
            long_polling=long_polling,
            durability=self._durability if self._is_sync or has_copies else None,
            queue_locks=QueueLocks(clock),
            schedule=schedule,
            statistics=statistics,
            counts=counts,
            timer=timer if store_settings.timer_wheel_enable else None,
            pop=pop_service,
            ops=OpMessages(store, identity.store_host, clock, body_bytes_max=settings.transaction_op_bytes_max),
            topics_published=self._topics_published,
            ask_namesakes=self._ask_namesakes,
            may_serve=lambda: self._slave is None or self._slave.may_serve,
        )

    @property
    def _is_sync(self) -> bool:
        return self._store_settings.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def _make_store(self, topics: TopicTable, filters: FilterTable, arrivals: _Arrivals) -> MessageStore:
        counts, loop = self._counts, asyncio.get_running_loop()
        return MessageStore(
            self._store_root,
            self._store_settings,
            clock=self._clock,
            is_batch_topic=lambda topic: (topics if self._slave is None else self._slave.tables).is_batch_topic(topic),
            on_arrival=arrivals.tell if counts is None else arrivals.tell_and_sample,
            on_durable=self._flushed if self._is_sync else None,
            on_committed=lambda: loop.call_soon_threadsafe(self._dispatch_committed),
            on_flushed=None if counts is None else counts.flush_ms.observe,
            bitmap_of=filters.bitmap_of if self._settings.filter_bitmaps else None,
            is_replica=self._settings.broker_role is BrokerRole.SLAVE,
        )

    def _make_master(self, store: MessageStore) -> HaMaster:
        return HaMaster(
            store,
            self._settings,
            self._clock,
            on_acked=self._log_copied,
            ask_members=self._namesakes if self._settings.namesrv_addr else None,
            tls=self._tls,
            need_signatures=self._authentication.enabled,
        )

    def _flushed(self, durable_offset: int, error: OSError | None) -> None:
        """A flush round ended; called from the flush thread."""
        assert self._durability is not None, "the store opens when all is assembled"
        (self._durability if self._slave is None else self._slave.log).flushed(durable_offset, error)

    def _dispatch_committed(self) -> None:
        assert self._durability is not None, "the store opens when all is assembled"
        self._durability.dispatch()

    def _log_copied(self) -> None:
        """Slaves have more of the log."""
        assert self._durability is not None, "slaves come when all is assembled"
        self._durability.replicated()

    def _log_advanced(self, arrivals: list[DispatchRequest]) -> None:
        """The log has more for slaves."""
        assert self._master is not None, "only a master is told"
        self._master.advanced()

    async def _listen_for_slaves(self, port: int) -> str:
        """Open the HA port of a master; returns what a broker registers as its HA address."""
        settings = self._settings
        ha_port = settings.ha_listen_port or (port + 1 if settings.listen_port else 0)
        if self._master is not None:
            warn_of_ha_port(settings, self._tls, has_users=self._authentication.enabled)
            self._lifecycle.on_stop(Stage.REPLICATION, self._master.close)
            ha_port = await self._master.start(settings.bind_address, ha_port)
        return join_address(settings.broker_ip2 or settings.broker_ip1, ha_port)

    def _registration_of(self, context: BrokerContext, client: RemotingClient, ha_address: str) -> Registration:
        if not self._settings.namesrv_addr:
            _log.warning("no name server is configured: clients cannot find this broker; set namesrvAddr or -n")
        registration = Registration(
            self._settings,
            context.topics,
            client,
            address=self.address,
            ha_address=ha_address,
            on_master=None if self._slave is None else self._slave.follow,
        )
        if self._slave is not None:
            self._slave.may_act(registration)
        return registration

    def _add_handlers(self, context: BrokerContext, ha_address: str, dispatch: Router, vip_dispatch: Router) -> None:
        """The VIP port serves everything but pulls."""
        message_handlers = _MESSAGE_HANDLERS if self._slave is None else (RefusalHandlers,)
        for handlers in (kind(context) for kind in (*message_handlers, *_HANDLERS)):
            handlers.register(dispatch)
            handlers.register(vip_dispatch)
        PullHandlers(context).register(dispatch)
        if context.pop is not None:
            PopHandlers(context).register(dispatch)
            for each in (dispatch, vip_dispatch):
                PopAckHandlers(context).register(each)
        assert self._registration is not None, "made before"
        assignments = PopAssignmentHandlers(context, self._registration.routes)
        for each in (dispatch, vip_dispatch):
            assignments.register(each)
        role = self._slave or self._master
        assert role is not None, "a broker is a master or a slave"
        replication = ReplicationHandlers(context, ha_address=ha_address, slave=self._slave, status=role.status)
        unsupported = UnsupportedHandlers(context)
        for port in (dispatch, vip_dispatch):
            replication.register(port)
            unsupported.register(port)  # last: it takes what nobody else does

    def _start_services(self, context: BrokerContext) -> None:
        """Deliver what is delayed, write down what is decided about half messages, and ask about what is not."""
        settings = self._settings
        check_back = CheckBack(context)
        self._lifecycle.on_stop(Stage.OP_MESSAGES, context.ops.write)
        self._lifecycle.every(settings.transaction_op_interval_ms / 1000, context.ops.write, "op messages")
        self._lifecycle.every(settings.transaction_check_interval_ms / 1000, check_back.round, "transaction check")
        self._lifecycle.on_stop(Stage.ROUNDS, check_back.stop)  # before its round is waited for
        context.schedule.start()
        if context.timer is not None:
            context.timer.start()
            self._flush_timer(context.timer)
        assert context.pop is not None, "a master pops"
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
        slave.is_registered = True
        if slave.acting is not None:
            self._lifecycle.on_stop(Stage.SERVICES, slave.acting.close)
            slave.acting.start()

    async def _drain(self, servers: list[RemotingServer]) -> None:
        if self._settings.graceful_shutdown:
            for server in reversed(servers):
                await server.drain(_GRACE_MS)

    def _settings_changed(self, keys: Sequence[str]) -> None:
        """Tell the name servers what they have to know anew; an unchanged version they would not look at."""
        if self._context is not None and "brokerPermission" in keys:
            self._context.topics.tell_all()
        if self._master is not None and "haAllowedAddresses" in keys:
            self._master.addresses_changed()
        if self._context is not None and "autoCreateTopicEnable" in keys:
            self._context.topics.add_system_topics()

    def _topics_changed(self, topics: list[TopicConfig]) -> None:
        if self._registration is not None:
            self._registration.topics_changed(topics)

    def _refusal(self, authentication: Authentication, connection: Connection, command: Command) -> str | None:
        """The remark for a request that is not let in, or None; slaves are known by what they sign here."""
        remark = authentication.refusal(connection, command)
        if (
            remark is None
            and self._master is not None
            and connection.hops
            and authentication.is_trusted(connection.user)
        ):
            self._master.signed(connection.hops[-1])
        return remark

    async def _namesakes(self) -> set[str] | None:
        return None if self._registration is None else await self._registration.namesakes()

    async def _ask_namesakes(self, command: Callable[[], Command]) -> list[Command]:
        return [] if self._registration is None else await self._registration.ask_namesakes(command)

    async def _topics_published(self) -> None:
        if self._registration is not None:
            await self._registration.settled()


class _Arrivals:
    """Passes messages that became readable on to all who wait for them.

    ``counts``, ``sample_every``: of how many runs one is looked at for metrics: how long messages took to get readable.
    """

    def __init__(self, counts: Counts | None, sample_every: int) -> None:
        self.listeners: list[Callable[[list[DispatchRequest]], object]] = []
        self._counts = counts
        self._sample_every = sample_every
        self._runs_to_sample = 1

    def tell(self, arrivals: list[DispatchRequest]) -> None:
        for listener in self.listeners:
            listener(arrivals)

    def tell_and_sample(self, arrivals: list[DispatchRequest]) -> None:
        self._runs_to_sample -= 1
        if not self._runs_to_sample and self._counts is not None:
            self._runs_to_sample = self._sample_every
            self._counts.dispatched(arrivals)
        self.tell(arrivals)


def _count_delivered(statistics: Statistics, counts: Counts, message: PutMessage, put: PutResult) -> None:
    statistics.delivered(message, put)
    counts.delivered(message, put)


def _load(context: BrokerContext) -> None:
    """Read the tables and open the store; then what needs it open."""
    for table in (context.topics, context.groups, context.offsets, context.filters, context.schedule, context.access):
        table.load()
    if context.timer is not None:
        context.timer.load()
    context.store.open()
    if context.timer is not None:
        context.timer.recover()
    if context.pop is not None:
        context.pop.load()
