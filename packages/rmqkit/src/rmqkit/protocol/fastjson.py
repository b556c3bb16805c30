"""The JSON dialect of Java peers: fastjson's maps with keys that are not strings.

* integer keys have no quotes: ``{0:"a:1",1:"b:2"}``;
* object keys are not quoted, either: ``{{"brokerName":"b","queueId":0,"topic":"T"}:3}``;
* fastjson 1 may write a repeated object as ``{"$ref":"$.path"}``: ``$`` is the root, ``@`` the object that contains the
  reference, ``..`` the object around that object; steps are ``.name`` (with ``\\`` escapes), ``["name"]`` and
  ``[index]``;
* an enum may be its ordinal number instead of its name (`ORDINALS`).

Strict JSON is a subset, which msgspec reads directly. Readers return integer keys as text, as in strict JSON, and
object keys as `ObjectKey`. `decode_as` converts an `ObjectKey` to the key type of the map, such as ``dict[MessageQueue,
int]``. Writers write integer and object keys without quotes, which every Java release can read.

Most large bodies have object keys. One regular expression puts these keys in quotes, so that msgspec can read the body.
`_Reader` reads the remaining bodies character by character. Its grammar is JSON with these additions: a key may be an
integer or an object, a number may end in Java's ``L``, ``B``, ``S``, ``F`` or ``D``, and a string may contain unescaped
control characters (as in the stacks of Go clients). `_References` replaces references by copies, so the result is a
tree. The result must not have more values than the text has characters, which limits the growth of a short text. A
reference to an object that contains the reference becomes None, because a tree cannot represent it. Java writes such
references only for derived properties that no type here declares.

Source: remoting.md §6.1, §6.3, store.md §9.1.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from rmqkit.errors import BodyError
from rmqkit.protocol.codes import LANGUAGES

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
"""The names of enum members, in the order of their ordinals, by the name of the property. Source: remoting.md §6.3."""


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = threading.Lock()


def _decoder(body_type: type[T]) -> msgspec.json.Decoder[T]:
    """Return the cached decoder of a type. A lock serializes the creation of decoders: if two threads use a msgspec
    type for the first time at the same moment, one thread uses the unfinished type of the other, and the process
    crashes."""
    decoder = _decoders.get(body_type)
    if decoder is None:
        with _building:
            decoder = _decoders.setdefault(body_type, msgspec.json.Decoder(body_type, strict=False))
    return decoder


def decode_as(body: bytes | bytearray | memoryview, body_type: type[T], *, slow_bytes_max: int | None = None) -> T:
    """Return a typed value from a body in strict JSON or the dialect.
    Raises BodyError: the body is in neither format, or does not fit the type. The text names the place of the fault.
    ``slow_bytes_max``: the maximum size of a body that is not strict JSON of the type; None means no limit."""
    decoder = _decoder(body_type)
    if not _has_reference(body):
        try:
            return decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # not strict JSON, or valid only in the dialect
    if slow_bytes_max is not None and len(body) > slow_bytes_max:
        raise BodyError(
            f"JSON body of {len(body)} bytes is not strict JSON of {getattr(body_type, '__name__', body_type)}: "
            f"only {slow_bytes_max} bytes of anything else are read"
        )
    try:
        return msgspec.convert(read(body), body_type, strict=False)
    except msgspec.ValidationError:
        # Convert ordinals only if the type refuses the body: a property with a name of `ORDINALS` may be a number.
        plain = _with_names(read(body, has_quoted_objects=True))
    try:
        return msgspec.convert(plain, body_type, strict=False)
    except msgspec.ValidationError as error:
        raise BodyError(f"{getattr(body_type, '__name__', body_type)}: {error}") from None


def decode_with_texts(body: bytes | bytearray | memoryview, body_type: type[T]) -> T:
    """Return a typed value from a body with very many object keys, in a third of the time of `decode_as`. The type
    declares maps with object keys as ``dict[str, …]``. Each key is the text of its object, in strict JSON.
    Raises BodyError: the body has references, or is not in the form that Java and rmqkit write."""
    try:
        return _decoder(body_type).decode(_OBJECT_KEY.sub(_quoted, str(body, "utf-8")))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BodyError(f"{getattr(body_type, '__name__', body_type)}: {error}") from None


def loads(body: bytes | bytearray | memoryview) -> Any:
    """Return the value in a body in strict JSON or the dialect, with ``$ref`` resolved.
    Raises BodyError: the body is in neither format."""
    if not _has_reference(body):
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return read(body)


def _has_reference(body: bytes | bytearray | memoryview) -> bool:
    """Return True if a body may have references. msgspec would ignore references in a body of strict JSON."""
    return b'"$ref"' in (bytes(body) if isinstance(body, memoryview) else body)


def _with_names(value: Any) -> Any:
    """Replace ordinals by names in a value, in place, and return the value."""
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
    """Return a value in the dialect: integer keys, `ObjectKey` and struct keys have no quotes. None members of structs
    are omitted. A Raw must be a part that this function returned, with the same indent.
    ``indent``: the indentation of one level, for files that people read. Without an indent the result is one line."""
    return _text(value, "" if indent is None else "\n", indent or "").encode("utf-8", "replace")


_LEFT_OUT = (None, msgspec.UNSET)


def _text(value: Any, line: str, step: str) -> str:
    """Return the text of a value, without indentation of its first line.

    ``line``: a line end and the indentation of the value's level.
    """
    # Do not use isinstance: True is also an int, and `str` would write True with a capital letter.
    if type(value) is int:
        return str(value)
    if type(value) in (str, bool):
        return msgspec.json.encode(value).decode()
    if type(value) is msgspec.Raw:
        # All line ends are layout, because line ends in texts are escaped.
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
        # Write the key on one line even if the rest is indented, because `_OBJECT_KEY` finds no other form. Do not
        # quote the key as in strict JSON, because fastjson2 of 5.4 rejects quoted object keys.
        return _text(key, "", "")
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return str(int(key)) if is_number else msgspec.json.encode(str(key)).decode()


@functools.cache
def _members(struct: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Return each attribute of a struct with the start of its JSON member: the quoted name and a colon."""
    return tuple((info.name, f'"{info.encode_name}":') for info in msgspec.structs.fields(struct))


