"""Bodies as columns, with Spark's own functions; a package that Spark lacks is named by Spark."""

from __future__ import annotations

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession

from rmqkit.spark import from_body_avro, from_body_json, from_body_protobuf

pytestmark = pytest.mark.spark


def test_json_bodies_are_columns(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(b'{"cents": 5, "item": "tea"}',), (b"no json",), (None,)], "body binary")
    rows = frame.select(from_body_json("cents int, item string").alias("order")).collect()
    assert rows == [(Row(cents=5, item="tea"),), (Row(cents=None, item=None),), (None,)]


def test_a_package_that_spark_lacks_is_named(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(b"\x0a",)], "body binary")
    with pytest.raises(AnalysisException, match="Avro"):
        frame.select(from_body_avro('"long"')).collect()
    with pytest.raises(AnalysisException, match="Protobuf"):
        frame.select(from_body_protobuf("Order", b"")).collect()
