"""What brokers count: queues of a topic 202, lag of groups 208 and 317, time spans 303, counters 315.

Maps whose keys are queues need the dialect: write them with `fastjson.dumps`, read them with `fastjson.decode_as`.
Source: remoting.md §4.4, §6.4.9, §6.4.13, §6.7.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.codes import Int64
from rmqkit.protocol.schemas.clients import MessageQueue


class StatsDataRequest(Struct, rename="camel", gc=False):
    """VIEW_BROKER_STATS_DATA: one counter by name and key (remoting.md §6.7)."""

    stats_name: str
    stats_key: str


class TimeSpanRequest(Struct, gc=False):
    """QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class ConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_CONSUME_STATS; ``topic_list`` is separated by ``;`` (5.3)."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class AllConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_BROKER_CONSUME_STATS."""

    is_order: bool


class TopicOffsets(Struct, rename="camel", gc=False):
    """One queue of a topic; ``last_update_timestamp`` is the store time of its newest message in ms, 0 if empty."""

    min_offset: Int64 = 0
    max_offset: Int64 = 0
    last_update_timestamp: Int64 = 0


class TopicStatsTable(Struct, rename="camel"):
    """Answer to GET_TOPIC_STATS_INFO; ``topic_put_tps`` is messages per second."""

    offset_table: dict[MessageQueue, TopicOffsets] = field(default_factory=dict)
    topic_put_tps: float = 0.0


class ConsumeOffsets(Struct, rename="camel", gc=False):
    """How far a group is on one queue (``OffsetWrapper``); ``pull_offset`` from 5.0 on."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    pull_offset: Int64 | None = None
    last_timestamp: Int64 = 0


class ConsumeStats(Struct, rename="camel"):
    """Answer to GET_CONSUME_STATS; ``consume_tps`` is messages per second."""

    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, ConsumeOffsets] = field(default_factory=dict)


class ConsumeStatsList(Struct, rename="camel"):
    """Answer to GET_BROKER_CONSUME_STATS: one map per group, group → its topics' stats."""

    broker_addr: str | None = None
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = field(default_factory=list)
    total_diff: Int64 = 0
    total_inflight_diff: Int64 = 0


class StatsItem(Struct, gc=False):
    """One counter over one span: how many, per second, and the average size or time of one."""

    sum: Int64 = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Struct, rename="camel"):
    """Answer to VIEW_BROKER_STATS_DATA."""

    stats_minute: StatsItem = field(default_factory=StatsItem)
    stats_hour: StatsItem = field(default_factory=StatsItem)
    stats_day: StatsItem = field(default_factory=StatsItem)


class QueueTimeSpan(Struct, rename="camel", kw_only=True):
    """Store times of one queue in ms; ``delay_time`` is how late the group is.
    The ``str`` forms are local time as ``yyyy-MM-dd#HH:mm:ss:SSS``."""

    message_queue: MessageQueue
    min_time_stamp: Int64 = 0
    max_time_stamp: Int64 = 0
    consume_time_stamp: Int64 = 0
    delay_time: Int64 = 0
    min_time_stamp_str: str | None = None
    max_time_stamp_str: str | None = None
    consume_time_stamp_str: str | None = None


class ConsumeTimeSpans(Struct, rename="camel"):
    """Answer to QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: list[QueueTimeSpan] = field(default_factory=list)
