"""Headers about topics: 17, 21, 202, 215, 300, 351, 513. Source: remoting.md §4.3.7, §4.4, §4.6.2."""

from __future__ import annotations

from msgspec import Struct

from rmqkit.protocol.numbers import Int32


class CreateTopicRequest(Struct, rename="camel", gc=False):
    """UPDATE_AND_CREATE_TOPIC and UPDATE_AND_CREATE_STATIC_TOPIC.
    ``attributes`` is a list such as ``+message.type=DELAY,-reserve.time``."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool = False
    attributes: str | None = None
    force: bool | None = None


class TopicRequest(Struct, gc=False):
    """Requests about one topic: 202, 215, 300, 351."""

    topic: str


class TopicConfigsRequest(Struct, rename="camel", gc=False):
    """GET_ALL_TOPIC_CONFIG; a page of them when a slave of 5.3 or later asks for one."""

    topic_seq: Int32 | None = None
    data_version: str | None = None
    max_topic_num: Int32 | None = None


class TopicConfigsResponse(Struct, rename="camel", gc=False):
    """How many topics there are in all."""

    total_topic_num: Int32 | None = None
