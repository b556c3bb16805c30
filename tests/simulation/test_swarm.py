"""A short swarm: fixed seeds are sound, a seed repeats its run, and a failing plan is shrunk to its cause."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.simulation.plan import ACTIONS, MAKERS, Fault, plan_of
from tests.simulation.run import Outcome
from tests.simulation.shrink import shrunk
from tests.sources import ROOT

SEEDS = 16


def simulate(*arguments: str, **environment: str) -> str:
    """Run the program, and return what it prints. Fail with it if a seed fails."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_fixed_seeds_are_sound() -> None:
    printed = simulate("--first", "1", "--count", str(SEEDS), "--jobs", "1")
    assert f"{SEEDS} seeds from 1" in printed
    assert " 0 failed" in printed


@pytest.mark.slow
def test_a_seed_has_one_trace_whatever_the_hash_seed_and_what_ran_before() -> None:
    alone = simulate("--seed", "2", PYTHONHASHSEED="7")
    after_others = simulate("--first", "1", "--count", "2", "--jobs", "1", "--each")
    trace = re.search(r"seed 2: .*trace ([0-9a-f]{32})", alone)
    assert trace is not None, alone
    assert trace[1] in after_others


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert plan_of(5) == plan_of(5)
    assert plan_of(5) != plan_of(6)


def test_seeds_have_all_kinds_of_faults_and_many_settings() -> None:
    plans = [plan_of(seed) for seed in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == {
        *MAKERS,
        *ACTIONS,
        "age",
        "expire",
        "renewed",
        "group deleted",
    }
    assert any(not plan.faults for plan in plans)
    assert {plan.slaves for plan in plans} == {0, 1}
    assert {plan.executors for plan in plans} == {0, 1, 2}
    kinds = {"push", "ordered", "pop", "broadcast", "once", "pull", "fleeting", "lite"}
    assert {kind for plan in plans for kind in plan.groups.values()} == kinds


def outcome(finding: str) -> Outcome:
    return Outcome(1, [finding] if finding else [], 1.0, 1, 1, 1, 1, "")


def test_a_failing_plan_is_cut_to_the_faults_that_it_needs() -> None:
    faults = [Fault(float(at), "kill", "broker-0", (1.0,)) for at in range(1, 17)]
    plan = plan_of(1).with_faults(faults)
    runs = 0

    def run(candidate: object) -> Outcome:
        nonlocal runs
        runs += 1
        kept = {fault.at for fault in candidate.faults}  # type: ignore[attr-defined]
        return outcome("lost" if {3.0, 11.0} <= kept else "")

    found = shrunk(plan, "lost", seconds=60, run=run)
    assert [fault.at for fault in found.faults] == [3.0, 11.0]
    assert runs < 60


def test_a_plan_that_fails_without_faults_is_cut_to_none() -> None:
    plan = plan_of(1).with_faults([Fault(1.0, "kill", "broker-0", (1.0,))])
    found = shrunk(plan, "lost", seconds=60, run=lambda _: outcome("lost"))
    assert found.faults == []
    assert found.seconds == 2.0


def test_another_failure_is_not_taken_for_the_same() -> None:
    plan = plan_of(1).with_faults([Fault(1.0, "kill", "broker-0", (1.0,)), Fault(2.0, "cut", "a>b")])

    def run(candidate: object) -> Outcome:
        count = len(candidate.faults)  # type: ignore[attr-defined]
        return outcome("lost" if count == 2 else "something else")

    assert len(shrunk(plan, "lost", seconds=60, run=run).faults) == 2


def test_signatures_have_no_numbers() -> None:
    one, other = (
        outcome("G-push did not get 3 messages, the first is 17"),
        outcome("G-push did not get 5 messages, the first is 9"),
    )
    assert one.signature == other.signature != outcome("broker-0: verify finds an abort file").signature
