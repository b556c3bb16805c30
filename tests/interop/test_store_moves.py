"""A store directory moves from our broker to Apache's and back, and every message with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rmqkit import Message, Producer, PullConsumer
from rmqkit.errors import NoRoute
from tests.interop.apache import BROKER_CONF, open_store_with_apache
from tests.interop.kit import ApacheKit
from tests.interop.standalone import run_standalone

TOPIC = "Moving"
COUNT = 300
CONF = {"brokerName": "mover", "brokerClusterName": "MovingCluster", "mappedFileSizeCommitLog": "65536"}


async def send(namesrv: str, mark: str) -> None:
    async with Producer("movers", namesrv) as producer:
        await producer.send(Message(topic=TOPIC, body=b"first", tags=mark))
        await asyncio.gather(
            *(
                producer.send(Message(topic=TOPIC, body=b"%d" % i * (i % 40 + 1), tags=mark, keys=[f"{mark}-{i}"]))
                for i in range(COUNT)
            )
        )


async def read(namesrv: str) -> dict[tuple[int, int], tuple[str, bytes, str | None, tuple[str, ...]]]:
    """Everything in the topic: (queue, offset) → id, body, tag, keys."""
    found: dict[tuple[int, int], tuple[str, bytes, str | None, tuple[str, ...]]] = {}
    async with PullConsumer("reader", namesrv) as consumer:
        async with asyncio.timeout(60):
            while True:
                try:
                    queues = await consumer.queues(TOPIC)
                    break
                except NoRoute:
                    await asyncio.sleep(0.2)
        for queue in queues:
            offset = await consumer.min_offset(queue)
            while offset < await consumer.max_offset(queue):
                result = await consumer.pull(queue, offset)
                for m in result.messages:
                    found[m.queue_id, m.queue_offset] = (m.offset_msg_id, m.body, m.tags, tuple(m.keys))
                offset = result.next_begin_offset
    return found


def test_a_store_goes_to_apache_s_broker_and_comes_back(apache_kit: ApacheKit, tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = tmp_path / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in {**BROKER_CONF, **CONF}.items()))

    with run_standalone(store, tmp_path, "-c", str(config)) as ours:
        asyncio.run(send(ours.namesrv_addr, "ours"))
        written = asyncio.run(read(ours.namesrv_addr))
        ours.stop()
    assert len(written) == COUNT + 1

    with open_store_with_apache(apache_kit, store, tmp_path, CONF) as theirs:
        assert asyncio.run(read(theirs.namesrv_addr)) == written
        asyncio.run(send(theirs.namesrv_addr, "theirs"))
        grown = asyncio.run(read(theirs.namesrv_addr))
        theirs.stop_broker()
    assert len(grown) == 2 * (COUNT + 1)
    assert grown.items() > written.items()

    with run_standalone(store, tmp_path, "-c", str(config)) as ours:
        assert asyncio.run(read(ours.namesrv_addr)) == grown
        asyncio.run(send(ours.namesrv_addr, "again"))
        assert len(asyncio.run(read(ours.namesrv_addr))) == 3 * (COUNT + 1)
        ours.stop()
