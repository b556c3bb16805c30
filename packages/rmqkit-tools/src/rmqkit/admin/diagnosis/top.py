"""The load of a cluster: rates, lags and members, from two samples (``rmq top``).

`Sampler.look` takes a sample and returns a `Snapshot`. `compare`, a pure function, makes a `Report` from two snapshots.

======================  ==============================  ==================================================
figures                 request                         sent to
======================  ==============================  ==================================================
topics, their queues    GET_ALL_TOPIC_CONFIG            every master
ends of queues          GET_TOPIC_STATS_INFO            the masters of each topic
offsets of groups       GET_BROKER_CONSUME_STATS        every master
age of a lag            QUERY_CONSUME_TIME_SPAN         the masters where a group is behind
members                 GET_CONSUMER_CONNECTION_LIST    every master, for each group
load and disk           GET_BROKER_RUNTIME_INFO         every broker, slaves too
======================  ==============================  ==================================================

- Rates are differences of the end offsets of queues, and of the offsets that groups have committed. Clients commit
  every few seconds, so rates over a shorter time vary.
- A rate includes a queue if its broker answered in both samples. A new queue counts from 0. The first offset of a group
  in a queue does not count as consumption, because the offset at which the group began is not known.
- An offset that moved backwards (a reset, or a topic that was deleted and created again) counts as 0.
- A broker that does not answer has a row with the reason. Its messages are missing from the other rows.

At most `_ASKED_AT_ONCE` requests run at the same time. Source: behaviour.md §5.4, §9.9; remoting.md §6.4.8.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterable
from typing import TypeVar

from msgspec import Struct, field

from rmqkit.admin import Admin
from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.errors import PeerRefused, RmqError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.names import (
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    SYSTEM_GROUPS,
    is_of_applications,
)
from rmqkit.protocol.schemas.clients import ConsumerConnection, ConsumerGroupRequest, MessageQueue
from rmqkit.protocol.schemas.offsets import (
    AllConsumeStatsRequest,
    ConsumeStatsList,
    ConsumeTimeSpans,
    TimeSpanRequest,
    TopicStatsTable,
)
from rmqkit.protocol.schemas.topics import TopicConfigTable, TopicRequest

__all__ = ["GroupRow", "QueueEnds", "QueueOffset", "Report", "Sampler", "Snapshot", "TopicRow", "compare"]

T = TypeVar("T")

_ASKED_AT_ONCE = 16
_GONE = (ResponseCode.TOPIC_NOT_EXIST, ResponseCode.SYSTEM_ERROR)
"""The codes that brokers return for a topic that was just deleted."""


class QueueEnds(Struct, frozen=True):
    """The first stored offset of a queue, and its end."""

    first: int
    end: int


class QueueOffset(Struct, frozen=True):
    """The offset of a group in a queue, 0 if the group has no offset, and the end of the queue at the same time."""

    offset: int
    end: int


class Snapshot(Struct, frozen=True, kw_only=True):
    """A cluster at one moment.

    Attributes:
        monotonic_ms, now_ms: the time of the sample, by the monotonic clock for spans and by the wall clock for
            display.
        answered: names of the brokers that answered every request. Data of other brokers may be missing.
        queues: the queues of all topics.
        groups: the offsets by group and queue.
        ages_ms: the age of the oldest message that is not consumed, by group and topic. Groups without a lag are
            missing.
        members: the number of online clients, by group.
        servers: names of clusters and brokers, which are also names of topics.
    """

    monotonic_ms: float
    now_ms: int
    answered: frozenset[str] = frozenset()
    brokers: list[BrokerRow] = field(default_factory=list)
    queues: dict[MessageQueue, QueueEnds] = field(default_factory=dict)
    groups: dict[tuple[str, MessageQueue], QueueOffset] = field(default_factory=dict)
    ages_ms: dict[tuple[str, str], int] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    servers: frozenset[str] = frozenset()


class TopicRow(Struct, rename="camel", kw_only=True):
    """A topic with its rates, in messages per second: stored, and consumed by all its groups. A rate is None if no
    queue could be compared. ``stored``: the number of stored messages. ``groups``: the number of groups with
    offsets."""

    topic: str
    in_per_second: float | None
    out_per_second: float | None
    stored: int
    groups: int


class GroupRow(Struct, rename="camel", kw_only=True):
    """A group on a topic: its rate in messages per second, its lag, the age of the oldest message of the lag in ms, and
    the number of online clients. The age is None if there is no lag, or if no broker reported the age."""

    group: str
    topic: str
    out_per_second: float | None
    lag: int
    age_ms: int | None
    members: int


class Report(Struct, rename="camel", kw_only=True):
    """The difference of two snapshots. Times are in ms, and rows are sorted by name."""

    time_ms: int
    span_ms: int
    brokers: list[BrokerRow]
    topics: list[TopicRow]
    groups: list[GroupRow]


def compare(before: Snapshot, after: Snapshot, *, system: bool = False) -> Report:
    """Return the rates between two snapshots, with the other values of the later snapshot. Retry topics are included if
    their group has a lag in them. ``system``: include topics that no application created."""
    span_ms = after.monotonic_ms - before.monotonic_ms
    assert span_ms >= 0, "the first snapshot is not later than the second"
    stored, consumed = _Counts(span_ms), _Counts(span_ms)
    row_of: dict[str, TopicRow] = {}
    for queue, ends in after.queues.items():
        row = row_of.setdefault(queue.topic, TopicRow(topic=queue.topic, **_NOTHING, stored=0, groups=0))
        row.stored += max(0, ends.end - ends.first)
        if queue.broker_name in before.answered:
            known = before.queues.get(queue)
            stored.add(queue.topic, ends.end - (known.end if known is not None else 0))
    group_rows: dict[tuple[str, str], GroupRow] = {}
    for (group, queue), place in after.groups.items():
        key = group, queue.topic
        fresh = GroupRow(group=group, topic=queue.topic, out_per_second=None, lag=0, age_ms=None, members=0)
        group_row = group_rows.setdefault(key, fresh)
        group_row.lag += max(0, place.end - place.offset)
        was = before.groups.get((group, queue))
        if queue.broker_name in before.answered:
            consumed.add(key, place.offset - was.offset if was is not None and was.offset else 0)
    for (group, topic), group_row in group_rows.items():
        group_row.out_per_second = consumed.rate((group, topic))
        group_row.age_ms = after.ages_ms.get((group, topic)) if group_row.lag else None
        group_row.members = after.members.get(group, 0)
        if topic in row_of:
            row_of[topic].groups += 1
            if group_row.out_per_second is not None:
                row_of[topic].out_per_second = (row_of[topic].out_per_second or 0.0) + group_row.out_per_second
    for topic, row in row_of.items():
        row.in_per_second = stored.rate(topic)
    return Report(
        time_ms=after.now_ms,
        span_ms=round(span_ms),
        brokers=after.brokers,
        topics=[row for name, row in sorted(row_of.items()) if system or is_of_applications(name, after.servers)],
        groups=[row for _, row in sorted(group_rows.items()) if system or _is_shown(row, after.servers)],
    )


_NOTHING: dict[str, None] = {"in_per_second": None, "out_per_second": None}

_Key = str | tuple[str, str]


class _Counts:
    """The numbers of messages between two snapshots."""

    def __init__(self, span_ms: float) -> None:
        self._span_ms = span_ms
        self._counts: dict[_Key, int] = {}

    def add(self, key: _Key, count: int) -> None:
        self._counts[key] = self._counts.get(key, 0) + max(0, count)

    def rate(self, key: _Key) -> float | None:
        """Return the messages per second, or None if no queue could be compared."""
        return self._counts[key] * 1000 / self._span_ms if key in self._counts and self._span_ms else None


def _is_shown(row: GroupRow, servers: Collection[str]) -> bool:
    if row.topic.startswith(RETRY_PREFIX):
        return row.lag > 0
    return is_of_applications(row.topic, servers)


class Sampler:
    """A sampler of a cluster. Use it only on the event loop."""

    def __init__(self, admin: Admin) -> None:
        self._calls = admin.calls
        self._clusters = admin.clusters
        self._turns = asyncio.Semaphore(_ASKED_AT_ONCE)

    async def look(self) -> Snapshot:
        """Take one sample. Raises RmqError: no name server answers."""
        self._calls.forget()
        info = await self._calls.cluster()
        masters = await self._calls.masters()
        look = _Look(self._calls.clock.monotonic_ms(), frozenset(masters))
        looks = asyncio.gather(*(self._look_at(name, address, look) for name, address in masters.items()))
        brokers, _ = await asyncio.gather(self._clusters.brokers(), looks)
        behind: dict[tuple[str, str], set[str]] = {}
        for (group, queue), place in look.groups.items():
            if place.end > place.offset:
                behind.setdefault((group, queue.topic), set()).add(queue.broker_name)
        ages = [
            self._age(masters[broker], key, look)
            for key, names in behind.items()
            for broker in names
            if broker in masters
        ]
        members = [
            self._members(name, address, group, look) for group in look.known for name, address in masters.items()
        ]
        await asyncio.gather(*ages, *members)
        return Snapshot(
            monotonic_ms=look.monotonic_ms,
            now_ms=self._calls.clock.now_ms(),
            answered=frozenset(look.answered),
            brokers=brokers,
            queues=look.queues,
            groups=look.groups,
            ages_ms=look.ages_ms,
            members={group: len(clients) for group, clients in look.clients.items()},
            servers=frozenset((*info.cluster_addr_table, *info.broker_addr_table)),
        )

    async def _look_at(self, name: str, address: str, look: _Look) -> None:
        """Add the topics and groups of a master to the sample."""
        code = RequestCode.GET_BROKER_CONSUME_STATS
        try:
            topics, stats = await asyncio.gather(
                self._one(self._calls.fetch(TopicConfigTable, address, RequestCode.GET_ALL_TOPIC_CONFIG)),
                self._one(self._calls.fetch(ConsumeStatsList, address, code, AllConsumeStatsRequest(False))),
            )
            tables = await asyncio.gather(*(self._ends(address, topic) for topic in topics.topic_config_table))
        except RmqError:  # the row of this broker contains the reason
            look.answered.discard(name)
            return
        for table in tables:
            for queue, offsets in table.offset_table.items():
                look.queues[queue] = QueueEnds(offsets.min_offset, offsets.max_offset)
        for by_group in stats.consume_stats_list:
            for group, several in by_group.items():
                if group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX):
                    continue
                look.known.add(group)
                for one in several:
                    for queue, place in one.offset_table.items():
                        look.groups[group, queue] = QueueOffset(place.consumer_offset, place.broker_offset)

    async def _ends(self, address: str, topic: str) -> TopicStatsTable:
        code = RequestCode.GET_TOPIC_STATS_INFO
        try:
            return await self._one(self._calls.fetch(TopicStatsTable, address, code, TopicRequest(topic)))
        except PeerRefused as error:
            if error.code not in _GONE:
                raise
            return TopicStatsTable()

    async def _age(self, address: str, key: tuple[str, str], look: _Look) -> None:
        """Add the age of a group's lag on a topic at a broker. If the request fails, the age is missing."""
        (group, topic), code = key, RequestCode.QUERY_CONSUME_TIME_SPAN
        try:
            spans = await self._one(self._calls.fetch(ConsumeTimeSpans, address, code, TimeSpanRequest(topic, group)))
        except RmqError:
            return
        late_ms = max((span.delay_time for span in spans.consume_time_span_set), default=0)
        if late_ms > 0:
            look.ages_ms[key] = max(late_ms, look.ages_ms.get(key, 0))

    async def _members(self, name: str, address: str, group: str, look: _Look) -> None:
        """Add the clients of a group at a broker, if the broker answered. An offline group has no clients."""
        if name not in look.answered:
            return
        code = RequestCode.GET_CONSUMER_CONNECTION_LIST
        try:
            found = await self._one(self._calls.fetch(ConsumerConnection, address, code, ConsumerGroupRequest(group)))
        except RmqError:
            return
        look.clients.setdefault(group, set()).update(one.client_id for one in found.connection_set)

    async def _one(self, asking: Awaitable[T]) -> T:
        async with self._turns:
            return await asking


class _Look:
    """The data of an unfinished sample."""

    def __init__(self, monotonic_ms: float, masters: Iterable[str]) -> None:
        self.monotonic_ms = monotonic_ms
        self.answered = set(masters)
        self.known: set[str] = set()
        self.queues: dict[MessageQueue, QueueEnds] = {}
        self.groups: dict[tuple[str, MessageQueue], QueueOffset] = {}
        self.ages_ms: dict[tuple[str, str], int] = {}
        self.clients: dict[str, set[str]] = {}
