"""Plain sends, processed together for each read. A plain send is a request that only stores messages, with a topic, a
queue and a unique key. The compiled core (`rmqkit.protocol.core`) reads, encodes and answers plain sends if it is
installed; otherwise the plain Python code in this module does. Tests check that both produce the same bytes for every
frame that the core accepts.

A frame is not a plain send, and is handled separately, if it is one-way, retried, part of a transaction or without a
body, if its topic is not ASCII or over 127 bytes, or if its properties have duplicates, are over 511 bytes, or include
a name in ``not_plain``. A send with a delivery time is plain: `PlainSends.keep` redirects it to the timer's queue and
adds the timer's properties. A send to a lite topic is plain: `PlainSends.enter_lite` adds its number there. A batch
becomes its own `PlainBatch` if the properties of its request are plain and the batch is short enough to be stored in
one piece. The messages of a batch are stored with their properties unchanged. A batch whose messages are all in the
same lite topic becomes a `PlainLiteBatch`. Its messages are stored like single sends to the lite topic.
Source: remoting.md §1.2, §1.3, §4.3.1, §7.3; store.md §3.4, §4.1, §18.2; behaviour.md §5.
"""

from __future__ import annotations

import functools
import re
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from copy import copy
from itertools import accumulate, count
from operator import itemgetter
from typing import Any

from msgspec import Struct

from rmqkit.errors import BodyError, HeaderError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import (
    FRAME_BYTES_MAX,
    JSON,
    REQUEST_HEADER_BYTES_MAX,
    ROCKETMQ,
    Frame,
    decode_command,
    decode_header,
    frame_start,
)
from rmqkit.protocol.core import LIVE, Core, Sends, SendsReader
from rmqkit.protocol.ids import RecallHandle, encode_recall_handle
from rmqkit.protocol.names import RETRY_PREFIX, lite_queue, lite_topic_fault
from rmqkit.protocol.properties import (
    LITE_TOPIC,
    Keys,
    decode_properties,
    encoded_tags_code,
    find_property,
    in_stored_order,
)
from rmqkit.protocol.record import (
    CRC_NAME,
    INNER_BATCH,
    TRANSACTION_MASK,
    BatchBounds,
    RecordRow,
    batch_bounds,
    encode_records,
    seal,
    with_room_for_crc,
)
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request

__all__ = ["PlainBatch", "PlainSends", "PlainSendsReader", "sends_reader"]

_START = struct.Struct(">iI")
_ENTRY = struct.Struct(">qiq")
_LITE_ENTRY = struct.Struct(">qiIqIqqqi")
_LENGTH = struct.Struct(">h")
_HEADERS: dict[int, type[SendMessageRequest]] = {
    RequestCode.SEND_MESSAGE: SendMessageRequest,
    RequestCode.SEND_MESSAGE_V2: SendMessageV2Request,
    RequestCode.SEND_BATCH_MESSAGE: SendMessageV2Request,
}
_HEADER_BYTES = 0xFFFFFF
_STORED_BYTES_MAX = 511
_TIMED_BYTES_MAX = 66
_LITE_BYTES_MAX = 98
"""Maximum growth of the properties of a message in a lite topic, without the lengths of its topic and lite topic."""
_TOPIC_BYTES_MAX = 127
_ENTRIES_MAX = 96
_MEMBERS_MAX = 2048
_MEMBERS_PROPERTIES_BYTES_MAX = 32 << 10
_LITE_MEMBERS_PROPERTIES_BYTES_MAX = 128 << 10
"""The same for a batch in a lite topic, which cannot be stored in slices."""
_LITE_NAME = LITE_TOPIC.encode()
_LITE_MARK = _LITE_NAME + b"\x01"
_CELL_NUMBERS = 3
_I32_MAX, _I64_MAX = (1 << 31) - 1, (1 << 63) - 1
_TIME = re.compile(r"[0-9]{1,17}", re.ASCII)
_NO_WAIT = b"WAIT\x01false\x02"
_BINARY_SENDS = frozenset(_LENGTH.pack(code) for code in _HEADERS)
_is_json_send = re.compile(rb'"code": ?(?:10|310|320)\b').search
"""A cheap test for headers of possible sends. It saves parsing other requests twice."""


