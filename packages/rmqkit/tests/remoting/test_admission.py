"""The setting of the addresses that may change a server: its text, and the addresses that it allows."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from rmqkit.errors import SettingsError
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.remoting.address import AdminAddresses
from rmqkit.settings import load, to_properties


@pytest.mark.parametrize(
    ("text", "hops", "included"),
    [
        ("loopback", ["127.0.0.1"], True),
        ("loopback", ["127.8.9.1"], True),
        ("loopback", ["::1"], True),
        ("loopback", ["10.0.0.1"], False),
        ("loopback", ["127.0.0.1", "10.0.0.1"], False),  # a local balancer speaks for somebody else
        ("loopback", ["10.0.0.1", "127.0.0.1"], False),  # somebody says that it speaks for us
        ("loopback", [], False),
        ("any", ["192.0.2.1"], True),
        ("any", ["2001:db8::1", "192.0.2.1"], True),
        ("none", ["127.0.0.1"], False),
        ("10.1.2.3", ["10.1.2.3"], True),
        ("10.1.2.3", ["127.0.0.1"], False),
        ("Loopback, 10.1.2.3/16;2001:db8::/32", ["127.0.0.1", "10.1.9.9", "2001:db8::7"], True),
        ("Loopback, 10.1.2.3/16;2001:db8::/32", ["10.2.0.1"], False),
    ],
)
def test_every_hop_must_be_one_of_the_addresses(text, hops, included):
    assert AdminAddresses(text).include([ip_address(hop) for hop in hops]) is included


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "must contain loopback, any, or addresses and networks such as 10.1.0.0/16"),
        (" , ", "must contain loopback, any, or addresses and networks such as 10.1.0.0/16"),
        ("localhost", "localhost is neither loopback, any, an address nor a network such as 10.1.0.0/16"),
        ("loopback,10.1.0.0/33", "10.1.0.0/33 is neither loopback, any, an address nor a network such as 10.1.0.0/16"),
    ],
)
def test_a_text_that_names_nothing_stops_the_start(text, fault):
    with pytest.raises(SettingsError) as raised:
        load([NamesrvSettings], {"adminAllowedAddresses": text}, source="namesrv.conf")
    assert str(raised.value) == f"namesrv.conf: adminAllowedAddresses={text}: {fault}"


def test_the_setting_is_shown_as_it_was_written():
    (settings,) = load([NamesrvSettings], {"adminAllowedAddresses": "loopback,10.1.0.0/16"}, source="x").values
    assert to_properties(settings)["adminAllowedAddresses"] == "loopback,10.1.0.0/16"
