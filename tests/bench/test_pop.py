"""The bench of POP measures our broker and another one under the same loads, and leaves no message unacknowledged."""

from __future__ import annotations

import pytest

from bench.commands import pop as pop_figures
from bench.commands.served import serve_standalone


@pytest.mark.slow
def test_bench_pop_reports_both_brokers() -> None:
    said: list[str] = []
    with serve_standalone() as (name_servers, pid):
        rows = pop_figures.measure(
            name_servers=name_servers, pid=pid, messages=320, body_bytes=100, rounds=1, tell=said.append
        )
    assert [row["broker"] for row in rows] == ["ours", "other"] * 4
    *loads, ours, other = rows
    assert all(row["broker_cpu_us"] > 0 and row["messages_per_second"] > 0 for row in loads)
    ratios = [row["per_cpu_second_to_other"] for row in loads[::2]]
    costs = [row["broker_cpu_us"] for row in loads]
    assert ratios == [round(b / a, 2) for a, b in zip(costs[::2], costs[1::2], strict=True)]
    assert all(row["p50_ms"] <= row["p99_ms"] for row in (ours, other))
    assert len(said) == 3 * 3 * 2, "two warm-up cycles and one measured cycle"
