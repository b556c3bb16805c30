"""The seam to the disk: replacements, locks, and calls that are more than one call of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rmqkit.system import disk


def test_a_replaced_function_is_replaced_for_all_callers_until_the_context_ends(tmp_path: Path) -> None:
    written: list[bytes] = []
    with disk.replaced({"pwrite": lambda descriptor, data, position: written.append(data) or len(data)}):
        disk.write_all(7, b"data", 0)
    assert written == [b"data"] and disk.pwrite is os.pwrite


def test_replacements_are_nested() -> None:
    with disk.replaced({"exists": lambda path: "outer"}):
        with disk.replaced({"exists": lambda path: "inner"}):
            assert disk.exists(Path("x")) == "inner"
        assert disk.exists(Path("x")) == "outer"


def test_an_error_inside_the_context_ends_the_replacement() -> None:
    with pytest.raises(KeyError), disk.replaced({"size": lambda path: 1}):
        raise KeyError
    assert disk.size(Path(__file__)) > 1


@pytest.mark.parametrize("name", ["fsync", "write_all", "replaced", "os", "_held"])
def test_an_unknown_name_is_refused_and_nothing_is_replaced(name: str) -> None:
    close = disk.close
    said = f"rmqkit.system.disk has no '{name}' to replace: use one of close, "
    with pytest.raises(ValueError, match=said), disk.replaced({"close": print, name: print}):
        raise AssertionError
    assert disk.close is close


def test_every_public_function_can_be_replaced() -> None:
    functions = {name for name in disk.__all__ if name not in ("Mapped", "make_directories", "replaced", "write_all")}
    with disk.replaced(dict.fromkeys(functions, print)):
        assert {name for name in functions if getattr(disk, name) is not print} == set()


def test_directories_are_made_one_by_one_below_the_first_that_exists(tmp_path: Path) -> None:
    made: list[Path] = []
    real = disk.make_directory
    with disk.replaced({"make_directory": lambda path: (made.append(path), real(path))}):
        disk.make_directories(tmp_path / "a" / "b")
        disk.make_directories(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert made[-2:] == [tmp_path / "a" / "b"] * 2
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        disk.make_directories(tmp_path / "file")


def test_listings_are_sorted_and_sizes_leave_directories_out(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    (tmp_path / "aa").mkdir()
    assert disk.names(tmp_path) == ["a", "aa", "b", "c"]
    assert disk.file_sizes(tmp_path) == [("a", 3), ("b", 3), ("c", 3)]


def test_a_time_that_is_set_is_the_time_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk.set_modified_ms(tmp_path / "file", 1_700_000_000_123)
    assert disk.modified_ms(tmp_path / "file") == 1_700_000_000_123


def test_a_missing_file_may_be_removed_only_if_the_caller_allows_it(tmp_path: Path) -> None:
    disk.remove(tmp_path / "file", missing_ok=True)
    with pytest.raises(FileNotFoundError):
        disk.remove(tmp_path / "file")


OTHER = "import sys; from pathlib import Path; from rmqkit.system import disk; print(disk.is_locked(Path(sys.argv[1])))"


def test_a_locked_file_is_locked_for_this_and_other_processes_until_it_is_unlocked(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def is_locked_for_another_process() -> bool:
        return subprocess.check_output([sys.executable, "-c", OTHER, path], text=True) == "True\n"

    assert not disk.is_locked(path) and not path.exists(), "the question creates no file"
    descriptor = disk.lock(path)
    for _ in range(2):
        assert disk.is_locked(path)
        with pytest.raises(BlockingIOError, match="this process has locked it"):
            disk.lock(path)
    assert is_locked_for_another_process(), "no refused lock has closed a descriptor of the file"
    disk.unlock(descriptor)
    assert not disk.is_locked(path)
    disk.unlock(disk.lock(path))
