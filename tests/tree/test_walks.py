"""The paths in docs/architecture.md name every file that a request or a scan enters."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT, found
from tests.tree.walks import walks

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
FILES_MAX = {"send": 10, "pull": 15, "pop": 24, "scan": 17}
"""The number of files that each path enters. If you add a file, merge another one, or give the reason here. A scan has
two files of columns: the table of columns is in the store, as the archive writes it, and the choice of a read above it.
"""
BROKER_FILES_MAX = {"send": 2, "pull": 6, "pop": 8}
"""The number of these files in `broker/`."""


@pytest.fixture(scope="module")
def entered() -> dict[str, list[str]]:
    # Without the compiled core, the Python twin checks for every request whether it is a send, also for the other
    # paths.
    return {
        walk: [name for name in files if name != "protocol/sends" or walk == "send"] for walk, files in walks().items()
    }


def named(walk: str) -> set[str]:
    """Return the modules that the section of a path names."""
    section = PAGE.split(f"## The path of a {walk}\n")[1].split("\n## ")[0]
    places = {name: found(name) for name in re.findall(r"`([a-z0-9_/]+)`", section)}
    return {name for name, path in places.items() if path is not None and path.is_file()}


@pytest.mark.parametrize("walk", FILES_MAX)
def test_a_walk_names_what_is_entered(entered: dict[str, list[str]], walk: str) -> None:
    assert set(entered[walk]) - named(walk) == set()


@pytest.mark.parametrize("walk", FILES_MAX)
def test_a_walk_enters_few_files(entered: dict[str, list[str]], walk: str) -> None:
    assert len(entered[walk]) <= FILES_MAX[walk]


@pytest.mark.parametrize("walk", BROKER_FILES_MAX)
def test_a_walk_enters_few_files_of_the_broker(entered: dict[str, list[str]], walk: str) -> None:
    assert sum(name.startswith("broker/") for name in entered[walk]) <= BROKER_FILES_MAX[walk]
