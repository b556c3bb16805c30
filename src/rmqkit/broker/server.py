"""A running broker: its store, tables, port, registration and periodic work, started and stopped in order.

Start: check and open the store (recovery), load the tables, listen, register. Stop: leave the name servers, stop
listening, answer held pulls, write the tables, close the store last. Source: behaviour.md §2.1, §2.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rmqkit.broker.check_back import CheckBack
from rmqkit.broker.clients import ClientTable
from rmqkit.broker.durability import Durability
from rmqkit.broker.filters import FilterTable
from rmqkit.broker.groups import GroupTable
from rmqkit.broker.handlers.clients import ClientHandlers
from rmqkit.broker.handlers.connections import ConnectionHandlers
from rmqkit.broker.handlers.groups import GroupHandlers
from rmqkit.broker.handlers.offsets import OffsetHandlers
from rmqkit.broker.handlers.progress import ProgressHandlers
from rmqkit.broker.handlers.pull import PullHandlers
from rmqkit.broker.handlers.query import QueryHandlers
from rmqkit.broker.handlers.reply import ReplyHandlers
from rmqkit.broker.handlers.resets import ResetHandlers
from rmqkit.broker.handlers.runtime_info import RuntimeInfoHandlers
from rmqkit.broker.handlers.send import SendHandlers
from rmqkit.broker.handlers.send_back import SendBackHandlers
from rmqkit.broker.handlers.topics import TopicHandlers
from rmqkit.broker.handlers.transactions import TransactionHandlers
from rmqkit.broker.long_polling import LongPolling
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.own_address import OwnAddress
from rmqkit.broker.parts import Parts
from rmqkit.broker.queue_locks import QueueLocks
from rmqkit.broker.registration import Registration
from rmqkit.broker.schedule import Schedule
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.statistics import SAMPLE_SECONDS, Statistics
from rmqkit.broker.topics import TopicTable
from rmqkit.broker.transaction import OpMessages
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.protocol.bodies.topics import TopicConfig
from rmqkit.protocol.command import Command
from rmqkit.protocol.record import pack_host
from rmqkit.remoting.address import advertised_ip, join_address
from rmqkit.remoting.authentication import Authentication, AuthenticationSettings, inner_credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.remoting.server import RemotingServer
from rmqkit.remoting.tls import ClientTls, ServerTls
from rmqkit.store.delay_levels import parse_delay_levels
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import FlushDiskType, StoreSettings

__all__ = ["Broker"]

_CLIENT_SWEEP_SECONDS = 10.0
_FILTER_PERSIST_SECONDS = 10.0
_TELL_CHANGES_SECONDS = 15.0
_WRITE_NEW_SECONDS = 1.0
_FIRST_RETENTION_SECONDS = 60.0
_VIP_BELOW = 2
_GRACE_MS = 30_000

_HANDLERS = (
    *(
        SendHandlers,
        SendBackHandlers,
        ReplyHandlers,
        TransactionHandlers,
        OffsetHandlers,
        QueryHandlers,
        ClientHandlers,
    ),
    *(TopicHandlers, GroupHandlers, ConnectionHandlers, ResetHandlers, ProgressHandlers, RuntimeInfoHandlers),
)
"""What every port answers; pulls are answered by one port only."""

_Work = Callable[[], object]
"""A function or a coroutine function."""

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

    Attributes:
        address: where clients reach it, as ``host:port``; set by `start`.
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
    ) -> None:
        self._settings = settings
        self._store_settings = store_settings
        self._store_root = store_root
        self._clock = clock
        self._tls = tls
        self._client_tls = client_tls
        self._authentication = authentication or AuthenticationSettings()
        self._stops: list[_Work] = []
        self._parts: Parts | None = None
        self._registration: Registration | None = None
        self.address = ""

    async def start(self) -> None:
        """Open the store, listen and register.

        Raises:
            StoreError, ListenFailed: nothing was started or everything was stopped again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stop in order; the store closes last. A step that fails does not keep the others from being done."""
        failures: list[Exception] = []
        while self._stops:
            try:
                await _do(self._stops.pop())
            except Exception as error:  # noqa: BLE001 - every step has its turn; the first failure is told
                failures.append(error)
        if failures:
            raise failures[0]

    # -- inside

    async def _start(self) -> None:
        settings = self._settings
        settings.broker_name = settings.broker_name or socket.gethostname()
        settings.broker_ip1 = settings.broker_ip1 or advertised_ip(settings.bind_address)
        authentication = Authentication.of(self._authentication)
        refusal = authentication.refusal if authentication is not None else None
        dispatch, vip_dispatch = Dispatch(refusal), Dispatch(refusal)
        servers = [self._server(dispatch)]
        port = await self._bind(servers[0], settings.listen_port)  # a port in use is found before anything is written
        if settings.listen_port > _VIP_BELOW:
            servers.append(self._server(vip_dispatch))
            await self._bind(servers[1], settings.listen_port - _VIP_BELOW)
        self.address = join_address(settings.broker_ip1, port)
        parts = self._parts = self._open(port)
        # After the ports have closed; delay offsets come last, when the copies before them are on the disk.
        self._stops[:0] = [parts.schedule.persist, parts.store.close, parts.persist]
        self._stops.append(parts.long_polling.close)
        self._add_handlers(parts, dispatch, vip_dispatch)
        if settings.broker_role is not BrokerRole.SLAVE:
            self._start_check_back(parts)
        dispatch.together = vip_dispatch.together = parts.store.together
        parts.persist()
        parts.statistics.sample()
        for server in servers:
            await server.serve()
        if settings.graceful_shutdown:
            self._stops += [partial(server.drain, _GRACE_MS) for server in servers]
        await self._register(parts, port)
        self._run("new topics", parts.topics.write_new, _WRITE_NEW_SECONDS)
        self._run("new groups", parts.groups.write_new, _WRITE_NEW_SECONDS)
        self._run("filter table", parts.filters.persist_round, _FILTER_PERSIST_SECONDS)
        self._run("offset table", parts.offsets.persist_round, settings.offset_persist_interval_ms / 1000)
        self._run("delay offsets", parts.schedule.persist_round, settings.delay_offset_persist_interval_ms / 1000)
        if settings.broker_role is not BrokerRole.SLAVE:
            parts.schedule.start()
            self._stops.append(parts.schedule.stop)
        self._run("silent clients", parts.clients.close_silent, _CLIENT_SWEEP_SECONDS)
        self._run("consumer changes", parts.clients.tell_changes, _TELL_CHANGES_SECONDS)
        self._run("expired queue locks", parts.queue_locks.drop_expired, _CLIENT_SWEEP_SECONDS)
        retention_seconds = self._store_settings.clean_resource_interval_ms / 1000
        self._run("statistics", parts.statistics.sample, SAMPLE_SECONDS)
        self._run("retention", parts.store.retention_round, retention_seconds, _FIRST_RETENTION_SECONDS)

    def _server(self, dispatch: Dispatch) -> RemotingServer:
        return RemotingServer(
            dispatch,
            clock=self._clock,
            on_close=self._connection_closed,
            tls=self._tls,
            accepts_proxy=self._settings.proxy_protocol,
        )

    async def _bind(self, server: RemotingServer, port: int) -> int:
        self._stops.append(server.close)
        return await server.bind(self._settings.bind_address, port)

    def _connection_closed(self, connection: Connection) -> None:
        if self._parts is not None:
            self._parts.clients.connection_closed(connection)
            self._parts.long_polling.connection_closed(connection)

    def _open(self, port: int) -> Parts:
        """Read the tables and recover the store; nothing is written when that fails."""
        settings, store_settings, clock = self._settings, self._store_settings, self._clock
        folder = self._store_root / "config"
        is_sync = store_settings.flush_disk_type is FlushDiskType.SYNC_FLUSH
        loop = asyncio.get_running_loop()
        durability = (
            Durability(clock, store_settings.sync_flush_timeout_ms, lambda: store.dispatch()) if is_sync else None
        )
        long_polling = LongPolling(clock)
        topics = TopicTable(folder, settings, clock, self._topics_changed)
        filters = FilterTable(folder, settings, clock)
        store = MessageStore(
            self._store_root,
            store_settings,
            clock=clock,
            is_batch_topic=topics.is_batch_topic,
            on_arrival=long_polling.arrived,
            on_durable=durability.flushed if durability is not None else None,
            on_committed=lambda: loop.call_soon_threadsafe(store.dispatch),
            bitmap_of=filters.bitmap_of if settings.filter_bitmaps else None,
        )
        identity = OwnAddress(settings.broker_ip1, pack_host(settings.broker_ip1, port))
        delays_ms = parse_delay_levels(store_settings.message_delay_level)
        parts = Parts(
            settings=settings,
            store_settings=store_settings,
            address=self.address,
            identity=identity,
            clock=clock,
            store=store,
            topics=topics,
            groups=GroupTable(folder, settings, clock),
            offsets=OffsetTable(folder, clock),
            clients=ClientTable(settings, clock, filters),
            filters=filters,
            long_polling=long_polling,
            durability=durability,
            queue_locks=QueueLocks(clock),
            schedule=Schedule(folder, store, delays_ms, long_polling, clock, flushes=is_sync),
            statistics=Statistics(store, settings.cluster_name, clock),
            ops=OpMessages(store, identity.store_host, clock, body_bytes_max=settings.transaction_op_bytes_max),
            told=self._told,
            ask_namesakes=self._ask_namesakes,
        )
        for table in (parts.topics, parts.groups, parts.offsets, parts.filters, parts.schedule):
            table.load()
        store.open()
        return parts

    def _add_handlers(self, parts: Parts, dispatch: Dispatch, vip_dispatch: Dispatch) -> None:
        """The VIP port serves everything but pulls."""
        for handlers in (kind(parts) for kind in _HANDLERS):
            handlers.register(dispatch)
            handlers.register(vip_dispatch)
        PullHandlers(parts).register(dispatch)

    def _start_check_back(self, parts: Parts) -> None:
        """Write down what is decided, and ask about what is not."""
        settings = self._settings
        check_back = CheckBack(parts)
        self._stops.insert(2, parts.ops.write)  # after the ports have closed, before the store does
        self._run("op messages", parts.ops.write, settings.transaction_op_interval_ms / 1000)
        self._run("transaction check", check_back.round, settings.transaction_check_interval_ms / 1000)
        self._stops.append(check_back.stop)

    async def _register(self, parts: Parts, port: int) -> None:
        settings = self._settings
        if not settings.namesrv_addr:
            _log.warning("no name server is configured: clients cannot find this broker; set namesrvAddr or -n")
            return
        client = RemotingClient(
            clock=self._clock, tls=self._client_tls, credentials=inner_credentials(self._authentication)
        )
        self._stops.append(client.close)
        ha_ip = settings.broker_ip2 or settings.broker_ip1
        self._registration = Registration(
            settings,
            parts.topics,
            client,
            address=self.address,
            ha_address=join_address(ha_ip, settings.ha_listen_port or port + 1),
        )
        self._stops.append(self._registration.stop)
        await self._registration.start()

    def _topics_changed(self, topics: list[TopicConfig]) -> None:
        if self._registration is not None:
            self._registration.topics_changed(topics)

    async def _ask_namesakes(self, command: Callable[[], Command]) -> list[Command]:
        return [] if self._registration is None else await self._registration.ask_namesakes(command)

    async def _told(self) -> None:
        if self._registration is not None:
            await self._registration.settled()

    def _run(self, name: str, work: _Work, seconds: float, first_seconds: float | None = None) -> None:
        """Do some work regularly, first after ``first_seconds``; the broker's stop lets a round under way end."""
        stopping = asyncio.Event()
        task = asyncio.create_task(_repeat(name, work, seconds, first_seconds, stopping), name=name)

        async def stop() -> None:
            stopping.set()
            await task

        self._stops.append(stop)


async def _repeat(name: str, work: _Work, seconds: float, first_seconds: float | None, stopping: asyncio.Event) -> None:
    pause_seconds = seconds if first_seconds is None else first_seconds
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), pause_seconds)
            return
        pause_seconds = seconds
        try:
            await _do(work)
        except Exception:  # noqa: BLE001 - the outer edge of a periodic task: told once, tried again next time
            _log.exception("%s: a round failed", name)


async def _do(work: _Work) -> None:
    done = work()
    if inspect.isawaitable(done):
        await done
