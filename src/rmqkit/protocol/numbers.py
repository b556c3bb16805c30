"""Java's integer widths for header and body fields; a number outside them is refused when it is read.

Python's integers have no bound, Java's do: a number that no Java peer could have sent would later fail in a file, a
record or another peer, far from where it came in. Source: remoting.md §4 ("`int` = 32 bit, `long` = 64 bit").
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = ["Int32", "Int64"]

Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
