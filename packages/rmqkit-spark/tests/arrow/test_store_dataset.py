"""Stores as Arrow tables: the rows of a plain decoder and of Spark's source, without reading more than requested."""

from __future__ import annotations

import shutil
import subprocess
import sys
from datetime import UTC, datetime

import duckdb
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.arrow import dataset, scan, to_pandas, to_polars
from rmqkit.arrow.store_dataset import may_meet
from rmqkit.errors import SettingsError, StoreError, StoreMismatch
from rmqkit.extras import install
from rmqkit.spark.source.store import read_part, read_plan, store_options, store_parts
from rmqkit.store.kernels import batch as kernels
from tests.golden_stores import unpack_golden
from tests.spark.messages import plain_rows, record_at, rows_of, segment_of

GOLDEN = "5.4.0", "4.9.4", "5.4.0-ipv6-crc", "5.4.0-retained"
FILE_BYTES = 4096


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request, tmp_path_factory):
    return unpack_golden(request.param, tmp_path_factory.mktemp("golden")).root


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A log of three files: orders and audit in two queues each, an hour of store time in each file."""
    root = tmp_path_factory.mktemp("store")
    (root / "commitlog").mkdir()
    for number in range(3):
        makers = [
            lambda at, number=number, i=i: record_at(
                at,
                topic=(b"orders", b"audit")[i % 2],
                queue_id=i // 2 % 2,
                queue_offset=number * 5 + i // 4,
                store_timestamp=(number + 1) * 3_600_000 + i,
                body=b"%d-%d" % (number, i),
                properties=b"TAGS\x01%s\x02KEYS\x01k%d k\x02" % ((b"a", b"b", b"a b")[i % 3], i),
            )
            for i in range(12)
        ]
        base = number * FILE_BYTES
        segment = segment_of(makers, base_offset=base, size=FILE_BYTES)
        (root / "commitlog" / f"{base:020}").write_bytes(segment)
    return root


def moment(ms):
    return pa.scalar(ms * 1000, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def place(row):
    return row["topic"], row["queueId"], row["queueOffset"]


def bodies(reader):
    return [body.decode() for batch in reader for body in batch.column("body").to_pylist()]


# ---------------------------------------------------------------- the same rows


def test_rows_are_those_of_a_plain_decoder_and_of_sparks_source(golden):
    found = rows_of(list(scan(golden)))
    files = sorted((golden / "commitlog").iterdir())
    assert found == [row for path in files for row in plain_rows(path.read_bytes())]
    options = store_options({"path": str(golden)})
    plan = read_plan(options, [])
    assert found == rows_of([batch for part in store_parts(options, plan.selection) for batch in read_part(part, plan)])


def test_queues_give_what_consumers_get(golden):
    walked = {row["commitLogOffset"] for row in rows_of(list(scan(golden)))}
    queued = {row["commitLogOffset"] for row in rows_of(list(scan(golden, offsets_from="consumequeue")))}
    assert queued and queued <= walked


def test_batch_queues_give_every_message_of_their_batches(tmp_path):
    root = unpack_golden("5.4.0", tmp_path).root
    walked = rows_of(list(scan(root, topic="GoldInnerBatch")))
    assert len(walked) > len({row["commitLogOffset"] for row in walked}) > 1
    for queue in (), (0,), (1,), (2, 3):
        wanted = [row for row in walked if not queue or row["queueId"] in queue]
        queued = rows_of(list(scan(root, topic="GoldInnerBatch", queue=queue, offsets_from="consumequeue")))
        assert sorted(queued, key=place) == sorted(wanted, key=place)
    everything = rows_of(list(scan(root, offsets_from="consumequeue")))
    assert {place(row) for row in everything} >= {place(row) for row in walked}


def test_a_store_of_batch_queues_only_is_read_by_them_and_one_without_queues_is_named(tmp_path):
    root = unpack_golden("5.4.0", tmp_path).root
    shutil.rmtree(root / "consumequeue")
    assert scan(root, topic="GoldInnerBatch", offsets_from="consumequeue").read_all().num_rows > 0
    shutil.rmtree(root / "batchconsumequeue")
    with pytest.raises(StoreError, match="consumequeue does not exist: give the store directory, or have the queues"):
        scan(root, offsets_from="consumequeue")


# ---------------------------------------------------------------- what is wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"topic": "audit", "queue": 1}, [f"{n}-{i}" for n in range(3) for i in (3, 7, 11)]),
        ({"topic": ["audit", "orders"], "queue": [0], "end": 3_600_004}, ["0-0", "0-1"]),
        ({"tags": "b || c", "topic": "orders"}, [f"{n}-{i}" for n in range(3) for i in (4, 10)]),
        ({"start": 10_800_010}, ["2-10", "2-11"]),
        ({"start": "1970-01-01T03:00:00.011+00:00"}, ["2-11"]),
        ({"start": datetime(1970, 1, 1, 3, 0, 0, 11_000, UTC)}, ["2-11"]),
        ({"topic": "nobody"}, []),
    ],
)
def test_options_choose_messages(store, options, wanted):
    assert bodies(scan(store, columns=["body"], **options)) == wanted


def test_columns_come_in_the_order_of_the_wish(store):
    table = scan(store, columns=["queueId", "topic"]).read_all()
    assert table.column_names == ["queueId", "topic"] and table.num_rows == 36
    assert dataset(store, columns=["topic"]).schema == pa.schema([("topic", pa.string())])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": ["topc"]}, "no column 'topc' with these options: did you mean topic"),
        ({"corrupt": "ignore"}, "corrupt='ignore' must be one of fail, skip, report"),
        ({"offsets_from": "index"}, "offsets_from='index' must be one of walk, consumequeue"),
        ({"start": "yesterday"}, "start='yesterday' must be a datetime, ms since the epoch, or an ISO time"),
        ({"key": "k"}, "needs a topic"),
        ({"tags": " || "}, "tags ' || '"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(store, options, text):
    with pytest.raises(SettingsError, match=text.replace("|", r"\|")):
        scan(store, **options)


def test_a_store_that_is_not_there_is_reported_before_a_row_is_read(tmp_path):
    with pytest.raises(StoreError, match="commitlog does not exist: give the store directory"):
        scan(tmp_path)


def test_missing_files_are_reported(store, tmp_path):
    (tmp_path / "commitlog").mkdir()
    for path in [*sorted((store / "commitlog").iterdir())][::2]:
        (tmp_path / "commitlog" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(StoreMismatch):
        scan(tmp_path)


def test_damage_fails_is_left_out_or_is_a_row(store, tmp_path):
    (tmp_path / "commitlog").mkdir()
    octets = bytearray((store / "commitlog" / f"{0:020}").read_bytes())
    octets[:4] = b"\xff" * 4
    (tmp_path / "commitlog" / f"{0:020}").write_bytes(octets)
    with pytest.raises(StoreError, match=r"damage at byte 0 .*corrupt='skip' reads on"):
        scan(tmp_path).read_all()
    assert bodies(scan(tmp_path, corrupt="skip")) == [f"0-{i}" for i in range(1, 12)]
    reported = scan(tmp_path, corrupt="report", columns=["commitLogOffset", "_corrupt"]).read_all().to_pylist()
    assert len(reported) == 12 and reported[0]["_corrupt"].startswith("announced size is -1")


# ---------------------------------------------------------------- filters

COMPARISONS = st.one_of(
    st.builds(lambda topic: pc.field("topic") == topic, st.sampled_from(["orders", "audit", "nobody"])),
    st.builds(
        lambda topics: pc.field("topic").isin(topics), st.sets(st.sampled_from(["orders", "x"]), min_size=1).map(sorted)
    ),
    st.builds(lambda number: pc.field("queueId") > number, st.integers(-1, 2)),
    st.builds(lambda number: pc.field("queueId") == number, st.integers(0, 2)),
    st.builds(lambda ms: pc.field("storeTimestamp") >= moment(ms), st.integers(3_599_999, 10_800_012)),
    st.builds(lambda ms: pc.field("storeTimestamp") < moment(ms), st.integers(3_599_999, 10_800_012)),
    st.builds(lambda body: pc.field("body") == body, st.sampled_from([b"1-4", b"2-11", b"?"])),
    st.just(pc.field("tags").is_valid()),
    st.just(pc.starts_with(pc.field("keys"), "k1")),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=6,
)


@given(wanted=FILTERS, columns=st.sampled_from([["body"], ["commitLogOffset", "topic"], None]))
def test_any_filter_gives_the_rows_that_it_gives_of_the_whole(store, wanted, columns):
    messages = dataset(store)
    expected = scan(store).read_all().filter(wanted)
    found = messages.to_table(columns=columns, filter=wanted)
    assert found.to_pylist() == (expected if columns is None else expected.select(columns)).to_pylist()
    assert messages.count_rows(filter=wanted) == expected.num_rows


@pytest.fixture
def decoded(monkeypatch):
    """Return the list of the numbers of records decoded at once."""
    counts = []
    real = kernels.message_batches

    def counting(records, **options):
        counts.append(len(records))
        return real(records, **options)

    monkeypatch.setattr("rmqkit.arrow.reader.message_batches", counting)
    return counts


@pytest.mark.parametrize(
    ("sql", "count"),
    [
        ("topic = 'orders'", 18),
        ("topic = 'orders' and queueId = 1", 9),
        ("topic in ('audit', 'nobody') and queueId > 0", 9),
        ("topic = 'nobody'", 0),
        ("(topic = 'orders' and queueId = 0) or (topic = 'audit' and queueId = 1)", 18),
        ("body = '1-4'", 36),
    ],
)
def test_duckdb_has_only_those_decoded_that_its_comparisons_leave(store, decoded, sql, count):
    messages = dataset(store)  # noqa: F841 - found by its name
    found = duckdb.sql(f"select body from messages where {sql} order by commitLogOffset").fetchall()
    assert sum(decoded) == count
    whole = scan(store).read_all()  # noqa: F841 - found by its name
    assert found == duckdb.sql(f"select body from whole where {sql} order by commitLogOffset").fetchall()


@pytest.mark.parametrize(
    ("damaged", "wanted"),
    [
        (0, pc.field("storeTimestamp") > moment(10_800_005)),
        (2, (pc.field("storeTimestamp") <= moment(3_600_005)) & (pc.field("topic") != "nobody")),
    ],
)
def test_files_of_other_times_are_not_read(store, tmp_path, damaged, wanted):
    (tmp_path / "commitlog").mkdir()
    for path in (store / "commitlog").iterdir():
        (tmp_path / "commitlog" / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "commitlog" / f"{damaged * FILE_BYTES:020}").open("r+b") as file:
        file.seek(500)
        file.write(b"\xff" * 500)  # whoever walks this file fails
    messages = dataset(tmp_path)
    assert messages.count_rows(filter=wanted) == 6
    with pytest.raises(StoreError):
        messages.count_rows()


def test_what_is_known_decides_a_filter_or_leaves_it_open():
    topic, queue = pc.field("topic"), pc.field("queueId")
    known = (topic == "a") & (queue == pa.scalar(1, pa.int32()))
    body = pc.field("body") == b"x"
    may = [may_meet(one, known) for one in (topic == "a", body & (queue == 1), body | (topic == "b"), queue > 0)]
    assert may == [True] * 4
    not_at_all = (
        topic == "b",
        topic.isin(["b", "c"]),
        body & (queue > 1),
        (topic == "b") | (queue == 0),
        ~(queue == 1),
    )
    assert [may_meet(one, known) for one in not_at_all] == [False] * 5


# ---------------------------------------------------------------- data frames


def test_data_frames_have_the_rows(golden):
    whole = scan(golden).read_all()
    names = ["topic", "queueId", "queueOffset", "body", "storeTimestamp"]
    frame = to_polars(golden, columns=names)
    assert frame.rows() == [tuple(row.values()) for row in whole.select(names).to_pylist()]
    pandas = to_pandas(golden, columns=["topic", "queueId"])
    assert pandas["queueId"].tolist() == whole.column("queueId").to_pylist()
    lazy = polars.scan_pyarrow_dataset(dataset(golden)).filter(polars.col("queueId") == 1).select("topic", "queueId")
    assert lazy.collect().height == whole.filter(pc.field("queueId") == 1).num_rows


def test_duckdb_finds_readers_and_datasets_by_the_names_of_variables(golden):
    reader, messages = scan(golden), dataset(golden)  # noqa: F841 - found by its name
    count = messages.count_rows()
    assert duckdb.sql("select count(*) from reader").fetchall() == [(count,)]
    for _ in range(2):  # a dataset is read any number of times
        assert duckdb.sql("select count(*) from messages").fetchall() == [(count,)]


def test_a_read_that_stops_early_ends(golden):
    messages = dataset(golden)
    assert len(duckdb.sql("select topic from messages limit 1").fetchall()) == 1
    assert messages.head(3, columns=["topic"]).num_rows == 3
    assert next(messages.to_batches(columns=["topic"])).num_rows > 0


def test_no_spark_is_imported(golden):
    program = f"""
import sys
from rmqkit.arrow import scan
scan({str(golden)!r}).read_all()
assert not [name for name in sys.modules if name.startswith(("pyspark", "py4j", "rmqkit.spark"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("missing", ["pyarrow", "numpy"])
def test_what_is_not_installed_is_named_with_its_extra(store, missing):
    program = f"""
import sys
sys.modules[{missing!r}] = None
from rmqkit.arrow import scan
from rmqkit.errors import SettingsError
try:
    scan({str(store)!r})
except SettingsError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=100)
    assert told.stdout == f"a table of a store needs {missing}, which is not installed: {install('arrow')}\n"


def test_a_running_brokers_log_is_read_up_to_its_last_whole_record(store, tmp_path):
    (tmp_path / "commitlog").mkdir()
    octets, end = (store / "commitlog" / f"{0:020}").read_bytes(), 0
    for _ in range(3):
        end += int.from_bytes(octets[end : end + 4])
    path = tmp_path / "commitlog" / f"{0:020}"
    path.write_bytes(octets[:end] + octets[end : end + 40] + bytes(1 << 16))  # the fourth is being written
    assert bodies(scan(tmp_path)) == ["0-0", "0-1", "0-2"]
