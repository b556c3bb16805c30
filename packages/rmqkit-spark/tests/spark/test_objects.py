"""Stores in an object store are verified, rebuilt, audited and queried like those on a disk, with Spark's keys."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from msgspec.structs import replace
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from rmqkit.arrow.fs import find_segments, with_s3_settings
from rmqkit.cli import app
from rmqkit.errors import SettingsError, StoreError
from rmqkit.protocol.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC
from rmqkit.spark.jobs.audit import Audit, audit
from rmqkit.spark.jobs.audit_report import write_report
from rmqkit.spark.jobs.rebuild import rebuild
from rmqkit.spark.jobs.verify import verify
from rmqkit.spark.source.store import store_options, store_splits
from tests.cli.in_process import rmq
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.jobs.in_process import in_process
from tests.spark.messages import record_at, segment_of
from tests.spark.object_store import ACCESS_KEY, SECRET_KEY, ObjectStore, serve_objects
from tests.store.stores import golden_settings, tree

TREES = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "index")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GoldenStore, ObjectStore]]:
    folder = tmp_path_factory.mktemp("objects")
    store = unpack_golden("5.4.0", folder)
    with serve_objects(folder) as server:
        yield store, server


def test_a_store_at_an_address_is_verified_like_one_on_a_disk(
    golden: tuple[GoldenStore, ObjectStore], tmp_path: Path
) -> None:
    store, server = golden
    settings = golden_settings(store)
    remote = verify(in_process(), server.address("store"), settings, split_bytes=60_000, work_dir=str(tmp_path))
    local = verify(in_process(), str(store.root), settings, split_bytes=60_000)
    assert remote.is_sound
    assert remote.checked == local.checked
    assert [one.records for one in remote.segments] == [one.records for one in local.segments]
    assert remote.segments[0].segment == "s3://data/store/commitlog/00000000000000000000"
    assert not list(tmp_path.iterdir())


def test_damage_is_reported_with_its_place_in_the_object_store(tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    with (store.root / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(88)
        file.write(b"????")
    with serve_objects(tmp_path) as server:
        found = verify(in_process(), server.address("store"), golden_settings(store), log_only=True)
        assert all(key.startswith("store/commitlog/") for key, _ in server.reads)
    (finding,) = found.findings
    assert str(finding).startswith("s3://data/store/commitlog/00000000000000000000 at ")


def test_queues_and_index_are_rebuilt_to_a_prefix(golden: tuple[GoldenStore, ObjectStore], tmp_path: Path) -> None:
    store, server = golden
    settings = golden_settings(store)
    shutil.copytree(store.root, tmp_path / "copy")
    local = rebuild(in_process(), str(tmp_path / "copy"), settings, split_bytes=60_000)
    made = rebuild(in_process(), server.address("store"), settings, target=server.address("made"), split_bytes=60_000)
    assert (made.records, made.queues, made.index_files) == (local.records, local.queues, local.index_files)
    for name in TREES:
        assert tree(server.root / "made" / name) == tree(tmp_path / "copy" / name), name
    with pytest.raises(StoreError, match=r"^s3://data/made/consumequeue has files already: give another target$"):
        rebuild(in_process(), server.address("store"), settings, target=server.address("made"))
    rebuild(in_process(), server.address("store"), settings, queues=False, target=str(tmp_path / "index-only"))
    assert [one.name for one in (tmp_path / "index-only").iterdir()] == ["index"]


def test_an_audit_of_an_address_finds_what_that_of_a_disk_finds(
    golden: tuple[GoldenStore, ObjectStore], tmp_path: Path
) -> None:
    store, server = golden
    options = {"splitBytes": "20k"}
    seen = len(server.reads)
    remote = audit(in_process(), server.address("store"), options, period_seconds=1)
    local = audit(in_process(), str(store.root), options, period_seconds=1)
    assert remote.lags and remote.delayed and remote.hot_keys and not remote.notes
    for name in set(Audit.__struct_fields__) - {"store", "segments"}:
        assert getattr(remote, name) == getattr(local, name), name
    assert remote.store == "s3://data/store"
    for ours, theirs in zip(remote.segments, local.segments, strict=True):
        assert ours.segment == f"s3://data/store/{Path(theirs.segment).relative_to(store.root)}"
        assert replace(ours, segment=theirs.segment) == theirs
    write_report(remote, tmp_path / "report.html")
    assert SECRET_KEY not in (tmp_path / "report.html").read_text()
    # Of queues nothing is fetched that no group consumes and nobody waits in, and tag codes are not looked at.
    whole = {key for key, size in server.reads[seen:] if "/consumequeue" in key and size > 20}
    asked = {(one.topic, one.queue_id) for one in remote.lags} | {(SCHEDULE_TOPIC, level) for level in range(18)}
    asked |= {(HALF_TOPIC, 0), (OP_HALF_TOPIC, 0)}
    assert {tuple(key.split("/")[2:4]) for key in whole} <= {(topic, str(queue)) for topic, queue in asked}
    assert not any("/consumequeue_ext/" in key for key in whole if SCHEDULE_TOPIC not in key and "TRANS" not in key)


def test_an_audit_of_an_address_reports_damage_and_what_is_missing(tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    with (store.root / "commitlog" / f"{0:020}").open("r+b") as file:
        file.write(b"\xff" * 4)
    shutil.rmtree(store.root / "config")
    with serve_objects(tmp_path) as server:
        found = audit(in_process(), server.address("store"), {"splitBytes": "20k"})
        assert [one.damages for one in found.segments if one.damages] == [1]
        assert found.notes[0].startswith("consumer lag not known: s3://data/store/config/consumerOffset.json does not")
        with pytest.raises(StoreError, match=r"^s3://data/store/commitlog/0+: damage at byte 0 "):
            audit(in_process(), server.address("store"), {"corruptRecordMode": "fail"})
        with pytest.raises(StoreError, match=r"^s3://data/none/commitlog does not exist"):
            audit(in_process(), server.address("none"))
        with pytest.raises(StoreError, match=r"^s3://data/store/commitlog cannot be read: .*ACCESS_DENIED") as refused:
            audit(in_process(), server.address("store", user="AKOTHER:n0n3@"))
        assert "n0n3" not in str(refused.value)


@pytest.mark.spark
def test_the_command_audits_an_address_with_the_settings_of_the_session(
    golden: tuple[GoldenStore, ObjectStore], spark: SparkSession
) -> None:
    _, server = golden
    conf = [text for name, value in hadoop(server).items() for text in ("--conf", f"{name}={value}")]
    done = CliRunner().invoke(app, ["pipeline", "audit", "s3a://data/store", "--period", "1", *conf])
    assert done.exit_code == 0, done.output
    assert "Traffic: Topic GoldPlain: 233 messages, 40% of all 584; busiest second from " in done.stdout
    assert "Consumers: Group g_tag is 11 messages behind" in done.stdout
    assert "Note:" not in done.stdout


# ---------------------------------------------------------------- SQL


def queried(*arguments: str) -> CompletedProcess[str]:
    return rmq("store", "query", *arguments)


def test_sql_over_an_address_has_the_rows_of_a_disk(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    for sql in (
        "select topic, count(*) as n, sum(queueId) as s from messages group by 1 order by 1",
        "select * from messages order by commitLogOffset",
        "select body from messages where topic = 'GoldTag' and queueId = 1 order by queueOffset",
    ):
        remote, local = (queried(at, sql, "--json") for at in (server.address("store"), str(store.root)))
        assert (remote.returncode, remote.stderr) == (0, "")
        assert remote.stdout == local.stdout and remote.stdout.count("\n") > 2


def test_sql_fetches_only_files_of_the_times_that_it_requests(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    size, hour_ms = 64 << 10, 3_600_000
    for number in range(4):
        makers = [
            lambda at, number=number, i=i: record_at(
                at, store_timestamp=number * hour_ms + i * 60_000, body=bytes(1000)
            )
            for i in range(50)
        ]
        segment = segment_of(makers, base_offset=number * size, size=size)
        (tmp_path / f"store/commitlog/{number * size:020}").write_bytes(segment)
    with serve_objects(tmp_path) as server:
        when = "'1970-01-01 02:10:00Z' and '1970-01-01 02:19:00Z'"
        sql = f"select count(*) as n from messages where storeTimestamp between {when}"
        told = queried(server.address("store"), sql, "--csv")
        assert (told.stdout, told.stderr) == ("n\n10\n", "")
        heads = Counter(key for key, read in server.reads if read <= 4096)
        assert set(heads.values()) == {1} and len(heads) == 4, "the first record of each file says its time"
        (whole,) = {key for key, read in server.reads if read > 4096}
        assert whole.endswith(f"{2 * size:020}")


@pytest.mark.parametrize(
    ("below", "user", "sql", "code", "text"),
    [
        ("none", None, "select 1 from messages", 1, "rmq: s3://data/none/commitlog does not exist: give the store dir"),
        ("store", "AKOTHER:n0n3@", "select 1 from messages", 1, "rmq: s3://data/store/commitlog cannot be read: "),
        ("store", None, "select topc from messages", 2, 'Candidate bindings: "topic"'),
    ],
)
def test_what_sql_over_an_address_cannot_do_is_one_line(
    golden: tuple[GoldenStore, ObjectStore], below: str, user: str | None, sql: str, code: int, text: str
) -> None:
    _, server = golden
    address = server.address(below) if user is None else server.address(below, user=user)
    told = queried(address, sql)
    assert (told.returncode, told.stdout) == (code, "")
    assert text in told.stderr and told.stderr.count("\n") == 1
    assert SECRET_KEY not in told.stderr and "n0n3" not in told.stderr


def test_sql_over_an_address_reports_damage_or_leaves_it_out(tmp_path: Path) -> None:
    store = unpack_golden("5.4.0", tmp_path)
    with (store.root / "commitlog" / f"{0:020}").open("r+b") as file:
        file.write(b"\xff" * 4)
    count = "select count(*) as n from messages"
    with serve_objects(tmp_path) as server:
        told = queried(server.address("store"), count)
        assert told.returncode == 1 and told.stderr.count("\n") == 1
        assert told.stderr.startswith("rmq: s3://data/store/commitlog/00000000000000000000: damage at byte 0 ")
        assert "--skip-damage reads on" in told.stderr
        assert queried(server.address("store"), count, "--skip-damage", "--csv").stdout == "n\n619\n"


def test_where_new_files_go_is_said(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    with pytest.raises(SettingsError, match=r"^rebuild: s3://data/store is an address: give a target$"):
        rebuild(in_process(), server.address("store"))
    with pytest.raises(SettingsError, match="where its new files go: give no target"):
        rebuild(in_process(), str(store.root), target="/elsewhere")
    with pytest.raises(StoreError, match=r"^s3://data/none/commitlog does not exist"):
        verify(in_process(), server.address("none"))


# ---------------------------------------------------------------- endpoints and credentials


def hadoop(server: ObjectStore) -> dict[str, str]:
    """The settings that Hadoop's connector would have for the object store."""
    return {
        "spark.hadoop.fs.s3a.access.key": ACCESS_KEY,
        "spark.hadoop.fs.s3a.secret.key": SECRET_KEY,
        "spark.hadoop.fs.s3a.endpoint": f"http://127.0.0.1:{server.server_port}",
        "spark.hadoop.fs.s3a.path.style.access": "true",
    }


