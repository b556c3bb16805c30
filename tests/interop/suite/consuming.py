"""Helpers for behaviours of consumers: recording handlers, messages to send, and the broker's view of groups."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rmqkit import Message, MessageQueue, ReceivedMessage, SendResult
from rmqkit.protocol import fastjson
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import decode_header, request
from rmqkit.protocol.schemas.clients import (
    ConsumerConnection,
    ConsumerGroupRequest,
    ConsumerIds,
    ConsumerRunningInfo,
    RunningInfoRequest,
)
from rmqkit.protocol.schemas.offsets import OffsetResponse, QueryConsumerOffsetRequest, ResetOffsetRequest
from tests.client import peers
from tests.interop.suite.scene import Scene

T = TypeVar("T")

SECONDS = 200.0
"""Longer than the 130 s for which a broker remembers a member if it handles the member's heartbeat after its
goodbye.
"""
POLL_SECONDS = 0.02
APACHE_POPS_MAX = 4
"""The number of pops after which Apache's broker must have answered with a message: see `popped_at_last`."""


class Received:
    """A handler that records messages."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []

    async def __call__(self, message: ReceivedMessage) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[str]:
        return bodies(self.messages)

    async def at_least(self, count: int) -> list[str]:
        """Wait until ``count`` messages have arrived. Return their bodies in the order of arrival."""
        await until(lambda: len(self.messages) >= count, f"{count} messages")
        return self.bodies


def bodies(messages: list[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


async def until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Call `peers.until` with a time for a busy machine."""
    await peers.until(condition, what, seconds)


async def eventually(look: Callable[[], Awaitable[T]], holds: Callable[[T], object], what: str) -> T:
    """Call ``look`` until the result satisfies ``holds``, and return it. Raises AssertionError with the description."""
    seen: Any = None
    try:
        async with asyncio.timeout(SECONDS):
            while not holds(seen := await look()):
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not within {SECONDS:g} s: {what}; seen last: {seen}") from None
    return seen  # type: ignore[no-any-return]


async def popped_at_last(
    pop: Callable[[], Awaitable[list[ReceivedMessage]]], *, is_ours: bool
) -> list[ReceivedMessage]:
    """Return the messages of one pop at our broker, and of the first pop with messages at Apache's broker.

    Apache's broker misses a message that arrives after the look into the queue and before the pop is listed as waiting.
    It looks again when the wait expires. If this look is more than 500 ms late, as on a busy machine, the broker
    answers POLLING_TIMEOUT instead. A pop without a wait has the same limit. The messages remain in the queue.
    """
    for _ in range(1 if is_ours else APACHE_POPS_MAX):
        if found := await pop():
            return found
    return []


def queue(scene: Scene, queue_id: int = 0, topic: str | None = None) -> MessageQueue:
    return MessageQueue(topic or scene.topic, scene.broker_name, queue_id)


async def send(
    scene: Scene, *texts: str, topic: str | None = None, queue_id: int = 0, **fields: Any
) -> list[SendResult]:
    """Send messages to one queue, one after the other, and wait until they can be read. ``fields`` are those of
    `Message`.
    """
    sender, reader, place = await scene.sender(), await scene.reader(), queue(scene, queue_id, topic)
    results = [
        await sender.send(Message(topic=place.topic, body=text.encode(), **fields), queue=place) for text in texts
    ]
    while await reader.max_offset(place) <= results[-1].queue_offset:  # Apache's queues are written after its log
        await asyncio.sleep(POLL_SECONDS)
    return results


async def send_everywhere(scene: Scene, queues: int, count: int, *, first: int = 0) -> set[str]:
    """Send ``count`` messages to each queue, named ``<queue>-<number>``. Return the names."""
    names = [[f"{queue_id}-{i}" for i in range(first, first + count)] for queue_id in range(queues)]
    await asyncio.gather(*(send(scene, *some, queue_id=queue_id) for queue_id, some in enumerate(names)))
    return {name for some in names for name in some}


