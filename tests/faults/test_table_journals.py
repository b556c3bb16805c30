"""Power cuts and kills under a table with a journal: no acknowledged change is lost, and no change is applied in part.

A kill is a cut that keeps all writes, right after any operation.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rmqkit.broker.tables.files import JournaledTable
from rmqkit.protocol.schemas.topics import DataVersion
from tests.examples import chosen_seed, many
from tests.faults.disk import CutStyle, Recorder

MEMBER = "rows"
NAMES = "abcd"
_seed = chosen_seed()
State = tuple[dict[str, Any], DataVersion]


class Work:
    """Random changes of a table on a recorded disk. ``states``: each state with the times when its change began and
    when it was acknowledged, or None."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.recorder = Recorder(folder)
        self.ms = 0.0
        clock = SimpleNamespace(now_ms=lambda: int(self.ms), monotonic_ms=lambda: self.ms)
        self.table = JournaledTable(folder / "topics.json", {MEMBER: dict[str, int]}, clock)
        self.states: list[list[Any]] = []

    def state(self) -> State:
        return dict(self.table.members[MEMBER]), self.table.version

    def run(self, steps: int) -> None:
        with self.recorder:
            self.table.load(DataVersion(), {})
            self.states.append([0, 0, self.state()])
            self.table.persist()
            asyncio.run(self._steps(steps))

    async def _steps(self, count: int) -> None:
        for _ in range(count):
            self.ms += self.chance.choice([0, 1, 2000])
            await self._step(
                self.chance.choice(["now", "now", "soon", "shared", "round", "busy", "persist", "replace"])
            )

    async def _step(self, kind: str) -> None:
        table = self.table
        if kind == "now":
            self._change()
        elif kind == "soon":
            self.states.append([self.recorder.time, None, None])
            table.change_soon(self._rows())
            self.states[-1][2] = self.state()
        elif kind == "shared":
            begun = self.recorder.time
            await asyncio.gather(table.change_shared(self._rows()), table.change_shared(self._rows()))
            self._acknowledged(begun)
        elif kind == "round":
            await table.write_new()
            self._settled()
        elif kind == "busy":  # changes while the file is written in a thread
            self.ms += 2000
            self._change()
            writing = asyncio.create_task(table.write_new())
            while not writing.done():
                await asyncio.sleep(0)
                if self.chance.random() < 0.01:
                    self._change()
            await writing
        elif kind == "persist":
            table.persist()
            self._settled()
        else:
            begun = self.recorder.time
            members = {MEMBER: {name: {"n": self.chance.randint(0, 9)} for name in self.chance.sample(NAMES, 2)}}
            table.replace(members, DataVersion(self.chance.randint(100, 200), 0, int(self.ms)))
            self._acknowledged(begun)

    def _change(self) -> None:
        begun = self.recorder.time
        self.table.change(self._rows())
        self._acknowledged(begun)

    def _rows(self) -> dict[tuple[str, str], Any]:
        names = self.chance.sample(NAMES, self.chance.randint(1, 3))
        return {(MEMBER, name): self.chance.choice([None, {"n": self.chance.randint(0, 9)}]) for name in names}

    def _acknowledged(self, begun: int) -> None:
        self.states.append([begun, None, self.state()])
        self._settled()

    def _settled(self) -> None:
        for one in self.states:
            one[1] = self.recorder.time if one[1] is None else one[1]

    def allowed(self, time: int) -> list[State]:
        """Return the states that a start may find after a cut."""
        last = max(number for number, one in enumerate(self.states) if one[1] is not None and one[1] <= time)
        return [one[2] for number, one in enumerate(self.states) if number >= last and one[0] <= time]

    def check_cut(self, time: int, style: CutStyle, seed: str, to: Path) -> None:
        self.recorder.cut(time, style, random.Random(seed), to)
        again = Work(to, self.chance)
        found = loaded(again.table)
        assert found in self.allowed(time), f"--seed {seed}: cut at {time} of {self.recorder.time}, {style}: {found}"
        again.table.persist()
        assert not again.table.journal.path.exists()
        assert loaded(Work(to, self.chance).table) == found


def loaded(table: JournaledTable) -> State:
    stored = table.file.load(dict) or {}
    version = DataVersion(*(stored.get("dataVersion") or {}).values())
    table.load(version, {MEMBER: stored.get(MEMBER, {})})
    return dict(table.members[MEMBER]), table.version


@pytest.mark.faults
@pytest.mark.parametrize("number", range(min(6, many(6))))
def test_no_power_cut_loses_a_change_that_was_acknowledged(tmp_path: Path, number: int) -> None:
    seed = _seed + number
    chance = random.Random(f"{seed} table")
    (tmp_path / "config").mkdir()
    work = Work(tmp_path / "config", chance)
    work.run(40)
    assert work.allowed(work.recorder.time)[-1] == work.state()
    for cut in range(40):
        style, time = (
            CutStyle.any(chance),
            chance.choice([chance.randint(0, work.recorder.time), *work.recorder.of_interest]),
        )
        work.check_cut(time, style, f"{seed} {cut}", tmp_path / f"cut-{cut}")


@pytest.mark.faults
def test_a_kill_between_any_two_operations_leaves_every_change(tmp_path: Path) -> None:
    """All cuts of a short run: changes, a write of the file with changes during it, and the removal of the journal."""
    (tmp_path / "config").mkdir()
    work = Work(tmp_path / "config", random.Random("kill"))

    async def scenario() -> None:
        for kind in ("now", "shared", "soon", "busy", "now", "persist", "now", "replace", "round"):
            await work._step(kind)

    with work.recorder:
        work.table.load(DataVersion(), {})
        work.states.append([0, 0, work.state()])
        work.table.persist()
        asyncio.run(scenario())
    for time in range(work.recorder.time + 1):
        work.check_cut(time, CutStyle("new", is_loose=False), f"kill {time}", tmp_path / f"cut-{time}")
