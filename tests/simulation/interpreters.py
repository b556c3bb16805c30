"""``make traces``: the same seeds on every CPython of this machine, in pure Python, and beside busy processes.

Every run of a seed must have one trace. The environments are made once, in ``.cache/simulation``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.release.dist import VERSIONS, python_of
from tests.sources import FOLDERS, ROOT

_UV = [ROOT / "requirements/uv.sh", Path(sys.executable).parent.parent]
_TRACE = re.compile(r"seed \d+: .* trace ([0-9a-f]{32}): (.*)")
_BUSY = "while True: pass"


def environment(version: str) -> Path | None:
    """Return an interpreter of a version with the libraries that a simulation needs, or None."""
    base, reason = python_of(version)
    if base is None:
        print(f"traces: {version:8} skipped: {reason}")
        return None
    home = ROOT / ".cache/simulation" / version
    python = home / "bin/python"
    if not python.exists():
        locked = (ROOT / "requirements/dev.txt").read_text() + (ROOT / "requirements/query.txt").read_text()
        more = [re.search(rf"^{name}==[^ ]+", locked, re.MULTILINE) for name in ("greenlet", "numpy")]
        pins = [found[0] for found in more if found is not None]
        _run(*_UV, "venv", "--quiet", "--python", base, home)
        install = [*_UV, "pip", "install", "--quiet", "--python", python]
        _run(*install, "-r", ROOT / "requirements/run.txt")
        _run(*install, *pins)
    return python


def trace(python: Path, seed: int) -> tuple[str, str]:
    """Return the trace of a seed and its verdict."""
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in FOLDERS)
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": sources, "RMQKIT_NATIVE": "0"}
    command = [python, "-W", "ignore", "-m", "tests.simulation", "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    found = _TRACE.search(done.stdout)
    if found is None:
        sys.exit(f"traces: {python} with seed {seed} printed no trace:\n{done.stdout}{done.stderr[-2000:]}")
    return found[1], found[2]


def _run(*command: str | Path) -> None:
    subprocess.run([str(one) for one in command], cwd=ROOT, check=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--count", type=int, default=10, help="the number of seeds")
    parser.add_argument("--busy", type=int, default=0, help="processes that only compute, beside the runs")
    arguments = parser.parse_args()
    pythons = {version: python for version in VERSIONS if (python := environment(version)) is not None}
    differing = 0
    with ExitStack() as stack:
        for _ in range(arguments.busy):
            busy = subprocess.Popen([sys.executable, "-c", _BUSY])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        for seed in range(arguments.first, arguments.first + arguments.count):
            found = {version: trace(python, seed) for version, python in pythons.items()}
            traces = {text for text, _ in found.values()}
            differing += len(traces) > 1
            shown = (
                traces.pop() if len(traces) == 1 else " ".join(f"{name}={text}" for name, (text, _) in found.items())
            )
            print(f"traces: seed {seed}: {shown} on {', '.join(pythons)}: {next(iter(found.values()))[1]}", flush=True)
    print(f"traces: {arguments.count} seeds, {differing} with more than one trace")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
