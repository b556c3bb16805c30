"""Modules do not import in circles, wherever the import stands: at the top, in a function, under TYPE_CHECKING."""

from __future__ import annotations

from tests.tree.house import circles, imports

KNOWN = {"rmqkit.remoting.connection", "rmqkit.cli.servers.serve"}
"""The first module of circles that are still to be cut; nothing may be added."""


def test_a_circle_is_found_over_several_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set[str]()}
    assert circles(graph) == [["a", "b", "c"]]


def test_no_new_circle_of_imports():
    assert {group[0] for group in circles(imports())} <= KNOWN
