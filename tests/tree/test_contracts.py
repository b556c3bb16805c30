"""A folder of many modules has an order: an exhaustive contract of import-linter, which `make check` checks."""

from __future__ import annotations

import tomllib

from tests.sources import FOLDERS, ROOT

MOST = 6
"""The largest number of modules and folders in one folder without an order between them."""


def test_a_folder_of_many_modules_has_an_exhaustive_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    ordered = {
        container
        for contract in contracts
        if contract["type"] == "layers" and contract.get("exhaustive")
        for container in contract["containers"]
    }
    folders: dict[str, set[str]] = {}
    for root in FOLDERS.values():
        for path in root.rglob("*.py"):
            below = path.parent if path.name == "__init__.py" else path
            for part in (below, *below.parents):
                if part.is_relative_to(root) and part != root:
                    container = ".".join(("rmqkit", *part.parent.relative_to(root).parts))
                    folders.setdefault(container, set()).add(part.stem)
    assert "rmqkit.store.log" in folders
    without = {name for name, members in folders.items() if len(members) > MOST} - ordered
    assert without == set(), "add a contract to pyproject.toml: type layers, exhaustive = true, containers = [folder]"
