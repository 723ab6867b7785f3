"""This module is the table of RocketMQ's configuration names that have no setting here, and why.

Apache's broker takes some five hundred names and ignores any other without a word. Sluice knows all
that Apache RocketMQ 4.x and 5.5 know, so that an existing file can be used as it is. A name with a
meaning is read into the setting of that meaning (`foreign` in store.py and processes.py). The rest
stands here, in two tables:

* INERT: accepted, reported once as a warning, without effect. Ignoring it breaks no promise.
* FIXED: only the values listed are accepted. Ignoring another value would lose data or protection
  that the file asks for, so it is an error.

A name in none of them is an error: it is most likely a typing mistake.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Fixed(NamedTuple):
    """A name that may only say what Sluice does anyway."""

    values: tuple[str, ...]
    reason: str


_NO_ACCESS = "access control is not in this version: the broker would run unprotected"
_NO_REPLICAS = "replication is not in this version: one copy is all there is"

_PLAIN_KEY = "a key with a password is not read; decrypt the file, and let nobody else read it"

NAMESERVER_FIXED: Final[dict[str, Fixed]] = {
    "tls.server.keyPassword": Fixed(("",), _PLAIN_KEY),
    "tls.client.keyPassword": Fixed(("",), _PLAIN_KEY),
    "tls.test.mode.enable": Fixed(("false",), "no certificate is made up; name yours"),
}
FIXED: Final[dict[str, Fixed]] = {
    **NAMESERVER_FIXED,
    "aclEnable": Fixed(("false",), _NO_ACCESS),
    "authenticationEnabled": Fixed(("false",), _NO_ACCESS),
    "authorizationEnabled": Fixed(("false",), _NO_ACCESS),
    "inSyncReplicas": Fixed(("1",), _NO_REPLICAS),
    "minInSyncReplicas": Fixed(("1",), _NO_REPLICAS),
    "enableDLegerCommitLog": Fixed(("false",), "there is no DLedger here"),
    "enableControllerMode": Fixed(("false",), "there is no Apache controller here"),
    "storeType": Fixed(("default",), "Sluice reads and writes the file store only"),
    "enableConsumeQueueExt": Fixed(("false",), "the extended queue index is not read"),
    "messageStorePlugIn": Fixed(("",), "plug-ins are Java classes"),
    "readOnlyCommitLogStorePaths": Fixed(("",), "the log lives in one directory"),
}

# Only the place that it has anyway may be named: <storePathRootDir>/commitlog.
COMMIT_LOG_PATH: Final = "storePathCommitLog"

_TLS_INERT: Final = {
    "a certificate that is shown is always verified, and there is no second file to read": """
        tls.client.authServer tls.config.file tls.server.authClient
    """,
}

_INERT_BY_REASON: Final = _TLS_INERT | {
    "one event loop does this work: there is no thread pool and no queue in front of one": """
        ackMessageThreadPoolNums ackThreadPoolQueueCapacity adminBrokerThreadPoolNums
        adminBrokerThreadPoolQueueCapacity asyncSendEnable
        batchDispatchRequestThreadPoolNums brokerFastFailureEnable clientAsyncSemaphoreValue
        clientCallbackExecutorThreads clientManageThreadPoolNums
        clientManagerThreadPoolQueueCapacity clientOnewaySemaphoreValue clientWorkerThreads
        compactionThreadNum consumerManageThreadPoolNums
        consumerManagerThreadPoolQueueCapacity defaultThreadPoolNums disableCallbackExecutor
        disableNettyWorkerGroup dispatchCqThreads enableFastChannelEventProcess
        endTransactionPoolQueueCapacity endTransactionThreadPoolNums heartbeatThreadPoolNums
        heartbeatThreadPoolQueueCapacity litePullMessageThreadPoolNums
        litePullThreadPoolQueueCapacity loadBalanceProcessorThreadPoolNums
        loadBalanceThreadPoolQueueCapacity maxAsyncPutMessageRequests
        processReplyMessageThreadPoolNums pullMessageThreadPoolNums
        pullThreadPoolQueueCapacity putMessageFutureThreadPoolNums
        putThreadPoolQueueCapacity queryMessageThreadPoolNums queryThreadPoolQueueCapacity
        recoverThreadPoolNums replyThreadPoolQueueCapacity sendMessageThreadPoolNums
        sendThreadPoolQueueCapacity serverAsyncSemaphoreValue serverCallbackExecutorThreads
        serverNettyWorkerGroupEnable serverOnewaySemaphoreValue serverSelectorThreads
        serverWorkerThreads timerGetMessageThreadNum timerPutMessageThreadNum
        timerReputServiceCorePoolSize timerReputServiceMaxPoolSize
        timerReputServiceQueueCapacity transactionCheckRocksdbCoreThreads
        transactionCheckRocksdbMaxThreads useEpollNativeSelector waitTimeMillsInAckQueue
        waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue
        waitTimeMillsInLitePullQueue waitTimeMillsInPullQueue waitTimeMillsInSendQueue
        waitTimeMillsInTransactionQueue
    """,
    "Sluice keeps no data in RocksDB": """
        bottomMostCompressionTypeForConsumeQueueStore cleanRocksDBDirtyCQIntervalMin
        combineAssignOffsetCQType combineCQEnableCheckSelf combineCQLoadingCQTypes
        combineCQMaxExtraSearchCommitLogFiles combineCQPreferCQType
        combineCQUseRocksdbForLmq configManagerVersion enableRocksDBLog indexRocksDBEnable
        iteratorWhenUseRocksdbConsumeQueue maxRocksDBIndexQueryDays memTableFlushIntervalMs
        realTimePersistRocksDBConfig rocksdbCQDoubleWriteEnable rocksdbCompressionType
        rocksdbFlushWalFrequency rocksdbWalFileRollingThreshold statRocksDBCQIntervalSec
        timerRocksDBEnable timerRocksDBPrecisionMs timerRocksDBRollIntervalHours
        timerRocksDBRollMaxTps timerRocksDBRollRangeHours timerRocksDBStopScan
        timerRocksDBTimeExpiredMaxTps transRocksDBEnable
        transactionCheckRocksdbQueueCapacity useSeparateStorePathForRocksdbCQ
        useSingleRocksDBForAllConfigs
    """,
    "light topics are not in this version": """
        enableLiteEventMode enableLitePopLog enableLmq enableLmqQuota enableLmqStats
        enableMultiDispatch liteEventCheckInterval liteEventFullDispatchDelayTime
        liteEventFullDispatchDelayTimeForWildcardGroup liteLagCountMetricsEnable
        liteLagLatencyCollectEnable liteLagLatencyMetricsEnable liteLagLatencyTopK
        litePullMessageEnable liteSubscriptionCheckInterval
        liteSubscriptionCheckTimeoutMills liteTtlCheckInterval maxClientEventCount
        maxLiteSubscriptionCount maxLmqConsumeQueueNum minLiteTTl
    """,
    "POP consumption has no such choice here": """
        appendAckAsync appendCkAsync defaultMessageRequestMode defaultPopShareQueueNum
        enableNotifyAfterPopOrderLockRelease enableNotifyBeforePopCalculateLag
        enablePopBatchAck enablePopBufferMerge enablePopLog enablePopMessageThreshold
        enablePopMetrics enableRetryTopicV2 enableSkipLongAwaitingAck
        initPopOffsetByCheckMsgInMem loadBalancePollNameServerInterval
        maxMessageFilterNumForNotification maxPopPollingSize popCkMaxBufferSize
        popCkOffsetMaxQueueSize popCkStayBufferTime popCkStayBufferTimeOut
        popConsumerFSServiceInit popConsumerKVServiceEnable popConsumerKVServiceInit
        popConsumerKVServiceLog popFromRetryProbability popFromRetryProbabilityForPriority
        popLongPollingForceNotifyInterval
        popPollingMapExpireTimeSeconds popPollingMapSize popPollingSize
        popResponseReturnActualRetryTopic popReviveConcurrency popReviveMaxAttemptTimes
        popReviveMaxReturnSizePerRead popReviveSkipIfGroupAbsent priorityOrderAsc
        retrieveMessageFromPopRetryTopicV1 reviveAckWaitMs reviveInterval reviveMaxSlow
        reviveQueueNum reviveScanTime serverLoadBalancerEnable skipWhenCKRePutReachMaxTimes
        useMessageFilterForNotification useSeparateRetryQueue
    """,
    "statistics and metrics are not set up by these": """
        accountStatsEnable accountStatsPrintZeroValues autoDeleteUnusedStats
        channelExpiredTimeout commercialBaseCount commercialBigCount commercialEnable
        commercialSizePerMsg commercialTimerCount commercialTransCount diskFallRecorded
        enableConnectionMetrics enableDetailStat enableLagAndDlqMetrics
        enableMessageStoreMetrics enableRemotingMetrics enableRequestMetrics
        enableScheduleMessageStats enableStatsMetrics enableTransactionMetrics
        estimateAccumulation isolateLogEnable maxStatsIdleTimeInMinutes
        metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills
        metricLoggingExporterIntervalInMills metricsExportBatchMaxDataPoints
        metricsGrpcExporterHeader metricsGrpcExporterTarget
        metricsInDelta metricsLabel metricsOtelCardinalityLimit
        printChannelGroups printChannelGroupsMinNum regionId
        subscriptionExpiredTimeout timerEnableCheckMetrics timerMetricSmallThreshold traceOn
        transactionMetricFlushInterval
    """,
    "timed messages wait in the log itself: there is no wheel, no timer log, nothing to roll": """
        allowRecallWhenBrokerNotWriteable appendTopicForTimerDeleteKey
        disappearTimeAfterStart mappedFileSizeTimerLog maxDelayTime
        timerColdDataCheckIntervalMs timerCongestNumEachSlot timerEnableRetryUntilSuccess
        timerFlushIntervalMs timerInterceptDelayLevel timerPrecisionMs
        timerProgressLogIntervalMs timerRecallToTimeWheelEnable timerRecallToTimelineEnable
        timerRollWindowSlot timerSkipUnknownError timerStopDequeue timerStopEnqueue
        timerWheelEnable timerWheelSnapshotFlush timerWheelSnapshotIntervalMs
    """,
    "replication is not in this version": """
        allAckInSyncStateSet asyncLearner brokerIP2 checkSyncStateSetPeriod
        duplicationEnable enableAutoInSyncReplicas enableSlaveActingMaster
        haFlowControlEnable haHousekeepingInterval haListenPort haMasterAddress
        haMaxGapNotInSync haMaxTimeSlaveNotCatchup haSendHeartbeatInterval
        haSlaveFallbehindMax haTransferBatchSize maxChecksumRange maxHaTransferByteInSecond
        maxSlaveResendLength offsetCheckInSlave replicasPerDiskPartition slaveReadEnable
        slaveTimeout syncFromLastFile syncMasterFlushOffsetWhenStartup totalReplicas
    """,
    "there is no DLedger and no Apache controller here": """
        brokerContainer brokerElectionPriority brokerHeartbeatInterval
        brokerNotActiveTimeoutMillis cleanOfflineBrokerInterval controllerAddr
        controllerHeartBeatTimeoutMills dLegerGroup dLegerPeers dLegerSelfId
        enableRemoteEscape fetchControllerAddrByDnsLookup forwardTimeout inBrokerContainer
        isBrokerContainer preferredLeaderId sendHeartbeatTimeoutMillis skipPreOnline
        storePathBrokerIdentity storePathDLedgerCommitLog storePathEpochFile
        syncBrokerMemberGroupPeriod syncBrokerMetadataPeriod syncControllerMetadataPeriod
    """,
    "access control is not in this version (and the keys that switch it on are refused)": """
        aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond authConfigPath
        authenticationMetadataProvider authenticationProvider authenticationStrategy
        authenticationWhitelist authorizationMetadataProvider authorizationProvider
        authorizationStrategy authorizationWhitelist clusterName configName
        initAuthenticationUser innerClientAuthenticationCredentials migrateAuthFromV1Enabled
        statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum
        statefulAuthorizationCacheExpiredSecond statefulAuthorizationCacheMaxNum
        userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond
    """,
    "what is in memory is asked of the system; see hot_bytes and cold_read_threads": """
        accessMessageInMemoryHotRatio accessMessageInMemoryMaxRatio cgColdReadThreshold
        coldCtrStrategyEnable coldDataFlowControlEnable coldDataScanEnable
        consumerFallbehindThreshold dataReadAheadEnable disableConsumeIfConsumerReadSlowly
        globalColdReadThreshold sampleCountThreshold sampleSteps usePIDColdCtrStrategy
    """,
    "topics are not compacted": """
        compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
        enableCompaction maxOffsetMapSize
    """,
    "the log is written with pwritev: there is no buffer pool, no mapping to warm or swap": """
        cleanSwapedMapInterval clientPooledByteBufAllocatorEnable commitCommitLogLeastPages
        commitCommitLogThoroughInterval commitIntervalCommitLog
        commitLogForceSwapMapInterval commitLogSwapMapInterval
        commitLogSwapMapReserveFileNum enableRunningFlagsInFlush
        fastFailIfNoBufferInStorePool flushCommitLogTimed flushLeastPagesWhenWarmMapedFile
        logicQueueForceSwapMapInterval logicQueueSwapMapInterval
        logicQueueSwapMapReserveFileNum mappedFileSwapEnable osPageCacheBusyTimeOutMills
        putConsumeQueueDataByFileChannel serverPooledByteBufAllocatorEnable
        sharedByteBufferNum transferMsgByHeap transientStorePoolEnable
        transientStorePoolSize wakeCommitWhenPutMessage wakeFlushWhenPutMessage
        warmMapedFileEnable writeWithoutMmap
    """,
    "the event loop is the only writer: there is no lock to choose": """
        debugLockEnable lockInStrictMode spinLockCollisionRetreatOptimalDegree
        topicQueueLockNum useABSLock useReentrantLockWhenPutMessage
    """,
    "the broker's own connections to others are not set up by these": """
        channelNotActiveInterval clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout
        clientSocketRcvBufSize clientSocketSndBufSize connectTimeoutMillis
        enableReconnectForGoAway enableShutdownGracefully maxReconnectIntervalTimeSeconds
        scanAvailableNameSrv serverSocketRcvBufSize serverSocketSndBufSize
        shutdownWaitTimeSeconds socksProxyConfig writeBufferHighWaterMark
        writeBufferLowWaterMark
    """,
    "nameservers are those of namesrvAddr; the broker registers whole, on change and on time": """
        compatibleWithOldNameSrv compressedRegister enableRegisterProducer
        enableSingleTopicRegister enableSplitMetadata enableSplitRegistration
        fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer fetchNamesrvAddrInterval
        forceRegister splitMetadataSize splitRegistrationSize updateNameServerAddrPeriod
    """,
    "indexes are written with the append, checkpointed, and checked when the store opens": """
        bitMapLengthConsumeQueueExt checkCRCOnRecover checkCommitLogOffsetOnRecover
        commitLogRecoverMaxNum consumerOffsetUpdateVersionStep
        correctLogicMinOffsetForceInterval correctLogicMinOffsetSleepInterval
        delayOffsetUpdateVersionStep deleteConsumeQueueFilesInterval dispatchCqCacheNum
        dispatchFromSenderThread enableAcceleratedRecovery enableAsyncReput
        enableBuildConsumeQueueConcurrently enableCleanExpiredOffset
        enableLogConsumeQueueRepeatedlyBuildWhenRecover flushConsumeQueueLeastPages
        flushConsumeQueueThoroughInterval flushConsumerOffsetHistoryInterval
        flushDelayOffsetInterval flushIntervalConsumeQueue forceVerifyPropCRC
        indexFileReadEnable indexFileWriteEnable mapedFileSizeConsumeQueueExt
        mappedFileSizeConsumeQueueExt maxConsumeQueueScan maxRecoveryCommitlogFiles
        messageIndexSafe persistConsumerOffsetIncrementally putMsgIndexHightWater
        recheckReputOffsetFromCq recoverConcurrently searchBcqByCacheEnable
        travelCqFileNumWhenGetMessage
    """,
    "the store's files have fixed places under storePathRootDir": """
        abortFile brokerConfigPath configBlackList rocketmqHome storeCheckpoint
        storePathConsumeQueue storePathConsumerQueue storePathIndex
    """,
    "whole files are deleted as soon as they may be, one after another": """
        cleanResourceInterval deleteCommitLogFilesInterval deleteFileBatchMax
        destroyMapedFileIntervalForcibly logicalDiskSpaceCleanForciblyThreshold
        maxBatchDeleteFilesNum redeleteHangedFileInterval
    """,
    "filters are computed when a message is read": """
        enableCalcFilterBitMap expectConsumerNumUseFilter filterDataCleanTimeSpan
        filterServerNums filterSupportRetry maxErrorRateOfBloomFilter maxFilterMessageSize
    """,
    "nothing in this version would change by it": """
        autoMessageVersionOnTopicLen broadcastOffsetExpireMaxSecond
        broadcastOffsetExpireSecond brokerTopicEnable checkTransactionMessageEnable
        clearRetryTopicWhenDeleteTopic clusterTopicEnable defaultQueryMaxNum enableBatchPush
        enableBroadcastOffsetStore enableCreateSysGroup enableMixedMessageType
        enableNetWorkFlowControl enableScheduleAsyncDeliver highSpeedMode maxTopicLength
        notifyConsumerIdsChangedEnable pullBatchMaxMessageCount putMessageTimeout
        readUnCommitted realTimeNotifyConsumerChange rejectPullConsumerEnable
        scheduleAsyncDeliverMaxPendingLimit scheduleAsyncDeliverMaxResendNum2Blocked
        startAcceptSendRequestTimeStamp storeReplyMessageEnable syncFlushTimeout
        transWriteOriginTransHalfEnable transactionOpBatchInterval transactionOpMsgMaxSize
        useStaticSubscription validateSystemTopicWhenUpdateTopic
    """,
}

_NAMESERVER_INERT_BY_REASON: Final = _TLS_INERT | {
    "one event loop does this work: there is no thread pool to size": """
        clientRequestThreadPoolNums clientRequestThreadPoolQueueCapacity defaultThreadPoolNums
        defaultThreadPoolQueueCapacity unRegisterBrokerQueueCapacity serverWorkerThreads
        serverCallbackExecutorThreads serverSelectorThreads serverOnewaySemaphoreValue
        serverAsyncSemaphoreValue serverNettyWorkerGroupEnable serverPooledByteBufAllocatorEnable
        useEpollNativeSelector serverSocketSndBufSize serverSocketRcvBufSize
        writeBufferHighWaterMark writeBufferLowWaterMark enableShutdownGracefully
        shutdownWaitTimeSeconds
    """,
    "the nameserver's one file has a fixed place under its directory": """
        configBlackList configStorePath kvConfigPath rocketmqHome
    """,
    "nothing in this version would change by it": """
        clusterTest enableControllerInNamesrv needWaitForService productEnvName
        waitSecondsForService controllerDLegerGroup controllerDLegerPeers controllerDLegerSelfId
    """,
}


def _by_name(by_reason: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names.split()}


BROKER_INERT: Final = _by_name(_INERT_BY_REASON)
NAMESERVER_INERT: Final = _by_name(_NAMESERVER_INERT_BY_REASON)
