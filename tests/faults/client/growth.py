"""A test for growth: samples over time, a straight line through the samples after the warm-up, and a verdict.

The line's slope is the median of the slopes between all pairs of samples (Theil and Sen), so one step in a flat series
is no growth: a process retains memory that a burst needed once. A series is flat if its slope is within the limit per
hour, or if its rise during the measurement is too small to judge.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KIB_FIELDS = {"RssAnon": "anonymous_mib", "RssFile": "mapped_mib"}

Sample = tuple[float, float]
"""Seconds since the start, and the value."""


@dataclass(slots=True)
class Growth:
    """The growth of a series after the warm-up: ``low`` and ``high`` are its bounds, ``grown`` is the rise of the
    line.
    """

    name: str
    low: float
    high: float
    slope_per_hour: float
    grown: float
    is_flat: bool

    def __str__(self) -> str:
        verdict = "flat" if self.is_flat else "GROWS"
        return (
            f"{self.name:24} {verdict}  {self.low:9.2f} to {self.high:9.2f}, "
            f"{self.slope_per_hour:+9.2f} per hour ({self.grown:+.2f} in the run)"
        )


def judge(
    name: str, samples: Sequence[Sample], *, warm_up_seconds: float, per_hour_max: float, noticed: float
) -> Growth:
    """Return the verdict on one series. A rise of at most ``noticed`` is flat.
    Raises ValueError: fewer than three samples follow the warm-up."""
    judged = [(seconds, value) for seconds, value in samples if seconds >= warm_up_seconds]
    if len(judged) < 3:
        raise ValueError(f"{name}: {len(judged)} samples after {warm_up_seconds:g} s: run longer or sample more often")
    slope = statistics.median((b - a) / (later - at) for (at, a), (later, b) in itertools.combinations(judged, 2))
    grown = slope * (judged[-1][0] - judged[0][0])
    values = [value for _, value in judged]
    is_flat = slope * 3600 <= per_hour_max or grown <= noticed
    return Growth(name, min(values), max(values), slope * 3600, grown, is_flat)


def process_figures(pid: int) -> dict[str, float]:
    """Return a process's private memory in MiB, MiB of mapped files (a broker's store: the page cache), threads, open
    files.
    """
    figures: dict[str, float] = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _KIB_FIELDS:
            figures[_KIB_FIELDS[name]] = int(value.split()[0]) / 1024
        elif name == "Threads":
            figures["threads"] = float(value)
    figures["files"] = float(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))
    return figures
