"""The connected producers and consumers (``ProducerManager``, ``ConsumerManager``).

A heartbeat adds a client. A closed connection, UNREGISTER_CLIENT or 120 s without a heartbeat removes it. When the
members or subscriptions of a clustering group change, the broker sends a one-way NOTIFY_CONSUMER_IDS_CHANGED to every
member, and the members rebalance. When the broker has the subscriptions of a 5.x client, the client may send their
fingerprint instead (heartbeat V2).

`QueueLocks` has the locks for ordered consumption (``RebalanceLockManager``): one client of a group consumes a queue at
a time. A lock expires 60 s after its last request. Its owner renews it every 20 s.
Use this module only on the event loop. Source: behaviour.md §2.6, §2.7; remoting.md §9.3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.filters import FilterTable, PullFilter
from rmqkit.clock import Clock
from rmqkit.filter import TAG, codes_of, is_tag_type, subscription
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.schemas.clients import ConsumerData, ConsumerGroupRequest, MessageQueue, SubscriptionData
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import ROUND_SLICE_SECONDS, Slice

_COMPENSATED_MS = 600_000
BROADCASTING = "BROADCASTING"
CONSUME_ACTIVELY = "CONSUME_ACTIVELY"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One connected client in a group. ``user``: the signer of its last heartbeat, if signatures are required."""

    client_id: str
    language: str | None
    version: int
    seen_ms: float
    user: str | None = None


@dataclass(slots=True)
class Subscribed:
    """A group's subscription to one topic. ``tags``: the tag filter for the group's pulls; None for SQL92."""

    data: SubscriptionData
    tags: PullFilter | None


@dataclass(slots=True)
class ConsumerGroup:
    """A consumer group with online members. The newest heartbeat sets type, model and subscriptions."""

    name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    members: dict[Connection, Member] = field(default_factory=dict)
    subscriptions: dict[str, Subscribed] = field(default_factory=dict)

    @property
    def is_broadcasting(self) -> bool:
        return self.message_model == BROADCASTING

    def subscribe(self, wanted: Iterable[SubscriptionData]) -> bool:
        """Replace the subscriptions by the subscriptions in a heartbeat. Return True if a topic was added or
        removed."""
        changed = False
        topics: set[str] = set()
        for data in wanted:
            topics.add(data.topic)
            known = self.subscriptions.get(data.topic)
            # Use the subscription with the newest version: members of a group may differ during an upgrade.
            if known is None or data.sub_version > known.data.sub_version:
                changed = changed or known is None
                tags = PullFilter(codes_of(data)) if is_tag_type(data.expression_type) else None
                self.subscriptions[data.topic] = Subscribed(data, tags)
        for topic in self.subscriptions.keys() - topics:
            del self.subscriptions[topic]
            changed = True
        return changed


