"""Header blocks of HTTP/2: what is read of them, and as much of HPACK as our answers need. Source: RFC 7541."""

from __future__ import annotations

from collections.abc import Sequence

from rmqkit.errors import RmqError

__all__ = ["HeaderBlockError", "Headers", "header_block"]

Headers = list[tuple[bytes, bytes]]


class HeaderBlockError(RmqError):
    """A header block cannot be read; what follows on its connection cannot be either.

    Attributes:
        is_too_large: it can be read, and has more than is taken.
    """

    def __init__(self, text: str, *, is_too_large: bool = False) -> None:
        super().__init__(text)
        self.is_too_large = is_too_large


def header_block(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A header block that no table is needed for: each header as a literal that is not indexed (RFC 7541 §6.2.2)."""
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
