"""The Iceberg table of an archive: every segment is in it once, and readers see every message once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog import load_catalog

from rmqkit.errors import StoreError
from rmqkit.protocol.record import decode_record
from rmqkit.store.archive.archive import segment_name
from rmqkit.store.archive.catalog import add_segments
from rmqkit.store.archive.places import Folder
from rmqkit.store.archive.seal import Work, seal, work_on
from rmqkit.store.settings import StoreSettings
from tests.store.stores import message, opened

FILE_BYTES = 16 << 10
OWN, OTHER = "11" * 16, "22" * 16
NAME = "rmqkit.broker-a"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    with opened(tmp_path / "store", StoreSettings(commit_log_file_bytes=FILE_BYTES)) as store:
        for number in range(60):
            body = b"%d " % number + bytes(1000)
            store.put(message(topic="T", queue_id=number % 2, body=body, KEYS=f"k{number}", TAGS=f"t{number}"))
        store.flusher.flush_log()
        return [file.path for file in store.log.queue.files[:-1]]


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "archive/broker-a")


def sealed(files: list[Path], place: Folder, log_id: str = OWN) -> None:
    for path in files:
        seal(Work(str(path), int(path.name), "", "", with_tags=False, log_id=log_id), place)


def catalog_of(folder: Path) -> str:
    return f"sql:sqlite:///{folder}/catalog.db"


@contextmanager
def table(folder: Path) -> Iterator[Any]:
    catalog = load_catalog("rmqkit", type="sql", uri=f"sqlite:///{folder}/catalog.db")
    try:
        yield catalog.load_table(NAME)
    finally:
        catalog.close()


def numbers(folder: Path) -> list[int]:
    with table(folder) as found:
        return sorted(int(body.split(b" ")[0]) for body in found.scan().to_arrow()["body"].to_pylist())


def count_of(files: list[Path]) -> int:
    """Return how many messages some log files have."""
    found = 0
    for path in files:
        log, at = path.read_bytes(), 0
        while log[at + 4 : at + 8] == b"\xda\xa3\x20\xa7":
            at += decode_record(log, at).size
            found += 1
    return found


def test_every_segment_is_added_once(files, place, tmp_path):
    sealed(files[:2], place)
    catalog = catalog_of(tmp_path)
    assert add_segments(place, catalog, NAME, OWN) == 2
    assert add_segments(place, catalog, NAME, OWN) == 0
    sealed(files[2:], place)
    assert add_segments(place, catalog, NAME, OWN) == len(files) - 2 > 0
    assert numbers(tmp_path) == list(range(count_of(files)))
    with table(tmp_path) as found:
        assert found.properties["gc.enabled"] == "false", "maintenance of the table deletes no segment"
    assert set(place.names()) == {segment_name(int(path.name)) for path in files}, "the table is beside the segments"


def test_a_segment_that_was_written_again_replaces_its_rows(files, place, tmp_path):
    sealed(files, place)
    catalog = catalog_of(tmp_path)
    add_segments(place, catalog, NAME, OWN)
    path = Path(str(place)) / segment_name(FILE_BYTES)
    before = path.stat().st_size
    seal(Work(str(files[1]), FILE_BYTES, "", "", with_tags=True, log_id=OWN), place)
    with path.open("rb") as file:
        assert file.seek(0, 2) != before, "the keys of tags make it longer"
    assert add_segments(place, catalog, NAME, OWN) == 1
    assert numbers(tmp_path) == list(range(count_of(files)))
    with table(tmp_path) as found:
        assert {str(one) for one in found.inspect.data_files()["file_path"].to_pylist()} == {
            f"{place.uri}/{name}" for name in place.names()
        }, "no file was written for the table"


def test_segments_of_another_log_and_damaged_ones_are_left_out(files, place, tmp_path):
    sealed(files[:1], place, OTHER)
    sealed(files[1:], place)
    damaged = Path(str(place)) / segment_name(int(files[-1].name))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert add_segments(place, catalog_of(tmp_path), NAME, OWN) == len(files) - 2


def test_a_file_without_messages_is_left_out(place, tmp_path):
    (tmp_path / "log").write_bytes(bytes(1024))
    sealed([], place)
    seal(Work(str(tmp_path / "log"), 0, "", "", with_tags=False, log_id=OWN), place)
    assert add_segments(place, catalog_of(tmp_path), NAME, OWN) == 0


def test_a_catalog_that_cannot_be_reached_is_named(files, place, tmp_path):
    sealed(files[:1], place)
    with pytest.raises(StoreError, match=rf"table {NAME} of catalog sql:sqlite:////no/folder/x\.db: "):
        add_segments(place, "sql:sqlite:////no/folder/x.db", NAME, OWN)
    with pytest.raises(StoreError, match=rf"table {NAME} of catalog nothing: "):
        add_segments(place, "nothing", NAME, OWN)


@pytest.mark.parametrize("kind", ["rest:http", "sql:nothing"])
def test_an_error_does_not_show_the_password_of_a_catalog(files, place, kind):
    with pytest.raises(StoreError) as caught:
        add_segments(place, f"{kind}://me:pass@127.0.0.1:1/x", NAME, OWN)
    assert "127.0.0.1:1/x" in str(caught.value)
    assert "pass" not in str(caught.value)


def test_a_failure_of_the_catalog_leaves_the_segment(files, place):
    work = Work(str(files[0]), 0, "", "", False, OWN, "sql:sqlite:////no/folder/x.db", NAME)
    done = work_on(work, place)
    assert (done.name, done.error) == (segment_name(0), "")
    assert "no/folder" in done.catalog_error and "\n" not in done.catalog_error
    assert list(place.names()) == [segment_name(0)]


def test_work_without_a_file_completes_the_table(files, place, tmp_path):
    sealed(files, place)
    done = work_on(Work("", 0, "", "", False, OWN, catalog_of(tmp_path), NAME), place)
    assert (done.name, done.error, done.catalog_error) == ("", "", "")
    assert numbers(tmp_path) == list(range(count_of(files)))


def test_the_rows_of_deleted_segments_are_removed_without_a_copy(files, place, tmp_path):
    sealed(files, place)
    add_segments(place, catalog_of(tmp_path), NAME, OWN)
    with table(tmp_path) as found:
        found.delete(f"brokerName = 'broker-a' and commitLogOffset < {2 * FILE_BYTES}")
    gone = count_of(files[:2])
    assert numbers(tmp_path) == list(range(gone, count_of(files)))
    with table(tmp_path) as found:
        left = {path.rpartition("/")[2] for path in found.inspect.data_files()["file_path"].to_pylist()}
    assert left == {segment_name(int(path.name)) for path in files[2:]}, "no file was written again"
