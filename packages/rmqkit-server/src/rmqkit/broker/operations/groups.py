"""Consumer groups and their progress: codes 200, 201, 207, 208, 225, 300, 303, 308, 315, 317, 343, 345, 352, 353, 402,
5003 (``AdminBrokerProcessor``).

Source: remoting.md §4.4, §6.4.9, §6.4.13, §6.7; behaviour.md §5.2, §9.9, §9.10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Set
from datetime import datetime

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.lite.subscriptions import BINDING
from rmqkit.broker.operations import OperationsContext
from rmqkit.broker.operations.topics import GROUP_ATTRIBUTES, alter
from rmqkit.broker.tables.groups import request_modes_file
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.names import group_fault, topic_fault
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.groups import (
    DeleteGroupRequest,
    GroupConfigList,
    GroupConfigsResponse,
    GroupForbidden,
    GroupForbiddenRequest,
    GroupList,
    GroupNameList,
    GroupRequest,
    GroupSubscription,
    GroupTopicRequest,
    SubscriptionGroupConfig,
)
from rmqkit.protocol.schemas.offsets import (
    AllConsumeStatsRequest,
    ConsumeOffsets,
    ConsumeStats,
    ConsumeStatsList,
    ConsumeStatsRequest,
    ConsumeTimeSpans,
    CorrectionOffsetRequest,
    CorrectionOffsets,
    QueueTimeSpan,
    StatsDataRequest,
    TimeSpanRequest,
)
from rmqkit.protocol.schemas.pop import MessageRequestModes
from rmqkit.protocol.schemas.topics import TopicConfig, TopicList, TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body
from rmqkit.remoting.tasks import Slice


class GroupHandlers(Handlers[OperationsContext]):
    """The handlers that create, change, delete and show consumer groups."""

    def __init__(self, context: OperationsContext) -> None:
        super().__init__(context)
        self._altering = asyncio.Lock()

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, admins_only=True)
    async def create(self, connection: Connection, command: Command) -> Command:
        if not command.payload:
            return reply(command)
        return await self._put(command, [decode_body(command, SubscriptionGroupConfig)])

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, admins_only=True)
    async def create_several(self, connection: Connection, command: Command) -> Command:
        """Create or change several groups. If one group is refused, change none."""
        return await self._put(command, decode_body(command, GroupConfigList).group_config_list)

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP, admins_only=True)
    def delete(self, connection: Connection, command: Command) -> Command:
        """Delete a group if it exists. Also delete its offsets if this is requested."""
        header = decode_header_leniently(command, DeleteGroupRequest)
        self._delete({header.group_name}, with_offsets=bool(header.clean_offset))
        return reply(command)

    @answers(RequestCode.DELETE_SUBSCRIPTION_GROUP_LIST, admins_only=True)
    def delete_several(self, connection: Connection, command: Command) -> Command:
        """Delete several groups like `delete`, all with one write of the table. If one name is blank, delete none."""
        body = decode_body(command, GroupNameList) if command.payload else GroupNameList()
        fault = None if body.group_name_list else "The specified group name list is blank."
        if not all(map(str.strip, body.group_name_list)):
            fault = "The specified group name is blank."
        if fault is not None:
            return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        self._delete(set(body.group_name_list), with_offsets=body.clean_offset)
        return reply(command)

    @answers(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, admins_only=True)
    def forbid(self, connection: Connection, command: Command) -> Command:
        """Forbid or allow a group to read a topic, if this is requested. ``readable`` in the answer is True if the
        group is allowed to read the topic."""
        header = decode_header_leniently(command, GroupForbiddenRequest)
        if header.readable is not None:
            self._context.groups.forbid_reading(header.group, header.topic, is_forbidden=not header.readable)
        readable = not self._context.groups.is_read_forbidden(header.group, header.topic)
        body = GroupForbidden(group=header.group, topic=header.topic, readable=readable)
        return reply(command, remark="", body=msgspec.json.encode(body))

    @answers(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def all_groups(self, connection: Connection, command: Command) -> Command:
        """Return all groups and the version of the table. Slaves copy them."""
        stored = self._context.groups.stored
        header = GroupConfigsResponse(len(stored.subscription_group_table))
        return reply(command, header=header, body=fastjson.dumps(stored))

    @answers(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    def request_modes(self, connection: Connection, command: Command) -> Command:
        """Return the request modes of groups from ``messageRequestMode.json``. Slaves copy them."""
        modes = request_modes_file(self._context.store.root).load(MessageRequestModes) or MessageRequestModes()
        return reply(command, body=msgspec.json.encode(modes))

    @answers(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def group(self, connection: Connection, command: Command) -> Command:
        """Return a group. Create a missing group if the settings allow it."""
        config = self._context.groups.get(decode_header(command, GroupRequest).group)
        if config is None:
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
        return reply(command, body=fastjson.dumps(config))

    @answers(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def groups_of_topic(self, connection: Connection, command: Command) -> Command:
        """Return the groups that subscribe to a topic or have offsets for it."""
        topic = decode_header(command, TopicRequest).topic
        # Join both: an offline group has only offsets, and a new group has only a subscription.
        groups = self._context.clients.subscribers(topic) | set(self._context.offsets.groups(topic))
        return reply(command, body=msgspec.json.encode(GroupList(sorted(groups))))

    @answers(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def topics_of_group(self, connection: Connection, command: Command) -> Command:
        topics = self._context.offsets.topics(decode_header(command, GroupRequest).group)
        return reply(command, body=msgspec.json.encode(TopicList(topics, self._context.address)))

    @answers(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def subscription(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, GroupTopicRequest)
        subscribed = self._context.clients.subscription(header.group, header.topic or "")
        body = GroupSubscription(group=header.group, topic=header.topic, subscription_data=subscribed)
        return reply(command, body=fastjson.dumps(body))

    def _delete(self, groups: Set[str], *, with_offsets: bool) -> None:
        # Remove the groups first: if the disk refuses, their offsets stay, too.
        self._context.groups.remove(*groups)
        self._context.statistics.drop_counters(groups=groups)
        if with_offsets:
            self._context.offsets.remove_group(*groups)
        if self._context.lite is not None:
            self._context.lite.delete_groups(groups)

    async def _put(self, command: Command, wanted: list[SubscriptionGroupConfig]) -> Command:
        """Create or change groups. The attributes of ``wanted`` are signed changes."""
        now = Slice()
        # Only one request at a time until the table has the changes: otherwise two could change the same old row.
        async with self._altering:
            for config in wanted:
                await now.pause_if_over()
                fault = group_fault(config.group_name)
                if fault is not None:  # nothing has changed yet: all groups are written together below
                    return reply(command, ResponseCode.INVALID_PARAMETER, fault)
                known = self._context.groups.stored.subscription_group_table.get(config.group_name)
                current = (known.attributes or {}) if known is not None else {}
                try:
                    config.attributes = alter(current, config.attributes or {}, GROUP_ATTRIBUTES, is_new=known is None)
                except ValueError as error:
                    return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
                if (fault := _lite_fault(config.attributes)) is not None:
                    return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        if wanted:
            await self._context.groups.put_shared(*wanted)
        return reply(command)


def _lite_fault(attributes: Mapping[str, str]) -> str | None:
    """Return the fault of a group's attributes for lite topics, or None. Source: lite.md §2."""
    parent = attributes.get(BINDING)
    if parent is not None:
        return topic_fault(parent)
    lite = next((name for name in attributes if name.startswith("lite.")), None)
    return None if lite is None else f"{lite} needs {BINDING}: set it to the parent topic of the group's lite topics"


