"""UPDATE_AND_CREATE_TOPIC (``AdminBrokerProcessor``). Source: remoting.md §4.3.7; store.md §9.2."""

from __future__ import annotations

from rmqkit.broker.topics import TopicTable, apply_attributes
from rmqkit.protocol.bodies.topics import TopicConfig
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.headers.topics import CreateTopicRequest
from rmqkit.protocol.names import is_system_topic, topic_fault
from rmqkit.remoting.admission import AdminFrom, for_admins
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch

__all__ = ["TopicHandlers"]


class TopicHandlers:
    """Creates and changes topics."""

    def __init__(self, *, topics: TopicTable, admin_from: AdminFrom) -> None:
        self._topics = topics
        self._admin_from = admin_from

    def register(self, dispatch: Dispatch) -> None:
        """Answer the topic codes."""
        dispatch.register(RequestCode.UPDATE_AND_CREATE_TOPIC, for_admins(self.create, self._admin_from))

    def create(self, connection: Connection, command: Command) -> Command:
        """Create a topic or change its queues, permission and attributes."""
        header = decode_header(command, CreateTopicRequest)
        fault = topic_fault(header.topic)
        if fault is None and is_system_topic(header.topic):
            fault = f"The topic[{header.topic}] is conflict with system topic."
        if fault is None and "message.type=MIXED" in (header.attributes or ""):
            fault = "MIXED message type is not supported."
        if fault is not None:
            return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        known = self._topics.get(header.topic)
        current = (known.attributes if known is not None else None) or {}
        try:
            attributes = apply_attributes(current, header.attributes or "", is_new=known is None)
        except ValueError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        created = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
            attributes=attributes,
        )
        if created != known:
            self._topics.put(created)
        return reply(command)
