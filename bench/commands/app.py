"""The commands of ``rmq bench``, and how their figures are printed."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rmqkit.errors import SettingsError

_WIDTH = 120


app = typer.Typer(
    name="bench",
    help="Measure performance. Every command can print JSON, too.",
    no_args_is_help=True,
    add_completion=False,
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def start(
    runs: Annotated[int, typer.Option(min=1, help="Number of starts of each process.")] = 5,
    brokers: Annotated[
        int, typer.Option(min=1, help="Number of test brokers to start, one at a time and eight at a time.")
    ] = 100,
    as_json: _Json = False,
) -> None:
    """Measure how long servers take to start, as processes and as brokers of the pytest plugin, and their memory."""
    from bench.commands import start as start_figures

    logging.getLogger("rmqkit").setLevel(logging.ERROR)  # the log lines of servers are not useful here
    figures = start_figures.measure(runs=runs, brokers=brokers)
    _report("start", {"runs": runs, "brokers": brokers}, figures, as_json)


@app.command()
def wire(
    connections: Annotated[int, typer.Option(min=1, help="Number of idle connections to hold.")] = 10_000,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests over sockets.")] = 100_000,
    as_json: _Json = False,
) -> None:
    """Measure the server CPU time of encoding and decoding commands, and of requests over sockets."""
    from bench.commands import wire as wire_figures

    wire_figures.allow_connections()
    figures = wire_figures.measure(connections=connections, requests=requests)
    _report("wire", {"connections": connections, "requests": requests}, figures, as_json)


@app.command()
def store(
    messages: Annotated[int, typer.Option(min=256, help="Number of messages per round.")] = 50_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Body size in bytes.")] = 1024,
    directory: Annotated[Path | None, typer.Option(help="Directory for temporary files. (default: $TMPDIR)")] = None,
    as_json: _Json = False,
) -> None:
    """Measure how many messages per second the store writes, dispatches, reads and recovers, beside a naive store."""
    from bench.commands import store as store_figures

    logging.getLogger("rmqkit").setLevel(logging.ERROR)  # the warnings of recovery and of the pool are expected here
    figures = store_figures.measure(messages=messages, body_bytes=body_bytes, directory=directory)
    _report("store", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


@app.command()
def broker(
    namesrv: Annotated[
        str | None, typer.Option(help="Name servers of the broker to measure. (default: start a broker)")
    ] = None,
    pid: Annotated[
        int | None, typer.Option(help="Process id of that broker, to measure its CPU time and memory.")
    ] = None,
    messages: Annotated[int, typer.Option(min=1000, help="Number of messages per load.")] = 50_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Body size in bytes.")] = 1024,
    as_json: _Json = False,
) -> None:
    """Measure the CPU time of sends and pulls in the broker, and the latency of long polls, for any broker.

    The load is a Python program. To compare with Apache's broker under the same Java load, run `make bench T=broker`.
    """
    from bench.commands import broker as broker_figures

    figures = broker_figures.measure(name_servers=namesrv, pid=pid, messages=messages, body_bytes=body_bytes)
    _report("broker", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


@app.command()
def pop(
    namesrv: Annotated[str | None, typer.Option(help="Name servers of another broker, to measure it, too.")] = None,
    pid: Annotated[
        int | None, typer.Option(help="Process id of that broker, to measure its CPU time and memory.")
    ] = None,
    messages: Annotated[int, typer.Option(min=1000, help="Number of messages per load.")] = 20_000,
    body_bytes: Annotated[int, typer.Option(min=1, max=1 << 20, help="Body size in bytes.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Number of measured rounds.")] = 5,
    as_json: _Json = False,
) -> None:
    """Measure the CPU time of pops and acks in the broker, and the latency of a pop, compared with another broker.

    `make bench T=pop` measures Apache's broker in the same run.
    """
    from bench.commands import pop as pop_figures

    figures = pop_figures.measure(
        name_servers=namesrv,
        pid=pid,
        messages=messages,
        body_bytes=body_bytes,
        rounds=rounds,
        tell=lambda text: typer.echo(text, err=True),
    )
    _report("pop", {"messages": messages, "body_bytes": body_bytes, "rounds": rounds}, figures, as_json)


@app.command()
def timer(
    namesrv: Annotated[str | None, typer.Option(help="Name servers of another broker, to measure it, too.")] = None,
    pid: Annotated[
        int | None, typer.Option(help="Process id of that broker, to measure its CPU time and memory.")
    ] = None,
    pending: Annotated[
        int, typer.Option(min=1000, help="Number of messages that are pending all the time.")
    ] = 1_000_000,
    rate: Annotated[int, typer.Option(min=10, help="Number of messages that become due per second.")] = 1000,
    seconds: Annotated[int, typer.Option(min=1, help="Seconds during which messages become due.")] = 30,
    body_bytes: Annotated[int, typer.Option(min=17, max=1 << 20, help="Body size in bytes.")] = 100,
    as_json: _Json = False,
) -> None:
    """Measure how late timed messages are while many wait, with CPU time and memory, compared with another broker.

    `make bench T=timer` measures Apache's broker in the same run.
    """
    from bench.commands import timer as timer_figures

    settings = {"pending": pending, "rate": rate, "seconds": seconds, "body_bytes": body_bytes}
    figures = timer_figures.measure(
        name_servers=namesrv, pid=pid, **settings, tell=lambda text: typer.echo(text, err=True)
    )
    _report("timer", settings, figures, as_json)


@app.command()
def client(
    namesrv: Annotated[
        str | None, typer.Option(help="Name servers of the broker to measure. (default: start a broker)")
    ] = None,
    messages: Annotated[int, typer.Option(min=100, help="Number of messages per round.")] = 30_000,
    body_bytes: Annotated[int, typer.Option(min=100, max=1 << 20, help="Body size in bytes.")] = 1024,
    as_json: _Json = False,
) -> None:
    """Measure the CPU time of a client that sends and consumes, the latency through the broker, and import times."""
    from bench.commands import client as client_figures

    figures = client_figures.measure(name_servers=namesrv, messages=messages, body_bytes=body_bytes)
    _report("client", {"messages": messages, "body_bytes": body_bytes}, figures, as_json)


@app.command()
def spark(
    mib: Annotated[int, typer.Option(min=1, help="Size of the log in MiB, with bodies of 1 KiB.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Number of measured rounds.")] = 3,
    only: Annotated[str, typer.Option(help="Rows to measure, such as 1,3,6. (default: all)")] = "",
    max_gib: Annotated[int, typer.Option(min=1, max=64, help="Size of the log in row 7, in GiB.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="The same as --mib 256 --max-gib 2.")] = False,
    directory: Annotated[Path | None, typer.Option(help="Directory for temporary files. (default: $TMPDIR)")] = None,
    as_json: _Json = False,
) -> None:
    """Measure the CPU time of the Spark pipeline, compared with other ways to do the same."""
    from bench.commands import spark as spark_figures

    if quick:
        mib, max_gib = 256, 2
    names = [str(row) for row in spark_figures.ROWS]
    chosen = only.split(",") if only else names
    if wrong := [row for row in chosen if row not in names]:
        raise SettingsError(f"--only {only}: there is no row {wrong[0]!r}: give some of {','.join(names)}")
    before = os.getloadavg()[0]
    figures = spark_figures.measure(
        mib=mib,
        repeats=repeats,
        rows=[int(row) for row in chosen],
        gib=max_gib,
        directory=directory,
        tell=lambda text: typer.echo(text, err=True),
    )
    load = f"{before:.1f} to {os.getloadavg()[0]:.1f}"
    if not as_json:
        figures = [
            {name: value for name, value in one.items() if not name.endswith(("_median", "_s_min"))} for one in figures
        ]
    _report("spark", {"mib": mib, "repeats": repeats, "max_gib": max_gib, "load_average": load}, figures, as_json)


@app.command()
def console(
    topics: Annotated[int, typer.Option(min=1, help="Number of topics, with 4 queues each.")] = 1_000,
    groups: Annotated[int, typer.Option(min=1, help="Number of groups, each reading 5 topics.")] = 200,
    messages: Annotated[
        int, typer.Option(min=1_000, help="Number of messages in the topic that is searched.")
    ] = 1_000_000,
    asks: Annotated[int, typer.Option(min=1, help="Number of requests for each list page.")] = 50,
    pages: Annotated[int, typer.Option(min=1, max=100, help="Number of open pages.")] = 50,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long pages are open.")] = 20.0,
    pairs: Annotated[
        int, typer.Option(min=2, help="Number of rounds of sends with a console, and of those without.")
    ] = 20,
    as_json: _Json = False,
) -> None:
    """Measure the web console: list pages, rounds of its watcher, searches, open pages, and its cost to the broker."""
    from bench.commands import console as console_figures

    settings: dict[str, Any] = {"topics": topics, "groups": groups, "messages": messages, "asks": asks, "pages": pages}
    settings |= {"seconds": seconds, "pairs": pairs}
    figures = console_figures.measure(**settings, tell=lambda text: typer.echo(text, err=True))
    if not as_json:
        figures = [
            one | {"more": " ".join(f"{name}={value}" for name, value in one["more"].items())} for one in figures
        ]
    _report("console", settings, figures, as_json)


def _report(bench: str, settings: dict[str, Any], figures: list[dict[str, Any]], as_json: bool) -> None:
    """Print figures as JSON, or as a table with one row each."""
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
