"""The disk of a simulated machine: what a kill and a power cut leave, and its faults."""

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rmqkit.store.files import sync_directory, write_durably
from rmqkit.system import disk, threads
from rmqkit.testing.simulation import Machine, World

PAGE = 4096


@pytest.fixture
def world() -> Iterator[World]:
    with World(1) as world:
        yield world


def run(world: World, work: Callable[[Path], None], *, name: str = "a", lives: bool = True) -> Machine:
    """Run a function in a process of a machine, with the directory of the machine."""
    machine = world.machine(name)

    async def main() -> None:
        work(machine.disk.path)
        await asyncio.sleep(1000 if lives else 0)

    process = world.process(name, main)
    world.run(until=world.now + 5)
    assert process.error is None, process.error
    return machine


def write(path: Path, data: bytes, position: int = 0, *, syncs: bool = False) -> None:
    descriptor = disk.open(path, os.O_RDWR | os.O_CREAT)
    disk.pwrite(descriptor, data, position)
    if syncs:
        disk.sync_file(descriptor)
    disk.close(descriptor)


def test_a_kill_loses_nothing(world: World) -> None:
    machine = run(world, lambda root: write(root / "f", b"unsynced"))
    machine.processes[0].kill()
    assert machine.disk.files() == {"f": b"unsynced"}


def test_a_power_cut_loses_no_synced_byte_and_no_synced_name(world: World) -> None:
    machine = run(world, lambda root: write_durably(root / "f", b"x" * 10_000))
    machine.lose_power()
    assert machine.disk.files() == {"f": b"x" * 10_000}


@pytest.mark.parametrize("seed", range(30))
def test_a_power_cut_leaves_each_unsynced_page_old_new_or_torn(seed: int) -> None:
    def work(root: Path) -> None:
        write_durably(root / "f", b"o" * 4 * PAGE)
        write(root / "f", b"n" * 4 * PAGE)

    with World(seed) as world:
        machine = run(world, work)
        machine.lose_power()
        found = machine.disk.files()["f"]
    assert len(found) == 4 * PAGE
    assert all(len(set(found[at : at + 512])) == 1 for at in range(0, len(found), 512)), "a sector is whole"


def test_power_cuts_leave_all_states_of_a_page() -> None:
    def work(root: Path) -> None:
        write_durably(root / "f", b"o" * PAGE)
        write(root / "f", b"n" * PAGE)

    found = set()
    for seed in range(60):
        with World(seed) as world:
            machine = run(world, work)
            machine.lose_power()
            content = machine.disk.files()["f"]
            found.add("torn" if len(set(content)) > 1 else content[:1].decode())
    assert found == {"o", "n", "torn"}


def test_a_file_without_a_synced_name_may_be_gone_after_a_power_cut() -> None:
    counts = {True: 0, False: 0}
    for seed in range(40):
        with World(seed) as world:
            machine = run(world, lambda root: write(root / "f", b"data"))
            machine.lose_power()
            counts["f" in machine.disk.files()] += 1
    assert min(counts.values()) > 0


def names_after_power_cuts(work: Callable[[Path], None], *, is_loose: bool) -> set[tuple[str, ...]]:
    """Return the names that power cuts leave on disks with, or without, an order of names."""
    found = set()
    for seed in range(100):
        with World(seed) as world:
            if world.machine("a").disk.is_loose == is_loose:
                run(world, work).lose_power()
                found.add(tuple(world.machine("a").disk.files()))
    return found


def test_names_come_and_go_in_their_order() -> None:
    def work(root: Path) -> None:
        write(root / "a", b"")
        disk.rename(root / "a", root / "b")
        write(root / "c", b"")
        disk.remove(root / "b")

    assert names_after_power_cuts(work, is_loose=False) == {(), ("a",), ("b",), ("b", "c"), ("c",)}


