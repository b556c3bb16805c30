"""Message body compression: zlib, LZ4 frames and Zstandard. Bits 8–10 of sysFlag identify the format.

======  ===========  ==========================================
bits    name         format
======  ===========  ==========================================
0x000   (none)       zlib, from clients before 5.0
0x100   LZ4          LZ4 frame format; the level is ignored
0x200   ZSTD         Zstandard frame
0x300   ZLIB         zlib stream, RFC 1950
======  ===========  ==========================================

Only clients compress; a broker stores bodies unchanged. Bit 0 of sysFlag (COMPRESSED) must be set as well.
lz4 and zstd are imported when a body needs them. Python 3.14 and later includes zstd; older versions use the backport.
Source: remoting.md §7.5.
"""

from __future__ import annotations

import enum
import sys
import zlib
from typing import Any

from rmqkit.errors import BodyError
from rmqkit.protocol.record import COMPRESSED, COMPRESSION_MASK

DECOMPRESSED_BYTES_MAX = 64 << 20
"""The maximum size of a decompressed body: sixteen times the largest message that a broker accepts by default."""

_LZ4_GROWTH = 4
assert not COMPRESSED & COMPRESSION_MASK, "bit 0 means compressed, bits 8 to 10 the format"


class Compression(enum.IntEnum):
    """The sysFlag value of each compression type."""

    LZ4 = 0x100
    ZSTD = 0x200
    ZLIB = 0x300


def compress(body: bytes, compression: Compression, level: int = 5) -> bytes:
    """Return the compressed body. The caller must set ``COMPRESSED | compression`` in sysFlag."""
    if compression is Compression.LZ4:
        import lz4.frame

        return bytes(lz4.frame.compress(body))
    if compression is Compression.ZSTD:
        return bytes(_zstd().compress(body, level))
    return zlib.compress(body, level)


def decompress(body: bytes, sys_flag: int, *, bytes_max: int = DECOMPRESSED_BYTES_MAX) -> bytes:
    """Return the decompressed body, or the body itself if sysFlag marks no compression.
    Raises BodyError: the compression type is unknown, the stream is damaged, or the result would exceed
    ``bytes_max``."""
    if not sys_flag & COMPRESSED:
        return body
    match sys_flag & COMPRESSION_MASK:
        case 0 | Compression.ZLIB:
            return _decompress_zlib(body, bytes_max)
        case Compression.LZ4:
            return _decompress_lz4(body, bytes_max)
        case Compression.ZSTD:
            return _decompress_zstd(body, bytes_max)
        case unknown:
            raise BodyError(f"compression type {unknown >> 8} in sysFlag {sys_flag:#x} is not known: use 1, 2 or 3")


def _decompress_zlib(body: bytes, bytes_max: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        # zlib would interpret a limit of 0 as no limit.
        plain = stream.decompress(body, bytes_max)
    except zlib.error as error:
        raise BodyError(f"zlib body of {len(body)} bytes is damaged: {error}") from None
    return _whole(plain, stream.eof, "zlib", body, bytes_max)


def _decompress_lz4(body: bytes, bytes_max: int) -> bytes:
    import lz4.frame

    stream = lz4.frame.LZ4FrameDecompressor()
    parts: list[bytes] = []
    plain_bytes = 0
    # The library allocates the permitted output before it reads the input, so the limit grows with the output.
    room = _LZ4_GROWTH * len(body) + 1
    try:
        while not stream.eof and plain_bytes < bytes_max:
            parts.append(stream.decompress(b"" if parts else body, min(room, bytes_max - plain_bytes)))
            plain_bytes += len(parts[-1])
            room *= 2
            if stream.needs_input:
                break
    except (RuntimeError, EOFError) as error:
        raise BodyError(f"lz4 body of {len(body)} bytes is damaged: {error}") from None
    return _whole(b"".join(parts), stream.eof, "lz4", body, bytes_max)


def _decompress_zstd(body: bytes, bytes_max: int) -> bytes:
    zstd = _zstd()
    stream = zstd.ZstdDecompressor()
    try:
        # Allow one byte more than the limit: only a body that is too long fills this byte.
        plain = bytes(stream.decompress(body, bytes_max + 1))
    except zstd.ZstdError as error:
        raise BodyError(f"zstd body of {len(body)} bytes is damaged: {error}") from None
    return _whole(plain, stream.eof and len(plain) <= bytes_max, "zstd", body, bytes_max)


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


def _whole(plain: bytes, ended: bool, name: str, body: bytes, bytes_max: int) -> bytes:
    if ended:
        return plain
    if len(plain) >= bytes_max:
        raise BodyError(f"{name} body of {len(body)} bytes grows beyond the limit of {bytes_max} bytes")
    raise BodyError(f"{name} body of {len(body)} bytes ends in the middle of its stream")
