"""Clients: their heartbeats, the members of groups, queue locks, and requests that the broker relays to clients.

Clients send codes 34, 35, 38, 41 and 42 (``ClientManageProcessor``, ``ConsumerManageProcessor``). Tools send 203, 204,
223, 307, 309 and 328. The broker relays a tool's request to a client, and returns the client's answer
(``Broker2Client``). The timeout is 10 s, or 5 s for several clients. The reference does not relay requests to clients
older than 3.1.8 (2014). rmqkit treats them like all other clients.

Source: remoting.md §4.3.4, §4.4, §4.5, §9.3; behaviour.md §2.6, §2.7, §8.15.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from rmqkit.broker.handlers import Handlers, answers, needs_parser, when_prepared, when_published
from rmqkit.broker.operations import OperationsContext
from rmqkit.broker.tables.clients import CONSUME_ACTIVELY, Member
from rmqkit.errors import ProtocolError, RemotingError, RequestTimedOut
from rmqkit.filter import SQL92
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Body, Command, decode_fields, decode_header, decode_header_leniently, reply, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.names import retry_topic
from rmqkit.protocol.schemas.clients import (
    ClientConnection,
    ConsumeDirectlyRequest,
    ConsumerConnection,
    ConsumerData,
    ConsumerGroupRequest,
    ConsumerIds,
    HeartbeatData,
    LockBody,
    LockedQueues,
    MessageQueue,
    ProducerConnection,
    ProducerGroupRequest,
    ProducerInfo,
    ProducerTable,
    RunningInfoRequest,
    UnregisterClientRequest,
)
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.offsets import ConsumerStatus, ConsumerStatusRequest
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body
from rmqkit.remoting.tasks import Slice

_AT_ONCE_MAX = 64


class ClientHandlers(Handlers[OperationsContext]):
    """The handlers that update the client table and the queue locks."""

    @answers(RequestCode.HEART_BEAT)
    def heartbeat(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None]:
        """Register a client's groups. Silently skip a group that is not allowed to be created.
        If a retry topic was created, the answer waits until the name servers know it: the client may request its route
        next."""
        data = decode_body(command, HeartbeatData)
        refusal = self._too_many(connection, data)
        if refusal is not None:
            return reply(command, ResponseCode.SYSTEM_ERROR, refusal)
        kinds = {one.expression_type for each in data.consumerDataSet for one in each.subscription_data_set}
        if SQL92 in kinds and needs_parser():
            return when_prepared(connection, lambda: self._heartbeat(connection, command, data))
        return self._heartbeat(connection, command, data)

    def _heartbeat(
        self, connection: Connection, command: Command, data: HeartbeatData
    ) -> Command | Awaitable[Command | None]:
        member = Member(
            data.clientID, command.language, command.version, self._context.clock.monotonic_ms(), connection.user
        )
        if _size(data) > _AT_ONCE_MAX:
            return self._heartbeat_in_slices(connection, command, data, member)
        topic_count, started_ms = len(self._context.topics), self._context.clock.monotonic_ms()
        differ = any([*self._consumers(connection, member, data)])  # a list, as any() stops at the first True
        answer = self._took_in(connection, command, data, member, differ, started_ms)
        return (
            answer
            if len(self._context.topics) == topic_count
            else when_published(self._context.topics_published, answer)
        )

    async def _heartbeat_in_slices(
        self, connection: Connection, command: Command, data: HeartbeatData, member: Member
    ) -> Command:
        started_ms, now, differ = self._context.clock.monotonic_ms(), Slice(), False
        for differs in self._consumers(connection, member, data):
            differ = differ or differs
            await now.pause_if_over()
            if not connection.is_open:
                break  # after the close, registered members would never be removed
        return await when_published(
            self._context.topics_published, self._took_in(connection, command, data, member, differ, started_ms)
        )

    def _consumers(self, connection: Connection, member: Member, data: HeartbeatData) -> Iterator[bool]:
        """Register the consumers of a heartbeat one by one. For each, yield True if it has to send its
        subscriptions."""
        fingerprint = data.heartbeatFingerprint
        keeps_topics = bool(fingerprint) and data.withoutSub
        for consumer in data.consumerDataSet:
            # Like the reference, skip the consumer silently. The client's other groups are registered.
            if self._context.settings.reject_pull_consumers and consumer.consume_type == CONSUME_ACTIVELY:
                continue
            config = self._context.groups.get(consumer.group_name)
            if config is None:
                continue
            differs = self._context.clients.needs_topics(consumer.group_name, fingerprint, has_topics=not keeps_topics)
            self._ensure_retry_topic(consumer, config)
            notify = config.notify_consumer_ids_changed_enable
            self._context.clients.register_consumer(
                connection, member, consumer, notify=notify, keeps_topics=keeps_topics
            )
            yield differs

    def _took_in(
        self,
        connection: Connection,
        command: Command,
        data: HeartbeatData,
        member: Member,
        differ: bool,
        started_ms: float,
    ) -> Command:
        """Register the producers of a heartbeat and return the answer."""
        # The statistics have separate times for consumers and producers. Consumers are first, as in the reference.
        consumers_ms = self._context.clock.monotonic_ms()
        for producer in data.producerDataSet if connection.is_open else ():
            self._context.clients.register_producer(connection, member, producer.group_name)
        self._context.statistics.registered("CONSUMER", consumers_ms - started_ms, len(data.consumerDataSet))
        self._context.statistics.registered(
            "PRODUCER", self._context.clock.monotonic_ms() - consumers_ms, len(data.producerDataSet)
        )
        # A client without fingerprints always sends its subscriptions.
        changed = "true" if differ or not data.heartbeatFingerprint else "false"
        # The first field allows clients of 5.x to omit unchanged subscriptions. The second field requests all
        # subscriptions.
        return reply(command, fields={"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": changed})

    def _too_many(self, connection: Connection, data: HeartbeatData) -> str | None:
        """Return the reason if a heartbeat has too many groups or subscriptions, or None."""
        settings = self._context.settings
        group_count = len(data.consumerDataSet) + len(data.producerDataSet)
        if group_count > settings.heartbeat_groups_max:
            return f"heartbeat with {group_count} groups: maxGroupsPerHeartbeat is {settings.heartbeat_groups_max}"
        count = sum(len(consumer.subscription_data_set) for consumer in data.consumerDataSet)
        if count > settings.heartbeat_subscriptions_max:
            maximum = settings.heartbeat_subscriptions_max
            return f"heartbeat with {count} subscriptions: maxSubscriptionsPerHeartbeat is {maximum}"
        # The sum counts known groups twice, so compare the names only if it exceeds the limit.
        if self._context.clients.group_count(connection) + group_count <= settings.connection_groups_max:
            return None
        joined = self._context.clients.groups_of(connection) | {one.group_name for one in data.consumerDataSet}
        total = len(joined | {one.group_name for one in data.producerDataSet})
        if total > settings.connection_groups_max:
            return f"a connection with {total} groups: maxGroupsPerConnection is {settings.connection_groups_max}"
        return None

    @answers(RequestCode.UNREGISTER_CLIENT)
    def unregister(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, UnregisterClientRequest, missing={"clientID": ""})
        if header.producerGroup:
            # Unregister only this connection: a client that reconnected is registered on another connection.
            self._context.clients.unregister_producer(connection, header.producerGroup)
        if header.consumerGroup:
            config = self._context.groups.get(header.consumerGroup)
            notify = config is None or config.notify_consumer_ids_changed_enable
            self._context.clients.unregister_consumer(connection, header.consumerGroup, notify=notify)
        return reply(command, fields={})

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def consumer_list(self, connection: Connection, command: Command) -> Command:
        header = decode_header(command, ConsumerGroupRequest)
        group = self._context.clients.consumers(header.consumer_group)
        if group is None:
            remark = f"no consumer for this group, {header.consumer_group}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        ids = [member.client_id for member in group.members.values()]
        return reply(command, body=msgspec.json.encode(ConsumerIds(ids)))

    @answers(RequestCode.LOCK_BATCH_MQ)
    def lock_queues(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Lock queues for a client. Return the queues that the client holds now."""
        body = decode_body(command, LockBody)
        # Lock here first: the request to the other brokers contains only queues that this broker grants.
        granted = self._context.queue_locks.lock(body.consumer_group, body.client_id, body.queues)
        if self._needs_namesakes(body):
            return self._lock_with_namesakes(command, body, granted)
        return reply(command, body=msgspec.json.encode(LockedQueues(granted)))

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def unlock_queues(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        body = decode_body(command, LockBody)
        self._context.queue_locks.unlock(body.consumer_group, body.client_id, body.queues)
        return self._unlock_with_namesakes(command, body) if self._needs_namesakes(body) else reply(command)

    def _needs_namesakes(self, body: LockBody) -> bool:
        settings = self._context.settings
        return settings.strict_locks and settings.replica_count > 1 and not body.only_this_broker

    async def _lock_with_namesakes(self, command: Command, body: LockBody, granted: list[MessageQueue]) -> Command:
        """Grant queues that more than half of the brokers of this name grant (``lockInStrictMode``)."""
        asked = replace(body, queues=granted, only_this_broker=True)
        assert not body.only_this_broker, "the request comes from a client, not from a broker"
        votes = Counter(granted)  # the votes of this broker
        for answer in await self._context.ask_namesakes(lambda: _with_body(RequestCode.LOCK_BATCH_MQ, asked)):
            votes.update(decode_as(answer.payload, LockedQueues).queues)
        assert all(votes[queue] > 0 for queue in granted), "each granted queue has the own vote"
        agreed = [queue for queue in granted if votes[queue] > self._context.settings.replica_count // 2]
        return reply(command, body=msgspec.json.encode(LockedQueues(agreed)))

    async def _unlock_with_namesakes(self, command: Command, body: LockBody) -> Command:
        asked = replace(body, only_this_broker=True)
        await self._context.ask_namesakes(lambda: _with_body(RequestCode.UNLOCK_BATCH_MQ, asked))
        return reply(command)

    def _ensure_retry_topic(self, consumer: ConsumerData, config: SubscriptionGroupConfig) -> None:
        name = retry_topic(consumer.group_name)
        if self._context.topics.get(name) is not None:
            return
        # The retry topic is ordered if any topic is: retried messages of an ordered topic are consumed in order, too.
        topics = [self._context.topics.get(data.topic) for data in consumer.subscription_data_set]
        made = self._context.topics.ensure(
            name,
            config.retry_queue_nums,
            order=any(topic.order for topic in topics if topic is not None),
            unit=consumer.unit_mode,
            soon=True,
        )
        self._context.groups.made_retry_topic(consumer.group_name, made)


def _size(data: HeartbeatData) -> int:
    """Return the number of groups and subscriptions in a heartbeat. The work for the heartbeat grows with it."""
    return len(data.consumerDataSet) + sum(len(consumer.subscription_data_set) for consumer in data.consumerDataSet)


def _with_body(code: RequestCode, body: LockBody) -> Command:
    return request(code, body=msgspec.json.encode(body))


_RELAY_TIMEOUT_MS = 10_000
_STATUS_TIMEOUT_MS = 5_000
# The text for a missing client id in the reference's remarks.
_NULL = {"clientId": "null"}

_log = logging.getLogger(__name__)


class ConnectionHandlers(Handlers[OperationsContext]):
    """The handlers that show online clients and relay requests to them."""

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def consumers(self, connection: Connection, command: Command) -> Command:
        """Return the members of a consumer group and its properties."""
        name = decode_header(command, ConsumerGroupRequest).consumer_group
        group = self._context.clients.consumers(name)
        if group is None:
            return reply(command, ResponseCode.CONSUMER_NOT_ONLINE, f"the consumer group[{name}] not online")
        body = ConsumerConnection(
            connection_set=_connections(group.members),
            consume_type=group.consume_type,
            message_model=group.message_model,
            consume_from_where=group.consume_from_where,
            subscription_table={topic: subscribed.data for topic, subscribed in group.subscriptions.items()},
        )
        return reply(command, body=msgspec.json.encode(body))

    @answers(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def producers(self, connection: Connection, command: Command) -> Command:
        name = decode_header(command, ProducerGroupRequest).producer_group
        members = self._context.clients.producers(name)
        if not members:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"the producer group[{name}] not exist")
        return reply(command, body=msgspec.json.encode(ProducerConnection(_connections(members))))

    @answers(RequestCode.GET_ALL_PRODUCER_INFO)
    def all_producers(self, connection: Connection, command: Command) -> Command:
        # Convert the members' monotonic times to wall time: tools compare them with the clock of their machine.
        since_ms = self._context.clock.now_ms() - self._context.clock.monotonic_ms()
        table = {
            group: [
                ProducerInfo(
                    client_id=member.client_id,
                    remote_ip=f"/{peer.peer}",
                    language=member.language or "OTHER",
                    version=member.version,
                    last_update_timestamp=int(since_ms + member.seen_ms),
                )
                for peer, member in members.items()
            ]
            for group, members in self._context.clients.all_producers.items()
        }
        return reply(command, body=msgspec.json.encode(ProducerTable(table)))

    @answers(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, lane="relays")
    async def consumer_status(self, connection: Connection, command: Command) -> Command:
        """Return the offsets for a topic that the members of a group report. Members that do not answer are omitted."""
        header = decode_header_leniently(command, ConsumerStatusRequest, missing={"topic": ""})
        group = self._context.clients.consumers(header.group)
        if group is None:
            remark = f"No Any Consumer online in the consumer group: [{header.group}]"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        asked = {
            member.client_id: peer
            for peer, member in group.members.items()
            if (header.client_addr or "").strip() in ("", member.client_id)
        }
        found = await asyncio.gather(*(self._status_of(peer, header) for peer in asked.values()))
        table = {client_id: queues for client_id, queues in zip(asked, found, strict=True) if queues is not None}
        return reply(command, body=fastjson.dumps(ConsumerStatus(consumer_table=table)))

    @answers(RequestCode.GET_CONSUMER_RUNNING_INFO, lane="relays")
    async def running_info(self, connection: Connection, command: Command) -> Command:
        header = decode_header_leniently(command, RunningInfoRequest, missing=_NULL)
        return await self._relay(command, header.consumer_group, header.client_id, decode_fields(command), b"")

    @answers(RequestCode.CONSUME_MESSAGE_DIRECTLY, admins_only=True, lane="relays")
    async def consume_directly(self, connection: Connection, command: Command) -> Command:
        """Let a consumer handle one message now. The broker adds the message and the flags of topic and group to the
        request."""
        header = decode_header_leniently(command, ConsumeDirectlyRequest, missing=_NULL)
        try:
            offset = decode_offset_id(header.msg_id or "")[2]
        except ValueError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        record = self._context.store.log.record_at(offset) if offset >= 0 else None
        if record is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        fields = {**decode_fields(command), "brokerName": self._context.settings.broker_name}
        topic = self._context.topics.get(header.topic or "")
        if topic is not None:
            fields["topicSysFlag"] = str(topic.topic_sys_flag)
        group = self._context.groups.get(header.consumer_group)
        if group is not None:
            fields["groupSysFlag"] = str(group.group_sys_flag)
        return await self._relay(command, header.consumer_group, header.client_id or "null", fields, record)

    async def _relay(self, command: Command, group: str, client_id: str, fields: dict[str, str], body: Body) -> Command:
        peer = self._context.clients.consumer_connection(group, client_id)
        if peer is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"The Consumer <{group}> <{client_id}> not online")
        try:
            # Make a new command: the opaque of the tool's request has no meaning on the member's connection.
            answer = await peer.call(Command(command.code, fields=fields, body=body), _RELAY_TIMEOUT_MS)
        except RequestTimedOut as error:
            remark = f"consumer <{group}> <{client_id}> Timeout: {error}"
            return reply(command, ResponseCode.CONSUME_MSG_TIMEOUT, remark)
        except RemotingError as error:
            remark = f"invoke consumer <{group}> <{client_id}> Exception: {error}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        return reply(command, answer.code, answer.remark, fields=decode_fields(answer), body=answer.payload)

    async def _status_of(self, peer: Connection, header: ConsumerStatusRequest) -> dict[MessageQueue, int] | None:
        asked = ConsumerStatusRequest(header.topic, header.group)
        try:
            answer = await peer.call(request(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, asked), _STATUS_TIMEOUT_MS)
            if answer.code == ResponseCode.SUCCESS and answer.payload:
                return fastjson.decode_as(answer.payload, ConsumerStatus).message_queue_table
        except (RemotingError, ProtocolError) as error:
            _log.warning("consumer status of group %s: %s", header.group, error)
        return None


def _connections(members: Mapping[Connection, Member]) -> list[ClientConnection]:
    return [
        ClientConnection(
            client_id=member.client_id,
            client_addr=peer.peer,
            language=member.language or "OTHER",
            version=member.version,
        )
        for peer, member in members.items()
    ]
