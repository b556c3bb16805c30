"""Headers of offset requests: 14, 15, 29, 30, 31, 32. Source: remoting.md §4.3.3."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32, Int64


class QueryConsumerOffsetRequest(Struct, rename="camel", gc=False):
    """QUERY_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None


class UpdateConsumerOffsetRequest(Struct, rename="camel", gc=False):
    """UPDATE_CONSUMER_OFFSET; a missing queue or offset gets the reference's own remark."""

    consumer_group: str
    topic: str
    queue_id: Int32 | None = None
    commit_offset: Int64 | None = None


class QueueRequest(Struct, rename="camel", gc=False):
    """GET_MAX_OFFSET, GET_MIN_OFFSET, GET_EARLIEST_MSG_STORETIME: one queue of a topic.
    ``committed`` False asks GET_MAX_OFFSET for what is stored but not readable yet."""

    topic: str
    queue_id: Int32
    committed: bool | None = None


class SearchOffsetRequest(Struct, rename="camel", gc=False):
    """SEARCH_OFFSET_BY_TIMESTAMP; ``boundary_type`` LOWER (default) or UPPER, case does not matter."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None


class OffsetResponse(Struct, gc=False):
    """One queue offset."""

    offset: Int64


class StoreTimeResponse(Struct, gc=False):
    """A store time in ms since the epoch, -1 for an empty queue."""

    timestamp: Int64
