"""Polling: subscribe, assign, seek, commit. Source: behaviour.md §8.14."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rmqkit import ClientError, PullConsumer
from rmqkit.client.runtime.settings import HoldLimits, Pulling
from tests.interop.suite.consuming import (
    bodies,
    client_ids,
    commit,
    committed,
    eventually,
    is_committed,
    queue,
    running_info,
    send,
    send_everywhere,
    until,
)
from tests.interop.suite.scene import Scene


async def polled(consumer: PullConsumer, count: int) -> list[str]:
    """Return the polled bodies as soon as there are ``count``."""
    found: list[str] = []
    while len(found) < count:
        found += bodies(await consumer.poll(10))
    return found


async def assigned(scene: Scene, *queue_ids: int, **settings: Any) -> PullConsumer:
    """Return a consumer of these queues, by default the first one, that saves no offsets by itself."""
    consumer = await scene.pull_consumer(**({"auto_commit": False} | settings))
    consumer.assign([queue(scene, queue_id) for queue_id in queue_ids or (0,)])
    return consumer


async def test_assigned_queues_are_polled_and_no_others(scene: Scene) -> None:
    """behaviour.md §8.14: assign."""
    await scene.create_topic(queues=3)
    sent = await send_everywhere(scene, 3, 4)
    consumer = await assigned(scene, 0, 2)
    assert set(await polled(consumer, 8)) == {name for name in sent if not name.startswith("1")}
    assert consumer.held_queues() == {queue(scene, 0), queue(scene, 2)}


async def test_who_assigns_queues_does_not_share_them(scene: Scene) -> None:
    """behaviour.md §8.14: manual."""
    await scene.create_topic()
    await send(scene, "0", "1")
    for _ in range(2):
        assert await polled(await assigned(scene), 2) == ["0", "1"]
    assert await client_ids(scene) == []


async def test_another_assignment_replaces_the_first(scene: Scene) -> None:
    """behaviour.md §8.14."""
    await scene.create_topic(queues=2)
    await send(scene, "0")
    await send(scene, "1", queue_id=1)
    consumer = await assigned(scene, 0)
    assert await polled(consumer, 1) == ["0"]
    consumer.assign([queue(scene, 1)])
    assert await polled(consumer, 1) == ["1"]
    assert consumer.held_queues() == {queue(scene, 1)}


async def test_subscribed_topics_are_shared_by_the_group(scene: Scene) -> None:
    """behaviour.md §8.14: subscribe."""
    await scene.create_topic(queues=4)
    members = [await scene.pull_consumer() for _ in range(2)]
    for member in members:
        member.subscribe(scene.topic)
    await until(lambda: [len(member.held_queues()) for member in members] == [2, 2], "two queues each")
    sent = await send_everywhere(scene, 4, 3)
    found = await asyncio.gather(*(polled(member, 6) for member in members))
    assert sorted([*found[0], *found[1]]) == sorted(sent)
    assert len(await client_ids(scene)) == 2


async def test_subscribing_and_assigning_exclude_each_other(scene: Scene) -> None:
    """behaviour.md §8.14."""
    await scene.create_topic()
    one, two = await scene.pull_consumer(), await scene.pull_consumer()
    one.subscribe(scene.topic)
    two.assign([queue(scene)])
    with pytest.raises(ClientError, match="mutually exclusive"):
        one.assign([queue(scene)])
    with pytest.raises(ClientError, match="mutually exclusive"):
        two.subscribe(scene.topic)
    with pytest.raises(ClientError, match="no queues to poll"):
        await (await scene.pull_consumer()).poll()


async def test_tags_and_sql_choose_what_is_polled(scene: Scene) -> None:
    """behaviour.md §8.14, §6."""
    await scene.create_topic()
    for i in range(6):
        await send(scene, str(i), tags="AB"[i % 2], properties={"n": str(i)})
    by_tag, by_sql = await scene.pull_consumer(f"{scene.group}-tag"), await scene.pull_consumer(f"{scene.group}-sql")
    by_tag.subscribe(scene.topic, "B")
    by_sql.subscribe(scene.topic, "n > 3", expression_type="SQL92")
    assert await polled(by_tag, 3) == ["1", "3", "5"]
    assert await polled(by_sql, 2) == ["4", "5"]


async def test_nothing_in_time_is_an_empty_list(scene: Scene) -> None:
    """behaviour.md §8.14: poll(timeout)."""
    await scene.create_topic()
    consumer = await assigned(scene)
    assert await consumer.poll(0.01) == []
    await send(scene, "0")
    assert bodies(await consumer.poll(30)) == ["0"]


async def test_a_poll_gives_no_more_than_it_is_to(scene: Scene) -> None:
    """behaviour.md §8.14."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await assigned(scene)
    found = [bodies(await consumer.poll(30, max_count=2)) for _ in range(3)]
    assert found == [["0", "1"], ["2", "3"], ["4"]]


