"""Messages by key, id and time, and SQL: the same of a store and of its archive, and as little read as can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from rmqkit.errors import SettingsError
from rmqkit.spark.failures import one_line
from rmqkit.spark.jobs import query as query_job
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.query import VIEWS, query, sql
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import record_at, segment_of

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
        if name in ("topics", "offsets", "consumequeue"):
            assert counted[name] == reader.load(str(golden.root)).count() > 0
    assert counted["messages"] == len(golden.manifest["messages"])
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
    loaded = query_job._loaded

    def noted(spark: SparkSession, path: str, options: dict[str, str]) -> Any:
        read.append(options["columns"])
        return loaded(spark, path, options)

    monkeypatch.setattr(query_job, "_loaded", noted)
    sql(spark, str(golden.root), text)
    assert read == [columns]


def test_a_result_of_sql_never_has_the_filters_of_an_earlier_action(spark: SparkSession, golden: GoldenStore) -> None:
    frame = sql(spark, str(golden.root), "select topic, queueId from messages", {"topic": "GoldTag,GoldBig"})
    everything = frame.count()
    assert 0 < frame.where("topic = 'GoldTag' and queueId = 1").count() < everything
    assert frame.count() == everything


def test_mistakes_are_told(spark: SparkSession, golden: GoldenStore, paths: dict[str, str], tmp_path: Path) -> None:
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
