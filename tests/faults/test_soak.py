"""The soak in short: everything arrives, and the judge sees a leak where there is one."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from tests.faults.client.growth import judge
from tests.faults.soak import Delivery, parse, report, soak

SHORT = ["--seconds", "7", "--guest-seconds", "3", "--rate", "300"]


def samples(per_hour: float, noise: float, seconds: int = 1800) -> list[tuple[float, float]]:
    chance = random.Random(7)
    warm_up = [(float(at), 20.0 * at / 300) for at in range(0, 300, 5)]
    return warm_up + [
        (float(at), 20 + per_hour * at / 3600 + chance.uniform(-noise, noise)) for at in range(300, seconds, 5)
    ]


@pytest.mark.parametrize(
    ("per_hour", "noise", "is_flat"),
    [(0, 0, True), (0, 3, True), (-30, 1, True), (6, 0.1, True), (12, 0.1, False), (12, 3, False), (200, 5, False)],
)
def test_a_series_that_grows_is_told_from_one_that_only_trembles(per_hour: float, noise: float, is_flat: bool) -> None:
    judged = judge("MiB", samples(per_hour, noise), warm_up_seconds=300, per_hour_max=8, noticed=2)
    assert judged.is_flat is is_flat, judged
    assert judged.slope_per_hour == pytest.approx(per_hour, abs=noise + 0.01)


def test_one_step_is_no_growth_and_two_are() -> None:
    limits = {"warm_up_seconds": 0, "per_hour_max": 8, "noticed": 1}
    one = [(float(at), 20 + 7 * (at > 800)) for at in range(0, 1800, 5)]
    two = [(at, value + 7 * (at > 1300)) for at, value in one]
    assert judge("MiB", one, **limits).is_flat
    assert not judge("MiB", two, **limits).is_flat


def test_what_is_too_little_to_tell_is_flat() -> None:
    steep = [(float(at), at / 100) for at in range(10)]
    assert judge("MiB", steep, warm_up_seconds=0, per_hour_max=8, noticed=1).is_flat
    assert not judge("MiB", steep, warm_up_seconds=0, per_hour_max=8, noticed=0.05).is_flat


def test_a_run_too_short_to_judge_says_so() -> None:
    with pytest.raises(ValueError, match="2 samples after 5 s"):
        judge("MiB", [(0, 1), (5, 1), (6, 1)], warm_up_seconds=5, per_hour_max=1, noticed=1)


def test_deliveries_are_counted_in_memory_that_does_not_grow() -> None:
    delivery = Delivery()
    for number in [0, 2, 1, 1, 5, *range(6, 2000)]:
        delivery.note(number)
    delivery.expect_no(3)
    assert (delivery.count, delivery.again, delivery.missing(2000)) == (1999 - 1, 1, 1)
    delivery.note(4)
    assert (delivery.missing(2000), delivery.missing(2005), len(delivery._above)) == (0, 5, 0)


@pytest.mark.faults
def test_a_short_soak_delivers_everything_and_grows_nothing() -> None:
    outcome = soak(parse(SHORT))
    print(report(outcome))
    assert outcome.faults == []
    assert sum(outcome.sent.values()) > 1500
    assert outcome.rebalances >= 2


@pytest.mark.faults
def test_a_leak_is_seen() -> None:
    """In a process of its own: one that has done much has room for a leak without growing."""
    command = [sys.executable, "-m", "tests.faults.soak", *SHORT, "--leak-bytes", "8000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    failed = [line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("  FAILED")]
    assert (done.returncode, failed) == (1, [["client", "anonymous_mib"]]), done.stdout + done.stderr