async def test_a_poll_gives_messages_of_one_queue(scene: Scene) -> None:
    """behaviour.md §8.14: one cached batch."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 5)
    consumer = await assigned(scene, 0, 1)
    found = 0
    while found < 10:
        messages = await consumer.poll(30)
        assert len({message.queue_id for message in messages}) == 1
        found += len(messages)


async def test_a_consumer_continues_where_it_seeks(scene: Scene) -> None:
    """behaviour.md §8.14: seek."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await assigned(scene)
    assert await polled(consumer, 5) == list("01234")
    await consumer.seek(queue(scene), 3)
    assert await polled(consumer, 2) == ["3", "4"]
    await consumer.seek_to_begin(queue(scene))
    assert await polled(consumer, 5) == list("01234")


async def test_who_seeks_to_the_end_gets_what_comes_then(scene: Scene) -> None:
    """behaviour.md §8.14: seekToEnd."""
    await scene.create_topic()
    await send(scene, "0", "1")
    consumer = await assigned(scene)
    await consumer.seek_to_end(queue(scene))
    await send(scene, "2")
    assert await polled(consumer, 1) == ["2"]


async def test_a_consumer_seeks_to_a_time(scene: Scene) -> None:
    """behaviour.md §8.14: offsetForTimestamp."""
    await scene.create_topic()
    while len({message.store_timestamp for message in await scene.stored(0)}) < 3:
        await send(scene, "x")
    stored = await scene.stored(3)
    at_ms = sorted({message.store_timestamp for message in stored})[1]
    consumer = await assigned(scene)
    await consumer.seek_to_time(queue(scene), at_ms / 1000)
    wanted = [message.queue_offset for message in stored if message.store_timestamp >= at_ms]
    found: list[int] = []
    while len(found) < len(wanted):
        found += [message.queue_offset for message in await consumer.poll(30)]
    assert found == wanted


async def test_seeking_before_the_first_poll_is_where_it_begins(scene: Scene) -> None:
    """behaviour.md §8.14: start offset is the seek value first."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await scene.pull_consumer()
    consumer.assign([queue(scene)])
    await consumer.seek(queue(scene), 4)
    assert await polled(consumer, 1) == ["4"]


async def test_seeking_outside_of_the_queue_or_elsewhere_is_refused(scene: Scene) -> None:
    """behaviour.md §8.14: Seek offset illegal."""
    await scene.create_topic(queues=2)
    await send(scene, "0")
    consumer = await assigned(scene, 0)
    with pytest.raises(ClientError, match="Seek offset illegal, seek offset = 2, min offset = 0, max offset = 1"):
        await consumer.seek(queue(scene, 0), 2)
    with pytest.raises(ClientError, match="not owned"):
        await consumer.seek(queue(scene, 1), 0)


async def test_without_auto_commit_only_a_commit_saves(scene: Scene) -> None:
    """behaviour.md §8.14: commit."""
    await scene.create_topic(queues=2)
    await send(scene, "0", "1")
    await send(scene, "2", queue_id=1)
    consumer = await assigned(scene, 0, 1)
    await polled(consumer, 3)
    assert [await consumer.committed(queue(scene, i)) or 0 for i in range(2)] == [0, 0]
    await consumer.commit()
    assert [await consumer.committed(queue(scene, i)) for i in range(2)] == [2, 1]


async def test_one_queue_is_committed_or_an_offset_of_it(scene: Scene) -> None:
    """behaviour.md §8.14: explicit maps and sets."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 3)
    consumer = await assigned(scene, 0, 1)
    await polled(consumer, 6)
    await consumer.commit(queue(scene, 0))
    await consumer.commit(queue(scene, 1), 2)
    assert [await consumer.committed(queue(scene, i)) for i in range(2)] == [3, 2]


