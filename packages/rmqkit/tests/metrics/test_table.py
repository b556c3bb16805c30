"""The table of metrics: it is consistent, and equals the metrics of the code and of the reference page."""

from __future__ import annotations

import re

from rmqkit.metrics import TABLE, Kind
from tests.sources import ROOT, modules

NAME = re.compile(r'"((?:rocketmq|rmqkit)_[a-z0-9_]+)"')


def test_names_are_there_once_and_say_their_kind():
    assert len({metric.exposed_name for metric in TABLE}) == len(TABLE)
    for metric in TABLE:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.unit in ("", "milliseconds", "seconds", "bytes"), metric.name
        assert metric.help, metric.name
        assert list(metric.buckets) == sorted(metric.buckets), metric.name


def test_what_the_code_reports_is_in_the_table_and_what_is_in_the_table_is_reported():
    sources = [path for path in modules() if "protocol" not in path.parts]
    told = {name for path in sources for name in NAME.findall(path.read_text(encoding="utf-8"))}
    assert told == {metric.name for metric in TABLE if not metric.absent}


def test_every_metric_is_on_the_reference_page():
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        assert f"| `{metric.exposed_name}` | {metric.kind.value} | {labels} | {metric.absent or metric.help} |" in page
