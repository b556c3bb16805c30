"""The ledger: the decisions of a transactional sink about its batches, in the order of one queue of a topic.

========  ====================  ====================================================================================
entry     written               meaning
========  ====================  ====================================================================================
part      before a decision     some of the batch's half messages (`Half`)
decision  before the first      **these rows are committed**: the offsets of the parts, and the ends of the target's
          END_TRANSACTION       queues; only the first decision of a batch is valid
claim     while committing      a process acquires or extends the lease; invalid if another process has a claim that is
                                younger than a lease
gone      when half messages    rows that have to be staged again because their half messages are missing; the next
          were deleted          decision of the batch adds them
done      at the end            every row is visible
aborted   after a failure       half messages with an earlier born time are void
========  ====================  ====================================================================================

The topic is ``rmqkit-ledger-<producer group>``. All entries are in the first queue of the first broker that has the
topic. Every process reads them in the order of this queue, so all processes agree on the decision and on the holder of
the lease (`progress`). A lease lasts three times ``transactionSettleMs``. Its holder starts END_TRANSACTION requests
during the first third. Each request is written within another third, and takes effect within the last third or never.
The state of a batch is known while the topic retains its entries (``fileReservedTime``). See docs/decisions/0006.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from rmqkit.errors import BodyError

HALVES_PER_PART = 10_000


class Batch(Struct, frozen=True, order=True):
    """A batch of a sink. The keys of its rows begin with its `prefix`."""

    sink_id: str
    batch_id: int

    @property
    def prefix(self) -> str:
        """The first part of the keys of all rows."""
        return f"{self.sink_id}/{self.batch_id}/"

    @classmethod
    def of_key(cls, row_key: str) -> Batch | None:
        """Return the batch in the key of a row, or None if the key does not belong to a sink."""
        sink_id, _, rest = row_key.partition("/")
        batch_id, found, _ = rest.partition("/")
        return cls(sink_id, int(batch_id)) if sink_id and found and batch_id.isdecimal() else None


class Half(Struct, frozen=True, gc=False):
    """A half message: the row key without its batch, and the fields for END_TRANSACTION.
    ``lane`` is the row's queue if the order in the queue matters, else -1."""

    row: str
    topic: str
    broker_name: str
    lane: int
    queue_offset: int
    log_offset: int


class Low(Struct, frozen=True, array_like=True):
    """The end of a queue of the target, read before a batch was decided. No row of the batch is before this end."""

    topic: str
    broker_name: str
    queue_id: int
    offset: int


class Kind(enum.Enum):
    """The kind of a ledger entry. HOME names the broker that has the ledger, as its claimant."""

    PART = "part"
    DECISION = "decision"
    CLAIM = "claim"
    GONE = "gone"
    DONE = "done"
    ABORTED = "aborted"
    HOME = "home"


class Entry(Struct, frozen=True, omit_defaults=True):
    """A message of the ledger. Its body is this struct as MessagePack."""

    kind: Kind
    batch: Batch
    claimant: str = ""
    halves: tuple[bytes, ...] = ()
    parts: tuple[int, ...] = ()
    lows: tuple[Low, ...] = ()
    rows: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the message body."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(body: bytes) -> Entry:
        """Decode a message body. Raises BodyError: the body is not an entry."""
        try:
            return _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise BodyError(f"a message of {len(body)} bytes is not a ledger entry: {error}") from None


class Written(Struct, frozen=True):
    """An entry with its offset. ``stored_ms`` is a time of the broker's clock, ``born_ms`` a time of the writer's
    clock."""

    entry: Entry
    offset: int
    stored_ms: int
    born_ms: int


class Progress(Struct):
    """The state of a batch, computed from the entries of the ledger.

    Attributes:
        decision: offset of the valid decision, or -1 without a decision.
        decided_by: claimant that wrote the decision.
        parts: offsets of the parts of the decision, and of later additions.
        holder, since, held_ms: holder of the lease, offset of the entry that began the lease, and the broker's time of
            the newest entry that extended it.
        gone: rows that must be staged again.
        is_past: whether the sink has decided a later batch.
        aborted_ms: the writer's time of the newest abort.
        is_known: whether the ledger has an entry of the sink.
    """

    decision: int = -1
    decided_by: str = ""
    parts: tuple[int, ...] = ()
    lows: tuple[Low, ...] = ()
    holder: str = ""
    since: int = -1
    held_ms: int = 0
    gone: frozenset[str] = frozenset()
    is_done: bool = False
    is_past: bool = False
    aborted_ms: int = -1
    is_known: bool = False

    @property
    def is_decided(self) -> bool:
        """Return True if the rows are committed, whether they are visible or not."""
        return self.decision >= 0


