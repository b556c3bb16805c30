"""Nouns with verbs (``rmq topic list``), and the common part of all verbs: options, connection, tables and JSON.

A verb is a coroutine function. It receives an `Admin` and its own options, and returns a result. This module adds the
common options, runs the verb, and prints the result:

========================  ====================================  =========================================
returned                  printed as                            with ``--json``
========================  ====================================  =========================================
text                      one line                              {"done": "text"}
list of texts             one line each                         the list
struct                    one line per field                    the object
list of structs or dicts  a table, a column per field           the list of objects
list of `Done`            a line for each server                the list of objects
dict                      one line per key and value            the object
`View`                    its parts, each one of the above      its ``value``
async iterator            each item when it arrives             one line each
========================  ====================================  =========================================

JSON has the field names of Java's tools (camel case).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from rmqkit.cli import with_bare_flags
from rmqkit.errors import RmqError

if TYPE_CHECKING:
    from rmqkit.admin import Admin
    from rmqkit.remoting.tls import Tls

LOCAL = "127.0.0.1:9876"
PROFILE_VARIABLE = "RMQ_PROFILE"
_COMPLETION_MS = 500.0


@dataclass(slots=True)
class View:
    """A result with one form for programs and one for display; the command exits with ``exit_code``."""

    value: Any
    parts: Sequence[Any]
    exit_code: int = 0


class Named:
    """A parameter that is given by position (``TopicA``) or by option (``-t TopicA``), as in Java's tool."""

    def __init__(self, *names: str, help: str, complete: Callable[..., Any] | None = None) -> None:  # noqa: A002
        self.names = names
        self.help = help
        self.complete = complete

    def argument(self, name: str) -> Any:
        return typer.Argument(metavar=name.upper(), help=self.help, show_default=False, autocompletion=self.complete)

    def option(self) -> Any:
        return typer.Option(*self.names, show_default=False, hidden=True, autocompletion=self.complete)


Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]


def confirm(what: str, *, yes: bool) -> None:
    """Ask the user for confirmation. Without a terminal, do not ask.
    Raises RmqError: the answer is not yes."""
    if yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RmqError("nothing was changed; --yes skips the question")


