"""The start of a connection, the names of its peer, its writes and its takeover. No sockets are used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from rmqkit.clock import SYSTEM_CLOCK
from rmqkit.protocol.command import Command, encode_command, reply
from rmqkit.protocol.core import CoreFault
from rmqkit.protocol.record import pack_host
from rmqkit.remoting.connection import Connection, Link
from rmqkit.remoting.limits import Limits
from rmqkit.remoting.router import Router
from rmqkit.remoting.sniffer import ProtocolSniffer
from rmqkit.testing.clock import StandingClock
from tests.remoting.wire import Wire, opened

MIB = 1 << 20


def frame(opaque: int, code: int = 7) -> bytes:
    return b"".join(encode_command(Command(code, opaque)))


def echo_router() -> tuple[Router, list[int]]:
    handled: list[int] = []
    router = Router()

    def handle(connection: Connection, command: Command) -> Command:
        handled.append(command.opaque)
        return reply(command)

    router.register(7, handle)
    return router, handled


# -- names of the peer


@pytest.mark.parametrize(
    ("peername", "peer", "packed", "addresses"),
    [
        (("10.0.0.9", 5), "10.0.0.9:5", b"\x0a\0\0\x09\0\0\0\x05", ("10.0.0.9",)),
        (("::ffff:10.0.0.9", 5, 0, 0), "10.0.0.9:5", b"\x0a\0\0\x09\0\0\0\x05", ("10.0.0.9",)),
        (("2001:db8::1", 5, 0, 0), "[2001:db8::1]:5", pack_host("2001:db8::1", 5), ("2001:db8::1",)),
        (("fe80::1%eth0", 5, 0, 2), "[fe80::1]:5", pack_host("fe80::1", 5), ("fe80::1",)),
        ("/run/rmq.sock", "/run/rmq.sock", bytes(8), ()),
        ("", "?", bytes(8), ()),
        (None, "?", bytes(8), ()),
    ],
)
async def test_the_peer_has_the_name_of_its_address(
    peername: object, peer: str, packed: bytes, addresses: tuple[str, ...]
) -> None:
    connection, _ = opened(wire=Wire(peername))
    assert (connection.peer, connection.peer_host, connection.addresses) == (peer, packed, addresses)
    assert tuple(map(str, connection.hops)) == addresses


@pytest.mark.parametrize(
    ("sockname", "host"),
    [(("10.0.0.1", 10911), "10.0.0.1"), (("::1", 5, 0, 0), "::1"), ("/run/rmq.sock", ""), (None, "")],
)
async def test_the_own_host_is_the_address_that_the_peer_reached(sockname: object, host: str) -> None:
    connection, _ = opened(wire=Wire(sockname=sockname))
    assert connection.own_host == host
    connection.connection_lost(None)
    assert connection.own_host == ""


@pytest.mark.parametrize(
    ("is_believed", "peer", "addresses"),
    [(True, "192.0.2.7:56324", ("192.0.2.7", "10.0.0.1")), (False, "10.0.0.1:9", ("10.0.0.1",))],
)
async def test_a_balancer_names_the_peer_only_if_its_address_is_believed(
    is_believed: bool, peer: str, addresses: tuple[str, ...]
) -> None:
    asked: list[list[str]] = []

    def believes(hops: Any) -> bool:
        asked.append(list(map(str, hops)))
        return is_believed

    router, handled = echo_router()
    sniffer = ProtocolSniffer(None, accepts_proxy=True, believes=believes)
    connection, _ = opened(router, Wire(("10.0.0.1", 9)), sniffer=sniffer)
    preamble = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 10911\r\n"
    connection.data_received(preamble[:9])
    connection.data_received(preamble[9:] + frame(1))
    assert (connection.peer, connection.addresses) == (peer, addresses)
    assert (asked, handled) == ([["10.0.0.1"]], [1])


# -- the first bytes


@pytest.mark.parametrize(
    ("is_server", "header_bytes", "is_closed"),
    [
        (True, (256 << 10) - 1, False),
        (True, 256 << 10, True),
        (False, 256 << 10, False),
        (False, 1 << 20, False),
    ],
)
async def test_a_server_refuses_headers_from_256_kib_on_and_a_client_reads_them(
    is_server: bool, header_bytes: int, is_closed: bool
) -> None:
    sniffer = ProtocolSniffer(None, accepts_proxy=False) if is_server else None
    connection, wire = opened(sniffer=sniffer)
    connection.data_received((4 + header_bytes).to_bytes(4) + header_bytes.to_bytes(4))
    assert wire.is_closed is is_closed


async def test_a_connection_that_begins_like_http_2_is_taken_over_with_the_data_read() -> None:
    taken: list[tuple[Connection, bytes]] = []
    router, handled = echo_router()
    sniffer = ProtocolSniffer(None, accepts_proxy=False)
    connection, wire = opened(router, sniffer=sniffer, upgrade=lambda *one: taken.append(one))
    connection.data_received(b"")
    assert taken == []
    connection.data_received(b"PRI")
    assert taken == [(connection, b"PRI")]
    assert (handled, wire.is_closed) == ([], False)


async def test_only_the_first_byte_of_a_connection_identifies_its_protocol() -> None:
    taken: list[bytes] = []
    router, handled = echo_router()
    connection, _ = opened(router, upgrade=lambda _, data: taken.append(data))
    cut_at = frame(1).index(b"P")  # the language of a request is PYTHON
    connection.data_received(frame(1)[:cut_at])
    connection.data_received(frame(1)[cut_at:])
    assert (taken, handled) == ([], [1])


async def test_a_port_without_http_2_closes_a_connection_that_begins_like_it() -> None:
    connection, wire = opened()
    connection.data_received(b"PRI * HTTP/2.0\r\n")
    assert wire.is_closed


class Other(Link):
    """A protocol that takes over a connection."""


async def test_a_connection_that_is_handed_over_keeps_its_names_and_closes_for_its_first_owner_only() -> None:
    closed: list[Link] = []
    begun: list[Link] = []
    other = Other(clock=SYSTEM_CLOCK, on_open=begun.append, on_close=closed.append)
    connection, wire = opened(wire=Wire(("10.0.0.9", 5)), on_close=closed.append)
    wire.names["peername"] = ("10.0.0.1", 1)  # the balancer's address
    connection.hand_over(other)
    assert (wire.protocol, begun, closed) == (other, [other], [connection])
    assert (other.peer, other.peer_host, other.addresses) == ("10.0.0.9:5", pack_host("10.0.0.9", 5), ("10.0.0.9",))
    assert list(map(str, other.hops)) == ["10.0.0.9"]
    assert (connection.is_open, other.is_open, wire.is_closed) == (False, True, False)
    assert (connection.closed.done(), other.closed.done()) == (True, False)
    other.connection_lost(None)
    assert closed == [connection, other]


async def test_a_connection_is_not_handed_over_after_an_answer_or_its_end() -> None:
    connection, _ = opened()
    connection.send_frame(b"a")
    with pytest.raises(AssertionError, match="nothing was sent before the protocol is known"):
        connection.hand_over(Other(clock=SYSTEM_CLOCK))
    connection.connection_lost(None)
    with pytest.raises(AssertionError, match="a connection that is handed over is open"):
        connection.hand_over(Other(clock=SYSTEM_CLOCK))


# -- writes


async def test_the_output_of_a_tick_is_written_once_at_its_end() -> None:
    connection, wire = opened()
    for piece in (b"a", b"b"):
        connection.send_frame(piece)
    connection.send_frame(b"c", b"d")
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.writes == [b"abcd"]
    connection.send(Command(7, 1))
    await asyncio.sleep(0)
    assert wire.writes == [b"abcd", frame(1)]


async def test_the_answers_to_one_read_are_written_once_before_the_read_returns() -> None:
    router, _ = echo_router()
    connection, wire = opened(router)
    connection.data_received(frame(1) + frame(2) + frame(3))
    assert len(wire.writes) == 1
    await asyncio.sleep(0)
    assert len(wire.writes) == 1


async def test_after_a_read_without_an_answer_a_later_answer_is_written() -> None:
    connection, wire = opened()
    connection.data_received(frame(1)[:5])
    connection.send_frame(b"a")
    await asyncio.sleep(0)
    assert wire.writes == [b"a"]


@pytest.mark.parametrize("is_gone", [True, False])
async def test_a_closed_connection_writes_nothing(is_gone: bool) -> None:
    connection, wire = opened()
    if is_gone:
        connection.connection_lost(None)
    else:
        wire.is_closed = True
    connection.send(Command(7, 1))
    connection.send_frame(b"a")
    connection.send_successes([1])
    await asyncio.sleep(0)
    connection.flush()
    assert wire.writes == []


async def test_a_connection_drops_unwritten_answers_when_it_is_lost() -> None:
    connection, wire = opened()
    connection.send_frame(b"a")
    connection.connection_lost(None)
    connection.close()
    connection.abort()
    await asyncio.sleep(0)
    assert (wire.writes, wire.is_closed, connection.closed.done()) == ([], False, True)


@pytest.mark.parametrize(("buffered", "is_writable"), [(0, True), (4 * MIB - 1, True), (4 * MIB, False)])
async def test_a_peer_that_has_4_mib_to_read_is_too_slow(buffered: int, is_writable: bool) -> None:
    connection, wire = opened()
    wire.buffered = buffered
    assert (connection.is_writable, connection.unsent_bytes) == (is_writable, buffered)
    wire.is_closed = True
    assert not connection.is_writable
    connection.connection_lost(None)
    assert (connection.is_writable, connection.unsent_bytes, connection.is_open) == (False, 0, False)


async def test_a_peer_without_unread_answers_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write of most connections leaves nothing to report."""
    noted: list[int] = []
    limits = Limits()
    monkeypatch.setattr(limits, "note_waiting", lambda _, unsent_bytes: noted.append(unsent_bytes))
    connection, wire = opened(limits=limits)
    for buffered in (0, 4095, 4096, 5000, 4095, 0):
        wire.buffered = buffered
        connection.send_frame(b"a")
        connection.flush()
    assert noted == [4096, 5000, 0]


