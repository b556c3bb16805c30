"""Client and server of the transport joined over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct

import pytest

from rmqkit.errors import ConnectFailed, ConnectionLost, PeerRefused, RequestTimedOut, SettingsError
from rmqkit.protocol.codes import ResponseCode
from rmqkit.protocol.command import (
    JSON,
    ROCKETMQ,
    Command,
    Frame,
    FrameSplitter,
    decode_command,
    encode_command,
    reply,
    request,
)
from rmqkit.remoting.address import AdminAddresses, advertised_ip, join_address, split_address, split_addresses
from rmqkit.remoting.client import Permits, RemotingClient, expect_success
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.listening import ListenFailed
from rmqkit.remoting.router import Lane, Router
from rmqkit.remoting.server import RemotingServer
from tests.waiting import SECONDS

ECHO, SILENT, BROKEN, SLOW, CALL_BACK, REFUSING = 1001, 1002, 1003, 1004, 1005, 1006


class Peers:
    """A server with some handlers, and a client."""

    def __init__(self, **server_options) -> None:
        self.dispatch = Router()
        self.seen: list[Command] = []
        self.gate = asyncio.Event()
        self.connections: list[Connection] = []
        for code, handler in {
            ECHO: self.echo,
            SILENT: self.silent,
            BROKEN: self.broken,
            SLOW: self.slow,
            CALL_BACK: self.call_back,
            REFUSING: self.refusing,
        }.items():
            self.dispatch.register(code, handler)
        self.closed: list[Connection] = []
        self.server = RemotingServer(self.dispatch, on_close=self.closed.append, **server_options)
        self.client_dispatch = Router()
        self.client = RemotingClient(self.client_dispatch)

    def echo(self, connection, command):
        self.seen.append(command)
        return reply(command, remark="echo", body=command.body)

    def silent(self, connection, command):
        self.connections.append(connection)

    def broken(self, connection, command):
        raise RuntimeError("boom")

    async def slow(self, connection, command):
        await self.gate.wait()
        return reply(command, remark="slow")

    async def call_back(self, connection, command):
        answer = await connection.call(request(7, body=b"from the server"), 60_000)
        return reply(command, remark=answer.remark)

    def refusing(self, connection, command):
        raise PeerRefused(17, "no such thing", "")

    async def __aenter__(self):
        port = await self.server.listen("127.0.0.1", 0)
        self.address = f"127.0.0.1:{port}"
        self.port = port
        return self

    async def __aexit__(self, *exc_info):
        self.gate.set()
        await self.client.close()
        await self.server.close()

    async def call(self, code, body=b"", timeout_ms=60_000):
        return await self.client.call(self.address, request(code, body=body), timeout_ms)


@pytest.fixture
async def peers():
    async with Peers() as it:
        yield it


async def test_many_calls_share_one_connection_and_find_their_answers(peers):
    bodies = [b"%d" % i for i in range(200)]
    answers = await asyncio.gather(*(peers.call(ECHO, body) for body in bodies))
    assert [answer.body for answer in answers] == bodies
    assert len(peers.server.connections) == 1


async def test_an_answer_does_not_wait_for_an_earlier_slow_one(peers):
    slow = asyncio.ensure_future(peers.call(SLOW))
    assert (await peers.call(ECHO)).remark == "echo"
    assert not slow.done()
    peers.gate.set()
    assert (await slow).remark == "slow"


async def test_an_unknown_code_is_answered_as_the_reference_does(peers):
    answer = await peers.call(9999)
    assert (answer.code, answer.remark) == (3, " request type 9999 not supported")


async def test_a_handler_that_fails_answers_and_is_logged_once(caplog):
    async with Peers() as peers:
        answer = await peers.call(BROKEN)
        assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, "RuntimeError: boom")
        assert (await peers.call(ECHO)).remark == "echo"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_a_refusal_raised_below_keeps_its_code_and_remark(peers):
    answer = await peers.call(REFUSING)
    assert (answer.code, answer.remark) == (17, "no such thing")
    with pytest.raises(PeerRefused, match="answered with code 17: no such thing"):
        expect_success(answer, peers.address)


async def test_one_way_requests_are_never_answered(peers):
    for code in (ECHO, BROKEN, 9999):
        await peers.client.send_one_way(peers.address, request(code, one_way=True), 1000)
    connection = await peers.client.connection(peers.address)
    connection._settle = lambda answer: pytest.fail(f"answered {answer}") if answer.remark != "echo" else done(answer)
    done = type(connection)._settle.__get__(connection)
    await peers.call(ECHO)
    assert [command.is_one_way for command in peers.seen] == [True, False]


async def test_the_server_calls_the_client_over_the_same_connection(peers):
    peers.client_dispatch.register(7, lambda connection, command: reply(command, remark=command.body.decode()))
    assert (await peers.call(CALL_BACK)).remark == "from the server"


async def test_a_call_without_answer_times_out_and_drops_its_connection(peers):
    await peers.client.connection(peers.address)
    with pytest.raises(RequestTimedOut, match=r"did not answer CONTROLLER_ELECT_MASTER \(1002\) within 1000 ms"):
        await peers.call(SILENT, timeout_ms=1000)
    await peers.connections[0].closed
    assert (await peers.call(ECHO)).remark == "echo"


@pytest.mark.parametrize(("answered_at", "stays"), [(2.9, True), (0.5, False)])
async def test_a_slow_call_ends_the_calls_of_others_only_if_the_peer_is_silent(answered_at, stays, peers):
    """Not since the slow call began: a peer may have answered something before it became silent."""
    slow = asyncio.ensure_future(peers.call(SLOW))
    late = asyncio.ensure_future(peers.call(SILENT, timeout_ms=3000))
    await asyncio.sleep(answered_at)
    await peers.call(ECHO)
    with pytest.raises(RequestTimedOut):
        await late
    peers.gate.set()
    if stays:
        assert (await slow).remark == "slow"
    else:
        with pytest.raises(ConnectionLost):
            await slow


class Mute(asyncio.Protocol):
    """A peer that accepts connections and reads nothing."""

    def connection_made(self, transport):
        transport.pause_reading()


async def test_a_peer_that_takes_nothing_does_not_keep_its_connection_after_a_time_out():
    async with await asyncio.get_running_loop().create_server(Mute, "127.0.0.1", 0) as mute:
        client, address = RemotingClient(), join_address(*mute.sockets[0].getsockname())
        connection = await client.connection(address)
        small = asyncio.ensure_future(client.call(address, Command(SILENT), 60_000))
        with pytest.raises(RequestTimedOut):
            await client.call(address, Command(SILENT, body=bytes(16 << 20)), 150)
        await asyncio.wait_for(connection.closed, SECONDS)
        with pytest.raises(ConnectionLost):
            await small
        await client.close()


async def test_calls_under_way_fail_when_the_connection_closes(peers):
    call = asyncio.ensure_future(peers.call(SILENT))
    while not peers.connections:
        await asyncio.sleep(0)
    peers.connections[0].abort()
    with pytest.raises(ConnectionLost):
        await call


async def test_nobody_listening_is_reported_with_the_address(peers):
    await peers.server.close()
    with pytest.raises(ConnectFailed, match=f"cannot connect to {peers.address}: "):
        await peers.call(ECHO)


class AcceptedTransport(asyncio.Transport):
    """The transport that the loop passes for an accepted connection."""

    is_aborted = False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return self.is_aborted

    def abort(self):
        self.is_aborted = True


async def test_who_is_accepted_while_the_port_closes_is_not_served_by_what_has_stopped(peers):
    await peers.server.close()
    transport = AcceptedTransport()
    peers.server._connection().connection_made(transport)
    assert transport.is_aborted


async def test_a_port_in_use_is_reported_in_one_line(peers):
    with pytest.raises(ListenFailed, match=f"cannot listen on 127.0.0.1:{peers.port}: .*choose another port"):
        await RemotingServer(Router()).listen("127.0.0.1", peers.port)
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0: .*; use one of this machine's"):
        await RemotingServer(Router()).listen("192.0.2.1", 0)
    for name in ("no host", "a..b"):
        with pytest.raises(ListenFailed, match=rf"cannot listen on {name}:0: .*; use one of this machine's"):
            await RemotingServer(Router()).listen(name, 0)
        with pytest.raises(SettingsError, match=rf"cannot listen on {name}: .*; use one of this machine's"):
            advertised_ip(name)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x10\x05\x00\x00\x04aaaaaaaaaaaa"])
async def test_bytes_that_are_no_frames_close_that_connection_alone_with_one_line(garbage, caplog):
    async with Peers() as peers:
        assert (await peers.call(ECHO)).remark == "echo"
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(garbage)
        assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()
        await writer.wait_closed()
        assert (await peers.call(ECHO)).remark == "echo"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "closing connection of 127.0.0.1:" in record.getMessage()


async def test_a_header_that_is_not_json_closes_the_connection(caplog):
    async with Peers() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(struct.pack(">iI", 4 + 5, 5) + b"{oops")
        assert await asyncio.wait_for(reader.read(), SECONDS) == b""
        writer.close()
        await writer.wait_closed()
    assert "not readable JSON" in caplog.text


async def test_a_binary_request_is_answered_in_json(peers):
    reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
    command = Command(ECHO, opaque=5, body=b"x")
    writer.write(b"".join(encode_command(command, ROCKETMQ)))
    start = await reader.readexactly(8)
    assert start[4] == 0
    assert b'"opaque":5' in await reader.readexactly(int.from_bytes(start[5:8]))
    writer.close()
    await writer.wait_closed()


async def test_a_peer_that_does_not_read_is_not_read_either(peers):
    body = bytes(1 << 20)
    _reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
    request_bytes = b"".join(encode_command(request(ECHO, body=body)))
    sent = 0

    async def flood():
        nonlocal sent
        while sent < 200:
            writer.write(request_bytes)
            await writer.drain()
            sent += 1

    flooding = asyncio.ensure_future(flood())
    while not peers.server.connections:
        await asyncio.sleep(0)
    (connection,) = peers.server.connections
    last = -1
    while last != len(peers.seen) or connection.is_writable:  # until nothing moves any more
        last = len(peers.seen)
        await asyncio.sleep(0.2)
    assert sent < 200, "the flood went through: nothing held it back"
    assert connection._transport.get_write_buffer_size() < 16 << 20
    flooding.cancel()
    writer.transport.abort()
    await asyncio.gather(flooding, return_exceptions=True)


async def test_large_requests_with_large_answers_do_not_stop_each_other(peers):
    body = bytes(1 << 20)

    answers = await asyncio.gather(*(peers.call(ECHO, body, timeout_ms=20_000) for _ in range(64)))
    assert all(answer.body == body for answer in answers)


async def test_an_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr("rmqkit.remoting.server._SWEEP_SECONDS", 0.01)

    async with Peers(idle_ms_max=300) as peers:
        connection = await peers.client.connection(peers.address)
        await asyncio.wait_for(asyncio.shield(connection.closed), SECONDS)
        assert (await peers.call(ECHO)).remark == "echo"  # the next call connects again


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9876", ("127.0.0.1", 9876)),
        ("[::1]:1", ("::1", 1)),
        (" host:0 ", ("host", 0)),
        ("::1:9", ("::1", 9)),
        ("host.:1", ("host.", 1)),
        ("mü.de:1", ("mü.de", 1)),
    ],
)
def test_addresses_are_split(text, address):
    assert split_address(text) == address
    assert split_address(join_address(*address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:x",
        "host:65536",
        "host:-1",
        "a..b:1",
        ".:1",
        "a" * 64 + ":1",
        "\udcff:1",
        "ü..b:1",
    ],
)
def test_what_is_no_address_is_a_value_error(text):
    with pytest.raises(ValueError, match="must be host:port"):
        split_address(text)


def test_address_lists_are_separated_by_semicolons():
    assert split_addresses("a:1; b:2;") == ["a:1", "b:2"]
    with pytest.raises(ValueError, match="empty"):
        split_addresses(" ; ")


async def test_a_balancer_s_preamble_names_the_real_peer():
    async with Peers(balancers=lambda: AdminAddresses("loopback")) as peers:
        seen = []
        peers.dispatch.register(7, lambda connection, command: seen.append(connection) or reply(command))
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        frame = b"".join(encode_command(request(7)))
        preamble = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 10911\r\n"
        for byte in preamble[:10]:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(preamble[10:] + frame)
        await reader.readexactly(8)
        writer.close()
        await writer.wait_closed()
        assert seen[0].peer == "192.0.2.7:56324"
        assert list(map(str, seen[0].hops)) == ["127.0.0.1", "192.0.2.7"]


async def test_a_draining_server_sends_new_requests_away_and_the_client_tries_again(peers):
    slow = asyncio.ensure_future(peers.call(SLOW))
    await peers.call(ECHO)
    draining = asyncio.ensure_future(peers.server.drain(5000))
    await asyncio.sleep(0)
    answer = await peers.call(ECHO)
    assert (answer.code, answer.remark) == (ResponseCode.GO_AWAY, "this process is shutting down")
    old = request(ECHO)
    old.version = 475
    assert (await peers.client.call(peers.address, old, 60_000)).remark == "echo"
    peers.gate.set()
    assert (await slow).remark == "slow"
    await peers.client.close()
    await draining


async def test_a_full_lane_answers_busy(peers):
    lane = Lane("slow", 2)
    peers.dispatch.register(7, peers.slow, lane)
    under_way = [asyncio.ensure_future(peers.call(7)) for _ in range(2)]
    while lane.requests < 2:
        await asyncio.sleep(0)
    refused = await peers.call(7)
    assert (refused.code, refused.remark) == (2, "[OVERLOAD]system busy, start flow control for a while")
    peers.gate.set()
    assert [(await call).remark for call in under_way] == ["slow", "slow"]
    assert lane.requests == 0
    assert (await peers.call(7)).remark == "slow"


async def test_calls_beyond_the_permits_wait_their_turn_and_time_out():
    permits = Permits(1)
    assert await permits.take(10)
    assert not await permits.take(1)
    second = asyncio.ensure_future(permits.take(5000))
    third = asyncio.ensure_future(permits.take(5000))
    await asyncio.sleep(0)
    second.cancel()
    permits.give_back()
    assert await third
    permits.give_back()
    assert await permits.take(1)


async def test_a_frame_that_trickles_in_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("rmqkit.remoting.server._SWEEP_SECONDS", 0.01)

    async with Peers(idle_ms_max=50) as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        frame = b"".join(encode_command(request(ECHO, body=bytes(100_000))))
        closed = asyncio.ensure_future(reader.read())
        sent = 0
        while not closed.done() and sent < 10_000:
            writer.write(frame[sent : sent + 1])
            sent += 1
            await asyncio.wait([closed], timeout=0.005)
        assert sent < 10_000
        writer.close()


def test_a_large_frame_in_small_pieces_is_joined_once():
    splitter = FrameSplitter()
    frame = b"".join(encode_command(request(ECHO, body=bytes(8 << 20))))
    frames = [f for at in range(0, len(frame), 1024) for f in splitter.feed(frame[at : at + 1024])]
    assert [len(f.body) for f in frames] == [8 << 20]
    assert splitter.buffered_bytes == 0


async def test_requests_of_one_read_are_handled_together():
    seen = []

    @contextlib.contextmanager
    def batch():
        seen.append("begin")
        yield
        seen.append("end")

    def handler(connection, command):
        seen.append(command.opaque)
        return reply(command)

    class Transport(asyncio.Transport):
        def is_closing(self):
            return False

        def set_write_buffer_limits(self, high=None, low=None):
            pass

        def write(self, data):
            seen.append("written")

        def writelines(self, pieces):
            seen.append("written")

    dispatch = Router()
    dispatch.batch = batch
    dispatch.register(7, handler)
    connection = Connection(dispatch)
    connection.connection_made(Transport())
    frames = [b"".join(encode_command(Command(7, opaque))) for opaque in (1, 2, 3)]
    connection.data_received(b"".join(frames[:2]) + frames[2][:9])
    connection.data_received(frames[2][9:])
    one_way = Command(7, 4, flag=2)
    connection.data_received(b"".join(encode_command(one_way)))
    assert seen == ["begin", 1, 2, "end", "written", 3, "written", 4]


class Written(asyncio.Transport):
    """Keeps what is written."""

    data = b""

    def is_closing(self):
        return False

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.data += data

    def writelines(self, pieces):
        self.data += b"".join(pieces)


async def test_what_the_dispatch_answers_at_once_is_not_handled():
    seen = []

    def rest(connection, frames):
        for frame in frames:
            command = decode_command(frame)
            if command.code == 8:
                connection.send_frame(b"at once")
            else:
                seen.append(f"given {command.code}")
                yield frame

    dispatch = Router()
    dispatch.fast_path = rest
    dispatch.register(7, lambda connection, command: seen.append(f"handled {command.code}"))
    transport = Written()
    connection = Connection(dispatch)
    connection.connection_made(transport)
    connection.data_received(b"".join(b"".join(encode_command(Command(code, code))) for code in (8, 7, 8, 7)))
    assert transport.data == b"at onceat once"
    assert seen == ["given 7", "handled 7", "given 7", "handled 7"]


def test_requests_that_have_to_be_looked_at_are_not_answered_at_once():
    def rest(connection, frames):
        raise AssertionError

    refusing, leaving = Router(lambda connection, command: "no"), Router()
    leaving.go_away()
    for dispatch in (refusing, leaving):
        dispatch.fast_path = rest
        assert dispatch.remaining(None, []) == []
    plain = Router()
    plain.fast_path = lambda connection, frames: ()
    alone, with_body = Frame(JSON, b"{}", b""), Frame(JSON, b"{}", b"body")
    asked = [list(plain.remaining(None, frames)) for frames in ([alone], [with_body], [alone, alone])]
    assert asked == [[alone], [], []]


async def test_what_is_gathered_is_written_by_the_flush():
    transport, connection = Written(), Connection(Router())
    connection.connection_made(transport)
    connection.cork()
    connection.send_frame(b"a")
    connection.send_frame(b"b")
    await asyncio.sleep(0)
    assert transport.data == b""
    connection.flush()
    assert transport.data == b"ab"
    connection.send_frame(b"c")
    await asyncio.sleep(0)
    assert transport.data == b"abc"