def _names_of(asking: Callable[[Admin, str], Awaitable[Sequence[str]]]) -> Callable[..., list[str]]:
    """Return a completion function for names. It returns no names if the name server does not answer quickly."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        import asyncio

        async def ask() -> Sequence[str]:
            async with asyncio.timeout(_COMPLETION_MS / 1000.0), admin_of(ctx.params, is_quiet=True) as admin:
                return await asking(admin, incomplete)

        try:
            return [name for name in asyncio.run(ask()) if name.startswith(incomplete)]
        except Exception:  # noqa: BLE001 - a shell that completes must not show any error
            return []

    return complete


async def _topics(admin: Admin, incomplete: str) -> Sequence[str]:
    own = await admin.calls.own_topic_names()
    return own if any(name.startswith(incomplete) for name in own) else await admin.calls.topic_names()


async def _groups(admin: Admin, incomplete: str) -> Sequence[str]:
    return sorted({group for table in (await admin.groups.tables()).values() for group in table})


async def _clusters(admin: Admin, incomplete: str) -> Sequence[str]:
    return sorted((await admin.calls.cluster()).cluster_addr_table)


async def _brokers(admin: Admin, incomplete: str) -> Sequence[str]:
    return sorted((await admin.calls.cluster()).broker_addr_table)


LIVE_TOPICS = _names_of(_topics)
Topic = Annotated[str, Named("-t", "--topic", help="Topic name.", complete=LIVE_TOPICS)]
LIVE_GROUPS = _names_of(_groups)
Group = Annotated[str, Named("-g", "--group", help="Consumer group name.", complete=LIVE_GROUPS)]
_BROKER, _CLUSTER = "Broker, by name or host:port.", "Cluster name; the command contacts all masters of it."
_LIVE_BROKERS, _LIVE_CLUSTERS = _names_of(_brokers), _names_of(_clusters)
Broker = Annotated[
    str | None, typer.Option("-b", "--broker", help=_BROKER, show_default=False, autocompletion=_LIVE_BROKERS)
]
Cluster = Annotated[
    str | None, typer.Option("-c", "--cluster", help=_CLUSTER, show_default=False, autocompletion=_LIVE_CLUSTERS)
]
BrokerName = Annotated[str, Named("-b", "--broker", help=_BROKER, complete=_LIVE_BROKERS)]
Key = Annotated[str, Named("-k", "--key", help="Name of the key.")]
Value = Annotated[str, Named("-v", "--value", help="New value.")]


def _profile_names(incomplete: str) -> list[str]:
    from rmqkit.cli.frame import profiles

    try:
        return [name for name in sorted(profiles.read().profiles) if name.startswith(incomplete)]
    except RmqError:  # a completion must not print errors
        return []


PROFILE_NAMES = _profile_names


def _chosen(context: typer.Context, value: str | None) -> str | None:
    from rmqkit.cli.frame import profiles

    return profiles.choose(context, value)


def _resolved(context: typer.Context, option: typer.CallbackParam, value: Any) -> Any:
    from rmqkit.cli.frame import profiles

    return profiles.resolved(context, option, value)


def _common(kind: Any, default: Any, names: str, text: str, **more: Any) -> tuple[Any, Any]:
    """Return the annotation and default of an option."""
    more = {"rich_help_panel": "Connection and output", "callback": _resolved, **more}
    return Annotated[kind, typer.Option(*names.split(), help=text, show_default=False, **more)], default


_SERVERS = f"Name servers, as host:port;host:port (default {LOCAL})."
_PROFILE: dict[str, Any] = {"callback": _chosen, "is_eager": True, "autocompletion": PROFILE_NAMES}
COMMON: dict[str, tuple[Any, Any]] = {
    "profile": _common(
        str | None, None, "--profile", "Profile of the cluster (rmq profile).", envvar=PROFILE_VARIABLE, **_PROFILE
    ),
    "name_servers": _common(str, LOCAL, "-n --name-servers", _SERVERS, envvar="NAMESRV_ADDR"),
    "as_json": _common(bool, False, "--json", "Print JSON."),
    "timeout_ms": _common(int, 5000, "--timeout", "Timeout of each request in ms (default 5000).", min=1),
    "access_key": _common(
        str, "", "--access-key", "User name (access key) that signs the requests.", envvar="RMQ_ACCESS_KEY"
    ),
    "secret_key": _common(str, "", "--secret-key", "Secret key of that user.", envvar="RMQ_SECRET_KEY"),
    "security_token": _common(
        str, "", "--security-token", "Security token to send with the signature.", envvar="RMQ_SECURITY_TOKEN"
    ),
    "tls": _common(bool, False, "--tls", "Encrypt every connection. Certificates are not verified without --tls-ca."),
    "tls_ca": _common(str, "", "--tls-ca", "PEM file of the CA. Server certificates are verified against it."),
    "tls_cert": _common(str, "", "--tls-cert", "PEM file of the client certificate."),
    "tls_key": _common(str, "", "--tls-key", "PEM file of the private key of that certificate."),
}
_WATCH = {"watch_s": _common(float, None, "--watch", "Repeat the command every N seconds until Ctrl-C.", min=0.1)}


def admin_of(options: Mapping[str, Any], *, is_quiet: bool = False) -> Admin:
    """Return a connection for the common options. Raises SettingsError: the options contradict each other."""
    from rmqkit.admin import Admin
    from rmqkit.remoting.authentication import Credentials
    from rmqkit.remoting.tls import ClientTls

    access_key, token = options.get("access_key"), options.get("security_token")
    secret, tls = options.get("secret_key") or "", tls_settings(options, is_quiet=is_quiet)
    return Admin(
        options.get("name_servers") or LOCAL,
        timeout_ms=options.get("timeout_ms") or 5000,
        tls=None if tls is None else ClientTls(tls),
        credentials=Credentials(access_key, secret, token or None) if access_key else None,
    )


def tls_settings(options: Mapping[str, Any], *, is_quiet: bool = False) -> Tls | None:
    """Return the TLS settings of the common options, or None for plain connections. Certificate files imply TLS.
    Without a CA, warn the user once. With --json, do not warn: standard error then has only errors."""
    from rmqkit.remoting.tls import Tls

    trusted, certificate = options.get("tls_ca") or "", options.get("tls_cert") or ""
    if (options.get("tls") or certificate) and not trusted and not (is_quiet or options.get("as_json")):
        _warn_unverified()
    if not (options.get("tls") or trusted or certificate):
        return None
    return Tls(trusted=trusted, verify=bool(trusted), certificate=certificate, key=options.get("tls_key") or "")


@functools.cache
def _warn_unverified() -> None:
    what = "TLS without a CA encrypts and verifies nothing: any program can answer in the place of a server"
    print(f"rmq: {what}; to verify servers, give --tls-ca FILE, the PEM file of their CA", file=sys.stderr, flush=True)


class Noun(TyperGroup):
    """A noun with verbs, such as ``topic``. The command of a verb is built when it is used, because building all
    commands would take most of the run time."""

    def __init__(self, name: str, help: str) -> None:  # noqa: A002
        super().__init__(name=name, help=help, no_args_is_help=True)
        self._build: dict[str, Callable[[], Any]] = {}

    def verb(self, name: str, *, watch: bool = False) -> Callable[[Any], Any]:
        """Make a coroutine function a verb; its docstring is the help. ``watch``: add the option ``--watch``."""

        def add(operation: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            def build() -> Any:
                alone = typer.Typer(add_completion=False)
                alone.command(name, help=inspect.getdoc(operation))(command_of(operation, watch=watch))
                return typer.main.get_command(alone)

            self._build[name] = build
            return operation

        return add

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self._build)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self._build and cmd_name not in self.commands:
            self.commands[cmd_name] = with_bare_flags(self._build[cmd_name]())
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self._build:
            self.commands = {name: self.get_command(ctx, name) for name in self._build}  # for suggestions
        return super().resolve_command(ctx, args)


def command_of(operation: Callable[..., Awaitable[Any]], *, watch: bool) -> Callable[..., None]:
    """Return a function for typer, with the operation's parameters except the first, and the common options."""
    own = list(inspect.signature(operation).parameters.values())[1:]
    # Evaluate only these annotations: the classes of the first parameter and of the result are not imported.
    shown = type("shown", (), {"__annotations__": {one.name: one.annotation for one in own}})
    hints = get_type_hints(shown, vars(sys.modules[operation.__module__]), include_extras=True)
    common = {**COMMON, **(_WATCH if watch else {})}
    named = {one.name: mark for one in own if (mark := _mark(hints[one.name])) is not None}
    parameters = []
    for one in own:
        annotation, default = hints[one.name], None if one.default is one.empty else one.default
        if one.name in named:
            annotation = Annotated[str | None, named[one.name].argument(one.name)]
            parameters.append((f"{one.name}_option", Annotated[str | None, named[one.name].option()], None))
            default = None
        elif one.default is one.empty:
            default = one.empty
        parameters.append((one.name, annotation, default))
    parameters += [(name, annotation, default) for name, (annotation, default) in common.items()]

    def command(**given: Any) -> None:
        options = {name: given.pop(name) for name in common}
        _place(named, {one.name: one.default for one in own}, given)
        _run(operation, given, options)

    signature = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, annotation, default in parameters
    ]
    command.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    command.__annotations__ = {name: annotation for name, annotation, _ in parameters}
    return command


