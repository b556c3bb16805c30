"""Reading of a connection, its activity, and the text of its end. No sockets are used."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rmqkit.errors import ConnectionLost
from rmqkit.protocol.command import Command, encode_command
from rmqkit.remoting.connection import Connection
from rmqkit.remoting.limits import ConnectionSettings, Limits
from rmqkit.remoting.router import Router
from rmqkit.settings import setting_table
from rmqkit.testing.clock import StandingClock
from tests.remoting.wire import opened

# -- reading


async def test_a_connection_reads_on_when_its_peer_has_read_its_answers() -> None:
    connection, wire = opened()
    connection.pause_writing()
    assert wire.reading == [False]
    connection.resume_writing()
    assert wire.reading == [False, True]


@pytest.mark.parametrize("goes_on_first", [True, False])
async def test_a_held_connection_of_a_slow_peer_waits_for_both(goes_on_first: bool) -> None:
    connection, wire = opened()
    connection.hold()
    connection.pause_writing()
    assert wire.reading == [False, False]
    for step in ("go on", "read") if goes_on_first else ("read", "go on"):
        assert True not in wire.reading
        if step == "read":
            connection.resume_writing()
        else:
            connection.go_on()
            await asyncio.sleep(0)
    assert wire.reading == [False, False, True]


async def test_a_connection_that_always_reads_does_not_wait_for_its_peer() -> None:
    connection, wire = opened(always_reads=True)
    connection.pause_writing()
    assert wire.reading == []
    connection.hold()
    connection.go_on()
    await asyncio.sleep(0)
    assert wire.reading == [False, True]


async def test_a_closing_connection_neither_pauses_nor_reads_on() -> None:
    connection, wire = opened()
    wire.is_closed = True
    connection.pause_writing()
    connection.resume_writing()
    assert wire.reading == []


async def test_requests_that_arrive_while_a_request_holds_the_connection_are_handled_in_their_order() -> None:
    handled: list[int] = []

    def handle(connection: Connection, command: Command) -> None:
        handled.append(command.opaque)
        if command.opaque in (2, 4):
            connection.hold()

    router = Router()
    router.register(7, handle)
    connection, _ = opened(router)
    frames = [b"".join(encode_command(Command(7, opaque))) for opaque in range(1, 7)]
    connection.data_received(b"".join(frames[:3]))
    connection.data_received(b"".join(frames[3:]))
    for expected in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        assert handled == expected
        if len(handled) < 6:
            connection.go_on()
            await asyncio.sleep(0)


# -- activity


async def test_a_read_and_a_write_are_activity_and_a_flush_of_nothing_is_none() -> None:
    clock = StandingClock()
    connection, wire = opened(clock=clock)
    began_ms = connection.active_ms
    clock.ms += 10
    connection.flush()
    assert connection.active_ms == began_ms
    connection.send_frame(b"a")
    connection.flush()
    assert (connection.active_ms, wire.data) == (began_ms + 10, b"a")
    clock.ms += 10
    connection.data_received(b"\0")
    assert connection.active_ms == connection.heard_ms == connection.frame_since_ms == began_ms + 20


async def test_the_age_of_an_incomplete_frame_counts_from_its_first_bytes() -> None:
    clock, router = StandingClock(), Router()
    router.register(7, lambda connection, command: None)
    connection, _ = opened(router, clock=clock)
    frame = b"".join(encode_command(Command(7, 1)))
    began_ms = connection.active_ms
    connection.data_received(frame[:5])
    clock.ms += 10
    connection.data_received(frame[5:9])
    assert connection.frame_since_ms == began_ms, "more of the same frame does not make it younger"
    connection.data_received(frame[9:] + frame[:3])
    assert connection.frame_since_ms == began_ms + 10
    connection.data_received(frame[3:])
    assert connection.frame_since_ms is None


@pytest.mark.parametrize(("buffered", "noted"), [(4095, 0), (4096, 4096), (5000, 5000)])
async def test_unread_answers_are_reported_from_4_kib_on(buffered: int, noted: int) -> None:
    limits = Limits()
    connection, wire = opened(limits=limits)
    wire.buffered = buffered
    connection.send_frame(b"a")
    connection.flush()
    assert (limits.unsent_bytes, connection.unsent_bytes) == (noted, buffered)
    wire.buffered = 1
    connection.send_frame(b"b")
    connection.flush()
    assert limits.unsent_bytes == 0


# -- closing


async def test_a_bad_request_behind_a_held_one_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    router = Router()
    router.register(7, lambda connection, command: connection.hold())
    connection, wire = opened(router)
    good = b"".join(encode_command(Command(7, 1)))
    connection.data_received(good + good[:8] + b"x" * (len(good) - 8))
    assert not wire.is_closed
    connection.go_on()
    await asyncio.sleep(0)
    assert wire.is_closed
    assert "closing connection of ?: " in caplog.text


@pytest.mark.parametrize(("reason", "lines"), [("", 0), ("the broker stops", 1)])
async def test_a_close_writes_what_is_queued_and_logs_its_reason(
    reason: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    connection, wire = opened()
    connection.send_frame(b"a")
    connection.close(reason)
    connection.close("a second reason")
    assert (wire.data, wire.is_closed) == (b"a", True)
    assert [record.message for record in caplog.records] == [f"closing connection of ?: {reason}"] * lines
    with pytest.raises(ConnectionLost, match=reason or "it was closed here"):
        await connection.call(Command(7, 0), 1000)


# -- limits of a server


async def test_refused_connections_are_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(ConnectionSettings(connections_max=16))
    for _ in range(16 + 9):
        limits.opened(opened()[0], None)
    counts = [record.message.rpartition(": ")[2] for record in caplog.records]
    assert counts == ["1", "2", "4", "8"]


def test_limits_can_be_changed_while_a_server_runs_but_not_below_what_a_few_clients_need() -> None:
    settings = {key: one[2] for key, one in setting_table(ConnectionSettings).items() if key.startswith("max")}
    assert {key: (one.hot, one.low) for key, one in settings.items()} == {
        "maxConnections": (True, 16),
        "maxConnectionsPerAddress": (True, 16),
        "maxIncompleteFrameBytes": (True, 32 << 20),
        "maxUnsentBytes": (True, 32 << 20),
    }


def test_a_server_without_settings_has_the_documented_limits() -> None:
    settings = ConnectionSettings()
    assert (settings.connections_max, settings.connections_per_address_max) == (65_536, 16_384)
    assert (settings.incomplete_bytes_max, settings.unsent_bytes_max) == (536_870_912, 536_870_912)
