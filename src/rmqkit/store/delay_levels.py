"""The delay levels of scheduled messages (``messageDelayLevel``): level 1 is the first. Source: store.md §18.1."""

from __future__ import annotations

import re

from rmqkit.errors import HeaderError, SettingsError

__all__ = ["delay_level", "delivery_time", "parse_delay_levels"]

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}", re.ASCII)
_LEVEL = re.compile(r"(\d+)([smhd])")


def delay_level(text: str | None) -> int:
    """The number in property DELAY, 0 without one. Raises HeaderError: it is not a 32-bit number."""
    if text is None:
        return 0
    level = int(text) if _INTEGER.fullmatch(text) else 1 << 31
    if not -(1 << 31) <= level < 1 << 31:
        raise HeaderError(f'property DELAY is not a number: "{text}"')
    return level


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """The delays in ms, level 1 first.
    Raises SettingsError: a level is not a number with unit s, m, h or d, or there is none."""
    delays: list[int] = []
    for level in text.split():
        match = _LEVEL.fullmatch(level)
        if match is None:
            raise SettingsError(f"messageDelayLevel: level {level!r} must be a number followed by s, m, h or d")
        delays.append(int(match[1]) * _UNIT_MS[match[2]])
    if not delays:
        raise SettingsError("messageDelayLevel names no level: give at least one, such as 1s")
    return tuple(delays)


def delivery_time(delays: tuple[int, ...], level: int, store_timestamp: int) -> int:
    """When a message of a level ≥ 1 is due; levels above the last count as the last."""
    return store_timestamp + delays[min(level, len(delays)) - 1]