def sends_reader(
    core: Core,
    stamps: Mapping[str, str],
    not_plain: Collection[str],
    timed: Mapping[str, int],
) -> SendsReader:
    """Return a reader that extracts plain sends from received bytes.
    ``stamps``: the properties that every message gets.
    ``not_plain``: names of properties that request more than storage.
    ``timed``: names of properties with a delivery time, in order of priority, and the unit of each in ms. The unit 0
    means a time since the epoch."""
    rules = stamps, not_plain, timed, FRAME_BYTES_MAX, REQUEST_HEADER_BYTES_MAX
    return core.sends_reader(*rules) or PlainSendsReader(*rules)


class _Sent(Struct, gc=False):
    """A plain send. ``place``: the topic and queue id for storage. ``asked``: the requested delivery time and its
    unit. ``lite``: the lite topic, with its slot, the number of the message there, and its life. They are 0 before
    `enter_lite`."""

    place: tuple[str, int]
    queue_id: int
    code: int
    opaque: int
    flag: int
    sys_flag: int
    born_timestamp: int
    reconsume_times: int
    body: bytes
    properties: bytes
    keys: Keys
    asked: tuple[int, int] | None
    sent_properties: str
    recall_handle: str = ""
    lite: str = ""
    lite_slot: int = 0
    lite_number: int = 0
    lite_epoch: int = 0


