from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit.errors import StoreMismatch
from rmqkit.store.log.file_queue import FileQueue
from rmqkit.store.log.mapped_file import file_name
from tests.store.stores import tree

SIZE = 100


def new_queue(*directories, read_only=()):
    return FileQueue(
        list(directories), SIZE, setting="mappedFileSizeTest", root=directories[0].parent, read_only=list(read_only)
    )


def grow(queue: FileQueue, count: int, start: int = 0) -> FileQueue:
    for i in range(count):
        file = queue.create(start + i * SIZE)
        file.write(0, bytes([i + 1]) * SIZE)
        file.wrote = SIZE
        queue.append(file)
    return queue


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queue"


@pytest.fixture
def queue(folder: Path) -> Iterator[FileQueue]:
    queue = grow(new_queue(folder), 3)
    yield queue
    queue.close()


def loaded(folder: Path) -> FileQueue:
    queue = new_queue(folder)
    queue.load()
    return queue


def test_empty_queue(folder: Path) -> None:
    queue = loaded(folder)
    assert (queue.min_offset, queue.max_offset, queue.find(0)) == (-1, 0, None)
    assert not folder.exists()


def test_load_finds_the_files_in_order_and_full(queue: FileQueue, folder: Path) -> None:
    again = loaded(folder)
    assert [file.start for file in again.files] == [0, 100, 200]
    assert (again.min_offset, again.max_offset) == (0, 300)


def test_find_by_offset(queue: FileQueue) -> None:
    starts = [None if (file := queue.find(offset)) is None else file.start for offset in (-1, 0, 99, 100, 299, 300)]
    assert starts == [None, 0, 0, 100, 200, None]


def test_gap_is_survived(queue: FileQueue, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / file_name(100)).unlink()
    again = loaded(folder)
    assert "does not follow" in caplog.text
    assert again.find(250).start == 200
    assert again.find(150) is None


def test_wrong_length_is_refused_with_both_numbers(queue: FileQueue, folder: Path) -> None:
    (folder / file_name(100)).write_bytes(b"short")
    before = tree(folder)
    with pytest.raises(StoreMismatch, match=r"00100 has 5 bytes and mappedFileSizeTest says 100"):
        loaded(folder)
    assert tree(folder) == before


def test_empty_last_file_is_deleted(queue: FileQueue, folder: Path) -> None:
    (folder / file_name(300)).touch()
    assert loaded(folder).max_offset == 300
    assert not (folder / file_name(300)).exists()


def test_empty_file_that_is_not_the_last_is_refused(queue: FileQueue, folder: Path) -> None:
    (folder / file_name(100)).write_bytes(b"")
    with pytest.raises(StoreMismatch):
        loaded(folder)


@pytest.mark.parametrize("name", ["notes.txt", "123", "0000000000000000010x", "٠" * 20])
def test_foreign_file_is_refused_by_name(queue: FileQueue, folder: Path, name: str) -> None:
    (folder / name).write_bytes(bytes(SIZE))
    with pytest.raises(StoreMismatch, match="is not a store file"):
        loaded(folder)


def test_directories_are_skipped(queue: FileQueue, folder: Path) -> None:
    (folder / "sub").mkdir()
    assert loaded(folder).max_offset == 300


def test_truncate_cuts_zeroes_and_deletes(queue: FileQueue, folder: Path) -> None:
    queue.truncate(130)
    assert sorted(path.name for path in folder.iterdir()) == [file_name(0), file_name(100)]
    assert (folder / file_name(100)).read_bytes() == b"\x02" * 30 + bytes(70)
    assert queue.max_offset == 130


def test_truncate_at_a_file_start_keeps_that_file_empty(queue: FileQueue, folder: Path) -> None:
    queue.truncate(200)
    assert (folder / file_name(200)).read_bytes() == bytes(SIZE)
    assert (queue.max_offset, len(queue.files)) == (200, 3)


def test_truncate_at_the_end_changes_nothing(queue: FileQueue, folder: Path) -> None:
    before = tree(folder)
    queue.truncate(300)
    assert tree(folder) == before and queue.max_offset == 300


def test_front_is_dropped_but_never_the_last(queue: FileQueue, folder: Path) -> None:
    assert queue.drop_front(lambda file: file.start < 100) == 1
    assert queue.min_offset == 100
    assert queue.drop_front(lambda file: True) == 1
    assert [path.name for path in folder.iterdir()] == [file_name(200)]


def test_drop_front_stops_at_the_first_that_stays(queue: FileQueue) -> None:
    assert queue.drop_front(lambda file: file.start == 100) == 0


def test_destroy_removes_the_directory(queue: FileQueue, folder: Path) -> None:
    queue.destroy()
    assert not folder.exists()


def test_several_directories_take_turns(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    queue = grow(new_queue(a, b), 3)
    assert sorted(path.name for path in a.iterdir()) == [file_name(0), file_name(200)]
    assert [path.name for path in b.iterdir()] == [file_name(100)]
    queue.close()
    again = new_queue(b, read_only=[a])
    again.load()
    assert [file.start for file in again.files] == [0, 100, 200]


def test_unsynced_bytes_are_those_behind_the_last_sync(queue: FileQueue) -> None:
    assert queue.unsynced_bytes == 300
    queue.sync()
    assert queue.unsynced_bytes == 0
    queue.append(queue.create(300))
    queue.files[-1].wrote = 40
    assert queue.unsynced_bytes == 40


def test_sync_touches_only_files_with_news(queue: FileQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.sync()
    synced = []
    monkeypatch.setattr("rmqkit.system.disk.sync_data", synced.append)
    queue.append(queue.create(300))
    queue.files[-1].wrote = 40
    queue.sync()
    assert synced == [queue.files[-1].fd]


def test_names_of_new_files_are_made_durable_once(
    queue: FileQueue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = []
    monkeypatch.setattr("rmqkit.store.log.file_queue.sync_directory", directories.append)
    queue.sync()
    queue.sync()
    assert directories == [folder, *list(folder.parents)[:3]] * 3
