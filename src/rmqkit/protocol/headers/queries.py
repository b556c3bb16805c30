"""Headers of looking things up: QUERY_MESSAGE 12, QUERY_CONSUME_QUEUE 321, VIEW_BROKER_STATS_DATA 315.

Source: remoting.md §4.3.6, §4.4.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.numbers import Int32, Int64


class QueryMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """QUERY_MESSAGE by key within store times in ms; a unique key finds at most 32 whatever ``max_num`` says.
    ``index_type``: ``K`` keys, ``U`` unique key, ``T`` tags (5.4); ``last_key``: where the next page starts."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    index_type: str | None = None
    last_key: str | None = None
    is_unique_key: bool | None = field(default=None, name="_UNIQUE_KEY_QUERY")


class QueryMessageResponse(Struct, rename="camel", gc=False):
    """How far the index has come: store time in ms and physical offset of its last entry."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


class QueryConsumeQueueRequest(Struct, rename="camel", kw_only=True, gc=False):
    """QUERY_CONSUME_QUEUE: ``count`` entries from ``index``; with a group, also what its filter says to each."""

    topic: str | None = None
    queue_id: Int32 = 0
    index: Int64 = 0
    count: Int32 = 0
    consumer_group: str | None = None


class StatsDataRequest(Struct, rename="camel", gc=False):
    """VIEW_BROKER_STATS_DATA: one counter by name and key (remoting.md §6.7)."""

    stats_name: str
    stats_key: str
