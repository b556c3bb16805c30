"""The packages: their allowed imports, one version, one licence, and the extras that install them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rmqkit.cli import PANELS
from tests.sources import FOLDERS, ROOT, found, imported, modules, package_of, place

BELOW = {
    "rmqkit": set[str](),
    "rmqkit-store": {"rmqkit"},
    "rmqkit-server": {"rmqkit", "rmqkit-store"},
    "rmqkit-tools": {"rmqkit", "rmqkit-store", "rmqkit-server"},
    "rmqkit-spark": {"rmqkit", "rmqkit-store", "rmqkit-tools"},
    "rmqkit-contrib": {"rmqkit"},
}
"""Package → the packages that it may import."""
NEEDS_AN_EXTRA = {("rmqkit-spark", "rmqkit-tools"): ("spark/commands",)}
"""Imports of a package that only an extra installs. Only these modules may import it."""
MAP_LINES_MAX = 10


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


PROJECTS = {name: project(ROOT / "packages" / name) for name in FOLDERS}


def test_imports_between_packages_point_down():
    crossing: dict[tuple[str, str], set[str]] = {}
    for path in modules():
        for name in imported(path, "rmqkit"):
            target = found(name.removeprefix("rmqkit.").replace(".", "/"))
            if target is not None and package_of(target) != package_of(path):
                crossing.setdefault((package_of(path), package_of(target)), set()).add(str(place(path)))
    assert {pair for pair in crossing if pair[1] not in BELOW[pair[0]]} == set()
    for pair, allowed in NEEDS_AN_EXTRA.items():
        assert [path for path in crossing[pair] if not path.startswith(allowed)] == []


def test_a_package_names_those_that_it_imports():
    for name, below in BELOW.items():
        bare = {need.partition("=")[0] for need in PROJECTS[name]["dependencies"]}
        required = {other for other in below if (name, other) not in NEEDS_AN_EXTRA}
        assert required <= bare, name
        assert {need for need in bare if need.startswith("rmqkit")} == required, name


def test_all_packages_have_one_version():
    version = PROJECTS["rmqkit"]["version"]
    assert {one["version"] for one in PROJECTS.values()} == {version, project(ROOT)["version"]}
    for name, one in PROJECTS.items():
        needs = [
            *one["dependencies"],
            *(need for extra in one.get("optional-dependencies", {}).values() for need in extra),
        ]
        ours = [need for need in needs if need.startswith(("rmqkit-", "rmqkit="))]
        assert all(need.endswith(f"=={version}") or need == "rmqkit-spark[pyspark]" for need in ours), name


@pytest.mark.parametrize("name", FOLDERS)
def test_a_package_has_licence_types_and_a_map(name: str):
    folder = ROOT / "packages" / name
    for file in ("LICENSE", "NOTICE"):
        assert (folder / file).read_text() == (ROOT / file).read_text(), f"copy {file} to {folder}"
    readme = (folder / "README.md").read_text().splitlines()
    rows = [line for line in readme if line.startswith("| `")]
    assert readme[0] == f"# {name}"
    assert 0 < len(rows) <= MAP_LINES_MAX
    # mypy and pyright need this mark to find an editable installation of the package
    marked = {path.parent for path in FOLDERS[name].glob("**/py.typed")}
    folders = {FOLDERS[name]} if name == "rmqkit" else {path.parent for path in FOLDERS[name].glob("*/__init__.py")}
    assert marked == folders
    assert (FOLDERS[name] / "__init__.pyi").exists() == (name != "rmqkit")


def test_a_checkout_has_the_extras_of_the_package():
    here, there = project(ROOT)["optional-dependencies"], PROJECTS["rmqkit"]["optional-dependencies"]
    assert here.keys() == there.keys()
    for extra, needs in there.items():
        ours = [need.partition("=")[0] for need in needs if need.startswith("rmqkit-")]
        for need in ours:
            assert any(one.startswith(f"{need} @ ") for one in here[extra]), (extra, need)


def test_commands_of_other_packages_are_in_a_group_of_the_help():
    points = (one.get("entry-points", {}).get("rmqkit.commands", {}) for one in PROJECTS.values())
    names = {name.split()[0] for commands in points for name in commands}
    assert "pipeline" in names
    assert names <= {name for commands in PANELS.values() for name in commands}
