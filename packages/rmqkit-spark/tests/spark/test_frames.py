"""Columns decoded from bodies by Spark's own functions, and the lag of a stream, from Spark's progress reports."""

from __future__ import annotations

import json

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession

from rmqkit.spark import backlog, backlog_summary, from_body_avro, from_body_json, from_body_protobuf

_KAFKA = {"endOffset": '{"orders":{"0":5}}', "latestOffset": '{"orders":{"0":9}}'}


def test_what_was_not_read_is_counted_by_queue() -> None:
    end, latest = {"orders": {"a": {"0": 5, "1": 7}}}, {"orders": {"a": {"0": 9, "1": 7, "2": 4}}}
    for form in (json.dumps, lambda offsets: offsets):
        source = {"endOffset": form(end), "latestOffset": form(latest)}
        assert backlog({"sources": [source]}) == {"orders/a/0": 4, "orders/a/1": 0, "orders/a/2": 4}


def test_sources_add_up_and_those_of_others_do_not_count() -> None:
    source = {"endOffset": {"orders": {"a": {"0": 5}}}, "latestOffset": {"orders": {"a": {"0": 9}}}}
    unknown = [{"endOffset": "17", "latestOffset": "19"}, {"endOffset": None, "latestOffset": None}, {}, _KAFKA]
    assert backlog({"sources": [source, source, *unknown]}) == {"orders/a/0": 8}


def test_a_queue_that_was_rebuilt_is_not_behind() -> None:
    source = {"endOffset": {"orders": {"a": {"0": 50}}}, "latestOffset": {"orders": {"a": {"0": 9}}}}
    assert backlog({"sources": [source]}) == {"orders/a/0": 0}


def test_a_summary_has_the_names_of_kafkas_metrics() -> None:
    source = {"endOffset": {"orders": {"a": {"0": 5, "1": 7}}}, "latestOffset": {"orders": {"a": {"0": 9, "1": 8}}}}
    names = ("minOffsetsBehindLatest", "avgOffsetsBehindLatest", "maxOffsetsBehindLatest")
    assert backlog_summary({"sources": [source]}) == dict(zip(names, (1, 2.5, 4), strict=True))
    assert backlog_summary({"sources": [_KAFKA]}) == {}


@pytest.mark.spark
def test_json_bodies_are_columns(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(b'{"cents": 5, "item": "tea"}',), (b"no json",), (None,)], "body binary")
    rows = frame.select(from_body_json("cents int, item string").alias("order")).collect()
    assert rows == [(Row(cents=5, item="tea"),), (Row(cents=None, item=None),), (None,)]


@pytest.mark.spark
def test_a_package_that_spark_lacks_is_named(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(b"\x0a",)], "body binary")
    with pytest.raises(AnalysisException, match="Avro"):
        frame.select(from_body_avro('"long"')).collect()
    with pytest.raises(AnalysisException, match="Protobuf"):
        frame.select(from_body_protobuf("Order", b"")).collect()