DEPTH_MAX = 64
"""The maximum depth of nesting. Every body of the protocol is far below this limit."""


def read(body: bytes | bytearray | memoryview, *, has_quoted_objects: bool = False) -> Any:
    """Return the value in a body. Raises BodyError: the body is not in the dialect, or its references cannot be
    resolved.
    ``has_quoted_objects``: read a text key that contains an object as an object key, because some peers quote these."""
    try:
        text = str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise BodyError(f"JSON body is not UTF-8: byte {error.start} cannot be decoded") from None
    # If no text in the body begins with a brace, then `_quoted` made every key that begins with a brace.
    if not has_quoted_objects and '"{' not in text and '"$ref"' not in text:
        # Ignore errors here: `_Reader` accepts more, and reports the place of an error.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return _with_objects(msgspec.json.decode(_OBJECT_KEY.sub(_quoted, text)))
    return _Reader(text, has_quoted_objects).document()


_MEMBER = r'"[A-Za-z]+":(?:"[^"\\]*"|-?[0-9]+)'
_OBJECT_KEY = re.compile(rf"(?<=[{{,])\{{{_MEMBER}(?:,{_MEMBER})*\}}(?=:)")
"""An object key as Java and rmqkit write it. No string can contain a match, because the quote of ``{"`` ends a
string."""


def _quoted(key: re.Match[str]) -> str:
    return '"' + key[0].replace('"', '\\"') + '"'


def _with_objects(value: Any) -> Any:
    """Return the value with an `ObjectKey` for each key that `_quoted` made. Lists are changed in place, and so are
    maps without such keys."""
    if type(value) is list:
        for index, element in enumerate(value):
            if type(element) in (dict, list):
                value[index] = _with_objects(element)
    elif type(value) is dict:
        has_objects = False
        for name, member in value.items():
            has_objects = has_objects or name[:1] == "{"
            if type(member) in (dict, list):
                value[name] = _with_objects(member)
        if has_objects:
            return {ObjectKey(msgspec.json.decode(key)) if key[:1] == "{" else key: one for key, one in value.items()}
    return value


class ObjectKey(Mapping[str, Any]):
    """A map key that is an object. Two keys are equal if they have the same members in any order."""

    __slots__ = ("_hash", "_members")

    def __init__(self, members: Mapping[str, Any]) -> None:
        """Store the members. Raises TypeError: a member is a list or an object."""
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
# Possessive quantifiers make a text without a closing quote fail without backtracking.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_ESCAPE_OR_CONTROL = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
_REF_STEP = re.compile(r"""\.((?:[^.\[\\]|\\.)+)|\[([0-9]+)\]|\["((?:[^"\\]|\\.)*)"\]|\['((?:[^'\\]|\\.)*)'\]""")


class _Reader:
    """A recursive-descent reader. ``at`` is the index of the next character."""

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
        # `int` raises ValueError for more than 4,300 digits. Callers expect BodyError and would not catch ValueError.
        if match is None or len(match[0]) > 400:
            raise self.error("a value")
        self.at = match.end()
        digits = match[0].rstrip("LBSFD")
        return float(digits) if match[1] or match[2] else int(digits)


class _References:
    """A copier that replaces every ``{"$ref": path}`` by a copy of the value at this path.
    The result can have at most ``nodes_max`` values, including objects and lists."""

    def __init__(self, root: Any, nodes_max: int) -> None:
        self._root = root
        self._nodes_left = self._nodes_max = nodes_max
        self._open: list[Any] = []

    def resolve(self) -> Any:
        return self._copy(self._root, ())

    def _copy(self, value: Any, around: tuple[Any, ...]) -> Any:
        """Return a copy of a value. ``around``: the objects and lists that contain the value, outermost first."""
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise BodyError(f"JSON body: its references grow it beyond {self._nodes_max} values")
        if not isinstance(value, dict | list):
            return value
        if isinstance(value, dict) and isinstance(path := value.get("$ref"), str):
            value, around = self._target(path, around)
            # Two references to each other would cause an endless loop. Java's references point only to objects.
            if isinstance(value, dict) and "$ref" in value:
                raise BodyError(f"JSON body: $ref {path[:80]!r} points to another reference")
            if not isinstance(value, dict | list):
                return value
        # Compare by identity: an object inside an equal object is not a cycle.
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
        """Return the value at a path, and the values that contain it, outermost first."""
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
    """Return an escape unchanged, and a control character as its escape in strict JSON."""
    return found[0] if found[0][0] == "\\" else f"\\u{ord(found[0]):04x}"
