"""gRPC over HTTP/2: framing, compression, deadlines, statuses. Source: gRPC over HTTP/2."""

from __future__ import annotations

import asyncio
import gzip
import urllib.parse
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.core import CORE
from rmqkit.proxy.schema.messages import SERVICE, message_class
from rmqkit.proxy.transport.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)
from rmqkit.proxy.transport.grpc_call import GrpcService
from rmqkit.proxy.transport.header_blocks import header_block, header_decoder
from tests.examples import examples
from tests.proxy.calling import METHODS
from tests.proxy.test_http2 import GREETING, Peer, Transport, data_of

OK = METHODS["Heartbeat"].response.FromString(b"")


class Endpoint:
    """An endpoint that records the calls and answers with nothing."""

    def __init__(self):
        self.methods = list(METHODS.values())
        self.asked = []
        self.frames = []
        self.written = []
        self.fails = False
        self.holds: asyncio.Future | None = None

    def answer_at_once(self, method, call, content, write):
        return False

    def handle_gathered(self):
        """Nothing was gathered."""

    async def unary(self, method, call, asked):
        self.asked.append((method.name, call, asked))
        if self.fails:
            raise ValueError("secret")
        if self.holds is not None:
            await self.holds
        return method.response()

    async def receive(self, method, call, asked, write, write_framed):
        self.asked.append((method.name, call, asked))
        for _ in range(3):
            await write(method.response())
        while sum(self.written) < len(self.frames):
            self.written.append(await write_framed(self.frames[sum(self.written) :]))

    async def telemetry(self, call, commands, write):
        async for command in commands:
            self.asked.append(("Telemetry", call, command))
            await write(command)


class Client(Peer):
    """A connection of a service and its client side."""

    def __init__(self, *, with_core=True):
        self.endpoint = Endpoint()
        service = GrpcService(self.endpoint)
        if not with_core:
            service._read_usual = None
        connection = service.connection(clock=SYSTEM_CLOCK)
        self.__dict__ |= connection.__dict__  # a peer's reading and writing, over what the service has made
        self.wire = Transport()
        self.connection_made(self.wire)
        self.sends(GREETING)

    async def ask(self, name, *messages, ends=True, path=None, **headers):
        """Make one call and return all frames of its answer."""
        own = {"te": "trailers", "content-type": "application/grpc", **headers}
        listed = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", (path or f"/{SERVICE}/{name}").encode())]
        listed += [(key.replace("_", "-").encode(), value.encode()) for key, value in own.items()]
        frames = [frame(HEADERS, END_HEADERS, 1, header_block(listed))]
        frames += [frame(DATA, 0, 1, one) for one in messages]
        found = self.sends(*frames, frame(DATA, END_STREAM, 1) if ends else b"")
        for _ in range(100):
            await asyncio.sleep(0)
        return found + self.read()


def framed(content, flag=0):
    return bytes((flag,)) + len(content).to_bytes(4) + content


def status_of(found):
    """Return the gRPC status of a finished call and its text."""
    decoder, headers = header_decoder(16_384), {}
    for kind, _, _, payload in found:
        if kind == HEADERS:
            headers |= dict(decoder.decode(payload))
    assert headers[b":status"] == b"200", headers
    return int(headers[b"grpc-status"]), headers.get(b"grpc-message", b"").decode()


HEARTBEAT = METHODS["Heartbeat"].request(group={"name": "G" * 500}).SerializeToString()


async def test_a_call_of_one_message():
    client = Client()
    found = await client.ask("Heartbeat", framed(HEARTBEAT), x_mq_client_id="c1")
    assert data_of(found, 1) == bytes(5)
    assert status_of(found) == (0, "")
    ((name, call, asked),) = client.endpoint.asked
    assert (name, asked.group.name) == ("Heartbeat", "G" * 500)
    assert call.metadata["x-mq-client-id"] == "c1"
    assert call.peername == ("10.0.0.7", 5000)
    assert call.seconds_left() is None


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7, 100, 505])
async def test_a_message_in_several_frames(size):
    client, whole = Client(), framed(HEARTBEAT)
    found = await client.ask("Heartbeat", *(whole[at : at + size] for at in range(0, len(whole), size)))
    assert status_of(found) == (0, "")
    assert client.endpoint.asked[0][2].group.name == "G" * 500


