"""Log lines that peers cause: one a minute for each address, and a bound on the addresses."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rmqkit.remoting import bounded_log
from rmqkit.remoting.bounded_log import BoundedLog
from tests.remoting.test_remoting import Peers


class Lines(logging.Logger):
    def __init__(self):
        super().__init__("lines")
        self.lines = []

    def _log(self, level, msg, args, **_):
        self.lines.append(msg % args)


@pytest.fixture
def log():
    return Lines()


def test_the_first_line_of_an_address_is_written_and_those_of_the_next_minute_are_counted(log):
    bounded = BoundedLog(log)
    for ms in (0, 1, 59_999):
        bounded.write(logging.ERROR, "a", "refused", ms)
    assert log.lines == ["refused"]
    bounded.write(logging.ERROR, "a", "refused again", 60_000)
    assert log.lines[1:] == ["refused again (2 like it from a left out)"]
    bounded.write(logging.ERROR, "a", "refused", 120_000)
    assert log.lines[2:] == ["refused"]


def test_one_address_does_not_silence_another(log):
    bounded = BoundedLog(log)
    for host in ("a", "b", "a", "b"):
        bounded.write(logging.ERROR, host, host, 0)
    assert log.lines == ["a", "b"]


def test_a_full_table_writes_one_line_a_minute_for_all_further_addresses(log, monkeypatch):
    monkeypatch.setattr(bounded_log, "_SOURCES_MAX", 3)
    bounded = BoundedLog(log)
    for host in "abcdef":
        bounded.write(logging.ERROR, host, host, 0)
    assert log.lines == ["a", "b", "c", "d"]
    bounded.write(logging.ERROR, "b", "b", 30_000)
    bounded.write(logging.ERROR, "g", "g", 60_000)
    assert log.lines[4:] == ["g"]
    assert list(bounded._written) == ["g"]


async def test_a_flood_of_broken_connections_writes_one_line(caplog):
    async with Peers() as peers:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.read() == b""
            writer.close()
    assert caplog.text.count("closing connection of 127.0.0.1:") == 1
