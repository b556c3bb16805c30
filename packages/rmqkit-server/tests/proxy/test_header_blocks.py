"""HPACK: the examples of RFC 7541, appendix C, and the same as the library's decoder for any bytes; in plain Python
and by the compiled core."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.core import CORE
from rmqkit.proxy.transport.header_blocks import HeaderBlockError, HeaderDecoder, header_block
from rmqkit.proxy.transport.plain_header_blocks import PlainHeaderBlocks
from tests.examples import examples

FIRST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
SECOND = [*FIRST, (b"cache-control", b"no-cache")]
THIRD = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
]
PLAIN = [
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
]
HUFFMAN = [
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
]


def plain(list_bytes_max):
    return HeaderDecoder(PlainHeaderBlocks(list_bytes_max))


def compiled(list_bytes_max):
    return HeaderDecoder(CORE.header_decoder(list_bytes_max))


@pytest.fixture(scope="module", params=["plain", "compiled"])
def decoder_of(request):
    """Return a function that creates a decoder."""
    if request.param == "compiled" and CORE.fault:
        pytest.skip(CORE.fault)
    return plain if request.param == "plain" else compiled


@pytest.mark.parametrize("blocks", [PLAIN, HUFFMAN], ids=["C.3", "C.4"])
def test_requests_of_one_connection(decoder_of, blocks):
    decoder = decoder_of(16_384)
    assert [decoder.decode(bytes.fromhex(block)) for block in blocks] == [FIRST, SECOND, THIRD]


@pytest.mark.parametrize(
    ("block", "headers"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")]),  # C.2.1
        ("040c2f73616d706c652f70617468", [(b":path", b"/sample/path")]),  # C.2.2
        ("100870617373776f726406736563726574", [(b"password", b"secret")]),  # C.2.3
        ("82", [(b":method", b"GET")]),  # C.2.4
        ("", []),
    ],
)
def test_single_headers(decoder_of, block, headers):
    assert decoder_of(16_384).decode(bytes.fromhex(block)) == headers


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("80", "no entry 0"),
        ("be", "no entry 62"),
        ("ff8080808080808080", "does not end, or is too large"),
        ("7f80", "does not end"),
        ("40", "ends within a header"),
        ("4005616263", "ends within a string"),
        ("400161", "ends within a header"),
        ("4082ffff0161", "a string cannot be read"),
        ("3fe21f", "a table of 4097 bytes is wanted; it has 4096"),
        ("8220", "the size of the table changes within"),
    ],
)
def test_what_is_no_header_block(decoder_of, block, text):
    with pytest.raises(HeaderBlockError, match=text) as caught:
        decoder_of(16_384).decode(bytes.fromhex(block))
    assert not caught.value.is_too_large


def test_few_bytes_that_mean_many_are_refused(decoder_of):
    decoder = decoder_of(16_384)
    decoder.decode(b"\x40\x01a" + b"\x7f\xa1\x1e" + b"b" * 4000)
    with pytest.raises(HeaderBlockError, match="more than 16384 bytes") as caught:
        decoder.decode(b"\xbe" * 5)
    assert caught.value.is_too_large


TEXTS = st.binary(max_size=40) | st.binary(min_size=120, max_size=300)


@examples(100)
@given(st.lists(st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), max_size=6), max_size=6), st.booleans())
def test_what_the_library_writes_is_read(decoder_of, lists, huffman):
    encoder, decoder = hpack.Encoder(), decoder_of(1 << 20)
    for number, headers in enumerate(lists):
        if number == 3:
            encoder.header_table_size = 100
        block = encoder.encode([(name.lower(), value, is_secret) for name, value, is_secret in headers], huffman)
        assert decoder.decode(block) == [(name.lower(), value) for name, value, _ in headers]


@examples(250)
@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_read_as_the_library_reads_them(decoder_of, blocks):
    library, decoder = hpack.Decoder(max_header_list_size=16_384), decoder_of(16_384)
    for block in blocks:
        try:
            wanted = [tuple(header) for header in library.decode(block, raw=True)]
        except hpack.HPACKError:
            wanted = None
        try:
            found = decoder.decode(block)
        except HeaderBlockError:
            return  # the connection ends
        assert wanted is not None, f"{block.hex()} is no header block"
        assert found == wanted


def outcome(decoder, block):
    try:
        return decoder.decode(block)
    except HeaderBlockError as error:
        return error.is_too_large


PARTS = st.binary(max_size=12) | st.sampled_from(
    [bytes.fromhex(one) for one in (*PLAIN, *HUFFMAN, "3f00", "20", "3fe11f")]
)


@examples(200)
@given(st.lists(st.lists(PARTS, max_size=3).map(b"".join), max_size=4))
@pytest.mark.skipif(bool(CORE.fault), reason=CORE.fault)
def test_the_core_reads_any_bytes_as_plain_python_does(blocks):
    by_plain, by_core = plain(300), compiled(300)
    for block in blocks:
        wanted = outcome(by_plain, block)
        assert outcome(by_core, block) == wanted
        if isinstance(wanted, bool):
            return  # the connection ends


@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=6))
def test_what_is_written_is_read(headers):
    assert [tuple(one) for one in hpack.Decoder(1 << 20).decode(header_block(headers), raw=True)] == headers
