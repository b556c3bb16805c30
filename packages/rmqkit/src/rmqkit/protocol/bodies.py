"""Typed bodies: values of a type, written as JSON and read from JSON.

==========================================  ====================================================================
type                                        library that writes and reads values
==========================================  ====================================================================
a pydantic model or pydantic dataclass, or  pydantic, imported at the first use. JSON contains the aliases of
a type that contains one (``list[Order]``)  fields, because pydantic reads these
other types: msgspec Structs,               msgspec, strictly: the text ``"1"`` is not an ``int``, and fields that
dataclasses, ``dict[str, int]``, …          the type does not have are ignored
==========================================  ====================================================================

A body that does not fit its type is an error of the sender. A retry does not repair it, so consumers move the message
to the dead letters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, ClassVar, Protocol, cast, get_args

import msgspec

from rmqkit.errors import BodyMismatch

_FAULTS_MAX = 5


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


class _PydanticModel(Protocol):
    __pydantic_validator__: ClassVar[Any]


Body = bytes | bytearray | memoryview | msgspec.Struct | _Dataclass | _PydanticModel
"""The body of a message to send: bytes, or a value that `encode_body` writes as JSON."""


def encode_body(value: object) -> bytes:
    """Return the JSON of a msgspec Struct, a dataclass or a pydantic model.
    Raises ValueError: the value has another type, or contains a value that cannot be written as JSON."""
    kind: Any = type(value)
    try:
        if _is_pydantics(kind):
            # Write the aliases: pydantic reads fields by their aliases and would not find the names.
            return cast("bytes", _adapter(kind).dump_json(value, by_alias=True))
        if isinstance(value, msgspec.Struct) or is_dataclass(value):
            return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a {kind.__name__} that cannot be written as JSON: {error}") from error
    raise ValueError(f"{kind.__name__}: it must be bytes, a msgspec Struct, a dataclass or a pydantic model")


@functools.lru_cache(maxsize=256)
def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that reads bodies as values of a type. The function raises BodyMismatch if a body does not fit.
    Raises TypeError: the type cannot be read from JSON."""
    name = str(kind) if get_args(kind) else getattr(kind, "__name__", str(kind))
    read = _adapter(kind).validate_json if _is_pydantics(kind) else msgspec.json.Decoder(kind).decode

    def decode(body: bytes) -> Any:
        try:
            return read(body)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise BodyMismatch(name, _reason(error)) from None

    return decode


def _is_pydantics(kind: Any) -> bool:
    return hasattr(kind, "__pydantic_validator__") or any(map(_is_pydantics, get_args(kind)))


@functools.lru_cache(maxsize=256)
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter  # already imported, because the type belongs to pydantic

    return TypeAdapter(kind)


def _reason(error: Exception) -> str:
    """Return a line that describes the fault without values from the body, because dead letters and logs have other
    readers."""
    faults = getattr(error, "errors", None)
    if faults is None:
        return str(error)
    found = faults(include_url=False, include_input=False, include_context=False)
    lines = [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in found[:_FAULTS_MAX]]
    more = [f"and {len(found) - _FAULTS_MAX} more"] if len(found) > _FAULTS_MAX else []
    return "; ".join(lines + more)
