"""Messages by time, over all queues of several brokers."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from rmqkit.admin import Admin
from rmqkit.admin.pulls import Span, age, listed
from rmqkit.errors import ClientError, SettingsError, UnknownName
from rmqkit.protocol.message import Message
from tests.admin.things import make_topic, send
from tests.client.peers import SECONDS

TOPIC = "Listing"
COUNT = 90


@pytest.fixture(scope="module")
def stored(name_servers):
    """Messages in four queues of two brokers, more than one pull gives of each; in the order they were sent."""

    async def fill():
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            await make_topic(admin, TOPIC)
            messages = [
                Message(topic=TOPIC, body=b"%d" % n, tags="AB"[n % 2], properties={"n": str(n)}) for n in range(COUNT)
            ]
            await send(admin, *messages)
            return [message async for message in listed(admin.calls, TOPIC, Span())]

    return asyncio.run(fill())


def bodies(name_servers, **span):
    async def run():
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            return [message.body async for message in listed(admin.calls, TOPIC, Span(**span))]

    return asyncio.run(run())


def test_everything_comes_in_the_order_it_was_stored(stored):
    assert sorted(int(one.body) for one in stored) == [*range(COUNT)]
    assert [*map(age, stored)] == sorted(map(age, stored))
    assert {(one.broker_name, one.queue_id) for one in stored} == {
        *itertools.product(("broker-a", "broker-b"), range(2))
    }


@pytest.mark.parametrize(("first", "last"), [(0, 89), (0, 0), (17, 17), (30, 60), (89, 89), (10, 11)])
def test_both_ends_of_a_span_are_included(stored, name_servers, first, last):
    begin_ms, end_ms = stored[first].store_timestamp, stored[last].store_timestamp
    within = [one.body for one in stored if begin_ms <= one.store_timestamp <= end_ms]

    assert bodies(name_servers, begin_ms=begin_ms, end_ms=end_ms) == within
    assert bodies(name_servers, begin_ms=end_ms + 1) == [one.body for one in stored if one.store_timestamp > end_ms]
    assert bodies(name_servers, end_ms=begin_ms - 1) == [one.body for one in stored if one.store_timestamp < begin_ms]


@pytest.mark.parametrize(
    ("span", "is_wanted"),
    [
        ({"tags": "A"}, lambda one: one.tags == "A"),
        ({"tags": "B || C"}, lambda one: one.tags == "B"),
        ({"tags": "C"}, lambda one: False),
        ({"broker": "broker-b"}, lambda one: one.broker_name == "broker-b"),
        ({"queue_id": 1}, lambda one: one.queue_id == 1),
        ({"broker": "broker-a", "queue_id": 0, "begin_offset": 20}, lambda one: one.queue_offset >= 20),
        ({"sql": "n BETWEEN 10 AND 40"}, lambda one: 10 <= int(one.body) <= 40),
        ({"sql": "n > 60", "tags": "A"}, lambda one: int(one.body) > 60 and one.tags == "A"),
    ],
)
def test_only_what_is_wanted(stored, name_servers, span, is_wanted):
    places = [
        one
        for one in stored
        if span.get("broker") in (None, one.broker_name) and span.get("queue_id") in (None, one.queue_id)
    ]
    assert bodies(name_servers, **span) == [one.body for one in places if is_wanted(one)]


def test_who_takes_a_few_pulls_a_few(stored, name_servers):
    async def run():
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            pulls, pull = [], admin.calls.pull

            async def counted(*args):
                pulls.append(args)
                return await pull(*args)

            admin.calls.pull = counted
            messages = listed(admin.calls, TOPIC, Span())
            assert [(await anext(messages)).body for _ in range(8)] == [one.body for one in stored[:8]]
            assert len(pulls) == 4

    asyncio.run(run())


def test_what_does_not_exist_is_said(stored, name_servers):
    async def run():
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            with pytest.raises(UnknownName, match="no topic Listin: did you mean Listing"):
                await anext(listed(admin.calls, "Listin", Span()))
            for wrong in (Span(sql="n >"), Span(tags="||")):
                with pytest.raises(SettingsError):
                    await anext(listed(admin.calls, TOPIC, wrong))
            with pytest.raises(ClientError, match="no such queue"):
                await anext(listed(admin.calls, TOPIC, Span(queue_id=7)))

    asyncio.run(run())


def test_queues_without_messages_are_not_asked_one_by_one(name_servers, monkeypatch):
    asked = []

    async def run():
        async with asyncio.timeout(SECONDS), Admin(name_servers) as admin:
            await make_topic(admin, "Wide", queues=50)
            await send(admin, Message(topic="Wide", body=b"one"))
            call = admin.calls.remoting.call
            monkeypatch.setattr(
                admin.calls.remoting, "call", lambda *given: asked.append(given[1].code) or call(*given)
            )
            return [message.body async for message in listed(admin.calls, "Wide", Span())]

    assert asyncio.run(run()) == [b"one"]
    assert len(asked) < 10
