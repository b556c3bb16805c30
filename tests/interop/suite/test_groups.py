"""Members of a group share its queues. Source: behaviour.md §8.4, §8.5, §5.6."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from rmqkit import MessageModel, PushConsumer, ReceivedMessage, allocate
from rmqkit.client.consumer.allocate import Allocate
from tests.interop.suite.consuming import (
    Received,
    client_ids,
    connection,
    eventually,
    is_committed,
    owners,
    queue,
    send,
    send_everywhere,
    until,
)
from tests.interop.suite.scene import Scene


def member(
    scene: Scene, received: Callable[[ReceivedMessage], object], name: str = "", **options: object
) -> PushConsumer:
    """Create one more member of the scene's group, whose client id ends in ``name``."""
    settings = scene.push_consumer(**({"instance_name": f"{scene.name}-{name}"} if name else {})).settings
    made = scene.closing(PushConsumer(scene.group, scene.namesrv, settings=settings, **options))  # type: ignore[arg-type]
    made.subscribe(scene.topic, "*", received)
    return made


def held(scene: Scene, consumer: PushConsumer) -> list[int]:
    """Return the queues of the scene's topic that a member has."""
    return sorted(one.queue_id for one in consumer.held_queues() if one.topic == scene.topic)


async def share_is(scene: Scene, members: Sequence[PushConsumer], wanted: list[list[int]]) -> None:
    await until(lambda: [held(scene, one) for one in members] == wanted, f"the shares {wanted}")


async def shared_by(scene: Scene, strategies: Sequence[Allocate], wanted: list[list[int]], queues: int = 8) -> None:
    """Check that members a, b, c … with these strategies have these queues, and get only their messages."""
    await scene.create_topic(queues=queues)
    handlers = [Received() for _ in strategies]
    members = [
        member(scene, handler, name, allocate=strategy)
        for handler, name, strategy in zip(handlers, "abcdef", strategies, strict=False)
    ]
    await asyncio.gather(*(one.start() for one in members))
    await share_is(scene, members, wanted)
    await send_everywhere(scene, queues, 1)
    for handler, share in zip(handlers, wanted, strict=True):
        await handler.at_least(len(share))
        assert sorted(message.queue_id for message in handler.messages) == share


async def test_averagely_gives_contiguous_blocks(scene: Scene) -> None:
    """behaviour.md §8.5: AVG."""
    await shared_by(scene, [allocate.averagely] * 3, [[0, 1, 2], [3, 4, 5], [6, 7]])


async def test_by_circle_deals_the_queues_out(scene: Scene) -> None:
    """behaviour.md §8.5: AVG_BY_CIRCLE."""
    await shared_by(scene, [allocate.averagely_by_circle] * 3, [[0, 3, 6], [1, 4, 7], [2, 5]])


async def test_configured_members_have_just_their_queues(scene: Scene) -> None:
    """behaviour.md §8.5: CONFIG."""
    shares = [[0, 5], [1, 2, 3, 4]]
    strategies = [allocate.configured([queue(scene, i) for i in share]) for share in shares]
    await shared_by(scene, strategies, shares, queues=6)


async def test_consistent_hash_gives_every_queue_to_one_member_and_moves_few(scene: Scene) -> None:
    """behaviour.md §8.5: CONSISTENT_HASH."""
    await scene.create_topic(queues=8)
    members = [member(scene, Received(), name, allocate=allocate.consistent_hash()) for name in "abc"]
    for one in members:
        await one.start()
    ids = await eventually(lambda: client_ids(scene), lambda seen: len(seen) == 3, "three members")
    queues = [queue(scene, i) for i in range(8)]
    wanted = [[one.queue_id for one in allocate.consistent_hash()(queues, ids, own_id)] for own_id in ids]
    await share_is(scene, members, wanted)
    assert sorted(queue_id for share in wanted for queue_id in share) == list(range(8))
    await members[2].close()
    await until(lambda: sum(len(held(scene, one)) for one in members[:2]) == 8, "every queue at two")
    assert all(set(share) <= set(held(scene, one)) for one, share in zip(members, wanted[:2], strict=False))


async def test_machine_rooms_leave_out_brokers_that_are_in_none(scene: Scene) -> None:
    """behaviour.md §8.5: MACHINE_ROOM takes brokers named `room@broker`."""
    await scene.create_topic(queues=2)
    received, witness = Received(), Received()
    consumer = member(scene, received, allocate=allocate.machine_room(["room"]))
    other = scene.push_consumer(f"{scene.group}-witness")
    other.subscribe(scene.topic, "*", witness)
    for one in (consumer, other):
        await one.start()
    await send(scene, "0")
    await witness.at_least(1)
    await until(lambda: {one.topic for one in other.held_queues()} >= {scene.topic}, "the witness's queues")
    assert (held(scene, consumer), received.bodies) == ([], [])


async def test_the_nearby_room_has_the_queues_until_nobody_is_there(scene: Scene) -> None:
    """behaviour.md §8.5: MACHINE_ROOM_NEARBY."""
    await scene.create_topic(queues=4)
    nearby = allocate.machine_room_nearby(
        allocate.averagely,
        room_of_broker=lambda name: "near",
        room_of_client=lambda client_id: "near" if client_id.endswith(("-a", "-b")) else "far",
    )
    members = [member(scene, Received(), name, allocate=nearby) for name in "abc"]
    for one in members:
        await one.start()
    await share_is(scene, members, [[0, 1], [2, 3], []])
    await members[0].close()
    await members[1].close()
    await share_is(scene, members[2:], [[0, 1, 2, 3]])


