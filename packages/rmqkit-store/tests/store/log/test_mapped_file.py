import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rmqkit.store.log.mapped_file import MappedFile, file_name
from tests.open_files import open_files


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MappedFile]:
    file = MappedFile.create(tmp_path / "q" / file_name(4096), 4096, 1000)
    yield file
    file.close()


def test_name_is_the_start_in_twenty_digits() -> None:
    assert file_name(1073741824) == "00000000001073741824"


def test_new_file_has_its_full_size_and_is_sparse(file: MappedFile) -> None:
    status = file.path.stat()
    assert status.st_size == 1000
    assert status.st_blocks == 0
    assert file.end == 5096


def test_view_shows_what_is_written_afterwards(file: MappedFile) -> None:
    view = file.view
    file.write(10, b"record")
    assert view[10:16] == b"record"


def test_view_cannot_be_written(file: MappedFile) -> None:
    with pytest.raises(TypeError):
        file.view[0] = 1


def test_slices_outlive_the_file(file: MappedFile) -> None:
    file.write(0, b"kept")
    part = file.view[:4]
    file.delete()
    assert not file.path.exists()
    assert part == b"kept"


def test_short_write_continues_until_the_disk_says_why(file: MappedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def one_byte_then_full(descriptor: int, data: bytes | memoryview, position: int) -> int:
        if position > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, bytes(data)[:1], position)

    monkeypatch.setattr("rmqkit.system.disk.pwrite", one_byte_then_full)
    with pytest.raises(OSError, match="No space left"):
        file.write(20, b"abc")
    monkeypatch.undo()
    assert file.read(20, 3) == b"a\0\0"


def test_failed_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, size: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("rmqkit.system.disk.truncate", fail)
    with pytest.raises(OSError, match="too large"):
        MappedFile.create(tmp_path / file_name(0), 0, 1000)
    assert list(tmp_path.iterdir()) == []


def test_clearing_turns_the_rest_into_zeros(file: MappedFile) -> None:
    file.write(0, b"x" * 1000)
    file.clear_from(333)
    assert file.read(0, 1000) == b"x" * 333 + bytes(667)


def test_clearing_keeps_holes(tmp_path: Path) -> None:
    file = MappedFile.create(tmp_path / file_name(0), 0, 64 << 20)
    file.write(5 << 20, b"stale")
    file.clear_from(100)
    assert file.read(5 << 20, 5) == bytes(5)
    assert file.path.stat().st_blocks * 512 < 4 << 20
    file.close()


def test_sync_remembers_what_was_written_before_it(file: MappedFile) -> None:
    file.wrote = 17
    file.sync()
    assert file.synced == 17


def test_refused_sync_raises_and_remembers_nothing(file: MappedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.wrote = 17

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("rmqkit.system.disk.sync_data", fail)
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    assert file.synced == 0


def test_sync_of_a_deleted_file_is_done(file: MappedFile) -> None:
    file.wrote = 17
    file.delete()
    file.sync()
    assert not file.path.exists()
    again = MappedFile.create(file.path, 0, file.size)  # its topic was created again meanwhile
    file.sync()
    assert open_files(file.path.parent) == [file.path]
    again.close()


# ---- warm-up


def test_warm_file_has_its_blocks_and_holds_zeros(file: MappedFile) -> None:
    file.warm(is_wanted=lambda: True)
    assert file.path.stat().st_blocks * 512 >= 1000
    assert file.path.read_bytes() == bytes(1000)
    assert file.wrote == 0


def test_warming_ends_when_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rmqkit.store.log.mapped_file._WARM_BYTES", 100)
    file = MappedFile.create(tmp_path / file_name(0), 0, 1000)
    written: list[int] = []
    monkeypatch.setattr(file.__class__, "write", lambda self, position, data: written.append(position))
    wanted = iter([True, False])
    file.warm(is_wanted=lambda: next(wanted))
    assert written == [0, 100]
    file.close()
