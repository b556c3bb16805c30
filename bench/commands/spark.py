"""``rmq bench spark``: the readers of a store beside other ways to do the same, from one interleaved run.

===  ==================================================  ==============================================================
row  ours                                                compared with
===  ==================================================  ==============================================================
1    seven queries of a store, by the reader in Java     Spark's scan of the same rows in zstd Parquet
2    the same work                                       the reader in Python, with the options that fit the query
3    `archive`                                           a data frame written to Parquet
4    `rebuild` of the consume queues                     a shuffle of one row per message
5    `verify` of the log                                 ``zlib.crc32`` of the bodies, on one core
6    a stream from a broker; a batch with 32 rows        a batch read of the same topic; a bound in ms
7    a scan of a large store; of many topics; on two     of a small store; of two topics; on one core
     cores; memory
===  ==================================================  ==============================================================

The figures are CPU time of this process, its JVM and the Python workers of the JVM (`interleaved`). Work of a single
core is measured in its own process. The CPU time of servers is not included. Wall time is reported too. The data are
those of the sample store, whose bodies are all different.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from bench.commands import naive_spark, sample_store
from bench.commands.interleaved import Figure, Ratio, Rounds, Work, verdict
from bench.commands.sample_store import FIRST_STORED_MS, QUEUES, TOPICS, write_log
from bench.commands.served import serve_standalone
from rmqkit.errors import RmqError
from rmqkit.protocol.schemas.topics import TopicConfig, TopicConfigTable
from rmqkit.spark.broker_format import BrokerTwin
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.rebuild import rebuild as rebuild_with_spark
from rmqkit.spark.jobs.verify import verify
from rmqkit.spark.session import spark_session
from rmqkit.spark.source.store import JAR, StoreSource, StoreTwin, store_options, store_splits
from rmqkit.store.files import JsonFile
from rmqkit.store.offline.rebuild import rebuild
from rmqkit.store.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["ROWS", "measure"]

ROWS = range(1, 8)
"""The ratios; row 7 is the growth with the store."""

Case = tuple[Ratio, Work, Work]
"""A ratio, our work, the other work."""

_LIVE = "100B live"
_DATA = {"1K": (1024, 1.0), "100B": (100, 0.5), _LIVE: (100, 0.45)}
"""Name of the data → bytes of a body, share of the requested MiB."""
_CHECKOUT = Path(__file__).parents[2]
_PLAIN = ("1K", "100B")
_LIVE_ROW, _GROWTH_ROW = 6, 7
_BATCH_ROWS = 400_000
_LOOK_S = 0.02
_SAMPLE_S = 0.2
_SMALL_BATCHES = 30
_SMALL_BATCH_ROWS = 32
_BOUNDS = {3: (2, 3), 4: (1.6, 2.5), 5: (0.2, 0.35), 6: (0.5, 0.7)}
"""Row → floor and ambition."""
_TWIN_BOUNDS = (1, 2)
_GROUP_BYTES = 32 << 20
"""Size of the row groups in Parquet. Each task buffers one while it writes, so Spark's default of 128 MiB needs much of
the memory of a JVM."""
_OVERHEAD_MS = (400, 250)
_GROWTH_MAX = 1.2
_CORES_MAX = 1.1
_WARM_UPS = 3
_TOPICS_FEW, _TOPICS_MANY = 2, 400
_TOPIC = "topic-0"
_QUEUE_COLUMNS = ("topic", "queueId", "queueOffset", "commitLogOffset", "storeSize", "tags")


def measure(
    *,
    mib: int,
    repeats: int,
    rows: Sequence[int] = ROWS,
    gib: int = 8,
    directory: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Figure]:
    """Return the figures of some rows.

    Args:
        mib: size of the log with bodies of 1 KiB; that with bodies of 100 B is half as large.
        repeats: number of counted rounds.
        gib: size of the log in the last row.
        directory: the parent of the temporary directory, None for the system's default.
        tell: called with a line about every piece of work.

    Raises:
        RmqError: the reader in Java is missing, or Java or the broker cannot be started.
    """
    if not JAR.exists():
        raise RmqError(f"{JAR} is missing, so Spark would read with Python: make env builds it, with a JDK")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rmq-bench-", dir=directory)))
        bench = _Bench(folder, stack, tell)
        for row in rows:
            for name in [] if row not in _CASES else [_LIVE] if row == _LIVE_ROW else _PLAIN:
                bench.add(row, bench.data(name, mib))
        figures = bench.rounds.run(repeats)
        if _LIVE_ROW in rows:
            figures += bench.small_batches()
        if _GROWTH_ROW in rows:
            figures += bench.growth(gib, repeats)
        return sorted(figures, key=lambda figure: int(figure["row"]))


class Data(Struct, frozen=True):
    """A store and its number of messages."""

    name: str
    root: Path
    count: int

    def ratio(self, row: int, what: str, ours: str, other: str, bounds: tuple[float, float] | None = None) -> Ratio:
        """Return a ratio of two pieces of work over the store. The default bounds are those of the row."""
        floor, ambition = bounds or _BOUNDS[row]
        names = f"{ours}, {self.name}", f"{other}, {self.name}"
        return Ratio(row, what, self.name, self.count, *names, floor, ambition)


class Query(Struct, frozen=True):
    """A query of messages. ``options`` let the reader in Python leave out what the query does not need. ``bounds`` are
    floor and ambition of the ratio to Parquet. ``indexed`` are the options of our reads: only an option makes a reader
    use the index."""

    name: str
    frame: Callable[[DataFrame], DataFrame]
    options: dict[str, str]
    bounds: tuple[float, float]
    indexed: dict[str, str] = {}


def queries(count: int) -> list[Query]:
    """Return the queries of a sample store with ``count`` messages."""
    low_ms, high_ms = (FIRST_STORED_MS + count * hour // 24 for hour in (12, 13))
    within = f"storeTimestamp >= timestamp_millis({low_ms}) and storeTimestamp < timestamp_millis({high_ms})"
    number = count // 2
    topic, key = f"topic-{number % TOPICS}", f"key-{number:010d}"
    by_key = f"topic = '{topic}' and keys = '{key}'"
    return [
        Query("all columns", lambda messages: messages, {}, (1.5, 2)),
        Query("count", lambda messages: messages.groupBy().count(), {"columns": "queueId"}, (0.5, 1)),
        Query(
            "two columns",
            lambda messages: messages.select("topic", "queueId"),
            {"columns": "topic,queueId"},
            (0.5, 1),
        ),
        Query(
            "one topic of 8",
            lambda messages: messages.where(f"topic = '{topic}'").selectExpr("sum(length(body)) as bytes"),
            {"columns": "topic,body", "topic": topic},
            (1.5, 2),
        ),
        Query(
            "one hour of 24",
            lambda messages: messages.where(within),
            {"startingTimestamp": str(low_ms), "endingTimestamp": str(high_ms)},
            (1.5, 2),
        ),
        Query(
            "by key",
            lambda messages: messages.where(by_key),
            {"topic": topic, "key": key},
            (1.5, 2),
            {"topic": topic, "key": key},
        ),
        Query(
            "group by topic, tags",
            lambda messages: messages.groupBy("topic", "tags").count(),
            {"columns": "topic,tags"},
            (1, 1.5),
        ),
    ]


class _Bench:
    def __init__(self, folder: Path, stack: ExitStack, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._stack = stack
        self.rounds = Rounds(tell)
        self._data: dict[str, Data] = {}
        self._name_servers = ""
        self._spark: SparkSession | None = None

    def data(self, name: str, mib: int) -> Data:
        """Return a store with one of the kinds of messages, created at the first call."""
        if name not in self._data:
            root, (body_bytes, share) = self._folder / name.replace(" ", "-"), _DATA[name]
            topics = 1 if name == _LIVE else TOPICS
            count = write_log(root, int((mib << 20) * share), body_bytes, topics=topics)
            rebuild(root, StoreSettings(), queues=False, index=True)
            self._data[name] = Data(name, root, count)
        return self._data[name]

    def add(self, row: int, data: Data) -> None:
        """Add the work of a row. Work that several rows need runs once a round."""
        for ratio, ours, other in _CASES[row](self, data):
            self.rounds.add(ratio, ours, other)

    @property
    def spark(self) -> SparkSession:
        """Return the session, started at the first call."""
        if self._spark is None:
            self._restart("local[2]")
        assert self._spark is not None, "the session is started"
        return self._spark

    def parquet(self, data: Data) -> Iterator[Case]:
        """Row 1."""
        target = self._folder / f"{data.root.name}.parquet"
        self._write_parquet(data, target)
        for query in queries(data.count):
            what = f"{query.name}: store / Parquet"
            ratio = data.ratio(1, what, f"store, {query.name}", f"Parquet, {query.name}", query.bounds)
            stored = partial(self._loaded, data, **query.indexed)
            written = partial(self.spark.read.parquet, str(target))
            yield ratio, _queried(query, stored), _queried(query, written)

    def twins(self, data: Data) -> Iterator[Case]:
        """Row 2."""
        for query in queries(data.count):
            what = f"{query.name}: Java / Python"
            ratio = data.ratio(2, what, f"store, {query.name}", f"Python, {query.name}", _TWIN_BOUNDS)
            java = partial(self._loaded, data, **query.indexed)
            python = partial(self._loaded, data, StoreTwin.name(), **query.options)
            yield ratio, _queried(query, java), _queried(query, python)

    def archives(self, data: Data) -> Iterator[Case]:
        """Row 3."""
        archived, written = self._folder / "archived", self._folder / "written"

        def in_workers() -> None:
            shutil.rmtree(archived, ignore_errors=True)
            archive(self.spark, str(data.root), str(archived), includes_newest=True)

        def by_writer() -> None:
            self._write_parquet(data, written)

        yield data.ratio(3, "archive / DataFrame to Parquet", "archive", "DataFrame to Parquet"), in_workers, by_writer

    def rebuilds(self, data: Data) -> Iterator[Case]:
        """Row 4."""
        target = self._folder / f"queues-{data.root.name}"

        def packed() -> None:
            rebuild_with_spark(self.spark, str(data.root), StoreSettings(), queues=True, index=False)

        def shuffled() -> None:
            shutil.rmtree(target, ignore_errors=True)
            rows = self._loaded(data).select(*_QUEUE_COLUMNS).repartition("topic", "queueId")
            rows = rows.sortWithinPartitions("topic", "queueId", "queueOffset")
            rows.write.format("queue-files").mode("append").save(str(target))

        yield data.ratio(4, "rebuild of queues / row shuffle", "rebuild", "row shuffle"), packed, shuffled

    def checks(self, data: Data) -> Iterator[Case]:
        """Row 5."""
        works = [naive_spark.crc_of_bodies(split) for split in store_splits(store_options({"path": str(data.root)}))]

        def checked() -> None:
            verify(self.spark, str(data.root), StoreSettings(), log_only=True)

        alone = partial(_alone, lambda: sum(work() for work in works))
        yield data.ratio(5, "verify / zlib.crc32 of the bodies, 1 thread", "verify", "CRC"), checked, alone

    def streams(self, data: Data) -> Iterator[Case]:
        """Row 6."""
        self._serve(data)
        batch_rows = min(_BATCH_ROWS, data.count // 2)

        def stream() -> float:
            """Return the cost of a stream, with the first batch counted as the average of the others: it starts Spark's
            machinery.
            """
            query = self._stream(batch_rows).trigger(availableNow=True).start()
            while query.isActive and not query.recentProgress:
                time.sleep(_LOOK_S)
            start = self.rounds.tree.cpu_seconds()
            spent = start
            while query.isActive:
                # The source's Python process stops with the query, and its time is no longer counted.
                spent = max(spent, self.rounds.tree.cpu_seconds())
                time.sleep(_SAMPLE_S)
            query.awaitTermination()  # raises the error of a failed query
            return (spent - start) * data.count / (data.count - batch_rows)

        ratio = data.ratio(6, f"stream of {batch_rows:,} rows a batch / batch read", "stream", "batch read")
        reader = self.spark.read.format("rocketmq").options(nameServer=self._name_servers, subscribe=_TOPIC)
        by_twin = self.spark.read.format(BrokerTwin.name()).options(nameServer=self._name_servers, subscribe=_TOPIC)
        yield ratio, stream, _to_nowhere(reader.load)
        ratio = data.ratio(6, "batch read: Java / Python", "batch read again", "Python batch read", _TWIN_BOUNDS)
        yield ratio, _to_nowhere(reader.load), _to_nowhere(by_twin.load)

    def small_batches(self) -> Iterator[Figure]:
        """Yield the wall time in ms of a stream's batch that reads almost nothing."""
        query = self._stream(_SMALL_BATCH_ROWS).start()
        while (query.lastProgress or {"batchId": 0})["batchId"] < _SMALL_BATCHES and query.isActive:
            query.awaitTermination(1)
        query.stop()
        query.awaitTermination()  # raises the error of a failed query
        took_ms = [progress["durationMs"]["triggerExecution"] for progress in query.recentProgress[5:]]
        median_ms = statistics.median(took_ms)
        yield {
            "row": _LIVE_ROW,
            "what": f"ms of a batch of {_SMALL_BATCH_ROWS} rows (wall, median)",
            "data": "100B",
            "ratio": round(median_ms),
            "ms_min": min(took_ms),
            "floor": _OVERHEAD_MS[0],
            "ambition": _OVERHEAD_MS[1],
            "verdict": verdict(median_ms, *_OVERHEAD_MS, at_most=True),
        }

    def growth(self, gib: int, repeats: int) -> Iterator[Figure]:
        """Row 7: the cost of a message of a larger store, of one with more topics, and of one on a second core."""
        large, small = self._folder / "large", self._folder / "small"
        self._data["large"] = Data("large", large, write_log(large, gib * sample_store.SEGMENT_BYTES, 1024))
        (small / "commitlog").mkdir(parents=True)
        first = f"{0:020d}"
        (small / "commitlog" / first).hardlink_to(large / "commitlog" / first)
        self._data["small"] = Data("small", small, self._data["large"].count // gib)
        for name, topics in (("few", _TOPICS_FEW), ("many", _TOPICS_MANY)):
            root = self._folder / name
            self._data[name] = Data(name, root, write_log(root, sample_store.SEGMENT_BYTES, 1024, topics=topics))
        self._scan(self._data["small"])()  # so that Java compiles its hot code
        memory_mib: dict[str, list[float]] = {"small": [], "large": []}
        for _ in range(repeats):
            for master, names in (("local[2]", ("small", "large", "few", "many")), ("local[1]", ("small",))):
                self._restart(master)
                for _ in range(_WARM_UPS):  # the first queries of a session cost more
                    self._scan(self._data["small"])()
                for name in names:
                    self.rounds.take(f"{master}, {name}", self._scan(self._data[name]))
                    if master == "local[2]" and name in memory_mib:
                        memory_mib[name].append(_driver_mib(self.spark))
        counts, bodies = {name: data.count for name, data in self._data.items()}, "1K"
        for what, ours, other, bound in (
            (f"{gib} GiB / 1 GiB", "local[2], large", "local[2], small", _GROWTH_MAX),
            (f"{_TOPICS_MANY} topics / {_TOPICS_FEW} topics", "local[2], many", "local[2], few", _GROWTH_MAX),
            ("local[2] / local[1]", "local[2], small", "local[1], small", _CORES_MAX),
        ):
            ours_count, other_count = (counts[name.split(", ")[1]] for name in (ours, other))
            yield self.rounds.figure(
                Ratio(
                    *(_GROWTH_ROW, f"CPU of a message, {what}", bodies, ours_count, ours, other, bound, 0),
                    at_most=True,
                    other_count=other_count,
                )
            )
        mib = {name: statistics.median(seen) for name, seen in memory_mib.items()}
        yield {
            "row": _GROWTH_ROW,
            "what": f"driver, JVM and Python: {mib['large']:.0f} MiB / {mib['small']:.0f} MiB, {gib} GiB / 1 GiB",
            "data": bodies,
            "ratio": round(mib["large"] / mib["small"], 2),
            "floor": _GROWTH_MAX,
            "verdict": verdict(mib["large"] / mib["small"], _GROWTH_MAX, 0, at_most=True),
        }

    def _restart(self, master: str) -> None:
        if self._spark is not None:
            self._spark.stop()
        self._spark = _session(master)
        self._stack.callback(self._spark.stop)

    def _loaded(self, data: Data, source: str = StoreSource.name(), **options: str) -> DataFrame:
        return self.spark.read.format(source).options(**options).load(str(data.root))

    def _scan(self, data: Data) -> Work:
        return _to_nowhere(partial(self._loaded, data))

    def _write_parquet(self, data: Data, target: Path) -> None:
        writer = self._loaded(data).write.option("compression", "zstd").option("parquet.block.size", _GROUP_BYTES)
        writer.mode("overwrite").parquet(str(target))

    def _serve(self, data: Data) -> None:
        """Let a broker serve a store whose messages belong to one topic."""
        rebuild(data.root, StoreSettings(), queues=True, index=False)
        newest = data.root / "commitlog" / f"{0:020d}"
        os.truncate(newest, sample_store.SEGMENT_BYTES)  # as brokers create it
        table = TopicConfigTable(topic_config_table={_TOPIC: TopicConfig(_TOPIC, QUEUES, QUEUES)})
        JsonFile(data.root / "config" / "topics.json").save(table)
        self._name_servers, pid = self._stack.enter_context(serve_standalone(data.root))
        self.rounds.tree.excluded.add(pid)

    def _stream(self, rows: int) -> DataStreamWriter:
        """Return a stream of the topic from its first message on that writes nothing, with a new checkpoint."""
        reader = self.spark.readStream.format("rocketmq").options(nameServer=self._name_servers, subscribe=_TOPIC)
        stream = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger=str(rows)).load()
        checkpoint = tempfile.mkdtemp(prefix="checkpoint-", dir=self._folder)
        return stream.writeStream.format("noop").option("checkpointLocation", checkpoint)