def by_queue(messages: list[ReceivedMessage]) -> dict[int, list[int]]:
    """Return queue → the offsets of its messages in the order of arrival."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for message in messages:
        found[message.queue_id].append(message.queue_offset)
    return dict(found)


# -- the broker's view


async def committed(scene: Scene, queue_id: int = 0, *, group: str | None = None, topic: str | None = None) -> int:
    """Return the broker's offset of a group, -1 if it has none."""
    header = QueryConsumerOffsetRequest(
        group or scene.group, topic or scene.topic, queue_id, set_zero_if_not_found=False
    )
    answer = await scene.ask_anyway(request(RequestCode.QUERY_CONSUMER_OFFSET, header))
    return -1 if answer.code == ResponseCode.QUERY_NOT_FOUND else decode_header(answer, OffsetResponse).offset


async def is_committed(
    scene: Scene, offset: int, queue_id: int = 0, *, group: str | None = None, topic: str | None = None
) -> None:
    """Wait until the broker has exactly this offset of a group."""
    await eventually(
        lambda: committed(scene, queue_id, group=group, topic=topic), lambda seen: seen == offset, f"offset {offset}"
    )


async def commit(scene: Scene, offset: int, queue_id: int = 0) -> None:
    """Create an offset of the group, without a member."""
    consumer = await scene.pull_consumer()
    await consumer.pull(queue(scene, queue_id), 0)
    await consumer.commit(queue(scene, queue_id), offset)
    await consumer.close()


async def client_ids(scene: Scene, group: str | None = None) -> list[str]:
    """Return the members of a group, sorted; none if the broker does not know the group."""
    header = ConsumerGroupRequest(group or scene.group)
    answer = await scene.ask_anyway(request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, header))
    if answer.code != ResponseCode.SUCCESS:
        return []
    return sorted(fastjson.decode_as(answer.payload, ConsumerIds).consumer_id_list)


async def connection(scene: Scene, group: str | None = None) -> ConsumerConnection:
    """Return the members of a group and their subscriptions."""
    header = ConsumerGroupRequest(group or scene.group)
    answer = await scene.ask_broker(request(RequestCode.GET_CONSUMER_CONNECTION_LIST, header))
    return fastjson.decode_as(answer.payload, ConsumerConnection)


async def running_info(
    scene: Scene, client_id: str | None = None, *, group: str | None = None, jstack: bool = False
) -> ConsumerRunningInfo:
    """Return a member's report about itself, requested through the broker; by default of the only member."""
    if client_id is None:
        (client_id,) = await eventually(lambda: client_ids(scene, group), lambda ids: len(ids) == 1, "one member")
    header = RunningInfoRequest(group or scene.group, client_id, jstack)
    answer = await scene.ask_broker(request(RequestCode.GET_CONSUMER_RUNNING_INFO, header))
    return fastjson.decode_as(answer.payload, ConsumerRunningInfo)


async def held_counts(scene: Scene) -> dict[int, int]:
    """Return queue of the scene's topic → number of its messages that the one member holds."""
    info = await running_info(scene)
    return {one.queue_id: held.cached_msg_count for one, held in info.mq_table.items() if one.topic == scene.topic}


async def owners(scene: Scene, group: str | None = None) -> dict[int, list[str]]:
    """Return queue of the scene's topic → the members that report it as theirs."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for client_id in await client_ids(scene, group):
        header = RunningInfoRequest(group or scene.group, client_id)
        answer = await scene.ask_anyway(request(RequestCode.GET_CONSUMER_RUNNING_INFO, header))
        if answer.code == ResponseCode.SUCCESS:  # the member may leave at this moment
            for one, held in fastjson.decode_as(answer.payload, ConsumerRunningInfo).mq_table.items():
                if one.topic == scene.topic and not held.droped:
                    found[one.queue_id].append(client_id)
    return dict(found)


async def reset_offset(scene: Scene, timestamp_ms: int, *, queue_id: int = -1, offset: int | None = None) -> None:
    """Send the request of `mqadmin resetOffsetByTime` to the broker."""
    header = ResetOffsetRequest(
        topic=scene.topic,
        group=scene.group,
        timestamp=timestamp_ms,
        is_force=True,
        queue_id=queue_id,
        offset=offset,
    )
    await scene.ask_broker(request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, header))
