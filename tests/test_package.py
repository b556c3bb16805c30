"""The package as a user gets it: built, looked into, installed where nothing else is, and used there."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UV = [ROOT / "requirements/uv.sh", Path(sys.prefix)]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SECONDS_MAX = 100


def run(*command: object, cwd: Path = ROOT) -> str:
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=clean, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the sdist, made by the build program of this environment."""
    folder = tmp_path_factory.mktemp("dist")
    run(*UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    return folder


def test_the_wheel_holds_every_source_and_nothing_else(built):
    names = set(zipfile.ZipFile(built / f"rmqkit-{VERSION}-py3-none-any.whl").namelist())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src/rmqkit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"rmqkit/py.typed", "rmqkit/filter/sql92.lark", "rmqkit/spark/log4j2.properties"} <= sources
    assert {name for name in names if not name.startswith(f"rmqkit-{VERSION}.dist-info/")} == sources


def test_the_sdist_holds_what_its_tests_and_images_need(built):
    with tarfile.open(built / f"rmqkit-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = "pyproject.toml README.md Makefile src/rmqkit/py.typed tests/conftest.py requirements/run.txt"
    assert set(wanted.split()) <= names
    assert "deploy/container/Containerfile" in names
    assert not any(part in name for name in names for part in ("__pycache__", ".venv", ".git/"))


def test_a_wheel_works_in_an_environment_of_its_own(built, tmp_path):
    """With exactly the pinned versions of what it needs, and nothing for tests or Spark."""
    home = tmp_path / "venv"
    python, rmq = home / "bin/python", home / "bin/rmq"
    run(*UV, "venv", "--quiet", "--python", sys.executable, home)
    install = [*UV, "pip", "install", "--quiet", "--python", python]
    run(*install, "--require-hashes", "-r", ROOT / "requirements/run.txt")
    run(*install, "--no-deps", built / f"rmqkit-{VERSION}-py3-none-any.whl")
    run(*UV, "pip", "check", "--python", python)
    assert run(rmq, "--version", cwd=tmp_path).startswith(
        f"rmq {VERSION}, Python {platform.python_version()}, {platform.system()}-"
    )
    assert "standalone" in run(rmq, "--help", cwd=tmp_path)
    assert "flushDiskType=ASYNC_FLUSH" in run(rmq, "broker", "--print-config", cwd=tmp_path)
    code = """
import rmqkit
from rmqkit.filter.sql92 import compile_expression
compile_expression("a > 1 AND b IS NOT NULL")
print(rmqkit.__file__, len([getattr(rmqkit, name) for name in rmqkit.__all__]))
"""
    assert run(python, "-c", code, cwd=tmp_path).startswith(str(home))
