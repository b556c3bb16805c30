"""Rows of the table of admin commands: groups, offsets, consumers, producers, messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rmqkit import Message, sync
from rmqkit.client.runtime.settings import Tracing
from tests.interop.admin_world import SECONDS_MAX, Row, World
from tests.patience import producing

TRACED = "7F00000100001234AAAA0000BBBB0001"
"""The unique key of a message that its producer traces."""


def offsets(rows: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in rows]


def keys(messages: list[dict[str, Any]]) -> list[str]:
    return [message["msgId"] for message in messages]


def stored_within(messages: list[dict[str, Any]], world: World, first: int, last: int) -> bool:
    """Return True if these are the messages stored from ``first`` to ``last``, both included."""
    low, high = world.messages[first].store_timestamp, world.messages[last].store_timestamp
    return keys(messages) == [one.unique_key for one in world.messages if low <= one.store_timestamp <= high]


def send_traced(world: World) -> bool:
    """Send a message with a traced producer, and wait until the trace can be found."""
    with sync.Producer("row_traced", world.namesrv, settings=producing(trace=Tracing())) as producer:
        producer.send(Message(topic="row_messages", body=b"traced", msg_id=TRACED))
    return waits_for(lambda: len(world.ask(f"message trace {TRACED}")) == 1)


def waits_for(is_so: Callable[[], bool]) -> bool:
    """Wait until a condition holds. Brokers add messages to queues and indexes some time after they stored them."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            if is_so():
                return True
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, f"not within {SECONDS_MAX} s"
        time.sleep(0.05)


