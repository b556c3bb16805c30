"""What commands print, tables for people and values as JSON has them, and the times that people type."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import SettingsError

_BODY_CHARS = 40
_FILE_WIDTH = 160
_NAME_CELLS_MIN = 8


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> None:
    """A table on stdout, as wide as the terminal; the columns named in ``right`` are right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table, numbers = Table(), set(right)
    for heading in headings:
        table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(table)


def cell(name: str, value: Any) -> str:
    """A value as a person reads it; ``name`` tells what the number is."""
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
