"""Consumer offsets and queue bounds: codes 14, 15, 29, 30, 31, 32, and 33 (a message by its place).

Source: remoting.md §4.3.3, §4.3.6; behaviour.md §5.2.
"""

from __future__ import annotations

from rmqkit.broker.groups import GroupTable
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.topics import TopicTable
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.clients import ViewMessageRequest
from rmqkit.protocol.headers.offsets import (
    OffsetResponse,
    QueryConsumerOffsetRequest,
    QueueRequest,
    SearchOffsetRequest,
    StoreTimeResponse,
    UpdateConsumerOffsetRequest,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.store.message_store import MessageStore

__all__ = ["OffsetHandlers"]


class OffsetHandlers:
    """Answers where a group is and what a queue holds."""

    def __init__(self, *, store: MessageStore, topics: TopicTable, groups: GroupTable, offsets: OffsetTable) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets

    def register(self, dispatch: Dispatch) -> None:
        """Answer the offset codes."""
        dispatch.register(RequestCode.QUERY_CONSUMER_OFFSET, self.query)
        dispatch.register(RequestCode.UPDATE_CONSUMER_OFFSET, self.update)
        dispatch.register(RequestCode.GET_MAX_OFFSET, self.max_offset)
        dispatch.register(RequestCode.GET_MIN_OFFSET, self.min_offset)
        dispatch.register(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, self.search)
        dispatch.register(RequestCode.GET_EARLIEST_MSG_STORETIME, self.earliest_store_time)
        dispatch.register(RequestCode.VIEW_MESSAGE_BY_ID, self.view)

    def query(self, connection: Connection, command: Command) -> Command:
        """The committed offset; without one, 0 where the queue still begins at 0 and that is in memory."""
        header = decode_header(command, QueryConsumerOffsetRequest)
        offset = self._offsets.get(header.consumer_group, header.topic, header.queue_id)
        if offset is not None:
            return reply(command, header=OffsetResponse(offset))
        if header.set_zero_if_not_found is False:
            remark = "Not found, do not set to zero, maybe this group boot first"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)
        starts_at_zero = self._store.min_offset(header.topic, header.queue_id) <= 0
        if starts_at_zero and self._store.is_in_memory(header.topic, header.queue_id, 0):
            return reply(command, header=OffsetResponse(0))
        remark = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
        return reply(command, ResponseCode.QUERY_NOT_FOUND, remark)

    def update(self, connection: Connection, command: Command) -> Command:
        """Commit an offset."""
        header = decode_header(command, UpdateConsumerOffsetRequest)
        if header.consumer_group not in self._groups:
            remark = f"Group {header.consumer_group} not exist!"
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, remark)
        if self._topics.get(header.topic) is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"Topic {header.topic} not exist!")
        if header.queue_id is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"QueueId is null, topic is {header.topic}")
        if header.commit_offset is None:
            return reply(command, ResponseCode.INVALID_PARAMETER, f"Offset is null, topic is {header.topic}")
        self._offsets.commit(header.consumer_group, header.topic, header.queue_id, header.commit_offset)
        return reply(command)

    def max_offset(self, connection: Connection, command: Command) -> Command:
        """One past the last message of a queue."""
        header = decode_header(command, QueueRequest)
        return reply(command, header=OffsetResponse(self._store.max_offset(header.topic, header.queue_id)))

    def min_offset(self, connection: Connection, command: Command) -> Command:
        """The first message of a queue that is still stored."""
        header = decode_header(command, QueueRequest)
        return reply(command, header=OffsetResponse(self._store.min_offset(header.topic, header.queue_id)))

    def search(self, connection: Connection, command: Command) -> Command:
        """The offset at a store time."""
        header = decode_header(command, SearchOffsetRequest)
        upper = (header.boundary_type or "").upper() == "UPPER"
        offset = self._store.offset_by_time(header.topic, header.queue_id, header.timestamp, upper=upper)
        return reply(command, header=OffsetResponse(offset))

    def earliest_store_time(self, connection: Connection, command: Command) -> Command:
        """The store time of a queue's first message."""
        header = decode_header(command, QueueRequest)
        timestamp = self._store.earliest_store_time(header.topic, header.queue_id)
        return reply(command, header=StoreTimeResponse(timestamp))

    def view(self, connection: Connection, command: Command) -> Command:
        """The record at a place in the log."""
        header = decode_header(command, ViewMessageRequest)
        record = self._store.record_at(header.offset)
        if record is None:
            remark = f"can not find message by the offset, {header.offset}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        return reply(command, body=[record])
