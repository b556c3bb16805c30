"""Consumer groups: created, changed, deleted and shown (remoting.md §4.4; behaviour.md §9.9)."""

from __future__ import annotations

import json

import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.schemas.offsets import UpdateConsumerOffsetRequest
from rmqkit.protocol.schemas.pull import PullFlag
from tests.broker.cluster import Cluster
from tests.virtual_time import run as run_virtual

CREATE = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
SEVERAL = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST
DELETE = RequestCode.DELETE_SUBSCRIPTIONGROUP
DELETE_SEVERAL = RequestCode.DELETE_SUBSCRIPTION_GROUP_LIST
FORBID = RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN
NO_AUTO_CREATE = {"auto_create_group": False}
ILLEGAL = "The specified group: a b, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
LONG = f"The specified group: {'x' * 121}, is longer than group max length: 120"


async def group(cluster, name="g1"):
    answer = await cluster.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, group=name)
    return json.loads(answer.body) if answer.code == 0 else (answer.code, answer.remark)


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        ({}, 29, "The specified group is blank."),
        ({"groupName": " "}, 29, "The specified group is blank."),
        ({"groupName": "a b"}, 29, ILLEGAL),
        ({"groupName": "x" * 121}, 29, LONG),
        ({"groupName": "g1", "attributes": {"+a": "b"}}, 1, "unsupported key: a"),
        ({"groupName": "g1", "attributes": {"+priority.factor": "101"}}, 1, "value is not in range(0, 100)"),
    ],
)
async def test_refused_groups(body, code, remark, tmp_path):
    async with Cluster(tmp_path / "store", broker=NO_AUTO_CREATE) as cluster:
        for request_code, content in ((CREATE, body), (SEVERAL, {"groupConfigList": [{"groupName": "g1"}, body]})):
            answer = await cluster.ask(request_code, content)
            assert (answer.code, answer.remark) == (code, remark)
        assert await group(cluster) == (26, "No group in this broker")


@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'{"groupName":"g1","retryMaxTimes":99999999999}', b"\xff"])
async def test_a_body_that_cannot_be_read_creates_nothing(body, tmp_path):
    async with Cluster(tmp_path / "store", broker=NO_AUTO_CREATE) as cluster:
        assert (await cluster.ask(CREATE, body)).code == 1
        assert (await cluster.ask(SEVERAL, b'{"groupConfigList":[{"groupName":"g1"},' + body + b"]}")).code == 1
        assert await group(cluster) == (26, "No group in this broker")


@pytest.mark.virtual_time
def test_a_group_is_changed_and_kept(tmp_path):
    async def first():
        async with Cluster(tmp_path / "store", broker=NO_AUTO_CREATE) as cluster:
            assert (await cluster.ask(CREATE)).code == 0  # no body: nothing to do
            change = {"groupName": "g1", "retryMaxTimes": 3, "attributes": {"+priority.factor": "5"}}
            assert (await cluster.ask(CREATE, change)).code == 0
            assert (
                await cluster.ask(SEVERAL, {"groupConfigList": [{"groupName": "g1", "retryQueueNums": 2}]})
            ).code == 0
        assert (tmp_path / "store/config/subscriptionGroup.json.bak").exists()
        assert not (tmp_path / "store/config/subscriptionGroup.journal").exists()

    async def second():
        async with Cluster(tmp_path / "store", broker=NO_AUTO_CREATE) as cluster:
            stored = await group(cluster)
            assert (stored["retryMaxTimes"], stored["retryQueueNums"]) == (16, 2)
            assert stored["attributes"] == {"priority.factor": "5"}
            assert "subscriptionDataSet" not in stored

    run_virtual(first())
    run_virtual(second())


async def test_asking_for_a_group_creates_it_where_that_is_allowed(cluster):
    assert (await group(cluster))["retryMaxTimes"] == 16
    assert await group(cluster, "a b") == (26, "No group in this broker")
    assert (await cluster.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG)).code == 1
    answer = await cluster.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    table = json.loads(answer.body)["subscriptionGroupTable"]
    assert {"g1", "TOOLS_CONSUMER", "CID_RMQ_SYS_TRANS"} <= set(table)


