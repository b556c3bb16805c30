"""What every send has to pass before its message is looked at (``AbstractSendMessageProcessor.msgCheck``).

The checks come in the reference's order with its codes and remarks; a topic that is missing is created here. Also here:
what a put that the store refused, or that waited, is answered with. Source: behaviour.md §3.1 steps 4 to 8, §3.2, §3.5.
"""

from __future__ import annotations

from datetime import datetime

from rmqkit.broker.context import Parts
from rmqkit.broker.durability import Outcome
from rmqkit.broker.settings import BrokerSettings
from rmqkit.errors import HeaderError
from rmqkit.protocol import names
from rmqkit.protocol import properties as property_names
from rmqkit.protocol.codes import FAQ, ResponseCode
from rmqkit.protocol.command import Command, decode_header, decode_header_leniently
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request
from rmqkit.protocol.schemas.topics import Permission, TopicConfig
from rmqkit.remoting.connection import Connection
from rmqkit.store.message_store import PutResult, PutStatus

__all__ = [
    "CODES",
    "NOT_ENOUGH_REPLICAS",
    "NO_BODY",
    "Refusal",
    "SendChecks",
    "decode_v1",
    "decode_v2",
    "put_refusal",
    "stamps_of",
    "tries_max",
]

_ASKS_FOR_TRIES_SINCE = 121  # 3.4.9

_MAY_MISS_LONG = {"producerGroup": "", "defaultTopic": "", "defaultTopicQueueNums": "4"}
_MAY_MISS_SHORT = {"a": "", "c": "", "d": "4"}

NO_BODY = "the message has no body"

Refusal = tuple[int, str]
"""Code and remark."""

NOT_ENOUGH_REPLICAS: Refusal = ResponseCode.SYSTEM_ERROR, "in-sync replicas not enough"

CODES = {
    Outcome.DURABLE: ResponseCode.SUCCESS,
    Outcome.TIMED_OUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    Outcome.REPLICA_TIMED_OUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    Outcome.FAILED: ResponseCode.SYSTEM_ERROR,
}
"""What is answered when a stored message had to wait."""

_ILLEGAL = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {body_bytes_max}B, msg properties length limit 32KB."
)
_UNAVAILABLE = (
    "service not available now. It may be caused by one of the following reasons: the broker's disk is full, "
    "messages are put to the slave, message store has been shut down, etc. {reason}"
)
_PUT_REFUSALS: dict[PutStatus, tuple[ResponseCode, str]] = {
    PutStatus.MESSAGE_ILLEGAL: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.PROPERTIES_SIZE_EXCEEDED: (ResponseCode.MESSAGE_ILLEGAL, _ILLEGAL),
    PutStatus.SERVICE_NOT_AVAILABLE: (ResponseCode.SERVICE_NOT_AVAILABLE, _UNAVAILABLE),
    PutStatus.CREATE_MAPPED_FILE_FAILED: (
        ResponseCode.SYSTEM_ERROR,
        "create mapped file failed, server is busy or broken.",
    ),
    PutStatus.OS_PAGE_CACHE_BUSY: (
        ResponseCode.SYSTEM_BUSY,
        "[PC_SYNCHRONIZED]broker busy, start flow control for a while",
    ),
    PutStatus.LIGHT_QUEUES_EXCEEDED: (
        ResponseCode.SYSTEM_ERROR,
        (
            "[LMQ_CONSUME_QUEUE_NUM_EXCEEDED]broker config enableLmq and enableMultiDispatch, lmq consumeQueue num "
            "exceed maxLmqConsumeQueueNum config num, default limit 2w."
        ),
    ),
}


def put_refusal(put: PutResult, body_bytes_max: int) -> Refusal:
    """The answer to a message that the store did not take. Source: behaviour.md §3.5."""
    code, remark = _PUT_REFUSALS[put.status]
    return code, remark.format(body_bytes_max=body_bytes_max, reason=put.reason).rstrip()


def tries_max(command: Command, asked: int | None, group: SubscriptionGroupConfig) -> int:
    """How often a message may be consumed: what the client asks for if it is not too old, else the group's limit."""
    return group.retry_max_times if asked is None or command.version < _ASKS_FOR_TRIES_SINCE else asked


def stamps_of(settings: BrokerSettings) -> tuple[bytes, dict[str, str]]:
    """The properties that every message gets, and those of them that the answer tells."""
    told = {
        property_names.MSG_REGION: settings.region_id,
        property_names.TRACE_ON: "true" if settings.trace_on else "false",
    }
    return encode_properties({**told, property_names.CLUSTER: settings.cluster_name}), told


def decode_v1(command: Command, **missing: str) -> SendMessageRequest:
    """The header of a send in its long form; what it may lack besides is ``missing``.
    Raises HeaderError: another field is missing, or a number is none."""
    may_miss = {**_MAY_MISS_LONG, **missing} if missing else _MAY_MISS_LONG
    return decode_header_leniently(command, SendMessageRequest, missing=may_miss)


def decode_v2(command: Command, **missing: str) -> SendMessageV2Request:
    """The header of a send in its short form, like `decode_v1`."""
    try:
        return decode_header(command, SendMessageV2Request)
    except HeaderError:
        may_miss = {**_MAY_MISS_SHORT, **missing}
        return decode_header_leniently(command, SendMessageV2Request, missing=may_miss, drops_unreadable=False)


class SendChecks:
    """Lets sends in."""

    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._identity = parts.identity
        self._topics = parts.topics
        self._clock = parts.clock

    def topic_of(self, connection: Connection, header: SendMessageRequest) -> TopicConfig | Refusal:
        """The topic that a message goes to, or why it does not."""
        settings, name = self._settings, header.topic
        if settings.accept_sends_from_ms and self._clock.now_ms() < settings.accept_sends_from_ms:
            remark = f"broker unable to service, until {_human_time(settings.accept_sends_from_ms)}"
            return ResponseCode.SYSTEM_ERROR, remark
        topic = self._topics.get(name)
        if topic is None and (fault := names.topic_fault(name)) is not None:
            return ResponseCode.INVALID_PARAMETER, fault
        if topic is not None and topic.order and not settings.broker_permission & Permission.WRITE:
            return ResponseCode.NO_PERMISSION, f"the broker[{self._identity.ip}] sending message is forbidden"
        if name in names.FORBIDDEN_TO_SEND:
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

    def is_new(self, topic: str) -> bool:
        """Whether a topic has to be made first."""
        return self._topics.get(topic) is None

    def is_static(self, topic: str) -> bool:
        """Whether a topic's queues are numbered over several brokers."""
        return topic in self._topics.static.local


def _human_time(timestamp_ms: int) -> str:
    """Local time as the reference prints it."""
    whole_seconds = datetime.fromtimestamp(timestamp_ms // 1000)
    return f"{whole_seconds:%Y-%m-%d %H:%M:%S},{timestamp_ms % 1000:03d}"


def _describe(topic: TopicConfig) -> str:
    """A topic as the reference prints it in remarks."""
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
