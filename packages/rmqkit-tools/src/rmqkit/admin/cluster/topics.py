"""Topics: routes, configurations, offsets and load (``topicList`` … ``statsAll``).

Source: behaviour.md §9.9, §2.8; remoting.md §4.2, §4.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from rmqkit.admin.calls import AdminCalls, Done
from rmqkit.admin.cluster.clusters import ORDER_TOPIC_CONFIG, NameServers
from rmqkit.errors import PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.names import AUTO_CREATE_TOPIC, DLQ_PREFIX, RETRY_PREFIX
from rmqkit.protocol.schemas.groups import GroupList
from rmqkit.protocol.schemas.offsets import (
    BrokerStatsData,
    ConsumeStats,
    ConsumeStatsRequest,
    StatsDataRequest,
    TopicStatsTable,
)
from rmqkit.protocol.schemas.topics import (
    ClusterRequest,
    CreateTopicRequest,
    DeleteTopicRequest,
    Permission,
    TopicConfig,
    TopicList,
    TopicRequest,
    TopicRoute,
)
from rmqkit.sentences import _

__all__ = ["Assigned", "QueueStatus", "TopicStats", "TopicUse", "Topics", "permission_of"]

_UNIT, _UNIT_SUB = 1, 2


class TopicUse(Struct, rename="camel"):
    """A topic in a cluster, and a group that consumes the topic (empty if no group does)."""

    cluster_name: str
    topic: str
    consumer_group: str


class QueueStatus(Struct, rename="camel"):
    """The bounds of a queue. ``last_updated_timestamp`` is in ms, and 0 if the queue is empty."""

    broker_name: str
    queue_id: int
    min_offset: int
    max_offset: int
    last_updated_timestamp: int


class TopicStatus(Struct, rename="camel"):
    """The queues of a topic, and the number of messages per second that are stored in the topic."""

    queues: list[QueueStatus]
    put_tps: float


class Assigned(Struct, rename="camel"):
    """A queue and the client to which it would be allocated."""

    client: str
    broker_name: str
    queue_id: int


class TopicStats(Struct, rename="camel", kw_only=True):
    """The load of a topic and one of its groups. Rates are of the last minute, counts are of the last 24 hours."""

    topic: str
    consumer_group: str = ""
    accumulation: int = 0
    in_tps: float = 0.0
    out_tps: float = 0.0
    in_24_hours: int = 0
    out_24_hours: int = 0


class Topics:
    """Operations on topics. Each raises the errors of `AdminCalls`, and UnknownName for a topic that does not exist."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls
        self._name_servers = NameServers(calls)

    async def names(self, cluster: str | None = None) -> list[str]:
        """Return all topics, or the topics of one cluster. The list is sorted and includes system topics."""
        if cluster is None:
            return await self._calls.topic_names()
        await self._calls.masters(cluster)
        code = RequestCode.GET_TOPICS_BY_CLUSTER
        return sorted((await self._calls.any_name_server.fetch(TopicList, code, ClusterRequest(cluster))).topic_list)

    async def uses(self) -> list[TopicUse]:
        """Return every topic with its cluster and each of its groups (``topicList -c``)."""
        names = [name for name in await self.names() if not name.startswith((RETRY_PREFIX, DLQ_PREFIX))]
        found = await self._calls.fan_out(names, self._uses_of)
        return [use for uses in found.values() for use in uses]

    async def _uses_of(self, topic: str) -> list[TopicUse]:
        try:
            clusters, groups = await self.clusters(topic), await self.groups(topic)
        except UnknownName:
            return []  # no broker has this topic: it may be the name of a cluster
        return [TopicUse(cluster, topic, group) for cluster in clusters for group in groups or [""]]

    async def route(self, topic: str) -> TopicRoute:
        """Return the brokers that have a topic, and the queues of the topic."""
        return await self._calls.route(topic)

    async def clusters(self, topic: str) -> list[str]:
        """Return the clusters that have a topic."""
        return sorted({broker.cluster for broker in (await self._calls.route(topic)).broker_datas})

    async def groups(self, topic: str) -> list[str]:
        """Return the groups that consume a topic or have offsets in it."""
        code, masters = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, await self._calls.masters_of_topic(topic)
        asked = (self._calls.fetch(GroupList, address, code, TopicRequest(topic)) for address in masters.values())
        return sorted({group for answer in await asyncio.gather(*asked) for group in answer.group_list})

    async def status(self, topic: str, cluster: str | None = None) -> TopicStatus:
        """Return the offsets of a topic's queues in one cluster, or in all clusters."""
        masters = await self._calls.masters_of_topic(topic)
        if cluster is not None:
            wanted = await self._calls.masters(cluster)
            masters = {name: address for name, address in masters.items() if name in wanted}
        code = RequestCode.GET_TOPIC_STATS_INFO
        asked = (self._calls.fetch(TopicStatsTable, address, code, TopicRequest(topic)) for address in masters.values())
        tables = await asyncio.gather(*asked)
        queues = sorted(
            (queue.broker_name, queue.queue_id, offsets.min_offset, offsets.max_offset, offsets.last_update_timestamp)
            for table in tables
            for queue, offsets in table.offset_table.items()
        )
        return TopicStatus([QueueStatus(*queue) for queue in queues], sum(table.topic_put_tps for table in tables))

    async def config(self, topic: str, broker: str | None = None) -> dict[str, TopicConfig]:
        """Return the configuration of a topic by broker name."""
        masters = await (self._calls.masters(broker=broker) if broker else self._calls.masters_of_topic(topic))
        return {name: await self._config_at(address, topic) for name, address in masters.items()}

    async def create(
        self,
        topic: str,
        *,
        broker: str | None = None,
        cluster: str | None = None,
        read_queues: int = 8,
        write_queues: int = 8,
        perm: int = Permission.READ | Permission.WRITE,
        order: bool = False,
        unit: bool = False,
        unit_sub: bool = False,
        attributes: str | None = None,
    ) -> list[Done]:
        """Create a topic, or change it if it exists. ``attributes`` is a text such as
        ``+message.type=DELAY,-reserve.time``.

        The queues of an ordered topic are also stored at the name servers.
        """
        flags = _UNIT * unit + _UNIT_SUB * unit_sub
        config = TopicConfig(topic, read_queues, write_queues, perm, topic_sys_flag=flags, order=order)
        header = _creation(config, attributes)
        addresses = await self._calls.addresses(broker, cluster)
        for address in addresses:
            await self._calls.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        self._calls.forget()
        queues = _(
            "{reads} queues to read and {writes} to write, permission {perm}",
            reads=read_queues,
            writes=write_queues,
            perm=_perm_text(perm),
        )
        done = [Done(address, _("topic {topic} has {queues}", topic=topic, queues=queues)) for address in addresses]
        if order:
            masters = await self._calls.targets(broker, cluster)
            kept = {} if broker is None else _parse_order(await self.order(topic) or "")
            text = ";".join(f"{name}:{n}" for name, n in (kept | dict.fromkeys(masters, write_queues)).items())
            done += await self.set_order(topic, text)
        return done

    async def delete(self, topic: str, cluster: str | None = None) -> list[Done]:
        """Delete a topic at all masters of a cluster, then the topic and its order at the name servers.
        Raises UnknownName: no broker has the topic."""
        masters = await self._calls.targets(None, cluster)
        if cluster is None:
            cluster = next(iter((await self._calls.cluster()).cluster_addr_table))
        await self._calls.route(topic)
        # Brokers first: a broker that still has the topic would register it again at the name servers.
        for address in masters.values():
            await self._calls.ask(address, RequestCode.DELETE_TOPIC_IN_BROKER, TopicRequest(topic))
        done = [Done(address, _("topic {topic} deleted", topic=topic)) for address in masters.values()]
        header = DeleteTopicRequest(topic, cluster)
        done += await self._name_servers.everywhere(
            RequestCode.DELETE_TOPIC_IN_NAMESRV, _("topic {topic} forgotten", topic=topic), header
        )
        await self._name_servers.delete_value(ORDER_TOPIC_CONFIG, topic)
        self._calls.forget()
        return done

    async def set_permission(
        self, topic: str, perm: int, *, broker: str | None = None, cluster: str | None = None
    ) -> list[Done]:
        """Set the permission of a topic and leave its other settings unchanged."""
        masters = await self._calls.masters_of_topic(topic)
        wanted = await self._calls.masters(cluster, broker) if broker or cluster else masters
        return [
            await self._set_permission_at(address, topic, perm)
            for name, address in wanted.items()
            if name in masters or broker is not None
        ]

    async def order(self, topic: str) -> str | None:
        """Return the queues of an ordered topic as a name server stores them (``broker-a:4;broker-b:4``); None if the
        topic is not ordered."""
        return await self._name_servers.value(ORDER_TOPIC_CONFIG, topic)

    async def set_order(self, topic: str, text: str) -> list[Done]:
        """Set the queues of an ordered topic. Raises SettingsError: the text is not ``broker:count;broker:count``."""
        _parse_order(text)
        return await self._name_servers.put_value(ORDER_TOPIC_CONFIG, topic, text)

    async def delete_order(self, topic: str) -> list[Done]:
        return await self._name_servers.delete_value(ORDER_TOPIC_CONFIG, topic)

    async def allocate(self, topic: str, clients: Sequence[str]) -> list[Assigned]:
        """Return the client of each queue that the average strategy would choose."""
        from rmqkit.client.consumer.allocate import averagely
        from rmqkit.client.runtime.routes import subscribe_queues

        queues, members = subscribe_queues(topic, await self._calls.route(topic)), sorted(clients)
        return [
            Assigned(client, queue.broker_name, queue.queue_id)
            for client in members
            for queue in averagely(queues, members, client)
        ]

    async def stats(self, topic: str | None = None, *, active_only: bool = False) -> list[TopicStats]:
        """Return the load of topics (``statsAll``), with one row for each group of a topic. Without ``topic``, retry
        and dead-letter topics are omitted. ``active_only``: omit rows without messages in the last 24 hours."""
        names = [topic] if topic is not None else await self.names()
        wanted = [name for name in names if topic is not None or not name.startswith((RETRY_PREFIX, DLQ_PREFIX))]
        found = await self._calls.fan_out(wanted, self._stats_of)
        rows = [row for rows in found.values() for row in rows]
        return [row for row in rows if row.in_24_hours or row.out_24_hours] if active_only else rows

    async def _stats_of(self, topic: str) -> list[TopicStats]:
        try:
            masters = list((await self._calls.masters_of_topic(topic)).values())
            groups = await self.groups(topic)
        except UnknownName:
            return []
        put = await self._counted(masters, "TOPIC_PUT_NUMS", topic)
        whole = TopicStats(topic=topic, in_tps=put[0], in_24_hours=put[1])
        rows = [replace(whole, consumer_group=group) for group in groups] or [whole]
        for row in rows[: len(groups)]:
            row.out_tps, row.out_24_hours = await self._counted(
                masters, "GROUP_GET_NUMS", f"{topic}@{row.consumer_group}"
            )
            row.accumulation = await self._accumulated(masters, topic, row.consumer_group)
        return rows

    async def _counted(self, addresses: Iterable[str], name: str, key: str) -> tuple[float, int]:
        """Return the messages per second in the last minute and the messages in the last 24 hours, over all brokers."""
        tps, day = 0.0, 0
        for address in addresses:
            try:
                header = StatsDataRequest(name, key)
                found = await self._calls.fetch(BrokerStatsData, address, RequestCode.VIEW_BROKER_STATS_DATA, header)
            except PeerRefused:
                continue  # the broker has counted no messages
            tps += found.stats_minute.tps
            day += found.stats_day.sum or found.stats_hour.sum or found.stats_minute.sum
        return tps, day

    async def _accumulated(self, addresses: Iterable[str], topic: str, group: str) -> int:
        total = 0
        for address in addresses:
            try:
                header = ConsumeStatsRequest(group, topic)
                found = await self._calls.fetch(ConsumeStats, address, RequestCode.GET_CONSUME_STATS, header)
            except PeerRefused:
                continue  # the broker does not know the group
            total += sum(one.broker_offset - one.consumer_offset for one in found.offset_table.values())
        return total

    async def _config_at(self, address: str, topic: str) -> TopicConfig:
        try:
            return await self._calls.fetch(TopicConfig, address, RequestCode.GET_TOPIC_CONFIG, TopicRequest(topic))
        except PeerRefused as refusal:
            if refusal.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise UnknownName(
                "topic", topic, _("broker {address}", address=address), remedy=_("create it there")
            ) from None

    async def _set_permission_at(self, address: str, topic: str, perm: int) -> Done:
        known = await self._config_at(address, topic)
        if known.perm == perm:
            return Done(address, _("topic {topic} has permission {perm} already", topic=topic, perm=_perm_text(perm)))
        attributes = ",".join(f"+{key}={value}" for key, value in (known.attributes or {}).items())
        header = _creation(replace(known, topic_name=topic, perm=perm), attributes or None)
        await self._calls.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        self._calls.forget()
        return Done(
            address,
            _(
                "permission of topic {topic} changed from {perm} to {former}",
                topic=topic,
                perm=_perm_text(known.perm),
                former=_perm_text(perm),
            ),
        )


