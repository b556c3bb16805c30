"""Pruned reads: in every query and session they have the same rows as reads of all columns."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.errors import PySparkException, SparkRuntimeException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from rmqkit.arrow.schema import MESSAGE_COLUMNS
from rmqkit.spark import read, register
from rmqkit.spark.jobs import pruning
from rmqkit.spark.jobs.pruning import planned_reads, unread
from rmqkit.spark.jobs.query import sql
from rmqkit.testing.clock import StandingClock
from tests.store.stores import message, opened, put_all, small_settings

pytestmark = pytest.mark.spark

THREADS = 8
PLANS = int(os.environ.get("PLANS", "15"))
"""`make pruning` sets 200."""
BEGIN_MS = 1_700_000_000_000
Work = Callable[[DataFrame], DataFrame]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with a message every ten seconds, of three topics and four queues, some with keys, some without tags."""
    root, clock = tmp_path_factory.mktemp("pruning"), StandingClock(BEGIN_MS)
    with opened(root, small_settings(), clock=clock) as store:
        for number in range(60):
            properties = {"KEYS": f"k{number % 7} k{number}"} | ({"TAGS": "abc"[number % 3]} if number % 5 else {})
            put_all(store, message(f"T{number % 3}", number % 4, b"%d" % number + bytes(30), **properties))
            clock.ms += 10_000
    return str(root)


