"""How long puts take (``StoreStatsService``): the longest, and how those of the last whole minute are spread.

A time is what passed from the read that brought a message until the log had it, in whole milliseconds as Java counts
them: below 1 ms is 0. The minute under way is not told; `end_minute` puts it in the place of the one before.
Loop only. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["PutTimes"]

_SPANS = {
    "[<=0ms]": 0,
    "[0~10ms]": 10,
    "[10~50ms]": 50,
    "[50~100ms]": 100,
    "[100~200ms]": 200,
    "[200~500ms]": 500,
    "[500ms~1s]": 1000,
    "[1~2s]": 2000,
    "[2~3s]": 3000,
    "[3~4s]": 4000,
    "[4~5s]": 5000,
    "[5~10s]": 10_000,
    "[10s~]": 1 << 62,
}
"""What the tools show, and the largest ms of each."""

_FINER = (1, 2, 3, 4, 5, 7, 20, 30, 70, 150, 300, 700, 20_000, 60_000)
_BOUNDS = sorted({*_SPANS.values(), *_FINER})
"""The largest ms of each bucket."""


class PutTimes:
    """Counts of puts by the ms they took. ``longest_ms`` is since the start."""

    __slots__ = ("_counts", "_last", "longest_ms")

    def __init__(self) -> None:
        self.longest_ms = 0
        self._counts = [0] * len(_BOUNDS)
        self._last = [0] * len(_BOUNDS)

    def add(self, ms: float, count: int = 1) -> None:
        """Count puts that took so long, each of them."""
        if ms < 1:
            self._counts[0] += count
            return
        self._counts[bisect_left(_BOUNDS, int(ms))] += count
        self.longest_ms = max(self.longest_ms, int(ms))

    def end_minute(self) -> None:
        """To be called every minute."""
        self._last, self._counts = self._counts, [0] * len(_BOUNDS)

    def __str__(self) -> str:
        """The last minute's puts by their time, as ``mqadmin brokerStatus`` prints it."""
        counts, at = dict.fromkeys(_SPANS, 0), 0
        names = list(_SPANS)
        for bound, count in zip(_BOUNDS, self._last, strict=True):
            at += bound > _SPANS[names[at]]
            counts[names[at]] += count
        return "".join(f"{name}:{count} " for name, count in counts.items())

    def percentile(self, part: float) -> float:
        """The ms that this part of the last minute's puts took at most, guessed within its bucket; 0 without any."""
        wanted, below, low = part * sum(self._last), 0, 0
        for bound, count in zip(_BOUNDS, self._last, strict=True):
            if count and below + count >= wanted:
                high = min(bound, max(low, self.longest_ms))
                return low + (high - low) * (wanted - below) / count
            below, low = below + count, bound
        return 0.0
