"""Commands of optional packages. A package declares the module of a command as an entry point of `rmqkit.commands`."""

from __future__ import annotations

from typing import Any

from rmqkit import extras
from rmqkit.errors import ExtraMissing

__all__ = ["is_installed", "module_of_another_package"]

_GROUP = "rmqkit.commands"


def is_installed(command: str) -> bool:
    """Return True if a package with the command is installed."""
    from importlib.metadata import entry_points  # slow to import, and most commands do not need it

    return bool(entry_points(group=_GROUP, name=command))


def module_of_another_package(command: str, extra: str) -> Any:
    """Import another package's module for a command.
    Raises ExtraMissing: the package is not installed; ``extra`` installs it."""
    from importlib.metadata import entry_points

    for found in entry_points(group=_GROUP, name=command):
        return found.load()
    raise ExtraMissing(f"rmq {command}", "rmqkit-spark", extras.install(extra))
