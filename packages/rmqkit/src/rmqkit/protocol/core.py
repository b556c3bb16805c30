"""The compiled core (`rmqkit_native`), and the types of its calls. `rmqkit.core.CORE.fault` shows if a process uses the
core.

The core extracts plain sends, frames that only request storage, from the bytes of a connection. It makes the records,
queue entries, index entries and responses of all plain sends without an object for each send. `rmqkit.protocol.sends`
does the same in plain Python and produces the same bytes for every frame that the core accepts. The core uses no file,
clock or table. It refuses no request: the broker does.
Source: remoting.md §1.2, §1.3, §4.3.1, §7.3; store.md §3.4, §4.1, §7.
"""

from __future__ import annotations

import sys
from array import array
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
    "LIVE",
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

FORMAT = 13
"""The version of the calls below. A core with another version is not used."""

LIVE = 1
"""The state of a lite topic that has messages, in the tables for `Sends.enter_lite`."""

CoreFault: type[BaseException] = getattr(_native, "PanicException", SystemError)
"""The error for bugs of the core. It is not a subclass of Exception, so no caller treats a bug as bad input."""


class Sends(Protocol):
    """Consecutive plain sends of a connection, or the messages of a batch.

    Attributes:
        chunk: the received bytes, of which the sends are ``start`` to ``end``. `forget_bodies` releases the bytes.
        queues: for each queue: topic, queue id, number of messages, and the size of their records, 0 before `encode`.
        is_batch: True if all messages are in one request, which has one response.
        waits_not: True if a message does not wait for the disk and the slaves (``WAIT`` is false).
        body_bytes_max: size of the longest body of a message.
        opaques: opaques of the requests, in order.
        last_offset: physical offset of the last record.
        kinds: topic, request code, ``message_type``, and the record bytes of each request of this kind.
        asked: the requested delivery times of the timed messages, and their units in ms.
        lite: topic and lite topic of each message, with an empty text for messages in no lite topic; an empty list if
            no message is in a lite topic.
        lite_parents: the topics that have messages in lite topics, in the order of their first messages.
        lite_numbers: the number of each message in its lite topic after `enter_lite`, 0 for messages in no lite topic.
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
    @property
    def lite(self) -> list[tuple[str, str]]: ...
    @property
    def lite_parents(self) -> list[str]: ...
    @property
    def lite_numbers(self) -> list[int]: ...

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
        """Return the concatenated records. ``numbers``: the next queue offset for each of ``queues``.
        ``is_sealed``: True if each record ends with its checksum (``appendPropCRC``).
        Raises ValueError: a record does not fit in the log's numbers, or a message arrived with a checksum."""

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        """Return the fields of a `DispatchRequest` for each record.

        ``with_tags``: True if TAGS are keys of the index.
        """

    def index_rows(self, with_tags: bool) -> tuple[bytes, int] | None:
        """Return the records as rows for `index_entries`, and the number of their keys, or None without a core."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        """Return the entries of each of ``queues``, and the physical offsets where the records of the queue start and
        end."""

    def keep(self, outs: list[int], timer_topic: str, broker_name: str) -> None:
        """Put the timed messages into the timer's queue instead of their own queues. ``outs``: the delivery time of
        each timed message.
        Raises ValueError: the broker's name contains a blank, which separates the parts of a handle."""

    def enter_lite(
        self, tables: list[dict[str, int]], states: array[int], nexts: array[int], epochs: array[int]
    ) -> bool:
        """Assign numbers to the messages in lite topics, and add the properties of the light queues. Return False, with
        nothing changed, if a lite topic has no slot or does not live. ``tables``: for each of `lite_parents`, the slots
        of its lite topics. ``states``, ``nexts``, ``epochs``: state (`LIVE`), next number and life of each slot."""

    def stored_lite(self, nexts: array[int]) -> None:
        """Set the next number of each lite topic, after the records are stored."""

    def lite_entries(
        self,
        first_index: int,
        tails: array[int],
        recent: array[int],
        read: Callable[[int], tuple[int, int] | None],
    ) -> bytes:
        """Return the entries of the light queues, for the messages in lite topics.

        ``first_index``: the index of the first of these entries. ``tails``: the index of the newest entry of each slot.
        ``recent``: cells of three numbers for recent entries: index, number in the light queue, and jump. The cell of
        an entry is its index modulo the number of cells. These entries are added. ``read``: returns number and jump of
        an entry that is not in its cell, or None if it has expired or the index is negative."""

    def entered_lite(
        self, first_index: int, tails: array[int], firsts: array[int], ends: array[int], seconds: array[int]
    ) -> list[int]:
        """Move the ends of the light queues after their entries are written. Return the slots that had no entry before.
        ``tails``, ``firsts``, ``ends``, ``seconds``: the newest entry, the first number, the end, and the store time in
        s of each slot."""

    def answers(
        self, pieces: tuple[bytes, ...], timed: tuple[bytes, ...], lite: tuple[bytes, ...], between: bytes
    ) -> bytes:
        """Return the concatenated frames of the responses. `answer_pieces` makes the arguments."""

    def forget_bodies(self) -> None:
        """Release the received bytes, after the records are stored."""


