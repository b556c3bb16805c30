"""The requests of tools about lite topics: 200074 to 200079 (lite.md §11)."""

from __future__ import annotations

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from tests.broker.lite.lite_peer import GROUP, PARENT, LitePeer, lite_cluster, make_group, make_parent, send


@pytest.fixture
async def lite(tmp_path):
    async with lite_cluster(tmp_path / "store") as cluster:
        yield cluster


async def read(cluster, code, **fields):
    answer = await cluster.ask(code, **fields)
    assert answer.code == 0, answer.remark
    return msgspec.json.decode(answer.payload)


async def test_the_broker(lite):
    await make_parent(lite, "LT2", **{"lite.topic.expiration": "20"})
    peer = LitePeer(lite)
    await peer.subscribe("a", "b")
    await send(lite, "a", "0")
    await peer.pop()
    info = await read(lite, RequestCode.GET_BROKER_LITE_INFO)
    assert list(info) == sorted(info)
    assert info.pop("cqTableSize") > 1
    assert info == {
        "currentLmqNum": 1,
        "eventMapSize": 0,
        "groupMeta": {PARENT: [GROUP]},
        "liteSubscriptionCount": 2,
        "maxLmqNum": 2_000_000,
        "offsetTableSize": 0,
        "orderInfoCount": 1,
        "storeType": "default",
        "topicMeta": {PARENT: -1, "LT2": 20},
    }


async def test_a_parent(lite):
    await send(lite, "a", "0")
    await send(lite, "b", "0")
    info = await read(lite, RequestCode.GET_PARENT_TOPIC_INFO, topic=PARENT)
    assert info == {"groups": [GROUP], "liteTopicCount": 2, "lmqNum": 2, "topic": PARENT, "ttl": -1}


async def test_a_lite_topic(lite):
    await make_group(lite, "W", **{"sub.wildcard": "true"})
    await LitePeer(lite).subscribe("a1")
    await send(lite, "a1", "0", "1")
    info = await read(lite, RequestCode.GET_LITE_TOPIC_INFO, parentTopic=PARENT, liteTopic="a1")
    assert info["topicOffset"].pop("lastUpdateTimestamp") > 0
    assert info == {
        "liteTopic": "a1",
        "parentTopic": PARENT,
        "shardingToBroker": True,
        "subscriber": [{"clientId": "raw1", "group": GROUP}, {"clientId": "*", "group": "W"}],
        "topicOffset": {"maxOffset": 2, "minOffset": 0},
    }
    unknown = await read(lite, RequestCode.GET_LITE_TOPIC_INFO, parentTopic=PARENT, liteTopic="none")
    assert unknown["topicOffset"] == {"lastUpdateTimestamp": 0, "maxOffset": 0, "minOffset": 0}


async def test_a_client(lite):
    await LitePeer(lite).subscribe("b", "a")
    fields = {"parentTopic": PARENT, "group": GROUP}
    info = await read(lite, RequestCode.GET_LITE_CLIENT_INFO, clientId="raw1", maxCount=1, **fields)
    assert info.pop("lastAccessTime") > 0
    assert info == {
        "clientId": "raw1",
        "group": GROUP,
        "lastConsumeTime": 0,
        "liteTopicCount": 2,
        "liteTopicSet": ["%LMQ%$LT$a"],
        "parentTopic": PARENT,
    }
    unknown = await read(lite, RequestCode.GET_LITE_CLIENT_INFO, clientId="none", **fields)
    assert (unknown["liteTopicCount"], unknown["lastAccessTime"]) == (-1, -1)


async def test_the_lag_of_a_group(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a", "b")
    await send(lite, "a", "0", "1", "2")
    await send(lite, "b", "0")
    for one in await peer.pop(1):
        await peer.ack(one)
    info = await read(lite, RequestCode.GET_LITE_GROUP_INFO, group=GROUP, topK=1)
    (most,) = info["lagCountTopK"]
    assert (most["liteTopic"], most["lagCount"], info["totalLagCount"]) == ("a", 2, 3)
    assert most["earliestUnconsumedTimestamp"] > 0
    assert (info["group"], info["parentTopic"], info["lagTimestampTopK"]) == (GROUP, PARENT, [])
    one = await read(lite, RequestCode.GET_LITE_GROUP_INFO, group=GROUP, liteTopic="a")
    wrapper = one["liteTopicOffsetWrapper"]
    assert wrapper.pop("lastTimestamp") > 0
    assert (wrapper, one["totalLagCount"]) == ({"brokerOffset": 3, "consumerOffset": 1, "pullOffset": 0}, 2)


async def test_a_dispatch_can_be_triggered(lite):
    await LitePeer(lite).subscribe("a")
    answer = await lite.ask(RequestCode.TRIGGER_LITE_DISPATCH, group=GROUP)
    assert (answer.code, answer.payload) == (0, b"")


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        (RequestCode.GET_PARENT_TOPIC_INFO, {"topic": "X"}, (17, "Topic [X] not exist.")),
        (RequestCode.GET_PARENT_TOPIC_INFO, {"topic": "NT"}, (29, "Topic [NT] type not match.")),
        (RequestCode.GET_LITE_TOPIC_INFO, {"parentTopic": "X", "liteTopic": "a"}, (17, "Topic [X] not exist.")),
        (RequestCode.GET_LITE_GROUP_INFO, {"group": "GN"}, (29, "Group [GN] is not a LITE group.")),
        (RequestCode.TRIGGER_LITE_DISPATCH, {"group": "GX"}, (26, "Group [GX] not exist.")),
    ],
)
async def test_refusals(lite, code, fields, expected):
    await lite.send("NT", b"x")
    await lite.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "GN"})
    answer = await lite.ask(code, **fields)
    assert (answer.code, answer.remark) == expected
