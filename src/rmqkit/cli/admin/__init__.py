"""``rmq admin NOUN VERB``: operations on a cluster; a module per noun, imported when one of its verbs is used.

Java's command names (`JAVA`) are accepted in place of noun and verb, with Java's short options.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from rmqkit.cli.admin.names import JAVA, NOUNS

__all__ = ["app"]


class _LateNouns(TyperGroup):
    """Nouns are listed; Java's names are found as well, and both are suggested for a mistyped one."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(NOUNS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        noun, _, verb = (cmd_name if cmd_name in NOUNS else JAVA.get(cmd_name, cmd_name)).partition(" ")
        if noun not in NOUNS:
            return None
        group: Any = typer.main.get_group(import_module(f"rmqkit.cli.admin.{noun.replace('-', '_')}").noun.app)
        return group.commands[verb] if verb else group

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = dict.fromkeys((*NOUNS, *JAVA))  # type: ignore[assignment] # names that may be suggested
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LateNouns,
    name="admin",
    help="Ask and change a cluster: brokers, topics, groups, offsets, messages.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _admin() -> None: ...
