"""A store written by a real Apache 5.4.0 broker, opened by `rmq standalone` and read by our own client."""

from __future__ import annotations

import asyncio

import pytest

from rmqkit import PullConsumer
from rmqkit.protocol.schemas.clients import MessageQueue
from rmqkit.rpc import PullStatus
from tests.golden_reading import as_listed, expected_messages, order, simple_queues
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import run_standalone

SYSTEM_TOPICS = {"RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"}


async def check_queue(
    consumer: PullConsumer, queue: MessageQueue, listed: dict[str, object], growing: set[object]
) -> list[dict[str, object]]:
    """Pull a queue from min to max and check its bounds and edges as the manifest lists them.

    What the running broker puts behind that (delayed messages fall due, half messages are asked about) is left out.
    """
    bounds = (listed["minOffset"], listed["maxOffset"])
    is_grown = listed["topic"] in growing and await consumer.max_offset(queue) > bounds[1]
    assert (await consumer.min_offset(queue), bounds[1] if is_grown else await consumer.max_offset(queue)) == bounds
    for expected in (listed[edge] for edge in ("pullAtMax", "pullAtMaxPlus7") if edge in listed and not is_grown):
        result = await consumer.pull(queue, expected["offset"])
        assert (result.status.value, result.next_begin_offset) == (expected["status"], expected["nextBeginOffset"])
    found, offset = [], bounds[0]
    while offset < bounds[1]:
        result = await consumer.pull(queue, offset)
        assert result.status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE)
        assert result.next_begin_offset > offset
        found += [as_listed(message) for message in result.messages if message.queue_offset < bounds[1]]
        offset = result.next_begin_offset
    if "pullError" in listed:  # the 4.9.4 broker had not made this topic's entry yet: it could only tell its bounds
        return []
    assert len(found) == listed["messages"]
    return found


@pytest.fixture(params=["5.4.0", "4.9.4"])
def golden(request, tmp_path) -> GoldenStore:
    return unpack_golden(request.param, tmp_path)


def test_every_message_of_the_manifest_is_pulled_from_min_to_max(golden, tmp_path):
    config = tmp_path / "broker.conf"
    config.write_text(golden.conf)
    queues, expected = simple_queues(golden), expected_messages(golden)
    assert len(expected) > 400
    growing = {message["properties"].get("REAL_TOPIC") for message in expected} | SYSTEM_TOPICS
    found: list[dict[str, object]] = []

    async def pull_all(namesrv: str) -> None:
        async with PullConsumer("audit", namesrv) as consumer:
            for listed in queues:
                queue = MessageQueue(listed["topic"], "broker-golden", listed["queueId"])
                found.extend(await check_queue(consumer, queue, listed, growing))

    with run_standalone(golden.root, tmp_path, "-c", str(config)) as standalone:
        asyncio.run(pull_all(standalone.namesrv_addr))
        standalone.stop()

    assert sorted(found, key=order) == expected
    print(f"{len(found)} messages of {len(queues)} queues, as listed")
