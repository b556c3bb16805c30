"""Whose administrative requests are taken."""

from __future__ import annotations

import pytest

from rmqkit.errors import SettingsError
from rmqkit.namesrv.admission import AdminPeers


@pytest.mark.parametrize(
    ("allowed", "peer", "is_admitted"),
    [
        ("loopback", "127.0.0.1:4000", True),
        ("loopback", "127.8.9.10:4000", True),
        ("loopback", "[::1]:4000", True),
        ("loopback", "10.1.2.3:4000", False),
        ("loopback", "[2001:db8::1]:4000", False),
        ("loopback", "?", False),
        ("any", "10.1.2.3:4000", True),
        ("any", "[2001:db8::1]:4000", True),
        ("any", "?", False),
        ("10.1.0.0/16; 10.2.0.7 ;", "10.1.255.1:1", True),
        ("10.1.0.0/16; 10.2.0.7 ;", "10.2.0.7:1", True),
        ("10.1.0.0/16; 10.2.0.7 ;", "10.2.0.8:1", False),
        ("10.1.0.0/16", "127.0.0.1:1", False),
        ("", "127.0.0.1:1", False),
    ],
)
def test_a_peer_is_admitted_by_its_network(allowed, peer, is_admitted):
    assert AdminPeers(allowed).admits(peer) is is_admitted


@pytest.mark.parametrize("allowed", ["everybody", "10.0.0.1/8", "10.0.0.0/33"])
def test_what_is_no_network_is_an_error(allowed):
    with pytest.raises(SettingsError, match=f"adminFrom={allowed}: .*; write loopback, any or networks such as"):
        AdminPeers(allowed)
