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
from collections.abc import Callable, Collection, Mapping
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


def decode_as(body: bytes | bytearray | memoryview, body_type: type[T]) -> T:
    """A typed value out of a body in strict JSON or the dialect.
    Raises BodyError: neither, or not of the type; the text names the place."""
    if not _has_reference(body):
        try:
            return msgspec.json.decode(body, type=body_type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # not strict JSON, or something that only the dialect allows
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
    """A value in the dialect: integer keys bare, `ObjectKey` and struct keys inline, None members left out.
    ``indent`` is the text of one level for files read by people; without it there is one line."""
    parts: list[str] = []
    _write(parts.append, value, "" if indent is None else "\n", indent or "")
    return "".join(parts).encode("utf-8", "replace")


def _write(put: Callable[[str], None], value: Any, line: str, step: str) -> None:
    if type(value) is int:
        put(str(value))
    elif isinstance(value, msgspec.Struct):
        members = ((name, getattr(value, attribute)) for attribute, name in _members(type(value)))
        _write_members(put, [(n, m) for n, m in members if m is not None and m is not msgspec.UNSET], line, step)
    elif isinstance(value, Mapping):
        _write_members(put, value.items(), line, step)
    elif isinstance(value, list | tuple | set | frozenset):
        inner, between = line + step if line else "", "["
        for element in value:
            put(between + inner)
            _write(put, element, inner, step)
            between = ","
        put(line + "]" if value else "[]")
    else:
        put(msgspec.json.encode(value).decode())


def _write_members(put: Callable[[str], None], members: Collection[tuple[Any, Any]], line: str, step: str) -> None:
    inner, between = line + step if line else "", "{"
    for key, member in members:
        put(between + inner)
        if isinstance(key, msgspec.Struct | ObjectKey):
            _write(put, key, "", "")
        else:
            put(str(int(key)) if isinstance(key, int) and not isinstance(key, bool) else _quoted(str(key)))
        put(":")
        _write(put, member, inner, step)
        between = ","
    put(line + "}" if members else "{}")


@functools.cache
def _members(struct: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """The attributes of a struct and their names on the wire."""
    return tuple((info.name, info.encode_name) for info in msgspec.structs.fields(struct))


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