def test_a_read_takes_the_settings_of_hadoop(golden: tuple[GoldenStore, ObjectStore]) -> None:
    store, server = golden
    local = store_splits(store_options({"path": str(store.root)}))
    for prefix in ("spark.hadoop.", ""):
        given = {name.removeprefix("spark.hadoop.") if not prefix else name: v for name, v in hadoop(server).items()}
        options = store_options({"path": "s3a://data/store", **given})
        assert [(one.low, one.high) for one in store_splits(options)] == [(one.low, one.high) for one in local]
        assert SECRET_KEY not in repr(options)


def test_jobs_take_the_settings_of_the_session(golden: tuple[GoldenStore, ObjectStore]) -> None:
    _, server = golden
    found = verify(in_process(hadoop(server)), "s3a://data/store", log_only=True)
    assert found.is_sound
    assert found.segments[0].segment.startswith("s3://data/store/")


def test_credentials_and_endpoint_may_be_those_of_the_environment(
    golden: tuple[GoldenStore, ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, server = golden
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    assert find_segments("s3://data/store", [])


@pytest.mark.parametrize(
    ("text", "settings", "address"),
    [
        ("/data/s3", {"fs.s3a.access.key": "a"}, "/data/s3"),
        ("gs://b/s", {"fs.s3a.access.key": "a"}, "gs://b/s"),
        ("s3a://b/s", {}, "s3://b/s"),
        ("s3://b/s", {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b/c"}, "s3://a:b%2Fc@b/s"),
        ("s3://u:p@b/s", {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b"}, "s3://u:p@b/s"),
        ("s3://b", {"fs.s3a.bucket.b.endpoint.region": "x", "fs.s3a.endpoint.region": "y"}, "s3://b?region=x"),
        ("s3://b/s?region=z", {"fs.s3a.endpoint.region": "y"}, "s3://b/s?region=z"),
        ("s3://b/s", {"fs.s3a.endpoint": "host:9000"}, "s3://b/s?endpoint_override=host%3A9000&scheme=https"),
        (
            "s3://b/s",
            {"fs.s3a.endpoint": "host", "fs.s3a.connection.ssl.enabled": "false"},
            "s3://b/s?endpoint_override=host&scheme=http",
        ),
        (
            "s3://b/s",
            {"fs.s3a.access.key": "a", "fs.s3a.secret.key": "b", "fs.s3a.session.token": "t+"},
            "s3://a:b@b/s?session_token=t%2B",
        ),
    ],
)
def test_settings_go_into_an_address_that_lacks_them(text: str, settings: dict[str, str], address: str) -> None:
    assert with_s3_settings(text, settings) == address


def test_temporary_credentials_are_sent(golden: tuple[GoldenStore, ObjectStore]) -> None:
    _, server = golden
    address = with_s3_settings("s3://data/store", {**hadoop(server), "fs.s3a.session.token": "token+1"})
    assert find_segments(address, [])
    assert server.tokens == {"token+1"}
