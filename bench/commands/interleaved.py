"""Costs of pieces of work, measured in the same rounds, and their ratios.

The cost is the CPU time of all processes (`process_tree`), unless the work returns a better value. Each round runs
every piece once, so that a busy machine affects them alike. Ratios compare the smallest values of the rounds; the
medians are reported too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from bench.commands.process_tree import ProcessTree

__all__ = ["Figure", "Ratio", "Rounds", "Work", "verdict"]

Figure = dict[str, Any]
Work = Callable[[], float | None]
"""Work that returns CPU seconds if it can measure them better than the caller."""

WARM_UPS = 1
"""Rounds that are not counted."""


class Ratio(Struct, frozen=True):
    """The cost per message of another piece of work, divided by that of ours; with ``at_most`` the inverse. ``data``
    names the data, ``count`` is the number of processed messages, ``other_count`` that of the other work if it
    differs."""

    row: int
    what: str
    data: str
    count: int
    ours: str
    other: str
    floor: float
    ambition: float
    at_most: bool = False
    other_count: int = 0


class Cost(Struct):
    """The times of a piece of work in every counted round."""

    cpu_s: list[float]
    wall_s: list[float]


class Rounds:
    """Pieces of work and their ratios. ``tell`` is called with a line about every finished piece."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tree = ProcessTree()
        self._tell = tell
        self._works: dict[str, Work] = {}
        self._costs: dict[str, Cost] = {}
        self._ratios: list[Ratio] = []

    def add(self, ratio: Ratio, ours: Work, other: Work) -> None:
        """Add a ratio. Work with a known name is not added again."""
        self._ratios.append(ratio)
        self._works.setdefault(ratio.ours, ours)
        self._works.setdefault(ratio.other, other)

    def run(self, repeats: int) -> list[Figure]:
        """Run ``repeats`` rounds, after `WARM_UPS` others, and return the ratios."""
        for turn in range(WARM_UPS + repeats):
            for name, work in self._works.items():
                self.take(name, work, counts=turn >= WARM_UPS)
        return [self.figure(ratio) for ratio in self._ratios]

    def take(self, name: str, work: Work, *, counts: bool = True) -> None:
        """Run some work once, and record its times if it counts."""
        wall, cpu = time.perf_counter(), self.tree.cpu_seconds()
        own = work()
        cpu_s, wall_s = self.tree.cpu_seconds() - cpu if own is None else own, time.perf_counter() - wall
        self._tell(f"{name}: {cpu_s:.2f} s of CPU, {wall_s:.2f} s")
        if counts:
            cost = self._costs.setdefault(name, Cost([], []))
            cost.cpu_s.append(cpu_s)
            cost.wall_s.append(wall_s)

    def figure(self, ratio: Ratio) -> Figure:
        """Return a ratio of the recorded times."""
        ours = _by_message(self._costs[ratio.ours], ratio.count)
        other = _by_message(self._costs[ratio.other], ratio.other_count or ratio.count)
        dividend, divisor = (ours, other) if ratio.at_most else (other, ours)
        least = dividend["us_min"] / divisor["us_min"]
        return {
            "row": ratio.row,
            "what": ratio.what,
            "data": ratio.data,
            "ratio": round(least, 2),
            "of_medians": round(dividend["us_median"] / divisor["us_median"], 2),
            "floor": ratio.floor,
            "ambition": ratio.ambition,
            "verdict": verdict(least, ratio.floor, ratio.ambition, at_most=ratio.at_most),
            **{
                f"{side}_{name}": round(value, 3)
                for side, one in (("ours", ours), ("other", other))
                for name, value in one.items()
            },
        }


def _by_message(cost: Cost, count: int) -> dict[str, float]:
    """Return microseconds of CPU per message, and wall seconds."""
    least, median = min(cost.cpu_s), statistics.median(cost.cpu_s)
    return {"us_min": least / count * 1e6, "us_median": median / count * 1e6, "wall_s_min": min(cost.wall_s)}


def verdict(value: float, floor: float, ambition: float, *, at_most: bool = False) -> str:
    """Return ✓✓ if the value reaches the ambition, ✓ if it reaches the floor."""
    reached = [value <= bound if at_most else value >= bound for bound in (floor, ambition)]
    return "✓✓" if all(reached) else "✓" if reached[0] else "miss"
