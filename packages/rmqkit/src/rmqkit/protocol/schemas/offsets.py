"""Requests for the offsets of queues (29 to 32), of groups (14, 15, 43, 308, 314) and of members (221, 223), for resets
of offsets (220, 222), and for statistics: topics (202), lag of groups (208, 317), time spans (303) and counters (315).

Maps with queues as keys need the dialect: write them with `fastjson.dumps`, and read them with `fastjson.decode_as`.
Source: remoting.md §4.3.3, §4.4, §4.5, §6.4.7, §6.4.9, §6.4.11 to §6.4.13, §6.7, §10.6.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, CLIENT, Operation, Right
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.protocol.schemas.topics import DataVersion, TopicRequest


class QueryConsumerOffsetRequest(Struct, rename="camel", gc=False):
    """QUERY_CONSUMER_OFFSET."""

    consumer_group: str
    topic: str
    queue_id: Int32
    set_zero_if_not_found: bool | None = None
    bname: str | None = None
    lite_topic: str | None = None


class UpdateConsumerOffsetRequest(Struct, rename="camel", gc=False):
    """UPDATE_CONSUMER_OFFSET. Queue and offset have defaults, because the reference refuses a request without them with
    its own remark."""

    consumer_group: str
    topic: str
    queue_id: Int32 | None = None
    commit_offset: Int64 | None = None
    bname: str | None = None
    lite_topic: str | None = None


class QueueRequest(Struct, rename="camel", gc=False):
    """GET_MAX_OFFSET, GET_MIN_OFFSET and GET_EARLIEST_MSG_STORETIME for a queue of a topic.
    If ``committed`` is False, GET_MAX_OFFSET includes stored messages that are not readable yet."""

    topic: str
    queue_id: Int32
    committed: bool | None = None
    bname: str | None = None
    lite_topic: str | None = None


class SearchOffsetRequest(Struct, rename="camel", gc=False):
    """SEARCH_OFFSET_BY_TIMESTAMP. ``boundary_type`` is LOWER (default) or UPPER, in any case."""

    topic: str
    queue_id: Int32
    timestamp: Int64
    boundary_type: str | None = None
    bname: str | None = None
    lite_topic: str | None = None


class OffsetResponse(Struct, gc=False):
    """A queue offset."""

    offset: Int64


class StoreTimeResponse(Struct, gc=False):
    """A store time in ms since the epoch, or -1 for an empty queue."""

    timestamp: Int64


class ConsumerOffsets(Struct, rename="camel"):
    """Response to GET_ALL_CONSUMER_OFFSET: ``topic@group`` → queue id → offset. 4.x sends only the table. 5.5 also
    sends a ``pull_offset_table``. rmqkit does not share pulled offsets, so its table is empty."""

    data_version: DataVersion | UnsetType = UNSET
    group_topic_map: dict[str, list[str]] | UnsetType = UNSET
    offset_table: dict[str, dict[Int32, Int64]] = field(default_factory=dict)
    pull_offset_table: dict[str, dict[Int32, Int64]] | UnsetType = UNSET


class LiteOffsetsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_CONSUMER_OFFSET for the offsets in lite topics: a place in the files of the broker. Only rmqkit has
    these fields."""

    lite_file: Int64 | None = None
    lite_position: Int64 | None = None


class LiteOffsetsResponse(Struct, rename="camel", gc=False):
    """The place after the records in the body. ``log_offset``: the end of the broker's log."""

    lite_file: Int64 | None = None
    lite_position: Int64 | None = None
    log_offset: Int64 = 0


class LightOffsets(ConsumerOffsets, rename="camel"):
    """The content of ``lmqConsumerOffset.json``, which adds ``topic@group`` → offset for groups ``%LMQ%…``."""

    lmq_offset_table: dict[str, Int64] = field(default_factory=dict)


class CorrectionOffsets(Struct, rename="camel"):
    """Response to QUERY_CORRECTION_OFFSET: queue id → offset."""

    correction_offsets: dict[Int32, Int64] = field(default_factory=dict)


class CorrectionOffsetRequest(Struct, rename="camel", gc=False):
    """QUERY_CORRECTION_OFFSET. ``filter_groups`` are names, separated by commas."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class CloneGroupOffsetRequest(Struct, rename="camel", gc=False):
    """CLONE_GROUP_OFFSET."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None


