"""The checks that every send has to pass, in the reference's order with its codes and remarks.

`SendChecks.topic_of` creates a missing topic. A header has a long or a short form. Use this module only on the event
loop.
Source: behaviour.md §3.1 to §3.3; remoting.md §4.3.1.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Protocol

from rmqkit.broker.delay.levels import Schedule
from rmqkit.broker.delay.timer import Timer
from rmqkit.broker.durability import Durability, Refusal
from rmqkit.broker.handlers import OwnAddress
from rmqkit.broker.recorder import Recorder
from rmqkit.broker.settings import BrokerSettings
from rmqkit.broker.tables.clients import ClientTable, QueueLocks
from rmqkit.broker.tables.groups import GroupTable
from rmqkit.broker.tables.topics import TopicTable
from rmqkit.clock import Clock
from rmqkit.errors import HeaderError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import MessageStore
from rmqkit.store.settings import StoreSettings

__all__ = ["NO_BODY", "SCHEDULED", "SendChecks", "SendContext", "decode_v1", "decode_v2", "stamps_of", "tries_max"]

SCHEDULED = (names.SCHEDULE_TOPIC, names.TIMER_TOPIC)
"""The topics that store messages until they are due."""

_ASKS_FOR_TRIES_SINCE = 121  # the number of version 3.4.9

_MAY_MISS_LONG = {"producerGroup": "", "defaultTopic": "", "defaultTopicQueueNums": "4"}
_MAY_MISS_SHORT = {"a": "", "c": "", "d": "4"}

NO_BODY = "the message has no body"


class SendContext(Protocol):
    """The parts of the broker that sends use."""

    clients: ClientTable
    clock: Clock
    durability: Durability | None
    groups: GroupTable
    identity: OwnAddress
    queue_locks: QueueLocks
    schedule: Schedule
    recorder: Recorder
    settings: BrokerSettings
    store: MessageStore
    store_settings: StoreSettings
    timer: Timer | None
    topics: TopicTable

    @property
    def topics_published(self) -> Callable[[], Awaitable[None]]: ...


def tries_max(command: Command, asked: int | None, group: SubscriptionGroupConfig) -> int:
    """Return the maximum number of tries for a message: the client's limit, or the group's limit for an old client."""
    return group.retry_max_times if asked is None or command.version < _ASKS_FOR_TRIES_SINCE else asked


def stamps_of(settings: BrokerSettings) -> tuple[dict[str, str], dict[str, str]]:
    """Return the properties that every message gets, and the part of these properties that the answer contains."""
    answered = {
        property_names.MSG_REGION: settings.region_id,
        property_names.TRACE_ON: "true" if settings.trace_on else "false",
    }
    return {**answered, property_names.CLUSTER: settings.cluster_name}, answered


def decode_v1(command: Command, **missing: str) -> SendMessageRequest:
    """Return the header of a send in its long form. ``missing``: further optional fields with their default values.
    Raises HeaderError: another field is missing, or is not a number."""
    may_miss = {**_MAY_MISS_LONG, **missing} if missing else _MAY_MISS_LONG
    return decode_header_leniently(command, SendMessageRequest, missing=may_miss)


def decode_v2(command: Command, **missing: str) -> SendMessageV2Request:
    """Return the header of a send in its short form, like `decode_v1`."""
    # Decode strictly first: this is one call, and it accepts the headers of all clients. The Java broker accepts more.
    try:
        return decode_header(command, SendMessageV2Request)
    except HeaderError:
        may_miss = {**_MAY_MISS_SHORT, **missing}
        return decode_header_leniently(command, SendMessageV2Request, missing=may_miss, drops_unreadable=False)


class SendChecks:
    """The checks of topic and queue of a send."""

    def __init__(self, context: SendContext) -> None:
        self._settings = context.settings
        self._identity = context.identity
        self._topics = context.topics
        self._clock = context.clock

    def topic_of(self, connection: Connection, header: SendMessageRequest) -> TopicConfig | Refusal:
        """Return the topic of a message, or a refusal."""
        settings, name = self._settings, header.topic
        if settings.accept_sends_from_ms and self._clock.now_ms() < settings.accept_sends_from_ms:
            remark = f"broker unable to service, until {_human_time(settings.accept_sends_from_ms)}"
            return ResponseCode.SYSTEM_ERROR, remark
        topic = self._topics.get(name)
        if topic is None and (fault := names.topic_fault(name)) is not None:
            return ResponseCode.INVALID_PARAMETER, fault
        if topic is not None and topic.order and not settings.broker_permission & Permission.WRITE:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._identity.ip}] sending message is forbidden"
        if name in names.FORBIDDEN_TO_SEND or names.split_lite_queue(name):
            return ResponseCode.NO_PERMISSION, f"Sending message to topic[{name}] is forbidden."
        if topic is None:
            template, queues = header.default_topic, header.default_topic_queue_nums
            unit = bool(header.unit_mode)
            topic = self._topics.create_for_send(name, template=template, queue_count=queues, unit=unit)
        if topic is None:
            return ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!{FAQ}"
        if header.queue_id >= topic.read_queue_nums and header.queue_id >= topic.write_queue_nums:
            remark = f"request queueId[{header.queue_id}] is illegal, {_describe(topic)} Producer: {connection.peer}"
            return ResponseCode.INVALID_PARAMETER, remark
        return topic


def _human_time(timestamp_ms: int) -> str:
    """Return the local time in the reference's format."""
    whole_seconds = datetime.fromtimestamp(timestamp_ms // 1000)
    return f"{whole_seconds:%Y-%m-%d %H:%M:%S},{timestamp_ms % 1000:03d}"


def _describe(topic: TopicConfig) -> str:
    """Return a topic in the format of the reference's remarks."""
    perm = "".join(
        letter if topic.perm & bit else "-"
        for letter, bit in (("R", Permission.READ), ("W", Permission.WRITE), ("X", Permission.INHERIT))
    )
    attributes = ", ".join(f"{name}={value}" for name, value in (topic.attributes or {}).items())
    return (
        f"TopicConfig [topicName={topic.topic_name}, readQueueNums={topic.read_queue_nums}, "
        f"writeQueueNums={topic.write_queue_nums}, perm={perm}, topicFilterType={topic.topic_filter_type}, "
        f"topicSysFlag={topic.topic_sys_flag}, order={str(topic.order).lower()}, attributes={{{attributes}}}]"
    )
