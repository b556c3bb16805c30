"""Headers of topic creation: 17. Source: remoting.md §4.3.7."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["CreateTopicRequest", "TopicRequest"]


class CreateTopicRequest(Struct, rename="camel", gc=False):
    """UPDATE_AND_CREATE_TOPIC; ``attributes`` is a list such as ``+message.type=DELAY,-reserve.time``."""

    topic: str
    default_topic: str
    read_queue_nums: int
    write_queue_nums: int
    perm: int
    topic_filter_type: str
    topic_sys_flag: int | None = None
    order: bool = False
    attributes: str | None = None
    force: bool | None = None


class TopicRequest(Struct, rename="camel", gc=False):
    """GET_ROUTEINFO_BY_TOPIC and other requests about one topic."""

    topic: str
    accept_standard_json_only: bool | None = None
