"""The compiled core (`rmqkit_native`), and the types of its calls. `rmqkit.core.CORE` says whether a process uses it.

For plain sends, the core takes the frames that only ask for storing out of the bytes of a connection. It makes records,
queue entries, index entries and answers of all of them, without an object for each. Its twin in plain Python is
`rmqkit.protocol.sends`, which gives the same bytes for every frame that the core takes. The core touches no file, clock
or table, and refuses nothing: the broker does.
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
"""What the calls below are numbered by: a core of another number is not used."""

CoreFault: type[BaseException] = getattr(_native, "PanicException", SystemError)
"""What the core raises where it is wrong itself; no Exception, so that nobody takes it for bad input."""


class Sends(Protocol):
    """Plain sends that came one behind the other, or the messages of a batch.

    Attributes:
        chunk: the bytes they came in, from ``start`` to ``end``; until `forget_bodies`.
        queues: topic, queue id, how many messages, and the bytes of their records, 0 before `encode`.
        is_batch: whether one request brought all of them, which has one answer.
        waits_not: whether one of them asks not to wait for the disk.
        body_bytes_max: of the longest body of a request.
        opaques: of the requests, in their order.
        last_offset: physical offset of the last record.
        kinds: topic, request code, ``message_type``, and the bytes that the records of each request have.
        asked: the times that some of them ask for, and their units in ms.
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
        """The records, one behind the other. ``numbers``: the next queue offset of each of ``queues``.
        ``is_sealed``: whether they end with their checksum (``appendPropCRC``).
        Raises ValueError: the records do not fit into the log's numbers, or one came with a checksum."""

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        """The fields of a `DispatchRequest` for each record. ``with_tags``: whether TAGS are keys of the index."""

    def index_rows(self, with_tags: bool) -> tuple[bytes, int] | None:
        """The records as rows for `index_entries`, and how many keys they have; None without a core."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        """For each of ``queues``: its entries, and the physical offsets between which their records lie."""

    def keep(self, outs: list[int], timer_topic: str, broker_name: str) -> None:
        """Have those that ask for a time stored in the timer's queue instead. ``outs``: until when each is kept.
        Raises ValueError: the broker's name holds a blank, which separates the parts of a handle."""

    def answers(self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], between: bytes) -> bytes:
        """The frames of the answers, one behind the other: `answer_pieces`."""

    def forget_bodies(self) -> None:
        """Let go of the bytes they came in, when the records are stored."""


AckedPop = tuple[str, str, int, int, int, int]
"""What acks name a pop by: topic, group, queue id, start offset, pop time, revive queue."""

AckedOffsets = tuple[str, str, int, int, int, int, list[int], list[int]]
"""`AckedPop`, the offsets that are acknowledged, and the opaques of these requests."""


class Acks(Protocol):
    """Requests to acknowledge one popped message each that came one behind the other. Only the core takes them: without
    it each is a frame.

    Attributes:
        chunk: the bytes they came in, from ``start`` to ``end``.
        pops: what they acknowledge, in the order in which the pops are named.
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
"""The type of the core's `Acks`, None without a core: what was taken out of a chunk is one if it has this type."""


class SendsReader(Protocol):
    """Takes plain sends out of bytes, and acks."""

    def read(self, chunk: bytes, start: int, count_max: int = sys.maxsize, /) -> Sends | Acks | None:
        """Return the plain requests that follow one another from ``start``; None if the first frame is not plain."""


SelectRecords = Callable[
    [bytes, memoryview, int, int, "frozenset[int] | None", int, int], "tuple[int, int, int, int, bytes | None] | None"
]
"""``(entries, log, start, end, codes, count_max, bytes_max)``: takes the records of the entries of a queue that are
wanted, all out of one file of the log: up to ``count_max`` of them and, but for the first, ``bytes_max`` bytes.
``log`` is the file, written from the physical offset ``start`` to ``end``; ``codes`` are the tag codes that are wanted,
None for all. Returns how many records were taken, how many entries were passed, the bytes of the records, where in the
file the first lies, and a copy of them one behind the other, or None when they lie so in the file; None alone when a
record lies elsewhere, or not behind the one before, or an entry has no tag code but the address of one."""


