"""The JSON dialect of Java peers: fastjson's maps with keys that are not strings.

* integer keys are written bare: ``{0:"a:1",1:"b:2"}``;
* object keys are written inline: ``{{"brokerName":"b","queueId":0,"topic":"T"}:3}``;
* fastjson 1 may write a repeated object as ``{"$ref":"$.path"}`` (``@`` this, ``..`` parent, ``$`` root).

Strict JSON is a subset and takes the fast way through msgspec. When read, integer keys become their text (as strict
JSON would have them) and object keys become `ObjectKey`. When written, integer keys are bare and `ObjectKey` is inline,
which every Java release reads. Source: remoting.md §6.1, store.md §9.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError

__all__ = ["ObjectKey", "decode_as", "dumps", "loads"]

T = TypeVar("T")

DEPTH_MAX = 64
"""Deeper nesting is refused; no body of the protocol comes near it."""


class ObjectKey(msgspec.Struct, frozen=True, order=True):
    """A map key that is an object, as sorted name/value pairs so that equal keys compare equal."""

    items: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> ObjectKey:
        return cls(tuple(sorted(value.items())))


def decode_as(body: bytes | bytearray | memoryview, body_type: type[T]) -> T:
    """A typed value out of a body in strict JSON or the dialect.

    Raises:
        BodyError: neither, or not of the type; the text names the place.
    """
    try:
        return msgspec.json.decode(body, type=body_type, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # not strict JSON, or a type that only the dialect's reader can settle
    try:
        return msgspec.convert(loads(body), body_type, strict=False)
    except msgspec.ValidationError as error:
        raise BodyError(f"{getattr(body_type, '__name__', body_type)}: {error}") from None


def loads(body: bytes | bytearray | memoryview) -> Any:
    """The value in a body in strict JSON or the dialect, with ``$ref`` resolved.

    Raises:
        BodyError: the body is neither.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        reader = _Reader(str(body, "utf-8"))
    except UnicodeDecodeError as error:
        raise BodyError(f"JSON body is not UTF-8: byte {error.start} cannot be decoded") from None
    return reader.document()


_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?[LBSFD]?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
_REF_STEP = re.compile(r"""\.((?:[^.\[\\]|\\.)+)|\[(\d+)\]|\["((?:[^"\\]|\\.)*)"\]|\['((?:[^'\\]|\\.)*)'\]""")


