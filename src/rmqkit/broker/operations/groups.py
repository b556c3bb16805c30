"""Consumer groups: codes 200, 201, 207, 225, 300, 343, 345, 352, 353, 402 (``AdminBrokerProcessor``).

Source: remoting.md §4.4; behaviour.md §9.9.
"""

from __future__ import annotations

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.broker.tables.attributes import GROUP_ATTRIBUTES, alter
from rmqkit.broker.tables.groups import request_modes_file
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.names import group_fault
from rmqkit.protocol.schemas.groups import (
    DeleteGroupRequest,
    GroupConfigList,
    GroupConfigsResponse,
    GroupForbidden,
    GroupForbiddenRequest,
    GroupList,
    GroupRequest,
    GroupSubscription,
    GroupTopicRequest,
    SubscriptionGroupConfig,
)
from rmqkit.protocol.schemas.pop import MessageRequestModes
from rmqkit.protocol.schemas.topics import TopicList, TopicRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body
from rmqkit.remoting.tasks import Slice

__all__ = ["GroupHandlers"]


class GroupHandlers(Handlers[OperationsContext]):
    """Creates, changes, deletes and shows consumer groups."""

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, admins_only=True)
    async def create(self, connection: Connection, command: Command) -> Command:
        if not command.payload:
            return reply(command)
        return await self._put(command, [decode_body(command, SubscriptionGroupConfig)])

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, admins_only=True)
    async def create_several(self, connection: Connection, command: Command) -> Command:
        """Create or change several groups: all, or none when one of them is refused."""
        return await self._put(command, decode_body(command, GroupConfigList).group_config_list)

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP, admins_only=True)
    def delete(self, connection: Connection, command: Command) -> Command:
        """Delete a group, with its offsets where that is asked for; an unknown one is fine."""
        header = decode_header_leniently(command, DeleteGroupRequest)
        self._context.groups.remove(header.group_name)
        self._context.statistics.forget(group=header.group_name)
        if header.clean_offset:
            self._context.offsets.remove_group(header.group_name)
        return reply(command)

    @answers(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, admins_only=True)
    def forbid(self, connection: Connection, command: Command) -> Command:
        """Close a topic to a group or open it, where that is asked for; whether it may read."""
        header = decode_header_leniently(command, GroupForbiddenRequest)
        if header.readable is not None:
            self._context.groups.forbid_reading(header.group, header.topic, is_forbidden=not header.readable)
        readable = not self._context.groups.is_read_forbidden(header.group, header.topic)
        body = GroupForbidden(group=header.group, topic=header.topic, readable=readable)
        return reply(command, remark="", body=msgspec.json.encode(body))

    @answers(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    def all_groups(self, connection: Connection, command: Command) -> Command:
        """Every group, with the version of the table; slaves copy it."""
        stored = self._context.groups.stored
        header = GroupConfigsResponse(len(stored.subscription_group_table))
        return reply(command, header=header, body=fastjson.dumps(stored))

    @answers(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    def request_modes(self, connection: Connection, command: Command) -> Command:
        """Which groups pop: what ``messageRequestMode.json`` says; slaves copy it."""
        modes = request_modes_file(self._context.store.root).load(MessageRequestModes) or MessageRequestModes()
        return reply(command, body=msgspec.json.encode(modes))

    @answers(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)
    def group(self, connection: Connection, command: Command) -> Command:
        """One group; an unknown one is created when the settings allow it."""
        config = self._context.groups.get(decode_header(command, GroupRequest).group)
        if config is None:
            return reply(command, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, "No group in this broker")
        return reply(command, body=fastjson.dumps(config))

    @answers(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def groups_of_topic(self, connection: Connection, command: Command) -> Command:
        """The groups that subscribe to a topic, and those that have offsets on it."""
        topic = decode_header(command, TopicRequest).topic
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

    async def _put(self, command: Command, wanted: list[SubscriptionGroupConfig]) -> Command:
        """Create or change groups; the attributes of what is wanted are signed changes."""
        table, now = self._context.groups.stored.subscription_group_table, Slice()
        for config in wanted:
            await now.pause_if_over()
            fault = group_fault(config.group_name)
            if fault is not None:
                return reply(command, ResponseCode.INVALID_PARAMETER, fault)
            known = table.get(config.group_name)
            current = (known.attributes or {}) if known is not None else {}
            try:
                config.attributes = alter(current, config.attributes or {}, GROUP_ATTRIBUTES, is_new=known is None)
            except ValueError as error:
                return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        if wanted:
            await self._context.groups.put_shared(*wanted)
        return reply(command)
