"""The base of all administrative operations: typed answers, and the addresses of name servers, brokers and clusters.

======================  ==================================================================================
target                  selection
======================  ==================================================================================
a name server           the first name server of the list that answers
cluster, routes         requested once, then cached until `AdminCalls.forget`
a broker                ``host:port``, or a name; a name stands for the master
several brokers         all at the same time; the first error is raised
======================  ==================================================================================

If a peer closes the connection or does not answer, `rmqkit.remoting.client` probes the kind of the peer, and the error
names this kind.

A *guard* is called before each request of each method. A guard can count requests, or refuse a request by raising an
exception. `read_only` is a guard that allows only requests that change nothing (`READING`). Use this module only on the
event loop.
Source: behaviour.md §9.9.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from msgspec import Struct

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import (
    ConnectionLost,
    NoNameServer,
    PeerRefused,
    ReadOnly,
    RemotingError,
    RequestTimedOut,
    RmqError,
    SettingsError,
    UnknownName,
)
from rmqkit.protocol.catalog import CATALOG
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command, decode_header
from rmqkit.protocol.names import is_of_applications
from rmqkit.protocol.schemas.pull import PullFlag, PullMessageRequest
from rmqkit.protocol.schemas.topics import ClusterInfo, TopicRoute
from rmqkit.remoting.address import split_addresses
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.client import RemotingClient
from rmqkit.remoting.tls import ClientTls
from rmqkit.rpc import BrokerCalls, NameServers
from rmqkit.sentences import _
from rmqkit.settings import parse_properties

__all__ = ["MASTER_ID", "READING", "TIMEOUT_MS", "AdminCalls", "Done", "Guard", "read_only"]

TIMEOUT_MS = 5000.0
MASTER_ID = 0

T = TypeVar("T")
H = TypeVar("H", bound=Struct)


class Done(Struct, rename="camel"):
    """A description of a change, and the server that made it."""

    where: str
    done: str


Guard = Callable[[str, Command], None]
"""A function that gets the address and the request before the request is sent. Its exceptions reach the caller."""

READING = frozenset(code for code, row in CATALOG.items() if row.is_reading)
"""The codes of requests that change nothing at any broker. GET_SUBSCRIPTIONGROUP_CONFIG (352) is not included, because
Apache's brokers create the group."""

_PULLS = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)


def read_only(address: str, command: Command) -> None:
    """Allow only requests that change nothing (a guard). Raises ReadOnly: the request changes something, or is a pull
    that commits an offset."""
    is_reading = command.code in READING
    if is_reading and command.code in _PULLS:
        is_reading = not decode_header(command, PullMessageRequest).sys_flag & PullFlag.COMMIT_OFFSET
    if not is_reading:
        known = {int(code): code.name for code in RequestCode}
        raise ReadOnly(command.code, known.get(command.code, "unknown"), address)


class _GuardedClient(RemotingClient):
    """A client that calls a guard before it sends a request."""

    def __init__(self, guard: Guard, **options: Any) -> None:
        super().__init__(**options)
        self._guard = guard

    async def call(self, address: str, command: Command, timeout_ms: float) -> Command:
        self._guard(address, command)
        return await super().call(address, command, timeout_ms)

    # The guard must see one-way requests too, because they may also change something.
    async def send_one_way(self, address: str, command: Command, timeout_ms: float) -> None:
        self._guard(address, command)
        await super().send_one_way(address, command, timeout_ms)


