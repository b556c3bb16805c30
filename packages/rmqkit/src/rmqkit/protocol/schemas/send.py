"""Requests for sends (10, 310, 320), replies (324 to 326), messages sent back (36), recalls (370) and transactions (37,
39, 323). Bodies are messages, not JSON.

Source: remoting.md §4.3.1, §4.3.5, §4.3.7, §4.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, CLIENT, Content, Operation, Right


class _Sent(Struct, rename="camel", gc=False):
    """The fields of a sent message: its group, its topic and queue, its flags and properties."""

    # The order of the fields here and in SendMessageRequest determines the letters a to n of the short form. A field
    # inserted in the middle would rename all later fields, and peers would read wrong values without an error.
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
    """The form with long names, for codes 10 and 324."""

    max_reconsume_times: Int32 | None = None
    batch: bool | None = None
    bname: str | None = None


if TYPE_CHECKING:

    class SendMessageV2Request(SendMessageRequest):
        """The form with the short names ``a`` … ``n`` for the same fields, for codes 310, 320 and 325."""

else:  # an inherited field keeps its wire name, so all fields are declared again
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
    """The response to every stored send. For a batch, ``queue_offset`` is the offset of the first message.
    ``lite_offset`` and ``lite_epoch``, which only brokers of rmqkit send: the number of the message in its lite topic,
    and the life of the lite topic."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    batch_uniq_id: str | None = None
    recall_handle: str | None = None
    lite_offset: Int64 | None = None
    lite_epoch: Int32 | None = None


class PushReplyRequest(_Sent, kw_only=True, gc=False):
    """PUSH_REPLY_MESSAGE_TO_CLIENT, which sends a stored reply to the requesting client. Hosts are ``ip:port``."""

    born_host: str
    store_host: str
    store_timestamp: Int64


class ConsumerSendBackRequest(Struct, rename="camel", gc=False):
    """CONSUMER_SEND_MSG_BACK. ``offset`` is physical. With ``delay_level`` 0 the broker chooses the level; -1 moves the
    message to the dead letters."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None
    bname: str | None = None


class RecallMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RECALL_MESSAGE. `rmqkit.protocol.ids` decodes the handle."""

    producer_group: str | None = None
    topic: str
    recall_handle: str
    bname: str | None = None


class RecallMessageResponse(Struct, rename="camel", gc=False):
    """The unique key of the message that will not be delivered."""

    msg_id: str


class EndTransactionRequest(Struct, rename="camel", kw_only=True, gc=False):
    """END_TRANSACTION; ``commit_or_rollback`` is 8 to commit, 12 to roll back, 0 while unknown.
    ``tran_state_table_offset`` is the queue offset of the send response, ``commit_log_offset`` the physical offset.
    Ids and group are optional, but a broker treats a missing group as a wrong group.

    ``decided_by_ledger`` is specific to rmqkit; Apache's brokers ignore it. The producer stores its decisions in a
    ledger and checks before a commit which messages are visible. Its commit is therefore valid even after a rollback
    (decision 6)."""

    topic: str | None = None
    producer_group: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    from_transaction_check: bool = False
    msg_id: str | None = None
    transaction_id: str | None = None
    bname: str | None = None
    decided_by_ledger: bool | None = None


class CheckTransactionRequest(Struct, rename="camel", kw_only=True, gc=False):
    """CHECK_TRANSACTION_STATE. The record in the body contains the authoritative topic."""

    topic: str | None = None
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None


class ResumeCheckRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RESUME_CHECK_HALF_MESSAGE. ``msg_id`` is the offset message id of the half message."""

    topic: str | None = None
    msg_id: str


# fmt: off
OPERATIONS = (
    Operation(Code.SEND_MESSAGE, 1, BROKER, SendMessageRequest, SendMessageResponse, request_body=Content.MESSAGE,
              right=Right("Pub", "topic", is_send=True)),
    Operation(Code.CONSUMER_SEND_MSG_BACK, 1, BROKER, ConsumerSendBackRequest,
              right=Right("Sub", "group!", message="offset", message_actions="Sub")),
    Operation(Code.END_TRANSACTION, 1, BROKER, EndTransactionRequest,
              right=Right("Pub", "topic-", message="commitLogOffset", message_actions="Pub")),
    Operation(Code.CHECK_TRANSACTION_STATE, 1, CLIENT, CheckTransactionRequest, request_body=Content.RECORDS),
    Operation(Code.SEND_MESSAGE_V2, 1, BROKER, SendMessageV2Request, SendMessageResponse,
              request_body=Content.MESSAGE, right=Right("Pub", "b", is_send=True)),
    Operation(Code.SEND_BATCH_MESSAGE, 1, BROKER, SendMessageV2Request, SendMessageResponse,
              request_body=Content.BATCH, right=Right("Pub", "b", is_send=True)),
    Operation(Code.RESUME_CHECK_HALF_MESSAGE, 2, BROKER, ResumeCheckRequest,
              right=Right("Update", "topic", message="msgId", message_actions="Update")),
    Operation(Code.SEND_REPLY_MESSAGE, 1, BROKER, SendMessageRequest, SendMessageResponse,
              request_body=Content.MESSAGE, right=Right("Pub", "topic", is_send=True)),
    Operation(Code.SEND_REPLY_MESSAGE_V2, 1, BROKER, SendMessageV2Request, SendMessageResponse,
              request_body=Content.MESSAGE, right=Right("Pub", "b", is_send=True)),
    Operation(Code.PUSH_REPLY_MESSAGE_TO_CLIENT, 1, CLIENT, PushReplyRequest, request_body=Content.MESSAGE),
    Operation(Code.RECALL_MESSAGE, 2, BROKER, RecallMessageRequest, RecallMessageResponse,
              right=Right("Pub", "topic=")),
)
# fmt: on
