"""Headers of the send family: SEND_MESSAGE 10, SEND_MESSAGE_V2 310, SEND_BATCH_MESSAGE 320.

Source: remoting.md §4.3.1.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["SendMessageRequest", "SendMessageResponse", "SendMessageV2Request"]


class SendMessageRequest(Struct, rename="camel", gc=False):
    """The long-named form (code 10)."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    flag: int
    properties: str | None = None
    reconsume_times: int | None = None
    unit_mode: bool | None = None
    max_reconsume_times: int | None = None
    batch: bool | None = None
    bname: str | None = None


_SHORT_NAMES = dict(zip(SendMessageRequest.__struct_fields__, "abcdefghijklmn", strict=True))


class SendMessageV2Request(SendMessageRequest, rename=_SHORT_NAMES, gc=False):
    """The short-named form (codes 310 and 320): same fields, names ``a`` … ``n``.

    An inherited field keeps its wire name, so each one is declared again.
    """

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: int
    queue_id: int
    sys_flag: int
    born_timestamp: int
    flag: int
    properties: str | None = None
    reconsume_times: int | None = None
    unit_mode: bool | None = None
    max_reconsume_times: int | None = None
    batch: bool | None = None
    bname: str | None = None


assert SendMessageV2Request.__struct_encode_fields__ == tuple("abcdefghijklmn")


class SendMessageResponse(Struct, rename="camel", gc=False):
    """What every stored send is answered with; `queue_offset` is the first one of a batch."""

    msg_id: str
    queue_id: int
    queue_offset: int
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
