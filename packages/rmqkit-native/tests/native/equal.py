"""Comparison of the compiled core with the plain Python decoders, for the tests here and the fuzzer."""

from __future__ import annotations

import re
import struct
from array import array
from itertools import accumulate, pairwise
from typing import Any

from rmqkit.core import CORE as PROCESS_CORE
from rmqkit.errors import FrameError, HeaderError
from rmqkit.protocol.codes import RequestCode
from rmqkit.protocol.command import (
    FRAME_BYTES_MAX,
    REQUEST_HEADER_BYTES_MAX,
    Frame,
    FrameSplitter,
    decode_command,
    decode_header,
    each_frame,
    frames_of,
)
from rmqkit.protocol.core import ACKS
from rmqkit.protocol.ids import decode_pop_handle
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.properties import decode_properties, encode_in_stored_order, find_keys
from rmqkit.protocol.record import INNER_BATCH, TRANSACTION_MASK, batch_bounds, has_sound_crc
from rmqkit.protocol.schemas.pop import AckMessageRequest
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request
from rmqkit.protocol.sends import PlainSendsReader
from rmqkit.protocol.templates import answer_pieces
from rmqkit.store.index.file import key_hashes
from rmqkit.store.lite.entries import LITE_ENTRY

STAMPS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
NOT_PLAIN = ["DELAY", "INNER_NUM", "TRAN_MSG", "POP_CK", "REAL_TOPIC"]
TIMED = {"TIMER_DELAY_SEC": 1000, "TIMER_DELAY_MS": 1, "TIMER_DELIVER_MS": 0}
HEADERS = {RequestCode.SEND_MESSAGE: SendMessageRequest, RequestCode.SEND_MESSAGE_V2: SendMessageV2Request}
FAULT = PROCESS_CORE.fault
"""Why there is no core to compare with, or an empty text."""

_RULES = (STAMPS, NOT_PLAIN, TIMED, FRAME_BYTES_MAX, REQUEST_HEADER_BYTES_MAX)
CORE: Any = PROCESS_CORE.sends_reader(*_RULES)
TWIN = PlainSendsReader(*_RULES)
HOST, BORN = bytes.fromhex("7f000001 00002a9f"), bytes.fromhex("0a000001 0000c350")
PIECES = answer_pieces(HOST, {"MSG_REGION": "100%b", "TRACE_ON": "true"})


def plain(frame: Frame) -> tuple[Any, ...] | None:
    """Return the Python decoders' result of a plain send: all stored and answered values. None for other requests."""
    try:
        command = decode_command(frame)
        if command.code not in HEADERS or command.flag or not frame.body:
            return None
        header = decode_header(command, HEADERS[RequestCode(command.code)])
    except HeaderError:
        return None
    if header.batch or header.topic.startswith(RETRY_PREFIX) or header.sys_flag & (TRANSACTION_MASK | INNER_BATCH):
        return None
    values = decode_properties((header.properties or "").encode("utf-8", "replace"))
    if not values.keys().isdisjoint([*NOT_PLAIN, *STAMPS]):
        return None
    stored = encode_in_stored_order({**values, **STAMPS})
    return (
        (header.topic, header.queue_id),
        *(command.code, command.opaque, header.flag, header.sys_flag, header.born_timestamp),
        *(header.reconsume_times or 0, frame.body, stored, *find_keys(stored)),
    )


def twin_takes(data: bytes) -> int:
    """Compare what the twin in plain Python takes with what the decoders say of each frame; returns how many."""
    sends: Any = TWIN.read(data, 0)
    if sends is None:
        return 0
    frames = FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX).feed(data[: sends.end])
    if sends.is_batch:
        (frame,) = frames
        members = batch_members(frame)
        assert len(sends) == len(members)
        if sends.lite:
            assert [sent.properties for sent in sends.sent] == [member[8] for member in members]
        return len(sends)
    found = [
        (
            one.place,
            one.code,
            one.opaque,
            one.flag,
            one.sys_flag,
            one.born_timestamp,
            one.reconsume_times,
            one.body,
            one.properties,
            *one.keys,
        )
        for one in sends.sent
    ]
    assert found == [plain(frame) for frame in frames]
    return len(found)


def taken(run: Any, at: int) -> tuple[Any, ...]:
    """The same as the core says it."""
    queue, *numbers, parts = run.message(at)
    return (run.queues[queue][:2], *numbers, *parts)


def check(data: bytes) -> int:
    """Compare what the core takes of some bytes with what the splitter and the decoders say; returns how many."""
    run = CORE.read(data)
    if run is None:
        return 0
    assert run.end <= len(data)
    if type(run) is ACKS:
        return check_acks(data)
    twin = TWIN.read(data[: run.end], 0)
    assert twin is not None
    frames = FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX).feed(data[: run.end])
    found = [taken(run, at) for at in range(len(run))]
    if run.is_batch:
        (frame,) = frames
        assert found == batch_members(frame)
    else:
        assert found == [plain(frame) for frame in frames]
    compare(run, twin)
    return len(run)


