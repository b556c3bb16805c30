"""The requests of tools about lite topics: 200074 to 200079 (``LiteManagerProcessor``).

Source: lite.md §11.
"""

from __future__ import annotations

import asyncio
import heapq

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.lite.listing import client_rows, names_of, topic_row
from rmqkit.broker.lite.service import LiteContext, LiteService
from rmqkit.broker.lite.subscriptions import BINDING, LiteGroup
from rmqkit.errors import PeerRefused
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.names import lite_queue
from rmqkit.protocol.schemas.lite import (
    BrokerLiteInfo,
    LiteClientInfo,
    LiteClientRequest,
    LiteGroupInfo,
    LiteGroupRequest,
    LiteLag,
    LiteSubscriber,
    LiteTopicInfo,
    LiteTopicLag,
    LiteTopicOffset,
    LiteTopicRequest,
    ParentTopicInfo,
    ParentTopicRequest,
    TriggerLiteDispatchRequest,
)
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Slice

__all__ = ["LiteQueryHandlers"]

_COUNT_MAX = 10_000
_TOP_MAX = 1000
_ROWS_MAX = 1000


class LiteQueryHandlers(Handlers[LiteContext]):
    """The handlers of requests of tools about lite topics."""

    def __init__(self, context: LiteContext) -> None:
        super().__init__(context)
        assert context.lite is not None, "a master serves lite topics"
        self._lite: LiteService = context.lite
        self._table = context.store.lite.table

    @answers(RequestCode.GET_BROKER_LITE_INFO)
    def of_broker(self, connection: Connection, command: Command) -> Command:
        """Return counts of the broker, and its parents with their groups."""
        parents = [name for name, one in self._context.topics.snapshot().topic_config_table.items() if one.is_lite]
        groups = {name: self._lite.bound_to(name) for name in parents}
        all_groups = self._lite.groups.values()
        live = self._table.live_count
        info = BrokerLiteInfo(
            cq_table_size=len(self._context.store.queues) + live,
            current_lmq_num=live,
            event_map_size=sum(bool(client.dirty) for group in all_groups for client in group.clients.values()),
            group_meta={name: bound for name, bound in groups.items() if bound},
            lite_subscription_count=self._lite.subscription_count,
            max_lmq_num=self._context.store_settings.lite_topic_count_max,
            offset_table_size=self._lite.offsets.count,
            order_info_count=sum(len(group.batches) for group in all_groups),
            topic_meta={name: self._lifetime(self._parent(name)) for name in parents},
        )
        return reply(command, body=fastjson.dumps(info))

    @answers(RequestCode.GET_PARENT_TOPIC_INFO)
    async def of_parent(self, connection: Connection, command: Command) -> Command:
        """Return the number of lite topics of a parent, its groups, and a page of its lite topics if it is wanted."""
        header = decode_header(command, ParentTopicRequest)
        name = header.topic
        config, known = self._parent(name), self._table.parents.get(name)
        count = 0 if known is None else known.live_count
        info = ParentTopicInfo(
            groups=self._lite.bound_to(name),
            lite_topic_count=count,
            lmq_num=self._table.live_count,
            topic=name,
            ttl=self._lifetime(config),
        )
        if header.max_count is not None:
            await self._add_rows(info, header, max(1, min(header.max_count, _ROWS_MAX)))
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, info))

    @answers(RequestCode.GET_LITE_TOPIC_INFO)
    def of_lite_topic(self, connection: Connection, command: Command) -> Command:
        """Return the bounds of a lite topic and its subscribers."""
        header = decode_header(command, LiteTopicRequest)
        self._parent(header.parent_topic)
        queue = self._lite.queue(header.parent_topic, header.lite_topic)
        bound = self._lite.bound_to(header.parent_topic)
        offsets = LiteTopicOffset()
        if queue is not None:
            last_ms = self._table.seconds[queue.slot] * 1000
            offsets = LiteTopicOffset(
                last_update_timestamp=last_ms, max_offset=queue.max_offset, min_offset=queue.min_offset
            )
        info = LiteTopicInfo(
            lite_topic=header.lite_topic,
            parent_topic=header.parent_topic,
            subscriber=[
                LiteSubscriber(client_id, group)
                for group, client_id in self._lite.subscribers(bound, header.lite_topic)
            ],
            topic_offset=offsets,
        )
        return reply(command, body=fastjson.dumps(info))

    @answers(RequestCode.GET_LITE_CLIENT_INFO)
    def of_client(self, connection: Connection, command: Command) -> Command:
        """Return the lite topics of a client."""
        header = decode_header_leniently(command, LiteClientRequest, missing={"maxCount": "1000"})
        self._parent(header.parent_topic)
        group = self._group(header.group)
        client = group.clients.get(header.client_id)
        info = LiteClientInfo(client_id=header.client_id, group=header.group, parent_topic=header.parent_topic)
        if client is not None:
            names = sorted(client.names)[: max(0, min(header.max_count, _COUNT_MAX))]
            info.last_access_time, info.last_consume_time = client.accessed_ms, client.consumed_ms
            info.lite_topic_count = len(client.names)
            info.lite_topic_set = [lite_queue(header.parent_topic, name) for name in names]
        return reply(command, body=fastjson.dumps(info))

    @answers(RequestCode.GET_LITE_GROUP_INFO)
    async def of_group(self, connection: Connection, command: Command) -> Command:
        """Return the lag of a group, in one lite topic or in all of them."""
        header = decode_header_leniently(command, LiteGroupRequest, missing={"topK": "20"})
        group = self._group(header.group)
        info = LiteGroupInfo(group=group.name, parent_topic=group.parent)
        if header.max_clients is not None:
            info.clients = list(client_rows(group, max(0, min(header.max_clients, _ROWS_MAX))))
            info.client_count = len(group.clients)
        if header.lite_topic:
            self._add_offsets(info, group, header.lite_topic)
        else:
            await self._add_lags(info, group, max(0, min(header.top_k, _TOP_MAX)))
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, info))

    @answers(RequestCode.TRIGGER_LITE_DISPATCH, admins_only=True)
    def deliver(self, connection: Connection, command: Command) -> Command:
        """Look at all lite topics of a group again."""
        header = decode_header(command, TriggerLiteDispatchRequest)
        self._lite.mark_all(self._group(header.group))
        return reply(command)

    # -- inside

    def _parent(self, name: str) -> TopicConfig:
        """Return a parent topic. Raises PeerRefused: the topic is missing or has another type."""
        config = self._context.topics.get(name)
        if config is None:
            raise PeerRefused(ResponseCode.TOPIC_NOT_EXIST, f"Topic [{name}] not exist.", self._ip)
        if not config.is_lite:
            raise PeerRefused(ResponseCode.INVALID_PARAMETER, f"Topic [{name}] type not match.", self._ip)
        return config

    def _group(self, name: str) -> LiteGroup:
        """Return a lite group. Raises PeerRefused: the group is missing or is no lite group."""
        config = self._context.groups.stored.subscription_group_table.get(name)
        if config is None:
            raise PeerRefused(ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"Group [{name}] not exist.", self._ip)
        if BINDING not in (config.attributes or {}):
            raise PeerRefused(ResponseCode.INVALID_PARAMETER, f"Group [{name}] is not a LITE group.", self._ip)
        return self._lite.group(name, config)

    @property
    def _ip(self) -> str:
        return self._context.settings.broker_ip1

    @staticmethod
    def _lifetime(config: TopicConfig) -> int:
        return int((config.attributes or {}).get("lite.topic.expiration", "-1"))

    async def _add_rows(self, info: ParentTopicInfo, header: ParentTopicRequest, count_max: int) -> None:
        """Add a page of lite topics to an answer."""
        group = None if not header.group else self._group(header.group)
        if group is not None and group.parent != info.topic:
            remark = f"lite group {group.name} is expected to bind topic {group.parent}, but actual is {info.topic}"
            raise PeerRefused(ResponseCode.INVALID_PARAMETER, remark, self._ip)
        lites, now = self._context.store.lite, Slice()
        names = await names_of(
            lites,
            info.topic,
            prefix=header.prefix or "",
            after=header.after or "",
            count_max=count_max + 1,
            with_expired=bool(header.with_expired),
        )
        info.lite_topics = []
        for name in names[:count_max]:
            info.lite_topics.append(topic_row(self._lite, lites, info.topic, name, info.groups, group))
            await now.pause_if_over()
        if len(names) > count_max:
            info.next_after = names[count_max - 1]

    def _add_offsets(self, info: LiteGroupInfo, group: LiteGroup, name: str) -> None:
        slot = self._table.find(group.parent, name)
        lag = LiteTopicLag()
        if slot is not None:
            high, at = self._table.ends[slot], self._lite.offset_of(group, slot)
            info.total_lag_count = max(0, high - at)
            info.earliest_unconsumed_timestamp = self._time_at(group, name, at) if high > at else -1
            last_ms = self._table.seconds[slot] * 1000
            lag = LiteTopicLag(broker_offset=high, consumer_offset=at, last_timestamp=last_ms)
        info.lite_topic_offset_wrapper = lag

    async def _add_lags(self, info: LiteGroupInfo, group: LiteGroup, top_max: int) -> None:
        known, now = self._table.parents.get(group.parent), Slice()
        largest: list[tuple[int, str]] = []
        for name, slot in list(known.slots.items()) if known is not None else ():
            await now.pause_if_over()
            if known is None or known.slots.get(name) != slot:
                continue
            lag = self._table.ends[slot] - self._lite.offset_of(group, slot)
            if lag > 0:
                info.total_lag_count += lag
                if len(largest) < top_max:
                    heapq.heappush(largest, (lag, name))
                elif largest:
                    heapq.heappushpop(largest, (lag, name))
        lags = [
            LiteLag(earliest_unconsumed_timestamp=self._first_time(group, name), lag_count=lag, lite_topic=name)
            for lag, name in sorted(largest, reverse=True)
        ]
        info.lag_count_top_k = lags
        info.lag_timestamp_top_k = []
        times = [one.earliest_unconsumed_timestamp for one in lags if one.earliest_unconsumed_timestamp > 0]
        info.earliest_unconsumed_timestamp = min(times, default=-1)

    def _first_time(self, group: LiteGroup, name: str) -> int:
        slot = self._table.find(group.parent, name)
        return -1 if slot is None else self._time_at(group, name, self._lite.offset_of(group, slot))

    def _time_at(self, group: LiteGroup, name: str, number: int) -> int:
        return self._context.store.store_time_at(lite_queue(group.parent, name), 0, number)
