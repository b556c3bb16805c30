"""The output of commands, as tables for people and as values in JSON, and the times that people type."""

from __future__ import annotations

import base64
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import SettingsError

_BODY_CHARS = 40
_UNLIMITED = 1 << 16
_NAME_CELLS_MIN = 8
_GAP = "  "
_COMMAND = re.compile(r"\brmq [^;,)]*")
_UNBROKEN = "\N{NO-BREAK SPACE}"


def columns() -> int:
    """Return the width of the terminal. A file or a pipe gets whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text. A command of ``rmq`` that fits into a line stays in one, so that it can be copied."""
    kept = _COMMAND.sub(lambda found: found[0].replace(" ", _UNBROKEN) if len(found[0]) <= width else found[0], text)
    return [line.replace(_UNBROKEN, " ") for line in textwrap.wrap(kept, width)]


def print_aligned(headings: list[str], rows: list[list[str]], numbers: Sequence[bool]) -> None:
    """Print columns that fit the terminal, else a line for each cell. ``numbers`` are aligned to the right."""
    lines: list[list[str]] = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [[[text] for text in line] for line in lines]
    room = columns() - len(_GAP) * (len(widths) - 1)
    if sum(widths) > room:
        shown, widths = _fitted(lines, widths, numbers, room)
    if sum(widths) > room:
        width = max(map(len, headings))
        for cells in rows:
            print(
                *(f"{name:<{width}}{_GAP}{text}" for name, text in zip(headings, cells, strict=True) if text), sep="\n"
            )
            print(flush=True)
        return
    for row in shown:
        for line in itertools.zip_longest(*row, fillvalue=""):
            aligned = [
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(line, widths, numbers, strict=True)
            ]
            print(_GAP.join(aligned).rstrip(), flush=True)


def _fitted(
    lines: list[list[str]], widths: list[int], numbers: Sequence[bool], room: int
) -> tuple[list[list[list[str]]], list[int]]:
    """Fit cells into some room, and return the lines of each cell. Sentences are wrapped; long names lose their middle.
    Numbers, times, addresses and other cells that begin with a digit stay whole."""
    prose = [
        any(line[place].count(" ") > 1 and not line[place][0].isdigit() for line in lines[1:])
        for place in range(len(widths))
    ]
    names = [
        place
        for place, is_number in enumerate(numbers)
        if not is_number and (prose[place] or not any(line[place][:1].isdigit() for line in lines[1:]))
    ]
    # A heading is wrapped, so that a column of numbers is no wider than its longest word.
    least = [max(map(len, (*column[0].split(), *column[1:]))) for column in zip(*lines, strict=True)]
    taken = sum(width for place, width in enumerate(least) if place not in names)
    fitted = dict(zip(names, fitting([widths[n] for n in names], room - taken), strict=True))
    widths = [fitted.get(place, width) for place, width in enumerate(least)]

    def cell(text: str, place: int, *, wraps: bool) -> list[str]:
        return (wrapped(text, widths[place]) or [""]) if wraps else [clip(text, widths[place])]

    return [
        [cell(text, place, wraps=number == 0 or prose[place]) for place, text in enumerate(line)]
        for number, line in enumerate(lines)
    ], widths


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> None:
    """Print a table that fits the terminal; the columns named in ``right`` are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table, numbers = Table(), set(right)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(markup=False, emoji=False, highlight=False, width=columns()).print(table)


def cell(name: str, value: Any) -> str:
    """Return a value as text for people; ``name`` determines the meaning of a number."""
    match value:
        case None:
            return ""
        case datetime():
            local = value.astimezone().replace(tzinfo=None) if value.tzinfo else value
            return local.isoformat(" ", "milliseconds")
        case bytes() | bytearray():
            return body_text(bytes(value))
        case dict():
            return " ".join(f"{key}={text}" for key, text in value.items())
        case list() | tuple():
            return " ".join(cell(name, one) for one in value)
        case bool():
            return "yes" if value else "no"
        case int() if name.lower().endswith("timestamp"):
            return time_text(value) if value else ""
        case int() if "bytes" in name.lower() or name == "storeSize":
            from rmqkit.protocol.schemas.brokers import bytes_text

            return bytes_text(value)
        case int() | float():
            return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
    return str(value)


def jsonable(value: Any) -> Any:
    """A value of a row as JSON has it: times in UTC, bytes as text, or as base64 when they are not UTF-8."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds")
        case bytes() | bytearray():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return {"base64": base64.b64encode(value).decode()}
        case dict():
            return {str(key): jsonable(one) for key, one in value.items()}
        case list() | tuple():
            return [jsonable(one) for one in value]
        case msgspec.Struct():
            return {name: jsonable(getattr(value, name)) for name in value.__struct_fields__}
    return value


def camel(name: str) -> str:
    """A field's name as Java spells it."""
    first, *more = name.split("_")
    return first + "".join(map(str.title, more))


def time_text(time_ms: int) -> str:
    """ISO local time, or the number when it is no time a calendar has."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def body_text(body: bytes) -> str:
    """The beginning of a body in one line."""
    text = body[: 4 * _BODY_CHARS].decode("utf-8", "backslashreplace")
    printable = "".join(char if char.isprintable() else "·" for char in text)
    more = "…" if len(printable) > _BODY_CHARS or len(body) > 4 * _BODY_CHARS else ""
    return printable[:_BODY_CHARS] + more


def clip(text: str, cells: int) -> str:
    """A text of at most so many characters: what is too long loses its middle."""
    if len(text) <= cells:
        return text
    kept = max(0, cells - 1)
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :] if kept // 2 else ''}"[:cells]


def fitting(widths: Sequence[int], spare: int) -> list[int]:
    """Widths of names, which share some room: what they want when there is enough, else the widest gives first."""
    fitted = list(widths)
    while sum(fitted) > spare and max(fitted, default=0) > _NAME_CELLS_MIN:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


_JAVA_FORM = "%Y-%m-%d#%H:%M:%S:%f"


def time_ms(text: str, clock: Clock = SYSTEM_CLOCK) -> int:
    """Milliseconds since the epoch from a number of them, ``now``, an ISO time or ``yyyy-MM-dd#HH:mm:ss:SSS`` as
    Java's tools have it; local unless it has a zone. Raises SettingsError: it is none of these."""
    if text.isdecimal():
        return int(text)
    if text in ("now", "currentTimeMillis"):
        return clock.now_ms()
    try:
        moment = datetime.strptime(text, _JAVA_FORM) if "#" in text else datetime.fromisoformat(text)
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        forms = "ms since the epoch, now, or like 2026-01-31T12:00:00 or 2026-01-31#12:00:00:000"
        raise SettingsError(f"time {text!r} must be {forms}") from None