AckedPop = tuple[str, str, int, int, int, int]
"""The parts of an ack that identify a pop: topic, group, queue id, start offset, pop time, revive queue."""

AckedOffsets = tuple[str, str, int, int, int, int, list[int], list[int]]
"""`AckedPop`, the acknowledged offsets, and the opaques of these requests."""


class Acks(Protocol):
    """Consecutive requests that each acknowledge one popped message. Only the core creates this object. Without a core
    each request stays a frame.

    Attributes:
        chunk: the received bytes, of which the acks are ``start`` to ``end``.
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
"""The core's class of `Acks`, for distinguishing acks from sends, or None without a core."""


class SendsReader(Protocol):
    """A reader that extracts plain sends and acks from received bytes."""

    def read(self, chunk: bytes, start: int, count_max: int = sys.maxsize, /) -> Sends | Acks | None:
        """Return the consecutive plain requests from ``start``, or None if the first frame is not plain."""


SelectRecords = Callable[
    [bytes, memoryview, int, int, "frozenset[int] | None", int, int], "tuple[int, int, int, int, bytes | None] | None"
]
"""A function ``(entries, log, start, end, codes, count_max, bytes_max)`` that selects the records of matching queue
entries from one file of the log: at most ``count_max`` records of at most ``bytes_max`` bytes, or one larger record.
``log`` is the file, written from the physical offset ``start`` to ``end``. ``codes`` are the accepted tag codes, or
None for all.
Returns the number of records, the number of processed entries, the bytes of the records, the position of the first
record in the file, and a concatenated copy of the records, or None if the records are contiguous in the file. Returns
None instead of all these values if a record is in another file or not after the previous record, or if an entry has the
address of a tag code."""


class LogReader(Protocol):
    """A reader of many records of a log in one call. `rmqkit.store.log.scan` does the same with numpy."""

    def sound_records(
        self, buffer: Any, base_offset: int | None, low: int, high: int, rows_max: int, bytes_max: int, /
    ) -> tuple[bytes, bytes, bytes]:
        """Return the consecutive sound records from ``low``: at most ``rows_max``, up to the record that reaches
        ``bytes_max`` bytes. Without a ``base_offset`` their physical offsets are not checked. The result has three
        parts: eight columns with eight bytes per number in the machine's order (positions, sizes, body_at, body_bytes,
        topic_at, topic_bytes, properties_at, properties_bytes), the heads of the records, and the layout of each record
        in one byte."""

    def have_sums(self, buffer: Any, starts: bytes, sizes: bytes, sums: bytes, /) -> bytes:
        """Return one byte for each part of a buffer: 1 if the part has its checksum in ``sums``, otherwise 0.
        ``starts`` and ``sizes`` have eight bytes per number in the machine's order. ``sums`` has four bytes per number,
        big-endian as in records."""


class GrpcSendsReader(Protocol):
    """A reader of plain sends in the requests of gRPC's SendMessage."""

    def read(self, request: bytes, born_host: str, /) -> tuple[str, str, str, str, bytes, int] | None:
        """Return topic, message id, message group, property string, body and born time in ms of a request with one
        message. Return None if the request needs more than storage, or could be refused. ``born_host``: the origin of
        the message if the request does not state one."""


class GrpcMessages(Protocol):
    """A converter of popped records to the messages of gRPC's ReceiveMessage."""

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
        """Return the `ReceiveMessageResponse` of each record in gRPC's framing, with its message id, receipt handle,
        queue id and offset. Return None if a record must be converted in plain Python, for example if its topic or tag
        does not match, if it has reached the maximum number of deliveries, or if its body is compressed. ``handle``:
        pop time, invisible time and revive queue in the format of handles; ``starts``: ``startOffsetInfo``. ``tags``:
        the accepted tags, or None for all."""


