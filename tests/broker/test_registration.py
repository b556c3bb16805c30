"""What name servers are told, and what is taken from their answers (behaviour.md §1.7, §2.3)."""

from __future__ import annotations

import asyncio
import json

import pytest

from rmqkit.protocol.bodies.topics import TopicRoute
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import Command
from rmqkit.protocol.fastjson import decode_as
from tests.broker.cluster import Cluster


async def ask_namesrv(cluster, code, **fields):
    return await cluster.client.call(cluster.standalone.namesrv_address, Command(code, fields=fields), 5000)


async def routed(cluster, topic):
    while (answer := await ask_namesrv(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic)).code != 0:
        await asyncio.sleep(0)
    (queues,) = decode_as(answer.body, TopicRoute).queue_datas
    return queues


def test_a_change_that_was_answered_is_routed(run):
    async def scenario(cluster):
        for perm in (6, 4, 6, 2):
            topics = [{"topicName": "T", "perm": perm}]
            await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": topics})
            answer = await ask_namesrv(cluster, RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
            assert [queues.perm for queues in decode_as(answer.body, TopicRoute).queue_datas] == [perm]

    run(scenario)


@pytest.mark.parametrize("compressed", [False, True])
def test_topics_are_registered_whole_and_one_by_one(run, compressed):
    async def scenario(cluster):
        assert (await routed(cluster, "TBW102")).write_queue_nums == 8
        await cluster.ask(
            RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": [{"topicName": "T", "perm": 4}]}
        )
        assert (await routed(cluster, "T")).perm == 4

    run(scenario, broker={"compressed_register": compressed})


def test_topics_that_name_servers_list_as_ordered_are_marked(tmp_path):
    async def order(cluster, topic):
        return json.loads((await cluster.ask(RequestCode.GET_TOPIC_CONFIG, topic=topic)).body)["order"]

    async def first():
        async with Cluster(tmp_path / "store") as cluster:
            topics = [{"topicName": "T"}, {"topicName": "U"}, {"topicName": "V", "order": True}]
            await cluster.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, {"topicConfigList": topics})
            for topic in ("T", "none"):
                key = {"namespace": "ORDER_TOPIC_CONFIG", "key": topic}
                await ask_namesrv(cluster, RequestCode.PUT_KV_CONFIG, **key, value="broker-a:4")
            registration = cluster.standalone._broker._registration
            assert await registration.register() == 1
            assert [await order(cluster, topic) for topic in "TUV"] == [True, False, True]
            await ask_namesrv(cluster, RequestCode.DELETE_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="T")
            await registration.register()
            assert await order(cluster, "T")  # a mark stays, as with 5.x

    async def second():
        async with Cluster(tmp_path / "store") as cluster:
            assert [await order(cluster, topic) for topic in "TUV"] == [True, False, True]

    asyncio.run(first())
    asyncio.run(second())


def test_an_answer_that_cannot_be_read_changes_nothing(run):
    async def scenario(cluster):
        registration = cluster.standalone._broker._registration
        version = cluster.standalone._broker._parts.topics.data_version
        for body in (b"{", b"[]", b'{"table":{"TBW102":7'):
            registration._mark_ordered(Command(0, body=body))
        assert cluster.standalone._broker._parts.topics.data_version == version

    run(scenario)


def test_name_servers_are_asked_what_they_know(run):
    async def scenario(cluster):
        registration = cluster.standalone._broker._registration
        assert not await registration.is_outdated()
        cluster.standalone._broker._parts.topics.data_version.advance(1)
        assert await registration.is_outdated()
        await registration.register()
        assert not await registration.is_outdated()
        registration._name_servers.append("127.0.0.1:1")  # nobody listens there
        assert await registration.is_outdated()
        registration._name_servers.pop()

    run(scenario)
