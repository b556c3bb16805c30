"""What clients told the trace topic of a message (``queryMsgTraceById``). Source: behaviour.md §9.7, §9.9."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.admin.messages import Messages
from rmqkit.errors import BodyError, UnknownName
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.protocol.names import TRACE_TOPIC
from rmqkit.protocol.trace import (
    ConsumeReturn,
    EndTransactionTrace,
    PublishTrace,
    SubscribeAfterTrace,
    SubscribeBeforeTrace,
    Trace,
    decode_traces,
)
from rmqkit.remoting.address import split_address

__all__ = ["TraceRow", "traces_of"]


class TraceRow(Struct, rename="camel", kw_only=True):
    """One act on a message; the begin and the end of handling it are one ``Sub``."""

    kind: str
    group: str
    client_host: str
    timestamp: int
    cost_ms: int | None = None
    status: str = ""
    retry_times: int | None = None


async def traces_of(messages: Messages, msg_id: str, trace_topic: str = TRACE_TOPIC) -> list[TraceRow]:
    """What clients told of a message, by its unique key, in order of time.
    Raises UnknownName: nothing, or the topic does not exist, as no client traces."""
    try:
        written = await messages.by_key(trace_topic, msg_id)
    except UnknownName as error:
        raise UnknownName("topic", trace_topic, error.asked, remedy="no client has traced anything yet") from None
    told = [
        (message, trace)  # a handler's begin and end may be in two messages
        for message in written
        for trace in _readable(message)
        if trace.msg_id == msg_id
    ]
    ends = {trace.request_id: trace for _, trace in told if isinstance(trace, SubscribeAfterTrace)}
    begun = {trace.request_id for _, trace in told if isinstance(trace, SubscribeBeforeTrace)}
    rows = [
        _row(message, trace, ends.get(trace.request_id) if isinstance(trace, SubscribeBeforeTrace) else trace)
        for message, trace in told
        if not (isinstance(trace, SubscribeAfterTrace) and trace.request_id in begun)
    ]
    if not rows:
        remedy = "clients trace with enable_trace, and tell it some seconds later"
        raise UnknownName("trace of message", msg_id, f"topic {trace_topic}", remedy=remedy)
    return sorted(rows, key=lambda row: row.timestamp)


def _readable(message: ReceivedMessage) -> list[Trace]:
    """What a message of the trace topic tells; nothing when it cannot be read."""
    try:
        return decode_traces(message.body)
    except BodyError:
        return []


def _row(message: ReceivedMessage, begin: Trace, end: Trace | None) -> TraceRow:
    row = TraceRow(
        kind=str(begin.__struct_config__.tag).removesuffix("Before").removesuffix("After"),
        group=begin.group or "",
        client_host=split_address(message.born_host)[0],
        timestamp=begin.timestamp or message.born_timestamp,
        retry_times=begin.retry_times if isinstance(begin, SubscribeBeforeTrace) else None,
    )
    match end:
        case None:
            row.status = "under way"
        case SubscribeAfterTrace():
            names = {int(code): code.name.lower().replace("_", " ") for code in ConsumeReturn}
            row.cost_ms, row.status = end.cost_ms, names.get(end.context_code, str(end.context_code))
        case EndTransactionTrace():
            row.status = end.state or ""
        case PublishTrace():
            row.cost_ms, row.client_host = end.cost_ms, end.client_host or row.client_host
            row.status = "success" if end.success else "failed"
        case _:
            row.status = "success" if getattr(end, "success", False) else "failed"
    return row
