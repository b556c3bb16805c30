"""Durations and points in time in the forms that Python programs use.

===========  ====================================================  =================================================
type         values                                                refused
===========  ====================================================  =================================================
`Duration`   seconds as a number, or a `timedelta`                 a negative number, infinity or NaN
`Moment`     a `datetime` with a time zone, or seconds since the   a `datetime` without a time zone, a number that is
             epoch, as ``time.time()``                             negative or too large for seconds
===========  ====================================================  =================================================

RocketMQ uses milliseconds. Inside rmqkit, the names of all numbers of milliseconds end in ``_ms``.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from rmqkit.errors import TimeIllegal

__all__ = ["Duration", "Moment", "duration_ms", "moment_ms", "moment_of"]

Duration: TypeAlias = float | timedelta
"""Seconds, or a `timedelta`."""

Moment: TypeAlias = float | datetime
"""A `datetime` with a time zone, or seconds since the epoch."""

_SECONDS_MAX = 1e11
"""The limit, about 3,000 years. A number of milliseconds since the epoch is larger, and therefore refused."""


def duration_ms(value: Duration, name: str) -> float:
    """Return a duration in ms. ``name``: the name of the argument, for the error.
    Raises TimeIllegal: the value is not a duration."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not _is_number(seconds):
        raise TimeIllegal(f"{name} is {value!r}: give seconds or a timedelta")
    if not 0 <= seconds <= _SECONDS_MAX:
        raise TimeIllegal(f"{name} is {value!r}: it must be 0 seconds or more")
    return seconds * 1000.0


def moment_ms(value: Moment, name: str) -> int:
    """Return a point in time in ms since the epoch. ``name``: the name of the argument, for the error.
    Raises TimeIllegal: the value is not a point in time."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise TimeIllegal(f"{name} is {value!r}: give it a time zone, for example datetime.now(UTC)")
        seconds = value.timestamp()
    elif _is_number(value):
        seconds = value
    else:
        raise TimeIllegal(f"{name} is {value!r}: give a datetime, or seconds since the epoch")
    if not 0 <= seconds < _SECONDS_MAX:
        raise TimeIllegal(f"{name} is {value!r}, not a time in seconds: give a datetime, or seconds since the epoch")
    return round(seconds * 1000)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def moment_of(ms: int) -> datetime:
    """Return the UTC time for a number of ms since the epoch."""
    return datetime.fromtimestamp(ms / 1000, UTC)
