"""Settings of the broker (``broker.conf``), but for the store's own. Source: store.md §23, behaviour.md §2."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Annotated

from msgspec import Struct, field

from rmqkit.errors import SettingsError
from rmqkit.remoting.admission import AdminAddresses
from rmqkit.settings import Setting

__all__ = ["NOT_BUILT", "PROMISES", "WITHOUT_EFFECT", "BrokerRole", "BrokerSettings", "refuse_unsupported"]


class BrokerRole(enum.Enum):
    """Who a broker is among those that share its name."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"


class BrokerSettings(Struct, kw_only=True):
    """What a ``broker.conf`` may say about the broker."""

    cluster_name: Annotated[str, Setting("brokerClusterName", "cluster the broker belongs to")] = "DefaultCluster"
    broker_name: Annotated[str, Setting("brokerName", "shared by a master and its slaves; default: host name")] = ""
    broker_id: Annotated[int, Setting("brokerId", "0 is the master", low=0)] = 0
    broker_role: Annotated[BrokerRole, Setting("brokerRole", "role among the brokers of one name")] = (
        BrokerRole.ASYNC_MASTER
    )
    broker_ip1: Annotated[str, Setting("brokerIP1", "address told to clients and stored in records")] = ""
    broker_ip2: Annotated[str, Setting("brokerIP2", "address told to slaves; default: brokerIP1")] = ""
    bind_address: Annotated[str, Setting("bindAddress", "address to listen on")] = "0.0.0.0"
    listen_port: Annotated[int, Setting("listenPort", "port to listen on, 0 for a free one", low=0, high=65535)] = 10911
    ha_listen_port: Annotated[
        int, Setting("haListenPort", "port told to slaves; 0 means listenPort + 1", low=0, high=65535)
    ] = 0
    namesrv_addr: Annotated[str, Setting("namesrvAddr", "name servers as host:port;host:port")] = ""
    broker_permission: Annotated[
        int, Setting("brokerPermission", "4 read, 2 write, 6 both", low=0, high=7, hot=True)
    ] = 6
    auto_create_topic: Annotated[
        bool, Setting("autoCreateTopicEnable", "create a topic when the first message for it comes", hot=True)
    ] = True
    default_topic_queue_count: Annotated[
        int, Setting("defaultTopicQueueNums", "queues of the auto-create template", low=1, high=65535)
    ] = 8
    auto_create_group: Annotated[
        bool, Setting("autoCreateSubscriptionGroup", "create a consumer group when it first appears", hot=True)
    ] = True
    cluster_topic: Annotated[
        bool, Setting("clusterTopicEnable", "let clients use the topic named like the cluster")
    ] = True
    broker_topic: Annotated[bool, Setting("brokerTopicEnable", "let clients use the topic named like the broker")] = (
        True
    )
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
    proxy_protocol: Annotated[
        bool, Setting("proxyProtocolEnable", "believe a PROXY preamble about who the peer is")
    ] = True
    graceful_shutdown: Annotated[
        bool, Setting("enableShutdownGracefully", "send clients away with GO_AWAY before the ports close", hot=True)
    ] = False
    property_filter: Annotated[bool, Setting("enablePropertyFilter", "accept SQL92 subscriptions", hot=True)] = False
    filter_bitmaps: Annotated[
        bool, Setting("enableCalcFilterBitMap", "store with each message whose SQL92 subscriptions want it")
    ] = False
    bloom_group_count: Annotated[
        int,
        Setting(
            "expectConsumerNumUseFilter", "SQL92 groups per topic the filter bitmaps are made for", low=1, high=4096
        ),
    ] = 32
    bloom_error_percent: Annotated[
        int,
        Setting("maxErrorRateOfBloomFilter", "percent of messages a filter bitmap may show in vain", low=1, high=99),
    ] = 20
    filter_keep_ms: Annotated[
        int, Setting("filterDataCleanTimeSpan", "ms a SQL92 filter is kept after its group has left", low=0, hot=True)
    ] = 86_400_000
    filter_retries: Annotated[
        bool, Setting("filterSupportRetry", "filter retried messages by the SQL92 filter of their topic", hot=True)
    ] = False
    lite_pull: Annotated[bool, Setting("litePullMessageEnable", "serve lite pull consumers", hot=True)] = True
    notify_consumers: Annotated[
        bool,
        Setting(
            "notifyConsumerIdsChangedEnable", "tell the members of a consumer group when others come or go", hot=True
        ),
    ] = True
    notify_at_once: Annotated[
        bool, Setting("realTimeNotifyConsumerChange", "tell them at once; false: every 15 s", hot=True)
    ] = True
    strict_locks: Annotated[
        bool,
        Setting("lockInStrictMode", "lock a queue only when most of the brokers of this name agree", hot=True),
    ] = False
    replica_count: Annotated[int, Setting("totalReplicas", "brokers of this name, for lockInStrictMode", low=1)] = 1
    client_silent_ms_max: Annotated[
        int,
        Setting("channelExpiredTimeout", "ms without a heartbeat after which a client is sent away", low=1, hot=True),
    ] = 120_000
    server_side_reset: Annotated[
        bool, Setting("useServerSideResetOffset", "move a group's offsets here; false: by asking its clients", hot=True)
    ] = True
    force_register: Annotated[
        bool, Setting("forceRegister", "register regularly even when nothing changed", hot=True)
    ] = True
    compressed_register: Annotated[bool, Setting("compressedRegister", "send registrations compressed", hot=True)] = (
        False
    )
    reject_pull_consumers: Annotated[
        bool, Setting("rejectPullConsumerEnable", "refuse consumers that pull by themselves", hot=True)
    ] = False
    slave_read: Annotated[
        bool,
        Setting("slaveReadEnable", "send consumers that are far behind to a slave, and serve them as one", hot=True),
    ] = False
    offset_check_in_slave: Annotated[
        bool, Setting("offsetCheckInSlave", "correct a consumer's offset as a slave, too", hot=True)
    ] = False
    unique_key_query_count_max: Annotated[
        int, Setting("defaultQueryMaxNum", "most messages a query by unique key returns", low=1, hot=True)
    ] = 32


