"""This module is the table of RocketMQ's requests and responses: data for `remoting_schemas.py`.

A row begins at the margin:   NAME who>whom | one sentence
Indented below it, if any:    > fields of the request     < fields of the response
A field is its name, then     !  needed   ?  optional    and its type
                              i  32-bit   l  64-bit   b  true or false
A field without a type is text, and optional unless marked.

The fields are those of the header classes of RocketMQ 5.5.0, in their order on the wire. Fields
that any request may carry are not repeated here: `remoting_schemas.py` lists them.
`nobody`: defined by RocketMQ and served nowhere. `inside`: never on the wire.
"""

from __future__ import annotations

from typing import Final

REQUESTS: Final = """\
SEND_MESSAGE client>broker | Stores one message; long field names, as the Go client sends it.
  > producerGroup! topic! defaultTopic! defaultTopicQueueNums!i queueId!i sysFlag!i
    bornTimestamp!l flag!i properties reconsumeTimes?i unitMode?b batch?b maxReconsumeTimes?i
  < msgId! queueId!i queueOffset!l transactionId batchUniqId recallHandle MSG_REGION TRACE_ON
PULL_MESSAGE client>broker |
  Reads messages of a queue from an offset on; held while there is none and sysFlag asks for it.
  > consumerGroup! topic! liteTopic queueId!i queueOffset!l maxMsgNums!i sysFlag!i
    commitOffset!l suspendTimeoutMillis!l subscription subVersion!l expressionType maxMsgBytes?i
    requestSource?i proxyFrowardClientId
  < suggestWhichBrokerId!l nextBeginOffset!l minOffset!l maxOffset!l offsetDelta?l
    topicSysFlag?i groupSysFlag?i forbiddenType?i
QUERY_MESSAGE client>broker | Finds messages by key or unique key in a span of time.
  > topic! key! maxNum!i beginTimestamp!l endTimestamp!l indexType lastKey _UNIQUE_KEY_QUERY?b
  < indexLastUpdateTimestamp!l indexLastUpdatePhyoffset!l
QUERY_BROKER_OFFSET nobody | Not served by RocketMQ 5.5.0.
QUERY_CONSUMER_OFFSET client>broker |
  The committed offset of a group on a queue; 22 when there is none.
  > consumerGroup! topic! queueId!i setZeroIfNotFound?b
  < offset!l
UPDATE_CONSUMER_OFFSET client>broker | Commits an offset; Java sends it one-way.
  > consumerGroup! topic! queueId!i commitOffset!l
UPDATE_AND_CREATE_TOPIC admin>broker | Creates a topic or changes its settings.
  > topic! defaultTopic! readQueueNums!i writeQueueNums!i perm!i topicFilterType! topicSysFlag?i
    order!b attributes force?b
UPDATE_AND_CREATE_TOPIC_LIST admin>broker |
  Creates or changes several topics: topicConfigList in the body.
GET_ALL_TOPIC_CONFIG slave>master | All topics with their data version, in pages.
  > topicSeq?i dataVersion maxTopicNum?i
  < totalTopicNum?i
GET_TOPIC_CONFIG_LIST nobody | Not served by RocketMQ 5.5.0.
GET_TOPIC_NAME_LIST nobody | Not served by RocketMQ 5.5.0.
UPDATE_BROKER_CONFIG admin>broker | Changes settings: properties text in the body.
GET_BROKER_CONFIG admin>broker | All settings as properties text in the body.
  < version!
TRIGGER_DELETE_FILES nobody | Not served by RocketMQ 5.5.0.
GET_BROKER_RUNTIME_INFO admin>broker | Counters and rates of the broker: a KVTable body.
SEARCH_OFFSET_BY_TIMESTAMP client>broker |
  The offset of the first message stored at or after a time.
  > topic! liteTopic queueId!i timestamp!l boundaryType
  < offset!l
GET_MAX_OFFSET client>broker | The offset that the next message of a queue will get.
  > topic! queueId!i committed?b
  < offset!l
GET_MIN_OFFSET client>broker | The offset of the oldest message of a queue.
  > topic! queueId!i
  < offset!l
GET_EARLIEST_MSG_STORETIME client>broker |
  When the oldest message of a queue was stored; -1 when there is none.
  > topic! queueId!i
  < timestamp!l
VIEW_MESSAGE_BY_ID client>broker | One stored message by its position in the log.
  > topic offset!l
HEART_BEAT client>broker | The client's groups and subscriptions, every 30 s; a JSON body.
  < IS_SUPPORT_HEART_BEAT_V2!b IS_SUB_CHANGE!b
UNREGISTER_CLIENT client>broker | The client leaves a group.
  > clientID! producerGroup consumerGroup
CONSUMER_SEND_MSG_BACK client>broker |
  Consuming failed: the message comes again later, or goes to the dead letters.
  > offset!l group! delayLevel!i originMsgId originTopic unitMode?b maxReconsumeTimes?i
END_TRANSACTION client>broker |
  Commits (8) or rolls back (12) a half message, or does not know (0).
  > topic producerGroup! tranStateTableOffset!l commitLogOffset!l commitOrRollback!i
    fromTransactionCheck?b msgId! transactionId
GET_CONSUMER_LIST_BY_GROUP client>broker |
  The client ids of a group, for the client's own allocation of queues.
  > consumerGroup!
CHECK_TRANSACTION_STATE broker>client |
  Asks a producer what became of a half message; the message is the body.
  > topic tranStateTableOffset!l commitLogOffset!l msgId transactionId offsetMsgId
  < producerGroup! tranStateTableOffset!l commitLogOffset!l commitOrRollback!i
NOTIFY_CONSUMER_IDS_CHANGED broker>client |
  The members of a group changed: allocate the queues again.
  > consumerGroup!
LOCK_BATCH_MQ client>broker |
  Locks queues for ordered consumption, 60 s; answers those that were locked.
UNLOCK_BATCH_MQ client>broker | Gives locked queues back.
GET_ALL_CONSUMER_OFFSET slave>master | All committed offsets: consumerOffset.json as the body.
GET_ALL_DELAY_OFFSET slave>master | Progress of the delay levels: delayOffset.json as the body.
CHECK_CLIENT_CONFIG client>broker | Checks an SQL subscription before the consumer starts.
GET_CLIENT_CONFIG nobody | Not served by RocketMQ 5.5.0.
GET_TIMER_CHECK_POINT slave>master | Progress of the timer: 56 bytes in the body.
GET_TIMER_METRICS slave>master | How many timer messages wait, by topic.
PUT_KV_CONFIG admin>ns | Sets one value of a namespace.
  > namespace! key! value!
GET_KV_CONFIG admin>ns | Reads one value of a namespace; 22 when there is none.
  > namespace! key!
  < value
DELETE_KV_CONFIG admin>ns | Deletes one value of a namespace.
  > namespace! key!
REGISTER_BROKER broker>ns | A broker and its topics, every 30 s and when a topic changes.
  > brokerName! brokerAddr! clusterName! haServerAddr! brokerId!l heartbeatTimeoutMillis?l
    enableActingMaster?b compressed?b bodyCrc32?i
  < haServerAddr masterAddr
UNREGISTER_BROKER broker>ns | A broker stops.
  > brokerName! brokerAddr! clusterName! brokerId!l
GET_ROUTEINFO_BY_TOPIC client>ns | Which brokers serve a topic; 17 when none does.
  > topic! acceptStandardJsonOnly?b
GET_BROKER_CLUSTER_INFO admin>ns | All brokers with their addresses, by cluster.
UPDATE_AND_CREATE_SUBSCRIPTIONGROUP admin>broker |
  Creates a group or changes its settings, in the body.
GET_ALL_SUBSCRIPTIONGROUP_CONFIG slave>master | All groups with their data version, in pages.
  > groupSeq?i dataVersion maxGroupNum?i
  < totalGroupNum!i
GET_TOPIC_STATS_INFO admin>broker | First and last offset of each queue of a topic.
  > topic!
GET_CONSUMER_CONNECTION_LIST admin>broker |
  The connected consumers of a group and what they subscribe to.
  > consumerGroup!
GET_PRODUCER_CONNECTION_LIST admin>broker | The connected producers of a group.
  > producerGroup!
WIPE_WRITE_PERM_OF_BROKER admin>ns |
  Takes a broker out of sending: its queues lose the write permission.
  > brokerName!
  < wipeTopicCount!i
GET_ALL_TOPIC_LIST_FROM_NAMESERVER admin>ns | The names of all topics.
DELETE_SUBSCRIPTIONGROUP admin>broker | Deletes a group, with its offsets if asked to.
  > groupName! cleanOffset?b
GET_CONSUME_STATS admin>broker | How far a group has read each queue, and how far it could.
  > consumerGroup! topic topicList
SUSPEND_CONSUMER nobody | Not served by RocketMQ 5.5.0.
RESUME_CONSUMER nobody | Not served by RocketMQ 5.5.0.
RESET_CONSUMER_OFFSET_IN_CONSUMER nobody | Not served by RocketMQ 5.5.0.
RESET_CONSUMER_OFFSET_IN_BROKER nobody | Not served by RocketMQ 5.5.0.
ADJUST_CONSUMER_THREAD_POOL nobody | Not served by RocketMQ 5.5.0.
WHO_CONSUME_THE_MESSAGE nobody | Not served by RocketMQ 5.5.0.
DELETE_TOPIC_IN_BROKER admin>broker | Deletes a topic from a broker.
  > topic!
DELETE_TOPIC_IN_NAMESRV admin>ns | Deletes a topic from the routes.
  > topic! clusterName
REGISTER_TOPIC_IN_NAMESRV broker>ns |
  Adds one topic's queues to the routes: queueDatas in the body.
  > topic!
GET_KVLIST_BY_NAMESPACE admin>ns | All values of a namespace: a KVTable body.
  > namespace!
RESET_CONSUMER_CLIENT_OFFSET broker>client |
  New offsets for a running consumer: offsetTable in the body.
  > topic! group! timestamp!l isForce?b queueId?i offset?l
GET_CONSUMER_STATUS_FROM_CLIENT broker>client | Asks a running consumer for its offsets.
  > topic! group! clientAddr
INVOKE_BROKER_TO_RESET_OFFSET admin>broker |
  Moves a group's offsets on a topic to a time or an offset.
  > group! topic! queueId?i offset?l timestamp!l isForce!b
INVOKE_BROKER_TO_GET_CONSUMER_STATUS admin>broker |
  The offsets that running consumers of a group hold.
  > topic! group! clientAddr
GET_TOPICS_BY_CLUSTER admin>ns | The topics of one cluster.
  > cluster!
UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST admin>broker |
  Creates or changes several groups: groupConfigList in the body.
QUERY_TOPIC_CONSUME_BY_WHO admin>broker | The groups that consume a topic.
  > topic!
REGISTER_FILTER_SERVER nobody | Not served by RocketMQ 5.5.0.
REGISTER_MESSAGE_FILTER_CLASS nobody | Not served by RocketMQ 5.5.0.
QUERY_CONSUME_TIME_SPAN admin>broker |
  First, last and consumed store time of each queue of a topic.
  > topic! group!
GET_SYSTEM_TOPIC_LIST_FROM_NS admin>ns |
  Cluster and broker names, which are topics too, and one address.
GET_SYSTEM_TOPIC_LIST_FROM_BROKER admin>broker | The topics that the broker keeps for itself.
CLEAN_EXPIRED_CONSUMEQUEUE admin>broker | Deletes queue files that point at deleted messages.
GET_CONSUMER_RUNNING_INFO admin>broker |
  What a running consumer does; the broker asks the client and passes its answer on.
  > consumerGroup! clientId! jstackEnable?b
QUERY_CORRECTION_OFFSET admin>broker | The offsets of a group, compared with those of others.
  > filterGroups compareGroup! topic!
CONSUME_MESSAGE_DIRECTLY admin>broker |
  Lets one client consume one message now and tell how it went.
  > consumerGroup! clientId msgId brokerName topic topicSysFlag?i groupSysFlag?i
SEND_MESSAGE_V2 client>broker |
  Stores one message. Field names of one letter: a to k are SEND_MESSAGE's first eleven in order,
  l is maxReconsumeTimes, m batch, n the broker's name.
  > a! b! c! d!i e!i f!i g!l h!i i j?i k?b l?i m?b n
  < msgId! queueId!i queueOffset!l transactionId batchUniqId recallHandle MSG_REGION TRACE_ON
GET_UNIT_TOPIC_LIST admin>ns | Topics of a unit.
GET_HAS_UNIT_SUB_TOPIC_LIST admin>ns | Topics with subscriptions of a unit.
GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST admin>ns | Topics of no unit with subscriptions of a unit.
CLONE_GROUP_OFFSET admin>broker | Copies the offsets of one group to another.
  > srcGroup! destGroup! topic offline?b
VIEW_BROKER_STATS_DATA admin>broker |
  Sums and rates of one statistic over the last minute, hour and day.
  > statsName! statsKey!
CLEAN_UNUSED_TOPIC admin>broker | Deletes queue files of topics that are gone.
GET_BROKER_CONSUME_STATS admin>broker | GET_CONSUME_STATS of all groups of a broker.
  > isOrder!b
UPDATE_NAMESRV_CONFIG admin>ns | Changes settings of the nameserver: properties text in the body.
GET_NAMESRV_CONFIG admin>ns | All settings of the nameserver as properties text in the body.
SEND_BATCH_MESSAGE client>broker |
  Stores several messages of one topic: SEND_MESSAGE_V2 with a batch body.
  > a! b! c! d!i e!i f!i g!l h!i i j?i k?b l?i m?b n
  < msgId! queueId!i queueOffset!l transactionId batchUniqId recallHandle MSG_REGION TRACE_ON
QUERY_CONSUME_QUEUE admin>broker | Entries of a queue's index.
  > topic queueId?i index?l count?i consumerGroup
QUERY_DATA_VERSION broker>ns | Whether the nameserver knows the broker's newest topics.
  > brokerName! brokerAddr! clusterName! brokerId!l
  < changed!b
RESUME_CHECK_HALF_MESSAGE admin>broker |
  Starts the checks of a half message again that were given up.
  > topic msgId
SEND_REPLY_MESSAGE client>broker | The answer to a request message; long field names.
  > producerGroup! topic! defaultTopic! defaultTopicQueueNums!i queueId!i sysFlag!i
    bornTimestamp!l flag!i properties reconsumeTimes?i unitMode?b batch?b maxReconsumeTimes?i
  < msgId! queueId!i queueOffset!l transactionId batchUniqId recallHandle MSG_REGION TRACE_ON
SEND_REPLY_MESSAGE_V2 client>broker | The answer to a request message; field names of one letter.
  > a! b! c! d!i e!i f!i g!l h!i i j?i k?b l?i m?b n
  < msgId! queueId!i queueOffset!l transactionId batchUniqId recallHandle MSG_REGION TRACE_ON
PUSH_REPLY_MESSAGE_TO_CLIENT broker>client |
  Hands the answer to the client that sent the request message.
  > producerGroup! topic! defaultTopic! defaultTopicQueueNums!i queueId!i sysFlag!i
    bornTimestamp!l flag!i properties reconsumeTimes?i unitMode?b bornHost! storeHost!
    storeTimestamp!l
ADD_WRITE_PERM_OF_BROKER admin>ns | Takes back WIPE_WRITE_PERM_OF_BROKER.
  > brokerName!
  < addTopicCount!i
GET_ALL_PRODUCER_INFO admin>broker | All connected producers, by group.
DELETE_EXPIRED_COMMITLOG admin>broker | Deletes log files that are older than the retention.
QUERY_TOPICS_BY_CONSUMER admin>broker | The topics that a group consumes.
  > group!
QUERY_SUBSCRIPTION_BY_CONSUMER admin>broker | What a group subscribes to.
  > group! topic
GET_TOPIC_CONFIG admin>broker | The settings of a topic; 17 when there is none.
  > topic!
GET_SUBSCRIPTIONGROUP_CONFIG admin>broker | The settings of a group.
  > group!
UPDATE_AND_GET_GROUP_FORBIDDEN admin>broker | Forbids or allows a group to read a topic.
  > group! topic! readable?b
CHECK_ROCKSDB_CQ_WRITE_PROGRESS admin>broker |
  Compares queue indexes with their copy in RocksDB; has a meaning only there.
  > topic! checkStoreTime?l
EXPORT_ROCKSDB_CONFIG_TO_JSON admin>broker |
  Writes settings out of RocksDB; has a meaning only there.
  > configType!
LITE_PULL_MESSAGE client>broker | PULL_MESSAGE of a lite pull consumer.
  > consumerGroup! topic! liteTopic queueId!i queueOffset!l maxMsgNums!i sysFlag!i
    commitOffset!l suspendTimeoutMillis!l subscription subVersion!l expressionType maxMsgBytes?i
    requestSource?i proxyFrowardClientId
  < suggestWhichBrokerId!l nextBeginOffset!l minOffset!l maxOffset!l offsetDelta?l
    topicSysFlag?i groupSysFlag?i forbiddenType?i
RECALL_MESSAGE client>broker | Takes back a timed message that was not delivered yet.
  > producerGroup topic! recallHandle!
  < msgId!
QUERY_ASSIGNMENT client>broker | The queues that a consumer shall read, where the broker allocates.
SET_MESSAGE_REQUEST_MODE admin>broker | Whether a group pulls or pops a topic.
GET_ALL_MESSAGE_REQUEST_MODE slave>master | All that was set by SET_MESSAGE_REQUEST_MODE.
UPDATE_AND_CREATE_STATIC_TOPIC admin>broker |
  A topic whose logical queues keep their numbers when they move.
  > topic! defaultTopic! readQueueNums!i writeQueueNums!i perm!i topicFilterType! topicSysFlag?i
    order!b attributes force?b
GET_BROKER_MEMBER_GROUP broker>ns | The addresses of all replicas of a broker.
  > clusterName! brokerName!
ADD_BROKER admin>broker | Starts another broker in a broker container.
  > configPath
REMOVE_BROKER admin>broker | Stops a broker of a broker container.
  > brokerName! brokerClusterName! brokerId!l
BROKER_HEARTBEAT broker>ns | A broker is alive; also sent to the controller, every second.
  > clusterName! brokerAddr! brokerName! brokerId?l epoch?i maxOffset?l confirmOffset?l
    heartbeatTimeoutMills?l electionPriority?i
NOTIFY_MIN_BROKER_ID_CHANGE ns>broker | Another replica has the lowest id now and acts as master.
  > minBrokerId?l brokerName minBrokerAddr offlineBrokerAddr haBrokerAddr
EXCHANGE_BROKER_HA_INFO slave>master |
  The addresses of master and slave, and how far the master has flushed.
  > masterHaAddress masterFlushOffset?l masterAddress
  < masterHaAddress masterFlushOffset?l masterAddress
GET_BROKER_HA_STATUS admin>broker | How far each replica is behind.
RESET_MASTER_FLUSH_OFFSET slave>master | How far the master had flushed.
  > masterFlushOffset!l
CONTROLLER_ALTER_SYNC_STATE_SET broker>controller |
  The master wants another set of in-sync replicas.
  > brokerName masterBrokerId?l masterEpoch?i invokeTime?l
  < newSyncStateSetEpoch?i
CONTROLLER_ELECT_MASTER broker>controller |
  Elects a master of a broker group; 2011 when there is one.
  > clusterName! brokerName! brokerId!l designateElect!b invokeTime?l
  < masterBrokerId?l masterAddress masterEpoch?i syncStateSetEpoch?i
CONTROLLER_REGISTER_BROKER broker>controller |
  A replica with its id and address; answers who is master.
  > clusterName brokerName brokerId?l brokerAddress invokeTime?l
  < clusterName brokerName masterBrokerId?l masterAddress masterEpoch?i syncStateSetEpoch?i
CONTROLLER_GET_REPLICA_INFO broker>controller |
  The master and the in-sync replicas of a broker group.
  > brokerName
  < masterBrokerId?l masterAddress masterEpoch?i
CONTROLLER_GET_METADATA_INFO broker>controller | Which controller leads, and the addresses of all.
  < group controllerLeaderId controllerLeaderAddress isLeader?b peers
CONTROLLER_GET_SYNC_STATE_DATA admin>controller | The in-sync replicas of several broker groups.
GET_BROKER_EPOCH_CACHE admin>broker | The epochs of a replica's log; only with a controller.
NOTIFY_BROKER_ROLE_CHANGED controller>broker | A master was elected.
  > masterAddress masterEpoch?i syncStateSetEpoch?i masterBrokerId?l
UPDATE_CONTROLLER_CONFIG admin>controller |
  Changes settings of the controller: properties text in the body.
GET_CONTROLLER_CONFIG admin>controller |
  All settings of the controller as properties text in the body.
CLEAN_BROKER_DATA admin>controller | Forgets replicas of a broker group.
  > clusterName brokerName! brokerControllerIdsToClean isCleanLivingBroker?b invokeTime?l
CONTROLLER_GET_NEXT_BROKER_ID broker>controller | The next free replica id of a broker group.
  > clusterName brokerName
  < clusterName brokerName nextBrokerId?l
CONTROLLER_APPLY_BROKER_ID broker>controller | Takes a replica id.
  > clusterName brokerName appliedBrokerId?l registerCheckCode
  < clusterName brokerName
BROKER_CLOSE_CHANNEL_REQUEST inside | Between controllers: a broker's connection was closed.
CHECK_NOT_ACTIVE_BROKER_REQUEST inside | Between controllers: find silent brokers.
GET_BROKER_LIVE_INFO_REQUEST inside | Between controllers: when brokers were last heard of.
GET_SYNC_STATE_DATA_REQUEST inside | Between controllers: in-sync replicas.
RAFT_BROKER_HEART_BEAT_EVENT_REQUEST inside | Between controllers: a broker's heartbeat.
UPDATE_COLD_DATA_FLOW_CTR_CONFIG admin>broker |
  Limits how fast groups may read cold data: properties text in the body.
REMOVE_COLD_DATA_FLOW_CTR_CONFIG admin>broker | Removes such a limit; the body names the group.
GET_COLD_DATA_FLOW_CTR_INFO admin>broker | Such limits and how they are used.
SET_COMMITLOG_READ_MODE admin>broker | How the kernel reads ahead in the log.
AUTH_CREATE_USER admin>broker | Adds a user: the body.
  > username
AUTH_UPDATE_USER admin>broker | Changes a user: the body.
  > username
AUTH_DELETE_USER admin>broker | Deletes a user.
  > username
AUTH_GET_USER admin>broker | Reads a user.
  > username
AUTH_LIST_USER admin>broker | Lists users.
  > filter
AUTH_CREATE_ACL admin>broker | Adds permissions of a subject: the body.
  > subject
AUTH_UPDATE_ACL admin>broker | Changes permissions of a subject: the body.
  > subject
AUTH_DELETE_ACL admin>broker | Deletes permissions of a subject.
  > subject policyType resource
AUTH_GET_ACL admin>broker | Reads the permissions of a subject.
  > subject
AUTH_LIST_ACL admin>broker | Lists permissions.
  > subjectFilter resourceFilter
SWITCH_TIMER_ENGINE admin>broker | Chooses where timed messages are kept.
POP_MESSAGE client>broker | Takes messages for a time; those not acknowledged by then come again.
  > consumerGroup! topic! queueId!i maxMsgNums!i invisibleTime!l pollTime!l bornTime!l
    initMode!i expType exp order?b attemptId
  < popTime!l invisibleTime!l reviveQid!i restNum!l startOffsetInfo msgOffsetInfo orderCountInfo
ACK_MESSAGE client>broker | Acknowledges one popped message.
  > consumerGroup! topic! queueId!i extraInfo! offset!l liteTopic
PEEK_MESSAGE client>broker | Reads messages without taking them.
  > topic! queueId!i maxMsgNums!i consumerGroup!
  < popTime!l invisibleTime!l reviveQid!i restNum!l startOffsetInfo msgOffsetInfo orderCountInfo
CHANGE_MESSAGE_INVISIBLETIME client>broker | Changes how long a popped message stays hidden.
  > consumerGroup! topic! queueId!i extraInfo! offset!l invisibleTime!l liteTopic suspend?b
  < popTime!l invisibleTime!l reviveQid!i
NOTIFICATION client>broker | Waits until a queue has messages to pop.
  > consumerGroup! topic! queueId!i pollTime!l bornTime!l order?b attemptId expType exp
  < hasMsg!b pollingFull?b
POLLING_INFO client>broker | How many pops wait on a queue.
  > consumerGroup! topic! queueId!i
  < pollingNum!i
POP_ROLLBACK admin>broker | Exports pop records, to go back to another way of keeping them.
POP_LITE_MESSAGE client>broker | POP_MESSAGE over the lite topics of a consumer.
  > clientId! consumerGroup! topic! maxMsgNum!i invisibleTime!l pollTime!l bornTime!l attemptId
  < popTime!l invisibleTime!l reviveQid!i startOffsetInfo msgOffsetInfo orderCountInfo
LITE_SUBSCRIPTION_CTL client>broker | Adds or removes lite topics of a consumer: the body.
ACK_LITE_MESSAGE client>broker | Acknowledges one message of a lite topic.
  > consumerGroup! topic! queueId!i extraInfo! offset!l liteTopic
NOTIFY_UNSUBSCRIBE_LITE broker>client | A lite topic was taken from the consumer.
  > liteTopic! consumerGroup! clientId!
GET_BROKER_LITE_INFO admin>broker | Counts of lite topics and their subscriptions.
GET_PARENT_TOPIC_INFO admin>broker | Lite topics under one topic.
  > topic!
GET_LITE_TOPIC_INFO admin>broker | One lite topic.
  > parentTopic liteTopic
GET_LITE_CLIENT_INFO admin>broker | The lite topics of one client.
  > parentTopic group clientId maxCount?i
GET_LITE_GROUP_INFO admin>broker | The lite topics of one group.
  > group! liteTopic topK?i typeName
TRIGGER_LITE_DISPATCH admin>broker | Offers waiting messages of lite topics again.
  > group! clientId
BATCH_ACK_MESSAGE client>broker | Acknowledges several popped messages: the body.
SLUICE_LIST_DEAD_LETTERS admin>broker |
  Sluice's own: a page of a group's dead letters, without their bodies.
  > group! queueId!i offset!l maxNum!i beginTimestamp?l endTimestamp?l key originTopic
  < nextOffset!l maxOffset!l
SLUICE_RESEND_DEAD_LETTERS admin>broker |
  Sluice's own: sends dead letters again, each once; offsets in the body, an outcome for each.
  > group! queueId!i toTopic?b
SLUICE_LIST_TRANSACTIONS admin>broker |
  Sluice's own: half messages that nobody has ended yet, from an offset of their queue on.
  > offset?l maxNum?i topic group
  < nextOffset!l openCount!l
SLUICE_LIST_KAFKA_GROUPS admin>broker |
  Sluice's own: groups of Kafka's clients with their members and offsets, a page at a time.
  > group after
  < after
SLUICE_LIST_DELAYED admin>broker |
  Sluice's own: messages that wait for their time, the earliest first, a page at a time.
  > topic after
  < after timerCount!l levelCount!l
SLUICE_BULK_FETCH client>broker |
  Sluice's own: entries of a range of offsets as they lie, some megabytes at a time, then the size
  of each as int32; their checksums are the reader's to check. Outside of what the queue holds: 21
  with the next good offset. Batches of Kafka's producers come whole (system flags 0x4080, and the
  id that their records' ids begin with), or, where a filter is given, as single messages.
  > topic! queueId!i offset!l toOffset!l maxBytes!i consumerGroup tags keys sql
  < nextOffset!l minOffset!l maxOffset!l count!i topicId
SLUICE_RANGE_BYTES client>broker |
  Sluice's own: about how many bytes ranges of offsets of a queue have; pairs in the body, a number
  for each in the answer's, as JSON.
  > topic! queueId!i
SLUICE_OFFSET_AT client>broker |
  Sluice's own: the first offset of a queue whose time is the given one or later, and whether no
  message behind it is older. Records of Kafka's producers have their own time, others that of
  storing.
  > topic! queueId!i timestamp!l
  < offset!l isOrdered!b
SLUICE_STAGE client>broker |
  Sluice's own: stores a batch for a queue where nobody sees it until its handle is published; with
  imageCount the body is so many messages in the log's layout and the size of each behind them.
  > sink! batch!l topic! queueId!i imageCount?i
  < handle!
SLUICE_PUBLISH client>broker |
  Sluice's own: makes staged batches visible, all of them, once for a sink and a batch; a JSON list
  of handles in the body. A batch that was published before is left as it is.
  > sink! batch!l once?b
  < published!b
SLUICE_SINK_STATE client>broker |
  Sluice's own: the newest batch that a sink has published here, -1 where it has none.
  > sink!
  < batch!l
"""

