"""A broker that is stopped and killed under a hundred gRPC clients, ``make kill T=grpc``: it must lose no answered
message, and the time until it works again is measured.

======================  =============================================================================================
clients                 actions, over ten connections
======================  =============================================================================================
40 producers            send numbered messages, and repeat sends that were not answered
30 simple consumers     of one group: receive and acknowledge
30 push consumers       of another: receive with renewal, acknowledge; one of 50 messages fails the first time
======================  =============================================================================================

All of them have an open Telemetry stream and send heartbeats. In a round the load runs, the broker is stopped (SIGTERM)
or killed (SIGKILL) and started again on its port and store, and the load runs until every client got an answer again.
At the end both groups must have received every answered message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rmqkit.remoting.tasks import Tasks
from tests.faults.grpc_broker import GrpcBroker
from tests.faults.grpc_clients import BEGIN, PRODUCER, PUSH, SIMPLE, Connection, Gone, Member, Refused, begin
from tests.waiting import until

TOPIC = "Load"
GROUPS = {SIMPLE: "G-simple", PUSH: "G-push"}
KINDS = [PRODUCER] * 40 + [SIMPLE] * 30 + [PUSH] * 30
CONNECTIONS = 10
FAILS_ONE_OF = 50
BEAT_SECONDS = 10.0
AGAIN_SECONDS = 0.2
SECONDS_MAX = 200.0


@dataclass
class Round:
    """One restart: seconds from the ready line until each group received a message and until the last client got an
    answer, and seconds without a broker before it."""

    how: str
    away: float = 0.0
    received: dict[str, float] = field(default_factory=dict)
    all_answered: float = 0.0


class Load:
    """The clients and their received messages."""

    def __init__(self, address: str, *, pause_seconds: float, invisible_seconds: int) -> None:
        self._connections = [Connection(address) for _ in range(CONNECTIONS)]
        self._pause_seconds = pause_seconds
        self._invisible_seconds = invisible_seconds
        self._tasks = Tasks()
        self._numbers = 0
        self._is_sending = True
        self.answered: set[int] = set()
        self.again = Counter[str]()
        self.came: dict[str, set[int]] = {group: set() for group in GROUPS.values()}
        self.calls = Counter[str]()
        self.failures = Counter[str]()
        self.silent: set[str] = set()
        self.since: dict[str, float] = {}
        """The time at which a group first received a message after the last `begin_round`."""

    async def start(self) -> None:
        first = self._connections[0].member("first")
        for group in GROUPS.values():
            await begin(first, group, TOPIC, first)
        for number, kind in enumerate(KINDS):
            member = self._connections[number % CONNECTIONS].member(f"client-{number}")
            self.silent.add(member.id)
            work = self._produce if kind == PRODUCER else self._consume
            self._tasks.start(self._listen(member, kind), f"stream of {member.id}")
            self._tasks.start(self._beat(member, kind), f"heartbeats of {member.id}")
            self._tasks.start(work(member, kind), member.id)

    def begin_round(self) -> None:
        """Forget the answers of all clients."""
        self.silent = {f"client-{number}" for number in range(len(KINDS))}
        self.since = {}

    def stop_sending(self) -> None:
        self._is_sending = False

    def missing(self) -> dict[str, int]:
        """Return the number of answered messages that each group has not received."""
        return {group: len(self.answered - came) for group, came in self.came.items()}

    async def close(self) -> None:
        await self._tasks.close()
        for connection in self._connections:
            await connection.close()

    # -- what a client does

    async def _produce(self, member: Member, kind: int) -> None:
        while self._is_sending:
            number, self._numbers = self._numbers, self._numbers + 1
            await self._answered(member, lambda number=number: member.send(TOPIC, b"%d" % number, f"M{number}"))
            self.answered.add(number)
            await asyncio.sleep(self._pause_seconds * random.uniform(0.5, 1.5))

    async def _consume(self, member: Member, kind: int) -> None:
        group = GROUPS[kind]
        how: dict[str, Any] = {"invisible": self._invisible_seconds}
        if kind == PUSH:
            how = {"invisible": None, "renew": True}
        while True:
            messages = await self._answered(member, lambda: member.receive(group, TOPIC, batch_size=8, **how))
            for message in messages:
                if message.body == BEGIN:
                    with suppress(Gone, Refused):
                        await member.ack(group, TOPIC, message)
                    continue
                number = int(message.body)
                is_first = message.system_properties.delivery_attempt == 1
                self.since.setdefault(group, time.monotonic())
                with suppress(Gone, Refused):  # the message is redelivered
                    if kind == PUSH and is_first and number % FAILS_ONE_OF == 0:
                        await member.hide(group, TOPIC, message, 1)
                        continue
                    self.again[group] += number in self.came[group]
                    self.came[group].add(number)
                    await member.ack(group, TOPIC, message)
                    self.calls["acks"] += 1

    async def _listen(self, member: Member, kind: int) -> None:
        """Read a stream, as SDKs do."""
        while True:
            try:
                if kind == PRODUCER:
                    await member.produces(TOPIC)
                else:
                    await member.consumes(GROUPS[kind], TOPIC, kind)
                assert member.talk is not None, "the member's stream is open"
                while True:
                    await member.talk.next()
            except Gone:
                self.calls["streams again"] += 1
            await asyncio.sleep(AGAIN_SECONDS)

    async def _beat(self, member: Member, kind: int) -> None:
        while True:
            with suppress(Gone, Refused):
                await member.beat(GROUPS.get(kind), kind)
            await asyncio.sleep(BEAT_SECONDS)

    async def _answered(self, member: Member, work: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a call until it is answered, and return the answer."""
        while True:
            try:
                answer = await work()
            except (Gone, Refused) as error:
                self.failures[str(error)[:80]] += 1
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            self.silent.discard(member.id)
            self.calls["sends" if answer.__class__.__name__ == "SendResultEntry" else "receives"] += 1
            return answer


