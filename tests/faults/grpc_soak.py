"""gRPC clients that connect and leave, ``make soak T=grpc``: every message must be delivered, and the endpoint must
forget the clients.

Twenty visits run at once, each with a new client id, every fourth over a new connection:

==================  =================================================================================================
visitor             actions
==================  =================================================================================================
producer            sends plain, ordered and delayed messages; recalls some of the delayed ones
transaction         half messages: commits, rolls back, or leaves; another producer commits when asked
simple consumer     receives; acknowledges, some later by a new handle, some twice, some never
push consumer       receives with renewal; acknowledges, or returns messages; leaves with some of them
ordered consumer    receives in order
odd one             requests what does not exist, and sends invalid messages
==================  =================================================================================================

They send a goodbye, close their stream, or just stop calling. Then every sent message must be delivered. Two minutes
after the last call every table must be as small as after the first visits (`tests.faults.grpc_tables`), and the
broker's memory must be flat (`tests.faults.client.growth`). The test makes the same visits in virtual time, without a
port. A line of JSON is printed every minute.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmqkit.clock import SYSTEM_CLOCK
from tests.faults.client.growth import Growth, Sample, judge, process_figures
from tests.faults.grpc_broker import GrpcBroker
from tests.faults.grpc_clients import (
    BEGIN,
    COMMIT,
    DELAY,
    FIFO,
    FROM_CHECK,
    PRODUCER,
    PUSH,
    ROLLBACK,
    SIMPLE,
    TRANSACTION,
    Connection,
    Gone,
    Member,
    Refused,
    begin,
)

PLAIN, ORDERED, DELAYED, DECIDED = "SoakPlain", "SoakOrdered", "SoakDelayed", "SoakDecided"
TOPICS = {PLAIN: "NORMAL", ORDERED: "FIFO", DELAYED: "DELAY", DECIDED: "TRANSACTION"}
GROUPS: dict[str, tuple[str, int]] = {
    "G-simple": (PLAIN, SIMPLE),
    "G-push": (PLAIN, PUSH),
    "G-ordered": (ORDERED, PUSH),
    "G-delayed": (DELAYED, SIMPLE),
    "G-decided": (DECIDED, PUSH),
}
IN_ORDER = "G-ordered"
KINDS = ["producer", "transaction", *GROUPS, "producer", "odd", "G-simple", "G-push"]
PLACES = 20
SILENT_SECONDS = 140.0
"""The time after which the endpoint forgets a client, plus the next sweep."""
DRAIN_SECONDS = 300.0
NAMES_MORE_MAX = 12
CONF = {
    "brokerName": "broker-a",
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 2000,
    "transactionCheckMax": 1000,  # the producer that is asked may have left without a goodbye
    "transactionOpBatchInterval": 500,
    "recallMessageEnable": "true",
}
MIB_PER_HOUR_MAX, MIB_NOTICED = 8.0, 4.0
WARM_UP_SECONDS, WARM_UP_SHARE_MAX = 300.0, 0.4
SAMPLE_SECONDS = 2.0
FIRST_SECONDS = 20.0
"""The duration of the visits before the first measurement of the tables."""
TOLD = {
    "clients": "Clients._clients",
    "renewed_of": "Renewals._held",
    "held_receives": "PopLongPolling._waiting",
    "open_transactions": "Sending._halves",
    "ended_transactions": "Sending._ended",
    "pops_in_flight": "CheckPointStore._table",
    "tasks": "tasks",
}
"""The tables that are printed every minute."""

Connect = Callable[[str, bool], tuple[Member, Callable[[], Awaitable[None]]]]
"""Returns a client with an id, perhaps with a new connection, and a function that closes it."""


class Visits:
    """The visits, and the messages that still must be delivered.

    Attributes:
        missing: numbers that were sent but not acknowledged, by group.
    """

    def __init__(self, connect: Connect, chance: random.Random, *, pause_seconds: float) -> None:
        self._connect = connect
        self._chance = chance
        self._pause_seconds = pause_seconds
        self._numbers = self._visits = 0
        self._is_over = False
        self.counts = Counter[str]()
        self.errors = Counter[str]()
        self.missing: defaultdict[str, set[int]] = defaultdict(set)

    async def prepare(self) -> None:
        """Start the groups at their present offsets. The topics and groups exist."""
        for group, (topic, _) in GROUPS.items():
            first, close = self._new()
            sender = _Sender(first, topic)
            await begin(first, group, topic, sender)  # type: ignore[arg-type]
            await first.leave(group)
            await close()

    async def run(self, seconds: float) -> None:
        """Run visits for some time, and wait until all visitors have left."""
        self._is_over = False
        async with asyncio.TaskGroup() as tasks:
            for _ in range(PLACES):
                tasks.create_task(self._place(), name="soak place")
            await asyncio.sleep(seconds)
            self._is_over = True

    async def drain(self) -> None:
        """Receive all remaining messages that arrive in time."""
        workers = [asyncio.create_task(self._take_all(group), name="soak drain") for group in GROUPS]
        answering = asyncio.create_task(self._answer_all(), name="soak drain")
        await asyncio.wait(workers, timeout=DRAIN_SECONDS)
        for worker in (answering, *workers):
            worker.cancel()
        await asyncio.gather(answering, *workers, return_exceptions=True)

    def lost(self) -> dict[str, list[int]]:
        """Return the first numbers that did not arrive, by group."""
        return {group: sorted(numbers)[:5] for group, numbers in self.missing.items() if numbers}

    # -- visits

    def _new(self, *, is_own: bool = False) -> tuple[Member, Callable[[], Awaitable[None]]]:
        self._visits += 1
        return self._connect(f"visitor-{self._visits}", is_own)

    async def _place(self) -> None:
        while not self._is_over:
            number = self._visits
            member, close = self._new(is_own=number % 4 == 0)
            kind = KINDS[number % len(KINDS)]
            work: Callable[[Member], Coroutine[Any, Any, None]]
            match kind:
                case "producer":
                    work = self._produce
                case "transaction":
                    work = self._decide
                case "odd":
                    work = self._be_odd
                case group:
                    work = lambda member, group=group: self._consume(member, group)  # noqa: E731
            try:
                await work(member)
                self.counts["visits"] += 1
            except (Gone, Refused) as error:
                self.errors[f"{kind}: {error}"[:100]] += 1
            finally:
                member.cut()
                await close()

    async def _produce(self, member: Member) -> None:
        await member.produces(PLAIN, ORDERED, DELAYED)
        for _ in range(self._chance.randrange(3, 15)):
            match self._chance.randrange(10):
                case 0 | 1:
                    await self._send(member, ORDERED, message_type=FIFO, message_group=f"{self._chance.randrange(8)}")
                case 2 | 3:
                    due = SYSTEM_CLOCK.now_ms() // 1000 + self._chance.randrange(2, 9)
                    number, sent = await self._send(
                        member, DELAYED, message_type=DELAY, delivery_timestamp={"seconds": due}
                    )
                    if sent.recall_handle and self._chance.random() < 0.3:
                        with suppress(Refused):  # on a busy machine the message may be due already, and is delivered
                            await member.ask("RecallMessage", topic={"name": DELAYED}, recall_handle=sent.recall_handle)
                            self.missing["G-delayed"].discard(number)
                            self.counts["recalled"] += 1
                case _:
                    await self._send(member, PLAIN, tag=self._chance.choice("ab"), keys=["k"])
            await self._pause()
        await member.beat(None, PRODUCER)
        await self._go(member, None)

    async def _decide(self, member: Member) -> None:
        await member.produces(DECIDED)
        for resolution in (COMMIT, ROLLBACK, None):
            number, _ = await self._send(member, DECIDED, message_type=TRANSACTION)
            if resolution == ROLLBACK:
                self.missing["G-decided"].discard(number)
            if resolution is not None:
                await member.end(DECIDED, f"M{number}", resolution)
                self.counts["ended"] += 1
            await self._pause()
        if self._chance.random() < 0.5:
            await self._answer(member)
        await self._go(member, None)

    async def _answer(self, member: Member) -> None:
        """Commit the half messages that the broker checks, until none arrives for a while."""
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(4):  # two check intervals
                    asked = await member.orphan()
                with suppress(Refused):  # the half message is checked twice, or another visitor ended it
                    await member.end(DECIDED, asked.transaction_id, COMMIT, FROM_CHECK)
                    self.counts["answered"] += 1

    async def _consume(self, member: Member, group: str) -> None:
        topic, kind = GROUPS[group]
        await member.consumes(group, topic, kind)
        for _ in range(self._chance.randrange(2, 8)):
            await member.beat(group, kind)
            for message in await member.receive(group, topic, **_how(group)):
                self.counts["received"] += 1
                match self._chance.randrange(20):
                    case 0:
                        continue  # another visitor gets it later
                    case 1:
                        await member.hide(group, topic, message, 0)
                        self.counts["hidden"] += 1
                    case 2:
                        await member.hide(group, topic, message, 10)
                        await self._ack(member, group, message)
                    case 3 if group != IN_ORDER:
                        await self._ack(member, group, message)
                        with suppress(Refused):
                            await member.ack(group, topic, message)
                    case _:
                        await self._ack(member, group, message)
                await self._pause()
        if self._chance.random() < 0.3:  # the visitor cancels the receive
            receiving = asyncio.create_task(member.receive(group, topic, **_how(group)), name="soak receive")
            await self._pause()
            receiving.cancel()
            await asyncio.wait([receiving])
        await self._go(member, group)

    async def _be_odd(self, member: Member) -> None:
        endpoints = {"scheme": 1, "addresses": [{"host": "127.0.0.1", "port": 8081}]}
        await member.ask("QueryRoute", topic={"name": PLAIN}, endpoints=endpoints)
        await member.ask("QueryAssignment", topic={"name": PLAIN}, group={"name": "G-push"}, endpoints=endpoints)
        for work in (
            member.ask("QueryRoute", topic={"name": "nowhere"}, endpoints=endpoints),
            member.send("nowhere", b"x", "M-odd"),
            member.send(PLAIN, b"x", "M-odd", message_type=TRANSACTION),
            member.end(DECIDED, "nobody's", COMMIT),
            member.receive("G-odd", "nowhere"),
            member.ask("AckMessage", topic={"name": PLAIN}, group={"name": "G-push"}, entries=[{"message_id": "x"}]),
            member.beat(None, PRODUCER),
        ):
            with suppress(Refused):
                await work
                raise AssertionError("it was answered as if it could be")
        await member.beat("G-push", PUSH)
        with suppress(Gone, TimeoutError):
            async with asyncio.timeout(5):
                await member.produces("a b")
                raise AssertionError("a name that cannot be")
        self.counts["odd"] += 1

    async def _go(self, member: Member, group: str | None) -> None:
        match self._chance.randrange(3):
            case 0:
                await member.leave(group)
            case 1:
                member.cut()
            case _:
                pass  # the visitor sends nothing; its stream closes with the visit

    # -- used by all visits

    async def _send(self, member: Member, topic: str, **more: Any) -> tuple[int, Any]:
        number, self._numbers = self._numbers, self._numbers + 1
        groups = [group for group, (wanted, _) in GROUPS.items() if wanted == topic]
        for group in groups:  # a receiver may acknowledge the message before its sender gets the answer
            self.missing[group].add(number)
        try:
            sent = await member.send(topic, b"%d " % number + bytes(100), f"M{number}", **more)
        except (Gone, Refused):
            for group in groups:
                self.missing[group].discard(number)
            raise
        self.counts["sent"] += 1
        return number, sent

    async def _ack(self, member: Member, group: str, message: Any) -> None:
        await member.ack(group, GROUPS[group][0], message)
        self.counts["acknowledged"] += 1
        if not message.body.startswith(BEGIN):
            self.missing[group].discard(int(message.body.split()[0]))

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_seconds * self._chance.uniform(0.5, 1.5))

    async def _take_all(self, group: str) -> None:
        topic, kind = GROUPS[group]
        member, close = self._new()
        await member.consumes(group, topic, kind)
        while self.missing[group]:
            for message in await member.receive(group, topic, **_how(group)):
                await self._ack(member, group, message)
            await member.beat(group, kind)
        await member.leave(group)
        await close()

    async def _answer_all(self) -> None:
        member, close = self._new()
        try:
            await member.produces(DECIDED)
            while True:
                await self._answer(member)
                await member.beat(None, PRODUCER)
        finally:
            member.cut()
            await close()


class _Sender:
    """A sender of the messages that a topic accepts."""

    def __init__(self, member: Member, topic: str) -> None:
        self._member = member
        self._topic = topic

    async def send(self, topic: str, body: bytes, message_id: str) -> None:
        match self._topic:
            case "SoakOrdered":
                await self._member.send(topic, body, message_id, message_group="0")
            case "SoakDelayed":
                await self._member.send(topic, body, message_id, delivery_timestamp={"seconds": 1})
            case "SoakDecided":
                await self._member.send(topic, body, message_id, message_type=TRANSACTION)
                await self._member.end(topic, message_id, COMMIT)
            case _:
                await self._member.send(topic, body, message_id)


def _how(group: str) -> dict[str, Any]:
    if GROUPS[group][1] == PUSH:
        return {"invisible": None, "renew": True, "batch_size": 8}
    return {"invisible": 10, "batch_size": 8}


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the tables that have grown by more entries than the retry topics that some groups created late."""
    pairs = {name: (before.get(name, 0), count) for name, count in sorted(after.items())}
    return {name: (old, new) for name, (old, new) in pairs.items() if new > old + NAMES_MORE_MAX}


