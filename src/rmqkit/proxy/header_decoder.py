"""Who reads header blocks: the compiled core, in 1 us for that of an SDK's request, or in 8 its twin in plain Python.
Source: RFC 7541.
"""

from __future__ import annotations

import os
from typing import Protocol

from rmqkit.protocol.core import compiled_header_decoder, core_fault
from rmqkit.proxy.header_blocks import HeaderBlockError, Headers

__all__ = ["BlockDecoder", "CompiledDecoder", "header_decoder"]


class BlockDecoder(Protocol):
    """Reads the header blocks of one side of a connection, in their order."""

    def decode(self, block: bytes) -> Headers:
        """The headers of a block. Raises HeaderBlockError."""


def header_decoder(list_bytes_max: int) -> BlockDecoder:
    """The compiled core's decoder where it is installed, else its twin."""
    if not core_fault(os.environ):
        return CompiledDecoder(list_bytes_max)
    from rmqkit.proxy.plain_header_blocks import HeaderDecoder

    return HeaderDecoder(list_bytes_max)


class CompiledDecoder:
    """The core's decoder, with the errors of `HeaderDecoder`."""

    def __init__(self, list_bytes_max: int) -> None:
        self._decode = compiled_header_decoder(list_bytes_max).decode

    def decode(self, block: bytes) -> Headers:
        try:
            return self._decode(block)
        except ValueError as error:
            text, is_too_large = error.args
            raise HeaderBlockError(text, is_too_large=is_too_large) from None
