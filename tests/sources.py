"""The folders of the packages: of their modules, which together form `rmqkit`, and of their tests."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {path.parts[-3]: path for path in sorted((ROOT / "packages").glob("*/src/rmqkit"))}
"""Package → the folder of its modules."""


def modules() -> Iterator[Path]:
    """Yield every module of every package."""
    for folder in FOLDERS.values():
        yield from sorted(folder.rglob("*.py"))


def place(path: Path) -> Path:
    """Return the path of a file below `rmqkit`."""
    (folder,) = [folder for folder in FOLDERS.values() if path.is_relative_to(folder)]
    return path.relative_to(folder)


def package_of(path: Path) -> str:
    """Return the package of a file."""
    return path.relative_to(ROOT / "packages").parts[0]


@functools.cache
def found(name: str) -> Path | None:
    """Return the module or folder with a path below `rmqkit` (without suffix), or None."""
    for folder in FOLDERS.values():
        for path in (folder / f"{name}.py", folder / name):
            if path.exists():
                return path
    return None


@functools.cache
def is_installed(package: str) -> bool:
    """Return True if the first room of a package can be found, without importing it."""
    folder = next(path for path in sorted(FOLDERS[package].iterdir()) if (path / "__init__.py").exists())
    return importlib.util.find_spec(f"rmqkit.{folder.name}") is not None


def joined(to: Path) -> Path:
    """Copy all packages into one folder, as an installation of the wheels does."""
    for folder in FOLDERS.values():
        ignored = shutil.ignore_patterns("__pycache__", "__init__.pyi")
        shutil.copytree(folder, to / "rmqkit", dirs_exist_ok=True, ignore=ignored)
    return to


def modules_of_tests() -> Iterator[Path]:
    """Yield every module below the test folders."""
    for folder in (ROOT / "tests", *sorted((ROOT / "packages").glob("*/tests"))):
        yield from sorted(folder.rglob("*.py"))


def files_of_tests() -> Iterator[Path]:
    """Yield every test file: those of the packages, and those in ``tests``."""
    yield from (path for path in modules_of_tests() if path.name.startswith("test_"))


def room(file: str) -> str:
    """Return the package and room of a test file, or its folder below `tests`."""
    parts = file.split("/")
    return f"{parts[1]}/{parts[3]}" if parts[0] == "packages" else "/".join(parts[:2])


def statements(path: Path) -> Iterator[ast.AST]:
    """Yield the statements of a file, nested ones included. This is twice as fast as `ast.walk`, which visits
    expressions too.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            nodes += getattr(node, field, ())


def imported(path: Path, of: str) -> set[str]:
    """Return the modules of `rmqkit` or `tests` that a file imports anywhere in the file."""
    return {name for name in _imported(path) if name.startswith(f"{of}.")}


@functools.cache
def _imported(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)
