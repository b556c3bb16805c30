"""Headers of client registration: 34, 35, 38, 40, 36. Source: remoting.md §4.3.4, §4.3.5."""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ConsumerGroupRequest", "ConsumerSendBackRequest", "UnregisterClientRequest", "ViewMessageRequest"]


class UnregisterClientRequest(Struct, gc=False):
    """UNREGISTER_CLIENT; either group may be missing."""

    clientID: str  # noqa: N815 - the wire spelling
    producerGroup: str | None = None  # noqa: N815
    consumerGroup: str | None = None  # noqa: N815


class ConsumerGroupRequest(Struct, rename="camel", gc=False):
    """GET_CONSUMER_LIST_BY_GROUP and NOTIFY_CONSUMER_IDS_CHANGED."""

    consumer_group: str


class ConsumerSendBackRequest(Struct, rename="camel", gc=False):
    """CONSUMER_SEND_MSG_BACK; ``offset`` is physical, ``delay_level`` 0 lets the broker choose, -1 is the DLQ."""

    offset: int
    group: str
    delay_level: int
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: int | None = None


class ViewMessageRequest(Struct, gc=False):
    """VIEW_MESSAGE_BY_ID; ``offset`` is physical."""

    offset: int
    topic: str | None = None