@pytest.fixture(scope="module")
def whole(spark: SparkSession, root: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """All rows and columns of the store, as Parquet: Spark itself prunes the reads of that."""
    path = str(tmp_path_factory.mktemp("whole"))
    spark.read.format("rocketmq-store").load(root).write.mode("overwrite").parquet(path)
    return path


@pytest.fixture(scope="module")
def sessions(spark: SparkSession, whole: str) -> Iterator[list[SparkSession]]:
    """Sessions with plans that follow what is measured and without, with errors for casts and without, and with texts
    of plans in which topics and long hexadecimal words are hidden."""
    made = []
    for number in range(4):
        session = spark.newSession()
        register(session)
        session.conf.set("spark.sql.session.timeZone", "America/New_York")
        session.conf.set("spark.sql.adaptive.enabled", str(number % 2 == 0).lower())
        session.conf.set("spark.sql.ansi.enabled", str(number // 2 == 0).lower())
        session.conf.set("spark.sql.redaction.string.regex", "[0-9a-f]{32}|T1")
        session.udf.register("half", lambda number: number // 2, "bigint")
        session.read.parquet(whole).createOrReplaceTempView("everything")
        session.sql("values (0, 'zero'), (1, 'one') as names(id, name)").createOrReplaceTempView("names")
        made.append(session)
    yield made
    spark.catalog.clearCache()


# ---------------------------------------------------------------- queries

_COLUMNS = ["topic", "tags", "keys", "queueId", "queueOffset", "commitLogOffset", "msgId", "storeSize", "bodyCrc"]
_NUMBERS = ["queueId", "queueOffset", "commitLogOffset", "length(body)", "size(properties)", "half(queueOffset)"]
_TESTS = [
    "topic = 'T1'", "topic in ('T0', 'T2')", "queueId > 1", "queueId = 1 and queueId > 2", "tags is null",
    "tags <=> 'a'", "not (topic = 'T1' or queueId = 0)", "(queueId > 2 and queueId = 1) or topic = 'T0'",
    "storeTimestamp >= timestamp_millis(1700000300000)", "storeTimestamp < timestamp'2023-11-14 17:17:00'",
    "properties['KEYS'] like 'k3%'", "length(body) > 31", "half(queueId) = 1", "cast(queueId as string) = '2'",
    "topic = tags", "1 = 0", "topic != 'T2' and bornTimestamp <= storeTimestamp", "coalesce(tags, keys) > 'b'",
]  # fmt: skip


def statement(chosen: random.Random) -> str:
    """A statement over ``messages``."""

    def test() -> str:
        return chosen.choice(_TESTS)

    def names(count: int) -> str:
        return ", ".join(chosen.sample(_COLUMNS, count))

    number, group = chosen.choice(_NUMBERS), chosen.choice(_COLUMNS[:4])
    return chosen.choice([
        f"select {names(3)} from messages where {test()} and {test()}",
        f"select {names(1)}, count(*), sum({number}) from messages where {test()} group by 1",
        f"select count(*), max({number}) from messages where {test()} or {test()}",
        (f"select a.queueOffset, b.{group} from messages a join messages b on a.{group} = b.{group}"
        f" and a.commitLogOffset < b.commitLogOffset where a.topic = 'T1' and b.queueId = {chosen.randrange(4)}"),
        (f"select l.topic, r.{group} from messages l left join (select * from messages where {test()}) r"
        " on l.commitLogOffset = r.commitLogOffset"),
        (f"with few as (select * from messages where {test()}), most as (select topic, {number} n from few)"
        f" select topic, n, (select count(*) from few) from most"),
        f"select tags, {number} from messages union all select topic, queueId from messages where {test()}",
        f"select {group} from messages where {test()} except all select {group} from messages where {test()}",
        (f"select topic, {number}, row_number() over (partition by topic order by commitLogOffset) from messages"
        f" where {test()}"),
        f"select msgId, lag({group}) over (partition by queueId order by commitLogOffset desc) from messages",
        f"select {names(2)}, (select max({number}) from messages where {test()}) from messages where {test()}",
        f"select {names(2)} from messages where queueOffset in (select queueOffset from messages where {test()})",
        (f"select {names(2)} from messages m where not exists"
        f" (select 1 from messages n where n.queueId = m.queueId and n.{group} is not null and n.storeSize > 9)"),
        f"select m.queueId, n.name, m.{group} from messages m join names n on m.queueId = n.id where {test()}",
        f"select e.key, count(*) from messages lateral view explode(properties) e as key, v where {test()} group by 1",
        f"select half(commitLogOffset), {group} from messages where {test()}",
        f"select * from messages where {test()} order by commitLogOffset limit 5",
        f"select {number} n from messages where {test()} group by all having n > 0",
        f"select distinct {group}, queueId from (select *, upper(topic) t from messages) where {test()}",
        "select count(*) from messages",
    ])  # fmt: skip


def work(chosen: random.Random) -> Work:
    """Some work over a data frame of messages."""
    test, other, group = chosen.choice(_TESTS), chosen.choice(_TESTS), chosen.choice(_COLUMNS[:4])
    made: list[Work] = [
        lambda rows: rows.where(test).groupBy(group).agg(f.count("*"), f.max("queueOffset")),
        lambda rows: rows.where(test).select(group).unionAll(rows.where(other).select("keys")),
        lambda rows: rows.where(test).cache().groupBy("topic").agg(f.min(group)),
        lambda rows: rows.select("topic", "queueId", "tags").cache().where(test_of_cached).select("queueId"),
        lambda rows: rows.where(test).dropDuplicates([group, "queueId"]).groupBy(group).count(),
        lambda rows: rows.repartition(3, "queueId").where(test).select("msgId", group),
        lambda rows: rows.where(test).mapInArrow(lambda batches: batches, rows.schema).select("topic", "bodyCrc"),
        lambda rows: rows.where(test).withColumn("n", f.expr("half(queueOffset)")).select("n", group),
        lambda rows: rows.rollup("topic", "queueId").agg(f.sum("storeSize")).where("queueId is null"),
        lambda rows: rows.groupBy("topic").pivot("queueId", [0, 1]).agg(f.count(group)),
        lambda rows: (
            rows.sparkSession.createDataFrame([("T1", 5)], "topic string, n int").join(rows, "topic").select("n")
        ),
    ]
    test_of_cached = chosen.choice(["topic = 'T1'", "queueId = 2 and tags is not null"])
    return chosen.choice(made)


def outcome(frame: DataFrame) -> list[str]:
    """Return the sorted rows or the error. With ANSI a cast may fail, both with and without pruning."""
    try:
        return sorted(str(row) for row in frame.collect())
    except PySparkException as error:
        return [str(error.getCondition())]


def difference(session: SparkSession, root: str, whole: str, seed: int) -> str:
    """The query if its outcome is another one than that of a read of everything, else no text."""
    chosen = random.Random(seed)
    if chosen.random() < 0.6:
        text = statement(chosen)
        found, expected = sql(session, root, text), session.sql(text.replace("messages", "everything"))
    else:
        some, text = work(chosen), f"work {seed}"
        found, expected = read(session, root, some), some(session.read.parquet(whole))
    rows, wanted = outcome(found), outcome(expected)
    return "" if rows == wanted else f"{seed}: {text}: {rows!s:.200} instead of {wanted!s:.200}"


@pytest.mark.parametrize("count", [6, pytest.param(PLANS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_queries_of_many_threads_have_the_rows_of_a_read_of_everything(
    count: int, sessions: list[SparkSession], root: str, whole: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = sys.stdout
    with ThreadPoolExecutor(THREADS) as threads:
        differences = threads.map(
            lambda seed: difference(sessions[seed % len(sessions)], root, whole, seed), range(count)
        )
        assert [told for told in differences if told] == []
    assert sys.stdout is printer
    assert capsys.readouterr().out == ""
    for session in sessions:
        assert sorted(row.tableName for row in session.sql("show tables").collect()) == ["everything", "names"]


# ---------------------------------------------------------------- what is not understood


def reads_of(spark: SparkSession, some: Work) -> pruning.Read:
    frames: dict[str, DataFrame] = {}
    reads = planned_reads(spark, lambda: some(frames["m"]), {"m": MESSAGE_COLUMNS}, frames.__setitem__)
    return reads["m"]


@pytest.fixture
def every_column() -> frozenset[str]:
    return frozenset(column.name for column in MESSAGE_COLUMNS)


@pytest.mark.parametrize(
    ("some", "columns"),
    [
        (lambda rows: rows.select("topic"), {"topic"}),
        (lambda rows: rows.where("queueId = 1 and queueId > 2").select("topic"), {"topic", "queueId"}),
        (lambda rows: rows.where("topic = 'x'").cache().select("tags"), None),
        (lambda rows: rows.sparkSession.createDataFrame(rows.rdd, rows.schema).select("topic"), None),
    ],
    ids=["a column", "a test that nothing meets", "a cached frame", "rows that went through Python"],
)
def test_a_plan_that_hides_columns_reads_all_of_them(
    some: Work, columns: set[str] | None, spark: SparkSession, every_column: frozenset[str]
) -> None:
    assert reads_of(spark, some).columns == (every_column if columns is None else columns)


@pytest.mark.parametrize("lists", ["", "parquet"])
def test_both_readers_of_parquet_are_understood(lists: str, spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.sources.useV1SourceList", lists)
    found = reads_of(session, lambda rows: rows.where("topic = 'T1'").select("tags"))
    assert found.columns == {"topic", "tags"}
    assert len(found.conditions) == (1 if lists else 0)


def test_a_leaf_that_is_not_known_reads_everything(
    spark: SparkSession, every_column: frozenset[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_numbers = lambda rows: rows.select("topic").union(spark.range(3).selectExpr("cast(id as string)"))  # noqa: E731
    assert reads_of(spark, with_numbers).columns == {"topic"}
    monkeypatch.setattr(pruning, "_READS_NO_FILE", set())
    assert reads_of(spark, with_numbers) == pruning.Read(every_column)


def test_a_column_that_was_not_read_raises_and_is_never_null(spark: SparkSession) -> None:
    columns = {column.name: column for column in MESSAGE_COLUMNS}
    frame = spark.range(1).selectExpr("id", *(f"{unread(one)} as {one.name}" for one in columns.values()))
    assert [field.dataType.simpleString() for field in frame.schema.fields[1:]] == [
        one.spark for one in columns.values()
    ]
    assert frame.select("id").collect() == [(0,)]
    for expression in ("body", "properties['a']", "count(topic)", "tags is null", "coalesce(queueId, 1)"):
        with pytest.raises(SparkRuntimeException, match=r"rmqkit: the column \w+ was not read"):
            frame.selectExpr(expression).collect()
