"""A stream under faults, ``make kill T=streams``: the query's result must have every acknowledged message once.

A producer sends numbered messages in batches while a query in a separate process writes them to Parquet files, with a
checkpoint. At times that the seed determines, a fault happens:

=============  =======================================================================================================
fault          effect
=============  =======================================================================================================
driver         SIGKILL for all processes of the query: while it starts, in a batch, or between two; then it is restarted
               from its checkpoint
broker         SIGKILL, and a restart over its store
queue          the topic gets more queues
=============  =======================================================================================================

At the end an ``AvailableNow`` query reads the available messages while the producer continues: it must stop at its
target.

The verdict compares positions (queue, offset), which the broker returned for every acknowledged batch. A batch whose
send failed is sent again and may be in the log twice. Such rows are counted separately, because the stream did not
duplicate them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rmqkit.client.observe.hooks import SendStatus
from rmqkit.client.producer.producer import Producer
from rmqkit.client.runtime.settings import ProducerSettings
from rmqkit.errors import RmqError
from rmqkit.protocol.message import Message
from tests.faults.client.servers import Servers
from tests.faults.spark.query import Plan, Query
from tests.faults.spark.servers import APACHE, OURS, ApacheServers, servers, set_queues
from tests.spark.session import SMALL

TOPIC = "Streamed"
QUEUES, QUEUES_LATER = 4, 6
BATCH, SENDERS = 400, 4
SLOW_BATCH, SLOW_PAUSE_SECONDS = 20, 0.2
LATE_BATCH, LATE_PAUSE_SECONDS = 5, 0.05
DRIVER, BROKER, QUEUE = "driver", "broker", "queue"
PHASES = ("batch", "start", "between")
CONF: Mapping[str, object] = {"brokerName": "broker-a", "mappedFileSizeCommitLog": 64 << 20}
SENDING = ProducerSettings(retries=0, send_timeout_ms=5000, route_interval_ms=1000, heartbeat_interval_ms=1000)

Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Run:
    """A batch of consecutive numbers at consecutive offsets of a queue."""

    queue_id: int
    offset: int
    first: int
    count: int


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    server: str
    seconds: float
    faults_done: dict[str, int]
    acknowledged: int
    rows: int
    lost: int
    duplicates: int
    changed: int
    gaps: int
    strangers: int
    again: int
    late_unread: int
    batches: int
    restarts: int

    @property
    def faults(self) -> list[str]:
        """Return the faults, one line each."""
        texts = {
            "lost": "acknowledged messages are not in the result",
            "duplicates": "rows are in the result more than once",
            "changed": "rows have another number than was sent to their place",
            "gaps": "places of queues were passed over",
            "strangers": "rows are of no batch that was sent or in doubt",
        }
        told = [f"{count} {text}" for name, text in texts.items() if (count := getattr(self, name))]
        if not self.late_unread:
            told.append("AvailableNow went on until nothing came any more, not to its target")
        return told

    def __str__(self) -> str:
        kills = ", ".join(f"{count} {name}" for name, count in sorted(self.faults_done.items()))
        return (
            f"{self.acknowledged} acknowledged, {self.rows} rows in {self.batches} batches; faults: {kills}; query"
            f" started anew by itself {self.restarts}; lost {self.lost}, duplicates {self.duplicates}, sent twice by"
            f" the producer {self.again}, behind the target {self.late_unread}; {self.seconds:.0f} s"
        )


def judge(rows: Mapping[str, Numbers], sent: Sequence[Run], late: Sequence[Run], doubtful: Numbers) -> Counter[str]:
    """Return the faults of a result with the columns ``queueId``, ``queueOffset``, ``number``.

    Args:
        sent: acknowledged batches that must be in the result.
        late: acknowledged batches that may be in the result, also in part.
        doubtful: numbers whose send failed once: they may be in the log at unknown offsets.
    """
    places = _places(rows["queueId"], rows["queueOffset"])
    unique, first_rows = np.unique(places, return_index=True)
    numbers = rows["number"][first_rows]
    told: Counter[str] = Counter(duplicates=len(places) - len(unique))
    known, known_numbers = _spread([*sent, *late])
    is_known, at = np.isin(unique, known), np.searchsorted(known, unique)
    told["changed"] = int((known_numbers[at[is_known]] != numbers[is_known]).sum())
    told["lost"] = int((~np.isin(_spread(sent)[0], unique)).sum())
    is_doubtful = np.isin(numbers[~is_known], doubtful)
    told["again"], told["strangers"] = int(is_doubtful.sum()), int((~is_doubtful).sum())
    queues, counts = np.unique(unique >> 40, return_counts=True)
    ends = [int((unique[unique >> 40 == queue] & ((1 << 40) - 1)).max()) + 1 for queue in queues]
    told["gaps"] = sum(end - count for end, count in zip(ends, counts.tolist(), strict=True))
    told["late_unread"] = int((~np.isin(_spread(late)[0], unique)).sum())
    return told


def _places(queue_ids: Numbers, offsets: Numbers) -> Numbers:
    return (queue_ids.astype(np.int64) << 40) | offsets


def _spread(runs: Sequence[Run]) -> tuple[Numbers, Numbers]:
    """Return sorted places, and the number at each."""
    if not runs:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    places = np.concatenate([(run.queue_id << 40) + run.offset + np.arange(run.count, dtype=np.int64) for run in runs])
    numbers = np.concatenate([run.first + np.arange(run.count, dtype=np.int64) for run in runs])
    order = np.argsort(places, kind="stable")
    return places[order], numbers[order]


def result_of(folder: Path) -> dict[str, Numbers]:
    """Return the rows of a Parquet sink: those of the files that its own log names."""
    names: set[str] = set()
    for log in (folder / "_spark_metadata").glob("[0-9]*"):
        names |= {json.loads(line)["path"] for line in log.read_text().splitlines()[1:]}
    tables = [pq.read_table(name.removeprefix("file://")) for name in sorted(names)]
    table = pa.concat_tables(tables)
    return {name: table[name].to_numpy().astype(np.int64) for name in ("queueId", "queueOffset", "number")}


class Trial:
    """One run with started servers."""

    def __init__(self, running: Servers | ApacheServers, folder: Path, arguments: argparse.Namespace) -> None:
        self._servers = running
        self._folder = folder
        self._arguments = arguments
        self._chance = random.Random(arguments.seed)
        self._sent: list[Run] = []
        self._late: list[Run] = []
        self._doubtful: list[tuple[int, int]] = []
        self._next = 0
        self._gate = 0
        self._has_faults_left = True
        self._done: Counter[str] = Counter()
        self._begun = time.monotonic()
        self._query = Query(self._plan(), folder, self._tell)

    async def run(self) -> Outcome:
        """Send, run the faults, finish, judge."""
        arguments = self._arguments
        events = self._events()
        set_queues(self._servers.broker.address, TOPIC, QUEUES)
        self._gate = arguments.messages // (len(events) + 1)
        async with Producer("streams-producer", self._servers.namesrv_addr, settings=SENDING) as producer:
            self._query.start()
            senders = [asyncio.create_task(self._send(producer)) for _ in range(SENDERS)]
            try:
                for number, event in enumerate(events, 1):
                    await self._goes_on()
                    await self._happen(event)
                    self._gate = arguments.messages * (number + 1) // (len(events) + 1)
                self._has_faults_left = False
                await asyncio.gather(*senders)
                late = asyncio.create_task(self._send_late(producer))
                self._tell("to the end")
                await self._query.finish()
                late.cancel()
                await asyncio.wait([late])
            finally:
                for task in senders:
                    task.cancel()
                await self._query.kill()
        return self._outcome(time.monotonic() - self._begun)

    def _events(self) -> list[str]:
        events = [DRIVER] * self._arguments.driver_kills + [BROKER] * self._arguments.broker_kills
        self._chance.shuffle(events)
        events.insert(len(events) // 2, QUEUE)
        return events

    # -- the producer

    async def _send(self, producer: Producer) -> None:
        """Send all messages, and more until every fault has happened: on a busy machine the driver starts so slowly
        that the messages run out, and a fault waits for a batch."""
        while (first := self._next) < self._arguments.messages or self._has_faults_left:
            is_slow = first > self._gate  # send slowly, so that a fault meets running work
            count = SLOW_BATCH if is_slow else min(BATCH, self._arguments.messages - first)
            self._next += count
            await self._send_run(producer, first, count, self._sent)
            await asyncio.sleep(SLOW_PAUSE_SECONDS if is_slow else 0)

    async def _send_late(self, producer: Producer) -> None:
        while True:
            first, self._next = self._next, self._next + LATE_BATCH
            await self._send_run(producer, first, LATE_BATCH, self._late)
            await asyncio.sleep(LATE_PAUSE_SECONDS)

    async def _send_run(self, producer: Producer, first: int, count: int, noted: list[Run]) -> None:
        messages = [Message(topic=TOPIC, body=b"%d" % number) for number in range(first, first + count)]
        while True:
            try:
                result = await producer.send_batch(messages)
            except RmqError:
                result = None
            if result is not None and result.status is SendStatus.SEND_OK:
                noted.append(Run(result.queue.queue_id, result.queue_offset, first, count))
                return
            self._doubtful.append((first, count))
            await asyncio.sleep(0.2)

    # -- faults

    async def _goes_on(self) -> None:
        """Wait until the query has made progress since the last fault, with messages left to read."""
        before = self._query.committed
        await self._query.until(lambda: self._query.committed > before, "a batch")
        await self._query.until(lambda: self._next > self._gate, "messages")

    async def _happen(self, event: str) -> None:
        begun = time.monotonic()
        match event:
            case "driver":
                await self._kill_driver(PHASES[self._done[DRIVER] % len(PHASES)])
            case "broker":
                self._servers.broker.kill()
                await self._servers.broker.start()
            case _:
                set_queues(self._servers.broker.address, TOPIC, QUEUES_LATER)
        self._done[event] += 1
        self._tell(f"{event} {self._done[event]} took {time.monotonic() - begun:.1f} s")

    async def _kill_driver(self, phase: str) -> None:
        if phase == "batch":
            await self._query.until(lambda: self._query.planned > self._query.committed, "a plan")
            await asyncio.sleep(self._chance.uniform(0, 0.6))
        elif phase == "between":
            before = self._query.committed
            await self._query.until(lambda: self._query.committed > before, "a batch")
        await self._query.kill()
        self._query.start()
        if phase == "start":
            await asyncio.sleep(self._chance.uniform(0, 12))
            await self._query.kill()
            self._query.start()

    def _plan(self) -> Plan:
        options = {
            "nameServer": self._servers.namesrv_addr,
            "subscribe": TOPIC,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(self._arguments.per_batch),
            "columns": "queueId,queueOffset,body",
            "pullBatchSize": "1024",
        }
        return Plan(
            source="rocketmq",
            source_options=options,
            select=["queueId", "queueOffset", "cast(cast(body as string) as bigint) number"],
            sink="parquet",
            sink_options={"path": str(self._folder / "out")},
            checkpoint=str(self._folder / "checkpoint"),
            conf=dict(SMALL) if self._arguments.small else {},
        )

    def _tell(self, text: str) -> None:
        seconds = time.monotonic() - self._begun
        print(f"  {seconds:5.0f} s  sent {self._next}, batch {self._query.committed}: {text}", flush=True)

    def _outcome(self, seconds: float) -> Outcome:
        rows = result_of(self._folder / "out")
        doubtful = [np.arange(first, first + count, dtype=np.int64) for first, count in self._doubtful]
        told = judge(rows, self._sent, self._late, np.concatenate([np.empty(0, np.int64), *doubtful]))
        return Outcome(
            seed=self._arguments.seed,
            server=self._arguments.server,
            seconds=seconds,
            faults_done=dict(self._done),
            acknowledged=sum(run.count for run in self._sent),
            rows=len(rows["number"]),
            batches=self._query.committed,
            restarts=self._query.restarts,
            **{name: told[name] for name in Outcome.__annotations__ if name in told},
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="tests.faults.spark.streams", description=__doc__)
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--server", choices=["both", OURS, APACHE], default="both")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="(random)")
    parser.add_argument("--driver-kills", type=int, default=6)
    parser.add_argument("--broker-kills", type=int, default=3)
    parser.add_argument("--per-batch", type=int, default=100_000, help="messages of a batch (100,000)")
    parser.add_argument("--small", action="store_true", help="settings of Spark that start sooner and run slower")
    parser.add_argument("--flush", choices=["ASYNC_FLUSH", "SYNC_FLUSH"], default="ASYNC_FLUSH")
    return parser.parse_args(arguments)


async def streams(arguments: argparse.Namespace, folder: Path) -> Outcome:
    """Run over new servers."""
    async with servers(arguments.server, folder, {**CONF, "flushDiskType": arguments.flush}) as running:
        return await Trial(running, folder, arguments).run()


def main() -> int:
    arguments = parse()
    logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
    faults: list[str] = []
    for kind in [OURS, APACHE] if arguments.server == "both" else [arguments.server]:
        own = argparse.Namespace(**{**vars(arguments), "server": kind})
        print(f"streams: {own.messages} messages, {kind}, seed {own.seed}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="rmq-streams-"))  # remains if the run fails
        outcome = asyncio.run(streams(own, folder))
        shutil.rmtree(folder)
        print(f"streams: {kind}: {outcome}", flush=True)
        faults += outcome.faults
    for fault in faults:
        print(f"  FAILED {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
