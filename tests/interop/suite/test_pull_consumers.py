"""Queues read by hand: pull, offsets, looking messages up. Source: behaviour.md §4.2, §4.3, §5.2, §8.1, §8.16."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from rmqkit import ClientError, MessageQueue, NoRoute, PeerRefused, PullConsumer, PullStatus, ReceivedMessage, sync
from rmqkit.client.runtime.settings import Pulling
from tests.interop.suite.consuming import (
    Received,
    bodies,
    by_queue,
    client_ids,
    committed,
    is_committed,
    queue,
    send,
    until,
)
from tests.interop.suite.scene import Scene
from tests.patience import pulling


async def test_the_queues_of_a_topic_are_listed_in_order(scene: Scene) -> None:
    """behaviour.md §8.14: fetch queues."""
    await scene.create_topic(queues=3)
    consumer = await scene.pull_consumer()
    assert await consumer.queues(scene.topic) == [queue(scene, i) for i in range(3)]
    with pytest.raises(NoRoute, match=f"{scene.topic}-missing"):
        await consumer.queues(f"{scene.topic}-missing")


async def test_only_readable_queues_are_listed(scene: Scene) -> None:
    """behaviour.md §8.4: readQueueNums."""
    await scene.create_topic(queues=2, read_queues=3)
    consumer = await scene.pull_consumer()
    assert await consumer.queues(scene.topic) == [queue(scene, i) for i in range(3)]


async def test_a_pull_finds_messages_from_an_offset_on(scene: Scene) -> None:
    """behaviour.md §4.3: FOUND."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 2)
    assert (result.status, bodies(result.messages)) == (PullStatus.FOUND, ["2", "3", "4"])
    assert (result.next_begin_offset, result.min_offset, result.max_offset) == (5, 0, 5)


async def test_a_pull_takes_no_more_than_it_is_to(scene: Scene) -> None:
    """behaviour.md §4.2: maxMsgNums."""
    await scene.create_topic()
    await send(scene, *"01234")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 0, max_count=2)
    assert (bodies(result.messages), result.next_begin_offset) == (["0", "1"], 2)


async def test_at_the_end_there_is_no_new_message(scene: Scene) -> None:
    """behaviour.md §4.3: NO_NEW_MSG."""
    await scene.create_topic()
    await send(scene, "0", "1")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 2)
    assert (result.status, result.messages, result.next_begin_offset) == (PullStatus.NO_NEW_MESSAGE, [], 2)


async def test_where_nothing_matches_the_pull_continues_after_it(scene: Scene) -> None:
    """behaviour.md §4.3: NO_MATCHED_MSG."""
    await scene.create_topic()
    for _ in range(3):
        await send(scene, "x", tags="A")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 0, "B")
    assert (result.status, result.messages, result.next_begin_offset) == (PullStatus.NO_MATCHED_MESSAGE, [], 3)


@pytest.mark.parametrize(("offset", "corrected"), [(5, 2), (-1, 0), (1 << 40, 2)])
async def test_an_offset_outside_of_the_queue_is_illegal_and_corrected(
    scene: Scene, offset: int, corrected: int
) -> None:
    """behaviour.md §4.2, §4.3: OFFSET_ILLEGAL."""
    await scene.create_topic()
    await send(scene, "0", "1")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), offset)
    assert (result.status, result.messages, result.next_begin_offset) == (PullStatus.OFFSET_ILLEGAL, [], corrected)


async def test_a_pull_chooses_by_tags(scene: Scene) -> None:
    """behaviour.md §6.1."""
    await scene.create_topic()
    for tag in "ABCA":
        await send(scene, tag, tags=tag)
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 0, "A || C")
    assert (bodies(result.messages), result.next_begin_offset) == (["A", "C", "A"], 4)
    with pytest.raises(ClientError):
        await consumer.pull(queue(scene), 0, "||")


async def test_a_pull_chooses_by_sql(scene: Scene) -> None:
    """behaviour.md §6.2."""
    await scene.create_topic()
    for i in range(6):
        await send(scene, str(i), properties={"n": str(i)})
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 0, "n IN ('1', '4')", expression_type="SQL92")
    assert (bodies(result.messages), result.next_begin_offset) == (["1", "4"], 6)


