"""Requests of brokers and clients to a name server (``DefaultRequestProcessor``, ``ClientRequestProcessor``).

====  ======================  ========================================================================================
code  request                 answer
====  ======================  ========================================================================================
105   route of a topic        queues and brokers, strict JSON or the dialect, acting masters and zones applied
103   broker registers        master's addresses for a slave; the order topics in the body
104   broker leaves           success, immediately; the broker is removed with the next batch
322   data version            true if it differs from the stored version; records that the broker is alive
904   broker heartbeat        success; records that the broker is alive
901   members of a group      id → address
106   clusters                all clusters and brokers
217   one topic's queues      merged into the table
====  ======================  ========================================================================================

Operators' requests are in `rmqkit.namesrv.admin_handlers`. Codes that are in neither module (such as the filter
servers' 301 and 302) are answered with REQUEST_CODE_NOT_SUPPORTED. Source: remoting.md §4.2; behaviour.md §1.3–§1.6.

The KV configuration (``KVConfigManager``), namespace → key → value, is stored in ``kvConfig.json``. It is the only
permanent table of a name server. The namespace `ORDER_TOPIC_CONFIG` contains the ordered topics for brokers: key topic,
value ``brokerA:4;brokerB:2``. Every change rewrites the file completely, and is answered and visible only after it is
on the disk. The file has Java's format::

    {"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:4"}}}

Use this module only on the event loop; a thread writes the file. Source: behaviour.md §1.1, §1.7.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct, field

from rmqkit.errors import StoreUnavailable
from rmqkit.namesrv.brokers import Claims, Unregistration
from rmqkit.namesrv.routes import (
    BrokerRegistration,
    Departure,
    MemberChange,
    Registered,
    RouteTable,
    in_zone,
    with_acting_masters,
)
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import FAQ, RequestCode, ResponseCode, version_number
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.names import SYNC_BROKER_MEMBER_PREFIX
from rmqkit.protocol.schemas.brokers import (
    BrokerHeartbeat,
    BrokerIdentity,
    BrokerMemberGroup,
    BrokerMemberGroupBody,
    BrokerMemberGroupRequest,
    DataVersionResponse,
    RegisterBrokerBody,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    decode_registration,
)
from rmqkit.protocol.schemas.topics import (
    DataVersion,
    KVTable,
    MemberRouteResponse,
    QueueData,
    RegisterTopicRequest,
    RouteRequest,
    TopicRoute,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import SLOW_BYTES_MAX, Answering, answers, decode_body
from rmqkit.remoting.tasks import Slice
from rmqkit.store.files import JsonFile

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"


class _Stored(Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = field(default_factory=dict)


class KeyValues:
    """The KV configuration and its file. The first write creates the directory of the file."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path)
        self._table: dict[str, dict[str, str]] = {}
        self._writing = asyncio.Lock()

    def load(self) -> None:
        """Read the file; a missing file is an empty table.
        Raises StoreMismatch: neither the file nor its backup contains a table.
        Raises StoreUnavailable: the file or its backup cannot be read."""
        try:
            stored = self._file.load(_Stored)
        except OSError as error:
            raise StoreUnavailable(f"cannot read {self._file.path}: errno {error.errno} {error.strerror}") from error
        self._table = stored.config_table if stored is not None else {}

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """Return all values of a namespace; empty if they were deleted, None if the namespace never had a value."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises StoreUnavailable: writing failed; nothing was changed."""
        async with self._writing:
            await self._replace(namespace, {**self._table.get(namespace, {}), key: value})

    async def delete(self, namespace: str, key: str) -> None:
        """Remove a value, if it exists. Raises StoreUnavailable: writing failed; nothing was changed."""
        async with self._writing:
            known = self._table.get(namespace)
            if known is not None:
                await self._replace(namespace, {name: value for name, value in known.items() if name != key})

    async def _replace(self, namespace: str, values: dict[str, str]) -> None:
        # Make the change visible only after it is on the disk, or brokers could get values that a crash reverts.
        table = {**self._table, namespace: values}
        await asyncio.to_thread(self._file.save, _Stored(table))
        self._table = table


_STRICT_JSON_SINCE = version_number(4, 9, 4)


class TableHandlers(Answering):
    """The common base of handlers that use the tables."""

    def __init__(self, settings: NamesrvSettings, routes: RouteTable, kv: KeyValues) -> None:
        super().__init__(settings.admin_addresses)
        self._settings = settings
        self._routes = routes
        self._kv = kv


