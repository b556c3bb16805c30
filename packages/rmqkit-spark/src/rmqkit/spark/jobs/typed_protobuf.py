"""Columns from a Protobuf descriptor, and the decoder of bodies.

The file is the output of ``protoc --include_imports --descriptor_set_out=FILE.desc``. Google's package decodes.

==============================================  ========================================================================
Protobuf                                        column
==============================================  ========================================================================
``string``, ``enum``                            string
``int32``, ``sint32``, ``sfixed32``             int
``uint32``, ``fixed32`` and 64 bits             bigint; a number above the range does not fit
``float``, ``double``, ``bool``, ``bytes``      float, double, boolean, binary
``repeated``, ``map``                           list, map
``google.protobuf.Timestamp``                   timestamp in µs, UTC
a message                                       struct
==============================================  ========================================================================

A field with presence (``optional``, a message, a member of ``oneof``) is null if it is absent. Any other field has its
default value then, as Protobuf says. A message that contains itself is refused. Unknown fields are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from rmqkit import extras
from rmqkit.errors import SettingsError
from rmqkit.spark.jobs.typed_columns import TIMESTAMP, Bodies, BodyColumn

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor, FieldDescriptor

_TIMESTAMP_NAME = "google.protobuf.Timestamp"
_INT64 = 1 << 63


class _Type(NamedTuple):
    """``value`` converts the value of Google's package to a value for Arrow; None: they are the same."""

    arrow: pa.DataType
    value: Callable[[Any], Any] | None = None


def protobuf_bodies(source: str, content: bytes, message: str) -> Bodies:
    """Return the columns of a message, and its decoder.
    Raises SettingsError: it is not a descriptor with this message. Raises ExtraMissing: the package is missing."""
    with extras.needed("grpc", "a Protobuf schema"):
        from google.protobuf.message import DecodeError
        from google.protobuf.message_factory import GetMessageClass
    descriptor = _descriptor(source, content, message)
    parse: Any = GetMessageClass(descriptor).FromString
    fields = _fields(source, descriptor, ())
    row = _row(fields)

    def decode(body: bytes) -> list[Any]:
        try:
            found = parse(body)
        except DecodeError as error:
            raise ValueError(f"no {descriptor.full_name}: {error}") from None
        if not found.IsInitialized():
            raise ValueError(f"no {descriptor.full_name}: {', '.join(found.FindInitializationErrors())} is missing")
        return list(row(found).values())

    return Bodies([BodyColumn(one.name, kind.arrow, one.is_required) for one, kind in fields], decode)


def _descriptor(source: str, content: bytes, message: str) -> Descriptor:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import DecodeError

    try:
        files = FileDescriptorSet.FromString(content).file
    except DecodeError as error:
        raise SettingsError(
            f"schema {source} is no descriptor: {error}: write it with protoc --descriptor_set_out"
        ) from None
    # Imported files come first, so the file that protoc was called for is the last one.
    own = files[-1] if files else None
    names = [".".join(filter(None, [own.package, one.name])) for one in own.message_type] if own else []
    if not message and len(names) != 1:
        raise SettingsError(f"schema {source} has the messages {', '.join(names) or '(none)'}: name one with --message")
    pool = DescriptorPool()
    try:
        for file in files:
            pool.Add(file)
        return pool.FindMessageTypeByName(message or names[0])
    except (KeyError, TypeError) as error:
        raise SettingsError(
            f"schema {source}: {' '.join(str(error).split())}: write it with protoc --include_imports, and name one of"
            " its messages with --message"
        ) from None


def _fields(source: str, message: Descriptor, above: tuple[str, ...]) -> list[tuple[FieldDescriptor, _Type]]:
    if message.full_name in above:
        raise SettingsError(f"schema {source}: {message.full_name} contains itself, which no column can: leave it out")
    if not message.fields:
        raise SettingsError(f"schema {source}: {message.full_name} has no fields: add them, or leave it out")
    return [(one, _field(source, one, (*above, message.full_name))) for one in message.fields]


def _field(source: str, field: FieldDescriptor, above: tuple[str, ...]) -> _Type:
    """Return the type of a field. ``above`` are the names of the messages around it."""
    kind: Any = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (_one(source, kind.fields_by_name[name], above) for name in ("key", "value"))
        return _Type(
            pa.map_(key.arrow, value.arrow),
            lambda found: [(_converted(key, one), _converted(value, found[one])) for one in sorted(found)],
        )
    single = _one(source, field, above)
    if not field.is_repeated:
        return single
    return _Type(pa.list_(single.arrow), lambda found: [_converted(single, one) for one in found])


def _one(source: str, field: FieldDescriptor, above: tuple[str, ...]) -> _Type:
    if field.message_type is not None:
        if field.message_type.full_name == _TIMESTAMP_NAME:
            return _Type(TIMESTAMP, _microseconds)
        fields = _fields(source, field.message_type, above)
        return _Type(pa.struct([pa.field(one.name, kind.arrow) for one, kind in fields]), _row(fields))
    if field.enum_type is not None:
        names = {one.number: one.name for one in field.enum_type.values}
        return _Type(pa.string(), lambda number: _symbol(field.full_name, names, number))
    match field.cpp_type:
        case field.CPPTYPE_INT32:
            return _Type(pa.int32())
        case field.CPPTYPE_INT64 | field.CPPTYPE_UINT32:
            return _Type(pa.int64())
        case field.CPPTYPE_UINT64:
            return _Type(pa.int64(), lambda number: _int64(field.full_name, number))
        case field.CPPTYPE_FLOAT:
            return _Type(pa.float32())
        case field.CPPTYPE_DOUBLE:
            return _Type(pa.float64())
        case field.CPPTYPE_BOOL:
            return _Type(pa.bool_())
    return _Type(pa.binary() if field.type == field.TYPE_BYTES else pa.string())


def _row(fields: list[tuple[FieldDescriptor, _Type]]) -> Callable[[Any], dict[str, Any]]:
    plain = [(one.name, one.has_presence, kind) for one, kind in fields]
    return lambda message: {
        name: None if has_presence and not message.HasField(name) else _converted(kind, getattr(message, name))
        for name, has_presence, kind in plain
    }


def _converted(kind: _Type, value: Any) -> Any:
    return value if kind.value is None else kind.value(value)


def _symbol(field: str, names: dict[int, str], number: int) -> str:
    if number not in names:
        raise ValueError(f"{number} is no value of {field}")
    return names[number]


def _int64(field: str, number: int) -> int:
    if number >= _INT64:
        raise ValueError(f"{field} is {number}, above the range of bigint")
    return number


def _microseconds(moment: Any) -> int:
    found: int = moment.seconds * 1_000_000 + moment.nanos // 1000
    if not -_INT64 <= found < _INT64:
        raise ValueError(f"{moment.seconds} s is no timestamp in µs")
    return found