class ResetOffsetRequest(Struct, rename="camel", kw_only=True, gc=False):
    """INVOKE_BROKER_TO_RESET_OFFSET. ``timestamp`` is in ms, or -1 for the end. ``queue_id`` -1 means every queue."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool
    queue_id: Int32 = -1
    offset: Int64 | None = None


class ResetClientOffsetRequest(Struct, rename="camel", kw_only=True, gc=False):
    """RESET_CONSUMER_CLIENT_OFFSET, which a broker sends to clients."""

    topic: str
    group: str
    timestamp: Int64 | None = None
    is_force: bool | None = None


class ConsumerStatusRequest(Struct, rename="camel", gc=False):
    """INVOKE_BROKER_TO_GET_CONSUMER_STATUS and GET_CONSUMER_STATUS_FROM_CLIENT. ``client_addr`` is a client id."""

    topic: str
    group: str
    client_addr: str | None = None


class ResetOffsetBody(Struct, rename="camel"):
    """Body of RESET_CONSUMER_CLIENT_OFFSET and response to INVOKE_BROKER_TO_RESET_OFFSET: queue → new offset."""

    offset_table: dict[MessageQueue, Int64] = field(default_factory=dict)


class QueueOffset(Struct, rename="camel", kw_only=True, gc=False):
    """An entry of `ResetOffsetList`."""

    topic: str
    broker_name: str
    queue_id: Int32
    offset: Int64


class ResetOffsetList(Struct, rename="camel"):
    """`ResetOffsetBody` for clients in C++ (``ResetOffsetBodyForC``)."""

    offset_table: list[QueueOffset] = field(default_factory=list)

    @classmethod
    def of(cls, body: ResetOffsetBody) -> ResetOffsetList:
        """Return the same offsets as a list."""
        return cls(
            [
                QueueOffset(topic=queue.topic, broker_name=queue.broker_name, queue_id=queue.queue_id, offset=offset)
                for queue, offset in body.offset_table.items()
            ]
        )


class ConsumerStatus(Struct, rename="camel"):
    """The committed offsets of one client (response to 221), or of several clients by id (response to 223)
    (``GetConsumerStatusBody``)."""

    message_queue_table: dict[MessageQueue, Int64] = field(default_factory=dict)
    consumer_table: dict[str, dict[MessageQueue, Int64]] = field(default_factory=dict)


class StatsDataRequest(Struct, rename="camel", gc=False):
    """VIEW_BROKER_STATS_DATA for a counter with this name and key (remoting.md §6.7)."""

    stats_name: str
    stats_key: str


class TimeSpanRequest(Struct, gc=False):
    """QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class ConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_CONSUME_STATS. ``topic_list`` (5.3) are names, separated by ``;``."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class AllConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_BROKER_CONSUME_STATS."""

    is_order: bool


class TopicOffsets(Struct, rename="camel", gc=False):
    """The offsets of a queue. ``last_update_timestamp`` is the store time of its newest message in ms, 0 if empty."""

    min_offset: Int64 = 0
    max_offset: Int64 = 0
    last_update_timestamp: Int64 = 0


class TopicStatsTable(Struct, rename="camel"):
    """Response to GET_TOPIC_STATS_INFO. ``topic_put_tps`` is messages per second."""

    offset_table: dict[MessageQueue, TopicOffsets] = field(default_factory=dict)
    topic_put_tps: float = 0.0


class ConsumeOffsets(Struct, rename="camel", gc=False):
    """The offsets of a group in one queue (``OffsetWrapper``). ``pull_offset`` exists since 5.0."""

    broker_offset: Int64 = 0
    consumer_offset: Int64 = 0
    pull_offset: Int64 | None = None
    last_timestamp: Int64 = 0


class ConsumeStats(Struct, rename="camel"):
    """Response to GET_CONSUME_STATS. ``consume_tps`` is messages per second."""

    consume_tps: float = 0.0
    offset_table: dict[MessageQueue, ConsumeOffsets] = field(default_factory=dict)


class ConsumeStatsList(Struct, rename="camel"):
    """Response to GET_BROKER_CONSUME_STATS. Each map has one group: group → the stats of its topics."""

    broker_addr: str | None = None
    consume_stats_list: list[dict[str, list[ConsumeStats]]] = field(default_factory=list)
    total_diff: Int64 = 0
    total_inflight_diff: Int64 = 0


class StatsItem(Struct, gc=False):
    """A counter over a time span: the total, the rate per second, and the average size or time of an item."""

    sum: Int64 = 0
    tps: float = 0.0
    avgpt: float = 0.0


