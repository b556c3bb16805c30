"""``rmq --help``: groups of commands."""

from __future__ import annotations

import re
from typing import Any

import typer

from rmqkit.cli import PANELS, app
from tests.cli.in_process import rmq


def test_help_shows_every_command_in_its_group() -> None:
    shown: dict[str, list[str]] = {}
    for line in rmq("--help").stdout.splitlines():
        if heading := re.match(r"╭─ (\w+)", line):
            shown[heading[1]] = []
        elif command := re.match(r"│ ([a-z]\S*)", line):
            list(shown.values())[-1].append(command[1])
    assert shown.pop("Options") == []
    root: Any = typer.main.get_command(app)
    listed = set(root.list_commands(typer.Context(root)))
    there = {panel: [name for name in commands if name in listed] for panel, commands in PANELS.items()}
    assert shown == {panel: names for panel, names in there.items() if names}
    assert {"Run", "Messages", "Operate", "Store"} <= shown.keys()
