"""The same raw calls to Apache's proxy 5.5.0 and to our endpoint: field by field. Source: grpc.md §2–§9."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping

import pytest

from tests.interop.conftest import _startup_lines
from tests.interop.grpc import flows, odd_input, refusals
from tests.interop.grpc.apache_proxy import PROXY_BROKER_CONF
from tests.interop.grpc.scene import CASES, Check, Outcome, Place, run_all
from tests.interop.server_process import ServerProcess
from tests.interop.standalone import READY_SECONDS, RMQ

assert all((flows, odd_input, refusals))  # importing them fills CASES
COMPARISONS_MIN = 450
# Known differences of ours that are faults. Remove an entry when you fix it.
OPEN: Mapping[str, set[str]] = {
    "settings": {"neither"},
    "receive_checks": {"blank SQL", "no SQL", "bars as tags"},
    "handle_checks": {"ack: unknown topic"},
    "small_calls": {"termination: unknown", "termination: unknown with group"},
    "odd_sends": {"recovery negative"},
    "odd_handles": {
        *("change: eight words", "change: ten words", "change: offset beyond", "change: revive queue 99"),
        *("change: no duration", "ack: queue 9", "change: queue 9", "ack: flag of retries", "change: flag of retries"),
    },
    "streams": {"termination again"},
    "transactions": {"commit of one born long ago"},
}


Outcomes = dict[str, Outcome]


@pytest.fixture(scope="module")
def both(apache_proxy: Place, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcomes, Outcomes]:
    """Return the answers of Apache's proxy, and of `rmq standalone` with the settings of Apache's broker. Both get the
    calls at the same time, because most calls wait.
    """
    work_dir = tmp_path_factory.mktemp("ours")
    config = work_dir / "broker.conf"
    config.write_text("".join(f"{key}={value}\n" for key, value in PROXY_BROKER_CONF.items()))
    command = [RMQ, "standalone", "--namesrv-port", "0", "--port", "0", "--set", "grpcServerPort=0"]
    command += ["--store", work_dir / "store", "-c", config]
    with ServerProcess(command, work_dir / "standalone.log") as process:
        ready = process.wait_ready(r"^ready namesrv=(\S+) broker=(\S+) grpc=(\S+) store=", READY_SECONDS)
        _startup_lines.append(f"rmq standalone: ready in {process.ready_seconds:.2f} s")

        async def run() -> tuple[Outcomes, Outcomes]:
            ours = Place("ours", ready[3], ready[1], ready[2])
            theirs, own = await asyncio.gather(run_all(apache_proxy), run_all(ours))
            return theirs, own

        return asyncio.run(run())


@pytest.fixture(scope="module")
def apache(both: tuple[Outcomes, Outcomes]) -> Outcomes:
    return both[0]


@pytest.fixture(scope="module")
def ours(both: tuple[Outcomes, Outcomes]) -> Outcomes:
    return both[1]


def unexpected(outcome: Outcome) -> str:
    """Return the lines that the spec requires and the answers lack."""
    lines = [outcome.failure] if outcome.failure else []
    for check in outcome.checks.values():
        lines += [f"{check.name}: no {line!r}" for line in check.missing()]
        lines += [f"    {line}" for line in check.lines] if check.missing() else []
    return "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_apache_answers_as_the_spec_says(apache: dict[str, Outcome], name: str) -> None:
    said = unexpected(apache[name])
    assert not said, said


@pytest.mark.parametrize("name", CASES)
def test_ours_answers_as_apache(apache: dict[str, Outcome], ours: dict[str, Outcome], name: str) -> None:
    assert not ours[name].failure, ours[name].failure
    said, mended = [], []
    for check in apache[name].checks.values():
        found = difference(check, ours[name].checks.get(check.name))
        if check.name not in OPEN.get(name, ()):
            said += found
        elif not found:
            mended.append(check.name)
    assert not said, "\n".join(said)
    assert not mended, f"{mended} of {name} are as Apache's now: take them out of OPEN"


def difference(apache: Check, ours: Check | None) -> list[str]:
    """Return the lines in which our answer differs from Apache's, or from the deliberate difference."""
    if ours is None:
        return [f"{apache.name}: no answer"]
    if apache.why:
        lines = [f"    no {line!r} ({apache.why})" for line in ours.missing()]
        lines += [f"    {line}" for line in ours.lines] if lines else []
    else:
        compared = difflib.unified_diff(apache.lines, ours.lines, "Apache", "ours", lineterm="", n=0)
        lines = [f"    {line}" for line in compared]
    return [f"{apache.name}:", *lines] if lines else []


def test_there_are_enough_comparisons(apache: dict[str, Outcome]) -> None:
    assert sum(len(outcome.checks) for outcome in apache.values()) >= COMPARISONS_MIN
