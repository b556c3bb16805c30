"""Requests for messages: pulls (11, 361), queries by key (12) and by offset id (33), and entries of a queue (321).

Responses to pulls and queries are sequences of records, not JSON. Source: remoting.md §4.3.2, §4.3.6, §4.4, §6.4.13.
"""

from __future__ import annotations

import enum

from msgspec import Struct, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, Content, Operation, Right
from rmqkit.protocol.schemas.clients import SubscriptionData


class PullFlag(enum.IntFlag):
    """Bits of a pull request's ``sysFlag``."""

    COMMIT_OFFSET = 1
    SUSPEND = 2
    SUBSCRIPTION = 4
    CLASS_FILTER = 8
    LITE = 16


class ForbiddenType(enum.IntEnum):
    """The reason for a NO_PERMISSION response to a pull."""

    BROKER = 1
    GROUP = 2
    TOPIC = 3
    BROADCAST = 4
    SUBSCRIPTION = 5


class PullMessageRequest(Struct, rename="camel", gc=False):
    """A pull of a queue from an offset, with limits and the time to wait for a message (``suspend_timeout_millis``).
    ``lite_topic``: the lite topic to read instead of a queue. ``lite_epoch``: the life of the lite topic to which the
    offset belongs; a broker of rmqkit refuses the pull if this life is over."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    sub_version: Int64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: Int32 | None = None
    bname: str | None = None
    request_source: Int32 | None = None
    proxy_froward_client_id: str | None = None  # the reference's spelling
    lite_topic: str | None = None
    lite_epoch: Int32 | None = None


class PullMessageResponse(Struct, rename="camel", gc=False):
    """The header of every response to a pull, even without messages: Java clients require the first four numbers."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    topic_sys_flag: Int32 | None = None
    group_sys_flag: Int32 | None = None
    forbidden_type: Int32 | None = None
    offset_delta: Int64 | None = None


class ViewMessageRequest(Struct, gc=False):
    """VIEW_MESSAGE_BY_ID. ``offset`` is physical."""

    offset: Int64
    topic: str | None = None


class QueryMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """QUERY_MESSAGE by key and store times in ms. A query by unique key finds at most 32 messages, even if ``max_num``
    is larger. ``index_type``: ``K`` keys, ``U`` unique key, ``T`` tags (5.4). ``last_key``: start of the next page."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    index_type: str | None = None
    last_key: str | None = None
    is_unique_key: bool | None = field(default=None, name="_UNIQUE_KEY_QUERY")


class QueryMessageResponse(Struct, rename="camel", gc=False):
    """The progress of the index: store time in ms and physical offset of its last entry."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


class QueryConsumeQueueRequest(Struct, rename="camel", kw_only=True, gc=False):
    """QUERY_CONSUME_QUEUE for ``count`` entries from ``index``. With a group, each entry also has the result of the
    group's filter."""

    topic: str | None = None
    queue_id: Int32 = 0
    index: Int64 = 0
    count: Int32 = 0
    consumer_group: str | None = None


class ConsumeQueueEntry(Struct, rename="camel", kw_only=True):
    """An entry of a queue. ``eval`` is the result of the group's filter, and ``msg`` is the reason if the result is
    False."""

    physic_offset: Int64
    physic_size: Int32
    # The code may exceed 32 bits: it is the delivery time for a message that waits for its delay level.
    tags_code: Int64
    eval: bool = False
    extend_data_json: str | None = None
    bit_map: str | None = None
    msg: str | None = None


class QueryConsumeQueueBody(Struct, rename="camel", kw_only=True):
    """Response to QUERY_CONSUME_QUEUE."""

    subscription_data: SubscriptionData | None = None
    filter_data: str | None = None
    queue_data: list[ConsumeQueueEntry] = field(default_factory=list)
    max_queue_index: Int64 = 0
    min_queue_index: Int64 = 0


# fmt: off
OPERATIONS = (
    Operation(Code.PULL_MESSAGE, 1, BROKER, PullMessageRequest, PullMessageResponse, response_body=Content.RECORDS,
              right=Right("Sub", "topic! consumerGroup!"), is_reading=True),
    Operation(Code.QUERY_MESSAGE, 1, BROKER, QueryMessageRequest, QueryMessageResponse, response_body=Content.RECORDS,
              right=Right("Sub Get", "topic="), is_reading=True),
    Operation(Code.VIEW_MESSAGE_BY_ID, 1, BROKER, ViewMessageRequest, response_body=Content.RECORDS,
              right=Right("Get", "topic", message="offset", message_actions="Sub Get"), is_reading=True),
    Operation(Code.QUERY_CONSUME_QUEUE, 2, BROKER, QueryConsumeQueueRequest, response_body=QueryConsumeQueueBody,
              right=Right("Get", "topic consumerGroup"), is_reading=True),
    Operation(Code.LITE_PULL_MESSAGE, 1, BROKER, PullMessageRequest, PullMessageResponse,
              response_body=Content.RECORDS, right=Right("Sub", "topic! consumerGroup!"), is_reading=True),
)
# fmt: on