async def test_a_pull_that_may_wait_gets_the_message_that_comes(scene: Scene) -> None:
    """behaviour.md §4.4: long polling."""
    await scene.create_topic()
    consumer = await scene.pull_consumer()
    await scene.sender()  # connect first, so that the pull waits only for the message
    await scene.reader()
    waiting = asyncio.create_task(consumer.pull(queue(scene), 0, wait=20))
    assert (await consumer.pull(queue(scene), 0)).status is PullStatus.NO_NEW_MESSAGE
    assert not waiting.done()
    await send(scene, "awaited")
    assert bodies((await waiting).messages) == ["awaited"]


async def test_a_pull_that_waited_in_vain_says_so(scene: Scene) -> None:
    """behaviour.md §4.4."""
    await scene.create_topic()
    await send(scene, "0")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 1, wait=0.2)
    assert (result.status, result.next_begin_offset) == (PullStatus.NO_NEW_MESSAGE, 1)


async def test_a_queue_that_does_not_exist_is_refused(scene: Scene) -> None:
    """behaviour.md §4.1."""
    await scene.create_topic()
    consumer = await scene.pull_consumer()
    with pytest.raises(PeerRefused, match=r"queueId\[7\] is illegal"):
        await consumer.pull(queue(scene, 7), 0)


async def test_a_queue_has_a_first_and_an_end(scene: Scene) -> None:
    """behaviour.md §5.2: GET_MIN_OFFSET, GET_MAX_OFFSET."""
    await scene.create_topic(queues=2)
    await send(scene, "0", "1", "2")
    consumer = await scene.pull_consumer()
    assert [await consumer.min_offset(queue(scene, i)) for i in range(2)] == [0, 0]
    assert [await consumer.max_offset(queue(scene, i)) for i in range(2)] == [3, 0]


async def spread(scene: Scene, count: int) -> list[ReceivedMessage]:
    """Send ``count`` messages to queue 0, each stored in a different millisecond."""
    while True:
        stored = await scene.stored(0)
        times = [message.store_timestamp for message in stored]
        if len(set(times)) >= count:
            return [next(message for message in stored if message.store_timestamp == at) for at in sorted(set(times))]
        await send(scene, f"message {len(stored)}")


async def test_an_offset_is_found_by_time(scene: Scene) -> None:
    """behaviour.md §5.2: SEARCH_OFFSET_BY_TIMESTAMP."""
    await scene.create_topic()
    messages = await spread(scene, 4)
    consumer = await scene.pull_consumer()
    for message in messages:
        assert await consumer.search_offset(queue(scene), message.store_timestamp / 1000) == message.queue_offset
    assert await consumer.search_offset(queue(scene), 0) == 0
    end = await consumer.max_offset(queue(scene))
    assert await consumer.search_offset(queue(scene), (messages[-1].store_timestamp + 3_600_000) / 1000) == end


async def test_offsets_are_saved_by_the_program(scene: Scene) -> None:
    """behaviour.md §5.2, §8.1: UPDATE_CONSUMER_OFFSET, QUERY_CONSUMER_OFFSET."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    consumer = await scene.pull_consumer()
    result = await consumer.pull(queue(scene), 0, max_count=2)
    await consumer.commit(queue(scene), result.next_begin_offset)
    assert await consumer.committed(queue(scene)) == await committed(scene) == 2
    await consumer.commit(queue(scene), 1)
    assert await consumer.committed(queue(scene)) == 1


async def test_offsets_belong_to_a_group(scene: Scene) -> None:
    """behaviour.md §5.1."""
    await scene.create_topic()
    await send(scene, "0", "1", "2")
    one, two = await scene.pull_consumer(), await scene.pull_consumer(f"{scene.group}-other")
    for consumer, offset in ((one, 1), (two, 2)):
        await consumer.pull(queue(scene), 0)
        await consumer.commit(queue(scene), offset)
    assert (await one.committed(queue(scene)), await two.committed(queue(scene))) == (1, 2)


async def test_reading_by_hand_joins_no_group(scene: Scene) -> None:
    """behaviour.md §8.1."""
    await scene.create_topic()
    await send(scene, "0")
    consumer = await scene.pull_consumer()
    assert bodies((await consumer.pull(queue(scene), 0)).messages) == ["0"]
    assert await client_ids(scene) == []


async def test_the_blocking_consumer_reads_by_hand_as_the_other(scene: Scene) -> None:
    """behaviour.md §8.1."""
    await scene.create_topic()
    await send(scene, "0", "1")

    def read() -> tuple[list[str], int | None]:
        with sync.PullConsumer(scene.group, scene.namesrv, settings=pulling()) as consumer:
            (one,) = consumer.queues(scene.topic)
            result = consumer.pull(one, consumer.min_offset(one))
            consumer.commit(one, result.next_begin_offset)
            return bodies(result.messages), consumer.committed(one)

    assert await asyncio.to_thread(read) == (["0", "1"], 2)


# -- scheduled pull


async def pulled_and_committed(consumer: PullConsumer, one: MessageQueue, seen: Received) -> None:
    """Do the work of a program in each call: read from the group's offset, one message at a time."""
    result = await consumer.pull(one, await consumer.committed(one) or 0, max_count=1)
    for message in result.messages:
        await seen(message)
    if result.messages:
        await consumer.commit(one, result.next_begin_offset)


