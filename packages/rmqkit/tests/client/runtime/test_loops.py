"""The clients on asyncio's own loop and on uvloop's."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import PushConsumerSettings, StartFrom
from rmqkit.protocol.message import Message
from rmqkit.standalone import Standalone
from tests.client.peers import SECONDS, until


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_messages_are_sent_and_received_on_either_loop(tmp_path, new_loop):
    async def main() -> None:
        async with Standalone(tmp_path / "store") as cluster, Producer("PG", cluster.namesrv_address) as producer:
            body = bytes(range(256)) * 512  # more than one read of a socket
            await asyncio.gather(*(producer.send(Message(topic="T", body=body)) for _ in range(10)))
            await producer.send_batch([Message(topic="T", body=b"x")] * 3)
            seen = []
            consumer = PushConsumer(
                "CG", cluster.namesrv_address, settings=PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET)
            )
            consumer.subscribe("T", "*", seen.append)
            async with consumer:
                await until(lambda: len(seen) == 13, "all messages")
            assert sum(message.body == body for message in seen) == 10
            async with PullConsumer("CG", cluster.namesrv_address) as reader:
                assert sum([await reader.committed(queue) or 0 for queue in await reader.queues("T")]) == 13

    async def in_time() -> None:
        async with asyncio.timeout(SECONDS):
            await main()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert type(runner.get_loop()).__module__.partition(".")[0] == new_loop.__module__.partition(".")[0]
        runner.run(in_time())
