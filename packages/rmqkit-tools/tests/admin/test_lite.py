"""Lite topics at two brokers: joined lists, the broker of a name, reads that follow, brokers without lists."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import UNSET

from rmqkit.admin import Admin
from rmqkit.admin.calls import read_only
from rmqkit.errors import PeerRefused, ReadOnly, SettingsError, UnknownName
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.message import Message
from tests.admin.things import BROKERS
from tests.client.peers import SECONDS

pytestmark = pytest.mark.real_time


async def make_parent(admin, parent, brokers=BROKERS):
    for broker in brokers:
        await admin.topics.create(parent, broker=broker, read_queues=1, write_queues=1, attributes="+message.type=LITE")
    async with asyncio.timeout(SECONDS):
        while {data.broker_name for data in (await admin.calls.route(parent)).broker_datas} != set(brokers):
            admin.calls.forget()
            await asyncio.sleep(0.01)


async def put(admin, parent, broker, *names):
    for name in names:
        message = Message(topic=parent, body=f"{broker}:{name}".encode(), lite_topic=name)
        await admin.messages.send(message, broker=broker, queue_id=0)


async def pages(admin, parent, count, **options):
    """The names on each page."""
    after, found = "", []
    while True:
        page = await admin.lite.names(parent, count=count, after=after, **options)
        found.append([(one.lite_topic, one.broker_name[-1]) for one in page.rows])
        after = page.next_after
        if not after:
            return found


async def test_pages_of_two_brokers_are_joined_in_order_without_gaps(admin):
    await make_parent(admin, "Joined")
    await put(admin, "Joined", "broker-a", "a", "c", "d", "x")
    await put(admin, "Joined", "broker-b", "b", "c", "e")
    everything = [("a", "a"), ("b", "b"), ("c", "a"), ("c", "b"), ("d", "a"), ("e", "b"), ("x", "a")]
    for count in (1, 2, 3, 4, 7, 100):
        found = await pages(admin, "Joined", count)
        assert [one for page in found for one in page] == everything, count
        assert all(len({name for name, _ in page}) <= count for page in found)
    assert await pages(admin, "Joined", 100, prefix="c") == [[("c", "a"), ("c", "b")]]
    assert (await admin.lite.names("Joined", count=1)).total == 7


@pytest.mark.parametrize("count", [0, 1001])
async def test_a_page_has_from_one_to_a_thousand_rows(admin, count):
    with pytest.raises(SettingsError, match=rf"count {count} must be from 1 to 1000"):
        await admin.lite.names("Any", count=count)


async def test_a_broker_that_cannot_list_is_named_and_the_others_are_listed(admin, monkeypatch):
    await make_parent(admin, "Mixed")
    await put(admin, "Mixed", "broker-a", "a")
    await put(admin, "Mixed", "broker-b", "b")
    ask, broker_b = admin.lite._info, await admin.calls.address("broker-b")

    async def as_apache(address, header):
        info = await ask(address, header)
        if address == broker_b:
            info.lite_topics = info.next_after = UNSET
        return info

    monkeypatch.setattr(admin.lite, "_info", as_apache)
    page = await admin.lite.names("Mixed")
    assert [one.lite_topic for one in page.rows] == ["a"]
    (trouble,) = page.troubles
    assert (
        trouble == "broker broker-b cannot list lite topics, only rmqkit's brokers can: name one, or see those with lag"
    )
    shown = await admin.lite.show("Mixed", "b")
    assert [(one.broker_name, one.max_offset, one.epoch) for one in shown.places] == [
        ("broker-a", 0, None),
        ("broker-b", 1, None),
    ]


async def test_only_the_broker_with_the_messages_deletes_and_is_read(admin):
    await make_parent(admin, "Halves")
    await put(admin, "Halves", "broker-b", "s", "s")
    assert [*await admin.lite.holders("Halves", "s")] == ["broker-b"]
    read = [(one.number, one.broker_name, one.message.body) async for one in admin.lite.read("Halves", "s")]
    assert read == [(0, "broker-b", b"broker-b:s"), (1, "broker-b", b"broker-b:s")]
    assert [one.where for one in await admin.lite.delete("Halves", "s")] == ["broker-b"]
    with pytest.raises(UnknownName, match="parent topic Halves on broker-a, broker-b has no lite topic s"):
        await admin.lite.delete("Halves", "s")


async def test_a_reader_that_follows_gets_messages_of_a_name_that_did_not_exist(admin):
    await make_parent(admin, "Later", ["broker-a"])
    reading = admin.lite.read("Later", "s", follows=True, count=2)
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    await put(admin, "Later", "broker-a", "s")
    async with asyncio.timeout(SECONDS):
        assert (await first).number == 0
        await put(admin, "Later", "broker-a", "s")
        assert [one.number async for one in reading] == [1]


async def test_the_newest_messages_are_returned_newest_first(admin):
    await make_parent(admin, "Newest", ["broker-a"])
    await put(admin, "Newest", "broker-a", *["s"] * 5)
    assert [one.number for one in await admin.lite.newest("Newest", "s", 3)] == [4, 3, 2]
    assert await admin.lite.newest("Newest", "none", 3) == []


async def test_the_parents_of_the_cluster_are_listed_with_their_brokers(admin):
    await make_parent(admin, "Seen")
    await put(admin, "Seen", "broker-a", "a")
    await put(admin, "Seen", "broker-b", "b")
    row = next(one for one in await admin.lite.parents() if one.parent == "Seen")
    assert (row.lite_topics, row.lifetime_minutes, row.brokers) == (2, -1, ["broker-a", "broker-b"])
    assert set(await admin.lite.brokers()) == {"broker-a", "broker-b"}


async def test_a_group_at_one_of_two_brokers_is_shown(admin):
    await make_parent(admin, "OneSided")
    await put(admin, "OneSided", "broker-a", "a")
    await admin.groups.update("one_sided", {"attributes": {"+lite.bind.topic": "OneSided"}}, "broker-a")
    found = await admin.lite.group("one_sided")
    assert (found.lag, [one.broker_name for one in found.top]) == (1, ["broker-a"])
    assert [one.where for one in await admin.lite.dispatch("one_sided")] == ["broker-a"]
    with pytest.raises(PeerRefused) as refused:
        await admin.lite.group("nobody")
    assert refused.value.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_a_guard_for_reading_lets_nothing_be_deleted_or_dispatched(admin, name_servers):
    await make_parent(admin, "Guarded", ["broker-a"])
    await put(admin, "Guarded", "broker-a", "s")
    async with Admin(name_servers, guard=read_only) as reader:
        assert (await reader.lite.show("Guarded", "s")).is_known
        assert len((await reader.lite.names("Guarded")).rows) == 1
        with pytest.raises(ReadOnly):
            await reader.lite.delete("Guarded", "s")
    assert (await admin.lite.show("Guarded", "s")).places[0].is_live