class AdminCalls(BrokerCalls):
    """Requests to name servers and brokers. The error of a lost connection names the kind of the peer. ``guard`` is
    called before each request is sent.
    Raises SettingsError: the list of name servers is empty, or an entry is not ``host:port``.

    Every method that sends a request raises RemotingError (no answer), NoNameServer (no name server answers),
    PeerRefused (an answer other than success), and BodyError or HeaderError (an answer that cannot be decoded).
    """

    def __init__(
        self,
        name_servers: str,
        *,
        timeout_ms: float = TIMEOUT_MS,
        tls: ClientTls | None = None,
        credentials: Credentials | None = None,
        clock: Clock = SYSTEM_CLOCK,
        guard: Guard | None = None,
    ) -> None:
        try:
            self.name_servers = split_addresses(name_servers)
        except ValueError as error:
            raise SettingsError(_("name servers {servers!r}: {error}", servers=name_servers, error=error)) from None
        options: dict[str, Any] = {"clock": clock, "tls": tls, "credentials": credentials}
        super().__init__(RemotingClient(**options) if guard is None else _GuardedClient(guard, **options), timeout_ms)
        self.clock = clock
        self.any_name_server = NameServers(self.name_servers, self)
        self._cluster: ClusterInfo | None = None
        self._routes: dict[str, TopicRoute] = {}

    def forget(self) -> None:
        """Drop the cached cluster and routes, so that the next use requests them again."""
        self._cluster = None
        self._routes.clear()

    # -- one peer

    async def call(self, address: str, command: Command, timeout_ms: float | None = None) -> Command:
        """Return the answer, with any code. Raises WrongProtocol, TlsMismatch: the connection was lost for this
        reason."""
        try:
            return await super().call(address, command, timeout_ms)
        except (ConnectionLost, RequestTimedOut) as error:
            from rmqkit.remoting.client import diagnosed

            raise await diagnosed(error, address, is_encrypted=self.remoting.is_encrypted) from None

    async def fetch_properties(self, address: str, code: int) -> dict[str, str]:
        """Return the settings in the body of a successful answer."""
        return parse_properties((await self.ask(address, code)).payload.decode("utf-8", "replace"))

    # -- addresses

    async def cluster(self) -> ClusterInfo:
        """Return all clusters and brokers that a name server knows."""
        if self._cluster is None:
            self._cluster = await self.any_name_server.fetch(ClusterInfo, RequestCode.GET_BROKER_CLUSTER_INFO)
        return self._cluster

    async def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic. Raises UnknownName: no broker has the topic."""
        if topic not in self._routes:
            route = await self.any_name_server.route(topic)
            if route is None:
                raise await self._unknown_topic(topic)
            self._routes[topic] = route
        return self._routes[topic]

    async def topic_names(self) -> list[str]:
        """Return all topics that a name server knows, sorted."""
        return await self.any_name_server.topics()

    async def own_topic_names(self) -> list[str]:
        """Return the topics that applications have created, sorted, without system, retry and dead-letter topics."""
        names, servers = await self.topic_names(), set[str]()
        with contextlib.suppress(RmqError):  # without the names, the list has two more topics
            info = await self.cluster()
            servers = {*info.cluster_addr_table, *info.broker_addr_table}
        return [name for name in names if is_of_applications(name, servers)]

    async def address(self, broker: str) -> str:
        """Return the address of a broker: ``host:port`` itself, or the master's address if a name is given.
        Raises UnknownName: the name servers know no broker of that name, or no master of it."""
        if ":" in broker:
            return broker
        known = (await self.cluster()).broker_addr_table
        masters = {name: data.broker_addrs[MASTER_ID] for name, data in known.items() if MASTER_ID in data.broker_addrs}
        if broker not in masters:
            raise UnknownName("broker" if broker not in known else "master of", broker, self._asked, masters)
        return masters[broker]

    async def broker_name(self, broker: str) -> str:
        """Return the name of a broker, from its name or its address. Raises UnknownName: the name servers do not know
        the broker."""
        known = (await self.cluster()).broker_addr_table
        for name, data in known.items():
            if broker == name or broker in data.broker_addrs.values():
                return name
        raise UnknownName("broker", broker, self._asked, known)

    async def masters(self, cluster: str | None = None, broker: str | None = None) -> dict[str, str]:
        """Return the addresses of masters by broker name: of a cluster, of one broker, or of all clusters. If the name
        servers do not know the address of a broker, the address is also used as the name.
        Raises UnknownName: the cluster or the broker does not exist."""
        if broker is not None:
            name, address = broker, await self.address(broker)
            with contextlib.suppress(RemotingError, NoNameServer, PeerRefused, UnknownName):
                name = await self.broker_name(broker)
            return {name: address}
        info = await self.cluster()
        if cluster is not None and cluster not in info.cluster_addr_table:
            raise UnknownName("cluster", cluster, self._asked, info.cluster_addr_table)
        names = info.cluster_addr_table[cluster] if cluster is not None else info.broker_addr_table
        addresses = {name: info.broker_addr_table[name].broker_addrs for name in sorted(names)}
        return {name: by_id[MASTER_ID] for name, by_id in addresses.items() if MASTER_ID in by_id}

    async def targets(self, broker: str | None, cluster: str | None) -> dict[str, str]:
        """Return the `masters` of a broker or of a cluster. If both are None, use the only cluster.
        Raises SettingsError: both are None, and there are several clusters, or no cluster."""
        if broker is None and cluster is None:
            clusters = sorted((await self.cluster()).cluster_addr_table)
            if not clusters:
                raise SettingsError(f"{self._asked} knows no broker: start one, or wait until it is registered")
            if len(clusters) != 1:
                raise SettingsError(
                    _("which brokers? name one with -b, or a cluster with -c: {clusters}", clusters=", ".join(clusters))
                )
        return await self.masters(cluster, broker)

    async def addresses(self, broker: str | None, cluster: str | None) -> list[str]:
        """Return the addresses of `targets`. The address of a broker needs no request to a name server."""
        return [await self.address(broker)] if broker is not None else [*(await self.targets(None, cluster)).values()]

    async def masters_of_topic(self, topic: str) -> dict[str, str]:
        """Return the addresses of a topic's masters, by broker name. Raises UnknownName: no broker has the topic."""
        brokers = sorted((await self.route(topic)).broker_datas, key=lambda data: data.broker_name)
        return {data.broker_name: data.broker_addrs[MASTER_ID] for data in brokers if MASTER_ID in data.broker_addrs}

    async def fan_out(self, addresses: Iterable[str], asking: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        """Send a request to each address at the same time. Return the answers by address, in the order of the
        addresses."""
        # The first error is raised immediately. The other requests continue, and may still change something.
        listed = list(addresses)
        return dict(zip(listed, await asyncio.gather(*map(asking, listed)), strict=True))

    @property
    def _asked(self) -> str:
        return _("name server {servers}", servers=", ".join(self.name_servers))

    async def _unknown_topic(self, topic: str) -> UnknownName:
        names: list[str] | None = None
        with contextlib.suppress(RmqError):
            # System topics would hide the intended name. List them only if the unknown name looks like a system topic.
            names = await (self.own_topic_names() if is_of_applications(topic) else self.topic_names())
        return UnknownName("topic", topic, self._asked, names)