async def test_auto_commit_saves_what_the_next_poll_leaves_behind(scene: Scene) -> None:
    """behaviour.md §8.14: autoCommit."""
    await scene.create_topic()
    await send(scene, "0", "1")
    consumer = await scene.pull_consumer(persist_interval_ms=50)
    consumer.subscribe(scene.topic)
    assert bodies(await consumer.poll(30, max_count=1)) == ["0"]
    assert await committed(scene) <= 0
    assert bodies(await consumer.poll(30, max_count=1)) == ["1"]
    await is_committed(scene, 1)
    await consumer.close()
    assert await committed(scene) == 2


async def test_what_a_failing_program_polled_is_redelivered(scene: Scene) -> None:
    """behaviour.md §8.14."""
    await scene.create_topic()
    await send(scene, "0", "1")
    failing = await scene.pull_consumer()
    failing.subscribe(scene.topic)

    async def fail() -> None:
        await failing.poll(30, max_count=1)
        await failing.poll(30, max_count=1)
        raise ZeroDivisionError

    try:
        await fail()
    except ZeroDivisionError as error:
        await failing.__aexit__(type(error), error, None)
    consumer = await scene.pull_consumer()
    consumer.subscribe(scene.topic)
    assert await polled(consumer, 1) == ["1"]


async def test_a_polling_consumer_begins_at_the_groups_offset(scene: Scene) -> None:
    """behaviour.md §8.9, §8.14."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    await commit(scene, 2)
    consumer = await assigned(scene)
    assert await polled(consumer, 1) == ["2"]


async def test_a_paused_queue_gives_nothing_until_it_is_resumed(scene: Scene) -> None:
    """behaviour.md §8.14: pause and resume per queue."""
    await scene.create_topic(queues=2)
    consumer = await assigned(scene, 0, 1)
    await until(lambda: len(consumer.held_queues()) == 2, "both queues")
    consumer.pause(queue(scene, 0))
    await send(scene, "0", queue_id=0)
    await send(scene, "1", queue_id=1)
    assert await polled(consumer, 1) == ["1"]
    assert await consumer.poll(0.01) == []
    consumer.resume(queue(scene, 0))
    assert await polled(consumer, 1) == ["0"]


async def test_messages_are_iterated_instead_of_polled(scene: Scene) -> None:
    """behaviour.md §8.14."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    seen: list[str] = []
    async with PullConsumer(scene.group, scene.namesrv, settings=(await scene.pull_consumer()).settings) as consumer:
        consumer.subscribe(scene.topic)
        async for message in consumer.messages():
            seen.append(message.body.decode())
            if len(seen) == 3:
                break
    assert seen == ["0", "1", "2"]
    assert await committed(scene) == 3


async def test_a_polling_member_takes_over_where_another_stopped(scene: Scene) -> None:
    """behaviour.md §8.4, §8.14."""
    await scene.create_topic(queues=2)
    await send_everywhere(scene, 2, 3)
    one, two = await scene.pull_consumer(), await scene.pull_consumer()
    one.subscribe(scene.topic)
    assert len(await polled(one, 6)) == 6
    assert await one.poll(0.01) == []  # messages of the previous poll are consumed
    two.subscribe(scene.topic)
    await until(lambda: len(one.held_queues()) == len(two.held_queues()) == 1, "a queue each")
    await one.close()
    await until(lambda: len(two.held_queues()) == 2, "both queues")
    await send(scene, "new 0", queue_id=0)
    await send(scene, "new 1", queue_id=1)
    assert sorted(await polled(two, 2)) == ["new 0", "new 1"]


async def test_no_more_is_held_for_polling_than_the_settings_say(scene: Scene) -> None:
    """behaviour.md §8.14: pullThresholdForQueue."""
    await scene.create_topic()
    await send(scene, *map(str, range(20)))
    consumer = await scene.pull_consumer(limits=HoldLimits(held_messages_max=4), pull=Pulling(count=2))
    consumer.subscribe(scene.topic)
    info = await eventually(
        lambda: running_info(scene),
        lambda seen: queue(scene) in seen.mq_table and seen.mq_table[queue(scene)].cached_msg_count >= 4,
        "four messages held",
    )
    assert info.mq_table[queue(scene)].cached_msg_count == 4
    assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_ACTIVELY"
    assert await polled(consumer, 20) == [str(i) for i in range(20)]
