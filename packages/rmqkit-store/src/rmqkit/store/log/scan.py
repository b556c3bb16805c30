"""The bulk scan of a CommitLog segment: many records per call, with numpy, for all code that reads a whole log.

A segment is a run of records (`rmqkit.protocol.record`). A *blank* closes a full segment::

    | record | record | ... | record | blank: i32 remaining, i32 BLANK_MAGIC, undefined bytes |

`walk` follows the chain of sizes and checks a whole run of records in one step. It uses the compiled core if the core
is installed, otherwise plain Python (0.2 µs a record) and numpy. A record is *sound* if its magic is known, its
physicalOffset is the segment's base offset plus its position, and the sum of its parts is its size. These are the
checks of `decode_record` and the check of the place, without the check that the topic is UTF-8 (see
`Records.text_only`). Only `crc_matches` reads bodies.

The chain of sizes stops at:

==================  =====================================================================================
blank               the valid end of a full segment, if its size is the number of remaining bytes, and no record
                    follows that was stored later than the record before the blank (`behind_blank`)
the given end       the valid end of the requested part
anything else       `Damage`; the scan continues at the next sound record, found by its magic and its place
==================  =====================================================================================

The newest segment is preallocated. Its last record is followed by zeros, or by stale bytes of a log that a recovery cut
(they are not cleared, store.md §2). `log_end` returns the end of its records; call it before you scan a segment that
may be the newest.

numpy is imported inside the functions that need it, so that importing this module costs a broker nothing.
Not handled here: opening files, decoding of variable fields, the meaning of damage. Source: store.md §3, §12.1.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rmqkit import extras
from rmqkit.core import CORE
from rmqkit.errors import BodyError, ExtraMissing, RecordCorrupt
from rmqkit.protocol.record import (
    BLANK_BYTES,
    BORN_HOST_V6,
    HEAD_FIELDS,
    MAGIC_V1,
    MAGIC_V2,
    STORE_HOST_V6,
    Record,
    body_crc,
    closes_file,
    decode_record,
    is_blank,
    layout_of,
)
from rmqkit.system import disk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "FALSE_BLANK",
    "RECORD_BYTES_MIN",
    "Buffer",
    "Damage",
    "Records",
    "behind_blank",
    "crc_matches",
    "find_record",
    "has_numpy",
    "head_dtype",
    "log_end",
    "need_numpy",
    "pick",
    "pulled",
    "runs",
    "split",
    "walk",
]

Buffer = bytes | bytearray | disk.Mapped
"""A whole segment, in memory or mapped: the input of a scan."""

BATCH_ROWS = 4096
BATCH_BYTES = 8 << 20
"""Runs of about this size stay in the CPU's caches. Larger runs were up to 45 % slower."""
_AHEAD_BYTES = 256 << 10
_SHORT_BYTES = 2048

FALSE_BLANK = "a blank that closes the file, with records after it"

_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_MAGIC = MAGIC_V1.to_bytes(4, "big", signed=True)[:3]  # v1 and v2 differ in the last byte only
_HOST_BITS = (0, BORN_HOST_V6, STORE_HOST_V6, BORN_HOST_V6 | STORE_HOST_V6)
_HOST_SHIFT = 4
_HEAD_V4_BYTES = layout_of(0).head_bytes
RECORD_BYTES_MIN = _HEAD_V4_BYTES + 1 + 2  # no body, no topic, no properties
_PHYSICAL_OFFSET_AT = layout_of(0).positions["physical_offset"]
_V1_TOPIC_BYTES_MAX = 127
_I16_MAX = 0x7FFF
_TOPICS_COMPARED = 32
_ANCHORS_TRIED = 16  # the log still has the records of a deleted topic
_CRC_MASK = 0x7FFFFFFF

assert MAGIC_V2.to_bytes(4, "big", signed=True)[:3] == _MAGIC
assert tuple(bits >> _HOST_SHIFT for bits in _HOST_BITS) == (0, 1, 2, 3)


def has_numpy() -> bool:
    """Return True if the bulk scan can be used. numpy is not imported."""
    return importlib.util.find_spec("numpy") is not None


