"""Topics: codes 17, 18, 21, 215, 305, 351 (``AdminBrokerProcessor``).

Who may create, change and delete is what ``adminAllowedAddresses`` says. A change is on the disk, and on its way to
the name servers, when it is answered. Source: remoting.md §4.3.7, §4.4; behaviour.md §9.9; store.md §9.2.
"""

from __future__ import annotations

import msgspec

from rmqkit.broker.attributes import TOPIC_ATTRIBUTES, alter, parse_changes
from rmqkit.broker.offsets import OffsetTable
from rmqkit.broker.topics import TopicTable
from rmqkit.protocol.bodies.groups import TopicConfigList
from rmqkit.protocol.bodies.namesrv import TopicList
from rmqkit.protocol.bodies.topics import DataVersion, TopicConfig
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.topics import CreateTopicRequest, TopicConfigsResponse, TopicRequest
from rmqkit.protocol.names import retry_topic, topic_fault
from rmqkit.remoting.admission import AdminAddresses, for_admins
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch
from rmqkit.store.message_store import MessageStore

__all__ = ["TopicHandlers"]

_FILTER_TYPES = ("SINGLE_TAG", "MULTI_TAG")


class TopicHandlers:
    """Creates, changes, deletes and shows topics."""

    def __init__(
        self, *, topics: TopicTable, offsets: OffsetTable, store: MessageStore, admin_addresses: AdminAddresses
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._store = store
        self._admin_addresses = admin_addresses

    def register(self, dispatch: Dispatch) -> None:
        """Answer the topic codes."""
        for code, handler in (
            (RequestCode.UPDATE_AND_CREATE_TOPIC, self.create),
            (RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, self.create_several),
            (RequestCode.DELETE_TOPIC_IN_BROKER, self.delete),
        ):
            dispatch.register(code, for_admins(handler, self._admin_addresses))
        dispatch.register(RequestCode.GET_ALL_TOPIC_CONFIG, self.all_topics)
        dispatch.register(RequestCode.GET_TOPIC_CONFIG, self.topic)
        dispatch.register(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.system_topics)

    def create(self, connection: Connection, command: Command) -> Command:
        """Create a topic or change its queues, permission and attributes."""
        header = decode_header_leniently(command, CreateTopicRequest, drops_unreadable=False)
        if header.topic_filter_type not in _FILTER_TYPES:
            remark = f"topicFilterType = [{header.topic_filter_type}] value invalid"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        wanted = TopicConfig(
            topic_name=header.topic,
            read_queue_nums=header.read_queue_nums,
            write_queue_nums=header.write_queue_nums,
            perm=header.perm,
            topic_filter_type=header.topic_filter_type,
            topic_sys_flag=header.topic_sys_flag or 0,
            order=header.order,
        )
        try:
            wanted.attributes = parse_changes(header.attributes or "")
        except ValueError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        return self._put(command, [wanted])

    def create_several(self, connection: Connection, command: Command) -> Command:
        """Create or change several topics: all, or none when one of them is refused."""
        return self._put(command, decode_as(command.payload, TopicConfigList).topic_config_list)

    def delete(self, connection: Connection, command: Command) -> Command:
        """Delete a topic, its queues, its groups' offsets and their POP retry topics; an unknown one is fine."""
        topic = decode_header_leniently(command, TopicRequest, missing={"topic": ""}).topic
        fault = topic_fault(topic) if not topic.strip() else self._conflict(topic)
        if fault is not None:
            return reply(command, ResponseCode.INVALID_PARAMETER, fault)
        retries = [retry_topic(f"{group}{mark}{topic}") for group in self._offsets.groups(topic) for mark in "_+"]
        for name in (topic, *filter(self._topics.get, retries)):
            self._topics.remove(name)
            self._offsets.remove_topic(name)
            self._store.delete_topic(name)
        return reply(command)

    def all_topics(self, connection: Connection, command: Command) -> Command:
        """Every topic, with the version of the table; slaves copy it."""
        table = self._topics.snapshot()
        table.mapping_data_version = DataVersion()
        table.topic_queue_mapping_info_map = {}
        header = TopicConfigsResponse(len(table.topic_config_table))
        return reply(command, header=header, body=msgspec.json.encode(table))

    def topic(self, connection: Connection, command: Command) -> Command:
        """One topic."""
        name = decode_header(command, TopicRequest).topic
        config = self._topics.get(name)
        if config is None:
            return reply(command, ResponseCode.TOPIC_NOT_EXIST, f"No topic in this broker. topic: {name}")
        return reply(command, body=msgspec.json.encode(config))

    def system_topics(self, connection: Connection, command: Command) -> Command:
        """The names of the topics that are the broker's own."""
        return reply(command, body=msgspec.json.encode(TopicList(topic_list=self._topics.system_topics)))

    def _put(self, command: Command, wanted: list[TopicConfig]) -> Command:
        """Create or change what differs; the attributes of what is wanted are signed changes."""
        changed = []
        for config in wanted:
            known = self._topics.get(config.topic_name)
            changes = config.attributes or {}
            fault = topic_fault(config.topic_name) or self._conflict(config.topic_name)
            if fault is None and changes.get("+message.type") == "MIXED":
                fault = "MIXED message type is not supported."
            if fault is not None:
                return reply(command, ResponseCode.INVALID_PARAMETER, fault)
            current = (known.attributes or {}) if known is not None else {}
            try:
                config.attributes = alter(current, changes, TOPIC_ATTRIBUTES, is_new=known is None)
            except ValueError as error:
                return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
            if config != known:
                changed.append(config)
        if changed:
            self._topics.put(*changed)
        return reply(command)

    def _conflict(self, topic: str) -> str | None:
        return f"The topic[{topic}] is conflict with system topic." if self._topics.is_system(topic) else None
