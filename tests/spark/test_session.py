"""The session a person gets: quiet, on loopback, with our format."""

from __future__ import annotations

import os
import sys

import pytest
from pyspark.sql import SparkSession

from rmqkit.errors import SettingsError
from rmqkit.spark import register, session, spark_session

pytestmark = pytest.mark.spark


def test_the_session_has_our_settings_and_the_callers(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.sparkContext.appName == "rmqkit-tests"


def test_workers_run_this_python(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
    assert found == [os.environ["PYSPARK_PYTHON"]] == [sys.executable]


def test_there_is_one_session(spark: SparkSession) -> None:
    assert spark_session("other").sparkContext is spark.sparkContext


def test_formats_can_be_registered_again(spark: SparkSession) -> None:
    register(spark)
    assert spark.read.format("rocketmq-store") is not None


def test_without_java_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(environ: object) -> None:
        raise SettingsError("Spark needs Java")

    monkeypatch.setattr(session, "find_java_home", none)
    with pytest.raises(SettingsError, match="Spark needs Java"):
        spark_session()
