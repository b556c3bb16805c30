"""What the compiled core makes of bytes, held against what the plain Python decoders make of them: for the tests here
and for the fuzzer."""

from __future__ import annotations

from typing import Any

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
)
from rmqkit.protocol.core import core_fault, members, sends_reader
from rmqkit.protocol.names import RETRY_PREFIX
from rmqkit.protocol.properties import decode_properties, encode_in_stored_order, find_keys
from rmqkit.protocol.record import INNER_BATCH, TRANSACTION_MASK, batch_bounds
from rmqkit.protocol.schemas.send import SendMessageRequest, SendMessageV2Request

STAMPS = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true", "CLUSTER": "DefaultCluster"}
NOT_PLAIN = ["DELAY", "INNER_NUM", "TRAN_MSG", "POP_CK", "TIMER_DELAY_SEC"]
HEADERS = {RequestCode.SEND_MESSAGE: SendMessageRequest, RequestCode.SEND_MESSAGE_V2: SendMessageV2Request}
FAULT = core_fault({})
"""Why there is no core to compare with, or an empty text."""

CORE: Any = sends_reader(
    {}, STAMPS, NOT_PLAIN, frame_bytes_max=FRAME_BYTES_MAX, header_bytes_max=REQUEST_HEADER_BYTES_MAX
)


def plain(frame: Frame) -> tuple[Any, ...] | None:
    """What the Python decoders make of a plain send: all that is stored and answered. None for other requests."""
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
    frames = FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX).feed(data[: run.end])
    assert [taken(run, at) for at in range(len(run))] == [plain(frame) for frame in frames]
    return len(run)


def check_stream(data: bytes) -> None:
    """Compare the frames, and the error, of the splitter with the core and without; then every run of sends."""
    outcomes: list[Any] = []
    for core in (None, CORE):
        splitter = FrameSplitter(header_bytes_max=REQUEST_HEADER_BYTES_MAX, sends=core)
        try:
            units = splitter.feed(data)
        except FrameError as error:
            outcomes.append(str(error))
            continue
        outcomes.append((each_frame(units), splitter.buffered_bytes))
        for unit in units:
            if core is not None and not isinstance(unit, Frame):
                check(unit.chunk[unit.start : unit.end])
    assert outcomes[0] == outcomes[1]


def check_members(body: bytes) -> int:
    """Compare the members that the core finds in a batch with those of the decoder; returns how many."""
    run: Any = members(body, "Orders", 0, 0, 0, 0)
    if run is None:
        return 0
    bounds = batch_bounds(body)  # what it takes is a batch: this raises nothing
    found = [taken(run, at) for at in range(len(run))]
    assert [(one[3], one[7], one[8]) for one in found] == [
        (flag, body[body_at : properties_at - 2], body[properties_at:end])
        for flag, body_at, properties_at, end in bounds
    ]
    assert [one[9:] for one in found] == [find_keys(one[8]) for one in found]
    return len(run)
