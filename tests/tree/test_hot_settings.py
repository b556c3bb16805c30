"""A hot setting is read at each use, never only once when an object is created or started."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from rmqkit.broker.settings import BrokerSettings
from rmqkit.cli.servers.logging_setup import LoggingSettings
from rmqkit.namesrv.settings import NamesrvSettings
from rmqkit.settings import setting_table
from rmqkit.store.settings import StoreSettings
from tests.sources import modules, place

ONCE = {"__init__", "start", "_start", "open", "_open", "load"}
"""Functions that run once. A lambda or nested function in them may run later."""
FOLDERS = {
    BrokerSettings: ("broker", "remoting"),
    StoreSettings: ("store", "broker"),
    NamesrvSettings: ("namesrv", "remoting"),
    LoggingSettings: ("cli",),
}


def reads(tree: ast.AST, names: set[str], once: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of every object named settings or logs, each with True if it is read only once."""
    for node in ast.iter_child_nodes(tree):
        later = isinstance(node, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef)
        inside = getattr(node, "name", "") in ONCE and not once if later else once
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load):
            owner = ast.unparse(node.value).lower()
            if "settings" in owner or owner == "logs":
                yield node.attr, once
        yield from reads(node, names, inside)


@pytest.mark.parametrize("settings_type", FOLDERS, ids=lambda one: one.__name__)
def test_every_hot_setting_is_read_when_it_is_used(settings_type):
    hot = {name for name, _, setting in setting_table(settings_type).values() if setting.hot}
    files = [file for file in modules() if place(file).parts[0] in FOLDERS[settings_type]]
    found = {read for file in files for read in reads(ast.parse(file.read_text()), hot)}
    assert hot
    assert hot <= {name for name, _ in found}, "every hot setting is read somewhere"
    assert {name for name, once in found if once} == set(), "no hot setting is read only at start"
