"""Messages sent one by one: their queues, their content, and queries for them. Source: behaviour.md §3, §7."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import random
from collections import Counter
from typing import Any

import pytest

from rmqkit import CompressionType, Message, MessageQueue, SendStatus, selectors
from rmqkit.client.runtime.settings import Compressing
from rmqkit.protocol.compression import Compression
from rmqkit.protocol.ids import decode_offset_id
from rmqkit.protocol.properties import java_hash
from rmqkit.protocol.schemas.topics import TopicRoute
from tests.interop.suite.scene import POLL_SECONDS, Scene

COMPRESSION_BITS = 0x700
TEXT = b"a body that gets smaller, " * 400


# -- the queue of a message


async def test_a_sent_message_is_stored_where_the_result_says(scene: Scene) -> None:
    """behaviour.md §7.6, §3.5."""
    await scene.create_topic(queues=3)
    producer = await scene.producer()
    result = await producer.send(Message(topic=scene.topic, body=b"one"))
    (one,) = await scene.stored(1)
    assert result.status is SendStatus.SEND_OK
    assert MessageQueue(one.topic, one.broker_name or "", one.queue_id) == result.queue
    assert one.queue_offset == result.queue_offset == 0
    assert (one.msg_id, one.offset_msg_id, one.body) == (result.msg_id, result.offset_msg_id, b"one")


async def test_queues_are_used_in_turn(scene: Scene) -> None:
    """behaviour.md §7.5."""
    await scene.create_topic(queues=3)
    producer = await scene.producer()
    used = [(await producer.send(Message(topic=scene.topic, body=b"x"))).queue.queue_id for _ in range(9)]
    assert used == [(used[0] + i) % 3 for i in range(9)]


async def test_offsets_of_a_queue_grow_by_one(scene: Scene) -> None:
    """behaviour.md §3.5."""
    await scene.create_topic()
    producer = await scene.producer()
    offsets = [(await producer.send(Message(topic=scene.topic, body=b"x"))).queue_offset for _ in range(5)]
    assert offsets == [0, 1, 2, 3, 4]


async def test_many_sends_at_a_time_lose_nothing_and_have_places_of_their_own(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    messages = [Message(topic=scene.topic, body=b"%d" % i) for i in range(300)]
    results = await asyncio.gather(*map(producer.send, messages))
    found = {one.offset_msg_id: one for one in await scene.stored(300)}
    assert len(found) == 300
    for message, result in zip(messages, results, strict=True):
        assert found[result.offset_msg_id].body == message.body


async def test_a_one_way_message_is_stored(scene: Scene) -> None:
    """behaviour.md §7.6: one try, no answer."""
    await scene.create_topic()
    producer = await scene.producer()
    await producer.send_one_way(Message(topic=scene.topic, body=b"one way", tags="A", keys=["k"]))
    (one,) = await scene.stored(1)
    assert (one.body, one.tags, one.keys) == (b"one way", "A", ["k"])


async def test_a_one_way_message_goes_to_the_queue_it_is_given(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    queues = await producer.queues(scene.topic)
    await producer.send_one_way(Message(topic=scene.topic, body=b"x"), queue=queues[2])
    (one,) = await scene.stored(1)
    assert one.queue_id == 2


async def test_a_message_goes_to_the_queue_it_is_given(scene: Scene) -> None:
    """behaviour.md §7.3, §7.6."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    queues = await producer.queues(scene.topic)
    assert [queue.queue_id for queue in queues] == [0, 1, 2, 3]
    for queue in reversed(queues):
        assert (await producer.send(Message(topic=scene.topic, body=b"x"), queue=queue)).queue == queue
    assert [one.queue_id for one in await scene.stored(4)] == [0, 1, 2, 3]


async def test_a_queue_between_the_write_and_the_read_count_may_be_given(scene: Scene) -> None:
    """behaviour.md §3.1, step 8: the larger of both counts is the limit."""
    await scene.create_topic(queues=1, read_queues=3)
    producer = await scene.producer()
    queue = MessageQueue(scene.topic, scene.broker_name, 2)
    assert (await producer.send(Message(topic=scene.topic, body=b"x"), queue=queue)).queue == queue
    assert [one.queue_id for one in await scene.stored(1)] == [2]


async def test_a_negative_queue_has_the_broker_choose_one(scene: Scene) -> None:
    """behaviour.md §3.1, step 8."""
    await scene.create_topic(queues=2)
    producer = await scene.producer()
    result = await producer.send(
        Message(topic=scene.topic, body=b"x"), queue=MessageQueue(scene.topic, scene.broker_name, -1)
    )
    (one,) = await scene.stored(1)
    assert result.queue.queue_id == one.queue_id
    assert one.queue_id in (0, 1)