def need_numpy(what: str) -> None:
    """Require numpy.

    Raises:
        ExtraMissing: numpy is missing; the text explains how to install it.
    """
    if not has_numpy():
        raise ExtraMissing(what, "numpy", extras.install("store"))


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not a record.

    Attributes:
        position: place where a record was expected, in bytes from the start of the segment.
        end: start of the next sound record, or the end of the scanned part.
        reason: the check that failed.
    """

    position: int
    end: int
    reason: str


@dataclass(slots=True)
class Records:
    """Sound records of one segment, as arrays with one element per record.

    All positions count from the start of ``buffer``.

    Attributes:
        buffer: the segment.
        base_offset: physical offset of the first byte of the segment.
        positions, sizes: position and size of each record, in bytes.
        heads: the bytes before the body, read as if both hosts were IPv4. If ``host_bits`` is 0, all fields are right.
            Otherwise only the fields before bornHost are right. `field` handles both cases.
        host_bits: ``(sysFlag & 0x30) >> 4``, the layout of each record.
        body_at, topic_at, properties_at: start of each variable field.
        body_bytes, topic_bytes, properties_bytes: length of each variable field.
    """

    buffer: Buffer
    base_offset: int
    positions: Ints
    sizes: Ints
    heads: NDArray[Any]
    host_bits: NDArray[np.uint8]
    body_at: Ints
    body_bytes: Ints
    topic_at: Ints
    topic_bytes: Ints
    properties_at: Ints
    properties_bytes: Ints
    _topics: tuple[list[str | None], Ints] | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def end(self) -> int:
        """Position after the last record. There must be at least one record."""
        return int(self.positions[-1] + self.sizes[-1])

    @property
    def offsets(self) -> Ints:
        """The physical offset of each record."""
        return self.base_offset + self.positions

    @property
    def store_timestamps(self) -> Ints:
        return self.field("store_timestamp")

    def topics(self) -> tuple[list[str | None], Ints]:
        """Return the distinct topics, and the index of each record's topic. A topic that is not UTF-8 is None."""
        if self._topics is None:
            found, topic = _distinct_topics(self)
            self._topics = [_text_or_none(one) for one in found], topic
        return self._topics

    def text_only(self) -> Records:
        """Return the records before the first record with a topic that is not UTF-8. `decode_record` rejects such a
        record.
        """
        topics, topic = self.topics()
        return self.head(int((topic == topics.index(None)).argmax())) if None in topics else self

    def head(self, count: int) -> Records:
        """Return the first ``count`` records."""
        return self if count >= len(self) else self.take(slice(count))

    def record(self, row: int) -> Record:
        """Decode one of the records.

        Raises:
            RecordCorrupt: its topic is not UTF-8.
        """
        with memoryview(self.buffer) as view:
            return decode_record(view, int(self.positions[row]))

    def properties(self, row: int) -> bytes:
        """Return the property string of one of the records."""
        at = int(self.properties_at[row])
        return bytes(self.buffer[at : at + int(self.properties_bytes[row])])

    def take(self, rows: slice | NDArray[Any]) -> Records:
        """Return some of the records, selected by a slice, a mask or ascending indexes."""
        arrays = (getattr(self, one.name)[rows] for one in fields(self)[2:-1])
        return Records(self.buffer, self.base_offset, *arrays)

    def field(self, name: str) -> Ints:
        """Return one number of every head, selected by its name in `HEAD_FIELDS`."""
        if name in _names_before_hosts() or not self.host_bits.any():
            return self.heads[name].astype("i8")
        width = head_dtype(0)[name].itemsize
        return _anywhere(self.buffer, f">i{width}")[self.field_at(name)].astype("i8")

    def field_at(self, name: str) -> Ints:
        """Return the position of one field in the buffer, for every head."""
        import numpy as np

        places = np.array([layout_of(bits).positions[name] for bits in _HOST_BITS], "i8")
        at: Ints = self.positions + places[self.host_bits]
        return at

    def field_bytes(self, name: str) -> Ints:
        """Return the size of one field in bytes, for every head. Hosts have different sizes."""
        import numpy as np

        widths = np.array([head_dtype(bits)[name].itemsize for bits in _HOST_BITS])
        return widths[self.host_bits]


