"""Offsets of groups and delay levels, bounds of queues: codes 14, 15, 29, 30, 31, 32, 43, 45, 60, 61, 202.

Source: remoting.md §4.3.3, §4.4, §6.4.9; behaviour.md §5.2, §9.9.
"""

from __future__ import annotations

import asyncio

from rmqkit.broker.handlers import Handlers, answers, by_global_number
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import (
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    StoreTimeResponse,
    TopicOffsets,
    TopicStatsTable,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Slice

__all__ = ["OffsetHandlers"]


class OffsetHandlers(Handlers[OperationsContext]):
    """Answers where groups are and what queues hold."""

    @answers(RequestCode.QUERY_CONSUMER_OFFSET)
    @by_global_number
    def query(self, connection: Connection, command: Command) -> Command:
        """The committed offset; without one, 0 where the queue still begins at 0 and that is in memory."""
        header = decode_header_leniently(command, QueryConsumerOffsetRequest, drops_unreadable=False)
        offset = self._context.offsets.get(header.consumer_group, header.topic, header.queue_id)
        if offset is not None and offset >= 0:
            return reply(command, header=OffsetResponse(offset))
        if header.set_zero_if_not_found is False:
            remark = "Not found, do not set to zero, maybe this group boot first"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)
        starts_at_zero = self._context.store.min_offset(header.topic, header.queue_id) <= 0
        if starts_at_zero and self._context.store.is_in_memory(header.topic, header.queue_id, 0):
            return reply(command, header=OffsetResponse(0))
        remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
        return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)

    @answers(RequestCode.UPDATE_CONSUMER_OFFSET)
    @by_global_number
    def update(self, connection: Connection, command: Command) -> Command:
        """Commit an offset; after a reset by an operator what clients commit is void until their next pull."""
        header = decode_header_leniently(command, UpdateConsumerOffsetRequest)
        if header.consumer_group not in self._context.groups:
            remark = f"Group {header.consumer_group} not exist!"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if self._context.topics.get(header.topic) is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if header.queue_id is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"QueueId is null, topic is {header.topic}")
        if header.commit_offset is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"Offset is null, topic is {header.topic}")
        if self._context.offsets.has_reset(header.consumer_group, header.topic, header.queue_id):
            return reply(command, remark="Offset has been previously reset")
        self._context.offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return reply(command)

    @answers(RequestCode.GET_MAX_OFFSET)
    @by_global_number
    def max_offset(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, QueueRequest)
        return reply(command, header=OffsetResponse(self._context.store.max_offset(header.topic, header.queue_id)))

    @answers(RequestCode.GET_MIN_OFFSET)
    @by_global_number
    def min_offset(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, QueueRequest)
        return reply(command, header=OffsetResponse(self._context.store.min_offset(header.topic, header.queue_id)))

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    @by_global_number
    def search(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, SearchOffsetRequest)
        upper = (header.boundary_type or "").upper() == "UPPER"
        offset = self._context.store.offset_by_time(header.topic, header.queue_id, header.timestamp, upper=upper)
        return reply(command, header=OffsetResponse(offset))

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME)
    @by_global_number
    def earliest_store_time(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, QueueRequest)
        timestamp = self._context.store.earliest_store_time(header.topic, header.queue_id)
        return reply(command, header=StoreTimeResponse(timestamp))

    @answers(RequestCode.GET_ALL_CONSUMER_OFFSET)
    async def all_offsets(self, connection: Connection, command: Command) -> Command:
        """The offsets of every group; slaves copy them."""
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, self._context.offsets.contents))

    @answers(RequestCode.GET_ALL_DELAY_OFFSET)
    def delay_offsets(self, connection: Connection, command: Command) -> Command:
        """How far each delay level is delivered; slaves copy it."""
        return reply(command, body=fastjson.dumps(self._context.schedule.offsets()))

    @answers(RequestCode.GET_TIMER_CHECK_POINT)
    def timer_checkpoint(self, connection: Connection, command: Command) -> Command:
        """How far the timer has come; slaves copy it."""
        if self._context.timer is not None:
            return reply(command, body=self._context.timer.checkpoint())
        return reply(command, ResponseCode.SYSTEM_ERROR, "The checkpoint is null")

    @answers(RequestCode.GET_TIMER_METRICS)
    def timer_metrics(self, connection: Connection, command: Command) -> Command:
        """The messages that wait for their time, by topic; slaves copy it."""
        if self._context.timer is not None:
            return reply(command, body=fastjson.dumps(self._context.timer.metrics))
        return reply(command, ResponseCode.SYSTEM_ERROR, "The timer message store is null")

    @answers(RequestCode.GET_TOPIC_STATS_INFO)
    async def topic_bounds(self, connection: Connection, command: Command) -> Command:
        """The bounds of every queue of a topic, and when its newest message was stored."""
        topic = decode_header(command, TopicRequest).topic
        config = self._context.topics.get(topic)
        if config is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        table, now = {}, Slice()
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            low, high = self._context.store.min_offset(topic, queue_id), self._context.store.max_offset(topic, queue_id)
            newest_ms = self._context.store.store_time_at(topic, queue_id, high - 1) if high else 0
            queue = MessageQueue(topic, self._context.settings.broker_name, queue_id)
            table[queue] = TopicOffsets(low, high, max(0, newest_ms))
            await now.pause_if_over()
        rate = self._context.statistics.per_second("TOPIC_PUT_NUMS", topic)
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, TopicStatsTable(table, rate)))
