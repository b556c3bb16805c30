"""Bodies of POP consumption: batch ack 200151, assignments 400, modes 401 and 402, and what the revive topic stores.

Messages of the revive topic have the tag ``ck``, ``ack`` or ``bAck``: a `CheckPoint`, or a `StoredAck` of one message
or of several. Source: remoting.md §4.6.1; behaviour.md §4.7; store.md §18.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.numbers import Int32, Int64


class BatchAck(Struct, kw_only=True):
    """Acks of one queue and one pop; `rmqkit.protocol.pop` reads and writes ``acked``, base64 in JSON.
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
    """One queue for the asking client, to be pulled or popped."""

    message_queue: MessageQueue
    mode: str = "PULL"
    attachments: dict[str, str] | None = None


class Assignments(Struct, rename="camel"):
    """Answer to QUERY_ASSIGNMENT; empty for a client the broker does not know."""

    message_queue_assignments: list[Assignment] = field(default_factory=list)


class MessageRequestMode(Struct, rename="camel", kw_only=True):
    """Body of SET_MESSAGE_REQUEST_MODE: whether a group pulls or pops a topic."""

    topic: str
    consumer_group: str
    mode: str = "PULL"
    pop_share_queue_num: Int32 = 0


class MessageRequestModes(Struct, rename="camel"):
    """Answer to GET_ALL_MESSAGE_REQUEST_MODE: topic → group → mode."""

    message_request_mode_map: dict[str, dict[str, MessageRequestMode]] = field(default_factory=dict)


class CheckPoint(Struct, kw_only=True, gc=False):
    """``ck``: messages of one queue that were popped together; times in ms.

    Attributes:
        diffs: their offsets, counted from ``start_offset``.
        acked_bits: bit i is set when the message ``diffs[i]`` is acknowledged.
        tries: how often it was put back because its messages could not be retried.
    """

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
        diffs = self.diffs or range(self.count)
        return {self.start_offset + diff for i, diff in enumerate(diffs) if not self.acked_bits >> i & 1}


class StoredAck(Struct, kw_only=True, gc=False):
    """``ack`` of one message, ``bAck`` of several, whose ``ack_offset`` is -1."""

    ack_offset: Int64 = field(name="ao")
    ack_offsets: list[Int64] | UnsetType | None = field(default=UNSET, name="aol")
    broker_name: str = field(name="bn")
    group: str = field(name="c")
    pop_time: Int64 = field(name="pt")
    queue_id: Int32 = field(name="q")
    start_offset: Int64 = field(name="so")
    topic: str = field(name="t")
