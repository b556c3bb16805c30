"""Shrinking: the shortest list of faults with which a run still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.simulation.plan import Fault, Plan
from tests.simulation.run import Outcome, Run

Execute = Callable[[Plan], Outcome]


def execute(plan: Plan) -> Outcome:
    """Run a plan, without a story."""
    return Run(plan).execute()


def shrunk(plan: Plan, signature: str, *, seconds: float, run: Execute = execute) -> Plan:
    """Return the plan with as few faults as possible, then with as short a run as possible.

    Args:
        signature: what the run must fail with; see `Outcome.signature`.
        seconds: real time that may be spent.
    """
    end = time.monotonic() + seconds

    def fails(candidate: Plan) -> bool:
        return time.monotonic() < end and run(candidate).signature == signature

    faults = _fewest(plan, fails)
    found = plan.with_faults(faults)
    for value in (2.0, 4.0, 8.0, 12.0):
        if value < found.seconds and (not faults or faults[-1].at < value):
            shorter = found.shortened(value)
            if fails(shorter):
                return shorter
    return found


def _fewest(plan: Plan, fails: Callable[[Plan], bool]) -> list[Fault]:
    """Leave out halves, quarters, … and single faults, as long as the run fails."""
    faults, size = list(plan.faults), max(1, len(plan.faults) // 2)
    if faults and fails(plan.with_faults([])):
        return []
    while faults:
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            if fails(plan.with_faults(fewer)):
                faults = fewer
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(faults)))
    return faults
