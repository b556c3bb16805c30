"""Tables of the fields of a class, for the class reference: settings with their bounds, values with their meaning.

What is said of a field comes from its `Setting`, from the ``Attributes:`` of the docstrings, or from the string behind
the member of an enum. On the site these tables take the place of the ``Attributes:`` (`docs.site_docstrings`).
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import get_args, get_type_hints

import msgspec

from rmqkit.settings import setting_table, value_of

__all__ = ["ATTRIBUTES", "bounds_text", "choices_text", "default_texts", "fields_table", "has_fields", "row"]

ATTRIBUTES = re.compile(r"^( *)Attributes:\n((?:\1 +.*\n?|\s*\n)+)", re.MULTILINE)
"""The section of a docstring that names fields."""

_UNITS = {"ms": "ms", "minutes": "minutes", "seconds": "s", "mib": "MiB", "bytes": "bytes"}


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(cell: str) -> str:
    cell = cell.replace("|", "\\|")
    return cell if cell.startswith("`") else cell.replace("<", "&lt;")


def bounds_text(low: int | None, high: int | None) -> str:
    """The bounds of a number, as ``≥ 1 ≤ 100``."""
    return " ".join(f"{sign} {bound}" for sign, bound in (("≥", low), ("≤", high)) if bound is not None)


def choices_text(value_type: object) -> str:
    """The values of an enum; nothing for other types."""
    if isinstance(value_type, type) and issubclass(value_type, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in value_type)
    return ""


def has_fields(kind: object) -> bool:
    """Return True for structs and enums, which a table of fields describes better than their methods."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct | enum.Enum)


def fields_table(kind: type) -> Iterator[str]:
    """The lines of a table of all fields, inherited ones at the end; nothing for a class without any."""
    if issubclass(kind, enum.Enum):
        yield from _table(("Member", "Meaning"), _member_rows(kind))
    elif issubclass(kind, msgspec.Struct) and _has_settings(kind):
        yield from _table(("Field", "Unit", "Default", "Bounds", "Meaning", "Key in Java"), _setting_rows(kind))
    elif issubclass(kind, msgspec.Struct):
        yield from _table(("Field", "Type", "Default", "Meaning"), _value_rows(kind))


def _table(titles: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    lines = list(rows)
    if lines:
        yield row(*titles)
        yield f"|{'---|' * len(tuple(titles))}"
        yield from lines


def _has_settings(kind: type[msgspec.Struct]) -> bool:
    return any("Setting(" in str(annotation) for annotation in inspect.get_annotations(kind).values())


def _setting_rows(kind: type[msgspec.Struct]) -> Iterator[str]:
    defaults, table = default_texts(kind), setting_table(kind)
    own = inspect.get_annotations(kind)
    for key, (name, value_type, setting) in sorted(
        table.items(), key=lambda item: item[1][0].partition(".")[0] not in own
    ):
        bounds = choices_text(value_type) or bounds_text(setting.low, setting.high)
        default = f"`{defaults[key]}`" if defaults[key] else ""
        yield row(f"`{name}`", _unit(name), default, bounds, setting.help, f"`{key}`")


def default_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the default of each setting as text, by its key; those of a group that is None by default, too."""
    return {key: _text_of(_default(kind, name)) for key, (name, _, _) in setting_table(kind).items()}


def _default(kind: type[msgspec.Struct], path: str) -> object:
    name, _, inner = path.partition(".")
    (field,) = [one for one in msgspec.structs.fields(kind) if one.name == name]
    if not inner or field.default is not None:
        return value_of(field.default, inner) if inner else field.default
    (group,) = [one for one in get_args(get_type_hints(kind)[name]) if one is not type(None)]
    return _default(group, inner)


def _text_of(value: object) -> str:
    if value is None or value is msgspec.NODEFAULT:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


def _unit(name: str) -> str:
    words = [word for word in name.rpartition(".")[2].split("_") if word not in ("max", "min")]
    return _UNITS.get(words[-1], "")


def _value_rows(kind: type[msgspec.Struct]) -> Iterator[str]:
    meanings = _attributes_of(kind)
    types = {name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()}
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    padded = (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults
    for name, default in zip(names, padded, strict=True):
        shown = types[name] if isinstance(types[name], str) else inspect.formatannotation(types[name])
        yield row(f"`{name}`", f"`{shown}`", _default_text(default), meanings.get(name, ""))


def _default_text(default: object) -> str:
    if default is msgspec.NODEFAULT:
        return ""
    made = default.factory() if hasattr(default, "factory") else default
    text = str(made) if isinstance(made, enum.Enum) else repr(made)
    return f"`{text}`"


def _attributes_of(kind: type) -> dict[str, str]:
    """The meaning of each field that a docstring names, in ``Attributes:``; ``a, b: text`` is of two."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = ATTRIBUTES.search(inspect.cleandoc(base.__dict__.get("__doc__") or "") + "\n")
        if section is None:
            continue
        names: list[str] = []
        for line in textwrap.dedent(section[2]).splitlines():
            begins = re.match(r"(\w+(?:, \w+)*): (.*)", line)
            if begins is not None:
                names = begins[1].split(", ")
                found |= dict.fromkeys(names, begins[2])
            else:
                found |= {name: f"{found[name]} {line.strip()}".rstrip() for name in names}
    return {name: text.replace("``", "`") for name, text in found.items()}


def _member_rows(kind: type[enum.Enum]) -> Iterator[str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    meanings, name = {}, ""
    for line in tree.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            name = line.targets[0].id
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and name:
            meanings[name] = " ".join(str(line.value.value).replace("``", "`").split())
    for member in kind:
        yield row(f"`{member.name}`", meanings.get(member.name, ""))