async def test_messages_of_a_stream_come_one_by_one():
    client = Client()
    commands = [message_class("TelemetryCommand")(thread_stack_trace={"nonce": str(n)}) for n in range(5)]
    sent = b"".join(framed(one.SerializeToString()) for one in commands)
    found = await client.ask("Telemetry", sent[:20], sent[20:], ends=False)
    assert data_of(found, 1) == sent
    client.sends(frame(DATA, END_STREAM, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert status_of(found + client.read()) == (0, "")


async def test_an_answer_of_several_messages():
    found = await Client().ask("ReceiveMessage", framed(b""))
    assert data_of(found, 1) == bytes(15)
    assert status_of(found) == (0, "")


async def test_framed_messages_leave_as_many_together_as_the_client_takes():
    client = Client()
    client.endpoint.frames = [framed(bytes(5))] * 3 + [framed(bytes(30_000))]
    client.sends(frame(SETTINGS, 0, 0, b"\0\4" + (15 + 25).to_bytes(4)))
    found = await client.ask("ReceiveMessage", framed(b""))
    assert client.endpoint.written == [2]
    assert data_of(found, 1) == (bytes(15) + framed(bytes(5)) * 3)[:40]
    for more in (5, 20_000, 20_000):
        found += client.sends(frame(WINDOW_UPDATE, 0, 1, more.to_bytes(4)))
        for _ in range(9):
            await asyncio.sleep(0)
        found += client.read()
    assert client.endpoint.written == [2, 1, 1]
    assert data_of(found, 1) == bytes(15) + b"".join(client.endpoint.frames)
    assert status_of(found) == (0, "")


@pytest.mark.parametrize(
    ("encoding", "pack"), [("gzip", lambda one: gzip.compress(one, mtime=0)), ("deflate", zlib.compress)]
)
async def test_a_compressed_message(encoding, pack):
    client = Client()
    found = await client.ask("Heartbeat", framed(pack(HEARTBEAT), 1), grpc_encoding=encoding)
    assert status_of(found) == (0, "")
    assert client.endpoint.asked[0][2].group.name == "G" * 500


@pytest.mark.parametrize(
    ("message", "encoding", "code", "text"),
    [
        (framed(HEARTBEAT, 1), None, 13, "compressed flag 1 and no grpc-encoding"),
        (framed(HEARTBEAT, 2), "gzip", 13, "compressed flag 2"),
        (framed(HEARTBEAT, 1), "gzip", 13, "cannot be read"),
        (framed(gzip.compress(HEARTBEAT, mtime=0)[:-9], 1), "gzip", 13, "is not whole"),
        (framed(gzip.compress(bytes(17 << 20), mtime=0), 1), "gzip", 8, "larger than max"),
        (framed(HEARTBEAT), "br", 12, "Decompressor is not installed for grpc-encoding: br"),
        (b"\0\x01\x00\x00\x01", None, 8, "Received message larger than max (16777217"),
        (b"\0\0\0\0\x09abc", None, 13, "one whole message is wanted, 0 and 8 bytes came"),
        (b"", None, 13, "one whole message is wanted, 0 and 0 bytes came"),
        (framed(b"") * 2, None, 13, "more than one message"),
        (framed(b"\xff" * 9), None, 13, "Heartbeat: Invalid protobuf byte sequence"),
    ],
)
async def test_what_is_no_call(message, encoding, code, text):
    client = Client()
    frames = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
    found = await client.ask("Heartbeat", *frames, **({"grpc_encoding": encoding} if encoding else {}))
    found_code, told = status_of(found)
    assert found_code == code
    assert text in urllib.parse.unquote(told)
    assert not client.endpoint.asked


async def test_methods_that_are_not_there():
    assert status_of(await Client().ask("", framed(b""), path="/x/Y%ä")) == (
        12,
        "Method not found: /x/Y%25%C3%83%C2%A4",
    )


async def test_what_is_no_grpc_has_a_status_of_http():
    decoder = header_decoder(1000)
    for headers, status in (({"content-type": "text/html"}, b"415"), ({}, b"405")):
        client = Client()
        method = b"POST" if headers else b"GET"
        listed = [(b":method", method), (b":scheme", b"http"), (b":path", b"/")]
        block = header_block([*listed, *((key.encode(), value.encode()) for key, value in headers.items())])
        ((kind, flags, _, payload),) = client.sends(frame(HEADERS, END_HEADERS | END_STREAM, 1, block))
        assert (kind, flags) == (HEADERS, END_HEADERS | END_STREAM)
        assert decoder.decode(payload) == [(b":status", status)]


@pytest.mark.parametrize(("told", "seconds"), [("10S", 10), ("2M", 120), ("1H", 3600), ("1500m", 1.5), ("7u", 0)])
async def test_a_deadline(told, seconds):
    client = Client()
    await client.ask("Heartbeat", framed(b""), grpc_timeout=told)
    assert client.endpoint.asked[0][1].seconds_left() == pytest.approx(seconds, abs=1)


@pytest.mark.parametrize("told", ["", "S", "1", "123456789S", "1x", "-1S"])
async def test_what_is_no_deadline(told):
    code, text = status_of(await Client().ask("Heartbeat", framed(b""), grpc_timeout=told))
    assert (code, text[:20]) == (13, "Invalid grpc-timeout")


async def test_what_fails_is_reported_without_its_cause(caplog):
    client = Client()
    client.endpoint.fails = True
    found = await client.ask("Heartbeat", framed(b""))
    assert status_of(found) == (13, "the server failed: see its log")
    assert "ValueError: secret" in caplog.text


async def test_an_answer_that_its_client_does_not_take_ends_with_the_deadline(caplog):
    client = Client()
    client.sends(frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)))  # no window at all
    began = asyncio.get_running_loop().time()
    with caplog.at_level("INFO"):
        await client.ask("ReceiveMessage", framed(b""), grpc_timeout="7S")
        await asyncio.sleep(6.9)
        assert not client.read()
        await asyncio.sleep(0.2)
    assert [kind for kind, *_ in client.read()] == [RST_STREAM]
    assert "has not taken the answer before the deadline" in caplog.text
    assert asyncio.get_running_loop().time() - began < 8


