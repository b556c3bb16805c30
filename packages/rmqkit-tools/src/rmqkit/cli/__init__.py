"""The command line: what is asked and what is printed; the work is done below.

The commands are in `serve`, `admin`, `bench`, `store`, and in other packages. A module is imported when one of its
commands runs (or all, for their help), so that each command starts as fast as it can.
On Windows there are only those that need no more than a client.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rmqkit.cli.others import is_installed, module_of_another_package
from rmqkit.errors import SettingsError

__all__ = ["PANELS", "app"]

_EVERYWHERE = {"admin", "top", "send", "tail", "consume", "explain", "profile"}
"""Commands that need no more than a client; the others run servers or read stores, and need Linux or macOS."""

_HELP_NAMES = ["-h", "--help"]

PANELS = {
    "Run": {
        "standalone": "servers.serve",
        "namesrv": "servers.serve",
        "broker": "servers.serve",
        "proxy": "servers.serve",
        "console": "servers.console",
        "doctor": "servers.doctor",
        "bench": "bench",
    },
    "Messages": {
        "send": "messages.send",
        "tail": "messages.tail",
        "consume": "messages.consume",
        "replay": "messages.replay",
        "explain": "admin.message",
    },
    "Operate": {
        "top": "admin.top",
        "admin": "admin",
        "profile": "profile",
    },
    "Store": {
        "store": "servers.store",
        "archive": "servers.archive",
    },
    "Spark": {
        "pipeline": "",
    },
}
"""Groups of ``rmq --help`` → their commands → the module of each; without a module, an entry point of `_EXTRAS`."""

_MODULES = {name: module for commands in PANELS.values() for name, module in commands.items()}
_PANEL_OF = {name: panel for panel, commands in PANELS.items() for name in commands}

_EXTRAS = {"pipeline": "spark"}
"""Commands of other packages, and the extra that brings each."""


class _LateImports(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        there = [name for name in _MODULES if name not in _EXTRAS or is_installed(name)]
        return [name for name in there if sys.platform != "win32" or name in _EVERYWHERE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _MODULES:
            return None
        if sys.platform == "win32" and cmd_name not in _EVERYWHERE:
            raise SettingsError(
                f"rmq {cmd_name} needs Linux or macOS, and this is Windows: run it in WSL or in a container; "
                f"clients and rmq {', '.join(sorted(_EVERYWHERE))} work here"
            )
        module: Any = typer.main.get_command(_module_of(cmd_name).app)
        command = with_bare_flags(module if module.name == cmd_name else module.commands[cmd_name])
        command.rich_help_panel = _PANEL_OF[cmd_name]
        return command

    def get_params(self, ctx: Any) -> Any:
        return bare_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = dict.fromkeys(_MODULES)  # type: ignore[assignment] # names that may be suggested
        return super().resolve_command(ctx, args)


def _module_of(command: str) -> Any:
    if command in _EXTRAS:
        return module_of_another_package(command, _EXTRAS[command])
    return import_module(f"rmqkit.cli.{_MODULES[command]}")


def with_bare_flags(command: Any) -> Any:
    """A command, and all below it, whose flags are shown without a value: from 0.29 on Typer writes ``--json <bool>``,
    and people type ``--json true``."""
    # With its names: the option for help is made by the first who asks for it, and kept.
    bare_flags(command.get_params(typer.Context(command, help_option_names=_HELP_NAMES)))
    for below in getattr(command, "commands", {}).values():
        if below is not None:
            with_bare_flags(below)
    return command


def bare_flags(parameters: Any) -> Any:
    """Parameters whose flags are shown without a value."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


def with_options(common: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options, of which each is a type for typer and a default, in place of its ``**``."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        parameters = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in common.items()
        ]
        command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return add


app = typer.Typer(
    cls=_LateImports,
    name="rmq",
    help="Messaging compatible with Apache RocketMQ: name server, broker and tools.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP_NAMES},  # of every command below
)


def _version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib.metadata import version

        print(f"rmq {version('rmqkit')}, Python {platform.python_version()}, {platform.platform()}")
        raise typer.Exit


@app.callback()
def _rmq(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the versions of rmq and Python, and the platform."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback when a command fails.")] = False,
) -> None: ...
