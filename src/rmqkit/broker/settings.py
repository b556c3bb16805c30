"""Settings of the broker (``broker.conf``), but for the store's own. Source: store.md §23, behaviour.md §2."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

from msgspec import field

from rmqkit.broker.replication.members import HaAddresses
from rmqkit.errors import SettingsError
from rmqkit.metrics import EXPORTER_PROMISES
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.limits import ConnectionSettings
from rmqkit.settings import Setting

__all__ = [
    "PROMISES",
    "WITHOUT_EFFECT",
    "BrokerRole",
    "BrokerSettings",
    "RequestMode",
    "refuse_unsupported",
]


class BrokerRole(enum.Enum):
    """Who a broker is among those that share its name."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class RequestMode(enum.Enum):
    """How a consumer group gets its messages."""

    PULL = "PULL"
    POP = "POP"


class BrokerSettings(ConnectionSettings, kw_only=True):
    """What a ``broker.conf`` may say about the broker."""

    cluster_name: Annotated[str, Setting("brokerClusterName", "cluster the broker belongs to")] = "DefaultCluster"
    broker_name: Annotated[str, Setting("brokerName", "shared by a master and its slaves; default: host name")] = ""
    broker_id: Annotated[int, Setting("brokerId", "0 is the master", low=0)] = 0
    broker_role: Annotated[BrokerRole, Setting("brokerRole", "role among those of its name")] = BrokerRole.ASYNC_MASTER
    broker_ip1: Annotated[str, Setting("brokerIP1", "address told to clients and stored in records")] = ""
    broker_ip2: Annotated[str, Setting("brokerIP2", "address told to slaves; default: brokerIP1")] = ""
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    listen_port: Annotated[int, Setting("listenPort", "port to listen on, 0 for a free one", low=0, high=65535)] = 10911
    grpc_port: Annotated[
        int,
        Setting("grpcServerPort", "port for SDKs of 5.x, 0 for a free one, -1 for none; rmq: 8081", low=-1, high=65535),
    ] = -1
    ha_listen_port: Annotated[int, Setting("haListenPort", "port for slaves; 0: listenPort + 1", low=0, high=65535)] = 0
    namesrv_addr: Annotated[str, Setting("namesrvAddr", "name servers as host:port;host:port")] = ""
    broker_permission: Annotated[int, Setting("brokerPermission", "4 read + 2 write", low=0, high=7, hot=True)] = 6
    auto_create_topic: Annotated[
        bool, Setting("autoCreateTopicEnable", "create a topic when the first message for it comes", hot=True)
    ] = True
    default_topic_queue_count: Annotated[
        int, Setting("defaultTopicQueueNums", "queues of the auto-create template", low=1, high=65535)
    ] = 8
    auto_create_group: Annotated[
        bool, Setting("autoCreateSubscriptionGroup", "create a consumer group when it first appears", hot=True)
    ] = True
    heartbeat_groups_max: Annotated[
        int, Setting("maxGroupsPerHeartbeat", "groups that one heartbeat may name", low=16, hot=True)
    ] = 4096
    heartbeat_subscriptions_max: Annotated[
        int, Setting("maxSubscriptionsPerHeartbeat", "subscriptions in it, of all groups", low=16, hot=True)
    ] = 8192
    connection_groups_max: Annotated[
        int, Setting("maxGroupsPerConnection", "groups that one connection may be in", low=16, hot=True)
    ] = 8192
    unused_groups_max: Annotated[
        int, Setting("maxUnusedGroups", "groups created as they appeared and not used yet", low=16, hot=True)
    ] = 100_000
    unused_group_keep_ms: Annotated[
        int,
        Setting("unusedGroupKeepTime", "ms until such a group goes away if nobody uses it", low=1000, hot=True),
    ] = 600_000
    cluster_topic: Annotated[bool, Setting("clusterTopicEnable", "let clients use the cluster's own topic")] = True
    broker_topic: Annotated[bool, Setting("brokerTopicEnable", "let clients use the broker's own topic")] = True
    trace_topic: Annotated[bool, Setting("traceTopicEnable", "create the trace topic at start")] = False
    trace_topic_name: Annotated[str, Setting("msgTraceTopicName", "name of the trace topic")] = "RMQ_SYS_TRACE_TOPIC"
    region_id: Annotated[str, Setting("regionId", "region stamped on messages")] = "DefaultRegion"
    trace_on: Annotated[bool, Setting("traceOn", "tell clients that they may trace")] = True
    long_polling: Annotated[bool, Setting("longPollingEnable", "hold pulls that find nothing", hot=True)] = True
    short_polling_ms: Annotated[
        int, Setting("shortPollingTimeMills", "ms to hold a pull without long polling", low=1, hot=True)
    ] = 1000
    offset_persist_interval_ms: Annotated[
        int, Setting("flushConsumerOffsetInterval", "ms between two writes of the offset table", low=100)
    ] = 5000
    delay_offset_persist_interval_ms: Annotated[
        int, Setting("flushDelayOffsetInterval", "ms between two writes of the delay levels' offsets", low=100)
    ] = 10_000
    accept_sends_from_ms: Annotated[
        int, Setting("startAcceptSendRequestTimeStamp", "ms since the epoch before which sends are refused", hot=True)
    ] = 0
    store_replies: Annotated[
        bool, Setting("storeReplyMessageEnable", "store the replies of request-reply messages, too", hot=True)
    ] = True
    register_interval_ms: Annotated[
        int, Setting("registerNameServerPeriod", "ms between two registrations", low=10_000, high=60_000)
    ] = 30_000
    register_timeout_ms: Annotated[
        int, Setting("registerBrokerTimeoutMills", "ms a name server may take to answer", low=1)
    ] = 24_000
    recall_messages: Annotated[
        bool, Setting("recallMessageEnable", "let senders call timed messages back before their time", hot=True)
    ] = False
    recall_unwritable: Annotated[
        bool, Setting("allowRecallWhenBrokerNotWriteable", "also while brokerPermission forbids writing", hot=True)
    ] = True
    reject_transactions: Annotated[bool, Setting("rejectTransactionMessage", "refuse half messages", hot=True)] = False
    transaction_timeout_ms: Annotated[
        int, Setting("transactionTimeOut", "ms before a half message is first asked about", low=0, hot=True)
    ] = 6000
    transaction_checks_max: Annotated[
        int, Setting("transactionCheckMax", "questions about a half message before it is given up", low=0, hot=True)
    ] = 15
    transaction_check_interval_ms: Annotated[
        int, Setting("transactionCheckInterval", "ms between two rounds of questions about half messages", low=1)
    ] = 30_000
    transaction_op_bytes_max: Annotated[
        int, Setting("transactionOpMsgMaxSize", "bytes of an op message beyond which it is written at once", low=1)
    ] = 4096
    transaction_op_interval_ms: Annotated[
        int, Setting("transactionOpBatchInterval", "ms at most until a decision is in an op message", low=1)
    ] = 3000
    admin_addresses: Annotated[
        AdminAddresses,
        Setting("adminAllowedAddresses", "who may change the server: loopback, any, or addresses and networks"),
    ] = field(default_factory=AdminAddresses)
    proxy_protocol: Annotated[bool, Setting("proxyProtocolEnable", "take connections with a PROXY preamble")] = True
    proxy_addresses: Annotated[
        AdminAddresses,
        Setting(
            "proxyProtocolAddresses",
            "balancers whose PROXY preamble is believed: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("none"))
    graceful_shutdown: Annotated[
        bool, Setting("enableShutdownGracefully", "send clients away with GO_AWAY before the ports close", hot=True)
    ] = False
    property_filter: Annotated[bool, Setting("enablePropertyFilter", "accept SQL92 subscriptions", hot=True)] = False
    filter_bitmaps: Annotated[
        bool, Setting("enableCalcFilterBitMap", "store with each message whose SQL92 subscriptions want it")
    ] = False
    bloom_group_count: Annotated[
        int, Setting("expectConsumerNumUseFilter", "SQL92 groups per topic that bitmaps are for", low=1, high=4096)
    ] = 32
    bloom_error_percent: Annotated[
        int, Setting("maxErrorRateOfBloomFilter", "percent of messages shown in vain by a bitmap", low=1, high=99)
    ] = 20
    filter_keep_ms: Annotated[
        int, Setting("filterDataCleanTimeSpan", "ms a SQL92 filter is kept after its group has left", low=0, hot=True)
    ] = 86_400_000
    filter_retries: Annotated[
        bool, Setting("filterSupportRetry", "filter retried messages by the SQL92 filter of their topic", hot=True)
    ] = False
    lite_pull: Annotated[bool, Setting("litePullMessageEnable", "serve lite pull consumers", hot=True)] = True
    notify_consumers: Annotated[
        bool, Setting("notifyConsumerIdsChangedEnable", "tell members of a group when others come or go", hot=True)
    ] = True
    notify_at_once: Annotated[
        bool, Setting("realTimeNotifyConsumerChange", "tell them at once; false: every 15 s", hot=True)
    ] = True
    strict_locks: Annotated[
        bool, Setting("lockInStrictMode", "lock a queue only when most brokers of this name agree", hot=True)
    ] = False
    replica_count: Annotated[int, Setting("totalReplicas", "brokers of this name, for lockInStrictMode", low=1)] = 1
    client_silent_ms_max: Annotated[
        int, Setting("channelExpiredTimeout", "ms without a heartbeat until a client is sent away", low=1, hot=True)
    ] = 120_000
    server_side_reset: Annotated[
        bool, Setting("useServerSideResetOffset", "move a group's offsets here; false: by asking its clients", hot=True)
    ] = True
    force_register: Annotated[bool, Setting("forceRegister", "register also when nothing changed", hot=True)] = True
    compressed_register: Annotated[bool, Setting("compressedRegister", "compress registrations", hot=True)] = False
    reject_pull_consumers: Annotated[
        bool, Setting("rejectPullConsumerEnable", "refuse consumers that pull by themselves", hot=True)
    ] = False
    stops_slow_groups: Annotated[
        bool, Setting("disableConsumeIfConsumerReadSlowly", "disable groups that read too far behind", hot=True)
    ] = False
    slow_group_bytes: Annotated[
        int, Setting("consumerFallbehindThreshold", "bytes of the log behind which that is", low=1, hot=True)
    ] = 16 << 30
    slave_read: Annotated[
        bool, Setting("slaveReadEnable", "send consumers far behind to a slave, and serve them as one", hot=True)
    ] = False
    offset_check_in_slave: Annotated[
        bool, Setting("offsetCheckInSlave", "correct a consumer's offset as a slave, too", hot=True)
    ] = False
    unique_key_query_count_max: Annotated[
        int, Setting("defaultQueryMaxNum", "most messages a query by unique key returns", low=1, hot=True)
    ] = 32
    in_sync_replicas: Annotated[
        int, Setting("inSyncReplicas", "copies a SYNC_MASTER's answer waits for, its own among them", low=1)
    ] = 1
    min_in_sync_replicas: Annotated[
        int, Setting("minInSyncReplicas", "copies that enableAutoInSyncReplicas does not go below", low=1)
    ] = 1
    auto_in_sync_replicas: Annotated[
        bool, Setting("enableAutoInSyncReplicas", "as acting-master group, wait for the copies there are")
    ] = False
    all_in_sync_replicas: Annotated[
        bool, Setting("allAckInSyncStateSet", "as SYNC_MASTER, wait for every slave that is in sync")
    ] = False
    slave_timeout_ms: Annotated[
        int, Setting("slaveTimeout", "ms an answer waits for the slaves' copies", low=1, hot=True)
    ] = 3000
    ha_batch_bytes: Annotated[
        int, Setting("haTransferBatchSize", "bytes of the log sent to a slave in one frame", low=1024, high=1 << 30)
    ] = 32 << 10
    ha_heartbeat_interval_ms: Annotated[
        int, Setting("haSendHeartbeatInterval", "ms without other traffic between master and slave", low=100)
    ] = 5000
    ha_silent_ms_max: Annotated[
        int, Setting("haHousekeepingInterval", "ms of silence after which master and slave part", low=100)
    ] = 20_000
    ha_gap_bytes_max: Annotated[
        int, Setting("haMaxGapNotInSync", "bytes a slave may be behind and still be in sync", low=1, hot=True)
    ] = 256 << 20
    ha_flow_control: Annotated[bool, Setting("haFlowControlEnable", "limit what a slave is sent", hot=True)] = False
    ha_bytes_per_second_max: Annotated[
        int, Setting("maxHaTransferByteInSecond", "that limit, bytes a second", low=1024, hot=True)
    ] = 100 << 20
    ha_master_address: Annotated[
        str, Setting("haMasterAddress", "host:port of the master's HA port; default: as the name servers say")
    ] = ""
    ha_addresses: Annotated[
        HaAddresses,
        Setting(
            "haAllowedAddresses",
            "who may follow the log: loopback, members (as name servers tell), any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=HaAddresses)
    ha_tls: Annotated[
        bool, Setting("haTlsEnable", "TLS between master and slave: a slave uses it, a master refuses others")
    ] = False
    acts_as_master: Annotated[
        bool, Setting("enableSlaveActingMaster", "as the lowest id left, go on with delays and transactions")
    ] = False
    remote_escape: Annotated[
        bool, Setting("enableRemoteEscape", "as acting master, put what is due on another broker's master")
    ] = False
    skip_pre_online: Annotated[
        bool, Setting("skipPreOnline", "register without taking over what an acting master has done")
    ] = False
    not_active_ms_max: Annotated[
        int, Setting("brokerNotActiveTimeoutMillis", "ms of silence until name servers forget a broker", low=1000)
    ] = 10_000
    config_black_list: Annotated[
        str, Setting("configBlackList", "keys that requests must not change, separated by semicolons")
    ] = "configBlackList;brokerConfigPath"
    request_mode: Annotated[
        RequestMode, Setting("defaultMessageRequestMode", "how groups consume that nobody set a mode for", hot=True)
    ] = RequestMode.PULL
    pop_share_queue_count: Annotated[
        int, Setting("defaultPopShareQueueNum", "members that share a member's queues then; below 1: all", hot=True)
    ] = -1
    pop_retry_percent: Annotated[
        int, Setting("popFromRetryProbability", "percent of pops that try retries first", low=0, high=100, hot=True)
    ] = 20
    mixed_topics: Annotated[
        bool, Setting("enableMixedMessageType", "create topics whose message.type is MIXED", hot=True)
    ] = False
    deletes_retry_topics: Annotated[
        bool, Setting("clearRetryTopicWhenDeleteTopic", "delete with a topic the retry topics of its pops", hot=True)
    ] = True
    pop_retry_percent_by_priority: Annotated[
        int,
        Setting("popFromRetryProbabilityForPriority", "the same for topics of priorities", low=0, high=100, hot=True),
    ] = 0
    higher_queues_first: Annotated[
        bool,
        Setting(
            "priorityOrderAsc",
            "pops go through queues downwards, so that higher priorities come first; false: upwards",
            hot=True,
        ),
    ] = True
    revive_queue_count: Annotated[
        int,
        Setting("reviveQueueNum", "queues for check points and acks of POP, when they are created", low=1, high=512),
    ] = 8
    retry_topic_v2: Annotated[
        bool, Setting("enableRetryTopicV2", "name POP's retry topics %RETRY%group+topic", hot=True)
    ] = False
    pops_keep_retry_topic: Annotated[
        bool, Setting("popResponseReturnActualRetryTopic", "give popped messages of retry topics as stored", hot=True)
    ] = False
    pop_buffer_merge: Annotated[
        bool, Setting("enablePopBufferMerge", "store acks of popped messages together, a moment later", hot=True)
    ] = False
    pop_in_flight_limited: Annotated[
        bool, Setting("enablePopMessageThreshold", "limit what a group has popped of a queue", hot=True)
    ] = False
    pop_in_flight_max: Annotated[
        int, Setting("popInflightMessageThreshold", "that limit, unacknowledged messages", low=1, hot=True)
    ] = 10_000
    pop_check_points_max: Annotated[
        int, Setting("popCkMaxBufferSize", "check points that may wait for acks, of all groups", low=1, hot=True)
    ] = 200_000
    pops_held_max: Annotated[int, Setting("maxPopPollingSize", "pops that may wait", low=0, hot=True)] = 100_000
    pops_held_per_queue_max: Annotated[
        int, Setting("popPollingSize", "pops of a group that may wait for a queue", low=0, hot=True)
    ] = 1024
    old_name_servers: Annotated[
        bool, Setting("compatibleWithOldNameSrv", "send signs of life as questions for the data version", hot=True)
    ] = True


# Keys of Java's configuration that 5.4.0 does not show, of caches and of older versions: accepted, noted, without
# effect. What it shows is in `rmqkit.broker.unused_settings`.
WITHOUT_EFFECT = frozenset(
    """
    brokerConfigPath useSpinLock commercialEnable haSlaveFallbehindMax userCacheMaxNum userCacheExpiredSecond
    userCacheRefreshSecond aclCacheMaxNum aclCacheExpiredSecond aclCacheRefreshSecond statefulAuthenticationCacheMaxNum
    statefulAuthenticationCacheExpiredSecond statefulAuthorizationCacheMaxNum statefulAuthorizationCacheExpiredSecond
    """.split()
)

_AUTHENTICATION = "org.apache.rocketmq.auth.authentication"
_AUTHORIZATION = "org.apache.rocketmq.auth.authorization"

# Keys that promise something, and the values whose promise is kept.
PROMISES = EXPORTER_PROMISES | {
    "authenticationProvider": (f"{_AUTHENTICATION}.provider.DefaultAuthenticationProvider",),
    "authenticationMetadataProvider": (f"{_AUTHENTICATION}.provider.LocalAuthenticationMetadataProvider",),
    "authenticationStrategy": tuple(
        f"{_AUTHENTICATION}.strategy.{kind}AuthenticationStrategy" for kind in ("Stateless", "Stateful")
    ),
    "authorizationProvider": (f"{_AUTHORIZATION}.provider.DefaultAuthorizationProvider",),
    "authorizationMetadataProvider": (f"{_AUTHORIZATION}.provider.LocalAuthorizationMetadataProvider",),
    "authorizationStrategy": tuple(
        f"{_AUTHORIZATION}.strategy.{kind}AuthorizationStrategy" for kind in ("Stateless", "Stateful")
    ),
    "migrateAuthFromV1Enabled": ("false",),
}


def refuse_unsupported(
    properties: Mapping[str, str], *, source: str, promises: Mapping[str, tuple[str, ...]] = PROMISES
) -> None:
    """Stop at a configuration whose promise could not be kept if its key were ignored.
    Raises SettingsError: a key asks for what is not built."""
    for key, supported in promises.items():
        value = properties.get(key, supported[0])
        if value not in supported:
            raise SettingsError(f"{source}: {key}={value} is not supported yet: use {' or '.join(supported)}")