async def test_a_call_that_its_client_gives_up_is_cancelled():
    client = Client()
    client.endpoint.holds = asyncio.get_running_loop().create_future()
    await client.ask("Heartbeat", framed(b""))
    client.sends(frame(RST_STREAM, 0, 1, bytes(4)))
    await asyncio.sleep(0)
    assert client.endpoint.holds.cancelled()


async def test_a_call_that_is_given_up_in_the_read_that_brings_it():
    client = Client()
    listed = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/{SERVICE}/Heartbeat".encode())]
    block = header_block([*listed, (b"content-type", b"application/grpc")])
    asked = frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, framed(b""))
    assert client.sends(asked, frame(RST_STREAM, 0, 1, bytes(4))) == []
    await asyncio.sleep(0)
    assert not client.endpoint.asked


@examples(200)
@given(st.lists(st.binary(max_size=20) | st.just(framed(b"")), max_size=8), st.sampled_from(["Heartbeat", "Telemetry"]))
def test_any_content_has_a_status(pieces, name):
    async def main():
        client = Client()
        code, _ = status_of(await client.ask(name, *pieces))
        assert code in (0, 8, 13)

    asyncio.run(main())


USUAL = [
    (b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/{SERVICE}/Heartbeat".encode()), (b":authority", b"h"),
    (b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"grpc-timeout", b"10S"), (b"x-mq-client-id", b"c"),
]  # fmt: skip
NAMES = [name for name, _ in USUAL] + [
    b"grpc-encoding", b"content-length", b"connection", b"authorization", b"x-mq-date-time", b"x", b"X", b":x", b"",
    b"x-mq-request-id", b"x-mq-language",
]  # fmt: skip
VALUES = [
    b"",
    b"POST",
    b"GET",
    b"/",
    b"identity",
    b"gzip",
    b"1S",
    b"12345678n",
    b"123456789S",
    b"1x",
    b"5",
    b"\xe4",
    b"a",
]
HEADER = st.sampled_from(USUAL) | st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES))


def what_headers_begin(headers, *, with_core):
    """Return the bytes written for a request, and the names, metadata and deadlines of its calls."""

    async def main():
        client = Client(with_core=with_core)
        asked = frame(HEADERS, END_HEADERS, 1, header_block(headers)) + frame(DATA, END_STREAM, 1, framed(b""))
        found = client.sends(asked)
        for _ in range(3):
            await asyncio.sleep(0)
        calls = [(name, call.metadata, call.seconds_left()) for name, call, _ in client.endpoint.asked]
        return found + client.read(), calls

    return asyncio.run(main())


@examples(300)
@given(st.lists(HEADER, max_size=4), st.integers(0, 8), st.integers(0, 8))
def test_headers_are_read_alike_with_and_without_the_core(some, at, left_out):
    headers = USUAL[:at] + some + [one for number, one in enumerate(USUAL[at:], at) if number != left_out]
    written, calls = what_headers_begin(headers, with_core=True)
    expected, expected_calls = what_headers_begin(headers, with_core=False)
    assert written == expected
    assert [call[:2] for call in calls] == [call[:2] for call in expected_calls]
    for (*_, left), (*_, expected_left) in zip(calls, expected_calls, strict=True):
        assert left == pytest.approx(expected_left, abs=1)


@pytest.mark.skipif(bool(CORE.fault), reason=CORE.fault)
def test_the_core_reads_usual_headers():
    path, seconds, metadata = CORE.read_grpc_call(USUAL)
    assert (path, seconds, metadata) == (USUAL[2][1], 10, {"x-mq-client-id": "c"})
    assert CORE.read_grpc_call([*USUAL, (b"x", b"y")]) is None
