"""The `rocketmq` package, which uses the C++ client, under the loads of `rmq bench client`. Prints JSON.

python bench/peers/cpp_client.py NAMESRV PREFIX MESSAGES BODY_BYTES
"""

import itertools
import threading

from load import Load, main
from rocketmq.client import Message, Producer, PushConsumer

BATCH = 300
"""The number of small messages in a batch of 32 KiB, the size at which our client closes a batch."""


def message(topic: str, body: bytes) -> Message:
    made = Message(topic)
    made.set_body(body)
    return made


class CppLoad(Load):
    """Blocking sends, with as many threads as our client has tasks."""

    def __init__(self, namesrv: str) -> None:
        self.namesrv = namesrv
        self.consumers: list[PushConsumer] = []
        self.producer = Producer("bench-cpp")
        self.producer.set_namesrv_addr(namesrv)
        self.producer.start()

    def send(self, topic: str, body: bytes) -> None:
        self.producer.send_sync(message(topic, body))

    def send_many(self, topic: str, body: bytes, count: int) -> None:
        for first in range(0, count, BATCH):
            self.producer.send_batch([message(topic, body) for _ in range(min(BATCH, count - first))])

    def consume(self, topic: str, count: int) -> None:
        everything = threading.Event()
        seen = itertools.count(1)
        consumer = PushConsumer(f"bench-{topic}")
        consumer.set_namesrv_addr(self.namesrv)

        def handler(received: object) -> None:
            if next(seen) >= count:
                everything.set()

        consumer.subscribe(topic, handler)
        consumer.start()
        self.consumers.append(consumer)  # shutting one down also stops the next one's pulls
        assert everything.wait(60), f"{topic}: not everything was consumed"


if __name__ == "__main__":
    main(CppLoad)
