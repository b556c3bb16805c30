"""Headers of POP consumption: 200050 to 200055; their codes need a JSON header. Source: remoting.md §4.6.1."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64


class PollingInfoRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POLLING_INFO, and what most requests about a queue name."""

    consumer_group: str
    topic: str
    queue_id: Int32


class PollingInfoResponse(Struct, rename="camel", gc=False):
    """How many pops wait."""

    polling_num: Int32 = 0


class PopMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """POP_MESSAGE; times in ms, ``queue_id`` -1 for any queue, ``init_mode`` 0 from the start or 1 from the end."""

    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    init_mode: Int32
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


class ChangeInvisibleTimeResponse(Struct, rename="camel", kw_only=True, gc=False):
    """What the client builds the new POP_CK from."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0


class PopMessageResponse(ChangeInvisibleTimeResponse, kw_only=True, gc=False):
    """POP_MESSAGE and PEEK_MESSAGE; the three strings are those of `rmqkit.protocol.pop`."""

    rest_num: Int64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """ACK_MESSAGE; ``extra_info`` is the POP_CK property of the message."""

    extra_info: str
    offset: Int64


class PeekMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """PEEK_MESSAGE."""

    max_msg_nums: Int32


class ChangeInvisibleTimeRequest(AckMessageRequest, kw_only=True, gc=False):
    """CHANGE_MESSAGE_INVISIBLETIME."""

    invisible_time: Int64


class NotificationRequest(PollingInfoRequest, kw_only=True, gc=False):
    """NOTIFICATION: wait until there is something to pop."""

    poll_time: Int64
    born_time: Int64
    order: bool | None = None
    attempt_id: str | None = None


class NotificationResponse(Struct, rename="camel", gc=False):
    """Whether there is, and whether the broker had no room to wait."""

    has_msg: bool = False
    polling_full: bool = False