# The value for "no correction": the offset of the compared group is the lowest.
_NOTHING = (1 << 63) - 1


class ProgressHandlers(Handlers[OperationsContext]):
    """The handlers that compare the offsets of groups with the ends of their queues."""

    @answers(RequestCode.GET_CONSUME_STATS)
    async def of_group(self, connection: Connection, command: Command) -> Command:
        """Return the progress of a group for the requested topics, or for all its topics."""
        header = decode_header(command, ConsumeStatsRequest)
        group = header.consumer_group
        asked = header.topic_list.split(";") if header.topic_list else [header.topic] if header.topic else None
        stats, now = ConsumeStats(), Slice()
        for topic in self._consumed(group, self._context.offsets.topics(group) if asked is None else asked):
            stats.offset_table |= await self._progress(group, topic, topic.read_queue_nums, now)
            stats.consume_tps += self._rate(group, topic)
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, stats))

    @answers(RequestCode.GET_BROKER_CONSUME_STATS)
    async def of_all_groups(self, connection: Connection, command: Command) -> Command:
        """Return the progress of every group for all its topics, or only for its ordered topics."""
        header = decode_header_leniently(command, AllConsumeStatsRequest, missing={"isOrder": "false"})
        answer, now, topics_of = ConsumeStatsList(self._context.address), Slice(), self._context.offsets.topics_by_group
        # Copy the names, because groups may change while the loop runs. A deleted group has an empty entry.
        for group in list(self._context.groups.stored.subscription_group_table):
            several = []
            for topic in self._consumed(group, topics_of.get(group, [])):
                if topic.order or not header.is_order:
                    table = await self._progress(group, topic, topic.write_queue_nums, now)
                    several.append(ConsumeStats(self._rate(group, topic), table))
            await now.pause_if_over()
            answer.consume_stats_list.append({group: several})
            for one in [one for stats in several for one in stats.offset_table.values()]:
                answer.total_diff += one.broker_offset - one.consumer_offset
                answer.total_inflight_diff += max(0, (one.pull_offset or 0) - one.consumer_offset)
        # Encode in a thread: Java's JSON of thousands of groups takes seconds. The answer no longer changes.
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, answer))

    @answers(RequestCode.QUERY_CONSUME_TIME_SPAN)
    async def time_spans(self, connection: Connection, command: Command) -> Command:
        """Return the store times of the oldest, newest and last consumed message of each queue, and the delay."""
        header = decode_header_leniently(command, TimeSpanRequest, missing={"group": ""})
        topic = self._context.topics.get(header.topic)
        if topic is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"topic[{header.topic}] not exist")
        spans, now = [], Slice()
        for queue_id in range(topic.write_queue_nums):
            spans.append(self._time_span(header.group, header.topic, queue_id))
            await now.pause_if_over()
        return reply(command, body=msgspec.json.encode(ConsumeTimeSpans(spans)))

    @answers(RequestCode.QUERY_CORRECTION_OFFSET)
    def corrections(self, connection: Connection, command: Command) -> Command:
        """Return the lowest offset of the groups for each queue; `_NOTHING` if the compared group's offset is lower.
        Groups in the filter are ignored. (Apache's broker also removes their offsets.)"""
        header = decode_header_leniently(command, CorrectionOffsetRequest, missing={"compareGroup": ""})
        left_out = (header.filter_groups or "").split(",")
        lowest: dict[int, int] = {}
        for group in self._context.offsets.groups(header.topic):
            for queue_id, offset in (
                self._context.offsets.queues(group, header.topic).items() if group not in left_out else ()
            ):
                # Ignore offsets before the first message: they belong to abandoned groups.
                if offset >= self._context.store.min_offset(header.topic, queue_id):
                    lowest[queue_id] = min(offset, lowest.get(queue_id, offset))
        for queue_id, offset in self._context.offsets.queues(header.compare_group, header.topic).items():
            if lowest.get(queue_id, 0) > offset:
                lowest[queue_id] = _NOTHING
        return reply(command, body=fastjson.dumps(CorrectionOffsets(lowest)))

    @answers(RequestCode.VIEW_BROKER_STATS_DATA)
    def counter(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, StatsDataRequest, missing={"statsName": "null", "statsKey": "null"})
        found = self._context.statistics.get(header.stats_name, header.stats_key)
        if found is None:
            remark = f"The stats <{header.stats_name}> <{header.stats_key}> not exist"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        return reply(command, body=msgspec.json.encode(found))

    # -- inside

    def _consumed(self, name: str, topics: list[str]) -> Iterator[TopicConfig]:
        """Yield the topics that exist and to which the group still subscribes. An offline group has no subscriptions,
        so all its existing topics are included."""
        group = self._context.clients.consumers(name)
        for topic in topics:
            config = self._context.topics.get(topic)
            is_elsewhere = group is not None and bool(group.subscriptions)
            if config is not None and (not is_elsewhere or self._context.clients.subscription(name, topic) is not None):
                yield config

    def _rate(self, group: str, topic: TopicConfig) -> float:
        return self._context.statistics.per_second("GROUP_GET_NUMS", f"{topic.topic_name}@{group}")

    async def _progress(
        self, group: str, topic: TopicConfig, queue_count: int, now: Slice
    ) -> dict[MessageQueue, ConsumeOffsets]:
        table, name = {}, topic.topic_name
        for queue_id in range(queue_count):
            consumed = max(0, self._context.offsets.get(group, name, queue_id) or 0)
            newest_ms = self._context.store.store_time_at(name, queue_id, consumed - 1) if consumed else 0
            table[MessageQueue(name, self._context.settings.broker_name, queue_id)] = ConsumeOffsets(
                # Read the end after the consumed offset: otherwise the consumed offset could be greater.
                broker_offset=self._context.store.max_offset(name, queue_id),
                consumer_offset=consumed,
                pull_offset=max(consumed, self._context.offsets.pull_offset(group, name, queue_id)),
                last_timestamp=max(0, newest_ms),
            )
            await now.pause_if_over()
        return table

    def _time_span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        store = self._context.store
        high = store.max_offset(topic, queue_id)
        oldest_ms = store.earliest_store_time(topic, queue_id)
        newest_ms = store.store_time_at(topic, queue_id, high - 1)
        consumed = self._context.offsets.get(group, topic, queue_id) or 0
        consumed_ms = store.store_time_at(topic, queue_id, consumed - 1) if consumed > 0 else oldest_ms
        is_behind = 0 <= consumed < high and self._context.offsets.get(group, topic, queue_id) is not None
        delay_ms = self._context.clock.now_ms() - store.store_time_at(topic, queue_id, consumed) if is_behind else 0
        return QueueTimeSpan(
            message_queue=MessageQueue(topic, self._context.settings.broker_name, queue_id),
            min_time_stamp=oldest_ms,
            max_time_stamp=newest_ms,
            consume_time_stamp=consumed_ms,
            delay_time=delay_ms,
            min_time_stamp_str=_local(oldest_ms),
            max_time_stamp_str=_local(newest_ms),
            consume_time_stamp_str=_local(consumed_ms),
        )


def _local(timestamp_ms: int) -> str:
    moment = datetime.fromtimestamp(timestamp_ms // 1000)
    return f"{moment:%Y-%m-%d#%H:%M:%S}:{timestamp_ms % 1000:03d}"
