"""The reader in Java reads what the reader in Python reads: generated stores, damage, options, and pushed filters.

The Python side runs without Spark. A filter is compared with Spark's own evaluation of it over the Python side's rows.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from rmqkit.arrow.plan import read_part
from rmqkit.arrow.schema import arrow_schema
from rmqkit.errors import RmqError
from rmqkit.protocol.properties import encode_properties
from rmqkit.spark import register
from rmqkit.spark.failures import error_within
from rmqkit.spark.source.store import JAR, read_plan, store_options, store_parts
from rmqkit.store.offline.rebuild import rebuild
from rmqkit.store.settings import StoreSettings
from tests.examples import examples
from tests.golden_stores import unpack_golden
from tests.spark.messages import record_at, record_makers, segment_of

pytestmark = [
    pytest.mark.spark,
    pytest.mark.hypothesis,
    pytest.mark.skipif(not JAR.exists(), reason="there is no JDK, so there is no reader in Java"),
]

_FILE_BYTES = 4096
KEYED = encode_properties({"KEYS": "two one"})
_STORES = 3
"""The stores that one job of Spark reads."""
_SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


@st.composite
def logs(draw: st.DrawFn) -> list[bytes]:
    """The files of a log: records of every layout, blanks, a preallocated end, and damage of many kinds."""
    files: list[bytes] = []
    left = draw(st.lists(record_makers(), max_size=6))
    while left or not files:
        base = _FILE_BYTES * len(files)
        data = bytearray()
        while left and len(data) + len(left[-1](0)) + 8 <= _FILE_BYTES:
            data += left.pop()(base + len(data))
        if left and not data:
            left.pop()  # larger than a file
            continue
        is_newest = not left
        size = draw(st.sampled_from([len(data), _FILE_BYTES])) if is_newest else _FILE_BYTES
        files.append(
            bytes(data).ljust(size, b"\0") if is_newest else segment_of([lambda _, d=data: bytes(d)], size=size)
        )
    return [_damaged(draw, file) for file in files] if draw(st.booleans()) else files


def _damaged(draw: st.DrawFn, file: bytes) -> bytes:
    data = bytearray(file)
    for _ in range(draw(st.integers(0, 2)) if data else 0):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["byte", "zeros", "blank", "copy"])):
            case "byte":
                data[at] = draw(st.integers(0, 255))
            case "zeros":
                end = min(len(data), at + draw(st.integers(1, 200)))
                data[at:end] = bytes(end - at)
            case "blank":
                size = draw(st.sampled_from([len(data) - at, len(data) - at - 1, 8, 1 << 30]))
                blank = size.to_bytes(4, "big", signed=True) + 0xCBD43194.to_bytes(4, "big")
                data[at : at + 8] = blank[: len(data) - at]
            case "copy":
                length = draw(st.integers(1, 300))
                part = data[:length]
                data[at : at + length] = part[: len(data) - at]
    return bytes(data)


_options = st.fixed_dictionaries(
    {
        "corruptRecordMode": st.sampled_from(["skip", "report"]),
        "verifyCrc": st.sampled_from(["none", "drop", "column"]),
    },
    optional={
        "decompress": st.sampled_from(["true", "false"]),
        "unwrap": st.sampled_from(["true", "false"]),
        "includeProperties": st.sampled_from(["map", "string", "none"]),
        "includeBody": st.sampled_from(["true", "false"]),
        "splitBytes": st.sampled_from(["1", "300", "2k"]),
        "batchRows": st.sampled_from(["1", "3", "4096"]),
        "brokerName": st.sampled_from(["broker-a", ""]),
        "topic": st.sampled_from(["orders", "orders,%RETRY%group", "nothing"]),
        "queueId": st.sampled_from(["1", "0,2147483646"]),
        "startingTimestamp": st.integers(0, 2**45).map(str),
        "endingTimestamp": st.integers(0, 2**45).map(str),
    },
)


def _write(root: Path, files: list[bytes]) -> None:
    (root / "commitlog").mkdir(parents=True)
    for number, file in enumerate(files):
        (root / "commitlog" / f"{number * _FILE_BYTES:020d}").write_bytes(file)


def _by_python(root: Path, given_options: dict[str, str], names: list[str]) -> pa.Table:
    options = store_options({**given_options, "path": str(root)})
    plan = read_plan(options, names)
    batches = [batch for part in store_parts(options, plan.selection) for batch in read_part(part, plan)]
    return pa.Table.from_batches(batches, arrow_schema(plan.columns))


def _by_java(spark: SparkSession, roots: list[Path], given_options: dict[str, str]) -> pa.Table:
    load = spark.read.format("rocketmq-store").options(**given_options).load
    frame = reduce(DataFrame.unionAll, [load(str(root)) for root in roots])
    shown = frame._jdf.queryExecution().toString()
    assert shown.count("BatchScan rocketmq-store ") == len(roots), "the reader in Java serves the reads"
    return frame.toArrow()


def table_rows(table: pa.Table) -> list[dict[str, Any]]:
    rows = []
    for name in ("bornTimestamp", "storeTimestamp"):  # Python has no times after the year 9999
        if name in table.column_names:
            at = table.column_names.index(name)
            table = table.set_column(at, name, table.column(at).cast(pa.int64()))
    for row in table.to_pylist(maps_as_pydicts="strict"):
        if row.get("_corrupt"):
            row["_corrupt"] = _without_library(row["_corrupt"])
        rows.append(row)
    return rows


def _without_library(text: str) -> str:
    """Return a reason without the words of the library that unpacks bodies."""
    return re.sub(r"is damaged: [^;]*|ends in the middle of its stream", "is damaged", text)


def outcome(read: Any) -> object:
    try:
        return table_rows(read())
    except RmqError as error:
        return _without_library(str(error))
    except (PySparkException, Py4JJavaError) as error:
        found = error_within(error)
        assert found is not None, str(error)
        return _without_library(str(found))


@given(st.lists(logs(), min_size=_STORES, max_size=_STORES), _options)
@examples(34, suppress=_SUPPRESSED)
def test_both_readers_return_the_same_rows(
    spark: SparkSession, stores: list[list[bytes]], given_options: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder, str(number)) for number in range(_STORES)]
        for root, files in zip(roots, stores, strict=True):
            _write(root, files)
        expected = [row for root in roots for row in table_rows(_by_python(root, given_options, []))]
        assert table_rows(_by_java(spark, roots, given_options)) == expected


@given(logs(), _options)
@examples(12, suppress=_SUPPRESSED)
def test_both_readers_fail_with_the_same_error(
    spark: SparkSession, files: list[bytes], given_options: dict[str, str]
) -> None:
    given_options |= {"corruptRecordMode": "fail", "verifyCrc": "fail"}
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), files)
        expected = outcome(lambda: _by_python(Path(folder), given_options, []))
        assert outcome(lambda: _by_java(spark, [Path(folder)], given_options)) == expected


_SLOTS = 64


@given(logs(), _options, st.data())
@examples(24, suppress=_SUPPRESSED)
def test_both_readers_find_the_same_messages_of_a_key(
    spark: SparkSession, files: list[bytes], given_options: dict[str, str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _write(root, files)
        rows = table_rows(_by_python(root, {"corruptRecordMode": "skip"}, []))
        words = sorted(word for row in rows for word in (row["keys"] or "").split() if "," not in word)
        topics = sorted({row["topic"] for row in rows if row["topic"] and "," not in row["topic"]} | {"orders"})
        given_options |= {
            "topic": ",".join(data.draw(st.lists(st.sampled_from(topics), min_size=1, max_size=2))),
            "key": ",".join(data.draw(st.lists(st.sampled_from([*words, "FD00", "none"]), min_size=1, max_size=3))),
            "maxHashSlotNum": str(_SLOTS),
        }
        with suppress(RmqError):  # of a damaged log: then there is no index
            rebuild(root, StoreSettings(hash_slot_count=_SLOTS, index_entry_count=1000), queues=False, index=True)
        newest = root / "commitlog" / f"{_FILE_BYTES * (len(files) - 1):020d}"
        if data.draw(st.booleans()):
            newest.write_bytes(_damaged(data.draw, newest.read_bytes()))
        expected = outcome(lambda: _by_python(root, given_options, []))
        load = spark.read.format("rocketmq-store").options(**given_options).load
        assert outcome(lambda: load(str(root)).toArrow()) == expected


def test_the_reader_in_java_reads_the_records_of_a_key_alone(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path, [segment_of([lambda at: record_at(at, properties=KEYED), record_at, record_at])])
    rebuild(tmp_path, StoreSettings(hash_slot_count=_SLOTS), queues=False, index=True)
    given_options = {"topic": "orders", "key": "one,none", "maxHashSlotNum": str(_SLOTS)}
    found = _by_java(spark, [tmp_path], given_options).to_pylist()
    assert [(row["commitLogOffset"], row["keys"]) for row in found] == [(0, "two one")]
    frame = spark.read.format("rocketmq-store").options(**given_options).load(str(tmp_path))
    assert frame.where("queueId = 77").count() == 0
    frame.collect()
    assert frame._jdf.queryExecution().executedPlan().collectLeaves().head().metrics().apply(
        "logBytesRead"
    ).value() == len(record_at(0, properties=KEYED))  # fmt: skip


def test_the_source_in_python_reports_an_index_that_does_not_fit(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path, [segment_of([record_at])])
    rebuild(tmp_path, StoreSettings(hash_slot_count=_SLOTS), queues=False, index=True)
    frame = spark.read.format("rocketmq-store").options(topic="orders", key="one", maxHashSlotNum=str(10**9))
    with pytest.raises(PySparkException) as error:
        frame.load(str(tmp_path)).collect()
    assert "give the broker's maxHashSlotNum as an option" in str(error_within(error.value))


def _torn(segment: bytes, at: int) -> bytes:
    return segment[:at] + bytes(8) + segment[at + 8 :]


_SIZE = len(record_at(0))


def _older(at: int) -> bytes:
    return record_at(at, store_timestamp=1_600_000_000_000)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(segment_of([record_at] * 5), id="longer"),
        pytest.param(segment_of([record_at] * 2), id="shorter"),
        pytest.param(segment_of([record_at, lambda at: record_at(at, body=b"abc" * 40), record_at]), id="another log"),
        pytest.param(segment_of([record_at, record_at, lambda at: record_at(at, body=b"HELLO")]), id="another body"),
        pytest.param(_torn(segment_of([record_at] * 4), 3 * _SIZE), id="damage behind"),
        pytest.param(_torn(segment_of([record_at] * 4), 1 * _SIZE), id="damage before"),
        # The rest of a log that a recovery cut begins after damage, with a record that was stored earlier.
        pytest.param(_torn(segment_of([record_at] * 2 + [_older]), _SIZE), id="an older record in the same place"),
        pytest.param(_torn(segment_of([record_at] * 3 + [_older]), 2 * _SIZE + 91), id="damage in the last record"),
    ],
)
def test_a_second_read_sees_how_the_newest_file_changed(spark: SparkSession, tmp_path: Path, changed: bytes) -> None:
    options = {"corruptRecordMode": "report"}
    _write(tmp_path, [segment_of([record_at] * 3).ljust(_FILE_BYTES, b"\0")])
    assert len(table_rows(_by_java(spark, [tmp_path], options))) == 3
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(changed.ljust(_FILE_BYTES, b"\0"))
    expected = table_rows(_by_python(tmp_path, options, []))
    for _ in range(2):
        assert table_rows(_by_java(spark, [tmp_path], options)) == expected


_NUMBERS = ("queueId", "queueOffset", "commitLogOffset")


def _conditions(rows: list[dict[str, Any]]) -> st.SearchStrategy[str]:
    """Return conditions about values that occur, and others."""
    some = rows or [{}]

    def texts(name: str) -> st.SearchStrategy[str]:
        found = sorted(
            {row.get(name) or "x" for row in some if "'" not in (row.get(name) or "") and "\\" not in str(row)}
        )
        one = st.sampled_from([*found, "x"]).map(lambda text: f"'{text}'")
        many = st.lists(one, min_size=1, max_size=3).map(", ".join)
        return st.one_of(
            one.map(lambda text: f"{name} = {text}"),
            one.map(lambda text: f"{name} <=> {text}"),
            many.map(lambda listed: f"{name} in ({listed})"),
            st.just(f"{name} is not null"),
            one.map(lambda text: f"not {name} = {text}"),
        )

    def numbers(name: str) -> st.SearchStrategy[str]:
        found = sorted({row[name] for row in some if row.get(name) is not None}) or [0]
        return st.tuples(st.sampled_from(["<", "<=", "=", ">=", ">", "<=>"]), st.sampled_from(found)).map(
            lambda test: f"{name} {test[0]} {test[1]}L" if name != "queueId" else f"{name} {test[0]} {test[1]}"
        )

    times = st.tuples(
        st.sampled_from(["storeTimestamp", "bornTimestamp"]), st.sampled_from(["<", "<=", ">=", ">"]),
        st.integers(0, 2**45),
    ).map(lambda test: f"{test[0]} {test[1]} timestamp_micros({test[2]}000)")  # fmt: skip
    one = st.one_of(*map(texts, ("topic", "keys", "tags", "msgId")), *map(numbers, _NUMBERS), times)
    return st.lists(one, min_size=1, max_size=3).map(" and ".join)


@given(st.data())
@examples(24, suppress=_SUPPRESSED)
def test_pushed_filters_and_columns_select_what_spark_selects(spark: SparkSession, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), data.draw(logs()))
        given_options = {"corruptRecordMode": data.draw(st.sampled_from(["skip", "report"]))}
        everything = _by_python(Path(folder), given_options, [])
        assume(everything.num_rows)  # Spark makes no data frame of an empty table
        condition = data.draw(_conditions(table_rows(everything)))
        names = data.draw(st.lists(st.sampled_from(everything.column_names), min_size=1, max_size=4, unique=True))
        frame = spark.read.format("rocketmq-store").options(**given_options).load(folder)
        # A body that cannot be unpacked counts as damage only where a read needs it.
        bodiless = _by_python(Path(folder), given_options, [name for name in everything.column_names if name != "body"])
        selected, counted = (
            spark.createDataFrame(rows).where(condition)
            for rows in (everything if "body" in names else bodiless, bodiless)
        )
        expected = table_rows(selected.select(*names).toArrow())
        assert table_rows(frame.where(condition).select(*names).toArrow()) == expected
        assert frame.where(condition).count() == counted.count()


# ---------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_golden("5.4.0", tmp_path_factory.mktemp("golden")).root


def _plan(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


def test_a_plan_shows_columns_filters_and_limit(spark: SparkSession, golden: Path) -> None:
    frame = spark.read.format("rocketmq-store").load(str(golden))
    shown = _plan(frame.where("topic = 'GoldTag' and queueId > 0").select("tags").limit(3))
    assert (
        "PushedFilters: [IsNotNull(topic), IsNotNull(queueId), EqualTo(topic,GoldTag), GreaterThan(queueId,0)]" in shown
    )
    assert "PushedLimit: 3" in shown
    assert "Filter (" not in shown
    assert re.search(r"BatchScan rocketmq-store \S+\[tags#\d+\]", shown)


def test_a_filter_that_the_reader_cannot_test_stays_with_spark(spark: SparkSession, golden: Path) -> None:
    frame = spark.read.format("rocketmq-store").load(str(golden)).where("topic like 'Gold%g'").limit(3)
    assert "PushedLimit" not in _plan(frame)
    assert {row.topic for row in frame.collect()} == {"GoldTag"}


def test_a_pushed_limit_returns_so_many_rows(spark: SparkSession, golden: Path) -> None:
    frame = spark.read.format("rocketmq-store").option("splitBytes", "10k").load(str(golden))
    assert frame.limit(7).count() == 7
    assert frame.where("topic = 'GoldTag'").limit(1_000_000).count() == frame.where("topic = 'GoldTag'").count()


def test_a_body_that_is_not_needed_is_not_unpacked(spark: SparkSession, tmp_path: Path) -> None:
    _write(tmp_path, [segment_of([lambda at: record_at(at, body=b"not zlib", sys_flag=1)])])
    frame = spark.read.format("rocketmq-store").load(str(tmp_path))
    assert frame.select("topic", "sysFlag").collect() == [("orders", 0)]
    assert frame.count() == 1


def test_metrics_count_the_bytes_that_are_read_and_skipped(spark: SparkSession, tmp_path: Path) -> None:
    sizes = [len(record_at(0, topic=topic)) for topic in (b"orders", b"others")]
    makers = [lambda at: record_at(at, topic=b"orders"), lambda at: record_at(at, topic=b"others")]
    _write(tmp_path, [segment_of(makers)])
    frame = spark.read.format("rocketmq-store").load(str(tmp_path)).where("topic = 'orders'")
    frame.collect()
    plan = frame._jdf.queryExecution().executedPlan()
    metrics = plan.collectLeaves().head().metrics()
    assert metrics.apply("logBytesRead").value() == sum(sizes)
    assert metrics.apply("logBytesSkipped").value() == sizes[1]


def test_the_optimizer_knows_the_size_of_a_store(spark: SparkSession, golden: Path) -> None:
    frame = spark.read.format("rocketmq-store").load(str(golden))
    sizes = [
        int(one._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()) for one in (frame, frame.select("topic"))
    ]
    log = sum(file.stat().st_size for file in (golden / "commitlog").iterdir())
    assert 0 < sizes[1] < sizes[0] <= log


def test_reads_that_java_does_not_serve_go_to_python(spark: SparkSession, golden: Path) -> None:
    load = spark.read.format("rocketmq-store").option
    by_queues = load("offsetsFrom", "consumequeue").option("topic", "GoldTag").load(str(golden))
    assert by_queues.count() == load("topic", "GoldTag").load(str(golden)).count() > 0


# ---------------------------------------------------------------- catalogs


@pytest.fixture
def catalog(spark: SparkSession, golden: Path) -> Iterator[SparkSession]:
    """A catalog over a store; Spark makes one for each name, once in a session."""
    session = spark.newSession()
    register(session)
    session.conf.set("spark.sql.catalog.kept", "rmqkit.spark.RmqCatalog")
    session.conf.set("spark.sql.catalog.kept.path", str(golden))
    yield session
    session.catalog.clearCache()


def test_topics_of_a_store_are_tables_of_a_catalog(catalog: SparkSession, golden: Path) -> None:
    topics = {folder.name for tree in ("consumequeue", "batchconsumequeue") for folder in (golden / tree).iterdir()}
    assert {row.tableName for row in catalog.sql("show tables in kept").collect()} == topics
    assert "GoldInnerBatch" in topics
    count = catalog.read.format("rocketmq-store").option("topic", "GoldTag").load(str(golden)).count()
    assert catalog.read.table("kept.GoldTag").count() == count > 0
    catalog.sql("use kept")
    assert catalog.sql("select count(*) from GoldTag where topic = 'GoldTag'").first() == (count,)
    assert catalog.sql("describe GoldTag").first().col_name == "topic"


@pytest.mark.parametrize("name", ["Nope", "`../commitlog`", "`GoldTag,GoldKey`", "other.GoldTag"])
def test_a_catalog_has_no_other_tables(name: str, catalog: SparkSession) -> None:
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        catalog.sql(f"select * from kept.{name}")


@pytest.mark.parametrize("text", ["drop table kept.GoldTag", "alter table kept.GoldTag add columns (a int)"])
def test_a_catalog_changes_no_topic(text: str, catalog: SparkSession, golden: Path) -> None:
    with pytest.raises(Exception, match="catalog kept is read only: its tables are topics"):
        catalog.sql(text)
    assert (golden / "consumequeue" / "GoldTag").is_dir()
