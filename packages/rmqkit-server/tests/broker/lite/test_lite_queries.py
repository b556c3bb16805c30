"""The requests of tools about lite topics: 200074 to 200079 (lite.md §11)."""

from __future__ import annotations

import asyncio
import shutil

import msgspec
import pytest

from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.record import iter_records
from tests.broker.cluster import Cluster
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


# ---- lists, which only rmqkit has


async def rows(cluster, count=10, **fields):
    info = await read(cluster, RequestCode.GET_PARENT_TOPIC_INFO, topic=PARENT, maxCount=count, **fields)
    return info["liteTopics"], info.get("nextAfter")


def names(listed):
    return [one["liteTopic"] for one in listed]


async def test_lite_topics_are_listed_page_by_page_in_the_order_of_their_names(lite):
    for name in ("b2", "a1", "b1", "b10", "c"):
        await send(lite, name, "0")
    first, after = await rows(lite, 2)
    assert (names(first), after) == (["a1", "b1"], "b1")
    second, after = await rows(lite, 2, after=after)
    assert (names(second), after) == (["b10", "b2"], "b2")
    third, after = await rows(lite, 2, after=after)
    assert (names(third), after) == (["c"], None)


async def test_a_page_that_is_just_full_has_no_next_one(lite):
    await send(lite, "a", "0")
    await send(lite, "b", "0")
    listed, after = await rows(lite, 2)
    assert (names(listed), after) == (["a", "b"], None)


async def test_a_prefix_selects_names_among_very_many(lite):
    for i in range(1500):
        await send(lite, f"s{(i * 7) % 1500:04}", "x")
    listed, after = await rows(lite, 3, prefix="s1")
    assert (names(listed), after) == (["s1000", "s1001", "s1002"], "s1002")
    listed, after = await rows(lite, 3, prefix="s1", after="s1497")
    assert (names(listed), after) == (["s1498", "s1499"], None)
    assert await rows(lite, 3, prefix="t") == ([], None)


async def test_a_list_has_no_more_rows_than_a_thousand(lite):
    for i in range(1001):
        await send(lite, f"s{i:04}", "x")
    listed, after = await rows(lite, 5000)
    assert (len(listed), after) == (1000, "s0999")
    assert len((await rows(lite, -1))[0]) == 1


async def test_a_row_has_the_bounds_the_subscribers_and_the_offset_of_one_group(tmp_path):
    async with lite_cluster(tmp_path / "store") as cluster:
        await make_parent(cluster, **{"lite.topic.expiration": "20"})
        await make_group(cluster, "W", **{"sub.wildcard": "true"})
        peer = LitePeer(cluster)
        await peer.subscribe("a")
        await send(cluster, "a", "0", "1", "2")
        (first, *_) = await peer.pop(2)
        await peer.ack(first)
        (row,), _ = await rows(cluster, group=GROUP)
        assert row.pop("freeAt") > 0
        newest = row.pop("lastUpdateTimestamp")
        assert row.pop("expiresAt") == newest + 20 * 60_000
        bounds = {"minOffset": 0, "maxOffset": 3, "epoch": 1, "isLive": True}
        own = {"subscriberCount": 2, "consumerOffset": 1, "unackedCount": 1}
        assert row == {"liteTopic": "a", **bounds, **own}
        (plain,), _ = await rows(cluster)
        assert "consumerOffset" not in plain
        assert "unackedCount" not in plain


async def test_a_list_for_a_group_of_another_parent_is_refused(lite):
    await make_parent(lite, "LT2")
    await make_group(lite, "LG2", "LT2")
    answer = await lite.ask(RequestCode.GET_PARENT_TOPIC_INFO, topic=PARENT, maxCount=1, group="LG2")
    assert (answer.code, answer.remark) == (29, "lite group LG2 is expected to bind topic LT2, but actual is LT")


async def test_the_clients_of_a_group_are_listed(lite):
    await LitePeer(lite, "c2").subscribe("a", "b")
    await LitePeer(lite, "c1").subscribe("a")
    await send(lite, "a", "0")
    info = await read(lite, RequestCode.GET_LITE_GROUP_INFO, group=GROUP, maxClients=1)
    (one,) = info["clients"]
    assert one.pop("lastAccessTime") > 0
    counts = {"liteTopicCount": 1, "dirtyCount": 1, "waitingCount": 0, "takenCount": 0}
    assert one == {"clientId": "c1", "lastConsumeTime": 0, **counts}
    assert info["clientCount"] == 2
    assert "clients" not in await read(lite, RequestCode.GET_LITE_GROUP_INFO, group=GROUP)


# ---- deletions


async def delete(cluster, name):
    answer = await cluster.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic=f"%LMQ%${PARENT}${name}")
    return answer.code, answer.remark


