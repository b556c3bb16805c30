"""Where the sources are: the folders of the packages, from which `rmqkit` is put together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {path.parent.name: path / "rmqkit" for path in sorted((ROOT / "packages").glob("*/src"))}
"""Package → the folder of its modules."""


def modules() -> Iterator[Path]:
    """Every module of every package."""
    for folder in FOLDERS.values():
        yield from sorted(folder.rglob("*.py"))


def place(path: Path) -> Path:
    """Return a file's path below `rmqkit`."""
    (folder,) = [folder for folder in FOLDERS.values() if path.is_relative_to(folder)]
    return path.relative_to(folder)


def package_of(path: Path) -> str:
    """Return the package that a file belongs to."""
    return path.relative_to(ROOT / "packages").parts[0]


def found(name: str) -> Path | None:
    """Return the module or folder that has a path below `rmqkit`, without its ending; None if there is none."""
    for folder in FOLDERS.values():
        for path in (folder / f"{name}.py", folder / name):
            if path.exists():
                return path
    return None


def joined(to: Path) -> Path:
    """Copy all packages into one folder, as wheels are installed."""
    for folder in FOLDERS.values():
        ignored = shutil.ignore_patterns("__pycache__", "__init__.pyi")
        shutil.copytree(folder, to / "rmqkit", dirs_exist_ok=True, ignore=ignored)
    return to
