"""The suite about itself: how many behaviours there are, each run at both brokers, and what they are named by."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

BEHAVIOURS_MIN = 150


def behaviours() -> Iterator[ast.AsyncFunctionDef]:
    """Every behaviour of the suite."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield node


def test_the_suite_has_enough_behaviours_at_each_broker() -> None:
    assert len({one.name for one in behaviours()}) >= BEHAVIOURS_MIN


def test_every_behaviour_has_a_name_of_its_own_and_its_section_of_the_specification() -> None:
    assert [name for name, count in Counter(one.name for one in behaviours()).items() if count > 1] == []
    assert [one.name for one in behaviours() if "§" not in (ast.get_docstring(one) or "")] == []
