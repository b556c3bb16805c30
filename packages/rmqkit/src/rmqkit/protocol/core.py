"""The compiled core (`rmqkit_native`), and the types of its calls. `rmqkit.core.CORE` shows if a process uses it.

For plain sends, the core extracts the frames that only request storage from the bytes of a connection. It makes
records, queue entries, index entries and responses for all of them, without an object for each. `rmqkit.protocol.sends`
does the same in plain Python and produces the same bytes for every frame that the core accepts. The core uses no file,
clock or table, and refuses nothing: the broker does.
Source: remoting.md §1.2, §1.3, §4.3.1, §7.3; store.md §3.4, §4.1, §7.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from mmap import mmap
from typing import Any, Protocol

from msgspec import Struct

try:
    import rmqkit_native as _native
except ImportError:  # no wheel for this machine, or not installed
    _native = None

__all__ = [
    "ACKS",
    "FORMAT",
    "AckedOffsets",
    "AckedPop",
    "Acks",
    "Core",
    "CoreFault",
    "GrpcAck",
    "GrpcHeaders",
    "GrpcMessages",
    "GrpcSendsReader",
    "HeaderBlockDecoder",
    "LogReader",
    "SelectRecords",
    "Sends",
    "SendsReader",
    "index_entries",
    "set_slots",
]

FORMAT = 11
"""Version of the calls below: a core with another number is not used."""

CoreFault: type[BaseException] = getattr(_native, "PanicException", SystemError)
"""Raised for bugs of the core; it is not an Exception, so that no caller treats it as bad input."""


class Sends(Protocol):
    """Consecutive plain sends of a connection, or the messages of a batch.

    Attributes:
        chunk: the received bytes, from ``start`` to ``end``; until `forget_bodies`.
        queues: topic, queue id, number of messages, and the bytes of their records, 0 before `encode`.
        is_batch: whether all of them came in one request, which has one response.
        waits_not: whether one of them requests a response before the disk has it.
        body_bytes_max: size of the longest body of a request.
        opaques: opaques of the requests, in order.
        last_offset: physical offset of the last record.
        kinds: topic, request code, ``message_type``, and the record bytes of each request.
        asked: the delivery times that some of them request, and their units in ms.
    """

    @property
    def chunk(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def queues(self) -> list[tuple[str, int, int, int]]: ...
    @property
    def is_batch(self) -> bool: ...
    @property
    def waits_not(self) -> bool: ...
    @property
    def body_bytes_max(self) -> int: ...
    @property
    def opaques(self) -> list[int]: ...
    @property
    def last_offset(self) -> int: ...
    @property
    def kinds(self) -> list[tuple[str, int, str, list[int]]]: ...
    @property
    def asked(self) -> list[tuple[int, int]]: ...

    def __len__(self) -> int: ...

    def encode(
        self,
        numbers: list[int],
        physical_offset: int,
        born_host: bytes,
        store_timestamp: int,
        store_host: bytes,
        is_sealed: bool,
    ) -> bytes:
        """Return the concatenated records. ``numbers``: the next queue offset of each of ``queues``.
        ``is_sealed``: whether they end with their checksum (``appendPropCRC``).
        Raises ValueError: the records do not fit in the log's numbers, or one arrived with a checksum."""

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        """Return the fields of a `DispatchRequest` for each record.

        ``with_tags``: whether TAGS are keys of the index.
        """

    def index_rows(self, with_tags: bool) -> tuple[bytes, int] | None:
        """Return the records as rows for `index_entries`, and the number of their keys; None without a core."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        """Return for each of ``queues``: its entries, and the physical offsets of start and end of their records."""

    def keep(self, outs: list[int], timer_topic: str, broker_name: str) -> None:
        """Put the messages that request a delivery time into the timer's queue instead of their own. ``outs``: delivery
        times.
        Raises ValueError: the broker's name contains a blank, which separates the parts of a handle."""

    def answers(self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], between: bytes) -> bytes:
        """Return the concatenated frames of the responses: see `answer_pieces`."""

    def forget_bodies(self) -> None:
        """Release the received bytes, after the records are stored."""


AckedPop = tuple[str, str, int, int, int, int]
"""The parts of an ack that identify a pop: topic, group, queue id, start offset, pop time, revive queue."""

AckedOffsets = tuple[str, str, int, int, int, int, list[int], list[int]]
"""`AckedPop`, the acknowledged offsets, and the opaques of these requests."""