def _mark(annotation: Any) -> Named | None:
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Named)), None)


def _place(named: Mapping[str, Named], defaults: Mapping[str, Any], given: dict[str, Any]) -> None:
    """Set each named parameter from its option, or else from the next positional argument."""
    placed = [given.pop(name) for name in named]
    rest = [text for text in placed if text is not None]
    for name, mark in named.items():
        option = given.pop(f"{name}_option")
        given[name] = option if option is not None else rest.pop(0) if rest else defaults[name]
        if given[name] is inspect.Parameter.empty:
            raise typer.BadParameter(f"give {name.upper()}, or {mark.names[0]} {name.upper()}")
    if rest:
        raise typer.BadParameter(f"unexpected extra argument: {rest[0]}")


def _run(operation: Callable[..., Awaitable[Any]], given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    import asyncio

    watch_s = options.get("watch_s")

    async def run() -> int:
        async with admin_of(options) as admin:
            while True:
                result = await operation(admin, **given)
                async for one in result if isinstance(result, AsyncIterator) else _alone(result):
                    show(one, as_json=options["as_json"], clear=watch_s is not None)
                if watch_s is None:
                    return result.exit_code if isinstance(result, View) else 0
                await _pause(watch_s)
                admin.calls.forget()

    silence()
    try:
        if code := asyncio.run(run()):
            raise typer.Exit(code)
    except KeyboardInterrupt:
        if watch_s is None:
            raise
    except BrokenPipeError:
        drop_output()


async def _pause(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


@functools.cache
def silence() -> None:
    """Suppress the log lines of libraries: the command reports an error in one line."""
    import logging

    logging.getLogger("rmqkit").addHandler(logging.NullHandler())


def drop_output() -> None:
    """Discard the rest of the output, after the reader of stdout has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _alone(result: Any) -> AsyncIterator[Any]:
    yield result


def show(result: Any, *, as_json: bool, clear: bool = False) -> None:
    """Print the result of a verb; ``clear``: clear the terminal before."""
    if as_json:
        import msgspec

        from rmqkit.sentences import plain

        value = result.value if isinstance(result, View) else {"done": result} if isinstance(result, str) else result
        print(msgspec.json.encode(value, enc_hook=plain).decode(), flush=True)
        return
    if clear and sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")
    for part in result.parts if isinstance(result, View) else [result]:
        _show(part)


def _show(part: Any) -> None:
    from msgspec import Struct

    if isinstance(part, str):
        print(part, flush=True)
    elif isinstance(part, Struct):
        _show({name.replace("_", " "): _text(name, getattr(part, name)) for name in part.__struct_fields__})
    elif isinstance(part, Mapping):
        width = max(map(len, map(str, part)), default=0)
        for key, value in part.items():
            _show(f"{key:<{width}}  {_text(str(key), value)}".rstrip())
    elif part and isinstance(part[0], Struct):
        from rmqkit.admin.calls import Done

        if isinstance(part[0], Done):
            for one in part:
                print(f"{one.where}: {one.done}", flush=True)
            return
        _print_rows([{name: getattr(row, name) for name in row.__struct_fields__} for row in part])
    elif part and isinstance(part[0], Mapping):
        _print_rows(part)
    else:
        for line in part:
            _show(str(line))


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table. Empty columns are left out; numbers are right-aligned."""
    from rmqkit.cli.frame.printing import print_aligned

    fields = [name for name in rows[0] if any(row[name] not in ("", None) for row in rows)]
    numbers = [all(type(row[name]) in (int, float) for row in rows) for name in fields]
    headings = [name.replace("_", " ").upper() for name in fields]
    print_aligned(headings, [[_text(name, row[name]) for name in fields] for row in rows], numbers)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    from msgspec import UNSET

    from rmqkit.cli.frame.printing import cell

    if value is UNSET:
        return ""

    return cell(name, value)
