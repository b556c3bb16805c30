"""The output of commands as tables and JSON, and the times in options."""

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
    """Return the width of the terminal. Files and pipes get whole lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNLIMITED


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text. An ``rmq`` command is not broken if it fits into one line, for copying."""
    kept = _COMMAND.sub(lambda found: found[0].replace(" ", _UNBROKEN) if len(found[0]) <= width else found[0], text)
    return [line.replace(_UNBROKEN, " ") for line in textwrap.wrap(kept, width)]


def print_aligned(headings: list[str], rows: list[list[str]], numbers: Sequence[bool]) -> None:
    """Print columns if they fit the terminal, or else a line for each cell. ``numbers`` are right-aligned."""
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
    """Fit cells into ``room`` columns, and return the lines of each cell. Sentences are wrapped, long names lose their
    middle. Cells that begin with a digit (numbers, times, addresses) stay whole."""
    prose = [
        any(line[place].count(" ") > 1 and not line[place][0].isdigit() for line in lines[1:])
        for place in range(len(widths))
    ]
    names = [
        place
        for place, is_number in enumerate(numbers)
        if not is_number and (prose[place] or not any(line[place][:1].isdigit() for line in lines[1:]))
    ]
    # Headings are wrapped, so a column of numbers needs only the width of the heading's longest word.
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
    """Return a value as text for display; ``name`` determines the meaning of a number."""
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
    """Return a value for JSON: times in UTC, bytes as text, or as base64 if they are not UTF-8."""
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
    """Return a field's name in Java's spelling."""
    first, *more = name.split("_")
    return first + "".join(map(str.title, more))


def time_text(time_ms: int) -> str:
    """Return the ISO local time, or the number if it is outside of the calendar."""
    try:
        return datetime.fromtimestamp(time_ms / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return str(time_ms)


def body_text(body: bytes) -> str:
    """Return the beginning of a body in one line."""
    text = body[: 4 * _BODY_CHARS].decode("utf-8", "backslashreplace")
    printable = "".join(char if char.isprintable() else "·" for char in text)
    more = "…" if len(printable) > _BODY_CHARS or len(body) > 4 * _BODY_CHARS else ""
    return printable[:_BODY_CHARS] + more


def clip(text: str, cells: int) -> str:
    """Return a text of at most ``cells`` characters: a longer text loses its middle."""
    if len(text) <= cells:
        return text
    kept = max(0, cells - 1)
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :] if kept // 2 else ''}"[:cells]


def fitting(widths: Sequence[int], spare: int) -> list[int]:
    """Return widths of name columns that share ``spare`` columns; if necessary, the widest shrink first."""
    fitted = list(widths)
    while sum(fitted) > spare and max(fitted, default=0) > _NAME_CELLS_MIN:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


_JAVA_FORM = "%Y-%m-%d#%H:%M:%S:%f"


def time_ms(text: str, clock: Clock = SYSTEM_CLOCK) -> int:
    """Return ms since the epoch, from ms, ``now``, an ISO time or Java's ``yyyy-MM-dd#HH:mm:ss:SSS``. Times without a
    zone are local. Raises SettingsError: another text."""
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
