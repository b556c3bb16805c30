"""``rmq top``: the load of a cluster, on a screen that is updated regularly, or as JSON lines.

`screen` returns the text of one report for a width and height. Long names lose their middle; numbers are never cut. An
extra line has the number of rows that do not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import shutil
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from rmqkit.admin.cluster.clusters import BrokerRow
from rmqkit.admin.diagnosis.top import GroupRow, Report, Sampler, Snapshot, TopicRow, compare
from rmqkit.admin.messages.sending import Stop
from rmqkit.cli import with_options
from rmqkit.cli.frame.connected import run
from rmqkit.cli.frame.nouns import COMMON, LOCAL, admin_of
from rmqkit.cli.frame.printing import clip, fitting
from rmqkit.errors import RmqError
from rmqkit.sentences import plain

app = typer.Typer(name="top", add_completion=False)

_WINDOW_MS = 10_000
_SAMPLES_MAX = 128
_GAP = "  "
_pause = asyncio.sleep


class Sort(enum.Enum):
    """The column by which rows are sorted: the largest value first, names from A to Z."""

    LAG = "lag"
    AGE = "age"
    IN = "in"
    OUT = "out"
    NAME = "name"


_KEYS = {sort.value[0]: sort for sort in Sort}
_HELP = "sort: l lag, a age, i in, o out, n name · q quits"


@app.command()
@with_options(COMMON)
def top(
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Seconds between two reports.")
    ] = 2.0,
    sort: Annotated[Sort, typer.Option(help="Sort rows by this.")] = Sort.LAG,
    once: Annotated[bool, typer.Option("--once", help="Print one report, then exit.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Show system topics, too.")] = False,
    **options: Any,
) -> None:
    """Show live how busy brokers, topics and groups are: rates, lags, members, disks.

    Rates cover the last 10 seconds: messages stored, and messages that groups have committed. The age of a lag is the
    time since its oldest message was stored. Keys change the sorting, q quits. With --json, or without a terminal, it
    prints a report every interval. With --once, it measures for one interval, prints one report and exits."""
    is_screen = sys.stdout.isatty() and not once and not options["as_json"]
    where = options["name_servers"] or LOCAL

    async def work(stop: Stop) -> None:
        async with admin_of(options) as admin:
            reports = _reports(Sampler(admin), interval_s, system=system)
            if is_screen:
                await _draw(reports, where, sort)
                return
            async for report in reports:
                if isinstance(report, RmqError):
                    raise report
                if options["as_json"]:
                    print(msgspec.json.encode(sorted_by(report, sort), enc_hook=plain).decode(), flush=True)
                else:
                    columns = shutil.get_terminal_size().columns
                    print(screen(report, sort, where=where, columns=columns), flush=True)
                if once:
                    return

    run(work)


async def _reports(sampler: Sampler, interval_s: float, *, system: bool) -> AsyncIterator[Report | RmqError]:
    """Yield a report or an error every ``interval_s`` seconds. A report covers `_WINDOW_MS`, at least two samples."""
    samples: deque[Snapshot] = deque(maxlen=_SAMPLES_MAX)
    while True:
        try:
            samples.append(await sampler.look())
        except RmqError as error:
            yield error
        else:
            while len(samples) > 2 and samples[-1].monotonic_ms - samples[1].monotonic_ms >= _WINDOW_MS:
                samples.popleft()
            if len(samples) > 1:
                yield compare(samples[0], samples[-1], system=system)
        await _pause(interval_s)


async def _draw(reports: AsyncIterator[Report | RmqError], where: str, sort: Sort) -> None:
    """Redraw the screen with each report and each key, until ``q``. While no name server answers, the last line has the
    error. Raises RmqError: no name server answers at the start."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    shown: Report | None = None
    trouble = ""
    pressed: asyncio.Queue[str] = asyncio.Queue()

    def draw() -> None:
        size = shutil.get_terminal_size()
        if shown is None:
            text = f"rmq top: looking at {where}; rates need a second look"
        else:
            text = screen(shown, sort, where=where, columns=size.columns, lines=size.lines, note=trouble or _HELP)
        live.update(Text(text, no_wrap=True), refresh=True)

    with _keys(pressed.put_nowait), Live(console=console, screen=True, auto_refresh=False) as live:
        draw()
        asking = asyncio.ensure_future(anext(reports))
        reading = asyncio.ensure_future(pressed.get())
        try:
            while True:
                done, _ = await asyncio.wait([asking, reading], return_when=asyncio.FIRST_COMPLETED)
                if asking in done:
                    trouble, found = "", asking.result()
                    if not isinstance(found, RmqError):
                        shown = found
                    elif shown is None:
                        raise found
                    else:
                        trouble = str(found)
                    asking = asyncio.ensure_future(anext(reports))
                if reading in done:
                    key = reading.result()
                    if key == "q":
                        return
                    sort = _KEYS.get(key, sort)
                    reading = asyncio.ensure_future(pressed.get())
                draw()
        finally:
            asking.cancel()
            reading.cancel()
            await asyncio.wait([asking, reading])


