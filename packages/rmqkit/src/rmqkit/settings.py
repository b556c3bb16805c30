"""Settings: one annotated `msgspec.Struct` per component, filled from RocketMQ's properties files.

Each setting is declared once, in the module that uses it::

    class StoreSettings(Struct):
        flush_interval_ms: Annotated[int, Setting("flushIntervalCommitLog", low=1, help="...")] = 500

This declaration serves file parsing, bounds, ``--print-config``, admin requests and the documentation. Apache's files,
Java properties (``broker.conf``, ``namesrv.conf``) or a proxy's JSON (``rmq-proxy.json``), work unchanged. A key
without effect here is accepted. An unknown key is reported with the most similar known key. A wrong value is an error.

A running server has a `Configuration` with its settings and their sources. Hot settings can be changed in two ways: by
a request (UPDATE_BROKER_CONFIG), which also stores the changes in the file, or by a new version of the file. All other
settings need a restart. Source: store.md §23, behaviour.md §1.7, §9.9.
"""

from __future__ import annotations

import difflib
import enum
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from rmqkit.errors import SettingsError
from rmqkit.sentences import _

__all__ = [
    "SECRET",
    "Configuration",
    "Described",
    "Given",
    "Loaded",
    "Setting",
    "bounds_text",
    "given_by_file",
    "load",
    "parse_properties",
    "properties_line",
    "read_properties",
    "setting_table",
    "to_properties",
    "value_of",
    "write_properties",
]

SECRET = "***"
"""The text shown instead of a secret."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a settings field: its name in RocketMQ, its help text and its allowed values.

    Args:
        key: the key in properties files and admin commands.
        help: one sentence for users.
        low: smallest allowed value, inclusive.
        high: largest allowed value, inclusive.
        hot: True if the value can be changed while the process runs.
        secret: True if the value is never shown.
        only: the only accepted value, if all other values request something that is not implemented. ``help`` contains
            the reason.
    """

    key: str
    help: str
    low: int | None = None
    high: int | None = None
    hot: bool = False
    secret: bool = False
    only: str | None = None


class Given(NamedTuple):
    """A setting's text and its source: ``broker.conf:3``, ``environment``, ``command line``."""

    text: str
    source: str


@dataclass(slots=True)
class Loaded:
    """The result of `load` for a properties file.

    Attributes:
        values: one settings object per requested type, in the order of the types.
        unknown: unknown keys, each with the most similar known key, or None.
        without_effect: keys of Java's servers that have no effect here.
    """

    values: tuple[Any, ...]
    unknown: list[tuple[str, str | None]] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)


@functools.cache
def setting_table(settings_type: type[msgspec.Struct]) -> dict[str, tuple[str, Any, Setting]]:
    """Return the declared settings of a type: RocketMQ key → (field name, value type, declaration). A field with a
    struct (or an optional struct) as its type is a group. Settings in a group have names such as ``batch.delay_ms``."""
    table: dict[str, tuple[str, Any, Setting]] = {}
    for name, hint in get_type_hints(settings_type, include_extras=True).items():
        if (group := _group_of(hint)) is not None:
            table |= {key: (f"{name}.{inner}", *rest) for key, (inner, *rest) in setting_table(group).items()}
        elif get_origin(hint) is Annotated:
            value_type, *extras = get_args(hint)
            for extra in extras:
                if isinstance(extra, Setting):
                    table[extra.key] = (name, value_type, extra)
    return table