def _creation(config: TopicConfig, attributes: str | None) -> CreateTopicRequest:
    """Return the request that creates a topic with a configuration."""
    facts = config.read_queue_nums, config.write_queue_nums, config.perm, config.topic_filter_type
    rest = config.topic_sys_flag, config.order, attributes
    return CreateTopicRequest(config.topic_name, AUTO_CREATE_TOPIC, *facts, *rest)


def permission_of(text: str) -> int:
    """Return the permission bits for ``6``/``rw``, ``4``/``r`` or ``2``/``w``. Raises SettingsError: the text is none
    of these."""
    known = {"2": 2, "w": 2, "4": 4, "r": 4, "6": 6, "rw": 6, "wr": 6}
    if text.lower() not in known:
        raise SettingsError(_("permission {text} must be 2 or w (write), 4 or r (read), 6 or rw (both)", text=text))
    return known[text.lower()]


def _perm_text(perm: int) -> str:
    letters = f"{'r' if perm & Permission.READ else ''}{'w' if perm & Permission.WRITE else ''}"
    return letters or _("none")


def _parse_order(text: str) -> dict[str, int]:
    parts = [part.rpartition(":") for part in text.split(";") if part]
    if any(not name or not count.isdecimal() for name, __, count in parts):
        raise SettingsError(_("order {text!r} must be broker:count;broker:count", text=text))
    return {name: int(count) for name, __, count in parts}
