"""Consumer groups: make, change, delete, show, and how far they are (``updateSubGroup``, ``consumerProgress`` …).

A group is what brokers hold of it, each for itself: a configuration (code 201 tells all of them; asking for one with
352 would create it at Apache's brokers) and offsets. Its lag (*diff*) on a queue is the broker's offset less its own;
*in flight* is what it has pulled and not yet committed. Source: behaviour.md §5.2, §9.9; remoting.md §6.4.8, §6.4.9.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rmqkit.admin.calls import AdminCalls
from rmqkit.admin.clients import Clients
from rmqkit.errors import PeerRefused, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode, version_name
from rmqkit.protocol.names import SYSTEM_GROUPS, dlq_topic, retry_topic
from rmqkit.protocol.schemas.clients import ConsumerConnection, MessageQueue
from rmqkit.protocol.schemas.groups import DeleteGroupRequest, SubscriptionGroupConfig, SubscriptionGroupTable
from rmqkit.protocol.schemas.offsets import ConsumeOffsets, ConsumeStats, ConsumeStatsRequest
from rmqkit.protocol.schemas.pop import MessageRequestMode
from rmqkit.protocol.schemas.topics import DeleteTopicRequest, TopicConfigTable, TopicRequest

__all__ = ["GroupProgress", "GroupSummary", "Groups", "Metadata", "QueueProgress"]

_CREATE_GROUP = "make it with: rmq admin group create"
_GROUPS_AT_ONCE = 16
_ANY_QUEUE = -1
"""What clients that pop say of a broker that shares its queues out among all of them."""


class QueueProgress(Struct, rename="camel", kw_only=True):
    """How far a group is on one queue; ``last_timestamp`` is when the last message it consumed was stored, in ms."""

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
    """How far a group is on all its queues, and in all; ``consume_tps`` is messages per second."""

    group: str
    queues: list[QueueProgress]
    consume_tps: float
    diff_total: int
    inflight_total: int


class GroupSummary(Struct, rename="camel", kw_only=True):
    """A group in one line; ``count`` is how many clients are online, without them there is no version or type."""

    group: str
    count: int = 0
    version: str = ""
    consume_type: str = ""
    message_model: str = ""
    consume_tps: float = 0.0
    diff_total: int = 0


class Metadata(Struct, rename="camel"):
    """Groups and topics of a broker with all their settings (``exportMetadata``)."""

    topic_config_table: dict[str, Any]
    subscription_group_table: dict[str, SubscriptionGroupConfig]


class Groups:
    """Operations on consumer groups; each raises what `AdminCalls` raises."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    async def tables(
        self, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, dict[str, SubscriptionGroupConfig]]:
        """The groups that each master has, by broker name and group."""
        masters = await self._calls.masters(cluster, broker)
        tables = await self._calls.fan_out(masters.values(), self._table)
        return {name: tables[address] for name, address in masters.items()}

    async def configs(
        self, group: str, broker: str | None = None, cluster: str | None = None
    ) -> dict[str, SubscriptionGroupConfig]:
        """The configuration of a group by broker name. Raises UnknownName: no broker has the group."""
        tables = await self.tables(broker, cluster)
        found = {name: table[group] for name, table in tables.items() if group in table}
        if not found:
            known = {name for table in tables.values() for name in table}.difference(SYSTEM_GROUPS)
            raise UnknownName("group", group, f"broker {', '.join(tables)}", known, _CREATE_GROUP)
        return found

    async def update(
        self, group: str, changes: Mapping[str, Any], broker: str | None = None, cluster: str | None = None
    ) -> dict[str, SubscriptionGroupConfig]:
        """Create a group, or change some fields of it and leave the others as they are at each broker.
        ``attributes`` are changes, too: ``+name`` → value adds, ``-name`` removes. The result, by broker name."""
        masters = await self._calls.targets(broker, cluster)

        async def update(address: str) -> None:
            known = (await self._table(address)).get(group) or SubscriptionGroupConfig(group_name=group)
            wanted = replace(known, **{"attributes": {}, **changes})
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            await self._calls.ask(address, code, body=msgspec.json.encode(wanted))

        await self._calls.fan_out(masters.values(), update)
        return await self.configs(group, broker, cluster)

    async def delete(
        self, group: str, broker: str | None = None, cluster: str | None = None, *, keep_offsets: bool = False
    ) -> list[str]:
        """Delete a group; of a whole cluster its retry and dead-letter topics, too. The names of the brokers.
        Raises UnknownName: none of them has the group."""
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
        """Have a group pop a topic, or pull it; the names of the brokers.
        Raises PeerRefused: a broker does not let brokers share queues out."""
        masters = await self._calls.targets(broker, cluster)
        wanted = MessageRequestMode(topic=topic, consumer_group=group, mode=mode, pop_share_queue_num=share_count)
        await self._calls.fan_out(masters.values(), lambda address: self._calls.set_request_mode(address, wanted))
        return list(masters)

    async def progress(
        self, group: str, topic: str = "", cluster: str | None = None, *, clients: bool = False
    ) -> GroupProgress:
        """How far a group is on all its topics, or on one; ``clients`` also looks who has each queue.
        Raises UnknownName: no broker has the group or offsets of it."""
        stats = await self._stats(group, topic, cluster)
        if not any(place.consumer_offset for one in stats for place in one.offset_table.values()):
            await self.configs(group, cluster=cluster)  # asked for a topic, brokers answer for unknown groups, too
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
        """All groups but those of the system, the furthest behind first."""
        names = {name for table in (await self.tables(cluster=cluster)).values() for name in table}
        turns = asyncio.Semaphore(_GROUPS_AT_ONCE)

        async def summary(group: str) -> GroupSummary:
            async with turns:
                return await self._summary(group, cluster)

        found = await asyncio.gather(*(summary(group) for group in sorted(names.difference(SYSTEM_GROUPS))))
        return sorted(found, key=lambda row: (-row.diff_total, row.group))

    async def metadata(self, broker: str | None = None, cluster: str | None = None) -> dict[str, Metadata]:
        """Topics and groups with all their settings, by broker name."""
        masters = await self._calls.targets(broker, cluster)

        async def both(address: str) -> Metadata:
            topics = await self._calls.fetch(TopicConfigTable, address, RequestCode.GET_ALL_TOPIC_CONFIG)
            return Metadata(dict(topics.topic_config_table), await self._table(address))

        found = await self._calls.fan_out(masters.values(), both)
        return {name: found[address] for name, address in masters.items()}

    # -- inside

    async def _table(self, address: str) -> dict[str, SubscriptionGroupConfig]:
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        return (await self._calls.fetch(SubscriptionGroupTable, address, code)).subscription_group_table

    async def _stats(self, group: str, topic: str, cluster: str | None) -> list[ConsumeStats]:
        masters = await (self._calls.masters_of_topic(topic) if topic else self._calls.masters(cluster))
        header = ConsumeStatsRequest(group, topic or None)
        code = RequestCode.GET_CONSUME_STATS
        answers = await self._calls.fan_out(
            masters.values(), lambda address: self._calls.fetch(ConsumeStats, address, code, header)
        )
        return list(answers.values())

    async def _owners(self, group: str) -> dict[MessageQueue, str]:
        """Which clients have each queue; nobody when the group is not online."""
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
        """Brokers and name servers do not mind a topic they do not have."""
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
