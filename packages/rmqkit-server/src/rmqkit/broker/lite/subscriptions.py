"""Groups of lite topics, their clients, and which client subscribes to which lite topic.

A client of a lite group subscribes by itself: two members of a group may have different lite topics. Three models:

=========  ============================================================================================================
model      rule
=========  ============================================================================================================
shared     several clients may subscribe to a lite topic; each message goes to one of them, in order
exclusive  the newest subscriber takes a lite topic. The former subscriber is notified, and gets a *tombstone*: its
           regular `COMPLETE_ADD` does not bring the lite topic back until it has named it no more, or asks for it again
wildcard   the clients of the group share all lite topics of the parent
=========  ============================================================================================================

A lite topic is *dirty* for a client if it may have messages for the client's group. A dirty lite topic is a name in a
set, so memory is limited by the number of subscriptions. Use this module only on the event loop.
Source: lite.md §1, §2, §6.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rmqkit.broker.lite.batches import LiteBatch
from rmqkit.protocol.schemas.groups import LITE_BINDING, SubscriptionGroupConfig
from rmqkit.remoting.connection import Connection

__all__ = ["BINDING", "LiteClient", "LiteGroup", "is_exclusive", "is_wildcard"]

BINDING = LITE_BINDING


def is_exclusive(config: SubscriptionGroupConfig) -> bool:
    return (config.attributes or {}).get("lite.sub.model") == "Exclusive"


def is_wildcard(config: SubscriptionGroupConfig) -> bool:
    """Return True for a wildcard group. Any other text than ``false`` counts as true."""
    return (config.attributes or {}).get("lite.sub.wildcard", "false") not in ("", "false")


class LiteClient:
    """One client of a lite group.

    Attributes:
        connection: the connection of its newest request.
        names: the lite topics that it subscribes to.
        dirty: lite topics that may have messages for it, in the order in which they got them.
        tombstones: lite topics that another client of an exclusive group has taken.
        waiting: its pops that wait, oldest first.
        has_joined: whether a client of a wildcard group has requested all lite topics.
        accessed_ms: wall time of its newest subscription request. A pop does not count.
        consumed_ms: wall time of its newest pop that found messages, 0 without one.
    """

    __slots__ = tuple("accessed_ms client_id connection consumed_ms dirty has_joined names tombstones waiting".split())

    def __init__(self, client_id: str, connection: Connection) -> None:
        self.client_id = client_id
        self.connection = connection
        self.names: set[str] = set()
        self.dirty: dict[str, None] = {}
        self.tombstones: set[str] = set()
        self.waiting: dict[Any, None] = {}
        self.has_joined = False
        self.accessed_ms = 0
        self.consumed_ms = 0


class LiteGroup:
    """The clients of one lite group, and what they have received.

    Attributes:
        parent: the topic to which the group is bound.
        clients: the clients by id.
        batches: the batch that is out, by slot of the lite topic.
        dirty: for a wildcard group, the lite topics that may have messages.
        is_wildcard: whether its clients share all lite topics.
    """

    __slots__ = ("_owners", "batches", "clients", "dirty", "is_wildcard", "name", "parent")

    def __init__(self, name: str, parent: str, *, is_wildcard: bool) -> None:
        self.name = name
        self.parent = parent
        self.is_wildcard = is_wildcard
        self.clients: dict[str, LiteClient] = {}
        self.batches: dict[int, LiteBatch] = {}
        self.dirty: dict[str, None] = {}
        self._owners: dict[str, LiteClient | list[LiteClient]] = {}  # most lite topics have one subscriber

    def subscribers(self, name: str) -> Collection[LiteClient]:
        """Return the clients that get messages of a lite topic."""
        if self.is_wildcard:
            return self.clients.values()
        owners = self._owners.get(name)
        return () if owners is None else [owners] if isinstance(owners, LiteClient) else owners

    @property
    def subscription_count(self) -> int:
        """Number of pairs of a client and a lite topic."""
        return sum(len(client.names) for client in self.clients.values())

    def subscribe(self, client: LiteClient, name: str) -> None:
        """Add a lite topic to a client."""
        if name in client.names:
            return
        client.names.add(name)
        owners = self._owners.get(name)
        if owners is None:
            self._owners[name] = client
        elif isinstance(owners, LiteClient):
            self._owners[name] = [owners, client]
        else:
            owners.append(client)

    def unsubscribe(self, client: LiteClient, name: str) -> bool:
        """Remove a lite topic from a client. Return False if the client did not have it."""
        if name not in client.names:
            return False
        client.names.discard(name)
        client.dirty.pop(name, None)
        owners = self._owners[name]
        if isinstance(owners, list):
            owners.remove(client)
            if len(owners) == 1:
                self._owners[name] = owners[0]
        else:
            del self._owners[name]
        return True

    def remove_client(self, client: LiteClient) -> None:
        """Forget a client and its subscriptions."""
        for name in list(client.names):
            self.unsubscribe(client, name)
        self.clients.pop(client.client_id, None)

    def mark(self, name: str) -> Collection[LiteClient]:
        """Mark a lite topic as dirty. Return the clients that may be woken."""
        clients = self.subscribers(name)
        if self.is_wildcard:
            self.dirty[name] = None
            return clients
        for client in clients:
            client.dirty[name] = None
        return clients