def _group_of(hint: Any) -> type[msgspec.Struct] | None:
    kinds = [kind for kind in get_args(hint) or (hint,) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return kinds[0] if kinds and get_origin(hint) is not Annotated else None


def value_of(settings: msgspec.Struct, name: str) -> Any:
    """Return the value of a setting by its field name in `setting_table`, or None if its group is None."""
    value: Any = settings
    for part in name.split("."):
        value = None if value is None else getattr(value, part)
    return value


def _made(settings_type: type[msgspec.Struct], values: Mapping[str, Any]) -> msgspec.Struct:
    """Return new settings with values, given by their field names in `setting_table`."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(settings_type, include_extras=True).items():
        group = _group_of(hint)
        if group is None:
            arguments |= {name: values[name]} if name in values else {}
        elif inner := {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{name}.")}:
            arguments[name] = _made(group, inner)
    return settings_type(**arguments)


def load(
    types: Sequence[type[msgspec.Struct]],
    properties: Mapping[str, str] | Mapping[str, Given],
    *,
    source: str = "",
    without_effect: Iterable[str] = (),
) -> Loaded:
    """Fill one settings object per type from a parsed properties file.

    Args:
        types: the settings types that share the file. A key can belong to several types.
        properties: key → text, as from `parse_properties`, or key → `Given`.
        source: the name of the file for errors, for properties without a source.
        without_effect: keys to accept silently. `Loaded.without_effect` lists the keys that were found.

    Raises:
        SettingsError: a value does not have its type, or is out of bounds.
    """
    tables = [setting_table(settings_type) for settings_type in types]
    accepted = frozenset(without_effect)
    chosen: list[dict[str, Any]] = [{} for _ in types]
    loaded = Loaded(values=())
    for key, given in properties.items():
        text, where = given if isinstance(given, Given) else (given, source)
        owners = [i for i, table in enumerate(tables) if key in table]
        for i in owners:
            name, value_type, setting = tables[i][key]
            chosen[i][name] = value = _convert(text, value_type, setting, where)
            if setting.only is not None and _text(value) != setting.only:
                remedy = f"use {key}={setting.only}" if setting.only else "leave it out"
                raise SettingsError(f"{where}: {key}={text} is not supported: {setting.help}; {remedy}")
        if not owners:
            if key in accepted:
                loaded.without_effect.append(key)
            elif len(loaded.unknown) >= _NEAREST_MAX:  # limit the searches, because each takes a millisecond
                loaded.unknown.append((key, None))
            else:
                known = [k for table in tables for k in table] + list(accepted)
                loaded.unknown.append((key, next(iter(difflib.get_close_matches(key, known, n=1)), None)))
    loaded.values = tuple(_made(settings_type, values) for settings_type, values in zip(types, chosen, strict=True))
    return loaded


def to_properties(settings: msgspec.Struct) -> dict[str, str]:
    """Return the text of each setting by its RocketMQ key. If a group of settings is None, the texts of its settings
    are empty."""
    return {key: _text(value_of(settings, name)) for key, (name, _, _) in setting_table(type(settings)).items()}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


class Described(msgspec.Struct, rename="camel", kw_only=True):
    """A setting in the output of ``--print-config``."""

    key: str
    value: str
    source: str
    default: str
    bounds: str
    hot: bool
    help: str


_JSON = ".json"
_NEAREST_MAX = 16
"""The maximum number of unknown keys for which a similar known key is searched."""


class Configuration:
    """The settings of a running server, and changes of these settings (``Configuration``). Use it only on the event
    loop.

    Args:
        settings: the settings objects that the parts of the server read. Several objects may have the same key.
        given: the text and the source of each value that replaces a default, by key.
        file: the file in which `change` stores changes. With None, changes last until the process stops.

    Attributes:
        listeners: functions that are called with the changed keys after a change.
    """

    def __init__(
        self, settings: Sequence[msgspec.Struct], given: Mapping[str, Given] | None = None, *, file: Path | None = None
    ) -> None:
        self._objects = tuple(settings)
        self.listeners: list[Callable[[Sequence[str]], object]] = []
        self._given = dict(given or {})
        self._file = file
        self._at_start = self._texts()  # includes values that the server itself has set

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings objects, in their order."""
        return self._objects

    @classmethod
    def load(
        cls, types: Sequence[type[msgspec.Struct]], given: Mapping[str, Given], *, file: Path | None = None
    ) -> Configuration:
        """Return a configuration with new settings objects. Keys that no type declares are ignored.
        Raises SettingsError: a value does not have its type, or is out of bounds."""
        return cls(_fresh(types, given), given, file=file)

    def texts(self) -> dict[str, str]:
        """Return every key with its value as text, sorted. Secrets are hidden."""
        return {key: SECRET if text and self._tables[key][2].secret else text for key, text in self._texts().items()}

    def described(self) -> list[Described]:
        """Return every setting, sorted by key."""
        defaults = {key: text for one in self._objects for key, text in to_properties(type(one)()).items()}
        return [
            Described(
                key=key,
                value=text,
                source=self._given[key].source if key in self._given else "default",
                default=defaults[key],
                bounds=bounds_text(self._tables[key][1], self._tables[key][2]),
                hot=self._tables[key][2].hot,
                help=self._tables[key][2].help,
            )
            for key, text in self.texts().items()
        ]

    def is_frozen(self, keys: Iterable[str]) -> bool:
        """Return True if one of the keys is a setting that needs a restart."""
        return any(key in self._tables and not self._tables[key][2].hot for key in keys)

    def change(self, properties: Mapping[str, str]) -> None:
        """Write hot settings to the file, then change them. If a setting is refused, no setting is changed.
        Raises SettingsError: a key is unknown, a value cannot be used, or the file cannot be written."""
        assert not self.is_frozen(properties), "all keys are hot"
        types = [type(one) for one in self._objects]
        loaded = load(types, properties, source="request")
        if loaded.unknown:
            key, nearest = loaded.unknown[0]
            hint = f", did you mean {nearest}?" if nearest else ""
            raise SettingsError(f"unknown key {key}{hint}; nothing was changed")
        texts = {key: text for one in loaded.values for key, text in to_properties(one).items() if key in properties}
        if self._file is not None and properties:
            write_properties(self._file, texts)
        self._given.update((key, Given(text, str(self._file or "request"))) for key, text in texts.items())
        self._take(loaded.values, properties)

    def reload(self, given: Mapping[str, Given]) -> tuple[list[str], list[str]]:
        """Change the hot settings to new values. A hot setting without a new value returns to its default.
        Returns the changed keys, and the keys that differ from the values at the start and need a restart.
        Raises SettingsError: a value cannot be used. No setting is changed then."""
        fresh = _fresh([type(one) for one in self._objects], given)
        now = {key: text for one in fresh for key, text in to_properties(one).items()}
        texts = self._texts()
        hot = [key for key, text in texts.items() if self._tables[key][2].hot and now[key] != text]
        cold = [key for key in texts if not self._tables[key][2].hot and now[key] != self._at_start[key]]
        self._given = {key: one for key, one in given.items() if key not in cold}
        self._take(fresh, hot)
        return hot, cold

    # -- internal methods

    @functools.cached_property
    def _tables(self) -> dict[str, tuple[str, Any, Setting]]:
        return {key: entry for one in self._objects for key, entry in setting_table(type(one)).items()}

    def _texts(self) -> dict[str, str]:
        merged = {key: text for one in self._objects for key, text in to_properties(one).items()}
        return dict(sorted(merged.items()))

    def _take(self, fresh: Sequence[msgspec.Struct], keys: Iterable[str]) -> None:
        changed = list(keys)
        for mine, other in zip(self._objects, fresh, strict=True):
            table = setting_table(type(mine))
            for name in (table[key][0] for key in changed if key in table):
                setattr(mine, name, getattr(other, name))
        if changed:
            for listener in self.listeners:
                listener(changed)


def _fresh(types: Sequence[type[msgspec.Struct]], given: Mapping[str, Given]) -> tuple[Any, ...]:
    known = {key for one in types for key in setting_table(one)}
    return load(types, {key: one for key, one in given.items() if key in known}).values


def bounds_text(value_type: Any, setting: Setting) -> str:
    """Return a short description of the values that a setting accepts."""
    if value_type is bool:
        return _("true or false")
    if isinstance(value_type, type) and issubclass(value_type, enum.Enum):
        return _("one of {values}", values=", ".join(str(member.value) for member in value_type))
    if value_type is not int:
        return _("text")
    match setting.low, setting.high:
        case None, None:
            return _("a whole number")
        case low, None:
            return _("a whole number at least {low}", low=low)
        case None, high:
            return _("a whole number at most {high}", high=high)
        case low, high:
            return _("a whole number from {low} to {high}", low=low, high=high)


def read_properties(path: Path) -> dict[str, str]:
    """Return the keys and values of a Java properties file. Raises SettingsError: the file cannot be read or is not
    text."""
    return {key: given.text for key, given in given_by_file(path).items()}


def given_by_file(path: Path) -> dict[str, Given]:
    """Return the values of a Java properties file by key, each with its file and line. If a key occurs several times,
    the last line is used. A file with a name that ends with ``.json`` contains a JSON object, like the file of Apache's
    proxy.
    Raises SettingsError: the file cannot be read, is not text, or is not a JSON object."""
    text = _content(path)
    if path.suffix == _JSON:
        return _given_by_json(text, path)
    return {entry.key: Given(entry.value, f"{path}:{entry.first + 1}") for entry in _entries(text)}


def write_properties(path: Path, changes: Mapping[str, str]) -> None:
    """Change keys in a properties file without changing its other lines. Create the file if it is missing.
    When this function returns, the changes are flushed to the disk. The file is complete at any time.
    Raises SettingsError: the file cannot be read or written. The file is unchanged then."""
    path = path.resolve()
    if path.suffix == _JSON:
        raise SettingsError(f"cannot write {path}: changes are kept in properties files only; nothing was changed")
    text = _content(path) if path.exists() else ""
    lines, missing = text.splitlines(keepends=True), dict(changes)
    for entry in reversed(list(_entries(text))):  # the last line of a key counts
        if entry.key in missing:
            lines[entry.first : entry.end] = [properties_line(entry.key, missing.pop(entry.key)) + "\n"]
    if lines and not lines[-1].endswith(("\n", "\r")):
        lines[-1] += "\n"
    lines += [properties_line(*item) + "\n" for item in missing.items()]
    whole = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(whole, "wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            whole.chmod(path.stat().st_mode)
        whole.replace(path)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror}; nothing was changed") from error


def _given_by_json(text: str, path: Path) -> dict[str, Given]:
    try:
        entries = msgspec.json.decode(text, type=dict[str, Any]) if text.strip() else {}
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path} has to be one JSON object of settings: {error}") from None
    return {
        key: Given(value if isinstance(value, str) else msgspec.json.encode(value).decode(), _place(key, text, path))
        for key, value in entries.items()
        if value is not None
    }


