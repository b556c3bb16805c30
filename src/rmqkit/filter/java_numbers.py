"""Numbers in property texts, read as Java reads them (``Integer.parseInt``, ``Long.parseLong``, ``Double.valueOf``).

Each comes back as an integer that sorts as Java's type does, so that comparing is the same for all. Doubles sort as by
``Double.compare``: -0.0 < 0.0, NaN above infinity and equal to itself. Source: behaviour.md §6.4.
"""

from __future__ import annotations

import re
import struct

__all__ = ["parse_double", "parse_int", "parse_long", "sortable"]

_I32_END, _I64_END = 1 << 31, 1 << 63
_ASTRAL = "\U00010000-\U0010ffff"
_INTEGER = re.compile(rf"[+-]?(?:(?![{_ASTRAL}])\d)+")  # digits of any script, one UTF-16 unit each
_DOUBLE = re.compile(
    r"[\0- ]*(?:"
    r"(?P<name>[+-]?(?:NaN|Infinity))|"
    r"(?P<digits>[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)[fFdD]?|"
    r"(?P<hex>[+-]?0[xX](?:[\da-fA-F]+\.?|[\da-fA-F]*\.[\da-fA-F]+)[pP][+-]?\d+)[fFdD]?"
    r")[\0- ]*",
    re.ASCII,
)
_F64, _I64 = struct.Struct(">d"), struct.Struct(">q")


def parse_int(text: str) -> int:
    """A 32-bit integer. Raises ValueError."""
    return _integer(text, _I32_END)


def parse_long(text: str) -> int:
    """A 64-bit integer. Raises ValueError."""
    return _integer(text, _I64_END)


def parse_double(text: str) -> int:
    """A double, in its sortable form. Raises ValueError."""
    match = _DOUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no double")
    if hexadecimal := match["hex"]:
        try:
            return sortable(float.fromhex(hexadecimal))
        except OverflowError:
            return sortable(float("-inf" if hexadecimal[0] == "-" else "inf"))
    return sortable(float(match["name"] or match["digits"]))


def sortable(number: float) -> int:
    """The integer that orders doubles as ``Double.compare`` does."""
    if number != number:
        return _I64_END
    bits: int = _I64.unpack(_F64.pack(number))[0]
    return bits if bits >= 0 else -_I64_END - bits - 1


def _integer(text: str, end: int) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no integer")
    number = int(text)
    if not -end <= number < end:
        raise ValueError(f"{text!r} does not fit")
    return number