async def test_members_beyond_the_queues_have_none(scene: Scene) -> None:
    """behaviour.md §8.5: Q ≤ C."""
    await shared_by(scene, [allocate.averagely] * 4, [[0], [1], [], []], queues=2)


async def test_every_message_reaches_one_member(scene: Scene) -> None:
    """behaviour.md §8.4: clustering."""
    await scene.create_topic(queues=4)
    handlers = [Received(), Received()]
    members = [member(scene, handler) for handler in handlers]
    for one in members:
        await one.start()
    await until(lambda: [len(held(scene, one)) for one in members] == [2, 2], "two queues each")
    sent = await send_everywhere(scene, 4, 10)
    await until(lambda: sum(len(handler.messages) for handler in handlers) >= 40, "every message")
    assert Counter(body for handler in handlers for body in handler.bodies) == dict.fromkeys(sent, 1)
    assert [len(handler.messages) for handler in handlers] == [20, 20]


async def test_members_that_come_and_go_while_messages_flow_lose_none(scene: Scene) -> None:
    """behaviour.md §8.4: rebalance on join and leave."""
    await scene.create_topic(queues=4)
    received = Received()
    members = [member(scene, received) for _ in range(3)]
    sent: set[str] = set()
    for number, action in enumerate((members[0].start, members[1].start, members[2].start, members[0].close)):
        sending = asyncio.create_task(send_everywhere(scene, 4, 10, first=10 * number))
        await action()
        sent |= await sending
    await until(lambda: set(received.bodies) == sent, "every message")
    await until(lambda: sum(len(held(scene, one)) for one in members[1:]) == 4, "every queue at the two that stay")


async def test_who_stays_takes_over_from_who_leaves_where_it_stopped(scene: Scene) -> None:
    """behaviour.md §8.4, §5.6."""
    await scene.create_topic(queues=2)
    handlers = [Received(), Received()]
    members = [member(scene, handler, name) for handler, name in zip(handlers, "ab", strict=True)]
    for one in members:
        await one.start()
    await share_is(scene, members, [[0], [1]])
    await send_everywhere(scene, 2, 5)
    await handlers[0].at_least(5)
    await members[0].close()
    await share_is(scene, members[1:], [[0, 1]])
    await send(scene, "new", queue_id=0)
    assert sorted(await handlers[1].at_least(6)) == sorted([*(f"1-{i}" for i in range(5)), "new"])


async def test_after_settling_no_queue_has_two_owners(scene: Scene) -> None:
    """behaviour.md §8.4: five members at once."""
    await scene.create_topic(queues=8)
    async with AsyncExitStack() as leaving:
        members = [member(scene, Received()) for _ in range(5)]
        await asyncio.gather(*(leaving.enter_async_context(one) for one in members))
        await eventually(
            lambda: owners(scene),
            lambda seen: sorted(seen) == list(range(8)) and all(len(ids) == 1 for ids in seen.values()),
            "one owner of each queue",
        )
        await until(lambda: sorted(len(held(scene, one)) for one in members) == [1, 1, 2, 2, 2], "even shares")


async def test_a_group_is_known_by_its_members_and_subscriptions(scene: Scene) -> None:
    """behaviour.md §2.6, §8.3: heartbeats."""
    await scene.create_topic()
    consumer = scene.push_consumer()
    consumer.subscribe(scene.topic, "A || B", Received())
    await consumer.start()
    seen = await connection(scene)
    (client,) = seen.connection_set
    assert [client.client_id] == await client_ids(scene)
    assert (seen.consume_type, seen.message_model, seen.consume_from_where) == (
        "CONSUME_PASSIVELY",
        "CLUSTERING",
        "CONSUME_FROM_FIRST_OFFSET",
    )
    assert seen.subscription_table[scene.topic].sub_string == "A || B"
    assert set(seen.subscription_table) == {scene.topic, f"%RETRY%{scene.group}"}


async def test_every_broadcasting_member_gets_every_message(scene: Scene) -> None:
    """behaviour.md §8.4, §8.9: broadcasting."""
    await scene.create_topic(queues=2)
    sent = await send_everywhere(scene, 2, 5)
    handlers = [Received(), Received()]
    for number, handler in enumerate(handlers):
        consumer = scene.push_consumer(
            message_model=MessageModel.BROADCASTING,
            instance_name=f"{scene.name}-{number}",
            offsets_dir=str(scene.peer.work_dir / scene.name),
        )
        consumer.subscribe(scene.topic, "*", handler)
        await consumer.start()
    for handler in handlers:
        assert Counter(await handler.at_least(10)) == dict.fromkeys(sent, 1)


async def test_a_group_reads_a_topic_that_another_group_has_read(scene: Scene) -> None:
    """behaviour.md §8.1: groups do not know each other."""
    await scene.create_topic()
    await send(scene, "0", "1")
    for group in (scene.group, f"{scene.group}-other"):
        received = Received()
        consumer = scene.push_consumer(group)
        consumer.subscribe(scene.topic, "*", received)
        await consumer.start()
        assert await received.at_least(2) == ["0", "1"]
        await is_committed(scene, 2, group=group)
