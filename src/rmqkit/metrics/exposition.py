"""The exporter's settings, the same for broker and name server, and the text that Prometheus reads."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from msgspec import Struct

from rmqkit.metrics.counters import TABLE, Gathered, Histogram, Metric
from rmqkit.settings import Setting

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(gathered: Gathered, common: Mapping[str, str]) -> bytes:
    """The values of metrics of the table as text. ``common``: labels that every sample has."""
    # Only a process that has an exporter imports it: a broker starts and stays smaller without.
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector

    def family(metric: Metric, values: Mapping[tuple[str, ...], float | Histogram]) -> Family:
        name = metric.exposed_name
        made = Family(name.removesuffix("_total"), metric.help, metric.kind.value)
        for texts, value in values.items():
            labels = {**common, **dict(zip(metric.labels, texts, strict=True))}
            if isinstance(value, Histogram):
                for suffix, bound, number in _samples(value):
                    made.add_sample(f"{name}_{suffix}", {**labels, **bound}, number)
            else:
                made.add_sample(name, labels, value)
        return made

    class Families(Collector):
        def collect(self) -> Iterable[Family]:
            metrics = {metric.name: metric for metric in TABLE}
            return (family(metrics[name], values) for name, values in sorted(gathered.items()) if values)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    return generate_latest(registry)


def _samples(value: Histogram) -> Iterator[tuple[str, dict[str, str], float]]:
    """The samples of a histogram: cumulated buckets, the count, the sum."""
    count = 0
    for bound, added in zip((*map(str, value.bounds), "+Inf"), value.counts, strict=True):
        count += added
        yield "bucket", {"le": bound}, count
    yield "count", {}, count
    yield "sum", {}, value.sum


class ExporterType(enum.Enum):
    """Who may read the metrics."""

    DISABLE = "DISABLE"
    PROM = "PROM"


class MetricLabels(str):
    """Labels that every sample gets: ``name:value,name:value``. Raises ValueError: a pair is not of that form."""

    __slots__ = ()

    def __new__(cls, text: str = "") -> MetricLabels:
        for pair in filter(None, text.split(",")):
            name, colon, value = pair.partition(":")
            if not (colon and value and name.isidentifier() and name.isascii()):
                raise ValueError(f"{pair!r} is not of the form name:value")
        return super().__new__(cls, text)

    @property
    def pairs(self) -> dict[str, str]:
        return dict(pair.split(":", 1) for pair in self.split(",") if pair)


class ExporterSettings(Struct, kw_only=True):
    """What a configuration file may say about metrics."""

    exporter_type: Annotated[
        ExporterType, Setting("metricsExporterType", "who is told the metrics: nobody, or Prometheus")
    ] = ExporterType.DISABLE
    exporter_port: Annotated[
        int, Setting("metricsPromExporterPort", "port that Prometheus reads, 0 for a free one", low=0, high=65535)
    ] = 5557
    exporter_host: Annotated[str, Setting("metricsPromExporterHost", "address of that port; default: bindAddress")] = ""
    metric_labels: Annotated[
        MetricLabels, Setting("metricsLabel", "labels of every sample, as name:value,name:value")
    ] = MetricLabels()


EXPORTER_PROMISES = {"metricsInDelta": ("false",)}
"""Prometheus reads sums, never differences."""

EXPORTERS_WITHOUT_EFFECT = frozenset(
    """
    metricsGrpcExporterTarget metricsGrpcExporterHeader metricGrpcExporterTimeOutInMills metricsOtelCardinalityLimit
    metricGrpcExporterIntervalInMills metricLoggingExporterIntervalInMills
    """.split()
)
"""Keys of exporters that are not here."""
