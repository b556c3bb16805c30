"""Many messages in few requests: batches of the program's own, and `send_many`. Source: behaviour.md §3.6, §7.8."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from rmqkit import Message, MessageIllegal, SendManyFailed, SendResult, SendStatus, selectors
from rmqkit.client.runtime.settings import Batching
from tests.interop.suite.scene import Scene


def numbered(scene: Scene, count: int) -> list[Message]:
    return [
        Message(topic=scene.topic, body=b"%d" % i, tags="AB"[i % 2], keys=[f"k{i}"], properties={"n": str(i)}, flag=i)
        for i in range(count)
    ]


async def test_a_batch_lies_in_one_queue_one_message_after_the_other(scene: Scene) -> None:
    """behaviour.md §3.6."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    result = await producer.send_batch(numbered(scene, 20))
    found = await scene.stored(20)
    assert result.status is SendStatus.SEND_OK
    assert {one.queue_id for one in found} == {result.queue.queue_id}
    assert [one.queue_offset for one in found] == [result.queue_offset + i for i in range(20)]
    assert [one.body for one in found] == [b"%d" % i for i in range(20)]


async def test_every_message_of_a_batch_keeps_its_tag_keys_properties_and_flag(scene: Scene) -> None:
    """remoting.md §7.2."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_batch(numbered(scene, 4))
    found = [(one.tags, one.keys, one.properties["n"], one.flag) for one in await scene.stored(4)]
    assert found == [("AB"[i % 2], [f"k{i}"], str(i), i) for i in range(4)]


async def test_a_batch_has_the_ids_of_its_messages_joined_by_commas(scene: Scene) -> None:
    """behaviour.md §3.6."""
    await scene.create_topic()
    producer = await scene.producer()
    result = await producer.send_batch(numbered(scene, 5))
    found = await scene.stored(5)
    assert result.msg_id.split(",") == [one.msg_id for one in found]
    assert result.offset_msg_id.split(",") == [one.offset_msg_id for one in found]


async def test_messages_of_a_batch_are_stored_as_they_are_without_the_brokers_stamps(scene: Scene) -> None:
    """remoting.md §4.3.1: a normal batch stores the inner properties unchanged."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_batch([Message(topic=scene.topic, body=b"x")])
    (one,) = await scene.stored(1)
    assert one.properties.keys() == {"UNIQ_KEY", "WAIT"}


