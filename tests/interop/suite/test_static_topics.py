"""Static topics, whose queues are numbered over all brokers. Source: behaviour.md §7.2; remoting.md §4.6.2."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit import Message, MessageQueue, SendFailed
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import Command, decode_fields
from rmqkit.protocol.fastjson import loads
from tests.interop.static_topics import creation
from tests.interop.suite.consuming import SECONDS
from tests.interop.suite.scene import POLL_SECONDS, Scene

GLOBAL = "__syslo__global__"


async def static_topic(scene: Scene) -> list[MessageQueue]:
    """Create the scene's topic as a static one, and wait until the name server shows its mapping."""
    await scene.ask_broker(creation(scene.topic, scene.broker_name))
    async with asyncio.timeout(SECONDS):
        while not ((route := await scene.route(scene.topic)) and route.topic_queue_mapping_by_broker):
            await asyncio.sleep(POLL_SECONDS)
    return [MessageQueue(scene.topic, GLOBAL, number) for number in range(8)]


async def test_messages_are_sent_to_and_read_from_queues_by_their_numbers_in_the_topic(scene: Scene) -> None:
    """behaviour.md §7.2, remoting.md §4.6.2: clients know queues by their numbers over all brokers."""
    queues = await static_topic(scene)
    producer = await scene.producer()
    assert await producer.queues(scene.topic) == queues
    for number in (5, 3):
        for offset in range(2):
            result = await producer.send(Message(topic=scene.topic, body=b"%d" % number), queue=queues[number])
            assert (result.queue, result.queue_offset) == (queues[number], offset)
    batch = await producer.send_batch([Message(topic=scene.topic, body=b"5")] * 2, queue=queues[5])
    assert (batch.queue, batch.queue_offset) == (queues[5], 2)
    with pytest.raises(SendFailed, match="no route names its master"):
        await producer.send(Message(topic=scene.topic, body=b"x"), queue=queues[4])
    consumer = scene.push_consumer()
    seen: list[tuple[int, int, bytes]] = []
    everything = asyncio.Event()

    @consumer.on(scene.topic)
    async def handle(message) -> None:  # type: ignore[no-untyped-def]
        seen.append((message.queue_id, message.queue_offset, message.body))
        if len(seen) == 6:
            everything.set()

    await consumer.start()
    async with asyncio.timeout(SECONDS):
        await everything.wait()
    assert sorted(seen) == [(number, i, b"%d" % number) for number, count in ((3, 2), (5, 4)) for i in range(count)]
    reader = await scene.reader()
    assert [await reader.max_offset(queues[number]) for number in (3, 5)] == [2, 4]
    assert [await reader.min_offset(queues[number]) for number in (3, 5)] == [0, 0]


async def test_the_broker_answers_for_its_own_queues_only(scene: Scene) -> None:
    """remoting.md §4.6.2: a queue that is elsewhere is answered 501."""
    await static_topic(scene)
    group = {"consumerGroup": scene.group}
    pull = {"queueOffset": 0, "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0}
    told = []
    for number in ("5", "4"):
        for code, fields in (
            (RequestCode.PULL_MESSAGE, {**group, **pull, "subVersion": 0, "subscription": "*"}),
            (RequestCode.UPDATE_CONSUMER_OFFSET, {**group, "commitOffset": "7"}),
            (RequestCode.QUERY_CONSUMER_OFFSET, group),
            (RequestCode.GET_MAX_OFFSET, {}),
            (RequestCode.GET_MIN_OFFSET, {}),
            (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"timestamp": "0"}),
        ):
            texts = {name: str(value) for name, value in fields.items()}
            command = Command(code, fields={"topic": scene.topic, "queueId": number, **texts})
            answer = await scene.ask_anyway(command)
            told.append((answer.code, answer.remark or "", decode_fields(answer).get("offset")))
    where = f"{scene.topic}-4 does not exit in request process of current broker {scene.broker_name}"
    no_item = f"{scene.topic}-4 cannot find mapping item in request process of current broker {scene.broker_name}"
    assert told[0][0] == ResponseCode.PULL_NOT_FOUND
    assert told[1:6] == [(0, "", None), (0, "", "7"), *[(0, "", "0")] * 3]
    assert told[6:] == [
        (501, no_item, None),
        *[(501, where, None)] * 3,
        (501, f"{scene.topic}-4 is not leader in broker {scene.broker_name}, request code 31", None),
        (501, where, None),
    ]


async def test_a_mapping_is_shown_and_gives_way_to_newer_ones_only(scene: Scene) -> None:
    """remoting.md §4.6.2: request 513 looks at epoch and scope, 351 shows the mapping."""
    await static_topic(scene)

    async def refused(**changes: object) -> tuple[int, str | None]:
        answer = await scene.ask_anyway(creation(scene.topic, scene.broker_name, **changes))
        return answer.code, answer.remark

    assert await refused(epoch=999) == (1, "Can't accept data with small epoch 999 < 1000")
    other = "Can't accept data with unmatched scope other != __global__"
    assert await refused(epoch=1001, scope="other") == (1, other)
    show = Command(RequestCode.GET_TOPIC_CONFIG, fields={"topic": scene.topic, "lo": "true"})
    shown = loads((await scene.ask_broker(show)).payload)["mappingDetail"]
    assert (shown["bname"], shown["epoch"], shown["currIdMap"]) == (scene.broker_name, 1000, {"5": 0, "3": 1})
    assert [item["queueId"] for item in (*shown["hostedQueues"]["5"], *shown["hostedQueues"]["3"])] == [0, 1]
