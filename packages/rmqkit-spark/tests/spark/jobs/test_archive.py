"""Archives: equal to the store in every format, complete or absent after a kill, and the deletion of log files.

Most tests run without a JVM (`in_process`). The last tests run the same code on Spark."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from pyspark.sql import SparkSession

from rmqkit.arrow.reader import ReadPlan, read_split
from rmqkit.arrow.schema import MESSAGE_COLUMNS, arrow_schema
from rmqkit.errors import SettingsError, StoreError, StoreMismatch
from rmqkit.settings import load
from rmqkit.spark.jobs import archive as archive_job
from rmqkit.spark.jobs import archive_target
from rmqkit.spark.jobs.archive import archive
from rmqkit.spark.jobs.archive_target import Target
from rmqkit.spark.source.store import store_options, store_splits
from rmqkit.store.files import StoreLock
from rmqkit.store.offline import check as fsck
from rmqkit.store.settings import StoreSettings
from tests.golden_stores import golden_manifest, unpack_golden
from tests.sources import ROOT
from tests.spark.jobs.in_process import in_process
from tests.spark.messages import record_at, rows_of, segment_of

_NAMES = ["5.4.0", "4.9.4", "5.4.0-ipv6-crc"]
_FORMATS = ["parquet", "delta", "iceberg"]
_SIZE = 131072

Rows = list[dict[str, Any]]


class Killed(BaseException):
    """The exception that stops a run without any cleanup, like a kill."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: unpack_golden(name, tmp_path_factory.mktemp("golden")).root for name in _NAMES}


@pytest.fixture
def tasks() -> SparkSession:
    return in_process()


@pytest.fixture
def store(tmp_path: Path, stores: dict[str, Path]) -> Path:
    """A copy of a store of four log files."""
    return shutil.copytree(stores["5.4.0"], tmp_path / "store", ignore=shutil.ignore_patterns("timer*", "lock"))


def _sorted(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: (row["commitLogOffset"], row["queueOffset"], row["body"]))


def _of_store(root: Path, before: int | None = None) -> Rows:
    """Return the rows of rocketmq-store, up to a physical offset."""
    plan = ReadPlan(columns=MESSAGE_COLUMNS)
    rows = rows_of(
        [batch for split in store_splits(store_options({"path": str(root)})) for batch in read_split(split, plan)]
    )
    return _sorted([row for row in rows if before is None or row["commitLogOffset"] < before])


def _read_parquet(target: Path) -> pa.Table:
    return pyarrow.dataset.dataset(target, format="parquet", partitioning="hive").to_table()


def _read_delta(target: Path) -> pa.Table:
    from deltalake import DeltaTable

    return DeltaTable(target).to_pyarrow_table()


def _read_iceberg(target: Path) -> pa.Table:
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("rmqkit", type="sql", uri=f"sqlite:///{target}/catalog.db")
    try:
        return catalog.load_table("rmqkit.messages").scan().to_arrow()
    finally:
        catalog.close()


_READ: dict[str, Callable[[Path], pa.Table]] = {
    "parquet": _read_parquet,
    "delta": _read_delta,
    "iceberg": _read_iceberg,
}


def _of_archive(target: Path, table_format: str = "parquet") -> Rows:
    schema = arrow_schema(MESSAGE_COLUMNS)
    table = _READ[table_format](target).select(schema.names).cast(schema)
    return _sorted(rows_of(table.to_batches()))


def _visible(target: Path) -> list[str]:
    """The Parquet files that a reader of the folder sees."""
    found = (path.relative_to(target) for path in target.rglob("*.parquet"))
    return sorted(str(path) for path in found if not path.parts[0].startswith("_"))


def _manifests(target: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((target / "_archive").glob("*.json"))]


# ---------------------------------------------------------------- the same rows


@pytest.mark.parametrize("table_format", _FORMATS)
@pytest.mark.parametrize("name", _NAMES)
def test_an_archive_has_the_rows_of_its_store(
    name: str, table_format: str, tasks: SparkSession, stores: dict[str, Path], tmp_path: Path
) -> None:
    expected = _of_store(stores[name])
    done = archive(
        tasks,
        str(stores[name]),
        str(tmp_path),
        {"splitBytes": "60k"},
        table_format=table_format,
        includes_newest=True,
        verify="full",
    )
    assert _of_archive(tmp_path, table_format) == expected
    assert (done.run, done.rows, done.lost, done.missing_bytes) == (1, len(expected), 0, 0)
    assert done.records == len({row["commitLogOffset"] for row in expected}) == sum(s.records for s in done.segments)
    [manifest] = _manifests(tmp_path)
    assert sorted(file["path"] for file in manifest["files"]) == _visible(tmp_path)
    assert sum(file["rows"] for file in manifest["files"]) == len(expected)
    assert sum(segment["rows"] for segment in manifest["segments"]) == len(expected)
    assert not (tmp_path / "_archive" / "staging").exists()


