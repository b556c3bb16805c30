"""An HPACK decoder in plain Python, with the tables and the Huffman code of `hpack`.

`hpack`'s `Decoder` is not used, because it logs a debug line for each header. For the dozen headers of an SDK's
request, that decoder took 40 us, and this decoder takes 8. The module is imported only without a compiled core, because
the import of `hpack` is slow. Source: RFC 7541.
"""

from __future__ import annotations

from functools import lru_cache

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

__all__ = ["PlainHeaderBlocks"]

_STATIC = ((b"", b""), *HeaderTable.STATIC_TABLE)
_NUMBER_MAX = 1 << 20
_ENTRY_BYTES = 32
_decode_huffman = lru_cache(maxsize=1024)(decode_huffman)  # names and constant values repeat often


class PlainHeaderBlocks:
    """The decoder of the header blocks of one side of a connection, in their order.

    Args:
        list_bytes_max: limit for the headers of one block, each counted with 32 more bytes (RFC 9113 §6.5.2).
    """

    def __init__(self, list_bytes_max: int) -> None:
        self._list_bytes_max = list_bytes_max
        self._table = HeaderTable()

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the headers of a block. Raises ValueError, like the compiled core. The arguments of the error are a
        text, and True if the block is valid but has too many bytes of headers."""
        headers: list[tuple[bytes, bytes]] = []
        at, size, left, entries = 0, len(block), self._list_bytes_max, self._table.dynamic_entries
        while at < size:
            first = block[at]
            if first & 0x80:
                index = first & 0x7F
                at += 1
                if index == 0x7F:
                    index, at = _more_of_number(block, at, index)
                header = _STATIC[index] if 0 < index < len(_STATIC) else self._entry(index)
            elif first & 0x60 == 0x20:
                if headers:
                    raise ValueError("the size of the table changes within a header block", False)
                at = self._resize(block, at)
                continue
            else:
                mask = 0x3F if first & 0x40 else 0x0F
                index = first & mask
                at += 1
                if index == mask:
                    index, at = _more_of_number(block, at, index)
                if index:
                    name = (_STATIC[index] if index < len(_STATIC) else self._entry(index))[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                header = name, value
                if first & 0x40:
                    self._table.add(name, value)
                    entries = self._table.dynamic_entries
            left -= len(header[0]) + len(header[1]) + _ENTRY_BYTES
            if left < 0:
                raise ValueError(f"headers of more than {self._list_bytes_max} bytes", True)
            headers.append(header)
        assert len(entries) <= HeaderTable.DEFAULT_SIZE // _ENTRY_BYTES, "the table does not exceed its size"
        return headers

    def _entry(self, index: int) -> tuple[bytes, bytes]:
        at = index - len(_STATIC)
        entries = self._table.dynamic_entries
        if not 0 <= at < len(entries):
            raise ValueError(f"the table has no entry {index}", False)
        return entries[at]

    def _resize(self, block: bytes, at: int) -> int:
        size = block[at] & 0x1F
        at += 1
        if size == 0x1F:
            size, at = _more_of_number(block, at, size)
        if size > HeaderTable.DEFAULT_SIZE:
            raise ValueError(f"a table of {size} bytes is wanted; it has {HeaderTable.DEFAULT_SIZE}", False)
        self._table.maxsize = size
        return at


def _more_of_number(block: bytes, at: int, number: int) -> tuple[int, int]:
    """Return a number that does not fit into its first byte, and the position after it (RFC 7541 §5.1)."""
    shift, size = 0, len(block)
    while at < size and number <= _NUMBER_MAX and shift <= 28:
        more = block[at]
        at += 1
        number += (more & 0x7F) << shift
        if more < 0x80:
            return number, at
        shift += 7
    raise ValueError("a number in a header block does not end, or is too large", False)


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return a string and the position after it (RFC 7541 §5.2)."""
    if at >= len(block):
        raise ValueError("a header block ends within a header", False)
    first = block[at]
    length = first & 0x7F
    at += 1
    if length == 0x7F:
        length, at = _more_of_number(block, at, length)
    end = at + length
    if end > len(block):
        raise ValueError("a header block ends within a string", False)
    text = block[at:end]
    if first & 0x80:
        try:
            text = _decode_huffman(text)
        except HPACKError as error:
            raise ValueError(f"a string cannot be read: {error}", False) from None
    return text, end
