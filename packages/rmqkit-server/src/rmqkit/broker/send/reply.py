"""SEND_REPLY_MESSAGE(_V2): the broker pushes a reply message to its requester (``ReplyMessageProcessor``).

The requester is the producer with the client id in property REPLY_TO_CLIENT. The requester has 10 s to accept the
reply. With ``storeReplyMessageEnable`` the broker also stores the reply, even if the push failed.
Source: behaviour.md §3.8; remoting.md §4.3.1, §4.3.7.
"""

from __future__ import annotations

import random

from rmqkit.broker.durability import REJECTED, Outcome
from rmqkit.broker.handlers import Handlers, answers
from rmqkit.broker.send.checks import NO_BODY, SendChecks, SendContext, decode_v1, decode_v2, stamps_of
from rmqkit.broker.settings import BrokerRole
from rmqkit.errors import PeerRefused, RemotingError
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, reply, request
from rmqkit.protocol.ids import offset_id
from rmqkit.protocol.properties import decode_properties, encode_in_stored_order
from rmqkit.protocol.record import host_text
from rmqkit.protocol.schemas.send import PushReplyRequest, SendMessageRequest, SendMessageResponse
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import InnerMessage, PutStatus

__all__ = ["ReplyHandlers"]

_PUSH_TIMEOUT_MS = 10_000


class ReplyHandlers(Handlers[SendContext]):
    """The handlers of reply messages."""

    def __init__(self, context: SendContext) -> None:
        super().__init__(context)
        self._checks = SendChecks(context)
        _, self._answer_fields = stamps_of(self._context.settings)

    # Use a separate lane: each request waits up to 10 s for another client.
    @answers(RequestCode.SEND_REPLY_MESSAGE, lane="reply")
    async def reply(self, connection: Connection, command: Command) -> Command:
        """SEND_REPLY_MESSAGE: long header names."""
        return await self._reply(connection, command, decode_v1(command, topic="", sysFlag="0"))

    @answers(RequestCode.SEND_REPLY_MESSAGE_V2, lane="reply")
    async def reply_v2(self, connection: Connection, command: Command) -> Command:
        """SEND_REPLY_MESSAGE_V2: short header names."""
        return await self._reply(connection, command, decode_v2(command, b=""))

    async def _reply(self, connection: Connection, command: Command, header: SendMessageRequest) -> Command:
        if self._context.settings.broker_role is BrokerRole.SLAVE and not self._context.settings.acts_as_master:
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        if not command.body:
            raise PeerRefused(ResponseCode.SYSTEM_ERROR, NO_BODY, self._context.identity.ip)
        topic = self._checks.topic_of(connection, header)
        if isinstance(topic, tuple):
            return reply(command, *topic, fields=self._answer_fields)
        queue_id = header.queue_id if header.queue_id >= 0 else random.randrange(topic.write_queue_nums or 1)
        sent = decode_properties((header.properties or "").encode("utf-8", "replace"))
        message = InnerMessage(
            topic=topic.topic_name,
            queue_id=queue_id,
            body=command.payload,
            string=None,
            values=sent | self._answer_fields,
            flag=header.flag,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            born_host=connection.peer_host,
            store_host=self._context.identity.store_host,
            reconsume_times=header.reconsume_times or 0,
        )
        failure = await self._push(connection, header, message)
        answer = SendMessageResponse("0", queue_id, 0) if failure is None else None
        # Store the reply even if the push failed. The answer still reports the failure.
        if self._context.settings.store_replies:
            answer = await self._store_reply(message) or answer
        code = ResponseCode.SUCCESS if failure is None else ResponseCode.SYSTEM_ERROR
        return reply(command, code, failure, header=answer, fields=self._answer_fields)

    async def _push(self, connection: Connection, header: SendMessageRequest, message: InnerMessage) -> str | None:
        """Push a reply to its requester. Return the remark of a failure, or None."""
        client_id = message.parsed.get(property_names.REPLY_TO_CLIENT)
        if client_id is None:
            return "reply message properties[REPLY_TO_CLIENT] is null"
        requester = self._context.clients.producer_connection(client_id)
        if requester is None:
            return f"push reply message fail, channel of <{client_id}> not found."
        now_ms = self._context.clock.now_ms()
        # Add this property only to the pushed message: the stored reply does not have it.
        properties = message.parsed | {property_names.PUSH_REPLY_TIME: str(now_ms)}
        pushed = PushReplyRequest(
            producer_group=header.producer_group,
            topic=header.topic,
            default_topic=header.default_topic,
            default_topic_queue_nums=header.default_topic_queue_nums,
            queue_id=header.queue_id,
            sys_flag=header.sys_flag,
            born_timestamp=header.born_timestamp,
            flag=header.flag,
            properties=encode_in_stored_order(properties).decode(),
            reconsume_times=header.reconsume_times,
            unit_mode=header.unit_mode,
            born_host=connection.peer,
            store_host=host_text(self._context.identity.store_host),
            store_timestamp=now_ms,
        )
        push = request(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, pushed, message.body)
        try:
            taken = (await requester.call(push, _PUSH_TIMEOUT_MS)).code == ResponseCode.SUCCESS
        except RemotingError:
            taken = False
        return None if taken else f"push reply message to {client_id}fail."

    async def _store_reply(self, message: InnerMessage) -> SendMessageResponse | None:
        """Store a reply in its topic. Return None if the store refuses it: the replier does not learn about this."""
        put = self._context.store.put(message)
        if put.status is not PutStatus.OK:
            return None
        self._context.recorder.stored(message, put, 0.0)
        if self._context.durability is not None and not self._context.durability.has(put.end_offset):
            outcome, _ = await self._context.durability.wait(put.end_offset)
            if outcome is Outcome.FAILED:
                return None
        return SendMessageResponse(
            offset_id(message.store_host, put.physical_offset), message.queue_id, put.queue_offset
        )