async def test_a_scheduled_pull_is_called_for_each_queue_over_and_over(scene: Scene) -> None:
    """behaviour.md §8.1: scheduled pull."""
    await scene.create_topic(queues=2)
    received = Received()
    consumer = await scene.pull_consumer()

    async def task(one: MessageQueue) -> None:
        await pulled_and_committed(consumer, one, received)

    consumer.schedule(scene.topic, task, pause=0.01)
    for queue_id in range(2):
        await send(scene, "0", "1", "2", queue_id=queue_id)
    await received.at_least(6)
    assert by_queue(received.messages) == {0: [0, 1, 2], 1: [0, 1, 2]}
    await is_committed(scene, 3, queue_id=1)


async def test_members_with_scheduled_pulls_share_the_queues(scene: Scene) -> None:
    """behaviour.md §8.1, §8.4."""
    await scene.create_topic(queues=4)
    handlers = [Received(), Received()]
    members = [await scene.pull_consumer() for _ in handlers]
    for member, handler in zip(members, handlers, strict=True):

        async def task(one: MessageQueue, member: PullConsumer = member, handler: Received = handler) -> float:
            await pulled_and_committed(member, one, handler)
            return 10

        member.schedule(scene.topic, task)
    await until(lambda: [len(member.held_queues()) for member in members] == [2, 2], "two queues each")
    for queue_id in range(4):
        await send(scene, str(queue_id), queue_id=queue_id)
    await until(lambda: all(len(handler.messages) >= 2 for handler in handlers), "the messages")
    assert sorted(handlers[0].bodies + handlers[1].bodies) == ["0", "1", "2", "3"]
    await members[0].close()
    await until(lambda: len(members[1].held_queues()) == 4, "every queue at the one that stays")


async def test_a_scheduled_pull_that_raises_is_called_again(scene: Scene) -> None:
    """behaviour.md §8.1."""
    await scene.create_topic()
    calls: list[MessageQueue] = []
    consumer = await scene.pull_consumer(pull=Pulling(error_pause_ms=10))

    def task(one: MessageQueue) -> None:
        calls.append(one)
        raise ValueError("not this time")

    consumer.schedule(scene.topic, task)
    await until(lambda: len(calls) >= 3, "three calls")
    assert set(calls) == {queue(scene)}


async def test_closing_waits_for_the_scheduled_pull_under_way(scene: Scene) -> None:
    """behaviour.md §8.1, §7.12."""
    await scene.create_topic()
    await send(scene, "0")
    begun, release = asyncio.Event(), asyncio.Event()
    consumer = await scene.pull_consumer()

    async def task(one: MessageQueue) -> None:
        result = await consumer.pull(one, 0)
        begun.set()
        await release.wait()
        await consumer.commit(one, result.next_begin_offset)

    consumer.schedule(scene.topic, task)
    await begun.wait()
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    assert not closing.done()
    release.set()
    await closing
    assert await committed(scene) == 1


async def test_a_queue_listener_is_notified_what_is_held_and_what_there_is(scene: Scene) -> None:
    """behaviour.md §8.1, §8.3: queue listener."""
    await scene.create_topic(queues=2)
    told: list[tuple[list[int], list[int]]] = []

    def listener(queues: set[MessageQueue], held: set[MessageQueue]) -> None:
        told.append((sorted(one.queue_id for one in queues), sorted(one.queue_id for one in held)))

    one, two = scene.push_consumer(), scene.push_consumer()
    for member in (one, two):
        member.subscribe(scene.topic, "*", Received())
    one.on_queues_changed(scene.topic, listener)
    await one.start()
    await until(lambda: told[-1:] == [([0, 1], [0, 1])], "both queues")
    await two.start()
    await until(lambda: told[-1][0] == [0, 1] and len(told[-1][1]) == 1, "one of two queues")
    await two.close()
    await until(lambda: told[-1] == ([0, 1], [0, 1]), "both queues again")
    await scene.create_topic(queues=3)
    await until(lambda: told[-1] == ([0, 1, 2], [0, 1, 2]), "the new queue")


