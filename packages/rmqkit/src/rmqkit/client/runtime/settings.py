"""Settings of the clients, with the names of the Java properties.

Default, bounds and help of a value are declared once. `check` checks the bounds when a client is created, so that a
wrong value causes an error immediately. Negative times are refused when the settings are created.
Source: behaviour.md §7.1, §7.4, §8.2; remoting.md §9.3.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.protocol.names import AUTO_CREATE_TOPIC, TRACE_TOPIC
from rmqkit.remoting.address import split_addresses
from rmqkit.remoting.authentication import Credentials
from rmqkit.remoting.tls import Tls
from rmqkit.settings import Setting, setting_table, value_of

S = TypeVar("S", bound=Struct)

DEFAULT_NAME_SERVER = "127.0.0.1:9876"


class CompressionType(enum.Enum):
    """The formats in which a producer can compress bodies."""

    ZLIB = "ZLIB"
    """A format that every client can read."""
    LZ4 = "LZ4"
    """A format that older clients cannot read."""
    ZSTD = "ZSTD"
    """A format that older clients cannot read."""


class StartFrom(enum.Enum):
    """The position at which a group starts in a queue that it reads for the first time (Java's ``ConsumeFromWhere``).
    If a group has an offset for the queue, it continues at this offset."""

    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    """The first stored message: the group skips no message. This is the default of every consumer."""
    NEW_MESSAGES = "CONSUME_FROM_MAX_OFFSET"
    """The end of every queue. For a POP consumer, the broker decides, and it starts as with LAST_OFFSET."""
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"
    """The first message stored at or after ``start_timestamp_ms``."""
    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    """The first message if the queue still has its very first message; otherwise the end. This is the default of Java's
    clients."""


class MessageModel(enum.Enum):
    """The members that get a message: one member of a group, or all members."""

    CLUSTERING = "CLUSTERING"
    """One member gets each message."""
    BROADCASTING = "BROADCASTING"
    """Every member gets every message."""


class Tracing(Struct, kw_only=True, frozen=True):
    """The traces of messages that the client sends to a topic (``enableTrace``)."""

    topic: Annotated[str, Setting("traceTopic", "topic for traces")] = TRACE_TOPIC
    batch_count: Annotated[
        int, Setting("traceMsgBatchNum", "number of trace records in one message", low=1, high=20)
    ] = 10
    recalls: Annotated[bool, Setting("com.rocketmq.recall.default.trace.enable", "trace recalls, too")] = False


class Batching(Struct, kw_only=True, frozen=True):
    """Batches of `Producer.send_many` and, with ``auto``, batches of concurrent sends."""

    auto: Annotated[bool, Setting("autoBatch", "combine concurrent sends into batches")] = False
    bytes: Annotated[
        int, Setting("batchMaxBytes", "size of a batch; a full batch is sent at once", low=1, high=2 << 20)
    ] = 32 << 10
    delay_ms: Annotated[
        int, Setting("batchMaxDelayMs", "how long a batch waits for more messages", low=1, high=30_000)
    ] = 10
    total_bytes: Annotated[
        int,
        Setting("totalBatchMaxBytes", "maximum bytes that wait in batches with auto; more sends are sent alone", low=1),
    ] = 32 << 20


class Compressing(Struct, kw_only=True, frozen=True):
    """Compression of bodies."""

    type: Annotated[CompressionType, Setting("compressType", "compression of bodies")] = CompressionType.ZLIB
    level: Annotated[int, Setting("compressLevel", "compression level of ZLIB (0 to 9) and ZSTD", low=0, high=22)] = 5
    body_bytes_min: Annotated[
        int, Setting("compressMsgBodyOverHowmuch", "compress bodies of at least this size", low=1)
    ] = 4096


class SendLimits(Struct, kw_only=True, frozen=True):
    """Limits of a producer."""

    message_bytes_max: Annotated[int, Setting("maxMessageSize", "maximum size of a body or a batch", low=1)] = 4 << 20
    sends_max: Annotated[
        int,
        Setting("backPressureForAsyncSendNum", "maximum number of concurrent sends; more sends wait in line", low=10),
    ] = 1024
    sends_bytes_max: Annotated[
        int,
        Setting(
            "backPressureForAsyncSendSize", "maximum bytes of concurrent sends; more sends wait in line", low=1 << 20
        ),
    ] = 100 << 20


class HoldLimits(Struct, kw_only=True, frozen=True):
    """Limits of the messages that a consumer holds: messages that it has pulled and not acknowledged yet."""

    span_max: Annotated[
        int,
        Setting(
            "consumeConcurrentlyMaxSpan",
            "maximum distance of offsets between the first and the last held message of a queue",
            low=1,
            high=65535,
        ),
    ] = 2000
    held_messages_max: Annotated[
        int,
        Setting(
            "pullThresholdForQueue",
            "maximum number of held messages per queue (slow handlers hold less)",
            low=1,
            high=65535,
        ),
    ] = 1000
    held_mib_max: Annotated[
        int, Setting("pullThresholdSizeForQueue", "maximum size of held messages per queue", low=1, high=1024)
    ] = 100
    topic_messages_max: Annotated[
        int,
        Setting(
            "pullThresholdForTopic",
            "maximum number of held messages per topic; -1 means only the limit per queue",
            low=-1,
            high=6_553_500,
        ),
    ] = -1
    topic_mib_max: Annotated[
        int,
        Setting(
            "pullThresholdSizeForTopic",
            "maximum size of held messages per topic; -1 means only the limit per queue",
            low=-1,
            high=102_400,
        ),
    ] = -1


class Pulling(Struct, kw_only=True, frozen=True):
    """Requests for messages of a queue."""

    count: Annotated[int, Setting("pullBatchSize", "number of messages that one pull requests", low=1, high=1024)] = 32
    bytes_max: Annotated[int, Setting("pullBatchSizeInBytes", "number of bytes that one pull requests", low=1)] = (
        256 << 10
    )
    suspend_ms: Annotated[
        int,
        Setting(
            "brokerSuspendMaxTimeMillis",
            "how long the broker may hold a pull if there is no message (long polling)",
            low=1,
        ),
    ] = 15_000
    timeout_ms: Annotated[int, Setting("consumerTimeoutMillisWhenSuspend", "timeout of a pull", low=1)] = 30_000
    error_pause_ms: Annotated[int, Setting("pullTimeDelayMillsWhenException", "pause after a failed pull", low=1)] = (
        1000
    )


class Popping(Struct, kw_only=True, frozen=True):
    """Requests for messages with POP."""

    invisible_ms: Annotated[
        int,
        Setting(
            "popInvisibleTime",
            "invisible time of a popped message; renewed while a handler holds it",
            low=5000,
            high=300_000,
        ),
    ] = 60_000
    count: Annotated[int, Setting("popBatchNums", "number of messages that one pop requests", low=1, high=32)] = 32
    held_max: Annotated[
        int, Setting("popThresholdForQueue", "maximum number of held popped messages per queue or broker", low=1)
    ] = 96


class ClientSettings(Struct, kw_only=True):
    """Settings of every client.

    Attributes:
        tls: the encryption of all connections; None means plain connections.
        auth: the credentials that sign all requests; None means no signatures.
        trace: the traces of messages; None means no traces.
    """

    tls: Tls | None = None
    auth: Credentials | None = None
    trace: Tracing | None = None
    instance_name: Annotated[
        str, Setting("instanceName", "second part of the client id; DEFAULT is replaced by <pid>#<nanoseconds>")
    ] = "DEFAULT"
    client_ip: Annotated[
        str, Setting("clientIP", "first part of the client id; empty means the address of this machine")
    ] = ""
    unit_name: Annotated[str, Setting("unitName", "last part of the client id; may be empty")] = ""
    route_interval_ms: Annotated[
        int,
        Setting("pollNameServerInterval", "interval at which the client refreshes the routes of its topics", low=10),
    ] = 30_000
    heartbeat_interval_ms: Annotated[
        int, Setting("heartbeatBrokerInterval", "interval of heartbeats to brokers", low=10)
    ] = 30_000
    api_timeout_ms: Annotated[
        int, Setting("mqClientApiTimeout", "timeout of requests for routes and groups", low=1)
    ] = 3000
    namespace: Annotated[
        str, Setting("namespace", "prefix of all topic and group names on brokers: <namespace>%<name>")
    ] = ""
    namespace_v2: Annotated[str, Setting("namespaceV2", "namespace sent as a separate field, for proxies")] = ""
    vip_channel: Annotated[
        bool, Setting("vipChannelEnabled", "send requests other than pulls to the port two below the broker's")
    ] = False
    name_server_domain: Annotated[
        str,
        Setting(
            "rocketmq.namesrv.domain", "host[:port] of a web server that returns the name servers; empty means none"
        ),
    ] = ""
    name_server_subgroup: Annotated[
        str,
        Setting(
            "rocketmq.namesrv.domain.subgroup", "last part of the URL path of that web server: /rocketmq/<subgroup>"
        ),
    ] = "nsaddr"

    def __post_init__(self) -> None:
        """Check the numbers that must not be negative. Raises SettingsError: such a number is negative. `check` checks
        all bounds.
        """
        for key, (name, _, setting) in setting_table(type(self)).items():
            value = value_of(self, name)
            if setting.low is not None and setting.low >= 0 and value is not None and value < 0:
                raise SettingsError(_out_of_bounds(key, name, value, setting))

    @property
    def keeps_instance_name(self) -> bool:
        """Return True if the instance name DEFAULT is not replaced, so that the client id is the same after a
        restart.
        """
        return False


class ProducerSettings(ClientSettings, kw_only=True):
    """Settings of producers: how messages are sent."""

    batch: Batching = Batching()
    compression: Compressing = Compressing()
    limits: SendLimits = SendLimits()
    send_timeout_ms: Annotated[
        int,
        Setting(
            "sendMsgTimeout",
            "time for all tries and pauses of one send, without the time in line behind other sends",
            low=1,
        ),
    ] = 20_000
    try_timeout_ms: Annotated[
        int,
        Setting("sendMsgMaxTimeoutPerRequest", "time to wait for the answer to one try; -1 means no limit", low=-1),
    ] = 3000
    retries: Annotated[
        int,
        Setting(
            "retryTimesWhenSendFailed",
            "number of retries after a failed try; -1 means as many as the time allows",
            low=-1,
            high=100,
        ),
    ] = -1
    retry_chosen_queue: Annotated[
        bool,
        Setting("retryChosenQueue", "retry sends to a chosen queue, always to the same queue; false means one try"),
    ] = True
    line_timeout_ms: Annotated[
        int,
        Setting("sendLineTimeout", "how long a send may wait in line behind other sends; -1 means no limit", low=-1),
    ] = -1
    retry_not_stored: Annotated[
        bool,
        Setting(
            "retryAnotherBrokerWhenNotStoreOK",
            "send again after a flush or replication timeout (the message may then be stored twice)",
        ),
    ] = False
    template_topic: Annotated[
        str, Setting("createTopicKey", "template topic for topics that are created by sending")
    ] = AUTO_CREATE_TOPIC
    template_queue_count: Annotated[
        int,
        Setting("defaultTopicQueueNums", "number of queues per broker of a topic that is created by sending", low=1),
    ] = 4
    delay_level_max: Annotated[
        int, Setting("delayLevelMax", "highest delay level of the brokers (messageDelayLevel)", low=1)
    ] = 18
    avoid_slow_brokers: Annotated[
        bool, Setting("sendLatencyEnable", "avoid brokers for a while after they were slow or failed")
    ] = False


class ConsumerSettings(ClientSettings, kw_only=True):
    """Settings of every consumer."""

    limits: HoldLimits = HoldLimits()
    pull: Pulling = Pulling()
    message_model: Annotated[
        MessageModel, Setting("messageModel", "whether one member or every member of the group gets a message")
    ] = MessageModel.CLUSTERING
    offsets_dir: Annotated[
        str,
        Setting("localOffsetStoreDir", "directory for the offsets of broadcasting; empty means ~/.rocketmq_offsets"),
    ] = ""
    start_from: Annotated[
        StartFrom, Setting("consumeFromWhere", "where a group starts in a queue that it reads for the first time")
    ] = StartFrom.FIRST_OFFSET
    start_timestamp_ms: Annotated[
        int,
        Setting(
            "consumeTimestamp",
            "start time for start_from=TIMESTAMP, in ms since the epoch; 0 means half an hour ago",
            low=0,
        ),
    ] = 0
    persist_interval_ms: Annotated[
        int, Setting("persistConsumerOffsetInterval", "interval at which offsets are saved", low=10)
    ] = 5000
    rebalance_interval_ms: Annotated[int, Setting("rebalanceWaitInterval", "interval of rebalances", low=10)] = 20_000
    take_over_pause_ms: Annotated[
        int, Setting("takeOverPause", "pause before reading a queue that another member may still own", low=0)
    ] = 500
    stall_after_ms: Annotated[
        int, Setting("stallAfter", "log a warning when a queue with a backlog does not move for this time", low=10)
    ] = 10_000

    @property
    def window_at_start(self) -> int:
        """Return the initial number of messages of a queue to hold."""
        return self.limits.held_messages_max

    @property
    def is_broadcasting(self) -> bool:
        """Return True if every member of the group gets every message."""
        return self.message_model is MessageModel.BROADCASTING

    @property
    def keeps_instance_name(self) -> bool:
        """Return True in broadcasting: offsets are stored under the client id, so it must be the same after a
        restart."""
        return self.is_broadcasting


class PullConsumerSettings(ConsumerSettings, kw_only=True):
    """Settings of pull consumers."""

    pull: Pulling = Pulling(count=10, suspend_ms=20_000)
    request_timeout_ms: Annotated[
        int, Setting("consumerPullTimeoutMillis", "timeout of `pull`, in addition to `pull.suspend_ms`", low=1)
    ] = 10_000
    auto_commit: Annotated[bool, Setting("autoCommit", "save the offsets of polled messages automatically")] = True


class PushConsumerSettings(ConsumerSettings, kw_only=True):
    """Settings of push and POP consumers: how messages are consumed and retried."""

    pop: Popping = Popping()
    handlers_max: Annotated[
        int,
        Setting("consumeThreadMax", "maximum number of messages that are handled at the same time", low=1, high=1000),
    ] = 20
    retries_max: Annotated[
        int,
        Setting(
            "maxReconsumeTimes",
            "number of retries before a message goes to the dead letters; -1 means 16, in order no limit",
            low=-1,
        ),
    ] = -1
    consume_timeout_minutes: Annotated[int, Setting("consumeTimeout", "how long a handler may take", low=1)] = 15
    drain_ms: Annotated[
        int, Setting("awaitTerminationMillisWhenShutdown", "how long close waits for running handlers", low=0)
    ] = 30_000
    local_retry_ms: Annotated[
        int,
        Setting(
            "localRetryPause",
            "pause before a message is handled again if it cannot be sent back to the broker",
            low=1,
        ),
    ] = 5000
    suspend_queue_ms: Annotated[
        int, Setting("suspendCurrentQueueTimeMillis", "pause of an ordered queue after a failure", low=10, high=30_000)
    ] = 1000
    client_rebalance: Annotated[
        bool,
        Setting(
            "clientRebalance",
            "members calculate the assignment of queues; false means that brokers do, and decide between pull and POP",
        ),
    ] = True
    lock_interval_ms: Annotated[
        int, Setting("lockInterval", "interval at which the locks of ordered queues are renewed", low=10)
    ] = 20_000

    @property
    def window_at_start(self) -> int:
        """Return the initial number of messages of a queue to hold: two for each handler. Fast handlers increase it
        later."""
        return min(2 * self.handlers_max, self.limits.held_messages_max)


def check(settings: S) -> S:
    """Return the settings if every number is within its bounds.
    Raises SettingsError: a number is out of bounds. The text contains both names, the value and the bounds."""
    for key, (name, _, setting) in setting_table(type(settings)).items():
        value = value_of(settings, name)
        if value is None:
            continue
        too_low = setting.low is not None and value < setting.low
        if too_low or (setting.high is not None and value > setting.high):
            raise SettingsError(_out_of_bounds(key, name, value, setting))
    return settings


def _out_of_bounds(key: str, name: str, value: object, setting: Setting) -> str:
    high = "" if setting.high is None else f" and at most {setting.high}"
    return f"{name} ({key}) is {value}: it must be at least {setting.low}{high}"


def name_server_list(
    name_servers: str | Sequence[str] | None, environment: Mapping[str, str] = os.environ, *, domain: str = ""
) -> list[str]:
    """Return the name servers of a client: the passed name servers, otherwise the name servers in ``NAMESRV_ADDR``,
    otherwise 127.0.0.1:9876. The list is empty if the name servers must be requested from a web server (``domain``).

    ``name_servers``: ``host:port;host:port``, or a list of addresses; each may begin with ``rocketmq://``.
    Raises SettingsError: an address is not ``host:port``."""
    given = name_servers or environment.get("NAMESRV_ADDR", "")
    if not given:
        return [] if domain else [DEFAULT_NAME_SERVER]
    parts = given.split(";") if isinstance(given, str) else given
    try:
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("an address is a text, host:port")
        return split_addresses(";".join(part.strip().removeprefix("rocketmq://").removesuffix("/") for part in parts))
    except ValueError as error:
        raise SettingsError(f"name servers {given!r}: {error}") from None
