"""A FastStream application, started and ended by the program: ``python examples/faststream_service.py [HOST:PORT]``.

As a service it is run with ``faststream run faststream_service:app``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from faststream import FastStream
from pydantic import BaseModel

from rmqkit.faststream import RocketBroker, RocketMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 and __name__ == "__main__" else os.environ.get("NAMESRV_ADDR")

# A logger of the program's own in place of FastStream's, which says something of every message.
broker = RocketBroker(NAME_SERVERS or "127.0.0.1:9876", logger=logging.getLogger("shop"))
app = FastStream(broker)


class Order(BaseModel):
    id: int
    items: list[str]


class Bill(BaseModel):
    order: int
    amount: float


@broker.subscriber("StreamOrders", group="stream-billing")
@broker.publisher("StreamBills")
async def bill(order: Order, message: RocketMessage) -> Bill:
    print("billed:", ", ".join(message.raw_message.keys))
    return Bill(order=order.id, amount=20.0 * len(order.items))


@broker.subscriber("StreamBills", group="stream-shipping")
async def ship(bill: Bill) -> None:
    print(f"shipped: order {bill.order} for {bill.amount}")
    app.exit()


@app.after_startup
async def order_something() -> None:
    await broker.publish(Order(id=17, items=["lamp", "book"]), "StreamOrders", keys=["order", "17"])


if __name__ == "__main__":
    asyncio.run(app.run())
