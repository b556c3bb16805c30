"""The start times of servers, as processes and as fixtures of tests, and their memory."""

from __future__ import annotations

import gc
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rmqkit.errors import RmqError

__all__ = ["measure"]

_READY_SECONDS_MAX = 30.0
_IDLE_SECONDS = 1.0
_BUDGETS = {"standalone": (500, 80), "broker": (400, 80), "namesrv": (400, 80)}
"""Process → ms until ready, MiB resident when idle."""
_TEST_BROKER_MS_BUDGET = 200
_AT_A_TIME = 8


def measure(*, runs: int, brokers: int) -> list[dict[str, Any]]:
    """Return one row per kind of process, started ``runs`` times, then rows of ``rmqkit.testing``'s brokers, alone and
    many at once.
    Raises RmqError: a process does not become ready."""
    return [*(_measure_process(kind, runs) for kind in _BUDGETS), *_measure_test_brokers(brokers)]


def _ready(name: str, ready_ms: list[float], budget: int) -> dict[str, Any]:
    p99 = max(ready_ms) if len(ready_ms) < 2 else statistics.quantiles(ready_ms, n=100, method="inclusive")[98]
    times = {"min": min(ready_ms), "p50": statistics.median(ready_ms), "p99": p99}
    return {"ready": name} | {f"ms_{at}": round(ms, 1) for at, ms in times.items()} | {"ms_budget": budget}


def _measure_process(kind: str, runs: int) -> dict[str, Any]:
    ready_ms, rss_mib = zip(*(_start_once(kind) for _ in range(runs)), strict=True)
    ready_ms_budget, rss_mib_budget = _BUDGETS[kind]
    memory = {"rss_mib": round(max(rss_mib), 1), "rss_budget": rss_mib_budget}
    return _ready(kind, [*ready_ms], ready_ms_budget) | memory


def _start_once(kind: str) -> tuple[float, float]:
    """Return milliseconds from process start to the ready line, and MiB resident a second later."""
    with tempfile.TemporaryDirectory(prefix="rmq-bench-") as folder:
        command = [sys.executable, "-m", "rmqkit", kind, "--host", "127.0.0.1", "--port", "0"]
        if kind == "standalone":
            command += ["--namesrv-port", "0"]
        if kind != "namesrv":
            command += ["--store", str(Path(folder) / "store")]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            ready_ms = _wait_ready(process, started)
            time.sleep(_IDLE_SECONDS)
            return ready_ms, _resident_mib(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=_READY_SECONDS_MAX)


def _wait_ready(process: subprocess.Popen[str], started: float) -> float:
    assert process.stdout is not None, "stdout is piped"
    readable, _, _ = select.select([process.stdout], [], [], _READY_SECONDS_MAX)
    line = process.stdout.readline() if readable else ""
    if not line.startswith("ready "):
        process.kill()
        _, errors = process.communicate()
        raise RmqError(f"{' '.join(process.args[2:])} did not become ready: {errors.strip() or line!r}")  # type: ignore[arg-type, index]
    return (time.perf_counter() - started) * 1000


def _measure_test_brokers(count: int) -> list[dict[str, Any]]:
    """Measure test brokers: one after the other, eight in parallel, and all, eight at a time."""
    from rmqkit.testing import LocalCluster

    def start_once(_: int) -> float:
        started = time.perf_counter()
        with LocalCluster():
            return (time.perf_counter() - started) * 1000

    with LocalCluster():  # includes the imports
        alone_mib = _resident_mib("self")
        further = [LocalCluster().start() for _ in range(_AT_A_TIME)]
        each_mib = (_resident_mib("self") - alone_mib) / _AT_A_TIME
        for cluster in further:
            cluster.close()
    alone = [start_once(number) for number in range(count)]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        list(pool.map(start_once, range(_AT_A_TIME)))
        before = _held()
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        started = time.perf_counter()
        crowded = list(pool.map(start_once, range(count)))
        seconds = time.perf_counter() - started
        left = {name: now - before[name] for name, now in _held().items()}
    peak_mib = round(_resident_mib("self", "VmHWM"), 1)
    return [
        _ready("test broker", alone, _TEST_BROKER_MS_BUDGET) | {"rss_mib": round(each_mib, 1)},
        _ready(f"{count} of them, {_AT_A_TIME} at a time", crowded, _TEST_BROKER_MS_BUDGET)
        | {"rss_peak": peak_mib, "seconds": round(seconds, 2)}
        | left,
    ]


def _held() -> dict[str, int]:
    gc.collect()
    return {"threads_left": threading.active_count(), "files_left": len([*Path("/proc/self/fd").iterdir()])}


def _resident_mib(pid: int | str, field: str = "VmRSS") -> float:
    """Return the resident memory of a process, including pages of mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields[field].split()[0]) / 1024
