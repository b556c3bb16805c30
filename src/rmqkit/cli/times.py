"""Times as people write them on the command line."""

from __future__ import annotations

from datetime import datetime

from rmqkit.clock import SYSTEM_CLOCK, Clock
from rmqkit.errors import SettingsError

_JAVA_FORM = "%Y-%m-%d#%H:%M:%S:%f"


def time_ms(text: str, clock: Clock = SYSTEM_CLOCK) -> int:
    """Milliseconds since the epoch from a number of them, ``now``, an ISO time or ``yyyy-MM-dd#HH:mm:ss:SSS`` as
    Java's tools have it; local unless it has a zone. Raises SettingsError: it is none of these."""
    if text.isdecimal():
        return int(text)
    if text in ("now", "currentTimeMillis"):
        return clock.now_ms()
    try:
        moment = datetime.strptime(text, _JAVA_FORM) if "#" in text else datetime.fromisoformat(text)
        return round(moment.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        forms = "ms since the epoch, now, or like 2026-01-31T12:00:00 or 2026-01-31#12:00:00:000"
        raise SettingsError(f"time {text!r} must be {forms}") from None