RESPONSES: Final = """\
RPC_TIME_OUT | Inside RocketMQ's processes: no answer in time.
RPC_SEND_TO_CHANNEL_FAILED | Inside RocketMQ's processes: the call could not be sent.
RPC_ADDR_IS_NULL | Inside RocketMQ's processes: no address to call.
RPC_UNKNOWN | Inside RocketMQ's processes: unknown failure of a call.
SUCCESS | Done.
SYSTEM_ERROR | It failed; the remark says why. Producers try another broker.
SYSTEM_BUSY | The broker takes no more right now; the remark names the resource. Try again.
REQUEST_CODE_NOT_SUPPORTED | Nobody here serves this request code.
TRANSACTION_FAILED | The transaction could not be ended.
FLUSH_DISK_TIMEOUT | Stored, but not flushed in time. A producer counts it as sent.
SLAVE_NOT_AVAILABLE | Stored, but there are too few replicas. A producer counts it as sent.
FLUSH_SLAVE_TIMEOUT | Stored, but not replicated in time. A producer counts it as sent.
MESSAGE_ILLEGAL | The message breaks a limit and can never be stored.
SERVICE_NOT_AVAILABLE | The store cannot write now (disk full, failed flush, not the master).
VERSION_NOT_SUPPORTED | The peer is too old.
NO_PERMISSION | The topic, the group or the broker does not allow it.
TOPIC_NOT_EXIST | There is no such topic here.
TOPIC_EXIST_ALREADY | There is such a topic already.
PULL_NOT_FOUND | No message at this offset yet.
PULL_RETRY_IMMEDIATELY | None of the messages looked at passed the filter: go on at nextBeginOffset.
PULL_OFFSET_MOVED | The offset is outside of the queue: go on at nextBeginOffset.
QUERY_NOT_FOUND | Nothing was found.
SUBSCRIPTION_PARSE_FAILED | The subscription's expression is wrong.
SUBSCRIPTION_NOT_EXIST | The group's subscription did not come by heartbeat yet.
SUBSCRIPTION_NOT_LATEST | The group's newest subscription did not come by heartbeat yet.
SUBSCRIPTION_GROUP_NOT_EXIST | There is no such group.
FILTER_DATA_NOT_EXIST | The SQL filter of the group is not known yet.
FILTER_DATA_NOT_LATEST | The SQL filter of the group is older than the request's.
INVALID_PARAMETER | A parameter is outside of what is allowed.
TRANSACTION_SHOULD_COMMIT | The half message shall be committed.
TRANSACTION_SHOULD_ROLLBACK | The half message shall be rolled back.
TRANSACTION_STATE_UNKNOW | The half message's fate is not known (the name is RocketMQ's).
TRANSACTION_STATE_GROUP_WRONG | The half message belongs to another group.
NO_BUYER_ID | Not used any more.
NOT_IN_CURRENT_UNIT | Not used any more.
CONSUMER_NOT_ONLINE | No consumer of the group is connected.
CONSUME_MSG_TIMEOUT | The client did not answer in time.
NO_MESSAGE | The offset to acknowledge holds no message.
POLLING_FULL | Too many requests wait already.
POLLING_TIMEOUT | No message came while the request was held.
BROKER_NOT_EXIST | There is no such broker.
BROKER_DISPATCH_NOT_COMPLETE | The queue indexes are not complete yet.
BROADCAST_CONSUMPTION | Not possible for a broadcasting group.
FLOW_CONTROL | The caller is over its quota.
NOT_LEADER_FOR_QUEUE | Another broker leads this logical queue.
ILLEGAL_OPERATION | The operation is not allowed in this state.
GO_AWAY | The broker is going to stop: use another connection. Only for clients newer than 5.3.1.
CONTROLLER_FENCED_MASTER_EPOCH | The master's epoch is old.
CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH | The in-sync set's epoch is old.
CONTROLLER_INVALID_MASTER | The caller is not the master.
CONTROLLER_INVALID_REPLICAS | The in-sync set names unknown replicas.
CONTROLLER_MASTER_NOT_AVAILABLE | No master can be elected.
CONTROLLER_INVALID_REQUEST | The controller cannot read the request.
CONTROLLER_BROKER_NOT_ALIVE | The broker was silent for too long.
CONTROLLER_NOT_LEADER | Another controller leads.
CONTROLLER_BROKER_METADATA_NOT_EXIST | The controller does not know this broker group.
CONTROLLER_INVALID_CLEAN_BROKER_METADATA | A living replica cannot be forgotten.
CONTROLLER_BROKER_NEED_TO_BE_REGISTERED | The replica has to register first.
CONTROLLER_MASTER_STILL_EXIST | There is a living master.
CONTROLLER_ELECT_MASTER_FAILED | The election failed.
CONTROLLER_ALTER_SYNC_STATE_SET_FAILED | The in-sync set was not changed.
CONTROLLER_BROKER_ID_INVALID | The replica id is taken.
CONTROLLER_JRAFT_INTERNAL_ERROR | The controllers cannot agree.
CONTROLLER_BROKER_LIVE_INFO_NOT_EXISTS | The controller never heard of this broker.
LMQ_QUOTA_EXCEEDED | Too many light queues.
LITE_SUBSCRIPTION_QUOTA_EXCEEDED | Too many lite subscriptions.
USER_NOT_EXIST | There is no such user.
POLICY_NOT_EXIST | There is no such permission.
"""