class LogReader(Protocol):
    """Reads many records of a log at once; its twin is numpy in `rmqkit.store.log.scan`."""

    def sound_records(
        self, buffer: Any, base_offset: int | None, low: int, high: int, rows_max: int, bytes_max: int, /
    ) -> tuple[bytes, bytes, bytes]:
        """The sound records that lie one behind the other from ``low`` on: at most ``rows_max``, and up to the one that
        reaches ``bytes_max`` bytes. Without a ``base_offset`` they may say any place in the log. Returns eight columns
        of eight bytes a number in the machine's order (positions, sizes, body_at, body_bytes, topic_at, topic_bytes,
        properties_at, properties_bytes), the heads, and a byte for the layout of each."""

    def have_sums(self, buffer: Any, starts: bytes, sizes: bytes, sums: bytes, /) -> bytes:
        """Which parts of a buffer have the checksums given: 1 or 0 for each. ``starts`` and ``sizes`` have eight bytes
        a number in the machine's order, ``sums`` four as records have them."""


class GrpcSendsReader(Protocol):
    """Takes plain sends out of the requests of gRPC's SendMessage."""

    def read(self, request: bytes, born_host: str, /) -> tuple[str, str, str, str, bytes, int] | None:
        """Topic, message id, message group, property string, body and time of birth in ms of the one message of a
        request; None when it asks for more than storing, or could be refused. ``born_host``: where the message comes
        from unless it says so."""


class GrpcMessages(Protocol):
    """Makes of what a pop found the messages of gRPC's ReceiveMessage."""

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
"""Topic, group, message id, receipt handle, and what that says: kind of topic, broker, queue id, the message's offset,
the pop's start offset, pop time, invisible time, revive queue."""


GrpcHeaders = tuple[bytes, "float | None", dict[str, str]]
"""Of a call its path, the seconds until its deadline, and the metadata that is of use."""


class HeaderBlockDecoder(Protocol):
    """Reads the header blocks of one side of a connection of HTTP/2."""

    def decode(self, block: bytes, /) -> list[tuple[bytes, bytes]]:
        """The headers of a block. Raises ValueError: it cannot be read; its arguments are a text, and whether there
        are only too many bytes of headers."""


class Core(Struct):
    """The compiled code that a process uses: all of it, or none. Its methods give None where plain Python works.

    Attributes:
        fault: the reason why plain Python does the work; empty where the compiled core does.
    """

    fault: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Core:
        """Decide whether a process with this environment uses the core."""
        if _native is None:
            return cls("rmqkit_native is not installed")
        # Another number takes other arguments: the core would store wrong records, or raise in the middle of a read.
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
        """The twin is the loop in `rmqkit.store.reader`."""
        select: SelectRecords | None = None if self.fault else _native.select_records
        return select

    @property
    def log_reader(self) -> LogReader | None:
        """The twin is numpy in `rmqkit.store.log.scan`."""
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
        """Return an encoder of answers to receives. Its twin is `rmqkit.proxy.schema.records.message_of`, which may put
        user properties in another order. ``hidden``: names of properties that applications do not see."""
        if self.fault:
            return None
        messages: GrpcMessages = _native.GrpcMessages(set(hidden))
        return messages

    @property
    def read_grpc_ack(self) -> Callable[[bytes], GrpcAck | None] | None:
        """Reads an AckMessage request with one entry; gives None for a request that is unusual or could be refused."""
        read: Callable[[bytes], GrpcAck | None] | None = None if self.fault else _native.read_grpc_ack
        return read

    @property
    def read_grpc_call(self) -> Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None:
        """Checks and reads the headers of a gRPC call; gives None for headers that are unusual or could be refused."""
        read: Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None
        read = None if self.fault else _native.read_grpc_call
        return read

    def header_decoder(self, list_bytes_max: int) -> HeaderBlockDecoder | None:
        """The twin is `rmqkit.proxy.transport.plain_header_blocks.PlainHeaderBlocks`."""
        if self.fault:
            return None
        decoder: HeaderBlockDecoder = _native.HeaderDecoder(list_bytes_max)
        return decoder


def index_entries(
    table: mmap, slot_count: int, first: int, end: int, begin_timestamp: int, rows: bytes
) -> tuple[bytes, bytes, int] | None:
    """The entries of an index file for the numbers from ``first`` to before ``end``, the changes for `set_slots`, and
    how many slots had no entry before; None when there are more keys than numbers. ``rows``: of each record physical
    offset, storeTimestamp, count of its keys and their hashes; 8, 8, 4 and 4 bytes in the machine's order. Only where
    there is a core."""
    entered: tuple[bytes, bytes, int] | None = _native.index_entries(
        table, slot_count, first, end, begin_timestamp, rows
    )
    return entered


def set_slots(table: mmap, slot_count: int, changes: bytes) -> None:
    """Let the slots of an index file lead to entries that are written."""
    _native.set_slots(table, slot_count, changes)