GrpcAck = tuple[str, str, str, str, str, str, int, int, int, int, int, int]
"""An ack: topic, group, message id, receipt handle, and the content of the handle: kind of topic, broker, queue id,
offset of the message, start offset of the pop, pop time, invisible time, revive queue."""


GrpcHeaders = tuple[bytes, "float | None", dict[str, str]]
"""The path of a call, the seconds until its deadline, and its relevant metadata."""


class HeaderBlockDecoder(Protocol):
    """A reader of the header blocks of one side of an HTTP/2 connection."""

    def decode(self, block: bytes, /) -> list[tuple[bytes, bytes]]:
        """Return the headers of a block.

        Raises ValueError: the block cannot be decoded. The arguments of the error are a text, and a bool that is True
        if the only fault is too many bytes of headers.
        """


class Core(Struct):
    """The compiled code for a process, which uses all of it or none. The members are None if plain Python is used.

    Attributes:
        fault: the reason why plain Python is used; empty if the compiled core is used.
    """

    fault: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Core:
        """Return the core for a process with this environment."""
        if _native is None:
            return cls("rmqkit_native is not installed")
        # With another number the arguments differ: the core would store wrong records, or raise while reading.
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
        """Return a reader of plain sends. `rmqkit.protocol.sends.sends_reader` explains the arguments."""
        if self.fault:
            return None
        rules = list(stamps.items()), list(not_plain), list(timed.items())
        reader: SendsReader = _native.Core(*rules, frame_bytes_max, header_bytes_max)
        return reader

    @property
    def select_records(self) -> SelectRecords | None:
        """The core's selection of records. The plain version is the loop in `rmqkit.store.reader`."""
        select: SelectRecords | None = None if self.fault else _native.select_records
        return select

    @property
    def log_reader(self) -> LogReader | None:
        """The core's reader of logs. The plain version is `rmqkit.store.log.scan`, with numpy."""
        reader: LogReader | None = None if self.fault else _native
        return reader

    def grpc_sends(
        self, refused: Collection[str], body_bytes_max: int, properties_bytes_max: int
    ) -> GrpcSendsReader | None:
        """Return a reader of gRPC's plain sends. The plain version reads each send with protobuf.
        ``refused``: names that user properties of a plain send must not have."""
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
        """A reader of AckMessage requests with one entry. It returns None for a request that is unusual or could be
        refused."""
        read: Callable[[bytes], GrpcAck | None] | None = None if self.fault else _native.read_grpc_ack
        return read

    @property
    def read_grpc_call(self) -> Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None:
        """A reader that checks the headers of a gRPC call. It returns None for headers that are unusual or could be
        refused."""
        read: Callable[[list[tuple[bytes, bytes]]], GrpcHeaders | None] | None
        read = None if self.fault else _native.read_grpc_call
        return read

    def header_decoder(self, list_bytes_max: int) -> HeaderBlockDecoder | None:
        """Return a decoder of header blocks. The plain version is
        `rmqkit.proxy.transport.plain_header_blocks.PlainHeaderBlocks`."""
        if self.fault:
            return None
        decoder: HeaderBlockDecoder = _native.HeaderDecoder(list_bytes_max)
        return decoder


def index_entries(
    table: mmap, slot_count: int, first: int, end: int, begin_timestamp: int, rows: bytes
) -> tuple[bytes, bytes, int] | None:
    """Return the entries of an index file, the changes for `set_slots`, and the number of slots that were empty before.
    Return None if there are more keys than entry numbers. This function requires a core. The entries have the numbers
    from ``first`` up to but not including ``end``.
    ``rows``: for each record its physical offset, storeTimestamp, number of keys, and the hashes of the keys; 8, 8, 4
    and 4 bytes in the machine's order."""
    entered: tuple[bytes, bytes, int] | None = _native.index_entries(
        table, slot_count, first, end, begin_timestamp, rows
    )
    return entered


def set_slots(table: mmap, slot_count: int, changes: bytes) -> None:
    """Set the slots of an index file to new entries, after the entries are written."""
    _native.set_slots(table, slot_count, changes)
