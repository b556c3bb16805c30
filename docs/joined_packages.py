"""Joins the packages into one folder for mkdocstrings, which reads only the first folder of a package."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOINED = ROOT / ".cache" / "documented"
"""`mkdocs.yml` names it."""


def on_startup(**_: object) -> None:
    """Copy the sources before mkdocs reads its configuration."""
    shutil.rmtree(JOINED, ignore_errors=True)
    for folder in sorted((ROOT / "packages").glob("*/src")):
        ignored = shutil.ignore_patterns("__pycache__", "__init__.pyi")
        shutil.copytree(folder, JOINED, dirs_exist_ok=True, ignore=ignored)
