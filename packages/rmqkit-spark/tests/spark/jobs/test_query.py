"""Messages by key, id and time, and SQL: the same of a store and of its archive, and as little read as can be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from rmqkit.errors import SettingsError
from rmqkit.spark import read
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.query import VIEWS, query, sql
from rmqkit.spark.source.store import JAR
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import record_at, segment_of
from tests.spark.object_store import serve_objects
from tests.store.stores import message, opened, put_all, small_settings

pytestmark = pytest.mark.spark

_PATHS = ["store", "archive"]
in_java = pytest.mark.skipif(not JAR.exists(), reason="there is no JDK, so there is no reader in Java")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> GoldenStore:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def paths(golden: GoldenStore, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A store, and an archive of it."""
    target = tmp_path_factory.mktemp("archive")
    archive(spark, str(golden.root), str(target), includes_newest=True)
    return {"store": str(golden.root), "archive": str(target)}


@pytest.fixture(scope="module")
def find(spark: SparkSession, golden: GoldenStore, paths: dict[str, str]) -> Callable[..., list[tuple[str, int, int]]]:
    """Topics, queues and offsets of what a query finds."""
    slots = golden.manifest["brokerConf"]["maxHashSlotNum"]

    def found(path: str, **asked: Any) -> list[tuple[str, int, int]]:
        options = {"columns": "topic,queueId,queueOffset", "maxHashSlotNum": slots}
        return sorted(tuple(row) for row in query(spark, paths[path], options, **asked).collect())

    return found


def _listed(golden: GoldenStore, is_wanted: Callable[[dict[str, Any]], bool]) -> list[tuple[str, int, int]]:
    messages = golden.manifest["messages"]
    return sorted((one["topic"], one["queueId"], one["queueOffset"]) for one in messages if is_wanted(one))


@pytest.mark.parametrize("path", _PATHS)
def test_a_key_and_ids_find_their_messages(path: str, find: Callable[..., Any], golden: GoldenStore) -> None:
    some = next(one for one in golden.manifest["messages"] if one["topic"] == "GoldKey" and " " in (one["keys"] or ""))
    word, here = some["keys"].split()[-1], (some["topic"], some["queueId"], some["queueOffset"])
    with_key = _listed(golden, lambda one: one["topic"] == "GoldKey" and word in (one["keys"] or "").split())
    assert here in with_key
    assert find(path, topic="GoldKey", key=word) == with_key
    assert find(path, topic="GoldKey", msg_id=some["msgId"]) == [here]
    assert find(path, msg_id=some["msgId"]) == [here]
    assert find(path, msg_id=some["offsetMsgId"]) == [here]
    assert find(path, topic="GoldTag", key=word) == find(path, topic="GoldTag", msg_id=some["offsetMsgId"]) == []


