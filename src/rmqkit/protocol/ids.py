"""Message ids: the *offset message id* a broker gives and the *unique key* a client gives (``MessageClientIDSetter``).

======================  ====================================================================  =========
id                      layout                                                                text
======================  ====================================================================  =========
offset message id       store host IP 4 or 16, port i32, physical offset i64                  32 or 56
unique key (UNIQ_KEY)   client IP 4 or 16, process id u16, random i32, ms of month u32,       32 or 56
                        counter u16
======================  ====================================================================  =========

Text is upper-case hexadecimal; the length tells IPv4 from IPv6. Source: remoting.md §7.4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import datetime

from rmqkit.protocol.record import unpack_host

_OFFSET = struct.Struct(">q")
_UNIQUE_TAIL = struct.Struct(">IH")


def offset_id(store_host: bytes, physical_offset: int) -> str:
    """The offset message id of a record: packed store host (8 or 20 bytes) and its place in the log."""
    return (store_host + _OFFSET.pack(physical_offset)).hex().upper()


def offset_ids(store_host: bytes, physical_offsets: Iterable[int]) -> str:
    """The offset message ids of several records, joined by commas."""
    host = store_host.hex().upper()
    return ",".join([f"{host}{offset & 0xFFFFFFFFFFFFFFFF:016X}" for offset in physical_offsets])


def decode_offset_id(text: str) -> tuple[str, int, int]:
    """IP, port and physical offset in an offset message id. Raises ValueError: not 32 or 56 hexadecimal digits."""
    if len(text) not in (32, 56):
        raise ValueError(f"offset message id {text!r} has {len(text)} characters: it must have 32 or 56")
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"offset message id {text!r} is not hexadecimal") from None
    if len(packed) * 2 != len(text):
        raise ValueError(f"offset message id {text!r} is not hexadecimal")
    ip, port = unpack_host(packed[:-8])
    return ip, port, _OFFSET.unpack_from(packed, len(packed) - 8)[0]


class UniqueKeys:
    """Gives out unique keys for one process.
    ``ip`` is packed (4 or 16 bytes), ``seed`` any 32-bit number that differs between instances in one process."""

    __slots__ = ("_counter", "_month_end_ms", "_month_start_ms", "_prefix")

    def __init__(self, ip: bytes, process_id: int, seed: int) -> None:
        self._prefix = (ip + struct.pack(">HI", process_id & 0xFFFF, seed & 0xFFFFFFFF)).hex().upper()
        self._counter = seed & 0xFFFF
        self._month_start_ms = self._month_end_ms = 0

    def next(self, now_ms: int) -> str:
        """A key not given before, for a message born at ``now_ms`` (ms since the epoch)."""
        if not self._month_start_ms <= now_ms < self._month_end_ms:
            self._enter_month(now_ms)
        self._counter = (self._counter + 1) & 0xFFFF
        tail = _UNIQUE_TAIL.pack(now_ms - self._month_start_ms, self._counter)
        return self._prefix + tail.hex().upper()

    def _enter_month(self, now_ms: int) -> None:
        """The time part counts from 00:00 local time of the first day of the month, so that it fits 32 bits."""
        first = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
        self._month_start_ms = int(first.timestamp() * 1000)
        self._month_end_ms = int(following.timestamp() * 1000)
