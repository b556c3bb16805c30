"""RECALL_MESSAGE (370): a producer recalls a timed message before its time (``RecallMessageProcessor``).

The client received a handle in the answer to its send. The broker stores a *marker* with the unique key of the message
for the same second. When the second is over, the broker delivers neither the message nor the marker. The answer to a
recall is the same if the message does not exist. Recalls are off unless ``recallMessageEnable`` is set.
Source: behaviour.md §3.9; remoting.md §7.6.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from rmqkit.broker.delay.timer import Timer, schedule_timed
from rmqkit.broker.durability import Durability, Outcome, Refusal
from rmqkit.broker.handlers import Handlers, OwnAddress, answers
from rmqkit.broker.settings import BrokerRole, BrokerSettings
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import HeaderError
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header_leniently, reply
from rmqkit.protocol.ids import RecallHandle, decode_recall_handle
from rmqkit.protocol.schemas.send import RecallMessageRequest
from rmqkit.protocol.schemas.topics import Permission
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import InnerMessage, MessageStore, PutStatus
from rmqkit.store.settings import StoreSettings

__all__ = ["RecallHandlers"]

_FAILED = ResponseCode.SYSTEM_ERROR, "recall failed, execute error"
_UNAVAILABLE = "recall failed, broker service not available"


class RecallContext(Protocol):
    """The parts of the broker that a recall uses."""

    clock: Clock
    durability: Durability | None
    identity: OwnAddress
    settings: BrokerSettings
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable


class RecallHandlers(Handlers[RecallContext]):
    """The handler of recalls of timed messages."""

    def __init__(self, context: RecallContext) -> None:
        super().__init__(context)
        self._store_settings = context.store_settings
        self._answer_fields = {property_names.MSG_REGION: context.settings.region_id}

    @answers(RequestCode.RECALL_MESSAGE)
    def recall(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        header = decode_header_leniently(command, RecallMessageRequest, missing={"recallHandle": ""})
        handle = self._handle(header)
        if isinstance(handle, tuple):
            return self._refuse(command, *handle)
        marker = self._marker(connection, header, handle)
        kept = schedule_timed(self._context.timer, marker)
        put = None if isinstance(kept, tuple) else self._context.store.put(kept)
        if put is None or put.status is not PutStatus.OK:
            return self._refuse(command, *_FAILED)
        answer = reply(command, fields={"msgId": handle.unique_key, **self._answer_fields})
        if self._context.durability is None or self._context.durability.has(put.end_offset):
            return answer
        return self._answer_when_durable(command, answer, put.end_offset)

    # -- inside

    def _handle(self, header: RecallMessageRequest) -> RecallHandle | Refusal:
        """Return the handle of the message to recall, or a refusal. The checks run in the reference's order."""
        settings, now_ms = self._context.settings, self._context.clock.now_ms()
        if not settings.recall_messages:
            return ResponseCode.NO_PERMISSION, "recall failed, operation is forbidden"
        if settings.broker_role is BrokerRole.SLAVE:
            return ResponseCode.SLAVE_NOT_AVAILABLE, _UNAVAILABLE
        is_closed = not (settings.broker_permission & Permission.WRITE or settings.recall_unwritable)
        if now_ms < settings.accept_sends_from_ms or is_closed:
            return ResponseCode.SERVICE_NOT_AVAILABLE, _UNAVAILABLE
        if self._context.topics.get(header.topic) is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"recall failed, the topic[{header.topic}] not exist"
        try:
            handle = decode_recall_handle(header.recall_handle)
        except HeaderError:
            return ResponseCode.ILLEGAL_OPERATION, "recall handle is invalid"
        if handle.topic != header.topic:
            return ResponseCode.ILLEGAL_OPERATION, "recall failed, topic not match"
        if handle.broker_name != settings.broker_name:
            return ResponseCode.ILLEGAL_OPERATION, _UNAVAILABLE
        left_ms = handle.deliver_timestamp + 1 - now_ms
        if not 0 < left_ms < self._store_settings.timer_delay_seconds_max * 1000:
            return ResponseCode.ILLEGAL_OPERATION, "recall failed, timestamp invalid"
        return handle

    def _marker(self, connection: Connection, header: RecallMessageRequest, handle: RecallHandle) -> InnerMessage:
        now_ms = self._context.clock.now_ms()
        properties = {
            property_names.PRODUCER_GROUP: header.producer_group or "",
            "BORN_TIMESTAMP": str(now_ms),
            property_names.TAGS: "_RECALL_TAG_",
            property_names.UNIQ_KEY: handle.unique_key,
            # Write the key alone, like 5.4. 5.3 writes topic and + before the key. Delivery accepts both forms.
            property_names.TIMER_DELETE_KEY: handle.unique_key,
            # Add 1 ms, because `Timer` subtracts 1 ms: a marker has to be in the same slot as its message.
            property_names.TIMER_DELIVER_MS: str(handle.deliver_timestamp + 1),
        }
        return InnerMessage(
            topic=handle.topic,
            queue_id=0,
            body=b"0",
            string=None,
            values=properties,
            flag=0,
            sys_flag=0,
            born_timestamp=now_ms,
            born_host=connection.peer_host,
            store_host=self._context.identity.store_host,
        )

    def _refuse(self, command: Command, code: int, remark: str) -> Command:
        return reply(command, code, remark, fields=self._answer_fields)

    async def _answer_when_durable(self, command: Command, answer: Command, end_offset: int) -> Command:
        assert self._context.durability is not None, "answers wait for the disk or slaves"
        outcome, _ = await self._context.durability.wait(end_offset)
        if outcome is Outcome.FAILED:
            return self._refuse(command, *_FAILED)
        return answer
