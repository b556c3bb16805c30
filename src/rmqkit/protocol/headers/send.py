"""Headers of the send family: 10, 310, 320, the replies 324 and 325, and the reply pushed to its requester, 326.

Source: remoting.md §4.3.1, §4.3.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64


class _Sent(Struct, rename="camel", gc=False):
    """What says of a message whose it is and where it goes."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None


class SendMessageRequest(_Sent, gc=False):
    """The long-named form (codes 10 and 324)."""

    max_reconsume_times: Int32 | None = None
    batch: bool | None = None
    bname: str | None = None


if TYPE_CHECKING:

    class SendMessageV2Request(SendMessageRequest):
        """The short-named form (codes 310, 320 and 325): same fields, names ``a`` … ``n``."""

else:  # an inherited field keeps its wire name, so each one is declared again
    SendMessageV2Request = msgspec.defstruct(
        "SendMessageV2Request",
        [(info.name, info.type, info.default) for info in msgspec.structs.fields(SendMessageRequest)],
        bases=(SendMessageRequest,),
        module=__name__,
        rename=dict(zip(SendMessageRequest.__struct_fields__, "abcdefghijklmn", strict=True)),
        gc=False,
    )

assert SendMessageV2Request.__struct_encode_fields__ == tuple("abcdefghijklmn")


class SendMessageResponse(Struct, rename="camel", gc=False):
    """What every stored send is answered with; `queue_offset` is the first one of a batch."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None


class PushReplyRequest(_Sent, kw_only=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT: a stored reply on its way to the client that asked; hosts are ``ip:port``."""

    born_host: str
    store_host: str
    store_timestamp: Int64