_DECODER = msgspec.msgpack.Decoder(Entry)


def progress(entries: Iterable[Written], batch: Batch, lease_ms: int) -> Progress:
    """Compute the state of a batch from the entries of a ledger. The entries must be in the order of the queue."""
    now = Progress()
    for written in entries:
        entry = written.entry
        if entry.batch.sink_id != batch.sink_id:
            continue
        now.is_known = True
        if entry.batch != batch:
            now.is_past |= entry.batch.batch_id > batch.batch_id and entry.kind in (Kind.DECISION, Kind.DONE)
        elif entry.kind is Kind.DONE:
            now.is_done = True
        # A driver writes this entry after a decision if it cannot read the decision.
        elif entry.kind is Kind.ABORTED:
            if not now.is_decided:
                now.aborted_ms = max(now.aborted_ms, written.born_ms)
        elif entry.kind is Kind.GONE:
            now.gone = frozenset(entry.rows)
        elif entry.kind is Kind.DECISION:
            _decide(now, written, lease_ms)
        # A claim before the decision has no effect: the decision begins the first lease.
        elif entry.kind is Kind.CLAIM and now.is_decided:
            _claim(now, written, lease_ms)
    return now


def _decide(now: Progress, written: Written, lease_ms: int) -> None:
    entry = written.entry
    if now.is_decided and not now.gone:
        return  # two drivers decided at the same time: both read the same order, so the first decision is valid
    if now.is_decided:
        now.parts, now.gone = now.parts + entry.parts, frozenset()
    else:
        now.decided_by, now.parts, now.lows = entry.claimant, entry.parts, entry.lows
    assert written.offset > now.decision, "entries are read in the order of their queue"
    now.decision = written.offset
    now.decided_by = entry.claimant
    _claim(now, written, lease_ms)


def _claim(now: Progress, written: Written, lease_ms: int) -> None:
    claimant = written.entry.claimant
    if claimant != now.holder:
        # Compare two times of the broker's clock. The clocks of the claimants must not matter.
        if now.holder and written.stored_ms < now.held_ms + lease_ms:
            return
        now.holder, now.since = claimant, written.offset
    now.held_ms = written.stored_ms


def pack_halves(halves: Sequence[Half]) -> list[bytes]:
    """Pack half messages into few bytes, at most ``HALVES_PER_PART`` half messages in each piece."""
    pieces = [halves[at : at + HALVES_PER_PART] for at in range(0, len(halves), HALVES_PER_PART)]
    return [_pack(piece) for piece in pieces]


def unpack_halves(packed: bytes) -> list[Half]:
    """Unpack the half messages of a piece. Raises BodyError: the bytes are not a piece of half messages."""
    try:
        places, rows, where, queue_steps, log_steps = _PIECE.decode(zlib.decompress(packed))
        halves, queue_offset, log_offset = [], 0, 0
        for row, place, queue_step, log_step in zip(rows, where, queue_steps, log_steps, strict=True):
            queue_offset += queue_step
            log_offset += log_step
            halves.append(Half(row, *places[place], queue_offset, log_offset))
        return halves
    except (zlib.error, msgspec.MsgspecError, ValueError, IndexError) as error:
        raise BodyError(f"{len(packed)} bytes of a ledger's part are not half messages: {error}") from None


_PIECE = msgspec.msgpack.Decoder(
    tuple[list[tuple[str, str, int]], list[str], list[int], list[int], list[int]],
)


def _pack(halves: Sequence[Half]) -> bytes:
    """Pack half messages, with offsets as differences. Most differences are small, so zlib needs only a few bytes per
    row.
    """
    distinct = dict.fromkeys((half.topic, half.broker_name, half.lane) for half in halves)
    places = {place: number for number, place in enumerate(distinct)}
    return zlib.compress(
        msgspec.msgpack.encode(
            (
                list(places),
                [half.row for half in halves],
                [places[half.topic, half.broker_name, half.lane] for half in halves],
                _steps([half.queue_offset for half in halves]),
                _steps([half.log_offset for half in halves]),
            )
        ),
        1,
    )


def _steps(numbers: Sequence[int]) -> list[int]:
    return [number - before for before, number in zip((0, *numbers), numbers, strict=False)]
