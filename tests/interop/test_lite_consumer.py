"""Our consumer of lite topics, lite sends and streams at Apache's broker 5.5.0, and at ours.

Source: lite.md §6 to §8. Apache's broker keeps a batch back until the latest invisible time of its messages is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import rmqkit.streams
from rmqkit import LiteConsumer, Message, Producer
from rmqkit.client.lite.consumer import LiteMessage
from rmqkit.client.producer.producer import Producer as Sender
from rmqkit.protocol.message import ReceivedMessage
from tests.client.peers import until
from tests.interop.apache import ApachePair
from tests.interop.conftest import LIGHT_CONF
from tests.interop.standalone import run_standalone
from tests.patience import producing

SECONDS = 120


@pytest.fixture(scope="module", params=["ours", "apache"])
def name_servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "apache":
        apache: ApachePair = request.getfixturevalue("apache")
        yield apache.namesrv_addr
        return
    work_dir = tmp_path_factory.mktemp("ours")
    conf = work_dir / "broker.conf"
    conf.write_text("".join(f"{key}={value}\n" for key, value in LIGHT_CONF.items()))
    with run_standalone(work_dir / "store", work_dir, "--config", str(conf)) as running:
        yield running.namesrv_addr


@asynccontextmanager
async def producing_to(name_servers: str, parent: str) -> AsyncIterator[Sender]:
    """Create a parent topic, and start a producer."""
    async with rmqkit.streams.open(name_servers, parent):
        pass
    async with Producer("lite-interop", name_servers, settings=producing()) as producer:
        yield producer


async def send(producer: Sender, parent: str, name: str, *bodies: str) -> None:
    for body in bodies:
        await producer.send(Message(topic=parent, lite_topic=name, body=body.encode()))


async def taken(member: LiteConsumer, count: int) -> list[LiteMessage]:
    found: list[LiteMessage] = []
    async with asyncio.timeout(SECONDS):
        async for message in member:
            found.append(message)
            if len(found) == count:
                break
    return found


def shown(message: ReceivedMessage) -> tuple[str | None, str, int]:
    return message.lite_topic, message.body.decode(), message.delivery_attempt


def test_messages_of_several_lite_topics_are_received_in_order_and_once(name_servers: str) -> None:
    async def main() -> None:
        parent, group = "LiteOrder", "LiteOrderGroup"
        async with (
            producing_to(name_servers, parent) as producer,
            LiteConsumer(group, parent, name_servers) as member,
        ):
            await member.subscribe("n1", "n2")
            await send(producer, parent, "n1", "m0", "m1")
            await send(producer, parent, "n2", "k0")
            found = []
            while len(found) < 3:
                (message,) = await taken(member, 1)
                await message.ack()
                found.append(message)
            assert [shown(one) for one in found if one.lite_topic == "n1"] == [("n1", "m0", 1), ("n1", "m1", 1)]
            assert [shown(one) for one in found if one.lite_topic == "n2"] == [("n2", "k0", 1)]
            await send(producer, parent, "n1", "m2")
            (message,) = await taken(member, 1)
            assert shown(message) == ("n1", "m2", 1)
            await message.ack()

    asyncio.run(main())


def test_a_message_that_is_given_back_is_received_again_before_the_next_one(name_servers: str) -> None:
    async def main() -> None:
        parent, group = "LiteBack", "LiteBackGroup"
        async with (
            producing_to(name_servers, parent) as producer,
            LiteConsumer(group, parent, name_servers) as member,
        ):
            await member.subscribe("b1")
            await send(producer, parent, "b1", "a")
            (message,) = await taken(member, 1)
            await send(producer, parent, "b1", "b")
            await message.nack(2)
            found = await taken(member, 1)
            assert shown(found[0]) == ("b1", "a", 2)
            await found[0].ack()
            found = await taken(member, 1)
            assert shown(found[0])[:2] == ("b1", "b")
            await found[0].ack()

    asyncio.run(main())


def test_the_newest_subscriber_of_an_exclusive_group_takes_a_lite_topic(name_servers: str) -> None:
    async def main() -> None:
        parent = "LiteExclusive"
        options = {"attributes": {"lite.sub.model": "Exclusive"}}
        async with (
            producing_to(name_servers, parent) as producer,
            LiteConsumer("LiteExclusiveGroup", parent, name_servers, **options) as one,
            LiteConsumer("LiteExclusiveGroup", parent, name_servers, **options) as two,
        ):
            await one.subscribe("e1", "e2")
            await two.subscribe("e1")
            await until(lambda: "e1" not in one.names)
            assert (one.names, one.taken, two.names) == ({"e2"}, ["e1"], {"e1"})
            await send(producer, parent, "e1", "x")
            (message,) = await taken(two, 1)
            assert shown(message) == ("e1", "x", 1)
            await message.ack()

    asyncio.run(main())


def test_events_of_a_stream_are_read_from_any_event_on(name_servers: str) -> None:
    async def main() -> None:
        async with rmqkit.streams.open(name_servers, "LiteStreams") as streams:
            for word in "Once upon a time".split():
                await streams.append("s1", word)
            await streams.finish("s1")
            events = [event async for event in streams.read("s1")]
            assert [event.text for event in events] == ["Once", "upon", "a", "time", ""]
            assert [event.text async for event in streams.read("s1", after=events[1].id)] == ["a", "time", ""]

    asyncio.run(main())


def test_the_name_of_a_lite_topic_selects_the_queue_of_its_parent(name_servers: str) -> None:
    async def main() -> None:
        async with producing_to(name_servers, "LiteQueues") as producer:
            result = await producer.send(Message(topic="LiteQueues", lite_topic="s1", body=b"x"))
            assert result.queue.queue_id == 4  # lite.md §4, for 8 queues

    asyncio.run(main())
