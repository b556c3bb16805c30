"""Run simulated clusters under faults, one for each seed, until a time is over::

    python -m tests.simulation --seconds 60              # random seeds, in one process for each core
    python -m tests.simulation --seed 17 --story         # one seed, with its story
    python -m tests.simulation --first 1 --count 1000    # these seeds

A seed that fails is shrunk, and printed as a story with the line that runs it again. The exit code is 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

from tests.simulation.plan import plan_of
from tests.simulation.run import Outcome, Run, run_seed
from tests.simulation.shrink import shrunk
from tests.simulation.story import told

_HASH_SEED = "0"
_SHRINK_SECONDS = 120.0
_FAILURES_MAX = 5
_SEEDS_PER_PROCESS = 200
"""A process keeps about 1 MB of each seed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="real time to run")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--first", type=int, help="the first seed; without it, a random one")
    parser.add_argument("--count", type=int, help="the number of seeds; without it, as many as the time allows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="the number of processes")
    parser.add_argument("--faults", help="times of the faults to keep, separated by commas, or none")
    parser.add_argument("--for", type=float, dest="for_seconds", help="seconds of sends and faults in the run")
    parser.add_argument("--story", action="store_true", help="print the story of the seed")
    parser.add_argument("--each", action="store_true", help="print a line for each seed, not only for failing ones")
    parser.add_argument("--lines", type=int, default=25, help="lines of the story")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:  # the order of sets of names is part of a run
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], _environment())
    return one(arguments) if arguments.seed is not None else swarm(arguments)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": _HASH_SEED}


def one(arguments: argparse.Namespace) -> int:
    """Run one seed, as a whole or in part."""
    plan = plan_of(arguments.seed)
    if arguments.for_seconds:
        plan = plan.shortened(arguments.for_seconds)
    if arguments.faults:
        kept = set() if arguments.faults == "none" else {float(one) for one in arguments.faults.split(",")}
        plan = plan.with_faults([fault for fault in plan.faults if fault.at in kept])
    if arguments.story:
        print(told(plan, lines=arguments.lines))
        return 0
    outcome = Run(plan).execute()
    print(_line(outcome))
    return int(bool(outcome.findings))


def swarm(arguments: argparse.Namespace) -> int:
    """Run many seeds in parallel, and print the sums."""
    first = random.randrange(1 << 40) if arguments.first is None else arguments.first
    began = time.monotonic()
    total: Counter[str] = Counter()
    failures: list[Outcome] = []
    seconds = 0.0
    for outcome in _outcomes(first, arguments):
        total.update(
            seeds=1,
            messages=outcome.messages,
            arrivals=outcome.arrivals,
            faults=outcome.faults,
            events=outcome.events,
        )
        seconds += outcome.simulated_seconds
        if outcome.findings:
            failures.append(outcome)
        if outcome.findings or arguments.each:
            print(_line(outcome), flush=True)
    spent = time.monotonic() - began
    print(
        f"{total['seeds']} seeds from {first}, {seconds / 3600:.2f} simulated hours in {spent:.0f} s, "
        f"{total['faults']} faults, "
        f"{total['messages']} messages sent, {total['arrivals']} handled, {total['events']} events, "
        f"{len(failures)} failed"
    )
    for signature in {outcome.signature for outcome in failures}:
        failed = next(outcome for outcome in failures if outcome.signature == signature)
        print(told(shrunk(plan_of(failed.seed), signature, seconds=_SHRINK_SECONDS)))
    return int(bool(failures))


def _outcomes(first: int, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Run seeds in parallel until the time or the count is over, or too many have failed."""
    end = time.monotonic() + arguments.seconds
    numbers = itertools.count() if arguments.count is None else range(arguments.count)
    seeds = (first + number for number in numbers)
    failed = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, context, max_tasks_per_child=_SEEDS_PER_PROCESS) as pool:
        running = {pool.submit(run_seed, seed) for seed in itertools.islice(seeds, 2 * arguments.jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield (outcome := future.result())
                failed += bool(outcome.findings)
            is_over = failed >= _FAILURES_MAX or (arguments.count is None and time.monotonic() > end)
            if not is_over:
                running |= {pool.submit(run_seed, seed) for seed in itertools.islice(seeds, len(done))}


def _line(outcome: Outcome) -> str:
    verdict = "; ".join(outcome.findings) or "sound"
    return (
        f"seed {outcome.seed}: {outcome.simulated_seconds:.0f} s, {outcome.messages} messages, {outcome.arrivals} "
        f"handled, {outcome.faults} faults, trace {outcome.trace}: {verdict}"
    )


if __name__ == "__main__":
    sys.exit(main())