class PlainSends:
    """`Sends` in plain Python."""

    __slots__ = (
        *("_counts", "_numbers", "_physical_offset", "_reader", "_sizes", "_store_timestamp"),
        *("body_bytes_max", "chunk", "end", "queues", "sent", "start", "waits_not"),
    )

    is_batch = False

    def __init__(self, reader: PlainSendsReader, chunk: bytes, start: int, end: int, sent: list[_Sent]) -> None:
        self.chunk, self.start, self.end, self.sent = chunk, start, end, sent
        self.waits_not = any(_NO_WAIT in one.properties for one in sent)
        self.body_bytes_max = max([len(one.body) for one in sent])
        self._reader = reader
        self._numbers: list[int] = []
        self._sizes: list[int] = []
        self._physical_offset = self._store_timestamp = -1
        self._count()

    def __len__(self) -> int:
        return len(self.sent)

    def _count(self) -> None:
        self._counts = Counter([one.place for one in self.sent]) if len(self.sent) > 1 else {self.sent[0].place: 1}
        self.queues = [(*place, count, 0) for place, count in self._counts.items()]

    @property
    def asked(self) -> list[tuple[int, int]]:
        return [sent.asked for sent in self.sent if sent.asked is not None]

    @property
    def lite(self) -> list[tuple[str, str]]:
        places = [(sent.place[0], sent.lite) for sent in self.sent]
        return places if any(name for _, name in places) else []

    @property
    def opaques(self) -> list[int]:
        return [sent.opaque for sent in self.sent]

    @property
    def last_offset(self) -> int:
        return self._physical_offset + sum(self._sizes[:-1])

    @property
    def kinds(self) -> list[tuple[str, int, str, list[int]]]:
        kinds: dict[tuple[str, int, str], list[int]] = {}
        for sent, size in zip(self.sent, self._sizes, strict=True):
            kinds.setdefault((sent.place[0], sent.code, _kind(sent)), []).append(size)
        return [(*key, sizes) for key, sizes in kinds.items()]

    def keep(self, outs: list[int], timer_topic: str, broker_name: str) -> None:
        """Put the timed messages into the timer's queue instead of their own queues. ``outs``: the delivery time of
        each timed message.
        Raises ValueError: the broker's name contains a blank, which separates the parts of a handle."""
        left = iter(outs)
        for sent in self.sent:
            if sent.asked is not None:
                out, (topic, queue_id) = next(left), sent.place
                more = f"TIMER_OUT_MS\x01{out}\x02REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}\x02"
                sent.properties = self._reader.stored(sent.sent_properties, more)
                key = sent.keys[0].decode()
                sent.recall_handle = encode_recall_handle(RecallHandle(topic, broker_name, out, key))
                # Change only the queue for storage. The response contains ``queue_id``, the requested queue.
                sent.place = timer_topic, 0
        self._count()

    @property
    def lite_parents(self) -> list[str]:
        return list(dict.fromkeys([sent.place[0] for sent in self.sent if sent.lite]))

    @property
    def lite_numbers(self) -> list[int]:
        return [sent.lite_number for sent in self.sent]

    def enter_lite(
        self, tables: list[dict[str, int]], states: array[int], nexts: array[int], epochs: array[int]
    ) -> bool:
        slots_of = dict(zip(self.lite_parents, tables, strict=True))
        slots = [slots_of[sent.place[0]].get(sent.lite, -1) if sent.lite else None for sent in self.sent]
        if any(slot is not None and (slot < 0 or states[slot] != LIVE) for slot in slots):
            return False
        ends: dict[int, int] = {}
        for sent, slot in zip(self.sent, slots, strict=True):
            if slot is None:
                continue
            number, epoch = ends.get(slot, nexts[slot]), epochs[slot]
            ends[slot] = number + 1
            more = f"INNER_MULTI_DISPATCH\x01{lite_queue(sent.place[0], sent.lite)}\x02"
            life = f"__LITE_EPOCH\x01{epoch}\x02" if epoch > 1 else ""
            last = f"{life}INNER_MULTI_QUEUE_OFFSET\x01{number}\x02"
            sent.properties = self._reader.stored(sent.sent_properties, more, last)
            sent.lite_slot, sent.lite_number, sent.lite_epoch = slot, number, epoch
        return True

    def stored_lite(self, nexts: array[int]) -> None:
        for sent in self.sent:
            if sent.lite_epoch:
                nexts[sent.lite_slot] = sent.lite_number + 1

    def encode(
        self,
        numbers: list[int],
        physical_offset: int,
        born_host: bytes,
        store_timestamp: int,
        store_host: bytes,
        is_sealed: bool,
    ) -> bytes:
        next_numbers = dict(zip(self._counts, numbers, strict=True))
        fields = {place: bytes([len(place[0])]) + place[0].encode() for place in self._counts}
        rows: list[RecordRow] = []
        self._numbers = []
        for sent in self.sent:
            place = sent.place
            properties = _with_room(sent.properties) if is_sealed else sent.properties
            number = next_numbers[place]
            next_numbers[place] = number + 1
            self._numbers.append(number)
            rows.append(
                (
                    fields[place],
                    place[1],
                    sent.flag,
                    number,
                    sent.sys_flag,
                    sent.born_timestamp,
                    sent.reconsume_times,
                    sent.body,
                    _LENGTH.pack(len(properties)) + properties,
                )
            )
        self._physical_offset, self._store_timestamp = physical_offset, store_timestamp
        try:
            data, self._sizes = encode_records(
                rows,
                physical_offset=physical_offset,
                born_host=born_host,
                store_timestamp=store_timestamp,
                store_host=store_host,
            )
        except struct.error as error:
            raise ValueError(f"a record does not fit into the log's numbers: {error}") from None
        if is_sealed:
            data = _sealed(data, self._sizes)
        record_bytes = dict.fromkeys(self._counts, 0)
        for sent, size in zip(self.sent, self._sizes, strict=True):
            record_bytes[sent.place] += size
        self.queues = [(*place, count, record_bytes[place]) for place, count in self._counts.items()]
        return data

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        at, rows, now = self._physical_offset, [], self._store_timestamp
        for sent, number, size in zip(self.sent, self._numbers, self._sizes, strict=True):
            keys = sent.keys
            code = encoded_tags_code(keys[2])
            rows.append((*sent.place, number, code, now, at, size, sent.sys_flag, sent.properties, 1, keys, None))
            at += size
        return rows

    def lite_entries(
        self,
        first_index: int,
        tails: array[int],
        recent: array[int],
        read: Callable[[int], tuple[int, int] | None],
    ) -> bytes:
        cells, own, entries = len(recent) // _CELL_NUMBERS, dict[int, int](), list[bytes]()

        def entry(index: int) -> tuple[int, int] | None:
            cell = index % cells * _CELL_NUMBERS
            if index < 0 or recent[cell] != index:
                return None if index < 0 else read(index)
            return recent[cell + 1], recent[cell + 2]

        at, now, index = self._physical_offset, self._store_timestamp, first_index
        for sent, size in zip(self.sent, self._sizes, strict=True):
            if sent.lite_epoch:
                slot, number = sent.lite_slot, sent.lite_number
                previous = own.get(slot, tails[slot])
                jump = _jump_after(previous, entry)
                code = encoded_tags_code(sent.keys[2])
                entries.append(_LITE_ENTRY.pack(at, size, slot, number, sent.lite_epoch, now, previous, jump, code))
                cell = index % cells * _CELL_NUMBERS
                recent[cell], recent[cell + 1], recent[cell + 2] = index, number, jump
                own[slot] = index
                index += 1
            at += size
        return b"".join(entries)

    def entered_lite(
        self, first_index: int, tails: array[int], firsts: array[int], ends: array[int], seconds: array[int]
    ) -> list[int]:
        second, opened = max(0, self._store_timestamp // 1000), list[int]()
        for index, sent in enumerate([sent for sent in self.sent if sent.lite_epoch], first_index):
            slot = sent.lite_slot
            if tails[slot] < 0:
                firsts[slot] = sent.lite_number
                opened.append(slot)
            tails[slot], ends[slot], seconds[slot] = index, sent.lite_number + 1, second
        return opened

    def index_rows(self, with_tags: bool) -> None:
        """Return None: the index reads keys from `requests`."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        entries: dict[tuple[str, int], list[bytes]] = {place: [] for place in self._counts}
        starts: dict[tuple[str, int], int] = {}
        ends: dict[tuple[str, int], int] = {}
        at, pack = self._physical_offset, _ENTRY.pack
        for sent, size in zip(self.sent, self._sizes, strict=True):
            place = sent.place
            entries[place].append(pack(at, size, encoded_tags_code(sent.keys[2])))
            starts.setdefault(place, at)
            at += size
            ends[place] = at
        return [(b"".join(several), starts[place], ends[place]) for place, several in entries.items()]

    def answers(
        self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], lite: tuple[bytes, ...], between: bytes
    ) -> bytes:
        at, parts = self._physical_offset, list[bytes]()
        plain_form, timed_form, lite_form = _form(pieces), _form(timed), _form(lite)
        for sent, number, size in zip(self.sent, self._numbers, self._sizes, strict=True):
            values = (at, sent.queue_id, number, sent.keys[0])
            if sent.lite_epoch:
                header = lite_form % (*values, b"%d" % sent.lite_number, b"%d" % sent.lite_epoch, b"%d" % sent.opaque)
            elif sent.recall_handle:
                header = timed_form % (*values, sent.recall_handle.encode(), b"%d" % sent.opaque)
            else:
                header = plain_form % (*values, b"%d" % sent.opaque)
            parts += (_frame_start(len(header)), header)
            at += size
        return b"".join(parts)

    def forget_bodies(self) -> None:
        self.chunk = b""
        for sent in self.sent:
            sent.body = b""


class PlainBatch:
    """`Sends` of a batch in plain Python. All messages have the topic and queue of the request, and their own
    properties unchanged."""

    __slots__ = (
        *("_bounds", "_codes", "_number", "_properties", "_request", "_sizes", "_starts", "_store_timestamp"),
        *("chunk", "end", "queues", "start"),
    )
    is_batch = True

    def __init__(self, chunk: bytes, start: int, end: int, request: _Sent, bounds: list[BatchBounds]) -> None:
        self.chunk, self.start, self.end = chunk, start, end
        self.queues = [(*request.place, len(bounds), 0)]
        self._request, self._bounds = request, bounds
        self._properties: list[bytes] = []
        self._codes: list[int] = []
        self._sizes: list[int] = []
        self._starts: list[int] = []
        self._number = self._store_timestamp = -1

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def waits_not(self) -> bool:
        return _NO_WAIT in self._request.properties

    @property
    def body_bytes_max(self) -> int:
        return self._bounds[-1][3]

    @property
    def asked(self) -> list[tuple[int, int]]:
        return []

    @property
    def lite(self) -> list[tuple[str, str]]:
        return []

    @property
    def lite_parents(self) -> list[str]:
        return []

    @property
    def lite_numbers(self) -> list[int]:
        return [0] * len(self)

    @property
    def opaques(self) -> list[int]:
        return [self._request.opaque]

    @property
    def last_offset(self) -> int:
        return self._starts[-1]

    @property
    def kinds(self) -> list[tuple[str, int, str, list[int]]]:
        return [(self.queues[0][0], self._request.code, _kind(self._request), [self.queues[0][3]])]

    def keep(self, outs: list[int], timer_topic: str, broker_name: str) -> None:
        """Do nothing: a batch has no timed messages."""

    def enter_lite(self, *columns: object) -> bool:
        """Return True: no message is in a lite topic."""
        return True

    def stored_lite(self, nexts: object) -> None:
        """Do nothing: no message is in a lite topic."""

    def lite_entries(self, *arguments: object) -> bytes:
        """Return no entries: no message is in a lite topic."""
        return b""

    def entered_lite(self, *arguments: object) -> list[int]:
        """Return no slots: no message is in a lite topic."""
        return []

    def encode(
        self,
        numbers: list[int],
        physical_offset: int,
        born_host: bytes,
        store_timestamp: int,
        store_host: bytes,
        is_sealed: bool,
    ) -> bytes:
        request, (self._number,) = self._request, numbers
        body, times = request.body, request.reconsume_times
        topic, queue_id, sys_flag, born = *request.place, request.sys_flag, request.born_timestamp
        field = bytes([len(topic)]) + topic.encode()
        # An entry of a batch and a record both end with the properties after their length.
        rows = [
            (field, queue_id, flag, number, sys_flag, born, times, body[body_at : at - 2], body[at - 2 : end])
            for number, (flag, body_at, at, end) in enumerate(self._bounds, self._number)
        ]
        if is_sealed:
            with_room = [_with_room(row[-1][2:]) for row in rows]
            rows = [(*row[:-1], _LENGTH.pack(len(one)) + one) for row, one in zip(rows, with_room, strict=True)]
        self._store_timestamp = store_timestamp
        try:
            data, self._sizes = encode_records(
                rows,
                physical_offset=physical_offset,
                born_host=born_host,
                store_timestamp=store_timestamp,
                store_host=store_host,
            )
        except struct.error as error:
            raise ValueError(f"a record does not fit into the log's numbers: {error}") from None
        if is_sealed:
            data = _sealed(data, self._sizes)
        self._starts = list(accumulate(self._sizes[:-1], initial=physical_offset))
        self._properties = [body[at:end] for _, _, at, end in self._bounds]
        self._codes = [encoded_tags_code(find_property(one, b"TAGS") or b"") for one in self._properties]
        self.queues = [(topic, queue_id, len(rows), len(data))]
        return data

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        """Return rows without keys. The index extracts the keys faster from many property strings together."""
        (place, sys_flag), now = (self._request.place, self._request.sys_flag), self._store_timestamp
        rows = zip(count(self._number), self._codes, self._starts, self._sizes, self._properties, strict=False)
        return [
            (*place, number, code, now, at, size, sys_flag, properties, 1, None, None)
            for number, code, at, size, properties in rows
        ]

    def index_rows(self, with_tags: bool) -> None:
        """Return None: the index reads keys from `requests`."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        entries = b"".join(map(_ENTRY.pack, self._starts, self._sizes, self._codes))
        return [(entries, self._starts[0], self._starts[-1] + self._sizes[-1])]

    def answers(
        self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], lite: tuple[bytes, ...], between: bytes
    ) -> bytes:
        request, ids = self._request, between.join([b"%016X" % start for start in self._starts])
        values = (ids, request.queue_id, self._number, request.keys[0], b"%d" % request.opaque)
        header = _form(pieces).replace(b"%016X", b"%b", 1) % values
        return _frame_start(len(header)) + header

    def forget_bodies(self) -> None:
        self.chunk = self._request.body = b""


