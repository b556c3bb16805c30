"""Settings of the clients, under the names their Java properties have.

One declaration per value: default, bounds and help. `check` enforces the bounds when a client is built, so a wrong
value is an error at once and not a surprise later; a negative time is one where the settings are made.
Source: behaviour.md §7.1, §7.4, §8.2; remoting.md §9.3.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Annotated, TypeVar

from msgspec import Struct

from rmqkit.errors import SettingsError
from rmqkit.protocol.names import AUTO_CREATE_TOPIC, TRACE_TOPIC
from rmqkit.remoting.address import split_addresses
from rmqkit.remoting.tls import ClientTlsSettings
from rmqkit.settings import Setting, setting_table

S = TypeVar("S", bound=Struct)


class CompressionType(enum.Enum):
    """The ways to compress bodies."""

    ZLIB = "ZLIB"
    LZ4 = "LZ4"
    ZSTD = "ZSTD"


class StartFrom(enum.Enum):
    """Where a group begins in a queue for which the broker has no offset of it (``ConsumeFromWhere``)."""

    LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"
    NEW_MESSAGES = "CONSUME_FROM_MAX_OFFSET"
    """At the end, also of a young queue, where LAST_OFFSET begins at the first message as long as the queue has it.
    A POP consumer, whose broker decides, begins as with LAST_OFFSET."""


class MessageModel(enum.Enum):
    """Which members of a group get a message."""

    CLUSTERING = "CLUSTERING"
    """One member."""
    BROADCASTING = "BROADCASTING"
    """Every member."""


class ClientSettings(ClientTlsSettings, kw_only=True):
    """Settings that every client has."""

    instance_name: Annotated[
        str, Setting("instanceName", "second part of the client id; DEFAULT becomes <pid>#<nanoseconds>")
    ] = "DEFAULT"
    client_ip: Annotated[str, Setting("clientIP", "first part of the client id; empty: this machine's address")] = ""
    access_key: Annotated[str, Setting("accessKey", "user who signs every request; empty: nothing is signed")] = ""
    secret_key: Annotated[str, Setting("secretKey", "the user's secret")] = ""
    security_token: Annotated[str, Setting("securityToken", "sent along with the signature")] = ""
    unit_name: Annotated[str, Setting("unitName", "last part of the client id")] = ""
    route_interval_ms: Annotated[
        int, Setting("pollNameServerInterval", "ms between two looks at the routes of the topics in use", low=10)
    ] = 30_000
    heartbeat_interval_ms: Annotated[int, Setting("heartbeatBrokerInterval", "ms between heartbeats", low=10)] = 30_000
    api_timeout_ms: Annotated[int, Setting("mqClientApiTimeout", "ms per request about routes or groups", low=1)] = 3000
    namespace: Annotated[
        str, Setting("namespace", "part of the names of all topics and groups at brokers: <namespace>%<name>")
    ] = ""
    namespace_v2: Annotated[str, Setting("namespaceV2", "namespace sent beside topics, for proxies")] = ""
    vip_channel: Annotated[
        bool, Setting("vipChannelEnabled", "whether requests other than pulls go to the brokers' port - 2")
    ] = False
    enable_trace: Annotated[bool, Setting("enableTrace", "whether messages are traced to the trace topic")] = False
    trace_topic: Annotated[str, Setting("traceTopic", "topic that tells what became of messages")] = TRACE_TOPIC
    trace_batch_count: Annotated[
        int, Setting("traceMsgBatchNum", "acts that are sent to the trace topic together", low=1, high=20)
    ] = 10
    trace_recalls: Annotated[
        bool, Setting("com.rocketmq.recall.default.trace.enable", "whether the trace topic tells of recalls, too")
    ] = False
    name_server_domain: Annotated[
        str, Setting("rocketmq.namesrv.domain", "host[:port] whose web server knows the name servers; empty: none")
    ] = ""
    name_server_subgroup: Annotated[
        str, Setting("rocketmq.namesrv.domain.subgroup", "last part of the web server's /rocketmq/<subgroup>")
    ] = "nsaddr"

    def __post_init__(self) -> None:
        """Raises SettingsError: a number is negative that cannot be; `check` looks at all bounds."""
        for key, (name, _, setting) in setting_table(type(self)).items():
            if setting.low is not None and setting.low >= 0 and getattr(self, name) < 0:
                raise SettingsError(_out_of_bounds(key, name, getattr(self, name), setting))

    @property
    def keeps_instance_name(self) -> bool:
        """Whether the client id keeps the name DEFAULT."""
        return False


class ProducerSettings(ClientSettings, kw_only=True):
    """Settings of producers: how messages are sent."""

    send_timeout_ms: Annotated[
        int, Setting("sendMsgTimeout", "ms a send may take once it is its turn, all tries and pauses together", low=1)
    ] = 20_000
    try_timeout_ms: Annotated[
        int,
        Setting("sendMsgMaxTimeoutPerRequest", "ms until a try without an answer is given up; -1: no limit", low=-1),
    ] = 3000
    retries: Annotated[
        int,
        Setting("retryTimesWhenSendFailed", "more tries after a failed one; -1: while there is time", low=-1, high=100),
    ] = -1
    retry_chosen_queue: Annotated[
        bool, Setting("retryChosenQueue", "whether what a program sends to a queue is tried again, at the same queue")
    ] = True
    line_timeout_ms: Annotated[
        int, Setting("sendLineTimeout", "ms a send may wait in line for its turn; -1: until it comes", low=-1)
    ] = -1
    retry_not_stored: Annotated[
        bool, Setting("retryAnotherBrokerWhenNotStoreOK", "whether flush and replication time-outs are sent again")
    ] = False
    compress_body_bytes: Annotated[
        int, Setting("compressMsgBodyOverHowmuch", "bodies of at least this many bytes are compressed", low=1)
    ] = 4096
    compression: Annotated[CompressionType, Setting("compressType", "how bodies are compressed")] = CompressionType.ZLIB
    compression_level: Annotated[int, Setting("compressLevel", "effort of ZLIB (0 to 9) and ZSTD", low=0, high=22)] = 5
    message_bytes_max: Annotated[int, Setting("maxMessageSize", "largest body or batch in bytes", low=1)] = 4 << 20
    template_topic: Annotated[
        str, Setting("createTopicKey", "topic whose queues an unknown topic is created after")
    ] = AUTO_CREATE_TOPIC
    template_queue_count: Annotated[
        int, Setting("defaultTopicQueueNums", "queues per broker of a topic that is created by sending", low=1)
    ] = 4
    sends_max: Annotated[
        int, Setting("backPressureForAsyncSendNum", "sends under way at a time; further ones wait in line", low=10)
    ] = 1024
    sends_bytes_max: Annotated[
        int, Setting("backPressureForAsyncSendSize", "bytes under way; further sends wait in line", low=1 << 20)
    ] = 100 << 20
    delay_level_max: Annotated[
        int, Setting("delayLevelMax", "the last delay level of the brokers (messageDelayLevel)", low=1)
    ] = 18
    avoid_slow_brokers: Annotated[
        bool, Setting("sendLatencyEnable", "whether brokers that were slow or failed get no messages for a while")
    ] = False
    batch_bytes: Annotated[int, Setting("batchMaxBytes", "bytes that close a batch", low=1, high=2 << 20)] = 32 << 10
    batch_delay_ms: Annotated[
        int, Setting("batchMaxDelayMs", "ms a batch is kept open for further messages", low=1, high=30_000)
    ] = 10
    auto_batch: Annotated[
        bool, Setting("autoBatch", "whether single sends wait for others, to share a request as a batch")
    ] = False
    batch_total_bytes: Annotated[
        int, Setting("totalBatchMaxBytes", "bytes waiting with auto_batch; further sends go alone", low=1)
    ] = 32 << 20


class ConsumerSettings(ClientSettings, kw_only=True):
    """Settings of consumers: how queues are shared, read and remembered."""

    message_model: Annotated[MessageModel, Setting("messageModel", "how the members of a group share messages")] = (
        MessageModel.CLUSTERING
    )
    offsets_dir: Annotated[
        str, Setting("localOffsetStoreDir", "where broadcasting keeps offsets; empty: ~/.rocketmq_offsets")
    ] = ""
    start_from: Annotated[StartFrom, Setting("consumeFromWhere", "where a new group begins")] = StartFrom.LAST_OFFSET
    start_timestamp_ms: Annotated[
        int, Setting("consumeTimestamp", "ms since the epoch, for start_from TIMESTAMP; 0: half an hour ago", low=0)
    ] = 0
    span_max: Annotated[
        int, Setting("consumeConcurrentlyMaxSpan", "offsets from the first to the last message held", low=1, high=65535)
    ] = 2000
    held_messages_max: Annotated[int, Setting("pullThresholdForQueue", "messages per queue", low=1, high=65535)] = 1000
    held_mib_max: Annotated[int, Setting("pullThresholdSizeForQueue", "MiB held of a queue", low=1, high=1024)] = 100
    topic_messages_max: Annotated[
        int, Setting("pullThresholdForTopic", "messages held of a topic; -1: as the queues", low=-1, high=6_553_500)
    ] = -1
    topic_mib_max: Annotated[
        int, Setting("pullThresholdSizeForTopic", "MiB held of a topic; -1: as the queues", low=-1, high=102_400)
    ] = -1
    pull_count: Annotated[int, Setting("pullBatchSize", "messages one pull asks for", low=1, high=1024)] = 32
    pull_bytes_max: Annotated[int, Setting("pullBatchSizeInBytes", "bytes one pull asks for", low=1)] = 256 << 10
    suspend_ms: Annotated[int, Setting("brokerSuspendMaxTimeMillis", "ms an empty pull may be held", low=1)] = 15_000
    pull_timeout_ms: Annotated[
        int, Setting("consumerTimeoutMillisWhenSuspend", "ms after which a pull without an answer has failed", low=1)
    ] = 30_000
    persist_interval_ms: Annotated[
        int, Setting("persistConsumerOffsetInterval", "ms between two rounds that save offsets", low=10)
    ] = 5000
    rebalance_interval_ms: Annotated[int, Setting("rebalanceWaitInterval", "ms between rebalances", low=10)] = 20_000
    take_over_pause_ms: Annotated[
        int, Setting("takeOverPause", "ms between getting a queue that another client may hold and reading it", low=0)
    ] = 500
    stall_after_ms: Annotated[
        int, Setting("stallAfter", "ms after which a queue with a backlog that does not move is reported", low=10)
    ] = 10_000
    error_pause_ms: Annotated[int, Setting("pullTimeDelayMillsWhenException", "ms after a failed pull", low=1)] = 1000

    @property
    def is_broadcasting(self) -> bool:
        """Whether every member of the group gets every message."""
        return self.message_model is MessageModel.BROADCASTING

    @property
    def keeps_instance_name(self) -> bool:
        """Offsets of broadcasting lie under the client id, so it has to be the same after a restart."""
        return self.is_broadcasting


class PullConsumerSettings(ConsumerSettings, kw_only=True):
    """Settings of pull consumers."""

    pull_count: Annotated[int, Setting("pullBatchSize", "messages one pull asks for", low=1, high=1024)] = 10
    suspend_ms: Annotated[int, Setting("brokerSuspendMaxTimeMillis", "ms an empty pull may be held", low=1)] = 20_000
    request_timeout_ms: Annotated[
        int, Setting("consumerPullTimeoutMillis", "ms a `pull` may take besides the time it may be held", low=1)
    ] = 10_000
    auto_commit: Annotated[bool, Setting("autoCommit", "whether offsets of polled messages are saved unasked")] = True


class PushConsumerSettings(ConsumerSettings, kw_only=True):
    """Settings of push and pop consumers: how messages are consumed and retried."""

    handlers_max: Annotated[int, Setting("consumeThreadMax", "messages handled at a time", low=1, high=1000)] = 20
    retries_max: Annotated[
        int, Setting("maxReconsumeTimes", "failures before the dead letters; -1: 16, in order without end", low=-1)
    ] = -1
    consume_timeout_minutes: Annotated[int, Setting("consumeTimeout", "minutes a handler may take", low=1)] = 15
    drain_ms: Annotated[
        int, Setting("awaitTerminationMillisWhenShutdown", "ms that closing waits for handlers at work", low=0)
    ] = 30_000
    local_retry_ms: Annotated[
        int, Setting("localRetryPause", "ms until a message that could not be sent back is handled again", low=1)
    ] = 5000
    suspend_queue_ms: Annotated[
        int, Setting("suspendCurrentQueueTimeMillis", "ms an ordered queue stops after a failure", low=10, high=30_000)
    ] = 1000
    client_rebalance: Annotated[
        bool, Setting("clientRebalance", "whether members share out queues; false: brokers do, and say whether to pop")
    ] = True
    pop_invisible_ms: Annotated[
        int, Setting("popInvisibleTime", "ms a popped message is ours; renewed while held", low=5000, high=300_000)
    ] = 60_000
    pop_count: Annotated[int, Setting("popBatchNums", "messages one pop asks for", low=1, high=32)] = 32
    pop_held_max: Annotated[int, Setting("popThresholdForQueue", "popped messages per queue or broker", low=1)] = 96
    lock_interval_ms: Annotated[
        int, Setting("lockInterval", "ms between two rounds that renew the locks of ordered queues", low=10)
    ] = 20_000


def check(settings: S) -> S:
    """Return the settings if every number is within its bounds.
    Raises SettingsError: one is not; the text names both spellings, the value and the bounds."""
    for key, (name, _, setting) in setting_table(type(settings)).items():
        value = getattr(settings, name)
        too_low = setting.low is not None and value < setting.low
        if too_low or (setting.high is not None and value > setting.high):
            raise SettingsError(_out_of_bounds(key, name, value, setting))
    return settings


def _out_of_bounds(key: str, name: str, value: object, setting: Setting) -> str:
    high = "" if setting.high is None else f" and at most {setting.high}"
    return f"{name} ({key}) is {value}: it must be at least {setting.low}{high}"


def name_server_list(
    name_servers: str | None, environment: Mapping[str, str] = os.environ, *, domain: str = ""
) -> list[str]:
    """List the name servers a client was given, else those of ``NAMESRV_ADDR``; none when a web server is to be asked.
    Raises SettingsError: neither names any, or one is not ``host:port``."""
    text = name_servers or environment.get("NAMESRV_ADDR", "")
    if not text and domain:
        return []
    if not text:
        raise SettingsError("no name server is known: pass name_servers='host:port;host:port' or set NAMESRV_ADDR")
    try:
        return split_addresses(text)
    except ValueError as error:
        raise SettingsError(f"name servers {text!r}: {error}") from None
