"""The stored inputs of the fuzzer, and a short fuzzing run if atheris is installed (`make fuzz` installs it)."""

from __future__ import annotations

import importlib.util
import mmap
import subprocess
import sys

import pytest

from tests.fuzz.fuzz_decoders import CORPUS, FRESH_PEAK, fuzz, targets
from tests.fuzz.targets import TARGETS

LIMITS = ("-runs=5000", "-seed=4")
"""The same inputs in every run, however busy the machine is."""


def test_every_target_has_inputs():
    assert targets() == sorted(TARGETS)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_kept_inputs_are_values_or_documented_errors(target):
    inputs = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    assert inputs
    for data in inputs:
        for at in range(len(data) + 1):  # also truncated at every byte
            TARGETS[target](data[:at])


def test_what_the_test_process_holds_does_not_count_against_the_limit():
    ask = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    with mmap.mmap(-1, 512 << 20) as held:
        held.write(bytes(512 << 20))
        peak_kib = int(subprocess.check_output([*FRESH_PEAK, sys.executable, "-c", ask]))
    assert peak_kib < 256 << 10


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="fuzzing needs atheris, which has no wheel for this Python or is not installed: make fuzz",
)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_little_fuzzing_finds_nothing(target, tmp_path):
    run = fuzz(target, tmp_path, *LIMITS)
    assert run.finding is None, run.finding
    assert run.executions > 0