@pytest.mark.spark
def test_spark_reads_an_archive_as_the_store(spark: SparkSession, stores: dict[str, Path], tmp_path: Path) -> None:
    archive(spark, str(stores["5.4.0"]), str(tmp_path), includes_newest=True)
    stored = spark.read.format("rocketmq-store").load(str(stores["5.4.0"]))
    archived = spark.read.parquet(str(tmp_path))
    assert archived.columns == [*stored.columns, "day"]
    assert [field.dataType for field in archived.schema.fields[:21]] == [one.dataType for one in stored.schema.fields]
    names = [f"cast({name} as string) {name}" for name in stored.columns]
    left, right = stored.selectExpr(*names), archived.selectExpr(*names)
    assert left.exceptAll(right).union(right.exceptAll(left)).collect() == []
    assert archived.where("topic = '%RETRY%g_retry'").count() == stored.where("topic = '%RETRY%g_retry'").count() > 0


def test_partitions_are_a_choice(tasks: SparkSession, stores: dict[str, Path], tmp_path: Path) -> None:
    for partition_by, depth in (((), 1), (("day",), 2)):
        target = tmp_path / str(depth)
        archive(tasks, str(stores["4.9.4"]), str(target), partition_by=partition_by, includes_newest=True)
        assert {path.count("/") + 1 for path in _visible(target)} == {depth}
        assert _of_archive(target) == _of_store(stores["4.9.4"])


@pytest.mark.parametrize("table_format", _FORMATS)
def test_a_topic_alone_or_none_at_all(
    table_format: str, tasks: SparkSession, stores: dict[str, Path], tmp_path: Path
) -> None:
    def archived(topic: str) -> None:
        archive(tasks, str(stores["4.9.4"]), str(tmp_path / topic), {"topic": topic}, table_format=table_format)

    archived("GoldTag")
    newest = 2 * _SIZE
    expected = [row for row in _of_store(stores["4.9.4"], before=newest) if row["topic"] == "GoldTag"]
    assert _of_archive(tmp_path / "GoldTag", table_format) == expected != []
    archived("Nobody")
    assert _visible(tmp_path / "Nobody") == []
    assert [len(one["segments"]) for one in _manifests(tmp_path / "Nobody")] == [2]


