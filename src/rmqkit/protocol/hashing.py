"""Java's ``String.hashCode`` and the numbers RocketMQ derives from it.

Tag codes in consume queues and key hashes in index files are frozen on disk by this function: ``h = 31 * h + unit``
over UTF-16 code units in wrapping 32-bit arithmetic. Source: store.md "Conventions", remoting.md §6.4.4.
"""

from __future__ import annotations

import functools


def java_hash(text: str) -> int:
    """Java's ``text.hashCode()``: a signed 32-bit number; any Python string is accepted, lone surrogates too."""
    h = 0
    if text.isascii():
        for unit in text.encode():
            h = (31 * h + unit) & 0xFFFFFFFF
    else:
        encoded = text.encode("utf-16-be", "surrogatepass")
        for i in range(0, len(encoded), 2):
            h = (31 * h + (encoded[i] << 8 | encoded[i + 1])) & 0xFFFFFFFF
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


@functools.lru_cache(maxsize=4096)
def tags_code(tags: str) -> int:
    """The consume-queue code of a TAGS property; 0 when there is none. Source: store.md §4.2."""
    return java_hash(tags)


@functools.lru_cache(maxsize=4096)
def encoded_tags_code(tags: bytes) -> int:
    """`tags_code` of a property value as it is stored."""
    return java_hash(tags.decode("utf-8", "replace"))
