"""Typed administrative operations on a cluster: the functions behind ``rmq``, comparable to Java's ``mqadmin``.

`Admin` has one attribute for each noun (``admin.topics``, ``admin.brokers`` …). The value is an object with the
operations on this noun. Its methods send requests through `AdminCalls` and return structs. Only the command line
(`rmqkit.cli.admin`) prints. The operations work with Apache's servers and with rmqkit's servers.

::

    async with Admin("127.0.0.1:9876") as admin:
        for row in await admin.clusters.brokers():
            print(row.broker_name, row.addr)

The module of a noun is imported when the noun is first used. Source: behaviour.md §9.9.
"""

from __future__ import annotations

from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rmqkit.admin.calls import TIMEOUT_MS, AdminCalls, Done, Guard, read_only
from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import ClientTls
from rmqkit.sentences import _

if TYPE_CHECKING:
    from rmqkit.admin.cluster.access import Access
    from rmqkit.admin.cluster.brokers import Brokers
    from rmqkit.admin.cluster.clients import Clients
    from rmqkit.admin.cluster.clusters import Clusters, NameServers
    from rmqkit.admin.cluster.groups import Groups, Offsets
    from rmqkit.admin.cluster.lite import Lite
    from rmqkit.admin.cluster.stores import Stores
    from rmqkit.admin.cluster.topics import Topics
    from rmqkit.admin.messages.filters import Filters
    from rmqkit.admin.messages.messages import Messages
    from rmqkit.admin.messages.waiting import Waiting
    from rmqkit.admin.replay.dead import Dead

__all__ = ["Admin", "AdminCalls", "Done", "Guard", "read_only"]

_NOUNS = {
    "clusters": ("cluster.clusters", "Clusters"),
    "topics": ("cluster.topics", "Topics"),
    "brokers": ("cluster.brokers", "Brokers"),
    "name_servers": ("cluster.clusters", "NameServers"),
    "groups": ("cluster.groups", "Groups"),
    "offsets": ("cluster.groups", "Offsets"),
    "lite": ("cluster.lite", "Lite"),
    "messages": ("messages.messages", "Messages"),
    "clients": ("cluster.clients", "Clients"),
    "dead": ("replay.dead", "Dead"),
    "access": ("cluster.access", "Access"),
    "waiting": ("messages.waiting", "Waiting"),
    "stores": ("cluster.stores", "Stores"),
    "filters": ("messages.filters", "Filters"),
}
"""The module and the class of each noun."""


class Admin:
    """A connection to a cluster, for administration. Use it as an async context manager, in one event loop.

    Args:
        name_servers: the addresses of the name servers, such as ``host:port;host:port``.
        timeout_ms: the timeout of each request.
        tls: the TLS settings of every connection; None: no encryption.
        credentials: the credentials that sign every request; None: no signature.
        guard: a function that is called before each request, such as `read_only`. Its exceptions reach the caller.
    """

    clusters: Clusters
    topics: Topics
    brokers: Brokers
    name_servers: NameServers
    groups: Groups
    offsets: Offsets
    lite: Lite
    messages: Messages
    clients: Clients
    dead: Dead
    access: Access
    waiting: Waiting
    stores: Stores
    filters: Filters

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
        self.calls = AdminCalls(
            name_servers, timeout_ms=timeout_ms, tls=tls, credentials=credentials, clock=clock, guard=guard
        )

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self.calls.remoting.close()

    def __getattr__(self, name: str) -> Any:
        """Create the operations of a noun when they are first used."""
        if name not in _NOUNS:
            raise AttributeError(_("Admin has no {name}: it has {nouns}", name=name, nouns=", ".join(_NOUNS)))
        module, of_noun = _NOUNS[name]
        noun = getattr(import_module(f"rmqkit.admin.{module}"), of_noun)(self.calls)
        setattr(self, name, noun)
        return noun
