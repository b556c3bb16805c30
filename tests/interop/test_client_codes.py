"""Requests of clients and tools with missing, empty, unreadable and extreme fields: Apache's broker and ours answer
alike.

The other codes are in `test_send_answers` and `test_admin_codes`. Left out, because ours deliberately answers better:
an SQL92 expression in a pull that does not compile (Apache's broker delivers everything, ours refuses it), a count of
2,147,483,647 in a query (Apache's runs out of memory), putting an ordinary message into the half topic by code 323.
"""

import base64
import time

import pytest

from rmqkit.broker import assembly
from rmqkit.protocol.codes import RequestCode as Code
from tests.interop.apache import BROKER_NAME, CLUSTER, ApachePair
from tests.interop.asking import PULL_ALL, Asked, Pairs, answers_of_both, differences, odd, without
from tests.interop.test_admin_codes import SCENARIOS as ADMIN_SCENARIOS
from tests.interop.test_send_answers import probes

TOPIC, GROUP, OTHER = "ClientCodes", "codes_g", "codes_h"
FOR_EVER = (1 << 63) - 1
DAY_MS = 86_400_000
SOON_MS = int(time.time()) * 1000 + DAY_MS // 2


def create(topic: str) -> Asked:
    fields = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    return Asked(Code.UPDATE_AND_CREATE_TOPIC, {**fields, "topicFilterType": "SINGLE_TAG", "order": "false"})


def send(topic: str, key: str, properties: str = "") -> Asked:
    values = (
        "p",
        topic,
        "TBW102",
        4,
        0,
        0,
        1_700_000_000_000,
        0,
        f"UNIQ_KEY\x01{key:0>32}\x02{properties}",
        0,
        "false",
    )
    return Asked(Code.SEND_MESSAGE_V2, dict(zip("abcdefghijk", values, strict=True)), b"hello")


def changed(code: int, good: dict[str, object], *changes: dict[str, object]) -> list[Asked]:
    return [Asked(code, {**good, **change}) for change in changes]


def handle_of(
    version: str = "v1", topic: str = "CodesTimer", broker: str = BROKER_NAME, at: object = SOON_MS, key: str = "K"
) -> str:
    """Return a recall handle (remoting.md §7.6)."""
    return base64.urlsafe_b64encode(f"{version} {topic} {broker} {at} {key}".encode()).decode()


RECALLED = handle_of()


def recall(topic: str = "CodesTimer", handle: str = RECALLED) -> Asked:
    return Asked(Code.RECALL_MESSAGE, {"producerGroup": "p", "topic": topic, "recallHandle": handle})


