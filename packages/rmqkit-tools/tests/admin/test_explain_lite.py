"""Planted causes why a lite group gets no messages, and the verdict over literal facts. Source: lite.md §6 to §9."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import pytest
from msgspec.structs import replace

from rmqkit.admin import Admin
from rmqkit.admin.cluster.lite import ClientAt, GroupAt, LiteAt
from rmqkit.admin.diagnosis.causes import Explanation
from rmqkit.admin.diagnosis.lite_causes import LiteCause, LiteFacts, judge_lite
from rmqkit.admin.explain import explain
from rmqkit.admin.explain_lite import explain_lite
from rmqkit.broker.settings import BrokerSettings
from rmqkit.client.lite.consumer import LiteConsumer
from rmqkit.errors import PeerRefused, SettingsError, UnknownName
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import reply
from rmqkit.protocol.message import Message
from rmqkit.protocol.schemas.groups import SubscriptionGroupConfig
from rmqkit.protocol.schemas.topics import TopicConfig
from rmqkit.standalone import Standalone
from rmqkit.store.settings import StoreSettings
from tests.admin.test_lite import make_parent, put
from tests.admin.things import make_topic
from tests.client.peers import SECONDS

real_time = pytest.mark.real_time
NOW_MS = 1_790_000_000_000


class Scene:
    """A parent topic of its own at broker-a, with messages of the lite topic ``s``."""

    def __init__(self, admin: Admin, name_servers: str, parent: str) -> None:
        self.admin, self.name_servers, self.parent = admin, name_servers, parent
        self.group = f"g_{parent}"

    async def start(self, *names: str, **attributes: str) -> None:
        await make_parent(self.admin, self.parent, ["broker-a"])
        await self.bind(self.parent, **attributes)
        await put(self.admin, self.parent, "broker-a", *names)

    async def bind(self, parent: str, **attributes: str) -> None:
        given = {"+lite.bind.topic": parent, **{f"+lite.{name}": value for name, value in attributes.items()}}
        await self.admin.groups.update(self.group, {"attributes": given}, "broker-a")

    def consumer(self, **options: Any) -> LiteConsumer:
        return LiteConsumer(self.group, self.parent, self.name_servers, **options)

    async def why(self, name: str = "s", **options: Any) -> Explanation:
        return await explain_lite(self.admin, self.parent, name, options.pop("group", self.group), **options)

    async def cause(self, name: str = "s", **options: Any) -> LiteCause:
        return (await self.why(name, **options)).cause  # type: ignore[return-value]


@pytest.fixture
def scene(admin, name_servers, request):
    number = sum(map(ord, request.node.name))
    return Scene(admin, name_servers, f"E{number}_{request.node.name[5:25]}")


# -- planted causes


@real_time
async def test_a_topic_of_another_type_is_no_parent(admin):
    await make_topic(admin, "Plain", ["broker-a"])
    found = await explain_lite(admin, "Plain", "s", "any")
    assert (found.cause, found.sentence) == (
        LiteCause.NO_PARENT,
        "Topic Plain on broker-a is no parent of lite topics: its type is NORMAL.",
    )


@real_time
async def test_a_missing_topic_and_a_wrong_name_are_errors(admin, scene):
    await scene.start()
    with pytest.raises(UnknownName, match="has no topic Nowhere"):
        await explain_lite(admin, "Nowhere", "s", "any")
    with pytest.raises(SettingsError, match="lite topic 'a/b': lite topic can only contain"):
        await scene.why("a/b")


@real_time
async def test_a_group_that_does_not_exist(scene):
    await scene.start("s")
    assert await scene.cause(group="nobody") is LiteCause.GROUP_UNKNOWN


@real_time
async def test_a_group_that_may_not_consume(admin, scene):
    await scene.start("s")
    await admin.groups.update(scene.group, {"consume_enable": False}, "broker-a")
    found = await scene.why()
    assert (found.cause, found.remedy) == (
        LiteCause.GROUP_DISABLED,
        f"enable it: rmq group create {scene.group} -s true",
    )


@real_time
async def test_a_group_without_a_binding(admin, scene):
    await scene.start("s")
    await admin.groups.update("plain_group", {}, "broker-a")
    assert await scene.cause(group="plain_group") is LiteCause.REGULAR_GROUP


@real_time
async def test_a_group_that_is_bound_to_another_topic(scene):
    await scene.start("s")
    await scene.bind("Elsewhere")
    found = await scene.why()
    assert (found.cause, found.sentence) == (
        LiteCause.BOUND_ELSEWHERE,
        f"Group {scene.group} is bound to topic Elsewhere, not to {scene.parent}.",
    )


@real_time
async def test_a_parent_that_may_not_be_read(admin, scene):
    await scene.start("s")
    await admin.topics.set_permission(scene.parent, 2)
    assert await scene.cause() is LiteCause.NOT_READABLE


@real_time
async def test_a_user_without_the_right(admin, scene):
    await scene.start("s")
    await admin.access.create_user("ann", "secret12", broker="broker-a")
    await admin.access.put_policy("ann", f"Group:{scene.group}", ["Sub"], broker="broker-a")
    found = await scene.why(user="ann")
    assert found.cause is LiteCause.NO_PERMISSION
    assert f"Topic:{scene.parent}" in found.sentence
    assert shlex.split(found.remedy.partition(": ")[2])[:3] == ["rmq", "policy", "put"]
    await admin.access.put_policy("ann", f"Topic:{scene.parent}", ["Sub"], broker="broker-a")
    assert await scene.cause(user="ann") is LiteCause.NO_CLIENT
    with pytest.raises(UnknownName, match="has no user bob"):
        await scene.cause(user="bob")


@real_time
async def test_a_name_that_was_never_written(scene):
    await scene.start("other")
    async with scene.consumer() as consumer:
        await consumer.subscribe("s")
        assert await scene.cause() is LiteCause.NEVER_WRITTEN


@real_time
async def test_a_name_that_a_full_broker_refuses(tmp_path):
    settings = StoreSettings(lite_topic_count_max=1)
    async with Standalone(tmp_path / "store", store=settings) as alone, Admin(alone.namesrv_address) as admin:
        broker = alone.broker.context.settings.broker_name
        await admin.topics.create("P", broker=broker, attributes="+message.type=LITE")
        await admin.groups.update("g", {"attributes": {"+lite.bind.topic": "P"}}, broker)
        await admin.messages.send(Message(topic="P", body=b"x", lite_topic="a"), broker=broker, queue_id=0)
        found = await explain_lite(admin, "P", "b", "g")
        assert found.cause is LiteCause.TOO_MANY
        assert "has 1 lite topics, and refuses new ones from 1 on" in found.sentence


@real_time
async def test_a_broker_whose_subscriptions_are_used_up(tmp_path):
    broker = BrokerSettings(listen_port=0, bind_address="127.0.0.1", broker_name="b", lite_subscriptions_max=1)
    async with Standalone(tmp_path / "store", broker=broker) as alone, Admin(alone.namesrv_address) as admin:
        full = Scene(admin, alone.namesrv_address, "P")
        await admin.topics.create("P", broker="b", attributes="+message.type=LITE")
        await admin.groups.update(full.group, {"attributes": {"+lite.bind.topic": "P"}}, "b")
        await admin.messages.send(Message(topic="P", body=b"x", lite_topic="s"), broker="b", queue_id=0)
        async with full.consumer() as consumer:
            await consumer.subscribe("other")
            with pytest.raises(PeerRefused):
                await consumer.subscribe("s")
            found = await full.why()
            assert found.cause is LiteCause.QUOTA
            assert "has 1 subscriptions of clients to lite topics, and may have 1" in found.sentence


@real_time
async def test_a_broker_that_does_not_know_the_requests(admin, scene, monkeypatch):
    await scene.start("s")
    ask = admin.calls.call

    async def as_5_4(address, command, timeout_ms=None):
        if 200070 <= command.code <= 200079:
            return reply(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, "request type not supported")
        return await ask(address, command, timeout_ms)

    monkeypatch.setattr(admin.calls, "call", as_5_4)
    assert await scene.cause() is LiteCause.NOT_SERVED


@real_time
async def test_a_name_that_expired(admin, scene):
    await scene.start("s", "s")
    await admin.lite.delete(scene.parent, "s")
    async with scene.consumer() as consumer:
        await consumer.subscribe("s")
        found = await scene.why()
        assert found.cause is LiteCause.EXPIRED
        assert "its last message was number 1" in found.sentence


@real_time
async def test_a_message_that_was_never_stored(scene):
    await scene.start("s")
    assert await scene.cause(number=1) is LiteCause.NOT_STORED
    assert await scene.cause(number=0) is LiteCause.NO_CLIENT


@real_time
async def test_an_offset_past_the_message(admin, scene):
    await scene.start("s", "s")
    async with scene.consumer() as consumer:
        await consumer.subscribe("s")
        messages = aiter(consumer)
        await (await anext(messages)).ack()
        assert await scene.cause(number=0) is LiteCause.CONSUMED
        assert await scene.cause(number=1) is LiteCause.UNACKED
        await (await anext(messages)).ack()
        found = await scene.why()
        assert found.cause is LiteCause.CONSUMED
        assert "its offset is 2, the next message gets number 2" in found.sentence


@real_time
async def test_a_group_without_clients(scene):
    await scene.start("s")
    assert await scene.cause() is LiteCause.NO_CLIENT


@real_time
async def test_a_client_that_the_broker_does_not_know(scene):
    await scene.start("s")
    async with scene.consumer() as consumer:
        await consumer.subscribe("s")
        assert await scene.cause(client_id="nobody@1") is LiteCause.CLIENT_UNKNOWN


@real_time
async def test_another_client_of_an_exclusive_group_has_the_name(admin, scene):
    await scene.start("s", "t", **{"sub.model": "Exclusive"})
    async with scene.consumer() as first:
        await first.subscribe("s", "t")
        (one,) = [one.client_id for one in (await admin.lite.group(scene.group, broker="broker-a")).clients]
        async with scene.consumer() as second:
            await second.subscribe("s")
            found = await scene.why(client_id=one)
            assert found.cause is LiteCause.TAKEN
            assert one not in found.sentence
            assert await scene.cause("t", client_id=one) is LiteCause.UNACKED


@real_time
async def test_a_client_whose_quota_is_used_up(scene):
    await scene.start("s", **{"sub.client.quota": "1"})
    async with scene.consumer() as consumer:
        await consumer.subscribe("other")
        found = await scene.why()
        assert found.cause is LiteCause.QUOTA
        assert "has 1 lite topics, and may have 1" in found.sentence


@real_time
async def test_a_name_to_which_no_client_subscribes(admin, scene):
    await scene.start("s")
    async with scene.consumer() as consumer:
        await consumer.subscribe("other")
        (one,) = [one.client_id for one in (await admin.lite.group(scene.group, broker="broker-a")).clients]
        assert await scene.cause() is LiteCause.NOT_SUBSCRIBED
        found = await scene.why(client_id=one)
        assert found.cause is LiteCause.NOT_SUBSCRIBED
        assert found.sentence == f"Client {one} of group {scene.group} does not subscribe to lite topic s."


@real_time
async def test_messages_that_are_not_acknowledged_hold_up_the_others(scene):
    await scene.start("s", "s")
    async with scene.consumer(count_max=1) as consumer:
        await consumer.subscribe("s")
        await anext(aiter(consumer))
        found = await scene.why(number=1)
        assert found.cause is LiteCause.UNACKED
        assert "has received 1 messages" in found.sentence


@real_time
async def test_a_subscriber_that_does_not_pop(admin, scene):
    await scene.start()
    async with scene.consumer() as consumer:
        await consumer.subscribe("s")
        for task in consumer._popping.values():
            task.cancel()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*consumer._popping.values(), return_exceptions=True)
            while (await admin.lite.group(scene.group, broker="broker-a")).clients[0].waiting_count:
                await put(admin, scene.parent, "broker-a", "t")  # the lost pop of the client takes this name
                await consumer.subscribe("t")
        await put(admin, scene.parent, "broker-a", "s")
        found = await scene.why()
        assert found.cause is LiteCause.WAITING
        assert "1 messages behind" in found.sentence


@real_time
async def test_a_wildcard_group_needs_no_subscription(scene):
    await scene.start("s", **{"sub.wildcard": "true"})
    async with scene.consumer(count_max=1) as consumer:
        message = await anext(aiter(consumer))
        assert await scene.cause() is LiteCause.UNACKED
        await message.ack()
        assert await scene.cause() is LiteCause.CONSUMED


@real_time
async def test_a_message_of_a_lite_topic_is_explained_by_its_id(admin, scene):
    await scene.start()
    message = Message(topic=scene.parent, body=b"x", lite_topic="s", keys=["k"])
    sent = await admin.messages.send(message, broker="broker-a", queue_id=0)
    found = await explain(admin, scene.parent, scene.group, sent.offset_msg_id)
    assert found.cause is LiteCause.NO_CLIENT
    await admin.groups.update("plain_group", {}, "broker-a")
    plain = await explain(admin, scene.parent, "plain_group", sent.offset_msg_id)
    assert not isinstance(plain.cause, LiteCause)


# -- literal facts, for causes that only other brokers have, and for edges


def facts(**changes: Any) -> LiteFacts:
    """A healthy lite topic with two messages, of which the group has consumed none."""
    attributes = {"lite.bind.topic": "P"}
    found = LiteFacts(
        parent="P",
        name="s",
        group="g",
        broker="b",
        now_ms=NOW_MS,
        topic=TopicConfig("P", attributes={"message.type": "LITE"}),
        config=SubscriptionGroupConfig(group_name="g", attributes=attributes),
        place=LiteAt(broker_name="b", max_offset=2, last_update_timestamp=NOW_MS, epoch=1, is_live=True),
        standing=GroupAt(group="g", broker_name="b", lag=2, clients=["c"]),
        clients=[ClientAt(broker_name="b", client_id="c", lite_topic_count=1)],
    )
    return replace(found, **changes)


def at(**changes: Any) -> LiteAt:
    return replace(LiteAt(broker_name="b", max_offset=2, last_update_timestamp=NOW_MS), **changes)


def test_a_healthy_group_only_waits():
    assert judge_lite(facts()).cause is LiteCause.WAITING


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"topic": None}, LiteCause.NO_PARENT),
        ({"is_served": False, "place": None}, LiteCause.NOT_SERVED),
        ({"is_off": True, "place": at(max_offset=0, has_lists=False)}, LiteCause.SWITCHED_OFF),
        ({"routed_perm": 2}, LiteCause.NOT_READABLE),
        ({"place": at(min_offset=2)}, LiteCause.DELETED),
        ({"place": at(min_offset=1), "number": 0}, LiteCause.DELETED),
        ({"place": at(min_offset=1), "number": 1}, LiteCause.WAITING),
        ({"subscriptions": 9, "subscriptions_max": 9}, LiteCause.WAITING),
        (
            {"standing": GroupAt(group="g", broker_name="b"), "subscriptions": 9, "subscriptions_max": 9},
            LiteCause.QUOTA,
        ),
        (
            {"standing": GroupAt(group="g", broker_name="b"), "subscriptions": 8, "subscriptions_max": 9},
            LiteCause.NOT_SUBSCRIBED,
        ),
        ({"standing": GroupAt(group="g", broker_name="b", consumer_offset=1), "number": 0}, LiteCause.CONSUMED),
        ({"clients": [], "standing": GroupAt(group="g", broker_name="b", clients=["*"])}, LiteCause.NO_CLIENT),
        ({"clients": [], "standing": GroupAt(group="g", broker_name="b")}, LiteCause.NO_CLIENT),
        (
            {"clients": [], "standing": GroupAt(group="g", broker_name="b"), "place": at(has_lists=False)},
            LiteCause.NOT_SUBSCRIBED,
        ),
    ],
)
def test_facts_lead_to_one_cause(changes, cause):
    assert judge_lite(facts(**changes)).cause is cause


def test_a_broker_without_lives_does_not_distinguish_an_expired_name_from_an_unwritten_one():
    apache = facts(place=at(max_offset=0, has_lists=False), lifetime_minutes=20)
    assert judge_lite(apache).sentence == (
        "Lite topic s of P has never had a message on b; lite topics of P expire after 20 minutes."
    )
    known = facts(place=at(max_offset=0, epoch=1, is_live=True), lifetime_minutes=20)
    assert judge_lite(known).sentence == "Lite topic s of P has never had a message on b."


def test_the_command_of_a_remedy_survives_a_shell():
    found = judge_lite(facts(group="a|b", config=None))
    words = shlex.split(found.remedy.partition(": ")[2])
    assert words[:4] == ["rmq", "group", "create", "a|b"]


def test_evidence_names_what_was_found_and_who_reported_it():
    found = judge_lite(facts(lite_topics=3, lite_topics_max=10))
    assert [(one.name, one.value) for one in found.evidence] == [
        ("type of P", "LITE"),
        ("bound to", "P"),
        ("consumeEnable", "true"),
        ("model", "Shared"),
        ("lite topics per client", 2000),
        ("its messages", "0 to 2"),
        ("last message", "2026-09-21T14:13:20Z"),
        ("life", 1),
        ("group's offset", 0),
        ("subscribers", "c"),
        ("lite topics of the broker", "3 of 10"),
        ("client", "c: 1 lite topics, 0 waiting pops, last request at 1970-01-01T00:00:00Z"),
    ]
