"""Settings of Apache's 5.5 broker that have no effect here; see `rmqkit.unused`.

Together with the settings that have an effect (`rmqkit.broker.settings`, `rmqkit.store.settings`) they are all settings
in the answers of 5.4 and 5.5 brokers to GET_BROKER_CONFIG. A test compares them with such an answer. Defaults that
depend on the machine are the defaults for two processors.
"""

from __future__ import annotations

from rmqkit.unused import Unused, unused_type

__all__ = ["UNUSED", "UnusedSettings"]


UNUSED = (
    Unused(
        "storage engines other than files are not built",
        """
        configManagerVersion=v1 indexRocksDBEnable=false messageStorePlugIn= popConsumerKVServiceEnable=false
        rocksdbCQDoubleWriteEnable=false storeType=default timerRocksDBEnable=false timerWheelSnapshotFlush=false
        transRocksDBEnable=false transWriteOriginTransHalfEnable=true
        """,
        must_stay=True,
    ),
    Unused(
        "the controller, DLedger and broker containers are not built",
        """
        duplicationEnable=false enableControllerMode=false enableDLegerCommitLog=false isBrokerContainer=false
        isInBrokerContainer=false
        """,
        must_stay=True,
    ),
    Unused(
        "namesrvAddr sets the name servers",
        """
        fetchControllerAddrByDnsLookup=false fetchNameSrvAddrByDnsLookup=false fetchNamesrvAddrByAddressServer=false
        """,
        must_stay=True,
    ),
    Unused(
        "users and policies: see authenticationEnabled and authorizationEnabled",
        """
        aclEnable=false
        """,
        must_stay=True,
    ),
    Unused(
        "tls.enable encrypts outgoing connections",
        """
        useTLS=false
        """,
        must_stay=True,
    ),
    Unused(
        "timed messages are always accepted and delivered",
        """
        timerStopDequeue=false timerStopEnqueue=false
        """,
        must_stay=True,
    ),
    Unused(
        "retry topics have one kind of queue",
        """
        useSeparateRetryQueue=false
        """,
        must_stay=True,
    ),
    Unused(
        "the broker's own topics are not changed by requests",
        """
        validateSystemTopicWhenUpdateTopic=true
        """,
        must_stay=True,
    ),
    Unused(
        "counters start at 0 when the broker starts",
        """
        metricsInDelta=false
        """,
        must_stay=True,
    ),
    Unused(
        "Apache's 5.4.0 broker does not read it, either",
        """
        cleanOfflineBrokerInterval=30000 cleanSwapedMapInterval=300000 commitLogForceSwapMapInterval=43200000
        commitLogSwapMapInterval=3600000 commitLogSwapMapReserveFileNum=100 dispatchCqCacheNum=4096 dispatchCqThreads=10
        dispatchFromSenderThread=false enableAsyncReput=true enableCleanExpiredOffset=false
        flushConsumerOffsetHistoryInterval=60000 highSpeedMode=false logicQueueForceSwapMapInterval=43200000
        logicQueueSwapMapInterval=3600000 logicQueueSwapMapReserveFileNum=20 mappedFileSwapEnable=true
        maxBatchDeleteFilesNum=50 maxReconnectIntervalTimeSeconds=60 maxRecoveryCommitlogFiles=30
        maxSlaveResendLength=268435456 maxTopicLength=127 pullBatchMaxMessageCount=160 putMessageTimeout=8000
        putMsgIndexHightWater=600000 serverSocketBacklog=1024 timerInterceptDelayLevel=false
        """,
    ),
    Unused(
        "one event loop answers requests, so there are no thread pools",
        """
        ackMessageThreadPoolNums=16 ackThreadPoolQueueCapacity=100000 adminBrokerThreadPoolNums=16
        adminBrokerThreadPoolQueueCapacity=10000 asyncSendEnable=true batchDispatchRequestThreadPoolNums=16
        brokerFastFailureEnable=true clientAsyncSemaphoreValue=65535 clientCallbackExecutorThreads=2
        clientManageThreadPoolNums=32 clientManagerThreadPoolQueueCapacity=1000000 clientOnewaySemaphoreValue=65535
        clientWorkerThreads=4 consumerManageThreadPoolNums=32 consumerManagerThreadPoolQueueCapacity=1000000
        enableFastChannelEventProcess=false enableNetWorkFlowControl=false endTransactionPoolQueueCapacity=100000
        endTransactionThreadPoolNums=12 heartbeatThreadPoolNums=2 heartbeatThreadPoolQueueCapacity=50000
        litePullMessageThreadPoolNums=20 litePullThreadPoolQueueCapacity=100000 loadBalanceProcessorThreadPoolNums=32
        loadBalanceThreadPoolQueueCapacity=100000 maxAsyncPutMessageRequests=5000 osPageCacheBusyTimeOutMills=1000
        processReplyMessageThreadPoolNums=20 pullMessageThreadPoolNums=20 pullThreadPoolQueueCapacity=100000
        putMessageFutureThreadPoolNums=2 putThreadPoolQueueCapacity=10000 queryMessageThreadPoolNums=10
        queryThreadPoolQueueCapacity=20000 recoverThreadPoolNums=32 replyThreadPoolQueueCapacity=10000
        sendMessageThreadPoolNums=2 sendThreadPoolQueueCapacity=10000 serverAsyncSemaphoreValue=64
        serverCallbackExecutorThreads=0 serverNettyWorkerGroupEnable=true serverOnewaySemaphoreValue=256
        serverSelectorThreads=3 serverWorkerThreads=8 timerEnableDisruptor=false timerGetMessageThreadNum=3
        timerPutMessageThreadNum=3 transferMsgByHeap=true waitTimeMillsInAckQueue=3000
        waitTimeMillsInAdminBrokerQueue=5000 waitTimeMillsInHeartbeatQueue=31000 waitTimeMillsInLitePullQueue=5000
        waitTimeMillsInPullQueue=5000 waitTimeMillsInSendQueue=200 waitTimeMillsInTransactionQueue=3000
        """,
    ),
    Unused(
        "Netty's sockets and buffers, and how Java's client keeps connections",
        """
        channelNotActiveInterval=60000 clientChannelMaxIdleTimeSeconds=120 clientCloseSocketIfTimeout=true
        clientPooledByteBufAllocatorEnable=false clientSocketRcvBufSize=0 clientSocketSndBufSize=0
        connectTimeoutMillis=3000 disableCallbackExecutor=false disableNettyWorkerGroup=false
        enableReconnectForGoAway=true isScanAvailableNameSrv=true serverChannelMaxIdleTimeSeconds=120
        serverPooledByteBufAllocatorEnable=true serverSocketRcvBufSize=0 serverSocketSndBufSize=0
        shutdownWaitTimeSeconds=30 socksProxyConfig={} useEpollNativeSelector=false writeBufferHighWaterMark=0
        writeBufferLowWaterMark=0
        """,
    ),
    Unused(
        "locks, memory maps and the page cache in Java's store",
        """
        accessMessageInMemoryHotRatio=26 bitMapLengthConsumeQueueExt=64 dataReadAheadEnable=true debugLockEnable=false
        fastFailIfNoBufferInStorePool=false flushLeastPagesWhenWarmMapedFile=4096 maxConsumeQueueScan=20000
        putConsumeQueueDataByFileChannel=true sampleCountThreshold=5000 sampleSteps=32 searchBcqByCacheEnable=true
        sharedByteBufferNum=16 spinLockCollisionRetreatOptimalDegree=1000 topicQueueLockNum=32
        travelCqFileNumWhenGetMessage=1 useABSLock=false useReentrantLockWhenPutMessage=true writeWithoutMmap=false
        """,
    ),
    Unused(
        "the store has its own rules for flushing, recovery, checking and deleting, and always keeps the index",
        """
        commitLogRecoverMaxNum=10 consumerOffsetUpdateVersionStep=500 correctLogicMinOffsetForceInterval=300000
        correctLogicMinOffsetSleepInterval=1 delayOffsetUpdateVersionStep=200 deleteCommitLogFilesInterval=100
        deleteConsumeQueueFilesInterval=100 destroyMapedFileIntervalForcibly=120000 diskFallRecorded=true
        enableAcceleratedRecovery=false enableBuildConsumeQueueConcurrently=false
        enableLogConsumeQueueRepeatedlyBuildWhenRecover=false enableRunningFlagsInFlush=false flushCommitLogTimed=true
        indexFileReadEnable=true indexFileWriteEnable=true logicalDiskSpaceCleanForciblyThreshold=0.8
        maxChecksumRange=1073741824 readUnCommitted=false recheckReputOffsetFromCq=false recoverConcurrently=false
        redeleteHangedFileInterval=120000 replicasPerDiskPartition=1 wakeCommitWhenPutMessage=true
        wakeFlushWhenPutMessage=false checkCommitLogOffsetOnRecover=false correctMinOffsetMadviseEnable=false
        maxCheckMessageReuseBufferSize=1048576 persistConsumerOffsetIncrementally=false
        """,
    ),
    Unused(
        "RocksDB and combined queues, which are not used here",
        """
        bottomMostCompressionTypeForConsumeQueueStore=zstd cleanRocksDBDirtyCQIntervalMin=60
        combineAssignOffsetCQType=default combineCQEnableCheckSelf=false combineCQLoadingCQTypes=default;defaultRocksDB
        combineCQMaxExtraSearchCommitLogFiles=3 combineCQPreferCQType=default enableRocksDBLog=false
        maxRocksDBIndexQueryDays=7 memTableFlushIntervalMs=3600000 realTimePersistRocksDBConfig=true
        rocksdbCompressionType=lz4 rocksdbFlushWalFrequency=1024 rocksdbWalFileRollingThreshold=1073741824
        statRocksDBCQIntervalSec=10 timerRecallToTimeWheelEnable=true timerRecallToTimelineEnable=true
        timerRocksDBPrecisionMs=1000 timerRocksDBRollIntervalHours=1 timerRocksDBRollMaxTps=8000.0
        timerRocksDBRollRangeHours=2 timerRocksDBStopScan=false timerRocksDBTimeExpiredMaxTps=200000.0
        useSingleRocksDBForAllConfigs=false
        combineCQUseRocksdbForLmq=false iteratorWhenUseRocksdbConsumeQueue=true popRocksdbBlockCacheSize=268435456
        popRocksdbWriteBufferSize=33554432 rocksdbCQSelectiveDoubleWriteEnable=false
        rocksdbMaxSizeAmplificationPercent=25 transactionCheckRocksdbCoreThreads=2 transactionCheckRocksdbMaxThreads=5
        transactionCheckRocksdbQueueCapacity=2000 useSeparateStorePathForRocksdbCQ=false
        """,
    ),
    Unused(
        "compaction is not supported: `cleanup.policy=COMPACTION` is refused",
        """
        compactionCqMappedFileSize=10485760 compactionMappedFileSize=104857600 compactionScheduleInternal=900000
        compactionThreadNum=6 enableCompaction=true maxOffsetMapSize=104857600
        """,
    ),
    Unused(
        "POP always keeps its check points in the log",
        """
        appendAckAsync=false appendCkAsync=false enableNotifyAfterPopOrderLockRelease=true enablePopBatchAck=false
        enablePopLog=false enableSkipLongAwaitingAck=false initPopOffsetByCheckMsgInMem=true
        popCkOffsetMaxQueueSize=20000 popCkStayBufferTime=10000 popCkStayBufferTimeOut=3000
        popConsumerFSServiceInit=true popConsumerKVServiceInit=false popConsumerKVServiceLog=false
        popLongPollingForceNotifyInterval=800 popPollingMapExpireTimeSeconds=600 popPollingMapSize=100000
        popReviveConcurrency=32 popReviveMaxAttemptTimes=16 popReviveMaxReturnSizePerRead=16384
        retrieveMessageFromPopRetryTopicV1=true reviveAckWaitMs=180000 reviveInterval=1000 reviveMaxSlow=3
        reviveScanTime=10000 skipWhenCKRePutReachMaxTimes=false popOrderLockTimerTickMs=100
        popOrderLockTimerTicksPerWheel=512 popReviveSkipIfGroupAbsent=true
        """,
    ),
    Unused(
        "threads, checks and retries of Java's timer; delayed messages are delivered in order",
        """
        appendTopicForTimerDeleteKey=false enableScheduleAsyncDeliver=false scheduleAsyncDeliverMaxPendingLimit=2000
        scheduleAsyncDeliverMaxResendNum2Blocked=3 timerCheckMetricsWhen=05 timerColdDataCheckIntervalMs=60000
        timerEnableCheckMetrics=true timerEnableRetryUntilSuccess=false timerMetricSmallThreshold=1000000
        timerProgressLogIntervalMs=10000 timerSkipUnknownError=false timerWarmEnable=false
        timerWheelSnapshotIntervalMs=10000 timerReputServiceCorePoolSize=6 timerReputServiceMaxPoolSize=6
        timerReputServiceQueueCapacity=10000
        """,
    ),
    Unused(
        "the controller and automatic failover are not supported",
        """
        asyncLearner=false brokerElectionPriority=2147483647 brokerHeartbeatInterval=1000 checkSyncStateSetPeriod=5000
        controllerAddr= controllerHeartBeatTimeoutMills=10000 disappearTimeAfterStart=-1 enableBatchPush=false
        haMaxTimeSlaveNotCatchup=15000 sendHeartbeatTimeoutMillis=1000 syncBrokerMetadataPeriod=5000
        syncControllerMetadataPeriod=10000 syncFromLastFile=false syncMasterFlushOffsetWhenStartup=false
        """,
    ),
    Unused(
        "brokers register changes at once, in one request",
        """
        enableSingleTopicRegister=false enableSplitMetadata=true enableSplitRegistration=false
        fetchNamesrvAddrInterval=10000 forwardTimeout=3000 loadBalancePollNameServerInterval=30000
        splitMetadataSize=2000 splitRegistrationSize=800 syncBrokerMemberGroupPeriod=1000
        updateNameServerAddrPeriod=120000
        """,
    ),
    Unused(
        "there is no flow control for reads of old messages",
        """
        cgColdReadThreshold=3145728 coldCtrStrategyEnable=false coldDataFlowControlEnable=false coldDataScanEnable=false
        globalColdReadThreshold=104857600 usePIDColdCtrStrategy=true
        """,
    ),
    Unused(
        "the page of metrics lists all counters",
        """
        accountStatsEnable=true accountStatsPrintZeroValues=true autoDeleteUnusedStats=true commercialBaseCount=1
        commercialSizePerMsg=4096 enableConnectionMetrics=true enableDetailStat=true enableLagAndDlqMetrics=true
        enableLmqStats=false enableMessageStoreMetrics=true enableNotifyBeforePopCalculateLag=true enablePopMetrics=true
        enableRemotingMetrics=true enableRequestMetrics=true enableScheduleMessageStats=true enableStatsMetrics=true
        enableTransactionMetrics=true estimateAccumulation=true isolateLogEnable=false maxStatsIdleTimeInMinutes=-1
        metricGrpcExporterIntervalInMills=60000 metricGrpcExporterTimeOutInMills=3000
        metricLoggingExporterIntervalInMills=10000 metricsGrpcExporterHeader= metricsGrpcExporterTarget=
        metricsOtelCardinalityLimit=50000 printChannelGroups=false printChannelGroupsMinNum=5 rocketmqHome=
        transactionMetricFlushInterval=10000 metricsExportBatchMaxConcurrent=4 metricsExportBatchMaxDataPoints=1000
        metricsExportBatchSplitEnabled=true metricsExportOtelMemoryMode=IMMUTABLE_DATA
        """,
    ),
    Unused(
        "deletions of several topics or groups are not slowed down",
        "batchDeleteSubscriptionGroupMaxRate=10.0 batchDeleteTopicMaxRate=10.0",
    ),
    Unused(
        "lite topics are served without it",
        """
        enableLiteEventMode=true enableLitePopLog=false liteEventCapacityCacheTtlMs=5000 liteEventCheckInterval=10000
        liteEventFullDispatchDelayTime=10000 liteEventFullDispatchDelayTimeForWildcardGroup=10000
        liteLagLatencyCollectEnable=false liteLagLatencyMetricsEnable=false
        liteLagLatencyTopK=50 maxClientEventCount=100
        """,
    ),
    Unused(
        "tables of clients and groups, and proxies that broadcast",
        """
        broadcastOffsetExpireMaxSecond=300 broadcastOffsetExpireSecond=120 enableBroadcastOffsetStore=true
        enableCreateSysGroup=true enableRegisterProducer=true serverLoadBalancerEnable=true
        subscriptionExpiredTimeout=600000 useStaticSubscription=false
        """,
    ),
)


UnusedSettings = unused_type("UnusedSettings", UNUSED, __name__)
