"""The ports that tests choose: no two processes get the same port."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.ports import BLOCK, HOST, free_port, free_ports, silent_port

ASK = "from tests.ports import free_port; print(*(free_port() for _ in range(1000)))"


def test_another_process_gets_none_of_them():
    ours = {free_port() for _ in range(BLOCK)}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    theirs = {int(port) for port in done.stdout.split()}
    assert len(theirs) > BLOCK / 2
    assert ours.isdisjoint(theirs)
    assert {port // BLOCK for port in ours}.isdisjoint(port // BLOCK for port in theirs), (
        "the two processes use different blocks"
    )


def test_a_port_is_used_again_after_all_others_and_one_in_use_does_not():
    with socket.create_server((HOST, free_port())) as server:
        in_turn = [free_port() for _ in range(BLOCK // 2)]
        assert len(set(in_turn)) == len(in_turn)
        assert server.getsockname()[1] not in {free_port() for _ in range(BLOCK)}


def test_those_beside_a_port_come_to_nobody_else():
    broker = free_port(-2, 1)
    assert {free_port() for _ in range(BLOCK // 2)}.isdisjoint({broker - 2, broker - 1, broker, broker + 1})
    name_server, broker, ha = free_ports()
    assert len({name_server, broker - 2, broker, broker + 1, ha}) == 5


def test_at_a_silent_port_connections_are_refused():
    with silent_port() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port))
