"""Times on the command line."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rmqkit.cli.frame.printing import time_ms
from rmqkit.errors import SettingsError
from rmqkit.testing.clock import StandingClock

LOCAL = datetime(2026, 1, 31, 12, 30, 15, 250_000)
MS = round(LOCAL.timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1700000000000", 1_700_000_000_000),
        ("2026-01-31#12:30:15:250", MS),
        ("2026-01-31T12:30:15.250", MS),
        ("2026-01-31 12:30:15.250", MS),
        ("2026-01-31T12:30:15.250+00:00", round(LOCAL.replace(tzinfo=UTC).timestamp() * 1000)),
        ("2026-01-31", round(datetime(2026, 1, 31).timestamp() * 1000)),
        ("now", 42),
        ("currentTimeMillis", 42),
    ],
)
def test_every_form_is_read(text, expected):
    assert time_ms(text, StandingClock(42)) == expected


@pytest.mark.parametrize("text", ["noon", "", "2026-13-01", "2026-01-31#12:30", "-1", "1e3"])
def test_what_is_no_time_is_said_in_one_line(text):
    with pytest.raises(SettingsError, match="must be ms since the epoch, now, or like 2026-01-31T12:00:00") as error:
        time_ms(text)
    assert "\n" not in str(error.value)
