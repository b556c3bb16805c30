"""Columns from an Avro schema, and the decoder of bodies in Avro's binary encoding.

A body is one record of exactly this schema, without the header of a file and without the id of a registry.

==============================================  ========================================================================
Avro                                            column
==============================================  ========================================================================
``string``, ``enum``                            string
``int``, ``long``                               int, bigint
``float``, ``double``, ``boolean``              float, double, boolean
``bytes``, ``fixed``                            binary
``decimal`` of ``bytes`` or ``fixed``           decimal, up to 38 digits
``date``, ``timestamp-millis`` and ``-micros``  date, timestamp in µs, UTC
``array``, ``map``, ``record``                  list, map, struct
union of ``null`` and one type                  the type; null is allowed
==============================================  ========================================================================

Any other type is refused, and so is a record that contains itself. Another ``logicalType`` is ignored, as Avro's
specification says. Each value has at least one byte, because records without fields are refused, so the size of the
body bounds the number of its values. The encoding is in https://avro.apache.org/docs/1.12.0/specification/.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa

from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_columns import TIMESTAMP, Bodies, BodyColumn

_Read = Callable[[bytes, int], tuple[Any, int]]
"""A function of a body and a position. It returns a value, and the position after the value. It raises ValueError."""

_DIGITS_MAX = 38
_LONG_BYTES_MAX = 10
_INT32, _INT64 = 1 << 31, 1 << 63


class _Type(NamedTuple):
    arrow: pa.DataType
    read: _Read
    is_nullable: bool = False


class _Unfit(ValueError):
    """A value that does not fit, with its path."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{reason} - at `${path}`")
        self.path, self.reason = path, reason


def avro_bodies(source: str, text: str) -> Bodies:
    """Return the columns of a schema, and its decoder. Raises SettingsError: it is not a schema of a table."""
    try:
        root = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"schema {source} is not JSON: {error}: give a file with an Avro schema") from None
    if not isinstance(root, dict) or root.get("type") != "record":
        raise SettingsError(f"schema {source} has no columns: its type must be record")
    fields = _Reader(source).fields(root, "$", "", ())
    read = _record([(name, one.read) for name, one in fields])

    def decode(body: bytes) -> list[Any]:
        row, end = read(body, 0)
        if end != len(body):
            raise ValueError(f"{len(body) - end} bytes follow the record")
        return list(row.values())

    return Bodies([BodyColumn(name, one.arrow, not one.is_nullable) for name, one in fields], decode)


