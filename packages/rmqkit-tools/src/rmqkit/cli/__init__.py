"""The ``rmq`` command: the table of its commands, and the look-up of their modules.

`PANELS` has all commands. A command runs (``rmq send``), or is a noun with verbs (``rmq topic list``). ``rmq broker``
and ``rmq namesrv`` are both: alone they start a server, and with a verb (``rmq broker status``) they send requests to
running servers. A module is only imported when one of its commands runs, or for the help of all commands, so that each
command starts quickly. Windows has only the commands that need neither servers nor stores.
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

__all__ = ["NOUNS", "PANELS", "app", "noun_group"]

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
        "message": "admin.message:MESSAGE",
        "explain": "admin.message",
        "dead": "admin.dead:DEAD",
        "replay": "messages.replay",
        "waiting": "admin.waiting:WAITING",
        "filter": "admin.filters:FILTER",
    },
    "Operate": {
        "top": "admin.top",
        "cluster": "admin.servers:CLUSTER",
        "topic": "admin.topic:TOPIC",
        "lite": "admin.lite:LITE",
        "group": "admin.groups:GROUP",
        "offset": "admin.groups:OFFSET",
        "consumer": "admin.clients:CONSUMER",
        "producer": "admin.clients:PRODUCER",
        "user": "admin.access:USER",
        "policy": "admin.access:POLICY",
        "profile": "profile",
        "admin": "admin.mqadmin",
    },
    "Store": {
        "store": "servers.store",
        "archive": "servers.archive",
    },
    "Spark": {
        "pipeline": "",
    },
}
"""Groups of ``rmq --help`` → their commands → the module of each, with its `Noun` if the command is a noun. A command
without a module is an entry point of another package (`_EXTRAS`)."""

_MODULES = {name: module for commands in PANELS.values() for name, module in commands.items()}
_PANEL_OF = {name: panel for panel, commands in PANELS.items() for name in commands}

_SERVERS = {"broker": "admin.servers:BROKER", "namesrv": "admin.servers:NAMESRV"}
"""Commands that start a server → the noun of the same name."""
NOUNS = {name: place for name, place in _MODULES.items() if ":" in place} | _SERVERS
"""Noun → its module, and the `Noun` in it."""

_EVERYWHERE = {"admin", "top", "send", "tail", "consume", "explain", "profile", *NOUNS} - _SERVERS.keys()
"""Commands that need only a client. The others run servers or read stores, and need Linux or macOS."""

_EXTRAS = {"pipeline": "spark"}
"""Commands of other packages → the extra that installs each."""


def noun_group(noun: str) -> Any:
    """Import the module of a noun, and return the group of its verbs."""
    module, _, name = NOUNS[noun].partition(":")
    return with_bare_flags(getattr(import_module(f"rmqkit.cli.{module}"), name))


class _LateImports(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        there = [name for name in _MODULES if name not in _EXTRAS or is_installed(name)]
        return [name for name in there if sys.platform != "win32" or name in _EVERYWHERE]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _MODULES:
            return None
        command = self._command(cmd_name)
        command.rich_help_panel = _PANEL_OF[cmd_name]
        return command

    def _command(self, name: str) -> Any:
        if sys.platform == "win32" and name not in _EVERYWHERE:
            raise SettingsError(
                f"rmq {name} needs Linux or macOS, and this is Windows: run it in WSL or in a container; "
                f"clients, rmq {', '.join(sorted(_EVERYWHERE))}, and the verbs of {' and '.join(_SERVERS)} work here"
            )
        if name in NOUNS and name not in _SERVERS:
            return noun_group(name)
        command: Any = typer.main.get_command(_module_of(name).app)
        command = command if command.name == name else command.commands[name]
        return with_bare_flags(_ServerOrVerbs(command) if name in _SERVERS else command)

    def get_params(self, ctx: Any) -> Any:
        return bare_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *rest = args
        if name in _SERVERS and rest and not rest[0].startswith("-"):
            return name, noun_group(name), rest  # does not need the server's module
        self.commands = dict.fromkeys(_MODULES)  # type: ignore[assignment] # names that may be suggested
        return super().resolve_command(ctx, args)


class _ServerOrVerbs(TyperGroup):
    """A command that starts a server. Its help also lists the verbs of the noun with the same name."""

    def __init__(self, server: Any) -> None:
        super().__init__(
            name=server.name,
            params=server.params,
            callback=server.callback,
            help=server.help,
            invoke_without_command=True,
            subcommand_metavar="[VERB [ARGS]...]",
        )

    def list_commands(self, ctx: Any) -> list[str]:
        return list(noun_group(str(self.name)).list_commands(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return noun_group(str(self.name)).get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Refuse a verb after the server's options: the options would have no effect."""
        self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment] # may be suggested
        if args[0] in self.commands:
            ctx.fail(f"The options must follow the verb: write rmq {self.name} {args[0]}, then the options of the verb")
        return super().resolve_command(ctx, args)


def _module_of(command: str) -> Any:
    if command in _EXTRAS:
        return module_of_another_package(command, _EXTRAS[command])
    return import_module(f"rmqkit.cli.{_MODULES[command]}")


def with_bare_flags(command: Any) -> Any:
    """Show the flags of a command and its subcommands without a value. Since 0.29, Typer shows ``--json <bool>``, which
    makes users type ``--json true``."""
    # Pass the names: the first access creates the help option and caches it.
    bare_flags(command.get_params(typer.Context(command, help_option_names=_HELP_NAMES)))
    for below in getattr(command, "commands", {}).values():
        if below is not None:
            with_bare_flags(below)
    return command


def bare_flags(parameters: Any) -> Any:
    """Remove the value of flags from the help of parameters. Return the parameters."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return parameters


def with_options(common: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces the ``**`` parameter of a command by options (name → type for typer,
    default)."""

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
    context_settings={"help_option_names": _HELP_NAMES},  # for all subcommands, too
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
