"""``rmq bench``: run the measurements in the folder ``bench`` of a checkout. An installed wheel does not contain this
folder.

Without a checkout, the command fails and says how to get one. `make env` installs a checkout with all measurements.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from rmqkit.errors import SettingsError

_CHECKOUT = Path(__file__).parents[5]


def _from_checkout() -> typer.Typer | None:
    """Return the commands of ``bench/commands``; None if rmqkit does not run from a checkout."""
    if not (_CHECKOUT / "bench" / "commands").is_dir() or not Path(__file__).is_relative_to(_CHECKOUT / "packages"):
        return None
    sys.path.insert(0, str(_CHECKOUT))
    from bench.commands.app import app as commands

    return commands


def _without_checkout() -> typer.Typer:
    instead = typer.Typer(
        name="bench", help="Measure performance. Needs a source checkout of rmqkit.", add_completion=False
    )

    @instead.callback(invoke_without_command=True, context_settings={"ignore_unknown_options": True})
    def bench(words: list[str] | None = typer.Argument(None, hidden=True)) -> None:  # noqa: B008
        raise SettingsError(
            f"rmq bench needs a source checkout, but this rmqkit is installed in {_CHECKOUT}: clone its repository, "
            "run make env there, then .venv/bin/rmq bench"
        )

    return instead


app = _from_checkout() or _without_checkout()