def decoded_ack(frame: Frame) -> tuple[Any, ...]:
    """Return the Python decoders' result of an ack."""
    command = decode_command(frame)
    assert (command.code, command.flag, command.body) == (RequestCode.ACK_MESSAGE, 0, b"")
    header = decode_header(command, AckMessageRequest)
    handle = decode_pop_handle(header.extra_info)
    key = header.topic, header.consumer_group, header.queue_id, handle.check_point_offset, handle.pop_time
    return (*key, handle.revive_queue_id), header.offset, command.opaque


def check_acks(data: bytes) -> int:
    """Compare the acks that the core takes of some bytes with what the decoders say; returns how many."""
    acks = CORE.read(data)
    if type(acks) is not ACKS:
        return 0
    assert (acks.start, acks.chunk) == (0, data)
    pops = acks.pops
    found = [(pop[:6], *one) for pop in pops for one in zip(pop[6], pop[7], strict=True)]
    assert found == [decoded_ack(frame) for frame in frames_of(acks)]
    assert all(one[:6] != other[:6] for one, other in pairwise(pops))
    return len(found)


def batch_members(frame: Any) -> list[tuple[Any, ...]]:
    """Return the Python decoders' result of a plain batch: the values of `plain` for each message."""
    command = decode_command(frame)
    header = decode_header(command, SendMessageV2Request)
    assert (command.code, command.flag, header.batch) == (RequestCode.SEND_BATCH_MESSAGE, 0, True)
    assert not header.unit_mode
    assert not header.topic.startswith(RETRY_PREFIX)
    assert not header.sys_flag & (TRANSACTION_MASK | INNER_BATCH)
    asked = decode_properties((header.properties or "").encode())
    assert asked.keys().isdisjoint([*NOT_PLAIN, *STAMPS, *TIMED])
    members = []
    for flag, body_at, at, end in batch_bounds(frame.body):
        stored = frame.body[at:end]
        if b"__LITE_TOPIC\x01" in frame.body and (values := decode_properties(stored)).get("__LITE_TOPIC"):
            assert values.keys().isdisjoint([*NOT_PLAIN, *STAMPS, *TIMED])
            stored = encode_in_stored_order({**values, **STAMPS})
        fields = header.sys_flag, header.born_timestamp, header.reconsume_times or 0
        body = frame.body[body_at : at - 2]
        place = (header.topic, header.queue_id), command.code, command.opaque, flag
        members.append((*place, *fields, body, stored, *find_keys(stored)))
    return members


