"""The wire names of every header, as in the tables of remoting.md §4. A star marks a required field.

Encoding and decoding cannot find a misspelled name, so the names are repeated here.
"""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.protocol.catalog import CATALOG
from tests.tree.test_codes import OF_APACHE

SEND = (
    "producerGroup* topic* defaultTopic* defaultTopicQueueNums* queueId* sysFlag* bornTimestamp* flag* properties "
    "reconsumeTimes unitMode maxReconsumeTimes batch bname"
)
SEND_SHORT = "a* b* c* d* e* f* g* h* i j k l m n"
SENT = (
    "msgId* queueId* queueOffset* transactionId batchUniqId recallHandle "
    "liteOffset liteEpoch"  # fields of rmqkit only
)
PULL = (
    "consumerGroup* topic* queueId* queueOffset* maxMsgNums* sysFlag* commitOffset* suspendTimeoutMillis* subVersion* "
    "subscription expressionType maxMsgBytes bname requestSource proxyFrowardClientId liteTopic "
    "liteEpoch"  # a field of rmqkit only
)
PULLED = (
    "suggestWhichBrokerId* nextBeginOffset* minOffset* maxOffset* topicSysFlag groupSysFlag forbiddenType offsetDelta"
)
CREATE_TOPIC = (
    "topic* defaultTopic* readQueueNums* writeQueueNums* perm* topicFilterType* topicSysFlag order attributes force"
)
QUEUE = "topic* queueId* committed bname liteTopic"
POPPED = "popTime invisibleTime reviveQid restNum startOffsetInfo msgOffsetInfo orderCountInfo"

REQUESTS = {
    10: SEND, 324: SEND, 310: SEND_SHORT, 320: SEND_SHORT, 325: SEND_SHORT, 11: PULL, 361: PULL,
    12: "topic* key* maxNum* beginTimestamp* endTimestamp* indexType lastKey _UNIQUE_KEY_QUERY",
    14: "consumerGroup* topic* queueId* setZeroIfNotFound bname liteTopic",
    15: "consumerGroup* topic* queueId commitOffset bname liteTopic",
    17: CREATE_TOPIC, 21: "topicSeq dataVersion maxTopicNum",
    43: "liteFile litePosition",  # fields of rmqkit only
    29: "topic* queueId* timestamp* boundaryType bname liteTopic", 30: QUEUE, 31: QUEUE, 32: QUEUE, 33: "offset* topic",
    35: "clientID* producerGroup consumerGroup", 38: "consumerGroup*",
    61: "dueWithin",  # a code of rmqkit only
    40: "consumerGroup*", 203: "consumerGroup*",
    36: "offset* group* delayLevel* originMsgId originTopic unitMode maxReconsumeTimes bname",
    37: "topic producerGroup tranStateTableOffset* commitLogOffset* commitOrRollback* fromTransactionCheck msgId "
        "transactionId bname decidedByLedger",  # the last field exists in rmqkit only
    39: "topic tranStateTableOffset* commitLogOffset* msgId transactionId offsetMsgId bname",
    100: "namespace key value*", 101: "namespace* key*", 102: "namespace* key*", 219: "namespace*",
    103: "brokerName* brokerAddr* clusterName* brokerId* haServerAddr heartbeatTimeoutMillis enableActingMaster "
         "compressed bodyCrc32 __ZONE_NAME",
    104: "brokerName* brokerAddr* clusterName* brokerId*", 322: "brokerName* brokerAddr* clusterName* brokerId*",
    105: "topic* acceptStandardJsonOnly __ZONE_MODE __ZONE_NAME", 201: "groupSeq dataVersion maxGroupNum",
    202: "topic*", 215: "topic*", 300: "topic*", 351: "topic*", 204: "producerGroup*", 205: "brokerName*",
    327: "brokerName*", 207: "groupName* cleanOffset", 208: "consumerGroup* topic topicList",
    216: "topic* clusterName", 217: "topic*", 220: "topic* group* timestamp isForce",
    221: "topic* group* clientAddr", 223: "topic* group* clientAddr",
    222: "topic* group* timestamp* isForce* queueId offset", 224: "cluster*", 303: "topic* group*",
    307: "consumerGroup* clientId* jstackEnable", 308: "filterGroups compareGroup* topic*",
    309: "consumerGroup* clientId msgId topic brokerName topicSysFlag groupSysFlag",
    314: "srcGroup* destGroup* topic offline", 315: "statsName* statsKey*", 317: "isOrder*",
    321: "topic queueId index count consumerGroup", 323: "topic msgId*",
    326: "producerGroup* topic* defaultTopic* defaultTopicQueueNums* queueId* sysFlag* bornTimestamp* flag* properties "
         "reconsumeTimes unitMode bornHost* storeHost* storeTimestamp*",
    343: "group*", 352: "group*", 345: "group* topic", 353: "group* topic* readable",
    370: "producerGroup topic* recallHandle* bname",
    901: "clusterName* brokerName*", 904: "clusterName* brokerAddr* brokerName*",
    905: "minBrokerId* brokerName* minBrokerAddr* offlineBrokerAddr haBrokerAddr",
    906: "masterHaAddress masterFlushOffset masterAddress", 908: "masterFlushOffset*",
    3001: "username*", 3002: "username*", 3003: "username*", 3004: "username*",
    3005: "filter", 3006: "subject*", 3007: "subject*", 3008: "subject* policyType resource", 3009: "subject*",
    3010: "subjectFilter resourceFilter",
    200050: "consumerGroup* topic* queueId* maxMsgNums* invisibleTime* pollTime* bornTime* initMode* expType exp order "
            "attemptId bname",
    200051: "consumerGroup* topic* queueId* extraInfo* offset* bname liteTopic",
    200052: "topic* queueId* maxMsgNums* consumerGroup* bname",
    200053: "consumerGroup* topic* queueId* extraInfo* offset* invisibleTime* bname suspend liteTopic",
    200054: "consumerGroup* topic* queueId* pollTime* bornTime* order attemptId bname expType exp "
            "isLiteConsumer clientId",
    200055: "consumerGroup* topic* queueId* bname",
    200070: "clientId* consumerGroup* topic* maxMsgNum* invisibleTime* pollTime* bornTime* attemptId bname "
            "resync",  # a field of rmqkit only
    200073: "liteTopic* consumerGroup* clientId*", 200076: "parentTopic* liteTopic*",
    200075: "topic* maxCount prefix after group withExpired",  # all but the first are fields of rmqkit only
    200077: "parentTopic* group* clientId* maxCount", 200079: "group* clientId",
    200078: "group* liteTopic topK maxClients",  # the last is a field of rmqkit only
}  # fmt: skip

