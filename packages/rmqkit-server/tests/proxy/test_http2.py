"""One connection of HTTP/2, without a socket: frames in, frames out. Source: RFC 9113."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.proxy.transport import http2
from rmqkit.proxy.transport.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
    frame,
)
from rmqkit.proxy.transport.header_blocks import header_block, header_decoder
from rmqkit.proxy.transport.http2 import Http2Connection
from rmqkit.proxy.transport.stream import STREAM_WINDOW, Http2Stream
from rmqkit.remoting.limits import Limits

REQUEST = header_block([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b"te", b"trailers")])
GREETING = PREFACE + frame(SETTINGS, 0, 0)
WINDOW = 65_535


class Transport(asyncio.Transport):
    """A transport that stores the written bytes. ``is_read``: True if the other side reads them."""

    def __init__(self):
        super().__init__()
        self.written = bytearray()
        self.is_closed = self.is_paused = False

    def get_extra_info(self, name, default=None):
        return ("10.0.0.7", 5000) if name == "peername" else default

    def set_write_buffer_limits(self, high=None, low=None): ...
    def get_write_buffer_size(self):
        return 0

    def write(self, data):
        self.written += data

    def writelines(self, pieces):
        self.written += b"".join(pieces)

    def is_closing(self):
        return self.is_closed

    def close(self):
        self.is_closed = True

    abort = close

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


class Echo(Http2Stream):
    """A stream that answers with a request's body when it is complete, or never if ``peer.answers`` is False."""

    __slots__ = ("body",)

    def opened(self, headers):
        self.body = b""

    def received(self, data):
        self.body += data
        self.keep(len(self.body))
        self.take(len(data))

    def ended(self):
        self._connection.asked.append(self)
        if self._connection.answers:
            self.answer()

    def answer(self):
        self.write_headers(header_block([(b":status", b"200")]))
        if self.body:
            self.write_data(self.body)
        self.write_tail(header_block([(b"x-end", b"1")]))

    def cut(self):
        self._connection.cuts.append(self.id)

    def overrun(self):
        self.write_headers(header_block([(b":status", b"413")]), ends=True)


class Peer(Http2Connection):
    """A connection and its client side."""

    def __init__(self, *, answers=True, **arguments):
        super().__init__(Echo, clock=SYSTEM_CLOCK, **arguments)
        self.answers, self.asked, self.cuts = answers, [], []
        self.wire = Transport()
        self.connection_made(self.wire)
        self.flush()

    def sends(self, *frames):
        """Send frames and return the bytes of the answer."""
        self.data_received(b"".join(frames))
        return self.read()

    def read(self):
        """Return the written frames."""
        self.flush()
        data, found = bytes(self.wire.written), []
        self.wire.written.clear()
        while data:
            size, kind, flags = int.from_bytes(data[:3]), data[3], data[4]
            found.append((kind, flags, int.from_bytes(data[5:9]), data[9 : 9 + size]))
            data = data[9 + size :]
        return found

    def ended_with(self, found):
        """Return the code of the GOAWAY that ended the connection."""
        assert self.wire.is_closed, found
        (code,) = (payload[4:8] for kind, _, _, payload in found if kind == GOAWAY)
        return ErrorCode(int.from_bytes(code))


async def greeted(**arguments):
    peer = Peer(**arguments)
    peer.sends(GREETING)
    return peer


def asks(stream_id, body=b"", *, ends=True):
    flags = END_HEADERS | (END_STREAM if ends and not body else 0)
    opened = frame(HEADERS, flags, stream_id, REQUEST)
    return opened + (frame(DATA, END_STREAM if ends else 0, stream_id, body) if body else b"")


def data_of(found, stream_id):
    return b"".join(payload for kind, _, one, payload in found if kind == DATA and one == stream_id)


def is_whole(found, stream_id):
    return any(kind == HEADERS and flags & END_STREAM and one == stream_id for kind, flags, one, _ in found)


async def test_a_request_and_its_answer():
    peer = Peer()
    hello = peer.read()
    assert [kind for kind, *_ in hello] == [SETTINGS, WINDOW_UPDATE]
    found = peer.sends(GREETING, asks(1, b"hello"))
    assert found[0] == (SETTINGS, ACK, 0, b"")
    assert [(kind, flags, one) for kind, flags, one, _ in found[1:]] == [
        (HEADERS, END_HEADERS, 1),
        (DATA, 0, 1),
        (HEADERS, END_HEADERS | END_STREAM, 1),
    ]
    assert data_of(found, 1) == b"hello"
    assert header_decoder(1000).decode(found[1][3]) == [(b":status", b"200")]


