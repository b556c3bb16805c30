"""What a message is answered with when the store refused it, or when its put had to wait for disk or slaves.

Source: behaviour.md §3.5.
"""

from __future__ import annotations

from rmqkit.broker.durability import Outcome
from rmqkit.protocol.codes import ResponseCode
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = ["CODES", "NOT_ENOUGH_REPLICAS", "REJECTED", "Refusal", "put_refusal"]

REJECTED = "[REJECTREQUEST]system busy, start flow control for a while"
"""The remark of a request that is not let in at all."""

Refusal = tuple[int, str]
"""Code and remark."""

NOT_ENOUGH_REPLICAS: Refusal = ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough"

CODES = {
    Outcome.DURABLE: ResponseCode.SUCCESS,
    Outcome.TIMED_OUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    Outcome.REPLICA_TIMED_OUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    Outcome.FAILED: ResponseCode.SYSTEM_ERROR,
}
"""What is answered when a stored message had to wait."""

_ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {body_bytes_max}B, msg properties length limit 32KB."
)
_UNAVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: the broker's disk is full, "
    "messages are put to the slave, message store has been shut down, etc. {reason}"
)
_PUT_REFUSALS: dict[PutStatus, tuple[ResponseCode, str]] = {
    PutStatus.MESSAGE_ILLEGAL: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.PROPERTIES_SIZE_EXCEEDED: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.SERVICE_NOT_AVAILABLE: (ResponseCode.SERVICE_NOT_AVAILABLE, _UNAVAILABLE),
    PutStatus.CREATE_MAPPED_FILE_FAILED: (
        ResponseCode.SYSTEM_ERROR,
        "create mapped file failed, server is busy or broken.",
    ),
    PutStatus.OS_PAGE_CACHE_BUSY: (
        ResponseCode.SYSTEM_BUSY,
        "[PC_SYNCHRONIZED]broker busy, start flow control for a while",
    ),
    PutStatus.LIGHT_QUEUES_EXCEEDED: (
        ResponseCode.SYSTEM_ERROR,
        (
            "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]broker config enableLmq and enableMultiDispatch, lmq consumeQueue num "
            "exceed maxLmqConsumeQueueNum config num, default limit 2w."
        ),
    ),
}


def put_refusal(put: PutResult, body_bytes_max: int) -> Refusal:
    """The answer to a message that the store did not take. Source: behaviour.md §3.5."""
    code, remark = _PUT_REFUSALS[put.status]
    return code, remark.format(body_bytes_max=body_bytes_max, reason=put.reason).rstrip()
