"""An order and its message, both or none: ``python examples/transactions.py [HOST:PORT of a name server]``.

The database is SQLite; the order's row has the message's id, so that `check` finds it when the broker asks later how
the transaction ended, also after a crash in between, also in another process of the group.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys

from rmqkit import (
    Message,
    PushConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"

database = sqlite3.connect(":memory:")
database.execute("CREATE TABLE orders (message_id TEXT PRIMARY KEY, amount INTEGER CHECK (amount > 0))")


async def place_order(message: Message, amount: int) -> TransactionState:
    """The local transaction."""
    try:
        with database:
            database.execute("INSERT INTO orders VALUES (?, ?)", (message.msg_id, amount))
    except sqlite3.IntegrityError as error:
        print(f"order of {amount}: rolled back, {error}")
        return TransactionState.ROLLBACK
    if amount == 3:
        raise ConnectionError("lost, just after the order was placed")  # the broker will ask
    return TransactionState.COMMIT


async def is_placed(message: ReceivedMessage) -> TransactionState:
    """Answer the broker when it does not know the outcome of a transaction."""
    row = database.execute("SELECT amount FROM orders WHERE message_id = ?", (message.msg_id,)).fetchone()
    print(f"asked about an order: {row}")
    return TransactionState.COMMIT if row else TransactionState.ROLLBACK


async def main() -> None:
    shipped: asyncio.Queue[bytes] = asyncio.Queue()
    consumer = PushConsumer("shipping", NAME_SERVERS)

    @consumer.on("PlacedOrders")
    async def ship(message: ReceivedMessage) -> None:
        await shipped.put(message.body)

    shop = TransactionProducer("shop", NAME_SERVERS, execute=place_order, check=is_placed)
    async with shop, consumer:
        for amount in (1, 0, 3):
            result = await shop.send_in_transaction(Message(topic="PlacedOrders", body=b"%d" % amount), amount)
            print(f"order of {amount}: {result.state.name}")
        print("shipped:", *sorted([(await shipped.get()).decode() for _ in range(2)]))


asyncio.run(main())
