"""A rebalance storm: 20 members of one group, in a few processes, join and leave without end; processes are killed.

``python -m tests.faults.client.storm --seconds 120`` is the long form, with our servers or, with ``--namesrv``, any
others. The seed determines the times of joining and leaving, but not the state of the group at these times.

A queue that changes hands is not consumed for 500 ms, with our clients as with Java's. A queue that moved twice a
second would never be consumed. So members stay long enough for two or three changes a second, each of which moves some
of the queues. Ordered queues need no pause, because their locks show when they are free. But the locks of a killed
process last for 60 s, so ordered storms have no kills.

A member's process (``--member``) is started with the address, and prints one line per event::

    join|leave|refused <member>
    got <member> <number> <queue> <offset> <time> <times it was sent back>
    left <what outlived the members>
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import ProducerSettings, Pulling, PushConsumerSettings, StartFrom
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.client.peers import until
from tests.faults.client.ledger import Arrival, Ledger, Place, Stall, arrival_of
from tests.faults.client.servers import Servers
from tests.patience import TIMEOUT_MS

TOPIC, GROUP = "Storm", "CG-storm"
QUEUES = 16
CONF = f"defaultTopicQueueNums={QUEUES}\nflushConsumerOffsetInterval=500\n"
PROCESSES, MEMBERS_EACH = 4, 5
HERE_SECONDS, AWAY_SECONDS = (6.0, 24.0), (0.5, 2.0)
REBALANCE_SECONDS = 4.0
STALL_SECONDS_MAX = 2 * REBALANCE_SECONDS
CHANGES_MIN = 10
SETTLE_SECONDS = 150.0
UNSAVED_SECONDS_MAX = 6.0
JUDGED = PushConsumerSettings(
    rebalance_interval_ms=int(REBALANCE_SECONDS * 1000),
    heartbeat_interval_ms=1000,
    persist_interval_ms=300,
    pull=Pulling(error_pause_ms=200),
    start_from=StartFrom.FIRST_OFFSET,
    drain_ms=5000,
    api_timeout_ms=15_000,
)


@dataclass
class Outcome:
    """The result of a storm."""

    acknowledged: int
    in_doubt: int
    changes: int
    kills: int
    lost: set[int]
    strangers: set[int]
    duplicates: dict[str, int]
    oldest_taken_over: float
    order_broken: list[str]
    stalls: dict[str, Stall]
    left: list[str]
    begun: float

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        told = [f"left behind: {one}" for one in self.left] + self.order_broken
        if self.lost:
            told.append(f"{len(self.lost)} lost: {sorted(self.lost)[:10]}")
        if self.strangers:
            told.append(f"never sent: {sorted(self.strangers)[:10]}")
        if self.duplicates.get("unexplained"):
            told.append(f"duplicates without explanation: {self.duplicates}")
        if self.oldest_taken_over > UNSAVED_SECONDS_MAX:
            told.append(f"consumed again {self.oldest_taken_over:.2f} s after it was consumed and should be saved")
        for queue, stall in self.stalls.items():
            if stall.seconds > STALL_SECONDS_MAX:
                when = stall.until - self.begun
                told.append(f"{queue} stood still for {stall.seconds:.2f} s until {when:.2f} s after the begin")
        return told

    def __str__(self) -> str:
        return (
            f"{self.acknowledged} sent, {self.in_doubt} in doubt, {self.changes} joined or left, {self.kills} processes"
            f" killed, lost {len(self.lost)}, again {self.duplicates} (oldest after {self.oldest_taken_over:.2f} s), "
            f"longest stall {max(self.stalls.values()).seconds:.2f} s"
        )


class Storm:
    """One run, in which ``kills`` processes are killed at random times."""

    def __init__(
        self,
        namesrv: str,
        *,
        seconds: float,
        seed: int,
        rate: int,
        kills: int,
        is_ordered: bool,
        processes: int = PROCESSES,
    ) -> None:
        self._namesrv = namesrv
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._rate = rate
        self._kills = kills
        self._processes = processes
        self._is_ordered = is_ordered
        self._ledger = Ledger()
        self._events: Counter[str] = Counter()
        self._left: list[str] = []
        self._names = itertools.count()
        self._members: list[asyncio.subprocess.Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._is_sending = True
        self._begun = time.monotonic()

    async def run(self) -> Outcome:
        """Run the storm, then let one remaining member consume the other messages."""
        settings = ProducerSettings(template_queue_count=QUEUES, send_timeout_ms=TIMEOUT_MS, try_timeout_ms=-1)
        async with Producer("PG-storm", self._namesrv, settings=settings) as producer:
            await producer.send(Message(topic=TOPIC, body=b"0"))  # this send creates the topic
            sender = asyncio.create_task(asyncio.sleep(0))
            try:
                for _ in range(self._processes):
                    await self._start_process()
                await until(lambda: self._events["join"] >= self._processes, "the first members", SETTLE_SECONDS)
                sender = asyncio.create_task(self._keep_sending(producer))
                await self._rage()
                async with self._last_member():
                    await self._end_processes()
                    self._is_sending = False
                    await sender
                    with contextlib.suppress(AssertionError):  # the outcome names the missing messages
                        await until(lambda: not self._ledger.lost(GROUP), "everything", SETTLE_SECONDS)
            finally:
                sender.cancel()
                for process in self._members:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                await asyncio.gather(*self._readers)
        return self._outcome()

    @property
    def _changes(self) -> int:
        """Return how often members have joined or left."""
        return self._events["join"] + self._events["leave"]

    async def _rage(self) -> None:
        pause = self._seconds / (self._kills + 1)
        for _ in range(self._kills):
            await asyncio.sleep(pause)
            process = self._members.pop(self._chance.randrange(len(self._members)))
            process.kill()
            await process.wait()
            await self._start_process()
        await asyncio.sleep(pause)
        # On a busy machine members join slowly. The storm lasts until enough members joined or left.
        await until(lambda: self._changes > CHANGES_MIN, "changes of the group", SETTLE_SECONDS)

    async def _start_process(self) -> None:
        command = ["-m", "tests.faults.client.storm", "--member", f"m{next(self._names)}", "--namesrv", self._namesrv]
        command += ["--seed", str(self._chance.randrange(1 << 32)), *(["--ordered"] if self._is_ordered else [])]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
        self._members.append(process)
        self._readers.append(asyncio.create_task(self._read(process)))

    async def _end_processes(self) -> None:
        for process in self._members:
            assert process.stdin is not None, "stdin is a pipe"
            process.stdin.close()
        for process in self._members:
            if await process.wait() != 0:
                self._left.append(f"member process ended with {process.returncode}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "stdout is a pipe"
        while (line := await process.stdout.readline()).endswith(b"\n"):
            event, _, rest = line.decode().strip().partition(" ")
            self._events[event] += 1
            if event == "got":
                member, number, queue, offset, at, times = rest.split(" ")
                place = Place(queue, int(offset))
                self._ledger.note(GROUP, Arrival(int(number), place, member, float(at), int(times) > 0))
            elif event == "left":
                self._left.append(rest)

    async def _keep_sending(self, producer: Producer) -> None:
        self._begun = time.monotonic()
        async with asyncio.TaskGroup() as sends:
            number = 0
            while self._is_sending:
                while number < (time.monotonic() - self._begun) * self._rate:
                    number += 1
                    sends.create_task(self._send(producer, number))
                await asyncio.sleep(0.01)

    async def _send(self, producer: Producer, number: int) -> None:
        try:
            self._ledger.sent(number, await producer.send(Message(topic=TOPIC, body=b"%d " % number + bytes(100))))
        except RmqError as error:
            self._ledger.failed(number, error)

    def _last_member(self) -> PushConsumer:
        return member_of(
            self._namesrv, "last", lambda arrival: self._ledger.note(GROUP, arrival), is_ordered=self._is_ordered
        )

    def _outcome(self) -> Outcome:
        ledger = self._ledger
        return Outcome(
            acknowledged=len(ledger.acknowledged),
            in_doubt=len(ledger.in_doubt),
            changes=self._changes,
            kills=self._kills,
            lost=ledger.lost(GROUP),
            strangers=ledger.strangers(GROUP) - {0},  # number 0 only created the topic
            duplicates=dict(ledger.duplicates(GROUP)),
            oldest_taken_over=ledger.oldest_taken_over(GROUP),
            order_broken=ledger.order_broken(GROUP) if self._is_ordered else [],
            stalls=ledger.stalls(GROUP),
            left=self._left,
            begun=self._begun,
        )


def member_of(namesrv: str, member: str, note: Callable[[Arrival], None], *, is_ordered: bool) -> PushConsumer:
    """Create a member without starting it."""
    consumer = PushConsumer(GROUP, namesrv, settings=JUDGED, ordered=is_ordered)

    @consumer.on(TOPIC)
    async def handle(message: ReceivedMessage) -> None:
        note(arrival_of(message, member))
        await asyncio.sleep(0)

    return consumer


# -- a member's process


async def live(namesrv: str, name: str, seed: int, *, is_ordered: bool) -> None:
    """Let members join and leave until the input ends."""
    before = asyncio.all_tasks()
    ends = asyncio.Event()
    threading.Thread(target=_wait_for_end, args=(asyncio.get_running_loop(), ends), daemon=True).start()
    chance = random.Random(seed)
    async with asyncio.TaskGroup() as members:
        for number in range(MEMBERS_EACH):
            one = random.Random(chance.randrange(1 << 32))
            members.create_task(_come_and_go(namesrv, f"{name}.{number}", one, ends, is_ordered=is_ordered))
    for task in asyncio.all_tasks() - before:
        tell("left", f"{name}: task {task.get_name()}")
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            tell("left", f"{name}: thread {thread.name}")


async def _come_and_go(
    namesrv: str, name: str, chance: random.Random, ends: asyncio.Event, *, is_ordered: bool
) -> None:
    for times in itertools.count():
        await _pause(ends, chance.uniform(*AWAY_SECONDS))
        if ends.is_set():
            return
        member = f"{name}.{times}"
        consumer = member_of(namesrv, member, _tell_arrival, is_ordered=is_ordered)
        try:
            await consumer.start()
        except RmqError as error:  # the machine is overloaded
            tell("refused", f"{member}: {error}")
            continue
        tell("join", member)
        await _pause(ends, chance.uniform(*HERE_SECONDS))
        await consumer.close()
        tell("leave", member)


def _tell_arrival(one: Arrival) -> None:
    tell("got", f"{one.member} {one.number} {one.place.queue} {one.place.offset} {one.at:.6f} {int(one.is_retried)}")


def tell(event: str, rest: str) -> None:
    """Print one line with a single write, so that it is complete even if the process is killed next."""
    os.write(1, f"{event} {rest}\n".encode())


def _wait_for_end(loop: asyncio.AbstractEventLoop, ends: asyncio.Event) -> None:
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(ends.set)


async def _pause(ends: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ends.wait(), seconds)


# -- the long form


async def storm(arguments: argparse.Namespace) -> Outcome:
    """Run a storm against the servers of the arguments, else against ours."""
    options = {name: getattr(arguments, name) for name in ("seconds", "seed", "rate", "kills")}
    if arguments.namesrv:
        return await Storm(arguments.namesrv, **options, is_ordered=arguments.ordered).run()
    with tempfile.TemporaryDirectory(prefix="rmq-storm-") as folder:
        async with Servers(Path(folder), conf=CONF) as servers:
            return await Storm(servers.namesrv_addr, **options, is_ordered=arguments.ordered).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.client.storm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=int, default=300, help="messages a second (300)")
    parser.add_argument("--kills", type=int, default=6, help="member processes to kill (6)")
    parser.add_argument("--seed", type=int, help="(random)")
    parser.add_argument("--ordered", action="store_true", help="ordered consumption")
    parser.add_argument("--namesrv", help="servers that run already")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.randrange(1 << 32)
    logging.getLogger("rmqkit").setLevel(logging.ERROR)
    if arguments.member:
        asyncio.run(live(arguments.namesrv, arguments.member, arguments.seed, is_ordered=arguments.ordered))
        return 0
    print(f"storm: {arguments.seconds:g} s, seed {arguments.seed}", flush=True)
    outcome = asyncio.run(storm(arguments))
    print(f"storm: {outcome}")
    for fault in outcome.faults:
        print(f"  FAILED {fault}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
