"""The delay levels of scheduled messages (``messageDelayLevel``): level 1 is the first. Source: store.md §18.1."""

from __future__ import annotations

import re

from rmqkit.errors import SettingsError

__all__ = ["delivery_time", "parse_delay_levels"]

_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"(\d+)([smhd])")


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
