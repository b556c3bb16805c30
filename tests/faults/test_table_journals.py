"""Power cuts and kills under a table with a journal: no acknowledged change is lost, and no change is applied in part.

The table works in a process of a simulated world, which dies at a call of the disk. The next process loads the table.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from rmqkit.broker.tables.files import JournaledTable
from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.schemas.topics import DataVersion
from rmqkit.system import disk
from rmqkit.testing.simulation import World
from tests.examples import chosen_seed, many
from tests.faults.power_cut import run_process

MEMBER = "rows"
NAMES = "abcd"
KINDS = ["now", "now", "soon", "shared", "round", "busy", "persist", "replace"]
CUTS = 20
_seed = chosen_seed()
_Rows = dict[tuple[str, str], Any]
State = tuple[dict[str, Any], int]


class Work:
    """Random changes of a table in processes of a simulated machine.

    Attributes:
        states: the rows and version numbers that a start may find: the last acknowledged ones, and those of later
            changes.
    """

    def __init__(self, world: World, chance: random.Random) -> None:
        self.world, self.chance = world, chance
        self.path = world.machine("a").disk.path / "topics.json"
        self.states: list[State] = [({}, 0)]

    def run(self, kinds: list[str], *, dies_at: int | None = None) -> bool:
        """Start a process, which checks the table and changes it. Return True if it ended by itself."""

        async def main() -> None:
            self._start()
            for kind in kinds:
                await asyncio.sleep(self.chance.choice([0, 0.001, 2]))
                await self._step(kind)

        return run_process(self.world, main, dies_at=dies_at)

    def _start(self) -> None:
        self.table = self._loaded()
        found = state(self.table)
        assert found in self.states, f"found {found}, allowed {self.states}"
        self.states = [found]
        self.table.persist()
        assert not disk.exists(self.table.journal.path)
        assert state(self._loaded()) == found

    def _loaded(self) -> JournaledTable:
        table = JournaledTable(self.path, {MEMBER: dict[str, int]}, SYSTEM_CLOCK)
        stored = table.file.load(dict) or {}
        table.load(DataVersion(*(stored.get("dataVersion") or {}).values()), {MEMBER: stored.get(MEMBER, {})})
        return table

    async def _step(self, kind: str) -> None:
        table = self.table
        if kind == "now":
            self._change()
        elif kind == "soon":
            rows = self._rows()
            self._begin(rows)
            table.change_soon(rows)
            return
        elif kind == "shared":
            one, other = self._rows(), self._rows()
            self._begin(one | other)
            await asyncio.gather(table.change_shared(one), table.change_shared(other))
        elif kind == "round":
            await table.write_new()
        elif kind == "busy":  # changes while the file is written in a thread
            await asyncio.sleep(2)
            self._change()
            writing = asyncio.create_task(table.write_new())
            while not writing.done():
                await asyncio.sleep(0.0002)
                if self.chance.random() < 0.3:
                    self._change()
            await writing
        elif kind == "persist":
            table.persist()
        else:
            members = {name: {"n": self.chance.randint(0, 9)} for name in self.chance.sample(NAMES, 2)}
            version = DataVersion(self.chance.randint(100, 200))
            self.states.append((members, version.counter))
            table.replace({MEMBER: members}, version)
        self._acknowledged()

    def _change(self) -> None:
        rows = self._rows()
        self._begin(rows)
        self.table.change(rows)
        self._acknowledged()

    def _rows(self) -> _Rows:
        names = self.chance.sample(NAMES, self.chance.randint(1, 3))
        return {(MEMBER, name): self.chance.choice([None, {"n": self.chance.randint(0, 9)}]) for name in names}

    def _begin(self, rows: _Rows) -> None:
        """Allow the state after a change."""
        before, counter = self.states[-1]
        after = before | {name: row for (_, name), row in rows.items()}
        self.states.append(({name: row for name, row in after.items() if row is not None}, counter + 1))

    def _acknowledged(self) -> None:
        assert state(self.table) == self.states[-1]
        del self.states[:-1]


def state(table: JournaledTable) -> State:
    return dict(table.members[MEMBER]), table.version.counter


@pytest.mark.faults
@pytest.mark.parametrize("number", range(min(6, many(6))))
def test_no_power_cut_loses_a_change_that_was_acknowledged(number: int) -> None:
    print(f"seed {_seed + number}")
    chance = random.Random(f"{_seed + number} table")
    with World(_seed + number) as world:
        work = Work(world, chance)
        for _ in range(CUTS):
            work.run(chance.choices(KINDS, k=40), dies_at=chance.randint(1, 200))
            world.machine("a").lose_power()
        work.run([])


@pytest.mark.faults
def test_a_kill_before_any_call_of_the_disk_leaves_every_change() -> None:
    """All kills of a short run: changes, a write of the file with changes during it, and the removal of the journal."""
    kinds = ["now", "shared", "soon", "busy", "now", "persist", "now", "replace", "round"]
    has_ended, calls = False, 0
    while not has_ended:
        calls += 1
        with World(_seed) as world:
            work = Work(world, random.Random("kill"))
            has_ended = work.run(kinds, dies_at=calls)
            work.run([])
    assert calls > len(kinds), "every change calls the disk"
