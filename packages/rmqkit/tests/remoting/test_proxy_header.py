"""PROXY preambles, v1 and v2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import FrameError
from rmqkit.remoting.sniffer import ProxyHeader, parse_proxy_header

V1 = b"PROXY TCP4 192.0.2.7 198.51.100.1 56324 10911\r\n"
V1_V6 = b"PROXY TCP6 2001:db8::7 2001:db8::1 56324 10911\r\n"
SIGNATURE = bytes.fromhex("0d0a0d0a000d0a515549540a")
V2 = SIGNATURE + bytes.fromhex("2111000c c0000207 c6336401 dc04 2a9f")
V2_WITH_EXTENSION = SIGNATURE + bytes.fromhex("21110012 c0000207 c6336401 dc04 2a9f 04 0003 616263")
V2_V6 = SIGNATURE + bytes.fromhex(
    "2121 0024 20010db8000000000000000000000007 20010db8000000000000000000000001 dc04 2a9f"
)
V2_LOCAL = SIGNATURE + bytes.fromhex("2000 0000")


@pytest.mark.parametrize(
    ("preamble", "source"),
    [
        (V1, ("192.0.2.7", 56324)),
        (V1_V6, ("2001:db8::7", 56324)),
        (b"PROXY UNKNOWN\r\n", None),
        (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", None),
        (V2, ("192.0.2.7", 56324)),
        (V2_WITH_EXTENSION, ("192.0.2.7", 56324)),
        (V2_V6, ("2001:db8::7", 56324)),
        (V2_LOCAL, None),
    ],
)
def test_preambles_name_the_source_and_may_come_in_pieces(preamble, source):
    assert parse_proxy_header(preamble) == ProxyHeader(len(preamble), source)
    assert parse_proxy_header(preamble + b"rest") == ProxyHeader(len(preamble), source)
    for length in range(1, len(preamble)):
        assert parse_proxy_header(preamble[:length]) is None


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x10", b"\x16\x03\x01", b"PROXX", b"\r\n\r\nx"])
def test_other_streams_have_none(data):
    assert parse_proxy_header(data) == ProxyHeader(0, None)


@pytest.mark.parametrize(
    "data",
    [
        b"PROXY TCP4 nowhere 198.51.100.1 1 2\r\n",
        b"PROXY TCP6 192.0.2.7 198.51.100.1 1 2\r\n",
        b"PROXY TCP4 192.0.2.7 198.51.100.1 99999 2\r\n",
        b"PROXY TCP4\r\n",
        b"PROXY \r\n",
        b"PROXY TCP4 \xff 1 2 3\r\n",
        b"PROXY " + b"x" * 200,
        SIGNATURE + bytes.fromhex("3111000c") + bytes(12),
        SIGNATURE + bytes.fromhex("21110004") + bytes(4),
    ],
)
def test_damaged_preambles_are_frame_errors(data):
    with pytest.raises(FrameError, match="PROXY header"):
        parse_proxy_header(data)


@given(st.binary(max_size=60), st.sampled_from([b"", b"PROXY ", SIGNATURE, V1[:20], V2[:14]]))
def test_any_bytes_are_a_preamble_none_or_a_frame_error(noise, start):
    try:
        parse_proxy_header(start + noise)
    except FrameError as error:
        assert str(error)
