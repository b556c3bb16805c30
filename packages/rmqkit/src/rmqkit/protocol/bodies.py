"""Bodies of a type: a value becomes JSON when it is sent, and JSON becomes a value of that type when it is read.

==========================================  ====================================================================
a type                                      is written and read by
==========================================  ====================================================================
a pydantic model or pydantic dataclass, or  pydantic, which is imported only then. Fields have their aliases' names,
one that contains such (``list[Order]``)    as reading looks for those
anything else: msgspec Structs,             msgspec, strictly: the text ``"1"`` is no ``int``, and a field that is
dataclasses, ``dict[str, int]``, …          not of the type is ignored
==========================================  ====================================================================

A body that does not fit is the sender's fault and is no better the next time: consumers put it to the dead letters.
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
"""What a message to send may have as its body: bytes, or a value that `encode_body` makes JSON of."""


def encode_body(value: object) -> bytes:
    """Make JSON of a msgspec Struct, a dataclass or a pydantic model.
    Raises ValueError: it is none of them, or something in it cannot be written as JSON."""
    kind: Any = type(value)
    try:
        if _is_pydantics(kind):
            # By alias: pydantic reads a field by its alias, so that the name alone would not be found.
            return cast("bytes", _adapter(kind).dump_json(value, by_alias=True))
        if isinstance(value, msgspec.Struct) or is_dataclass(value):
            return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a {kind.__name__} that cannot be written as JSON: {error}") from error
    raise ValueError(f"{kind.__name__}: it must be bytes, a msgspec Struct, a dataclass or a pydantic model")


@functools.lru_cache(maxsize=256)
def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """Make a function that reads bodies of a type; it raises BodyMismatch when one does not fit.
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
    from pydantic import TypeAdapter  # loaded already: the type is one of its own

    return TypeAdapter(kind)


def _reason(error: Exception) -> str:
    """One line that says what does not fit, without the values: dead letters and logs are read by others, too."""
    faults = getattr(error, "errors", None)
    if faults is None:
        return str(error)
    found = faults(include_url=False, include_input=False, include_context=False)
    lines = [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in found[:_FAULTS_MAX]]
    more = [f"and {len(found) - _FAULTS_MAX} more"] if len(found) > _FAULTS_MAX else []
    return "; ".join(lines + more)
