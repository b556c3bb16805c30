"""Costs of pieces of work beside each other: rounds in which each is done once, and ratios of what they took.

What counts is CPU time of all processes (`process_tree`), unless the work knows better. A busy machine disturbs those
that are next to each other alike; the least of the rounds is compared, the median is told beside.
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
"""Does something; returns CPU seconds where it knows them better than the caller."""

WARM_UPS = 1
"""Rounds that do not count."""


class Ratio(Struct, frozen=True):
    """The cost of one piece of work by that of ours, by message; with ``at_most`` the other way round.
    ``data`` says of what, ``count`` how many messages are gone over, ``other_count`` how many by the other if that
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
    """What a piece of work took in every round that counts."""

    cpu_s: list[float]
    wall_s: list[float]


class Rounds:
    """Work and ratios of it; ``tell`` is given a line about every piece that was done."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tree = ProcessTree()
        self._tell = tell
        self._works: dict[str, Work] = {}
        self._costs: dict[str, Cost] = {}
        self._ratios: list[Ratio] = []

    def add(self, ratio: Ratio, ours: Work, other: Work) -> None:
        """Take up a ratio; work of a name that is known is not taken up again."""
        self._ratios.append(ratio)
        self._works.setdefault(ratio.ours, ours)
        self._works.setdefault(ratio.other, other)

    def run(self, repeats: int) -> list[Figure]:
        """What the ratios are after so many rounds, and `WARM_UPS` before them."""
        for turn in range(WARM_UPS + repeats):
            for name, work in self._works.items():
                self.take(name, work, counts=turn >= WARM_UPS)
        return [self.figure(ratio) for ratio in self._ratios]

    def take(self, name: str, work: Work, *, counts: bool = True) -> None:
        """Do some work once; what it took counts or not."""
        wall, cpu = time.perf_counter(), self.tree.cpu_seconds()
        own = work()
        cpu_s, wall_s = self.tree.cpu_seconds() - cpu if own is None else own, time.perf_counter() - wall
        self._tell(f"{name}: {cpu_s:.2f} s of CPU, {wall_s:.2f} s")
        if counts:
            cost = self._costs.setdefault(name, Cost([], []))
            cost.cpu_s.append(cpu_s)
            cost.wall_s.append(wall_s)

    def figure(self, ratio: Ratio) -> Figure:
        """What a ratio is after the work that was done."""
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
    """Microseconds of CPU by message, and seconds by the clock."""
    least, median = min(cost.cpu_s), statistics.median(cost.cpu_s)
    return {"us_min": least / count * 1e6, "us_median": median / count * 1e6, "wall_s_min": min(cost.wall_s)}


def verdict(value: float, floor: float, ambition: float, *, at_most: bool = False) -> str:
    """✓✓ for the ambition, ✓ for the floor."""
    reached = [value <= bound if at_most else value >= bound for bound in (floor, ambition)]
    return "✓✓" if all(reached) else "✓" if reached[0] else "miss"
