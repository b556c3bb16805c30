"""Administrative requests with missing, empty, unreadable and extreme fields: Apache's broker and ours answer alike."""

import pytest

from rmqkit.protocol.codes import RequestCode as Code
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.asking import PULL_ALL, Asked, Pairs, answers_of_both, differences, odd, without

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

USER, SUBJECT = {"username": "admin-codes"}, {"subject": "User:admin-codes"}


SHRUNK, ORDERED = "AdminCodesShrunk", "AdminCodesOrdered"
PULL: dict[str, object] = {
    **PULL_ALL,
    "consumerGroup": "admin_codes_slow",
    "topic": SHRUNK,
}
POP: dict[str, object] = {
    "consumerGroup": "admin_codes_slow",
    "topic": SHRUNK,
    "queueId": 0,
    "maxMsgNums": 8,
    "invisibleTime": 60_000,
    "pollTime": 0,
    "bornTime": 1 << 60,
    "initMode": 0,
    "expType": "TAG",
    "exp": "*",
    "order": "false",
}
POPS = [
    *(Asked(code, POP) for code in (Code.POP_MESSAGE, Code.NOTIFICATION, Code.PEEK_MESSAGE)),
    Asked(Code.POLLING_INFO, {name: POP[name] for name in ("consumerGroup", "topic", "queueId")}),
]
FORBIDDEN = {"group": "admin_codes_slow", "topic": SHRUNK}
MIN_OFFSETS = [
    Asked(Code.QUERY_CONSUMER_OFFSET, {"consumerGroup": "admin_codes_slow", "topic": SHRUNK, "queueId": 0, **more})
    for more in ({}, {"setZeroIfNotFound": "false"})
]


def queues(writable: int, readable: int, perm: int = 6, topic: str = SHRUNK) -> Asked:
    counts = {"writeQueueNums": writable, "readQueueNums": readable}
    order = str(topic == ORDERED).lower()
    return Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, **counts, "topic": topic, "perm": perm, "order": order})


def sends(*queue_ids: int, topic: str = SHRUNK) -> list[Asked]:
    return [Asked(Code.SEND_MESSAGE_V2, {**SEND, "b": topic, "e": queue_id}, b"hello") for queue_id in queue_ids]


def pulls(*queue_ids: int, **changed: object) -> list[Asked]:
    """Return pulls that start after the first message."""
    fields = [{**PULL, "queueId": queue_id, "queueOffset": 1, **changed} for queue_id in queue_ids]
    return [Asked(code, one) for one in fields for code in (Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)]


def readable(queue_id: int, count: int) -> Asked:
    """Return a request that waits for a number of messages: Apache's broker shows them a moment after it stored
    them.
    """
    fields = {**PULL, "queueId": queue_id, "queueOffset": count - 1, "sysFlag": 6}
    return Asked(Code.PULL_MESSAGE, fields, is_awaited=True)


def group(**changed: object) -> Asked:
    return Asked(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body={"groupName": "admin_codes_slow", **changed})


def broker_permission(perm: int) -> Asked:
    return Asked(Code.UPDATE_BROKER_CONFIG, body=f"brokerPermission={perm}".encode())


def policies(*entries: dict[str, object], policy_type: object = "Custom") -> dict[str, object]:
    entry = {"resource": "Topic:a", "actions": ["Pub"], "decision": "Allow"}
    return {"policies": [{"policyType": policy_type, "entries": [entry | changed for changed in entries]}]}


