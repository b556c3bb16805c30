"""A store and its archive as one table: every message once, whether the log has it or only the archive."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec.structs import replace

from rmqkit.arrow import dataset, query, scan
from rmqkit.errors import StoreError
from rmqkit.protocol.properties import encode_properties
from rmqkit.protocol.record import BatchEntry, encode_batch
from rmqkit.store.archive.archive import segment_name
from rmqkit.store.archive.identity import adopt
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.seal import Work, seal
from rmqkit.store.archive.verify import found_in
from rmqkit.store.message_store import PutStatus
from rmqkit.store.settings import StoreSettings
from tests.cli.in_process import rmq
from tests.store.stores import message, opened

FILE_BYTES = 16 << 10
OWN, OTHER = "11" * 16, "22" * 16
COUNT, DELETED = 60, 3


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, Path]:
    """Return a store and its archive: of four full log files or more, all are archived, and the first three deleted."""
    root, folder = tmp_path / "store", tmp_path / "archive/broker-a"
    with opened(root, StoreSettings(commit_log_file_bytes=FILE_BYTES)) as opening:
        for number in range(COUNT):
            body = b"%d " % number + bytes(1000)
            topic = "Even" if number % 2 == 0 else "Odd"
            opening.put(message(topic=topic, queue_id=number % 3, body=body, KEYS=f"k{number} all", TAGS=f"t{number}"))
        opening.flusher.flush_log()
        files = [file.path for file in opening.log.queue.files[:-1]]
    assert len(files) > DELETED
    for path in files:
        seal(Work(str(path), int(path.name), "", "", with_tags=False, log_id=OWN), Folder(folder))
    for path in files[:DELETED]:
        path.unlink()
    return root, folder


def numbers(root: Path, archive: Path | str, **options: object) -> list[int]:
    bodies = scan(root, archive=archive, **options).read_all()["body"].to_pylist()
    return sorted(int(body.split(b" ")[0]) for body in bodies)


def test_every_message_is_there_once(store):
    root, archive = store
    assert 0 < len(numbers(root, "")) < COUNT
    assert numbers(root, archive) == list(range(COUNT))
    assert numbers(root, f"file://{archive}") == list(range(COUNT))
    found = scan(root, archive=archive).read_all()
    assert found.schema.equals(scan(root).schema)
    assert dataset(root, archive=archive).count_rows() == COUNT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topic": "Even"}, range(0, COUNT, 2)),
        ({"topic": ["Even", "Odd"], "queue": 1}, range(1, COUNT, 3)),
        ({"tags": "t1 || t58 || none"}, [1, 58]),
        ({"topic": "Odd", "key": ["k1", "k59", "k"]}, [1, 59]),
        ({"start": 0}, range(COUNT)),
        ({"end": 1}, []),
        ({"columns": ["body", "_corrupt"], "corrupt": "report"}, range(COUNT)),
    ],
    ids=str,
)
def test_options_count_for_both(store, options, expected):
    assert numbers(*store, **options) == list(expected)


def test_times_are_compared_in_both(store):
    root, archive = store
    rows = scan(root, archive=archive, columns=["storeTimestamp", "body"]).read_all().sort_by("storeTimestamp")
    middle = rows["storeTimestamp"][COUNT // 4].as_py()
    expected = pc.sum(pc.greater_equal(rows["storeTimestamp"], rows["storeTimestamp"][COUNT // 4])).as_py()
    assert len(numbers(root, archive, start=middle)) == expected
    assert len(numbers(root, archive, end=middle)) == COUNT - expected


def test_sql_reads_both(store):
    root, archive = store
    messages = dataset(root, archive=archive)
    found = query.query(messages, "select count(*) c from messages where topic = 'Even' and queueId = 0")
    assert found is not None and found.read_all()["c"].to_pylist() == [10]
    done = rmq("store", "query", str(root), "select count(*) c from messages", "--csv", "--archive", str(archive))
    assert done.stdout == f"c\n{COUNT}\n"


def test_a_missing_segment_is_an_error_unless_damage_is_skipped(store):
    root, archive = store
    (archive / segment_name(FILE_BYTES)).unlink()
    with pytest.raises(StoreError, match=f"lack the bytes from {FILE_BYTES} to {2 * FILE_BYTES}; run: rmq archive ver"):
        numbers(root, archive)
    assert 0 < len(numbers(root, archive, corrupt="skip")) < COUNT


@pytest.mark.parametrize("share", [0.2, 0.9999])
def test_a_damaged_segment_is_an_error(store, share):
    root, archive = store
    path = archive / segment_name(0)
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"archive .*broker-a: .*; run: rmq archive verify"):
        numbers(root, archive)


def test_segments_of_another_log_are_refused(store):
    root, archive = store
    adopt(root, found_in(Folder(archive)))
    assert numbers(root, archive) == list(range(COUNT))
    others = [replace(one, directory=replace(one.directory, log=OTHER)) for one in found_in(Folder(archive))]
    adopt(root, others)
    with pytest.raises(StoreError, match=f"is of log {OWN}, and store .* has log {OTHER}"):
        numbers(root, archive)


def test_an_empty_archive_is_refused(store, tmp_path):
    with pytest.raises(StoreError, match="has no segments: give the folder of a broker"):
        numbers(store[0], tmp_path / "nothing")


# ---------------------------------------------------------------- inner batches


def entry(number: int) -> BatchEntry:
    return BatchEntry(b"%d" % number, encode_properties({"TAGS": f"t{number % 3}", "KEYS": f"k{number}"}))


@pytest.fixture
def batched(tmp_path: Path) -> tuple[Path, Path, pa.Table]:
    """Return a store with inner batches of three messages and single messages, its archive, and the rows of the log
    before the first file was deleted."""
    root, folder = tmp_path / "store", tmp_path / "archive/broker-a"
    settings = StoreSettings(commit_log_file_bytes=FILE_BYTES)
    with opened(root, settings, is_batch_topic="Batches".__eq__) as opening:
        for number in range(0, COUNT, 3):
            body = encode_batch([entry(number + i) for i in range(3)])
            assert opening.put_batch(message(topic="Batches", body=body, UNIQ_KEY=f"U{number}")).status is PutStatus.OK
            opening.put(message(topic="Single", body=b"%d " % number + bytes(1000), TAGS="t0"))
        opening.flusher.flush_log()
        path = opening.log.queue.files[0].path
    whole = scan(root, broker_name="broker-a").read_all()
    seal(Work(str(path), int(path.name), "broker-a", "", with_tags=False, log_id=OWN), Folder(folder))
    path.unlink()
    return root, folder, whole


def in_order(table: pa.Table) -> list[dict[str, object]]:
    return table.sort_by([("topic", "ascending"), ("queueOffset", "ascending")]).to_pylist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topic": "Batches", "tags": "t1"},
        {"topic": "Batches", "key": ["k4", "k8"]},
        {"columns": ["queueOffset", "topic", "tags"]},
        {"topic": "Single"},
        {"queue": 1},
    ],
    ids=str,
)
def test_members_of_an_archived_batch_are_rows_as_in_the_log(batched, options):
    root, archive, whole = batched
    for option, column in (("topic", "topic"), ("tags", "tags"), ("key", "keys"), ("queue", "queueId")):
        if option in options:
            values = options[option] if option == "key" else [options[option]]
            whole = whole.filter(pc.is_in(whole[column], pa.array(values, whole[column].type)))
    whole = whole.select(options.get("columns", whole.column_names))
    found = scan(root, archive=archive, broker_name="broker-a", **options).read_all()
    assert in_order(found) == in_order(whole)


def test_sql_over_a_store_and_its_archive_filters_members(batched):
    root, archive, whole = batched
    found = query.query(dataset(root, archive=archive), "select count(*) c from messages where tags = 't2'")
    assert found is not None
    assert found.read_all()["c"].to_pylist() == [pc.sum(pc.equal(whole["tags"], "t2")).as_py()] == [COUNT // 3]
