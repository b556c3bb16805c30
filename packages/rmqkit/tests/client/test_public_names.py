"""The public names of ``rmqkit``."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rmqkit


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, rmqkit; print(*sorted({'asyncio', 'msgspec', 'rmqkit.client', 'uvloop'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", rmqkit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(rmqkit, name) is not None
    assert name in dir(rmqkit)


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(rmqkit.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.asname for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(rmqkit.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rmqkit' has no attribute 'Produzer'"):
        rmqkit.Produzer  # noqa: B018 - the access is the test
