"""Coverage-guided fuzzing of the decoders.

``python -m tests.fuzz.fuzz_decoders <target> [libFuzzer options]`` fuzzes one target. It starts from the inputs in
``tests/fuzz/corpus/<target>/`` and writes new inputs into the first folder among the options. It stops at the first
input that makes the target fail, and saves that input as ``crash-<hash>``.

``python -m tests.fuzz.fuzz_decoders --seconds 600`` runs the targets one after the other, each for its share of the
time, and prints a line per target (`make fuzz`). Needs atheris.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"
OPTIONS = ("-max_len=4096", "-rss_limit_mb=1024", "-timeout=60")
SECONDS_MAX = 7200  # of a target
# libFuzzer compares its memory peak with the limit, and on Linux exec passes on the peak of the parent process. A small
# shell in between forks a child that starts with its own peak.
FRESH_PEAK = ("sh", "-c", '"$@"; exit $?', "fuzz")


@dataclass
class Run:
    """The result of fuzzing one target.

    Attributes:
        coverage: program counters reached.
        finding: the end of the output of a run that failed, else None.
    """

    target: str
    executions: int
    coverage: int
    finding: str | None


def targets() -> list[str]:
    """Return the names of all targets. Each target has a folder of inputs."""
    return sorted(folder.name for folder in CORPUS.iterdir())


def fuzz(target: str, kept: Path, *limits: str) -> Run:
    """Fuzz one target in a process of its own. Return the result.

    ``kept``: receives new inputs and, if the run fails, the failing input. ``limits``: options of libFuzzer that limit
    the run."""
    learned = kept / target
    learned.mkdir(parents=True, exist_ok=True)
    options = [*limits, f"-artifact_prefix={kept}/{target}-", "-print_final_stats=1"]
    command = [*FRESH_PEAK, sys.executable, "-m", "tests.fuzz.fuzz_decoders", target, str(learned), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=SECONDS_MAX)
    return Run(
        target,
        executions=max(map(int, re.findall(r"number_of_executed_units: (\d+)", done.stderr)), default=0),
        coverage=max(map(int, re.findall(r" cov: (\d+)", done.stderr)), default=0),
        finding=(done.stdout + done.stderr)[-3000:] if done.returncode else None,
    )


def fuzz_all(seconds: int, kept: Path) -> int:
    """Fuzz every target for its share of the time. Return the number of findings."""
    runs = []
    for target in targets():
        run = fuzz(target, kept, f"-max_total_time={max(1, seconds // len(targets()))}")
        print(f"fuzz: {run.target:14}{run.executions:>12,} runs {run.coverage:>6} places", flush=True)
        if run.finding is not None:
            print(f"{run.finding}\nfuzz: {run.target} failed; the input is in {kept}", flush=True)
        runs.append(run)
    return sum(run.finding is not None for run in runs)


def fuzz_here(target: str, options: list[str]) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["rmqkit"]):
        from tests.fuzz.targets import TARGETS
    warnings.simplefilter("error")
    atheris.Setup([sys.argv[0], *OPTIONS, *options, str(CORPUS / target)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--seconds":
        sys.exit(fuzz_all(int(sys.argv[2]), ROOT / ".cache/fuzz"))
    fuzz_here(sys.argv[1], sys.argv[2:])
