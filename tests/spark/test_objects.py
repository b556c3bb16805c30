"""Stores in an object store are verified and rebuilt like those on a disk, with credentials as Spark has them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit.arrow.fs import find_segments, with_s3_settings
from rmqkit.errors import SettingsError, StoreError
from rmqkit.spark.jobs.rebuild import rebuild
from rmqkit.spark.jobs.verify import verify
from rmqkit.spark.source.store import store_options, store_splits
from tests.golden_stores import GoldenStore, unpack_golden
from tests.spark.jobs.in_process import in_process
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


def test_damage_is_told_with_its_place_in_the_object_store(tmp_path: Path) -> None:
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
