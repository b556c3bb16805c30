"""What is put, and what becomes of it (``MessageExtBrokerInner``, ``PutMessageResult``). Source: store.md §3.6, §14."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct

__all__ = ["PutMessage", "PutResult", "PutStatus"]


class PutStatus(enum.Enum):
    """How a put ended. Source: store.md §14.
    ``OS_PAGE_CACHE_BUSY`` says that the disk lags behind: the next log file, or a buffer of the transient store pool,
    is still to come. (Apache's meaning, an append lock held for long, needs several threads that append.)"""

    OK = "PUT_OK"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPPED_FILE_FAILED = "CREATE_MAPPED_FILE_FAILED"
    OS_PAGE_CACHE_BUSY = "OS_PAGE_CACHE_BUSY"
    LIGHT_QUEUES_EXCEEDED = "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"


class PutMessage(Struct, gc=False):
    """A message to store.

    Attributes:
        body: as it is to be stored; for `MessageStore.put_batch` the wire batch body.
        properties: encoded property string.
        born_host, store_host: packed IP and port, 8 or 20 bytes.
        tags_code: of its TAGS, where the sender knows it and that there is no INNER_NUM; else it is worked out.
    """

    topic: str
    queue_id: int
    body: bytes
    properties: bytes
    flag: int
    sys_flag: int
    born_timestamp: int
    born_host: bytes
    store_host: bytes
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    tags_code: int | None = None


class PutResult(Struct, gc=False):
    """What became of a put.

    Attributes:
        physical_offset: where the (first) record lies.
        end_offset: end of the last byte written; on the disk when ``store.durable_offset`` has reached it.
        queue_offset: number of the (first) message in its queue.
        physical_offsets: one per message of a batch.
        reason: why it was refused.
    """

    status: PutStatus
    physical_offset: int = -1
    end_offset: int = -1
    queue_offset: int = -1
    store_timestamp: int = 0
    physical_offsets: Sequence[int] = ()
    reason: str = ""
