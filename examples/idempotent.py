"""A deposit that is stored twice is booked once: ``python examples/idempotent.py [HOST:PORT of a name server]``."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rmqkit import Message, PushConsumerSettings, SqliteDedupe, sync

NAME_SERVERS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9876"
ONE_BY_ONE = PushConsumerSettings(handlers_max=1)


@dataclass
class Deposit:
    owner: str
    amount: int


def main(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE deposits (owner TEXT, amount INTEGER)")
    deposits, booked = SqliteDedupe(database), threading.Event()
    consumer = sync.PushConsumer("booking", NAME_SERVERS, settings=ONE_BY_ONE)

    @consumer.on("Deposits", body=Deposit, dedupe=deposits)
    def book(deposit: Deposit) -> None:
        deposits.connection.execute("INSERT INTO deposits VALUES (?, ?)", (deposit.owner, deposit.amount))
        if deposit.owner == "bob":
            booked.set()

    with sync.Producer("bank", NAME_SERVERS) as producer:
        (queue, *_) = producer.queues("Deposits")
        first = producer.send("Deposits", Deposit("alice", 100), queue=queue)
        # A producer does this by itself when the answer to a send gets lost: it sends the same message again.
        again = Message(topic="Deposits", body=Deposit("alice", 100), msg_id=first.msg_id)
        ids = {first.msg_id, producer.send(again, queue=queue).msg_id}
        ids.add(producer.send("Deposits", Deposit("bob", 50), queue=queue).msg_id)
        print(f"stored: 3 messages, {4 - len(ids)} with the same id")
    with consumer:  # closing waits for the handler's transaction
        booked.wait()
    with closing(sqlite3.connect(database)) as connection:
        print("booked:", connection.execute("SELECT * FROM deposits").fetchall())


with tempfile.TemporaryDirectory() as folder:
    main(Path(folder) / "bank.db")
