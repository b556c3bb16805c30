"""Consumer groups: their configuration, progress and offsets (``updateSubGroup``, ``resetOffsetByTime`` …).

Each broker stores its own part of a group: a configuration and offsets. Code 201 returns all configurations. Code 352
returns one configuration, but would create the group at Apache's brokers. The lag (*diff*) of a group on a queue is the
end of the queue minus the committed offset. Messages *in flight* are pulled and not yet committed.

A group can be moved to a time, to the end, to an offset, or to the offsets of another group
(``skipAccumulatedMessage``, ``cloneGroupOffset``). The broker does the reset (code 222). A 5.x broker moves the group
itself, and ignores the offsets that clients commit before their next pull. An older broker notifies the clients, and
refuses the reset if no client is online. In that case the offsets are written one by one, as Java's tool does.
Source: behaviour.md §5.2–5.4, §9.9; remoting.md §6.4.8, §6.4.9, §10.6.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.cluster.brokers import GroupProgress as BrokerGroupProgress
from rmqkit.admin.cluster.clients import Clients
from rmqkit.errors import ClientError, PeerRefused, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode, version_name
from rmqkit.protocol.names import SYSTEM_GROUPS, dlq_topic, retry_topic
from rmqkit.protocol.schemas.clients import ConsumerConnection, ConsumerGroupRequest, MessageQueue
from rmqkit.protocol.schemas.groups import DeleteGroupRequest, SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import (
    ConsumeOffsets,
    ConsumeStats,
    ConsumeStatsRequest,
    ResetOffsetBody,
    ResetOffsetRequest,
    TopicStatsTable,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.schemas.pop import MessageRequestMode
from rmqkit.protocol.schemas.topics import DeleteTopicRequest, TopicConfigTable, TopicRequest
from rmqkit.sentences import _, marked
from rmqkit.settings import parse_properties

__all__ = [
    "END_MS",
    "GroupLag",
    "GroupProgress",
    "GroupSummary",
    "Groups",
    "Metadata",
    "Moved",
    "Movement",
    "Offsets",
    "QueueMove",
    "QueueProgress",
    "lags",
    "movements",
]


_CREATE_GROUP = marked("make it with: rmq group create {group}")
_GROUPS_AT_ONCE = 16
_ANY_QUEUE = -1
"""The queue id in the reports of popping clients for a broker. All these clients share all queues of the broker."""


class QueueProgress(Struct, rename="camel", kw_only=True):
    """A group's progress in one queue. ``last_timestamp`` is the store time of the last consumed message, in ms."""

    topic: str
    broker_name: str
    queue_id: int
    broker_offset: int
    consumer_offset: int
    client: str | None = None
    diff: int
    inflight: int
    last_timestamp: int


class GroupProgress(Struct, rename="camel", kw_only=True):
    """A group's progress in all its queues, with the sums. ``consume_tps`` is in messages per second."""

    group: str
    queues: list[QueueProgress]
    consume_tps: float
    diff_total: int
    inflight_total: int


class GroupSummary(Struct, rename="camel", kw_only=True):
    """A summary of a group. ``count`` is the number of online clients. Without clients, version and type are empty."""

    group: str
    count: int = 0
    version: str = ""
    consume_type: str = ""
    message_model: str = ""
    consume_tps: float = 0.0
    diff_total: int = 0


class GroupLag(Struct, rename="camel", kw_only=True):
    """The lag of a group on one topic, over all brokers.

    Attributes:
        count: the number of messages that are not consumed yet.
        behind_since_ms: the store time of the last consumed message in a queue with a lag (the oldest of all these
            queues); None if no queue has a lag, or if the brokers do not know the time.
        queues: the number of queues in which the group has offsets.
        end: the sum of the end offsets of these queues. It grows by one with each message that is stored in the topic.
    """

    group: str
    topic: str
    count: int = 0
    behind_since_ms: int | None = None
    queues: int = 0
    end: int = 0