async def test_a_batch_is_never_compressed(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_batch([Message(topic=scene.topic, body=bytes(5000))] * 2)
    found = await scene.stored(2)
    assert [(one.body, one.sys_flag) for one in found] == [(bytes(5000), 0)] * 2
    assert all(one.store_size > 5000 for one in found)


async def test_a_batch_goes_to_the_queue_it_is_given(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=3)
    producer = await scene.producer()
    queue = (await producer.queues(scene.topic))[1]
    assert (await producer.send_batch(numbered(scene, 3), queue=queue)).queue == queue
    assert {one.queue_id for one in await scene.stored(3)} == {1}


async def test_a_batch_creates_its_topic(scene: Scene) -> None:
    """behaviour.md §3.2."""
    producer = await scene.producer()
    await producer.send_batch(numbered(scene, 3))
    assert len(await scene.stored(3)) == 3


async def refused(scene: Scene, messages: list[Message], text: str) -> None:
    await scene.create_topic()
    producer = await scene.producer()
    with pytest.raises(MessageIllegal, match=text):
        await producer.send_batch(messages)
    assert await scene.stored(0) == []


async def test_a_batch_without_messages_is_refused(scene: Scene) -> None:
    """behaviour.md §3.6."""
    await refused(scene, [], "a batch has no messages: give at least one")


async def test_a_batch_of_two_topics_is_refused(scene: Scene) -> None:
    """behaviour.md §3.6: the topic of the messages in one batch should be the same."""
    messages = [Message(topic=scene.topic, body=b"x"), Message(topic="Other", body=b"x")]
    await refused(scene, messages, "a batch has one topic and one wait_store: found Other")


async def test_a_batch_that_waits_and_does_not_wait_for_the_disk_is_refused(scene: Scene) -> None:
    """behaviour.md §3.6."""
    messages = [Message(topic=scene.topic, body=b"x", wait_store=wait) for wait in (True, False)]
    await refused(scene, messages, "a batch has one topic and one wait_store")


async def test_a_batch_with_a_delayed_message_is_refused(scene: Scene) -> None:
    """behaviour.md §3.6: delay level is not supported for batching."""
    messages = [Message(topic=scene.topic, body=b"x", delay_level=1)]
    await refused(scene, messages, "cannot hold delayed messages: send them one by one")


async def test_a_batch_for_a_retry_topic_is_refused(scene: Scene) -> None:
    """behaviour.md §3.6: retry group is not supported for batching."""
    messages = [Message(topic=f"%RETRY%{scene.group}", body=b"x")]
    await refused(scene, messages, f"a batch cannot be sent to retry topic %RETRY%{scene.group}")


async def test_a_batch_over_the_limit_is_refused_with_both_sizes(scene: Scene) -> None:
    """behaviour.md §7.8: total ≤ maxMessageSize."""
    messages = [Message(topic=scene.topic, body=bytes(1 << 20))] * 5
    await refused(scene, messages, rf"batch of 5 messages .* has \d+ bytes, \d+ more than the limit of {4 << 20}")


# -- batch.auto


async def test_single_sends_that_share_a_request_have_their_own_results(scene: Scene) -> None:
    """behaviour.md §7.8."""
    await scene.create_topic(queues=2)
    producer = await scene.producer(batch=Batching(auto=True))
    results = await asyncio.gather(*map(producer.send, numbered(scene, 40)))
    found = {(one.queue_id, one.queue_offset): one for one in await scene.stored(40)}
    for i, result in enumerate(results):
        one = found[result.queue.queue_id, result.queue_offset]
        assert (one.body, one.flag, one.tags) == (b"%d" % i, i, "AB"[i % 2])
        assert (one.msg_id, one.offset_msg_id) == (result.msg_id, result.offset_msg_id)
        assert "CLUSTER" not in one.properties, "the message was in a batch"


# -- send_many


async def check_places(scene: Scene, messages: list[Message], results: list[SendResult]) -> None:
    """Check that every message is at the place of its own result."""
    found = {one.offset_msg_id: one for one in await scene.stored(len(messages))}
    assert len(found) == len(messages) == len(results)
    for message, result in zip(messages, results, strict=True):
        one = found[result.offset_msg_id]
        assert (one.body, one.msg_id, one.keys) == (message.body, result.msg_id, list(message.keys))
        assert (one.queue_id, one.queue_offset) == (result.queue.queue_id, result.queue_offset)


async def test_many_messages_get_each_the_result_of_its_own_place(scene: Scene) -> None:
    """behaviour.md §7.8: each caller gets its own result derived from the batch's."""
    await scene.create_topic(queues=3)
    producer = await scene.producer()
    messages = numbered(scene, 2000)
    await check_places(scene, messages, await producer.send_many(messages))


async def test_many_messages_go_out_in_batches(scene: Scene) -> None:
    """behaviour.md §7.8: batches are stored without the stamps that single messages get."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_many(numbered(scene, 50))
    assert all("MSG_REGION" not in one.properties for one in await scene.stored(50))


async def test_many_messages_may_be_of_several_topics(scene: Scene) -> None:
    """behaviour.md §7.8: the key of a batch is the topic."""
    topics = [await scene.create_topic(f"{scene.topic}-{i}") for i in range(3)]
    producer = await scene.producer()
    results = await producer.send_many(Message(topic=topics[i % 3], body=b"%d" % i) for i in range(30))
    assert [result.queue.topic for result in results] == [topics[i % 3] for i in range(30)]
    for k, topic in enumerate(topics):
        assert [one.body for one in await scene.stored(10, topic)] == [b"%d" % i for i in range(k, 30, 3)]


async def test_many_messages_of_a_sharding_key_keep_their_order(scene: Scene) -> None:
    """behaviour.md §9.4."""
    await scene.create_topic(queues=4)
    producer = await scene.producer(batch=Batching(bytes=500))
    messages = [Message(topic=scene.topic, body=b"%d" % i, sharding_key="abcde"[i % 5]) for i in range(300)]
    await producer.send_many(messages, selector=selectors.by_sharding_key)
    found = await scene.stored(300)
    for key in "abcde":
        numbers = [int(one.body) for one in found if one.properties["__SHARDINGKEY"] == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 60


async def test_many_messages_may_come_one_by_one(scene: Scene) -> None:
    """behaviour.md §7.8: held up to batchMaxDelayMs."""
    await scene.create_topic()
    producer = await scene.producer(batch=Batching(delay_ms=5))

    async def source() -> AsyncIterator[Message]:
        for message in numbered(scene, 40):
            await asyncio.sleep(0.001)
            yield message

    results = await producer.send_many(source())
    await check_places(scene, numbered(scene, 40), results)


async def test_delayed_messages_among_many_go_out_alone_and_come_later(scene: Scene) -> None:
    """behaviour.md §7.8: not for delay messages."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_many([Message(topic=scene.topic, body=b"%d" % i, delay_level=i % 2) for i in range(6)])
    found = await scene.stored(6)
    assert [one.body for one in found[:3]] == [b"0", b"2", b"4"]
    assert {one.body: one.properties.get("DELAY") for one in found[3:]} == dict.fromkeys((b"1", b"3", b"5"), "1")


async def test_large_messages_among_many_go_out_compressed(scene: Scene) -> None:
    """behaviour.md §7.8, §7.4."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_many([Message(topic=scene.topic, body=bytes(size)) for size in (10, 50_000, 20)])
    sizes = {len(one.body): one.store_size for one in await scene.stored(3)}
    assert sizes.keys() == {10, 50_000, 20}
    assert sizes[50_000] < 2000


async def test_no_messages_are_no_results(scene: Scene) -> None:
    """behaviour.md §7.8."""
    producer = await scene.producer()
    assert await producer.send_many([]) == []


async def test_a_failure_among_many_reports_what_became_of_each(scene: Scene) -> None:
    """behaviour.md §7.8."""
    await scene.create_topic()
    producer = await scene.producer()
    messages = [Message(topic=scene.topic, body=body) for body in (b"first", b"", b"third")]
    with pytest.raises(
        SendManyFailed, match=r"1 of 3 messages not sent, the first because: body .* is empty"
    ) as failed:
        await producer.send_many(messages)
    kinds = [type(result) for result in failed.value.results]
    assert kinds == [SendResult, MessageIllegal, SendResult]
    assert [one.body for one in await scene.stored(2)] == [b"first", b"third"]


async def test_several_calls_at_a_time_do_not_disturb_each_other(scene: Scene) -> None:
    """behaviour.md §7.8."""
    await scene.create_topic(queues=2)
    producer = await scene.producer()
    calls = [[Message(topic=scene.topic, body=b"%d" % i) for i in range(100)] for _ in range(5)]
    results = await asyncio.gather(*map(producer.send_many, calls))
    assert Counter(one.body for one in await scene.stored(500)) == Counter({b"%d" % i: 5 for i in range(100)})
    assert len({result.offset_msg_id for of_call in results for result in of_call}) == 500