def test_a_sync_of_a_file_brings_the_names_before_it_on_ordered_disks_only() -> None:
    def work(root: Path) -> None:
        write(root / "first", b"")
        write(root / "second", b"2", syncs=True)
        write(root / "third", b"")

    assert names_after_power_cuts(work, is_loose=False) == {("first", "second"), ("first", "second", "third")}
    assert () in names_after_power_cuts(work, is_loose=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_rename_leaves_the_old_file_or_the_new_one(seed: int) -> None:
    def work(root: Path) -> None:
        write_durably(root / "f", b"old")
        write(root / "f.tmp", b"new", syncs=True)
        disk.rename(root / "f.tmp", root / "f")

    with World(seed) as world:
        machine = run(world, work)
        machine.lose_power()
        files = machine.disk.files()
        assert files["f"] in (b"old", b"new")
        if files["f"] == b"old":
            assert files.get("f.tmp") in (None, b"new")


@pytest.mark.parametrize("seed", range(20))
def test_a_synced_directory_keeps_its_names(seed: int) -> None:
    def work(root: Path) -> None:
        write(root / "f.tmp", b"new", syncs=True)
        disk.rename(root / "f.tmp", root / "f")
        sync_directory(root)

    with World(seed) as world:
        machine = run(world, work)
        machine.lose_power()
        assert machine.disk.files() == {"f": b"new"}


def test_a_full_disk_refuses_new_bytes_and_overwrites_old_ones(world: World) -> None:
    refused: list[int | None] = []

    def work(root: Path) -> None:
        write_durably(root / "f", b"1234")
        world.machine("a").disk.fill(100)
        write(root / "f", b"abcd")
        for path, position in ((root / "f", 4), (root / "g", 0)):
            try:
                write(path, b"more", position)
            except OSError as error:
                refused.append(error.errno)

    machine = run(world, work)
    assert refused == [errno.ENOSPC, errno.ENOSPC]
    assert machine.disk.files() == {"f": b"abcd"}


def test_some_disks_drop_the_pages_of_a_failed_sync() -> None:
    with World(5) as world:
        machine = world.machine("a")
        machine.disk.drops = True

        def work(root: Path) -> None:
            write(root / "f", b"a" * 5000, syncs=True)
            machine.disk.fail(1)
            with pytest.raises(OSError, match="Input/output"):
                write(root / "f", b"b" * 10, 4990, syncs=True)
            machine.disk.heal()
            assert disk.read_file(root / "f") == b"a" * 5000, "as on the disk"
            write(root / "f", b"c", 0, syncs=True)

        run(world, work)
        machine.lose_power()
        assert machine.disk.files() == {"f": b"c" + b"a" * 4999}


def test_a_success_after_a_failed_sync_proves_nothing_until_the_bytes_are_written_again() -> None:
    def fail(root: Path) -> int:
        descriptor = disk.open(root / "f", os.O_RDWR)
        disk.pwrite(descriptor, b"new!", 0)
        world.machine("a").disk.fail(0.5)
        with pytest.raises(OSError, match="Input/output error"):
            disk.sync_file(descriptor)
        world.machine("a").disk.heal()
        return descriptor

    def lose(root: Path) -> None:
        write_durably(root / "f", b"old!")
        disk.sync_file(fail(root))

    def write_again(root: Path) -> None:
        write_durably(root / "f", b"old!")
        descriptor = fail(root)
        disk.pwrite(descriptor, b"new!", 0)
        disk.sync_file(descriptor)

    for seed in range(10):
        for work, expected in ((lose, b"old!"), (write_again, b"new!")):
            with World(seed) as world:
                machine = run(world, work)
                machine.lose_power()
                assert machine.disk.files()["f"] == expected


@pytest.mark.parametrize("seed", range(5))
def test_a_page_that_is_written_during_a_failed_sync_is_written_by_the_next(seed: int) -> None:
    failed: list[OSError] = []
    with World(seed) as world:
        machine = world.machine("a")
        machine.disk.drops = False

        async def main() -> None:
            descriptor = disk.open(machine.disk.path / "f", os.O_RDWR | os.O_CREAT)
            disk.pwrite(descriptor, b"one", 0)

            def sync() -> None:
                try:
                    disk.sync_file(descriptor)
                except OSError as error:
                    failed.append(error)

            machine.disk.slow(60)
            thread = threads.Thread(sync, name="sync")
            thread.start()
            await asyncio.sleep(0.0001)
            disk.pwrite(descriptor, b"two", 3)
            machine.disk.fail(60)
            await asyncio.sleep(30)
            machine.disk.heal()
            disk.sync_file(descriptor)
            sync_directory(machine.disk.path)
            await asyncio.sleep(1000)

        world.process("a", main)
        world.run(until=100)
        machine.lose_power()
        assert len(failed) == 1
        assert machine.disk.files() == {"f": b"onetwo"}


def test_a_mapping_is_the_file(world: World) -> None:
    def work(root: Path) -> None:
        write_durably(root / "f", bytes(2 * PAGE))
        descriptor = disk.open(root / "f", os.O_RDWR)
        mapping = disk.map_file(descriptor, 2 * PAGE, writable=True)
        disk.pwrite(descriptor, b"written", 10)
        assert mapping[10:17] == b"written"
        mapping[PAGE : PAGE + 6] = b"mapped"
        assert disk.pread(descriptor, 6, PAGE) == b"mapped"
        disk.sync_file(descriptor)
        disk.close(descriptor)

    machine = run(world, work)
    machine.lose_power()
    found = machine.disk.files()["f"]
    assert (found[10:17], found[PAGE : PAGE + 6]) == (b"written", b"mapped")


def test_a_file_is_locked_until_its_process_ends(world: World) -> None:
    def take(root: Path) -> None:
        disk.lock(root / "lock")

    machine = run(world, take)
    refused = world.process("other", lambda: _lock_again(machine.disk.path), on="a")
    world.run(until=world.now + 1)
    assert isinstance(refused.error, BlockingIOError)
    machine.processes[0].kill()
    run(world, take)


async def _lock_again(root: Path) -> None:
    disk.lock(root / "lock")


@pytest.mark.parametrize("call", range(1, 8))
def test_a_process_dies_at_a_call_of_the_disk(world: World, call: int) -> None:
    machine = world.machine("a")

    async def main() -> None:
        for number in range(10):
            write(machine.disk.path / str(number), b"x")
        await asyncio.sleep(100)

    died: list[float] = []
    process = world.process("a", main)
    process.die_at_call(call, then=lambda: died.append(world.now))
    world.run(until=5)
    assert not process.is_alive
    assert len(died) == 1
    assert len(machine.disk.files()) == (call - 1 + 1) // 2, "each file is an open and a write"


def test_missing_and_foreign_paths_raise_the_errors_of_the_system(world: World) -> None:
    def work(root: Path) -> None:
        with pytest.raises(FileNotFoundError):
            disk.read_file(root / "missing")
        with pytest.raises(FileNotFoundError):
            disk.names(root / "missing")
        with pytest.raises(OSError, match="only files below /simulated"):
            disk.open(Path("/etc/passwd"), os.O_RDONLY)
        disk.make_directory(root / "d")
        disk.make_directory(root / "d")
        write(root / "d" / "f", b"1")
        with pytest.raises(OSError, match="not empty"):
            disk.remove_directory(root / "d")
        assert disk.file_sizes(root / "d") == [("f", 1)]
        disk.remove_tree(root / "d")
        assert disk.names(root) == []
        disk.remove(root / "d", missing_ok=True)

    run(world, work)


def test_the_simulated_disk_has_every_function_of_the_seam(world: World) -> None:
    built_on_others = {"write_all", "make_directories", "replaced", "Mapped"}
    assert set(disk.__all__) - built_on_others == set(world.files.functions())


def test_the_disk_is_copied_to_real_files(world: World, tmp_path: Path) -> None:
    def work(root: Path) -> None:
        disk.make_directory(root / "d")
        write(root / "d" / "f", b"end", 3 * PAGE)

    machine = run(world, work)
    machine.disk.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy" / "d" / "f").stat().st_size == 3 * PAGE + 3