def walk(
    buffer: Buffer,
    base_offset: int,
    low: int = 0,
    high: int | None = None,
    *,
    rows_max: int = BATCH_ROWS,
    bytes_max: int = BATCH_BYTES,
) -> Iterator[Records | Damage]:
    """Yield the records of a part of a segment, run by run, in order.

    Args:
        buffer: the whole segment.
        base_offset: physical offset of its first byte (the number in the file name).
        low: start of a record.
        high: end of the part (exclusive): the start of a record, or the end of the segment.
        rows_max: maximum number of records in one run.
        bytes_max: a run ends with the record that reaches this number of bytes.
    """
    high = len(buffer) if high is None else high
    position, last = low, None
    while position < high:
        for records in runs(buffer, base_offset, position, high, rows_max=rows_max, bytes_max=bytes_max):
            yield records
            position, last = records.end, records
        if high - position < BLANK_BYTES:
            return
        if closes_file(memoryview(buffer), position):
            stored_ms = 0 if last is None else int(last.take(slice(-1, None)).store_timestamps[0])
            resumed = behind_blank(buffer, base_offset, position, high, stored_ms)
            if resumed == high:
                return
            yield Damage(position, resumed, FALSE_BLANK)
        else:
            resumed = find_record(buffer, base_offset, position + 1, high)
            yield Damage(position, resumed, _unsound(buffer, base_offset, position, high) or "not a record")
        position = resumed


def behind_blank(buffer: Buffer, base_offset: int, position: int, high: int, stored_ms: int) -> int:
    """Return the position of the first sound record after a blank that should end the file, or ``high`` if the blank is
    valid.

    A writer puts nothing after a blank, so a record there was written before the blank. There are two cases. The blank
    may be damage in a chain of records. Or the record is stale: a recovery cut the log before it, and the file was
    filled again. A stale record was stored earlier than the record before the blank, at ``stored_ms`` (as in
    `log_end`).
    """
    found = find_record(buffer, base_offset, position + BLANK_BYTES, high)
    if found == high:
        return high
    with memoryview(buffer) as view:
        return found if decode_record(view, found).store_timestamp >= stored_ms else high


def runs(
    buffer: Buffer, base_offset: int, low: int, high: int, *, rows_max: int = BATCH_ROWS, bytes_max: int = BATCH_BYTES
) -> Iterator[Records]:
    """Yield the runs of `walk` up to the first bytes that are not a record: a blank or damage."""
    while len(records := _sound_records(buffer, base_offset, low, high, rows_max, bytes_max)):
        yield records
        low = records.end


def pick(buffer: Buffer, base_offset: int, positions: Sequence[int]) -> Iterator[Records | Damage]:
    """Yield the records at chosen positions of a segment, in order. A position without a record yields a `Damage`."""
    left, high = list(positions), len(buffer)
    while left:
        chain = list(itertools.takewhile(lambda position: _fits(buffer, position, high), left))
        found = len(chain)
        if chain:
            records = _run(buffer, base_offset, chain)
            found = len(records)
            if found:
                yield records
        if found < len(left):
            reason = _unsound(buffer, base_offset, left[found], high) if 0 <= left[found] < high else None
            yield Damage(left[found], left[found], reason or "outside of the file")
            found += 1
        left = left[found:]


def _fits(buffer: Buffer, position: int, high: int) -> bool:
    return 0 <= position <= high - RECORD_BYTES_MIN and (
        RECORD_BYTES_MIN <= _I32.unpack_from(buffer, position)[0] <= high - position
    )


def pulled(body: Buffer) -> Records:
    """Return the records of a pull response. They are contiguous in the response, wherever they are in the log.

    Raises:
        BodyError: there are other bytes between or after the records.
    """
    records = _sound_records(body, None, 0, len(body), len(body), len(body) + 1)
    end = records.end if len(records) else 0
    if end != len(body):
        raise BodyError(f"a pulled body of {len(body)} bytes has no record at byte {end}")
    return records


def crc_matches(records: Records) -> NDArray[np.bool_]:
    """Return a mask of the records with a body that has the CRC in the head of the record (CRC-32 with the top bit
    cleared)."""
    import numpy as np

    if (core := CORE.log_reader) is not None:
        sums = records.heads["body_crc"].tobytes()
        found = core.have_sums(records.buffer, records.body_at.tobytes(), records.body_bytes.tobytes(), sums)
        return np.frombuffer(found, bool)
    crc32 = zlib.crc32
    ends = (records.body_at + records.body_bytes).tolist()
    with memoryview(records.buffer) as view:
        crcs = [crc32(view[at:end]) for at, end in zip(records.body_at.tolist(), ends, strict=True)]
    matching: NDArray[np.bool_] = np.array(crcs, "i8") & _CRC_MASK == records.heads["body_crc"]
    return matching


