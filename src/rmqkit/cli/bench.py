"""``rmq bench``: measurements a person reads as a table and a program as JSON."""

from __future__ import annotations

import json
import logging
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rmqkit.errors import RmqError

__all__ = ["app"]

_READY_SECONDS_MAX = 30.0
_IDLE_SECONDS = 1.0
_WIDTH = 120

BUDGETS = {"standalone": (500, 80), "broker": (400, 80), "namesrv": (400, 80)}
"""Process → ms until ready, MiB resident when idle. Source: design.md §1, promise 7."""


app = typer.Typer(name="bench", help="Measure; every figure also as JSON.", no_args_is_help=True, add_completion=False)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def start(
    runs: Annotated[int, typer.Option(min=1, help="Starts of each process.")] = 5, as_json: _Json = False
) -> None:
    """How long standalone, broker and name server take until ready, and their memory when idle."""
    _report("start", {"runs": runs}, [_measure(kind, runs) for kind in BUDGETS], as_json)


@app.command()
def wire(
    connections: Annotated[int, typer.Option(min=1, help="Idle connections to hold.")] = 10_000,
    requests: Annotated[int, typer.Option(min=1, help="Requests through sockets.")] = 100_000,
    as_json: _Json = False,
) -> None:
    """What commands cost to read and write, and requests through sockets; server CPU, not wall time."""
    from rmqkit.cli import wire_figures

    wire_figures.allow_connections()
    figures = wire_figures.measure(connections=connections, requests=requests)
    _report("wire", {"connections": connections, "requests": requests}, figures, as_json)


@app.command()
def store(
    messages: Annotated[int, typer.Option(min=256, help="Messages of a round.")] = 50_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Bytes of a body.")] = 1024,
    directory: Annotated[Path | None, typer.Option(help="Where the files lie meanwhile. [default: $TMPDIR]")] = None,
    as_json: _Json = False,
) -> None:
    """What the store puts, dispatches, reads and recovers in a second, beside the naive way to do the same."""
    from rmqkit.cli import store_figures

    logging.getLogger("rmqkit").setLevel(logging.ERROR)  # what recovery and the pool warn of is wanted here
    figures = store_figures.measure(messages=messages, body_bytes=body_bytes, directory=directory)
    _report("store", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


@app.command()
def broker(
    namesrv: Annotated[str | None, typer.Option(help="Name servers of the broker. [default: starts one]")] = None,
    pid: Annotated[int | None, typer.Option(help="Process of that broker, to tell what it costs.")] = None,
    messages: Annotated[int, typer.Option(min=1000, help="Messages of a load.")] = 50_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Bytes of a body.")] = 1024,
    as_json: _Json = False,
) -> None:
    """What sends and pulls cost the broker's process, and how long held pulls take; ours, or any (Apache's, too).

    The load is Python. A checkout's make bench-broker puts ours and Apache's under the same Java load in one run.
    """
    from rmqkit.cli import broker_figures

    figures = broker_figures.measure(name_servers=namesrv, pid=pid, messages=messages, body_bytes=body_bytes)
    _report("broker", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


@app.command()
def client(
    namesrv: Annotated[str | None, typer.Option(help="Name servers of the broker. [default: starts one]")] = None,
    messages: Annotated[int, typer.Option(min=100, help="Messages of a round.")] = 30_000,
    body_bytes: Annotated[int, typer.Option(min=100, max=1 << 20, help="Bytes of a body.")] = 1024,
    as_json: _Json = False,
) -> None:
    """What sending and consuming cost the client's process, latency through the broker, import times."""
    from rmqkit.cli import client_figures

    figures = client_figures.measure(name_servers=namesrv, messages=messages, body_bytes=body_bytes)
    _report("client", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


def _measure(kind: str, runs: int) -> dict[str, Any]:
    ready_ms, rss_mib = zip(*(_start_once(kind) for _ in range(runs)), strict=True)
    ready_ms_budget, rss_mib_budget = BUDGETS[kind]
    return {
        "process": kind,
        "ready_ms_min": round(min(ready_ms), 1),
        "ready_ms_median": round(statistics.median(ready_ms), 1),
        "ready_ms_max": round(max(ready_ms), 1),
        "ready_ms_budget": ready_ms_budget,
        "idle_rss_mib_max": round(max(rss_mib), 1),
        "idle_rss_mib_budget": rss_mib_budget,
    }


def _start_once(kind: str) -> tuple[float, float]:
    """Milliseconds from process start to the ready line, and MiB resident a second later."""
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


def _resident_mib(pid: int) -> float:
    """Resident memory without file pages: what mapped logs keep in the page cache does not count."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) / 1024


def _report(bench: str, settings: dict[str, Any], figures: list[dict[str, Any]], as_json: bool) -> None:
    """Figures as JSON, or as a table with one row each."""
    if as_json:
        machine = {"machine": platform.machine(), "python": platform.python_version(), "cpus": os.cpu_count()}
        print(json.dumps({"bench": bench, **settings, **machine, "figures": figures}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"bench {bench}: " + ", ".join(f"{value} {name}" for name, value in settings.items()))
    headings = list(dict.fromkeys(heading for figure in figures for heading in figure))
    for i, heading in enumerate(headings):
        table.add_column(heading.replace("_", " "), justify="right" if i else "left", no_wrap=not i)
    for figure in figures:
        values = (figure.get(heading, "") for heading in headings)
        table.add_row(*(f"{value:,}" if isinstance(value, int | float) else str(value) for value in values))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)
