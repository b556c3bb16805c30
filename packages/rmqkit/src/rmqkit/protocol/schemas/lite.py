"""Lite topics of RocketMQ 5.5: subscriptions, pops and what tools read (200070 to 200079).

The codes fit only in a JSON header. ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME have the field ``liteTopic`` for lite
topics. Source: lite.md §6, §7, §11.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, CLIENT, Content, Operation, Right
from rmqkit.protocol.schemas.pop import ChangeInvisibleTimeResponse

ADD, REMOVE, COMPLETE_ADD, COMPLETE_REMOVE = "PARTIAL_ADD", "PARTIAL_REMOVE", "COMPLETE_ADD", "COMPLETE_REMOVE"
"""The actions of a `LiteSubscription`."""
OFFSET, TAIL, TIMESTAMP, POLICY = "OFFSET", "TAIL_N", "TIMESTAMP", "POLICY"
"""The types of an `OffsetOption`."""
LAST, MIN, MAX = 0, 1, 2
"""The values of the type POLICY: the group's offset, the first and the next message."""


class PopLiteMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POP_LITE_MESSAGE. Times are in ms. ``resync``: a broker that does not know the client answers ILLEGAL_OPERATION
    instead of waiting; only rmqkit has this field."""

    client_id: str
    consumer_group: str
    topic: str
    max_msg_num: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    attempt_id: str | None = None
    bname: str | None = None
    resync: bool | None = None


class PopLiteMessageResponse(ChangeInvisibleTimeResponse, kw_only=True, gc=False):
    """The answer to POP_LITE_MESSAGE. ``order_count_info``: see `rmqkit.protocol.ids.encode_lite_counts`."""

    order_count_info: str | None = None


class OffsetOption(Struct, rename="camel"):
    """The place where a group begins to read a lite topic. ``value``: an offset, a number of messages, a time in ms, or
    a policy."""

    type: str
    value: Int64 = 0


class LiteSubscription(Struct, rename="camel", kw_only=True):
    """A change of the lite topics that a client subscribes to."""

    action: str
    client_id: str | None = None
    group: str | None = None
    topic: str | None = None
    lite_topic_set: list[str] | None = None
    version: Int64 = 0
    offset_option: OffsetOption | None = None


class LiteSubscriptionCtlBody(Struct, rename="camel"):
    """Body of LITE_SUBSCRIPTION_CTL."""

    subscription_set: list[LiteSubscription] = field(default_factory=list)


class NotifyUnsubscribeLiteRequest(Struct, rename="camel", kw_only=True, gc=False):
    """NOTIFY_UNSUBSCRIBE_LITE: a newer subscriber of an exclusive group has taken a lite topic."""

    lite_topic: str
    consumer_group: str
    client_id: str


class BrokerLiteInfo(Struct, rename="camel", kw_only=True):
    """The answer to GET_BROKER_LITE_INFO. ``topic_meta``: lifetime in minutes by parent. ``group_meta``: groups by
    parent."""

    cq_table_size: int = field(default=0, name="cqTableSize")
    current_lmq_num: int = 0
    event_map_size: int = 0
    group_meta: dict[str, list[str]] = field(default_factory=dict)
    lite_subscription_count: int = 0
    max_lmq_num: int = 0
    offset_table_size: int = 0
    order_info_count: int = 0
    store_type: str = "default"
    topic_meta: dict[str, int] = field(default_factory=dict)


class ParentTopicRequest(Struct, rename="camel", gc=False):
    """GET_PARENT_TOPIC_INFO."""

    topic: str


class ParentTopicInfo(Struct, rename="camel", kw_only=True):
    """The answer to GET_PARENT_TOPIC_INFO. ``ttl``: lifetime of its lite topics in minutes, -1 without one."""

    groups: list[str] = field(default_factory=list)
    lite_topic_count: int = 0
    lmq_num: int = 0
    topic: str = ""
    ttl: int = -1


class LiteTopicRequest(Struct, rename="camel", gc=False):
    """GET_LITE_TOPIC_INFO."""

    parent_topic: str
    lite_topic: str


class LiteSubscriber(Struct, rename="camel"):
    """A subscriber of a lite topic; ``*`` for a wildcard group."""

    client_id: str
    group: str


class LiteTopicOffset(Struct, rename="camel", kw_only=True):
    """The bounds of a lite topic. ``last_update_timestamp``: store time of the newest message in ms, 0 without one."""

    last_update_timestamp: int = 0
    max_offset: int = 0
    min_offset: int = 0


class LiteTopicInfo(Struct, rename="camel", kw_only=True):
    """The answer to GET_LITE_TOPIC_INFO."""

    lite_topic: str
    parent_topic: str
    sharding_to_broker: bool = True
    subscriber: list[LiteSubscriber] = field(default_factory=list)
    topic_offset: LiteTopicOffset = field(default_factory=LiteTopicOffset)


class LiteClientRequest(Struct, rename="camel", kw_only=True, gc=False):
    """GET_LITE_CLIENT_INFO."""

    parent_topic: str
    group: str
    client_id: str
    max_count: Int32 = 1000


class LiteClientInfo(Struct, rename="camel", kw_only=True):
    """The answer to GET_LITE_CLIENT_INFO. Times are in ms. ``lite_topic_count`` is -1 for an unknown client."""

    client_id: str
    group: str
    last_access_time: int = -1
    last_consume_time: int = 0
    lite_topic_count: int = -1
    lite_topic_set: list[str] | None = None
    parent_topic: str = ""


class LiteGroupRequest(Struct, rename="camel", kw_only=True, gc=False):
    """GET_LITE_GROUP_INFO. ``top_k``: maximum number of lite topics with lag."""

    group: str
    lite_topic: str | None = None
    top_k: Int32 = field(default=20, name="topK")


class LiteLag(Struct, rename="camel", kw_only=True):
    """The lag of a group in a lite topic."""

    earliest_unconsumed_timestamp: int = -1
    lag_count: int = 0
    lite_topic: str = ""


class LiteTopicLag(Struct, rename="camel", kw_only=True):
    """The offsets of a group in one lite topic."""

    broker_offset: int = 0
    consumer_offset: int = 0
    last_timestamp: int = 0
    pull_offset: int = 0


class LiteGroupInfo(Struct, rename="camel", kw_only=True, omit_defaults=False):
    """The answer to GET_LITE_GROUP_INFO."""

    earliest_unconsumed_timestamp: int = -1
    group: str = ""
    lag_count_top_k: list[LiteLag] | None = field(default=None, name="lagCountTopK")
    lag_timestamp_top_k: list[LiteLag] | None = field(default=None, name="lagTimestampTopK")
    lite_topic_offset_wrapper: LiteTopicLag | None = None
    parent_topic: str = ""
    total_lag_count: int = 0


class TriggerLiteDispatchRequest(Struct, rename="camel", kw_only=True, gc=False):
    """TRIGGER_LITE_DISPATCH."""

    group: str
    client_id: str | None = None


# fmt: off
OPERATIONS = (
    Operation(Code.POP_LITE_MESSAGE, 3, BROKER, PopLiteMessageRequest, PopLiteMessageResponse,
              response_body=Content.RECORDS, right=Right("Sub", "consumerGroup topic")),
    Operation(Code.LITE_SUBSCRIPTION_CTL, 3, BROKER, request_body=LiteSubscriptionCtlBody,
              right=Right("Sub", is_body=True)),
    Operation(Code.ACK_LITE_MESSAGE, 3, BROKER, is_typed=False),
    Operation(Code.NOTIFY_UNSUBSCRIBE_LITE, 3, CLIENT, NotifyUnsubscribeLiteRequest),
    Operation(Code.GET_BROKER_LITE_INFO, 3, BROKER, response_body=BrokerLiteInfo, right=Right("Get"), is_reading=True),
    Operation(Code.GET_PARENT_TOPIC_INFO, 3, BROKER, ParentTopicRequest, response_body=ParentTopicInfo,
              right=Right("Get", "topic"), is_reading=True),
    Operation(Code.GET_LITE_TOPIC_INFO, 3, BROKER, LiteTopicRequest, response_body=LiteTopicInfo,
              right=Right("Get", "parentTopic"), is_reading=True),
    Operation(Code.GET_LITE_CLIENT_INFO, 3, BROKER, LiteClientRequest, response_body=LiteClientInfo,
              right=Right("Get", "parentTopic group"), is_reading=True),
    Operation(Code.GET_LITE_GROUP_INFO, 3, BROKER, LiteGroupRequest, response_body=LiteGroupInfo,
              right=Right("Get", "group"), is_reading=True),
    Operation(Code.TRIGGER_LITE_DISPATCH, 3, BROKER, TriggerLiteDispatchRequest, right=Right("Update", "group")),
)
# fmt: on
