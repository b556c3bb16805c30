"""Frames, into which a connection's bytes are split, and commands, the headers of frames (``RemotingCommand``).

======  ============  =====================================================================
offset  size          field
======  ============  =====================================================================
0       4             totalLength: bytes after this field = 4 + headerLength + bodyLength
4       1             serializeType: 0 JSON header, 1 ROCKETMQ (binary) header
5       3             headerLength, unsigned
8       headerLength  header
...     rest          body
======  ============  =====================================================================

The splitter holds incomplete input and never waits. It holds at most one frame (16 MiB by default) and the bytes of one
read. A larger frame is refused before its bytes arrive. A server also refuses headers of `REQUEST_HEADER_BYTES_MAX` or
more, because a server reads headers before it authenticates the client.

The header of a frame is a command. The JSON form::

    {"code":…,"language":…,"version":…,"opaque":…,"flag":…,"remark":…,"extFields":{…}}

The binary form::

    i16 code | u8 language | i16 version | i32 opaque | i32 flag | i32 n, remark | i32 n, entries
    entry: i16 n, key | i32 n, value

A response may have another form than its request, so each peer must accept both forms. Codes above 32767 do not fit in
the binary form. ``extFields`` stays undecoded until a typed header is needed, and is then decoded in one msgspec call.
Source: remoting.md §1.1–1.4.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast, get_args

import msgspec
from msgspec import Raw, Struct

from rmqkit.errors import FrameError, HeaderError
from rmqkit.protocol.codes import CURRENT_VERSION, LANGUAGES, ResponseCode
from rmqkit.protocol.core import Acks, Sends, SendsReader

FRAME_BYTES_MAX = 16 << 20
"""The maximum size of a frame, including its length field (``com.rocketmq.remoting.frameMaxLength``)."""

REQUEST_HEADER_BYTES_MAX = 256 << 10
"""The limit of a request's header, which must be smaller. The longest headers of clients have 32 KiB of properties,
which become 192 KiB of JSON if every byte is escaped. Responses may have longer headers: the response to a batch
contains every message id."""

JSON = 0
ROCKETMQ = 1

# The length is signed, as in Java. A negative length fails the comparison with the header's length. As an unsigned
# number it would be a length of up to 4 GiB.
_START = struct.Struct(">iI")
_HEADER_BYTES_MAX = 0xFFFFFF
_UNKNOWN_TYPES = 0xFE000000
_PIECES_MAX = 1024


class Frame(Struct, gc=False):
    """A frame with its header and body as bytes."""

    serialize_type: int
    header: bytes
    body: bytes


class FrameSplitter:
    """A splitter of a byte stream into frames, with one call per read. A frame over ``frame_bytes_max`` is refused.
    ``header_bytes_max``: a power of two that headers must stay below. None allows every header that fits in its frame.
    ``sends``: a reader that returns consecutive plain sends as a `Sends` instead of frames, and acks of popped messages
    as an `Acks`.
    ``buffered_bytes``: the number of held bytes of an incomplete frame."""

    __slots__ = ("_frame_bytes_max", "_held", "_refused_bits", "_sends", "_wanted_bytes", "buffered_bytes")

    def __init__(
        self,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        *,
        header_bytes_max: int | None = None,
        sends: SendsReader | None = None,
    ) -> None:
        self._sends = sends
        self._held: list[bytes | bytearray] = []
        self.buffered_bytes = 0
        self._wanted_bytes = 0
        self._frame_bytes_max = frame_bytes_max
        # Type and header length share a word. One test of its bits detects unknown types and headers that are too long.
        self._refused_bits = _UNKNOWN_TYPES
        if header_bytes_max is not None:
            assert header_bytes_max.bit_count() == 1, "the limit is a power of two"
            self._refused_bits |= _HEADER_BYTES_MAX & -header_bytes_max

    def feed(self, chunk: bytes) -> list[Frame | Sends | Acks]:
        """Accept the bytes of one read and return the frames that they complete, in order.
        Raises FrameError: a frame has impossible lengths, an unknown serialize type or a size over the limit. As in the
        reference, earlier frames of the same chunk are lost with the connection."""
        if self._held:
            if len(self._held) <= _PIECES_MAX:
                self._held.append(chunk)
            else:
                self._add_small(chunk)
            self.buffered_bytes += len(chunk)
            if self.buffered_bytes < self._wanted_bytes:
                return []  # join only when the frame is complete, to avoid copying a large frame for every read
            chunk = b"".join(self._held)
        frames: list[Frame | Sends | Acks] = []
        sends = self._sends
        position, available, wanted = 0, len(chunk), 8
        while available - position >= 8:
            if sends is not None and (run := sends.read(chunk, position)) is not None:
                frames.append(run)
                position = run.end
                continue
            length, word = _START.unpack_from(chunk, position)
            header_bytes = word & _HEADER_BYTES_MAX
            if length + 4 > self._frame_bytes_max or header_bytes > length - 4 or word & self._refused_bits:
                raise self._refusal(length, word)
            end = position + 4 + length
            if end > available:
                wanted = end - position
                break
            body_at = position + 8 + header_bytes
            frames.append(Frame(word >> 24, chunk[position + 8 : body_at], chunk[body_at:end]))
            position = end
        self._held = [chunk[position:]] if position < available else []
        self.buffered_bytes = available - position
        self._wanted_bytes = wanted
        return frames

    def _add_small(self, chunk: bytes) -> None:
        """Append a chunk to a bytearray, if there are very many small reads. A bytes object for each byte would need
        forty bytes."""
        last = self._held[-1]
        if isinstance(last, bytearray):
            last += chunk
        else:
            self._held.append(bytearray(chunk))

    def _refusal(self, length: int, word: int) -> FrameError:
        header_bytes = word & _HEADER_BYTES_MAX
        if length + 4 > self._frame_bytes_max:
            return FrameError(f"frame of {length + 4} bytes is over the limit of {self._frame_bytes_max}")
        if word >> 24 > ROCKETMQ:
            return FrameError(f"serialize type {word >> 24} is not known: it must be 0 (JSON) or 1 (ROCKETMQ)")
        if header_bytes > length - 4:
            return FrameError(f"header of {header_bytes} bytes does not fit into a frame of {length} bytes")
        return FrameError(f"header of {header_bytes} bytes: requests must have less than {REQUEST_HEADER_BYTES_MAX}")


def frames_of(sends: Sends | Acks) -> list[Frame]:
    """Return the frames of plain sends or acks that were read together. Call this before `Sends.forget_bodies`."""
    # The splitter has no ``sends``, because a reader would collect the frames again.
    return cast("list[Frame]", FrameSplitter().feed(sends.chunk[sends.start : sends.end]))


def each_frame(units: Iterable[Frame | Sends | Acks]) -> list[Frame]:
    """Return all frames that were read, including the frames in each `Sends` and `Acks`."""
    return [frame for unit in units for frame in ([unit] if isinstance(unit, Frame) else frames_of(unit))]


def frame_start(serialize_type: int, header_bytes: int, body_bytes: int) -> bytes:
    """Return the eight bytes before a header.
    Raises FrameError: the header is over 16 MiB or the frame over 2 GiB, the limits of the length fields."""
    length = 4 + header_bytes + body_bytes
    if header_bytes > _HEADER_BYTES_MAX or length > 0x7FFFFFFF:
        raise FrameError(f"a header of {header_bytes} and a body of {body_bytes} bytes do not fit into one frame")
    return _START.pack(length, serialize_type << 24 | header_bytes)


Body = bytes | bytearray | memoryview
H = TypeVar("H", bound=Struct)

RESPONSE = 1
_ONE_WAY = 2
_BINARY_HEAD = struct.Struct(">hBhii")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_NO_FIELDS = Raw(b"")


class Command(Struct, gc=False):
    """A request or response.

    Attributes:
        code: request code, or the response code of a response (`RESPONSE` in ``flag``).
        opaque: the number that pairs a response with its request.
        flag: bit 0 response, bit 1 one-way.
        fields: ``extFields``, undecoded if received as JSON (`decode_header`, `decode_fields`), or None.
        body: the bytes after the header. A list of pieces is written without joining the pieces.
        remark: free text; in responses the text of an error.
        language: name of the sender's language, or None if unknown.
        version: the sender's protocol version number.
    """

    code: int
    opaque: int = 0
    flag: int = 0
    fields: dict[str, str] | Raw | None = None
    body: Body | list[Body] = b""
    remark: str | None = None
    language: str | None = "PYTHON"
    version: int = CURRENT_VERSION

    @property
    def payload(self) -> bytes:
        """The body in one piece. The body of a received command is always in one piece."""
        body = self.body
        if isinstance(body, bytes):
            return body
        return b"".join(body) if isinstance(body, list) else bytes(body)

    @property
    def is_one_way(self) -> bool:
        return bool(self.flag & _ONE_WAY)


# The field `body` has an empty wire name, so that a JSON member "body" in a header cannot replace the frame's body.
class _JsonCommand(Command, rename={"fields": "extFields", "body": ""}, gc=False):
    """A command decoded from JSON. `decode_command` adds the body of the frame."""

    fields: Raw = _NO_FIELDS
    body: Any = b""
    # If these members are missing, Java's decoder assumes the following values (remoting.md §1.2).
    language: str | int | None = "JAVA"  # type: ignore[assignment]
    version: int = 0


class _JsonHeaderOut(Struct, kw_only=True, omit_defaults=True, gc=False):
    """A JSON header to send. The fields are in alphabetical order, as in Java."""

    code: int
    extFields: dict[str, str] | None = None  # noqa: N815
    flag: int
    language: str
    opaque: int
    remark: str | None = None
    serializeTypeCurrentRPC: str  # noqa: N815
    version: int


_decode_json_command = msgspec.json.Decoder(_JsonCommand, strict=False).decode
_encode_json = msgspec.json.Encoder().encode


def request(code: int, header: Struct | None = None, body: Body = b"", *, one_way: bool = False) -> Command:
    """Return a request with a typed header. The connection sets the opaque."""
    fields = None if header is None else header_fields(header)
    return Command(code, flag=_ONE_WAY if one_way else 0, fields=fields, body=body)


def reply(
    command: Command,
    code: int = ResponseCode.SUCCESS,
    remark: str | None = None,
    *,
    header: Struct | None = None,
    fields: dict[str, str] | None = None,
    body: Body | list[Body] = b"",
) -> Command:
    """Return the response to a request, with its opaque, a code, and a typed header, fields or both."""
    if header is not None:
        fields = header_fields(header) if fields is None else {**header_fields(header), **fields}
    return Command(code, command.opaque, RESPONSE, fields, body, remark)


def decode_command(frame: Frame) -> Command:
    """Return the command in a frame.
    Raises HeaderError: a JSON header does not have the expected form, or the parts of a binary header do not fit."""
    if frame.serialize_type == JSON:
        return _decode_json(frame)
    assert frame.serialize_type == ROCKETMQ, "the splitter refuses other types"
    return _decode_binary(frame)


def encode_command(command: Command, serialize_type: int = JSON) -> list[Body]:
    """Return the pieces to write for a command: first the frame start with the header, then the pieces of the body.
    Raises HeaderError: a binary header cannot contain the code.
    Raises FrameError: the command does not fit in a frame."""
    fields = command.fields
    if isinstance(fields, Raw):
        # A forwarded command has the fields of its peer. Convert numbers to text, which every decoder accepts.
        fields = decode_fields(command)
    encode = _encode_json_header if serialize_type == JSON else _encode_binary_header
    header = encode(command, fields)
    body = command.body
    if isinstance(body, list):
        return [frame_start(serialize_type, len(header), sum(map(len, body))) + header, *body]
    if len(body) <= 4096:
        return [b"".join((frame_start(serialize_type, len(header), len(body)), header, body))]
    return [frame_start(serialize_type, len(header), len(body)) + header, body]


def decode_header(command: Command, header_type: type[H]) -> H:
    """Return the typed header of a command, decoded from the raw bytes in one call.
    Peers send every value as a string; numbers and booleans are accepted, too.
    Raises HeaderError: a required field is missing, or a value has the wrong type. The text names the field."""
    fields = command.fields
    try:
        if isinstance(fields, Raw):
            header: H = _header_decoder(header_type)(fields)
            return header
        return msgspec.convert(fields or {}, header_type, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(fields, Raw):
            # Retry with text values: Java treats null as a missing field and converts all other JSON values to text.
            return decode_header(Command(command.code, fields=decode_fields(command)), header_type)
        raise HeaderError(f"{header_type.__name__}: {error}") from None


def decode_header_leniently(
    command: Command, header_type: type[H], *, missing: Mapping[str, str] | None = None, drops_unreadable: bool = True
) -> H:
    """Decode a header like Java: for example, a boolean that is not ``true`` is false.
    Raises HeaderError: see `decode_header`.
    ``missing``: the values for required fields that the peer omitted.
    ``drops_unreadable``: treat an invalid number as missing, as Java does for headers without their own codec.
    """
    flags, missing = _flag_names(header_type), missing or {}
    try:
        header = decode_header(command, header_type)
        for attribute, name in flags.items():
            # msgspec also reads 1 as true, but Java does not. Apache's C++ client sends 1 for a batch.
            if getattr(header, attribute) and decode_fields(command)[name].lower() != "true":
                break
        else:
            return header
    except HeaderError:
        pass
    values = {**missing, **decode_fields(command)}
    for name in flags.values() & values.keys():
        values[name] = "true" if values[name].lower() == "true" else "false"
    for info in msgspec.structs.fields(header_type):
        name = info.encode_name
        try:
            msgspec.convert(values.get(name), info.type | None, strict=False)
        except msgspec.ValidationError:
            if drops_unreadable and name in missing:
                values[name] = missing[name]
            elif drops_unreadable and not info.required:
                del values[name]
    return decode_header(Command(command.code, fields=values), header_type)


def decode_fields(command: Command) -> dict[str, str]:
    """Return ``extFields`` as text → text, empty if missing. Raises HeaderError: the fields are not a JSON object."""
    fields = command.fields
    if fields is None:
        return {}
    if isinstance(fields, dict):
        return fields
    try:
        decoded = msgspec.json.decode(fields) if fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"extFields cannot be read: {error}") from None
    if decoded is None:
        return {}
    if not isinstance(decoded, dict):
        raise HeaderError(f"extFields must be an object, not {type(decoded).__name__}")
    # Omit nulls. As text, a null would become a topic named null, or an invalid number.
    return {name: _text(value) for name, value in decoded.items() if value is not None}


def header_fields(header: Struct) -> dict[str, str]:
    """Return a typed header as ``extFields``. Every value is a text, and None is omitted."""
    fields: dict[str, str] = {}
    for attribute, name in _wire_names(type(header)):
        value = getattr(header, attribute)
        if value is not None:
            kind = type(value)
            fields[name] = value if kind is str else str(value) if kind is int else _text(value)
    return fields


@functools.cache
def _wire_names(header_type: type[Struct]) -> tuple[tuple[str, str], ...]:
    return tuple((info.name, info.encode_name) for info in msgspec.structs.fields(header_type))


@functools.cache
def _flag_names(header_type: type[Struct]) -> dict[str, str]:
    """Return the boolean fields of a header type: attribute → wire name."""
    fields = msgspec.structs.fields(header_type)
    return {info.name: info.encode_name for info in fields if info.type is bool or bool in get_args(info.type)}


@functools.cache
def _header_decoder(header_type: type[H]) -> Any:
    return msgspec.json.Decoder(header_type, strict=False).decode


def _text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))  # an enum member is sent as its number
    return _encode_json(value).decode()


def _decode_json(frame: Frame) -> Command:
    try:
        command: Command = _decode_json_command(frame.header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"command header is not readable JSON: {error}") from None
    if command.language not in LANGUAGES:
        command.language = _language(command.language)
    command.fields = command.fields or None
    command.body = frame.body
    return command


def _language(value: str | int | None) -> str | None:
    """Return the name of a language from its number, or None if the language is unknown."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:4])
    return LANGUAGES[value] if isinstance(value, int) and 0 <= value < len(LANGUAGES) else None


