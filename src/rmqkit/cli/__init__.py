"""The command line: what is asked and what is printed; the work is done below.

The commands are in `serve`, `bench` and `store`. A module is imported when one of its commands runs (or all, for their
help), so that each command starts as fast as it can.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["app"]

_MODULES = {"standalone": "serve", "namesrv": "serve", "broker": "serve", "bench": "bench", "store": "store"}


class _LateImports(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _MODULES:
            return None
        module: Any = typer.main.get_command(import_module(f"rmqkit.cli.{_MODULES[cmd_name]}").app)
        return module if module.name == cmd_name else module.commands[cmd_name]


app = typer.Typer(
    cls=_LateImports,
    name="rmq",
    help="RocketMQ-compatible messaging: name server, broker, tools.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _rmq() -> None: ...