class PlainLiteBatch(PlainSends):
    """`Sends` of a batch whose messages are all in the same lite topic, in plain Python."""

    __slots__ = ("_request",)
    is_batch = True

    def __init__(
        self, reader: PlainSendsReader, chunk: bytes, start: int, end: int, request: _Sent, sent: list[_Sent]
    ) -> None:
        super().__init__(reader, chunk, start, end, sent)
        self._request = request
        self.waits_not = _NO_WAIT in request.properties
        self.body_bytes_max = len(request.body)

    @property
    def opaques(self) -> list[int]:
        return [self._request.opaque]

    @property
    def kinds(self) -> list[tuple[str, int, str, list[int]]]:
        return [(self.queues[0][0], self._request.code, _kind(self._request), [self.queues[0][3]])]

    def answers(
        self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], lite: tuple[bytes, ...], between: bytes
    ) -> bytes:
        request, first = self._request, self.sent[0]
        starts = accumulate(self._sizes[:-1], initial=self._physical_offset)
        ids = between.join([b"%016X" % start for start in starts])
        place = (b"%d" % first.lite_number, b"%d" % first.lite_epoch) if first.lite_epoch else ()
        values = (ids, request.queue_id, self._numbers[0], request.keys[0], *place, b"%d" % request.opaque)
        header = _form(lite if place else pieces).replace(b"%016X", b"%b", 1) % values
        return _frame_start(len(header)) + header

    def forget_bodies(self) -> None:
        super().forget_bodies()
        self._request.body = b""


