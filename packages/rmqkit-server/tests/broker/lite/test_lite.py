"""Lite topics over remoting: sends, subscriptions, delivery, acks, expiry, restarts (lite.md §3 to §9, §13)."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit.broker.lite import handlers, service
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import decode_fields
from rmqkit.protocol.properties import decode_properties, encode_properties
from rmqkit.protocol.record import BatchEntry, encode_batch, iter_records
from tests.broker.cluster import Cluster
from tests.broker.lite.lite_peer import GROUP, PARENT, LitePeer, light, lite_cluster, make_group, make_parent, send

RULE = "lite topic can only contain alphanumeric characters, hyphens(-), and underscores(_)"


@pytest.fixture
async def lite(tmp_path):
    async with lite_cluster(tmp_path / "store") as cluster:
        yield cluster


async def codes(answers):
    return [(one.code, one.remark) for one in answers]


def shown(messages):
    return [(one.lite, one.body.decode(), one.tries) for one in messages]


# ---- sends


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (" ", "lite topic cannot be the char sequence of whitespace"),
        ("x" * 65, "lite topic exceed the max size 64"),
        ("x" * 300, "lite topic exceed the max size 64"),
        *((name, RULE) for name in ("a$b", "a b", "é", "a/b", "a,b", "a%b", "a.b:c")),
    ],
)
async def test_a_name_that_is_not_allowed_is_refused_and_costs_others_nothing(lite, name, fault):
    (answer,) = await send(lite, name, "x")
    assert (answer.code, answer.remark) == (13, fault)
    (plain,) = [await lite.send("Plain", b"x")]
    assert plain.code == 0
    assert [one.body for one in iter_records((await lite.pull(topic="Plain")).payload)] == [b"x"]


async def test_a_name_of_64_characters_is_allowed(lite):
    (answer,) = await send(lite, "x" * 64, "x")
    assert answer.code == 0


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("DELAY", "3", "DELAY"),
        ("TIMER_DELAY_SEC", "3", "DELAY"),
        ("TIMER_DELIVER_MS", "3", "DELAY"),
        ("TRAN_MSG", "true", "TRANSACTION"),
        ("_SYS_MSG_PRIORITY_", "2", "PRIORITY"),
    ],
)
async def test_a_message_of_another_type_is_in_no_lite_topic(lite, name, value, kind):
    (answer,) = await send(lite, "s1", "x", **{name: value})
    remark = f"TopicMessageType validate failed, the expected type is LITE, but actual type is {kind}"
    assert (answer.code, answer.remark) == (13, remark)


async def test_messages_are_read_by_the_light_queues_name_and_by_the_lite_topics(lite):
    answers = await send(lite, "s1", "a", "b", "c")
    assert [decode_fields(one)["liteOffset"] for one in answers] == ["0", "1", "2"]
    for fields in ({"topic": light("s1")}, {"topic": PARENT, "lite_topic": "s1", "queue_id": 3}):
        answer = await lite.pull(**fields)
        header = decode_fields(answer)
        assert (answer.code, header["minOffset"], header["maxOffset"]) == (0, "0", "3")
        records = list(iter_records(answer.payload))
        assert [one.body for one in records] == [b"a", b"b", b"c"]
        properties = decode_properties(records[0].properties)
        assert properties["INNER_MULTI_DISPATCH"] == "%LMQ%$LT$s1"
        assert properties["INNER_MULTI_QUEUE_OFFSET"] == "0"
    for code, expected in ((RequestCode.GET_MAX_OFFSET, "3"), (RequestCode.GET_MIN_OFFSET, "0")):
        answer = await lite.ask(code, topic=PARENT, queueId=2, liteTopic="s1")
        assert decode_fields(answer)["offset"] == expected
    answer = await lite.ask(RequestCode.GET_MAX_OFFSET, topic=PARENT, queueId=0, liteTopic="none")
    assert decode_fields(answer)["offset"] == "0"


async def test_a_light_queue_is_no_topic_to_send_to(lite):
    await send(lite, "s1", "a")
    answer = await lite.send(light("s1"), b"x")
    assert (answer.code, answer.remark) == (16, "Sending message to topic[%LMQ%$LT$s1] is forbidden.")
    assert decode_fields(await lite.pull(topic=light("s1")))["maxOffset"] == "1"


async def test_a_topic_of_another_type_has_no_lite_topics(lite):
    assert (await send(lite, "s1", "x", topic="Plain"))[0].code == 0
    answer = await lite.pull(topic="%LMQ%$Plain$s1")
    assert answer.code == 17


async def test_a_forged_dispatch_enters_no_lite_topic_of_another_parent(lite):
    forged = encode_properties({"INNER_MULTI_DISPATCH": light("s1"), "INNER_MULTI_QUEUE_OFFSET": "7"}).decode()
    for topic in ("Plain", PARENT):
        assert (await lite.send(topic, b"x", forged)).code == 0
    assert decode_fields(await lite.pull(topic=light("s1")))["maxOffset"] == "0"


def batch(*names: str) -> bytes:
    return encode_batch(
        BatchEntry(b"m%d" % i, encode_properties({"__LITE_TOPIC": name} if name else {"A": "B"}), 0)
        for i, name in enumerate(names)
    )


async def send_batch(cluster, body):
    return await cluster.send(PARENT, body, "UNIQ_KEY\x01U\x02", code=RequestCode.SEND_BATCH_MESSAGE, batch=True)


async def test_a_batch_of_one_lite_topic_is_stored_in_order(lite):
    answer = await send_batch(lite, batch("s1", "s1", "s1"))
    assert answer.code == 0, answer.remark
    assert decode_fields(answer)["msgId"].count(",") == 2
    records = list(iter_records((await lite.pull(topic=light("s1"))).payload))
    assert [one.body for one in records] == [b"m0", b"m1", b"m2"]


@pytest.mark.parametrize("names", [("s1", "s2"), ("s1", ""), ("", "s1")])
async def test_a_batch_of_several_lite_topics_is_refused_and_nothing_is_stored(lite, names):
    answer = await send_batch(lite, batch(*names))
    assert (answer.code, answer.remark) == (13, "a batch has messages of one lite topic only")
    assert decode_fields(await lite.pull(topic=PARENT))["maxOffset"] == "0"
    assert decode_fields(await lite.pull(topic=light("s1")))["maxOffset"] == "0"


# ---- subscriptions


@pytest.mark.parametrize(
    ("body", "code", "remark"),
    [
        (b"", 604, "Request body is null."),
        ({"subscriptionSet": []}, 604, "LiteSubscriptionCtlRequestBody is empty."),
    ],
)
async def test_a_subscription_without_content_is_refused(lite, body, code, remark):
    answer = await lite.ask(RequestCode.LITE_SUBSCRIPTION_CTL, body)
    assert (answer.code, answer.remark) == (code, remark)


async def test_names_are_checked_in_every_action(lite):
    peer = LitePeer(lite)
    for action in ("PARTIAL_ADD", "COMPLETE_ADD"):
        answer = await peer.change(action, "x" * 65)
        assert (answer.code, answer.remark) == (29, "lite topic exceed the max size 64")
        answer = await peer.change(action, "")
        assert (answer.code, answer.remark) == (29, "lite topic cannot be the char sequence of whitespace")


async def test_a_group_reads_only_the_topic_to_which_it_is_bound(lite):
    await make_parent(lite, "Other")
    peer = LitePeer(lite)
    answer = await peer.change("PARTIAL_ADD", "a", topic="Other")
    assert answer.remark == "lite group LG is expected to bind topic LT, but actual is Other"
    regular = LitePeer(lite, group="GN")
    answer = await regular.change("PARTIAL_ADD", "a")
    assert answer.remark == "lite group GN is expected to bind topic null, but actual is LT"


async def test_the_quota_of_a_client_counts_all_its_lite_topics(lite):
    await make_group(lite, "Five", **{"sub.client.quota": "5"})
    peer = LitePeer(lite, group="Five")
    await peer.subscribe(*"abcd")
    assert (await peer.change("PARTIAL_ADD", "d", "e")).code == 0
    for action, names in (("PARTIAL_ADD", "f"), ("COMPLETE_ADD", "abcdef")):
        answer = await peer.change(action, *names)
        assert (answer.code, answer.remark) == (2018, "lite subscription quota exceeded: 5")
    assert (await peer.change("PARTIAL_REMOVE", "a")).code == 0
    assert (await peer.change("PARTIAL_ADD", "f")).code == 0


async def test_the_quota_of_a_broker_counts_all_clients(tmp_path):
    async with lite_cluster(tmp_path, broker={"lite_subscriptions_max": 3}) as cluster:
        one, two = LitePeer(cluster, "c1"), LitePeer(cluster, "c2")
        await one.subscribe("a", "b")
        await two.subscribe("a")
        assert (await two.change("PARTIAL_ADD", "b")).code == 2018
        assert (await one.change("COMPLETE_REMOVE")).code == 0
        assert (await two.change("PARTIAL_ADD", "b")).code == 0


async def test_the_number_of_clients_is_limited(lite, monkeypatch):
    monkeypatch.setattr(handlers, "CLIENTS_MAX", 1)
    one, two = LitePeer(lite, "c1"), LitePeer(lite, "c2")
    await one.subscribe("a")
    for answer in (await two.change("PARTIAL_ADD", "a"), await two.pop_answer()):
        assert (answer.code, answer.remark) == (2018, "lite subscription quota exceeded: 1 clients")
    await one.subscribe("b")
    await one.change("COMPLETE_REMOVE")
    await two.subscribe("a")


async def test_acknowledged_batches_do_not_pile_up(lite, monkeypatch):
    monkeypatch.setattr(service, "_DUE_MIN", 10)
    lite.standalone.broker.context.lite._due_max = 10
    peer = LitePeer(lite)
    await peer.subscribe("a")
    for _ in range(30):
        await send(lite, "a", "x")
        await peer.ack(*await peer.pop())
    assert len(lite.standalone.broker.context.lite._due) <= 11
    await send(lite, "a", "y")
    assert shown(await peer.pop(invisible_ms=5000)) == [("a", "y", 0)]
    assert shown(await peer.pop(wait_ms=10_000)) == [("a", "y", 1)]


# ---- delivery


async def test_messages_of_subscribed_lite_topics_are_received_once(lite):
    peer = LitePeer(lite)
    await peer.subscribe("n1", "n2")
    await send(lite, "n1", "m0", "m1")
    await send(lite, "n2", "k0")
    await send(lite, "n3", "other")
    got = await peer.pop()
    assert shown(got) == [("n1", "m0", 0), ("n1", "m1", 0), ("n2", "k0", 0)]
    assert await peer.pop() == []
    assert await peer.ack(*got) == [0, 0, 0]
    assert await peer.pop() == []


async def test_a_waiting_pop_gets_a_new_message(lite):
    peer = LitePeer(lite)
    await peer.subscribe("n1")
    waiting = asyncio.create_task(peer.pop(wait_ms=15_000))
    await asyncio.sleep(1)
    await send(lite, "n1", "m0")
    assert shown(await waiting) == [("n1", "m0", 0)]


async def test_a_pop_that_finds_nothing_ends_at_its_time(lite):
    peer = LitePeer(lite)
    await peer.subscribe("n1")
    answer = await peer.pop_answer(wait_ms=5000)
    assert (answer.code, answer.remark, decode_fields(answer)["reviveQid"]) == (210, "NO_MESSAGE_IN_QUEUE", "999")


async def test_a_subscription_delivers_what_is_there(lite):
    await send(lite, "old", "m0")
    peer = LitePeer(lite)
    await peer.subscribe("old")
    assert shown(await peer.pop()) == [("old", "m0", 0)]


async def test_forty_lite_topics_are_served_in_turn(lite):
    peer = LitePeer(lite)
    names = [f"s{i}" for i in range(40)]
    await peer.subscribe(*names)
    for name in names:
        await send(lite, name, "x")
    first, second = await peer.pop(), await peer.pop()
    assert (len(first), len(second)) == (32, 8)
    assert sorted(one.lite for one in first + second) == sorted(names)


async def test_one_busy_lite_topic_leaves_room_for_the_others(lite):
    peer = LitePeer(lite)
    await peer.subscribe("busy", "calm")
    await send(lite, "busy", *map(str, range(40)))
    await send(lite, "calm", "x")
    got = await peer.pop()
    assert [one.lite for one in got].count("busy") == 16
    assert ("calm", "x", 0) in shown(got)


async def test_the_next_messages_wait_for_the_acks_of_the_batch(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1")
    got = await peer.pop()
    await send(lite, "a", "2")
    assert await peer.pop() == []
    await peer.ack(got[1])
    assert await peer.pop() == []
    waiting = asyncio.create_task(peer.pop(wait_ms=9000))
    await asyncio.sleep(0.1)
    await peer.ack(got[0])
    assert shown(await waiting) == [("a", "2", 0)]


async def test_messages_that_are_not_acknowledged_are_redelivered_in_order(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1", "2")
    got = await peer.pop(invisible_ms=10_000)
    await peer.ack(got[0])
    again = await peer.pop(wait_ms=15_000)
    assert shown(again) == [("a", "1", 1), ("a", "2", 1)]
    assert await peer.ack(got[1]) == [0], "an ack of an earlier delivery has no effect"
    assert shown(await peer.pop(wait_ms=40_000)) == [("a", "1", 2), ("a", "2", 2)]


async def test_a_nack_brings_the_message_back_at_its_time_and_later_ones_behind_it(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1", "2")
    got = await peer.pop()
    start = lite.standalone.broker.context.clock.now_ms()
    assert (await peer.nack(got[0], 2000)).code == 0
    again = await peer.pop(wait_ms=20_000)
    passed = lite.standalone.broker.context.clock.now_ms() - start
    assert shown(again) == [("a", "0", 1), ("a", "1", 1), ("a", "2", 1)]
    assert 2000 <= passed <= 3000


async def test_a_nack_of_a_later_message_waits_for_the_earlier_ones(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1")
    got = await peer.pop()
    await peer.nack(got[1], 1000)
    assert await peer.pop(wait_ms=5000) == []
    await peer.ack(got[0])
    assert shown(await peer.pop(wait_ms=5000)) == [("a", "1", 1)]


async def test_suspend_pauses_the_queue_and_is_not_counted(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1")
    got = await peer.pop()
    await peer.ack(got[0])
    assert (await peer.nack(got[1], 3000, suspend=True)).code == 0
    assert await peer.pop(wait_ms=2000) == []
    assert shown(await peer.pop(wait_ms=5000)) == [("a", "1", 0)]


async def test_the_same_attempt_gets_the_same_messages_and_newer_ones(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "A0")
    assert shown(await peer.pop(attemptId="x")) == [("a", "A0", 0)]
    await send(lite, "a", "A1")
    assert shown(await peer.pop(attemptId="x")) == [("a", "A0", 0), ("a", "A1", 0)]
    assert await peer.pop(attemptId="y") == []


async def test_two_clients_of_a_shared_group_get_a_lite_topic_one_at_a_time(lite):
    one, two = LitePeer(lite, "c1"), LitePeer(lite, "c2")
    await one.subscribe("sh")
    await two.subscribe("sh")
    await send(lite, "sh", *"0123")
    got = await one.pop()
    assert [text.body for text in got] == [b"0", b"1", b"2", b"3"]
    assert await two.pop() == []
    await send(lite, "sh", "4")
    await one.ack(*got)
    assert shown(await two.pop()) == [("sh", "4", 0)]


async def test_two_groups_each_get_every_message(lite):
    await make_group(lite, "LG2")
    one, two = LitePeer(lite), LitePeer(lite, group="LG2")
    for peer in (one, two):
        await peer.subscribe("a")
    await send(lite, "a", "0")
    assert shown(await one.pop()) == shown(await two.pop()) == [("a", "0", 0)]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"type": "POLICY", "value": 1}, "01234"),
        ({"type": "MIN", "value": 0}, "01234"),
        ({"type": "POLICY", "value": 2}, ""),
        ({"type": "OFFSET", "value": 3}, "34"),
        ({"type": "OFFSET", "value": 99}, ""),
        ({"type": "OFFSET", "value": -1}, "01234"),
        ({"type": "TAIL_N", "value": 2}, "34"),
        ({"type": "TAIL_N", "value": 99}, "01234"),
        ({"type": "POLICY", "value": 0}, "01234"),
    ],
)
async def test_an_offset_option_sets_the_start(lite, option, expected):
    await send(lite, "a", *"01234")
    peer = LitePeer(lite)
    await peer.subscribe("a", offsetOption=option)
    assert "".join(one.body.decode() for one in await peer.pop()) == expected
    await send(lite, "a", "5")
    await lite.standalone.broker.context.lite.expire()
    if not expected:
        assert shown(await peer.pop()) == [("a", "5", 0)]


async def test_a_time_as_an_offset_option(lite):
    await send(lite, "a", "0")
    await asyncio.sleep(10)
    at = lite.standalone.broker.context.clock.now_ms()
    await send(lite, "a", "1", "2")
    peer = LitePeer(lite)
    await peer.subscribe("a", offsetOption={"type": "TIMESTAMP", "value": at})
    assert [one.body for one in await peer.pop()] == [b"1", b"2"]


# ---- exclusive and wildcard groups


class Notified:
    """A client connection that records the lite topics that were taken from its clients."""

    def __init__(self, cluster: Cluster) -> None:
        self.taken: list[tuple[str, str]] = []
        self.client = cluster.new_client({RequestCode.NOTIFY_UNSUBSCRIBE_LITE: self._notice})

    def _notice(self, connection, command):
        fields = decode_fields(command)
        self.taken.append((fields["clientId"], fields["liteTopic"]))


async def test_the_newest_subscriber_of_an_exclusive_group_owns_a_lite_topic(lite):
    await make_group(lite, "EX", **{"sub.model": "Exclusive"})
    told = Notified(lite)
    one, two = LitePeer(lite, "ex1", "EX", told.client), LitePeer(lite, "ex2", "EX")
    await one.subscribe("e1", "e2")
    await two.subscribe("e1")
    await asyncio.sleep(0.1)
    assert told.taken == [("ex1", "e1")]
    await send(lite, "e1", "x")
    assert await one.pop() == []
    assert shown(await two.pop()) == [("e1", "x", 0)]
    assert (await one.change("COMPLETE_ADD", "e1", "e2")).code == 0
    await asyncio.sleep(0.1)
    assert told.taken == [("ex1", "e1"), ("ex1", "e1")]
    await send(lite, "e2", "y")
    assert shown(await one.pop()) == [("e2", "y", 0)]
    # The client names it no more, and later asks for it again.
    await one.change("COMPLETE_ADD", "e2")
    await one.change("COMPLETE_ADD", "e2")
    await one.subscribe("e1")
    info = await lite.ask(RequestCode.GET_LITE_TOPIC_INFO, parentTopic=PARENT, liteTopic="e1")
    assert b'"clientId":"ex1"' in info.payload and b"ex2" not in info.payload


async def test_a_take_over_can_reset_the_offset(lite):
    await make_group(lite, "EX", **{"sub.model": "Exclusive", "sub.reset.offset.exclusive": "true"})
    one, two = LitePeer(lite, "ex1", "EX"), LitePeer(lite, "ex2", "EX")
    await one.subscribe("a")
    await send(lite, "a", "0", "1")
    await one.ack(*await one.pop())
    await two.subscribe("a")
    assert [text.body for text in await two.pop()] == [b"0", b"1"]


@pytest.mark.parametrize(("resets", "expected"), [("true", [b"0"]), ("false", [])])
async def test_an_unsubscription_can_reset_the_offset(lite, resets, expected):
    await make_group(lite, "UN", **{"sub.reset.offset.unsubscribe": resets})
    peer = LitePeer(lite, group="UN")
    await peer.subscribe("a")
    await send(lite, "a", "0")
    await peer.ack(*await peer.pop())
    assert (await peer.change("PARTIAL_REMOVE", "a", "unknown")).code == 0
    await peer.subscribe("a")
    assert [one.body for one in await peer.pop()] == expected


async def test_a_wildcard_group_gets_all_lite_topics(lite):
    await make_group(lite, "W", **{"sub.wildcard": "true"})
    await send(lite, "before", "0")
    peer = LitePeer(lite, group="W")
    answer = await peer.change("PARTIAL_ADD", "a")
    remark = "java.lang.IllegalStateException: subscribe lite operation is not supported for this group"
    assert (answer.code, answer.remark) == (604, remark)
    assert (await peer.change("COMPLETE_ADD")).code == 0
    assert shown(await peer.pop(wait_ms=1000)) == [("before", "0", 0)]
    waiting = asyncio.create_task(peer.pop(wait_ms=5000))
    await asyncio.sleep(0.5)
    await send(lite, "after", "1")
    assert shown(await waiting) == [("after", "1", 0)]


async def test_a_group_that_is_no_wildcard_group_in_spite_of_the_attribute(lite):
    await make_group(lite, "W", **{"sub.wildcard": "false"})
    await LitePeer(lite, group="W").subscribe("a")


async def test_a_silent_client_is_forgotten_and_others_get_its_messages(tmp_path):
    settings = {"lite_client_timeout_ms": 20_000, "lite_client_check_interval_ms": 5000}
    async with lite_cluster(tmp_path, broker=settings) as cluster:
        one, two = LitePeer(cluster, "c1"), LitePeer(cluster, "c2")
        await one.subscribe("a", "b")
        await asyncio.sleep(15)
        await two.subscribe("a")
        assert await count(cluster, "c1") == 2
        await asyncio.sleep(12)
        assert (await count(cluster, "c1"), await count(cluster, "c2")) == (-1, 1)
        await send(cluster, "a", "x")
        assert shown(await two.pop()) == [("a", "x", 0)]


async def count(cluster, client_id):
    fields = {"parentTopic": PARENT, "group": GROUP, "clientId": client_id, "maxCount": 1000}
    answer = await cluster.ask(RequestCode.GET_LITE_CLIENT_INFO, **fields)
    return int(answer.payload.split(b'"liteTopicCount":')[1].split(b",")[0])


# ---- refusals


@pytest.mark.parametrize(
    ("fields", "code", "remark"),
    [
        ({"maxMsgNum": 33}, 29, "the broker[127.0.0.1] pop message's num is greater than 32"),
        ({"topic": "NT"}, 29, "the topic [NT] message type not match"),
        ({"consumerGroup": "GN"}, 29, "subscription bind topic not match, GN"),
        ({}, 210, "NO_MESSAGE_IN_QUEUE"),
    ],
)
async def test_refused_pops(lite, fields, code, remark):
    await lite.send("NT", b"x")
    answer = await LitePeer(lite).pop_answer(**fields)
    assert (answer.code, answer.remark) == (code, remark)


async def test_a_pop_of_a_missing_topic(lite):
    answer = await LitePeer(lite).pop_answer(topic="NOPE")
    assert answer.code == 17
    assert decode_fields(answer)["popTime"] == "0"


async def test_an_unknown_client_that_asks_for_it_has_to_send_its_subscriptions(lite):
    peer = LitePeer(lite, "new")
    answer = await peer.pop_answer(resync="true")
    assert (answer.code, answer.remark) == (604, "resync")
    await peer.subscribe("a")
    assert (await peer.pop_answer(resync="true")).code == 210


# ---- notifications


async def notified(cluster, client_id="raw1", *, wait_ms=0, **fields):
    given = {"consumerGroup": GROUP, "topic": PARENT, "queueId": -1, "pollTime": wait_ms, "bornTime": 0}
    given["bornTime"] = cluster.standalone.broker.context.clock.now_ms()
    given |= {"isLiteConsumer": "true", "clientId": client_id, **fields}
    answer = await cluster.ask(RequestCode.NOTIFICATION, **given)
    return decode_fields(answer) if answer.code == 0 else (answer.code, answer.remark)


HAS, HAS_NONE = [{"hasMsg": text, "pollingFull": "false"} for text in ("true", "false")]


async def test_a_notification_says_whether_a_pop_would_find_messages(lite):
    peer = LitePeer(lite)
    await peer.subscribe("n1")
    assert await notified(lite) == HAS_NONE
    await send(lite, "n1", "0", "1")
    assert await notified(lite) == HAS
    assert await notified(lite) == HAS, "it takes nothing"
    (first, *_) = await peer.pop(1)
    assert await notified(lite) == HAS_NONE, "a batch is out"
    await peer.ack(first)
    assert await notified(lite) == HAS
    assert await notified(lite, "another") == HAS_NONE


async def test_a_notification_waits_for_a_message_and_no_longer_than_its_time(lite):
    peer = LitePeer(lite)
    await peer.subscribe("n1")
    waiting = asyncio.ensure_future(notified(lite, wait_ms=20_000))
    await asyncio.sleep(1)
    await send(lite, "other", "0")
    await asyncio.sleep(1)
    assert not waiting.done()
    await send(lite, "n1", "0")
    assert await waiting == HAS
    assert [one.body for one in await peer.pop()] == [b"0"]
    assert await notified(lite, wait_ms=5_000) == HAS_NONE


async def test_refused_notifications(lite):
    await lite.send("NT", b"x")
    await make_parent(lite, "LT2")
    assert await notified(lite, topic="NT") == (29, "the topic [NT] message type not match")
    assert await notified(lite, topic="LT2") == (29, f"subscription bind topic not match, {GROUP}")
    assert await notified(lite, clientId=" ") == (29, "clientId is missing")


async def test_200072_has_no_handler(lite):
    answer = await lite.ask(RequestCode.ACK_LITE_MESSAGE)
    assert (answer.code, answer.remark) == (3, " request type 200072 not supported")


async def test_refused_acks(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0", "1")
    (first, _) = await peer.pop()
    assert (await peer.ack_answer(first, consumerGroup="GN")).remark == "group type or bind topic not match."
    assert (await peer.ack_answer(first, queueId=1)).remark == "ack queue illegal."
    too_far = await peer.ack_answer(first, offset=3)
    assert (too_far.code, too_far.remark) == (208, "ack offset illegal.")
    none = await peer.ack_answer(first, offset=2)
    assert (none.code, none.remark) == (13, "ack offset illegal.")
    assert (await peer.ack_answer(first)).code == 0


# ---- life


async def test_a_lite_topic_expires_and_lives_again_with_further_numbers(tmp_path):
    async with Cluster(tmp_path, broker={"lite_expiry_interval_ms": 3000}) as cluster:
        await make_parent(cluster, **{"lite.topic.expiration": "1"})
        await make_group(cluster)
        peer = LitePeer(cluster)
        await peer.subscribe("ttl1")
        await send(cluster, "ttl1", *"012")
        got = await peer.pop()
        await peer.ack(got[0])
        await asyncio.sleep(130)
        info = (await cluster.ask(RequestCode.GET_LITE_TOPIC_INFO, parentTopic=PARENT, liteTopic="ttl1")).payload
        assert b'"maxOffset":3,"minOffset":3' in info
        assert cluster.standalone.broker.context.lite.committed(GROUP, light("ttl1")) is None
        assert await peer.pop() == []
        await peer.change("COMPLETE_ADD", "ttl1")
        await send(cluster, "ttl1", "new")
        (new,) = await peer.pop()
        assert (new.body, new.number, new.tries) == (b"new", 3, 0)
        assert await peer.ack(new) == [0]


async def test_the_lag_of_a_consumer_does_not_stop_an_expiry_and_another_parent_is_unharmed(tmp_path):
    async with Cluster(tmp_path) as cluster:
        await make_parent(cluster, **{"lite.topic.expiration": "1"})
        await make_parent(cluster, "Forever")
        await send(cluster, "a", "x")
        await send(cluster, "a", "x", topic="Forever")
        await asyncio.sleep(200)
        assert decode_fields(await cluster.pull(topic=light("a")))["minOffset"] == "1"
        assert decode_fields(await cluster.pull(topic="%LMQ%$Forever$a"))["minOffset"] == "0"


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "killed"])
async def test_a_restart_keeps_acked_messages_acked_and_delivers_the_others_again(tmp_path, is_stopped):
    import shutil

    async with lite_cluster(tmp_path / "store") as cluster:
        peer = LitePeer(cluster)
        names = [f"s{i}" for i in range(20)]
        await peer.subscribe(*names)
        for name in names:
            await send(cluster, name, "0", "1")
        got = await peer.pop() + await peer.pop()
        for one in got:
            if one.number == 0 and int(one.lite[1:]) % 2:
                await peer.ack(one)
        await asyncio.sleep(5)
        if not is_stopped:
            shutil.copytree(tmp_path / "store", tmp_path / "killed", ignore=shutil.ignore_patterns("lock"))
    async with Cluster(tmp_path / ("store" if is_stopped else "killed")) as cluster:
        peer = LitePeer(cluster)
        await peer.subscribe(*names)
        got = await peer.pop() + await peer.pop()
        expected = {(name, i) for name in names for i in (0, 1) if i or not int(name[1:]) % 2}
        assert {(one.lite, one.number) for one in got} == expected
        assert {one.tries for one in got} == {0}
        (answer,) = await send(cluster, "s3", "2")
        assert decode_fields(answer)["liteOffset"] == "2"


async def test_a_deleted_parent_and_a_deleted_group_leave_nothing(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "0")
    await peer.ack(*await peer.pop())
    service = lite.standalone.broker.context.lite
    assert service.offsets.count == 1
    await lite.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, groupName=GROUP)
    assert (service.offsets.count, service.groups) == (0, {})
    await lite.ask(RequestCode.DELETE_TOPIC_IN_BROKER, topic=PARENT)
    assert len(lite.standalone.broker.context.store.lite.table) == 0


async def test_a_dead_letter_is_not_in_its_lite_topic_again(lite):
    peer = LitePeer(lite)
    await peer.subscribe("a")
    await send(lite, "a", "D0", "D1")
    got = await peer.pop()
    place = got[0].handle.split()[-1]
    sent_back = await lite.ask(
        RequestCode.CONSUMER_SEND_MSG_BACK, offset=place, group=GROUP, delayLevel=-1, originTopic=PARENT,
        maxReconsumeTimes=0,
    )  # fmt: skip
    assert sent_back.code == 0, sent_back.remark
    await peer.ack(*got)
    assert await peer.pop() == []
    assert decode_fields(await lite.pull(topic=light("a")))["maxOffset"] == "2"
    (dead,) = iter_records((await lite.pull(topic=f"%DLQ%{GROUP}")).payload)
    properties = decode_properties(dead.properties)
    assert properties["__LITE_TOPIC"] == "a"
    assert "INNER_MULTI_DISPATCH" not in properties
