"""The story of a failed run: its shape, its faults, what was found, and the lines before it."""

from __future__ import annotations

import re

from tests.simulation.plan import Plan, shape_of
from tests.simulation.run import Outcome, Run

_LAST_LINES = 25
_TOLD = ("FAULT", "FINDING", "kill", "power", "start", "ended", "log", "healed", "unhandled")


def told(plan: Plan, *, lines: int = _LAST_LINES, again: str = "") -> str:
    """Run a plan again, and return its story. ``again``: the line that repeats it, if it is not `command`."""
    outcome = Run(plan, keeps_story=True).execute()
    parts = [f"seed {plan.seed} fails: {outcome.findings[0] if outcome.findings else 'nothing, this time'}"]
    parts += [f"  {name}: {value}" for name, value in shape_of(plan).items()]
    parts.append(f"  {len(plan.faults)} fault(s):")
    parts += [f"    {fault}" for fault in plan.faults]
    parts += [f"  finding: {finding}" for finding in outcome.findings]
    parts.append(f"  the last lines of {len(outcome.story)}:")
    parts += [f"    {line}" for line in _last(outcome, lines)]
    parts.append(f"  run it again: {again or command(plan)}")
    return "\n".join(parts)


def command(plan: Plan) -> str:
    """Return the command that runs a plan again."""
    times = ",".join(f"{fault.at:g}" for fault in plan.faults) or "none"
    return f"python -m tests.simulation --seed {plan.seed} --faults {times} --for {plan.seconds:g} --story"


def _last(outcome: Outcome, count: int) -> list[str]:
    chosen = [line for line in outcome.story if line.split(" ", 2)[1] in _TOLD]
    return [re.sub(r"\s+", " ", line)[:200] for line in chosen[-count:]]
