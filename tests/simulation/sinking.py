"""A query that writes to a topic exactly once: the transactional sink of `rmqkit.spark.sink`, without Spark.

======================  ================================================================================================
process                 what it does
======================  ================================================================================================
``spark-driver``        begins a batch, waits for its tasks, and commits their half messages. After an error it aborts
                        the batch, as Spark does, and runs it again. After its death the next process runs it again
``spark-executor-N``    stages the rows of a task as half messages, as `rmqkit.spark.sink.writers` does
======================  ================================================================================================

A task without a result is given to a second executor after a time. The first one may go on later: only one result of a
task counts. A `Query` has the part of Spark that never fails: its checkpoint, and the list of tasks. Now and then a
query gives up after an error, and another begins.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rmqkit.client.producer.selectors import PlacedMessage
from rmqkit.errors import RmqError
from rmqkit.protocol.message import ReceivedMessage
from rmqkit.spark.options import DeliveryGuarantee, SinkOptions
from rmqkit.spark.sink.exactly_once import ExactlyOnce
from rmqkit.spark.sink.ledger import Batch, Half, pack_halves

if TYPE_CHECKING:
    from tests.simulation.clients import ClientProcess
    from tests.simulation.run import Run

TOPIC = "Sunk"
_PARTITIONS = 2
_ROWS_MAX = 4
_LOOK_MS = 200.0
_TASK_SECONDS = 3.0
_PAUSE_MS = 1000.0
_GIVES_UP = 0.15
_STEP_SECONDS = 0.025
_LIMITED_SECONDS = 2.0
"""The duration of a commit with a limit of rows per second."""
_RESTART_SECONDS = 6.0
_SETTLE_MS = 1000
_PATIENCE_MS = 2000
UNDECIDED_SECONDS = 60.0
"""The time after the healing in which executors finish a batch that was decided, and whose query has given up."""


@dataclass(slots=True, eq=False)
class Task:
    """One partition of a batch.

    Attributes:
        attempts: how often it was given to an executor; ``given``: when, the last time.
        result: the packed half messages of the first attempt that ended.
    """

    batch: Batch
    rows: list[PlacedMessage]
    attempts: int = 0
    given: float = 0.0
    result: list[bytes] | None = None


@dataclass(slots=True)
class Query:
    """The checkpoint and the tasks of a query, and of those that it replaces.

    Attributes:
        rows: the keys of the rows of each batch that was begun, by the prefix of the keys. A batch itself has another
            hash after the run.
        done: the prefixes of the batches that the checkpoint has as committed.
        given_up: the prefixes of the batches whose query has given up.
    """

    run: Run
    number: int = 1
    batch: Batch | None = None
    rows: dict[str, list[str]] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    tasks: deque[Task] = field(default_factory=deque)
    _count: int = 0

    def begin(self) -> list[Task]:
        """Begin the next batch, or again the batch that is not done. Return its tasks."""
        if self.batch is None:
            self.batch = Batch(f"query-{self.number}", self._count)
        tasks = [Task(self.batch, rows_of(self.batch, partition)) for partition in range(_PARTITIONS)]
        self.rows[self.batch.prefix] = [row.msg_id or "" for task in tasks for row in task.rows]
        self.tasks = deque(tasks)
        return tasks

    def committed(self, batch: Batch) -> None:
        """Write into the checkpoint that a batch is committed."""
        self.done.add(batch.prefix)
        self.batch, self._count = None, batch.batch_id + 1

    def give_up(self, batch: Batch) -> None:
        """End the query. Another one begins."""
        self.given_up.add(batch.prefix)
        self.run.world.note("query", "given up", batch.prefix)
        self.batch, self._count, self.number = None, 0, self.number + 1

    @property
    def is_settled(self) -> bool:
        """Return True if no batch changes any more."""
        undecided = self.run.healed_at + UNDECIDED_SECONDS if self.given_up else 0.0
        return self.batch is None and self.run.world.now >= undecided


def rows_of(batch: Batch, partition: int) -> list[PlacedMessage]:
    """Return the rows of a task. They depend only on their batch and partition. Rows of partition 0 have an order."""
    count = random.Random(f"{batch.prefix}{partition}").randint(1, _ROWS_MAX)
    key = "in order" if partition == 0 else None
    names = [f"{batch.prefix}{partition}/{row}" for row in range(count)]
    return [PlacedMessage(topic=TOPIC, body=name.encode(), msg_id=name, sharding_key=key) for name in names]


def _options(run: Run) -> SinkOptions:
    return SinkOptions(
        name_servers=run.cluster.addresses,
        topic=TOPIC,
        guarantee=DeliveryGuarantee.TRANSACTIONAL,
        group="P-spark",
        settle_ms=_SETTLE_MS,
        patience_ms=_PATIENCE_MS,
        rows_per_s=run.plan.rows_per_s,
    )


def _blocking(work: Callable[[ClientProcess, ExactlyOnce], None]) -> Callable[[ClientProcess], Awaitable[None]]:
    """Return a main function that calls a blocking function in a thread, with a sink."""

    async def main(client: ClientProcess) -> None:
        loop = asyncio.get_running_loop()
        sink = await loop.run_in_executor(None, ExactlyOnce, _options(client.run))
        try:
            await loop.run_in_executor(None, work, client, sink)
        finally:
            await sink.producer.close()

    return main


# ---------------------------------------------------------------- driver


def _drive(client: ClientProcess, sink: ExactlyOnce) -> None:
    query, chance = client.run.query, client.chance
    assert client.stops is not None
    while not client.stops.is_set():
        if query.batch is None and not client.run.is_sending:
            sink.producer.pause(_PAUSE_MS)
            continue
        tasks = query.begin()
        batch = tasks[0].batch
        try:
            if not _wait(client, sink, tasks):
                return
            _hit(client, chance)
            sink.commit(batch, [piece for task in tasks for piece in task.result or ()])
        except RmqError as error:
            client.run.world.note("query", "failed", batch.prefix, error)
            _abort(client, sink, tasks)
            if chance.random() < _GIVES_UP:
                query.give_up(batch)
        else:
            query.committed(batch)
        sink.producer.pause(_PAUSE_MS * chance.random())


def _wait(client: ClientProcess, sink: ExactlyOnce, tasks: list[Task]) -> bool:
    """Wait for the results of all tasks, and hand tasks out again. Return False if the driver has to stop."""
    world, query = client.run.world, client.run.query
    assert client.stops is not None
    while any(task.result is None for task in tasks):
        sink.producer.pause(_LOOK_MS)
        if client.stops.is_set():
            return False
        for task in tasks:
            is_late = task.attempts and task.result is None and world.now > task.given + _TASK_SECONDS
            if is_late and task not in query.tasks:
                query.tasks.append(task)
    return True


def _abort(client: ClientProcess, sink: ExactlyOnce, tasks: list[Task]) -> None:
    try:
        sink.abort(tasks[0].batch, [piece for task in tasks for piece in task.result or ()])
    except RmqError as error:
        client.run.world.note("query", "not aborted", error)


# ---------------------------------------------------------------- executors


def _execute(client: ClientProcess, sink: ExactlyOnce) -> None:
    query, chance = client.run.query, client.chance
    assert client.stops is not None
    while not client.stops.is_set():
        if not query.tasks:
            sink.producer.pause(_LOOK_MS)
            continue
        task = query.tasks.popleft()
        task.attempts, task.given = task.attempts + 1, client.run.world.now
        _hit(client, chance)
        try:
            result = _staged(sink, task)
        except RmqError as error:  # the driver gives the task out again
            client.run.world.note("task", "failed", error)
        else:
            task.result = result if task.result is None else task.result


def _staged(sink: ExactlyOnce, task: Task) -> list[bytes]:
    """Stage the rows of a task, and return its half messages."""
    now, rows, staged = sink.progress(task.batch), task.rows, list[Half]()
    if now.is_decided:
        rows = [row for row in rows if (row.msg_id or "").removeprefix(task.batch.prefix) in now.gone]
    try:
        sink.producer.stage(rows, task.batch, staged)
    except RmqError:
        sink.roll_back(staged, task.batch)
        raise
    return pack_halves(staged)


def _hit(client: ClientProcess, chance: random.Random) -> None:
    """Now and then kill or pause the process during its next step. Faults at planned times hit a step rarely."""
    run = client.run
    if run.is_healed or chance.random() >= run.plan.hits_share:
        return
    process, seconds = client.process, chance.random() * _RESTART_SECONDS
    assert process is not None, "the process runs"

    def befall() -> None:
        if run.is_healed or not process.is_alive:
            return
        if is_death:
            client.kill(seconds)
        else:
            process.pause(seconds)

    is_death = chance.random() < 0.7
    run.world.after(chance.random() * (_LIMITED_SECONDS if run.plan.rows_per_s else _STEP_SECONDS), befall)


drive = _blocking(_drive)
execute = _blocking(_execute)


# ---------------------------------------------------------------- oracle


def judge(query: Query, stored: Iterator[tuple[str, ReceivedMessage]]) -> list[str]:
    """Compare the rows in the target with the batches of a query. ``stored``: messages in the order of their log, with
    the name of their broker."""
    copies: Counter[str] = Counter()
    queues: defaultdict[tuple[str, int, str], list[tuple[int, int]]] = defaultdict(list)
    for broker, message in stored:
        if message.topic == TOPIC:
            row = bytes(message.body).decode()
            sink_id, batch_id, partition, number = row.split("/")
            copies[row] += 1
            if partition == "0":
                queues[broker, message.queue_id, sink_id].append((int(batch_id), int(number)))
    findings = []
    for batch, rows in query.rows.items():
        counts = {row: copies.pop(row, 0) for row in rows}
        is_done = batch in query.done
        if set(counts.values()) not in ([{1}] if is_done else [{0}, {1}]):
            wrong = next((row for row, count in counts.items() if count > 1), min(rows, key=counts.__getitem__))
            said = "is committed" if is_done else "was given up"
            findings.append(f"batch {batch} {said}, and row {wrong} is stored {counts[wrong]} times: {counts}")
    findings += [f"row {row} of no batch is stored" for row in copies]
    for queue, numbers in queues.items():
        if numbers != sorted(numbers):
            findings.append(f"rows of {queue[2]} are not in order in queue {queue[1]} of {queue[0]}: {numbers}")
    return findings
