"""Objects as bodies, and what becomes of one that does not fit: ``python examples/typed_bodies.py [HOST:PORT]``."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel, Field

from rmqkit import Producer, PushConsumer, ReceivedMessage

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"


class Ticket(BaseModel):
    seat: str = Field(pattern=r"\d+[A-F]")
    price: float = Field(gt=0)


async def main() -> None:
    bodies: list[Ticket | bytes] = [Ticket(seat="12A", price=90), b'{"seat": "aisle", "price": 0}']
    gate = PushConsumer("gate", NAME_SERVERS)
    desk = PushConsumer("gate-desk", NAME_SERVERS)
    admitted: asyncio.Queue[Ticket] = asyncio.Queue()
    turned_away: asyncio.Queue[ReceivedMessage] = asyncio.Queue()

    @gate.on("Tickets", body=Ticket)
    async def admit(ticket: Ticket) -> None:
        await admitted.put(ticket)

    @desk.on("%DLQ%gate")
    async def explain(message: ReceivedMessage) -> None:
        await turned_away.put(message)

    async with Producer("box-office", NAME_SERVERS) as producer, gate, desk:
        for body in bodies:
            await producer.send("Tickets", body)
        print("admitted:", await admitted.get())
        print("turned away:", (await turned_away.get()).properties["rmqkit_reason"])


asyncio.run(main())
