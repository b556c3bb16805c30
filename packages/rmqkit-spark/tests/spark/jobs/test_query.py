"""Messages by key, id and time, and SQL: the same of a store and of its archive, and as little read as can be."""

from __future__ import annotations

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
from rmqkit.spark.jobs import query as query_job
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.query import VIEWS, query, sql
from rmqkit.testing.clock import StandingClock
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import record_at, segment_of
from tests.spark.object_store import serve_objects
from tests.store.stores import message, opened, put_all, small_settings

pytestmark = pytest.mark.spark

_PATHS = ["store", "archive"]


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
    # An inner batch has one entry. Each of the 38 queues is a task.
    assert counted["consumequeue"] == len({one["physicalOffset"] for one in golden.manifest["messages"]})
    joined = "select o.group, t.writeQueues from offsets o join topics t on o.topic = t.topic where o.topic = 'GoldTag'"
    assert sql(spark, str(golden.root), joined).collect()[0].writeQueues == 4


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("select topic, length(body) from messages where queueId = 1", "topic,queueId,body"),
        ("select * from (select topic, body, tags from messages) where tags = 'a'", "topic,tags,body"),
        ("select topic from (select topic, body from messages)", "topic"),
        ("select a.msgId from messages a join messages b on a.keys = b.tags", "msgId,keys,tags"),
        ("select (select max(queueOffset) from messages) m", "queueOffset"),
        ("select properties['a'] from messages", "properties"),
        ("select count(*) from messages", "topic"),
    ],
)
def test_sql_reads_the_columns_it_uses(
    text: str, columns: str, spark: SparkSession, golden: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    loaded = query_job.loaded

    def noted(spark: SparkSession, path: str, options: dict[str, str]) -> Any:
        read.append(options["columns"])
        return loaded(spark, path, options)

    monkeypatch.setattr(query_job, "loaded", noted)
    sql(spark, str(golden.root), text)
    assert read == [columns]


def test_work_is_planned_before_anything_is_read(
    spark: SparkSession, golden: GoldenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    loaded = query_job.loaded

    def noted(spark: SparkSession, path: str, options: dict[str, str]) -> Any:
        given.append(options)
        return loaded(spark, path, options)

    monkeypatch.setattr(query_job, "loaded", noted)
    messages = golden.manifest["messages"]
    counts = read(
        spark, str(golden.root), lambda rows: rows.where("topic = 'GoldTag' and queueId > 0").groupBy("tags").count()
    )
    expected = Counter(one["tags"] for one in messages if one["topic"] == "GoldTag" and one["queueId"] > 0)
    assert {row.tags: row["count"] for row in counts.collect()} == expected
    assert given == [{"entity": "messages", "columns": "topic,queueId,tags", "topic": "GoldTag"}]
    # The result can be used as any other frame, and has no column that was not read.
    assert counts.where("count > 0").count() == len(expected)
    topics = read(spark, str(golden.root), lambda rows: rows.select("topic"))
    assert topics.count() == len(messages)
    for frame in (topics, sql(spark, str(golden.root), "select topic from messages")):
        with pytest.raises(AnalysisException, match="queueId"):
            frame.where("queueId > 0")


def test_work_may_use_the_messages_twice(spark: SparkSession, golden: GoldenStore) -> None:
    def work(rows: DataFrame) -> DataFrame:
        tagged = rows.where("topic = 'GoldTag' and tags is not null").select("queueOffset")
        return tagged.join(rows.where("topic = 'GoldKey'").select("queueOffset", "keys"), "queueOffset")

    whole = spark.read.format("rocketmq-store").load(str(golden.root))
    found = read(spark, str(golden.root), work).collect()
    assert sorted(found) == sorted(work(whole).collect()) != []


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
        for scheme in ("s3:", "s3a:"):
            address = archived.replace("s3:", scheme)
            assert sorted(sql(spark, address, text).collect()) == expected, scheme
            assert sql(spark, store.replace("s3:", scheme), count).collect()[0].n == tagged, scheme
            (row,) = query(spark, address, topic=some["topic"], msg_id=some["msgId"]).collect()
            assert (row.queueId, row.queueOffset) == (some["queueId"], some["queueOffset"]), scheme


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


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("topic = 'T1'", {"topic": "T1"}),
        ("'T1' = topic and queueId in (1, 3)", {"topic": "T1", "queueId": "1,3"}),
        ("topic in ('T0', 'T1') and topic in ('T1', 'T2') and tags = 'b'", {"topic": "T1"}),
        (
            f"storeTimestamp >= timestamp_millis({_LOW}) and storeTimestamp < timestamp_millis({_HIGH})",
            {"startingTimestamp": str(_LOW), "endingTimestamp": str(_HIGH + 1)},
        ),
        (
            f"timestamp_millis({_HIGH}) > storeTimestamp and storeTimestamp > timestamp_millis({_LOW}) and queueId = 2",
            {"queueId": "2", "startingTimestamp": str(_LOW), "endingTimestamp": str(_HIGH + 1)},
        ),
        (
            "storeTimestamp = timestamp'2023-11-14 22:15:00Z'",
            {"startingTimestamp": "1700000100000", "endingTimestamp": "1700000100001"},
        ),
        (f"queueId in ({', '.join(map(str, range(2, 20)))})", {"queueId": ",".join(map(str, range(2, 20)))}),
        ("topic = 'T1' or queueId = 1", {}),
        ("topic != 'T1' and not queueId = 1 and topic is not null", {}),
        ("queueId > 1 and queueId = -1", {}),
        ("topic = 'a,b'", {}),
        ("lower(topic) = 't1' and tags != topic", {}),
        ("topic = 'T0' and queueId not in (select queueId from messages where topic = 'T1' and queueId > 1)", {}),
    ],
)
def test_sql_leaves_out_what_its_where_does(
    where: str, options: dict[str, str], spark: SparkSession, minutes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []
    loaded = query_job.loaded

    def noted(spark: SparkSession, path: str, options: dict[str, str]) -> Any:
        given.append(options)
        return loaded(spark, path, options)

    monkeypatch.setattr(query_job, "loaded", noted)
    text = f"select queueOffset, topic, queueId from messages where {where}"
    found = sql(spark, str(minutes), text).collect()
    (said,) = given
    assert {name: value for name, value in said.items() if name not in ("entity", "columns")} == options
    monkeypatch.setattr(query_job, "_narrowed", lambda tests, given: {})
    assert sorted(found) == sorted(sql(spark, str(minutes), text).collect())
    assert len(found) > 0 or where in ("queueId > 1 and queueId = -1", "topic = 'a,b'")


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