def _encode_json_header(command: Command, fields: dict[str, str] | None) -> bytes:
    return _encode_json(
        _JsonHeaderOut(
            code=int(command.code),
            extFields=fields,
            flag=command.flag,
            language=command.language or "OTHER",
            opaque=command.opaque,
            remark=command.remark,
            serializeTypeCurrentRPC="JSON",
            version=command.version,
        )
    )


def _decode_binary(frame: Frame) -> Command:
    header = frame.header
    if len(header) < _BINARY_HEAD.size:
        raise HeaderError(f"binary header has {len(header)} bytes: it must have at least {_BINARY_HEAD.size}")
    # A Java peer that sends a POP code in a binary header cuts the code to 16 bits (200050 to 3442). Such a code stays
    # unknown: guessing the missing bits would be wrong for a peer that really means 3442.
    code, language, version, opaque, flag = _BINARY_HEAD.unpack_from(header)
    remark, position = _take(header, _BINARY_HEAD.size)
    entries_bytes, position = _length(header, position)
    end = position + entries_bytes
    fields = _entries(header, position, end)
    return Command(code, opaque, flag, fields or None, frame.body, remark, _language(language), version)


def _entries(header: bytes, position: int, end: int) -> dict[str, str]:
    """Return the entries between two positions. An empty key or value means null, so the entry is dropped.
    This is one flat loop for speed: every request with a binary header has about twelve entries."""
    fields: dict[str, str] = {}
    unpack_length = _I32.unpack_from
    text = header.decode("latin-1")  # slices of text are three times cheaper than decoding each piece
    key_at = position + 2
    try:
        while position < end:
            key_at = position + 2
            key_end = key_at + (header[position] << 8 | header[position + 1])
            value_at = key_end + 4
            value_bytes = unpack_length(header, key_end)[0]
            position = value_at + value_bytes
            if value_bytes < 0 or position > end:
                raise HeaderError(f"binary header: entry at byte {key_at - 2} does not fit into {end} bytes")
            if value_bytes and key_end > key_at:
                key, value = text[key_at:key_end], text[value_at:position]
                # The latin-1 slice is the right text only if all characters are ASCII.
                if not (key.isascii() and value.isascii()):
                    key, value = str(header[key_at:key_end], "utf-8"), str(header[value_at:position], "utf-8")
                fields[key] = value
    except (IndexError, struct.error):
        raise HeaderError(f"binary header ends inside the entry at byte {key_at - 2}") from None
    except UnicodeDecodeError:
        raise HeaderError(f"binary header: the entry at byte {key_at - 2} is not UTF-8") from None
    return fields


