"""A store in an object store: the same rows as from a disk, with few bytes read, and no secret in any text."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from rmqkit.arrow.fs import RemotePath, above, find_segments, join, list_files, map_range, map_records, resolve
from rmqkit.arrow.reader import Selection, read_split
from rmqkit.arrow.splits import Split, plan_splits
from rmqkit.errors import StoreError
from rmqkit.spark.jobs.summary import summary
from rmqkit.spark.options import Entity
from rmqkit.spark.source.store import StoreReader, read_plan, store_options, store_parts
from tests.examples import examples
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.messages import record_at, rows_of, segment_of
from tests.spark.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, serve_objects
from tests.spark.test_splits import forged_log
from tests.spark.test_tables import place, rows, slots

MIB = 1 << 20


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStore]:
    """An object store over an empty directory."""
    with serve_objects(tmp_path) as server:
        yield server


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GoldenStore, ObjectStore]]:
    """A golden store on a disk, and what serves it."""
    folder = tmp_path_factory.mktemp("objects")
    store = unpack_golden("5.4.0", folder)
    with serve_objects(folder) as server:
        yield store, server


def log(root: Path, *segments: bytes, size: int) -> None:
    """A commit log of preallocated files."""
    folder = root / "commitlog"
    folder.mkdir(exist_ok=True)
    for number, segment in enumerate(segments):
        path = folder / f"{number * size:020}"
        path.write_bytes(segment)
        os.truncate(path, size)


def places(root: str, split_bytes: int = MIB) -> list[tuple[int, int, int]]:
    return [(one.base_offset, one.low, one.high) for one in plan_splits(find_segments(root, []), split_bytes)]


# ---------------------------------------------------------------- the same rows


@pytest.mark.parametrize("entity", [entity.value for entity in Entity])
def test_every_entity_is_read_from_an_address_as_from_a_disk(
    entity: str, golden: tuple[GoldenStore, ObjectStore]
) -> None:
    store, server = golden
    read = rows(server.address("store"), entity=entity, maxHashSlotNum=slots(store))
    assert read == rows(store.root, entity=entity, maxHashSlotNum=slots(store))
    assert bool(read) == (entity != "transactions")


def test_queues_keys_and_times_choose_messages_from_an_address(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    address = server.address("store")
    (query, *_) = (one for one in store.manifest["queryByKey"] if one.get("physicalOffsets"))
    for chosen in (
        {"topic": "GoldTag", "offsetsFrom": "consumequeue", "splitBytes": "2k"},
        {"topic": query["topic"], "key": query["key"], "maxHashSlotNum": slots(store)},
        {"splitBytes": "9k", "verifyCrc": "fail"},
    ):
        remote, local = rows(address, **chosen), rows(store.root, **chosen)
        assert sorted(remote, key=place) == sorted(local, key=place)
        assert remote
    stored = sorted(one["storeTimestamp"] for one in store.manifest["messages"])
    late = Selection(start_us=(stored[-1] + 3_600_000) * 1000)
    (part,) = store_parts(store_options({"path": server.address("store")}), late)
    assert isinstance(part, Split)
    assert part.path.startswith("s3://data/store/commitlog/0")


@pytest.mark.spark
def test_executors_read_an_address(spark: SparkSession, golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    frame = spark.read.format("rocketmq-store").options(splitBytes="60k", columns="topic").load(server.address("store"))
    assert frame.rdd.getNumPartitions() > 4
    assert frame.count() == len(store.manifest["messages"])
    counted = summary(spark, server.address("store"), {"splitBytes": "60k"})
    assert sum(row.messages for row in counted.collect()) == len(store.manifest["messages"])


# ---------------------------------------------------------------- few bytes


def test_a_plan_fetches_little_however_large_the_files_are(objects: ObjectStore) -> None:
    large = segment_of([lambda at: record_at(at, body=os.urandom(5000))] * 13000)
    log(objects.root, large[: 48 * MIB], large[48 * MIB :], b"", size=48 * MIB)
    local, remote = places(str(objects.root), 4 * MIB), places(objects.address(""), 4 * MIB)
    assert remote == local
    assert len(remote) == 16
    assert 0 < sum(size for _, size in objects.reads) < 3 * MIB


def test_a_record_in_a_body_is_no_boundary_where_queues_point_at_the_records(objects: ObjectStore) -> None:
    segment, third = forged_log(objects.root, queues=True)
    assert places(objects.address(""), 200) == places(str(objects.root), 200)
    assert places(objects.address(""), 200) == [(0, 0, third), (0, third, len(segment))]


def test_a_task_fetches_its_split_and_chosen_records_only(objects: ObjectStore) -> None:
    long = [lambda at: record_at(at, body=bytes(9000)), lambda at: record_at(at, body=b"x" * 70_000)]
    segment = segment_of([*long, *[lambda at: record_at(at, body=bytes(1000))] * 3000])
    log(objects.root, segment, size=8 * MIB)
    path = find_segments(objects.address(""), [])[0].path
    buffer = map_range(path, 1 * MIB, 2 * MIB)
    assert buffer[MIB : 2 * MIB] == segment[MIB : 2 * MIB]
    assert [size for _, size in objects.reads] == [MIB]
    objects.reads.clear()
    second, last = len(segment_of(long[:1])), len(segment) - 1123
    chosen = map_records(path, [-5, second, last, 8 * MIB + 1])
    assert chosen[second : second + 70_000] == segment[second : second + 70_000]
    assert chosen[last : len(segment)] == segment[last:]
    assert sum(size for _, size in objects.reads) < 80_000


def test_the_index_is_read_without_its_slots(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    server.reads.clear()
    rows(server.address("store"), entity="index", maxHashSlotNum=slots(store))
    files = list_files(str(store.root / "index"))
    assert len(server.reads) == 2 * len(files)
    assert sum(size for _, size in server.reads) < sum(file.size for file in files) - len(files) * 4 * int(slots(store))


# ---------------------------------------------------------------- where a remote log ends


@examples(40, suppress=[HealthCheck.function_scoped_fixture])
@given(
    bodies=st.lists(st.tuples(st.sampled_from([0, 9, 3000, 70_000, 300_000]), st.booleans()), max_size=7),
    cut=st.sampled_from([0, 0, 1, 20, 2000]),
    blank=st.booleans(),
)
def test_the_end_of_a_remote_log_is_that_of_a_local_one(
    objects: ObjectStore, bodies: list[tuple[int, bool]], cut: int, blank: bool
) -> None:
    """Bodies of zeros look like the end; the last record may be half written; a full file ends with a blank."""
    makers = [lambda at, n=n, z=z: record_at(at, body=bytes(n) if z else b"\x01" * n) for n, z in bodies]
    segment = segment_of(makers)
    segment = segment_of(makers, size=3 * MIB) if blank and not cut else segment[: max(0, len(segment) - cut)]
    log(objects.root, segment, size=3 * MIB)
    assert places(objects.address("")) == places(str(objects.root))


def test_a_file_of_zeros_is_looked_at_once(objects: ObjectStore) -> None:
    log(objects.root, segment_of([record_at] * 3, size=MIB), b"", b"", size=MIB)
    assert places(objects.address("")) == places(str(objects.root)) != []
    assert objects.read_bytes(f"{MIB:020}") == objects.read_bytes(f"{2 * MIB:020}") == 64 << 10


# ---------------------------------------------------------------- secrets and places


def test_what_travels_to_tasks_shows_no_secret_and_works_there(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    options = store_options({"path": server.address("store"), "splitBytes": "100k"})
    partitions = StoreReader(options, read_plan(options, ["topic"])).partitions()
    tables = [
        part
        for chosen in ({"entity": "topics"}, {"offsetsFrom": "consumequeue"})
        for part in store_parts(store_options({"path": server.address("store"), **chosen}))
    ]
    shown = repr([[one.value for one in partitions], tables, options])
    assert "s3://data/store/commitlog/00000000000000000000" in shown
    assert "s3cr3t" not in shown
    assert ACCESS_KEY not in shown
    (part, *_) = pickle.loads(pickle.dumps(partitions))[0].value
    assert part == partitions[0].value[0]
    (row, *_) = rows_of(list(read_split(part, read_plan(options, ["topic"]))))
    assert row["topic"] in {one["topic"] for one in store.manifest["messages"]}


def test_credentials_may_come_from_the_environment(
    golden: tuple[GoldenStore, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = golden
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert len(find_segments(server.address("store", user=""), [])) == len(find_segments(str(store.root), []))


def test_addresses_are_joined_and_shown_without_their_options() -> None:
    assert [resolve(f"s3:/{address}") for address in ("/b/a@b/", "u:s@b/c", "/u:s/e@b/c", "/u@b/c")] == [
        "s3://b/a@b", "s3:/b/c", "s3://b/c", "s3://b/c"
    ]  # fmt: skip
    assert resolve("hdfs://host:8020/a@b") == "hdfs://host:8020/a@b"
    root = resolve("s3://user:secret@bucket/a/store?region=eu-1")
    file = join(root, "consumequeue", "orders", "0", "1")
    assert str(file) == f"{file}" == "s3://bucket/a/store/consumequeue/orders/0/1"
    assert above(file, 4) == root == "s3://bucket/a/store"
    assert isinstance(file, RemotePath)
    assert (file.root, resolve(file)) == ("s3://user:secret@bucket/a/store?region=eu-1", file)
    assert join(resolve("file:/data/store"), "config", "x") == "/data/store/config/x"
    assert above("/data/store/consumequeue/orders/0/1", 4) == "/data/store"


def test_what_is_wrong_with_an_address_is_reported_in_one_line_without_secrets(objects: ObjectStore) -> None:
    for address, text in (
        (
            objects.address("none"),
            "s3://data/none/commitlog does not exist: give the store directory, the one that hol",
        ),
        (objects.address("", user="OTHER:s3cr3t@"), "s3://data/commitlog cannot be read: .* AWS Error ACCESS_DENIED"),
        ("nfs4://u:s3cr3t@host/store", "nfs4://host/store is not an address that pyarrow.fs can use: Unrecognized fil"),
        ("s3://u:s3cr3t@data/store?bogus=1", "s3://data/store is not an address that pyarrow.fs can use: .*'bogus'"),
    ):
        with pytest.raises(StoreError, match=text) as caught:
            find_segments(address, [])
        assert "\n" not in str(caught.value)
        assert "s3cr3t" not in str(caught.value)


def test_an_object_that_vanished_or_shrank_is_named(objects: ObjectStore) -> None:
    log(objects.root, segment_of([record_at] * 30), size=5000)
    (split,) = plan_splits(find_segments(objects.address(""), []), MIB)
    plan = read_plan(store_options({"path": "/s"}), ["topic"])
    os.truncate(objects.root / "commitlog" / f"{0:020}", 1000)
    with pytest.raises(StoreError, match=r"^s3://data/commitlog/0{20} has 1000 bytes, \d+ when the query was planned"):
        list(read_split(split, plan))
    (objects.root / "commitlog" / f"{0:020}").unlink()
    with pytest.raises(StoreError, match=r"^s3://data/commitlog/0{20} has vanished since the query was planned"):
        list(read_split(split, plan))
