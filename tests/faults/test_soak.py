"""The soak in short: every message arrives, and the judge finds a deliberate leak."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.client.growth import judge
from tests.faults.soak import Delivery

SHORT, LONGER = (["--seconds", seconds, "--guest-seconds", "3", "--rate", "300"] for seconds in ("5", "30"))


def soaked(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a soak in a new process: a process that has worked before has free memory that hides a leak, or grows by
    itself.
    """
    command = [sys.executable, "-m", "tests.faults.soak", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[subprocess.CompletedProcess[str], Path]]:
    """Run a normal soak and one that leaks, at the same time. Return the runs with the files of their figures."""
    files = [tmp_path_factory.mktemp("soak") / "figures.json" for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(soaked, *SHORT, *more, "--json", str(file))
            for file, more in zip(files, ([], ["--leak-bytes", "30000"]), strict=True)
        ]
        return [(run.result(), file) for run, file in zip(runs, files, strict=True)]


def failed(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.partition("FAILED ")[2] for line in done.stdout.splitlines() if line.startswith("  FAILED")]


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
def test_a_series_that_grows_is_distinguished_from_one_that_only_trembles(
    per_hour: float, noise: float, is_flat: bool
) -> None:
    judged = judge("MiB", samples(per_hour, noise), warm_up_seconds=300, per_hour_max=8, noticed=2)
    assert judged.is_flat is is_flat, judged
    assert judged.slope_per_hour == pytest.approx(per_hour, abs=noise + 0.01)


def test_one_step_is_no_growth_and_two_are() -> None:
    limits = {"warm_up_seconds": 0, "per_hour_max": 8, "noticed": 1}
    one = [(float(at), 20 + 7 * (at > 800)) for at in range(0, 1800, 5)]
    two = [(at, value + 7 * (at > 1300)) for at, value in one]
    assert judge("MiB", one, **limits).is_flat
    assert not judge("MiB", two, **limits).is_flat


def test_what_is_too_little_to_report_is_flat() -> None:
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
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_short_soak_delivers_everything_and_grows_nothing(
    short_runs: list[tuple[subprocess.CompletedProcess[str], Path]],
) -> None:
    """On a busy machine half of a short soak is not enough for the warm-up. A real leak also grows in a longer soak."""
    done, written = short_runs[0]
    if faults := failed(done):
        assert all(" GROWS " in fault for fault in faults), done.stdout + done.stderr
        done = soaked(*LONGER, "--json", str(written))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(written.read_text())
    assert sum(figures["sent"].values()) > 500
    assert figures["rebalances"] >= 2


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_leak_is_seen(short_runs: list[tuple[subprocess.CompletedProcess[str], Path]]) -> None:
    done, _ = short_runs[1]
    assert done.returncode == 1, done.stdout + done.stderr
    assert ["client", "anonymous_mib"] in [fault.split()[:2] for fault in failed(done)], done.stdout
