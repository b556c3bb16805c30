"""Members of a group of lite topics: each subscribes to all sessions, leaves one of them now and then, and comes back.

A message is handled or fails, and is then acknowledged or given back. If an acknowledgement is lost, it is delivered
again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rmqkit.client.lite.consumer import LiteConsumer
from rmqkit.client.runtime.settings import PushConsumerSettings
from rmqkit.errors import RmqError
from tests.simulation.clients import CHATS, SESSIONS, ClientProcess, handled

_INVISIBLE_SECONDS = 15
_GIVE_BACK_SECONDS = 0.5
_STAY_SECONDS = 4.0
_AWAY_SECONDS = 1.0


def session_main(group: str) -> Callable[[ClientProcess], Awaitable[None]]:
    """Return the main function of a member."""

    async def consume(client: ClientProcess) -> None:
        assert client.stops is not None
        settings = PushConsumerSettings(heartbeat_interval_ms=5000)
        chance = client.chance
        async with LiteConsumer(
            group,
            CHATS,
            client.run.cluster.addresses,
            settings=settings,
            invisible_time=_INVISIBLE_SECONDS,
            count_max=chance.choice([1, 4, 32]),
            deliveries_max=1000,
        ) as consumer:
            await consumer.subscribe(*SESSIONS)
            moving = asyncio.create_task(_move(client, consumer, chance))
            taking = asyncio.create_task(_take(client, group, consumer, chance))
            try:
                await client.stops.wait()
            finally:
                for task in (moving, taking):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task

    return consume


async def _take(client: ClientProcess, group: str, consumer: LiteConsumer, chance: random.Random) -> None:
    async for message in consumer:
        try:
            await handled(client, group, message, chance)
        except ConnectionError:
            with suppress(RmqError):
                await message.nack(_GIVE_BACK_SECONDS)
        else:
            with suppress(RmqError):
                await message.ack()


async def _move(client: ClientProcess, consumer: LiteConsumer, chance: random.Random) -> None:
    """Leave one session after the other for a moment, as long as there are faults."""
    while not client.run.is_healed:
        await asyncio.sleep(_STAY_SECONDS * chance.random())
        name = chance.choice(SESSIONS)
        with suppress(RmqError):
            await consumer.unsubscribe(name)
        await asyncio.sleep(_AWAY_SECONDS * chance.random())
        await _subscribe(consumer, name)


async def _subscribe(consumer: LiteConsumer, name: str) -> None:
    while True:
        try:
            await consumer.subscribe(name)
        except RmqError:
            await asyncio.sleep(_AWAY_SECONDS)
        else:
            return
