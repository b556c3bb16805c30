"""Settings of the exporter, the same for broker and name server; the names are the broker's of the reference."""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Struct

from rmqkit.settings import Setting


class ExporterType(enum.Enum):
    """Who is told the metrics."""

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
