"""Administrative requests with missing, empty, unreadable and extreme fields: Apache's broker and ours answer alike."""

import pytest

from rmqkit.protocol.codes import RequestCode as Code
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.asking import Asked, Pairs, answers_of_both, differences, odd, without

TOPIC, GROUP = "AdminCodes", "admin_codes"

CREATE = {
    "topic": TOPIC,
    "defaultTopic": "TBW102",
    "readQueueNums": 4,
    "writeQueueNums": 4,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": 0,
    "order": "false",
}
QUEUE = {"topic": TOPIC, "queueId": 0}
OFFSET = {"consumerGroup": GROUP, **QUEUE}
RESET = {"group": GROUP, "topic": TOPIC, "timestamp": -1, "isForce": "true"}
LOCKED = {"topic": TOPIC, "brokerName": BROKER_NAME, "queueId": 0}
BEAT = {
    "clientID": "admin-codes",
    "consumerDataSet": [
        {
            "groupName": GROUP,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": [{"topic": TOPIC, "subString": "*", "subVersion": 1}],
        }
    ],
}
SEND = dict(zip("abcdefghijkl", ("p", TOPIC, "TBW102", 4, 0, 0, 1_700_000_000_000, 0, "", 0, "false"), strict=False))

SCENARIOS: dict[str, list[Asked]] = {
    "topics": [
        *(Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "topic": name}) for name in ("TBW102", BROKER_NAME, CLUSTER)),
        *(
            Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "topic": name})
            for name in ("", "a b", "x" * 128, "rmq_sys_")
        ),
        *(
            Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "attributes": change})
            for change in ("a", "+a", "+a=b", "-a", "+=x", "a=b", "+message.type=X", "+message.type=MIXED", ",")
        ),
        *odd(Code.UPDATE_AND_CREATE_TOPIC, without(CREATE, "readQueueNums", "writeQueueNums", "topicSysFlag", "order")),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "readQueueNums": "x"}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "perm": 1 << 40}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, CREATE),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "attributes": "-message.type"}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "attributes": "+queue.type=BatchCQ"}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "attributes": "+reserve.time=7,+message.type=FIFO"}),
        *odd(Code.GET_TOPIC_CONFIG, {"topic": TOPIC}),
        Asked(Code.GET_TOPIC_CONFIG, {"topic": "none"}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC_LIST),
        Asked(Code.UPDATE_AND_CREATE_TOPIC_LIST, body=b"{"),
        Asked(Code.UPDATE_AND_CREATE_TOPIC_LIST, body={"topicConfigList": []}),
        Asked(
            Code.UPDATE_AND_CREATE_TOPIC_LIST, body={"topicConfigList": [{"topicName": "A"}, {"topicName": "TBW102"}]}
        ),
        Asked(Code.UPDATE_AND_CREATE_TOPIC_LIST, body={"topicConfigList": [{"topicName": ""}]}),
        *odd(Code.GET_TOPIC_STATS_INFO, {"topic": TOPIC}),
        Asked(Code.GET_TOPIC_STATS_INFO, {"topic": "none"}),
        *(Asked(Code.DELETE_TOPIC_IN_BROKER, {"topic": name}) for name in ("", " ", "TBW102", "none", "a b", TOPIC)),
        Asked(Code.DELETE_TOPIC_IN_BROKER),
        *(Asked(code) for code in (306, 316, 329)),
        Asked(Code.GET_TOPIC_CONFIG, {"topic": TOPIC}),
    ],
    "groups": [
        *(
            Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=body)
            for body in (
                *(b"", b"{", b"[]", {}, {"groupName": "a b"}, {"groupName": "x" * 121}),
                *({"groupName": GROUP, "retryMaxTimes": number} for number in (-9, 3, 1 << 40)),
            )
        ),
        *odd(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": GROUP}),
        Asked(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "a b"}),
        Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST),
        Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body={"groupConfigList": []}),
        Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, body={"groupConfigList": [{"groupName": "a b"}]}),
        *(Asked(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": GROUP, "topic": TOPIC, "readable": r}) for r in "x "),
        *odd(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": GROUP, "topic": TOPIC, "readable": "true"}),
        *odd(Code.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "none"}),
        *odd(Code.QUERY_SUBSCRIPTION_BY_CONSUMER, {"group": "none", "topic": TOPIC}),
        *(
            Asked(Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": name, "cleanOffset": "x"})
            for name in ("", "none", GROUP)
        ),
        Asked(Code.DELETE_SUBSCRIPTIONGROUP),
    ],
    "clients": [
        Asked(Code.UPDATE_AND_CREATE_TOPIC, CREATE),
        Asked(Code.HEART_BEAT),
        Asked(Code.HEART_BEAT, body=b"{"),
        Asked(Code.HEART_BEAT, body=BEAT),
        *(Asked(Code.HEART_BEAT, body={**BEAT, "heartbeatFingerprint": number}) for number in (7, 7, 8)),
        Asked(Code.HEART_BEAT, body={**BEAT, "heartbeatFingerprint": 8, "withoutSub": True}),
        *odd(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP}),
        Asked(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": ""}),
        *(Asked(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": name}) for name in ("", "none")),
        Asked(Code.GET_CONSUMER_CONNECTION_LIST),
        *(Asked(Code.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": name}) for name in ("", "none")),
        Asked(Code.GET_PRODUCER_CONNECTION_LIST),
        *odd(Code.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": GROUP, "clientId": "nobody", "jstackEnable": "x"}),
        *odd(Code.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": GROUP, "clientId": "nobody", "msgId": "zz"}),
        *odd(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"group": "none", "topic": TOPIC}),
        Asked(Code.LOCK_BATCH_MQ),
        *(
            Asked(code, body={"consumerGroup": GROUP, "clientId": client, "mqSet": [LOCKED]})
            for client in ("c1", "c2")
            for code in (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ, Code.LOCK_BATCH_MQ)
        ),
        Asked(Code.UNLOCK_BATCH_MQ),
        Asked(Code.UNREGISTER_CLIENT),
        Asked(Code.UNREGISTER_CLIENT, {"clientID": "zz", "consumerGroup": "none", "producerGroup": "none"}),
        Asked(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP}),
        Asked(Code.UNREGISTER_CLIENT, {"clientID": "admin-codes", "consumerGroup": GROUP}),
        Asked(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": GROUP}),
    ],
    "offsets": [
        Asked(Code.UPDATE_AND_CREATE_TOPIC, CREATE),
        Asked(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": GROUP}),
        Asked(Code.QUERY_CONSUMER_OFFSET, OFFSET),
        *(Asked(Code.SEND_MESSAGE_V2, SEND, b"hello") for _ in range(3)),
        *odd(Code.QUERY_CONSUMER_OFFSET, {**OFFSET, "consumerGroup": "new"}, "queueId", kept="consumerGroup"),
        Asked(Code.QUERY_CONSUMER_OFFSET, {**OFFSET, "setZeroIfNotFound": "x"}),
        *odd(
            *(Code.UPDATE_CONSUMER_OFFSET, {**OFFSET, "commitOffset": 2}, "queueId", "commitOffset"),
            kept="consumerGroup",
        ),
        Asked(Code.UPDATE_CONSUMER_OFFSET, {**OFFSET, "commitOffset": 2, "consumerGroup": "none"}),
        Asked(Code.UPDATE_CONSUMER_OFFSET, {**OFFSET, "commitOffset": 2, "topic": "none"}),
        Asked(Code.QUERY_CONSUMER_OFFSET, OFFSET),
        *odd(Code.GET_MAX_OFFSET, QUEUE, "queueId"),
        *odd(Code.GET_MIN_OFFSET, QUEUE, "queueId"),
        *odd(Code.SEARCH_OFFSET_BY_TIMESTAMP, {**QUEUE, "timestamp": 0}, "queueId", "timestamp"),
        *(Asked(Code.GET_CONSUME_STATS, {"consumerGroup": "none", "topic": topic}) for topic in ("none", TOPIC)),
        Asked(Code.GET_CONSUME_STATS),
        *odd(Code.INVOKE_BROKER_TO_RESET_OFFSET, RESET, "timestamp", kept="group"),
        *(Asked(Code.INVOKE_BROKER_TO_RESET_OFFSET, {**RESET, "queueId": 0, "offset": n}) for n in (-2, -1, 0, 4, 5)),
        *(Asked(Code.INVOKE_BROKER_TO_RESET_OFFSET, {**RESET, "queueId": n, "offset": 0}) for n in (-5, 77, "x", "")),
        Asked(Code.INVOKE_BROKER_TO_RESET_OFFSET, {**RESET, "group": "none"}),
        Asked(Code.INVOKE_BROKER_TO_RESET_OFFSET, {**RESET, "topic": "none"}),
        Asked(Code.UPDATE_CONSUMER_OFFSET, {**OFFSET, "commitOffset": 2}),
        Asked(Code.QUERY_CONSUMER_OFFSET, OFFSET),
        Asked(Code.CLONE_GROUP_OFFSET),
        *(
            Asked(Code.CLONE_GROUP_OFFSET, {"srcGroup": g, "destGroup": "twin", "topic": TOPIC})
            for g in ("none", GROUP)
        ),
        Asked(Code.QUERY_CONSUMER_OFFSET, {**OFFSET, "consumerGroup": "twin"}),
        Asked(Code.GET_CONSUME_STATS, {"consumerGroup": GROUP}),
    ],
}


@pytest.fixture(scope="module")
def pairs(apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return answers_of_both(SCENARIOS, apache.broker_addr, tmp_path_factory.mktemp("ours") / "store")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_answers_are_the_same(pairs: Pairs, name: str) -> None:
    assert differences(pairs[name]) == {}
    assert {ours.code for _, _, ours in pairs[name]} > {0, 1}
