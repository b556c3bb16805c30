"""SIGKILL during pops and acks: no message is lost, and an unacknowledged one is redelivered when its time expires."""

from __future__ import annotations

import asyncio
import random

from tests.broker.pops import Client, ack, now_ms, pop
from tests.interop.standalone import run_standalone

KILLS = 2
SENT = 100
INVISIBLE_MS = 500


class Ledger:
    """The last pop time of each message, the acknowledged messages, and those acknowledged in time."""

    def __init__(self):
        self.popped = {}
        self.acked = set()
        self.settled = set()

    async def work(self, client, choices, steps):
        """Pop and acknowledge some messages, until all are acknowledged or the steps are used up."""
        while len(self.acked) < SENT and steps:
            steps -= 1
            found = await pop(client, max_msg_nums=8, invisible_time=INVISIBLE_MS, poll_time=2000)
            for body in found.handles:
                earliest = self.popped.get(body, -INVISIBLE_MS) + INVISIBLE_MS
                assert found.header.pop_time >= earliest, f"{body} came {earliest - found.header.pop_time} ms early"
                assert body not in self.settled, f"{body} was acknowledged before it was due"
                self.popped[body] = found.header.pop_time
            chosen = [body for body in found.handles if choices.random() < 0.75]
            answers = await asyncio.gather(*(ack(client, found.handles[body]) for body in chosen))
            assert {answer.code for answer in answers} <= {0}
            self.acked.update(chosen)
            if now_ms() < found.header.pop_time + INVISIBLE_MS:
                self.settled.update(chosen)


def test_nothing_popped_is_lost_or_comes_early(tmp_path):
    choices, ledger = random.Random(11), Ledger()

    async def run(running, steps):
        client = Client(running.broker_addr)
        if not ledger.popped:
            for number in range(SENT):
                await client.send(b"%d" % number)
        async with asyncio.timeout(150):
            await ledger.work(client, choices, steps)
        await client.client.close()

    for _ in range(KILLS):
        with run_standalone(tmp_path / "store", tmp_path) as running:
            asyncio.run(run(running, choices.randrange(5, 9)))
            running.process.kill()
    with run_standalone(tmp_path / "store", tmp_path) as running:
        asyncio.run(run(running, 10_000))
        running.stop()
    assert ledger.acked == {str(number) for number in range(SENT)}
