"""A store whose syncs failed, then a kill, a start, and a power cut: nothing that the start found is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rmqkit.store.message_store import MessageStore, PutStatus
from rmqkit.store.settings import FlushDiskType, StoreSettings
from rmqkit.testing.simulation import Machine, World
from tests.store.stores import message, read_all, small_settings

SETTINGS: StoreSettings = small_settings(flush_disk_type=FlushDiskType.SYNC_FLUSH)


def run(world: World, work: Callable[[MessageStore], None]) -> Machine:
    """Run a function with an open store in a process, which is then killed. The disk is healed."""
    machine = world.machine("a")

    async def main() -> None:
        store = MessageStore(Path(machine.disk.path, "store"), SETTINGS)
        store.open()
        work(store)
        await asyncio.sleep(1000)

    process = world.process("broker", main)
    world.run(until=world.now + 10)
    assert process.error is None, process.error
    process.kill()
    machine.disk.heal()
    return machine


def put(store: MessageStore, *numbers: int) -> None:
    for number in numbers:
        assert store.put(message(body=b"%d" % number)).status is PutStatus.OK


def numbers_of(store: MessageStore) -> list[int]:
    return [int(record.body) for record in read_all(store, "TopicTest")]


@pytest.mark.parametrize("drops", [False, True], ids=["clean pages", "dropped pages"])
@pytest.mark.parametrize("seed", range(6))
def test_records_of_failed_syncs_are_lost_at_the_next_start_or_never(seed: int, drops: bool) -> None:
    found: list[list[int]] = []
    with World(seed) as world:
        world.machine("a").disk.drops = drops
        run(world, lambda store: put(store, 0))

        def fail(store: MessageStore) -> None:
            put(store, *range(1, 41))  # several files
            world.machine("a").disk.fail(60)
            store.flusher.flush_log()
            assert store.failure is not None

        run(world, fail)

        def go_on(store: MessageStore) -> None:
            found.append(numbers_of(store))
            put(store, 100, 101)
            store.flusher.flush_log()
            assert store.failure is None

        run(world, go_on).lose_power()
        run(world, lambda store: found.append(numbers_of(store)))
    assert found[0] == [*range(len(found[0]))]
    assert drops or len(found[0]) == 41, "a kill loses nothing"
    assert found[1] == [*found[0], 100, 101]
