"""Spark reads a store and its archive as one table: every message once."""

from __future__ import annotations

import pytest

from rmqkit.errors import SettingsError
from rmqkit.spark.source.store import StoreReader, read_plan, store_options
from tests.arrow.test_archived import COUNT, store

__all__ = ["store"]


def loaded(spark, store, **options):
    root, archive = store
    return spark.read.format("rocketmq-store").options(archive=str(archive), **options).load(str(root))


@pytest.mark.spark
def test_every_message_is_there_once(spark, store):
    frame = loaded(spark, store)
    rows = frame.selectExpr("cast(split(decode(body, 'UTF-8'), ' ')[0] as int) number", "properties['KEYS'] key")
    found = sorted((row.number, row.key) for row in rows.collect())
    assert found == [(number, f"k{number} all") for number in range(COUNT)]
    assert frame.where("topic = 'Even' and queueId = 1").count() == COUNT // 6
    assert frame.where("tags in ('t1', 't58')").count() == 2


@pytest.mark.spark
def test_options_count_for_both(spark, store):
    assert loaded(spark, store, topic="Odd", columns="topic,queueOffset").count() == COUNT // 2
    assert loaded(spark, store, startingTimestamp=1, endingTimestamp=2).count() == 0


def test_each_segment_is_a_partition(store):
    root, archive = store
    with_archive = store_options({"path": str(root), "archive": str(archive)})
    alone = store_options({"path": str(root)})
    counts = [len(StoreReader(one, read_plan(one, ())).partitions()) for one in (with_archive, alone)]
    assert counts[0] == counts[1] + 3


@pytest.mark.parametrize(
    ("option", "value", "needs"),
    [
        ("entity", "commitlog-raw", "entity=messages"),
        ("decompress", "false", "decompress=true"),
        ("includeProperties", "string", "includeProperties=map"),
    ],
)
def test_what_segments_do_not_have_is_refused(store, option, value, needs):
    root, archive = store
    with pytest.raises(SettingsError, match=f"rocketmq-store: archive needs {needs}"):
        store_options({"path": str(root), "archive": str(archive), option: value})
