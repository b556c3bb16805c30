"""Settings: one annotated `msgspec.Struct` per component, filled from RocketMQ's own properties files.

Each field is declared once, beside the component that uses it::

    class StoreSettings(Struct):
        flush_interval_ms: Annotated[int, Setting("flushIntervalCommitLog", low=1, help="...")] = 500

and that one declaration feeds file parsing, bounds, ``--print-config`` and the documentation. The files are Java
properties (``broker.conf``, ``namesrv.conf``) and work as they are: a key without effect here is accepted, an unknown
key is reported with the nearest known name, a wrong value is an error. Source: style.md §10, store.md §23.
"""

from __future__ import annotations

import difflib
import enum
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from rmqkit.errors import SettingsError

__all__ = ["Loaded", "Setting", "load", "parse_properties", "read_properties", "setting_table", "to_properties"]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a settings field is called in RocketMQ and what it may hold.

    Args:
        key: the key in properties files and admin commands.
        help: one sentence for people.
        low: smallest value allowed, inclusive.
        high: largest value allowed, inclusive.
        hot: whether it may be changed while the process runs.
    """

    key: str
    help: str
    low: int | None = None
    high: int | None = None
    hot: bool = False


@dataclass(slots=True)
class Loaded:
    """What `load` made of a properties file.

    Attributes:
        values: one settings object per type asked for, in that order.
        unknown: keys nobody knows, each with the nearest known key or None.
        without_effect: keys that Java brokers use and that have no meaning here.
    """

    values: tuple[Any, ...]
    unknown: list[tuple[str, str | None]] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


@functools.cache
def setting_table(settings_type: type[msgspec.Struct]) -> dict[str, tuple[str, Any, Setting]]:
    """The declared settings of a type: RocketMQ key → (field name, value type, declaration)."""
    table: dict[str, tuple[str, Any, Setting]] = {}
    for name, hint in get_type_hints(settings_type, include_extras=True).items():
        if get_origin(hint) is Annotated:
            value_type, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Setting):
                    table[extra.key] = (name, value_type, extra)
    return table


def load(
    types: Sequence[type[msgspec.Struct]],
    properties: Mapping[str, str],
    *,
    source: str,
    without_effect: Iterable[str] = (),
) -> Loaded:
    """Fill one settings object per type from a parsed properties file.

    Args:
        types: the settings types that share the file; a key may belong to several of them.
        properties: key → text, as `parse_properties` returns it.
        source: the file's name, for error texts.
        without_effect: keys to accept silently (they come back in ``Loaded.without_effect``).

    Raises:
        SettingsError: a value is not of its type or out of bounds.
    """
    tables = [setting_table(settings_type) for settings_type in types]
    accepted = frozenset(without_effect)
    chosen: list[dict[str, Any]] = [{} for _ in types]
    loaded = Loaded(values=())
    for key, text in properties.items():
        owners = [i for i, table in enumerate(tables) if key in table]
        for i in owners:
            name, value_type, setting = tables[i][key]
            chosen[i][name] = _convert(text, value_type, setting, source)
        if not owners:
            if key in accepted:
                loaded.without_effect.append(key)
            else:
                known = [k for table in tables for k in table] + list(accepted)
                loaded.unknown.append((key, next(iter(difflib.get_close_matches(key, known, n=1)), None)))
    loaded.values = tuple(settings_type(**values) for settings_type, values in zip(types, chosen, strict=True))
    return loaded


def to_properties(settings: msgspec.Struct) -> dict[str, str]:
    """The settings as RocketMQ keys and texts, as ``--print-config`` and the admin commands show them."""
    texts: dict[str, str] = {}
    for key, (name, _, _) in setting_table(type(settings)).items():
        value = getattr(settings, name)
        texts[key] = str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))
    return texts


def read_properties(path: Path) -> dict[str, str]:
    """Read a Java properties file.

    Raises:
        SettingsError: the file cannot be read or is not text.
    """
    try:
        return parse_properties(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"configuration {path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


_KEY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> dict[str, str]:
    """Parse the Java properties format: comments, ``=``/``:``/blank separators, continued lines, escapes."""
    properties: dict[str, str] = {}
    lines = iter(text.splitlines())
    for raw in lines:
        line = raw.lstrip()
        if not line or line[0] in "#!":
            continue
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + next(lines, "").lstrip()
        match = _KEY.fullmatch(line)
        assert match is not None, "the pattern accepts every line"
        properties[_unescape(match[1])] = _unescape(match[2]).rstrip()
    return properties


def _unescape(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        escaped = match[1]
        return chr(int(escaped[1:], 16)) if len(escaped) == 5 else _CONTROL.get(escaped, escaped)

    return _ESCAPE.sub(replace, text)


def _convert(text: str, value_type: Any, setting: Setting, source: str) -> Any:
    if value_type is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise SettingsError(f"{source}: {setting.key}={text} must be true or false")
    if isinstance(value_type, type) and issubclass(value_type, enum.Enum):
        try:
            return value_type(text)
        except ValueError:
            names = ", ".join(str(member.value) for member in value_type)
            raise SettingsError(f"{source}: {setting.key}={text} must be one of {names}") from None
    if value_type is int:
        return _convert_int(text, setting, source)
    try:
        return value_type(text)
    except ValueError as error:
        raise SettingsError(f"{source}: {setting.key}={text}: {error}") from None


def _convert_int(text: str, setting: Setting, source: str) -> int:
    low, high = setting.low, setting.high
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"
    expected = "a whole number" if low is None else f"a whole number {bounds}"
    try:
        number = int(text)
    except ValueError:
        raise SettingsError(f"{source}: {setting.key}={text} must be {expected}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise SettingsError(f"{source}: {setting.key}={text} must be {expected}")
    return number
