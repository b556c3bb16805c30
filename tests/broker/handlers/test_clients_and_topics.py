"""Heartbeats, groups and topics (behaviour.md §2.6, remoting.md §4.3.4, §4.3.7)."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields, request
from rmqkit.protocol.fastjson import decode_as
from rmqkit.protocol.headers.clients import ConsumerGroupRequest, UnregisterClientRequest
from rmqkit.protocol.headers.topics import CreateTopicRequest, TopicRequest


def test_members_of_a_group_are_listed_and_told_of_changes(run):
    async def scenario(cluster):
        beat = await cluster.heartbeat("c1", ("T", "*"))
        assert decode_fields(beat) == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "false"}
        other = cluster.new_client()
        await cluster.heartbeat("c2", ("T", "*"), client=other)
        answer = await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))
        assert sorted(json.loads(answer.body)["consumerIdList"]) == ["c1", "c2"]
        while len(cluster.notices) < 3:  # c1 on its own, then c1 and c2
            await asyncio.sleep(0)
        await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c2", None, "g"), client=other)
        while len(cluster.notices) < 4:
            await asyncio.sleep(0)
        await other.close()
        assert set(cluster.notices) == {"g"}
        await cluster.call(RequestCode.UNREGISTER_CLIENT, UnregisterClientRequest("c1", "p", "g"))
        answer = await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))
        assert (answer.code, answer.remark) == (1, "no consumer for this group, g")

    run(scenario)


def test_a_closed_connection_leaves_its_groups(run):
    async def scenario(cluster):
        other = cluster.new_client()
        await cluster.heartbeat("c1", ("T", "*"), client=other)
        await other.close()
        while (await cluster.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, ConsumerGroupRequest("g"))).code == 0:
            await asyncio.sleep(0)

    run(scenario)


def test_a_heartbeat_makes_the_retry_topic_and_the_name_server_knows_it(run):
    async def scenario(cluster):
        await cluster.heartbeat("c1", ("T", "*"))
        while True:
            answer = await cluster.client.call(
                cluster.standalone.namesrv_address,
                request(RequestCode.GET_ROUTEINFO_BY_TOPIC, TopicRequest("%RETRY%g")),
                5000,
            )
            if answer.code == 0:
                break
        (queues,) = decode_as(answer.body, TopicRoute).queue_datas
        assert (queues.broker_name, queues.read_queue_nums, queues.perm) == ("broker-a", 1, 6)

    run(scenario)


@pytest.mark.parametrize(
    ("header", "code", "remark"),
    [
        (
            CreateTopicRequest("TBW102", "", 1, 1, 6, "SINGLE_TAG"),
            29,
            "The topic[TBW102] is conflict with system topic.",
        ),
        (CreateTopicRequest("", "", 1, 1, 6, "SINGLE_TAG"), 29, "The specified topic is blank."),
        (
            CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+message.type=MIXED"),
            29,
            "MIXED message type is not supported.",
        ),
        (CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+a=b"), 1, "unsupported key: a"),
        (CreateTopicRequest("T", "", 1, 1, 6, "SINGLE_TAG", attributes="+message.type=X"), 1, "value is not in set: X"),
    ],
)
def test_refused_topics(run, header, code, remark):
    async def scenario(cluster):
        answer = await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)
        assert (answer.code, answer.remark) == (code, remark)

    run(scenario)


def test_a_topic_is_changed_and_keeps_its_attributes(run, tmp_path):
    async def scenario(cluster):
        for attributes, queues in (("+message.type=DELAY", 2), ("", 3)):
            header = CreateTopicRequest("T", "TBW102", queues, queues, 6, "SINGLE_TAG", attributes=attributes)
            assert (await cluster.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)).code == 0
        stored = json.loads((tmp_path / "store/config/topics.json").read_text())["topicConfigTable"]["T"]
        assert (stored["readQueueNums"], stored["attributes"]) == (3, {"message.type": "DELAY"})

    run(scenario)


def test_an_unknown_request_is_not_supported(run):
    async def scenario(cluster):
        answer = await cluster.call(4711)
        assert (answer.code, answer.remark) == (3, " request type 4711 not supported")

    run(scenario)


def test_a_request_without_its_fields_names_the_first_missing_one(run):
    async def scenario(cluster):
        answer = await cluster.call(RequestCode.PULL_MESSAGE)
        assert (answer.code, "consumerGroup" in answer.remark) == (1, True)

    run(scenario)
