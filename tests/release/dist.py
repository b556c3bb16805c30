"""``make dist``: sdist and wheels in ``dist/``, checked as a package index does, and used as a user does.

Each wheel is built from its sdist. The native wheel is built where cargo is. Then `first_use` installs both into empty
environments of every CPython that pyproject.toml names and this machine has. With the first of them, `each_alone`
imports every module of each wheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.release.alone import each_alone
from tests.release.first_use import ROOT, FirstUse, Unusable, first_use
from tests.sources import FOLDERS

DIST = ROOT / "dist"
CRATE = "packages/rmqkit-native/Cargo.toml"
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "packages/rmqkit/pyproject.toml").read_text())["project"]
VERSIONS = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if "Python :: 3." in text]
_UV = [ROOT / "requirements/uv.sh", BIN.parent]


def build() -> tuple[Path, Path | None]:
    """Build everything into an empty ``dist/``. Return the client's wheel and the native wheel (None without cargo)."""
    shutil.rmtree(DIST, ignore_errors=True)
    how = ["build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", DIST]
    for name in FOLDERS:
        _run(*_UV, *how, ROOT / "packages" / name)
    (DIST / ".gitignore").unlink(missing_ok=True)
    (wheel,) = DIST.glob("rmqkit-*.whl")
    path = os.pathsep.join((os.environ["PATH"], str(Path.home() / ".cargo/bin")))
    if shutil.which("cargo", path=path) is None:
        print("dist: no cargo, so there is no native wheel")
        return wheel, None
    maturin = [BIN / "maturin", "build", "--quiet", "--release", "--locked", "--sdist", "-m", CRATE]
    _run(*maturin, "-i", sys.executable, "-o", DIST, PATH=path)
    (native,) = DIST.glob("rmqkit_native-*.whl")
    return wheel, native


def look_at(files: list[Path], folder: Path) -> None:
    """Have twine check the metadata, as a package index does."""
    home = folder / "twine"
    _run(*_UV, "venv", "--quiet", "--python", sys.executable, home)
    release = ROOT / "requirements/release.txt"
    _run(*_UV, "pip", "install", "--quiet", "--python", home / "bin/python", "--require-hashes", "-r", release)
    _run(home / "bin/twine", "check", "--strict", *files)


def python_of(version: str) -> tuple[Path | None, str]:
    """Return an interpreter of that version with venv and pip, or None and the reason."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    candidates = [*map(str, installed), shutil.which(f"python{version}") or ""]
    for candidate in filter(None, candidates):
        asked = "import ensurepip, platform; print(platform.python_version(), platform.python_implementation())"
        done = subprocess.run([candidate, "-c", asked], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"{version}.") and "CPython" in done.stdout:
            return Path(candidate), ""
    return None, "found, but without ensurepip" if any(candidates) else "not on this machine"


def _run(*command: str | Path, **environ: str) -> None:
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**os.environ, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise Unusable(f"{' '.join(map(str, command))[:200]} ended with {done.returncode}:\n{done.stdout}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build sdist and wheels and use them in empty environments.")
    parser.add_argument("--only", help="one version of Python: 3.12")
    given = parser.parse_args()
    used: list[FirstUse] = []
    try:
        wheel, native = build()
        files = sorted(DIST.iterdir())
        for file in files:
            print(f"dist: {file.stat().st_size / 1e6:6.2f} MB {file.relative_to(ROOT)}")
        with tempfile.TemporaryDirectory() as folder:
            look_at(files, Path(folder))
            print("dist: twine takes all of them")
            for version in VERSIONS:
                python, reason = python_of(version)
                if given.only not in (None, version) or python is None:
                    print(f"dist: {version:8} skipped: {reason or 'not asked for'}")
                    continue
                place = Path(folder) / version
                place.mkdir()
                if not used:
                    for line in each_alone(python, DIST, place):
                        print(f"dist: {line}", flush=True)
                used.append(first_use(python, wheel, place, (native,) if native else ()))
                print(f"dist: {used[-1]}", flush=True)
    except Unusable as error:
        sys.exit(f"dist: {error}")
    faults = [fault for one in used for fault in one.faults()]
    sys.exit("\n".join(faults) or (0 if used else "dist: there is no Python to try the wheel with"))


if __name__ == "__main__":
    main()
