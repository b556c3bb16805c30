"""Tests of a package that need other packages carry the mark `integration`.

The tests of a package run alone: ``pytest packages/rmqkit`` needs neither Spark nor a server. Files that need a package
which is not installed are left out, and the end of the run names the missing packages.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest

from tests.sources import FOLDERS, ROOT, found, imported, is_installed, package_of

BELOW = {
    "rmqkit": {"rmqkit"},
    "rmqkit-store": {"rmqkit", "rmqkit-store"},
    "rmqkit-server": {"rmqkit", "rmqkit-store", "rmqkit-server"},
    "rmqkit-tools": {"rmqkit", "rmqkit-store", "rmqkit-server", "rmqkit-tools"},
    "rmqkit-spark": {"rmqkit", "rmqkit-store", "rmqkit-spark"},
    "rmqkit-contrib": {"rmqkit", "rmqkit-contrib"},
    "rmqkit-native": {"rmqkit"},
}
"""Package → the packages that an installation of it always includes."""

_left_out: Counter[str] = Counter()


@functools.cache
def _test_module(name: str) -> Path | None:
    below = name.removeprefix("tests.").replace(".", "/") + ".py"
    folders = (ROOT / "tests", *(ROOT / "packages" / package / "tests" for package in FOLDERS))
    return next((folder / below for folder in folders if (folder / below).exists()), None)


@functools.cache
def _direct(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the packages and the test modules that a test file imports directly."""
    modules = (found(name.removeprefix("rmqkit.").replace(".", "/")) for name in imported(path, "rmqkit"))
    packages = frozenset(package_of(module) for module in modules if module is not None)
    tests = (_test_module(name) for name in imported(path, "tests"))
    return packages, frozenset(module for module in tests if module is not None)


@functools.cache
def needed(path: Path) -> frozenset[str]:
    """Return the packages that a test file imports, directly or through test modules."""
    packages: set[str] = set()
    seen, open_paths = {path}, [path]
    while open_paths:
        own, modules = _direct(open_paths.pop())
        packages |= own
        open_paths += modules - seen
        seen |= modules
    return frozenset(packages)


@functools.cache
def of_others(path: Path) -> frozenset[str]:
    """Return the packages that a test file needs and that an installation of its own package may lack."""
    parts = path.relative_to(ROOT).parts
    return needed(path) - BELOW[parts[1]] if parts[0] == "packages" else frozenset()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out a file that needs a package which is not installed."""
    if not collection_path.name.startswith("test_") or not collection_path.is_relative_to(ROOT / "packages"):
        return None
    if all(map(is_installed, FOLDERS)):  # reading the imports of every file costs seconds in every process
        return None
    missing = [package for package in sorted(of_others(collection_path)) if not is_installed(package)]
    _left_out.update(missing[:1])
    return True if missing else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need other packages, if ``-m`` selects by the mark."""
    if "integration" not in config.option.markexpr:
        return
    for item in items:
        if item.path.is_relative_to(ROOT / "packages") and of_others(item.path):
            item.add_marker("integration")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the missing packages."""
    for package, count in _left_out.items():
        terminalreporter.line(f"left out: {count} files that need {package}: pip install -e packages/{package}")