class ClientTable:
    """The producer and consumer groups with online members.
    ``filters``: the table in which the subscriptions of every group are registered, until the group is removed.

    Attributes:
        may_be_asked: returns True if a producer has the right to see messages of a topic. Any client can join any
            group, so membership alone is no permission.
    """

    def __init__(self, settings: BrokerSettings, clock: Clock, filters: FilterTable) -> None:
        self._settings = settings
        self._clock = clock
        self._filters = filters
        self._fingerprints: dict[str, int] = {}
        self._compensated: dict[tuple[str, str], SubscriptionData] = {}
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}
        self._producer_connections: dict[str, Connection] = {}
        self._consumes: dict[Connection, set[str]] = {}
        self._produces: dict[Connection, set[str]] = {}
        self._changed_groups: set[str] = set()
        self.may_be_asked: Callable[[Connection, Member, str], bool] = lambda connection, member, topic: True

    def consumers(self, group: str) -> ConsumerGroup | None:
        return self._consumers.get(group)

    def producers(self, group: str) -> dict[Connection, Member]:
        return self._producers.get(group, {})

    def producer_connection(self, client_id: str) -> Connection | None:
        """Return the connection of the producer with a client id, for replies to its requests."""
        return self._producer_connections.get(client_id)

    @property
    def all_consumers(self) -> Mapping[str, ConsumerGroup]:
        return self._consumers

    @property
    def all_producers(self) -> Mapping[str, Mapping[Connection, Member]]:
        return self._producers

    def group_count(self, connection: Connection) -> int:
        """Return the number of groups with a member on a connection."""
        return len(self._consumes.get(connection, ())) + len(self._produces.get(connection, ()))

    def groups_of(self, connection: Connection) -> set[str]:
        """Return the names of the groups with a member on a connection."""
        return self._consumes.get(connection, set()) | self._produces.get(connection, set())

    def subscribers(self, topic: str) -> set[str]:
        """Return the online consumer groups that subscribe to a topic."""
        return {name for name, group in self._consumers.items() if topic in group.subscriptions}

    def consumer_connection(self, group_name: str, client_id: str) -> Connection | None:
        group = self._consumers.get(group_name)
        members = group.members.items() if group is not None else ()
        return next((connection for connection, member in members if member.client_id == client_id), None)

    def needs_topics(self, group_name: str, fingerprint: int, *, has_topics: bool) -> bool:
        """Return True if a client has to send its subscriptions, because their fingerprint differs from the last one.

        In contrast to 5.4.0, also return True if the broker does not have the group's subscriptions: a client that was
        offline for a while does not know that the broker removed the group.
        """
        # Store one fingerprint per group: members with other subscriptions have to send them.
        known = self._fingerprints.get(group_name)
        self._fingerprints[group_name] = fingerprint
        group = self._consumers.get(group_name)
        is_lost = not has_topics and (group is None or not group.subscriptions)
        return is_lost or (known is not None and known != fingerprint)

    def register_consumer(
        self, connection: Connection, member: Member, data: ConsumerData, *, notify: bool, keeps_topics: bool = False
    ) -> bool:
        """Register the consumer that sent a heartbeat. Return True if members or topics of the group changed.
        ``keeps_topics``: True if the heartbeat has no subscriptions. Then the group's subscriptions do not change."""
        group = self._consumers.get(data.group_name)
        if group is None:
            group = ConsumerGroup(data.group_name, data.consume_type, data.message_model, data.consume_from_where)
            self._consumers[data.group_name] = group
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        known = group.members.get(connection)
        if known is not None and known.client_id != member.client_id:
            _log.error("client %s of %s now has the name %s", known.client_id, connection.peer, member.client_id)
        group.members[connection] = member
        self._consumes.setdefault(connection, set()).add(data.group_name)
        assert self._consumers[data.group_name] is group, "the group is in the table"
        changed = known is None
        if not keeps_topics:
            changed = group.subscribe(data.subscription_data_set) or changed
            self._filters.register(data.group_name, data.subscription_data_set)
        if changed and notify:
            self._notify(group)
        return changed

    def compensate(self, group: str, topic: str, expression: str | None, expression_type: str | None) -> None:
        """Record a subscription that a group sends only in its pulls. It is removed 10 minutes after the last pull."""
        data = self._compensated.get((group, topic))
        if data is None or data.sub_string != (expression or "*"):
            self._compensated[group, topic] = data = subscription(
                topic, expression, expression_type=expression_type or TAG
            )
        data.sub_version = self._clock.now_ms()

    def subscription(self, group_name: str, topic: str) -> SubscriptionData | None:
        """Return a group's subscription to a topic from its heartbeats, otherwise from its pulls."""
        group = self._consumers.get(group_name)
        subscribed = group.subscriptions.get(topic) if group is not None else None
        return self._compensated.get((group_name, topic)) if subscribed is None else subscribed.data

    def register_producer(self, connection: Connection, member: Member, group: str) -> None:
        """Register the producer that sent a heartbeat. Another user cannot take over the replies to its client id."""
        self._producers.setdefault(group, {})[connection] = member
        self._produces.setdefault(connection, set()).add(group)
        known = self._producer_connections.get(member.client_id, connection)
        if known is connection or self._user_of(known) in (None, member.user):
            self._producer_connections[member.client_id] = connection

    def _user_of(self, producer: Connection) -> str | None:
        group = next(iter(self._produces.get(producer, ())), None)
        return None if group is None else self._producers[group][producer].user

    def unregister_consumer(self, connection: Connection, group_name: str, *, notify: bool = True) -> None:
        group = self._consumers.get(group_name)
        if group is None or group.members.pop(connection, None) is None:
            return
        _discard(self._consumes, connection, group_name)
        # Remove an empty group: otherwise its filter would stay alive, and tools would show the group as online.
        if not group.members:
            del self._consumers[group_name]
            self._fingerprints.pop(group_name, None)
            self._filters.unregister(group_name)
        elif notify:
            self._notify(group)

    def unregister_producer(self, connection: Connection, group: str) -> None:
        members = self._producers.get(group, {})
        member = members.pop(connection, None)
        if member is None:
            return
        _discard(self._produces, connection, group)
        if not members:
            del self._producers[group]
        # Keep the entry of a client that reconnected: replies go to its new connection.
        is_known = self._producer_connections.get(member.client_id) is connection
        if is_known and connection not in self._produces:
            del self._producer_connections[member.client_id]

    def connection_closed(self, connection: Connection) -> None:
        """Remove all members on a connection."""
        for name in list(self._consumes.get(connection, ())):
            self.unregister_consumer(connection, name)
        for name in list(self._produces.get(connection, ())):
            self.unregister_producer(connection, name)
        assert connection not in self._consumes, "a closed connection is in no consumer group"
        assert connection not in self._produces, "a closed connection is in no producer group"

    def close_silent(self) -> None:
        """Close the connections of clients that sent no heartbeat for too long (``channelExpiredTimeout``)."""
        oldest_ms = self._clock.monotonic_ms() - self._settings.client_silent_ms_max
        tables = [group.members for group in self._consumers.values()] + list(self._producers.values())
        silent = {c for members in tables for c, member in members.items() if member.seen_ms < oldest_ms}
        for connection in silent:
            connection.close(f"no heartbeat for {self._settings.client_silent_ms_max} ms")
            # Remove the members now: a peer that does not read would hold its queues until the close is complete.
            self.connection_closed(connection)
        before_ms = self._clock.now_ms() - _COMPENSATED_MS
        for key in [key for key, data in self._compensated.items() if data.sub_version < before_ms]:
            del self._compensated[key]

    def notify_changes(self) -> None:
        """Notify the members of groups that changed since the last call (``realTimeNotifyConsumerChange`` false)."""
        changed, self._changed_groups = self._changed_groups, set()
        # Skip groups that no longer exist.
        for name in changed & self._consumers.keys():
            self._notify_members(self._consumers[name])

    def _notify(self, group: ConsumerGroup) -> None:
        if group.is_broadcasting or not self._settings.notify_consumers:
            return
        if self._settings.notify_at_once:
            self._notify_members(group)
        else:
            self._changed_groups.add(group.name)

    def _notify_members(self, group: ConsumerGroup) -> None:
        header = ConsumerGroupRequest(consumer_group=group.name)
        for connection in group.members:
            connection.send(request(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, header, one_way=True))


