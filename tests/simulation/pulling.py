"""Members of a pull group, in two forms in which a program uses `PullConsumer`. A member handles all messages before an
offset, and then commits the offset itself. It chooses a form at each start:

==========  ==========================================================================================================
form        what the member does
==========  ==========================================================================================================
polled      calls ``poll``, handles the messages of the answer, then calls ``commit``
scheduled   for each of its queues: reads the committed offset, calls ``pull``, handles, then commits the next offset
==========  ==========================================================================================================

A member whose handler fails tries again, or dies with the error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.runtime.settings import PullConsumerSettings
from rmqkit.errors import RmqError
from tests.simulation.clients import TOPICS_OF, ClientProcess, handled

Handle = Callable[[Any], Awaitable[None]]

_PAUSE_SECONDS = 0.05
"""Short enough for a long queue: where a setting limits the bytes of an answer, each pull returns one message."""
_POLL_SECONDS = 3.0
_DEATHS = 0.1
"""The share of the failures of a handler that the member does not survive."""


def pull_main(group: str) -> Callable[[ClientProcess], Awaitable[None]]:
    """Return the main function of a member of a pull group."""

    async def consume(client: ClientProcess) -> None:
        settings = PullConsumerSettings(auto_commit=False, heartbeat_interval_ms=5000)
        consumer = PullConsumer(group, client.run.cluster.addresses, settings=settings)
        chance = client.chance

        async def handle(message: Any) -> None:
            while True:
                try:
                    await handled(client, group, message, chance)
                except ConnectionError:
                    if chance.random() < _DEATHS:
                        raise
                else:
                    return

        form = _polled if chance.random() < 0.5 else _scheduled
        await form(client, consumer, handle)

    return consume


async def _polled(client: ClientProcess, consumer: PullConsumer, handle: Handle) -> None:
    assert client.stops is not None
    for topic in sorted(TOPICS_OF["pull"]):
        consumer.subscribe(topic)
    async with consumer:
        while not client.stops.is_set():
            for message in await consumer.poll(timeout=_POLL_SECONDS):
                await handle(message)
            try:
                await consumer.commit()
            except RmqError as error:  # the next commit saves this offset, too
                client.run.world.note("commit", client.name, error)


async def _scheduled(client: ClientProcess, consumer: PullConsumer, handle: Handle) -> None:
    assert client.stops is not None

    async def task(queue: Any) -> None:
        committed = await consumer.committed(queue)
        offset = await consumer.min_offset(queue) if committed is None else committed
        result = await consumer.pull(queue, offset, wait=_POLL_SECONDS)
        for message in result.messages:
            await handle(message)
        if result.next_begin_offset != committed:
            await consumer.commit(queue, result.next_begin_offset)

    for topic in sorted(TOPICS_OF["pull"]):
        consumer.schedule(topic, task, pause=_PAUSE_SECONDS)
    async with consumer:
        await client.stops.wait()