@contextlib.contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call a function with each pressed key. Without a terminal, and on Windows, there are no keys."""
    try:
        import termios
        import tty
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def read() -> None:
        for key in os.read(descriptor, 64).decode("ascii", "ignore"):
            press(key)

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# ---------------------------------------------------------------- text


def sorted_by(report: Report, sort: Sort) -> Report:
    """Return the report with sorted rows; equal rows stay sorted by name."""
    group_key: dict[Sort, Callable[[GroupRow], float]] = {
        Sort.LAG: lambda row: row.lag,
        Sort.AGE: lambda row: row.age_ms or 0,
        Sort.IN: lambda row: row.out_per_second or 0,
        Sort.OUT: lambda row: row.out_per_second or 0,
        Sort.NAME: lambda row: 0,
    }
    topic_key: dict[Sort, Callable[[TopicRow], float]] = {
        Sort.LAG: lambda row: row.in_per_second or 0,
        Sort.AGE: lambda row: row.in_per_second or 0,
        Sort.IN: lambda row: row.in_per_second or 0,
        Sort.OUT: lambda row: row.out_per_second or 0,
        Sort.NAME: lambda row: 0,
    }
    return msgspec.structs.replace(
        report,
        topics=sorted(report.topics, key=topic_key[sort], reverse=True),
        groups=sorted(report.groups, key=group_key[sort], reverse=True),
    )


def screen(
    report: Report, sort: Sort, *, where: str = LOCAL, columns: int = 80, lines: int | None = None, note: str = ""
) -> str:
    """Return the text of a report with at most ``lines`` lines of ``columns`` characters; ``note`` is the last line."""
    report = sorted_by(report, sort)
    moment = datetime.fromtimestamp(report.time_ms / 1000)
    head = f"rmq top · {moment:%H:%M:%S} · rates of {report.span_ms / 1000:.1f} s · by {sort.value} · {where}"
    tables = [
        ("BROKER ADDRESS IN/S OUT/S DISK OLDEST".split(), 2, [_broker(row) for row in report.brokers]),
        ("TOPIC IN/S OUT/S STORED GROUPS".split(), 1, [_topic(row) for row in report.topics]),
        ("GROUP TOPIC OUT/S LAG AGE MEMBERS".split(), 2, [_group(row) for row in report.groups]),
    ]
    texts = [clip(head, columns)]
    room = None if lines is None else lines - 1 - bool(note)
    counts = _shares([len(rows) for _, _, rows in tables], None if room is None else room - 2 * len(tables))
    for (headings, names, rows), count in zip(tables, counts, strict=True):
        if not rows:
            continue
        texts += ["", *_table(headings, names, rows, count, columns)]
    if lines is not None:  # the note is in the last line of the screen
        texts = [*texts, *[""] * lines][: lines - bool(note)]
    return "\n".join([*texts, *([clip(note, columns)] if note else [])])


def _broker(row: BrokerRow) -> list[str]:
    name = f"{row.broker_name}:{row.broker_id}" if row.broker_id else row.broker_name
    if row.trouble:
        return [name, row.addr, "", "", "", "away"]
    oldest = _span(int(row.earliest_hours * 3_600_000))
    return [name, row.addr, _rate(row.in_tps), _rate(row.out_tps), f"{row.disk_ratio:.0%}", oldest]


def _topic(row: TopicRow) -> list[str]:
    return [row.topic, _rate(row.in_per_second), _rate(row.out_per_second), f"{row.stored:,}", str(row.groups)]


def _group(row: GroupRow) -> list[str]:
    age = "" if row.age_ms is None else _span(row.age_ms)
    return [row.group, row.topic, _rate(row.out_per_second), f"{row.lag:,}", age, str(row.members)]


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:,.0f}" if per_second >= 100 or not per_second else f"{per_second:.1f}"


def _span(ms: int) -> str:
    """Return a time in its largest unit: 0.4 s, 12 s, 3 min, 5 h, 9 d."""
    seconds = ms / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:,.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _shares(counts: Sequence[int], room: int | None) -> list[int]:
    """Return the number of shown rows of each table: all rows if there is room, or else equal shares. Other tables get
    the unused part of a share."""
    if room is None or sum(counts) <= room:
        return list(counts)
    shares, left = [0] * len(counts), max(room, 0)
    for place, number in sorted(enumerate(counts), key=lambda one: one[1]):
        tables_left = sum(1 for share in shares if not share)
        shares[place] = min(number, max(1, left // max(1, tables_left)))
        left = max(0, left - shares[place])
    return shares


def _table(headings: Sequence[str], names: int, rows: Sequence[Sequence[str]], count: int, columns: int) -> list[str]:
    """Return the lines of a table. The first ``names`` columns are names and can be clipped; the others are numbers."""
    shown = rows if count >= len(rows) else rows[: max(1, count - 1)]
    widths = [max(len(text) for text in column) for column in zip(headings, *shown, strict=True)]
    spare = columns - sum(widths[names:]) - len(_GAP) * (len(widths) - 1)
    widths[:names] = fitting(widths[:names], spare)
    lines = [
        _GAP.join(
            clip(text, width).ljust(width) if place < names else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, *shown)
    ]
    more = len(rows) - len(shown)
    return [*lines, f"… and {more:,} more"] if more else lines