ROWS = [
    Row(
        "updateSubGroup",
        "-b {broker} -g row_group -r 3",
        "group create row_group -b {broker} -r 3",
        lambda answer, world: answer[world.broker_name]["retryMaxTimes"] == 3,
    ),
    Row(
        "updateSubGroup",
        "-c {cluster} -g row_group -s false -q 2",
        "admin updateSubGroup -c {cluster} -g row_group -s false -q 2",
        lambda answer, world: (
            {name: answer[world.broker_name][name] for name in ("consumeEnable", "retryQueueNums", "retryMaxTimes")}
            == {"consumeEnable": False, "retryQueueNums": 2, "retryMaxTimes": 3}
        ),
        note="what is not given stays",
    ),
    Row(
        "getConsumerConfig",
        "-g {group}",
        "group show {group}",
        lambda answer, world: answer[world.broker_name]["groupName"] == world.group,
        java=lambda text, answer: "retryMaxTimes" in text and "broker-interop" in text,
    ),
    Row(
        "consumerProgress",
        "-g {group}",
        "group progress {group}",
        lambda answer, world: (
            (answer["diffTotal"], [queue["consumerOffset"] for queue in answer["queues"]]) == (8, [1] * 4)
            and {queue["brokerName"] for queue in answer["queues"]} == {world.broker_name}
        ),
        note="mqadmin needs the retry topic, which a group has that was online",
    ),
    Row(
        "consumerProgress",
        "-g {online} -s true",
        "admin consumerProgress -g {online} -s true",
        lambda answer, world: (
            answer["diffTotal"] == 0
            and {queue["client"] for queue in answer["queues"]} == {world.client_id}
            and {queue["consumerOffset"] for queue in answer["queues"] if queue["topic"] == world.topic} == {3}
        ),
        java=lambda text, answer: "Consume Diff Total: 0" in text,
    ),
    Row(
        "consumerProgress",
        "",
        "group progress",
        lambda rows, world: (
            {row["group"]: (row["count"], row["diffTotal"]) for row in rows}.items()
            >= {world.group: (0, 8), world.online: (1, 0)}.items()
            and {row["version"] for row in rows if row["group"] == world.online} == {"V5_4_0"}
        ),
        java=lambda text, rows: any(row["group"][:32] in text and row["count"] == 1 for row in rows),
    ),
    Row(
        "consumerConnection",
        "-g {online}",
        "consumer connections {online}",
        lambda answer, world: (
            [one["clientId"] for one in answer["connectionSet"]] == [world.client_id]
            and answer["subscriptionTable"][world.topic]["subString"] == "*"
            and answer["messageModel"] == "CLUSTERING"
        ),
        java=lambda text, answer: all(one["clientId"] in text for one in answer["connectionSet"]),
    ),
    Row(
        "consumerStatus",
        "-g {online}",
        "consumer status {online}",
        lambda answer, world: (
            answer["verdict"] == {"sameSubscription": True, "troubles": []}
            and {held["queue"]["queueId"] for held in answer["clients"][world.client_id]["mqTable"]} == {0, 1, 2, 3}
        ),
    ),
    Row(
        "consumerStatus",
        "-g {online} -i {client_id} -s",
        "admin consumerStatus -g {online} -i {client_id} -s",
        lambda answer, world: "thread " in answer["clients"][world.client_id]["jstack"],
        java=lambda text, answer: "PROP_CONSUME_TYPE" in text,
    ),
    Row(
        "producerConnection",
        "-g {producers} -t {topic}",
        "producer connections {producers} -t {topic}",
        lambda answer, world: [one["language"] for one in answer] == ["PYTHON"],
        java=lambda text, answer: answer[0]["clientId"] in text,
    ),
    Row(
        "producer",
        "-b {broker}",
        "producer list -b {broker}",
        lambda rows, world: (
            {row["brokerName"] for row in rows if row["group"] == world.producers} == {world.broker_name}
        ),
        java=lambda text, rows: any(row["clientId"] in text for row in rows),
    ),
    Row(
        "resetOffsetByTime",
        "-g row_group -t {topic} -s 1",
        "offset reset row_group {topic} 1",
        lambda rows, world: offsets(rows) == [0] * 4 and {row["brokerName"] for row in rows} == {world.broker_name},
    ),
    Row(
        "resetOffsetByTime",
        "-g row_group -t {topic} -s -1",
        "admin resetOffsetByTime -g row_group -t {topic} -s -1",
        lambda rows, world: offsets(rows) == [3] * 4,
    ),
    Row(
        "resetOffsetByTime",
        "-g row_group -t {topic} -s {messages[4].store_timestamp}",
        "offset reset row_group {topic} {messages[4].store_timestamp}",
        lambda rows, world: (
            offsets(rows)
            == [
                sum(
                    one.store_timestamp < world.messages[4].store_timestamp and one.queue_id == queue_id
                    for one in world.messages
                )
                for queue_id in range(4)
            ]
        ),
    ),
    Row(
        "resetOffsetByTime",
        "-b {broker} -g row_group -t {topic} -s -1 -q 2 -o 1",
        "admin resetOffsetByTime -b {broker} -g row_group -t {topic} -s -1 -q 2 -o 1",
        lambda rows, world: [(row["queueId"], row["offset"]) for row in rows] == [(2, 1)],
    ),
    Row(
        "skipAccumulatedMessage",
        "-g row_group -t {topic}",
        "offset skip row_group {topic}",
        lambda rows, world: (
            offsets(rows) == [3] * 4 and world.ask("group progress row_group -t {topic}")["diffTotal"] == 0
        ),
    ),
    Row(
        "cloneGroupOffset",
        "-s {group} -d row_group -t {topic}",
        "offset clone {group} row_group {topic}",
        lambda rows, world: (
            offsets(rows) == [1] * 4 and world.ask("group progress row_group -t {topic}")["diffTotal"] == 8
        ),
        note="also to a group that was reset just before",
    ),
    Row(
        "deleteSubGroup",
        "-b {broker} -g row_group -r false",
        "group delete row_group -b {broker} -r false",
        lambda answer, world: (
            bool(world.ask("group create row_gone -c {cluster}"))
            and ("row_group" not in world.ask("group list") or world.side == "Apache")
        ),
        note="5.5.0 creates a group whose offsets stay at once again",
    ),
    Row(
        "deleteSubGroup",
        "-c {cluster} -g row_group",
        "admin deleteSubGroup -c {cluster} -g row_gone",
        lambda answer, world: "row_gone" not in world.ask("group list"),
    ),
    Row(
        "exportMetadata",
        "-b {broker} -f exported",
        "group export -b {broker}",
        lambda answer, world: (
            answer[world.broker_name]["topicConfigTable"][world.topic]["writeQueueNums"] == 4
            and world.group in answer[world.broker_name]["subscriptionGroupTable"]
        ),
    ),
    Row(
        "queryMsgById",
        "-t {topic} -i {messages[5].message_id}",
        "message show {messages[5].message_id}",
        lambda answer, world: (
            (answer["msgId"], answer["keys"], answer["body"]) == (world.messages[5].unique_key, ["key-5"], "message 5")
            and answer["topic"] == world.topic
        ),
        java=lambda text, answer: (
            answer["offsetMsgId"] in text and f"CommitLog Offset:    {answer['physicalOffset']}" in text
        ),
    ),
    Row(
        "queryMsgById",
        "-t {topic} -i {messages[1].message_id} -g {online} -d {client_id}",
        "admin queryMsgById -t {topic} -i {messages[1].message_id} -g {online} -d {client_id}",
        lambda answer, world: answer["consumeResult"] == "CR_SUCCESS",
        java=lambda text, answer: "CR_SUCCESS" in text,
    ),
    Row(
        "queryMsgByUniqueKey",
        "-t {topic} -i {messages[2].unique_key}",
        "admin queryMsgByUniqueKey -t {topic} -i {messages[2].unique_key}",
        lambda answer, world: (
            (answer["offsetMsgId"], answer["queueOffset"]) == (world.messages[2].message_id, 0)
            and answer["tags"] == "A"
        ),
        java=lambda text, answer: answer["topic"] in text and answer["keys"][0] in text,
    ),
    Row(
        "queryMsgByKey",
        "-t {topic} -k key-7",
        "message by-key {topic} key-7",
        lambda answer, world: keys(answer) == [world.messages[7].unique_key],
        java=lambda text, answer: answer[0]["msgId"] in text,
    ),
    Row(
        "queryMsgByOffset",
        "-t {topic} -b {broker_name} -i 3 -o 2",
        "message at {topic} {broker_name} 3 2",
        lambda answer, world: (
            (answer["msgId"], answer["brokerName"]) == (world.messages[11].unique_key, world.broker_name)
        ),
        java=lambda text, answer: answer["msgId"] in text or answer["offsetMsgId"] in text,
    ),
    Row(
        "printMsg",
        "-t {topic}",
        "message list {topic}",
        lambda answer, world: keys(answer) == [one.unique_key for one in world.messages],
        java=lambda text, answer: text.count("MSGID:") == len(answer),
    ),
    Row(
        "printMsg",
        "-t {topic} -s B",
        "message list {topic} --tags B",
        lambda answer, world: keys(answer) == [one.unique_key for one in world.messages if one.tag == "B"],
    ),
    Row(
        "printMsg",
        "-t {topic} -b {messages[3].store_timestamp} -e {messages[8].store_timestamp}",
        "message list {topic} --from {messages[3].store_timestamp} --to {messages[8].store_timestamp}",
        lambda answer, world: stored_within(answer, world, 3, 8),
    ),
    Row(
        "printMsgByQueue",
        "-t {topic} -a {broker_name} -i 1 -p true -d true",
        "admin printMsgByQueue -t {topic} -a {broker_name} -i 1 -p true -d true",
        lambda answer, world: keys(answer) == [one.unique_key for one in world.messages if one.queue_id == 1],
    ),
    Row(
        "consumeMessage",
        "-t {topic} -b {broker_name} -i 0 -o 1 -c 5",
        "message consume {topic} -b {broker_name} -i 0 -o 1 -c 5",
        lambda answer, world: [(one["queueId"], one["queueOffset"]) for one in answer] == [(0, 1), (0, 2)],
    ),
    Row(
        "queryCq",
        "-t {topic} -q 0 -i 1 -c 2",
        "message entries {topic} 0 1 -c 2 -g {online}",
        lambda answer, world: (
            [entry["tagsCode"] for entry in answer["queueData"]] == [65, 65]
            and (answer["minQueueIndex"], answer["maxQueueIndex"]) == (0, 3)
            and answer["subscriptionData"]["subString"] == "*"
        ),
        java=lambda text, answer: str(answer["queueData"][0]["physicOffset"]) in text,
    ),
    Row(
        "updateTopic",
        "-b {broker} -t row_messages -r 1 -w 1",
        "topic create row_messages -b {broker} -r 1 -w 1",
        lambda answer, world: waits_for(lambda: bool(world.ask("topic route row_messages"))),
    ),
    Row(
        "sendMessage",
        "-t row_messages -p a~text -k row-key -c A -b {broker_name} -i 0",
        "message send row_messages a~text -k row-key -c A -b {broker_name} -i 0",
        lambda answer, world: (
            (answer["sendResult"], answer["queueId"]) == ("SEND_OK", 0)
            and waits_for(lambda: world.ask("message by-key row_messages row-key")[0]["body"] == "a text")
            and world.ask(f"message show {answer['offsetMsgId']}")["msgId"] == answer["msgId"]
            and send_traced(world)
        ),
    ),
    Row(
        "queryMsgTraceById",
        f"-i {TRACED}",
        f"message trace {TRACED}",
        lambda rows, world: (
            [(row["kind"], row["group"], row["status"]) for row in rows] == [("Pub", "row_traced", "success")]
        ),
        java=lambda text, rows: "row_traced" in text,
    ),
    Row(
        "queryMsgById",
        f"-t row_messages -i {TRACED} -s true",
        f"admin queryMsgById -t row_messages -i {TRACED} -s true",
        lambda answer, world: (
            (answer["msgId"], answer["sendResult"]) == (TRACED, "SEND_OK")
            and waits_for(lambda: len(world.ask("message list row_messages")) == 3)
        ),
    ),
]