# -- requests of one read


async def test_requests_of_one_read_share_a_batch_and_a_single_request_has_none() -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def batch() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    router = Router()
    router.batch = batch
    router.register(7, lambda connection, command: seen.append(command.opaque))
    connection, _ = opened(router)
    connection.data_received(frame(1))
    connection.data_received(frame(2) + frame(3))
    assert seen == [1, "begin", 2, 3, "end"]
    router.fast_path = lambda connection, frames: iter(())
    connection.data_received(frame(4) + frame(5))
    assert seen == [1, "begin", 2, 3, "end"], "no batch is opened if the fast path has handled all"


async def test_a_request_that_holds_the_connection_in_a_batch_stops_the_others() -> None:
    seen: list[int] = []

    def handle(connection: Connection, command: Command) -> None:
        seen.append(command.opaque)
        if command.opaque == 1:
            connection.hold()

    router = Router()
    router.batch = contextlib.nullcontext
    router.register(7, handle)
    connection, _ = opened(router)
    connection.data_received(frame(1) + frame(2))
    assert seen == [1]
    connection.go_on()
    assert seen == [1], "the caller may be sending other replies"
    await asyncio.sleep(0)
    assert seen == [1, 2]


async def test_a_connection_that_is_lost_while_it_is_held_handles_nothing_more() -> None:
    router, handled = echo_router()
    connection, wire = opened(router)
    connection.hold()
    connection.data_received(frame(1))
    connection.connection_lost(None)
    connection.go_on()
    await asyncio.sleep(0)
    assert (handled, wire.writes, wire.reading) == ([], [], [False])


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_fault_of_the_compiled_core_closes_the_connection_at_once(
    is_held: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(connection: Connection, units: Any) -> Any:
        raise CoreFault("boom")

    router = Router()
    router.fast_path = fail
    connection, wire = opened(router)
    if is_held:
        connection.hold()
    connection.data_received(frame(1) + frame(2))
    if is_held:
        assert not wire.is_closed
        connection.go_on()
        await asyncio.sleep(0)
    assert wire.is_aborted
    assert caplog.messages == ["closing connection of ?: a fault of the compiled core: boom"]


async def test_the_answers_to_requests_that_waited_are_written_once() -> None:
    router, handled = echo_router()
    connection, wire = opened(router)
    connection.hold()
    connection.data_received(frame(1))
    connection.data_received(frame(2))
    connection.go_on()
    await asyncio.sleep(0)
    assert (handled, len(wire.writes)) == ([1, 2], 1)
    connection.send_frame(b"later")
    await asyncio.sleep(0)
    assert wire.writes[1:] == [b"later"]


async def test_only_one_request_at_a_time_holds_a_connection() -> None:
    connection, _ = opened()
    with pytest.raises(AssertionError, match="the connection is held"):
        connection.go_on()
    connection.hold()
    with pytest.raises(AssertionError, match="only one request at a time holds the connection"):
        connection.hold()


# -- limits


async def test_the_limits_are_notified_of_each_change_of_an_incomplete_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, bool]] = []
    limits = Limits()
    monkeypatch.setattr(limits, "note_incomplete", lambda _, size, *, is_new: noted.append((size, is_new)))
    router, _ = echo_router()
    connection, _ = opened(router, limits=limits)
    one = frame(1)
    connection.data_received(one)
    assert noted == [], "a read of whole frames changes nothing"
    for data in (one[:5], one[5:9], one[9:] + one[:3], one[3:]):
        connection.data_received(data)
    assert noted == [(5, True), (9, False), (3, True), (0, True)]


async def test_a_connection_that_is_cut_logs_the_reason_and_fails_later_calls_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connection, wire = opened(wire=Wire(("10.0.0.9", 5)))
    connection.cut("it took too much")
    assert wire.is_aborted
    assert caplog.messages == ["closing connection of 10.0.0.9:5: it took too much"]
    answer = connection.call(Command(7, 0), 1000)
    assert str(answer.exception()).count("it took too much") == 1


async def test_a_server_logs_one_line_a_minute_for_all_connections_of_an_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits, clock = Limits(), StandingClock()

    def cut(address: str, port: int) -> None:
        opened(wire=Wire((address, port)), limits=limits, clock=clock)[0].cut("x")

    for address, port in [("10.0.0.9", 5), ("10.0.0.9", 6), ("10.0.0.8", 5)]:
        cut(address, port)
    clock.ms += 59_999
    cut("10.0.0.9", 7)
    clock.ms += 1
    cut("10.0.0.9", 8)
    assert caplog.messages == [
        "closing connection of 10.0.0.9:5: x",
        "closing connection of 10.0.0.8:5: x",
        "closing connection of 10.0.0.9:8: x (2 like it from 10.0.0.9 left out)",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