_CASES: dict[int, Callable[[_Bench, Data], Iterator[Case]]] = {
    1: _Bench.parquet,
    2: _Bench.twins,
    3: _Bench.archives,
    4: _Bench.rebuilds,
    5: _Bench.checks,
    6: _Bench.streams,
}


def _session(master: str) -> SparkSession:
    # Spark's Python workers import `naive_spark` by name, from the same path as this process.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_CHECKOUT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    spark = spark_session("bench", master)
    spark.dataSource.register(naive_spark.QueueFiles)
    return spark


def _to_nowhere(load: Callable[[], DataFrame]) -> Work:
    """Return work that loads and reads rows: Spark plans a data frame only once, but each run must include planning."""
    return lambda: load().write.format("noop").mode("overwrite").save()


def _queried(query: Query, load: Callable[[], DataFrame]) -> Work:
    return _to_nowhere(lambda: query.frame(load()))


def _alone(work: Callable[[], int]) -> float:
    """Return CPU seconds of work that this process does by itself."""
    start = time.process_time()
    work()
    return time.process_time() - start


def _driver_mib(spark: SparkSession) -> float:
    """Return resident memory of this process and the JVM, without file pages, after a collection."""
    runtime: Any = spark.sparkContext._jvm
    runtime.java.lang.System.gc()
    jvm = int(runtime.java.lang.ProcessHandle.current().pid())
    sizes = []
    for process in (os.getpid(), jvm):
        status = Path(f"/proc/{process}/status").read_text()
        sizes.append(int(status.partition("RssAnon:")[2].split()[0]))
    return sum(sizes) / 1024
