"""The compiled core (``native/``, `rmqkit_native`): what a broker computes for plain sends, all of one read at once.

The core takes frames that ask for nothing but storing, one behind the other, out of the bytes of a connection, and
makes their records, queue entries and answers without an object for each. What it does not know it leaves to the
decoders of `rmqkit.protocol.command` and `rmqkit.protocol.templates`, which say the same of every frame that it takes.
What could be refused, and what touches a file, a clock or a table, is not its business.
Source: remoting.md §1.2, §1.3, §4.3.1, §7.3; store.md §3.4, §4.1, §7.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from mmap import mmap
from typing import Any, Protocol

try:
    import rmqkit_native as _native
except ImportError:  # no wheel for this machine, or not installed
    _native = None

__all__ = [
    "FORMAT",
    "CoreFault",
    "Sends",
    "SendsReader",
    "core_fault",
    "index_entries",
    "members",
    "sends_reader",
    "set_slots",
]

FORMAT = 2
"""What the calls below are numbered by: a core of another number is not used."""

CoreFault: type[BaseException] = getattr(_native, "PanicException", SystemError)
"""What the core raises where it is wrong itself; no Exception, so that nobody takes it for bad input."""


class Sends(Protocol):
    """Plain sends that came one behind the other.

    Attributes:
        chunk: the bytes they came in, from ``start`` to ``end``; until `forget_bodies`.
        queues: topic, queue id, how many messages, and the bytes of their records, 0 before `encode`.
        waits_not: whether one of them asks not to wait for the disk.
        body_bytes_max: of the longest body.
        opaques: of the requests, in their order.
        physical_offsets: of the records.
        kinds: topic, request code, whether there is a sharding key, and the bytes of each record.
    """

    chunk: bytes
    start: int
    end: int
    queues: list[tuple[str, int, int, int]]
    waits_not: bool
    body_bytes_max: int
    opaques: list[int]
    physical_offsets: list[int]
    kinds: list[tuple[str, int, bool, list[int]]]

    def __len__(self) -> int: ...

    def encode(
        self, numbers: list[int], physical_offset: int, born_host: bytes, store_timestamp: int, store_host: bytes
    ) -> bytes:
        """The records, one behind the other. ``numbers``: the next queue offset of each of ``queues``.
        Raises ValueError: the records do not fit into the log's numbers."""

    def requests(self, with_tags: bool) -> list[tuple[Any, ...]]:
        """The fields of a `DispatchRequest` for each record. ``with_tags``: whether TAGS are keys of the index."""

    def queue_entries(self) -> list[tuple[bytes, int, int]]:
        """For each of ``queues``: its entries, and the physical offsets between which their records lie."""

    def answers(self, pieces: list[bytes]) -> bytes:
        """The frames of the answers, one behind the other; ``pieces`` are `SendAnswers.pieces`."""

    def ids(self, store_host: bytes) -> str:
        """The ids of the messages, joined by commas: `rmqkit.protocol.ids.offset_ids`."""

    def forget_bodies(self) -> None:
        """Let go of the bytes they came in, when the records are stored."""


class SendsReader(Protocol):
    """Takes plain sends out of bytes."""

    def read(self, chunk: bytes, start: int) -> Sends | None:
        """Those that begin at a place, as many as follow one another; None when the first frame there is none."""


def core_fault(environment: Mapping[str, str]) -> str:
    """Why there is no compiled core, or an empty text."""
    if _native is None:
        return "rmqkit_native is not installed"
    if _native.FORMAT != FORMAT:
        return f"rmqkit_native has format {_native.FORMAT}, {FORMAT} is needed: install the one beside this rmqkit"
    if environment.get("RMQKIT_NATIVE") == "0":
        return "RMQKIT_NATIVE=0"
    return ""


def sends_reader(
    environment: Mapping[str, str],
    stamps: Mapping[str, str],
    not_plain: Collection[str],
    *,
    frame_bytes_max: int,
    header_bytes_max: int,
) -> SendsReader | None:
    """What reads plain sends; None where there is no compiled core.
    ``stamps``: the properties that every message gets. ``not_plain``: names of those that ask for more than storing."""
    if core_fault(environment):
        return None
    reader: SendsReader = _native.Core(list(stamps.items()), list(not_plain), frame_bytes_max, header_bytes_max)
    return reader


def members(
    body: bytes, topic: str, queue_id: int, sys_flag: int, born_timestamp: int, reconsume_times: int
) -> Sends | None:
    """The messages of a batch's body; None where the plain way has to decide, also about what is no batch.
    Only where there is a core."""
    found: Sends | None = _native.members(body, topic, queue_id, sys_flag, born_timestamp, reconsume_times)
    return found


def index_entries(
    table: mmap, slot_count: int, first: int, begin_timestamp: int, rows: list[tuple[bytes, int, int]]
) -> tuple[bytes, bytes, int]:
    """The entries of an index file for the numbers from ``first`` on, the changes for `set_slots`, and how many slots
    had no entry before. ``rows``: hashes, physical offset and storeTimestamp of each record. Only where there is a
    core."""
    entered: tuple[bytes, bytes, int] = _native.index_entries(table, slot_count, first, begin_timestamp, rows)
    return entered


def set_slots(table: mmap, slot_count: int, changes: bytes) -> None:
    """Let the slots of an index file lead to entries that are written."""
    _native.set_slots(table, slot_count, changes)
