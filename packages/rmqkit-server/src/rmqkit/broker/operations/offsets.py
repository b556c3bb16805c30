"""Offsets of groups and delay levels, bounds of queues: codes 14, 15, 29, 30, 31, 32, 43, 45, 60, 61, 202.
Resets of groups by an operator: codes 222 (reset by time or offset) and 314 (clone).

By default the broker resets a group itself (``useServerSideResetOffset``). Until the owner of a queue follows the
reset, the broker redirects held and later pulls of the queue to the target, and ignores commits of clients. Otherwise
the broker notifies every client of the group (code 220, one-way), and the clients reset their offsets.

Source: remoting.md §4.3.3, §4.4, §6.4.9, §10.6; behaviour.md §5.2, §5.3, §5.4, §9.9.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from msgspec.structs import replace

from rmqkit.broker.handlers import Handlers, answers, by_global_number, of_lite_topic
from rmqkit.broker.older import when_found
from rmqkit.broker.operations import OperationsContext
from rmqkit.broker.settings import BrokerRole
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply, request
from rmqkit.protocol.schemas.brokers import TimerMetricsRequest
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.offsets import (
    CloneGroupOffsetRequest,
    LiteOffsetsRequest,
    LiteOffsetsResponse,
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    ResetClientOffsetRequest,
    ResetOffsetBody,
    ResetOffsetList,
    ResetOffsetRequest,
    SearchOffsetRequest,
    StoreTimeResponse,
    TopicOffsets,
    TopicStatsTable,
    UpdateConsumerOffsetRequest,
)
from rmqkit.protocol.schemas.topics import TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.tasks import Slice


class OffsetHandlers(Handlers[OperationsContext]):
    """The handlers of requests about offsets of groups and bounds of queues."""

    @answers(RequestCode.QUERY_CONSUMER_OFFSET)
    @by_global_number
    def query(self, connection: Connection, command: Command) -> Command:
        """Return the committed offset. If there is none, return 0 if a new group gets every message
        (`_starts_at_0`)."""
        header = of_lite_topic(decode_header_leniently(command, QueryConsumerOffsetRequest, drops_unreadable=False))
        lite = self._context.lite
        offset = None if lite is None else lite.committed(header.consumer_group, header.topic)
        if offset is None:
            offset = self._context.offsets.get(header.consumer_group, header.topic, header.queue_id)
        if offset is not None and offset >= 0:
            return reply(command, header=OffsetResponse(offset))
        if header.set_zero_if_not_found is False:
            remark = "Not found, do not set to zero, maybe this group boot first"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)
        if self._starts_at_0(header.topic, header.queue_id):
            return reply(command, header=OffsetResponse(0))
        remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
        return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)

    def _starts_at_0(self, topic: str, queue_id: int) -> bool:
        """Return True if a new group gets every message of a queue, even if it wants to start at the end.

        This is the case if message 0 is in memory, as in the reference, or if the queue is empty. The reference
        returns no offset for an empty queue. The client then requests the maximum offset and skips the messages that
        arrive before this request: 29 of 600 with the Java client 4.9.3.
        """
        low, high = self._context.store.bounds(topic, queue_id)
        if low > 0 or high > 0:
            return low <= 0 and self._context.store.is_in_memory(topic, queue_id, 0)
        config = self._context.topics.get(topic)
        return config is not None and 0 <= queue_id < config.read_queue_nums

    @answers(RequestCode.UPDATE_CONSUMER_OFFSET)
    @by_global_number
    def update(self, connection: Connection, command: Command) -> Command:
        """Commit an offset. After a reset by an operator, commits are ignored while the reset is pending."""
        header = of_lite_topic(decode_header_leniently(command, UpdateConsumerOffsetRequest))
        # Use `in`: `get` might create a deleted group again for the last commit of a leaving client.
        if header.consumer_group not in self._context.groups:
            remark = f"Group {header.consumer_group} not exist!"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if self._context.topics.get(header.topic) is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if header.queue_id is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"QueueId is null, topic is {header.topic}")
        if header.commit_offset is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"Offset is null, topic is {header.topic}")
        lite = self._context.lite
        if lite is not None and lite.commit(header.consumer_group, header.topic, header.commit_offset):
            return reply(command)
        # Ignore the commit: it would undo a reset that the client does not know yet. The next pull redirects it.
        if self._context.offsets.has_reset(header.consumer_group, header.topic, header.queue_id):
            return reply(command, remark="Offset has been previously reset")
        self._context.offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return reply(command)

    @answers(RequestCode.GET_MAX_OFFSET)
    @by_global_number
    def max_offset(self, connection: Connection, command: Command) -> Command:
        header = of_lite_topic(decode_header(command, QueueRequest))
        return reply(command, header=OffsetResponse(self._context.store.max_offset(header.topic, header.queue_id)))

    @answers(RequestCode.GET_MIN_OFFSET)
    @by_global_number
    def min_offset(self, connection: Connection, command: Command) -> Command:
        """Return the first offset of a queue. Like the reference, return -1 for a batch queue that is still empty."""
        header = of_lite_topic(decode_header(command, QueueRequest))
        offset = self._context.first_offset(header.topic, header.queue_id)
        is_empty = not offset and self._context.store.max_offset(header.topic, header.queue_id) == 0
        if is_empty and self._context.topics.is_batch_topic(header.topic):
            offset = -1
        return reply(command, header=OffsetResponse(offset))

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    @by_global_number
    def search(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Return the offset of the first message at or after a time. With the lower boundary, this can also be a
        message that was deleted from the log and that another place has."""
        header = of_lite_topic(decode_header(command, SearchOffsetRequest))
        # 4.9 clients send no boundary, which means the lower boundary.
        upper = (header.boundary_type or "").upper() == "UPPER"
        offset = self._context.store.offset_by_time(header.topic, header.queue_id, header.timestamp, upper=upper)
        older = self._context.older
        if older is None or upper or offset > self._context.store.min_offset(header.topic, header.queue_id):
            return reply(command, header=OffsetResponse(offset))
        return when_found(
            older.offset_by_time(connection, header.topic, header.queue_id, header.timestamp),
            lambda found: reply(command, header=OffsetResponse(offset if found is None else min(offset, found))),
        )

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME)
    @by_global_number
    def earliest_store_time(self, connection: Connection, command: Command) -> Command:
        header = of_lite_topic(decode_header(command, QueueRequest))
        timestamp = self._context.store.earliest_store_time(header.topic, header.queue_id)
        return reply(command, header=StoreTimeResponse(timestamp))

    @answers(RequestCode.GET_ALL_CONSUMER_OFFSET)
    async def all_offsets(self, connection: Connection, command: Command) -> Command:
        """Return the offsets of all groups, or the offsets in lite topics after a place. Slaves copy them."""
        place = decode_header(command, LiteOffsetsRequest)
        if place.lite_file is not None and place.lite_position is not None and self._context.lite is not None:
            log_offset = self._context.store.max_physical_offset
            file, position, records = self._context.lite.offsets.records_after(place.lite_file, place.lite_position)
            return reply(command, header=LiteOffsetsResponse(file, position, log_offset), body=records)
        contents = self._context.offsets.contents
        contents.pull_offset_table = {}
        # Encode the copy in a thread: Java's JSON of a large table takes seconds.
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, contents))

    @answers(RequestCode.GET_ALL_DELAY_OFFSET)
    def delay_offsets(self, connection: Connection, command: Command) -> Command:
        """Return the offset of each delay level. Slaves copy the offsets."""
        return reply(command, body=fastjson.dumps(self._context.schedule.offsets()))

    @answers(RequestCode.GET_TIMER_CHECK_POINT)
    def timer_checkpoint(self, connection: Connection, command: Command) -> Command:
        """Return the timer's progress. Slaves copy it."""
        if self._context.timer is not None:
            return reply(command, body=self._context.timer.checkpoint())
        return reply(command, ResponseCode.SYSTEM_ERROR, "The checkpoint is null")

    @answers(RequestCode.GET_TIMER_METRICS)
    async def timer_metrics(self, connection: Connection, command: Command) -> Command:
        """Return the numbers of waiting timed messages by topic, and, if requested, by due time. Slaves copy the
        numbers by topic."""
        if (timer := self._context.timer) is not None:
            metrics = timer.metrics
            if decode_header(command, TimerMetricsRequest).due_within:
                metrics = replace(metrics, due_within_s=await timer.due_within_s())
            return reply(command, body=fastjson.dumps(metrics))
        return reply(command, ResponseCode.SYSTEM_ERROR, "The timer message store is null")

    @answers(RequestCode.GET_TOPIC_STATS_INFO)
    async def topic_bounds(self, connection: Connection, command: Command) -> Command:
        """Return the bounds of every queue of a topic, and the store time of the newest message of each queue."""
        topic = decode_header(command, TopicRequest).topic
        config = self._context.topics.get(topic)
        if config is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"topic[{topic}] not exist")
        table, now = {}, Slice()
        for queue_id in range(max(config.read_queue_nums, config.write_queue_nums)):
            low, high = self._context.min_offset(topic, queue_id), self._context.store.max_offset(topic, queue_id)
            newest_ms = self._context.store.store_time_at(topic, queue_id, high - 1) if high else 0
            queue = MessageQueue(topic, self._context.settings.broker_name, queue_id)
            table[queue] = TopicOffsets(low, high, max(0, newest_ms))
            await now.pause_if_over()
        rate = self._context.statistics.per_second("TOPIC_PUT_NUMS", topic)
        return reply(command, body=await asyncio.to_thread(fastjson.dumps, TopicStatsTable(table, rate)))


