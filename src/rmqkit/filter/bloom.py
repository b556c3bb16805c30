"""The Bloom filter of SQL92 subscriptions (``BloomFilter``): one bitmap per message says which groups may want it.

A subscription ``group#topic`` owns k bits out of m. The dispatcher sets those of every group whose expression is true
for a message; a pull skips a message that lacks one of its bits. Positions are frozen on disk: Murmur3 x64 128 of the
UTF-8 text, seed 0; its low 64 bits are two i32, ``h1`` the lower one and ``h2``; the i-th position is ``h1 + i * h2``
in wrapping 32-bit arithmetic, inverted when negative, modulo m. Bit p is ``1 << (p % 8)`` of byte ``p / 8``.
Source: store.md §17.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mmh3


@dataclass(frozen=True, slots=True)
class BloomFilter:
    """Numbers of positions (k) and of bits (m, a multiple of 8)."""

    position_count: int
    bit_count: int

    @classmethod
    def of(cls, error_percent: int, expected_count: int) -> BloomFilter:
        """The filter for an error rate in percent and a number of groups; 20 and 32 make k 3 and m 112."""
        bits = math.ceil(expected_count * math.log2(100 / error_percent) * math.log2(math.e))
        return cls(math.ceil(math.log(error_percent / 100, 0.5)), -(-bits // 8) * 8)

    def positions(self, group: str, topic: str) -> tuple[int, ...]:
        """The bits of a subscription."""
        low64 = mmh3.hash64(f"{group}#{topic}".encode(), 0, x64arch=True, signed=False)[0]
        h1, h2 = low64 & 0xFFFFFFFF, low64 >> 32
        sums = ((h1 + i * h2) & 0xFFFFFFFF for i in range(1, self.position_count + 1))
        return tuple((one ^ 0xFFFFFFFF if one >> 31 else one) % self.bit_count for one in sums)

    def mask(self, positions: tuple[int, ...]) -> int:
        """A bitmap with some bits set, as a number; combine with ``|``, see `bitmap`."""
        return sum({1 << position for position in positions})

    def bitmap(self, mask: int) -> bytes:
        """The bytes that are stored for a mask."""
        return mask.to_bytes(self.bit_count // 8, "little")

    def has(self, bitmap: bytes, mask: int) -> bool:
        """Whether a bitmap has all bits of a mask; True for a bitmap of another length, which says nothing."""
        return len(bitmap) * 8 != self.bit_count or int.from_bytes(bitmap, "little") & mask == mask