@pytest.mark.parametrize("path", _PATHS)
def test_times_are_bounds_that_belong_to_the_range(path: str, find: Callable[..., Any], golden: GoldenStore) -> None:
    times = sorted(one["storeTimestamp"] for one in golden.manifest["messages"])
    low, high = times[len(times) // 3], times[2 * len(times) // 3]
    assert find(path, begin_ms=low, end_ms=high) == _listed(golden, lambda one: low <= one["storeTimestamp"] <= high)
    expected = _listed(golden, lambda one: one["topic"] == "GoldPlain" and one["storeTimestamp"] <= low)
    assert find(path, topic="GoldPlain", end_ms=low) == expected != []
    assert find(path, begin_ms=times[-1] + 1) == []


def test_a_topic_of_batch_queues_is_found_without_the_index(find: Callable[..., Any], golden: GoldenStore) -> None:
    expected = _listed(golden, lambda one: one["topic"] == "GoldInnerBatch")
    assert find("store", topic="GoldInnerBatch") == expected != []


def test_a_store_without_queues_and_index_is_walked(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(segment_of([record_at, record_at]))
    assert query(spark, str(tmp_path), topic="orders", key="k2").count() == 2
    assert query(spark, str(tmp_path), topic="orders", key="k").count() == 0


@pytest.mark.parametrize("path", _PATHS)
def test_sql_counts_what_the_manifest_lists(
    path: str, spark: SparkSession, paths: dict[str, str], golden: GoldenStore
) -> None:
    text = """select topic, count(*) from (select topic, queueId, body from messages) where queueId > 0
              and topic in (select topic from messages where tags = 'ib' or tags is null) group by topic"""
    messages = golden.manifest["messages"]
    chosen = {one["topic"] for one in messages if one["tags"] in ("ib", None)}
    expected = Counter(one["topic"] for one in messages if one["queueId"] > 0 and one["topic"] in chosen)
    assert {row[0]: row[1] for row in sql(spark, paths[path], text).collect()} == expected
    assert sql(spark, paths[path], "select count(*) n from MESSAGES").collect()[0].n == len(messages)
    assert spark.catalog.listTables() == []


def test_every_entity_is_a_view(spark: SparkSession, golden: GoldenStore) -> None:
    options = {"maxHashSlotNum": golden.manifest["brokerConf"]["maxHashSlotNum"]}
    counts = " union all ".join(f"select '{name}' name, count(*) n from {name}" for name in VIEWS)
    counted = {row.name: row.n for row in sql(spark, str(golden.root), counts, options).collect()}
    for name, entity in VIEWS.items():
        reader = spark.read.format("rocketmq-store").option("entity", entity.value)
        if name in ("topics", "offsets"):
            assert counted[name] == reader.load(str(golden.root)).count() > 0
    assert counted["messages"] == len(golden.manifest["messages"])
    assert [name for name, count in counted.items() if not count] == ["transactions"]
    # An inner batch has one entry. Each of the 38 queues is a task.
    assert counted["consumequeue"] == len({one["physicalOffset"] for one in golden.manifest["messages"]})
    joined = "select o.group, t.writeQueues from offsets o join topics t on o.topic = t.topic where o.topic = 'GoldTag'"
    assert sql(spark, str(golden.root), joined).collect()[0].writeQueues == 4


def _scans(frame: DataFrame) -> list[str]:
    """Return the lines of a plan that read a store in the JVM."""
    plan = frame._jdf.queryExecution().executedPlan().toString()
    return [line for line in plan.splitlines() if "BatchScan rocketmq-store" in line]


def _columns(scan: str) -> set[str]:
    return set(re.findall(r"(\w+)#\d+", scan.partition("[")[2].partition("]")[0]))


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("select topic, length(body) from messages where queueId = 1", {"topic", "body"}),
        ("select * from (select topic, body, tags from messages) where tags = 'a'", {"topic", "tags", "body"}),
        ("select topic from (select topic, body from messages)", {"topic"}),
        ("select (select max(queueOffset) from messages) m", {"queueOffset"}),
        ("select properties['a'] from messages", {"properties"}),
        ("select count(*) from messages", set()),
    ],
)
@in_java
def test_sql_reads_the_columns_it_uses(text: str, columns: set[str], spark: SparkSession, golden: GoldenStore) -> None:
    frame = sql(spark, str(golden.root), text)
    frame.collect()
    plans = _scans(frame) or [str(frame._jdf.queryExecution().optimizedPlan())]
    assert [_columns(scan) for scan in _scans(frame)] in ([columns], [])
    assert plans


def test_messages_of_a_store_are_a_frame_as_any_other(spark: SparkSession, golden: GoldenStore) -> None:
    messages = golden.manifest["messages"]
    rows = read(spark, str(golden.root))
    counts = rows.where("topic = 'GoldTag' and queueId > 0").groupBy("tags").count()
    expected = Counter(one["tags"] for one in messages if one["topic"] == "GoldTag" and one["queueId"] > 0)
    assert {row.tags: row["count"] for row in counts.collect()} == expected
    tagged = rows.where("topic = 'GoldTag' and tags is not null").select("queueOffset")
    joined = tagged.join(rows.where("topic = 'GoldKey'").select("queueOffset", "keys"), "queueOffset")
    offsets = {
        topic: Counter(
            one["queueOffset"] for one in messages if one["topic"] == topic and (topic == "GoldKey" or one["tags"])
        )
        for topic in ("GoldTag", "GoldKey")
    }
    assert joined.count() == sum(count * offsets["GoldKey"][at] for at, count in offsets["GoldTag"].items()) > 0
    assert read(spark, str(golden.root), {"topic": "GoldTag"}).count() == sum(
        one["topic"] == "GoldTag" for one in messages
    )


def test_a_result_of_sql_has_no_column_that_its_select_drops(spark: SparkSession, golden: GoldenStore) -> None:
    with pytest.raises(AnalysisException, match="queueId"):
        sql(spark, str(golden.root), "select topic from messages").where("queueId > 0")


def test_an_archive_in_an_object_store_is_read_as_one_on_a_disk(
    spark: SparkSession, golden: GoldenStore, paths: dict[str, str]
) -> None:
    text = "select topic, max(length(body)) n, max(properties['KEYS']) k from messages group by topic"
    expected = sorted(sql(spark, paths["archive"], text).collect())
    count = "select count(*) n from messages where topic = 'GoldTag'"
    messages = golden.manifest["messages"]
    some, tagged = messages[0], sum(one["topic"] == "GoldTag" for one in messages)
    with serve_objects(Path(paths["archive"]).parent) as server:
        archived = server.address(Path(paths["archive"]).name)
        store = server.address(f"{golden.root.parent.name}/{golden.root.name}")
        assert sorted(sql(spark, archived, text).collect()) == expected
        (row,) = query(spark, archived.replace("s3:", "s3a:"), topic=some["topic"], msg_id=some["msgId"]).collect()
        assert (row.queueId, row.queueOffset) == (some["queueId"], some["queueOffset"])
        assert sql(spark, store.replace("s3:", "s3a:"), count).collect()[0].n == tagged