class _Reader:
    """A recursive-descent reader; ``at`` is the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.has_refs = False

    def document(self) -> Any:
        value = self.value(0)
        self.skip()
        if self.at != len(self.text):
            raise self.error("the end")
        return _resolve(value, value, value) if self.has_refs else value

    def error(self, expected: str) -> BodyError:
        found = self.text[self.at : self.at + 12] or "the end"
        return BodyError(f"JSON body: expected {expected} at character {self.at}, found {found!r}")

    def skip(self) -> str:
        match = _SPACE.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise self.error(f"at most {DEPTH_MAX} levels")
        match self.skip():
            case "{":
                return self.object(depth)
            case "[":
                return self.array(depth)
            case '"':
                return self.string()
            case _:
                return self.word_or_number()

    def object(self, depth: int) -> dict[Any, Any]:
        members: dict[Any, Any] = {}
        self.at += 1
        while self.skip() != "}":
            key = self.key(depth)
            self.expect(":")
            members[key] = self.value(depth + 1)
            if self.skip() == ",":
                self.at += 1
            elif self.text[self.at : self.at + 1] != "}":
                raise self.error("',' or '}'")
        self.at += 1
        self.has_refs = self.has_refs or "$ref" in members
        return members

    def key(self, depth: int) -> str | ObjectKey:
        if self.skip() == "{":
            value = self.value(depth + 1)
            try:
                hash(key := ObjectKey.of(value))
            except TypeError:
                raise self.error("an object key with plain values") from None
            return key
        key_value = self.value(depth + 1)
        if isinstance(key_value, str):
            return key_value
        if isinstance(key_value, int) and not isinstance(key_value, bool):
            return str(key_value)
        raise self.error("a string, integer or object as key")

    def array(self, depth: int) -> list[Any]:
        elements: list[Any] = []
        self.at += 1
        while self.skip() != "]":
            elements.append(self.value(depth + 1))
            if self.skip() == ",":
                self.at += 1
            elif self.text[self.at : self.at + 1] != "]":
                raise self.error("',' or ']'")
        self.at += 1
        return elements

    def expect(self, character: str) -> None:
        if self.skip() != character:
            raise self.error(repr(character))
        self.at += 1

    def string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self.error("a string")
        try:
            value = msgspec.json.decode(match[0], type=str)
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise self.error("a string without broken escapes") from None
        self.at = match.end()
        return value

    def word_or_number(self) -> Any:
        for word, value in _WORDS.items():
            if self.text.startswith(word, self.at):
                self.at += len(word)
                return value
        match = _NUMBER.match(self.text, self.at)
        if match is None or len(match[0]) > 400:
            raise self.error("a value")
        self.at = match.end()
        digits = match[0].rstrip("LBSFD")
        return float(digits) if match[1] or match[2] else int(digits)


def _resolve(value: Any, root: Any, parent: Any) -> Any:
    """The value with every ``{"$ref": path}`` in it replaced by what it points to."""
    if isinstance(value, list):
        return [_resolve(element, root, value) for element in value]
    if not isinstance(value, dict):
        return value
    if isinstance(path := value.get("$ref"), str):
        return _lookup(path, root, parent)
    return {key: _resolve(member, root, value) for key, member in value.items()}


def _lookup(path: str, root: Any, parent: Any) -> Any:
    if path in ("@", ".."):
        return parent
    if not path.startswith("$"):
        raise BodyError(f"JSON body: $ref {path!r} is not a path")
    at, found = 1, root
    while at < len(path):
        step = _REF_STEP.match(path, at)
        if step is None:
            raise BodyError(f"JSON body: $ref {path!r} cannot be read at character {at}")
        name = next(part for part in step.groups() if part is not None)
        try:
            found = found[int(name)] if isinstance(found, list) else found[re.sub(r"\\(.)", r"\1", name)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise BodyError(f"JSON body: $ref {path!r} points to nothing") from None
        at = step.end()
    return found


def dumps(value: Any, *, indent: str | None = None) -> bytes:
    """A value in the dialect: integer keys bare, `ObjectKey` and frozen struct keys inline, None members left out.

    Args:
        value: anything msgspec can turn into plain values, maps with int, str or struct keys included.
        indent: text of one level for files read by people, or None for one line.
    """
    return "".join(_write(value, "" if indent is None else "\n", indent or "")).encode("utf-8", "replace")


def _write(value: Any, line: str, step: str) -> list[str]:
    if isinstance(value, ObjectKey):
        value = dict(value.items)
    elif isinstance(value, msgspec.Struct):
        value = {
            info.encode_name: member
            for info in msgspec.structs.fields(value)
            if (member := getattr(value, info.name)) is not None and member is not msgspec.UNSET
        }
    inner = line + step if line else ""
    if isinstance(value, Mapping):
        members = [[*_write_key(key), ":", *_write(member, inner, step)] for key, member in value.items()]
        return _join("{", members, "}", line, inner)
    if isinstance(value, list | tuple | set | frozenset):
        return _join("[", [_write(element, inner, step) for element in value], "]", line, inner)
    return [msgspec.json.encode(value).decode()]


def _write_key(key: Any) -> list[str]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [str(int(key))]
    if isinstance(key, msgspec.Struct):
        return _write(key, "", "")
    return [msgspec.json.encode(str(key)).decode()]


def _join(start: str, members: list[list[str]], end: str, line: str, inner: str) -> list[str]:
    parts = [start]
    for i, member in enumerate(members):
        parts.append(("," if i else "") + inner)
        parts.extend(member)
    parts.append((line if members else "") + end)
    return parts
