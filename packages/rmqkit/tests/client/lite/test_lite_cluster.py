"""Lite topics of two brokers: where they are, which broker gets subscriptions, and what stays when a broker stops.

Source: lite.md §13.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import rmqkit.streams
from rmqkit import LiteConsumer, Message, Producer
from rmqkit.broker.server import Broker
from rmqkit.broker.settings import BrokerSettings
from rmqkit.namesrv.server import NameServer
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.protocol.names import lite_queue
from rmqkit.store.settings import StoreSettings
from tests.ports import free_port

PARENT, GROUP = "LT", "LG"
NAMES = [f"s{number}" for number in range(24)]


@asynccontextmanager
async def two_brokers(root):
    """A name server and two brokers with the parent topic, by name."""
    namesrv = NameServer(NamesrvSettings(listen_port=0, bind_address="127.0.0.1"))
    await namesrv.start()
    brokers = {}
    try:
        for name in ("broker-a", "broker-b"):
            settings = BrokerSettings(
                listen_port=free_port(-2, 1),
                bind_address="127.0.0.1",
                broker_name=name,
                namesrv_addr=namesrv.address,
            )
            brokers[name] = Broker(settings, StoreSettings(commit_log_file_bytes=1 << 20), root / name)
            await brokers[name].start()
        async with rmqkit.streams.open(namesrv.address, PARENT):
            yield namesrv.address, brokers
    finally:
        for broker in brokers.values():
            await broker.stop()
        await namesrv.stop()


def places(brokers):
    """Return the broker of each name."""
    return {
        name: [
            where for where, broker in brokers.items() if broker.context.store.max_offset(lite_queue(PARENT, name), 0)
        ]
        for name in NAMES
    }


async def received(member, count):
    bodies = {}
    async with asyncio.timeout(60):
        async for message in member:
            bodies.setdefault(message.lite_topic, []).append(message.body.decode())
            await message.ack()
            if sum(map(len, bodies.values())) == count:
                break
    return bodies


async def test_names_are_spread_and_the_other_brokers_names_go_on_when_one_stops(tmp_path):
    async with (
        two_brokers(tmp_path) as (address, brokers),
        Producer("p", address) as producer,
        LiteConsumer(GROUP, PARENT, address) as member,
    ):
        await member.subscribe(*NAMES)
        for body in "xy":
            for name in NAMES:
                await producer.send(Message(topic=PARENT, lite_topic=name, body=body.encode()))
        where = places(brokers)
        assert all(len(one) == 1 for one in where.values())
        assert {one for (one,) in where.values()} == set(brokers)
        assert await received(member, 2 * len(NAMES)) == {name: ["x", "y"] for name in NAMES}

        kept = [name for name, (one,) in where.items() if one == "broker-b"]
        await brokers.pop("broker-a").stop()
        await producer.send_many([Message(topic=PARENT, lite_topic=name, body=b"z") for name in kept])
        assert await received(member, len(kept)) == {name: ["z"] for name in kept}


async def test_subscriptions_are_sent_to_both_brokers(tmp_path):
    async with two_brokers(tmp_path) as (address, brokers), LiteConsumer(GROUP, PARENT, address) as member:
        await member.subscribe(*NAMES)
        for broker in brokers.values():
            (client,) = broker.context.lite.groups[GROUP].clients.values()
            assert set(client.names) == set(NAMES)


async def test_streams_of_both_brokers_are_read_over_one_object(tmp_path):
    async with two_brokers(tmp_path) as (address, brokers), rmqkit.streams.open(address, PARENT) as streams:
        for number in range(3):
            await asyncio.gather(*(streams.append(name, f"{name} {number}") for name in NAMES))
        assert {one for (one,) in places(brokers).values()} == set(brokers)
        for name in NAMES:
            texts = [event.text async for event in streams.read(name, follow=False)]
            assert texts == [f"{name} {number}" for number in range(3)]
