"""The parts of one broker, and the connections between them.

========================  =============================================================================================
event                     goes to
========================  =============================================================================================
messages became readable  waiting pulls, waiting pops, the links to slaves
a flush ended             the waiting answers of a master (`Durability`), or the reports of a slave
slaves have more data     the waiting answers of a master
log bytes were committed  the dispatcher (``transientStorePoolEnable``)
topics were changed       the registration with the name servers
a connection closed       clients, waiting pulls, waiting pops
========================  =============================================================================================

`Assembly` opens nothing until `Assembly.load`. `rmqkit.broker.server` starts and stops the parts.
Source: behaviour.md §2.1.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rmqkit.broker.access.policies import Authorization, message_at
from rmqkit.broker.access.users import AccessHandlers, AccessTable
from rmqkit.broker.archive import LogArchive
from rmqkit.broker.context import BrokerContext
from rmqkit.broker.dead_letters import DeadLetters
from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.recall import RecallHandlers
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.lite.handlers import LiteHandlers
from rmqkit.broker.lite.queries import LiteQueryHandlers
from rmqkit.broker.lite.service import LiteService
from rmqkit.broker.operations.brokers import ConfigHandlers, RuntimeInfoHandlers, UnsupportedHandlers
from rmqkit.broker.operations.clients import ClientHandlers, ConnectionHandlers
from rmqkit.broker.operations.groups import GroupHandlers, ProgressHandlers
from rmqkit.broker.operations.offsets import OffsetHandlers, ResetHandlers
from rmqkit.broker.operations.topics import TopicHandlers
from rmqkit.broker.pop.assignment import PopAssignmentHandlers
from rmqkit.broker.pop.handlers import PopAckHandlers, PopHandlers
from rmqkit.broker.pop.service import PopService
from rmqkit.broker.pull.handler import PullHandlers
from rmqkit.broker.pull.long_polling import LongPolling
from rmqkit.broker.pull.query import QueryHandlers
from rmqkit.broker.recorder import Recorder
from rmqkit.broker.registration import Registration
from rmqkit.broker.replication.copies import waits_for_copies
from rmqkit.broker.replication.master import HaMaster
from rmqkit.broker.replication.role import ReplicationHandlers, SlaveRole
from rmqkit.broker.send.handler import SendHandlers
from rmqkit.broker.send.refusals import RefusalHandlers
from rmqkit.broker.send.reply import ReplyHandlers
from rmqkit.broker.send.send_back import SendBackHandlers
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.statistics import Statistics
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.filters import FilterTable
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.offsets import OffsetTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.broker.transaction.half import OpMessages
from rmqkit.broker.transaction.handlers import TransactionHandlers
from rmqkit.broker.transaction.open import OpenTransactions
from rmqkit.clock import Clock
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import pack_host
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, codes_of
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import Answering, Router
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.settings import Configuration
from rmqkit.store.message_store import DispatchRequest, MessageStore
from rmqkit.store.settings import FlushDiskType, StoreSettings, parse_delay_levels

if TYPE_CHECKING:
    from rmqkit.broker.counts import Counts
    from rmqkit.broker.grpc_backend import LocalBackend
    from rmqkit.proxy.backend import GrpcRefusal

__all__ = ["HANDLERS", "MESSAGE_HANDLERS", "Assembly"]

_DISPATCHES_PER_SAMPLE = 64

# The handlers on every port of masters and slaves.
HANDLERS = (
    *(ReplyHandlers, TransactionHandlers, OffsetHandlers, QueryHandlers, ClientHandlers, TopicHandlers),
    *(GroupHandlers, ConnectionHandlers, ResetHandlers, ProgressHandlers, RuntimeInfoHandlers, ConfigHandlers),
    *(AccessHandlers, RecallHandlers),
)

# The handlers of sends at a master. A slave accepts no messages.
MESSAGE_HANDLERS = (SendHandlers, SendBackHandlers)

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Assembly:
    """The parts of one broker and their connections. Use it only on the event loop. Only the end of a flush can be
    reported from another thread.

    Attributes:
        address: the address for clients, as ``host:port``.
        client: connections to other servers.
        counts: the counters for Prometheus; None without an exporter.
        context: the state that request handlers use.
        durability: the queue of waiting answers. It is never None, unlike ``context.durability``.
        master, slave: the parts for the broker's role. One of them is None.
        registration: the registration with the name servers; None before `register_with`.
    """

    settings: BrokerSettings
    store_settings: StoreSettings
    store_root: Path
    clock: Clock
    configuration: Configuration
    authentication: AuthenticationSettings
    tls: ServerTls | None
    client_tls: ClientTls | None
    address: str
    port: int
    client: RemotingClient
    counts: Counts | None
    context: BrokerContext = field(init=False)
    durability: Durability = field(init=False)
    master: HaMaster | None = None
    slave: SlaveRole | None = None
    registration: Registration | None = None
    _on_readable: list[Callable[[Sequence[DispatchRequest]], object]] = field(default_factory=list)
    _runs_to_sample: int = 1
    _authentication: Authentication | None = None
    _grpc_refusal: GrpcRefusal | None = None

    # Long: it makes the parts of a broker in the order in which they need each other.
    def __post_init__(self) -> None:
        settings, store_settings, clock = self.settings, self.store_settings, self.clock
        folder, has_light = self.store_root / "config", store_settings.enable_light_queues
        identity = OwnAddress(settings.broker_ip1, pack_host(settings.broker_ip1, self.port))
        topics = TopicTable(folder, settings, clock, self._topics_changed, has_light=has_light)
        groups = GroupTable(folder, settings, clock, has_light=has_light)
        offsets = OffsetTable(folder, clock, has_light=has_light)
        filters = FilterTable(folder, settings, clock)
        long_polling = LongPolling(clock)
        store = self._make_store(topics, filters)
        offsets.flush_log = store.flush_log
        self._on_readable.append(long_polling.arrived)
        archive = self._make_archive(store) if store_settings.archive else None
        pop: PopService | None = None
        if settings.broker_role is not BrokerRole.SLAVE:
            master = self.master = self._make_master(store)
            pop = PopService(folder, store, topics, groups, offsets, settings, clock, identity.store_host, archive)
            # Notify the slaves' links last: they send data only in the next tick.
            self._on_readable += [pop.waiting.arrived, pop.notifications.arrived, master.advanced]
        # At a slave, too: lite topics expire there by the same rule, and it copies the offsets of its master.
        lite = LiteService(store, topics, groups, settings, clock)
        has_copies = waits_for_copies(settings)
        self.durability = Durability(
            store,
            clock,
            flush_timeout_ms=(lambda: store_settings.sync_flush_timeout_ms) if self._is_sync else None,
            copies=self.master.copies if self.master is not None and has_copies else None,
            copies_timeout_ms=lambda: settings.slave_timeout_ms,
        )
        statistics = Statistics(store, settings.cluster_name, clock, topics.is_system)
        recorder = Recorder(statistics, self.counts)
        ops = OpMessages(store, identity.store_host, clock, body_bytes_max=settings.transaction_op_bytes_max)
        self.context = BrokerContext(
            settings=settings,
            store_settings=store_settings,
            configuration=self.configuration,
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
            durability=self.durability if self._is_sync or has_copies else None,
            queue_locks=QueueLocks(clock),
            schedule=Schedule(
                folder,
                store,
                parse_delay_levels(store_settings.message_delay_level),
                long_polling,
                clock,
                flushes=self._is_sync,
                on_delivered=recorder.delivered,
                dead_letters=DeadLetters(store, topics.ensure),
            ),
            statistics=statistics,
            recorder=recorder,
            counts=self.counts,
            timer=self._make_timer(store, topics, long_polling, recorder)
            if store_settings.timer_wheel_enable
            else None,
            pop=pop,
            ops=ops,
            transactions=OpenTransactions(store, topics, offsets, ops),
            topics_published=self._topics_published,
            ask_namesakes=self._ask_namesakes,
            archive=archive,
            lite=lite,
        )
        if self.master is None:
            slave = self.slave = SlaveRole(
                self.context, self.client, self.store_root, flushes=self._is_sync, tls=self.client_tls
            )
            self.context.may_serve = lambda: slave.may_serve

    def load(self) -> None:
        """Read the tables and recover the store. If a table cannot be read, no file is written.
        Raises StoreError: a table cannot be read, or the store cannot be opened."""
        context = self.context
        for table in (
            *(context.topics, context.groups, context.offsets, context.filters, context.schedule, context.access),
            *(() if context.timer is None else (context.timer,)),
        ):
            table.load()
        if self.slave is not None:
            context.offsets.begin_copying()
        # Open the store after the tables: recovery needs the queue types of the topics.
        context.store.open()
        # After the store: the timer recovers to the end of the log, and pops read their check points from the log.
        if context.timer is not None:
            context.timer.recover()
        if context.pop is not None:
            context.pop.load()
        if context.lite is not None:
            context.lite.load()

    def register_with(self, ha_address: str) -> Registration:
        """Make the registration with the name servers. ``ha_address``: the address at which slaves read the log."""
        assert self.registration is None, "a broker has one registration"
        if not self.settings.namesrv_addr:
            _log.warning("no name server is configured: clients cannot find this broker; set namesrvAddr or -n")
        self.registration = Registration(
            self.settings,
            self.context.topics,
            self.client,
            address=self.address,
            ha_address=ha_address,
            on_master=None if self.slave is None else self.slave.follow,
        )
        if self.slave is not None:
            self.slave.may_act(self.registration)
        return self.registration

    def add_handlers(self, mains: Sequence[Router], vip: Router, ha_address: str) -> None:
        """Register the handlers of requests. The VIP port serves all requests except pulls and pops."""
        context, role = self.context, self.slave if self.master is None else self.master.copies
        assert role is not None, "a broker is a master or a slave"
        assert self.registration is not None, "the registration exists"
        reading: list[Answering] = [PullHandlers(context)]
        of_both = [
            kind(context) for kind in (*(MESSAGE_HANDLERS if self.slave is None else (RefusalHandlers,)), *HANDLERS)
        ]
        if context.pop is not None:
            reading.append(PopHandlers(context))
            reading.append(LiteHandlers(context, context.identity))
            of_both += [PopAckHandlers(context), LiteQueryHandlers(context)]
        of_both += [
            PopAssignmentHandlers(context, self.registration.routes),
            ReplicationHandlers(context, ha_address=ha_address, slave=self.slave, status=role.status),
            UnsupportedHandlers(context),  # last: it registers the codes without a handler
        ]
        for main in mains:
            for handlers in reading:
                handlers.register(main)
        for port in (*mains, vip):
            for handlers in of_both:
                handlers.register(port)

    def authorize(self, authentication: Authentication) -> None:
        """Check requests with this broker's users, and with their policies if this is configured."""
        context = self.context
        context.access.add(authentication.initial)
        # Pass a function, not the mapping: every change of a user replaces the mapping.
        authentication.users = lambda: context.access.users
        self._authentication = authentication
        if self.authentication.authorization_enabled:
            free = codes_of(self.authentication.authorization_white_list)
            inner, lies_at = authentication.inner_name, partial(message_at, context.store)
            authorization = Authorization(context.access, self.settings.cluster_name, inner, free, lies_at)
            self._grpc_refusal = authorization.grpc_refusal
            authentication.authorize = authorization.refusal
            context.clients.may_be_asked = lambda producer, member, topic: authorization.may_publish(
                member.user, topic, producer.addresses
            )

    def grpc_backend(self, router: Router) -> LocalBackend:
        """Return the backend for a gRPC endpoint. ``router``: has this broker's handlers and refuses no client."""
        from rmqkit.broker.grpc_backend import LocalBackend

        return LocalBackend(
            self.context,
            router,
            authentication=self._authentication,
            authorize=self._grpc_refusal,
            on_closed=self.connection_closed,
        )

    def connection_closed(self, connection: Connection) -> None:
        """Drop the clients and the held requests of a closed connection."""
        context = self.context
        context.statistics.add("CHANNEL_ACTIVITY", "CLOSE")
        for part in (context.clients, context.long_polling, context.pop, context.lite):
            if part is not None:
                part.connection_closed(connection)

    # ---- parts that use other parts

    @property
    def _is_sync(self) -> bool:
        return self.store_settings.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def _make_store(self, topics: TopicTable, filters: FilterTable) -> MessageStore:
        counts, loop = self.counts, asyncio.get_running_loop()
        is_replica = self.settings.broker_role is BrokerRole.SLAVE
        return MessageStore(
            self.store_root,
            self.store_settings,
            clock=self.clock,
            is_batch_topic=self._is_batch_topic if is_replica else topics.is_batch_topic,
            on_arrival=self._readable if counts is None else self._readable_and_sampled,
            on_durable=self._flushed if self._is_sync else None,
            # The commit thread calls this, but only the loop can dispatch.
            on_committed=lambda: loop.call_soon_threadsafe(self.durability.dispatch),
            on_flushed=None if counts is None else counts.flush_ms.observe,
            bitmap_of=filters.bitmap_of if self.settings.filter_bitmaps else None,
            is_replica=is_replica,
        )

    def _is_batch_topic(self, topic: str) -> bool:
        assert self.slave is not None, "the store is opened after all parts were made"
        return self.slave.tables.is_batch_topic(topic)

    def _make_master(self, store: MessageStore) -> HaMaster:
        return HaMaster(
            store,
            self.settings,
            self.clock,
            on_acked=lambda: self.durability.replicated(),  # a lambda: durability is made after the master
            ask_members=self._namesakes if self.settings.namesrv_addr else None,
            tls=self.tls,
            need_signatures=self.authentication.enabled,
        )

    def _make_archive(self, store: MessageStore) -> LogArchive:
        is_slave = self.settings.broker_role is BrokerRole.SLAVE
        archive = LogArchive(store, self.store_settings, self.settings.broker_name, writes=not is_slave)
        store.kept_from, store.older = lambda: archive.kept_from, archive
        return archive

    def _make_timer(
        self, store: MessageStore, topics: TopicTable, long_polling: LongPolling, recorder: Recorder
    ) -> Timer | None:
        if not self.store_settings.timer_wheel_enable:
            return None
        timer = Timer(
            store,
            self.store_settings,
            long_polling,
            self.clock,
            flushes=self._is_sync,
            on_delivered=recorder.moved,
            dead_letters=DeadLetters(store, topics.ensure),
            copied_offset=lambda: -1 if self.master is None else self.master.copies.replicated_offset(2),
        )
        timer.state.is_measured = self.counts is not None
        return timer

    # ---- events

    def _readable(self, requests: Sequence[DispatchRequest]) -> None:
        """Pass messages that became readable to all listeners."""
        for listener in self._on_readable:
            listener(requests)

    def _readable_and_sampled(self, requests: Sequence[DispatchRequest]) -> None:
        """Do the same as `_readable`. For some runs, also measure the time until the messages became readable."""
        self._runs_to_sample -= 1
        if not self._runs_to_sample and self.counts is not None:
            # Measure every run if a flush or a commit precedes it: there are few runs with many messages each.
            is_late = self._is_sync or self.store_settings.transient_store_pool
            self._runs_to_sample = 1 if is_late else _DISPATCHES_PER_SAMPLE
            self.counts.dispatched(requests)
        self._readable(requests)

    def _flushed(self, durable_offset: int, error: OSError | None) -> None:
        """Pass the end of a flush to the waiting answers or to the slave. The flush thread calls this."""
        (self.durability if self.slave is None else self.slave.log).flushed(durable_offset, error)

    def _topics_changed(self, topics: list[TopicConfig]) -> None:
        if self.registration is not None:
            self.registration.topics_changed(topics)

    async def _topics_published(self) -> None:
        if self.registration is not None:
            await self.registration.settled()

    async def _namesakes(self) -> set[str] | None:
        return None if self.registration is None else await self.registration.namesakes()

    async def _ask_namesakes(self, command: Callable[[], Command]) -> list[Command]:
        return [] if self.registration is None else await self.registration.ask_namesakes(command)
