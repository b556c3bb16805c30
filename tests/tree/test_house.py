"""Modules do not import each other in cycles, neither at the top, in a function, nor under TYPE_CHECKING."""

from __future__ import annotations

from pathlib import Path

from tests.sources import modules
from tests.tree.house import LINES_MAX, circles, foreign_privates, imports, long_functions

KNOWN = {"rmqkit.remoting.connection", "rmqkit.cli.servers.serve"}
"""The first modules of the import cycles that still exist. Add no other module."""


def test_a_circle_is_found_over_several_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert circles(graph) == [["a", "b", "c"]]


def test_a_long_function_has_a_reason_in_place():
    """A comment that begins with `# Long: ` above a function gives the reason."""
    assert [one for path in modules() for one in long_functions(path)] == []


def test_a_long_function_is_found(tmp_path: Path):
    path, body = tmp_path / "a.py", "    pass\n" * LINES_MAX
    path.write_text(f"@one\ndef f():\n{body}\n\n# Long: a table.\n@one\ndef g():\n{body}\n\ndef h():\n{body[9:]}")
    assert long_functions(path) == ["a.py:2 f"]


def test_private_attributes_of_others_are_found(tmp_path: Path):
    path = tmp_path / "a.py"
    path.write_text("self._a\nother._b\nother.__c__\nsuper()._d\nself.it._e = 1\n")
    assert foreign_privates(path) == ["a.py:2 other._b", "a.py:5 self.it._e"]


def test_no_new_circle_of_imports():
    assert {group[0] for group in circles(imports())} <= KNOWN
