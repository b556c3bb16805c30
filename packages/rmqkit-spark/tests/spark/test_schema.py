"""Tables of Spark's catalog over a store and a topic keep their options, and ``DESCRIBE`` shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from rmqkit.arrow.schema import CORRUPT_COLUMN, MESSAGE_COLUMNS, PROPERTY_STRING
from rmqkit.errors import SettingsError
from rmqkit.spark.schema import declared, given_options
from tests.spark.messages import record_at, segment_of

COLUMNS = (*MESSAGE_COLUMNS, PROPERTY_STRING, CORRUPT_COLUMN)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A log of three messages."""
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020}").write_bytes(segment_of([record_at] * 3))
    return tmp_path


def test_options_travel_with_the_columns_of_a_table() -> None:
    properties = {
        "provider": "rocketmq-store", "owner": "me", "location": "file:/s", "path": "file:/s",
        "topic": "a,b", "option.topic": "a,b", "option.splitBytes": "1m",
    }  # fmt: skip
    table = declared(COLUMNS, properties)
    assert isinstance(table, StructType)
    assert [(one.name, one.dataType.simpleString()) for one in table.fields] == [
        (one.name, one.spark) for one in COLUMNS
    ]
    stored = StructType.fromJson(table.jsonValue())
    assert given_options({}, stored) == {"path": "file:/s", "topic": "a,b", "splitBytes": "1m"}
    assert stored.fields[0].metadata["comment"] == "path=file:/s, splitBytes=1m, topic=a,b"


def test_a_read_has_the_options_that_it_was_given() -> None:
    given = {"path": "/s", "topic": "a"}
    assert given_options(given) == given_options(given, StructType()) == given
    assert given_options({}, StructType()) == {}
    assert isinstance(declared(COLUMNS, given), str)


@pytest.mark.parametrize("name", ["secretKey", "secretkey", "fs.s3a.secret.key"])
def test_a_secret_is_not_put_into_a_catalog(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{name} in a table is seen by all who use the catalog"):
        declared(COLUMNS, {"provider": "rocketmq", f"option.{name}": "s3cr3t"})


@pytest.mark.spark
def test_a_table_is_created_described_read_and_dropped(spark: SparkSession, store: Path) -> None:
    spark.sql(f"create table saved using `rocketmq-store` options (path '{store}', columns 'topic,queueOffset')")
    try:
        described = " ".join(str(row) for row in spark.sql("describe extended saved").collect())
        assert "columns=topic,queueOffset" in described
        assert f"path=file:{store}" in described
        assert spark.table("saved").columns == ["topic", "queueOffset"]
        assert spark.sql("select count(topic) from saved").collect() == [(3,)]
    finally:
        spark.sql("drop table saved")
    assert (store / "commitlog" / f"{0:020}").exists()
