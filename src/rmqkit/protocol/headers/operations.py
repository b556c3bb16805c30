"""Headers of rare operations: 354, 355, 902, 903, 2004, 5001 and the lite topics 200070 to 200079.

Source: remoting.md §4.6.4; the lite family came after 5.4 and is not checked against a running broker.
"""

from __future__ import annotations

from msgspec import Struct, field

from rmqkit.protocol.numbers import Int32, Int64

__all__ = [
    "AddBrokerRequest",
    "CheckQueueProgressRequest",
    "ExportConfigRequest",
    "LiteClientRequest",
    "LiteGroupRequest",
    "LiteTopicRequest",
    "LiteUnsubscribeRequest",
    "ParentTopicRequest",
    "PopLiteMessageRequest",
    "ReadAheadRequest",
    "RemoveBrokerRequest",
    "TimerEngineRequest",
    "TriggerLiteRequest",
]


class CheckQueueProgressRequest(Struct, rename="camel", gc=False):
    """CHECK_ROCKSDB_CQ_WRITE_PROGRESS."""

    topic: str
    check_store_time: Int64 = 0


class ExportConfigRequest(Struct, rename="camel", gc=False):
    """EXPORT_ROCKSDB_CONFIG_TO_JSON; ``topics;subscriptionGroups;consumerOffsets`` or a part of it."""

    config_type: str


class AddBrokerRequest(Struct, rename="camel", gc=False):
    """ADD_BROKER; without a path the body is the configuration."""

    config_path: str | None = None


class RemoveBrokerRequest(Struct, rename="camel", gc=False):
    """REMOVE_BROKER."""

    broker_name: str
    broker_cluster_name: str
    broker_id: Int64


class ReadAheadRequest(Struct, gc=False):
    """SET_COMMITLOG_READ_MODE; the number is an ``madvise`` advice."""

    read_ahead_mode: Int32 | None = field(default=None, name="READ_AHEAD_MODE")


class TimerEngineRequest(Struct, gc=False):
    """SWITCH_TIMER_ENGINE: ``R`` for RocksDB, ``F`` for files."""

    engine_type: str | None = field(default=None, name="E_T")


class PopLiteMessageRequest(Struct, rename="camel", kw_only=True, gc=False):
    """POP_LITE_MESSAGE; times in ms."""

    client_id: str
    consumer_group: str
    topic: str
    max_msg_num: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    attempt_id: str | None = None


class LiteUnsubscribeRequest(Struct, rename="camel", gc=False):
    """NOTIFY_UNSUBSCRIBE_LITE, pushed to a client."""

    lite_topic: str
    consumer_group: str
    client_id: str


class ParentTopicRequest(Struct, gc=False):
    """GET_PARENT_TOPIC_INFO."""

    topic: str | None = None


class LiteTopicRequest(Struct, rename="camel", gc=False):
    """GET_LITE_TOPIC_INFO."""

    parent_topic: str | None = None
    lite_topic: str | None = None


class LiteClientRequest(Struct, rename="camel", gc=False):
    """GET_LITE_CLIENT_INFO."""

    parent_topic: str | None = None
    group: str | None = None
    client_id: str | None = None
    max_count: Int32 | None = None


class LiteGroupRequest(Struct, rename="camel", gc=False):
    """GET_LITE_GROUP_INFO."""

    group: str
    lite_topic: str | None = None
    top_k: Int32 | None = None


class TriggerLiteRequest(Struct, rename="camel", gc=False):
    """TRIGGER_LITE_DISPATCH."""

    group: str
    client_id: str | None = None