class RouteHandlers(TableHandlers):
    """The handlers of clients' requests; ``is_ready`` returns True if brokers had time to register since the start."""

    def __init__(
        self, settings: NamesrvSettings, routes: RouteTable, kv: KeyValues, is_ready: Callable[[], bool]
    ) -> None:
        super().__init__(settings, routes, kv)
        self._is_ready = is_ready

    @answers(RequestCode.GET_ROUTEINFO_BY_TOPIC)
    def route(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, RouteRequest)
        if not self._is_ready():
            return reply(command, ResponseCode.SYSTEM_ERROR, "name server not ready")
        route = self._routes.route(header.topic)
        if route is None:
            remark = f"No topic route info in name server for the topic: {header.topic}{FAQ}"
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, remark)
        route = self._as_asked(header, route)
        # Older clients expect fastjson's dialect, in which broker ids are keys without quotes.
        is_strict = command.version >= _STRICT_JSON_SINCE or header.accept_standard_json_only
        body = msgspec.json.encode(route) if is_strict else fastjson.dumps(route)
        if not header.topic.startswith(SYNC_BROKER_MEMBER_PREFIX):
            return reply(command, body=body)
        return reply(command, header=MemberRouteResponse(self._registered_from(route)), body=body)

    def _registered_from(self, route: TopicRoute) -> str:
        """Return the addresses from which the brokers of a route registered; Apache's servers do not send these."""
        addresses = {address for broker in route.broker_datas for address in broker.broker_addrs.values()}
        places = {
            address: str(live.connection.hops[-1])
            for address in sorted(addresses)
            for live in self._routes.living(address)
            if isinstance(live.connection, Connection) and live.connection.hops
        }
        return msgspec.json.encode(places).decode()

    def _as_asked(self, header: RouteRequest, route: TopicRoute) -> TopicRoute:
        if self._settings.order_message_enable:
            order = self._kv.get(ORDER_TOPIC_CONFIG, header.topic)
            route.order_topic_conf = msgspec.UNSET if order is None else order
        if self._settings.support_acting_master:
            # Apply acting masters before zones: a group with an acting master is then a group with a master.
            route = with_acting_masters(header.topic, route)
        if header.zone_name and (header.zone_mode or "").lower() == "true":
            route = in_zone(route, header.zone_name)
        return route


