"""Commands of packages that may not be installed: each names its module as an entry point of `rmqkit.commands`."""

from __future__ import annotations

from typing import Any

from rmqkit import extras
from rmqkit.errors import ExtraMissing

__all__ = ["is_installed", "module_of_another_package"]

_GROUP = "rmqkit.commands"


def is_installed(command: str) -> bool:
    """Return True if a package is there that has a command."""
    from importlib.metadata import entry_points  # most commands start without it

    return bool(entry_points(group=_GROUP, name=command))


def module_of_another_package(command: str, extra: str) -> Any:
    """Import the module that another package names for a command.
    Raises ExtraMissing: the package is not installed; ``extra`` brings it."""
    from importlib.metadata import entry_points

    for found in entry_points(group=_GROUP, name=command):
        return found.load()
    raise ExtraMissing(f"rmq {command}", "rmqkit-spark", extras.install(extra))
