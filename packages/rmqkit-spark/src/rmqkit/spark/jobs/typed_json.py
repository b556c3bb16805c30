"""Columns from a JSON Schema, and the decoder of JSON bodies.

====================================  =============================  =============================================
JSON Schema                           column                         note
====================================  =============================  =============================================
``string``                            string                         ``minLength``, ``maxLength``, ``pattern``
``string``, format ``date-time``      timestamp in µs, UTC           a time without an offset does not fit
``string``, format ``date``           date
``integer``                           bigint                         ``1.0`` does not fit
``number``                            double                         ``minimum`` and the other bounds, as integers
``boolean``                           boolean
``array`` with ``items``              list                           ``minItems``, ``maxItems``
``object`` with ``properties``        struct                         ``required``, ``additionalProperties: false``
``object`` with                       map of strings to the type     no ``properties`` beside it
``additionalProperties: {...}``
====================================  =============================  =============================================

A property may be absent if it is not ``required``, and may be null if its type includes ``null`` (or ``nullable``, or
``anyOf`` with null). ``enum`` and ``const`` hold texts or integers. ``$ref`` points into ``$defs`` of the same file.
Any other keyword that restricts values is refused, so that no body passes without its check. Properties that the
schema does not name are left out of the table. msgspec decodes and checks the bodies, so a reason has a path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pyarrow as pa
from msgspec import Meta

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_columns import TIMESTAMP, Bodies, BodyColumn

_NOTES = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "example",
    "deprecated", "readOnly", "writeOnly", "type", "nullable", "format",
}  # fmt: skip
_NUMBERS = {
    "minimum": "ge", "maximum": "le", "exclusiveMinimum": "gt", "exclusiveMaximum": "lt", "multipleOf": "multiple_of"
}  # fmt: skip
_CHECKS = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    "array": {"minItems": "min_length", "maxItems": "max_length"},
}
_OWN = {"array": {"items"}, "object": {"properties", "required", "additionalProperties"}}
_INT64 = 1 << 63


class _Kind(NamedTuple):
    """A type for msgspec, for Arrow, and the conversion between their values (None: the values are the same)."""

    python: Any
    arrow: pa.DataType
    convert: Callable[[Any], Any] | None = None


class _Field(NamedTuple):
    name: str
    kind: _Kind
    is_required: bool


class _Row(NamedTuple):
    """An object with properties. Field ``i`` of the struct ``python`` is named ``f<i>``."""

    python: Any
    fields: list[_Field]


def json_bodies(source: str, text: str) -> Bodies:
    """Return the columns of a schema, and its decoder. Raises SettingsError: it is not a schema of a table."""
    try:
        root = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"schema {source} is not JSON: {error}: give a file with a JSON Schema") from None
    if not isinstance(root, dict):
        raise SettingsError(f"schema {source} is not an object: give a JSON Schema")
    reader = _Reader(source, root)
    node, is_nullable = reader.resolved(root, "$", ())[:2]
    if node.get("type") != "object" or not node.get("properties") or is_nullable:
        raise SettingsError(f"schema {source} has no columns: its type must be object, with properties")
    reader.check_keywords(node, "object", "$")
    row = reader.row(node, "$", ())
    parse = msgspec.json.Decoder(row.python).decode
    named = [(f"f{i}", one.kind) for i, one in enumerate(row.fields)]

    def decode(body: bytes) -> list[Any]:
        found = parse(body)
        return [_converted(kind, getattr(found, name)) for name, kind in named]

    return Bodies([BodyColumn(one.name, one.kind.arrow, one.is_required) for one in row.fields], decode)


def _converted(kind: _Kind, value: Any) -> Any:
    return value if value is None or kind.convert is None else kind.convert(value)


class _Reader:
    """Reads the nodes of a schema. A place is the path of a node, as in the reasons of msgspec."""

    def __init__(self, source: str, root: dict[str, Any]) -> None:
        self._source = source
        self._root = root

    def kind(self, node: Any, place: str, above: tuple[str, ...]) -> _Kind:
        """Return the kind of a node. ``above`` are the references that lead to the node."""
        node, is_nullable, above = self.resolved(node, place, above)
        if "enum" in node or "const" in node:
            return self._choice(node, place, is_nullable=is_nullable or "type" not in node)
        kind_name = node.get("type")
        if kind_name not in ("string", "integer", "number", "boolean", "array", "object"):
            raise self._wrong(place, f"type {json.dumps(kind_name)} is not known: give one type, or one and null")
        self.check_keywords(node, kind_name, place)
        found = self._plain(kind_name, node, place, above)
        python = self._checked(found.python, kind_name, node, place)
        return found._replace(python=python | None if is_nullable else python)

    def row(self, node: dict[str, Any], place: str, above: tuple[str, ...]) -> _Row:
        """Return an object with properties."""
        required = node.get("required", [])
        if not isinstance(required, list) or not isinstance(node["properties"], dict):
            raise self._wrong(place, "required must be a list, and properties an object")
        for name in required:
            if name not in node["properties"]:
                raise self._wrong(place, f"required names {name!r}, which is not among the properties: add it")
        if isinstance(node.get("additionalProperties"), dict):
            raise self._wrong(place, "properties and additionalProperties with a type: give one of them")
        fields = [
            _Field(name, self.kind(one, f"{place}.{name}", above), name in required)
            for name, one in node["properties"].items()
        ]
        # Fields have numbers in place of names, because a property may have a name that Python has not.
        declared: list[Any] = [
            (f"f{i}", one.kind.python) if one.is_required else (f"f{i}", one.kind.python, None)
            for i, one in enumerate(fields)
        ]
        struct = msgspec.defstruct(
            "Row",
            declared,
            rename={f"f{i}": one.name for i, one in enumerate(fields)},
            forbid_unknown_fields=node.get("additionalProperties") is False,
            kw_only=True,
        )
        return _Row(struct, fields)

    def resolved(self, node: Any, place: str, above: tuple[str, ...]) -> tuple[dict[str, Any], bool, tuple[str, ...]]:
        """Follow references. Return the node without null, whether null is allowed, and the references."""
        is_nullable = False
        while isinstance(node, dict) and ("$ref" in node or "anyOf" in node):
            beside = {name: value for name, value in node.items() if name not in ("$ref", "anyOf")}
            if "$ref" in node:
                above, node = (*above, str(node["$ref"])), self._target(str(node["$ref"]), place, above)
            else:
                others = [one for one in node["anyOf"] if one != {"type": "null"}]
                if len(others) != 1 or len(node["anyOf"]) != 2:
                    raise self._wrong(place, "anyOf is only supported with one type and null: leave it out")
                is_nullable, node = True, others[0]
            if isinstance(node, dict):
                node = node | beside
        if not isinstance(node, dict):
            raise self._wrong(place, "is not an object: give a schema with a type")
        is_nullable |= node.get("nullable") is True
        kinds = node.get("type")
        if isinstance(kinds, list):
            others = [one for one in kinds if one != "null"]
            is_nullable |= len(others) < len(kinds)
            node = {**node, "type": others[0] if len(others) == 1 else kinds}
        return node, is_nullable, above

    def check_keywords(self, node: dict[str, Any], kind_name: str, place: str) -> None:
        """Raise SettingsError if a node has a keyword that would not be checked."""
        for keyword in node.keys() - _NOTES - _CHECKS.get(kind_name, {}).keys() - _OWN.get(kind_name, set()):
            if not keyword.startswith("x-"):
                raise self._wrong(place, f"keyword {keyword} of type {kind_name} is not supported: leave it out")

    def _target(self, ref: str, place: str, above: tuple[str, ...]) -> Any:
        if ref in above:
            raise self._wrong(place, f"{ref} contains itself, which no column can: leave it out")
        found: Any = self._root
        for name in ref.removeprefix("#/").split("/") if ref.startswith("#/") else [ref]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise self._wrong(place, f"$ref {ref} is not in this file: use #/$defs/NAME")
            found = found[name]
        return found

    def _plain(self, kind_name: str, node: dict[str, Any], place: str, above: tuple[str, ...]) -> _Kind:
        match kind_name:
            case "string" if node.get("format") == "date-time":
                return _Kind(Annotated[datetime, Meta(tz=True)], TIMESTAMP, lambda moment: moment.astimezone(UTC))
            case "string" if node.get("format") == "date":
                return _Kind(date, pa.date32())
            case "string":
                return _Kind(str, pa.string())
            case "integer":
                return _Kind(int, pa.int64())
            case "number":
                return _Kind(float, pa.float64())
            case "boolean":
                return _Kind(bool, pa.bool_())
            case "array":
                if "items" not in node:
                    raise self._wrong(place, "array without items: give the type of the items")
                item = self.kind(node["items"], f"{place}[...]", above)
                return _Kind(list[item.python], pa.list_(item.arrow), _each(item))  # type: ignore[name-defined]
        if node.get("properties"):
            return _struct(self.row(node, place, above))
        if isinstance(node.get("additionalProperties"), dict) and not node.get("required"):
            value = self.kind(node["additionalProperties"], f"{place}[...]", above)
            python: Any = dict[str, value.python]  # type: ignore[name-defined]
            return _Kind(python, pa.map_(pa.string(), value.arrow), _each_value(value))
        raise self._wrong(place, "object without properties: give them, or the type of additionalProperties")

    def _choice(self, node: dict[str, Any], place: str, *, is_nullable: bool) -> _Kind:
        for keyword in node.keys() - _NOTES - {"enum", "const"}:
            raise self._wrong(place, f"keyword {keyword} beside enum or const is not supported: leave it out")
        values = node.get("enum", [node.get("const")])
        others = [one for one in values if one is not None] if isinstance(values, list) else []
        for kind_name, python, arrow in (("string", str, pa.string()), ("integer", int, pa.int64())):
            if {type(one) for one in others} == {python} and node.get("type", kind_name) == kind_name:
                choice: Any = Literal[tuple(others)]
                return _Kind(choice | None if is_nullable and None in values else choice, arrow)
        raise self._wrong(place, f"enum {json.dumps(values)} must have texts or integers, as the type says")

    def _checked(self, python: Any, kind_name: str, node: dict[str, Any], place: str) -> Any:
        checks = {ours: node[name] for name, ours in _CHECKS.get(kind_name, {}).items() if name in node}
        if kind_name == "integer":
            # A number that Arrow's int64 cannot hold must not stop the job.
            low, high = {} if "gt" in checks else {"ge": -_INT64}, {} if "lt" in checks else {"le": _INT64 - 1}
            checks = low | high | checks
        if not checks:
            return python
        try:
            if "pattern" in checks:
                re.compile(checks["pattern"])
            found = Annotated[python, Meta(**checks)]
            msgspec.json.Decoder(found)
        except (TypeError, ValueError, re.error) as error:
            raise self._wrong(place, f"{error}: correct it") from None
        return found

    def _wrong(self, place: str, text: str) -> SettingsError:
        return SettingsError(f"schema {self._source}, {place}: {text}")


def _struct(row: _Row) -> _Kind:
    fields = [(f"f{i}", one.name, one.kind) for i, one in enumerate(row.fields)]
    return _Kind(
        row.python,
        pa.struct([pa.field(one.name, one.kind.arrow) for one in row.fields]),
        lambda value: {name: _converted(kind, getattr(value, field)) for field, name, kind in fields},
    )


def _each(item: _Kind) -> Callable[[Any], Any] | None:
    return None if item.convert is None else lambda values: [_converted(item, one) for one in values]


def _each_value(value: _Kind) -> Callable[[Any], Any]:
    return lambda values: [(name, _converted(value, one)) for name, one in values.items()]