RESPONSES = {
    10: SENT, 310: SENT, 320: SENT, 324: SENT, 325: SENT, 11: PULLED, 361: PULLED,
    12: "indexLastUpdateTimestamp* indexLastUpdatePhyoffset*", 14: "offset*", 29: "offset*", 30: "offset*",
    31: "offset*", 32: "timestamp*", 21: "totalTopicNum", 26: "version",
    34: "IS_SUPPORT_HEART_BEAT_V2 IS_SUB_CHANGE",
    43: "liteFile litePosition logOffset",  # of rmqkit only
    101: "value*",
    103: "haServerAddr masterAddr", 201: "totalGroupNum", 205: "wipeTopicCount*", 322: "changed*",
    327: "addTopicCount*", 370: "msgId*", 906: "masterHaAddress masterFlushOffset masterAddress",
    200050: POPPED, 200052: POPPED, 200053: "popTime invisibleTime reviveQid", 200054: "hasMsg pollingFull",
    200055: "pollingNum", 200070: "popTime invisibleTime reviveQid orderCountInfo",
}  # fmt: skip


def wire_names(header: type[msgspec.Struct] | None) -> set[str]:
    fields = msgspec.structs.fields(header) if header is not None else ()
    return {field.encode_name + "*" * field.required for field in fields}


@pytest.mark.parametrize("code", OF_APACHE)
def test_headers_have_the_names_of_the_tables(code):
    operation = CATALOG[code]
    assert wire_names(operation.request_header) == set(REQUESTS.get(code, "").split())
    assert wire_names(operation.response_header) == set(RESPONSES.get(code, "").split())