def _discard(table: dict[Connection, set[str]], connection: Connection, group: str) -> None:
    groups = table[connection]
    assert group in groups, "both tables have the group and the connection"
    groups.discard(group)
    if not groups:
        del table[connection]


# The lifetime of a lock that is not renewed.
LOCK_MS_MAX = 60_000


@dataclass(slots=True)
class _Lock:
    client_id: str
    renewed_ms: float


class QueueLocks:
    """The locks of queues. ``groups``: group → queue → the lock and its owner."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.groups: dict[str, dict[MessageQueue, _Lock]] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Lock queues for a client, unless another client holds a valid lock. Return the queues that the client holds
        now."""
        # Use monotonic time: a wall clock that is set forward would expire all locks, and two clients would consume one
        # queue.
        now_ms = self._clock.monotonic_ms()
        locks = self.groups.setdefault(group, {})
        granted: list[MessageQueue] = []
        for queue in queues:
            held = locks.get(queue)
            if held is None or held.client_id == client_id or _is_expired(held, now_ms):
                locks[queue] = _Lock(client_id, now_ms)
                granted.append(queue)
        assert all(locks[queue].client_id == client_id for queue in granted), "a queue has one owner"
        return granted

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        locks = self.groups.get(group, {})
        for queue in queues:
            held = locks.get(queue)
            if held is not None and held.client_id == client_id:
                del locks[queue]
        if not locks:
            self.groups.pop(group, None)

    async def drop_expired(self) -> None:
        """Remove the expired locks."""
        work = Slice(ROUND_SLICE_SECONDS)
        for group in list(self.groups):
            now_ms, locks = self._clock.monotonic_ms(), self.groups.get(group, {})
            for queue in [queue for queue, held in locks.items() if _is_expired(held, now_ms)]:
                del locks[queue]
            if not locks:
                self.groups.pop(group, None)
            await work.pause_if_over()

    def is_any_held(self, group: str) -> bool:
        """Return True if a group holds a lock that is not expired. Such a group consumes in order."""
        locks = self.groups.get(group)
        if not locks:
            return False
        now_ms = self._clock.monotonic_ms()
        return any(not _is_expired(held, now_ms) for held in locks.values())


def _is_expired(held: _Lock, now_ms: float) -> bool:
    return now_ms - held.renewed_ms > LOCK_MS_MAX
