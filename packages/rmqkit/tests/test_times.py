"""Durations and points in time as programs give them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmqkit.errors import TimeIllegal
from rmqkit.times import duration_ms, moment_ms, moment_of


@pytest.mark.parametrize(
    ("value", "ms"), [(0, 0), (7, 7000), (0.25, 250), (1e-5, 0.01), (timedelta(minutes=1, microseconds=500), 60_000.5)]
)
def test_durations_are_seconds_or_timedeltas(value, ms):
    assert duration_ms(value, "delay") == pytest.approx(ms)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (-0.001, "delay is -0.001: it must be 0 seconds or more"),
        (timedelta(seconds=-1), "must be 0 seconds or more"),
        (float("nan"), "delay is nan: it must be 0 seconds or more"),
        (float("inf"), "delay is inf: it must be 0 seconds or more"),
        ("7", "delay is '7': give seconds or a timedelta"),
        (True, "delay is True: give seconds or a timedelta"),
        (None, "delay is None: give seconds or a timedelta"),
        (datetime(2026, 1, 1, tzinfo=UTC), "give seconds or a timedelta"),
    ],
)
def test_what_is_no_duration_is_refused(value, fault):
    with pytest.raises(TimeIllegal) as caught:
        duration_ms(value, "delay")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("value", "ms"),
    [
        (0, 0),
        (1_900_000_000.001, 1_900_000_000_001),
        (99_999_999_999, 99_999_999_999_000),
        (datetime(2026, 1, 31, 12, tzinfo=UTC), 1_769_860_800_000),
        (datetime(2026, 1, 31, 12, tzinfo=timezone(timedelta(hours=2))), 1_769_853_600_000),
    ],
)
def test_points_in_time_are_datetimes_or_seconds(value, ms):
    assert moment_ms(value, "at") == ms


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (datetime(2026, 1, 31), "give it a time zone, for example datetime.now(UTC)"),
        (-1, "at is -1, not a time in seconds"),
        (1e11, "not a time in seconds"),
        (1_900_000_000_000, "at is 1900000000000, not a time in seconds: give a datetime, or seconds since the epoch"),
        (float("nan"), "not a time in seconds"),
        (datetime(1969, 12, 31, tzinfo=UTC), "not a time in seconds"),
        ("2026-01-31", "at is '2026-01-31': give a datetime, or seconds since the epoch"),
        (False, "give a datetime"),
        (timedelta(1), "give a datetime"),
    ],
)
def test_what_is_no_point_in_time_is_refused(value, fault):
    with pytest.raises(TimeIllegal) as caught:
        moment_ms(value, "at")
    assert fault in str(caught.value)


@given(st.integers(0, 99_999_999_999_999))
def test_no_millisecond_is_lost(ms):
    assert moment_ms(ms / 1000, "at") == ms
    if ms < 253_402_300_800_000:
        assert moment_ms(moment_of(ms), "at") == ms
