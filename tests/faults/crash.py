"""The long crash tests, ``make kill T=store``: thousands of simulated power cuts, hundreds of SIGKILLs.

``python -m tests.faults.crash --seed S --cuts 1 --kills 0`` repeats the power cuts of one workload.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rmqkit.store.settings import FlushDiskType
from tests.faults.kills import Kills, kill_settings
from tests.faults.power_cut import PowerCuts

KILLS_PER_STORE = 25
_TELL_SECONDS = 20

WAYS: list[tuple[str, FlushDiskType, dict[str, Any]]] = [
    ("sync", FlushDiskType.SYNC_FLUSH, {}),
    ("async", FlushDiskType.ASYNC_FLUSH, {}),
    ("sync, extension", FlushDiskType.SYNC_FLUSH, {"enable_consume_queue_ext": True}),
    ("async, extension", FlushDiskType.ASYNC_FLUSH, {"enable_consume_queue_ext": True}),
    ("async, pool", FlushDiskType.ASYNC_FLUSH, {"transient_store_pool": True}),
]


@dataclass
class Outcome:
    """The result of one workload or one store: cuts or kills, checked recoveries, messages, and failures."""

    done: int
    checked: int
    name: str
    messages: int = 0
    failures: list[str] = field(default_factory=list)


def cut_one(seed: int, count: int) -> Outcome:
    """Cut the power of one workload, and perhaps again after its recovery."""
    with tempfile.TemporaryDirectory() as folder:
        cuts = PowerCuts(seed, Path(folder))
        settings, failures = cuts.settings, []
        try:
            cuts.run()
        except AssertionError as error:
            failures.append(f"--seed {seed}: {error}")
        name = settings.flush_disk_type.value + (" with pool" * settings.transient_store_pool)
        return Outcome(count, len(cuts.cuts), name, failures=failures)


def kill_one(seed: int, count: int) -> Outcome:
    """Kill a number of processes over one store."""
    logging.getLogger("rmqkit").setLevel(logging.CRITICAL)
    name, flush_disk_type, changes = WAYS[seed % len(WAYS)]
    with tempfile.TemporaryDirectory() as folder:
        kills = Kills(Path(folder) / "store", kill_settings(flush_disk_type, **changes), random.Random(seed))
        outcome = Outcome(0, 0, name)
        try:
            while kills.kills < count:
                kills.kill()
                outcome.checked += 1
        except AssertionError as error:
            outcome.failures.append(f"--seed {seed}, {name}, kill {kills.kills}: {error}")
        outcome.done, outcome.messages = kills.kills, kills.acknowledged
        return outcome


def run(what: str, one: Callable[[int, int], Outcome], seed: int, count: int, each: int, jobs: int) -> int:
    """Run ``one`` for ``count`` cuts or kills, ``each`` per seed, in several processes. Return the number of
    failures.
    """
    begun = told = time.monotonic()
    total, names = Outcome(0, 0, ""), Counter[str]()
    print(f"{what}: {count}, {each} per seed from {seed} on, {jobs} processes", flush=True)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        starts = range(0, count, each)
        counts = [min(each, count - start) for start in starts]
        for outcome in pool.map(one, range(seed, seed + len(starts)), counts):
            total.done += outcome.done
            total.checked += outcome.checked
            total.messages += outcome.messages
            total.failures += outcome.failures
            names[outcome.name] += outcome.done
            for failure in outcome.failures:
                print(f"  FAILED {failure}", flush=True)
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                print(f"  {total.done} done, {len(total.failures)} failed, {told - begun:.0f} s", flush=True)
    ways = ", ".join(f"{name} {number}" for name, number in sorted(names.items()))
    messages = f", {total.messages} messages acknowledged" if total.messages else ""
    print(
        f"{what}: {total.done} done ({ways}){messages}, {total.checked} recoveries checked, "
        f"{len(total.failures)} failed, {time.monotonic() - begun:.0f} s",
        flush=True,
    )
    return len(total.failures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.faults.crash", description=__doc__)
    parser.add_argument("--cuts", type=int, default=2000, help="workloads with power cuts (2000)")
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs (500)")
    parser.add_argument("--seed", type=int, help="first seed (random)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per CPU)")
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    bad = run("power cuts", cut_one, seed, given.cuts, 1, given.jobs)
    bad += run("kills", kill_one, seed, given.kills, KILLS_PER_STORE, given.jobs)
    print("crash: nothing acknowledged was lost" if not bad else f"crash: {bad} FAILED")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
