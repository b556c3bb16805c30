"""The long crash tests, ``make kill T=store``: thousands of simulated power cuts, hundreds of SIGKILLs.

``python -m tests.faults.crash --seed S --cut N`` repeats one power cut of one workload.
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

CUTS_PER_WORKLOAD = 10
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
    """Cut the power of one workload a number of times."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            cuts = PowerCuts(seed, Path(folder))
        except AssertionError as error:
            return Outcome(count, 0, "no workload", failures=[f"--seed {seed}, before any cut: {error}"])
        settings = cuts.settings
        outcome = Outcome(count, 0, settings.flush_disk_type.value + (" with pool" * settings.transient_store_pool))
        for number in range(count):
            try:
                outcome.checked += 1 + cuts.cut(number).count(", then ")
            except AssertionError as error:
                outcome.failures.append(f"--seed {seed} --cut {number}: {error}")
        return outcome


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
    parser.add_argument("--cuts", type=int, default=2000, help="power cuts (2000)")
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs (500)")
    parser.add_argument("--seed", type=int, help="first seed (random)")
    parser.add_argument("--cut", type=int, help="do only this cut of the workload of --seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per CPU)")
    given = parser.parse_args()
    seed = random.randrange(1 << 30) if given.seed is None else given.seed
    if given.cut is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(PowerCuts(seed, Path(folder)).cut(given.cut))
        return 0
    bad = run("power cuts", cut_one, seed, given.cuts, CUTS_PER_WORKLOAD, given.jobs)
    bad += run("kills", kill_one, seed, given.kills, KILLS_PER_STORE, given.jobs)
    print("crash: nothing acknowledged was lost" if not bad else f"crash: {bad} FAILED")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