def lags(stats: Iterable[BrokerGroupProgress]) -> dict[tuple[str, str], GroupLag]:
    """Return the lags by group and topic, from the rows of all brokers (`Brokers.consume_stats`). This function is
    pure."""
    found: dict[tuple[str, str], GroupLag] = {}
    for row in stats:
        key = row.group, row.topic
        lag = found.get(key)
        if lag is None:
            lag = found[key] = GroupLag(group=row.group, topic=row.topic)
        behind = max(0, row.diff)
        lag.count += behind
        lag.queues += 1
        lag.end += row.broker_offset
        if behind and row.last_timestamp > 0:
            lag.behind_since_ms = min(row.last_timestamp, lag.behind_since_ms or row.last_timestamp)
    return found


class Movement(Struct, kw_only=True):
    """The changes of a group between two samples, over all its queues.

    Attributes:
        late: the number of messages that were stored at the first sample and are not consumed at the second one.
        consumed: the number of messages by which the committed offsets rose.
        grew: the number of messages by which the lag rose; negative if the lag fell.
        lag: the lag at the second sample.
    """

    late: int = 0
    consumed: int = 0
    grew: int = 0
    lag: int = 0


def movements(before: Iterable[BrokerGroupProgress], now: Iterable[BrokerGroupProgress]) -> dict[str, Movement]:
    """Return the changes between two samples of `Brokers.consume_stats`, by group. A queue in only one sample does not
    change the sums. This function is pure."""
    places = {(row.group, row.topic, row.broker_name, row.queue_id): row for row in before}
    found: dict[str, Movement] = {}
    for row in now:
        old = places.get((row.group, row.topic, row.broker_name, row.queue_id))
        moved = found.setdefault(row.group, Movement())
        moved.lag += max(0, row.diff)
        if old is not None:
            moved.late += max(0, old.broker_offset - row.consumer_offset)
            moved.consumed += max(0, row.consumer_offset - old.consumer_offset)
            moved.grew += max(0, row.diff) - max(0, old.diff)
    return found


class Metadata(Struct, rename="camel"):
    """The groups and topics of a broker with all their settings (``exportMetadata``)."""

    topic_config_table: dict[str, Any]
    subscription_group_table: dict[str, SubscriptionGroupConfig]