async def test_who_assigns_queues_is_reported_when_the_topic_gets_more(scene: Scene) -> None:
    """behaviour.md §8.14: topic queue-change listeners."""
    await scene.create_topic(queues=1)
    consumer = await scene.pull_consumer()
    told: list[set[MessageQueue]] = []
    consumer.on_queues_changed(scene.topic, lambda queues, held: told.append(queues))
    consumer.assign(await consumer.queues(scene.topic))
    await until(lambda: told[-1:] == [{queue(scene)}], "the first queue")
    await scene.create_topic(queues=2)
    await until(lambda: told[-1] == {queue(scene, 0), queue(scene, 1)}, "the second queue")
    assert consumer.held_queues() == {queue(scene)}


# -- looking messages up


async def test_a_message_is_found_by_its_offset_message_id(scene: Scene) -> None:
    """behaviour.md §8.16: VIEW_MESSAGE_BY_ID."""
    await scene.create_topic()
    _, sent, _ = await send(scene, "0", "1", "2")
    consumer = await scene.pull_consumer()
    assert sent.offset_msg_id is not None
    found = await consumer.view_message(scene.topic, sent.offset_msg_id)
    assert found is not None
    assert (found.body, found.msg_id, found.queue_offset) == (b"1", sent.msg_id, 1)
    assert await consumer.view_message(scene.topic, f"{sent.offset_msg_id[:16]}{1 << 40:016X}") is None


async def test_a_message_is_found_by_its_unique_key(scene: Scene) -> None:
    """behaviour.md §8.16: _UNIQUE_KEY_QUERY."""
    await scene.create_topic()
    _, sent, _ = await send(scene, "0", "1", "2", keys=["k"])
    consumer = await scene.pull_consumer()
    found = None
    while found is None:  # the index is written after the log
        found = await consumer.view_message(scene.topic, sent.msg_id)
    assert (found.body, found.offset_msg_id) == (b"1", sent.offset_msg_id)
    assert await consumer.view_message(scene.topic, "0" * 32) is None


async def found_by_key(consumer: PullConsumer, topic: str, key: str, count: int) -> list[str]:
    while len(found := await consumer.query_messages(topic, key)) < count:
        await asyncio.sleep(0.02)
    return bodies(found)


async def test_messages_are_found_by_key(scene: Scene) -> None:
    """behaviour.md §8.16: QUERY_MESSAGE."""
    await scene.create_topic(queues=2)
    await send(scene, "0", keys=["red", "round"])
    await send(scene, "1", keys=["red"], queue_id=1)
    await send(scene, "2", keys=["blue"])
    consumer = await scene.pull_consumer()
    assert await found_by_key(consumer, scene.topic, "red", 2) == ["0", "1"]
    assert await found_by_key(consumer, scene.topic, "round", 1) == ["0"]
    assert await consumer.query_messages(scene.topic, "green") == []
    with pytest.raises(NoRoute):
        await consumer.query_messages(f"{scene.topic}-missing", "red")


async def test_a_query_by_key_is_limited_in_number_and_time(scene: Scene) -> None:
    """behaviour.md §8.16."""
    await scene.create_topic()
    await send(scene, "a", keys=["k"])
    await send(scene, "b", keys=["k"])
    consumer = await scene.pull_consumer()
    await found_by_key(consumer, scene.topic, "k", 2)
    assert len(await consumer.query_messages(scene.topic, "k", max_count=1)) == 1
    stored, hour = (await scene.stored(2))[0].stored_at, timedelta(hours=1)
    for begin, end, count in (
        (stored - hour, stored + hour, 2),
        (0, stored - hour, 0),
        (stored + hour, None, 0),
    ):
        found = await consumer.query_messages(scene.topic, "k", begin=begin, end=end)
        assert len(found) == count


async def test_keys_with_equal_hashes_are_distinguished(scene: Scene) -> None:
    """behaviour.md §8.16: results re-checked by exact key."""
    await scene.create_topic()
    await send(scene, "one", keys=["Aa"])
    await send(scene, "other", keys=["BB"])
    consumer = await scene.pull_consumer()
    assert await found_by_key(consumer, scene.topic, "Aa", 1) == ["one"]
    assert await found_by_key(consumer, scene.topic, "BB", 1) == ["other"]
