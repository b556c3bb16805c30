"""Heartbeats and who is online: codes 34, 35, 38 (``ClientManageProcessor``, ``ConsumerManageProcessor``).

Source: remoting.md §4.3.4; behaviour.md §2.6.
"""

from __future__ import annotations

import msgspec

from rmqkit.broker.clients import ClientTable, Member
from rmqkit.broker.groups import GroupTable
from rmqkit.broker.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.protocol.bodies.clients import ConsumerData, ConsumerIds, HeartbeatData
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.clients import ConsumerGroupRequest, UnregisterClientRequest
from rmqkit.protocol.names import retry_topic
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.dispatch import Dispatch

__all__ = ["ClientHandlers"]


class ClientHandlers:
    """Keeps the client table."""

    def __init__(self, *, clients: ClientTable, groups: GroupTable, topics: TopicTable, clock: Clock) -> None:
        self._clients = clients
        self._groups = groups
        self._topics = topics
        self._clock = clock

    def register(self, dispatch: Dispatch) -> None:
        """Answer the client codes."""
        dispatch.register(RequestCode.HEART_BEAT, self.heartbeat)
        dispatch.register(RequestCode.UNREGISTER_CLIENT, self.unregister)
        dispatch.register(RequestCode.GET_CONSUMER_LIST_BY_GROUP, self.consumer_list)

    def heartbeat(self, connection: Connection, command: Command) -> Command:
        """Take in a client's groups; a group that may not be created is skipped silently."""
        data = decode_as(command.payload, HeartbeatData)
        member = Member(data.clientID, command.language, command.version, self._clock.monotonic_ms())
        for consumer in data.consumerDataSet:
            if data.withoutSub:
                self._refresh(connection, consumer.group_name, member)
            else:
                self._register_consumer(connection, consumer, member)
        for producer in data.producerDataSet:
            self._clients.register_producer(connection, member, producer.group_name)
        # Without stored fingerprints every heartbeat must come whole: a changed subscription says so to V2 clients.
        changed = "true" if data.heartbeatFingerprint else "false"
        return reply(command, fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": changed})

    def unregister(self, connection: Connection, command: Command) -> Command:
        """A client says good-bye to its groups."""
        header = decode_header(command, UnregisterClientRequest)
        if header.producerGroup:
            self._clients.unregister_producer(connection, header.producerGroup)
        if header.consumerGroup:
            config = self._groups.get(header.consumerGroup)
            notify = config is None or config.notify_consumer_ids_changed_enable
            self._clients.unregister_consumer(connection, header.consumerGroup, notify=notify)
        return reply(command, fields={})

    def consumer_list(self, connection: Connection, command: Command) -> Command:
        """The client ids of a group's members online."""
        header = decode_header(command, ConsumerGroupRequest)
        group = self._clients.consumers(header.consumer_group)
        if group is None:
            remark = f"no consumer for this group, {header.consumer_group}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        ids = [member.client_id for member in group.members.values()]
        return reply(command, body=msgspec.json.encode(ConsumerIds(ids)))

    def _register_consumer(self, connection: Connection, consumer: ConsumerData, member: Member) -> None:
        config = self._groups.get(consumer.group_name)
        if config is None:
            return
        topics = [self._topics.get(data.topic) for data in consumer.subscription_data_set]
        self._topics.ensure(
            retry_topic(consumer.group_name),
            config.retry_queue_nums,
            order=any(topic.order for topic in topics if topic is not None),
            unit=consumer.unit_mode,
        )
        notify = config.notify_consumer_ids_changed_enable
        self._clients.register_consumer(connection, member, consumer, notify=notify)

    def _refresh(self, connection: Connection, group_name: str, member: Member) -> None:
        group = self._clients.consumers(group_name)
        if group is not None and connection in group.members:
            group.members[connection] = member