def find_record(buffer: Buffer, base_offset: int, low: int, high: int, search_end: int | None = None) -> int:
    """Return the position of the first sound record that begins at or after ``low`` and ends at or before ``high``.
    Return ``high`` if there is no such record.

    A body that repeats bytes of another record is not found, because the physical offset in these bytes is not their
    place. Only a sender that predicts the place of its message can write a body that looks like a record here. All
    bytes after ``search_end`` must be zero.
    """
    at, search_end = low + 4, high if search_end is None else search_end
    while (at := buffer.find(_MAGIC, at, search_end)) >= 0:
        position = at - 4
        if (
            position + RECORD_BYTES_MIN <= high
            and _I64.unpack_from(buffer, position + _PHYSICAL_OFFSET_AT)[0] == base_offset + position
            and _unsound(buffer, base_offset, position, high) is None
        ):
            return position
        at += 1
    return high


def split(
    buffer: Buffer,
    base_offset: int,
    high: int,
    split_bytes: int,
    is_anchored: Callable[[Record], bool] | None = None,
) -> list[tuple[int, int]]:
    """Return parts ``(low, high)`` of about ``split_bytes`` that together cover a segment up to ``high``.

    Every inner boundary is a record that a scan from the start reaches, so the parts can be scanned independently. A
    body can contain bytes that look like a record at exactly this place. Therefore a record at a boundary is trusted
    only if ``is_anchored`` returns True for it, because data outside of the log refers to it. In this case no other
    record is read. Otherwise the sizes are followed from the previous boundary.
    """
    lows = [0]
    for target in range(split_bytes, high, split_bytes):
        target = max(target, lows[-1] + 1)
        low = None if is_anchored is None else _anchored(buffer, base_offset, target, high, is_anchored)
        low = _first_behind(buffer, base_offset, lows[-1], target, high) if low is None else low
        if low >= high:
            break
        lows.append(low)
    return list(zip(lows, [*lows[1:], high], strict=True)) if high else []


def _anchored(
    buffer: Buffer, base_offset: int, low: int, high: int, is_anchored: Callable[[Record], bool]
) -> int | None:
    """Check the next few sound records. Return the position of the first anchored record, ``high`` if no record
    follows, or None if none of these records is anchored."""
    for tried in range(_ANCHORS_TRIED):
        low = find_record(buffer, base_offset, low, high)
        if low >= high:
            return None if tried else high
        with memoryview(buffer) as view:
            record = decode_record(view, low)
        if is_anchored(record):
            return low
        low += 1
    return None


def _first_behind(buffer: Buffer, base_offset: int, low: int, target: int, high: int) -> int:
    """Return the position of the first record at or after ``target`` that a scan from ``low`` reaches. Return ``high``
    if there is no such record."""
    for part in walk(buffer, base_offset, low, high):
        if isinstance(part, Records) and part.positions[-1] >= target:
            return int(part.positions[part.positions.searchsorted(target)])
    return high


def log_end(buffer: Buffer, base_offset: int, high: int | None = None) -> int:
    """Return the end of the records in a segment that may be the newest, or 0 without records. The writer may be
    active: a last record with an incomplete body does not count. The end is followed by zeros, a blank, or stale
    records of a log that was cut. Stale records were stored earlier than the last record before them. Records after
    damage were stored later. (Stale records that happen to begin exactly at the end continue the chain; the recovery of
    a broker accepts them, too.) The function reads every head.

    Args:
        buffer: the whole segment.
        base_offset: physical offset of its first byte.
        high: position after which the segment contains only zeros.
    """
    last: Records | None = None
    damaged = False
    for part in walk(buffer, base_offset, 0, high):
        if isinstance(part, Damage):
            damaged = True
            continue
        if damaged and last is not None:
            first, before = part.take(slice(1)), last.take(slice(-1, None))
            if first.field("store_timestamp")[0] < before.field("store_timestamp")[0]:
                break
        damaged = False
        last = part
    if last is None:
        return 0
    return last.end if _is_complete(last) else int(last.positions[-1])