async def test_requests_cut_anywhere_have_the_same_answers():
    whole = GREETING + b"".join(asks(number, b"x" * number * 400) for number in range(1, 40, 2))
    wanted = [one for one in (await greeted()).sends(whole[len(GREETING) :]) if one[0] != WINDOW_UPDATE]
    chosen = random.Random(7)
    for _ in range(20):
        peer = Peer()
        peer.read()
        cuts = sorted(chosen.sample(range(1, len(whole)), 12))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        found = [one for piece in pieces for one in peer.sends(piece)]
        assert [one for one in found[1:] if one[0] != WINDOW_UPDATE] == wanted
        assert peer.frame_since_ms is None


async def test_an_answer_waits_for_the_windows_of_its_stream():
    peer = await greeted()
    body = bytes(range(256)) * 400
    found = peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + (1000).to_bytes(4)), asks(1, body[:16_000]))
    assert data_of(found, 1) == body[:1000]
    assert peer.pending_bytes == 15_000
    found = peer.sends(frame(WINDOW_UPDATE, 0, 1, (500).to_bytes(4)))
    assert data_of(found, 1) == body[1000:1500]
    found = peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + (20_000).to_bytes(4)))
    assert data_of(found, 1) == body[1500:16_000]
    assert is_whole(found, 1)
    assert peer.pending_bytes == 0


async def test_a_window_may_be_less_than_nothing():
    peer = await greeted()
    peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + (1000).to_bytes(4)), asks(1, b"x" * 3000))
    peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)))
    assert data_of(peer.sends(frame(WINDOW_UPDATE, 0, 1, (1000).to_bytes(4))), 1) == b""
    found = peer.sends(frame(WINDOW_UPDATE, 0, 1, (2000).to_bytes(4)))
    assert len(data_of(found, 1)) == 2000
    assert is_whole(found, 1)


async def test_answers_share_the_window_of_the_connection():
    peer = await greeted()
    size = 16_000
    found = peer.sends(*(asks(number, b"x" * size) for number in range(1, 21, 2)))
    assert sum(len(data_of(found, number)) for number in range(1, 21, 2)) == WINDOW
    assert [is_whole(found, number) for number in range(1, 21, 2)] == [True] * 4 + [False] * 6
    found += peer.sends(frame(WINDOW_UPDATE, 0, 0, (10 * size).to_bytes(4)))
    assert all(len(data_of(found, number)) == size and is_whole(found, number) for number in range(1, 21, 2))


async def test_a_request_may_be_larger_than_every_window():
    peer = await greeted()
    sent, window, connection_window = 0, STREAM_WINDOW, http2.CONNECTION_WINDOW
    peer.sends(asks(1, ends=False))
    while sent < 10 << 20:
        size = min(16_384, window, connection_window)
        assert size, "the windows are closed, and the request is not whole"
        window, connection_window, sent = window - size, connection_window - size, sent + size
        for kind, _, stream_id, payload in peer.sends(frame(DATA, 0, 1, bytes(size))):
            assert kind == WINDOW_UPDATE
            if stream_id:
                window += int.from_bytes(payload)
            else:
                connection_window += int.from_bytes(payload)


async def test_what_is_not_answered_holds_back_further_requests():
    peer = await greeted(answers=False)
    window, number = http2.CONNECTION_WINDOW, 1
    while window >= 16_384:
        for kind, _, stream_id, payload in peer.sends(asks(number, bytes(16_384))):
            assert (kind, stream_id) == (WINDOW_UPDATE, 0)
            window += int.from_bytes(payload)
        window, number = window - 16_384, number + 2
        assert number < 10_000, "the connection reads more than may wait"
    for stream in peer.asked:
        stream.reset()
    assert any(kind == WINDOW_UPDATE and not stream_id for kind, _, stream_id, _ in peer.read())


async def test_requests_that_never_end_are_bounded(monkeypatch):
    monkeypatch.setattr(http2, "_INCOMPLETE_BYTES_MAX", 103_000)
    limits = Limits()
    peer = await greeted(limits=limits)
    limits.opened(peer, None)
    found = []
    for number in range(1, 21, 2):
        found += peer.sends(asks(number, bytes(16_000), ends=False))
    refused = [one for kind, _, one, _ in found if kind == RST_STREAM]
    assert refused == [13, 15, 17, 19]
    assert 6 * 16_000 < limits.incomplete_bytes < 103_000
    assert peer.frame_since_ms is not None
    peer.sends(*(frame(DATA, END_STREAM, number) for number in range(1, 12, 2)))
    assert limits.incomplete_bytes == 0
    assert peer.frame_since_ms is None