@pytest.mark.parametrize("key", ["order-1", "Zürich", "polygenelubricants"])
async def test_a_hash_key_leads_to_the_queue_java_chooses(scene: Scene, key: str) -> None:
    """behaviour.md §7.7: |hash mod n|; the last key's hash is the smallest of all numbers."""
    await scene.create_topic(queues=5)
    producer = await scene.producer()
    results = [
        await producer.send(Message(topic=scene.topic, body=b"x"), selector=selectors.by_hash(key)) for _ in range(3)
    ]
    assert {result.queue.queue_id for result in results} == {abs(java_hash(key)) % 5}


async def test_messages_of_a_sharding_key_lie_in_one_queue_in_order(scene: Scene) -> None:
    """behaviour.md §9.4, §7.7."""
    await scene.create_topic(queues=4)
    producer = await scene.producer()
    for i, key in itertools.product(range(5), "abc"):
        message = Message(topic=scene.topic, body=b"%d" % i, sharding_key=key)
        await producer.send(message, selector=selectors.by_sharding_key)
    found = await scene.stored(15)
    for key in "abc":
        of_key = [one for one in found if one.properties["__SHARDINGKEY"] == key]
        assert {one.queue_id for one in of_key} == {java_hash(key) % 4}
        assert [one.body for one in of_key] == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_selector_of_the_programs_own_chooses_the_queue(scene: Scene) -> None:
    """behaviour.md §7.7."""
    await scene.create_topic(queues=3)
    producer = await scene.producer()
    for i in range(6):
        message = Message(topic=scene.topic, body=b"%d" % i, properties={"lane": str(i % 3)})
        await producer.send(message, selector=lambda queues, message: queues[int(message.properties["lane"])])
    assert Counter((one.queue_id, one.properties["lane"]) for one in await scene.stored(6)) == {
        (0, "0"): 2,
        (1, "1"): 2,
        (2, "2"): 2,
    }


async def test_a_random_selector_takes_one_of_the_queues(scene: Scene) -> None:
    """behaviour.md §7.7."""
    await scene.create_topic(queues=2)
    producer = await scene.producer()
    for _ in range(4):
        await producer.send(Message(topic=scene.topic, body=b"x"), selector=selectors.at_random)
    assert {one.queue_id for one in await scene.stored(4)} <= {0, 1}


# -- topics that do not exist yet


def queue_counts(route: TopicRoute | None) -> list[tuple[int, int]]:
    return [(data.write_queue_nums, data.read_queue_nums) for data in route.queue_datas] if route else []


@pytest.mark.parametrize(("wanted", "given"), [(None, 4), (2, 2), (20, 8)])
async def test_the_first_message_creates_its_topic_with_the_wanted_queues(
    scene: Scene, wanted: int | None, given: int
) -> None:
    """behaviour.md §3.2, §7.2: at most as many as the template topic has."""
    settings: dict[str, Any] = {} if wanted is None else {"template_queue_count": wanted}
    producer = await scene.producer(**settings)
    await producer.send(Message(topic=scene.topic, body=b"first"))
    while not (route := await scene.route(scene.topic)):
        await asyncio.sleep(POLL_SECONDS)
    assert queue_counts(route) == [(given, given)]
    assert [data.perm for data in route.queue_datas] == [6]


async def test_before_the_topic_is_created_its_queues_are_those_it_will_have(scene: Scene) -> None:
    """behaviour.md §7.2."""
    producer = await scene.producer(template_queue_count=3)
    expected = await producer.queues(scene.topic)
    assert [queue.queue_id for queue in expected] == [0, 1, 2]
    results = [await producer.send(Message(topic=scene.topic, body=b"x")) for _ in range(3)]
    assert sorted(result.queue for result in results) == sorted(expected)


# -- the content of a message


async def test_tag_keys_flag_and_properties_come_back_as_they_were_sent(scene: Scene) -> None:
    """remoting.md §8.1, §7.3."""
    await scene.create_topic()
    one = await scene.sent_and_stored(
        Message(
            topic=scene.topic,
            body=b"x",
            tags="TagÄ",
            keys=["first", "zweiter-ß"],
            flag=-7,
            properties={"city": "東京", "blank": "a b", "emoji 🙂": "🚀"},
        )
    )
    assert (one.tags, one.keys, one.flag) == ("TagÄ", ["first", "zweiter-ß"], -7)
    assert one.properties["KEYS"] == "first zweiter-ß"
    assert {name: one.properties[name] for name in ("city", "blank", "emoji 🙂")} == {
        "city": "東京",
        "blank": "a b",
        "emoji 🙂": "🚀",
    }


