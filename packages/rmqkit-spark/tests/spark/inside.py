"""Access to the JVM of a Spark session: PySpark has no public names for it."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession


def jvm_of(spark: SparkSession) -> Any:
    """The classes of Spark's virtual machine."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None, "the session runs"
    return jvm


def java_context_of(spark: SparkSession) -> Any:
    """The context of Spark in its virtual machine."""
    context = spark.sparkContext._jsc
    assert context is not None, "the session runs"
    return context.sc()
