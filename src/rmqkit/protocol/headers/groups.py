"""Headers about consumer and producer groups: 201, 203, 204, 207, 208, 300, 303, 308, 314, 317, 343, 345, 352, 353.

Source: remoting.md §4.4.
"""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32


class GroupRequest(Struct, gc=False):
    """GET_SUBSCRIPTIONGROUP_CONFIG and QUERY_TOPICS_BY_CONSUMER."""

    group: str


class GroupTopicRequest(Struct, gc=False):
    """QUERY_SUBSCRIPTION_BY_CONSUMER."""

    group: str
    topic: str | None = None


class TimeSpanRequest(Struct, gc=False):
    """QUERY_CONSUME_TIME_SPAN."""

    topic: str
    group: str


class ProducerGroupRequest(Struct, rename="camel", gc=False):
    """GET_PRODUCER_CONNECTION_LIST."""

    producer_group: str


class GroupConfigsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_SUBSCRIPTIONGROUP_CONFIG; a page of them when a slave of 5.3 or later asks for one."""

    group_seq: Int32 | None = None
    data_version: str | None = None
    max_group_num: Int32 | None = None


class GroupConfigsResponse(Struct, rename="camel", gc=False):
    """How many groups there are in all."""

    total_group_num: Int32 | None = None


class DeleteGroupRequest(Struct, rename="camel", gc=False):
    """DELETE_SUBSCRIPTIONGROUP; with ``clean_offset`` its offsets go too."""

    group_name: str
    clean_offset: bool | None = None


class GroupForbiddenRequest(Struct, gc=False):
    """UPDATE_AND_GET_GROUP_FORBIDDEN; without ``readable`` only asks."""

    group: str
    topic: str
    readable: bool | None = None


class ConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_CONSUME_STATS; ``topic_list`` is separated by ``;`` (5.3)."""

    consumer_group: str
    topic: str | None = None
    topic_list: str | None = None


class AllConsumeStatsRequest(Struct, rename="camel", gc=False):
    """GET_BROKER_CONSUME_STATS."""

    is_order: bool


class CorrectionOffsetRequest(Struct, rename="camel", gc=False):
    """QUERY_CORRECTION_OFFSET; ``filter_groups`` is separated by commas."""

    compare_group: str
    topic: str
    filter_groups: str | None = None


class CloneGroupOffsetRequest(Struct, rename="camel", gc=False):
    """CLONE_GROUP_OFFSET."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None
