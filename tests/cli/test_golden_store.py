"""A store written by a real Apache 5.4.0 broker, opened by `rmq standalone` and read by our own client."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from rmqkit import PullConsumer
from rmqkit.client.calls import PullStatus
from rmqkit.protocol.bodies.clients import MessageQueue
from rmqkit.protocol.fastjson import loads
from rmqkit.protocol.message import ReceivedMessage
from tests.golden_stores import GoldenStore, unpack_golden
from tests.interop.standalone import run_standalone


def batch_topics(store: Path) -> set[str]:
    """Topics whose queues are BatchConsumeQueues."""
    table = loads((store / "config/topics.json").read_bytes())["topicConfigTable"]
    return {name for name, config in table.items() if config.get("attributes", {}).get("queue.type") == "BatchCQ"}


def as_listed(message: ReceivedMessage) -> dict[str, object]:
    """A message in the words of the manifest."""
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "size": message.store_size,
        "tags": message.tags,
        "msgId": message.msg_id,
        "offsetMsgId": message.offset_msg_id,
        "bodyCRC": message.body_crc,
        "bodyLength": len(message.body),
        "bodySha256": hashlib.sha256(message.body).hexdigest(),
        "sysFlagAfterDecode": message.sys_flag,
        "flag": message.flag,
        "bornTimestamp": message.born_timestamp,
        "storeTimestamp": message.store_timestamp,
        "bornHost": "/" + message.born_host,
        "storeHost": "/" + message.store_host,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        # The Java client adds these two when it pulls; the manifest leaves them out, stored ones included.
        "properties": {k: v for k, v in message.properties.items() if k not in ("MIN_OFFSET", "MAX_OFFSET")},
    }


async def check_queue(
    consumer: PullConsumer, queue: MessageQueue, listed: dict[str, object]
) -> list[dict[str, object]]:
    """Pull a queue from min to max and check its bounds and edges as the manifest lists them."""
    bounds = (await consumer.min_offset(queue), await consumer.max_offset(queue))
    assert bounds == (listed["minOffset"], listed["maxOffset"])
    for expected in (listed[edge] for edge in ("pullAtMax", "pullAtMaxPlus7") if edge in listed):
        result = await consumer.pull(queue, expected["offset"])
        assert (result.status.value, result.next_begin_offset) == (expected["status"], expected["nextBeginOffset"])
    found, offset = [], bounds[0]
    while offset < bounds[1]:
        result = await consumer.pull(queue, offset)
        assert result.status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE)
        assert result.next_begin_offset > offset
        found += [as_listed(message) for message in result.messages]
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
    config.write_text("".join(f"{key}={value}\n" for key, value in golden.manifest["brokerConf"].items()))
    left_out = batch_topics(golden.root)
    queues = [queue for queue in golden.manifest["queues"] if queue["topic"] not in left_out]
    expected = [message for message in golden.manifest["messages"] if message["topic"] not in left_out]
    assert len(expected) > 400
    found: list[dict[str, object]] = []

    async def pull_all(namesrv: str) -> None:
        async with PullConsumer("audit", namesrv) as consumer:
            for listed in queues:
                queue = MessageQueue(listed["topic"], "broker-golden", listed["queueId"])
                found.extend(await check_queue(consumer, queue, listed))

    with run_standalone(golden.root, tmp_path, "-c", str(config)) as standalone:
        asyncio.run(pull_all(standalone.namesrv_addr))
        standalone.stop()

    def order(message: dict[str, object]) -> tuple[object, ...]:
        return message["topic"], message["queueId"], message["queueOffset"]

    wanted = [{key: message.get(key) for key in found[0]} for message in sorted(expected, key=order)]
    for message in wanted:
        message["sysFlagAfterDecode"] &= ~1  # a 4.9 client leaves the compressed bit set
    assert sorted(found, key=order) == wanted
    print(f"{len(found)} messages of {len(queues)} queues, as listed")
