"""The transactional sink under kills, ``make kill T=eos``: every row must be in the topic, and none twice.

A query in a process of its own, with two executors of a standalone cluster, reads numbered rows and writes them to a
topic with ``deliveryGuarantee=transactional``. The rows are lines of files, or with ``--source topic`` messages of
another topic of the same broker. At moments that the seed determines, a process is killed (SIGKILL):

=========  ===========================================================================================================
process    effect
=========  ===========================================================================================================
driver     all processes of the query, or only its Java machine and its first Python process; the executors of a
           cluster outlive it for a moment; a new driver starts from the checkpoint
executor   one Java machine; Spark starts another
worker     one Python process: a task, the fork server of the tasks, or the driver's helper that plans or commits
broker     the broker; it is restarted over its store
=========  ===========================================================================================================

At the end the query runs to the end of its source, and the topic is read to its end. The verdict counts each row:
``lost`` and ``duplicates`` must be 0. An acknowledged message that is not in the source topic is lost, too. A message
that was sent again after an error may be in the source topic twice, so a row from a topic has its queue and offset. For
each duplicate the report shows the half messages of its copies: two copies of one half message were committed twice,
copies of two half messages were staged twice.
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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rmqkit.protocol.message import ReceivedMessage
from tests.faults.client.servers import Servers
from tests.faults.spark.query import Plan, Query
from tests.faults.spark.rows import QUEUES, FileRows, TopicRows, messages_of
from tests.faults.spark.servers import APACHE, OURS, ApacheServers, servers, set_queues
from tests.spark.session import SMALL
from tests.spark.standalone_cluster import CLUSTER_CONF, SparkCluster, kill

TOPIC = "Exact"
GROUP = "eos-sink"
DRIVER, EXECUTOR, WORKER, BROKER = "driver", "executor", "worker", "broker"
SHARES = {DRIVER: 0.21, BROKER: 0.15, EXECUTOR: 0.3}
"""The shares of the kills; the rest are of workers."""
SOURCES = {"files": FileRows, "topic": TopicRows}
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
    **CLUSTER_CONF,
    "spark.task.maxFailures": "1000",
    "spark.stage.maxConsecutiveAttempts": "1000",
    "spark.executor.memory": "600m",
}


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    server: str
    guarantee: str
    source: str = "files"
    seconds: float = 0.0
    sent: int = 0
    rows: int = 0
    read: int = 0
    batches: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    source_lost: int = 0
    lost: int = 0
    strangers: int = 0
    duplicates: int = 0
    of_one_half: int = 0
    shown: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        told = [f"{self.lost} rows are not in the topic"] if self.lost else []
        if self.source_lost:
            told.append(f"{self.source_lost} acknowledged messages are not in the source topic")
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
            f"{self.server}, {self.guarantee}, seed {self.seed}: {self.sent} sent to {self.source}, {self.rows} rows in"
            f" {self.batches} batches, {self.read} read; {self.kills.total()} kills ({kills}), query restarted after an"
            f" exit {self.restarts} times; lost {self.lost} and {self.source_lost} of the source, duplicates"
            f" {self.duplicates} (of one half message {self.of_one_half}); {self.seconds:.0f} s"
        )


class Copy(NamedTuple):
    """A message with a row."""

    row: bytes
    half: int
    told: str


def judge(outcome: Outcome, copies: Sequence[Copy], rows: Collection[bytes]) -> None:
    """Count the rows in the content of a topic."""
    of_row: defaultdict[bytes, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_row[copy.row].append(copy)
    outcome.rows, outcome.read = len(rows), len(copies)
    outcome.lost = sum(row not in of_row for row in rows)
    outcome.strangers = sum(len(them) for row, them in of_row.items() if row not in rows)
    outcome.duplicates = sum(len(them) - 1 for them in of_row.values())
    for row, them in sorted(of_row.items()):
        outcome.of_one_half += len(them) - len({copy.half for copy in them})
        if len(them) > 1 and len(outcome.shown) < SHOWN:
            outcome.shown.append(f"row {row.decode()}: {'; '.join(copy.told for copy in them)}")


def _copy(message: ReceivedMessage) -> Copy:
    half = message.prepared_transaction_offset
    told = (
        f"{message.msg_id} at queue {message.queue_id} offset {message.queue_offset}, half {half}, born"
        f" {message.born_timestamp}, stored {message.store_timestamp}"
    )
    return Copy(message.body, half, told)


class Trial:
    """One run with started servers and a cluster."""

    def __init__(
        self,
        running: Servers | ApacheServers,
        cluster: SparkCluster,
        folder: Path,
        arguments: argparse.Namespace,
    ) -> None:
        self._servers = running
        self._cluster = cluster
        self._folder = folder
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)
        self._outcome = Outcome(arguments.seed, arguments.server, arguments.guarantee, arguments.source)
        self._rows = SOURCES[arguments.source](running, folder)
        self._begun = time.monotonic()
        self._query = Query(self._plan(), folder, self._tell)

    async def run(self) -> Outcome:
        """Kill processes the given number of times, let the query finish, and judge."""
        set_queues(self._servers.broker.address, TOPIC, QUEUES)
        self._query.start()
        writer = asyncio.create_task(self._rows.feed(lambda: self._query.committed))
        try:
            for who in self._victims():
                if time.monotonic() - self._begun > self._arguments.seconds:
                    break
                await self._goes_on()
                await self._kill(who)
            await self._goes_on()
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer
            await self._query.finish()
            rows, self._outcome.source_lost = await asyncio.to_thread(self._rows.bodies)
            copies = await asyncio.to_thread(lambda: [*map(_copy, messages_of(self._servers.namesrv_addr, TOPIC))])
        finally:
            writer.cancel()
            await self._query.kill()
        judge(self._outcome, copies, rows)
        self._outcome.sent = self._rows.sent
        self._outcome.batches = self._query.committed
        self._outcome.restarts = self._query.restarts
        self._outcome.seconds = time.monotonic() - self._begun
        return self._outcome

    def _victims(self) -> list[str]:
        if each := self._arguments.each:
            victims = [DRIVER, EXECUTOR, WORKER, BROKER] * each
            self._chance.shuffle(victims)
            return victims
        kills = self._arguments.kills
        victims = [who for who, share in SHARES.items() for _ in range(max(1, round(kills * share)))]
        victims += [WORKER] * (kills - len(victims))
        self._chance.shuffle(victims)
        return victims

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
            members = self._query.program.members() | self._cluster.members()
            found[:] = [pid for pid, command in members.items() if PARTS[who] in command]
            return bool(found)

        await self._query.until(is_there, f"a process of kind {who}")
        kill(self._chance.choice(sorted(found)))

    def _plan(self) -> Plan:
        return Plan(
            source=self._rows.source,
            source_options=self._rows.options,
            select=list(self._rows.select),
            sink="rocketmq",
            sink_options={
                "nameServer": self._servers.namesrv_addr,
                "topic": TOPIC,
                "producerGroup": GROUP,
                "deliveryGuarantee": self._arguments.guarantee,
            },
            checkpoint=str(self._folder / "checkpoint"),
            master=self._cluster.master,
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
    parser.add_argument("--each", type=int, default=0, help="kills of each kind, in place of --kills")
    parser.add_argument("--source", choices=list(SOURCES), default="files", help="where the rows are (files)")
    parser.add_argument("--server", choices=["both", OURS, APACHE], default="both", help="(both, half the kills each)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="(random)")
    parser.add_argument("--guarantee", choices=["transactional", "at-least-once"], default="transactional")
    parser.add_argument("--seconds", type=float, default=7200.0, help="no kill comes later (7200, for each kind)")
    parser.add_argument("--batch-seconds", type=float, default=2.0, help="a kill comes so long into a batch at most")
    return parser.parse_args(arguments)


async def eos(arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Run over new servers."""
    async with servers(arguments.server, folder, CONF) as running:
        with SparkCluster(folder) as cluster:
            return await Trial(running, cluster, folder, arguments).run()


def main() -> int:
    arguments = parse()
    logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
    kinds = [OURS, APACHE] if arguments.server == "both" else [arguments.server]
    faults: list[str] = []
    for kind in kinds:
        own = argparse.Namespace(**{**vars(arguments), "server": kind, "kills": arguments.kills // len(kinds)})
        own.each //= len(kinds)
        print(f"eos: {4 * own.each or own.kills} kills, {kind}, seed {own.seed}", flush=True)
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
