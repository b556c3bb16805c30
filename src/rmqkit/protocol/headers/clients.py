"""Headers of client registration and of what clients hand back or look at: 33 to 36, 38, 40, 203.

Source: remoting.md §4.3.4, §4.3.5, §4.3.6.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.numbers import Int32, Int64


class HeartbeatResponse(Struct, gc=False):
    """HEART_BEAT, 5.x: whether fingerprints are understood, and whether the stored one differed."""

    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


class UnregisterClientRequest(Struct, gc=False):
    """UNREGISTER_CLIENT; either group may be missing."""

    clientID: str  # noqa: N815 - the wire spelling
    producerGroup: str | None = None  # noqa: N815
    consumerGroup: str | None = None  # noqa: N815


class ConsumerGroupRequest(Struct, rename="camel", gc=False):
    """GET_CONSUMER_LIST_BY_GROUP, NOTIFY_CONSUMER_IDS_CHANGED and GET_CONSUMER_CONNECTION_LIST."""

    consumer_group: str


class ConsumerSendBackRequest(Struct, rename="camel", gc=False):
    """CONSUMER_SEND_MSG_BACK; ``offset`` is physical, ``delay_level`` 0 lets the broker choose, -1 is the DLQ."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None


class ViewMessageRequest(Struct, gc=False):
    """VIEW_MESSAGE_BY_ID; ``offset`` is physical."""

    offset: Int64
    topic: str | None = None
