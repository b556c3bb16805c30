"""Trace records: the body of messages in RMQ_SYS_TRACE_TOPIC, one record per action of a client.

Fields are joined with 0x01 and each record ends with 0x02. The first field is the kind. The other fields are the
attributes of the class for this kind, in order. A null is written as ``null``. Old clients omit the last fields, which
have a default here. Newer clients may append fields, which are ignored. The KEYS property of the message contains the
message ids and keys. Source: remoting.md §7.7.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError
from rmqkit.protocol.codes import Int32, Int64

_FIELD_END = "\x01"
_RECORD_END = "\x02"
_NULL = "null"


class TracedType(enum.IntEnum):
    """The numbers of ``msgType``, Java's ordinals."""

    NORMAL = 0
    HALF = 1
    COMMITTED = 2
    DELAYED = 3
    ORDERED = 4


class ConsumeReturn(enum.IntEnum):
    """``contextCode``: the result of a listener."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURN_NULL = 3
    FAILED = 4


class RecallTrace(Struct, tag="Recall"):
    """A recall of a timed message. Times are in ms."""

    timestamp: Int64
    region_id: str | None
    group: str | None
    topic: str | None
    msg_id: str | None
    success: bool


class _Sent(Struct):
    timestamp: Int64
    region_id: str | None
    group: str | None
    topic: str | None
    msg_id: str | None
    tags: str | None
    keys: str | None
    store_host: str | None


class PublishTrace(_Sent, tag="Pub"):
    """A send."""

    body_bytes: Int32
    cost_ms: Int32
    msg_type: Int32
    offset_msg_id: str | None
    success: bool
    client_host: str | None = None


class EndTransactionTrace(_Sent, tag="EndTransaction"):
    """The end of a transaction. ``state`` is the name of the state."""

    msg_type: Int32
    transaction_id: str | None
    state: str | None
    from_check: bool


class SubscribeBeforeTrace(Struct, tag="SubBefore"):
    """The state of a message before a listener gets the message."""

    timestamp: Int64
    region_id: str | None
    group: str | None
    request_id: str | None
    msg_id: str | None
    retry_times: Int32
    keys: str | None


class SubscribeAfterTrace(Struct, tag="SubAfter"):
    """The result of a listener. The `SubscribeBeforeTrace` of the same delivery has the same ``request_id``."""

    request_id: str | None
    msg_id: str | None
    cost_ms: Int32
    success: bool
    keys: str | None
    context_code: Int32
    timestamp: Int64 | None = None
    group: str | None = None


Trace = PublishTrace | SubscribeBeforeTrace | SubscribeAfterTrace | EndTransactionTrace | RecallTrace

_KINDS: dict[str, type[Trace]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (PublishTrace, SubscribeBeforeTrace, SubscribeAfterTrace, EndTransactionTrace, RecallTrace)
}


def encode_traces(traces: Iterable[Trace]) -> bytes:
    """Return the body of a trace message.

    Raises ValueError: a field contains 0x01 or 0x02, the separators of the format.
    """
    return "".join([_line(trace) for trace in traces]).encode("utf-8", "replace")


def decode_traces(body: bytes | bytearray | memoryview) -> list[Trace]:
    """Return the records in the body of a trace message.
    Raises BodyError: the body is not UTF-8, or a record has an unknown kind, missing fields or fields of a wrong
    type."""
    try:
        lines = str(body, "utf-8").split(_RECORD_END)
    except UnicodeDecodeError as error:
        raise BodyError(f"trace body is not UTF-8: byte {error.start} cannot be decoded") from None
    return [_trace(line) for line in lines if line]


def _line(trace: Trace) -> str:
    values = list(msgspec.structs.astuple(trace))
    required = len(values) - len(trace.__struct_defaults__)
    while len(values) > required and values[-1] is None:
        values.pop()
    values = [str(trace.__struct_config__.tag), *map(_text, values)]
    line = _FIELD_END.join(values) + _RECORD_END
    if line.count(_FIELD_END) != len(values) - 1 or line.count(_RECORD_END) != 1:
        raise ValueError("a field of a trace contains the separator 0x01 or 0x02: remove it")
    return line


def _text(value: object) -> str:
    if value is None:
        return _NULL
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(int(value)) if isinstance(value, int) else str(value)


def _trace(line: str) -> Trace:
    name, *values = line.split(_FIELD_END)
    kind = _KINDS.get(name)
    if kind is None:
        raise BodyError(f"trace kind {name[:40]!r} is not known: it must be one of {', '.join(_KINDS)}")
    fields = {
        # The format cannot distinguish a missing value from the text null, and neither can Java's tools.
        field: None if value == _NULL else value
        for field, value in zip(kind.__struct_fields__, values, strict=False)  # more or fewer fields are accepted
    }
    try:
        return msgspec.convert({"type": name, **fields}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BodyError(f"{name} trace: {error}") from None