@pytest.mark.parametrize("clean", [{}, {"cleanOffset": "x"}, {"cleanOffset": "true"}])
async def test_a_deleted_group_takes_its_offsets_along_where_that_is_requested(clean, cluster):
    await cluster.send()
    for name in ("g1", "g2"):
        await cluster.pull(group=name)
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest(name, "T", 0, 1))
        await cluster.ask(FORBID, group=name, topic="T", readable="false")
    assert (await cluster.ask(DELETE, groupName="g1", **clean)).code == 0
    table = json.loads((await cluster.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)).body)
    assert ("g1" in table["subscriptionGroupTable"], "g2" in table["subscriptionGroupTable"]) == (False, True)
    assert table["forbiddenTable"] == {"g2": {"T": 4}}
    offsets = decode_as((await cluster.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)).body, dict)["offsetTable"]
    assert set(offsets) == ({"T@g2"} if clean.get("cleanOffset") == "true" else {"T@g1", "T@g2"})


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"", 29, "The specified group name list is blank."),
        ({"cleanOffset": True}, 29, "The specified group name list is blank."),
        ({"groupNameList": []}, 29, "The specified group name list is blank."),
        ({"groupNameList": ["g1", " "]}, 29, "The specified group name is blank."),
        ({"groupNameList": ["g1", None]}, 1, None),
    ],
)
async def test_a_blank_name_in_a_list_deletes_no_group(body, code, remark, tmp_path):
    async with Cluster(tmp_path / "store", broker=NO_AUTO_CREATE) as cluster:
        await cluster.ask(CREATE, {"groupName": "g1"})
        answer = await cluster.ask(DELETE_SEVERAL, body)
        assert answer.code == code
        assert remark is None or answer.remark == remark
        assert (await group(cluster))["groupName"] == "g1"


@pytest.mark.parametrize("clean", [{}, {"cleanOffset": False}, {"cleanOffset": True}])
async def test_several_groups_are_deleted_with_one_new_version(clean, cluster):
    await cluster.send()
    for name in ("g1", "g2", "g3"):
        await cluster.pull(group=name)
        await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest(name, "T", 0, 1))
        await cluster.ask(FORBID, group=name, topic="T", readable="false")
    context = cluster.standalone.broker.context
    counter = context.groups.stored.data_version.counter
    answer = await cluster.ask(DELETE_SEVERAL, {"groupNameList": ["g1", "none", "g2", "g1"], **clean})
    assert answer.code == 0
    assert context.groups.stored.data_version.counter == counter + 1
    stored = context.groups.stored
    assert [name in stored.subscription_group_table for name in ("g1", "g2", "g3")] == [False, False, True]
    assert stored.forbidden_table == {"g3": {"T": 4}}
    kept = {"T@g3"} if clean.get("cleanOffset") else {"T@g1", "T@g2", "T@g3"}
    assert set(context.offsets.contents.offset_table) == kept
    assert context.statistics.get("GROUP_GET_NUMS", "T@g1") is None
    assert context.statistics.get("GROUP_GET_NUMS", "T@g3") is not None


async def test_an_unknown_group_may_be_deleted_but_it_has_to_be_named(cluster):
    assert [(await cluster.ask(DELETE, groupName=name)).code for name in ("", "none")] == [0, 0]
    assert (await cluster.ask(DELETE)).code == 1


async def test_a_topic_is_closed_to_a_group(cluster):
    await cluster.send()
    await cluster.heartbeat("c1", ("T", "*"))

    async def forbidden(**readable):
        answer = await cluster.ask(FORBID, group="g", topic="T", **readable)
        return answer.code, json.loads(answer.body)["readable"]

    assert await forbidden() == (0, True)
    assert await forbidden(readable="false") == (0, False)
    assert await forbidden() == (0, False)
    answer = await cluster.pull(flags=PullFlag(0))
    assert (answer.code, answer.remark) == (16, "the consumer group[g] is forbidden for topic[T]")
    assert await forbidden(readable="true") == (0, True)
    assert (await cluster.pull(flags=PullFlag(0))).code == 0
    assert (await cluster.ask(FORBID)).code == 1


async def test_who_consumes_what(cluster):
    await cluster.send()
    await cluster.heartbeat("c1", ("T", "A || B"), group="online")
    await cluster.pull(group="stored")
    await cluster.call(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest("stored", "T", 0, 1))
    by_whom = await cluster.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T")
    assert json.loads(by_whom.body) == {"groupList": ["online", "stored"]}
    topics = [
        json.loads((await cluster.ask(RequestCode.QUERY_TOPICS_BY_CONSUMER, group=name)).body)["topicList"]
        for name in ("online", "stored", "none")
    ]
    assert topics == [[], ["T"], []]
    asked = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    online = json.loads((await cluster.ask(asked, group="online", topic="T")).body)
    assert (online["group"], online["subscriptionData"]["subString"]) == ("online", "A || B")
    for group_name, topic in (("online", "U"), ("none", "T")):
        answer = json.loads((await cluster.ask(asked, group=group_name, topic=topic)).body)
        assert answer == {"group": group_name, "topic": topic}
    for code in (asked, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, RequestCode.QUERY_TOPICS_BY_CONSUMER):
        assert (await cluster.ask(code)).code == 1