async def test_a_deleted_lite_topic_begins_its_next_life_and_its_subscribers_stay(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a", "b")
    await send(lite, "a", "0", "1")
    await send(lite, "b", "x")
    assert await delete(lite, "a") == (0, None)
    assert names((await rows(lite))[0]) == ["b"]
    (dead, _), _ = await rows(lite, withExpired="true")
    assert (dead["liteTopic"], dead["isLive"], dead["minOffset"], dead["maxOffset"]) == ("a", False, 2, 2)
    assert (dead["expiresAt"], dead["subscriberCount"]) == (-1, 1)
    assert [one.body for one in await peer.pop()] == [b"x"]
    await send(lite, "a", "2")
    assert [(one.number, one.body) for one in await peer.pop()] == [(2, b"2")]
    (row, _), _ = await rows(lite)
    assert (row["epoch"], row["minOffset"], row["isLive"]) == (2, 2, True)


async def test_a_deletion_leaves_the_parent_and_an_unknown_name_is_no_fault(lite):
    await send(lite, "a", "0")
    assert await delete(lite, "none") == (0, None)
    assert await delete(lite, "a") == (0, None)
    assert (await read(lite, RequestCode.GET_PARENT_TOPIC_INFO, topic=PARENT))["liteTopicCount"] == 0
    assert len([*iter_records((await lite.pull(topic=PARENT)).payload)]) == 1


async def test_a_deletion_is_on_the_disk_before_its_answer(tmp_path):
    async with lite_cluster(tmp_path / "store") as cluster:
        await send(cluster, "a", "0", "1")
        await delete(cluster, "a")
        shutil.copytree(tmp_path / "store", tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
    async with Cluster(tmp_path / "killed") as cluster:
        assert await rows(cluster) == ([], None)
        assert (await send(cluster, "a", "2"))[0].code == 0
        (row,), _ = await rows(cluster)
        assert (row["epoch"], row["minOffset"], row["maxOffset"]) == (2, 2, 3)


async def test_a_lite_topic_with_a_message_that_is_not_readable_yet_is_not_deleted(lite):
    await send(lite, "a", "0")
    table = lite.standalone.broker.context.store.lite.table
    table.nexts[table.find(PARENT, "a")] += 1  # as with a message that is stored and not yet dispatched
    code, remark = await delete(lite, "a")
    assert (code, remark) == (2, "a message of lite topic %LMQ%$LT$a is being written: delete it again")
    assert names((await rows(lite))[0]) == ["a"]


async def test_several_deletions_are_one_request(lite):
    await send(lite, "a", "0")
    await send(lite, "b", "0")
    body = {"topicList": [f"%LMQ%${PARENT}$a", f"%LMQ%${PARENT}$b"]}
    answer = await lite.ask(RequestCode.DELETE_TOPIC_IN_BROKER_LIST, body)
    assert (answer.code, await rows(lite)) == (0, ([], None))


# ---- resets of offsets


async def reset(cluster, name="a", group=GROUP, **fields):
    given = {"topic": f"%LMQ%${PARENT}${name}", "group": group, "timestamp": 0, "isForce": "true", **fields}
    answer = await cluster.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, **given)
    return [*loads(answer.payload)["offsetTable"].values()] if answer.code == 0 else (answer.code, answer.remark)


async def test_a_reset_takes_the_batch_back_and_delivers_from_there(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1", "2")
    await peer.ack(*await peer.pop())
    assert await peer.pop() == []
    assert await reset(lite, offset=1, queueId=0) == [1]
    assert [one.number for one in await peer.pop()] == [1, 2]
    assert await reset(lite) == [0]
    assert [one.number for one in await peer.pop()] == [0, 1, 2]
    assert await reset(lite, timestamp=-1) == [3]
    assert await peer.pop() == []
    await send(lite, "a", "3")
    assert [one.number for one in await peer.pop()] == [3]


async def test_a_reset_to_a_time_begins_at_the_first_message_from_then_on(lite):
    await send(lite, "a", "0")
    await asyncio.sleep(10)  # virtual
    since = lite.standalone.broker.context.clock.now_ms()
    await send(lite, "a", "1")
    assert await reset(lite, timestamp=since) == [1]
    assert await reset(lite, offset=3, queueId=0) == [2], "the offset after the end means the end"


async def test_refused_resets(lite):
    await make_parent(lite, "LT2")
    await make_group(lite, "LG2", "LT2")
    await send(lite, "a", "0")
    assert await reset(lite, "none") == (17, "Topic %LMQ%$LT$none does not exist")
    assert await reset(lite, group="nobody") == (26, "Group nobody does not exist")
    assert await reset(lite, group="LG2") == (29, "group type or bind topic not match.")
    assert await reset(lite, offset=3, queueId=0) == (1, "Target offset 3 not in consume queue range [0-1]")