_LOW, _HIGH = 1_700_000_100_000, 1_700_000_300_000


@pytest.fixture(scope="module")
def minutes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a message every ten seconds for ten minutes, of three topics and four queues, in many log files."""
    root, clock = tmp_path_factory.mktemp("minutes"), StandingClock(1_700_000_000_000)
    with opened(root, small_settings(), clock=clock) as store:
        for number in range(60):
            put_all(store, message(f"T{number % 3}", number % 4, b"%d" % number + bytes(300), TAGS="abc"[number % 3]))
            clock.ms += 10_000
    return root


_TIMES = "storeTimestamp >= timestamp_millis({}) and storeTimestamp < timestamp_millis({})".format


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("topic = 'T1'", 20),
        ("'T1' = topic and queueId in (1, 3)", 10),
        ("topic in ('T0', 'T1') and topic in ('T1', 'T2') and tags = 'b'", 20),
        (_TIMES(_LOW, _HIGH), 20),
        (f"{_TIMES(_LOW, _HIGH)} and queueId = 2", 5),
        ("storeTimestamp = timestamp'2023-11-14 22:15:00Z'", 1),
        ("topic = 'T1' or queueId = 1", 30),
        ("queueId > 1 and queueId = -1", 0),
        ("topic = 'a,b'", 0),
        ("topic = 'T0' and queueId not in (select queueId from messages where topic = 'T1' and queueId > 1)", 10),
    ],
)
@pytest.mark.parametrize("options", [{}, {"offsetsFrom": "consumequeue"}], ids=["java", "python"])
def test_sql_finds_what_its_where_says(
    where: str, count: int, options: dict[str, str], spark: SparkSession, minutes: Path
) -> None:
    found = sql(spark, str(minutes), f"select queueOffset from messages where {where}", options)
    assert found.count() == count


@in_java
def test_sql_reads_the_files_and_queues_that_its_where_leaves(spark: SparkSession, minutes: Path) -> None:
    whole = sql(spark, str(minutes), "select queueId from messages", {"splitBytes": "4096"})
    times = "storeTimestamp >= timestamp_millis(1700000540000)"
    some = sql(spark, str(minutes), f"select queueId from messages where {times}", {"splitBytes": "4096"})
    assert some.rdd.getNumPartitions() < whole.rdd.getNumPartitions() // 2
    of_queues = {"offsetsFrom": "consumequeue"}
    one = sql(spark, str(minutes), "select queueId from messages where topic = 'T1' and queueId = 1", of_queues)
    every = sql(spark, str(minutes), "select queueId from messages", of_queues)
    assert (one.rdd.getNumPartitions(), every.rdd.getNumPartitions()) == (1, 12)
    assert one.count() == 5


def test_what_options_say_is_not_replaced_by_the_where(spark: SparkSession, minutes: Path) -> None:
    text = "select queueOffset from messages where topic = 'T1'"
    assert sql(spark, str(minutes), text, {"TOPIC": "T2"}).count() == 0
    assert sql(spark, str(minutes), text, {"topic": "T1,T2", "queueId": "1"}).count() == 5


def test_a_result_of_sql_never_has_the_filters_of_an_earlier_action(spark: SparkSession, golden: GoldenStore) -> None:
    frame = sql(spark, str(golden.root), "select topic, queueId from messages", {"topic": "GoldTag,GoldBig"})
    everything = frame.count()
    assert 0 < frame.where("topic = 'GoldTag' and queueId = 1").count() < everything
    assert frame.count() == everything


def test_mistakes_are_reported(spark: SparkSession, golden: GoldenStore, paths: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match="nix"):
        sql(spark, paths["store"], "select nix from messages")
    assert spark.catalog.listTables() == []
    with pytest.raises(AnalysisException, match="consumequeue"):
        sql(spark, paths["archive"], "select * from consumequeue")
    spark.range(1).createOrReplaceTempView("topics")
    try:
        with pytest.raises(SettingsError, match="this session has a view or table topics: drop it"):
            sql(spark, paths["store"], "select * from topics")
    finally:
        spark.catalog.dropTempView("topics")
    with pytest.raises(SettingsError, match="did you mean columns"):
        query(spark, paths["store"], {"colums": "topic"})
    with pytest.raises(Exception, match="commitlog does not exist"), one_line():
        query(spark, str(tmp_path), topic="orders").collect()
    with pytest.raises(Exception, match="give the broker's maxHashSlotNum"), one_line():
        query(spark, paths["store"], topic="GoldKey", key="a").collect()