SCENARIOS: dict[str, list[Asked]] = {
    "users": [
        *(Asked(code) for code in (3001, 3002, 3003, 3004)),
        *(Asked(code, {"username": ""}, {"password": "p"}) for code in (3001, 3002, 3003, 3004)),
        *(Asked(3001, USER, body) for body in (b"", b"{", {}, {"password": ""}, {"userType": "Super"})),
        Asked(3002, USER, {"password": "p"}),
        Asked(3001, USER, {"username": "other", "password": "p", "userType": "x", "userStatus": "x"}),
        Asked(3001, USER, {"password": "p"}),
        Asked(3004, USER),
        *(
            Asked(3002, USER, body)
            for body in (b"", {}, {"password": "", "userType": "zz"}, {"userType": "super", "userStatus": "DISABLE"})
        ),
        Asked(3004, USER),
        Asked(3001, {"username": "admin-codes b/ä:x"}, {"password": "p q"}),
        *(Asked(3005, {"filter": part}) for part in ("admin-codes", "ADMIN", "*", "b/")),
        *(Asked(3003, {"username": name}) for name in ("none", "admin-codes b/ä:x", "admin-codes")),
        Asked(3004, USER),
    ],
    "policies": [
        Asked(3001, USER, {"password": "p"}),
        *(Asked(code) for code in (3006, 3007, 3008, 3009)),
        *(
            Asked(code, SUBJECT, body)
            for code in (3006, 3007)
            for body in (b"", b"{", {}, {"policies": []}, policies())
        ),
        *(
            Asked(3006, {"subject": subject}, policies({}))
            for subject in ("", "admin-codes", "Other:admin-codes", "User:none")
        ),
        *(
            Asked(3006, SUBJECT, policies(entry))
            for entry in (
                *({"resource": text} for text in ("", "a", "Foo:a", "Topic:", "Any:*", "topic:a**", "Namespace:a:b")),
                *({"actions": names} for names in ([], ["Foo"], ["ANY"], ["Foo", "sub", "All"])),
                *({"decision": text} for text in ("", "x", None, "deny")),
                *({"sourceIps": texts} for texts in ([], ["x"], ["1.2.3.4/33"], ["1.2.3.4", "10.0.0.0/8", "::1"])),
            )
        ),
        *(
            Asked(3006, SUBJECT, policies({"resource": "Group:g"}, policy_type=kind))
            for kind in ("zz", None, "default")
        ),
        Asked(3007, {"subject": "user:admin-codes"}, policies({"actions": ["Sub"]}, {"resource": "Topic:b"})),
        *(Asked(3009, {"subject": subject}) for subject in ("User:admin-codes", "zz", "", "User:none")),
        *(Asked(3010, {"subjectFilter": "admin-codes", "resourceFilter": part}) for part in ("", "b", "zz")),
        *(Asked(3008, {**SUBJECT, "resource": name}) for name in ("Topic:none", "topic:a")),
        Asked(3008, {**SUBJECT, "resource": "Group:g", "policyType": "Default"}),
        Asked(3009, SUBJECT),
        *(Asked(3008, {"subject": subject}) for subject in ("zz", "User:none", "User:admin-codes", "User:admin-codes")),
        Asked(3006, SUBJECT, policies({})),
        Asked(3003, USER),
        Asked(3009, SUBJECT),
        Asked(3001, USER, {"password": "p"}),
        Asked(3009, SUBJECT),
        Asked(3003, USER),
        Asked(Code.RESET_MASTER_FLUSH_OFFSET, {"masterFlushOffset": 5}),
        Asked(Code.GET_BROKER_EPOCH_CACHE),
    ],
    "topics": [
        *(Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "topic": name}) for name in ("TBW102", BROKER_NAME, CLUSTER)),
        *(
            Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "topic": name})
            for name in ("", "a b", "x" * 128, "rmq_sys_")
        ),
        *(
            Asked(Code.UPDATE_AND_CREATE_TOPIC, {**CREATE, "attributes": change})
            # Without "+message.type=X": since 5.5 the remark lists LITE, too.
            for change in ("a", "+a", "+a=b", "-a", "+=x", "a=b", "+message.type=MIXED", ",")
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
    "controls": [
        # Producers stop using queues first, then consumers.
        *(queues(4, 4), group(), *sends(0, 1, 2, 3), queues(2, 4), *sends(1, 2, 3, 4), readable(1, 2), readable(3, 2)),
        *(*pulls(1, 3, 4), queues(2, 2), *sends(1, 2, 3), readable(1, 3), *pulls(1, 2, 3)),
        *(queues(4, 2), *sends(3), *pulls(3)),
        # Permissions of a topic.
        *(queues(4, 4, 4), *sends(0), readable(0, 2), *pulls(0)),
        *(asked for perm in (2, 0, 1) for asked in (queues(4, 4, perm), *sends(0), *pulls(0), *POPS)),
        *(queues(4, 4), queues(4, 4, topic=ORDERED), *sends(0, topic=ORDERED)),
        # Permissions of a broker: only ordered messages stop at once, for all others the route is withdrawn.
        *(broker_permission(4), *sends(0), *sends(0, topic=ORDERED), broker_permission(2), *pulls(0)),
        *(*POPS, broker_permission(6), readable(0, 6)),
        # Permissions of a group.
        *(group(consumeEnable=False), *pulls(0), *pulls(0, sysFlag=2), *POPS, group(consumeEnable=True)),
        *(asked for may in (False, True) for asked in (group(consumeFromMinEnable=may), *MIN_OFFSETS, *pulls(0))),
        *(group(whichBrokerWhenConsumeSlowly=3, brokerId=2), *pulls(0), group()),
        *(Asked(353, {**FORBIDDEN, "readable": may}) for may in ("false", "true")),
        Asked(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "admin_codes_slow"}),
        *(Asked(Code.DELETE_TOPIC_IN_BROKER, {"topic": topic}) for topic in (SHRUNK, ORDERED)),
        Asked(Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "admin_codes_slow"}),
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
        # With the default, true, our broker answers 0 for an empty queue, so that a new group misses no message.
        Asked(Code.QUERY_CONSUMER_OFFSET, {**OFFSET, "setZeroIfNotFound": "false"}),
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
    codes = {ours.code for _, _, ours in pairs[name]}
    assert 0 in codes and len(codes) > 2
