"""The JSON dialect of Java peers: fastjson's maps with keys that are not strings.

* integer keys are written bare: ``{0:"a:1",1:"b:2"}``;
* object keys are written inline: ``{{"brokerName":"b","queueId":0,"topic":"T"}:3}``;
* fastjson 1 may write a repeated object as ``{"$ref":"$.path"}``: ``$`` is the root, ``@`` the object that holds the
  reference, ``..`` the one around that; steps are ``.name`` (with ``\\`` escapes), ``["name"]`` and ``[index]``;
* an enum may come as its ordinal number instead of its name (`ORDINALS`).

Strict JSON is a subset and takes the fast way through msgspec. When read, integer keys become their text (as strict
JSON would have them) and object keys become `ObjectKey`, which `decode_as` turns into the key type of the map, such as
``dict[MessageQueue, int]``. When written, integer keys are bare and object keys inline, which every Java release reads.

Source: remoting.md §6.1, §6.3, store.md §9.1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError
from rmqkit.protocol.codes import LANGUAGES
from rmqkit.protocol.fastjson_reader import ObjectKey, read

__all__ = ["ORDINALS", "ObjectKey", "decode_as", "dumps", "loads"]

T = TypeVar("T")

ORDINALS: dict[str, tuple[str, ...]] = {
    "consumeType": ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP"),
    "messageModel": ("BROADCASTING", "CLUSTERING"),
    "consumeFromWhere": (
        "CONSUME_FROM_LAST_OFFSET",
        "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
        "CONSUME_FROM_MIN_OFFSET",
        "CONSUME_FROM_MAX_OFFSET",
        "CONSUME_FROM_FIRST_OFFSET",
        "CONSUME_FROM_TIMESTAMP",
    ),
    "topicFilterType": ("SINGLE_TAG", "MULTI_TAG"),
    "consumeResult": ("CR_SUCCESS", "CR_LATER", "CR_ROLLBACK", "CR_COMMIT", "CR_THROW_EXCEPTION", "CR_RETURN_NULL"),
    "mode": ("PULL", "POP"),
    "language": LANGUAGES,
}
"""Enum members by the property that holds them, in the order of their ordinals. Source: remoting.md §6.3."""


def decode_as(body: bytes | bytearray | memoryview, body_type: type[T], *, slow_bytes_max: int | None = None) -> T:
    """A typed value out of a body in strict JSON or the dialect.
    Raises BodyError: neither, or not of the type; the text names the place.
    ``slow_bytes_max``: bytes up to which what is not strict JSON of the type is read; None: any number."""
    if not _has_reference(body):
        try:
            return msgspec.json.decode(body, type=body_type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # not strict JSON, or something that only the dialect allows
    if slow_bytes_max is not None and len(body) > slow_bytes_max:
        raise BodyError(
            f"JSON body of {len(body)} bytes is not strict JSON of {getattr(body_type, '__name__', body_type)}: "
            f"only {slow_bytes_max} bytes of anything else are read"
        )
    try:
        return msgspec.convert(read(body), body_type, strict=False)
    except msgspec.ValidationError:
        plain = _with_names(read(body, has_quoted_objects=True))
    try:
        return msgspec.convert(plain, body_type, strict=False)
    except msgspec.ValidationError as error:
        raise BodyError(f"{getattr(body_type, '__name__', body_type)}: {error}") from None


def loads(body: bytes | bytearray | memoryview) -> Any:
    """The value in a body in strict JSON or the dialect, with ``$ref`` resolved.
    Raises BodyError: the body is neither."""
    if not _has_reference(body):
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return read(body)


def _has_reference(body: bytes | bytearray | memoryview) -> bool:
    """A body with references is often strict JSON as well; msgspec would take them for unknown members."""
    return b'"$ref"' in (bytes(body) if isinstance(body, memoryview) else body)


def _with_names(value: Any) -> Any:
    """The value with ordinals replaced by names; lists and maps are changed in place."""
    if isinstance(value, list):
        for element in value:
            _with_names(element)
    elif isinstance(value, dict):
        for name, member in value.items():
            if type(member) is int and (names := ORDINALS.get(name)) and 0 <= member < len(names):
                value[name] = names[member]
            else:
                _with_names(member)
    return value


def dumps(value: Any, *, indent: str | None = None) -> bytes:
    """A value in the dialect: integer keys bare, `ObjectKey` and struct keys inline, None members left out. A Raw is
    what this returned for a part, with the same indent.
    ``indent`` is the text of one level for files read by people; without it there is one line."""
    return _text(value, "" if indent is None else "\n", indent or "").encode("utf-8", "replace")


_LEFT_OUT = (None, msgspec.UNSET)


def _text(value: Any, line: str, step: str) -> str:
    """A value, its first line not indented. ``line``: what begins a new line at the level of the value."""
    if type(value) is int:
        return str(value)
    if type(value) in (str, bool):
        return msgspec.json.encode(value).decode()
    if type(value) is msgspec.Raw:
        return bytes(value).decode().replace("\n", line)
    inner = line + step if line else ""
    if isinstance(value, msgspec.Struct):
        members = ((name, getattr(value, attribute)) for attribute, name in _members(type(value)))
        texts = [name + _text(one, inner, step) for name, one in members if one not in _LEFT_OUT]
        return _joined("{", texts, "}", line, inner)
    if isinstance(value, dict | Mapping):
        return _joined("{", [f"{_key(key)}:{_text(one, inner, step)}" for key, one in value.items()], "}", line, inner)
    if isinstance(value, list | tuple | set | frozenset):
        return _joined("[", [_text(one, inner, step) for one in value], "]", line, inner)
    return msgspec.json.encode(value).decode()


def _joined(begin: str, texts: list[str], end: str, line: str, inner: str) -> str:
    return f"{begin}{inner}{f',{inner}'.join(texts)}{line}{end}" if texts else begin + end


def _key(key: Any) -> str:
    if type(key) is not str and isinstance(key, msgspec.Struct | ObjectKey):
        return _text(key, "", "")
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return str(int(key)) if is_number else msgspec.json.encode(str(key)).decode()


@functools.cache
def _members(struct: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The attributes of a struct and how each begins on the wire."""
    return tuple((info.name, f'"{info.encode_name}":') for info in msgspec.structs.fields(struct))
