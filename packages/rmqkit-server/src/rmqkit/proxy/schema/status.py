"""Statuses of answers: the codes of ``definition.proto``, and the code for a broker's answer.

Every answer contains a status of these codes; the gRPC status of the call is OK. A failed check raises `Refused`, which
the endpoint converts to an answer. `sent_answer` and `acked_answer`, the most frequent answers, are encoded directly.
The bytes equal the encoding of the schema's messages, and cost a tenth of the time.
Source: grpc.md §3; definition.proto, service.proto; protobuf's encoding.
"""

from __future__ import annotations

import enum
from typing import Any

from rmqkit.errors import PeerRefused, RemotingError, RmqError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.proxy.schema.messages import message_class

__all__ = [
    "OK", "Code", "Refused", "acked_answer", "code_of_broker", "name_of", "refusal_of", "sent_answer", "status",
]  # fmt: skip


class Code(enum.IntEnum):
    """The status codes of ``definition.proto`` that are used here."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_LITE_TOPIC = 40020
    INVALID_CLIENT_PROPERTIES = 40021
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402
    FAILED_TO_CONSUME_MESSAGE = 60000


class Refused(RmqError):
    """The refusal of a call, which is answered with a code other than OK."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


_Status = message_class("Status")

_OF_BROKER: dict[int, Code] = {
    ResponseCode.SYSTEM_BUSY: Code.TOO_MANY_REQUESTS,
    ResponseCode.POLLING_FULL: Code.TOO_MANY_REQUESTS,
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: Code.NOT_IMPLEMENTED,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST: Code.CONSUMER_GROUP_NOT_FOUND,
    ResponseCode.TOPIC_NOT_EXIST: Code.TOPIC_NOT_FOUND,
    ResponseCode.LMQ_QUOTA_EXCEEDED: Code.LITE_TOPIC_QUOTA_EXCEEDED,
    ResponseCode.LITE_SUBSCRIPTION_QUOTA_EXCEEDED: Code.LITE_SUBSCRIPTION_QUOTA_EXCEEDED,
}


def status(code: int, text: str = "") -> Any:
    """Make a status; the default text is the name of the code."""
    return _Status(code=code, message=text or Code(code).name)


def name_of(code: int) -> str:
    """Return the name of a code, for metrics."""
    return Code(code).name


OK = status(Code.OK)


def code_of_broker(code: int) -> Code:
    """Return the status code for a broker's response code."""
    return _OF_BROKER.get(code, Code.INTERNAL_SERVER_ERROR)


def refusal_of(error: RmqError) -> Refused:
    """Return the refusal to send to a client after a request to a broker failed."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, PeerRefused):
        return Refused(code_of_broker(error.code), error.remark or str(error))
    if isinstance(error, RemotingError):
        return Refused(Code.PROXY_TIMEOUT, str(error))
    return Refused(Code.INTERNAL_SERVER_ERROR, str(error))


_SHORT_MAX = 0x7F


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > _SHORT_MAX:
        encoded.append(number & _SHORT_MAX | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_SHORT = [bytes((size,)) for size in range(_SHORT_MAX + 1)]


def _sized(content: bytes) -> bytes:
    size = len(content)
    return (_SHORT[size] if size <= _SHORT_MAX else _varint(size)) + content


_OK = _sized(OK.SerializeToString())
_OK_FIRST, _OK_LAST = b"\x0a" + _OK, b"\x1a" + _OK


def sent_answer(message_id: str, queue_offset: int) -> bytes:
    """Encode a `SendMessageResponse` for one stored message."""
    id_field = _sized(message_id.encode())
    entry = _OK_FIRST + b"\x12" + id_field + b"\x1a" + id_field
    if queue_offset:
        entry += b"\x20" + _varint(queue_offset)
    return _OK_FIRST + b"\x12" + _sized(entry)


def acked_answer(message_id: str, receipt_handle: str) -> bytes:
    """Encode an `AckMessageResponse` for one acknowledged message."""
    entry = b"\x12" + _sized(receipt_handle.encode()) + _OK_LAST
    if message_id:
        entry = b"\x0a" + _sized(message_id.encode()) + entry
    return _OK_FIRST + b"\x12" + _sized(entry)
