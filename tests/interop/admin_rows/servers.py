"""Rows of the table of admin commands: clusters, topics, brokers, name servers."""

from __future__ import annotations

import re

from tests.interop.admin_world import Row


def column(text: str, number: int) -> set[str]:
    """Return a column of mqadmin's output, without its title."""
    return {words[number] for line in text.splitlines()[1:] if len(words := line.split()) > number}


def every(done, world, count=1) -> bool:
    """Return True if ``count`` servers, all of this world, have done it."""
    return len(done) == count and all(one["where"] in (world.broker, world.namesrv) for one in done)


def _stays_wiped(world) -> bool:
    """Return True if the route shows no write permission. A broker that registers topics of earlier rows at the same
    moment restores the permission, so Apache's broker gets two more tries."""
    for _ in range(3):
        if world.ask("topic route {topic}")["queueDatas"][0]["perm"] == 4:
            return True
        world.ask("namesrv wipe-write {broker_name}")
    return False


ROWS = [
    Row(
        "clusterList",
        "",
        "cluster list",
        lambda rows, world: (
            [(row["clusterName"], row["brokerName"], row["brokerId"], row["addr"]) for row in rows]
            == [(world.cluster, world.broker_name, 0, world.broker)]
            and rows[0]["version"].startswith("V5")
            and rows[0]["active"]
            and not rows[0]["trouble"]
        ),
        java=lambda text, rows: column(text, 3) == {row["addr"] for row in rows},
    ),
    Row(
        "clusterList",
        "-m",
        "cluster list -m",
        lambda rows, world: rows[0]["inToday"] >= 12,
        java=lambda text, rows: column(text, 1) == {row["brokerName"] for row in rows},
    ),
    Row(
        "clusterRT",
        "-a 2 -s 16",
        "cluster rt -a 2 -s 16",
        lambda answer, world: (answer["stored"], answer["failed"]) == (2, 0) and answer["meanMs"] > 0,
    ),
    Row(
        "checkMsgSendRT",
        "-t {topic} -a 4 -s 16",
        "topic rt {empty} -a 4 -s 16",
        lambda answer, world: {one["queueId"] for one in answer["sends"]} == {0, 1, 2, 3} and answer["stored"] == 4,
    ),
    Row(
        "topicList",
        "",
        "topic list --system",
        lambda names, world: {world.topic, world.empty, "TBW102"} <= set(names),
        java=lambda text, names: set(text.splitlines()) >= set(names),
    ),
    Row(
        "topicList",
        "-c",
        "topic list -c",
        lambda rows, world: (
            {row["consumerGroup"] for row in rows if row["topic"] == world.topic} == {world.group, world.online}
            and all(row["clusterName"] == world.cluster for row in rows)
        ),
        java=lambda text, rows: all(row["topic"] in text for row in rows),
    ),
    Row(
        "topicRoute",
        "-t {topic}",
        "topic route {topic}",
        lambda route, world: (
            route["brokerDatas"][0]["brokerAddrs"] == {"0": world.broker}
            and (route["queueDatas"][0]["readQueueNums"], route["queueDatas"][0]["perm"]) == (4, 6)
        ),
        java=lambda text, route: f'"brokerName":"{route["queueDatas"][0]["brokerName"]}"' in re.sub(r"\s", "", text),
    ),
    Row(
        "topicStatus",
        "-t {topic}",
        "topic status {topic}",
        lambda status, world: (
            [(row["queueId"], row["minOffset"], row["maxOffset"]) for row in status["queues"]]
            == [(number, 0, 3) for number in range(4)]
            and max(row["lastUpdatedTimestamp"] for row in status["queues"]) == world.messages[-1].store_timestamp
        ),
        java=lambda text, status: column(text, 3) >= {"3"},
    ),
    Row(
        "topicClusterList",
        "-t {topic}",
        "topic clusters {topic}",
        lambda names, world: names == [world.cluster],
        java=lambda text, names: text.split() == names,
    ),
    Row(
        "updateTopic",
        "-c {cluster} -t row_topic -r 3 -w 2",
        "topic create row_topic -c {cluster} -r 3 -w 2",
        lambda done, world: (
            every(done, world)
            and world.ask("topic config row_topic")[world.broker_name]["readQueueNums"] == 3
            and world.ask("topic config row_topic")[world.broker_name]["writeQueueNums"] == 2
        ),
    ),
    Row(
        "updateTopic",
        "-b {broker} -t row_fifo -a +message.type=FIFO -o true",
        "admin updateTopic -b {broker} -t row_fifo -r 2 -w 2 -a +message.type=FIFO -o true",
        lambda done, world: (
            every(done, world, 2)
            and world.ask("topic config row_fifo")[world.broker_name]["attributes"] == {"message.type": "FIFO"}
            and world.ask("topic order row_fifo")["order"] == f"{world.broker_name}:2"
        ),
    ),
    Row(
        "updateTopicPerm",
        "-t row_topic -p 4",
        "topic perm row_topic r",
        lambda done, world: every(done, world) and world.ask("topic config row_topic")[world.broker_name]["perm"] == 4,
    ),
    Row(
        "updateTopicPerm",
        "-b {broker} -t row_topic -p 6",
        "admin updateTopicPerm -b {broker} -t row_topic -p 6",
        lambda done, world: (
            done[0]["done"].endswith("from r to rw")
            and world.ask("topic config row_topic")[world.broker_name]["readQueueNums"] == 3
        ),
    ),
    Row(
        "updateOrderConf",
        "-t row_topic -m put -v {broker_name}:2",
        "topic order row_topic -m put -v {broker_name}:2",
        every,
    ),
    Row(
        "updateOrderConf",
        "-t row_topic -m get",
        "topic order row_topic -m get",
        lambda answer, world: answer["order"] == f"{world.broker_name}:2",
    ),
    Row(
        "updateOrderConf",
        "-t row_topic -m delete",
        "topic order row_topic -m delete",
        lambda done, world: every(done, world) and world.ask("topic order row_topic")["order"] is None,
    ),
    Row(
        "deleteTopic",
        "-c {cluster} -t row_topic",
        "topic delete row_topic -c {cluster}",
        lambda done, world: every(done, world, 2) and "row_topic" not in world.ask("topic list"),
    ),
    Row(
        "allocateMQ",
        "-t {topic} -i 192.0.2.1,192.0.2.2,192.0.2.3",
        "topic allocate {topic} 192.0.2.1,192.0.2.2,192.0.2.3",
        lambda rows, world: (
            [(row["client"][-1], row["queueId"]) for row in rows] == [("1", 0), ("1", 1), ("2", 2), ("3", 3)]
        ),
        java=lambda text, rows: all(row["client"] in text for row in rows),
    ),
    Row(
        "statsAll",
        "-t {topic}",
        "topic stats {topic}",
        lambda rows, world: (
            {row["consumerGroup"]: row["accumulation"] for row in rows} == {world.group: 8, world.online: 0}
            and rows[0]["in24Hours"] >= 0
        ),
        java=lambda text, rows: {row["consumerGroup"] for row in rows} <= column(text, 1),
    ),
    Row(
        "statsAll",
        "-a",
        "topic stats -a",
        lambda rows, world: all(row["in24Hours"] or row["out24Hours"] for row in rows),
    ),
    Row(
        "brokerStatus",
        "-b {broker}",
        "broker status -b {broker}",
        lambda answer, world: {"putTps", "commitLogMaxOffset", "bootTimestamp"} <= answer[world.broker].keys(),
        java=lambda text, answer: "commitLogMaxOffset" in text,
    ),
    Row(
        "brokerStatus",
        "-c {cluster}",
        "broker status -c {cluster}",
        lambda answer, world: list(answer) == [world.broker] and answer[world.broker]["brokerActive"] == "true",
    ),
    Row(
        "getBrokerConfig",
        "-b {broker}",
        "broker config-get -b {broker}",
        lambda answer, world: (
            answer[world.broker]["brokerName"] == world.broker_name and "flushIntervalCommitLog" in answer[world.broker]
        ),
        java=lambda text, answer: "flushIntervalCommitLog" in text,
    ),
    Row(
        "getBrokerConfig",
        "-c {cluster}",
        "broker config-get -c {cluster}",
        lambda answer, world: answer[world.broker]["brokerClusterName"] == world.cluster,
    ),
    Row(
        "updateBrokerConfig",
        "-b {broker} -k flushIntervalCommitLog -v 333",
        "broker config-set -b {broker} flushIntervalCommitLog 333",
        lambda done, world: (
            every(done, world)
            and world.ask("broker config-get -b {broker}")[world.broker]["flushIntervalCommitLog"] == "333"
        ),
    ),
    Row(
        "brokerConsumeStats",
        "-b {broker}",
        "broker consume-stats -b {broker}",
        lambda answer, world: (
            {(row["group"], row["queueId"], row["diff"]) for row in answer["rows"] if row["topic"] == world.topic}
            == {(group, number, lag) for group, lag in ((world.group, 2), (world.online, 0)) for number in range(4)}
        ),
        java=lambda text, answer: "Diff Total:" in text,
    ),
    Row(
        "brokerConsumeStats",
        "-b {broker} -l 2",
        "broker consume-stats {broker_name} -l 2",
        lambda answer, world: (
            {row["group"] for row in answer["rows"] if row["topic"] == world.topic} == {world.group}
            and answer["diffTotal"] == sum(row["diff"] for row in answer["rows"]) >= 8
        ),
    ),
    Row(
        "sendMsgStatus",
        "-b {broker_name} -s 16 -c 3",
        "broker send-test {broker_name} -s 16 -c 3",
        lambda answer, world: [one["result"] for one in answer["sends"]] == ["SEND_OK"] * 3,
    ),
    Row(
        "haStatus",
        "-b {broker}",
        "broker ha-status -b {broker}",
        lambda answer, world: answer[world.broker]["master"] and answer[world.broker]["haConnectionInfo"] == [],
        java=lambda text, answer: "SlaveAddr" in text,
    ),
    Row(
        "haStatus",
        "-c {cluster}",
        "admin haStatus -c {cluster}",
        lambda answer, world: answer[world.broker]["masterCommitLogMaxOffset"] > 0,
    ),
    Row("cleanExpiredCQ", "-b {broker}", "broker clean-expired-cq -b {broker}", every),
    Row("cleanUnusedTopic", "-c {cluster}", "broker clean-unused-topic -c {cluster}", every),
    Row("deleteExpiredCommitLog", "-b {broker}", "broker delete-expired-commitlog -b {broker}", every),
    Row(
        "getNamesrvConfig",
        "",
        "namesrv config-get",
        lambda answer, world: answer[world.namesrv]["waitSecondsForService"] == "45",
        java=lambda text, answer: "waitSecondsForService" in text,
    ),
    Row(
        "updateNamesrvConfig",
        "-k waitSecondsForService -v 44",
        "namesrv config-set waitSecondsForService 44",
        lambda done, world: (
            every(done, world)
            and world.ask("namesrv config-get")[world.namesrv]["waitSecondsForService"] == "44"
            and every(world.ask("namesrv config-set waitSecondsForService 45"), world)
        ),
    ),
    Row(
        "wipeWritePerm",
        "-b {broker_name}",
        "namesrv wipe-write {broker_name}",
        lambda done, world: every(done, world) and _stays_wiped(world),
    ),
    Row(
        "addWritePerm",
        "-b {broker_name}",
        "namesrv add-write {broker_name}",
        lambda done, world: every(done, world) and world.ask("topic route {topic}")["queueDatas"][0]["perm"] == 6,
    ),
    Row(
        "updateKvConfig",
        "-s ROW -k a -v b",
        "namesrv kv-put ROW a b",
        lambda done, world: every(done, world) and world.ask("namesrv kv-get ROW") == {"a": "b"},
    ),
    Row(
        "deleteKvConfig",
        "-s ROW -k a",
        "namesrv kv-delete ROW a",
        lambda done, world: every(done, world) and world.ask("namesrv kv-get ROW") == {},
    ),
]
