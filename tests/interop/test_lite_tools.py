"""`rmq lite` at Apache's broker: lists that it has, one lite topic, reads, deletions, causes. Source: lite.md §11."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rmqkit.admin import Admin
from rmqkit.admin.diagnosis.lite_causes import LiteCause
from rmqkit.admin.explain_lite import explain_lite
from rmqkit.client.lite.consumer import LiteConsumer
from rmqkit.errors import UnknownName
from rmqkit.protocol.message import Message
from tests.interop.apache import BROKER_NAME, ApachePair

pytestmark = [pytest.mark.interop, pytest.mark.real_time]

SECONDS = 60


@pytest.fixture
async def admin(apache: ApachePair) -> AsyncIterator[Admin]:
    async with Admin(apache.namesrv_addr) as it:
        yield it


async def make(admin: Admin, parent: str, group: str = "", **counts: int) -> None:
    """Create a parent with messages in lite topics, and a lite group."""
    attributes = "+message.type=LITE,+lite.topic.expiration=20"
    await admin.topics.create(parent, broker=BROKER_NAME, read_queues=1, write_queues=1, attributes=attributes)
    if group:
        await admin.groups.update(group, {"attributes": {"+lite.bind.topic": parent}}, BROKER_NAME)
    async with asyncio.timeout(SECONDS):
        while parent not in await admin.calls.topic_names():
            await asyncio.sleep(0.05)
    for name, count in counts.items():
        for number in range(count):
            message = Message(topic=parent, body=b"%d" % number, lite_topic=name)
            await admin.messages.send(message, broker=BROKER_NAME, queue_id=0)
        async with asyncio.timeout(SECONDS):
            while (await admin.lite.show(parent, name)).places[0].max_offset < count:
                await asyncio.sleep(0.05)


async def test_apache_s_broker_shows_parents_and_one_lite_topic_and_says_that_it_has_no_list(admin: Admin) -> None:
    await make(admin, "LiteShown", "lite_shown", a=3, b=1)
    row = next(one for one in await admin.lite.parents() if one.parent == "LiteShown")
    assert (row.lite_topics, row.lifetime_minutes, row.groups) == (2, 20, ["lite_shown"])
    page = await admin.lite.names("LiteShown")
    assert page.rows == []
    assert [text.startswith(f"broker {BROKER_NAME} cannot list lite topics") for text in page.troubles] == [True]
    shown = await admin.lite.show("LiteShown", "a")
    (place,) = shown.places
    assert (place.min_offset, place.max_offset, place.epoch, place.has_lists) == (0, 3, None, False)
    assert place.expires_at == place.last_update_timestamp + 20 * 60_000
    (group,) = await admin.lite.groups("LiteShown")
    assert (group.group, group.model, group.quota, group.clients) == ("lite_shown", "Shared", 2000, None)
    assert group.trouble == ""
    assert not (await admin.lite.show("LiteShown", "none")).is_known


async def test_messages_are_read_and_a_lite_topic_is_deleted_and_its_parent_is_not(admin: Admin) -> None:
    await make(admin, "LiteRead", a=3, b=1)
    read = [(one.number, one.message.body) async for one in admin.lite.read("LiteRead", "a", start=-2)]
    assert read == [(1, b"1"), (2, b"2")]
    assert [one.number for one in await admin.lite.newest("LiteRead", "a", 2)] == [2, 1]
    assert [one.where for one in await admin.lite.delete("LiteRead", "a")] == [BROKER_NAME]
    with pytest.raises(UnknownName, match="has no lite topic a"):
        await admin.lite.holders("LiteRead", "a")
    assert [one.message.body async for one in admin.lite.read("LiteRead", "b")] == [b"0"]
    assert (await admin.topics.config("LiteRead"))[BROKER_NAME].is_lite


async def test_a_group_shows_its_backlog_and_a_client_its_lite_topics(admin: Admin, apache: ApachePair) -> None:
    await make(admin, "LiteGroup", "lite_group", a=3, b=1)
    async with LiteConsumer("lite_group", "LiteGroup", apache.namesrv_addr, count_max=1) as consumer:
        await consumer.subscribe("a")
        message = await anext(aiter(consumer))
        assert (message.lite_topic, message.number) == ("a", 0)
        found = await admin.lite.client("LiteGroup", "lite_group", consumer._client_id)
        assert found[BROKER_NAME].lite_topic_set == ["a"]
        assert await _cause(admin, "a", client_id=consumer._client_id) is LiteCause.WAITING
        assert await _cause(admin, "b", client_id=consumer._client_id) is LiteCause.NOT_SUBSCRIBED
        assert await _cause(admin, "a", client_id="nobody") is LiteCause.CLIENT_UNKNOWN
        await message.ack()
        async with asyncio.timeout(SECONDS):
            while await _cause(admin, "a", number=0) is not LiteCause.CONSUMED:
                await asyncio.sleep(0.05)
    assert [one.where for one in await admin.lite.dispatch("lite_group")] == [BROKER_NAME]
    assert [one.where for one in await admin.lite.reset("LiteGroup", "a", "lite_group", 2)] == [BROKER_NAME]
    assert await _cause(admin, "b") is LiteCause.NOT_SUBSCRIBED, "a client without heartbeats may be online"
    assert await _cause(admin, "none") is LiteCause.NEVER_WRITTEN
    assert await _cause(admin, "a", number=9) is LiteCause.NOT_STORED


async def _cause(admin: Admin, name: str, *, number: int | None = None, client_id: str | None = None) -> object:
    found = await explain_lite(admin, "LiteGroup", name, "lite_group", number=number, client_id=client_id)
    return found.cause


async def test_a_group_of_another_type_or_parent_is_explained(admin: Admin) -> None:
    await make(admin, "LiteBound", "lite_bound", a=1)
    await admin.groups.update("lite_plain", {}, BROKER_NAME)
    await admin.groups.update("lite_other", {"attributes": {"+lite.bind.topic": "Elsewhere"}}, BROKER_NAME)
    found = [(await explain_lite(admin, "LiteBound", "a", group)).cause for group in ("lite_plain", "lite_other", "no")]
    assert found == [LiteCause.REGULAR_GROUP, LiteCause.BOUND_ELSEWHERE, LiteCause.GROUP_UNKNOWN]


async def test_a_broker_without_light_queues_enters_messages_in_no_lite_topic(managed_apache: ApachePair) -> None:
    async with Admin(managed_apache.namesrv_addr) as admin:
        await make(admin, "LiteOff", "lite_off")
        message = Message(topic="LiteOff", body=b"x", lite_topic="a")
        await admin.messages.send(message, broker=BROKER_NAME, queue_id=0)
        found = await explain_lite(admin, "LiteOff", "a", "lite_off")
        assert found.cause is LiteCause.SWITCHED_OFF