async def test_a_message_may_have_a_body_and_nothing_else(scene: Scene) -> None:
    """remoting.md §8.1."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"\x00"))
    assert (one.body, one.tags, one.keys, one.flag, one.reconsume_times) == (b"\x00", None, [], 0, 0)
    assert one.properties.keys() == {"UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER"}


async def test_the_broker_stamps_region_cluster_and_trace_switch(scene: Scene) -> None:
    """behaviour.md §3.1, steps 2 and 11."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x"))
    stamped = {name: one.properties[name] for name in ("MSG_REGION", "TRACE_ON", "CLUSTER")}
    assert stamped == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": scene.peer.cluster}


@pytest.mark.parametrize("wait_store", [True, False])
async def test_a_message_says_whether_its_sender_waits_for_the_disk(scene: Scene, wait_store: bool) -> None:
    """remoting.md §8.1: WAIT."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x", wait_store=wait_store))
    assert one.properties["WAIT"] == ("true" if wait_store else "false")


async def test_time_and_address_of_birth_are_the_clients(scene: Scene) -> None:
    """remoting.md §4.3.1."""
    await scene.create_topic()
    before = datetime.datetime.now().timestamp() * 1000
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=b"x"))
    assert int(before) <= one.born_timestamp <= one.store_timestamp + 1000
    assert one.born_host.startswith("127.0.0.1:")
    assert one.store_host == scene.peer.broker_addr


async def test_the_same_message_may_be_sent_twice_and_gets_two_ids(scene: Scene) -> None:
    """behaviour.md §7.6."""
    await scene.create_topic()
    producer = await scene.producer()
    message = Message(topic=scene.topic, body=b"x")
    first, second = await producer.send(message), await producer.send(message)
    assert first.msg_id != second.msg_id
    assert message == Message(topic=scene.topic, body=b"x")
    assert [one.msg_id for one in await scene.stored(2)] == [first.msg_id, second.msg_id]


async def test_a_message_keeps_the_id_it_brings(scene: Scene) -> None:
    """behaviour.md §7.6: UNIQ_KEY if absent."""
    await scene.create_topic()
    producer = await scene.producer()
    first = await producer.send(Message(topic=scene.topic, body=b"x"))
    again = await producer.send(Message(topic=scene.topic, body=b"x", msg_id=first.msg_id))
    assert again.msg_id == first.msg_id
    assert again.offset_msg_id != first.offset_msg_id
    assert {one.msg_id for one in await scene.stored(2)} == {first.msg_id}


async def test_the_message_id_reports_address_process_and_time(scene: Scene) -> None:
    """remoting.md §7.4."""
    await scene.create_topic()
    producer = await scene.producer(client_ip="127.0.0.9")
    now = datetime.datetime.now()
    result = await producer.send(Message(topic=scene.topic, body=b"x"))
    packed = bytes.fromhex(result.msg_id)
    assert packed[:4] == bytes((127, 0, 0, 9))
    assert int.from_bytes(packed[4:6]) == os.getpid() & 0xFFFF
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    assert abs(int.from_bytes(packed[10:14]) - (now - month).total_seconds() * 1000) < 60_000
    assert result.msg_id == result.msg_id.upper()


async def test_the_offset_message_id_reports_broker_and_place_in_the_log(scene: Scene) -> None:
    """remoting.md §7.4."""
    await scene.create_topic()
    producer = await scene.producer()
    result = await producer.send(Message(topic=scene.topic, body=b"x"))
    (one,) = await scene.stored(1)
    ip, port, physical_offset = decode_offset_id(result.offset_msg_id)
    assert (f"{ip}:{port}", physical_offset) == (scene.peer.broker_addr, one.physical_offset)


async def test_the_transaction_id_of_a_result_is_the_message_id(scene: Scene) -> None:
    """behaviour.md §3.5: transactionId = UNIQ_KEY, for single sends."""
    await scene.create_topic()
    producer = await scene.producer()
    result = await producer.send(Message(topic=scene.topic, body=b"x"))
    assert result.transaction_id == result.msg_id


# -- bodies


@pytest.mark.parametrize("compression", list(CompressionType))
async def test_a_large_body_is_stored_compressed_and_read_whole(scene: Scene, compression: CompressionType) -> None:
    """remoting.md §7.5."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=TEXT), compression=Compressing(type=compression))
    assert one.body == TEXT
    assert one.store_size < len(TEXT) // 4
    assert one.sys_flag & COMPRESSION_BITS == Compression[compression.name]


