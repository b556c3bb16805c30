"""Who is connected, and what they are asked through the broker: codes 203, 204, 223, 307, 309, 328.

A relay hands a request on to one client and its answer back (``Broker2Client``); the client gets 10 s, and 5 s where
several are asked. Clients of before 3.1.8 (2014), to whom the reference relays nothing, are not told apart.
Source: remoting.md §4.4, §4.5; behaviour.md §8.15.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.operations.context import OperationsContext
from rmqkit.broker.tables.clients import Member
from rmqkit.errors import ProtocolError, RemotingError, RequestTimedOut
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Body, Command, decode_fields, decode_header, decode_header_leniently, reply, request
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.schemas.clients import (
    ClientConnection,
    ConsumeDirectlyRequest,
    ConsumerConnection,
    ConsumerGroupRequest,
    MessageQueue,
    ProducerConnection,
    ProducerGroupRequest,
    ProducerInfo,
    ProducerTable,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.offsets import ConsumerStatus, ConsumerStatusRequest
from rmqkit.remoting.connection import Connection

__all__ = ["ConnectionHandlers"]

_RELAY_TIMEOUT_MS = 10_000
_STATUS_TIMEOUT_MS = 5_000
_NULL = {"clientId": "null"}
"""How the reference's remarks spell a client id that is missing."""

_log = logging.getLogger(__name__)


class ConnectionHandlers(Handlers[OperationsContext]):
    """Shows the clients online and relays questions to them."""

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def consumers(self, connection: Connection, command: Command) -> Command:
        """The members of a consumer group and what it is registered with."""
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
        """The offsets that the members of a group have on a topic, as they see it; who does not answer is left out."""
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
        """Have a consumer handle one message now; the broker adds the message and what is known of topic and group."""
        header = decode_header_leniently(command, ConsumeDirectlyRequest, missing=_NULL)
        try:
            offset = decode_offset_id(header.msg_id or "")[2]
        except ValueError as error:
            return reply(command, ResponseCode.SYSTEM_ERROR, str(error))
        record = self._context.store.record_at(offset) if offset >= 0 else None
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
