"""Which producers and consumers are connected (``ProducerManager``, ``ConsumerManager``).

Heartbeats fill the tables; a closed connection, a good-bye or 120 s of silence empties them. When the members or
subscriptions of a clustering group change, every member is told with a one-way NOTIFY_CONSUMER_IDS_CHANGED so that it
rebalances. Loop only. Source: behaviour.md §2.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rmqkit.clock import Clock
from rmqkit.filter.subscription import codes_of
from rmqkit.protocol.bodies.clients import ConsumerData, SubscriptionData
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.headers.clients import ConsumerGroupRequest
from rmqkit.remoting.connection import Connection

__all__ = ["BROADCASTING", "CLIENT_SILENT_MS_MAX", "ClientTable", "ConsumerGroup", "Member", "Subscribed"]

CLIENT_SILENT_MS_MAX = 120_000
BROADCASTING = "BROADCASTING"


@dataclass(slots=True)
class Member:
    """One connected client in a group."""

    client_id: str
    language: str | None
    version: int
    seen_ms: float


@dataclass(slots=True)
class Subscribed:
    """A group's subscription to one topic, with what pulls filter by worked out once."""

    data: SubscriptionData
    codes: frozenset[int] | None


@dataclass(slots=True)
class ConsumerGroup:
    """A consumer group with members online; the newest heartbeat decides type, model and subscriptions."""

    name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    members: dict[Connection, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscribed] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member gets every message."""
        return self.message_model == BROADCASTING

    def subscribe(self, wanted: Iterable[SubscriptionData]) -> bool:
        """Take over the subscriptions of a heartbeat; True when a topic came or went."""
        changed = False
        topics: set[str] = set()
        for data in wanted:
            topics.add(data.topic)
            known = self.subscriptions.get(data.topic)
            if known is None or data.sub_version > known.data.sub_version:
                changed = changed or known is None
                self.subscriptions[data.topic] = Subscribed(data, codes_of(data))
        for topic in self.subscriptions.keys() - topics:
            del self.subscriptions[topic]
            changed = True
        return changed


class ClientTable:
    """Producer and consumer groups with members online."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}

    def consumers(self, group: str) -> ConsumerGroup | None:
        """A consumer group with members online, or None."""
        return self._consumers.get(group)

    def producers(self, group: str) -> dict[Connection, Member]:
        """The producers of a group that are online."""
        return self._producers.get(group, {})

    def register_consumer(self, connection: Connection, member: Member, data: ConsumerData, *, notify: bool) -> bool:
        """Take in one consumer of a heartbeat; True when members or topics of the group changed."""
        group = self._consumers.get(data.group_name)
        if group is None:
            group = ConsumerGroup(data.group_name, data.consume_type, data.message_model, data.consume_from_where)
            self._consumers[data.group_name] = group
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        is_new = connection not in group.members
        group.members[connection] = member
        changed = group.subscribe(data.subscription_data_set) or is_new
        if changed and notify and not group.is_broadcasting:
            _notify(group)
        return changed

    def register_producer(self, connection: Connection, member: Member, group: str) -> None:
        """Take in one producer of a heartbeat."""
        self._producers.setdefault(group, {})[connection] = member

    def unregister_consumer(self, connection: Connection, group_name: str, *, notify: bool = True) -> None:
        """A consumer leaves a group; the others are told."""
        group = self._consumers.get(group_name)
        if group is None or group.members.pop(connection, None) is None:
            return
        if not group.members:
            del self._consumers[group_name]
        elif notify and not group.is_broadcasting:
            _notify(group)

    def unregister_producer(self, connection: Connection, group: str) -> None:
        """A producer leaves a group."""
        members = self._producers.get(group)
        if members is not None and members.pop(connection, None) is not None and not members:
            del self._producers[group]

    def connection_closed(self, connection: Connection) -> None:
        """Forget everything that was registered over a connection."""
        for name in [name for name, group in self._consumers.items() if connection in group.members]:
            self.unregister_consumer(connection, name)
        for name in [name for name, members in self._producers.items() if connection in members]:
            self.unregister_producer(connection, name)

    def close_silent(self) -> None:
        """Close the connections of clients that sent no heartbeat for 120 s."""
        oldest_ms = self._clock.monotonic_ms() - CLIENT_SILENT_MS_MAX
        tables = [group.members for group in self._consumers.values()] + list(self._producers.values())
        silent = {c for members in tables for c, member in members.items() if member.seen_ms < oldest_ms}
        for connection in silent:
            connection.close(f"no heartbeat for {CLIENT_SILENT_MS_MAX} ms")
            self.connection_closed(connection)


def _notify(group: ConsumerGroup) -> None:
    header = ConsumerGroupRequest(consumer_group=group.name)
    for connection in group.members:
        connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, one_way=True))