@pytest.mark.parametrize(("size", "is_compressed"), [(4095, False), (4096, True)])
async def test_bodies_are_compressed_from_4096_bytes_on(scene: Scene, size: int, is_compressed: bool) -> None:
    """behaviour.md §7.4: compressMsgBodyOverHowmuch."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=TEXT[:size]))
    assert one.body == TEXT[:size]
    assert (one.store_size < size) == is_compressed


async def test_the_size_from_which_bodies_are_compressed_is_a_setting(scene: Scene) -> None:
    """behaviour.md §7.4."""
    await scene.create_topic()
    one = await scene.sent_and_stored(
        Message(topic=scene.topic, body=TEXT[:500]), compression=Compressing(body_bytes_min=100)
    )
    assert one.body == TEXT[:500]
    assert one.sys_flag & COMPRESSION_BITS


async def test_a_body_that_would_not_get_smaller_is_sent_as_it_is(scene: Scene) -> None:
    """remoting.md §7.5."""
    await scene.create_topic()
    body = random.Random(7).randbytes(5000)
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=body))
    assert (one.body, one.sys_flag & COMPRESSION_BITS) == (body, 0)
    assert one.store_size > len(body)


async def test_a_body_of_many_reads_and_writes_is_stored_whole(scene: Scene) -> None:
    """remoting.md §1.1."""
    await scene.create_topic()
    body = random.Random(8).randbytes(900_000)
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=body))
    assert one.body == body


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_any_buffer_can_be_a_body(scene: Scene, kind: type) -> None:
    """behaviour.md §7.3."""
    await scene.create_topic()
    one = await scene.sent_and_stored(Message(topic=scene.topic, body=kind(b"buffer")))
    assert one.body == b"buffer"


# -- queries


async def test_messages_are_found_by_each_of_their_keys(scene: Scene) -> None:
    """behaviour.md §8.16."""
    await scene.create_topic()
    producer, reader = await scene.producer(), await scene.reader()
    for i in range(3):
        await producer.send(Message(topic=scene.topic, body=b"%d" % i, keys=["common", f"own-{i}"]))
    while len(found := await reader.query_messages(scene.topic, "common")) < 3:
        await asyncio.sleep(POLL_SECONDS)  # the index is written a moment after the log
    assert [one.body for one in found] == [b"0", b"1", b"2"]
    assert [one.body for one in await reader.query_messages(scene.topic, "own-1")] == [b"1"]
    assert await reader.query_messages(scene.topic, "missing") == []


async def test_keys_are_searched_within_a_time(scene: Scene) -> None:
    """behaviour.md §8.16."""
    await scene.create_topic()
    producer, reader = await scene.producer(), await scene.reader()
    await producer.send(Message(topic=scene.topic, body=b"x", keys=["k"]))
    while not (found := await reader.query_messages(scene.topic, "k", begin=0)):
        await asyncio.sleep(POLL_SECONDS)
    day_ms = 86_400_000
    at_ms = found[0].store_timestamp
    assert (
        await reader.query_messages(scene.topic, "k", begin=(at_ms + day_ms) / 1000, end=(at_ms + 2 * day_ms) / 1000)
        == []
    )
    assert (
        len(await reader.query_messages(scene.topic, "k", begin=(at_ms - day_ms) / 1000, end=(at_ms + day_ms) / 1000))
        == 1
    )


async def test_a_message_is_found_by_its_message_id(scene: Scene) -> None:
    """behaviour.md §8.16; remoting.md §7.4."""
    await scene.create_topic()
    producer, reader = await scene.producer(), await scene.reader()
    result = await producer.send(Message(topic=scene.topic, body=b"found"))
    while (one := await reader.view_message(scene.topic, result.msg_id)) is None:
        await asyncio.sleep(POLL_SECONDS)
    assert (one.body, one.msg_id, one.offset_msg_id) == (b"found", result.msg_id, result.offset_msg_id)


async def test_a_message_is_viewed_by_its_offset_message_id(scene: Scene) -> None:
    """behaviour.md §8.16."""
    await scene.create_topic()
    producer, reader = await scene.producer(), await scene.reader()
    result = await producer.send(Message(topic=scene.topic, body=b"viewed"))
    one = await reader.view_message(scene.topic, result.offset_msg_id)
    assert one is not None
    assert (one.body, one.msg_id) == (b"viewed", result.msg_id)
