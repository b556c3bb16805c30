"""Power cuts under a store at work: a workload in a simulated world, cut at a call of the disk, and the checks after
each cut.

After a cut a new process opens the store, which recovers it, and then:

- every message below ``durable_offset`` exists, unless retention deleted its log file (SYNC_FLUSH acknowledged these
  messages, ASYNC_FLUSH reported the offset);
- every message read is the one put at that offset of that queue, properties and all; offsets have no gap;
- the last saved configuration exists;
- further puts are stored at the next offsets.

The process may be cut again, during its recovery or its puts, up to two times. Some cuts follow a kill, which leaves
everything in the page cache. At last the store is closed. Then `fsck.verify` finds no fault, and another start changes
no byte.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

from rmqkit.store.log import recovery
from rmqkit.store.offline import check as fsck
from rmqkit.testing.simulation import World
from tests.faults.workload import Ledger, Work, random_settings, read_everything

_BACKUP_ALONE = (fsck.Kind.FILE_MISSING, "numbers.json")
_CUTS_MAX = 3
_CALLS_MAX = 40
_KILL_SHARE = 0.25
_FOREVER = 1e9
STOP, KILL, POWER_CUT = "clean stop", "kill", "power cut"


def run_process(world: World, main: Callable[[], Coroutine[Any, Any, None]], *, dies_at: int | None = None) -> bool:
    """Run a process of the machine ``a`` to its end. ``dies_at``: the call of the disk at which it is killed. Return
    True if it ended by itself."""
    process = world.process("p", main, on="a")
    if dies_at is not None:
        process.die_at_call(dies_at)
    world.run(until=_FOREVER, unless=lambda: not process.is_alive)
    assert not process.is_alive, "the process ends"
    if process.error is not None:
        raise process.error
    assert not world.errors, world.errors[0]
    return process.ended


class PowerCuts:
    """One workload, and one to three cuts or kills of it, the last one a cut.

    Args:
        folder: an empty directory for a copy of the store at rest.

    Attributes:
        cuts: a short description of each cut and kill so far.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.folder = folder
        self.world = World(seed)
        self.chance = random.Random(f"{seed} work")
        self.settings = random_settings(self.chance)
        self.ledger = Ledger()
        self.cuts: list[str] = []
        self._bulk_from_bytes = self.chance.choice([0, 3000, recovery.BULK_FROM_BYTES])

    def run(self) -> None:
        """Cut, check, and cut again.

        Raises:
            AssertionError: a check fails.
        """
        try:
            with self.world, mock.patch.object(recovery, "BULK_FROM_BYTES", self._bulk_from_bytes):
                self._work_and_cut()
                self._rest()
            self._verify()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            raise AssertionError(f"{', then '.join(self.cuts)}: {type(error).__name__} in {where}: {error}") from error

    def _work_and_cut(self) -> None:
        """Run processes until the power was cut at least once and the last process has stopped cleanly. A kill is
        followed by a cut: what the recovery after the kill did not sync is lost then."""
        chance, is_again = self.chance, True
        while is_again:
            is_kill = len(self.cuts) < _CUTS_MAX - 1 and chance.random() < _KILL_SHARE
            steps = 30 if self.cuts else chance.choice([20, 60, 200])
            self._process(steps, KILL if is_kill else POWER_CUT)
            is_again = is_kill or (len(self.cuts) < _CUTS_MAX and chance.random() < 0.4)
        self._process(chance.choice([5, 30]), STOP)

    # ---- processes

    def _process(self, steps: int, end: str) -> None:
        """Run a process that opens the store, checks it and works, to its end. A kill or a power cut befalls the
        process at a call of the disk, or after its clean stop."""
        chance, machine = self.chance, self.world.machine("a")
        work = Work(machine, self.settings, chance, self.ledger)
        # 0: the recovery. Many cuts after the first one befall the recovery, or the calls right after it.
        last_step = chance.choice([0, 0, 1, 1, steps, chance.randint(0, steps)] if self.cuts else range(steps + 1))
        calls = int(2 ** chance.uniform(0, 9)) if last_step == 0 else chance.randint(1, _CALLS_MAX)

        async def main() -> None:
            process = self.world.processes[-1]
            for step in range(steps + 1):
                if step == last_step and end != STOP:
                    process.die_at_call(calls)
                if step == 0:
                    self._check_recovered(work)
                else:
                    await work.step()
            work.close()

        is_whole = run_process(self.world, main)
        if end == STOP:
            return
        work.report()
        if end == KILL:
            self.ledger.keep_cached(work.store.log.committed_offset)
        else:
            machine.lose_power()
            self.ledger.cached.clear()
        self.cuts.append(f"{end} at call {machine.disk.calls}{' after a clean stop' if is_whole else ''}")
        machine.skew_ms += 10_000

    def _check_recovered(self, work: Work) -> None:
        """Open the store after a cut, and compare it with the ledger."""
        found = read_everything(work.open())
        number = work.load_number()
        self.ledger.check(found, number)
        self.ledger.restart(found, number)

    # ---- the store at rest

    def _rest(self) -> None:
        """Check that another start changes nothing. Leave a copy of the closed store in the folder."""
        disk = self.world.machine("a").disk
        closed = disk.files()
        disk.copy_to(self.folder)
        work = Work(self.world.machine("a"), self.settings, self.chance, self.ledger)

        async def main() -> None:
            self._check_recovered(work)
            work.close()

        run_process(self.world, main)
        changed = {name for name, _ in disk.files().items() ^ closed.items()}
        # the checkpoint has the place of recovery's last record; queueends lists queues in the order of opening
        allowed = {"store/checkpoint", "store/queueends"}
        if self.settings.transient_store_pool:  # an empty last file is removed
            allowed.add(max(name for name in closed if name.startswith("store/commitlog/")))
        assert changed <= allowed, f"a clean start and stop changes {changed}"

    def _verify(self) -> None:
        report = fsck.verify(self.folder / "store", self.settings)
        # a cut between the two renames of a save leaves only the backup, until the next save
        findings = [one for one in report.findings if (one.kind, Path(one.path).name) != _BACKUP_ALONE]
        assert not findings and not report.is_unclean, "\n".join(map(str, findings[:5]))
