"""Replication under kills, ``make kill T=ha``: SIGKILL for master or slave at any instant, and bad links between them.

A SYNC_MASTER with ``inSyncReplicas=2`` and its slave, both SYNC_FLUSH, with senders on the master and readers on both.
In each round the seed chooses the killed brokers, the time, the fault of the links, and the next step:

==========  ==========================================================================================================
who         master, slave, or both; sometimes it is killed again while it starts
link        whole, cut, torn (breaks inside a frame), delayed, slow, half-open; the replication link, or both
healed      before the killed broker restarts, or after
next        at once, or when messages are acknowledged again, which must be soon
==========  ==========================================================================================================

At the end both brokers are killed and checked (`tests.faults.ha.history`): both have every message that a send answered
with SEND_OK, logs and queues are equal, and no offset was ever served with two messages. Then the split histories
follow (`tests.faults.ha.split`). Times are real: a seed repeats the plan, but not the exact timing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rmqkit.client.observe.hooks import SendResult, SendStatus
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import Compressing, ProducerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message
from tests.faults.client.ledger import Acknowledged, Ledger, Place
from tests.faults.ha import split
from tests.faults.ha.history import History, Watch, body_of, verdict
from tests.faults.ha.pair import MASTER, SLAVE, TOPIC, Fault, Pair, store_settings

SENDERS = 12
PAUSE_SECONDS, DOWN_SECONDS = 0.03, 0.3
BATCH_COUNTS = (1, 1, 1, 1, 3, 10)
BOTH = "both"
VICTIMS = {MASTER: 45, SLAVE: 45, BOTH: 10}
FAULTS = {Fault.NONE: 25, Fault.CUT: 15, Fault.TORN: 20, Fault.DELAYED: 15, Fault.SLOW: 10, Fault.HALF_OPEN: 15}
DELAYED_TOPIC, DELAYED_SHARE, DELAY_SECONDS = "Delayed", 0.1, 1.0
"""Delayed messages, which the master writes by itself at their time."""

AGAIN_COUNT = 60
AGAIN_SECONDS = 200.0
SHOWN = 20
SENDING = ProducerSettings(
    retries=0,
    send_timeout_ms=4000,
    compression=Compressing(body_bytes_min=1 << 20),
    route_interval_ms=500,
    heartbeat_interval_ms=1000,
    api_timeout_ms=3000,
)


@dataclass
class Outcome:
    """The result of a run. ``outages``: seconds from a kill until messages were acknowledged again."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    links: Counter[str] = field(default_factory=Counter)
    in_start: int = 0
    acknowledged: int = 0
    in_doubt: Counter[str] = field(default_factory=Counter)
    connections: int = 0
    served: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, int]] = field(default_factory=Counter)
    outages: list[float] = field(default_factory=list)
    log_bytes: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return a table for people."""
        refused = [f"{role} {code}: {count}" for (role, code), count in sorted(self.refused.items())]
        rows = {
            "kills": _counts(self.kills) + f", {self.in_start} of them in a start",
            "links": _counts(self.links) + f"; {self.connections} connections",
            "acknowledged": str(self.acknowledged),
            "in doubt": _counts(self.in_doubt) or "none",
            "served": _counts(self.served) + (f"; refused {', '.join(refused)}" if refused else ""),
            "outage": f"{max(self.outages, default=0):.1f} s at most, {len(self.outages)} looked at",
            "logs": f"{self.log_bytes} bytes each",
            "time": f"{self.seconds:.0f} s",
        }
        lines = [f"  {name:12} {text}" for name, text in rows.items()]
        return "\n".join(lines + [f"  FAILED {fault}" for fault in self.faults[:SHOWN]])


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common())


class Trial:
    """One run over a started pair."""

    def __init__(self, pair: Pair, kills: int, seed: int) -> None:
        self._pair = pair
        self._kills = kills
        self._chance = random.Random(seed)
        self._outcome = Outcome(seed)
        self._ledger = Ledger()
        self._history = History()
        self._watches = {role: Watch(pair, role, self._history) for role in pair.brokers}
        self._numbers = itertools.count()
        self._is_sending = True
        self._begun = time.monotonic()

    async def run(self) -> Outcome:
        """Kill the brokers the given number of times, wait until the logs are equal, stop everything, and check.
        Raises AssertionError: the brokers do not continue."""
        outcome, pair = self._outcome, self._pair
        async with Producer("PG-ha", pair.name_server.address, settings=SENDING) as producer:
            senders = [asyncio.create_task(self._keep_sending(producer)) for _ in range(SENDERS)]
            watches = [asyncio.create_task(watch.run()) for watch in self._watches.values()]
            try:
                await self._acknowledged_again()
                while outcome.kills.total() < self._kills:
                    await self._round()
                await self._acknowledged_again()
                self._is_sending = False
                await asyncio.gather(*senders)
                end = await self._settled()
            finally:
                for task in (*senders, *watches):
                    task.cancel()
                ended = await asyncio.gather(*senders, *watches, return_exceptions=True)
        outcome.faults += [f"{error!r}" for error in ended if isinstance(error, Exception)]
        for role, broker in pair.brokers.items():
            self._look_for_tracebacks(role)
            broker.kill()
        outcome.faults += [f"send raised {error!r}" for error in self._ledger.undocumented]
        outcome.faults += verdict(pair.stores, store_settings(), end, self._ledger, self._history)
        self._sum_up(end)
        return outcome

    async def _settled(self) -> int:
        """Return the end of the logs after all delayed messages are delivered and read."""
        end = -1
        while (found := await self._pair.converge()) != end:
            end = found
            for watch in self._watches.values():
                watch.go_back()
            await asyncio.sleep(2 * DELAY_SECONDS)
        return end

    def _sum_up(self, end: int) -> None:
        outcome = self._outcome
        outcome.acknowledged = len(self._ledger.acknowledged)
        outcome.served, outcome.refused = self._history.counts, self._history.refusals
        outcome.connections = self._pair.replication.connections
        outcome.log_bytes = end
        outcome.seconds = time.monotonic() - self._begun

    # -- who sends

    async def _keep_sending(self, producer: Producer) -> None:
        while self._is_sending:
            numbers = [next(self._numbers) for _ in range(self._chance.choice(BATCH_COUNTS))]
            messages = [Message(topic=TOPIC, body=body_of(n), tags="t", keys=[f"k{n}"]) for n in numbers]
            try:
                if self._chance.random() < DELAYED_SHARE:
                    await producer.send(Message(topic=DELAYED_TOPIC, body=body_of(0), delay_level=1))
                if len(messages) == 1:
                    result = await producer.send(messages[0])
                else:
                    result = await producer.send_batch(messages)
            except RmqError as error:
                self._doubt(numbers, error)
                await asyncio.sleep(DOWN_SECONDS)
            else:
                self._note(numbers, result)
            await asyncio.sleep(PAUSE_SECONDS * self._chance.random())

    def _note(self, numbers: list[int], result: SendResult) -> None:
        """Record a result. Only SEND_OK means that both brokers have the messages; every other answer leaves it
        open.
        """
        if result.status is not SendStatus.SEND_OK:
            name = result.status.name
            self._outcome.in_doubt[name] += len(numbers)
            self._ledger.in_doubt.update((number, RmqError(name)) for number in numbers)
            return
        queue = f"{result.queue.broker_name}/{result.queue.queue_id}"
        for i, (number, msg_id) in enumerate(zip(numbers, result.msg_id.split(","), strict=True)):
            place = Place(queue, result.queue_offset + i)
            self._ledger.acknowledged[number] = Acknowledged(place, msg_id, time.monotonic())

    def _doubt(self, numbers: list[int], error: RmqError) -> None:
        self._outcome.in_doubt[type(error).__name__] += len(numbers)
        for number in numbers:
            self._ledger.failed(number, error)

    # -- kills

    async def _round(self) -> None:
        chance, pair, outcome = self._chance, self._pair, self._outcome
        who = chance.choices(list(VICTIMS), list(VICTIMS.values()))[0]
        fault = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
        links = [pair.replication, pair.normal] if chance.random() < 0.3 else [pair.replication]
        heals_first, goes_on_first = chance.random() < 0.5, chance.random() < 0.75
        for link in links:
            fault.befall(link, chance)
        await asyncio.sleep(chance.choice([0.05, 0.4, 1.5]) * chance.random())
        victims = [MASTER, SLAVE] if who == BOTH else [who]
        chance.shuffle(victims)
        outcome.links[f"{fault.value}{' (all)' * (len(links) > 1)}"] += 1
        for role in victims:
            self._kill(role)
        await asyncio.sleep(chance.choice([0, 0.1, 0.8]) * chance.random())
        if heals_first:
            self._heal()
        for role in victims:
            await self._start(role)
        if not heals_first:
            await asyncio.sleep(chance.choice([0, 0.5]) * chance.random())
            self._heal()
        told = f"{who} killed, {fault.value} link{'s' * (len(links) > 1)}"
        if goes_on_first:
            told += f", acknowledged again after {await self._acknowledged_again():.1f} s"
        self._tell(told)

    def _heal(self) -> None:
        for link in (self._pair.replication, self._pair.normal):
            Fault.NONE.befall(link, self._chance)

    def _kill(self, role: str) -> None:
        self._look_for_tracebacks(role)
        self._pair.brokers[role].kill()
        self._outcome.kills[role] += 1
        for watch in self._watches.values():
            watch.go_back()

    async def _start(self, role: str) -> None:
        """Start a broker, and perhaps kill it while it starts."""
        broker = self._pair.brokers[role]
        if self._chance.random() < 0.15:
            starting = asyncio.create_task(broker.start())
            await asyncio.sleep(0.6 * self._chance.random())
            self._kill(role)
            self._outcome.in_start += 1
            with contextlib.suppress(RuntimeError):  # the broker was killed before it was ready
                await starting
        await broker.start()

    async def _acknowledged_again(self) -> float:
        """Wait for messages that both brokers have. Return the seconds. Raises AssertionError: there are none."""
        begun = time.monotonic()
        goal = len(self._ledger.acknowledged) + AGAIN_COUNT
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_SECONDS):
                while len(self._ledger.acknowledged) < goal:
                    await asyncio.sleep(0.005)
                self._outcome.outages.append(time.monotonic() - begun)
                return self._outcome.outages[-1]
        state = await self._pair.replication_state()
        raise AssertionError(
            f"nothing is acknowledged {AGAIN_SECONDS:g} s after kill {self._outcome.kills.total()}: {state}; "
            f"the slave's log: {self._pair.log_text(SLAVE)[-2000:]}"
        )

    def _look_for_tracebacks(self, role: str) -> None:
        _, found, rest = self._pair.log_text(role).partition("Traceback (most recent call last)")
        if found:
            self._outcome.faults.append(f"{role} logged a traceback: {rest.strip()[:1500]}")

    def _tell(self, text: str) -> None:
        doubt = len(self._ledger.in_doubt)
        print(
            f"  {time.monotonic() - self._begun:5.0f} s  kill {self._outcome.kills.total()}: {text}; "
            f"{len(self._ledger.acknowledged)} acknowledged, {doubt} in doubt",
            flush=True,
        )


async def crash(folder: Path, *, kills: int, seed: int) -> Outcome:
    """Run over a new pair."""
    async with Pair(folder) as pair:
        return await Trial(pair, kills, seed).run()


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.faults.ha.crash", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="(100)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="(random)")
    parser.add_argument("--no-splits", action="store_true", help="without the split histories")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
    print(f"crash-ha: {arguments.kills} kills, seed {arguments.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rmq-crash-ha-"))  # remains if the run fails
    outcome = asyncio.run(crash(folder, kills=arguments.kills, seed=arguments.seed))
    print(f"crash-ha: what happened\n{outcome.table()}", flush=True)
    if not outcome.faults:
        shutil.rmtree(folder)
    faults = len(outcome.faults)
    for one in [] if arguments.no_splits else split.SPLITS:
        with tempfile.TemporaryDirectory(prefix="rmq-split-") as name:
            try:
                told = asyncio.run(split.judge(one, Path(name)))
            except AssertionError as error:
                faults += 1
                told = f"FAILED {error}"
        print(f"  {one.name:32} {told}", flush=True)
    print("crash-ha: one history, nothing acknowledged was lost" if not faults else f"crash-ha: {faults} FAILED")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