async def test_more_streams_than_there_may_be():
    peer = Peer(answers=False, streams_max=3)
    (settings,) = [payload for kind, flags, _, payload in peer.read() if kind == SETTINGS and not flags]
    assert (3).to_bytes(2) + (3).to_bytes(4) in settings, "the limit is sent as SETTINGS_MAX_CONCURRENT_STREAMS"
    peer.sends(GREETING)
    found = peer.sends(*(asks(number) for number in range(1, 11, 2)))
    assert found == [(RST_STREAM, 0, number, ErrorCode.REFUSED_STREAM.to_bytes(4)) for number in (7, 9)]
    assert [stream.id for stream in peer.asked] == [1, 3, 5]


async def test_many_requests_of_one_read_are_handled_in_turns():
    peer = await greeted(answers=False)
    peer.data_received(b"".join(asks(number) for number in range(1, 1001, 2)))
    assert len(peer.asked) == 128
    assert peer.wire.is_paused
    peer.data_received(asks(1001))  # what the kernel had handed over before
    turns = 0
    while len(peer.asked) < 501:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 20
    assert turns >= 3
    await asyncio.sleep(0)
    assert not peer.wire.is_paused
    assert [stream.id for stream in peer.asked] == [*range(1, 1002, 2)]


FLOODS = {
    "ping": lambda number: frame(PING, 0, 0, bytes(8)),
    "settings": lambda number: frame(SETTINGS, 0, 0),
    "priority": lambda number: frame(PRIORITY, 0, 2 * number + 5, bytes(5)),
    "rapid reset": lambda number: asks(2 * number + 5) + frame(RST_STREAM, 0, 2 * number + 5, bytes(4)),
    "empty data": lambda number: frame(DATA, 0, 3),
    "empty continuation": lambda number: (
        frame(CONTINUATION, 0, 5) if number else frame(HEADERS, 0, 5, REQUEST) + frame(CONTINUATION, 0, 5)
    ),
    "unknown": lambda number: frame(99, 0, 0, b"x"),
    "reset by us": lambda number: asks(2 * number + 5) + frame(WINDOW_UPDATE, 0, 2 * number + 5, bytes(4)),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_ends_the_connection(kind):
    peer = await greeted(answers=False)
    peer.sends(asks(3, ends=False))
    found = []
    for number in range(1500):
        found += peer.sends(FLOODS[kind](number))
        if peer.wire.is_closed:
            break
    assert peer.ended_with(found) is ErrorCode.ENHANCE_YOUR_CALM
    assert number > 400, "a busy client is none"


async def test_pings_of_a_busy_client_are_none():
    """Go's client has a PING under way whenever it reads."""
    peer = await greeted()
    for number in range(1, 6001, 2):
        found = peer.sends(asks(number), frame(PING, 0, 0, b"12345678"))
        assert found[-1] == (PING, ACK, 0, b"12345678")


async def test_pings_without_a_call_are_answered_for_hours():
    peer = await greeted()
    for _ in range(8 * 120):
        await asyncio.sleep(30)
        assert peer.sends(frame(PING, 0, 0, b"12345678")) == [(PING, ACK, 0, b"12345678")]
    assert not peer.wire.is_closed


async def test_a_header_block_that_never_ends():
    peer = await greeted()
    found = peer.sends(frame(HEADERS, 0, 1, REQUEST), *(frame(CONTINUATION, 0, 1, bytes(8000)) for _ in range(5)))
    assert peer.ended_with(found) is ErrorCode.ENHANCE_YOUR_CALM
    assert peer.frame_since_ms is None


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(HEADERS, END_HEADERS, 2, REQUEST), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frame(DATA, 0, 0, b"x"), ErrorCode.PROTOCOL_ERROR),
        (asks(1) + frame(DATA, 0, 1, b"x"), ErrorCode.STREAM_CLOSED),
        (asks(3) + asks(1), ErrorCode.STREAM_CLOSED),
        (frame(HEADERS, END_HEADERS, 1, b"\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(HEADERS, END_HEADERS | PADDED, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
        (frame(CONTINUATION, END_HEADERS, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(HEADERS, 0, 1, REQUEST) + frame(PING, 0, 0, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (frame(SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(SETTINGS, 0, 0, b"\0\5\0\0\0\1"), ErrorCode.PROTOCOL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(WINDOW_UPDATE, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(PING, 0, 0, b"1"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(5, END_HEADERS, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (frame(GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (b"\x00\x40\x01\x00\x00\x00\x00\x00\x01", ErrorCode.FRAME_SIZE_ERROR),
    ],
)
async def test_what_ends_a_connection(frames, code):
    peer = await greeted(answers=False)
    assert peer.ended_with(peer.sends(frames)) is code


@pytest.mark.parametrize("begins", [b"GET / HTTP/1.1\r\n\r\n" + bytes(20), PREFACE + frame(PING, 0, 0, bytes(8))])
async def test_what_is_no_greeting(begins):
    peer = Peer()
    assert peer.ended_with(peer.sends(begins)) is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(
    "headers",
    [
        [(b":method", b"POST"), (b":path", b"/x")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"")],
        [(b":method", b"POST"), (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b"a", b"b"), (b":path", b"/")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b":status", b"200")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"Upper", b"x")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"connection", b"x")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"te", b"gzip")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"content-length", b"-1")],
        [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/"), (b"content-length", b"1")],
    ],
)
async def test_what_ends_a_stream_alone(headers):
    peer = await greeted()
    found = peer.sends(frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block(headers)))
    assert found == [(RST_STREAM, 0, 1, ErrorCode.PROTOCOL_ERROR.to_bytes(4))]
    assert is_whole(peer.sends(asks(3)), 3)


async def test_padding_is_no_content_and_counts_for_the_windows():
    peer = await greeted()
    found = peer.sends(asks(1, ends=False), frame(DATA, PADDED | END_STREAM, 1, b"\x05hello" + bytes(5)))
    assert data_of(found, 1) == b"hello"


async def test_a_client_that_gives_up():
    peer = await greeted(answers=False)
    peer.sends(asks(1, b"x" * 100), frame(RST_STREAM, 0, 1, ErrorCode.CANCEL.to_bytes(4)))
    assert peer.cuts == [1]
    peer.asked[0].answer()
    assert peer.read() == []
    await peer.asked[0].written()


async def test_a_stop_says_so_and_cuts_what_is_held():
    peer = await greeted(answers=False)
    peer.sends(asks(1), asks(3))
    peer.close("the server stops")
    assert peer.ended_with(peer.read()) is ErrorCode.NO_ERROR
    assert peer.cuts == [1, 3]
    assert all(stream.is_over for stream in peer.asked)


async def test_a_writer_waits_for_windows_and_for_a_client_that_reads():
    peer = await greeted(answers=False)
    peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + (10).to_bytes(4)), asks(1), asks(3))
    first, second = peer.asked
    assert not first.write_data(b"x" * 20)
    waiting = asyncio.ensure_future(first.written())
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.sends(frame(WINDOW_UPDATE, 0, 1, (10).to_bytes(4)))
    await waiting
    peer.pause_writing()
    assert peer.wire.is_paused
    waiting = asyncio.ensure_future(second.written())
    await asyncio.sleep(0)
    assert not waiting.done()
    peer.resume_writing()
    await waiting
    assert not peer.wire.is_paused


async def test_a_lost_connection_lets_writers_continue():
    peer = await greeted(answers=False)
    peer.sends(frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)), asks(1))
    (stream,) = peer.asked
    stream.write_data(b"x")
    waiting = asyncio.ensure_future(stream.written())
    await asyncio.sleep(0)
    peer.connection_lost(None)
    await waiting
    assert stream.is_over
    assert peer.cuts == [1]
    assert peer.unsent_bytes == 0


async def test_a_silent_client_is_asked_whether_it_is_there():
    peer = await greeted()
    heard_ms = peer.active_ms
    peer.probe()
    assert peer.read() == [(PING, 0, 0, bytes(8))]
    assert peer.active_ms == heard_ms


FRAMES = st.builds(
    frame,
    st.integers(0, 11),
    st.sampled_from([0, 1, 4, 5, 8, 9, 13, 0x20, 0x24, 0x2D, 0xFF]),
    st.integers(0, 9),
    st.binary(max_size=24) | st.just(REQUEST) | st.sampled_from([bytes(4), bytes(8), b"\0\4\0\0\0\x01"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAMES | st.binary(max_size=12), max_size=25))
def test_any_frames_are_answered_or_end_the_connection(frames):
    async def main():
        peer = await greeted()
        for one in frames:
            peer.data_received(one)
        peer.read()
        peer.connection_lost(None)
        assert peer.pending_bytes == peer._incomplete_bytes == 0 or peer.wire.is_closed

    asyncio.run(main())
