"""Consumer groups at a broker: requests for their configuration (200, 201, 207, 225, 352), their subscriptions (300,
343, 345) and their forbidden topics (353).

`SubscriptionGroupTable` is also the content of ``subscriptionGroup.json``. `FilterFile` is only used in a file.
Source: remoting.md §4.4, §6.4.4, §6.4.6, §6.4.13; store.md §9.6.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.codes import Int32, Int64
from rmqkit.protocol.codes import RequestCode as Code
from rmqkit.protocol.operation import BROKER, Operation, Right
from rmqkit.protocol.schemas.clients import SubscriptionData
from rmqkit.protocol.schemas.topics import DataVersion, TopicList, TopicRequest

_CUSTOMIZED = "CUSTOMIZED"
_MINUTE_MS = 60_000
_LEVELS_MS = (1000, 5000, 10_000, 30_000, *(_MINUTE_MS * n for n in (*range(1, 11), 20, 30, 60, 120)))


class ExponentialRetryPolicy(Struct, rename="camel", gc=False):
    """Delays in ms that grow from ``initial`` to ``max``."""

    initial: Int64 = 5000
    max: Int64 = 7_200_000
    multiplier: Int64 = 2


class CustomizedRetryPolicy(Struct, rename="camel"):
    """Delays in ms, one for each retry. The defaults are the delays of the default delay levels."""

    next: list[Int64] = field(default_factory=lambda: [*_LEVELS_MS])


class GroupRetryPolicy(Struct, rename="camel"):
    """The delays before retries (``groupRetryPolicy``), which proxies send to their clients.
    Brokers store and show the policy, but use their delay levels (checked with 5.4.0). An unknown type counts as the
    default type."""

    type: str | None = _CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | UnsetType | None = UNSET
    customized_retry_policy: CustomizedRetryPolicy | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.type != "EXPONENTIAL":
            self.type = _CUSTOMIZED
        # Omit null members like Java, so that both programs write the same file.
        self.exponential_retry_policy = self.exponential_retry_policy or UNSET
        self.customized_retry_policy = self.customized_retry_policy or UNSET


LITE_BINDING = "lite.bind.topic"
_LITE_QUOTA = 2000


class SubscriptionGroupConfig(Struct, rename="camel", kw_only=True):
    """The configuration of a consumer group at a broker, with the reference's defaults."""

    attributes: dict[str, str] | None = field(default_factory=dict)
    broker_id: Int64 = 0
    consume_broadcast_enable: bool = True
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_message_orderly: bool = False
    consume_timeout_minute: Int32 = 15
    group_name: str = ""
    group_retry_policy: GroupRetryPolicy | None = field(default_factory=GroupRetryPolicy)
    group_sys_flag: Int32 = 0
    notify_consumer_ids_changed_enable: bool = True
    retry_max_times: Int32 = 16
    retry_queue_nums: Int32 = 1
    subscription_data_set: list[Any] | None = None
    which_broker_when_consume_slowly: Int64 = 1

    @property
    def lite_parent(self) -> str | None:
        """The topic whose lite topics the group consumes. None for a regular group. Source: lite.md §2."""
        return (self.attributes or {}).get(LITE_BINDING)

    @property
    def lite_quota(self) -> int:
        """Number of lite topics that a client of the group may subscribe to; -1: no limit."""
        text = (self.attributes or {}).get("lite.sub.client.quota", "")
        return int(text) if text.removeprefix("-").isdecimal() else _LITE_QUOTA


class SubscriptionGroupTable(Struct, rename="camel"):
    """``subscriptionGroup.json``."""

    data_version: DataVersion = field(default_factory=DataVersion)
    forbidden_table: dict[str, dict[str, Int32]] = field(default_factory=dict)
    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)


class GroupConfigList(Struct, rename="camel"):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    group_config_list: list[SubscriptionGroupConfig] = field(default_factory=list)


class GroupNameList(Struct, rename="camel"):
    """Body of DELETE_SUBSCRIPTION_GROUP_LIST. With ``clean_offset`` the offsets of the groups are deleted, too."""

    group_name_list: list[str] = field(default_factory=list)
    clean_offset: bool = False


class GroupRequest(Struct, gc=False):
    """GET_SUBSCRIPTIONGROUP_CONFIG and QUERY_TOPICS_BY_CONSUMER."""

    group: str


