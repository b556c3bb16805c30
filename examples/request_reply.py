"""A question and its answer through a topic: ``python examples/request_reply.py [HOST:PORT of a name server]``."""

from __future__ import annotations

import asyncio
import sys

from rmqkit import Producer, PushConsumer, ReceivedMessage, ReplyTimedOut

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
PRICES = {b"apples": b"3", b"pears": b"4"}


async def main() -> None:
    consumer = PushConsumer("price-desk", NAME_SERVERS)
    desk = Producer("price-desk-replies", NAME_SERVERS)

    @consumer.on("Prices")
    async def tell_price(message: ReceivedMessage) -> None:
        if message.body in PRICES:
            await desk.reply(message, PRICES[message.body])

    async with Producer("customers", NAME_SERVERS) as customers, desk, consumer:
        for fruit in PRICES:
            reply = await customers.request("Prices", fruit, timeout=20)
            print(f"{fruit.decode()} cost {reply.body.decode()}")
        try:
            await customers.request("Prices", b"plums", timeout=0.3)
        except ReplyTimedOut as error:
            print(error)


asyncio.run(main())
