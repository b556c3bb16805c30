"""Topics: created, changed, deleted and shown (remoting.md §4.3.7, §4.4; behaviour.md §9.9)."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.offsets import QueueRequest, UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.topics import TopicConfig, TopicRequest, TopicRoute
from rmqkit.store.table_journal import stored_table
from tests.broker.cluster import Cluster
from tests.virtual_time import run as run_virtual

CREATE = RequestCode.UPDATE_AND_CREATE_TOPIC
SEVERAL = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST
DELETE = RequestCode.DELETE_TOPIC_IN_BROKER
DELETE_SEVERAL = RequestCode.DELETE_TOPIC_IN_BROKER_LIST
FIELDS = {
    "topic": "T",
    "defaultTopic": "TBW102",
    "readQueueNums": 2,
    "writeQueueNums": 2,
    "perm": 6,
    "topicFilterType": "SINGLE_TAG",
}
TYPES = "value is not in set: [UNSPECIFIED, MIXED, TRANSACTION, PRIORITY, FIFO, DELAY, LITE, NORMAL]"
MIXED = "MIXED message type is not supported."


async def topic(cluster, name="T"):
    answer = await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic=name)
    return json.loads(answer.body) if answer.code == 0 else (answer.code, answer.remark)


async def route(cluster, name):
    command = request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest(name))
    return await cluster.client.call(cluster.standalone.namesrv_address, command, 60_000)


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"topic": "TBW102"}, 29, "The topic[TBW102] is conflict with system topic."),
        ({"topic": "broker-a"}, 29, "The topic[broker-a] is conflict with system topic."),
        ({"topic": "DefaultCluster"}, 29, "The topic[DefaultCluster] is conflict with system topic."),
        ({"topic": "rmq_sys_x"}, 29, "The topic[rmq_sys_x] is conflict with system topic."),
        ({"topic": ""}, 29, "The specified topic is blank."),
        (
            {"topic": "a b"},
            29,
            "The specified topic: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$",
        ),
        ({"topic": "x" * 128}, 29, f"The specified topic: {'x' * 128}, is longer than topic max length: 127"),
        ({"attributes": "+message.type=MIXED"}, 29, MIXED),
        ({"attributes": "+a=b"}, 1, "unsupported key: a"),
        ({"attributes": "+message.type=X"}, 1, TYPES),
        ({"attributes": "message.type=X"}, 1, "add/alter attribute format is wrong: message.type"),
        ({"topicFilterType": "WRONG"}, 1, "topicFilterType = [WRONG] value invalid"),
    ],
)
async def test_refused_topics(fields, code, remark, cluster):
    answer = await cluster.ask(CREATE, **(FIELDS | fields))
    assert (answer.code, answer.remark) == (code, remark)
    assert await topic(cluster) == (17, "No topic in this broker. topic: T")


@pytest.mark.parametrize(
    "fields",
    [
        *({**FIELDS, name: value} for name in ("readQueueNums", "writeQueueNums", "perm") for value in ("", "x", 1e99)),
        {name: value for name, value in FIELDS.items() if name != "topic"},
        {name: value for name, value in FIELDS.items() if name != "perm"},
        {**FIELDS, "readQueueNums": 1 << 31},
        {},
    ],
)
async def test_a_field_that_cannot_be_read_creates_nothing(fields, cluster):
    assert (await cluster.ask(CREATE, **fields)).code == 1
    assert await topic(cluster) == (17, "No topic in this broker. topic: T")


async def test_a_topic_is_changed_and_keeps_its_attributes(tmp_path, cluster):
    for attributes, queues in (("+message.type=DELAY", 2), ("", 3)):
        fields = FIELDS | {"attributes": attributes, "readQueueNums": queues, "order": "x"}
        assert (await cluster.ask(CREATE, **fields)).code == 0
    stored = stored_table(tmp_path / "store/config/topics.json")["topicConfigTable"]["T"]
    assert (stored["readQueueNums"], stored["attributes"]) == (3, {"message.type": "DELAY"})
    assert stored == await topic(cluster)
    assert not stored["order"]  # what is not "true" is false, as in Java


async def test_a_topic_that_stays_as_it_is_makes_no_new_version(cluster):
    versions = []
    for _ in range(2):
        assert (await cluster.ask(CREATE, **FIELDS)).code == 0
        table = json.loads((await cluster.ask(RequestCode.GET_ALL_TOPIC_CONFIG)).body)
        versions.append(table["dataVersion"])
    assert versions[0] == versions[1]


async def test_several_topics_are_created_at_once_or_not_at_all(cluster):
    config = {"topicName": "T", "readQueueNums": 2, "writeQueueNums": 3, "perm": 4}
    for other, code, remark in [
        ({"topicName": "TBW102"}, 29, "The topic[TBW102] is conflict with system topic."),
        ({"topicName": ""}, 29, "The specified topic is blank."),
        ({"topicName": "U", "attributes": {"+message.type": "MIXED"}}, 29, MIXED),
        ({"topicName": "U", "attributes": {"+message.type": "X"}}, 1, TYPES),
    ]:
        answer = await cluster.ask(SEVERAL, {"topicConfigList": [config, other]})
        assert (answer.code, answer.remark) == (code, remark)
        assert await topic(cluster) == (17, "No topic in this broker. topic: T")
    for broken in (b"", b"{", {"topicConfigList": [None]}, {"topicConfigList": [config | {"perm": 1 << 40}]}):
        assert (await cluster.ask(SEVERAL, broken)).code == 1
    assert (await cluster.ask(SEVERAL, {"topicConfigList": []})).code == 0
    wanted = [config, {"topicName": "U", "attributes": {"+message.type": "FIFO"}}]
    assert (await cluster.ask(SEVERAL, {"topicConfigList": wanted})).code == 0
    assert ((await topic(cluster))["writeQueueNums"], (await topic(cluster))["perm"]) == (3, 4)
    assert (await topic(cluster, "U"))["attributes"] == {"message.type": "FIFO"}


async def test_a_new_topic_is_registered_at_once(cluster):
    await cluster.ask(CREATE, **FIELDS)
    while (answer := await route(cluster, "T")).code != 0:
        await asyncio.sleep(0)
    (queues,) = decode_as(answer.body, TopicRoute).queue_datas
    assert (queues.broker_name, queues.read_queue_nums) == ("broker-a", 2)


@pytest.mark.parametrize(
    ("fields", "remark"),
    [
        ({}, "The specified topic is blank."),
        ({"topic": ""}, "The specified topic is blank."),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "The topic[SCHEDULE_TOPIC_XXXX] is conflict with system topic."),
        ({"topic": "broker-a"}, "The topic[broker-a] is conflict with system topic."),
    ],
)
async def test_topics_that_are_not_deleted(fields, remark, cluster):
    answer = await cluster.ask(DELETE, **fields)
    assert (answer.code, answer.remark) == (29, remark)


async def test_an_unknown_topic_may_be_deleted(cluster):
    for name in ("none", "a b"):
        assert (await cluster.ask(DELETE, topic=name)).code == 0


@pytest.mark.virtual_time
def test_a_deleted_topic_takes_queues_offsets_and_pop_retries_along(tmp_path):
    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            for name in ("T", "U", "%RETRY%g_T", "%RETRY%g+T", "%RETRY%g_U"):
                await cluster.ask(CREATE, **(FIELDS | {"topic": name}))
            for name in ("T", "U"):
                await cluster.send(name)
                await cluster.pull(topic=name)
                await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", name, 0, 1))
            queue = tmp_path / "store/consumequeue/T"
            assert queue.is_dir()
            assert (await cluster.ask(DELETE, topic="T")).code == 0
            assert not queue.exists()
            assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("T", 0)) == 0
            assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("U", 0)) == 1
            offsets = decode_as((await cluster.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body, dict)
            assert offsets["offsetTable"] == {"U@g": {"0": 1}}
            assert (await cluster.pull(topic="T")).code == 17

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            gone = [await topic(cluster, name) for name in ("T", "%RETRY%g_T", "%RETRY%g+T")]
            assert [code for code, _ in gone] == [17, 17, 17]
            assert (await topic(cluster, "%RETRY%g_U"))["perm"] == 6
            # The name may be used again, from offset 0.
            await cluster.send("T")
            assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("T", 0)) == 1

    run_virtual(first())
    run_virtual(second())


async def test_a_topic_stays_while_the_disk_refuses_its_deletion(tmp_path, monkeypatch, cluster):
    await cluster.send("T")
    monkeypatch.setattr(cluster.standalone.broker.context.store.flusher, "durable_offset", 0)
    monkeypatch.setattr(cluster.standalone.broker.context.store.flusher, "flush_log", lambda: None)
    answer = await cluster.ask(DELETE, topic="T")
    assert answer.code == 1
    assert "cannot flush the log" in answer.remark
    assert (await topic(cluster))["topicName"] == "T"
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("T", 0)) == 1


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"", 29, "The specified topic list is blank."),
        ({}, 29, "The specified topic list is blank."),
        ({"topicList": []}, 29, "The specified topic list is blank."),
        ({"topicList": ["T", " "]}, 29, "The specified topic is blank."),
        ({"topicList": ["T", "TBW102"]}, 29, "The topic[TBW102] is conflict with system topic."),
        ({"topicList": ["T", "broker-a", ""]}, 29, "The topic[broker-a] is conflict with system topic."),
        (b"{", 1, None),
        ({"topicList": ["T", None]}, 1, None),
    ],
)
async def test_a_refused_name_in_a_list_deletes_no_topic(body, code, remark, cluster):
    await cluster.ask(CREATE, **FIELDS)
    answer = await cluster.ask(DELETE_SEVERAL, body)
    assert answer.code == code
    assert remark is None or answer.remark == remark
    assert (await topic(cluster))["topicName"] == "T"


async def test_several_topics_are_deleted_with_one_new_version(tmp_path, cluster):
    names = ("T", "U", "V", "%RETRY%g_T", "%RETRY%g_U", "%RETRY%g_V")
    for name in names:
        await cluster.ask(CREATE, **(FIELDS | {"topic": name}))
    for name in ("T", "U", "V"):
        await cluster.send(name)
        await cluster.pull(topic=name)
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", name, 0, 1))
    context = cluster.standalone.broker.context
    counter = context.topics.data_version.counter
    answer = await cluster.ask(DELETE_SEVERAL, {"topicList": ["T", "none", "a b", "U", "T"]})
    assert answer.code == 0
    assert context.topics.data_version.counter == counter + 1
    left = [name for name in names if (await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic=name)).code == 0]
    assert left == ["V", "%RETRY%g_V"]
    assert {path.name for path in (tmp_path / "store/consumequeue").iterdir()} >= {"V"}
    assert not (tmp_path / "store/consumequeue/T").exists()
    assert not (tmp_path / "store/consumequeue/U").exists()
    offsets = decode_as((await cluster.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body, dict)
    assert offsets["offsetTable"] == {"V@g": {"0": 1}}
    assert context.statistics.get("TOPIC_PUT_NUMS", "T") is None
    assert (await cluster.ask(DELETE_SEVERAL, {"topicList": ["none"]})).code == 0
    assert context.topics.data_version.counter == counter + 1


async def test_the_tables_that_slaves_and_tools_read(cluster):
    await cluster.ask(CREATE, **FIELDS)
    answer = await cluster.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
    table = json.loads(answer.body)
    assert table["topicConfigTable"]["T"]["readQueueNums"] == 2
    assert table["mappingDataVersion"] == {"counter": 0, "stateVersion": 0, "timestamp": 0}
    system = json.loads((await cluster.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)).body)["topicList"]
    assert {"TBW102", "broker-a", "DefaultCluster", "SCHEDULE_TOPIC_XXXX"} <= set(system)
    assert "T" not in system


# ---- cleaning up on an operator's word (remoting.md §4.4; behaviour.md §5.5)


async def test_what_belongs_to_no_topic_goes(tmp_path, cluster):
    for topic in ("T", "U"):
        await cluster.send(topic)
        await cluster.pull(topic=topic)
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("g", topic, 0, 1))
    context = cluster.standalone.broker.context
    context.topics.remove("U")  # as if its files had been left behind
    context.topics.remove("SCHEDULE_TOPIC_XXXX")
    assert (await cluster.ask(RequestCode.CLEAN_UNUSED_TOPIC)).code == 0
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("T", 0)) == 1
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("U", 0)) == 0
    assert not (tmp_path / "store/consumequeue/U").exists()
    offsets = decode_as((await cluster.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body, dict)["offsetTable"]
    assert offsets == {"T@g": {"0": 1}}


async def test_mixed_topics_are_made_where_a_setting_says_so(tmp_path):
    async with Cluster(tmp_path / "store", broker={"mixed_topics": True}) as cluster:
        assert (await cluster.ask(CREATE, **FIELDS, attributes="+message.type=MIXED")).code == 0


@pytest.mark.parametrize("deletes", [True, False])
async def test_a_setting_says_whether_retry_topics_go_with_their_topic(deletes, tmp_path):
    async with Cluster(tmp_path / "store", broker={"deletes_retry_topics": deletes}) as cluster:
        context = cluster.standalone.broker.context
        context.topics.put(TopicConfig(topic_name="T"), TopicConfig(topic_name="%RETRY%g_T"))
        context.offsets.commit("g", "T", 0, 0)
        assert (await cluster.ask(DELETE, topic="T")).code == 0
        assert (context.topics.get("%RETRY%g_T") is None) is deletes


async def test_offsets_that_a_group_left_behind_go(cluster):
    commits = {"behind": {0: 0, 1: 0}, "online": {0: 0, 1: 0}, "at the start": {0: 1, 1: 0}, "half": {0: 0, 1: 2}}

    store = cluster.standalone.broker.context.store
    for queue_id in (0, 0, 1, 1):
        await cluster.send(queue_id=queue_id, body=bytes(600_000))
    await cluster.heartbeat("c1", ("T", "*"), group="online")
    for group, queues in commits.items():
        for queue_id, offset in queues.items():
            cluster.standalone.broker.context.offsets.commit(group, "T", queue_id, offset)
    clean = RequestCode.CLEAN_UNUSED_TOPIC
    for gone, left in (((), set(commits)), ((0, 1), {"online", "at the start", "half"})):
        lows = dict.fromkeys(gone, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "min_offset", lambda topic, queue_id, lows=lows: lows.get(queue_id, 0))
            assert (await cluster.ask(clean)).code == 0
        offsets = decode_as((await cluster.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body, dict)["offsetTable"]
        assert {key.removeprefix("T@") for key in offsets} == left


async def test_old_files_go_at_once(tmp_path):
    hour = (time.localtime().tm_hour + 12) % 24
    async with Cluster(tmp_path / "store", store={"delete_when": f"{hour:02d}"}) as cluster:
        for _ in range(3):
            await cluster.send(body=bytes(600_000))
        log = tmp_path / "store/commitlog"
        first, *_ = sorted(log.iterdir())
        old = time.time() - 1000 * 3600
        os.utime(first, (old, old))
        assert (await cluster.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)).code == 0
        assert first.exists()  # not at this hour
        assert (await cluster.ask(RequestCode.DELETE_EXPIRED_COMMITLOG)).code == 0
        assert (await cluster.ask(RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE)).code == 0
        assert not first.exists()
        assert await cluster.number(RequestCode.GET_MIN_OFFSET, QueueRequest("T", 0)) == 1


@pytest.mark.parametrize("code", [306, 316, 329])
async def test_with_nothing_to_clean(code, cluster):
    await cluster.send()
    assert (await cluster.ask(code, b"{", x="y")).code == 0
    assert await cluster.number(RequestCode.GET_MAX_OFFSET, QueueRequest("T", 0)) == 1
