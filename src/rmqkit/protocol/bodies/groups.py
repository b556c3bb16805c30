"""Small bodies about topics and groups: 18, 225, 300, 345, 353. Source: remoting.md §4.4, §6.4.6, §6.4.13."""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.bodies.clients import SubscriptionData, SubscriptionGroupConfig
from rmqkit.protocol.bodies.topics import TopicConfig


class TopicConfigList(Struct, rename="camel"):
    """Body of UPDATE_AND_CREATE_TOPIC_LIST."""

    topic_config_list: list[TopicConfig] = field(default_factory=list)


class GroupConfigList(Struct, rename="camel"):
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST."""

    group_config_list: list[SubscriptionGroupConfig] = field(default_factory=list)


class GroupList(Struct, rename="camel"):
    """Answer to QUERY_TOPIC_CONSUME_BY_WHO."""

    group_list: list[str] = field(default_factory=list)


class GroupSubscription(Struct, rename="camel", kw_only=True):
    """Answer to QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str | None = None
    subscription_data: SubscriptionData | None = None


class GroupForbidden(Struct, kw_only=True):
    """Answer to UPDATE_AND_GET_GROUP_FORBIDDEN."""

    group: str
    topic: str
    readable: bool
