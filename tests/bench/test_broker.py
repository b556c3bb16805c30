"""The broker's bench reports its measurements, of a broker that it starts and of any other broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RMQ = Path(sys.executable).with_name("rmq")


@pytest.mark.slow
def test_bench_broker_prints_every_load_as_json() -> None:
    command = [RMQ, "bench", "broker", "--messages", "1000", "--body-bytes", "100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["bench"], told["messages"], told["body_bytes"]) == ("broker", 1000, 100)
    *sends, batches, backlog, held, alone, crowded = told["figures"]
    assert [figure["messages"] for figure in sends] == [100, 500, 1000, 1000]
    assert (batches["messages"], backlog["messages"]) == (992, 100 + 500 + 1000 + 1000 + 992)
    assert held["p50_ms"] <= held["p99_ms"]
    assert alone["messages"] == crowded["messages"] == 1000
    assert "10,000 pulls of 1,000 groups" in crowded["load"]
    assert all(figure["messages_per_second"] > 0 and figure["broker_cpu_us"] > 0 for figure in told["figures"])


def test_a_broker_that_is_not_there_is_reported_in_one_line() -> None:
    command = [RMQ, "bench", "broker", "--namesrv", "127.0.0.1:1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
