"""The list of long programs: every name starts an existing program, and pages name only programs of the list."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import long
from tests.sources import ROOT

PROGRAMS = [(kind, name) for kind, programs in long.KINDS.items() for name in programs]


@pytest.mark.parametrize(("kind", "name"), PROGRAMS)
def test_a_program_of_the_list_exists(kind: str, name: str):
    _, *words = long.arguments(kind, name, ["--seed", "7"])
    assert words[-2:] == ["--seed", "7"], "the arguments of the caller come last"
    if words[0] == "-m":
        assert find_spec(words[1]) is not None
    else:
        assert (ROOT / words[0]).is_file()


def test_an_unknown_name_lists_the_programs():
    command = [sys.executable, "-m", "tests.long", "kill", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no program 'nothing'" in done.stderr and "T=archive-mixed" in done.stderr


def test_texts_name_programs_of_the_list():
    files = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    texts = [(ROOT / file).read_text() for file in files.stdout.split() if file != "tests/long.py"]
    named = {found for text in texts for found in re.findall(r"`make (kill|soak|bench) T=([\w-]+)", text)}
    assert len(named) > 12
    assert named <= set(PROGRAMS)