# The values of the reference for missing fields.
_NUMBERS = {"timestamp": "0", "isForce": "false"}


class ResetHandlers(Handlers[OperationsContext]):
    """The handlers that reset and clone the offsets of groups."""

    @answers(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, admins_only=True)
    async def reset(self, connection: Connection, command: Command) -> Command:
        """Reset a group's offset for one queue of a topic, or for all queues. Return the new offsets."""
        header = decode_header_leniently(command, ResetOffsetRequest, missing=_NUMBERS)
        if self._context.settings.server_side_reset:
            return await self._reset_here(connection, command, header)
        return await self._reset_by_clients(connection, command, header)

    @answers(RequestCode.CLONE_GROUP_OFFSET, admins_only=True)
    def clone(self, connection: Connection, command: Command) -> Command:
        """Copy the offsets of a group to another group, for one topic or for all topics.
        Skip unknown topics. Skip topics to which an online source group does not subscribe, unless ``offline`` is
        set."""
        header = decode_header_leniently(command, CloneGroupOffsetRequest)
        group = self._context.clients.consumers(header.src_group)
        online = group.subscriptions if group is not None and not header.offline else None
        # Without a topic, copy all topics. (5.4.0 copies nothing: it searches for a topic with an empty name.)
        for topic in [header.topic] if header.topic else self._context.offsets.topics(header.src_group):
            if self._context.topics.get(topic) is not None and (not online or topic in online):
                self._context.offsets.clone(topic, source=header.src_group, target=header.dest_group)
        return reply(command)

    async def _reset_here(self, connection: Connection, command: Command, header: ResetOffsetRequest) -> Command:
        if self._context.settings.broker_role is BrokerRole.SLAVE:
            return reply(command, ResponseCode.SYSTEM_ERROR, "Can not reset offset in slave broker")
        topic = self._context.topics.get(header.topic)
        if topic is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} does not exist")
        if header.group not in self._context.groups:
            remark = f"Group {header.group} does not exist"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if header.queue_id >= 0 and header.offset is not None and header.offset != -1:
            low = self._context.min_offset(header.topic, header.queue_id)
            high = self._context.store.max_offset(header.topic, header.queue_id)
            # Accept the offset after the end, too, like the reference.
            if not low <= header.offset <= high + 1:
                remark = f"Target offset {header.offset} not in consume queue range [{low}-{high}]"
                return reply(command, ResponseCode.SYSTEM_ERROR, remark)
            targets = {header.queue_id: header.offset}
        else:
            queue_ids = [header.queue_id] if header.queue_id >= 0 else range(topic.write_queue_nums)
            is_end = header.timestamp < 0
            # Search all offsets before the first reset: if a search fails, nothing has changed.
            targets = {queue_id: await self._offset_at(connection, header, queue_id, is_end) for queue_id in queue_ids}
        assert all(offset >= 0 for offset in targets.values()), f"no target is negative: {targets}"
        for queue_id, offset in targets.items():
            # Set the reset first: the woken pull reads it.
            self._context.offsets.reset(header.group, header.topic, queue_id, offset)
            self._context.long_polling.wake(header.topic, queue_id, header.group)
            if self._context.pop is not None:
                self._context.pop.waiting.wake(header.topic, header.group, queue_id)
        return reply(command, body=fastjson.dumps(self._body(header, targets)))

    async def _reset_by_clients(self, connection: Connection, command: Command, header: ResetOffsetRequest) -> Command:
        topic = self._context.topics.get(header.topic)
        if topic is None:
            remark = f"[reset-offset] reset offset failed, no topic in this broker. topic={header.topic}"
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, remark)
        targets: dict[int, int] = {}
        for queue_id in range(topic.write_queue_nums):
            # Check all queues before the first client is notified: a failed reset must not change any queue.
            committed = self._context.offsets.get(header.group, header.topic, queue_id)
            if committed is None or committed < 0:
                remark = f"THe consumer group <{header.group}> not exist"  # the reference's spelling
                return reply(command, ResponseCode.SYSTEM_ERROR, remark)
            target = await self._offset_at(connection, header, queue_id, header.timestamp == -1)
            targets[queue_id] = target if header.is_force else min(committed, target)
        group = self._context.clients.consumers(header.group)
        if group is None:
            remark = (
                f"Consumer not online, so can not reset offset, Group: {header.group} Topic: {header.topic} "
                f"Timestamp: {header.timestamp}"
            )
            return reply(command, ResponseCode.CONSUMER_NOT_ONLINE, remark)
        body = self._body(header, targets)
        for_clients = ResetClientOffsetRequest(
            topic=header.topic, group=header.group, timestamp=header.timestamp, is_force=header.is_force
        )
        for peer, member in group.members.items():
            # Send a list to C++ clients. Java clients read a map with objects as keys instead.
            content = fastjson.dumps(ResetOffsetList.of(body) if member.language == "CPP" else body)
            peer.send(request(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, for_clients, content, one_way=True))
        return reply(command, body=fastjson.dumps(body))

    async def _offset_at(self, connection: Connection, header: ResetOffsetRequest, queue_id: int, is_end: bool) -> int:
        """Return the target offset of a queue. The message at this offset can be deleted from the log if another place
        has it.
        Raises PeerRefused, StoreError, OSError: the other place cannot be searched now."""
        store, older, topic = self._context.store, self._context.older, header.topic
        if is_end:
            return store.max_offset(topic, queue_id)
        offset = max(0, store.offset_by_time(topic, queue_id, header.timestamp))
        if older is None or offset > store.min_offset(topic, queue_id):
            return offset
        if header.timestamp <= 0:
            return min(offset, older.first_offset(topic, queue_id))
        found = await older.offset_by_time(connection, topic, queue_id, header.timestamp)
        return offset if found is None else min(offset, found)

    def _body(self, header: ResetOffsetRequest, targets: dict[int, int]) -> ResetOffsetBody:
        name = self._context.settings.broker_name
        return ResetOffsetBody({MessageQueue(header.topic, name, q): offset for q, offset in targets.items()})
