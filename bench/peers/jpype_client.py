"""The `pyrocketmq` package, which uses the Java client, under the loads of `rmq bench client`. Prints JSON.

CLASSPATH=FOLDER/* python bench/peers/jpype_client.py NAMESRV PREFIX MESSAGES BODY_BYTES
"""

import itertools
import threading
from typing import Any

import jpype
import jpype.imports
from load import Load, main

jpype.startJVM("-Xmx400m")

from pyrocketmq.client.consumer.consumer import MessageSelector, PushConsumer  # noqa: E402
from pyrocketmq.client.consumer.listener import ConsumeConcurrentlyStatus, MessageListenerConcurrently  # noqa: E402
from pyrocketmq.client.producer import Producer  # noqa: E402
from pyrocketmq.common.common import ConsumeFromWhere  # noqa: E402
from pyrocketmq.common.message import Message  # noqa: E402

BATCH = 300
"""The number of small messages in a batch of 32 KiB, the size at which our client closes a batch."""


class JpypeLoad(Load):
    """Blocking sends, with as many threads as our client has tasks."""

    def __init__(self, namesrv: str) -> None:
        self.namesrv = namesrv
        self.producer = Producer("bench-jpype")
        self.producer.setNamesrvAddr(namesrv)
        self.producer.start()

    def send(self, topic: str, body: bytes) -> None:
        self.producer.send(Message(topic=topic, body=body))

    def send_many(self, topic: str, body: bytes, count: int) -> None:
        for first in range(0, count, BATCH):
            self.producer.send([Message(topic=topic, body=body) for _ in range(min(BATCH, count - first))])

    def consume(self, topic: str, count: int) -> None:
        everything = threading.Event()
        seen = itertools.count(1)

        class Listener(MessageListenerConcurrently):  # type: ignore[misc]
            def _consumeMessage(self, messages: list[Any], context: object) -> Any:  # noqa: N802
                for _ in messages:
                    if next(seen) >= count:
                        everything.set()
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS

        consumer = PushConsumer(f"bench-{topic}")
        consumer.setNamesrvAddr(self.namesrv)
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        consumer.setConsumeMessageBatchMaxSize(32)
        consumer.registerMessageListener(Listener())
        consumer.subscribe(topic, MessageSelector.byTag("*"))
        consumer.start()
        assert everything.wait(120), f"{topic}: not everything was consumed"
        consumer.shutdown()


if __name__ == "__main__":
    main(JpypeLoad)
