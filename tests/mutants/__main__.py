"""``make mutants``: change the committed code in one place at a time, and count the changes that tests notice.

cosmic-ray makes the changes in a clone of the repository, so that the working tree stays as it is. A change survives
if the tests of its room pass. ``equivalent.toml`` lists survivors that cannot change behaviour, with the reason; they
do not count. Two rooms are tested at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutants.rooms import OPERATORS, ROOMS, Room
from tests.sources import ROOT

HOME = ROOT / ".cache/mutants"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
BASELINE_SECONDS_MAX = 240.0
_PYTEST = "-m pytest -x -q -p no:cacheprovider -p no:randomly --hypothesis-profile=mutants --ignore-glob=*_killed.py"
_MARKS = "not slow and not spark and not faults"
_SECONDS_MIN, _TIMES_UNCHANGED = 20.0, 4
"""A change counts as noticed when its tests take so many times as long as without a change, and these seconds."""


class Survivor(NamedTuple):
    """A change that no test noticed: the file, the line as it was, and the line as it became."""

    path: str
    line: int
    before: str
    after: str


class Outcome(NamedTuple):
    """The numbers of tried and noticed changes of a room, and of survivors with a reason, and the survivors without
    one.
    """

    tried: int
    noticed: int
    equivalent: int
    survivors: list[Survivor]

    @property
    def percent(self) -> float:
        """The share of noticed changes among those that are not equivalent."""
        return 100.0 * self.noticed / max(1, self.tried - self.equivalent)


class Mutation:
    """The changes of one room, in a clone of its own."""

    def __init__(self, name: str, room: Room, cosmic_ray: Path) -> None:
        self._room = room
        self._bin = cosmic_ray
        self._folder = HOME / name
        self._tree = self._folder / "tree"
        self._session = self._folder / "session.sqlite"
        self._config = self._folder / "config.toml"

    def run(self, most: int, seed: int) -> Outcome:
        """Try all changes, or ``most`` that the seed picks.
        Raises RuntimeError: the tests of the room fail without a change."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", "--local", ROOT, self._tree], check=True)
        self._config.write_text(self._settings(BASELINE_SECONDS_MAX))
        began = time.monotonic()
        if self._call("cosmic-ray", "baseline", self._config, is_unchanged=True).returncode:
            raise RuntimeError(f"{' '.join(self._room.tests)} fail without a change; run: make test-unit")
        self._config.write_text(self._settings(_SECONDS_MIN + _TIMES_UNCHANGED * (time.monotonic() - began)))
        self._call("cosmic-ray", "init", self._config, self._session)
        self._call("cr-filter-operators", self._session, self._config)
        self._leave_out(most, seed)
        self._call("cosmic-ray", "exec", self._config, self._session)
        return self._outcome()

    def _settings(self, seconds_max: float) -> str:
        tests = f"{sys.executable} {_PYTEST} -m '{_MARKS}' {' '.join(self._room.tests)}"
        kept = "|".join(OPERATORS)
        return "\n".join(
            [
                "[cosmic-ray]",
                f"module-path = {json.dumps(self._room.code)}",
                f"timeout = {seconds_max:.1f}",
                "excluded-modules = []",
                f"test-command = {json.dumps(tests)}",
                '[cosmic-ray.distributor]\nname = "local"',
                f"[cosmic-ray.filters.operators-filter]\nexclude-operators = [{json.dumps(f'core/(?!({kept})$).*')}]",
            ]
        )

    def _call(self, program: str, *words: str | Path, is_unchanged: bool = False) -> subprocess.CompletedProcess[str]:
        paths = [str(path) for path in (self._tree, *sorted(self._tree.glob("packages/*/src")))]
        # Only unchanged code is stored as bytecode. Two changes of a file within a second may have the same time and
        # size, and the second change would run as the first one. Without any bytecode a run takes three times the CPU.
        bytecode = "" if is_unchanged else "1"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": bytecode}
        command, check = [self._bin / program, *words], not is_unchanged
        return subprocess.run(command, cwd=self._tree, env=environ, check=check, capture_output=True, text=True)

    def _leave_out(self, most: int, seed: int) -> None:
        """Skip the changes that the seed did not pick, and changes of module constants: tests read these by name."""
        with sqlite3.connect(self._session) as session:
            query = "SELECT job_id FROM mutation_specs WHERE job_id NOT IN (SELECT job_id FROM work_results)"
            rows = session.execute(f"{query} ORDER BY module_path, operator_name, occurrence").fetchall()
            constants = "operator_name = 'core/NumberReplacer' AND definition_name IS NULL"
            left_out = {name for (name,) in session.execute(f"{query} AND {constants}")}
            names = [name for (name,) in rows if name not in left_out]
            if most:
                left_out |= set(names) - set(random.Random(seed).sample(names, min(most, len(names))))
            skipped = [("SKIPPED", "left out", name) for name in sorted(left_out)]
            session.executemany("INSERT INTO work_results (worker_outcome, output, job_id) VALUES (?, ?, ?)", skipped)

    def _outcome(self) -> Outcome:
        with sqlite3.connect(self._session) as session:
            query = "SELECT module_path, start_pos_row, test_outcome, diff FROM work_results JOIN mutation_specs"
            rows = session.execute(f"{query} USING (job_id) WHERE test_outcome IS NOT NULL").fetchall()
        reasons = tomllib.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
        known = {(one["path"], one["before"], one["after"]) for one in reasons.get("mutant", [])}
        lived = [survivor(path, line, diff) for path, line, outcome, diff in rows if outcome == "SURVIVED"]
        counted = [one for one in lived if (one.path, one.before, one.after) not in known]
        return Outcome(len(rows), len(rows) - len(lived), len(lived) - len(counted), sorted(counted))


def survivor(path: str, line: int, diff: str) -> Survivor:
    """Return a change as the first lines of its diff that differ."""
    (before,) = re.findall(r"^-(?!--)(.*)$", diff, re.MULTILINE)[:1] or [""]
    (after,) = re.findall(r"^\+(?!\+\+)(.*)$", diff, re.MULTILINE)[:1] or [""]
    return Survivor(path, line, before.strip(), after.strip())


def main() -> None:
    """Print a line for each survivor, and a table with a line for each room."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--bin", type=Path, required=True, help="folder with the program cosmic-ray")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="names with commas: %(default)s")
    parser.add_argument("--most", type=int, default=0, help="changes of each room, picked by the seed; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rooms = {name: ROOMS[name] for name in args.rooms.split(",")}

    def run(name: str) -> Outcome:
        outcome = Mutation(name, rooms[name], args.bin.absolute()).run(args.most, args.seed)
        for one in outcome.survivors:
            print(f"mutants: {name}: survived: {one.path}:{one.line}: {one.before}  ->  {one.after}", flush=True)
        return outcome

    with ThreadPoolExecutor(2) as threads:
        outcomes = dict(zip(rooms, threads.map(run, rooms), strict=True))
    print(f"{'room':16} {'tried':>6} {'noticed':>8} {'equivalent':>11} {'survived':>9} {'noticed %':>10}")
    for name, one in outcomes.items():
        print(f"{name:16} {one.tried:6} {one.noticed:8} {one.equivalent:11} {len(one.survivors):9} {one.percent:10.1f}")


if __name__ == "__main__":
    main()