def _jump_after(previous: int, entry: Callable[[int], tuple[int, int] | None]) -> int:
    """Return the jump of an entry of a light queue after the entry at index ``previous``. The jumps make a skip list
    (Myers, "An applicative random-access stack", 1983). ``entry``: returns number and jump of an entry, or None."""
    if (before := entry(previous)) is None or (target := entry(before[1])) is None:
        return previous
    further = entry(target[1])
    return target[1] if further is not None and before[0] - target[0] == target[0] - further[0] else previous


def _with_room(properties: bytes) -> bytes:
    """Return encoded properties with space for the checksum property.
    Raises ValueError: the properties already contain a checksum. The caller must store this message separately."""
    if CRC_NAME[:-1] in properties:
        raise ValueError("a message came with a checksum")
    return with_room_for_crc(properties)


def _sealed(records: bytes, sizes: list[int]) -> bytes:
    return b"".join([seal(records[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)])


def _kind(request: _Sent) -> str:
    """Return the ``message_type`` of a request in metrics."""
    properties = request.properties
    if b"__SHARDINGKEY\x01" in properties and b"\x02__SHARDINGKEY\x01" in b"\x02" + properties:
        return "fifo"
    return "normal" if request.asked is None else "delay"


@functools.lru_cache(maxsize=16)
def _form(pieces: tuple[bytes, ...]) -> bytes:
    """Return the header of a response as a format."""
    # The constant fields of responses are names from the configuration, which may contain a percent sign.
    first, *rest = [piece.replace(b"%", b"%%") for piece in pieces]
    return first + b"".join(
        [form + piece for form, piece in zip((b"%016X", b"%d", b"%d", b"%b", b"%b", b"%b", b"%b"), rest, strict=False)]
    )


@functools.lru_cache(maxsize=1024)
def _frame_start(header_bytes: int) -> bytes:
    return frame_start(JSON, header_bytes, 0)


def _members(body: bytes) -> list[BatchBounds]:
    """Return the bounds of the messages of a batch. Return an empty list if the body is not a batch, or if the batch
    must be refused or stored in slices."""
    try:
        bounds = batch_bounds(body, count_max=_MEMBERS_MAX + 1)
    except BodyError:
        return []
    lengths = [end - at for _, _, at, end in bounds]
    if len(bounds) > _MEMBERS_MAX or max(lengths) > _STORED_BYTES_MAX:
        return []
    # Return no bounds for messages that recovery might consider torn: the handler of single sends refuses them.
    return [] if any(end > at and not body[end - 1] for _, _, at, end in bounds) else bounds


class _Plan(Struct, frozen=True):
    """The treatment of messages that have the same names of properties.
    ``arrange``: sorts these properties, and the properties that every message gets, into the stored order.
    ``keys``: the indexes of UNIQ_KEY, KEYS and TAGS, -1 if missing, and the positions at which their values begin.
    ``times``: the indexes and units of properties with a delivery time. The first property has priority.
    ``lite``: the index of the lite topic, -1 if missing."""

    arrange: Callable[[list[str]], tuple[str, ...]]
    keys: list[tuple[int, int]]
    times: list[tuple[int, int]]
    lite: int


class PlainSendsReader:
    """`SendsReader` in plain Python."""

    def __init__(
        self,
        stamps: Mapping[str, str],
        not_plain: Collection[str],
        timed: Mapping[str, int],
        frame_bytes_max: int,
        header_bytes_max: int,
    ) -> None:
        self._stamp_pieces = [f"{name}\x01{value}" for name, value in stamps.items()]
        # A client must not send the properties that every message gets: they would occur twice.
        self._refused = {*stamps, *not_plain}
        self._timed = dict(timed)
        self._frame_bytes_max = frame_bytes_max
        self._header_bytes_max = header_bytes_max
        # Cache the plans, because producers send the same names in the same order in every message.
        self._plan_of: Callable[[tuple[str, ...]], _Plan | None] = functools.lru_cache(maxsize=1024)(self._plan)

    def read(self, chunk: bytes, start: int, count_max: int = sys.maxsize, /) -> Sends | None:
        """Return the consecutive plain sends from ``start``, or None if the first frame is not a plain send."""
        sent: list[_Sent] = []
        at, available = start, len(chunk)
        while available - at >= 8 and len(sent) < count_max:
            length, word = _START.unpack_from(chunk, at)
            header_bytes, end = word & _HEADER_BYTES, at + 4 + length
            is_sound = (
                word >> 24 <= ROCKETMQ
                and 4 <= length <= self._frame_bytes_max - 4
                and header_bytes < self._header_bytes_max
                and header_bytes + 4 <= length
            )
            body_at = at + 8 + header_bytes
            # Stop at an invalid frame. The splitter reads this frame next and reports the fault.
            if not is_sound or end > available or end == body_at:
                break
            one = self._read(word >> 24, chunk[at + 8 : body_at], chunk[body_at:end])
            if one is None:
                break
            if one.code == RequestCode.SEND_BATCH_MESSAGE:
                # If there are sends before the batch, return the sends alone. The next call reads the batch again.
                return self._batch(chunk, start, end, one) if not sent else PlainSends(self, chunk, start, at, sent)
            sent.append(one)
            at = end
        return PlainSends(self, chunk, start, at, sent) if sent else None

    def _batch(self, chunk: bytes, start: int, end: int, request: _Sent) -> Sends | None:
        """Return the messages of a batch, or None if they have to be handled separately."""
        body = request.body
        bounds = _members(body)
        if not bounds:
            return None
        stored = [body[at:properties_end] for _, _, at, properties_end in bounds]
        names = {find_property(one, _LITE_NAME) for one in stored} if _LITE_MARK in body else {None}
        is_lite = names != {None}
        bytes_max = _LITE_MEMBERS_PROPERTIES_BYTES_MAX if is_lite else _MEMBERS_PROPERTIES_BYTES_MAX
        if sum(map(len, stored)) > bytes_max or len(names) > 1:
            return None
        if not is_lite:
            return PlainBatch(chunk, start, end, request, bounds)
        members: list[_Sent] = []
        for (flag, body_at, at, _), own in zip(bounds, stored, strict=True):
            try:
                text = own.decode()
            except UnicodeDecodeError:
                return None
            read = self._properties(text, len(request.place[0]))
            if read is None or not read[3]:
                return None
            properties, keys, asked, lite = read
            member = copy(request)
            member.flag, member.body, member.properties, member.keys = flag, body[body_at : at - 2], properties, keys
            member.asked, member.sent_properties, member.lite = asked, text, lite
            members.append(member)
        return PlainLiteBatch(self, chunk, start, end, request, members)

    def _read(self, kind: int, header: bytes, body: bytes) -> _Sent | None:
        if (_is_json_send(header) is None) if kind == JSON else (header[:2] not in _BINARY_SENDS):
            return None
        try:
            command = decode_command(Frame(kind, header, body))
            header_type = _HEADERS.get(command.code)
            if header_type is None or command.flag:
                return None
            sent = decode_header(command, header_type)
        except HeaderError:
            return None
        topic, sys_flag, times = sent.topic, sent.sys_flag, sent.reconsume_times or 0
        is_batch = command.code == RequestCode.SEND_BATCH_MESSAGE
        is_special = bool(sent.batch) is not is_batch or sent.unit_mode or sys_flag & (TRANSACTION_MASK | INNER_BATCH)
        numbers = (command.opaque, sent.queue_id, sent.flag, sys_flag, sent.born_timestamp, times)
        # With a negative queue id the broker chooses the queue, which only the handler of single sends does.
        if is_special or min(numbers) < 0 or sent.properties is None:
            return None
        if not topic.isascii() or not 0 < len(topic) <= _TOPIC_BYTES_MAX or topic.startswith(RETRY_PREFIX):
            return None
        read = self._properties(sent.properties, len(topic))
        if read is None:
            return None
        stored, keys, asked, lite = read
        if is_batch and (asked is not None or lite):
            return None
        return _Sent(
            (topic, sent.queue_id),
            sent.queue_id,
            command.code,
            command.opaque,
            sent.flag,
            sys_flag,
            sent.born_timestamp,
            times,
            body,
            stored,
            keys,
            asked,
            sent.properties if asked is not None or lite else "",
            lite=lite,
        )

    def _properties(self, text: str, topic_bytes: int) -> tuple[bytes, Keys, tuple[int, int] | None, str] | None:
        """Return the stored form of properties, their keys, the requested delivery time and the lite topic. Return None
        if the message is not a plain send."""
        # A text never has more characters than bytes. The exact check of the bytes is below.
        if len(text) > _STORED_BYTES_MAX or "\x01\x02" in text or text.endswith("\x01"):
            return None
        pieces = text.removesuffix("\x02").split("\x02")
        try:
            plan = self._plan_of(tuple([piece[: piece.index("\x01")] for piece in pieces]))
            if plan is None or text.count("\x01") != len(pieces):
                return None
            stored = ("\x02".join(plan.arrange(pieces + self._stamp_pieces)) + "\x02").encode()
        except ValueError:  # a piece is not a pair, or there is a lone surrogate
            return None
        unique_key, words, tags = [pieces[at][start:] if at >= 0 else "" for at, start in plan.keys]
        # The response's JSON contains the key unchanged, so no character in it may need an escape.
        if not (unique_key.isascii() and unique_key.isalnum()) or len(stored) > _STORED_BYTES_MAX:
            return None
        asked, lite = None, ""
        if plan.lite >= 0:
            lite = pieces[plan.lite].partition("\x01")[2]
            more_bytes = _LITE_BYTES_MAX + topic_bytes + len(lite)
            if plan.times or len(stored) + more_bytes > _STORED_BYTES_MAX or lite_topic_fault(lite) is not None:
                return None
        if plan.times:
            if len(stored) + _TIMED_BYTES_MAX + topic_bytes > _STORED_BYTES_MAX:
                return None
            values = [pieces[at].partition("\x01")[2] for at, _ in plan.times]
            if not all(map(_TIME.fullmatch, values)):
                return None
            asked = int(values[0]), plan.times[0][1]
        return stored, (unique_key.encode(), words.encode(), tags.encode()), asked, lite

    def _plan(self, names: tuple[str, ...]) -> _Plan | None:
        """Return the plan for properties with these names, or None if such a message is not a plain send."""
        is_known = len(set(names)) == len(names) and all(names) and "UNIQ_KEY" in names
        if not is_known or not self._refused.isdisjoint(names) or len(names) + len(self._stamp_pieces) > _ENTRIES_MAX:
            return None
        all_names = [*names, *[piece.partition("\x01")[0] for piece in self._stamp_pieces]]
        in_order = decode_properties(in_stored_order("".join([f"{one}\x01v\x02" for one in all_names]).encode()))
        keys = [(names.index(one) if one in names else -1, len(one) + 1) for one in ("UNIQ_KEY", "KEYS", "TAGS")]
        times = [(names.index(one), unit_ms) for one, unit_ms in self._timed.items() if one in names]
        lite = names.index(LITE_TOPIC) if LITE_TOPIC in names else -1
        return _Plan(itemgetter(*map(all_names.index, in_order)), keys, times, lite)

    def stored(self, text: str, more: str, last: str = "") -> bytes:
        """Return the stored form of properties, ``more`` properties, the properties that every message gets, and the
        properties ``last``.
        Raises ValueError: a text cannot be encoded as UTF-8."""
        end = "" if text.endswith("\x02") else "\x02"
        stamps = "\x02".join([*self._stamp_pieces, ""])
        return in_stored_order(f"{text}{end}{more}{stamps}{last}".encode())