class _Reader:
    """Reads the nodes of a schema."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._named: dict[str, tuple[dict[str, Any], str]] = {}

    def fields(
        self, node: Mapping[str, Any], place: str, namespace: str, above: tuple[str, ...]
    ) -> list[tuple[str, _Type]]:
        """Return the fields of a record. ``above`` are the names of the records around it."""
        name, namespace = self._declared(node, place, namespace)
        if name in above:
            raise self._wrong(place, f"{name} contains itself, which no column can: leave it out")
        fields = node.get("fields")
        if not isinstance(fields, list) or not fields or not all(isinstance(one, dict) for one in fields):
            raise self._wrong(place, "a record needs fields: add them, or leave it out")
        named = [
            (str(one.get("name")), self.type(one.get("type"), f"{place}.{one.get('name')}", namespace, (*above, name)))
            for one in fields
        ]
        if len(dict(named)) < len(named):
            raise self._wrong(place, "two fields have the same name: rename one of them")
        return named

    def type(self, node: Any, place: str, namespace: str, above: tuple[str, ...]) -> _Type:
        """Return the type of a node."""
        if isinstance(node, list):
            return self._union(node, place, namespace, above)
        kind = node.get("type") if isinstance(node, dict) else node
        if isinstance(kind, (dict, list)):
            return self.type(kind, place, namespace, above)
        logical = node.get("logicalType") if isinstance(node, dict) else None
        if kind in _PLAIN:
            return _LOGICAL.get((kind, str(logical))) or (
                self._decimal(node, place, _bytes) if (kind, logical) == ("bytes", "decimal") else _PLAIN[kind]
            )
        if isinstance(node, str):
            return self._reference(node, place, namespace, above)
        match kind:
            case "array":
                item = self.type(node.get("items"), f"{place}[...]", namespace, above)
                return _Type(pa.list_(item.arrow), _array(item.read))
            case "map":
                value = self.type(node.get("values"), f"{place}[...]", namespace, above)
                return _Type(pa.map_(pa.string(), value.arrow), _array(_pair(value.read)))
            case "record":
                fields = self.fields(node, place, namespace, above)
                arrow = pa.struct([pa.field(name, one.arrow) for name, one in fields])
                return _Type(arrow, _record([(name, one.read) for name, one in fields]))
            case "enum" | "fixed":
                self._declared(node, place, namespace)
                return self._enum(node, place) if kind == "enum" else self._fixed(node, place)
        raise self._wrong(place, f"type {json.dumps(kind)} is not supported: give another type")

    def _declared(self, node: Mapping[str, Any], place: str, namespace: str) -> tuple[str, str]:
        """Store a named type. Return its full name and its namespace."""
        name = node.get("name")
        if not isinstance(name, str) or not name:
            raise self._wrong(place, f"{node.get('type')} has no name: add it")
        if "." not in name:
            space = str(node.get("namespace", namespace))
            name = f"{space}.{name}" if space else name
        self._named[name] = dict(node), namespace
        return name, name.rpartition(".")[0]

    def _reference(self, name: str, place: str, namespace: str, above: tuple[str, ...]) -> _Type:
        full = name if "." in name or f"{namespace}.{name}" not in self._named else f"{namespace}.{name}"
        if full not in self._named:
            raise self._wrong(place, f"type {name} is not supported, and no earlier type has this name: correct it")
        node, outer = self._named[full]
        return self.type(node, place, outer, above)

    def _union(self, node: list[Any], place: str, namespace: str, above: tuple[str, ...]) -> _Type:
        others = [one for one in node if one not in ("null", {"type": "null"})]
        if len(others) != 1 or len(node) > 2:
            raise self._wrong(place, "a union is only supported with one type and null: leave it out")
        found = self.type(others[0], place, namespace, above)
        reads = [None if one in ("null", {"type": "null"}) else found.read for one in node]
        return _Type(found.arrow, _choice(reads), is_nullable=len(node) == 2)

    def _enum(self, node: Mapping[str, Any], place: str) -> _Type:
        symbols = node.get("symbols")
        if not isinstance(symbols, list) or not symbols or not all(isinstance(one, str) for one in symbols):
            raise self._wrong(place, "enum needs symbols: add them")

        def read(body: bytes, at: int) -> tuple[str, int]:
            index, at = _long(body, at)
            if not 0 <= index < len(symbols):
                raise ValueError(f"{index} is the index of no symbol")
            return symbols[index], at

        return _Type(pa.string(), read)

    def _fixed(self, node: Mapping[str, Any], place: str) -> _Type:
        size = node.get("size")
        if not isinstance(size, int) or size < 1:
            raise self._wrong(place, f"fixed has the size {size}: give a number of bytes")

        def read(body: bytes, at: int) -> tuple[bytes, int]:
            return _taken(body, at, size)

        return self._decimal(node, place, read) if node.get("logicalType") == "decimal" else _Type(pa.binary(), read)

    def _decimal(self, node: Mapping[str, Any], place: str, read: _Read) -> _Type:
        precision: Any = node.get("precision")
        scale: Any = node.get("scale", 0)
        is_whole = isinstance(precision, int) and isinstance(scale, int)
        if not (is_whole and 1 <= precision <= _DIGITS_MAX and 0 <= scale <= precision):
            raise self._wrong(place, f"precision {precision}, scale {scale} is no decimal of 1 to {_DIGITS_MAX} digits")
        bound = 10**precision

        def number(body: bytes, at: int) -> tuple[Decimal, int]:
            digits, at = read(body, at)
            unscaled = int.from_bytes(digits, "big", signed=True)
            if not -bound < unscaled < bound:
                raise ValueError(f"decimal has more than {precision} digits")
            return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale)), at

        return _Type(pa.decimal128(precision, scale), number)

    def _wrong(self, place: str, text: str) -> SettingsError:
        return SettingsError(f"schema {self._source}, {place}: {text}")


# ---------------------------------------------------------------- values


def _long(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for byte in body[at : at + _LONG_BYTES_MAX]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >= 2 * _INT64:
                break
            return (value >> 1) ^ -(value & 1), at
        shift += 7
    raise ValueError("a number ends early, or has more than 64 bits")


def _int(body: bytes, at: int) -> tuple[int, int]:
    value, at = _long(body, at)
    if not -_INT32 <= value < _INT32:
        raise ValueError(f"{value} has more than 32 bits")
    return value, at


def _millis(body: bytes, at: int) -> tuple[int, int]:
    value, at = _long(body, at)
    if not -_INT64 <= value * 1000 < _INT64:
        raise ValueError(f"{value} ms is no timestamp in µs")
    return value * 1000, at


def _taken(body: bytes, at: int, size: int) -> tuple[bytes, int]:
    if not 0 <= size <= len(body) - at:
        raise ValueError(f"{size} bytes are expected, {len(body) - at} are left")
    return body[at : at + size], at + size


def _bytes(body: bytes, at: int) -> tuple[bytes, int]:
    size, at = _long(body, at)
    return _taken(body, at, size)


def _string(body: bytes, at: int) -> tuple[str, int]:
    content, at = _bytes(body, at)
    return content.decode(), at


def _boolean(body: bytes, at: int) -> tuple[bool, int]:
    byte, at = _taken(body, at, 1)
    if byte > b"\1":
        raise ValueError(f"{byte[0]} is no boolean")
    return byte == b"\1", at


def _packed(layout: str) -> _Read:
    size = struct.calcsize(layout)

    def read(body: bytes, at: int) -> tuple[float, int]:
        content, at = _taken(body, at, size)
        return struct.unpack(layout, content)[0], at

    return read


def _choice(reads: list[_Read | None]) -> _Read:
    def read(body: bytes, at: int) -> tuple[Any, int]:
        index, at = _long(body, at)
        if not 0 <= index < len(reads):
            raise ValueError(f"{index} is the index of no type")
        chosen = reads[index]
        return (None, at) if chosen is None else chosen(body, at)

    return read


def _array(item: _Read) -> _Read:
    def read(body: bytes, at: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        while True:
            count, at = _long(body, at)
            if count == 0:
                return values, at
            if count < 0:  # the size of the block in bytes follows
                count, (_, at) = -count, _long(body, at)
            if count > len(body) - at:
                raise ValueError(f"{count} items are expected, {len(body) - at} bytes are left")
            for _ in range(count):
                value, at = item(body, at)
                values.append(value)

    return read


def _pair(value: _Read) -> _Read:
    def read(body: bytes, at: int) -> tuple[tuple[str, Any], int]:
        key, at = _string(body, at)
        found, at = value(body, at)
        return (key, found), at

    return read


def _record(fields: list[tuple[str, _Read]]) -> _Read:
    def read(body: bytes, at: int) -> tuple[dict[str, Any], int]:
        row: dict[str, Any] = {}
        for name, field in fields:
            try:
                row[name], at = field(body, at)
            except _Unfit as error:
                raise _Unfit(f".{name}{error.path}", error.reason) from None
            except ValueError as error:
                raise _Unfit(f".{name}", str(error)) from None
        return row, at

    return read


_PLAIN = {
    "string": _Type(pa.string(), _string),
    "bytes": _Type(pa.binary(), _bytes),
    "int": _Type(pa.int32(), _int),
    "long": _Type(pa.int64(), _long),
    "float": _Type(pa.float32(), _packed("<f")),
    "double": _Type(pa.float64(), _packed("<d")),
    "boolean": _Type(pa.bool_(), _boolean),
}
_LOGICAL = {
    ("int", "date"): _Type(pa.date32(), _int),
    ("long", "timestamp-millis"): _Type(TIMESTAMP, _millis),
    ("long", "timestamp-micros"): _Type(TIMESTAMP, _long),
}
