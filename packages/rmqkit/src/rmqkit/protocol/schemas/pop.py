"""POP: requests for pops and acks (200050 to 200055, 200151) and for assignments (400 to 402), and the data that
brokers store (`PopCheckPoint`, `StoredAck`).

Codes of pops and acks fit only in a JSON header. Source: remoting.md §4.6.1; store.md §19.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, Content, Operation, Right
from rmqkit.protocol.schemas.clients import MessageQueue


class PollingInfoRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POLLING_INFO, and the base class of other requests about a queue."""

    consumer_group: str
    topic: str
    queue_id: Int32
    bname: str | None = None


class PollingInfoResponse(Struct, rename="camel", gc=False):
    """The number of waiting pops."""

    polling_num: Int32 = 0


class PopMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """POP_MESSAGE. Times are in ms. ``queue_id`` -1 means any queue. ``init_mode`` is 0 for the start, 1 for the
    end."""

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
    """The response to POP_MESSAGE and PEEK_MESSAGE. `rmqkit.protocol.ids` decodes the three texts."""

    rest_num: Int64 = 0
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


class AckMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """ACK_MESSAGE. ``extra_info`` is the POP_CK property of the message. ``lite_topic``: for a message of a lite topic,
    whose ``offset`` is its number there."""

    extra_info: str
    offset: Int64
    lite_topic: str | None = None


class PeekMessageRequest(PollingInfoRequest, kw_only=True, gc=False):
    """PEEK_MESSAGE."""

    max_msg_nums: Int32


class ChangeInvisibleTimeRequest(AckMessageRequest, kw_only=True, gc=False):
    """CHANGE_MESSAGE_INVISIBLETIME. With ``suspend`` (5.5) the next delivery does not count as a retry."""

    invisible_time: Int64
    suspend: bool | None = None


class NotificationRequest(PollingInfoRequest, kw_only=True, gc=False):
    """NOTIFICATION, which waits until a message can be popped. Requests since 5.5 have the filter of the pop.
    ``is_lite_consumer``, ``client_id``: since 5.5.1, wait for the lite topics of this client."""

    poll_time: Int64
    born_time: Int64
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None
    is_lite_consumer: bool | None = None
    client_id: str | None = None


class NotificationResponse(Struct, rename="camel", gc=False):
    """The response to NOTIFICATION.

    ``has_msg``: messages are available. ``polling_full``: too many requests are waiting at the broker.
    """

    has_msg: bool = False
    polling_full: bool = False


class BatchAck(Struct, kw_only=True):
    """The acks of one pop from one queue. `rmqkit.protocol.ids` encodes and decodes ``acked``, which is base64 in JSON.
    ``retry`` is ``0`` for the normal topic, ``1`` or ``2`` for the two spellings of the retry topic."""

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
    """Body of QUERY_ASSIGNMENT. ``strategy_name`` is ``AVG``, ``AVG_BY_CIRCLE`` or another strategy."""

    topic: str
    consumer_group: str
    client_id: str
    strategy_name: str = "AVG"
    message_model: str = "CLUSTERING"


class Assignment(Struct, rename="camel", kw_only=True):
    """A queue that the requesting client must pull or pop, according to ``mode``."""

    message_queue: MessageQueue
    mode: str = "PULL"
    attachments: dict[str, str] | None = None


class Assignments(Struct, rename="camel"):
    """Response to QUERY_ASSIGNMENT. The list is empty for a client that the broker does not know."""

    message_queue_assignments: list[Assignment] = field(default_factory=list)


class MessageRequestMode(Struct, rename="camel", kw_only=True):
    """Body of SET_MESSAGE_REQUEST_MODE, which makes a group pull or pop a topic."""

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: Int32 = 0


class MessageRequestModes(Struct, rename="camel"):
    """Response to GET_ALL_MESSAGE_REQUEST_MODE: topic → group → mode."""

    message_request_mode_map: dict[str, dict[str, MessageRequestMode]] = field(default_factory=dict)


class PopCheckPoint(Struct, kw_only=True, gc=False):
    """A stored ``ck`` for messages of one queue that were popped together. Times are in ms.

    Attributes:
        diffs: the offsets of the messages, relative to ``start_offset``.
        acked_bits: bit i is set if the message ``diffs[i]`` is acknowledged.
        tries: how often the check point was stored again because its messages could not be retried.
        suspends: the redelivery of the messages does not count (5.5). Older brokers ignore the field.
    """

    # A Java int with one bit for each of at most 32 messages.
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
    suspends: bool | UnsetType | None = field(default=UNSET, name="sp")
    topic: str = field(name="t")
    tries: str | UnsetType | None = field(default=UNSET, name="rp")

    @property
    def offsets_left(self) -> set[int]:
        """The queue offsets of messages that are not acknowledged."""
        # The number is negative if bit 31 is set. Python's shift still returns each bit.
        diffs = self.diffs or range(self.count)
        return {self.start_offset + diff for i, diff in enumerate(diffs) if not self.acked_bits >> i & 1}


class StoredAck(Struct, kw_only=True, gc=False):
    """A stored ``ack`` of one message, or a ``bAck`` of several messages with ``ack_offset`` -1."""

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
