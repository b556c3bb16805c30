"""What metrics count with: histograms that cost one bisection, and answers by request and response code.

Nothing here knows a label's text: keys are what is at hand where something is counted; texts are made when the values
are read. One thread writes a value, any may read it. Source: behaviour.md §9.10.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from enum import IntEnum
from operator import mul

from rmqkit.metrics.table import TABLE
from rmqkit.protocol.codes import RequestCode, ResponseCode


class Histogram:
    """How many values there were up to each bound. ``counts`` has one more, for those above all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value that occurred so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many values at once: in their order, one bisection for each bucket that has some."""
        in_order, counts, counted = sorted(values), self.counts, 0
        while counted < len(in_order):
            bucket = bisect_left(self.bounds, in_order[counted])
            until = len(in_order) if bucket == len(self.bounds) else bisect_right(in_order, self.bounds[bucket])
            counts[bucket] += until - counted
            counted = until
        self.sum += sum(values)

    def observe_each(self, values: Sequence[float], counts: Sequence[int]) -> None:
        """Count values that occurred so many times each: at once where they are of one bucket, as they mostly are."""
        if not values:
            return
        bucket = bisect_left(self.bounds, min(values))
        if bucket == len(self.bounds) or max(values) <= self.bounds[bucket]:
            self.counts[bucket] += sum(counts)
            self.sum += sum(map(mul, values, counts))
        else:
            for value, count in zip(values, counts, strict=True):
                self.observe(value, count)


Gathered = dict[str, Mapping[tuple[str, ...], "float | Histogram"]]
"""Metric name → label values in the table's order → value."""

_BOUNDS = {metric.name: metric.buckets for metric in TABLE}


def histogram(name: str) -> Histogram:
    """An empty histogram with a metric's buckets."""
    return Histogram(_BOUNDS[name])


_POLLS = frozenset((RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE))


class RpcLatency(dict[tuple[int, int, bool, str], Histogram]):
    """``rocketmq_rpc_latency``: request code, response code, whether the answer was held, how it was sent → times in
    ms. Codes that nobody knows come from peers: beyond `_KEYS_MAX` combinations they count as code -1."""

    _KEYS_MAX = 2048

    def __missing__(self, key: tuple[int, int, bool, str]) -> Histogram:
        if len(self) >= self._KEYS_MAX:
            key = -1, *key[1:]
        return self.setdefault(key, histogram("rocketmq_rpc_latency"))

    def gather(self) -> dict[tuple[str, ...], float | Histogram]:
        """The table with texts. Held pulls are long polls; other answers that were held merely waited."""
        gathered: dict[tuple[str, ...], float | Histogram] = {}
        for (code, response_code, is_held, result), found in self.items():
            is_poll = "true" if is_held and code in _POLLS else "false"
            labels = "remoting", _name(RequestCode, code), _name(ResponseCode, response_code), is_poll, result
            known = gathered.setdefault(labels, histogram("rocketmq_rpc_latency"))
            assert isinstance(known, Histogram), "all of this table are"
            known.counts = [a + b for a, b in zip(known.counts, found.counts, strict=True)]
            known.sum += found.sum
        return gathered


def _name(codes: type[IntEnum], code: int) -> str:
    """A code as a label, as a number where it has no name."""
    try:
        return codes(code).name.lower()
    except ValueError:
        return "other" if code < 0 else str(code)