class GroupTopicRequest(Struct, gc=False):
    """QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str | None = None


class GroupConfigsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG. Slaves of 5.3 or later may request pages."""

    group_seq: Int32 | None = None
    data_version: str | None = None
    max_group_num: Int32 | None = None


class GroupConfigsResponse(Struct, rename="camel", gc=False):
    """The response to a request for a page of groups, with the total number of groups."""

    total_group_num: Int32 | None = None


class DeleteGroupRequest(Struct, rename="camel", gc=False):
    """DELETE_SUBSCRIPTIONGROUP. With ``clean_offset`` the broker also deletes the offsets of the group."""

    group_name: str
    clean_offset: bool | None = None


class GroupForbiddenRequest(Struct, gc=False):
    """UPDATE_AND_GET_GROUP_FORBIDDEN. A request without ``readable`` is only a query."""

    group: str
    topic: str
    readable: bool | None = None


class GroupList(Struct, rename="camel"):
    """Response to QUERY_TOPIC_CONSUME_BY_WHO."""

    group_list: list[str] = field(default_factory=list)


class GroupSubscription(Struct, rename="camel", kw_only=True):
    """Response to QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str | None = None
    subscription_data: SubscriptionData | None = None


class GroupForbidden(Struct, kw_only=True):
    """Response to UPDATE_AND_GET_GROUP_FORBIDDEN."""

    group: str
    topic: str
    readable: bool


# ---- consumerFilter.json


class BloomData(Struct, rename="camel"):
    """``bloomFilterData``, the bits of a subscription in the Bloom filter."""

    bit_num: int
    bit_pos: list[int]


class FilterData(Struct, rename="camel", kw_only=True):
    """The SQL92 expression of a group.

    Attributes:
        born_time: ms since the epoch. Bitmaps of messages that were stored later include this expression.
        client_version: the version of the subscription. A subscription with an older version is ignored.
        dead_time: the time when the group left, in ms. The filter is dead if ``dead_time`` ≥ ``born_time``.
    """

    bloom_filter_data: BloomData | None = None
    born_time: int = 0
    client_version: int = 0
    consumer_group: str = ""
    dead: bool = False
    dead_time: int = 0
    expression: str = ""
    expression_type: str = "SQL92"
    topic: str = ""


class TopicFilters(Struct, rename="camel"):
    """The filters of a topic, by group."""

    group_filter_data: dict[str, FilterData] = field(default_factory=dict)
    topic: str = ""


class FilterFile(Struct, rename="camel"):
    """``consumerFilter.json``."""

    filter_data_by_topic: dict[str, TopicFilters] = field(default_factory=dict)


# fmt: off
OPERATIONS = (
    Operation(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, 2, BROKER, request_body=SubscriptionGroupConfig),
    Operation(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, 2, BROKER, GroupConfigsRequest, GroupConfigsResponse,
              response_body=SubscriptionGroupTable, is_reading=True),
    Operation(Code.DELETE_SUBSCRIPTIONGROUP, 2, BROKER, DeleteGroupRequest, right=Right("Delete", "groupName")),
    Operation(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, 2, BROKER, request_body=GroupConfigList),
    Operation(Code.DELETE_SUBSCRIPTION_GROUP_LIST, 2, BROKER, request_body=GroupNameList,
              right=Right("Delete", is_body=True)),
    Operation(Code.QUERY_TOPIC_CONSUME_BY_WHO, 2, BROKER, TopicRequest, response_body=GroupList,
              right=Right("Get", "topic"), is_reading=True),
    Operation(Code.QUERY_TOPICS_BY_CONSUMER, 2, BROKER, GroupRequest, response_body=TopicList,
              right=Right("Get", "group"), is_reading=True),
    Operation(Code.QUERY_SUBSCRIPTION_BY_CONSUMER, 2, BROKER, GroupTopicRequest, response_body=GroupSubscription,
              right=Right("Get", "group topic"), is_reading=True),
    Operation(Code.GET_SUBSCRIPTIONGROUP_CONFIG, 2, BROKER, GroupRequest, response_body=SubscriptionGroupConfig,
              right=Right("Get", "group")),
    Operation(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, 2, BROKER, GroupForbiddenRequest, response_body=GroupForbidden,
              right=Right("Update", "group topic")),
)
# fmt: on
