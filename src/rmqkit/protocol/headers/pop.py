"""Headers of POP consumption: 200050 to 200055; their codes need a JSON header. Source: remoting.md §4.6.1."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64

__all__ = [
    "AckMessageRequest",
    "ChangeInvisibleTimeRequest",
    "ChangeInvisibleTimeResponse",
    "NotificationRequest",
    "NotificationResponse",
    "PeekMessageRequest",
    "PollingInfoRequest",
    "PollingInfoResponse",
    "PopMessageRequest",
    "PopMessageResponse",
]


class PopMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POP_MESSAGE; times in ms, ``queue_id`` -1 for any queue, ``init_mode`` 0 from the start or 1 from the end."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    init_mode: Int32
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


class PopMessageResponse(Struct, rename="camel", kw_only=True, gc=False):
    """POP_MESSAGE, PEEK_MESSAGE and POP_LITE_MESSAGE; the three strings are those of `rmqkit.protocol.pop`."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0
    rest_num: Int64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """ACK_MESSAGE; ``extra_info`` is the POP_CK property of the message."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64


class PeekMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """PEEK_MESSAGE."""

    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    consumer_group: str


class ChangeInvisibleTimeRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CHANGE_MESSAGE_INVISIBLETIME."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64
    invisible_time: Int64


class ChangeInvisibleTimeResponse(Struct, rename="camel", kw_only=True, gc=False):
    """What the client builds the new POP_CK from."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0


class NotificationRequest(Struct, rename="camel", kw_only=True, gc=False):
    """NOTIFICATION: wait until there is something to pop."""

    consumer_group: str
    topic: str
    queue_id: Int32
    poll_time: Int64
    born_time: Int64
    order: bool | None = None
    attempt_id: str | None = None


class NotificationResponse(Struct, rename="camel", gc=False):
    """Whether there is, and whether the broker had no room to wait."""

    has_msg: bool = False
    polling_full: bool = False


class PollingInfoRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POLLING_INFO."""

    consumer_group: str
    topic: str
    queue_id: Int32


class PollingInfoResponse(Struct, rename="camel", gc=False):
    """How many pops wait."""

    polling_num: Int32 = 0