PULL: dict[str, object] = {
    **PULL_ALL,
    "consumerGroup": GROUP,
    "topic": "CodesPull",
    "expressionType": "TAG",
}
KEYED = {"topic": "CodesQuery", "key": "k1", "maxNum": 10, "beginTimestamp": 0, "endTimestamp": FOR_EVER}
HALF = "TRAN_MSG\x01true\x02PGROUP\x01p\x02KEYS\x01k\x02"
END: dict[str, object] = {
    "producerGroup": "p",
    "tranStateTableOffset": "@queue",
    "commitLogOffset": "@physical",
    "commitOrRollback": 8,
    "fromTransactionCheck": "false",
    "msgId": "x",
    "transactionId": "x",
}
TRIED = {"topic": TOPIC, "subString": "a > 5", "expressionType": "SQL92"}
OFFSET = {"consumerGroup": GROUP, "topic": "CodesProgress", "queueId": 0, "commitOffset": 2}
ENTRIES = {"topic": "CodesProgress", "queueId": 0, "index": 0, "count": 10}
COMPARED = {"topic": "CodesProgress", "compareGroup": GROUP}
POLICIES: tuple[object, ...] = (
    *({"type": "EXPONENTIAL"}, {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": 1}}, None, {}, "x"),
    *({"customizedRetryPolicy": {"next": [5000]}}, {"customizedRetryPolicy": {}}),
    {"exponentialRetryPolicy": {"initial": -5, "max": "x"}},
)
"""Values of ``groupRetryPolicy``, which brokers store and return and proxies use."""


def readable(topic: str, count: int = 1) -> Asked:
    """Return a pull that waits for a number of messages: Apache's broker shows them a moment after it stored them."""
    return Asked(Code.PULL_MESSAGE, {**PULL, "topic": topic, "queueOffset": count - 1, "sysFlag": 6}, is_awaited=True)


def member(client_id: str, group: str, *topics: str, **fields: object) -> Asked:
    subscriptions = [{"topic": topic, "subString": "*", "subVersion": 5} for topic in topics]
    consumer = {"groupName": group, "messageModel": "CLUSTERING", "subscriptionDataSet": subscriptions}
    return Asked(Code.HEART_BEAT, body={"clientID": client_id, "consumerDataSet": [{**consumer, **fields}]})


SCENARIOS: dict[str, list[Asked]] = {
    "pulls": [
        create("CodesPull"),
        *(send("CodesPull", f"pull{i}", "TAGS\x01A\x02") for i in range(3)),
        readable("CodesPull", 3),
        *odd(
            *(Code.PULL_MESSAGE, PULL, "queueId", "queueOffset", "maxMsgNums", "sysFlag", "commitOffset"),
            *("suspendTimeoutMillis", "subVersion"),
        ),
        *(
            asked
            for code in (Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE)
            for asked in changed(
                *(code, PULL, {}, {"queueOffset": 2}, {"queueOffset": 3}, {"queueOffset": 4}, {"queueOffset": 1 << 62}),
                *({"queueOffset": -(1 << 62)}, {"topic": "none"}, {"topic": ""}, {"consumerGroup": "a b"}),
                *({"consumerGroup": ""}, {"queueId": 9}, {"sysFlag": 0}, {"subscription": "||"}, {"subscription": ""}),
                *({"subscription": "B"}, {"subscription": "B || A"}, {"expressionType": "SQL92", "subscription": ""}),
                *({"expressionType": "SQL92", "subscription": "TAGS = 'A'"}, {"expressionType": ""}),
                {"maxMsgBytes": "x"},
                *({"queueId": 1}, {"queueId": 1, "queueOffset": 5}, {"queueId": 1, "queueOffset": -5}),
            )
        ),
        # Requests about a registered group.
        member("c1", GROUP, "CodesPull"),
        *changed(
            *(Code.PULL_MESSAGE, {**PULL, "sysFlag": 0}, {}, {"subVersion": 5}, {"subVersion": 6}, {"topic": "TBW102"}),
            {"consumerGroup": "codes_nobody"},
        ),
        Asked(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": GROUP, "topic": "CodesPull", "readable": "false"}),
        *changed(Code.PULL_MESSAGE, PULL, {"sysFlag": 0}, {}),
        Asked(Code.UPDATE_AND_GET_GROUP_FORBIDDEN, {"group": GROUP, "topic": "CodesPull", "readable": "true"}),
        member("c1", GROUP, "CodesPull", messageModel="BROADCASTING"),
        Asked(200, body={"groupName": GROUP, "consumeBroadcastEnable": False}),
        *changed(Code.PULL_MESSAGE, PULL, {"sysFlag": 0}, {}),
        Asked(200, body={"groupName": GROUP, "consumeEnable": False}),
        *changed(Code.PULL_MESSAGE, PULL, {"sysFlag": 0}, {}),
        Asked(200, body={"groupName": GROUP}),
        Asked(Code.UPDATE_AND_CREATE_TOPIC, {**create("CodesPull").fields, "perm": 2}),
        *changed(Code.PULL_MESSAGE, PULL, {}),
        Asked(Code.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": GROUP}),
    ],
    "queries": [
        create("CodesQuery"),
        *(send("CodesQuery", f"query{i}", "KEYS\x01k1 k2\x02") for i in range(3)),
        readable("CodesQuery", 3),
        *odd(Code.VIEW_MESSAGE_BY_ID, {"offset": "@physical"}, "offset"),
        *changed(Code.VIEW_MESSAGE_BY_ID, {}, {"offset": "@physical"}, {"offset": "@physical+1"}, {"offset": 1 << 40}),
        *odd(Code.GET_EARLIEST_MSG_STORETIME, {"topic": "CodesQuery", "queueId": 0}, "queueId"),
        *changed(Code.GET_EARLIEST_MSG_STORETIME, {"queueId": 0}, {"topic": "none"}, {"topic": ""}),
        *odd(Code.QUERY_MESSAGE, KEYED, "maxNum", "beginTimestamp", "endTimestamp", but=((1 << 31) - 1,)),
        *changed(
            *(Code.QUERY_MESSAGE, KEYED, {"key": ""}, {"topic": ""}, {"key": "none"}, {"topic": "none"}, {"maxNum": 2}),
            *({"_UNIQUE_KEY_QUERY": "x"}, {"_UNIQUE_KEY_QUERY": "true", "key": f"{'query1':0>32}"}, {"indexType": "Z"}),
            *({"_UNIQUE_KEY_QUERY": "true", "maxNum": -1}, {"indexType": "T"}, {"indexType": "U"}, {"indexType": ""}),
            {"beginTimestamp": 5, "endTimestamp": 1},
        ),
        *(Asked(Code.CHECK_CLIENT_CONFIG, body=body) for body in (b"", b"{", b"[]", {})),
        *(
            Asked(Code.CHECK_CLIENT_CONFIG, body={"clientId": "c", "subscriptionData": {**TRIED, name: value}})
            for name, values in {"subString": ("a > 5", "a >", ""), "expressionType": ("X", None)}.items()
            for value in values
        ),
    ],
    "transactions": [
        create("CodesHalf"),
        send("CodesHalf", "half1", HALF),
        *(Asked(Code.END_TRANSACTION, without(END, name)) for name in ("producerGroup", "tranStateTableOffset")),
        *(Asked(Code.END_TRANSACTION, without(END, name)) for name in ("commitLogOffset", "commitOrRollback")),
        *changed(
            *(Code.END_TRANSACTION, END, {"producerGroup": "others"}, {"producerGroup": ""}, {"commitOrRollback": 4}),
            *({"tranStateTableOffset": "@queue+1"}, {"commitLogOffset": "@physical+1"}, {"commitLogOffset": 1 << 40}),
            *({"commitOrRollback": value} for value in ("x", "", -1, 1 << 40)),
        ),
        *changed(Code.PULL_MESSAGE, {**PULL, "topic": "CodesHalf"}, {}),
        *changed(Code.END_TRANSACTION, END, {"fromTransactionCheck": "x"}),
        readable("CodesHalf"),
        send("CodesHalf", "half2", HALF),
        *changed(Code.END_TRANSACTION, END, {"commitOrRollback": 12, "fromTransactionCheck": "true"}),
        *changed(Code.PULL_MESSAGE, {**PULL, "topic": "CodesHalf"}, {}),
        *(Asked(Code.RESUME_CHECK_HALF_MESSAGE, {"topic": TOPIC, "msgId": i}) for i in ("", "x", "z" * 32, "f" * 32)),
        Asked(Code.RESUME_CHECK_HALF_MESSAGE, {"topic": TOPIC}),
        Asked(Code.RESUME_CHECK_HALF_MESSAGE),
        send("CodesHalf", "half3", HALF),
        *changed(Code.RESUME_CHECK_HALF_MESSAGE, {"msgId": "@msgId"}, {}, {"topic": TOPIC}),
        *changed(Code.END_TRANSACTION, END, {"commitOrRollback": 12}),
    ],
    "progress": [
        create("CodesProgress"),
        *(send("CodesProgress", f"progress{i}", "TAGS\x01A\x02") for i in range(3)),
        readable("CodesProgress", 3),
        Asked(Code.QUERY_CONSUME_TIME_SPAN, {"topic": "CodesProgress", "group": OTHER}),
        *(Asked(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": group}) for group in (GROUP, OTHER)),
        *changed(Code.UPDATE_CONSUMER_OFFSET, OFFSET, {}, {"consumerGroup": OTHER, "commitOffset": 1}),
        *odd(Code.QUERY_CONSUME_TIME_SPAN, {"topic": "CodesProgress", "group": GROUP}),
        *changed(Code.QUERY_CONSUME_TIME_SPAN, {"group": GROUP}, {"topic": "none"}, {"topic": "CodesProgress"}),
        *odd(Code.QUERY_CORRECTION_OFFSET, {**COMPARED, "filterGroups": "x"}),
        *changed(Code.QUERY_CORRECTION_OFFSET, COMPARED, {}, {"compareGroup": OTHER}, {"compareGroup": "none"}),
        *changed(Code.QUERY_CORRECTION_OFFSET, COMPARED, {"topic": "none"}, {"filterGroups": OTHER}),
        Asked(Code.UPDATE_CONSUMER_OFFSET, {**OFFSET, "consumerGroup": OTHER, "commitOffset": 1}),
        *changed(
            *(Code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "CodesProgress"}, {}),
            *({"statsKey": "none"}, {"statsName": "NONE"}, {"statsName": ""}),
            {"statsName": "BROKER_PUT_NUMS", "statsKey": CLUSTER},
        ),
        *odd(Code.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "none"}),
        *(Asked(Code.GET_BROKER_CONSUME_STATS, fields) for fields in ({}, {"isOrder": "false"}, {"isOrder": "true"})),
        Asked(Code.GET_BROKER_CONSUME_STATS, {"isOrder": "x"}),
        *changed(Code.GET_CONSUME_STATS, {"consumerGroup": GROUP}, {}, {"topicList": "CodesProgress;none"}),
        *odd(Code.QUERY_CONSUME_QUEUE, ENTRIES, "queueId", "index", "count"),
        *changed(
            *(Code.QUERY_CONSUME_QUEUE, ENTRIES, {"topic": "none"}, {"queueId": 1}, {"consumerGroup": GROUP}),
            *({"consumerGroup": ""}, {"index": 3}, {"index": 2}, {"count": 1}),
        ),
        member("c2", GROUP, "CodesProgress"),
        *changed(Code.QUERY_CONSUME_QUEUE, ENTRIES, {"consumerGroup": GROUP}),
        Asked(Code.GET_BROKER_CONSUME_STATS, {"isOrder": "false"}),
        Asked(Code.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": GROUP}),
    ],
    "tables": [
        *(
            asked
            for number, policy in enumerate(POLICIES)
            for asked in (
                Asked(200, body={"groupName": f"codes_policy{number}", "groupRetryPolicy": policy}),
                Asked(352, {"group": f"codes_policy{number}"}),
            )
        ),
        *(Asked(code, body=body) for code in (21, 43, 201, 305, 328) for body in (b"", b"garbage")),
        *(Asked(21, fields) for fields in ({"topicSeq": "x"}, {"topicSeq": -1, "maxTopicNum": 1 << 40})),
        *(Asked(201, fields) for fields in ({"groupSeq": "x"}, {"groupSeq": -1, "maxGroupNum": 1 << 40})),
        *odd(Code.QUERY_TOPICS_BY_CONSUMER, {"group": "codes_none"}),
        *odd(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "codes_none"}),
        *(Asked(code) for code in (-5, 999, 1 << 30)),
    ],
    "timers and recalls": [
        create("CodesTimer"),
        *(
            send("CodesTimer", "T", f"{name}\x01{value}\x02{more}")
            for name in ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")
            for value in (-5, 0, "x", "", " 3", 1 << 70, FOR_EVER, 4 * DAY_MS)
            for more in ("", "TIMER_DEL_UNIQKEY\x01K\x02")
            if value != FOR_EVER or name == "TIMER_DELIVER_MS"  # Java's long overflows, and the message is due at once
        ),
        send("CodesTimer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02"),
        send("CodesTimer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS + 1}\x02"),
        send("CodesTimer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02TIMER_DELAY_SEC\x010\x02"),
        send("CodesTimer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02TIMER_OUT_MS\x015\x02"),
        send("CodesTimer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02DELAY\x011\x02"),
        send("%RETRY%codes_g", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02"),
        send("rmq_sys_wheel_timer", "T", f"TIMER_DELIVER_MS\x01{SOON_MS}\x02"),
        Asked(Code.UPDATE_BROKER_CONFIG, body=b"recallMessageEnable=false"),
        recall(),
        Asked(Code.UPDATE_BROKER_CONFIG, body=b"recallMessageEnable=true"),
        *odd(Code.RECALL_MESSAGE, recall().fields),
        *(recall(topic=topic) for topic in ("CodesTimer", "CodesPull", "Nowhere")),
        *(recall(handle=handle) for handle in ("", "x", "djE", "*", RECALLED[:-6])),
        *(recall(handle=handle_of(*parts)) for parts in (("v2",), ("v1", "CodesPull"), ("v1", "CodesTimer", "other"))),
        *(recall(handle=handle_of("v1", "CodesTimer", BROKER_NAME, at)) for at in (5, SOON_MS + 4 * DAY_MS)),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(managed_apache: ApachePair, tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return answers_of_both(SCENARIOS, managed_apache.broker_addr, tmp_path_factory.mktemp("ours") / "store")


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_answers_are_the_same(pairs: Pairs, name: str) -> None:
    assert differences(pairs[name]) == {}
    assert {ours.code for _, _, ours in pairs[name]} >= {0, 1}


def test_every_code_the_broker_answers_is_compared() -> None:
    served = {
        answered.code
        for handlers in (*assembly.HANDLERS, *assembly.MESSAGE_HANDLERS, assembly.PullHandlers)
        for method in vars(handlers).values()
        for answered in getattr(method, "answered", ())
    }
    asked = {
        one.code for scenarios in (SCENARIOS, ADMIN_SCENARIOS) for several in scenarios.values() for one in several
    }
    asked |= {probe.code for probe in probes("T")}
    # Requests of slaves are compared with a recorded conversation, in tests.broker.replication.test_slave_sync. Static
    # topics have behaviours in suite/test_static_topics.py.
    asked |= {
        Code.UPDATE_AND_CREATE_STATIC_TOPIC,
        *(Code.GET_ALL_DELAY_OFFSET, Code.GET_ALL_MESSAGE_REQUEST_MODE),
        *(Code.GET_TIMER_CHECK_POINT, Code.GET_TIMER_METRICS),
        # Requests since 5.5.1.
        *(Code.DELETE_TOPIC_IN_BROKER_LIST, Code.DELETE_SUBSCRIPTION_GROUP_LIST),
    }
    # They have no fields, and their answers are about the process and the present time.
    assert served - asked == {Code.GET_BROKER_RUNTIME_INFO, Code.GET_BROKER_CONFIG}