def _length(header: bytes, position: int) -> tuple[int, int]:
    """Return a length and the position after the length.
    Raises HeaderError: the header does not contain this number of bytes."""
    after = position + _I32.size
    if after > len(header):
        raise HeaderError(f"binary header ends inside a length at byte {position}")
    length: int = _I32.unpack_from(header, position)[0]
    if length < 0 or after + length > len(header):
        raise HeaderError(f"binary header: length {length} at byte {position} does not fit into {len(header)} bytes")
    return length, after


def _take(header: bytes, position: int) -> tuple[str | None, int]:
    """Return a text, or None for length 0, and the position after the text."""
    length, start = _length(header, position)
    try:
        return (header[start : start + length].decode() if length else None), start + length
    except UnicodeDecodeError:
        raise HeaderError(f"binary header: text at byte {start} is not UTF-8") from None


def _encode_binary_header(command: Command, fields: Mapping[str, str] | None) -> bytes:
    if not -32768 <= command.code <= 32767:
        raise HeaderError(f"code {command.code} does not fit the binary header: send it with a JSON header")
    remark = (command.remark or "").encode()
    # Every decoder reads length 0 as null, so only JSON can represent an empty text.
    entries = b"".join(
        part
        for name, value in (fields or {}).items()
        for key, text in ((name.encode(), value.encode()),)
        for part in (_I16.pack(len(key)), key, _I32.pack(len(text)), text)
    )
    language = LANGUAGES.index(command.language) if command.language in LANGUAGES else LANGUAGES.index("OTHER")
    head = _BINARY_HEAD.pack(command.code, language, command.version, command.opaque, command.flag)
    return b"".join((head, _I32.pack(len(remark)), remark, _I32.pack(len(entries)), entries))
