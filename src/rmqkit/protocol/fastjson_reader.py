"""Reads fastjson's dialect of JSON, character by character; what msgspec cannot read comes here.

The grammar is JSON's, where a key may also be an integer or an object, a number may end in Java's ``L``, ``B``, ``S``,
``F`` or ``D``, a string may have control characters as they are (Go clients tell their stacks so), and an object may
stand for another by ``{"$ref":path}``.

References are resolved by copying, so the value is a tree again; the copies together may not have more values than the
text has characters, which bounds what a short text can grow into. A reference to an object around it cannot be part of
a tree: it reads as None. Java writes such ones only for derived properties that no type here declares.
Source: remoting.md §6.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rmqkit.errors import BodyError

__all__ = ["DEPTH_MAX", "ObjectKey", "read"]

DEPTH_MAX = 64
"""Deeper nesting is refused; no body of the protocol comes near it."""


def read(body: bytes | bytearray | memoryview, *, has_quoted_objects: bool = False) -> Any:
    """The value in a body. Raises BodyError: it is not in the dialect, or its references cannot be resolved.
    With ``has_quoted_objects`` a text key that holds an object is taken for one: some peers quote object keys."""
    try:
        text = str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"JSON body is not UTF-8: byte {error.start} cannot be decoded") from None
    return _Reader(text, has_quoted_objects).document()


class ObjectKey(Mapping[str, Any]):
    """A map key that is an object; equal to another with the same members in any order."""

    __slots__ = ("_hash", "_members")

    def __init__(self, members: Mapping[str, Any]) -> None:
        """Raises TypeError when a member is a list or an object itself."""
        self._members = dict(members)
        self._hash = hash(frozenset(self._members.items()))

    def __getitem__(self, name: str) -> Any:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectKey) and self._members == other._members

    def __repr__(self) -> str:
        return f"ObjectKey({self._members})"


_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?[LBSFD]?")
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ESCAPE_OR_CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
_REF_STEP = re.compile(r"""\.((?:[^.\[\\]|\\.)+)|\[([0-9]+)\]|\["((?:[^"\\]|\\.)*)"\]|\['((?:[^'\\]|\\.)*)'\]""")


class _Reader:
    """A recursive-descent reader; ``at`` is the next character."""

    def __init__(self, text: str, has_quoted_objects: bool) -> None:
        self.text = text
        self.has_quoted_objects = has_quoted_objects
        self.at = 0
        self.has_refs = False

    def document(self) -> Any:
        value = self.value(0)
        self.end()
        return _References(value, len(self.text)).resolve() if self.has_refs else value

    def end(self) -> None:
        if self.skip():
            raise self.error("the end")

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
            return self.object_key(depth)
        key = self.value(depth + 1)
        if isinstance(key, str):
            return self.quoted_object(key, depth) if self.has_quoted_objects and key.startswith("{") else key
        if isinstance(key, int) and not isinstance(key, bool):
            return str(key)
        raise self.error("a string, integer or object as key")

    def object_key(self, depth: int) -> ObjectKey:
        try:
            return ObjectKey(self.value(depth + 1))
        except TypeError:
            raise self.error("an object key with plain values") from None

    def quoted_object(self, key: str, depth: int) -> str | ObjectKey:
        inner = _Reader(key, False)
        try:
            value = inner.object_key(depth)
            inner.end()
        except BodyError:
            return key
        return value

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
            value = msgspec.json.decode(_ESCAPE_OR_CONTROL.sub(_escaped, match[0]), type=str)
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


class _References:
    """Copies a value with every ``{"$ref": path}`` replaced by a copy of what it points to.
    The copy may have at most ``nodes_max`` values, objects and lists."""

    def __init__(self, root: Any, nodes_max: int) -> None:
        self._root = root
        self._nodes_left = self._nodes_max = nodes_max
        self._open: list[Any] = []

    def resolve(self) -> Any:
        return self._copy(self._root, ())

    def _copy(self, value: Any, around: tuple[Any, ...]) -> Any:
        """A copy of a value that has these objects and lists around it, outermost first."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise BodyError(f"JSON body: its references grow it beyond {self._nodes_max} values")
        if not isinstance(value, dict | list):
            return value
        if isinstance(value, dict) and isinstance(path := value.get("$ref"), str):
            value, around = self._target(path, around)
            if isinstance(value, dict) and "$ref" in value:
                raise BodyError(f"JSON body: $ref {path[:80]!r} points to another reference")
            if not isinstance(value, dict | list):
                return value
        if any(value is one for one in self._open):
            return None
        if len(self._open) > DEPTH_MAX:
            raise BodyError(f"JSON body: its references nest it deeper than {DEPTH_MAX} levels")
        self._open.append(value)
        around = (*around, value)
        copied: Any
        if isinstance(value, list):
            copied = [self._copy(element, around) for element in value]
        else:
            copied = {key: self._copy(member, around) for key, member in value.items()}
        self._open.pop()
        return copied

    def _target(self, path: str, around: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """What a path points to, and what is around that."""
        if path.startswith("$"):
            found, around, at = self._root, (), 1
        elif path.startswith("@") and around:
            found, around, at = around[-1], around[:-1], 1
        elif path.startswith("..") and len(around) > 1:
            found, around, at = around[-2], around[:-2], 2
        else:
            raise BodyError(f"JSON body: $ref {path[:80]!r} is not a path from here")
        while at < len(path):
            step = _REF_STEP.match(path, at)
            if step is None:
                raise BodyError(f"JSON body: $ref {path[:80]!r} cannot be read at character {at}")
            name = next(part for part in step.groups() if part is not None)
            around = (*around, found)
            try:
                found = found[int(name)] if isinstance(found, list) else found[re.sub(r"\\(.)", r"\1", name)]
            except (KeyError, IndexError, TypeError, ValueError):
                raise BodyError(f"JSON body: $ref {path[:80]!r} points to nothing") from None
            at = step.end()
        return found, around


def _escaped(found: re.Match[str]) -> str:
    """An escape as it is, a control character as the escape that strict JSON has for it."""
    return found[0] if found[0][0] == "\\" else f"\\u{ord(found[0]):04x}"
