"""Looking messages up, and trying a subscription: codes 12, 33, 46 (``QueryMessageProcessor``).

QUERY_MESSAGE compares hashes: whoever asks compares keys and topic in the records that come back. A unique key finds at
most ``defaultQueryMaxNum``, a tag (``indexType`` T, 5.4) is indexed as ``T#tag``. Records leave as slices of the log.
Source: remoting.md §4.3.6; behaviour.md §2.6, §8.16; store.md §7.5.
"""

from __future__ import annotations

from rmqkit.broker.filters import inline_filter
from rmqkit.broker.handlers.answers import Handlers, answers
from rmqkit.filter.subscription import is_tag_type
from rmqkit.protocol.bodies.clients import CheckClientBody
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_header, reply
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.clients import ViewMessageRequest
from rmqkit.protocol.headers.queries import QueryMessageRequest, QueryMessageResponse
from rmqkit.remoting.connection import Connection

__all__ = ["QueryHandlers"]

_ANSWER_BYTES_MAX = 15 << 20
"""A client reads frames of 16 MiB: records beyond that would cost it all of them."""


class QueryHandlers(Handlers):
    """Finds messages by position and by key."""

    @answers(RequestCode.QUERY_MESSAGE)
    def query(self, connection: Connection, command: Command) -> Command:
        """The records that may have a key, in the order of the log."""
        header = decode_header(command, QueryMessageRequest)
        count_max = self._settings.unique_key_query_count_max if header.is_unique_key else header.max_num
        key = f"T#{header.key}" if header.index_type == "T" else header.key
        found = self._store.query(header.topic, key, count_max, header.begin_timestamp, header.end_timestamp)
        records: list[memoryview] = []
        left = _ANSWER_BYTES_MAX
        for physical_offset in found.physical_offsets:
            record = self._store.record_at(physical_offset)
            if record is not None and (len(record) <= left or not records):
                records.append(record)
                left -= len(record)
        if not records:
            remark = "can not find message, maybe time range not correct"
            return reply(command, ResponseCode.QUERY_NOT_FOUND, remark, header=QueryMessageResponse(0, 0))
        answer = QueryMessageResponse(found.last_update_timestamp, found.last_update_offset)
        return reply(command, header=answer, body=[*records])

    @answers(RequestCode.VIEW_MESSAGE_BY_ID)
    def view(self, connection: Connection, command: Command) -> Command:
        """The record at a physical offset, which is a part of an offset message id."""
        offset = decode_header(command, ViewMessageRequest).offset
        record = self._store.record_at(offset) if offset >= 0 else None
        if record is None:
            return reply(command, ResponseCode.SYSTEM_ERROR, f"can not find message by the offset, {offset}")
        return reply(command, body=[record])

    @answers(RequestCode.CHECK_CLIENT_CONFIG)
    def check_subscription(self, connection: Connection, command: Command) -> Command:
        """Whether a subscription would be taken; consumers ask before they start with SQL92."""
        body = decode_as(command.payload, CheckClientBody) if command.payload else CheckClientBody()
        wanted = body.subscription_data
        if wanted is None or is_tag_type(wanted.expression_type):
            return reply(command)
        if not self._settings.property_filter:
            remark = f"The broker does not support consumer to filter message by {wanted.expression_type}"
            return reply(command, ResponseCode.SYSTEM_ERROR, remark)
        try:
            inline_filter(wanted.sub_string, wanted.expression_type)
        except ValueError as error:
            return reply(command, ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error))
        return reply(command)
