"""A stage on which a situation is played: topics of one side, one query after the other, and their outcome.

A `Side` is a broker and the format of Spark that reads it. The steps of a situation call the methods of a `Stage`. They
wait for conditions: the query has read all messages that it can see, or it has failed. The sink stores the rows of each
batch in a file of its own, which a repeated batch overwrites, so a message that is in two files was read twice.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from pyspark.errors import PySparkException, StreamingQueryException

from rmqkit.spark import start_stream
from rmqkit.spark.broker_pool import DataLost
from tests.interop.streams.reader import Reader, store_batch, stored

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["CONTINUES", "DATA_LOSS", "WAITS", "Outcome", "Side", "Stage"]

CONTINUES = "continues"
WAITS = "hangs"
DATA_LOSS = "fails: data loss"
SETTLE_SECONDS = 120
"""The longest time until a query has read all messages or has failed."""
_CRASH = "the sink was interrupted by the situation"
_KAFKA_LOSS = re.compile(
    "Some data may have been lost because they are not available in Kafka any more|OffsetOutOfRange"
)
_ERROR = re.compile(r"(?:^|Caused by: |: )(?:[a-z]\w*\.)+([A-Z]\w*(?:Exception|Error|Lost|Route)): ?(.*)", re.MULTILINE)


class Side(Protocol):
    """A broker, and the source of Spark that reads it."""

    name: str
    format: str
    """The name of the source."""
    body: str
    """The column with the body of a message."""
    session: Mapping[str, str]
    """Settings that a Spark session needs for the source."""

    def options(self) -> dict[str, str]:
        """Return the options with the address of the broker."""

    def offsets(self, offsets: Mapping[str, Mapping[int, int]]) -> str:
        """Return the JSON of ``startingOffsets`` for offsets by topic and queue."""

    def create(self, topic: str, queues: int) -> None:
        """Create a topic, and return when clients can find it."""

    def widen(self, topic: str, queues: int) -> None:
        """Increase the number of queues of a topic."""

    def delete(self, topic: str) -> None:
        """Delete a topic, and return when clients cannot find it."""

    def send(self, topic: str, queue: int, bodies: Iterable[str]) -> None:
        """Send messages to a queue."""

    def expire(self, topics: Iterable[str]) -> None:
        """Delete all stored messages of some topics."""

    def kill(self) -> None:
        """Kill the broker."""

    def start(self) -> None:
        """Start the broker, for the first time or again."""


class Outcome(Struct, frozen=True):
    """The result of a situation.

    Attributes:
        read: numbers of the messages that were read.
        lost: numbers of the messages that were sent and not read.
        twice: numbers of the messages that the batches contain more than once.
        end: ``continues``, ``hangs``, ``fails: data loss``, or the class of another error of the last query.
        batches: number of batches with rows, if the situation fixes it, else 0.
        said: the text of the error.
    """

    read: str
    lost: str = ""
    twice: str = ""
    end: str = CONTINUES
    batches: int = 0
    said: str = ""


class Stage:
    """The topics, queries and messages of one run of a situation.

    Args:
        name: first part of the names of the topics, unique on the side.
    """

    def __init__(self, side: Side, spark: SparkSession, folder: Path, name: str) -> None:
        self._side = side
        self._spark = spark
        self._name = name
        self._out = folder / "out"
        self._checkpoint = folder / "checkpoint"
        self._folder = folder
        self._numbers = itertools.count()
        self._topics: dict[str, int] = {}
        self._query: StreamingQuery | None = None
        self._error: BaseException | None = None
        self._in_batch: Callable[[], None] | None = None
        self._counts_batches = False
        self._is_stuck = False
        self._out.mkdir(parents=True)

    # ---------------------------------------------------------------- topics

    def topic(self, name: str) -> str:
        """Return the name of a topic of this stage."""
        return f"{self._name}-{name}"

    def create(self, name: str, queues: int = 1) -> None:
        """Create a topic."""
        self._topics[name] = queues
        self._side.create(self.topic(name), queues)

    def widen(self, name: str, queues: int) -> None:
        """Increase the number of queues of a topic."""
        self._topics[name] = queues
        self._side.widen(self.topic(name), queues)

    def delete(self, name: str) -> None:
        """Delete a topic."""
        del self._topics[name]
        self._side.delete(self.topic(name))

    def send(self, name: str, count: int, queue: int = 0) -> None:
        """Send messages with the next numbers."""
        self._side.send(self.topic(name), queue, [str(next(self._numbers)) for _ in range(count)])

    def create_again(self, name: str, count: int) -> None:
        """Delete a topic, create it again, and send messages."""
        queues = self._topics[name]
        self.delete(name)
        self.create(name, queues)
        self.send(name, count)

    def expire(self) -> None:
        """Delete all stored messages of all topics."""
        self._side.expire([self.topic(name) for name in self._topics])

    def restart_broker(self) -> None:
        """Kill the broker, and start it again."""
        self._side.kill()
        self._side.start()

    # ---------------------------------------------------------------- the query

    def start(self, *, available_now: bool = False, **options: str | int) -> None:
        """Start the query, which continues from the checkpoint if there is one. Without options about topics it reads
        topic ``a``; it begins at the first message."""
        given = self.options(**options)
        source = self._spark.readStream.format(self._side.format).options(**given).load()
        rows = source.selectExpr(f"cast({self._side.body} as string) as body")
        writer = rows.writeStream.foreachBatch(self._store).option("checkpointLocation", str(self._checkpoint))
        trigger = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
        self._error, self._query = None, None
        try:
            self._query = start_stream(trigger)
        except StreamingQueryException as error:
            self._error = error

    def options(self, **options: str | int) -> dict[str, str]:
        """Return the options of the source for options of a situation: names of topics become those of this stage."""
        given = {"startingOffsets": "earliest", **{name: str(value) for name, value in options.items()}}
        for name in ("subscribe", "subscribePattern"):
            if name in given:
                given[name] = ",".join(map(self.topic, given[name].split(",")))
        if not given.keys() & {"subscribe", "subscribePattern"}:
            given["subscribe"] = self.topic("a")
        return {**self._side.options(), **given}

    def offsets(self, offsets: Mapping[str, Mapping[int, int]]) -> str:
        """Return the JSON of ``startingOffsets``."""
        return self._side.offsets({self.topic(name): queues for name, queues in offsets.items()})

    def settle(self) -> None:
        """Wait until the query has read all messages that it can see, or has failed."""
        query = self._query
        if query is None:
            return

        def all_read() -> None:
            try:
                query.processAllAvailable()
            except (StreamingQueryException, PySparkException) as error:
                self._error = error

        self._within(all_read)

    def ended(self) -> None:
        """Wait until a query of ``availableNow`` has stopped."""
        query = self._query
        if query is None:
            return

        def awaited() -> None:
            try:
                query.awaitTermination()
            except StreamingQueryException as error:
                self._error = error

        self._within(awaited)

    def _within(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(SETTLE_SECONDS)
        self._is_stuck = thread.is_alive()

    def stop(self) -> None:
        """Stop the query between two batches."""
        self.settle()
        if self._query is not None:
            self._query.stop()

    def count_read(self) -> int:
        """Return the number of rows in the batches so far."""
        return sum(len(rows) for rows in stored(self._out).values())

    def until_read(self, count: int) -> None:
        """Wait until the batches contain a number of rows, or the query has failed."""

        def is_read() -> None:
            while self.count_read() < count and self._query is not None and self._query.isActive:
                self._query.awaitTermination(0.1)  # type: ignore[arg-type]

        with contextlib.suppress(StreamingQueryException):
            self._within(is_read)

    def before_read(self, action: Callable[[], None]) -> None:
        """Run an action in the next batch, after it is planned and before its messages are read."""
        self._in_batch = action

    def interrupt_batch(self) -> None:
        """Let the next batch fail after it is planned: the next query plans it again. Wait for the failure."""

        def crash() -> None:
            raise RuntimeError(_CRASH)

        self._in_batch = crash

    def interrupted(self) -> None:
        """Wait until the interrupted query has failed. Raises AssertionError: it failed for another reason."""
        self.settle()
        assert self._error is not None and _CRASH in str(self._error), f"the batch was not interrupted: {self._error}"
        self._error, self._query = None, None

    def move_checkpoint(self) -> None:
        """Copy the checkpoint to another folder, remove the first one, and continue with the copy."""
        copy = self._checkpoint.with_name(f"{self._checkpoint.name}-moved")
        shutil.copytree(self._checkpoint, copy)
        shutil.rmtree(self._checkpoint)
        self._checkpoint = copy

    def forget_commit(self) -> None:
        """Remove the last commit from the checkpoint, as if the driver had died after the sink wrote the batch."""
        commits = self._checkpoint / "commits"
        last = max(int(file.name) for file in commits.iterdir() if file.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)

    @contextlib.contextmanager
    def reader(self, master: str) -> Iterator[Reader]:
        """Run the query in a driver of its own, whose processes can be killed."""
        with Reader(self._side, master, self.options(), self._out, self._checkpoint, self._folder) as running:
            yield running

    def count_batches(self) -> None:
        """Report the number of batches, because the situation fixes it."""
        self._counts_batches = True

    def close(self) -> Outcome:
        """Stop the query, and return the outcome."""
        if not self._is_stuck:
            self.settle()
        if self._query is not None:
            self._query.stop()
        batches = stored(self._out)
        counts = Counter(int(body) for rows in batches.values() for body in rows)
        sent = range(next(self._numbers))
        end, said = (WAITS, "") if self._is_stuck else failure(self._error)
        return Outcome(
            read=spans(number for number in counts),
            lost=spans(number for number in sent if number not in counts),
            twice=spans(number for number, count in counts.items() if count > 1),
            end=end,
            batches=sum(1 for rows in batches.values() if rows) if self._counts_batches else 0,
            said=said,
        )

    def _store(self, rows: DataFrame, batch_id: int) -> None:
        action, self._in_batch = self._in_batch, None
        if action is not None:
            action()
        store_batch(self._out, batch_id, rows)


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as spans: ``0-9,20-29``."""
    ordered = sorted(numbers)
    groups = itertools.groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    found = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in found)


def failure(error: BaseException | None) -> tuple[str, str]:
    """Return the class and the text of the innermost error of a failed query, or ``continues``."""
    if error is None:
        return CONTINUES, ""
    if _KAFKA_LOSS.search(str(error)):
        return DATA_LOSS, str(error)[:300]
    found = _ERROR.findall(str(error))
    if not found:
        return type(error).__name__, str(error)[:300]
    name, text = found[-1]
    return DATA_LOSS if name == DataLost.__name__ else name, text[:300]
