"""Clients under a steady load, ``make soak T=clients``: every message must be delivered, and nothing may grow.

One broker process; in this process, over 30 minutes (``--seconds``):

=======================  ===========================================================================================
client                   actions
=======================  ===========================================================================================
producer                 8 of 10 messages to `PLAIN`, 1 of 10 to `ORDERED` by sharding key
transaction producer     1 of 10 to `DECIDED`: committed, rolled back, or decided when the broker asks
push consumer            consumes `PLAIN` and `DECIDED`; 1 of 1000 messages fails once and is redelivered
guest                    a second member of that group, which joins and leaves: two rebalances each time
pull consumer            polls `PLAIN` in a separate group
ordered consumer         consumes `ORDERED`
=======================  ===========================================================================================

The verdict is good if no message is lost, no rolled back message arrives, each order is right, and every series is flat
after the warm-up. The broker's mapped files are shown but not judged, because they are its store. ``--leak-bytes``
retains bytes of every message, to show that the verdict can be bad.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rmqkit.client.consumer.consume import ConsumeLater
from rmqkit.client.consumer.pull import PullConsumer
from rmqkit.client.consumer.push import PushConsumer
from rmqkit.client.producer.producer import Producer
from rmqkit.client.producer.selectors import by_sharding_key
from rmqkit.client.producer.transaction import TransactionProducer, TransactionState
from rmqkit.client.runtime.settings import PullConsumerSettings, PushConsumerSettings, StartFrom
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message, ReceivedMessage
from tests.faults.client.growth import Growth, Sample, judge, process_figures
from tests.interop.standalone import run_standalone
from tests.patience import TIMEOUT_MS

PLAIN, ORDERED, DECIDED = "SoakPlain", "SoakOrdered", "SoakDecided"
TICK_SECONDS = 0.02
UNDER_WAY_MAX = 200
SHARDS = 16
FAILS_ONE_OF = 1000
WARM_UP_SECONDS, WARM_UP_SHARE_MAX = 300.0, 0.5
SETTLE_SECONDS = 200.0
SAMPLES, SAMPLES_MIN = 360, 10
PROGRESS_SECONDS = 10.0
MIB_PER_HOUR_MAX, MIB_NOTICED = 8.0, 4.0
COUNT_PER_HOUR_MAX, COUNT_NOTICED = 6.0, 5.0
CONF = """
transactionTimeOut=2000
transactionCheckInterval=2000
transactionOpBatchInterval=500
messageDelayLevel=1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s
"""

FIRST = PushConsumerSettings(start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=2000)
POLLED = PullConsumerSettings(start_from=StartFrom.FIRST_OFFSET, persist_interval_ms=2000)


class Delivery:
    """The numbers that a group received, in constant memory: all below a floor, and some above it."""

    def __init__(self) -> None:
        self.count = self.again = 0
        self.gap_seconds_max = 0.0
        self._floor = 0
        self._above: set[int] = set()
        self._last = time.monotonic()

    def note(self, number: int) -> None:
        """Record a received message."""
        now = time.monotonic()
        self.gap_seconds_max, self._last = max(self.gap_seconds_max, now - self._last), now
        if number < self._floor or number in self._above:
            self.again += 1
            return
        self.count += 1
        self._pass(number)

    def expect_no(self, number: int) -> None:
        """Record a number that must not arrive."""
        self._pass(number)

    def missing(self, numbers: int) -> int:
        """Return how many of the numbers from 0 on have not arrived."""
        return numbers - self._floor - len(self._above)

    def _pass(self, number: int) -> None:
        self._above.add(number)
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1


@dataclass
class Outcome:
    """The result of a run."""

    seconds: float
    sent: dict[str, int]
    failed_sends: int
    lost: dict[str, int]
    again: dict[str, int]
    rolled_back_arrived: int
    order_broken: int
    gap_seconds_max: dict[str, float]
    rebalances: int
    mapped_mib: float
    growth: list[Growth] = field(default_factory=list)
    leaked_tasks: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        told = [f"{count} messages lost for {name}" for name, count in self.lost.items() if count]
        told += [str(one) for one in self.growth if not one.is_flat]
        told += [f"task left after the end: {name}" for name in self.leaked_tasks]
        if self.rolled_back_arrived:
            told.append(f"{self.rolled_back_arrived} messages arrived that were rolled back")
        if self.failed_sends:
            told.append(f"{self.failed_sends} sends failed")
        if self.order_broken:
            told.append(f"{self.order_broken} messages were handled behind a later one of their queue")
        return told


class Soak:
    """One run against a broker."""

    def __init__(self, namesrv: str, broker_pid: int, arguments: argparse.Namespace) -> None:
        self._namesrv = namesrv
        self._broker_pid = broker_pid
        self._arguments = arguments
        self._sent: Counter[str] = Counter()
        self._failed_sends = self._order_broken = self._rolled_back_arrived = self._rebalances = 0
        self._delivered: defaultdict[str, Delivery] = defaultdict(Delivery)
        self._handled: defaultdict[int, int] = defaultdict(lambda: -1)
        self._kept: list[bytes] = []
        self._is_alone = True
        self._under_way = 0
        self._series: defaultdict[str, list[Sample]] = defaultdict(list)
        self._begun = time.monotonic()
        self._end = self._begun + arguments.seconds

    async def run(self) -> Outcome:
        """Work for the given time, then wait until all messages have arrived."""
        before = asyncio.all_tasks()
        async with contextlib.AsyncExitStack() as stack:
            producer = await stack.enter_async_context(Producer("soak-producer", self._namesrv))
            decider = await stack.enter_async_context(
                TransactionProducer("soak-decider", self._namesrv, execute=_decided_at_once, check=_decided_when_asked)
            )
            for topic in (PLAIN, ORDERED, DECIDED):  # so that no client waits for a route
                await producer.send(Message(topic=topic, body=b"hello"))
            await stack.enter_async_context(self._pushed())
            await stack.enter_async_context(self._ordered())
            poller = PullConsumer("soak-poll", self._namesrv, settings=POLLED)
            poller.subscribe(PLAIN)
            await stack.enter_async_context(poller)
            self._begun = time.monotonic()
            self._end = self._begun + self._arguments.seconds
            others = [asyncio.create_task(work, name="soak") for work in (self._poll(poller), self._tell())]
            async with asyncio.TaskGroup() as tasks:
                for work in (self._send(producer, decider), self._invite_guests(), self._sample()):
                    tasks.create_task(work, name="soak")
            gaps = {name: delivery.gap_seconds_max for name, delivery in self._delivered.items()}
            await self._settle()
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        outcome = self._outcome(gaps)
        outcome.leaked_tasks = sorted(task.get_name() for task in asyncio.all_tasks() - before)
        return outcome

    # -- who sends

    async def _send(self, producer: Producer, decider: TransactionProducer) -> None:
        number = 0
        async with asyncio.TaskGroup() as tasks:
            while (now := time.monotonic()) < self._end:
                # A machine that is too slow lowers the rate instead of filling the memory.
                while number < (now - self._begun) * self._arguments.rate and self._under_way < UNDER_WAY_MAX:
                    number += 1
                    self._under_way += 1
                    tasks.create_task(self._send_one(number % 10, producer, decider), name="soak send")
                await asyncio.sleep(TICK_SECONDS)

    async def _send_one(self, kind: int, producer: Producer, decider: TransactionProducer) -> None:
        topic = {0: ORDERED, 1: DECIDED}.get(kind, PLAIN)
        number = self._sent[topic]
        self._sent[topic] += 1
        shard = str(number % SHARDS)
        message = Message(topic=topic, body=b"%d " % number + bytes(100), sharding_key=shard)
        try:
            if topic == DECIDED:
                if _is_rolled_back(number):
                    self._delivered[DECIDED].expect_no(number)
                await decider.send_in_transaction(message, timeout=TIMEOUT_MS / 1000)
            elif topic == ORDERED:
                await producer.send(message, selector=by_sharding_key, timeout=TIMEOUT_MS / 1000)
            else:
                await producer.send(message, timeout=TIMEOUT_MS / 1000)
        except RmqError as error:
            self._failed_sends += 1
            print(f"  send of {topic} {number} failed: {error}", flush=True)
        finally:
            self._under_way -= 1

    # -- who consumes

    def _pushed(self) -> PushConsumer:
        consumer = PushConsumer("soak-push", self._namesrv, settings=FIRST)

        @consumer.on(PLAIN)
        async def plain(message: ReceivedMessage) -> None:
            if (number := self._number(message)) is None:
                return
            if number % FAILS_ONE_OF == 0 and not message.reconsume_times:
                raise ConsumeLater(1)
            self._delivered[PLAIN].note(number)

        @consumer.on(DECIDED)
        async def decided(message: ReceivedMessage) -> None:
            if (number := self._number(message)) is None:
                return
            if _is_rolled_back(number):
                self._rolled_back_arrived += 1
            else:
                self._delivered[DECIDED].note(number)

        return consumer

    def _ordered(self) -> PushConsumer:
        consumer = PushConsumer("soak-ordered", self._namesrv, settings=FIRST, ordered=True)

        @consumer.on(ORDERED)
        async def ordered(message: ReceivedMessage) -> None:
            if (number := self._number(message)) is not None:
                self._order_broken += message.queue_offset <= self._handled[message.queue_id]
                self._handled[message.queue_id] = message.queue_offset
                self._delivered[ORDERED].note(number)

        return consumer

    async def _poll(self, consumer: PullConsumer) -> None:
        while True:
            for message in await consumer.poll(1):
                if (number := self._number(message)) is not None:
                    self._delivered["polled"].note(number)

    def _number(self, message: ReceivedMessage) -> int | None:
        if self._arguments.leak_bytes:
            self._kept.append(os.urandom(self._arguments.leak_bytes))
        text = message.body.partition(b" ")[0]
        return int(text) if text.isdigit() else None

    async def _invite_guests(self) -> None:
        while self._end - time.monotonic() > self._arguments.guest_seconds:
            await asyncio.sleep(self._arguments.guest_seconds / 2)
            self._is_alone = False
            async with self._pushed():
                await asyncio.sleep(self._arguments.guest_seconds / 2)
            self._is_alone = True
            self._rebalances += 2

    # -- what is measured

    async def _sample(self) -> None:
        pause, judged = max(0.1, self._arguments.seconds / SAMPLES), 0
        while (now := time.monotonic()) < self._end:
            if judged < SAMPLES_MIN and self._end - now < 1.0:  # on a busy machine guests stay for long
                self._end = now + 1.0
            if self._is_alone:  # a guest has tasks and files too
                seconds = now - self._begun
                judged += seconds >= self._warm_up_seconds
                for who, pid in (("client", os.getpid()), ("broker", self._broker_pid)):
                    for name, value in process_figures(pid).items():
                        self._series[f"{who} {name}"].append((seconds, value))
                tasks = sum(1.0 for task in asyncio.all_tasks() if not task.get_name().startswith("soak"))
                self._series["client tasks"].append((seconds, tasks))
            await asyncio.sleep(pause)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            latest = {name: samples[-1][1] for name, samples in self._series.items()}
            got = {name: delivery.count for name, delivery in self._delivered.items()}
            print(
                f"  {time.monotonic() - self._begun:6.0f} s  sent {self._sent.total()}  consumed {sum(got.values())}  "
                f"client {latest['client anonymous_mib']:.1f} MiB, {latest['client tasks']:.0f} tasks, "
                f"{latest['client threads']:.0f} threads, {latest['client files']:.0f} files  "
                f"broker {latest['broker anonymous_mib']:.1f} MiB + {latest['broker mapped_mib']:.0f} mapped",
                flush=True,
            )

    async def _settle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while any(self._lost().values()):
                    await asyncio.sleep(0.05)

    @property
    def _warm_up_seconds(self) -> float:
        return min(WARM_UP_SECONDS, self._arguments.seconds * WARM_UP_SHARE_MAX)

    def _lost(self) -> dict[str, int]:
        wanted = dict(self._sent) | {"polled": self._sent[PLAIN]}
        return {name: self._delivered[name].missing(count) for name, count in wanted.items()}

    def _outcome(self, gaps: dict[str, float]) -> Outcome:
        growth = []
        for name, samples in self._series.items():
            limits = (MIB_PER_HOUR_MAX, MIB_NOTICED) if "mib" in name else (COUNT_PER_HOUR_MAX, COUNT_NOTICED)
            if not name.endswith("mapped_mib"):
                growth.append(
                    judge(
                        name, samples, warm_up_seconds=self._warm_up_seconds, per_hour_max=limits[0], noticed=limits[1]
                    )
                )
        return Outcome(
            seconds=self._arguments.seconds,
            sent=dict(self._sent),
            failed_sends=self._failed_sends,
            lost=self._lost(),
            again={name: delivery.again for name, delivery in self._delivered.items()},
            rolled_back_arrived=self._rolled_back_arrived,
            order_broken=self._order_broken,
            gap_seconds_max=gaps,
            rebalances=self._rebalances,
            mapped_mib=self._series["broker mapped_mib"][-1][1],
            growth=growth,
        )


def _is_rolled_back(number: int) -> bool:
    return number % 10 in (7, 9)


async def _decided_at_once(message: Message, argument: object) -> TransactionState:
    number = int(message.body.partition(b" ")[0])
    return TransactionState.UNKNOWN if number % 10 >= 8 else _decision(number)


def _decided_when_asked(message: ReceivedMessage) -> TransactionState:
    return _decision(int(message.body.partition(b" ")[0]))


def _decision(number: int) -> TransactionState:
    return TransactionState.ROLLBACK if _is_rolled_back(number) else TransactionState.COMMIT


def report(outcome: Outcome) -> str:
    """Return the result of a run as text for people."""
    seconds, sent = outcome.seconds, sum(outcome.sent.values())
    lines = [
        f"soak: {seconds:.0f} s, {sent} messages sent ({sent / seconds:.0f} a second), {outcome.rebalances} rebalances",
        *(
            f"  {name:12} lost {lost}, again {outcome.again[name]}, gap at most {outcome.gap_seconds_max[name]:.2f} s"
            for name, lost in outcome.lost.items()
        ),
        *(f"  {one}" for one in outcome.growth),
    ]
    faults = outcome.faults
    lines += [f"  FAILED {fault}" for fault in faults]
    lines.append("soak: everything arrived, nothing grows" if not faults else f"soak: {len(faults)} FAILED")
    return "\n".join(lines)


def soak(arguments: argparse.Namespace) -> Outcome:
    """Run a broker and its clients for the time in the arguments."""
    with tempfile.TemporaryDirectory(prefix="rmq-soak-") as name:
        folder = Path(name)
        conf = folder / "broker.conf"
        conf.write_text(CONF)
        with run_standalone(folder / "store", folder, "--config", str(conf)) as running:
            outcome = asyncio.run(Soak(running.namesrv_addr, running.process.pid, arguments).run())
            running.stop()
        return outcome


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.faults.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="(1800)")
    parser.add_argument("--rate", type=int, default=500, help="messages a second (500)")
    parser.add_argument("--guest-seconds", type=float, default=20.0, help="from one guest to the next (20)")
    parser.add_argument("--leak-bytes", type=int, default=0, help="keep so many bytes of every message")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    print(f"soak: {arguments.seconds:g} s at {arguments.rate} messages a second", flush=True)
    outcome = soak(arguments)
    print(report(outcome))
    if arguments.json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
        figures = {"soak": "clients", "rate": arguments.rate, **machine, **asdict(outcome), "faults": outcome.faults}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
