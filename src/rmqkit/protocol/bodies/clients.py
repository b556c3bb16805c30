"""Heartbeats and what clients and brokers tell each other about groups. Source: remoting.md §6.3, §6.4.4, §6.4.8."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from rmqkit.protocol.bodies.topics import DataVersion
from rmqkit.protocol.numbers import Int32, Int64

_CUSTOMIZED = "CUSTOMIZED"
_MINUTE_MS = 60_000
_LEVELS_MS = (1000, 5000, 10_000, 30_000, *(_MINUTE_MS * n for n in (*range(1, 11), 20, 30, 60, 120)))


class MessageQueue(Struct, rename="camel", frozen=True, order=True, gc=False):
    """One queue of a topic on one broker; sorts by topic, broker name, queue id as rebalancing needs it."""

    topic: str
    broker_name: str
    queue_id: Int32


class SubscriptionData(Struct, rename="camel", kw_only=True):
    """What a group wants of a topic.

    Attributes:
        sub_string: ``*``, ``A || B`` or an SQL92 text.
        tags_set: the tags of a tag expression.
        code_set: `java_hash` of each tag; what the broker filters by.
        sub_version: ms since the epoch; a newer one replaces an older one.
        expression_type: ``TAG`` or ``SQL92``.
    """

    class_filter_mode: bool = False
    topic: str
    sub_string: str = "*"
    tags_set: list[str] = field(default_factory=list)
    code_set: list[Int32] = field(default_factory=list)
    sub_version: Int64 = 0
    expression_type: str | None = "TAG"


class ConsumerData(Struct, rename="camel", kw_only=True):
    """One consumer group of a client."""

    group_name: str
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    subscription_data_set: list[SubscriptionData] = field(default_factory=list)
    unit_mode: bool = False


class ProducerData(Struct, rename="camel"):
    """One producer group of a client."""

    group_name: str


class HeartbeatData(Struct, kw_only=True):
    """Body of HEART_BEAT (note the spelling ``clientID``)."""

    clientID: str  # noqa: N815
    producerDataSet: list[ProducerData] = field(default_factory=list)  # noqa: N815
    consumerDataSet: list[ConsumerData] = field(default_factory=list)  # noqa: N815
    heartbeatFingerprint: Int32 = 0  # noqa: N815
    withoutSub: bool = False  # noqa: N815


class CheckClientBody(Struct, rename="camel", kw_only=True):
    """Body of CHECK_CLIENT_CONFIG."""

    client_id: str = ""
    group: str = ""
    namespace: str = ""
    subscription_data: SubscriptionData | None = None


class ConsumerIds(Struct, rename="camel"):
    """Answer to GET_CONSUMER_LIST_BY_GROUP."""

    consumer_id_list: list[str] = field(default_factory=list)


class ExponentialRetryPolicy(Struct, rename="camel", gc=False):
    """Waits in ms that grow from ``initial`` to ``max``."""

    initial: Int64 = 5000
    max: Int64 = 7_200_000
    multiplier: Int64 = 2


class CustomizedRetryPolicy(Struct, rename="camel"):
    """Waits in ms, one for each retry: those of the default delay levels."""

    next: list[Int64] = field(default_factory=lambda: [*_LEVELS_MS])


class GroupRetryPolicy(Struct, rename="camel"):
    """How long to wait before each retry (``groupRetryPolicy``): what proxies tell their clients.
    Brokers keep and show it and go by their delay levels all the same (checked with 5.4.0). A type that is not known
    counts as the default."""

    type: str | None = _CUSTOMIZED
    exponential_retry_policy: ExponentialRetryPolicy | UnsetType | None = UNSET
    customized_retry_policy: CustomizedRetryPolicy | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        if self.type != "EXPONENTIAL":
            self.type = _CUSTOMIZED
        self.exponential_retry_policy = self.exponential_retry_policy or UNSET
        self.customized_retry_policy = self.customized_retry_policy or UNSET


class SubscriptionGroupConfig(Struct, rename="camel", kw_only=True):
    """What a broker holds about a consumer group; defaults are the reference's."""

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


class SubscriptionGroupTable(Struct, rename="camel"):
    """``subscriptionGroup.json``."""

    data_version: DataVersion = field(default_factory=DataVersion)
    forbidden_table: dict[str, dict[str, Int32]] = field(default_factory=dict)
    subscription_group_table: dict[str, SubscriptionGroupConfig] = field(default_factory=dict)
