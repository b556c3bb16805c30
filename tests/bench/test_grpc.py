"""The bench of gRPC measures a broker's endpoint and a proxy, and leaves no process running."""

from __future__ import annotations

import pytest

from bench.grpc_bench import parsed, ratios, run


@pytest.mark.slow
def test_bench_grpc_reports_every_load() -> None:
    short = (
        "--without-apache --messages 64 --rounds 1 --warm-ups 0 --latencies 2 --held 20 --held-seconds 0.1 --starts 1"
    )
    told = run(parsed(short.split()))
    figures = told["figures"]
    assert list(figures) == ["send", "receive and ack", "one message", "held receives"]
    assert all(list(by_name) == ["ours", "rmq proxy"] for by_name in figures.values())
    for what in ("send", "receive and ack"):
        assert all(one["messages_per_second"] > 0 for one in figures[what].values())
    assert all(one["p50_ms"] > 0 for one in figures["one message"].values())
    assert sorted(told["ready_ms"]) == ["with gRPC", "without"]
    assert told["ratios"] == {}, "no second broker runs for comparison"


def test_ratios_say_how_many_times_better_ours_is() -> None:
    cpu = {"ours": {"cpu_us": 100.0}, "apache": {"cpu_us": 250.0}}
    time = {"ours": {"p50_ms": 1.0}, "apache": {"p50_ms": 4.0}}
    assert ratios({"send": cpu, "receive and ack": cpu, "one message": time}) == {
        "send: messages per CPU second, to Apache's": {"ours": 2.5},
        "receive and ack: messages per CPU second, to Apache's": {"ours": 2.5},
        "one message: time, to Apache's": {"ours": 0.25},
    }
