"""Queries of messages and queue entries, and checks of subscriptions: codes 12, 33, 46, 321
(``QueryMessageProcessor``).

The index for QUERY_MESSAGE has hashes, so the store compares topic and key of each record. A query of a unique key
returns at most ``defaultQueryMaxNum`` messages. A tag (``indexType`` T, 5.4) is indexed as ``T#tag``. Records are sent
as slices of the log.
Source: remoting.md §4.3.6; behaviour.md §2.6, §8.16; store.md §7.5.
"""

from __future__ import annotations

from collections.abc import Awaitable
from itertools import chain, repeat

import msgspec

from rmqkit.broker.durability import REJECTED
from rmqkit.broker.handlers import Handlers, answers, needs_parser, when_prepared
from rmqkit.broker.older import when_found
from rmqkit.broker.pull.handler import PullContext
from rmqkit.broker.tables.filters import EVERYTHING, inline_filter
from rmqkit.filter import SQL92, is_tag_type
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently, reply
from rmqkit.protocol.schemas.clients import CheckClientBody
from rmqkit.protocol.schemas.pull import (
    ConsumeQueueEntry,
    QueryConsumeQueueBody,
    QueryConsumeQueueRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    ViewMessageRequest,
)
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.router import decode_body
from rmqkit.store.queues.queue_ext import ExtUnit

__all__ = ["QueryHandlers"]

_ANSWER_BYTES_MAX = 15 << 20
"""The maximum size of an answer. Clients read frames of up to 16 MiB, and would lose a larger answer as a whole."""


_PHYSICAL_OFFSET = slice(28, 36)
"""The bytes of a record that contain its physical offset. The offset identifies the record."""

_ENTRIES_MAX = 10_000
"""The maximum number of queue entries in an answer."""


