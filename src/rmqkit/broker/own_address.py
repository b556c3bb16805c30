"""Where a broker is, as it stamps it on messages and names itself in remarks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OwnAddress"]


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """A broker's own address.

    Attributes:
        ip: as remarks name it.
        store_host: address and port packed as in records.
    """

    ip: str
    store_host: bytes
