"""Requests and answers that differ from the ones before in a few values only: what busy brokers read and write all
day.

A *shape* (`SendShape`) is the JSON header of a send whose queue id, born timestamp, opaque and property values are left
open. It is learned from a header that the plain decoders read, and reads others like it with one regular expression,
property string included: what matches means what `decode_command`, `decode_header` and `in_stored_order` make of it, at
a quarter of the cost. Headers with escapes or in another order, and properties that ask for more than storing, match
none; nor do batches, transactions, retried messages and one-way requests. One that asks for a time is a shape, too: its
property string is that of the timer topic's message.

A *template* (`answer_template`) is the header of an answer, encoded once from a sample by `encode_command`, with places
for what differs; filled, it is equal to it byte for byte at a fifth of the cost. `SendAnswers` fills those to stored
messages, `found_frame` and `success_frame` those to pops and acks.
Source: remoting.md §1.2, §4.3.1, §4.6.1, §7.3; store.md §18.2.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct

from rmqkit.errors import HeaderError
from rmqkit.protocol.codes import RequestCode, ResponseCode
from rmqkit.protocol.command import (
    JSON,
    RESPONSE,
    Body,
    Command,
    Frame,
    decode_command,
    decode_header,
    encode_command,
    frame_start,
    header_fields,
)
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.properties import decode_properties, in_stored_order
from rmqkit.protocol.record import INNER_BATCH, TRANSACTION_MASK
from rmqkit.protocol.schemas.pop import PopMessageResponse
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request

_SAMPLE_OPAQUE = 1_234_567_890
_START_BYTES = 8


def answer_template(
    fields: Mapping[str, str] | None,
    forms: Mapping[str, str],
    *,
    code: int = ResponseCode.SUCCESS,
    remark: str | None = None,
) -> bytes:
    """An answer's header as a format.
    ``forms``: what stands in the place of texts that the fields contain, in their order; ``%b`` for the opaque's digits
    comes last."""
    sample = Command(code, _SAMPLE_OPAQUE, RESPONSE, None if fields is None else dict(fields), remark=remark)
    text = b"".join(encode_command(sample))[_START_BYTES:].decode().replace("%", "%%")
    for value, form in {**forms, f'"opaque":{_SAMPLE_OPAQUE}': '"opaque":%b'}.items():
        text = text.replace(value, form, 1)
    return text.encode()


_TEXT = rb"[ !#-\[\]-~]+"
_OPEN = re.compile(
    rb'"(?:e|queueId)":"(?P<queue_id>\d+)"|"(?:g|bornTimestamp)":"(?P<born_timestamp>\d+)"|"opaque":(?P<opaque>\d+)'
    rb'|"(?:i|properties)":"(?P<properties>(?:[ !#-\[\]-~]|\\u000[12])+)"'
)
_ENTRY = re.compile(rb"(?P<name>%b)\\u0001(?P<value>%b)(?:\\u0002|\Z)" % (_TEXT, _TEXT))
_PATTERNS: dict[str | bytes, bytes] = {
    "queue_id": rb"(0|[1-9]\d{0,8})",
    "born_timestamp": rb"(0|[1-9]\d{0,17})",
    "opaque": rb"(0|[1-9]\d{0,9})",
    b"UNIQ_KEY": rb"([0-9A-Za-z]+)",
    b"WAIT": rb"(true|false)",
    **dict.fromkeys((b"TIMER_DELAY_SEC", b"TIMER_DELAY_MS", b"TIMER_DELIVER_MS"), rb"(\d{1,17})"),
}
_TIMES = {b"TIMER_DELAY_SEC": 1000, b"TIMER_DELAY_MS": 1, b"TIMER_DELIVER_MS": 0}
"""Properties that ask for a time, the one that counts first, and their unit in ms; 0: ms since the epoch."""
_KEPT = b"TIMER_OUT_MS\x01\0%d\0\x02REAL_TOPIC\x01%b\x02REAL_QID\x01\0%d\0\x02"
_NUMBERS = {"queue_id": 87, "born_timestamp": 1234567890123, "opaque": 4711}
"""The open numbers, with the values of a header that a new shape is tried on."""
_OTHER = b"Other"
assert _NUMBERS.keys() <= _PATTERNS.keys(), "an open number has a pattern"
_HEADERS = {RequestCode.SEND_MESSAGE: SendMessageRequest, RequestCode.SEND_MESSAGE_V2: SendMessageV2Request}
_HEAD_BYTES = 32
_SHAPES_MAX = 1024
_MISSES_PER_SHAPE = 8
_is_send = re.compile(rb'"code": ?(?:10|310)\b').search
"""Whether it is worth a look: a broker without plain senders would read every request twice."""


class SendShape(Struct, frozen=True, gc=False, eq=False):
    """One shape.

    Attributes:
        header: the one it was learned from; all but queue id, born timestamp and properties holds for the others.
        match: matches a whole header; its groups are the open values.
        read: takes digits of queue id, born timestamp and opaque, then UNIQ_KEY, KEYS and TAGS out of the groups.
        properties: what is stored, with a ``%b`` for each of the values that `values` takes out of the groups.
        asks: of a message for a time, which group says it, and in what unit (`_TIMES`); `values` takes the time it is
            kept until out of one group more.
    """

    header: SendMessageRequest
    match: Callable[[bytes], re.Match[bytes] | None]
    read: Callable[[tuple[bytes, ...]], tuple[bytes, bytes, bytes, bytes, bytes, bytes]]
    properties: bytes
    values: Callable[[tuple[bytes, ...]], Any]
    asks: tuple[int, int] | None = None


class SendShapes:
    """The shapes that were seen.
    One is learned from a header that matches none, the more seldom the more there are: sends that differ in everything
    must not cost much more than they do anyway.
    ``stamps``: the broker's own properties.
    ``not_plain``: names of properties that ask for more than storing."""

    def __init__(self, stamps: bytes, not_plain: Collection[str]) -> None:
        self._stamps = stamps
        self._not_plain = {*decode_properties(stamps), *not_plain}
        self._is_special = re.compile(rf"(?<![A-Z_])(?:{'|'.join(map(re.escape, not_plain))})".encode()).search
        self._by_head: dict[bytes, list[SendShape]] = {}
        self._count = 0
        self._misses_left = 0

    def find(self, frame: Frame) -> tuple[SendShape, tuple[bytes, ...]] | None:
        """The shape of a request and its open values; None when it has to be read in the plain way."""
        header = frame.header
        shapes = self._by_head.get(header[:_HEAD_BYTES])
        if shapes is not None and frame.serialize_type == JSON:
            for shape in shapes:
                match = shape.match(header)
                if match is not None:
                    if shape is not shapes[0]:
                        shapes.remove(shape)
                        shapes.insert(0, shape)
                    return shape, match.groups()
        self._misses_left -= 1
        if self._misses_left < 0 and _is_send(header) and self._is_special(header) is None:
            self._learn(frame)
        return None

    def _learn(self, frame: Frame) -> None:
        shape = learn_shape(frame, self._stamps, self._not_plain)
        if shape is not None:
            # Whoever sends different headers all the time must not fill memory; busy producers are learned again.
            if self._count == _SHAPES_MAX:
                self._by_head.clear()
                self._count = 0
            self._by_head.setdefault(frame.header[:_HEAD_BYTES], []).append(shape)
            self._count += 1
        self._misses_left = _MISSES_PER_SHAPE * self._count


def learn_shape(frame: Frame, stamps: bytes, not_plain: Collection[str]) -> SendShape | None:
    """The shape of a request; None when it is no plain send, or its header is not of the form that is looked for.
    ``not_plain``: names of properties that none of these has."""
    header = _plain_header(frame.header) if frame.serialize_type == JSON else None
    if header is None:
        return None
    opened = _open_values(frame.header)
    names = [key for key, _, _ in opened if isinstance(key, bytes)]
    places = {key: place for place, (key, _, _) in enumerate(opened)}
    is_odd = len(places) < len(opened) or not places.keys() >= {*_NUMBERS, b"UNIQ_KEY"}
    if is_odd or not {name.decode() for name in names}.isdisjoint(not_plain):
        return None
    pattern, other, at = b"", b"", 0
    for key, start, end in opened:
        closed, at = frame.header[at:start], end
        pattern += re.escape(closed) + _PATTERNS.get(key, b"(%b)" % _TEXT)
        other += closed + (b"%d" % _NUMBERS[key] if isinstance(key, str) else _OTHER)
    # The last group is always empty: it stands for the keys that these messages have not.
    match = re.compile(pattern + re.escape(frame.header[at:]) + rb"()").fullmatch
    # Tried on another header: a value that stands in two places, or a name inside a value, shows itself here.
    if _plain_header(other + frame.header[at:]) != _with_others(header, names):
        return None
    asks = next(((places[name], unit_ms) for name, unit_ms in _TIMES.items() if name in places), None)
    if asks is not None:
        stamps = _KEPT % (len(opened) + 1, header[0].topic.encode(), places["queue_id"]) + stamps
    stored = in_stored_order(b"".join([b"%b\x01\0%d\0\x02" % (name, places[name]) for name in names]) + stamps)
    order = re.findall(rb"\0(\d+)\0", stored)
    told: tuple[str | bytes, ...] = (*_NUMBERS, b"UNIQ_KEY", b"KEYS", b"TAGS")
    read = itemgetter(*[places.get(name, len(opened)) for name in told])
    properties = re.sub(rb"\0\d+\0", b"%b", stored.replace(b"%", b"%%"))
    sent = msgspec.structs.replace(header[0], queue_id=0)
    return SendShape(sent, match, read, properties, itemgetter(*map(int, order)), asks)


def _open_values(header: bytes) -> list[tuple[str | bytes, int, int]]:
    """What a shape leaves open in a header: name of the number or the property, and where the value lies."""
    found: list[tuple[str | bytes, int, int]] = []
    for one in _OPEN.finditer(header):
        kind = str(one.lastgroup)
        if kind in _NUMBERS:
            found.append((kind, *one.span(kind)))
        else:
            entries = _ENTRY.finditer(header, *one.span(kind))
            found += [(entry["name"], *entry.span("value")) for entry in entries]
    return found


def _plain_header(header: bytes) -> tuple[SendMessageRequest, int] | None:
    """What the plain decoders make of the header of a plain send, and its opaque; None for any other."""
    try:
        command = decode_command(Frame(JSON, header, b""))
        if command.code not in _HEADERS or command.flag:
            return None
        sent = decode_header(command, _HEADERS[RequestCode(command.code)])
    except HeaderError:
        return None
    is_special = sent.batch or sent.topic.startswith(RETRY_PREFIX) or sent.sys_flag & (TRANSACTION_MASK | INNER_BATCH)
    return None if is_special else (sent, command.opaque)


def _with_others(header: tuple[SendMessageRequest, int], names: list[bytes]) -> tuple[SendMessageRequest, int]:
    """A header with other values in the place of the open ones."""
    sent, _ = header
    properties = b"".join([b"%b\x01%b\x02" % (name, _OTHER) for name in names])
    if not (sent.properties or "").endswith("\x02"):
        properties = properties[:-1]
    opaque, fields = _NUMBERS["opaque"], {key: value for key, value in _NUMBERS.items() if key != "opaque"}
    return msgspec.structs.replace(sent, properties=properties.decode(), **fields), opaque


_PLAIN_COUNT = 5

Stored = tuple[int, bytes, int, bytes, bytes] | tuple[int, bytes, int, bytes, bytes, bytes]
"""Physical offset, queue id in digits, queue offset, unique key in letters and digits, of a timed message its recall
handle, opaque in digits."""


class SendAnswers:
    """Writes such frames.
    ``store_host``: the packed address that begins every message id.
    ``told``: further fields of every answer.
    ``code``: what is answered; the message is stored in any case.

    Attributes:
        pieces: what stands before, between and behind the values of a message that is not timed, for `Sends.answers`.
    """

    __slots__ = ("_template", "_timed", "pieces")

    def __init__(self, store_host: bytes, told: Mapping[str, str], code: int = ResponseCode.SUCCESS) -> None:
        forms = {"<id>": f"{store_host.hex().upper()}%016X", "<queue>": "%b", "<offset>": "%d", "<key>": "%b"}
        values = dict(zip(("msgId", "queueId", "queueOffset", "transactionId"), forms, strict=True))
        self._template = answer_template({**values, **told}, forms, code=code)
        marks = {"<id>": f"{store_host.hex().upper()}\0", "<queue>": "\0", "<offset>": "\0", "<key>": "\0"}
        self.pieces = answer_template({**values, **told}, marks, code=code).replace(b"%b", b"\0").split(b"\0")
        assert len(self.pieces) == 6, "five values stand between six pieces"
        timed = {**values, **told, "recallHandle": "<handle>"}
        handle = {'"recallHandle":"<handle>"': '"recallHandle":"%b"'}
        self._timed = answer_template(timed, forms | handle, code=code)

    def frames(self, answers: Iterable[Stored]) -> bytes:
        """The frames that say where messages lie, one behind the other."""
        template, timed, parts = self._template, self._timed, list[bytes]()
        for answer in answers:
            header = (template if len(answer) == _PLAIN_COUNT else timed) % answer
            parts += (_frame_start(len(header)), header)
        return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def _frame_start(header_bytes: int) -> bytes:
    return frame_start(JSON, header_bytes, 0)


_FOUND_NAMES = list(header_fields(PopMessageResponse(start_offset_info="", msg_offset_info="")))
_SUCCESS = answer_template(None, {})
_FOUND = answer_template(
    {name: f"<{name}>" for name in _FOUND_NAMES}, {f"<{name}>": "%b" for name in _FOUND_NAMES}, remark="FOUND"
)


def success_frame(opaque: int) -> bytes:
    """A success that says nothing else."""
    header = _SUCCESS % (b"%d" % opaque)
    return frame_start(JSON, len(header), 0) + header


def found_frame(opaque: int, answer: PopMessageResponse, body: Body) -> bytes:
    """What a pop found that was not in order, with a body that is copied."""
    header = _FOUND % (
        b"%d" % answer.pop_time,
        b"%d" % answer.invisible_time,
        b"%d" % answer.revive_qid,
        b"%d" % answer.rest_num,
        (answer.start_offset_info or "").encode(),
        (answer.msg_offset_info or "").encode(),
        b"%d" % opaque,
    )
    return b"".join((frame_start(JSON, len(header), len(body)), header, body))