class BrokerHandlers(TableHandlers):
    """The handlers of brokers' requests; ``on_change`` is called for each group with a new lowest id, ``claims`` checks
    the requests."""

    def __init__(
        self,
        settings: NamesrvSettings,
        routes: RouteTable,
        kv: KeyValues,
        unregistration: Unregistration,
        on_change: Callable[[MemberChange], None],
        claims: Claims,
    ) -> None:
        super().__init__(settings, routes, kv)
        self._claims = claims
        self._unregistration = unregistration
        self._on_change = on_change
        self._aside = asyncio.Lock()

    @answers(RequestCode.REGISTER_BROKER)
    def register_broker(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Register a broker, with all topics or with changed topics. A long table is decoded in a thread, and entered
        in slices. Registrations are handled in their order."""
        if (refused := self._claims.refused(connection, command)) is not None:
            return refused
        header = decode_header(command, RegisterBrokerRequest)
        body = command.payload
        if header.body_crc32 and zlib.crc32(body) & 0x7FFFFFFF != header.body_crc32:
            return reply(command, ResponseCode.SYSTEM_ERROR, "crc32 not match")
        is_plain = not header.compressed and body[:1] in (b"", b"{")
        # While a registration is decoded in the thread, later registrations wait: the order of two registrations of a
        # broker must not change.
        if not is_plain or len(body) > SLOW_BYTES_MAX or self._aside.locked():
            return self._register_aside(connection, command, header)
        decoded = decode_registration(body, is_compressed=False, version=command.version)
        registration = _registration(header, decoded, connection)
        if (refused := self._claims.registration(connection, command, registration)) is not None:
            return refused
        registered = self._routes.register(registration, forget_missing=self._settings.delete_topic_with_registration)
        return self._registered(command, registered)

    async def _register_aside(self, connection: Connection, command: Command, header: RegisterBrokerRequest) -> Command:
        async with self._aside:
            decode = partial(decode_registration, is_compressed=header.compressed, version=command.version)
            registration = _registration(header, await asyncio.to_thread(decode, command.payload), connection)
            if not connection.is_open:
                return reply(
                    command, ResponseCode.SYSTEM_ERROR, "register broker failed"
                )  # the close is already handled
            if (refused := self._claims.registration(connection, command, registration)) is not None:
                return refused
            steps = self._routes.register_in_steps(
                registration, forget_missing=self._settings.delete_topic_with_registration
            )
            now = Slice()
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    return self._registered(command, done.value)
                await now.pause_if_over()

    def _registered(self, command: Command, registered: Registered) -> Command:
        if not registered.is_accepted:
            return reply(command, ResponseCode.SYSTEM_ERROR, "register broker failed")
        if registered.change is not None:
            self._on_change(registered.change)
        master_address, ha_address = registered.master or (None, None)
        answer = RegisterBrokerResponse(ha_server_addr=ha_address, master_addr=master_address)
        return reply(command, header=answer, body=self._order_topics())

    @answers(RequestCode.UNREGISTER_BROKER)
    def unregister_broker(self, connection: Connection, command: Command) -> Command:
        """Queue the removal of a broker that unregisters."""
        if (refused := self._claims.refused(connection, command)) is not None:
            return refused
        header = decode_header(command, BrokerIdentity)
        if (refused := self._claims.speaks_for(connection, command, [header.broker_addr])) is not None:
            return refused
        departure = Departure(header.cluster_name, header.broker_addr, header.broker_name)
        is_queued = self._unregistration.submit(departure)
        return reply(command, ResponseCode.SUCCESS if is_queued else ResponseCode.SYSTEM_ERROR)

    @answers(RequestCode.QUERY_DATA_VERSION)
    def data_version(self, connection: Connection, command: Command) -> Command:
        """Return True in the header if the broker's data version differs from the stored version, and record that the
        broker is alive."""
        if (refused := self._claims.refused(connection, command)) is not None:
            return refused
        header = decode_header(command, BrokerIdentity)
        if (refused := self._claims.speaks_for(connection, command, [header.broker_addr])) is not None:
            return refused
        asked = decode_body(command, DataVersion)
        # None for an unknown broker: None differs from every version, so the broker registers.
        stored = self._routes.refresh((header.cluster_name, header.broker_addr))
        body = b"" if stored is None else msgspec.json.encode(stored)
        return reply(command, header=DataVersionResponse(changed=stored != asked), body=body)

    @answers(RequestCode.BROKER_HEARTBEAT)
    def heartbeat(self, connection: Connection, command: Command) -> Command:
        """Record that a broker is alive; an unknown broker gets the same answer."""
        if (refused := self._claims.refused(connection, command)) is not None:
            return refused
        header = decode_header(command, BrokerHeartbeat)
        if (refused := self._claims.speaks_for(connection, command, [header.broker_addr])) is not None:
            return refused
        self._routes.refresh((header.cluster_name, header.broker_addr))
        return reply(command)

    @answers(RequestCode.GET_BROKER_MEMBER_GROUP)
    def member_group(self, connection: Connection, command: Command) -> Command:
        """Return the brokers with a name, with their real ids."""
        header = decode_header(command, BrokerMemberGroupRequest)
        members = dict(self._routes.members(header.broker_name))
        group = BrokerMemberGroup(members, header.broker_name, header.cluster_name)
        return reply(command, body=fastjson.dumps(BrokerMemberGroupBody(group)))

    @answers(RequestCode.GET_BROKER_CLUSTER_INFO)
    def cluster_info(self, connection: Connection, command: Command) -> Command:
        """Return all clusters and brokers, always in fastjson's dialect."""
        return reply(command, body=fastjson.dumps(self._routes.clusters()))

    @answers(RequestCode.REGISTER_TOPIC_IN_NAMESRV)
    def register_topic(self, connection: Connection, command: Command) -> Command:
        """Merge the queues of one topic."""
        if (refused := self._claims.refused(connection, command)) is not None:
            return refused
        header = decode_header(command, RegisterTopicRequest)
        route = decode_body(command, TopicRoute)
        named = self._claims.addresses_of(queue.broker_name for queue in route.queue_datas)
        # Operators can also set the queues of a live broker.
        is_admin = self._settings.admin_addresses.include(connection.hops)
        if not is_admin and (refused := self._claims.speaks_for(connection, command, named)) is not None:
            return refused
        self._routes.register_topic(header.topic, map(_as_of_today, route.queue_datas))
        return reply(command)

    def _order_topics(self) -> bytes:
        order = self._kv.namespace(ORDER_TOPIC_CONFIG) if self._settings.return_order_topic_config else None
        return b"" if order is None else msgspec.json.encode(KVTable(dict(order)))


def _registration(
    header: RegisterBrokerRequest, body: RegisterBrokerBody, connection: Connection
) -> BrokerRegistration:
    return BrokerRegistration(
        cluster=header.cluster_name,
        address=header.broker_addr,
        broker_name=header.broker_name,
        broker_id=header.broker_id,
        ha_address=header.ha_server_addr,
        timeout_ms=header.heartbeat_timeout_millis,
        enable_acting_master=header.enable_acting_master,
        topics=body.topic_config_serialize_wrapper,
        connection=connection,
        filter_servers=body.filter_server_list,
        zone_name=header.zone_name,
    )


def _as_of_today(queue: QueueData) -> QueueData:
    """Return queue data with the flag under its 5.x name."""
    old = queue.topic_syn_flag
    if old is msgspec.UNSET:
        return queue
    return msgspec.structs.replace(queue, topic_sys_flag=queue.topic_sys_flag or old, topic_syn_flag=msgspec.UNSET)