def _place(key: str, text: str, path: Path) -> str:
    """Return the file and line of a key in JSON, or only the file if the key contains escapes."""
    at = text.find(msgspec.json.encode(key).decode())
    return str(path) if at < 0 else f"{path}:{text.count(chr(10), 0, at) + 1}"


def _content(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise SettingsError(f"cannot read configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"configuration {path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


_KEY = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class _Entry(NamedTuple):
    """A key and its value. Their lines have the indexes from ``first`` up to but not including ``end``."""

    key: str
    value: str
    first: int
    end: int


def parse_properties(text: str) -> dict[str, str]:
    """Return the keys and values of a text in the Java properties format: comments, the separators ``=``, ``:`` and
    blank, continued lines, and escapes."""
    return {entry.key: entry.value for entry in _entries(text)}


def properties_line(key: str, value: str) -> str:
    """Return the line of a properties file for a key and its value, without a line end."""
    escaped = "".join(map(_escape, value))
    return f"{key}={chr(92) if escaped[:1] == ' ' else ''}{escaped}"


def _escape(char: str) -> str:
    if char.isprintable() or char > "\uffff":
        return "\\\\" if char == "\\" else char
    return f"\\u{ord(char):04x}"


def _entries(text: str) -> Iterator[_Entry]:
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, line = at, lines[at].lstrip()
        at += 1
        if not line or line[0] in "#!":
            continue
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + (lines[at].lstrip() if at < len(lines) else "")
            at += 1
        match = _KEY.fullmatch(line)
        assert match is not None, "the pattern accepts every line"
        yield _Entry(_unescape(match[1]), _unescape(match[2]).rstrip(), first, at)


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
    expected = bounds_text(int, setting)
    try:
        number = int(text)
    except ValueError:
        raise SettingsError(f"{source}: {setting.key}={text} must be {expected}") from None
    if (low is not None and number < low) or (high is not None and number > high):
        raise SettingsError(f"{source}: {setting.key}={text} must be {expected}")
    return number
