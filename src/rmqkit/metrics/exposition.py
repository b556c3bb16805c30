"""The text that Prometheus reads, written by prometheus-client, which is imported here alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rmqkit.metrics.table import TABLE, Metric
from rmqkit.metrics.values import Gathered, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(gathered: Gathered, common: Mapping[str, str]) -> bytes:
    """The values of metrics of the table as text. ``common``: labels that every sample has."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(gathered, common))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, gathered: Gathered, common: Mapping[str, str]) -> None:
        self._gathered = gathered
        self._common = common

    def collect(self) -> Iterable[Family]:
        metrics = {metric.name: metric for metric in TABLE}
        return (self._family(metrics[name], values) for name, values in sorted(self._gathered.items()) if values)

    def _family(self, metric: Metric, values: Mapping[tuple[str, ...], float | Histogram]) -> Family:
        name = metric.exposed_name
        family = Family(name.removesuffix("_total"), metric.help, metric.kind.value)
        for texts, value in values.items():
            labels = {**self._common, **dict(zip(metric.labels, texts, strict=True))}
            if isinstance(value, Histogram):
                for suffix, bound, number in _samples(value):
                    family.add_sample(f"{name}_{suffix}", {**labels, **bound}, number)
            else:
                family.add_sample(name, labels, value)
        return family


def _samples(value: Histogram) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of a histogram: cumulated buckets, the count, the sum."""
    count = 0
    for bound, added in zip((*map(str, value.bounds), "+Inf"), value.counts, strict=True):
        count += added
        yield "bucket", {"le": bound}, count
    yield "count", {}, count
    yield "sum", {}, value.sum
