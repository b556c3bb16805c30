"""The report of `rmq bench timer` on two small brokers."""

from __future__ import annotations

import pytest

from bench.commands import timer as timer_figures
from bench.commands.served import serve_standalone


@pytest.mark.slow
def test_every_load_is_measured_at_both_brokers(monkeypatch):
    monkeypatch.setattr(timer_figures, "DUE_SECONDS", range(1, 2))
    told = []
    with serve_standalone() as (name_server, pid):
        rows = timer_figures.measure(
            name_servers=name_server, pid=pid, pending=1000, rate=20, seconds=1, body_bytes=100, tell=told.append
        )
    assert len(told) == 5
    loads = [
        row for row in rows if row["load"] != "wheel again"
    ]  # this few messages are delivered before the first measurement
    assert [(row["load"], row["broker"], row["messages"]) for row in loads] == [
        ("sends for later", "ours", 1000),
        ("due, 20/s", "ours", 20),
        ("sends for later", "other", 1000),
        ("due, 20/s", "other", 20),
    ]
    assert all(row["broker_cpu_us"] > 0 for row in rows)
    for row in loads[1::2]:
        assert 0 <= row["error_p50_ms"] <= row["error_p99_ms"] <= row["error_max_ms"]
        assert row["seen_p50_ms"] >= row["error_p50_ms"]
        assert row["rss_growth_mb"] >= 0