class BrokerStatsData(Struct, rename="camel"):
    """Response to VIEW_BROKER_STATS_DATA."""

    stats_minute: StatsItem = field(default_factory=StatsItem)
    stats_hour: StatsItem = field(default_factory=StatsItem)
    stats_day: StatsItem = field(default_factory=StatsItem)


class QueueTimeSpan(Struct, rename="camel", kw_only=True):
    """Store times in a queue, and the lag of a group as ``delay_time``, all in ms.
    The ``str`` fields are local times of the form ``yyyy-MM-dd#HH:mm:ss:SSS``."""

    message_queue: MessageQueue
    min_time_stamp: Int64 = 0
    max_time_stamp: Int64 = 0
    consume_time_stamp: Int64 = 0
    delay_time: Int64 = 0
    min_time_stamp_str: str | None = None
    max_time_stamp_str: str | None = None
    consume_time_stamp_str: str | None = None


class ConsumeTimeSpans(Struct, rename="camel"):
    """Response to QUERY_CONSUME_TIME_SPAN."""

    consume_time_span_set: list[QueueTimeSpan] = field(default_factory=list)


# fmt: off
OPERATIONS = (
    Operation(Code.QUERY_CONSUMER_OFFSET, 1, BROKER, QueryConsumerOffsetRequest, OffsetResponse,
              right=Right("Sub Get", "topic~ consumerGroup!"), is_reading=True),
    Operation(Code.UPDATE_CONSUMER_OFFSET, 1, BROKER, UpdateConsumerOffsetRequest,
              right=Right("Sub Update", "topic~ consumerGroup!")),
    Operation(Code.SEARCH_OFFSET_BY_TIMESTAMP, 1, BROKER, SearchOffsetRequest, OffsetResponse,
              right=Right("Get", "topic"), is_reading=True),
    Operation(Code.GET_MAX_OFFSET, 1, BROKER, QueueRequest, OffsetResponse, right=Right("Get", "topic"),
              is_reading=True),
    Operation(Code.GET_MIN_OFFSET, 1, BROKER, QueueRequest, OffsetResponse, right=Right("Get", "topic"),
              is_reading=True),
    Operation(Code.GET_EARLIEST_MSG_STORETIME, 1, BROKER, QueueRequest, StoreTimeResponse,
              right=Right("Get", "topic"), is_reading=True),
    Operation(Code.GET_ALL_CONSUMER_OFFSET, 2, BROKER, response_body=ConsumerOffsets, is_reading=True),
    Operation(Code.GET_TOPIC_STATS_INFO, 2, BROKER, TopicRequest, response_body=TopicStatsTable,
              right=Right("Get", "topic"), is_reading=True),
    Operation(Code.GET_CONSUME_STATS, 2, BROKER, ConsumeStatsRequest, response_body=ConsumeStats,
              right=Right("Get", "consumerGroup topic topicList;"), is_reading=True),
    Operation(Code.RESET_CONSUMER_CLIENT_OFFSET, 2, CLIENT, ResetClientOffsetRequest, request_body=ResetOffsetBody),
    Operation(Code.GET_CONSUMER_STATUS_FROM_CLIENT, 2, CLIENT, ConsumerStatusRequest, response_body=ConsumerStatus),
    Operation(Code.INVOKE_BROKER_TO_RESET_OFFSET, 2, BROKER, ResetOffsetRequest, response_body=ResetOffsetBody,
              right=Right("Update", "group topic")),
    Operation(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, 2, BROKER, ConsumerStatusRequest,
              response_body=ConsumerStatus, right=Right("Get", "topic group")),
    Operation(Code.QUERY_CONSUME_TIME_SPAN, 2, BROKER, TimeSpanRequest, response_body=ConsumeTimeSpans,
              right=Right("Get", "topic group"), is_reading=True),
    Operation(Code.QUERY_CORRECTION_OFFSET, 2, BROKER, CorrectionOffsetRequest, response_body=CorrectionOffsets,
              right=Right("Get", "filterGroups, compareGroup topic")),
    Operation(Code.CLONE_GROUP_OFFSET, 2, BROKER, CloneGroupOffsetRequest, right=Right("Update", "destGroup topic")),
    Operation(Code.VIEW_BROKER_STATS_DATA, 2, BROKER, StatsDataRequest, response_body=BrokerStatsData,
              right=Right("Get"), is_reading=True),
    Operation(Code.GET_BROKER_CONSUME_STATS, 2, BROKER, AllConsumeStatsRequest, response_body=ConsumeStatsList,
              right=Right("Get"), is_reading=True),
)
# fmt: on