WITHOUT_EFFECT = frozenset(
    """
    rocketmqHome sendMessageThreadPoolNums pullMessageThreadPoolNums litePullMessageThreadPoolNums
    ackMessageThreadPoolNums processReplyMessageThreadPoolNums queryMessageThreadPoolNums adminBrokerThreadPoolNums
    clientManageThreadPoolNums commitLogRecoverMaxNum consumerManageThreadPoolNums loadBalanceProcessorThreadPoolNums
    heartbeatThreadPoolNums endTransactionThreadPoolNums putMessageFutureThreadPoolNums serverWorkerThreads
    serverCallbackExecutorThreads serverSelectorThreads serverAsyncSemaphoreValue serverOnewaySemaphoreValue
    serverSocketSndBufSize serverSocketRcvBufSize serverPooledByteBufAllocatorEnable useEpollNativeSelector useTLS
    useReentrantLockWhenPutMessage useSpinLock transferMsgByHeap sendThreadPoolQueueCapacity
    pullThreadPoolQueueCapacity replyThreadPoolQueueCapacity queryThreadPoolQueueCapacity
    clientManagerThreadPoolQueueCapacity consumerManagerThreadPoolQueueCapacity heartbeatThreadPoolQueueCapacity
    endTransactionPoolQueueCapacity adminBrokerThreadPoolQueueCapacity ackThreadPoolQueueCapacity
    putThreadPoolQueueCapacity loadBalanceThreadPoolQueueCapacity litePullThreadPoolQueueCapacity
    flushConsumerOffsetHistoryInterval highSpeedMode commercialEnable clientAsyncSemaphoreValue
    clientOnewaySemaphoreValue clientCallbackExecutorThreads clientWorkerThreads deleteCommitLogFilesInterval
    deleteConsumeQueueFilesInterval destroyMapedFileIntervalForcibly redeleteHangedFileInterval
    fastFailIfNoBufferInStorePool osPageCacheBusyTimeOutMills bitMapLengthConsumeQueueExt
    """.split()
)
"""Keys of Java's configuration about threads, buffers, files in use and the JVM: accepted, noted, without effect."""

NOT_BUILT = frozenset(
    """
    allAckInSyncStateSet brokerFastFailureEnable consumerFallbehindThreshold consumerOffsetUpdateVersionStep
    controllerAddr delayOffsetUpdateVersionStep disableConsumeIfConsumerReadSlowly
    disappearTimeAfterStart enableAutoInSyncReplicas enableCompaction enableLmq
    enableMultiDispatch enableScheduleAsyncDeliver enableSlaveActingMaster
    flushCommitLogTimed
    haFlowControlEnable haHousekeepingInterval haMasterAddress haMaxGapNotInSync haSendHeartbeatInterval
    haSlaveFallbehindMax haTransferBatchSize mappedFileSizeTimerLog
    maxHaTransferByteInSecond minInSyncReplicas recallMessageEnable reviveQueueNum
    slaveTimeout timerCongestNumEachSlot timerFlushIntervalMs
    timerMaxDelaySec timerPrecisionMs timerRollWindowSlot timerWheelEnable
    waitTimeMillsInHeartbeatQueue waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue
    """.split()
)
"""Keys of parts that are not built yet: accepted, with one note that they are ignored."""

PROMISES = {
    "brokerRole": ("ASYNC_MASTER", "SYNC_MASTER"),
    "inSyncReplicas": ("1",),
    "duplicationEnable": ("false",),
    "enableControllerMode": ("false",),
    "enableDLegerCommitLog": ("false",),
    "storeType": ("default",),
}
"""Keys that promise something, and the values whose promise is kept."""


def refuse_unsupported(
    properties: Mapping[str, str], *, source: str, promises: Mapping[str, tuple[str, ...]] = PROMISES
) -> None:
    """Stop at a configuration whose promise could not be kept if its key were ignored.

    Raises:
        SettingsError: a key asks for what is not built.
    """
    for key, supported in promises.items():
        value = properties.get(key, supported[0])
        if value not in supported:
            raise SettingsError(f"{source}: {key}={value} is not supported yet: use {' or '.join(supported)}")
