"""The settings of the broker (``broker.conf``), without the store's. Source: store.md §23, behaviour.md §2."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

from msgspec import field

from rmqkit.broker.ha_addresses import HaAddresses
from rmqkit.errors import SettingsError
from rmqkit.metrics import EXPORTER_PROMISES
from rmqkit.remoting.address import AdminAddresses
from rmqkit.remoting.limits import GRPC_CALLS, GRPC_CALLS_MAX, ConnectionSettings
from rmqkit.settings import Setting

__all__ = [
    "PROMISES",
    "WITHOUT_EFFECT",
    "BrokerRole",
    "BrokerSettings",
    "RequestMode",
    "refuse_unsupported",
]


STANDALONE = {"recallMessageEnable": "true"}
"""The defaults for brokers in development and tests (``rmq standalone``, `Standalone`, the pytest plugin)."""


class BrokerRole(enum.Enum):
    """The role of a broker among the brokers that share its name."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class RequestMode(enum.Enum):
    """The request with which a consumer group gets its messages."""

    PULL = "PULL"
    POP = "POP"


class BrokerSettings(ConnectionSettings, kw_only=True):
    """The settings of a broker in ``broker.conf``."""

    cluster_name: Annotated[str, Setting("brokerClusterName", "cluster the broker belongs to")] = "DefaultCluster"
    broker_name: Annotated[
        str, Setting("brokerName", "name of the broker, shared by a master and its slaves; default: the host name")
    ] = ""
    broker_id: Annotated[int, Setting("brokerId", "0 is the master", low=0)] = 0
    broker_role: Annotated[BrokerRole, Setting("brokerRole", "role among the brokers with this name")] = (
        BrokerRole.ASYNC_MASTER
    )
    broker_ip1: Annotated[str, Setting("brokerIP1", "address advertised to clients, and stored in records")] = ""
    broker_ip2: Annotated[str, Setting("brokerIP2", "address advertised to slaves; default: brokerIP1")] = ""
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    listen_port: Annotated[int, Setting("listenPort", "port to listen on; 0 means a free port", low=0, high=65535)] = (
        10911
    )
    grpc_port: Annotated[
        int,
        Setting(
            "grpcServerPort",
            "gRPC port for the 5.x SDKs; 0 means a free port, -1 none; with the rmq command the default is 8081",
            low=-1,
            high=65535,
        ),
    ] = -1
    grpc_calls_max: Annotated[int, GRPC_CALLS] = GRPC_CALLS_MAX
    ha_listen_port: Annotated[
        int, Setting("haListenPort", "port for slaves; 0 means listenPort + 1", low=0, high=65535)
    ] = 0
    namesrv_addr: Annotated[str, Setting("namesrvAddr", "name servers as host:port;host:port")] = ""
    broker_permission: Annotated[
        int, Setting("brokerPermission", "permission: 4 is read, 2 is write, 6 is both", low=0, high=7, hot=True)
    ] = 6
    auto_create_topic: Annotated[
        bool, Setting("autoCreateTopicEnable", "create a topic when its first message arrives", hot=True)
    ] = True
    default_topic_queue_count: Annotated[
        int,
        Setting(
            "defaultTopicQueueNums", "number of queues of a topic that is created automatically", low=1, high=65535
        ),
    ] = 8
    auto_create_group: Annotated[
        bool, Setting("autoCreateSubscriptionGroup", "create a consumer group when it first appears", hot=True)
    ] = True
    heartbeat_groups_max: Annotated[
        int, Setting("maxGroupsPerHeartbeat", "maximum number of groups in one heartbeat", low=16, hot=True)
    ] = 4096
    heartbeat_subscriptions_max: Annotated[
        int,
        Setting("maxSubscriptionsPerHeartbeat", "maximum number of subscriptions in one heartbeat", low=16, hot=True),
    ] = 8192
    connection_groups_max: Annotated[
        int, Setting("maxGroupsPerConnection", "maximum number of groups of one connection", low=16, hot=True)
    ] = 8192
    unused_groups_max: Annotated[
        int,
        Setting(
            "maxUnusedGroups",
            "maximum number of groups that were created automatically and never used",
            low=16,
            hot=True,
        ),
    ] = 100_000
    unused_group_keep_ms: Annotated[
        int,
        Setting("unusedGroupKeepTime", "ms until such an unused group is deleted", low=1000, hot=True),
    ] = 600_000
    cluster_topic: Annotated[
        bool, Setting("clusterTopicEnable", "let clients use the topic named after the cluster")
    ] = True
    broker_topic: Annotated[bool, Setting("brokerTopicEnable", "let clients use the topic named after the broker")] = (
        True
    )
    trace_topic: Annotated[bool, Setting("traceTopicEnable", "create the trace topic at start")] = False
    trace_topic_name: Annotated[str, Setting("msgTraceTopicName", "name of the trace topic")] = "RMQ_SYS_TRACE_TOPIC"
    region_id: Annotated[str, Setting("regionId", "region stamped on messages")] = "DefaultRegion"
    trace_on: Annotated[bool, Setting("traceOn", "allow clients to trace")] = True
    long_polling: Annotated[
        bool, Setting("longPollingEnable", "hold pulls that find no message (long polling)", hot=True)
    ] = True
    short_polling_ms: Annotated[
        int, Setting("shortPollingTimeMills", "ms to hold a pull without long polling", low=1, hot=True)
    ] = 1000
    offset_persist_interval_ms: Annotated[
        int, Setting("flushConsumerOffsetInterval", "interval of saving the offset table, in ms", low=100)
    ] = 5000
    delay_offset_persist_interval_ms: Annotated[
        int, Setting("flushDelayOffsetInterval", "interval of saving the offsets of the delay levels, in ms", low=100)
    ] = 10_000
    accept_sends_from_ms: Annotated[
        int,
        Setting("startAcceptSendRequestTimeStamp", "refuse sends before this time, in ms since the epoch", hot=True),
    ] = 0
    store_replies: Annotated[
        bool, Setting("storeReplyMessageEnable", "store the replies of request-reply messages, too", hot=True)
    ] = True
    register_interval_ms: Annotated[
        int,
        Setting(
            "registerNameServerPeriod", "interval of registrations with name servers, in ms", low=10_000, high=60_000
        ),
    ] = 30_000
    register_timeout_ms: Annotated[
        int, Setting("registerBrokerTimeoutMills", "timeout of a registration, in ms", low=1)
    ] = 24_000
    recall_messages: Annotated[
        bool, Setting("recallMessageEnable", "let producers recall timed messages before their time", hot=True)
    ] = False
    recall_unwritable: Annotated[
        bool,
        Setting("allowRecallWhenBrokerNotWriteable", "allow recalls while brokerPermission forbids writing", hot=True),
    ] = True
    reject_transactions: Annotated[bool, Setting("rejectTransactionMessage", "refuse half messages", hot=True)] = False
    transaction_timeout_ms: Annotated[
        int, Setting("transactionTimeOut", "ms until the first check of a half message", low=0, hot=True)
    ] = 6000
    transaction_checks_max: Annotated[
        int,
        Setting(
            "transactionCheckMax", "number of checks of a half message before the broker gives up", low=0, hot=True
        ),
    ] = 15
    transaction_check_interval_ms: Annotated[
        int, Setting("transactionCheckInterval", "interval of checks of half messages, in ms", low=1)
    ] = 30_000
    transaction_op_bytes_max: Annotated[
        int,
        Setting("transactionOpMsgMaxSize", "size in bytes at which an op message is written at once", low=1),
    ] = 4096
    transaction_op_interval_ms: Annotated[
        int,
        Setting("transactionOpBatchInterval", "maximum ms until a decision is written in an op message", low=1),
    ] = 3000
    admin_addresses: Annotated[
        AdminAddresses,
        Setting("adminAllowedAddresses", "who may change the server: loopback, any, or addresses and networks"),
    ] = field(default_factory=AdminAddresses)
    proxy_protocol: Annotated[
        bool, Setting("proxyProtocolEnable", "accept connections with a PROXY protocol header")
    ] = True
    proxy_addresses: Annotated[
        AdminAddresses,
        Setting(
            "proxyProtocolAddresses",
            "load balancers whose PROXY protocol header is trusted: none, loopback, any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=lambda: AdminAddresses("none"))
    graceful_shutdown: Annotated[
        bool,
        Setting("enableShutdownGracefully", "before closing its ports, send GO_AWAY to clients", hot=True),
    ] = False
    property_filter: Annotated[bool, Setting("enablePropertyFilter", "accept SQL92 subscriptions", hot=True)] = False
    filter_bitmaps: Annotated[
        bool,
        Setting("enableCalcFilterBitMap", "store with each message a bitmap of the SQL92 subscriptions that match it"),
    ] = False
    bloom_group_count: Annotated[
        int,
        Setting(
            "expectConsumerNumUseFilter",
            "number of SQL92 groups per topic that a bitmap is sized for",
            low=1,
            high=4096,
        ),
    ] = 32
    bloom_error_percent: Annotated[
        int, Setting("maxErrorRateOfBloomFilter", "error rate of a bitmap, in percent", low=1, high=99)
    ] = 20
    filter_keep_ms: Annotated[
        int,
        Setting(
            "filterDataCleanTimeSpan", "ms until a SQL92 filter is deleted after its group has left", low=0, hot=True
        ),
    ] = 86_400_000
    filter_retries: Annotated[
        bool, Setting("filterSupportRetry", "filter retried messages by the SQL92 filter of their topic", hot=True)
    ] = False
    lite_pull: Annotated[bool, Setting("litePullMessageEnable", "serve lite pull consumers", hot=True)] = True
    notify_consumers: Annotated[
        bool, Setting("notifyConsumerIdsChangedEnable", "notify members of a group when others join or leave", hot=True)
    ] = True
    notify_at_once: Annotated[
        bool,
        Setting("realTimeNotifyConsumerChange", "notify members of a group at once; false means every 15 s", hot=True),
    ] = True
    strict_locks: Annotated[
        bool, Setting("lockInStrictMode", "lock a queue only when most brokers of this name agree", hot=True)
    ] = False
    replica_count: Annotated[
        int, Setting("totalReplicas", "number of brokers with this name, for lockInStrictMode", low=1)
    ] = 1
    client_silent_ms_max: Annotated[
        int, Setting("channelExpiredTimeout", "ms without a heartbeat until a client is disconnected", low=1, hot=True)
    ] = 120_000
    server_side_reset: Annotated[
        bool,
        Setting(
            "useServerSideResetOffset", "reset offsets on the broker; false means that its clients do it", hot=True
        ),
    ] = True
    force_register: Annotated[bool, Setting("forceRegister", "register even if nothing has changed", hot=True)] = True
    compressed_register: Annotated[bool, Setting("compressedRegister", "compress registrations", hot=True)] = False
    reject_pull_consumers: Annotated[bool, Setting("rejectPullConsumerEnable", "refuse pull consumers", hot=True)] = (
        False
    )
    stops_slow_groups: Annotated[
        bool, Setting("disableConsumeIfConsumerReadSlowly", "disable groups with a large lag", hot=True)
    ] = False
    slow_group_bytes: Annotated[
        int,
        Setting(
            "consumerFallbehindThreshold", "lag at which groups are disabled, in bytes of the log", low=1, hot=True
        ),
    ] = 16 << 30
    slave_read: Annotated[
        bool, Setting("slaveReadEnable", "master: send slow consumers to a slave; slave: serve consumers", hot=True)
    ] = False
    offset_check_in_slave: Annotated[
        bool, Setting("offsetCheckInSlave", "correct the offsets of consumers on a slave, too", hot=True)
    ] = False
    unique_key_query_count_max: Annotated[
        int,
        Setting("defaultQueryMaxNum", "maximum number of messages that a query by unique key returns", low=1, hot=True),
    ] = 32
    in_sync_replicas: Annotated[
        int, Setting("inSyncReplicas", "number of copies that a SYNC_MASTER waits for, including its own", low=1)
    ] = 1
    min_in_sync_replicas: Annotated[
        int, Setting("minInSyncReplicas", "minimum number of copies with enableAutoInSyncReplicas", low=1)
    ] = 1
    auto_in_sync_replicas: Annotated[
        bool,
        Setting(
            "enableAutoInSyncReplicas", "with enableSlaveActingMaster, wait only for the slaves that are connected"
        ),
    ] = False
    all_in_sync_replicas: Annotated[
        bool, Setting("allAckInSyncStateSet", "as SYNC_MASTER, wait for every slave that is in sync")
    ] = False
    slave_timeout_ms: Annotated[int, Setting("slaveTimeout", "ms that an answer waits for slaves", low=1, hot=True)] = (
        3000
    )
    ha_batch_bytes: Annotated[
        int, Setting("haTransferBatchSize", "maximum bytes of the log in one frame to a slave", low=1024, high=1 << 30)
    ] = 32 << 10
    ha_heartbeat_interval_ms: Annotated[
        int,
        Setting(
            "haSendHeartbeatInterval",
            "interval of heartbeats between master and slave without other traffic, in ms",
            low=100,
        ),
    ] = 5000
    ha_silent_ms_max: Annotated[
        int, Setting("haHousekeepingInterval", "ms of silence after which master and slave disconnect", low=100)
    ] = 20_000
    ha_gap_bytes_max: Annotated[
        int,
        Setting("haMaxGapNotInSync", "bytes that a slave may be behind and still count as in sync", low=1, hot=True),
    ] = 256 << 20
    ha_flow_control: Annotated[bool, Setting("haFlowControlEnable", "limit the rate of replication", hot=True)] = False
    ha_bytes_per_second_max: Annotated[
        int,
        Setting("maxHaTransferByteInSecond", "maximum rate of replication, in bytes per second", low=1024, hot=True),
    ] = 100 << 20
    ha_master_address: Annotated[
        str, Setting("haMasterAddress", "host:port of the HA port of the master; default: ask the name servers")
    ] = ""
    ha_addresses: Annotated[
        HaAddresses,
        Setting(
            "haAllowedAddresses",
            "addresses of slaves: loopback, members (as known to the name servers), any, or addresses and networks",
            hot=True,
        ),
    ] = field(default_factory=HaAddresses)
    ha_tls: Annotated[
        bool, Setting("haTlsEnable", "TLS between master and slave: a slave uses it, a master requires it")
    ] = False
    acts_as_master: Annotated[
        bool,
        Setting(
            "enableSlaveActingMaster",
            "let the slave with the lowest id continue delays and transactions when the master is down",
        ),
    ] = False
    remote_escape: Annotated[
        bool, Setting("enableRemoteEscape", "as acting master, store due messages on the master of another broker")
    ] = False
    skip_pre_online: Annotated[
        bool, Setting("skipPreOnline", "register without taking over the state of an acting master")
    ] = False
    not_active_ms_max: Annotated[
        int, Setting("brokerNotActiveTimeoutMillis", "ms of silence until name servers remove a broker", low=1000)
    ] = 10_000
    config_black_list: Annotated[
        str, Setting("configBlackList", "settings that requests cannot change, separated by semicolons")
    ] = "configBlackList;brokerConfigPath"
    request_mode: Annotated[
        RequestMode, Setting("defaultMessageRequestMode", "how groups consume if no mode is set for them", hot=True)
    ] = RequestMode.PULL
    pop_share_queue_count: Annotated[
        int,
        Setting(
            "defaultPopShareQueueNum",
            "for POP, number of members that share the queues of a member; below 1 means all",
            hot=True,
        ),
    ] = -1
    pop_retry_percent: Annotated[
        int, Setting("popFromRetryProbability", "percentage of pops that read retries first", low=0, high=100, hot=True)
    ] = 20
    mixed_topics: Annotated[
        bool, Setting("enableMixedMessageType", "create topics whose message.type is MIXED", hot=True)
    ] = False
    deletes_retry_topics: Annotated[
        bool,
        Setting("clearRetryTopicWhenDeleteTopic", "delete the POP retry topics of a topic together with it", hot=True),
    ] = True
    filters_notifications: Annotated[
        bool,
        Setting(
            "useMessageFilterForNotification",
            "apply the filter of NOTIFICATION requests, which 5.5 proxies send",
            hot=True,
        ),
    ] = True
    notification_entries_max: Annotated[
        int,
        Setting(
            "maxMessageFilterNumForNotification",
            "number of unread messages from which a NOTIFICATION no longer compares the tags of a queue",
            low=0,
            high=65_536,
            hot=True,
        ),
    ] = 64
    pop_retry_percent_by_priority: Annotated[
        int,
        Setting(
            "popFromRetryProbabilityForPriority",
            "percentage of pops that read retries first, for topics with priorities",
            low=0,
            high=100,
            hot=True,
        ),
    ] = 0
    higher_queues_first: Annotated[
        bool,
        Setting(
            "priorityOrderAsc",
            "true: high queue numbers first, so that high priorities come first; false: low numbers first",
            hot=True,
        ),
    ] = True
    revive_queue_count: Annotated[
        int,
        Setting("reviveQueueNum", "number of queues for check points and acks of POP", low=1, high=512),
    ] = 8
    retry_topic_v2: Annotated[
        bool, Setting("enableRetryTopicV2", "name POP's retry topics %RETRY%group+topic", hot=True)
    ] = False
    pops_keep_retry_topic: Annotated[
        bool, Setting("popResponseReturnActualRetryTopic", "return popped retries with their retry topic", hot=True)
    ] = False
    pop_buffer_merge: Annotated[
        bool,
        Setting(
            "enablePopBufferMerge", "collect acks of popped messages and store them together a moment later", hot=True
        ),
    ] = False
    pop_in_flight_limited: Annotated[
        bool, Setting("enablePopMessageThreshold", "limit the unacknowledged messages of a group per queue", hot=True)
    ] = False
    pop_in_flight_max: Annotated[
        int,
        Setting(
            "popInflightMessageThreshold",
            "maximum number of unacknowledged messages of a group per queue",
            low=1,
            hot=True,
        ),
    ] = 10_000
    pop_check_points_max: Annotated[
        int,
        Setting(
            "popCkMaxBufferSize", "maximum number of check points that wait for acks, over all groups", low=1, hot=True
        ),
    ] = 200_000
    lite_lifetime_min_ms: Annotated[
        int,
        Setting(
            "minLiteTTl",
            "shortest lifetime of a lite topic after its newest message, whatever lite.topic.expiration of its parent"
            " is, in ms",
            low=1000,
            hot=True,
        ),
    ] = 60_000
    lite_expiry_interval_ms: Annotated[
        int, Setting("liteTtlCheckInterval", "time between two removals of expired lite topics, in ms", low=100)
    ] = 10_000
    lite_client_check_interval_ms: Annotated[
        int,
        Setting("liteSubscriptionCheckInterval", "time between two searches for silent lite clients, in ms", low=100),
    ] = 120_000
    lite_client_timeout_ms: Annotated[
        int,
        Setting(
            "liteSubscriptionCheckTimeoutMills",
            "time without a subscription request after which a lite client is forgotten, in ms",
            low=1000,
            hot=True,
        ),
    ] = 180_000
    lite_subscriptions_max: Annotated[
        int,
        Setting("maxLiteSubscriptionCount", "maximum number of pairs of a client and a lite topic", low=0, hot=True),
    ] = 2_000_000
    lite_lag_metrics: Annotated[
        bool,
        Setting(
            "liteLagCountMetricsEnable",
            "export the lag of each lite group; every read of the metrics then looks at all lite topics of its parent",
            hot=True,
        ),
    ] = False
    pops_held_max: Annotated[int, Setting("maxPopPollingSize", "maximum number of waiting pops", low=0, hot=True)] = (
        100_000
    )
    pops_held_per_queue_max: Annotated[
        int, Setting("popPollingSize", "maximum number of waiting pops of a group per queue", low=0, hot=True)
    ] = 1024
    old_name_servers: Annotated[
        bool,
        Setting("compatibleWithOldNameSrv", "send heartbeats to name servers as queries of the data version", hot=True),
    ] = True


# Keys of the Java configuration that 5.4.0 does not show: they are for caches, or from older versions. The broker
# accepts and logs them without effect. Keys that 5.4.0 shows are in `rmqkit.broker.unused_settings`.
WITHOUT_EFFECT = frozenset(
    """
    brokerConfigPath useSpinLock commercialEnable haSlaveFallbehindMax userCacheMaxNum userCacheExpiredSecond
    userCacheRefreshSecond aclCacheMaxNum aclCacheExpiredSecond aclCacheRefreshSecond statefulAuthenticationCacheMaxNum
    statefulAuthenticationCacheExpiredSecond statefulAuthorizationCacheMaxNum statefulAuthorizationCacheExpiredSecond
    """.split()
)

_AUTHENTICATION = "org.apache.rocketmq.auth.authentication"
_AUTHORIZATION = "org.apache.rocketmq.auth.authorization"

# Keys that enable a feature, and their supported values.
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
    """Check that no key enables an unsupported feature. Such a key must not be ignored.
    Raises SettingsError: a key has an unsupported value."""
    for key, supported in promises.items():
        value = properties.get(key, supported[0])
        if value not in supported:
            raise SettingsError(f"{source}: {key}={value} is not supported yet: use {' or '.join(supported)}")
