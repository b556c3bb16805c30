"""The inputs kept for fuzzing, and a few seconds of it where atheris is installed (`make fuzz` installs it)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz.fuzz_decoders import CORPUS, fuzz, targets
from tests.fuzz.targets import TARGETS

SECONDS_EACH = 1


def test_every_target_has_inputs():
    assert targets() == sorted(TARGETS)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_the_kept_inputs_are_values_or_documented_errors(target):
    inputs = [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]
    assert inputs
    for data in inputs:
        for at in range(len(data) + 1):  # also cut off at every byte
            TARGETS[target](data[:at])


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="fuzzing needs atheris, which has no wheel for this Python or is not installed: make fuzz",
)
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_little_fuzzing_finds_nothing(target, tmp_path):
    run = fuzz(target, SECONDS_EACH, tmp_path)
    assert run.finding is None, run.finding
    assert run.executions > 0