class QueryHandlers(Handlers[PullContext]):
    """The handlers of queries by position and by key."""

    def __init__(self, context: PullContext) -> None:
        super().__init__(context)
        self._has_units = context.store_settings.enable_consume_queue_ext

    @answers(RequestCode.QUERY_MESSAGE)
    def query(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Return the records with a key in the order of the log, and then records that were deleted from the log."""
        if not self._context.may_serve():
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        header = decode_header_leniently(
            command, QueryMessageRequest, missing={"topic": "", "key": ""}, drops_unreadable=False
        )
        if header.max_num < 0 and not header.is_unique_key:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"maxNum must not be negative: {header.max_num}")
        count_max = self._context.settings.unique_key_query_count_max if header.is_unique_key else header.max_num
        key = f"T#{header.key}" if header.index_type == "T" else header.key
        found = self._context.store.query(header.topic, key, count_max, header.begin_timestamp, header.end_timestamp)
        records: list[memoryview] = []
        left = _ANSWER_BYTES_MAX
        for physical_offset in found.physical_offsets:
            record = self._context.store.log.record_at(physical_offset)
            # Accept a first record of any size: a client has to get a single long message.
            if record is not None and (len(record) <= left or not records):
                records.append(record)
                left -= len(record)
        assert records or left == _ANSWER_BYTES_MAX, "without records all bytes are left"
        answer = QueryMessageResponse(found.last_update_timestamp, found.last_update_offset)
        # Count the offsets of the index, not the records: records that did not fit must not be queried elsewhere.
        missing = min(count_max, self._context.store_settings.query_count_max) - len(found.physical_offsets)
        older = self._context.older
        if older is None or missing <= 0:
            return self._found(command, records, answer)
        looking = older.query(
            *(connection, header.topic, key, missing, header.begin_timestamp, header.end_timestamp), bytes_max=left
        )
        return when_found(looking, lambda found: self._found(command, _joined(records, found), answer))

    @staticmethod
    def _found(command: Command, records: list[memoryview], answer: QueryMessageResponse) -> Command:
        if not records:
            remark = "can not find message, maybe time range not correct"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark, header=QueryMessageResponse(0, 0))
        return reply(command, header=answer, body=[*records])

    @answers(RequestCode.VIEW_MESSAGE_BY_ID)
    def view(self, connection: Connection, command: Command) -> Command | Awaitable[Command]:
        """Return the record at a physical offset. Clients take the offset from an offset message id."""
        if not self._context.may_serve():
            return reply(command, ResponseCode.SYSTEM_BUSY, REJECTED)
        offset = decode_header(command, ViewMessageRequest).offset
        # A client can send any id, but no file has a negative offset.
        record = self._context.store.log.record_at(offset) if offset >= 0 else None
        older = self._context.older
        if record is None and offset >= 0 and older is not None:
            return when_found(older.record_at(connection, offset), lambda found: self._viewed(command, offset, found))
        return self._viewed(command, offset, record)

    @staticmethod
    def _viewed(command: Command, offset: int, record: memoryview | None) -> Command:
        if record is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return reply(command, body=[record])

    @answers(RequestCode.QUERY_CONSUME_QUEUE)
    def queue_entries(self, connection: Connection, command: Command) -> Command:
        """Return entries of a queue from an offset on, within one file of the queue.
        A group's filter is applied only to entries with an extension unit, as in the reference."""
        header = decode_header_leniently(command, QueryConsumeQueueRequest)
        topic, queue_id, group = header.topic, header.queue_id, header.consumer_group
        if topic is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, "QUERY_CONSUME_QUEUE needs a topic")
        low, high = self._context.store.min_offset(topic, queue_id), self._context.store.max_offset(topic, queue_id)
        if not high:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"{queue_id}@{topic} is not exist!")
        if not low <= header.index < high:
            return reply(command, remark=f"Index {header.index} of {queue_id}@{topic} is not exist!")
        body = QueryConsumeQueueBody(max_queue_index=high, min_queue_index=low)
        subscribed = self._context.clients.subscription(group, topic) if group is not None else None
        registered = self._context.filters.get(topic, group) if group is not None else None
        if subscribed is not None:
            body.subscription_data = subscribed
            body.filter_data = msgspec.json.encode(registered and registered.data).decode()
        elif group is not None:
            body.filter_data = f"{group}@{topic} is not online!"
        count = min(max(0, header.count), _ENTRIES_MAX)
        verdicts: list[bool] = []
        if subscribed is not None and self._has_units:
            wanted = EVERYTHING if registered is None else registered.pull_filter
            if is_tag_type(subscribed.expression_type):
                wanted = inline_filter(subscribed.sub_string, subscribed.expression_type)

            def judge(code: int | None, unit: ExtUnit | None) -> bool:
                by_code = wanted.codes is None or code in wanted.codes
                by_unit = wanted.accept_entry is None or wanted.accept_entry(code, unit)
                verdicts.append(unit is not None and by_code and by_unit)
                return False  # do not read the record

            self._context.store.get(topic, queue_id, header.index, count_max=count, accept_entry=judge)
        entries = self._context.store.entries(topic, queue_id, header.index, count_max=count) if count else []
        for (_, at, size, code), verdict in zip(entries, chain(verdicts, repeat(False)), strict=False):
            body.queue_data.append(
                ConsumeQueueEntry(physic_offset=at, physic_size=size, tags_code=code or 0, eval=verdict)
            )
        return reply(command, body=fastjson.dumps(body))

    @answers(RequestCode.CHECK_CLIENT_CONFIG)
    def check_subscription(self, connection: Connection, command: Command) -> Command | Awaitable[Command | None]:
        """Check a subscription. Consumers send this request before they start with SQL92."""
        body = decode_body(command, CheckClientBody) if command.payload else CheckClientBody()
        wanted = body.subscription_data
        if wanted is None or is_tag_type(wanted.expression_type):
            return reply(command)
        if not self._context.settings.property_filter:
            remark = f"The broker does not support consumer to filter message by {wanted.expression_type}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        if wanted.expression_type == SQL92 and needs_parser():
            return when_prepared(connection, lambda: self.check_subscription(connection, command))
        try:
            inline_filter(wanted.sub_string, wanted.expression_type)
        except ValueError as error:
            return reply(command, ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error))
        return reply(command)


def _joined(records: list[memoryview], older: list[memoryview]) -> list[memoryview]:
    """Return the records of the log, and then the older records that fit into an answer, without duplicates."""
    # The same file may be in the log and in the other place.
    known = {bytes(record[_PHYSICAL_OFFSET]) for record in records}
    found, left = [*records], _ANSWER_BYTES_MAX - sum(map(len, records))
    for record in older:
        if bytes(record[_PHYSICAL_OFFSET]) not in known and (len(record) <= left or not found):
            found.append(record)
            left -= len(record)
    return found