def compare(run: Any, twin: Any, born: bytes = BORN, host: bytes = HOST, physical_offset: int = 1 << 40) -> bytes:
    """Take both through all that a broker does with plain sends; returns the records."""
    assert (len(run), run.end) == (len(twin), twin.end)
    assert facts(run) == facts(twin)
    if run.asked:
        for sends in (run, twin):
            sends.keep([1_700_000_000_000 + at for at in range(len(run.asked))], "rmq_sys_wheel_timer", "broker-a")
        assert facts(run) == facts(twin)
    assert (run.lite, run.lite_parents) == (twin.lite, twin.lite_parents)
    tables = [LiteColumns(run), LiteColumns(run)]
    for sends, table in zip((run, twin), tables, strict=True):
        table.enter(sends)
    assert run.lite_numbers == twin.lite_numbers
    numbers = [100 * at for at in range(len(run.queues))]
    where = numbers, physical_offset, born, 1_234, host
    sealed = [sealed_records(sends, *where) for sends in (run, twin)]
    assert sealed[0] == sealed[1]
    if sealed[0] is not None:
        assert run.queue_entries() == twin.queue_entries()
        sizes = [size for _, _, size in run.places]
        assert all(
            has_sound_crc(sealed[0][end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)
        )
    records = [sends.encode(*where, False) for sends in (run, twin)]
    assert records[0] == records[1]
    for sends in (run, twin):
        sends.forget_bodies()
    for with_tags in (False, True):
        rows = twin.requests(with_tags)
        wanted = [(*row[:10], None, hashes(row[0], row[10] or find_keys(row[8]), with_tags)) for row in rows]
        assert run.requests(with_tags) == wanted
        keys = [(row[5], row[4], len(row[11]) // 4, row[11]) for row in wanted]
        packed = b"".join([struct.pack("=qqI", *place) + hashed for *place, hashed in keys])
        assert run.index_rows(with_tags) == (packed, sum(row[2] for row in keys))
        assert twin.index_rows(with_tags) is None
    assert facts(run) == facts(twin)
    assert (run.kinds, run.last_offset) == (twin.kinds, twin.last_offset)
    assert run.queue_entries() == twin.queue_entries()
    assert run.answers(*PIECES) == twin.answers(*PIECES)
    entries = [table.entries(sends) for sends, table in zip((run, twin), tables, strict=True)]
    assert entries[0] == entries[1]
    assert len(entries[0]) == LITE_ENTRY.size * sum(bool(name) for _, name in run.lite)
    assert tables[0].columns() == tables[1].columns()
    return records[0]


class LiteColumns:
    """A table of the lite topics of some sends, which have different lives and numbers, and earlier entries."""

    def __init__(self, sends: Any) -> None:
        names = sorted({place for place in sends.lite if place[1]})
        count, self.first_index = len(names), 7 * len(names)
        self.slots: dict[str, dict[str, int]] = {}
        for slot, (parent, name) in enumerate(names):
            self.slots.setdefault(parent, {})[name] = count - 1 - slot
        self.states = array("B", [1] * count)
        self.nexts = array("q", [slot * 1_000_003 for slot in range(count)])
        self.epochs = array("I", [1 + slot % 3 for slot in range(count)])
        # Each third lite topic has no entry yet, and each fifth has one that has expired.
        self.tails = array("q", [-1 if slot % 3 == 2 else 6 * slot + 3 for slot in range(count)])
        self.firsts, self.ends, self.seconds = (
            array("q", bytes(8 * count)),
            array("q", self.nexts),
            array("I", self.epochs),
        )
        self.recent = array("q", [-1] * 3 * 5)
        self.links = {at: (self.nexts[at // 6] + at - 10, at - 1 if at % 6 else -1) for at in range(6 * count)}
        for slot in range(0, count, 5):
            self.links.pop(6 * slot + 3, None)
        self.opened: list[int] = []

    def enter(self, sends: Any) -> None:
        """Enter the messages, of which each must live."""
        tables = [self.slots[parent] for parent in sends.lite_parents]
        if not tables:
            return
        assert not sends.enter_lite([{} for _ in tables], self.states, self.nexts, self.epochs)
        dead = array("B", [*self.states[:-1], 2])
        assert not sends.enter_lite(tables, dead, self.nexts, self.epochs)
        assert not any(sends.lite_numbers)
        assert sends.enter_lite(tables, self.states, self.nexts, self.epochs)
        sends.stored_lite(self.nexts)

    def entries(self, sends: Any) -> bytes:
        """Return the entries of the messages, and move the ends."""
        if not self.slots:
            return b""
        entries: bytes = sends.lite_entries(self.first_index, self.tails, self.recent, self.links.get)
        columns = self.tails, self.firsts, self.ends, self.seconds
        self.opened = sends.entered_lite(self.first_index, *columns)
        return entries

    def columns(self) -> tuple[Any, ...]:
        """Return all numbers, and the slots that had no entry."""
        return self.nexts, self.tails, self.firsts, self.ends, self.seconds, self.recent, self.opened


def sealed_records(sends: Any, *where: Any) -> bytes | None:
    """The records with their checksums; None for messages that came with one."""
    try:
        return bytes(sends.encode(*where, True))
    except ValueError:
        return None


def has_room(text: str) -> bool:
    """Return True if the properties of a plain send are not too long, and its lite topic has an allowed name."""
    pairs = decode_properties(text.encode())
    stored, lite_topic = encode_in_stored_order({**pairs, **STAMPS}), pairs.get("__LITE_TOPIC", "")
    if lite_topic and not re.fullmatch("[A-Za-z0-9_-]{1,64}", lite_topic, re.ASCII):
        return False
    more_bytes = 98 + len("Orders") + len(lite_topic) if lite_topic else 0
    return len(stored) + more_bytes < 512


def facts(sends: Any) -> tuple[Any, ...]:
    """Return the facts of plain sends that are known before and after they are stored."""
    return sends.is_batch, sends.queues, sends.waits_not, sends.body_bytes_max, sends.opaques, sends.asked


def hashes(topic: str, keys: Any, with_tags: bool) -> bytes:
    """The hashes of keys as the core packs them."""
    found = key_hashes(topic, keys, with_tags=with_tags)
    return struct.pack(f"={len(found)}i", *found)


def check_stream(data: bytes) -> None:
    """Compare the frames, and the error, of the splitter with the core, the twin and neither; then every run."""
    outcomes: list[Any] = []
    for core in (None, TWIN, *([] if FAULT else [CORE])):
        splitter = FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX, sends=core)
        try:
            units = splitter.feed(data)
        except FrameError as error:
            outcomes.append(str(error))
            continue
        outcomes.append((each_frame(units), splitter.buffered_bytes))
        for unit in units:
            if not isinstance(unit, Frame):
                (twin_takes if core is TWIN else check)(unit.chunk[unit.start : unit.end])
    assert all(outcome == outcomes[0] for outcome in outcomes)