class Groups:
    """Operations on consumer groups. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def tables(
        self, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, dict[str, SubscriptionGroupConfig]]:
        """Return the configurations of all groups at each master, by broker name and group."""
        masters = await self._calls.masters(cluster, broker)
        tables = await self._calls.fan_out(masters.values(), self.table)
        return {name: tables[address] for name, address in masters.items()}

    async def table(self, address: str) -> dict[str, SubscriptionGroupConfig]:
        """Return the configurations of all groups at one broker, by group."""
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        return (await self._calls.fetch(SubscriptionGroupTable, address, code)).subscription_group_table

    async def configs(
        self, group: str, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, SubscriptionGroupConfig]:
        """Return the configuration of a group by broker name. Raises UnknownName: no broker has the group."""
        tables = await self.tables(broker, cluster)
        found = {name: table[group] for name, table in tables.items() if group in table}
        if not found:
            known = {name for table in tables.values() for name in table}.difference(SYSTEM_GROUPS)
            raise UnknownName(
                "group",
                group,
                _("broker {tables}", tables=", ".join(tables)),
                known,
                _(_CREATE_GROUP, group=shlex.quote(group)),
            )
        return found

    async def update(
        self, group: str, changes: Mapping[str, Any], broker: str | None = None, cluster: str | None = None
    ) -> dict[str, SubscriptionGroupConfig]:
        """Create a group, or change some of its fields, at each broker. Return the new configurations by broker name.
        In ``attributes``, a key ``+name`` adds an attribute with a value, and a key ``-name`` removes one."""
        masters = await self._calls.targets(broker, cluster)

        async def update(address: str) -> None:
            known = (await self.table(address)).get(group) or SubscriptionGroupConfig(group_name=group)
            # Attributes are sent as changes, with + or - before each name. Brokers refuse names without a sign.
            wanted = replace(known, **{"attributes": {}, **changes})
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            await self._calls.ask(address, code, body=msgspec.json.encode(wanted))

        await self._calls.fan_out(masters.values(), update)
        return await self.configs(group, broker, cluster)

    async def delete(
        self, group: str, broker: str | None = None, cluster: str | None = None, *, keep_offsets: bool = False
    ) -> list[str]:
        """Delete a group and return the names of the brokers. Without ``broker``, also delete the retry topic and the
        dead-letter topic of the group.
        Raises UnknownName: none of the brokers has the group."""
        await self.configs(group, broker, cluster)
        masters = await self._calls.targets(broker, cluster)
        header = DeleteGroupRequest(group, not keep_offsets)
        code = RequestCode.DELETE_SUBSCRIPTIONGROUP
        await self._calls.fan_out(masters.values(), lambda address: self._calls.ask(address, code, header))
        if broker is None:
            for topic in (retry_topic(group), dlq_topic(group)):
                await self._delete_topic(topic, masters)
        return list(masters)

    async def set_mode(
        self, group: str, topic: str, mode: str, share_count: int, broker: str | None = None, cluster: str | None = None
    ) -> list[str]:
        """Set the mode of a group on a topic, pop or pull. Return the names of the brokers.
        Raises PeerRefused: the allocation of queues by brokers is switched off."""
        masters = await self._calls.targets(broker, cluster)
        wanted = MessageRequestMode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share_count)
        await self._calls.fan_out(masters.values(), lambda address: self._calls.set_request_mode(address, wanted))
        return list(masters)

    async def progress(
        self, group: str, topic: str = "", cluster: str | None = None, *, clients: bool = False
    ) -> GroupProgress:
        """Return the progress of a group on all its topics, or on one topic. ``clients``: add the client of each queue.
        Raises UnknownName: no broker has the group or its offsets."""
        stats = await self._stats(group, topic, cluster)
        if not any(place.consumer_offset for one in stats for place in one.offset_table.values()):
            await self.configs(group, cluster=cluster)  # if a topic is given, brokers also answer for unknown groups
        owners = await self._owners(group) if clients else {}
        found = (item for one in stats for item in one.offset_table.items())
        queues = [
            _queue_progress(queue, offsets, owners.get(queue) or owners.get(replace(queue, queue_id=_ANY_QUEUE)))
            for queue, offsets in sorted(found, key=itemgetter(0))
        ]
        return GroupProgress(
            group=group,
            queues=queues,
            consume_tps=sum(one.consume_tps for one in stats),
            diff_total=sum(queue.diff for queue in queues),
            inflight_total=sum(queue.inflight for queue in queues),
        )

    async def summaries(self, cluster: str | None = None) -> list[GroupSummary]:
        """Return all groups except system groups, the largest lag first."""
        names = {name for table in (await self.tables(cluster=cluster)).values() for name in table}
        turns = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def summary(group: str) -> GroupSummary:
            async with turns:
                return await self._summary(group, cluster)

        found = await asyncio.gather(*(summary(group) for group in sorted(names.difference(SYSTEM_GROUPS))))
        return sorted(found, key=lambda row: (-row.diff_total, row.group))

    async def metadata(self, broker: str | None = None, cluster: str | None = None) -> dict[str, Metadata]:
        """Return topics and groups with all their settings, by broker name."""
        masters = await self._calls.targets(broker, cluster)

        async def both(address: str) -> Metadata:
            topics = await self._calls.fetch(TopicConfigTable, address, RequestCode.GET_ALL_TOPIC_CONFIG)
            return Metadata(dict(topics.topic_config_table), await self.table(address))

        found = await self._calls.fan_out(masters.values(), both)
        return {name: found[address] for name, address in masters.items()}

    # -- inside

    async def _stats(self, group: str, topic: str, cluster: str | None) -> list[ConsumeStats]:
        masters = await (self._calls.masters_of_topic(topic) if topic else self._calls.masters(cluster))
        header = ConsumeStatsRequest(group, topic or None)
        code = RequestCode.GET_CONSUME_STATS
        answers = await self._calls.fan_out(
            masters.values(), lambda address: self._calls.fetch(ConsumeStats, address, code, header)
        )
        return list(answers.values())

    async def _owners(self, group: str) -> dict[MessageQueue, str]:
        """Return the clients that have a queue, by queue. The result is empty if the group is offline."""
        try:
            running = await Clients(self._calls).running(group)
        except PeerRefused:
            return {}
        owners: dict[MessageQueue, list[str]] = {}
        for client, info in running.items():
            for queue in (*info.mq_table, *info.mq_pop_table) if info is not None else ():
                owners.setdefault(queue, []).append(client)
        return {queue: " ".join(clients) for queue, clients in owners.items()}

    async def _summary(self, group: str, cluster: str | None) -> GroupSummary:
        stats = await self._stats(group, "", cluster)
        row = GroupSummary(
            group=group,
            consume_tps=sum(one.consume_tps for one in stats),
            diff_total=sum(
                offsets.broker_offset - offsets.consumer_offset
                for one in stats
                for offsets in one.offset_table.values()
            ),
        )
        try:
            online: ConsumerConnection = await Clients(self._calls).consumers(group)
        except PeerRefused as error:
            if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                raise
            return row
        row.count = len(online.connection_set)
        row.version = version_name(min((one.version for one in online.connection_set), default=0))
        row.consume_type, row.message_model = online.consume_type or "", online.message_model or ""
        return row

    async def _delete_topic(self, topic: str, masters: Mapping[str, str]) -> None:
        """Delete a topic at brokers and name servers. No server refuses the deletion of a topic that does not exist."""
        await self._calls.fan_out(
            masters.values(),
            lambda address: self._calls.ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic)),
        )
        await self._calls.fan_out(
            self._calls.name_servers,
            lambda address: self._calls.ask(address, RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicRequest(topic)),
        )


def _queue_progress(queue: MessageQueue, offsets: ConsumeOffsets, client: str | None) -> QueueProgress:
    return QueueProgress(
        topic=queue.topic,
        broker_name=queue.broker_name,
        queue_id=queue.queue_id,
        broker_offset=offsets.broker_offset,
        consumer_offset=offsets.consumer_offset,
        client=client,
        diff=offsets.broker_offset - offsets.consumer_offset,
        inflight=max(0, (offsets.pull_offset or 0) - offsets.consumer_offset),
        last_timestamp=offsets.last_timestamp,
    )


END_MS = -1
"""The value in place of a time that stands for the end of each queue."""

_EVERY_QUEUE = -1


class Moved(Struct, rename="camel"):
    """The new offset of a group in a queue."""

    topic: str
    broker_name: str
    queue_id: int
    offset: int


class QueueMove(Struct, rename="camel", kw_only=True):
    """The effect of a move of a group's offset in one queue.

    Attributes:
        now: the offset before the move; None if the group has no offset in the queue.
        then: the offset after the move.
        skipped: the number of messages that the group would never get.
        again: the number of messages that the group would get again.
        note: a remark, such as an offset that the queue does not have; or empty.
    """

    topic: str
    broker_name: str
    queue_id: int
    now: int | None
    then: int
    skipped: int = 0
    again: int = 0
    note: str = ""


class Offsets:
    """Operations on the offsets of groups. Each raises the errors of `AdminCalls`."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def reset(
        self,
        group: str,
        topic: str,
        timestamp_ms: int,
        *,
        broker: str | None = None,
        queue_id: int | None = None,
        offset: int | None = None,
        is_forced: bool = True,
    ) -> list[Moved]:
        """Move a group to the first message that was stored at or after a time (`END_MS`: to the end of each queue).
        With ``queue_id`` and ``offset``, move the group in one queue of a broker to an offset. Without ``is_forced``,
        brokers that delegate the reset to clients move no queue forward.
        Raises UnknownName: there is no such topic. Raises PeerRefused: there is no such group, or the queue does not
        have the offset.
        Raises ClientError: the broker cannot move a single queue while the group is online."""
        masters = await (self._calls.masters_of_topic(topic) if broker is None else self._calls.masters(broker=broker))
        header = ResetOffsetRequest(
            topic=topic,
            group=group,
            timestamp=timestamp_ms,
            is_force=is_forced,
            queue_id=_EVERY_QUEUE if queue_id is None else queue_id,
            offset=offset,
        )

        async def move(address: str) -> dict[MessageQueue, int]:
            code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
            if queue_id is not None:
                await self._check_moves_one(address, group)
            try:
                return (await self._calls.fetch(ResetOffsetBody, address, code, header)).offset_table
            except PeerRefused as error:
                if error.code != ResponseCode.CONSUMER_NOT_ONLINE:
                    raise
                return await self._rewrite(address, header)

        return _rows(await self._calls.fan_out(masters.values(), move))

    async def preview(
        self,
        group: str,
        topic: str,
        timestamp_ms: int = END_MS,
        *,
        broker: str | None = None,
        queue_id: int | None = None,
        offset: int | None = None,
        is_forced: bool = True,
        source: str | None = None,
    ) -> list[QueueMove]:
        """Return the moves that `reset` would make with the same arguments, or `clone` if there is a ``source``.
        No group is moved.

        Raises UnknownName: there is no such topic or group, or the source has no offsets on the topic.
        """
        await Groups(self._calls).configs(group)
        masters = await (self._calls.masters_of_topic(topic) if broker is None else self._calls.masters(broker=broker))
        header = ResetOffsetRequest(
            topic=topic, group=group, timestamp=timestamp_ms, is_force=is_forced, queue_id=_EVERY_QUEUE, offset=offset
        )

        async def look(address: str) -> list[QueueMove]:
            code = RequestCode.GET_TOPIC_STATS_INFO
            table = (await self._calls.fetch(TopicStatsTable, address, code, TopicRequest(topic))).offset_table
            moves = []
            for queue, has in sorted(table.items(), key=itemgetter(0)):
                if queue_id in (None, queue.queue_id):
                    now = await self._committed(address, group, queue)
                    if source is not None:
                        then = await self._committed(address, source, queue)
                    else:
                        then = has.max_offset if timestamp_ms < 0 and offset is None else None
                        then = await self._target(address, queue, header) if then is None else then
                    if then is not None:
                        then = then if is_forced or now is None else min(now, then)
                        moves.append(_move(queue, now, then, has.min_offset, has.max_offset))
            return moves

        found = await self._calls.fan_out(masters.values(), look)
        moves = [move for some in found.values() for move in some]
        if not moves:
            wanted = (
                _("queue {queue}", queue=queue_id) if source is None else _("offset of group {source}", source=source)
            )
            raise UnknownName(
                "place",
                wanted,
                _("topic {topic}", topic=topic),
                remedy=_("look with: rmq group progress {group}", group=shlex.quote(group)),
            )
        return moves

    async def skip(self, group: str, topic: str) -> list[Moved]:
        """Move a group to the end of each queue. Raises the errors of `reset`."""
        return await self.reset(group, topic, END_MS)

    async def clone(self, source: str, target: str, topic: str) -> list[Moved]:
        """Copy the offsets of a group on a topic to another group.
        Raises UnknownName: there is no such topic, or the source has no offsets on the topic.
        Raises PeerRefused: a broker does not know the target."""
        masters = await self._calls.masters_of_topic(topic)

        async def copy(address: str) -> dict[MessageQueue, int]:
            moved: dict[MessageQueue, int] = {}
            for queue in await self._offsets(address, source, topic):
                offset = await self._committed(address, source, queue)
                if offset is not None:
                    moved[queue] = offset
                    await self._put(address, target, queue, offset)
            return moved

        rows = _rows(await self._calls.fan_out(masters.values(), copy))
        if not rows:
            remedy = _("see the offsets that it has: rmq group progress {group}", group=shlex.quote(source))
            raise UnknownName(_("offset of group"), source, _("topic {topic}", topic=topic), remedy=remedy)
        return rows

    async def _check_moves_one(self, address: str, group: str) -> None:
        """Check that a broker can reset a single queue. A broker that delegates resets to its clients ignores the queue
        and resets all queues by time. Raises ClientError: the broker delegates resets, and clients are online."""
        try:
            settings = parse_properties(
                (await self._calls.ask(address, RequestCode.GET_BROKER_CONFIG)).payload.decode()
            )
        except PeerRefused:  # an rmqkit broker inside a program does not answer this request
            return
        if settings.get("useServerSideResetOffset") == "true":
            return
        try:
            await self._calls.ask(address, RequestCode.GET_CONSUMER_CONNECTION_LIST, ConsumerGroupRequest(group))
        except PeerRefused:  # no client is online: the offset can be written
            return
        why = _(
            "{address} has clients reset themselves (useServerSideResetOffset), all their queues at a time",
            address=address,
        )
        raise ClientError(
            _("{why}: stop the clients of group {group} first, or leave the queue out", why=why, group=group)
        )

    async def _committed(self, address: str, group: str, queue: MessageQueue) -> int | None:
        """Return the committed offset of a group in a queue; None if there is no offset (code 208 would return 0)."""
        timeout_ms = self._calls.timeout_ms
        return await self._calls.committed_offset(address, group, queue, is_stored=True, timeout_ms=timeout_ms)

    async def _put(self, address: str, group: str, queue: MessageQueue, offset: int) -> None:
        """Write an offset. Between a reset and the next pull, a broker ignores writes and returns a remark. In this
        case, reset the queue to the offset."""
        header = UpdateConsumerOffsetRequest(group, queue.topic, queue.queue_id, offset)
        if (await self._calls.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, header)).remark:
            again = ResetOffsetRequest(
                topic=queue.topic, group=group, timestamp=0, is_force=True, queue_id=queue.queue_id, offset=offset
            )
            await self._calls.ask(address, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, again)

    async def _offsets(self, address: str, group: str, topic: str) -> dict[MessageQueue, int]:
        header = ConsumeStatsRequest(group, topic)
        stats = await self._calls.fetch(ConsumeStats, address, RequestCode.GET_CONSUME_STATS, header)
        return {queue: one.consumer_offset for queue, one in stats.offset_table.items()}

    async def _rewrite(self, address: str, wanted: ResetOffsetRequest) -> dict[MessageQueue, int]:
        """Write the offsets of a reset to a broker, because no client is online that could do so."""
        moved: dict[MessageQueue, int] = {}
        for queue, committed in (await self._offsets(address, wanted.group, wanted.topic)).items():
            if wanted.queue_id not in (_EVERY_QUEUE, queue.queue_id):
                continue
            target = await self._target(address, queue, wanted)
            moved[queue] = target if wanted.is_force else min(committed, target)
            await self._put(address, wanted.group, queue, moved[queue])
        return moved

    async def _target(self, address: str, queue: MessageQueue, wanted: ResetOffsetRequest) -> int:
        if wanted.offset is not None and wanted.offset >= 0:
            return wanted.offset
        if wanted.timestamp < 0:
            return await self._calls.max_offset(address, queue)
        return await self._calls.search_offset(address, queue, wanted.timestamp)


def _move(queue: MessageQueue, now: int | None, then: int, first: int, end: int) -> QueueMove:
    """Return a move, with the number of stored messages that it skips or repeats."""
    note = ""
    if then > end:
        note = _("the queue ends at {end}", end=end)
    elif then < first:
        note = _("the queue begins at {first}", first=first)
    here, there = (min(max(at, first), end) for at in (then if now is None else now, then))
    return QueueMove(
        topic=queue.topic,
        broker_name=queue.broker_name,
        queue_id=queue.queue_id,
        now=now,
        then=then,
        skipped=max(0, there - here),
        again=max(0, here - there),
        note=note,
    )


def _rows(tables: dict[str, dict[MessageQueue, int]]) -> list[Moved]:
    moved = {queue: offset for table in tables.values() for queue, offset in table.items()}
    return [Moved(queue.topic, queue.broker_name, queue.queue_id, offset) for queue, offset in sorted(moved.items())]
