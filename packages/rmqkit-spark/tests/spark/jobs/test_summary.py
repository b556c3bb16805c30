"""The summary of a store counts what its manifest lists."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from rmqkit.errors import SettingsError, StoreError
from rmqkit.spark.jobs.summary import summary
from tests.golden_stores import unpack_golden
from tests.spark.messages import plain_records

pytestmark = pytest.mark.spark


def _expected(messages: list[dict[str, Any]], sizes: dict[int, int]) -> list[tuple[Any, ...]]:
    grouped: dict[tuple[str, str | None], list[dict[str, Any]]] = defaultdict(list)
    for message in messages:
        grouped[message["topic"], message["tags"]].append(message)
    return [
        (
            topic,
            tags,
            len(group),
            min(m["storeTimestamp"] for m in group),
            max(m["storeTimestamp"] for m in group),
            sum(sizes[at] for at in {m["physicalOffset"] for m in group}),  # an inner batch is one record
        )
        for (topic, tags), group in sorted(grouped.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    ]


@pytest.mark.parametrize("split_bytes", ["10k", "128m"])
def test_topics_and_tags_are_counted(split_bytes: str, spark: SparkSession, tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    frame = summary(spark, str(store.root), {"splitBytes": split_bytes})
    assert frame.columns == ["topic", "tags", "messages", "firstStoreTimestamp", "lastStoreTimestamp", "bytes"]
    counted = frame.selectExpr(
        "topic", "tags", "messages", "unix_millis(firstStoreTimestamp)", "unix_millis(lastStoreTimestamp)", "bytes"
    )
    segments = [path.read_bytes() for path in (store.root / "commitlog").iterdir()]
    sizes = {record.physical_offset: record.size for segment in segments for record in plain_records(segment)}
    assert [tuple(row) for row in counted.collect()] == _expected(store.manifest["messages"], sizes)


def test_an_empty_store_has_an_empty_summary(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert summary(spark, str(tmp_path)).collect() == []


def test_mistakes_are_raised_as_they_are(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="commitlog does not exist"):
        summary(spark, str(tmp_path))
    with pytest.raises(SettingsError, match="did you mean topic"):
        summary(spark, str(tmp_path), {"topci": "a"})
