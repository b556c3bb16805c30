"""`rmq bench` in a checkout, and where rmqkit was installed without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import joined


@pytest.mark.parametrize("words", [[], ["start", "--json"]])
def test_an_installation_without_a_checkout_says_in_one_line_what_to_do(tmp_path: Path, words: list[str]) -> None:
    joined(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rmqkit", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    text = json.loads(line)["error"] if "--json" in words else line.removeprefix("rmq: ")
    assert text.startswith("rmq bench needs a source checkout")
    assert text.endswith("clone its repository, run make env there, then .venv/bin/rmq bench")


def test_help_of_an_installation_without_a_checkout_names_the_command(tmp_path: Path) -> None:
    joined(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "rmqkit", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "Needs a source checkout of rmqkit" in done.stdout
