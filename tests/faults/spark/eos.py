"""The transactional sink under kills, ``make kill T=eos``: every row must be in the topic, and none twice.

A query in a process of its own, with two executors (``local-cluster``; none with ``--local``), reads files of numbered
rows and writes them to a topic with ``deliveryGuarantee=transactional``. At moments that the seed determines, a process
is killed (SIGKILL):

=========  ===========================================================================================================
process    effect
=========  ===========================================================================================================
driver     all processes of the query, or only the driver's own, so that executors outlive it for a moment; a new one
           starts from the checkpoint
executor   one Java machine; Spark starts another
worker     one Python process: a task, the fork server of the tasks, or the driver's helper that plans or commits
broker     the broker; it is restarted over its store
=========  ===========================================================================================================

At the end the query runs to the end of its files, and the topic is read to its end. The verdict counts each row:
``lost`` and ``duplicates`` must be 0. For each duplicate the report shows the half messages of its copies: two copies
of one half message were committed twice, copies of two half messages were staged twice.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rmqkit.protocol.message import ReceivedMessage, read_messages
from rmqkit.spark.broker_pool import Range, broker_pool
from rmqkit.spark.options import LiveOptions
from tests.faults.client.servers import Servers
from tests.faults.spark.query import Plan, Query, kill
from tests.faults.spark.servers import APACHE, OURS, ApacheServers, servers, set_queues
from tests.spark.session import SMALL

TOPIC = "Exact"
QUEUES = 4
GROUP = "eos-sink"
ROWS_PER_FILE, FILES_PER_BATCH, FILES_AHEAD = 100, 4, 24
DRIVER, EXECUTOR, WORKER, BROKER = "driver", "executor", "worker", "broker"
SHARES = {DRIVER: 0.21, BROKER: 0.15, EXECUTOR: 0.3}
"""The shares of the kills; the rest are of workers."""
CLUSTER = "local-cluster[2,1,1024]"
LOCAL = "local[2,1000]"
"""A master that also repeats failed tasks."""

PARTS = {EXECUTOR: "CoarseGrainedExecutorBackend", WORKER: " -m pyspark.", DRIVER: "SparkSubmit"}
SHOWN = 20
CONF: Mapping[str, object] = {
    "brokerName": "broker-a",
    "flushDiskType": "SYNC_FLUSH",
    "transactionTimeOut": 3000,
    "transactionCheckInterval": 3000,
    "transactionCheckMax": 15,
}
SPARK_CONF = {
    **SMALL,
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.executor.memory": "600m",
}


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    server: str
    guarantee: str
    seconds: float = 0.0
    rows: int = 0
    batches: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    lost: int = 0
    strangers: int = 0
    duplicates: int = 0
    of_one_half: int = 0
    shown: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        told = [f"{self.lost} rows are not in the topic"] if self.lost else []
        if self.strangers:
            told.append(f"{self.strangers} messages are of no row")
        if self.duplicates:
            told.append(
                f"{self.duplicates} rows are in the topic again, {self.of_one_half} of them from one half message"
            )
        return told + self.shown

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {who}" for who, count in sorted(self.kills.items()))
        return (
            f"{self.server}, {self.guarantee}: {self.rows} rows in {self.batches} batches; {self.kills.total()} kills"
            f" ({kills}), query started anew by itself {self.restarts}; lost {self.lost}, duplicates {self.duplicates}"
            f" (of one half message {self.of_one_half}); {self.seconds:.0f} s"
        )


class Copy(NamedTuple):
    """A message with a row."""

    row: int
    half: int
    told: str


def judge(outcome: Outcome, copies: Sequence[Copy], rows: int) -> None:
    """Count the rows 0 to ``rows`` - 1 in the content of a topic."""
    of_row: defaultdict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_row[copy.row].append(copy)
    outcome.rows = rows
    outcome.lost = sum(number not in of_row for number in range(rows))
    outcome.strangers = sum(len(them) for number, them in of_row.items() if not 0 <= number < rows)
    outcome.duplicates = sum(len(them) - 1 for them in of_row.values())
    for number, them in sorted(of_row.items()):
        outcome.of_one_half += len(them) - len({copy.half for copy in them})
        if len(them) > 1 and len(outcome.shown) < SHOWN:
            outcome.shown.append(f"row {number}: {'; '.join(copy.told for copy in them)}")


def read_topic(namesrv: str) -> list[Copy]:
    """Return all messages of the target topic."""
    brokers = broker_pool(LiveOptions(name_servers=namesrv))
    found: list[Copy] = []
    for queue, bound in brokers.bounds(brokers.queues([TOPIC])).items():
        for body in brokers.bodies(Range(queue, bound.low, bound.high)):
            found += map(_copy, read_messages(body))
    return found


def _copy(message: ReceivedMessage) -> Copy:
    half = message.prepared_transaction_offset
    told = (
        f"{message.msg_id} at queue {message.queue_id} offset {message.queue_offset}, half {half}, born"
        f" {message.born_timestamp}, stored {message.store_timestamp}"
    )
    return Copy(int(message.body), half, told)


class Trial:
    """One run with started servers."""

    def __init__(self, running: Servers | ApacheServers, folder: Path, arguments: argparse.Namespace) -> None:
        self._servers = running
        self._folder = folder
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)
        self._outcome = Outcome(arguments.seed, arguments.server, arguments.guarantee)
        self._files = 0
        self._begun = time.monotonic()
        self._query = Query(self._plan(), folder, self._tell)
        (folder / "in").mkdir()

    async def run(self) -> Outcome:
        """Kill processes the given number of times, let the query finish, and judge."""
        set_queues(self._servers.broker.address, TOPIC, QUEUES)
        self._write_files()
        self._query.start()
        writer = asyncio.create_task(self._keep_writing())
        try:
            for who in self._victims():
                if time.monotonic() - self._begun > self._arguments.seconds:
                    break
                await self._goes_on()
                await self._kill(who)
            await self._goes_on()
            writer.cancel()
            await self._query.finish()
            copies = await asyncio.to_thread(read_topic, self._servers.namesrv_addr)
        finally:
            writer.cancel()
            await self._query.kill()
        judge(self._outcome, copies, self._files * ROWS_PER_FILE)
        self._outcome.batches = self._query.committed
        self._outcome.restarts = self._query.restarts
        self._outcome.seconds = time.monotonic() - self._begun
        return self._outcome

    def _victims(self) -> list[str]:
        kills = self._arguments.kills
        shares = {who: share for who, share in SHARES.items() if who != EXECUTOR or not self._arguments.local}
        victims = [who for who, share in shares.items() for _ in range(max(1, round(kills * share)))]
        victims += [WORKER] * (kills - len(victims))
        self._chance.shuffle(victims)
        return victims

    # -- rows

    async def _keep_writing(self) -> None:
        while True:
            self._write_files()
            await asyncio.sleep(0.1)

    def _write_files(self) -> None:
        while self._files < self._query.committed * FILES_PER_BATCH + FILES_AHEAD:
            first = self._files * ROWS_PER_FILE
            text = "".join(f"{number}\n" for number in range(first, first + ROWS_PER_FILE))
            made = self._folder / "made"
            made.write_text(text)
            made.rename(self._folder / "in" / f"{self._files:08d}.txt")
            self._files += 1

    # -- kills

    async def _goes_on(self) -> None:
        """Wait for the moment of the next kill: sometimes soon after the last kill, else within one of the next
        batches.
        """
        if self._chance.random() < 0.4:
            await asyncio.sleep(self._chance.uniform(0, 3))
            return
        goal = self._query.committed + self._chance.choice([1, 1, 2])
        await self._query.until(lambda: self._query.committed >= goal, f"end of batch {goal}")
        if self._chance.random() < 0.8:
            await self._query.until(lambda: self._query.planned > self._query.committed, "a plan")
        await asyncio.sleep(self._chance.uniform(0, self._arguments.batch_seconds))

    async def _kill(self, who: str) -> None:
        if who == BROKER:
            self._servers.broker.kill()
            await self._servers.broker.start()
        elif who == DRIVER:
            await self._kill_driver()
        else:
            await self._kill_part(who)
        self._outcome.kills[who] += 1
        self._tell(f"{who} killed")

    async def _kill_driver(self) -> None:
        if self._chance.random() < 0.5:
            await self._query.kill()
        else:
            for pid, command in self._query.program.members().items():
                if PARTS[DRIVER] in command or "tests.faults.spark.query" in command:
                    kill(pid)
        self._query.start()

    async def _kill_part(self, who: str) -> None:
        """Kill a process of a kind, as soon as one exists."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [pid for pid, command in self._query.program.members().items() if PARTS[who] in command]
            return bool(found)

        await self._query.until(is_there, f"a process of kind {who}")
        kill(self._chance.choice(sorted(found)))

    def _plan(self) -> Plan:
        return Plan(
            source="text",
            source_options={"path": str(self._folder / "in"), "maxFilesPerTrigger": str(FILES_PER_BATCH)},
            select=["value body", "concat('k', value) keys"],
            sink="rocketmq",
            sink_options={
                "nameServer": self._servers.namesrv_addr,
                "topic": TOPIC,
                "producerGroup": GROUP,
                "deliveryGuarantee": self._arguments.guarantee,
            },
            checkpoint=str(self._folder / "checkpoint"),
            master=LOCAL if self._arguments.local else CLUSTER,
            conf=SPARK_CONF,
        )

    def _tell(self, text: str) -> None:
        print(
            f"  {time.monotonic() - self._begun:5.0f} s  kill {self._outcome.kills.total()}, batch"
            f" {self._query.committed} of {self._query.planned}: {text}",
            flush=True,
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="tests.faults.spark.eos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--server", choices=["both", OURS, APACHE], default="both", help="(both, half the kills each)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="(random)")
    parser.add_argument("--guarantee", choices=["transactional", "at-least-once"], default="transactional")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no kill comes later (7200, for each kind)")
    parser.add_argument("--batch-seconds", type=float, default=2.0, help="a kill comes so long into a batch at most")
    parser.add_argument("--local", action="store_true", help="tasks in the driver's Java machine, without executors")
    return parser.parse_args(arguments)


async def eos(arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Run over new servers."""
    async with servers(arguments.server, folder, CONF) as running:
        return await Trial(running, folder, arguments).run()


def main() -> int:
    arguments = parse()
    logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
    kinds = [OURS, APACHE] if arguments.server == "both" else [arguments.server]
    faults: list[str] = []
    for kind in kinds:
        own = argparse.Namespace(**{**vars(arguments), "server": kind, "kills": arguments.kills // len(kinds)})
        print(f"eos: {own.kills} kills, {kind}, seed {own.seed}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="rmq-eos-"))  # remains if the run fails
        outcome = asyncio.run(eos(own, folder))
        shutil.rmtree(folder)
        print(f"eos: {outcome}", flush=True)
        faults += outcome.faults
    for fault in faults:
        print(f"  FAILED {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
