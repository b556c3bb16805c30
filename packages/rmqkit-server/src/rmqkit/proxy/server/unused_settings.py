"""Settings of Apache's 5.5 proxy (``ProxyConfig``) that have no effect here; see `rmqkit.unused`.

Together with the settings that have an effect (`rmqkit.proxy.server.server`, `rmqkit.proxy.remote.users`) and
`RENAMED`, these are all keys of ``rmq-proxy.json``. A test compares them with Apache's class. Defaults that depend on
the machine are the values for two processors.
"""

from __future__ import annotations

from rmqkit.unused import Unused, unused_type

__all__ = ["RENAMED", "UNUSED", "UnusedSettings"]

RENAMED = {
    "tlsTestModeEnable": "tls.test.mode.enable",
    "tlsKeyPath": "tls.server.keyPath",
    "tlsKeyPassword": "tls.server.keyPassword",
    "tlsCertPath": "tls.server.certPath",
}
"""Keys of settings that have another name in servers of the remoting protocol."""

UNUSED = (
    Unused(
        "the name of a proxy is its address",
        """
        localServeAddr= proxyClusterName=DefaultCluster proxyName= regionId= useEndpointPortFromRequest=false
        """,
    ),
    Unused("namesrvAddr sets the name servers", "namesrvDomain= namesrvDomainSubgroup="),
    Unused("brokers can serve gRPC themselves", "brokerConfigPath="),
    Unused(
        "proxies do not exchange their clients, because brokers know all clients",
        """
        heartbeatSyncerThreadPoolNums=4 heartbeatSyncerThreadPoolQueueCapacity=100 heartbeatSyncerTopicClusterName=
        heartbeatSyncerTopicName=DefaultHeartBeatSyncerTopic
        """,
    ),
    Unused(
        "one event loop does the work: there are no pools, and queues are bounded by lanes",
        """
        consumerProcessorThreadPoolNums=2 consumerProcessorThreadPoolQueueCapacity=10000 enableGrpcEpoll=false
        grpcBossLoopNum=1 grpcClientManagerThreadPoolNums=2 grpcClientManagerThreadQueueCapacity=10000
        grpcConsumerThreadPoolNums=2 grpcConsumerThreadQueueCapacity=10000 grpcProducerThreadPoolNums=2
        grpcProducerThreadQueueCapacity=10000 grpcRouteThreadPoolNums=2 grpcRouteThreadQueueCapacity=10000
        grpcThreadPoolNums=20 grpcThreadPoolQueueCapacity=100000 grpcTransactionThreadPoolNums=2
        grpcTransactionThreadQueueCapacity=10000 grpcWorkerLoopNum=4 metadataThreadPoolNums=3
        metadataThreadPoolQueueCapacity=100000 producerProcessorThreadPoolNums=2
        producerProcessorThreadPoolQueueCapacity=10000 remotingDefaultThreadPoolNums=8
        remotingDefaultThreadPoolQueueCapacity=50000 remotingHeartbeatThreadPoolNums=4
        remotingHeartbeatThreadPoolQueueCapacity=50000 remotingPullMessageThreadPoolNums=8
        remotingPullThreadPoolQueueCapacity=50000 remotingSendMessageThreadPoolNums=8
        remotingSendThreadPoolQueueCapacity=10000 remotingTopicRouteThreadPoolNums=4
        remotingTopicRouteThreadPoolQueueCapacity=50000 remotingUpdateOffsetThreadPoolNums=8
        remotingUpdateOffsetThreadPoolQueueCapacity=10000 remotingWaitTimeMillsInDefaultQueue=3000
        remotingWaitTimeMillsInHeartbeatQueue=31000 remotingWaitTimeMillsInPullQueue=5000
        remotingWaitTimeMillsInSendQueue=3000 remotingWaitTimeMillsInTopicRouteQueue=3000
        remotingWaitTimeMillsInUpdateOffsetQueue=3000 renewMaxThreadPoolNums=4 renewThreadPoolNums=2
        renewThreadPoolQueueCapacity=300 returnHandleGroupThreadPoolNums=2 rocketmqMQClientNum=6
        topicRouteServiceThreadPoolNums=2 topicRouteServiceThreadPoolQueueCapacity=5000
        transactionHeartbeatThreadPoolNums=20 transactionHeartbeatThreadPoolQueueCapacity=200
        """,
    ),
    Unused(
        "bounds of messages are Apache's defaults",
        """
        enableMessageBodyEmptyCheck=true grpcMaxInboundMessageSize=136314880 maxDelayTimeMills=86400000
        maxMessageGroupSize=64 maxMessageSize=4194304 maxTransactionRecoverySecond=3600 maxUserPropertySize=16384
        userPropertyMaxNum=128
        """,
    ),
    Unused("the type of a topic is always checked", "enableTopicMessageTypeCheck=true"),
    Unused(
        "receive times and the settings sent to SDKs are Apache's defaults",
        """
        defaultInvisibleTimeMills=60000 grpcClientConsumerLongPollingBatchSize=32
        grpcClientConsumerMaxLongPollingTimeoutMillis=20000 grpcClientConsumerMinLongPollingTimeoutMillis=5000
        grpcClientProducerBackoffInitialMillis=10 grpcClientProducerBackoffMaxMillis=1000
        grpcClientProducerBackoffMultiplier=2 grpcClientProducerMaxAttempts=3 invisibleTimeMillisWhenClear=1000
        longPollingReserveTimeInMillis=100 maxInvisibleTimeMills=43200000 minInvisibleTimeMillsForRecv=10000
        """,
    ),
    Unused(
        "clients expire after Apache's default times, and a stop waits 10 s for calls",
        """
        channelExpiredInSeconds=60 channelExpiredTimeout=120000 contextExpiredInSeconds=30
        grpcClientIdleTimeMills=120000 grpcProxyRelayRequestTimeoutInSeconds=5 grpcShutdownTimeSeconds=30
        """,
    ),
    Unused(
        "handles of push consumers are always renewed, by Apache's default times",
        """
        enableProxyAutoRenew=true lockTimeoutMsInHandleGroup=3000 maxRenewRetryTimes=3 renewAheadTimeMillis=10000
        renewMaxTimeMillis=10800000 renewSchedulePeriodMillis=5000
        """,
    ),
    Unused(
        "transactions are kept as long as brokers may check them",
        """
        transactionDataExpireMillis=30000 transactionDataExpireScanPeriodMillis=10000 transactionDataMaxNum=15
        transactionDataMaxWaitClearMillis=30000 transactionHeartbeatBatchNum=100 transactionHeartbeatPeriodSecond=20
        """,
    ),
    Unused(
        "answers of brokers and name servers are cached for 20 s, and for 300 s while they do not answer",
        """
        aclCacheExpiredSeconds=300 aclCacheMaxNum=20000 aclCacheRefreshSeconds=20
        subscriptionGroupConfigCacheExpiredSeconds=300 subscriptionGroupConfigCacheMaxNum=20000
        subscriptionGroupConfigCacheRefreshSeconds=20 topicConfigCacheExpiredSeconds=300 topicConfigCacheMaxNum=20000
        topicConfigCacheRefreshSeconds=20 topicRouteServiceCacheExpiredSeconds=300 topicRouteServiceCacheMaxNum=20000
        topicRouteServiceCacheRefreshSeconds=20 userCacheExpiredSeconds=300 userCacheMaxNum=20000
        userCacheRefreshSeconds=20
        """,
    ),
    Unused("brokers decide how messages are delayed", "delayLevelTable={} messageDelayLevel= useDelayLevel=false"),
    Unused("certificates are read again when their files change", "tlsCertWatchIntervalMs=3600000"),
    Unused(
        "innerClientAuthenticationCredentials signs the requests of the proxy",
        "enableACL=false enableAclRpcHookForClusterMode=false",
    ),
    Unused(
        "brokers provide users and policies: see authenticationEnabled and authorizationEnabled",
        """
        authConfigPath= authenticationMetadataProvider= authenticationProvider= authenticationStrategy=
        authenticationWhitelist= authorizationMetadataProvider= authorizationProvider= authorizationStrategy=
        authorizationWhitelist= clusterName= configName= initAuthenticationUser= migrateAuthFromV1Enabled=false
        statefulAuthenticationCacheExpiredSecond=60 statefulAuthenticationCacheMaxNum=10000
        statefulAuthorizationCacheExpiredSecond=60 statefulAuthorizationCacheMaxNum=10000
        """,
    ),
    Unused(
        "metrics are for Prometheus: see metricsExporterType",
        """
        metricCollectorAddress= metricCollectorMode=off metricGrpcExporterIntervalInMills=60000
        metricGrpcExporterTimeOutInMills=3000 metricLoggingExporterIntervalInMills=10000 metricsGrpcExporterHeader=
        metricsGrpcExporterTarget= metricsInDelta=false traceOn=false
        """,
    ),
    Unused(
        "the log reports calls that hang",
        "enablePrintJstack=true printJstackInMillis=60000 printThreadPoolStatusInMillis=3000",
    ),
    Unused(
        "remoting and gRPC have separate ports",
        "enableRemotingLocalProxyGrpc=true localProxyConnectTimeoutMs=3000",
    ),
    Unused(
        "clients retry when a broker is slow",
        "detectInterval=2000 detectTimeout=200 sendLatencyEnable=false startDetectorEnable=false",
    ),
    Unused(
        "names of lite topics have at most 64 bytes at every broker",
        "maxLiteTopicSize=64",
    ),
    Unused("acks of one call are always sent together", "enableBatchAck=false"),
    Unused(
        "only proxies before 5.4.0 have this setting",
        """
        aclConfigCacheExpiredSeconds= aclConfigCacheMaxNum= aclConfigCacheRefreshSeconds=
        consumerProxyForwardThreadPoolNums= consumerProxyForwardThreadPoolQueueCapacity=
        grpcClientChannelMaxInactiveTimeMills= producerProxyForwardThreadPoolNums=
        producerProxyForwardThreadPoolQueueCapacity= remotingConsumerThreadPoolNums= remotingProducerThreadPoolNums=
        """,
    ),
)

UnusedSettings = unused_type("UnusedSettings", UNUSED, __name__)
