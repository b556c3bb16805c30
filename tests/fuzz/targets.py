"""The targets of the fuzzer: one function per decoder, which accepts any bytes and fails if the decoder does anything
undocumented.

A decoder may return a value or raise its one error. If there is an encoder, the value must survive it.
"""

from __future__ import annotations

from collections.abc import Callable

from rmqkit.errors import BodyError, FrameError, HeaderError, RecordCorrupt
from rmqkit.protocol import ids
from rmqkit.protocol.codes import CURRENT_VERSION
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    Frame,
    FrameSplitter,
    decode_command,
    decode_fields,
    decode_header,
    encode_command,
    frame_start,
)
from rmqkit.protocol.compression import Compression, decompress
from rmqkit.protocol.fastjson import decode_as, dumps, loads
from rmqkit.protocol.ha import Reports, frame_head, split_frames
from rmqkit.protocol.ids import decode_recall_handle
from rmqkit.protocol.message import read_messages
from rmqkit.protocol.properties import decode_properties, encode_properties, find_property
from rmqkit.protocol.record import Record, decode_batch, decode_record, encode_batch, encode_record
from rmqkit.protocol.schemas.brokers import decode_registration
from rmqkit.protocol.schemas.clients import HeartbeatData, MessageQueue
from rmqkit.protocol.schemas.offsets import ConsumeStatsList
from rmqkit.protocol.schemas.pull import PullMessageRequest
from rmqkit.protocol.schemas.send import SendMessageV2Request
from rmqkit.protocol.schemas.topics import TopicRoute
from rmqkit.protocol.trace import decode_traces, encode_traces
from rmqkit.remoting.sniffer import parse_proxy_header
from tests.native.equal import FAULT, check, check_stream
from tests.native.sends import send

__all__ = ["TARGETS"]

_GROWN_BYTES_MAX = 1 << 20
_HEADER_BYTES_MAX = 0xFFFFFF


def frame(data: bytes) -> None:
    """Check that the stream, in one piece and cut in two, yields the same frames."""
    at = data[0] % (len(data) + 1) if data else 0
    whole, cut = FrameSplitter(), FrameSplitter()
    try:
        frames = whole.feed(data)
    except FrameError:
        return
    assert cut.feed(data[:at]) + cut.feed(data[at:]) == frames
    check_stream(data)
    assert whole.buffered_bytes + sum(8 + len(one.header) + len(one.body) for one in frames) == len(data)


def json_header(data: bytes) -> None:
    _header(Frame(JSON, data, b""))
    _core_reads(JSON, data)


def binary_header(data: bytes) -> None:
    _header(Frame(ROCKETMQ, data, b""))
    _core_reads(ROCKETMQ, data)


def _core_reads(kind: int, header: bytes) -> None:
    """Check that the decoders read the same values from a header that the core accepts as a plain send."""
    if len(header) <= _HEADER_BYTES_MAX:
        check_stream(frame_start(kind, len(header), 1) + header + b"x")


def _header(received: Frame) -> None:
    try:
        command = decode_command(received)
        fields = decode_fields(command)
    except HeaderError:
        return
    for header_type in (PullMessageRequest, SendMessageV2Request):
        try:
            decode_header(command, header_type)
        except HeaderError:
            pass
    _written_and_read_again(command, fields)


def _written_and_read_again(command: Command, fields: dict[str, str]) -> None:
    again = Command(command.code, command.opaque, command.flag, fields, b"", command.remark, version=command.version)
    (one,) = FrameSplitter().feed(b"".join(encode_command(again)))
    assert decode_fields(decode_command(one)) == fields


def properties(data: bytes) -> None:
    decoded = decode_properties(data)
    if not any("\x01" in value for value in decoded.values()):  # readable, but not writable
        assert decode_properties(encode_properties(decoded)) == decoded
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    for name, value in decoded.items():
        assert find_property(data, name.encode()) == value.encode()


def record(data: bytes) -> None:
    try:
        found = decode_record(data, 0)
    except RecordCorrupt:
        pass
    else:
        _record_survives(found)
    try:
        read_messages(data)
    except (BodyError, RecordCorrupt):
        pass


def _record_survives(found: Record) -> None:
    """Compare everything but the magic, which the writer chooses by the length of the topic."""
    kept = {name: getattr(found, name) for name in found.__struct_fields__}
    magic, size = kept.pop("magic"), kept.pop("size")
    kept["crc"] = kept.pop("body_crc")
    again = decode_record(encode_record(**{**kept, "topic": found.topic.encode()}))
    again.magic, again.size = magic, size
    assert again == found


def batch(data: bytes) -> None:
    try:
        entries = decode_batch(data)
    except BodyError:
        return
    assert decode_batch(encode_batch(entries)) == entries
    if not FAULT and data:
        check(send({"m": "true"}, code=320, body=data))


def fastjson(data: bytes) -> None:
    try:
        value = loads(data)
    except BodyError:
        return
    dumps(value)
    for body_type in (HeartbeatData, TopicRoute, ConsumeStatsList, dict[MessageQueue, int]):
        try:
            typed = decode_as(data, body_type)
        except BodyError:
            continue
        assert decode_as(dumps(typed), body_type) == typed


def ha(data: bytes) -> None:
    """Check both directions of the HA link, in one piece and cut in two. Frames must survive encoding."""
    at = data[0] % (len(data) + 1) if data else 0
    try:
        frames, used = split_frames(memoryview(data))
    except FrameError:
        pass
    else:
        assert b"".join(frame_head(offset, len(one)) + one for offset, one in frames) == data[:used]
    whole, cut = Reports(), Reports()
    try:
        newest = whole.feed(data)
        first = cut.feed(data[:at])
        last = cut.feed(data[at:])
    except FrameError:
        return
    assert newest == (first if last is None else last)


def decompression(data: bytes) -> None:
    for compression in Compression:
        try:
            assert len(decompress(data, 1 | compression, bytes_max=_GROWN_BYTES_MAX)) <= _GROWN_BYTES_MAX
        except BodyError:
            pass
    for is_compressed in (True, False):
        try:
            decode_registration(data, is_compressed=is_compressed, version=CURRENT_VERSION)
        except BodyError:
            pass


def text(data: bytes) -> None:
    """Check the small texts in headers, trace records and the PROXY preamble."""
    words = data.decode("utf-8", "replace")
    for decode in (
        *(
            ids.decode_start_offsets,
            ids.decode_message_offsets,
            ids.decode_order_counts,
            ids.decode_pop_handle,
        ),
        decode_recall_handle,
    ):
        try:
            decode(words)
        except HeaderError:
            pass
    try:
        traces = decode_traces(data)
        assert decode_traces(encode_traces(traces)) == traces
    except BodyError:
        pass
    try:
        parse_proxy_header(data)
    except FrameError:
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (frame, json_header, binary_header, properties, record, batch, fastjson, ha, decompression, text)
}