def test_a_target_may_be_an_address(
    tasks: SparkSession, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    monkeypatch.setattr(Target, "filesystem", lambda target: elsewhere)
    for _ in range(2):
        done = archive(tasks, str(stores["4.9.4"]), "s3://user:secret@bucket/archive", includes_newest=True)
        assert done.target == "s3://bucket/archive"
    assert _of_archive(tmp_path) == _of_store(stores["4.9.4"])
    assert not (tmp_path / "_archive" / "lock").exists()
    with pytest.raises(SettingsError, match="Iceberg archive s3://bucket/archive needs a catalog"):
        archive(tasks, str(stores["4.9.4"]), "s3://bucket/archive", table_format="iceberg")


# ---------------------------------------------------------------- run after run


def _grow(store: Path, whole: Path, count: int) -> None:
    """Let a store have the first ``count`` log files of another one, and an empty one that is preallocated."""
    for path in (store / "commitlog").iterdir():
        path.unlink()
    for path in sorted((whole / "commitlog").iterdir())[:count]:
        shutil.copy2(path, store / "commitlog" / path.name)
    following = store / "commitlog" / f"{count * _SIZE:020d}"
    following.touch()
    os.truncate(following, _SIZE)


@pytest.mark.parametrize("table_format", _FORMATS)
def test_a_run_adds_what_is_new(
    table_format: str, tasks: SparkSession, store: Path, stores: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "archive"
    added = []
    for count in (1, 2, 2, 4):
        _grow(store, stores["5.4.0"], count)
        done = archive(tasks, str(store), str(target), table_format=table_format)
        added.append((done.run, [segment.base_offset // _SIZE for segment in done.segments]))
    assert added == [(0, []), (1, [0]), (0, []), (2, [1, 2])]
    assert _of_archive(target, table_format) == _of_store(store, before=3 * _SIZE)
    done = archive(tasks, str(store), str(target), table_format=table_format, includes_newest=True)
    assert [segment.base_offset // _SIZE for segment in done.segments] == [3]
    assert _of_archive(target, table_format) == _of_store(store)


def test_the_newest_file_is_gone_on_with(tasks: SparkSession, tmp_path: Path) -> None:
    target, log = tmp_path / "archive", tmp_path / "store" / "commitlog"
    log.mkdir(parents=True)
    makers = [lambda at, i=i: record_at(at, queue_offset=i) for i in range(9)]

    def written(count: int, size: int | None = None) -> None:
        data = segment_of(makers[:count], size=size)
        (log / f"{0:020d}").write_bytes(data + bytes(4096 - len(data)))

    for count in (3, 3, 7):
        written(count)
        archive(tasks, str(log.parent), str(target), includes_newest=True)
        assert [row["queueOffset"] for row in _of_archive(target)] == list(range(count))
    written(9, size=4096)
    (log / f"{4096:020d}").write_bytes(segment_of(makers[:1], base_offset=4096) + bytes(2000))
    archive(tasks, str(log.parent), str(target))
    assert _of_archive(target) == _of_store(log.parent, before=4096)
    assert [(one["segments"][0]["low"], one["segments"][0]["high"]) for one in _manifests(target)][-1][1] == 4096


def test_a_gap_in_the_log_is_reported(tasks: SparkSession, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    files = sorted((store / "commitlog").iterdir())
    shutil.move(files[3], tmp_path / "3")
    shutil.move(files[2], tmp_path / "2")
    archive(tasks, str(store), str(target))
    files[0].unlink()
    files[1].unlink()
    shutil.move(tmp_path / "2", files[2])
    shutil.move(tmp_path / "3", files[3])
    done = archive(tasks, str(store), str(target))
    assert (done.run, done.missing_bytes) == (2, _SIZE)


# ---------------------------------------------------------------- kills and faults


def _killing(original: Callable[..., Any], count: int, *, after: bool = False) -> Callable[..., Any]:
    """A function that kills at its nth call, before or after it did its work."""
    calls = itertools.count(1)

    def call(*given: Any, **named: Any) -> Any:
        is_it = next(calls) == count
        if is_it and not after:
            raise Killed
        result = original(*given, **named)
        if is_it:
            raise Killed
        return result

    return call


_POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "files are written": (archive_job, "verify_files", 1, False),
    "files are verified": (archive_job, "verify_files", 1, True),
    "manifest is being written": (archive_target, "_move", 1, False),
    "publishing has begun": (archive_target, "_move", 1, True),
    "some files are moved": (archive_target, "_move", 5, False),
    "all files are moved": (archive_job, "committer", 1, False),
    "the lake has committed": (archive_job, "committer", 1, True),
    "the manifest has its name": (archive_target.Target, "discard", 2, False),
}
_IN_LAKES = ("some files are moved", "all files are moved", "the lake has committed")


def _kill_at(point: str, patched: pytest.MonkeyPatch) -> None:
    owner, name, count, after = _POINTS[point]
    original = getattr(owner, name)
    if name == "committer":  # the function that it gives is the one to kill in
        patched.setattr(owner, name, lambda *given: _killing(original(*given), count, after=after))
    else:
        patched.setattr(owner, name, _killing(original, count, after=after))


@pytest.mark.parametrize(
    ("table_format", "point"),
    [("parquet", point) for point in _POINTS] + [(lake, point) for lake in _FORMATS[1:] for point in _IN_LAKES],
)
def test_a_killed_run_happened_or_did_not(
    table_format: str,
    point: str,
    tasks: SparkSession,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(**more: Any) -> Any:
        return archive(tasks, str(stores["4.9.4"]), str(tmp_path), table_format=table_format, **more)

    run()  # the first two files
    before = _of_archive(tmp_path, table_format)
    with monkeypatch.context() as patched:
        _kill_at(point, patched)
        with pytest.raises(Killed):
            run(includes_newest=True)
    happened = not point.startswith(("files", "manifest"))
    if not happened or table_format != "parquet":
        expected = _of_store(stores["4.9.4"]) if point == "the lake has committed" else before
        assert _of_archive(tmp_path, table_format) == expected
    done = run(includes_newest=True)
    assert done.run == (0 if happened else 2)
    assert _of_archive(tmp_path, table_format) == _of_store(stores["4.9.4"])
    listed = sorted(file["path"] for one in _manifests(tmp_path) for file in one["files"])
    assert listed == _visible(tmp_path)
    assert not list((tmp_path / "_archive").rglob("*.parquet"))


_CHILD = """
import sys, threading
from rmqkit.spark.jobs import archive as job
from tests.spark.jobs.in_process import in_process
job.verify_files = lambda *given, **named: threading.Event().wait()   # stands still with its files written
job.archive(in_process(), sys.argv[1], sys.argv[2], includes_newest=True)
"""


def test_a_driver_that_is_killed_leaves_nothing_to_see(
    tasks: SparkSession, stores: dict[str, Path], tmp_path: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(stores["4.9.4"]), str(tmp_path)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 500
        while len(list((tmp_path / "_archive" / "staging").rglob("*.parquet"))) < 20:
            assert child.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "no files were written"
            time.sleep(0.05)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert _visible(tmp_path) == []
    assert archive(tasks, str(stores["4.9.4"]), str(tmp_path), includes_newest=True).run == 1
    assert _of_archive(tmp_path) == _of_store(stores["4.9.4"])


def _damage_first(folder: Path) -> Path:
    path = min(folder.rglob("*.parquet"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    return path


def test_a_file_that_changes_before_it_is_published_fails_the_run(
    tasks: SparkSession, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = archive_job.verify_files

    def tampered(tasks: SparkSession, target: Target, *given: Any, **named: Any) -> None:
        if named.get("folder"):
            _damage_first(tmp_path / named["folder"])
        verify(tasks, target, *given, **named)

    monkeypatch.setattr(archive_job, "verify_files", tampered)
    with pytest.raises(StoreError, match=r"^\S+\.parquet has CRC \w+, written was \w+: restore it, or archive"):
        archive(tasks, str(stores["4.9.4"]), str(tmp_path), verify="full")
    assert _visible(tmp_path) == []
    assert _manifests(tmp_path) == []
    assert not (tmp_path / "_archive" / "staging").exists()


def test_a_file_that_was_changed_later_is_named(tasks: SparkSession, stores: dict[str, Path], tmp_path: Path) -> None:
    archive(tasks, str(stores["4.9.4"]), str(tmp_path))
    path = _damage_first(tmp_path)
    archive(tasks, str(stores["4.9.4"]), str(tmp_path))  # looks at new files only
    with pytest.raises(StoreError, match=rf"^{path} has CRC"):
        archive(tasks, str(stores["4.9.4"]), str(tmp_path), verify="full")


@pytest.mark.spark
def test_damage_in_the_log_is_named_or_counted(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    path = min((store / "commitlog").iterdir())
    content = bytearray(path.read_bytes())
    content[:8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(StoreError, match=rf"^{path}: damage at byte 0 "):
        archive(spark, str(store), str(tmp_path / "archive"))
    assert _visible(tmp_path / "archive") == []
    done = archive(spark, str(store), str(tmp_path / "archive"), {"corruptRecordMode": "skip"})
    assert (done.lost, done.segments[0].damages) == (1, 1)
    assert done.rows == len(_of_archive(tmp_path / "archive")) > 0
    asked = archive(spark, str(store), str(tmp_path / "archive"), {"corruptRecordMode": "skip"}, delete_after_hours=0)
    assert asked.deletable == []  # not all of the first file is in the archive


# ---------------------------------------------------------------- log files that are archived


def test_archived_log_files_are_deleted_when_asked(tasks: SparkSession, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "archive"
    files = sorted((store / "commitlog").iterdir())
    whole = _of_store(store)
    for path, hours in zip(files, (2, 2, 0, 0), strict=True):
        os.utime(path, (time.time() - 3600 * hours,) * 2)
    done = archive(tasks, str(store), str(target), delete_after_hours=1)
    assert (done.deletable, done.deleted) == ([str(path) for path in files[:2]], "yes")
    assert sorted((store / "commitlog").iterdir()) == files[2:]
    assert _of_archive(target) == [row for row in whole if row["commitLogOffset"] < 3 * _SIZE]
    loaded = load([StoreSettings], golden_manifest("5.4.0")["brokerConf"], source="broker.conf")
    assert fsck.verify(store, loaded.values[0]).is_sound
    done = archive(tasks, str(store), str(target), includes_newest=True, delete_after_hours=0)
    assert sorted((store / "commitlog").iterdir()) == files[3:]  # never the newest
    assert _of_archive(target) == whole


def test_a_store_in_use_or_not_stopped_in_order_keeps_its_files(
    tasks: SparkSession, store: Path, tmp_path: Path
) -> None:
    files = sorted((store / "commitlog").iterdir())
    lock = StoreLock(store)
    lock.acquire()
    try:
        done = archive(tasks, str(store), str(tmp_path / "archive"), delete_after_hours=0)
    finally:
        lock.release()
    assert done.deletable == [str(path) for path in files[:3]]
    assert done.deleted.startswith("no: a broker has the store")
    (store / "abort").touch()
    done = archive(tasks, str(store), str(tmp_path / "archive"), delete_after_hours=0)
    assert done.deleted.startswith("no: the broker was not stopped in order")
    assert sorted((store / "commitlog").iterdir()) == files


def test_nothing_is_deleted_that_the_archive_has_lost(tasks: SparkSession, store: Path, tmp_path: Path) -> None:
    archive(tasks, str(store), str(tmp_path / "archive"))
    path = _damage_first(tmp_path / "archive")
    files = sorted((store / "commitlog").iterdir())
    with pytest.raises(StoreError, match=rf"^{path} has CRC"):
        archive(tasks, str(store), str(tmp_path / "archive"), delete_after_hours=0)
    assert sorted((store / "commitlog").iterdir()) == files


# ---------------------------------------------------------------- mistakes


def test_mistakes_are_one_line(
    tasks: SparkSession, stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(stores["4.9.4"])

    def fails(match: str, kind: type[Exception] = SettingsError, path: str = store, **given: Any) -> None:
        with pytest.raises(kind, match=match) as caught:
            archive(tasks, path, given.pop("target", str(tmp_path / "new")), given.pop("options", None), **given)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "new").exists()

    fails(r"is not empty \(store\.sh\) and no archive", target=_with_file(tmp_path / "other"))
    fails("format 'orc' is not known: choose from parquet, delta, iceberg", table_format="orc")
    fails("cannot partition by 'hour': choose from topic, day", partition_by=["hour"])
    fails("verify='twice' is not known", verify="twice")
    fails("option 'key' cannot be used here: choose from topic,", options={"key": "a"})
    fails("'report' makes rows that are not messages: choose from fail skip", options={"corruptRecordMode": "report"})
    fails("with topic=a not all of the log is kept", options={"topic": "a"}, delete_after_hours=1)
    fails("commitlog does not exist", StoreError, path=str(tmp_path))
    fails("target nix://a/b cannot be opened", target="nix://a/b")
    for name, module in (("delta", "deltalake"), ("iceberg", "pyiceberg.catalog")):
        monkeypatch.setitem(sys.modules, module, None)
        fails(
            rf"format {name} needs {module.split('.')[0]}, which is not installed: pip install '.*\[{name}\]'",
            table_format=name,
        )


def _with_file(folder: Path) -> str:
    folder.mkdir()
    (folder / "store.sh").touch()
    return str(folder)


def test_an_archive_keeps_its_settings_and_its_store(
    tasks: SparkSession, stores: dict[str, Path], tmp_path: Path
) -> None:
    store = str(stores["4.9.4"])
    archive(tasks, store, str(tmp_path))
    with pytest.raises(
        SettingsError, match=r"was made with partition_by=\('topic', 'day'\), not \('day',\): use the same"
    ):
        archive(tasks, store, str(tmp_path), partition_by=["day"])
    with pytest.raises(SettingsError, match=r"was made with options=\{\}, not \{'topic': 'a'\}"):
        archive(tasks, store, str(tmp_path), {"topic": "a"})
    with pytest.raises(StoreMismatch, match="is not the file of that name in the archive"):
        archive(tasks, str(stores["5.4.0"]), str(tmp_path))
    with Target(str(tmp_path)).held(), pytest.raises(StoreError, match="another run writes to the archive"):
        archive(tasks, store, str(tmp_path))
    (tmp_path / "_archive" / "000001.json").write_text("{}")
    with pytest.raises(StoreError, match=r"000001\.json is not a manifest of an archive: .*: restore it"):
        archive(tasks, store, str(tmp_path))