def _is_complete(records: Records) -> bool:
    """Return True if body and properties of the last record are complete. Head and lengths are known to be complete."""
    at = int(records.body_at[-1])
    with memoryview(records.buffer) as view:
        crc = body_crc(view[at : at + int(records.body_bytes[-1])])
        has_properties_end = not records.properties_bytes[-1] or view[records.end - 1] != 0
    return has_properties_end and crc == records.heads["body_crc"][-1]


def _sound_records(
    buffer: Buffer, base_offset: int | None, low: int, high: int, rows_max: int, bytes_max: int
) -> Records:
    """Return the contiguous sound records from ``low`` on."""
    if (core := CORE.log_reader) is None:
        return _run(buffer, base_offset, _chain(buffer, low, high, rows_max, bytes_max))
    import numpy as np

    numbers, heads, layouts = core.sound_records(buffer, base_offset, low, high, rows_max, bytes_max)
    positions, sizes, *variable = np.frombuffer(numbers, "i8").reshape(8, -1)
    host_bits = np.frombuffer(layouts, "u1")
    return Records(
        buffer, base_offset or 0, positions, sizes, np.frombuffer(heads, head_dtype(0)), host_bits, *variable
    )


def _chain(buffer: Buffer, position: int, high: int, rows_max: int, bytes_max: int) -> list[int]:
    """Return the positions reached by following the sizes alone. `_run` decides how many of them are records.
    Each step would wait for memory. Therefore, while records are short, the bytes ahead are read in one step first."""
    import numpy as np

    unpack = _I32.unpack_from
    positions: list[int] = []
    append = positions.append
    last = min(high - RECORD_BYTES_MIN, position + bytes_max - 1)
    are_short = True
    while position <= last and (room := rows_max - len(positions)):
        stop = min(last, position + _AHEAD_BYTES)
        if are_short:
            np.frombuffer(buffer, "u1", stop - position + 1, position).max()
        for _ in range(room):
            if position > stop:
                break
            (size,) = unpack(buffer, position)
            if size < RECORD_BYTES_MIN:
                return positions
            append(position)
            position += size
        are_short = (len(positions) - rows_max + room) * _SHORT_BYTES > _AHEAD_BYTES
    if position > high:  # only the last record can be too long, because no record begins after it
        positions.pop()
    return positions


def _run(buffer: Buffer, base_offset: int | None, chain: list[int]) -> Records:
    """Return the sound records at the front of a chain of positions. The size at each position must fit in the buffer.
    Without a ``base_offset``, physical offsets are not checked."""
    import numpy as np

    at = np.array(chain, "i8")
    heads = _anywhere(buffer, f"V{_HEAD_V4_BYTES}")[at].view(head_dtype(0))
    sizes = heads["size"].astype("i8")
    ends = at + sizes
    host_bits = ((heads["sys_flag"] & (BORN_HOST_V6 | STORE_HOST_V6)) >> _HOST_SHIFT).astype("u1")
    is_v2 = heads["magic"] == MAGIC_V2
    sound = is_v2 | (heads["magic"] == MAGIC_V1)
    if base_offset is not None:
        sound &= heads["physical_offset"] == base_offset + at

    # Read the lengths at their nominal places, but never outside of their record: the sum reveals a wrong length.
    octets = np.frombuffer(buffer, "u1")
    body_at = at + np.array([layout_of(bits).head_bytes for bits in _HOST_BITS])[host_bits]
    if host_bits.any():
        body_bytes = _anywhere(buffer, ">i4")[np.minimum(body_at - 4, ends - 4)].astype("i8")
    else:
        body_bytes = heads["body_bytes"].astype("i8")
    topic_at = body_at + body_bytes + np.where(is_v2, 2, 1)
    topic_bytes = octets[np.clip(topic_at - 1, at, ends - 1)].astype("i8")
    if is_v2.any():
        topic_bytes[is_v2] += octets[np.clip(topic_at - 2, at, ends - 1)[is_v2]].astype("i8") << 8
    properties_at = topic_at + topic_bytes + 2
    length_at = np.clip(properties_at - 2, at, ends - 2)
    properties_bytes = (octets[length_at].astype("i8") << 8) + octets[length_at + 1]

    sound &= (body_bytes >= 0) & (topic_at + 2 <= ends)
    sound &= topic_bytes <= np.where(is_v2, _I16_MAX, _V1_TOPIC_BYTES_MAX)
    sound &= (properties_bytes <= _I16_MAX) & (properties_at + properties_bytes == ends)
    records = Records(
        buffer, base_offset or 0, at, sizes, heads, host_bits,
        body_at, body_bytes, topic_at, topic_bytes, properties_at, properties_bytes,
    )  # fmt: skip
    return records if sound.all() else records.take(slice(int(np.argmin(sound))))


