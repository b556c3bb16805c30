"""POP: pops and acks 200050 to 200055, 200151, assignments 400 to 402, and the stored data of brokers
(`PopCheckPoint`, `StoredAck`).

Codes of POP need a JSON header. Source: remoting.md §4.6.1; store.md §19.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, Content, Operation, Right
from rmqkit.protocol.schemas.clients import MessageQueue


class PollingInfoRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POLLING_INFO, and the common fields of most requests about a queue."""

    consumer_group: str
    topic: str
    queue_id: Int32
    bname: str | None = None


class PollingInfoResponse(Struct, rename="camel", gc=False):
    """The number of waiting pops."""

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
    """The values from which the client builds the new POP_CK."""

    pop_time: Int64 = 0
    invisible_time: Int64 = 0
    revive_qid: Int32 = 0


class PopMessageResponse(ChangeInvisibleTimeResponse, kw_only=True, gc=False):
    """POP_MESSAGE and PEEK_MESSAGE; the three strings are those of `rmqkit.protocol.ids`."""

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
    """NOTIFICATION: wait until a message can be popped."""

    poll_time: Int64
    born_time: Int64
    order: bool | None = None
    attempt_id: str | None = None


class NotificationResponse(Struct, rename="camel", gc=False):
    """The response to NOTIFICATION:

    ``has_msg`` if messages are available, ``polling_full`` if the broker cannot let more requests wait.
    """

    has_msg: bool = False
    polling_full: bool = False


class BatchAck(Struct, kw_only=True):
    """Acks of one queue and one pop; `rmqkit.protocol.ids` reads and writes ``acked``, base64 in JSON.
    ``retry`` is ``0`` for the normal topic, ``1`` and ``2`` for the two forms of the retry topic."""

    group: str = field(name="c")
    topic: str = field(name="t")
    retry: str = field(default="0", name="r")
    start_offset: Int64 = field(name="so")
    queue_id: Int32 = field(name="q")
    revive_queue_id: Int32 = field(name="rq")
    pop_time: Int64 = field(name="pt")
    invisible_time: Int64 = field(name="it")
    acked: bytes = field(name="b")


class BatchAckBody(Struct, rename="camel", kw_only=True):
    """Body of BATCH_ACK_MESSAGE."""

    broker_name: str | None = None
    acks: list[BatchAck] = field(default_factory=list)


class QueryAssignmentBody(Struct, rename="camel", kw_only=True):
    """Body of QUERY_ASSIGNMENT; ``strategy_name`` is ``AVG``, ``AVG_BY_CIRCLE`` and so on."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


class Assignment(Struct, rename="camel", kw_only=True):
    """A queue for the requesting client, to be pulled or popped."""

    message_queue: MessageQueue
    mode: str = "PULL"
    attachments: dict[str, str] | None = None


class Assignments(Struct, rename="camel"):
    """Response to QUERY_ASSIGNMENT; empty for a client that the broker does not know."""

    message_queue_assignments: list[Assignment] = field(default_factory=list)


class MessageRequestMode(Struct, rename="camel", kw_only=True):
    """Body of SET_MESSAGE_REQUEST_MODE: whether a group pulls or pops a topic."""

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: Int32 = 0


class MessageRequestModes(Struct, rename="camel"):
    """Response to GET_ALL_MESSAGE_REQUEST_MODE: topic → group → mode."""

    message_request_mode_map: dict[str, dict[str, MessageRequestMode]] = field(default_factory=dict)


class PopCheckPoint(Struct, kw_only=True, gc=False):
    """``ck``: messages of one queue that were popped together; times in ms.

    Attributes:
        diffs: their offsets, relative to ``start_offset``.
        acked_bits: bit i is set if the message ``diffs[i]`` is acknowledged.
        tries: how often it was stored again because its messages could not be retried.
    """

    # Java's int, with a bit for each of at most 32 messages.
    acked_bits: Int32 = field(default=0, name="bm")
    broker_name: str = field(name="bn")
    group: str = field(name="c")
    diffs: list[Int32] | None = field(default=None, name="d")
    invisible_time: Int64 = field(name="it")
    count: Int32 = field(name="n")
    pop_time: Int64 = field(name="pt")
    queue_id: Int32 = field(name="q")
    revive_time: Int64 = field(default=0, name="reviveTime")
    revive_offset: Int64 = field(default=0, name="ro")
    start_offset: Int64 = field(name="so")
    topic: str = field(name="t")
    tries: str | UnsetType | None = field(default=UNSET, name="rp")

    @property
    def offsets_left(self) -> set[int]:
        """The queue offsets that are not acknowledged."""
        # With bit 31 the number is negative, and Python's shift still finds each bit.
        diffs = self.diffs or range(self.count)
        return {self.start_offset + diff for i, diff in enumerate(diffs) if not self.acked_bits >> i & 1}


class StoredAck(Struct, kw_only=True, gc=False):
    """A stored ``ack`` is for one message, a ``bAck`` for several. The ``ack_offset`` of a ``bAck`` is -1."""

    ack_offset: Int64 = field(name="ao")
    ack_offsets: list[Int64] | UnsetType | None = field(default=UNSET, name="aol")
    broker_name: str = field(name="bn")
    group: str = field(name="c")
    pop_time: Int64 = field(name="pt")
    queue_id: Int32 = field(name="q")
    start_offset: Int64 = field(name="so")
    topic: str = field(name="t")


# fmt: off
OPERATIONS = (
    Operation(Code.QUERY_ASSIGNMENT, 3, BROKER, request_body=QueryAssignmentBody, response_body=Assignments),
    Operation(Code.SET_MESSAGE_REQUEST_MODE, 3, BROKER, request_body=MessageRequestMode),
    Operation(Code.GET_ALL_MESSAGE_REQUEST_MODE, 3, BROKER, response_body=MessageRequestModes),
    Operation(Code.POP_MESSAGE, 3, BROKER, PopMessageRequest, PopMessageResponse, response_body=Content.RECORDS,
              right=Right("Sub", "consumerGroup topic")),
    Operation(Code.ACK_MESSAGE, 3, BROKER, AckMessageRequest, right=Right("Sub", "consumerGroup topic")),
    Operation(Code.PEEK_MESSAGE, 3, BROKER, PeekMessageRequest, PopMessageResponse, response_body=Content.RECORDS,
              right=Right("Sub", "topic consumerGroup")),
    Operation(Code.CHANGE_MESSAGE_INVISIBLETIME, 3, BROKER, ChangeInvisibleTimeRequest, ChangeInvisibleTimeResponse,
              right=Right("Sub", "consumerGroup topic")),
    Operation(Code.NOTIFICATION, 3, BROKER, NotificationRequest, NotificationResponse,
              right=Right("Sub", "consumerGroup topic")),
    Operation(Code.POLLING_INFO, 3, BROKER, PollingInfoRequest, PollingInfoResponse,
              right=Right("Get", "consumerGroup topic")),
    Operation(Code.BATCH_ACK_MESSAGE, 3, BROKER, request_body=BatchAckBody, right=Right("Sub", is_body=True)),
)
# fmt: on