class Acks(Protocol):
    """Consecutive requests to acknowledge one popped message each. Only the core creates this object: without it each
    request is a frame.

    Attributes:
        chunk: the received bytes, from ``start`` to ``end``.
        pops: the acknowledged pops, in the order in which they first appear.
    """

    @property
    def chunk(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def pops(self) -> list[AckedOffsets]: ...


ACKS: Any = getattr(_native, "Acks", None)
"""The type of the core's `Acks`, None without a core, to distinguish acks from sends."""


class SendsReader(Protocol):
    """Extracts plain sends and acks from received bytes."""

    def read(self, chunk: bytes, start: int, count_max: int = sys.maxsize, /) -> Sends | Acks | None:
        """Return the plain requests that follow one another from ``start``; None if the first frame is not plain."""


SelectRecords = Callable[
    [bytes, memoryview, int, int, "frozenset[int] | None", int, int], "tuple[int, int, int, int, bytes | None] | None"
]
"""``(entries, log, start, end, codes, count_max, bytes_max)``: selects the records of queue entries that match, all
from one file of the log: at most ``count_max`` records and, except for the first, ``bytes_max`` bytes. ``log`` is the
file, written from the physical offset ``start`` to ``end``; ``codes`` are the tag codes to accept, None for all.
Returns the number of records, the number of processed entries, the bytes of the records, the position of the first
record in the file, and a concatenated copy of the records, or None if they are contiguous in the file. Returns only
None if a record is elsewhere or not after the previous one, or if an entry has the address of a tag code."""


class LogReader(Protocol):
    """Reads many records of a log at once; `rmqkit.store.log.scan` does the same with numpy."""

    def sound_records(
        self, buffer: Any, base_offset: int | None, low: int, high: int, rows_max: int, bytes_max: int, /
    ) -> tuple[bytes, bytes, bytes]:
        """Return the sound records that follow each other from ``low`` on: at most ``rows_max``, up to the record that
        reaches ``bytes_max`` bytes. Without a ``base_offset`` their physical offsets are not checked. The result is
        eight columns of eight bytes per number in the machine's order (positions, sizes, body_at, body_bytes, topic_at,
        topic_bytes, properties_at, properties_bytes), the heads, and a byte for the layout of each record."""

    def have_sums(self, buffer: Any, starts: bytes, sizes: bytes, sums: bytes, /) -> bytes:
        """Return for each part of a buffer 1 if it has the given checksum, otherwise 0. ``starts`` and ``sizes`` have
        eight bytes per number in the machine's order, ``sums`` four bytes in the order of records."""


class GrpcSendsReader(Protocol):
    """A reader of plain sends in the requests of gRPC's SendMessage."""

    def read(self, request: bytes, born_host: str, /) -> tuple[str, str, str, str, bytes, int] | None:
        """Return topic, message id, message group, property string, body and born time in ms of a request with one
        message; None if it requests more than storage, or could be refused. ``born_host``: the default origin of the
        message."""


class GrpcMessages(Protocol):
    """Converts popped records to the messages of gRPC's ReceiveMessage."""

    def encode(
        self,
        records: bytes,
        topic: str,
        broker: str,
        handle: str,
        starts: str,
        deliveries_max: int,
        tags: Sequence[str] | None,
        /,
    ) -> list[tuple[bytes, str, str, int, int]] | None:
        """Return for each record its `ReceiveMessageResponse` in gRPC's framing, its message id, receipt handle, queue
        id and offset. Return None if a record needs another path: the topic or the tag does not match, the number of
        deliveries is reached, the body is compressed, or for another reason. ``handle``: pop time, invisible time and
        revive queue in the format of handles; ``starts``: ``startOffsetInfo``; ``tags``: the tags to return, None for
        all."""


GrpcAck = tuple[str, str, str, str, str, str, int, int, int, int, int, int]
"""Topic, group, message id, receipt handle, and the content of the handle: kind of topic, broker, queue id, the
message's offset, the pop's start offset, pop time, invisible time, revive queue."""


GrpcHeaders = tuple[bytes, "float | None", dict[str, str]]
"""The path of a call, the seconds until its deadline, and its relevant metadata."""


class HeaderBlockDecoder(Protocol):
    """A reader of the header blocks of one side of an HTTP/2 connection."""

    def decode(self, block: bytes, /) -> list[tuple[bytes, bytes]]:
        """Return the headers of a block.

        Raises ValueError: it cannot be read; its arguments are a text, and whether the only fault is too many bytes of
        headers.
        """


class Core(Struct):
    """The compiled code that a process uses: all of it, or none. Its methods return None if plain Python is used.

    Attributes:
        fault: the reason why plain Python is used; empty if the compiled core is used.
    """

    fault: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Core:
        """Return the core for a process with this environment."""
        if _native is None:
            return cls("rmqkit_native is not installed")
        # With another number the arguments differ: the core would store wrong records, or raise during a read.
        if _native.FORMAT != FORMAT:
            return cls(
                f"rmqkit_native has format {_native.FORMAT}, {FORMAT} is needed: install the one beside this rmqkit"
            )
        return cls("RMQKIT_NATIVE=0" if environment.get("RMQKIT_NATIVE") == "0" else "")

    def sends_reader(
        self,
        stamps: Mapping[str, str],
        not_plain: Collection[str],
        timed: Mapping[str, int],
        frame_bytes_max: int,
        header_bytes_max: int,
    ) -> SendsReader | None:
        """Return a reader of plain sends, with the arguments of `rmqkit.protocol.sends.sends_reader`."""
        if self.fault:
            return None
        rules = list(stamps.items()), list(not_plain), list(timed.items())
        reader: SendsReader = _native.Core(*rules, frame_bytes_max, header_bytes_max)
        return reader

    @property
    def select_records(self) -> SelectRecords | None:
        """The core's selection of records; the plain version is the loop in `rmqkit.store.reader`."""
        select: SelectRecords | None = None if self.fault else _native.select_records
        return select

    @property
    def log_reader(self) -> LogReader | None:
        """The core's reader of logs; the plain version is numpy in `rmqkit.store.log.scan`."""
        reader: LogReader | None = None if self.fault else _native
        return reader

    def grpc_sends(
        self, refused: Collection[str], body_bytes_max: int, properties_bytes_max: int
    ) -> GrpcSendsReader | None:
        """Return a reader of gRPC's plain sends; plain Python reads each send with protobuf.
        ``refused``: names that no user property of a plain send has."""
        if self.fault:
            return None
        reader: GrpcSendsReader = _native.GrpcSends(set(refused), body_bytes_max, properties_bytes_max)
        return reader

    def grpc_messages(self, hidden: Collection[str]) -> GrpcMessages | None:
        """Return an encoder of responses to receives.

        The plain version is `rmqkit.proxy.schema.records.message_of`, which may order user properties differently.
        ``hidden``: names of properties that applications do not see.
        """
        if self.fault:
            return None
        messages: GrpcMessages = _native.GrpcMessages(set(hidden))
        return messages

    @property
    def read_grpc_ack(self) -> Callable[[bytes], GrpcAck | None] | None:
        """Reads an AckMessage request with one entry; returns None for a request that is
        unusual or could be refused."""
        read: Callable[[bytes], GrpcAck | None] | None = None if self.fault else _native.read_grpc_ack
        return read

    @property
    def read_grpc_call(self) -> Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None:
        """Checks and reads the headers of a gRPC call; returns None for headers that are
        unusual or could be refused."""
        read: Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None
        read = None if self.fault else _native.read_grpc_call
        return read

    def header_decoder(self, list_bytes_max: int) -> HeaderBlockDecoder | None:
        """Return a decoder of header blocks; the plain version is
        `rmqkit.proxy.transport.plain_header_blocks.PlainHeaderBlocks`."""
        if self.fault:
            return None
        decoder: HeaderBlockDecoder = _native.HeaderDecoder(list_bytes_max)
        return decoder


def index_entries(
    table: mmap, slot_count: int, first: int, end: int, begin_timestamp: int, rows: bytes
) -> tuple[bytes, bytes, int] | None:
    """Return the entries of an index file for the numbers from ``first`` up to but not including ``end``, the changes
    for `set_slots`, and the number of slots that had no entry before; None if there are more keys than numbers.
    ``rows``: for each record physical offset, storeTimestamp, number of its keys and their hashes; 8, 8, 4 and 4 bytes
    in the machine's order. Needs a core."""
    entered: tuple[bytes, bytes, int] | None = _native.index_entries(
        table, slot_count, first, end, begin_timestamp, rows
    )
    return entered


def set_slots(table: mmap, slot_count: int, changes: bytes) -> None:
    """Set the slots of an index file to entries that are written."""
    _native.set_slots(table, slot_count, changes)