def _distinct_topics(records: Records) -> tuple[list[bytes], Ints]:
    """Return the distinct topics of a run, and for each record the index of its topic.
    A few topics are distinguished by comparing eight octets at a time, which is several times as fast as a lookup for
    every record."""
    import numpy as np

    octets = np.frombuffer(records.buffer, "u1")
    words = np.lib.stride_tricks.as_strided(octets, (len(octets) - 7, 8), (1, 1), writeable=False)
    ends, topic = records.topic_at + records.topic_bytes, np.empty(len(records), "i8")
    numbers: dict[bytes, int] = {}
    for length in np.flatnonzero(np.bincount(records.topic_bytes)).tolist():
        rows = np.flatnonzero(records.topic_bytes == length)
        places = [*range(-length, -8, 8), -8]  # the last word of a short topic begins before the topic
        columns = [words[ends[rows] + place].view(">u8")[:, 0] for place in places]
        if length < 8:
            columns[-1] = columns[-1] & np.uint64((1 << 8 * length) - 1)
        while len(rows) and len(numbers) < _TOPICS_COMPARED:
            is_same = np.logical_and.reduce([column == column[0] for column in columns])
            end = int(ends[rows[0]])
            topic[rows[is_same]] = numbers.setdefault(octets[end - length : end].tobytes(), len(numbers))
            rows, columns = rows[~is_same], [column[~is_same] for column in columns]
        for row, end in zip(rows.tolist(), ends[rows].tolist(), strict=True):
            topic[row] = numbers.setdefault(octets[end - length : end].tobytes(), len(numbers))
    return list(numbers), topic


def _text_or_none(topic: bytes) -> str | None:
    try:
        return topic.decode()
    except UnicodeDecodeError:
        return None


def _unsound(buffer: Buffer, base_offset: int, position: int, high: int) -> str | None:
    """Return the reason why the bytes at a position are not a sound record that ends at or before ``high``. Return None
    if they are a sound record.
    """
    with memoryview(buffer) as whole, whole[:high] as part:
        if not any(part[position : position + BLANK_BYTES]):
            return "zeros where a record should begin"
        if is_blank(part, position):
            said, left = _I32.unpack_from(part, position)[0], len(buffer) - position
            return f"a blank that says {said} bytes where {left} are left"
        try:
            record = decode_record(part, position)
        except RecordCorrupt as error:
            return error.reason
    if record.physical_offset != base_offset + position:
        return f"it says physical offset {record.physical_offset} and lies at {base_offset + position}"
    return None


def _anywhere(buffer: Buffer, kind: str) -> NDArray[Any]:
    """Return one value of a numpy type for each byte of a buffer, read from this byte on. The values overlap, and
    indexing copies the chosen values."""
    import numpy as np

    dtype = np.dtype(kind)
    return np.ndarray((max(0, len(buffer) - dtype.itemsize + 1),), dtype, buffer, 0, (1,))


@functools.cache
def head_dtype(host_bits: int) -> np.dtype[Any]:
    """Return `HEAD_FIELDS` as a numpy record type for one combination of host sizes."""
    import numpy as np

    layout = layout_of(host_bits)
    names = [name for name, _ in HEAD_FIELDS]
    places = [layout.positions[name] for name in names]
    widths = [end - at for at, end in zip(places, [*places[1:], layout.head_bytes], strict=True)]
    kinds = {"i": ">i4", "q": ">i8"}
    formats = [kinds.get(letter, f"V{width}") for (_, letter), width in zip(HEAD_FIELDS, widths, strict=True)]
    return np.dtype({"names": names, "formats": formats, "offsets": places, "itemsize": layout.head_bytes})


@functools.cache
def _names_before_hosts() -> frozenset[str]:
    return frozenset(name for name, at in layout_of(0).positions.items() if at < layout_of(0).positions["born_host"])
