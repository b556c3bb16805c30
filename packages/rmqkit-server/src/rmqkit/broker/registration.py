"""Registration of the broker and its topics with every name server (``BrokerOuterAPI``).

The broker sends the same registration to all name servers in parallel. A failure of one name server is logged and does
not affect the other name servers. If a name server has all other topics, a changed topic is sent to it immediately and
alone. Otherwise the broker sends all topics: after a missed change, or on a new connection, because the name server may
have restarted. A later change alone, with its newer version, would hide the missed change from the name server. If the
answer to a full registration lists ordered topics, the broker marks these topics as ordered. A slave reads the address
of its master from any answer. With slave-acting-master, brokers also send a heartbeat every second, and name servers
remove a broker after `brokerNotActiveTimeoutMillis` without a heartbeat.
Source: behaviour.md §1.3, §1.7, §2.3; remoting.md §10.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.errors import BodyError, ConnectFailed, ConnectionLost, HeaderError, PeerRefused, RemotingError, StoreError
from rmqkit.protocol import fastjson, names
from rmqkit.protocol.codes import CURRENT_VERSION, RequestCode, request_name
from rmqkit.protocol.command import Command, decode_header_leniently, request
from rmqkit.protocol.schemas.brokers import (
    BrokerHeartbeat,
    BrokerIdentity,
    DataVersionResponse,
    RegisterBrokerBody,
    RegisterBrokerRequest,
    RegisterBrokerResponse,
    compress_registration,
)
from rmqkit.protocol.schemas.topics import (
    KVTable,
    MemberRouteResponse,
    Permission,
    RouteRequest,
    TopicConfig,
    TopicConfigTable,
    TopicRoute,
)
from rmqkit.remoting.address import ip_of, resolved, split_addresses
from rmqkit.remoting.client import RemotingClient, diagnosed, expect_success
from rmqkit.remoting.connection import Connection

__all__ = ["Registration"]

_MakeCommand = Callable[[], Command]

_SETTLED_SECONDS = 2.0
_FIRST_REPEAT_SECONDS = 10.0
_BEAT_SECONDS = 1.0
_GOODBYE_TIMEOUT_MS = 3000
_NAMESAKE_TIMEOUT_MS = 1000
_WARNED_MAX = 256
_CHANGED = {"changed": "true"}
_READ_WRITE = Permission.READ | Permission.WRITE

_log = logging.getLogger(__name__)


class Registration:
    """The registration of one broker. Use it only on the event loop.
    ``name_servers``: the addresses of the name servers.
    ``address``: the address for clients.
    ``ha_address``: the address for slaves.
    ``on_master``: called with the address and the HA address of a slave's master after a registration, if an answer has
    them.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        topics: TopicTable,
        client: RemotingClient,
        *,
        address: str,
        ha_address: str,
        on_master: Callable[[str, str], object] | None = None,
    ) -> None:
        self._settings = settings
        self._topics = topics
        self._client = client
        self._address = address
        self._ha_address = ha_address
        self._on_master = on_master
        self.name_servers = split_addresses(settings.namesrv_addr) if settings.namesrv_addr else []
        self._up_to_date: dict[str, Connection] = {}
        self._warned_places: set[tuple[str, str | None]] = set()
        self._is_started = False
        self._repeat: asyncio.Task[None] | None = None
        self._beat: asyncio.Task[None] | None = None
        self._changed: list[TopicConfig] = []
        self._single: set[asyncio.Task[int]] = set()

    async def start(self) -> int:
        """Register now, and then periodically. Return the number of name servers that accepted the registration."""
        self._is_started = True
        reached = await self.register()
        if self.name_servers:
            self._repeat = asyncio.create_task(self._keep_registered(), name="registration")
            if self._settings.acts_as_master:
                self._beat = asyncio.create_task(self._keep_beating(), name="heartbeat to name servers")
        return reached

    async def stop(self) -> None:
        """Unregister from every name server, and send no more changes."""
        self._is_started = False
        self._changed.clear()
        # Cancel the tasks first: a registration after the unregistration would register the broker for two minutes.
        for task in (self._repeat, self._beat, *self._single):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self._ask_name_servers(
            lambda: request(RequestCode.UNREGISTER_BROKER, self._identity), _GOODBYE_TIMEOUT_MS
        )

    async def register(self, changes: TopicConfigTable | None = None) -> int:
        """Send all topics to all name servers. Return the number of name servers that accepted them. ``changes``: a
        snapshot of some topics, which is sent instead to name servers that have all other topics."""
        made: dict[bool, _MakeCommand] = {}
        replies = await asyncio.gather(*(self._register_at(server, changes, made) for server in self.name_servers))
        answers = [answer for answer in replies if answer is not None]
        if changes is None and answers and answers[0].payload:
            self._mark_ordered(answers[0])
        if self._on_master is not None:
            self._pass_on_master(answers)
        return len(answers)

    async def _register_at(
        self, server: str, changes: TopicConfigTable | None, made: dict[bool, _MakeCommand]
    ) -> Command | None:
        """Register at one name server. Return its answer, or None. ``made``: the commands with all topics (True) and
        with the changes (False). A command is made when the first name server needs it."""
        try:
            connection = await self._client.connection(server)
        except ConnectFailed as error:
            _log.warning("cannot send the topics to %s: %s", server, error)
            return None
        # Send all topics on a new connection: a restarted name server has no topics.
        is_whole = changes is None or self._up_to_date.get(server) is not connection
        if is_whole not in made:
            made[is_whole] = self._registering(self._topics.snapshot() if is_whole or changes is None else changes)
        answer = await self._ask(server, made[is_whole](), self._settings.register_timeout_ms, logging.WARNING)
        if answer is None:
            # It is unknown if the name server accepted the topics, so send all topics the next time.
            self._up_to_date.pop(server, None)
        elif is_whole:
            self._up_to_date[server] = connection
        return answer

    def _registering(self, table: TopicConfigTable) -> _MakeCommand:
        """Return a function that makes the command to register a table of topics."""
        content = RegisterBrokerBody(topic_config_serialize_wrapper=self._with_broker_permission(table))
        is_compressed = self._settings.compressed_register
        body = (
            compress_registration(content, version=CURRENT_VERSION) if is_compressed else msgspec.json.encode(content)
        )
        header = RegisterBrokerRequest(
            **msgspec.structs.asdict(self._identity),
            ha_server_addr=self._ha_address,
            # Set a timeout only with heartbeats: without them it would expire between two registrations. With None name
            # servers wait for 120 s.
            heartbeat_timeout_millis=self._settings.not_active_ms_max if self._settings.acts_as_master else None,
            enable_acting_master=self._settings.acts_as_master,
            compressed=is_compressed,
            # Clear the sign bit, like Java's `UtilAll.crc32`: otherwise name servers answer `crc32 not match`.
            body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
        )
        return lambda: request(RequestCode.REGISTER_BROKER, header, body)

    def _pass_on_master(self, answers: list[Command]) -> None:
        """Call ``on_master`` with the first master in the answers, if there is one."""
        assert self._on_master is not None
        for answer in answers:
            try:
                named = decode_header_leniently(answer, RegisterBrokerResponse)
            except HeaderError as error:
                _log.warning("cannot read the address of the master in a name server's answer: %s", error)
                continue
            # Skip this broker's own address: an answer may still have it as the master if it was the master before.
            if named.master_addr and named.ha_server_addr and named.master_addr != self._address:
                self._on_master(named.master_addr, named.ha_server_addr)
                return

    def _mark_ordered(self, answer: Command) -> None:
        try:
            self._topics.mark_ordered(fastjson.decode_as(answer.payload, KVTable).table)
        except (BodyError, StoreError) as error:
            _log.warning("cannot take over the order topics of a name server: %s", error)

    def topics_changed(self, topics: list[TopicConfig]) -> None:
        """Register changed topics soon. The changes of one tick are sent together."""
        # Ignore changes before the start, which the first registration contains, and changes after the stop.
        if self.name_servers and self._is_started:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._register_changes)
            self._changed += topics

    def _register_changes(self) -> None:
        """Register the collected changes together: name servers ignore a second registration with the same version."""
        assert self._is_started or not self._changed, "changes are collected only between start and stop"
        topics, self._changed = self._changed, []
        if topics:
            changes = self._topics.snapshot(topics)
            task = asyncio.create_task(self.register(changes), name="registration of changed topics")
            self._single.add(task)
            task.add_done_callback(self._single.discard)

    async def settled(self) -> None:
        """Wait until all earlier changes are registered, at most 2 s."""
        # Register now, not in the next tick, so that the wait includes these changes.
        self._register_changes()
        if self._single:
            await asyncio.wait(self._single, timeout=_SETTLED_SECONDS)

    async def ask_namesakes(self, command: _MakeCommand) -> list[Command]:
        """Send a request to the other brokers of this name that name servers know. Return the successful answers."""
        addresses = set((await self.members()).values())
        return await self._ask_all(addresses - {self._address}, command, _NAMESAKE_TIMEOUT_MS)

    async def members(self) -> dict[int, str]:
        """Return the addresses of the brokers of this name by their real ids, from the answers of all name servers.
        The result is empty if no name server answers. 4.9 name servers have no other request for this
        (remoting.md §9.7)."""
        return {
            broker_id: address for members in await self._members_by_server() for broker_id, address in members.items()
        }

    async def namesakes(self) -> set[str] | None:
        """Return the addresses of the other brokers of this name, including brokers with the same id. Return None if no
        name server knows any broker of this name.

        Ignore a broker that another machine has registered, because any client can register any address. Apache's name
        servers do not return the address of the client that registered a broker, so their answers are not checked.
        """
        found: set[str] = set()
        is_any_named = False
        for answer in await self._route_answers(self._group_topic):
            places = _registered_from(answer)
            for members in self._members_of(fastjson.decode_as(answer.payload, TopicRoute)):
                is_any_named = True
                for address in set(members.values()) - {self._address}:
                    if places is None or await self._is_from(address, places.get(address)):
                        found.add(address)
        return found if is_any_named else None

    async def _is_from(self, address: str, place: str | None) -> bool:
        """Return True if a broker was registered from its own address, or from the machine of the name server."""
        host = None if place is None else ip_of(place)
        if host is not None and (host.is_loopback or host in await resolved(address)):
            return True
        if (address, place) not in self._warned_places and len(self._warned_places) < _WARNED_MAX:
            self._warned_places.add((address, place))
            _log.warning(
                "%s is registered as another broker %s, but from %s: it does not count as a member for "
                "haAllowedAddresses; if it is a slave behind NAT, add its source address to that setting",
                *(address, self._settings.broker_name, place),
            )
        return False

    async def _members_by_server(self) -> list[dict[int, str]]:
        """Return the brokers of this name, separately for each name server."""
        return [each for route in await self.routes(self._group_topic) for each in self._members_of(route)]

    @property
    def _group_topic(self) -> str:
        return names.SYNC_BROKER_MEMBER_PREFIX + self._settings.broker_name

    def _members_of(self, route: TopicRoute) -> list[dict[int, str]]:
        name = self._settings.broker_name
        return [group.broker_addrs for group in route.broker_datas if group.broker_name == name]

    async def routes(self, topic: str) -> list[TopicRoute]:
        """Return the route of a topic from each name server that knows the topic and answers within a second."""
        return [fastjson.decode_as(answer.payload, TopicRoute) for answer in await self._route_answers(topic)]

    async def _route_answers(self, topic: str) -> list[Command]:
        header = RouteRequest(topic, accept_standard_json_only=True)
        make = partial(request, RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        return await self._ask_all(self.name_servers, make, _NAMESAKE_TIMEOUT_MS, logging.DEBUG)

    @property
    def _identity(self) -> BrokerIdentity:
        return BrokerIdentity(
            broker_name=self._settings.broker_name,
            broker_addr=self._address,
            cluster_name=self._settings.cluster_name,
            broker_id=self._settings.broker_id,
        )

    async def is_outdated(self) -> bool:
        """Return True if a name server does not have the current topics, or does not answer."""
        body = msgspec.json.encode(self._topics.data_version)
        answers = await self._ask_name_servers(
            lambda: request(RequestCode.QUERY_DATA_VERSION, self._identity, body), self._settings.register_timeout_ms
        )
        headers = [decode_header_leniently(answer, DataVersionResponse, missing=_CHANGED) for answer in answers]
        # Also register if a name server does not answer: it may have no topics, and a registration is cheap.
        return len(headers) < len(self.name_servers) or any(header.changed for header in headers)

    def _with_broker_permission(self, table: TopicConfigTable) -> TopicConfigTable:
        # Change only the registration: the table has the permissions that operators set for each topic.
        perm = self._settings.broker_permission
        if perm & _READ_WRITE != _READ_WRITE:
            table.topic_config_table = {
                name: msgspec.structs.replace(config, perm=config.perm & perm)
                for name, config in table.topic_config_table.items()
            }
        return table

    async def _keep_registered(self) -> None:
        await asyncio.sleep(_FIRST_REPEAT_SECONDS)
        while True:
            if self._settings.force_register or await self.is_outdated():
                await self.register()  # without a change, the version query above keeps the broker registered
            await asyncio.sleep(self._settings.register_interval_ms / 1000)

    async def _keep_beating(self) -> None:
        """Send every name server a heartbeat every second (behaviour.md §10.5)."""
        while True:
            await asyncio.gather(*map(self._beat_at, self.name_servers))
            await asyncio.sleep(_BEAT_SECONDS)

    async def _beat_at(self, server: str) -> None:
        # 4.9 name servers have no BROKER_HEARTBEAT. Every name server accepts a version query as a heartbeat.
        if self._settings.old_name_servers:
            body = msgspec.json.encode(self._topics.data_version)
            beat = request(RequestCode.QUERY_DATA_VERSION, self._identity, body, one_way=True)
        else:
            header = BrokerHeartbeat(self._settings.cluster_name, self._address, self._settings.broker_name)
            beat = request(RequestCode.BROKER_HEARTBEAT, header, one_way=True)
        try:
            await self._client.send_one_way(server, beat, _NAMESAKE_TIMEOUT_MS)
        except ConnectFailed as error:
            _log.debug("cannot send a heartbeat to %s: %s", server, error)

    async def _ask_name_servers(self, command: _MakeCommand, timeout_ms: int) -> list[Command]:
        return await self._ask_all(self.name_servers, command, timeout_ms)

    async def _ask_all(
        self, servers: Iterable[str], command: _MakeCommand, timeout_ms: int, level: int = logging.WARNING
    ) -> list[Command]:
        replies = await asyncio.gather(*(self._ask(server, command(), timeout_ms, level) for server in servers))
        return [answer for answer in replies if answer is not None]

    async def _ask(self, server: str, command: Command, timeout_ms: int, level: int) -> Command | None:
        try:
            return expect_success(await self._client.call(server, command, timeout_ms), server)
        except (RemotingError, PeerRefused) as error:
            if isinstance(error, ConnectionLost):
                error = await diagnosed(error, server, is_encrypted=self._client.is_encrypted)
            _log.log(level, "%s did not take %s: %s", server, request_name(command.code), error)
            return None


def _registered_from(answer: Command) -> dict[str, str] | None:
    """Return the address from which each broker of a route was registered; None if the name server does not return
    it."""
    text = decode_header_leniently(answer, MemberRouteResponse).registered_from
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except msgspec.MsgspecError:
        # Return an empty dict, with which no broker is a member. With None every broker would be accepted.
        return {}