@dataclass
class Outcome:
    """The result of a run."""

    rounds: list[Round]
    answered: int
    missing: dict[str, int]
    again: dict[str, int]
    calls: dict[str, int]
    failures: dict[str, int]


async def restart(
    broker: GrpcBroker, ways: list[str], *, pause_seconds: float, invisible_seconds: int, up_seconds: float = 0.0
) -> Outcome:
    """Run a round for each way, ``stop`` or ``kill``, and return the verdict. Raises AssertionError: clients do not
    continue.
    """
    await broker.make({TOPIC: "NORMAL"})
    load = Load(broker.address, pause_seconds=pause_seconds, invisible_seconds=invisible_seconds)
    rounds = []
    try:
        await load.start()
        await _going(load)
        for way in ways:
            await asyncio.sleep(up_seconds * random.random())
            rounds.append(one := Round(way))
            begun = time.monotonic()
            await asyncio.to_thread(broker.stop if way == "stop" else broker.kill)
            await asyncio.to_thread(broker.start)
            ready = time.monotonic()
            load.begin_round()  # not earlier: clients may still read answers of the old process
            one.away = ready - begun
            await _going(load)
            one.all_answered = time.monotonic() - ready
            one.received = {group: at - ready for group, at in load.since.items()}
            print(f"  {json.dumps(asdict(one))}", flush=True)
        load.stop_sending()
        with suppress(AssertionError):
            await until(lambda: not any(load.missing().values()), "everything answered", SECONDS_MAX)
        counts = (dict(one) for one in (load.again, load.calls, load.failures))
        return Outcome(rounds, len(load.answered), load.missing(), *counts)
    finally:
        await load.close()


async def _going(load: Load) -> None:
    """Wait until every client got an answer and every group received a message."""
    await until(lambda: not load.silent and len(load.since) == len(GROUPS), "all clients are answered", SECONDS_MAX)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tests.faults.grpc_restart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="(20)")
    parser.add_argument("--pause-ms", type=float, default=100.0, help="of a producer between two messages (100)")
    parser.add_argument("--up-seconds", type=float, default=5.0, help="how long the broker runs, at the most (5)")
    given = parser.parse_args()

    async def run() -> Outcome:
        with tempfile.TemporaryDirectory(prefix="rmq-grpc-restart-") as folder:
            async with GrpcBroker(Path(folder), {"brokerName": "broker-a"}) as broker:
                ways = [("stop", "kill")[number % 2] for number in range(given.rounds)]
                return await restart(
                    *(broker, ways),
                    pause_seconds=given.pause_ms / 1000,
                    invisible_seconds=10,
                    up_seconds=given.up_seconds,
                )

    print(f"grpc-restart: {given.rounds} rounds, {len(KINDS)} clients", flush=True)
    outcome = asyncio.run(run())
    slowest = max(seconds for one in outcome.rounds for seconds in one.received.values())
    print(json.dumps(asdict(outcome) | {"rounds": len(outcome.rounds), "received_after_seconds_max": slowest}))
    lost = sum(outcome.missing.values())
    print(f"grpc-restart: {lost} LOST" if lost else "grpc-restart: nothing answered was lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