@dataclass
class Outcome:
    """The result of a run. ``grown``: tables with their entries before and after. ``missing``: by group."""

    minutes: float
    counts: dict[str, int]
    errors: dict[str, int]
    missing: dict[str, int]
    grown: dict[str, tuple[int, int]]
    after: dict[str, int]
    growth: list[Growth]

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        told = [f"{count} messages lost for {group}" for group, count in self.missing.items() if count]
        told += [f"{name} had {old} entries and has {new}" for name, (old, new) in self.grown.items()]
        told += [str(one) for one in self.growth if not one.is_flat]
        return told + [f"{count} times {error}" for error, count in self.errors.items()]


class Soak:
    """One run against a broker process."""

    def __init__(self, broker: GrpcBroker, minutes: float, pause_seconds: float, seed: int) -> None:
        self._broker = broker
        self._minutes = minutes
        self._shared = [Connection(broker.address) for _ in range(4)]
        self._visits = Visits(self._connect, random.Random(seed), pause_seconds=pause_seconds)
        self._series: defaultdict[str, list[Sample]] = defaultdict(list)
        self._begun = time.monotonic()

    async def run(self) -> Outcome:
        """Warm up, run the visits, drain."""
        await self._broker.make(TOPICS, {group: {"consume_message_orderly": group == IN_ORDER} for group in GROUPS})
        await self._visits.prepare()
        await self._visits.run(min(FIRST_SECONDS, self._minutes * 60 / 4))
        before = await self._emptied()
        print(
            json.dumps({"first": self._visits.counts, "errors": self._visits.errors, "lost": self._visits.lost()}),
            flush=True,
        )
        self._begun = time.monotonic()
        told = asyncio.create_task(self._tell())
        await self._visits.run(self._minutes * 60)
        told.cancel()
        await asyncio.wait([told])
        after = await self._emptied()
        for connection in self._shared:
            await connection.close()
        warm_up = min(WARM_UP_SECONDS, self._minutes * 60 * WARM_UP_SHARE_MAX)
        limits = {"warm_up_seconds": warm_up, "per_hour_max": MIB_PER_HOUR_MAX, "noticed": MIB_NOTICED}
        return Outcome(
            minutes=self._minutes,
            counts=dict(self._visits.counts),
            errors=dict(self._visits.errors),
            missing={group: len(numbers) for group, numbers in self._visits.missing.items()},
            grown=grown(before, after),
            after={name: after.get(table, 0) for name, table in TOLD.items()},
            growth=[judge(name, samples, **limits) for name, samples in self._series.items()],
        )

    def _connect(self, name: str, is_own: bool) -> tuple[Member, Callable[[], Awaitable[None]]]:
        if is_own:
            own = Connection(self._broker.address)
            return own.member(name), own.close
        return random.choice(self._shared).member(name), _leave_open

    async def _emptied(self) -> dict[str, int]:
        """Return the tables after all messages arrived and no client has called for long."""
        await self._visits.drain()
        await asyncio.sleep(SILENT_SECONDS)
        return await asyncio.to_thread(self._broker.sizes)

    async def _tell(self) -> None:
        minute = 0
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            # Channels and their calls are reference cycles. A closed channel holds its connection until the garbage
            # collector runs, and the broker has to hold the other end, about 60 KiB, for 120 s.
            gc.collect()
            seconds = time.monotonic() - self._begun
            figures = process_figures(self._broker.pid)
            figures.pop("mapped_mib")  # the broker's store
            for name, value in figures.items():
                self._series[name].append((seconds, value))
            if seconds >= 60 * (minute + 1):
                minute += 1
                tables = await asyncio.to_thread(self._broker.sizes)
                line: dict[str, Any] = {"minute": minute} | {name: round(value, 1) for name, value in figures.items()}
                line |= {name: tables.get(table, 0) for name, table in TOLD.items()}
                line |= self._visits.counts | {"errors": self._visits.errors.total()}
                print(json.dumps(line), flush=True)


async def _leave_open() -> None:
    """Do nothing: other visits use the connection too."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.faults.grpc_soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="(60)")
    parser.add_argument("--pause-ms", type=float, default=100.0, help="of a visitor between two calls (100)")
    parser.add_argument("--seed", type=int, default=4, help="of what visitors choose (4)")
    given = parser.parse_args()

    async def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix="rmq-grpc-soak-") as folder:
            async with GrpcBroker(Path(folder), CONF) as broker:
                return await Soak(broker, given.minutes, given.pause_ms / 1000, given.seed).run()

    print(f"grpc-soak: {given.minutes:g} minutes, {PLACES} visitors at a time", flush=True)
    outcome = asyncio.run(run())
    print(json.dumps(asdict(outcome) | {"faults": outcome.faults}))
    for one in outcome.growth:
        print(f"  {one}")
    for fault in outcome.faults:
        print(f"  FAILED {fault}")
    print("grpc-soak: everything came, nothing grows" if not outcome.faults else "grpc-soak: FAILED")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
